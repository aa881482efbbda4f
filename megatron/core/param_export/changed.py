"""Bringing only the changed elements of sharded parameters to one rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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
    mine: dict[torch.dtype, list] = {}
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
                rows = mine.setdefault(tensor.dtype, [])
                rows.append((torch.full_like(flat, number_of[box.full_name]), flat, value[inside]))
    dtypes = {entry.dtype for member in plan.members for entry in member.content.entries}
    device = plan.entries[0].tensor.device if plan.entries else torch.device("cpu")
    gathered: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for dtype in sorted(dtypes, key=str):
        empty = (torch.empty(0, dtype=kind, device=device) for kind in (torch.int64, torch.int64, dtype))
        columns = [torch.cat(part) for part in zip(tuple(empty), *mine.pop(dtype, ()), strict=True)]
        parts = _collect(plan, columns, receiver)
        if parts:
            gathered.update(_by_tensor(*(torch.cat(part) for part in zip(*parts, strict=True))))
    for number, name in enumerate(plan.expected):
        if number in gathered:
            yield name, *gathered.pop(number)


def _by_tensor(which: torch.Tensor, flat: torch.Tensor, value: torch.Tensor):
    """Tensor number -> (rising indices, values); repeated elements once."""
    order = torch.argsort(flat, stable=True)
    order = order[torch.argsort(which[order], stable=True)]
    which, flat, value = which[order], flat[order], value[order]
    first = torch.ones_like(which, dtype=torch.bool)
    first[1:] = (which[1:] != which[:-1]) | (flat[1:] != flat[:-1])
    which, flat, value = which[first], flat[first], value[first]
    present, counts = torch.unique_consecutive(which, return_counts=True)
    parts = zip(flat.split(counts.tolist()), value.split(counts.tolist()), strict=True)
    return dict(zip(present.tolist(), parts, strict=True))


def _collect(plan: Plan, columns: list[torch.Tensor], receiver: int):
    """Every rank's columns (tensor number, flat index, value), on the receiver."""
    if plan.ranks == 1:
        return [columns] if len(columns[0]) else []
    count = torch.tensor([len(columns[0])], dtype=torch.int64, device=columns[0].device)
    counts = [torch.empty_like(count) for _ in range(plan.ranks)]
    dist.all_gather(counts, count, group=plan.group)
    parts = []
    for rank, n in enumerate(int(c) for c in counts):
        if not n or plan.rank not in (rank, receiver):
            continue
        if rank == receiver:
            parts.append(columns)
        elif plan.rank == rank:
            for column in columns:
                dist.send(column.contiguous().view(torch.uint8), group=plan.group, group_dst=receiver)
        else:
            theirs = [torch.empty(n, dtype=column.dtype, device=column.device) for column in columns]
            for column in theirs:
                dist.recv(column.view(torch.uint8), group=plan.group, group_src=rank)
            parts.append(theirs)
    return parts
