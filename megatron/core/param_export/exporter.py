"""Exporting full Hugging Face tensors, loading them, and sending only the changed elements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from megatron.core.param_export.plan import Plan

DEFAULT_BUCKET_BYTES = 512 * 1024**2


def units(plan: Plan) -> list[list[str]]:
    """Full tensors that share a local tensor (q, k and v; gate and up) travel together; in export order."""
    parent = {name: name for name in plan.expected}

    def root(name):
        while parent[name] != name:
            parent[name] = name = parent[parent[name]]
        return name

    for entries in plan.world:
        for entry in entries:
            names = dict.fromkeys(box.full_name for box in entry.boxes)
            if entry.owner and names:
                first, *rest = (root(name) for name in names)
                for other in rest:
                    parent[root(other)] = root(first)
    grouped: dict[str, list[str]] = {}
    for name in plan.expected:
        grouped.setdefault(root(name), []).append(name)
    return list(grouped.values())


def buckets(plan: Plan, limit: int = DEFAULT_BUCKET_BYTES) -> list[list[str]]:
    """Units packed in order into buckets of at most ``limit`` bytes of full tensors (one unit at least)."""
    out: list[list[str]] = []
    filled = 0
    for unit in units(plan):
        size = sum(plan.nbytes(name) for name in unit)
        if not out or filled + size > limit:
            out.append([])
            filled = 0
        out[-1] += unit
        filled += size
    return out


def _receivers(plan: Plan, receivers) -> list[int]:
    if receivers == "all":
        return list(range(plan.ranks))
    ranks = sorted(set(receivers))
    if not ranks or ranks[0] < 0 or ranks[-1] >= plan.ranks:
        raise ValueError(f"receivers: ranks of 0..{plan.ranks - 1} or 'all', got {receivers!r}")
    return ranks


@torch.no_grad()
def export(
    plan: Plan, receivers: str | Sequence[int] = "all", bucket_bytes: int = DEFAULT_BUCKET_BYTES
) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the full tensors under their Hugging Face names, in a fixed order. Collective.

    Every rank of the plan must run the iterator to its end; ranks that do not receive get no items.

    Args:
        plan: a proven plan.
        receivers: "all", or the ranks (of the plan's group) that get the tensors.
        bucket_bytes: how many bytes of full tensors are gathered at a time.

    Yields:
        ``(name, tensor)``: contiguous, in the parameter's dtype and on its device. The tensor is the
        caller's.

    Raises:
        ValueError: the plan is not proven, or a receiver is not one of its ranks.
    """
    if not plan.proven:
        raise ValueError("prove() the plan before exporting with it")
    wanted = _receivers(plan, receivers)
    for names in buckets(plan, bucket_bytes):
        shards = sorted({(rank, number) for name in names for rank, number, _ in plan.sources[name]})
        here = plan.rank in wanted
        device = plan.entries[0].tensor.device if plan.entries else torch.device("cpu")
        held: dict[tuple[int, int], torch.Tensor] = {}
        for rank in sorted({rank for rank, _ in shards}):
            held.update(_send(plan, rank, [n for r, n in shards if r == rank], wanted, device))
        if not here:
            continue
        for name in names:
            full = torch.empty(plan.expected[name], dtype=plan.dtype(name), device=device)
            flat = full.view(-1)
            for rank, number, box in plan.sources[name]:
                box.copy_to_full(held[rank, number], flat)
            yield name, full


def _send(plan: Plan, source: int, numbers: list[int], wanted: list[int], device):
    """One rank's shards of a bucket to every receiver, as one run of bytes."""
    if plan.rank == source:
        local = {n: plan.entries[n].tensor.detach().contiguous().view(-1) for n in numbers}
    others = [rank for rank in wanted if rank != source]
    if others and plan.rank in (source, *wanted):
        sizes = [plan.world[source][n].numel * plan.world[source][n].dtype.itemsize for n in numbers]
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + -(-size // 16) * 16)
        if plan.rank == source:
            buffer = torch.zeros(starts[-1], dtype=torch.uint8, device=device)
            for n, start, size in zip(numbers, starts, sizes, strict=False):
                buffer[start : start + size].copy_(local[n].view(torch.uint8))
            for rank in others:
                dist.send(buffer, group=plan.group, group_dst=rank)
        else:
            buffer = torch.empty(starts[-1], dtype=torch.uint8, device=device)
            dist.recv(buffer, group=plan.group, group_src=source)
            local = {
                n: buffer[start : start + size].view(plan.world[source][n].dtype)
                for n, start, size in zip(numbers, starts, sizes, strict=False)
            }
    if plan.rank not in wanted:
        return {}
    return {(source, n): local[n] for n in numbers}


@torch.no_grad()
def load(plan: Plan, source: Mapping[str, torch.Tensor] | Callable[[str], torch.Tensor]) -> None:
    """Write Hugging Face tensors into the local parameters: the inverse of :func:`export`. Not collective.

    Replicas, tied copies and padding are written too; padded vocabulary rows become zero.

    Args:
        plan: a plan of the model, proven.
        source: a mapping, or a function, from a Hugging Face name to the full tensor.

    Raises:
        ValueError: a tensor has another shape than the configuration says; nothing of it was written.
    """
    if not plan.proven:
        raise ValueError("prove() the plan before loading with it")
    get = source if callable(source) else source.__getitem__
    writers: dict[str, list] = {}
    for entry in plan.entries:
        for box in entry.boxes:
            writers.setdefault(box.full_name, []).append((entry.tensor, box))
        for offset, size, stride in entry.cut:
            flat = entry.tensor.detach().view(-1)
            flat.as_strided(size, stride, flat.storage_offset() + offset).zero_()
    for name, targets in writers.items():
        full = get(name)
        if tuple(full.shape) != plan.expected[name]:
            raise ValueError(f"{name}: shape {tuple(full.shape)}, expected {plan.expected[name]}")
        full = full.to(targets[0][0].device).contiguous().view(-1)
        for tensor, box in targets:
            box.copy_to_local(full, tensor.detach().view(-1))


Changed = Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


@torch.no_grad()
def export_changed(
    plan: Plan, changed: Changed, receiver: int = 0
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Bring changed elements to one rank under Hugging Face names. Collective; traffic is O(changed).

    Each rank gives what it knows: under a distributed optimizer every data-parallel rank knows its own part,
    and the parts are merged. An element that several ranks report is kept once.

    Args:
        plan: a proven plan.
        changed: ``(parameter, index, value)``: a live tensor of the plan, int64 [n] flat indices into it, and
            the new values [n] in its dtype.
        receiver: the rank (of the plan's group) that gets the result.

    Yields:
        On the receiver, ``(hf_name, flat_index, value)`` with rising int64 indices, for tensors with a
        change, in export order. On other ranks nothing; they must run the iterator to its end too.
    """
    if not plan.proven:
        raise ValueError("prove() the plan before exporting with it")
    number_of = {name: k for k, name in enumerate(plan.expected)}
    mine: dict[torch.dtype, list] = {}
    for tensor, index, value in changed:
        entry = plan.entry_of(tensor)
        if not entry.sharer:
            continue
        for box in entry.boxes:
            inside, flat = box.map_to_full(index)
            if len(flat):
                rows = mine.setdefault(tensor.dtype, [])
                rows.append((torch.full_like(flat, number_of[box.full_name]), flat, value[inside]))
    dtypes = sorted({entry.dtype for entries in plan.world for entry in entries}, key=str)
    device = plan.entries[0].tensor.device if plan.entries else torch.device("cpu")
    gathered: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    names = list(plan.expected)
    for dtype in dtypes:
        rows = mine.get(dtype, [])
        which = torch.cat([r[0] for r in rows]) if rows else torch.empty(0, dtype=torch.int64, device=device)
        flat = torch.cat([r[1] for r in rows]) if rows else torch.empty(0, dtype=torch.int64, device=device)
        value = torch.cat([r[2] for r in rows]) if rows else torch.empty(0, dtype=dtype, device=device)
        parts = _collect(plan, which, flat, value, receiver)
        if plan.rank != receiver:
            continue
        which, flat, value = (torch.cat(part) for part in zip(*parts, strict=True))
        order = torch.argsort(flat, stable=True)
        order = order[torch.argsort(which[order], stable=True)]
        which, flat, value = which[order], flat[order], value[order]
        if len(which):
            first = torch.ones(len(which), dtype=torch.bool, device=device)
            first[1:] = (which[1:] != which[:-1]) | (flat[1:] != flat[:-1])
            which, flat, value = which[first], flat[first], value[first]
            present, counts = torch.unique_consecutive(which, return_counts=True)
            parts = zip(flat.split(counts.tolist()), value.split(counts.tolist()), strict=True)
            gathered.update({names[k]: pair for k, pair in zip(present.tolist(), parts, strict=True)})
    for name in names:
        if name in gathered:
            yield name, *gathered[name]


def _collect(plan: Plan, which, flat, value, receiver: int):
    """Every rank's three columns on the receiver."""
    if plan.ranks == 1:
        return [(which, flat, value)]
    count = torch.tensor([len(which)], dtype=torch.int64, device=which.device)
    counts = [torch.empty_like(count) for _ in range(plan.ranks)]
    dist.all_gather(counts, count, group=plan.group)
    parts = []
    for rank, n in enumerate(int(c) for c in counts):
        if rank == receiver and plan.rank == receiver:
            parts.append((which, flat, value))
        elif n and plan.rank == rank:
            for column in (which, flat, value.contiguous().view(torch.uint8)):
                dist.send(column.contiguous(), group=plan.group, group_dst=receiver)
        elif n and plan.rank == receiver:
            columns = [torch.empty(n, dtype=torch.int64, device=which.device) for _ in range(2)]
            columns.append(torch.empty(n * value.dtype.itemsize, dtype=torch.uint8, device=which.device))
            for column in columns:
                dist.recv(column, group=plan.group, group_src=rank)
            parts.append((columns[0], columns[1], columns[2].view(value.dtype)))
    return parts
