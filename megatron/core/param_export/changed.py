"""Bringing only the changed elements of sharded parameters to one rank."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.core.param_export.plan import Plan
from megatron.weight_sync.boxes import Box

Changed = Iterable[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]]


def export_changed(
    plan: Plan, changed: Changed, receiver: int = 0, *, sharded: bool = True
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Bring changed elements to one rank under Hugging Face names. Collective; traffic is O(changed).

    Args:
        plan: a proven plan.
        changed: ``(parameter, index, value)``: a live tensor of the plan, int64 [n] flat indices into it, and
            the new values [n] in its dtype. Index and value None: every element changed.
        receiver: the rank (of the plan's group) that gets the result.
        sharded: under a distributed optimizer every data-parallel rank knows the changes of its own part; all
            are asked, and an element that several ranks report counts once. False: all know everything, one
            is asked.

    Yields:
        On the receiver, ``(hf_name, flat_index, value)`` with rising int64 indices, for tensors with a
        change, in export order. On other ranks nothing; they must run the iterator to its end too.

    Raises:
        ValueError: the plan is not proven, or values have another dtype than their parameter.
        StalePlanError: the model's tensors were replaced since the plan was built; on every rank alike.
        KeyError: a tensor is not in the plan.
    """
    plan.require_proof()
    plan.require_current()
    yield from ChangedElements(plan, changed, sharded=sharded).collect(receiver)


class ChangedElements:
    """This rank's changed elements, placed in full tensors and counted, before they travel.

    Arguments as those of :func:`export_changed`; not collective.

    Attributes:
        counts: full tensor → this rank's changed elements in it; names without any are absent.
    """

    @torch.no_grad()
    def __init__(self, plan: Plan, changed: Changed, *, sharded: bool = True):
        self.plan = plan
        self.counts: dict[str, int] = {}
        self._runs: list[tuple[str, _Run | _Whole]] = []
        for tensor, index, value in changed:
            entry = plan.entry_of(tensor)
            if value is not None and value.dtype != tensor.dtype:
                raise ValueError(
                    f"{entry.global_name}: values are {value.dtype}, the parameter is {tensor.dtype}"
                )
            if not (entry.record.sharer if sharded else entry.owner):
                continue
            for box in entry.boxes:
                if index is None:
                    found, count = _Whole(tensor, box), box.numel
                else:
                    inside, flat = box.map_to_full(index)
                    found, count = _Run(flat, value[inside]), len(flat)
                if count:
                    self._runs.append((box.full_name, found))
                    self.counts[box.full_name] = self.counts.get(box.full_name, 0) + count

    @torch.no_grad()
    def collect(
        self, receiver: int, skip: Collection[str] = ()
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Bring them to one rank, but for the full tensors to ``skip``, the same on every rank. Collective;
        the plan must be current. Yields as :func:`export_changed`."""
        plan = self.plan
        names = list(plan.expected)
        number_of = {name: k for k, name in enumerate(names)}
        mine: dict[torch.dtype, list[tuple[int, _Run]]] = {}
        for name, found in self._runs:
            if name not in skip:
                run = found.run() if isinstance(found, _Whole) else found
                mine.setdefault(run.value.dtype, []).append((number_of[name], run))
        dtypes = {entry.dtype for member in plan.members for entry in member.content.entries}
        gathered: dict[int, list[_Run]] = {}
        for dtype in sorted(dtypes, key=str):
            for number, run in _collect(plan, mine.pop(dtype, []), dtype, receiver):
                gathered.setdefault(number, []).append(run)
        for number in sorted(gathered):
            yield names[number], *_merge(gathered.pop(number))


@dataclass(frozen=True)
class _Run:
    """Changed elements of one full tensor, from one shard."""

    flat: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True)
class _Whole:
    """All that one box of a shard holds of a full tensor; its indices are made only when it travels so."""

    tensor: torch.Tensor
    box: Box

    def run(self) -> _Run:
        local = self.tensor.detach().view(-1)
        inside, flat = self.box.map_to_full(torch.arange(local.numel(), device=local.device))
        return _Run(flat, local[inside])


def _merge(runs: list[_Run]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rising indices and their values; an element that several ranks reported, once."""
    flat, order = torch.sort(torch.cat([run.flat.long() for run in runs]), stable=True)
    value = torch.cat([run.value for run in runs])[order]
    first = torch.ones_like(flat, dtype=torch.bool)
    first[1:] = flat[1:] != flat[:-1]
    return flat[first], value[first]


def _collect(
    plan: Plan, runs: list[tuple[int, _Run]], dtype: torch.dtype, receiver: int
) -> list[tuple[int, _Run]]:
    """Every rank's runs, by the full tensor's number, on the receiver. An element travels as its index (4
    bytes, or 8) and its value."""
    if plan.ranks == 1:
        return runs
    device = plan.entries[0].tensor.device if plan.entries else torch.device("cpu")
    largest = max(math.prod(shape) for shape in plan.expected.values())
    index_dtype = torch.int32 if largest < 2**31 else torch.int64
    elements = sum(len(run.flat) for _, run in runs)
    sizes = torch.tensor([len(runs), elements], dtype=torch.int64, device=device)
    everyone = [torch.empty_like(sizes) for _ in range(plan.ranks)]
    dist.all_gather(everyone, sizes, group=plan.group)
    out = []
    for rank, (count, elements) in enumerate(pair.tolist() for pair in everyone):
        if not count:
            continue
        if plan.rank == rank == receiver:
            out += runs
        elif plan.rank == rank:
            head = torch.tensor(
                [[number, len(run.flat)] for number, run in runs], dtype=torch.int64, device=device
            )
            flat = torch.cat([run.flat.to(index_dtype) for _, run in runs])
            value = torch.cat([run.value for _, run in runs])
            for column in (head, flat, value.view(torch.uint8)):
                dist.send(column, group=plan.group, group_dst=receiver)
        elif plan.rank == receiver:
            head = torch.empty((count, 2), dtype=torch.int64, device=device)
            flat = torch.empty(elements, dtype=index_dtype, device=device)
            value = torch.empty(elements, dtype=dtype, device=device)
            for column in (head, flat, value.view(torch.uint8)):
                dist.recv(column, group=plan.group, group_src=rank)
            numbers, lengths = head.T.tolist()
            pieces = zip(flat.split(lengths), value.split(lengths), strict=True)
            out += [(number, _Run(*piece)) for number, piece in zip(numbers, pieces, strict=True)]
    return out
