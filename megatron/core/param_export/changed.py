"""Bringing only the changed elements of sharded parameters to one rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.core.param_export.plan import Plan

Changed = Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@torch.no_grad()
def export_changed(
    plan: Plan, changed: Changed, receiver: int = 0, *, sharded: bool = True
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Bring changed elements to one rank under Hugging Face names. Collective; traffic is O(changed).

    Args:
        plan: a proven plan.
        changed: ``(parameter, index, value)``: a live tensor of the plan, int64 [n] flat indices into it, and
            the new values [n] in its dtype.
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
    number_of = {name: k for k, name in enumerate(plan.expected)}
    mine: dict[torch.dtype, list[_Run]] = {}
    for tensor, index, value in changed:
        entry = plan.entry_of(tensor)
        if value.dtype != tensor.dtype:
            raise ValueError(
                f"{entry.global_name}: values are {value.dtype}, the parameter is {tensor.dtype}"
            )
        if not (entry.remote.sharer if sharded else entry.owner):
            continue
        for box in entry.boxes:
            inside, flat = box.map_to_full(index)
            if len(flat):
                run = _Run(number_of[box.full_name], flat, value[inside])
                mine.setdefault(tensor.dtype, []).append(run)
    names = list(plan.expected)
    dtypes = {entry.dtype for member in plan.members for entry in member.content.entries}
    gathered: dict[int, list[_Run]] = {}
    for dtype in sorted(dtypes, key=str):
        for run in _collect(plan, mine.pop(dtype, []), dtype, receiver):
            gathered.setdefault(run.number, []).append(run)
    for number in sorted(gathered):
        yield names[number], *_merge(gathered.pop(number))


@dataclass(frozen=True)
class _Run:
    """Changed elements of one full tensor, from one shard."""

    number: int
    flat: torch.Tensor
    value: torch.Tensor


def _merge(runs: list[_Run]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rising indices and their values; an element that several ranks reported, once."""
    flat, order = torch.sort(torch.cat([run.flat.long() for run in runs]), stable=True)
    value = torch.cat([run.value for run in runs])[order]
    first = torch.ones_like(flat, dtype=torch.bool)
    first[1:] = flat[1:] != flat[:-1]
    return flat[first], value[first]


def _collect(plan: Plan, runs: list[_Run], dtype: torch.dtype, receiver: int) -> list[_Run]:
    """Every rank's runs, on the receiver. An element travels as its index (4 bytes, or 8) and its value."""
    if plan.ranks == 1:
        return runs
    device = plan.entries[0].tensor.device if plan.entries else torch.device("cpu")
    largest = max(math.prod(shape) for shape in plan.expected.values())
    index_dtype = torch.int32 if largest < 2**31 else torch.int64
    elements = sum(len(run.flat) for run in runs)
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
                [[run.number, len(run.flat)] for run in runs], dtype=torch.int64, device=device
            )
            flat = torch.cat([run.flat.to(index_dtype) for run in runs])
            value = torch.cat([run.value for run in runs])
            for column in (head, flat, value.view(torch.uint8)):
                dist.send(column, group=plan.group, group_dst=receiver)
        elif plan.rank == receiver:
            head = torch.empty((count, 2), dtype=torch.int64, device=device)
            flat = torch.empty(elements, dtype=index_dtype, device=device)
            value = torch.empty(elements, dtype=dtype, device=device)
            for column in (head, flat, value.view(torch.uint8)):
                dist.recv(column, group=plan.group, group_src=rank)
            numbers, lengths = head.T.tolist()
            pieces = zip(numbers, flat.split(lengths), value.split(lengths), strict=True)
            out += [_Run(*piece) for piece in pieces]
    return out
