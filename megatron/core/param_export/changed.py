"""Bringing only the changed elements of sharded parameters to one rank.

Work is done for many tensors at a time, and the host waits for the device a few times per such batch, not for
each tensor. For that an element has a *position*: its place in all full tensors laid end to end, in export
order. Sorted positions are sorted by tensor and, within it, by flat index.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

from megatron.core.param_export.agreement import agree
from megatron.core.param_export.plan import Plan, PlanEntry

BATCH = 2**24
"""Elements that are mapped or merged at a time: it bounds the memory that takes, some 50 bytes for each."""

Changed = Iterable[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]]


def export_changed(
    plan: Plan, changed: Changed, receiver: int = 0, *, sharded: bool = True
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Bring changed elements to one rank under Hugging Face names. Collective; traffic is O(changed).

    Args:
        plan: a proven plan.
        changed: ``(parameter, index, value)``: a live tensor of the plan, int64 [n] flat indices into it, and
            the new values [n] in its dtype. Index and value None: every element changed. Of a tensor that
            several ranks hold whole, what one of them gives is read.
        receiver: the rank (of the plan's group) that gets the result.
        sharded: under a distributed optimizer every data-parallel rank knows the changes of its own part; all
            are asked, and an element that several ranks report counts once. False: all know everything, one
            is asked.

    Yields:
        On the receiver, ``(hf_name, flat_index, value)`` with rising int64 indices, for tensors with a
        change, in export order; they may share memory with those of other tensors. On other ranks nothing;
        they must run the iterator to its end too.

    Raises:
        ValueError: the plan is not proven; the receiver is no rank, or not the same everywhere; values have
            another dtype than their parameter, or indices are not int64, one for each value and within it.
        KeyError: a tensor is not in the plan.
        StalePlanError: the model's tensors were replaced since the plan was built.
        RuntimeError: anything else that iterating over ``changed`` raised on another rank.

    All but the first are raised on every rank, if on any.
    """
    plan.require_proof()
    plan.require_current()
    elements = failed = None
    try:
        if isinstance(receiver, bool) or receiver not in range(plan.ranks):
            raise ValueError(f"receiver: a rank of 0..{plan.ranks - 1}, got {receiver!r}")
        elements = ChangedElements(plan, changed, sharded=sharded)
    except Exception as error:
        failed = error
    told = plan.everyones(torch.tensor([failed is not None, -1 if failed else receiver]))
    if any(error for error, _ in told.tolist()):
        agree(failed, plan.group)
    receivers = told[:, 1].tolist()
    if len(set(receivers)) > 1:
        raise ValueError(f"receiver: the ranks say {receivers}")
    yield from elements.collect(receiver)


class ChangedElements:
    """This rank's changed elements, placed in full tensors and counted, before they travel.

    Arguments and errors as those of :func:`export_changed`; not collective.

    Attributes:
        counts: full tensor → this rank's changed elements in it; names without any are absent.
    """

    @torch.no_grad()
    def __init__(self, plan: Plan, changed: Changed, *, sharded: bool = True):
        self.plan = plan
        self.counts: dict[str, int] = {}
        self._whole: list[PlanEntry] = []
        self._runs: list[_Run] = []
        batches = _Batches(plan)
        for tensor, index, value in changed:
            entry = plan.entry_of(tensor)
            if value is not None and value.dtype != tensor.dtype:
                raise ValueError(
                    f"{entry.global_name}: values are {value.dtype}, the parameter is {tensor.dtype}"
                )
            if index is not None and (index.dtype != torch.int64 or index.shape != (value.numel(),)):
                raise ValueError(
                    f"{entry.global_name}: expected int64 indices [n] for n = {value.numel()} values, "
                    f"got {index.dtype} {list(index.shape)}"
                )
            if not (entry.record.sharer if sharded else entry.owner):
                continue
            if index is None:
                self._whole.append(entry)
                for box in entry.boxes:
                    self.counts[box.full_name] = self.counts.get(box.full_name, 0) + box.numel
            else:
                self._runs += batches.add(entry, index, value)
        self._runs += batches.rest()
        names = list(plan.expected)
        for run in self._runs:
            for number, length in zip(run.numbers, run.lengths, strict=True):
                self.counts[names[number]] = self.counts.get(names[number], 0) + length

    def collect(
        self, receiver: int, skip: Collection[str] = ()
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Bring them to one rank, but for the full tensors to ``skip``, the same on every rank. Collective;
        the plan must be current. Yields as :func:`export_changed`."""
        names = list(self.plan.expected)
        skipped = {number for number, name in enumerate(names) if name in skip} if skip else set()
        runs = [run.without(skipped) for run in (*self._runs, *self._whole_runs(skip))]
        gathered = _collect(self.plan, [run for run in runs if run.numbers], receiver)
        merged = (_merge(self.plan, of_dtype) for of_dtype in gathered.values())
        for number, index, value in heapq.merge(*merged, key=lambda item: item[0]):
            yield names[number], index, value

    def _whole_runs(self, skip: Collection[str]) -> Iterator[_Run]:
        """All elements of the tensors given whole; their indices are made only when they travel so."""
        batches = _Batches(self.plan)
        for entry in self._whole:
            if not all(box.full_name in skip for box in entry.boxes):
                flat = entry.contiguous().view(-1)
                for start in range(0, len(flat), BATCH):
                    value = flat[start : start + BATCH]
                    index = torch.arange(start, start + len(value), device=flat.device)
                    yield from batches.add(entry, index, value)
        yield from batches.rest()


@dataclass(frozen=True)
class _Run:
    """Changed elements of some full tensors, given by rising numbers: ``lengths[0]`` of the first, and so on.

    ``flat``: indices within each full tensor; int32 if that is wide enough, for the way.
    """

    numbers: list[int]
    lengths: list[int]
    flat: torch.Tensor
    value: torch.Tensor

    def between(self, low: int, high: int) -> _Run:
        """Those of the full tensors ``low`` to ``high``."""
        a, b = bisect_left(self.numbers, low), bisect_left(self.numbers, high)
        here = slice(sum(self.lengths[:a]), sum(self.lengths[:b]))
        return _Run(self.numbers[a:b], self.lengths[a:b], self.flat[here], self.value[here])

    def apart(self) -> Iterator[_Run]:
        """Runs that were sent as one: the numbers rise in each."""
        falls = [k for k in range(1, len(self.numbers)) if self.numbers[k] <= self.numbers[k - 1]]
        for a, b in pairwise([0, *falls, len(self.numbers)]):
            here = slice(sum(self.lengths[:a]), sum(self.lengths[:b]))
            yield _Run(self.numbers[a:b], self.lengths[a:b], self.flat[here], self.value[here])

    def without(self, skipped: set[int]) -> _Run:
        if skipped.isdisjoint(self.numbers):
            return self
        kept = [k for k, number in enumerate(self.numbers) if number not in skipped]
        flat, value = self.flat.split(self.lengths), self.value.split(self.lengths)
        return _Run(
            [self.numbers[k] for k in kept],
            [self.lengths[k] for k in kept],
            torch.cat([self.flat[:0], *(flat[k] for k in kept)]),
            torch.cat([self.value[:0], *(value[k] for k in kept)]),
        )


class _Batches:
    """Collects changed elements of local tensors, and maps them to full tensors when they are enough."""

    def __init__(self, plan: Plan):
        self.plan = plan
        self.waiting: dict[torch.dtype, list[tuple[PlanEntry, torch.Tensor, torch.Tensor]]] = {}
        self.elements = 0

    def add(self, entry: PlanEntry, index: torch.Tensor, value: torch.Tensor) -> list[_Run]:
        self.waiting.setdefault(value.dtype, []).append((entry, index, value))
        self.elements += index.numel()
        return self.rest() if self.elements >= BATCH else []

    def rest(self) -> list[_Run]:
        """What was added and not yet given back."""
        runs = [_map(self.plan, changes) for changes in self.waiting.values()]
        self.waiting, self.elements = {}, 0
        return runs


def _map(plan: Plan, changes: list[tuple[PlanEntry, torch.Tensor, torch.Tensor]]) -> _Run:
    """Tensors that are divided alike, as most layers' are, go through their boxes together."""
    alike: dict[int, list[tuple[PlanEntry, torch.Tensor, torch.Tensor]]] = {}
    for change in changes:
        alike.setdefault(change[0].form, []).append(change)
    rows = []
    for some in alike.values():
        rows.append([index.numel() for _, index, _ in some])
        for boxes in zip(*(entry.boxes for entry, _, _ in some), strict=True):
            rows.append([plan.starts[plan.numbers[b.full_name]] + b.full_offset for b in boxes])
    uploaded = _upload(rows, changes[0][1].device)
    positions, values = [], []
    for some in alike.values():
        index, lengths = torch.cat([index for _, index, _ in some]), next(uploaded)
        position = torch.full_like(index, -1)  # of padding, which goes nowhere
        for box in some[0][0].boxes:
            inside, flat = box.place_in_full(index)
            begins = next(uploaded).repeat_interleave(lengths, output_size=len(index))
            position = torch.where(inside, flat - box.full_offset + begins, position)
        positions.append(position)
        values += [value for *_, value in some]
    position, order = torch.cat(positions).sort(stable=True)
    numbers, lengths, first, flat = _divide(plan, position, 0, len(plan.expected))
    if first:
        _require_inside(list(alike.values()))
    narrow = torch.int32 if plan.largest < 2**31 else torch.int64
    return _Run(numbers, lengths, flat.to(narrow), torch.cat(values)[order[first:]])


def _require_inside(forms: list[list[tuple[PlanEntry, torch.Tensor, torch.Tensor]]]) -> None:
    """Elements that go nowhere are padding, or none of the tensor's."""
    flags = []
    for some in forms:
        index = torch.cat([index for _, index, _ in some])
        flags.append(((index < 0) | (index >= some[0][0].record.numel)).any())
    for some, flag in zip(forms, torch.stack(flags).tolist(), strict=True):
        for entry, index, _ in some if flag else ():
            outside = index[(index < 0) | (index >= entry.record.numel)]
            if len(outside):
                raise ValueError(
                    f"{entry.global_name}: index {int(outside[0])} is not in [0, {entry.record.numel})"
                )


def _upload(rows: list[list[int]], device: torch.device) -> Iterator[torch.Tensor]:
    """Rows of numbers on the device, in one copy."""
    numbers = torch.tensor([number for row in rows for number in row], device=device)
    return iter(numbers.split([len(row) for row in rows]))


def _divide(plan: Plan, position: torch.Tensor, low: int, high: int):
    """Sorted positions in the full tensors ``low`` to ``high``: the numbers of those with any, how many each,
    how many lie before the first tensor, and the others' flat indices. The host waits for the device."""
    starts = torch.tensor(plan.starts[low : high + 1], device=position.device)
    bounds = torch.searchsorted(position, starts)
    counts = bounds.diff()
    first, *lengths = torch.cat([bounds[:1], counts]).tolist()
    position = position[first:]
    flat = position - starts[:-1].repeat_interleave(counts, output_size=len(position))
    numbers = [low + k for k, length in enumerate(lengths) if length]
    return numbers, [length for length in lengths if length], first, flat


def _collect(plan: Plan, runs: list[_Run], receiver: int) -> dict[torch.dtype, list[_Run]]:
    """Every rank's runs, by the values' type, on the receiver. An element travels as its index (4 bytes, or
    8) and its value."""
    out: dict[torch.dtype, list[_Run]] = {dtype: [] for dtype in plan.dtypes}
    mine: dict[torch.dtype, list[_Run]] = {dtype: [] for dtype in plan.dtypes}
    for run in runs:
        mine[run.value.dtype].append(run)
    if plan.ranks == 1:
        return mine
    sizes = torch.tensor(
        [
            [sum(len(run.numbers) for run in mine[dtype]), sum(len(run.flat) for run in mine[dtype])]
            for dtype in plan.dtypes
        ]
    )
    device = plan.device
    for rank, by_dtype in enumerate(plan.everyones(sizes).tolist()):
        for dtype, (count, elements) in zip(plan.dtypes, by_dtype, strict=True):
            if not count:
                continue
            if plan.rank == rank == receiver:
                out[dtype] += mine[dtype]
            elif plan.rank == rank:
                head = [[n for run in mine[dtype] for n in run.numbers]]
                head += [[n for run in mine[dtype] for n in run.lengths]]
                flat = torch.cat([run.flat for run in mine[dtype]])
                value = torch.cat([run.value for run in mine[dtype]])
                for column in (torch.tensor(head, device=device), flat, value.view(torch.uint8)):
                    dist.send(column, group=plan.group, group_dst=receiver)
            elif plan.rank == receiver:
                narrow = torch.int32 if plan.largest < 2**31 else torch.int64
                head = torch.empty((2, count), dtype=torch.int64, device=device)
                flat = torch.empty(elements, dtype=narrow, device=device)
                value = torch.empty(elements, dtype=dtype, device=device)
                for column in (head, flat, value.view(torch.uint8)):
                    dist.recv(column, group=plan.group, group_src=rank)
                out[dtype] += _Run(*head.tolist(), flat, value).apart()
    return out


def _merge(plan: Plan, runs: list[_Run]) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Per full tensor its rising indices and their values; an element that several ranks reported, once."""
    totals: dict[int, int] = {}
    for run in runs:
        for number, length in zip(run.numbers, run.lengths, strict=True):
            totals[number] = totals.get(number, 0) + length
    low, elements = 0, 0
    for number in sorted(totals):
        if elements + totals[number] > BATCH and elements:
            yield from _merge_between(plan, runs, low, number)
            low, elements = number, 0
        elements += totals[number]
    if elements:
        yield from _merge_between(plan, runs, low, len(plan.expected))


def _merge_between(plan: Plan, runs: list[_Run], low: int, high: int):
    parts = [part for part in (run.between(low, high) for run in runs) if part.numbers]
    lengths = [length for part in parts for length in part.lengths]
    starts = [plan.starts[number] for part in parts for number in part.numbers]
    flat, value = torch.cat([part.flat for part in parts]), torch.cat([part.value for part in parts])
    lengths, starts = _upload([lengths, starts], flat.device)
    position = flat + starts.repeat_interleave(lengths, output_size=len(flat))
    position, order = position.sort(stable=True)
    first = torch.ones_like(position, dtype=torch.bool)
    first[1:] = position[1:] != position[:-1]
    (kept,) = first.nonzero(as_tuple=True)
    numbers, lengths, _, flat = _divide(plan, position[kept], low, high)
    value = value[order[kept]]
    yield from zip(numbers, flat.split(lengths), value.split(lengths), strict=True)
