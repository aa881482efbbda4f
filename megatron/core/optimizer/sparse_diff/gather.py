"""Changes of parameters that are sharded over ranks, gathered with traffic proportional to the changes."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .shards import Changes, Shard, seal

__all__ = ["gather"]


def gather(
    names: Sequence[str],
    tensors: Sequence[torch.Tensor],
    shards: Sequence[Shard],
    group: dist.ProcessGroup | None,
    dst: int | None = None,
) -> tuple[list[Changes | None] | None, bool]:
    """Seal `shards` and join their changes over `group`; the ranges of its ranks are disjoint.

    One collective carries the sizes of all the tensors, one the indices, and one the values of each dtype.

    Args:
        names: of the tensors, for messages.
        tensors: the same on every rank, in the same order.
        shards: this rank's part of each.
        group: the ranks that share the tensors; None where each rank owns them whole.
        dst: the rank in `group` that receives; all of them where None.

    Returns:
        Per tensor its `Changes`, or None where a rank needs it sent whole, in place of all of which None on
        ranks other than `dst`; and, the same on all ranks, whether any must be sent whole.

    Raises:
        RuntimeError: on all ranks, where a validated shard of any of them missed a change.
    """
    mine = seal(shards)
    if group is None or dist.get_world_size(group) == 1:
        for name, shard in zip(names, shards, strict=True):
            _raise_if_missed(name, *(getattr(shard, "missed", None) or (0, 0)))
        return mine, None in mine
    device = tensors[0].device
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    for p, shard in enumerate(shards):
        if not shard.numel:  # a rank that owns nothing of a tensor has nothing to be sent whole
            mine[p] = Changes(nothing, shard.values())
    sizes = torch.tensor(
        [
            (-1 if m is None else m.indices.numel(), s.start, *(getattr(s, "missed", None) or (0, 0)))
            for m, s in zip(mine, shards, strict=True)
        ],
        dtype=torch.int64,
        device=device,
    )
    table = sizes.new_empty(dist.get_world_size(group) * sizes.numel())
    dist.all_gather_into_tensor(table, sizes.view(-1), group=group)
    counts_RP, starts_RP, missed_RP, first_RP = table.view(-1, *sizes.shape).permute(2, 0, 1).tolist()
    for p, name in enumerate(names):
        for r in range(len(missed_RP)):
            _raise_if_missed(name, missed_RP[r][p], first_RP[r][p], r)
    whole = [any(row[p] < 0 for row in counts_RP) for p in range(len(tensors))]

    # 2^31 elements have indices up to 2^31 - 1
    index_dtype = torch.int32 if max(t.numel() for t in tensors) <= 1 << 31 else torch.int64
    indices = [None if m is None else m.indices.to(index_dtype) for m in mine]
    indices = _exchange(indices, counts_RP, whole, group, dst)
    values: list[list[torch.Tensor] | None] = [None] * len(tensors)
    for dtype in sorted({t.dtype for t in tensors}, key=str):
        other = [w or t.dtype != dtype for w, t in zip(whole, tensors, strict=True)]
        if all(other):
            continue
        pieces = [None if m is None else m.values for m in mine]
        for p, received in enumerate(_exchange(pieces, counts_RP, other, group, dst)):
            values[p] = received if received is not None else values[p]
    if dst is not None and dist.get_rank(group) != dst:
        return None, any(whole)
    changes = [
        None if whole[p] else _in_order(indices[p], values[p], [row[p] for row in starts_RP])
        for p in range(len(tensors))
    ]
    return changes, any(whole)


def _raise_if_missed(name: str, count: int, first: int, rank: int | None = None) -> None:
    if count:
        where = "" if rank is None else f" on rank {rank} of its group"
        raise RuntimeError(
            f"sparse diff: {name}: {count} elements changed unseen{where}, first flat index {first}; "
            "something wrote the parameter past the optimizer. Call invalidate() after such writes, or send "
            "whole weights"
        )


def _in_order(indices: list[torch.Tensor], values: list[torch.Tensor], starts: list[int]) -> Changes:
    """Join the pieces of all ranks; ranges are disjoint, so the order of their starts orders the elements."""
    order = sorted((r for r, piece in enumerate(indices) if piece.numel()), key=starts.__getitem__) or [0]
    joined = torch.cat([indices[r] for r in order]).to(torch.int64)
    return Changes(joined, torch.cat([values[r] for r in order]))


def _exchange(
    pieces: Sequence[torch.Tensor | None],
    counts_RP: list[list[int]],
    skip: Sequence[bool],
    group: dist.ProcessGroup,
    dst: int | None,
) -> list[list[torch.Tensor] | None]:
    """Pieces of every rank, by tensor and rank; None for tensors to `skip`."""
    keep = [p for p, s in enumerate(skip) if not s]
    if not keep:
        return [None] * len(skip)
    sent = torch.cat([pieces[p] for p in keep])
    totals = [sum(row[p] for p in keep) for row in counts_RP]
    received = _uneven_gather(sent, totals, group, dst)
    result: list[list[torch.Tensor] | None] = [None] * len(skip)
    by_rank = [
        r.split([row[p] for p in keep]) for r, row in zip(received, counts_RP, strict=True) if r is not None
    ]
    for k, p in enumerate(keep):
        result[p] = [pieces_of_rank[k] for pieces_of_rank in by_rank]
    return result


def _uneven_gather(
    sent: torch.Tensor, totals: list[int], group: dist.ProcessGroup, dst: int | None
) -> list[torch.Tensor | None]:
    """Flat tensors of `totals[r]` elements from every rank r, to all or to `dst`."""
    ranks, rank, most = len(totals), dist.get_rank(group), max(totals)
    if dst is not None:
        if rank != dst:
            if sent.numel():
                dist.send(sent, dist.get_global_rank(group, dst), group=group)
            return [None] * ranks
        received = [sent if r == dst else sent.new_empty(n) for r, n in enumerate(totals)]
        for r, n in enumerate(totals):
            if r != dst and n:
                dist.recv(received[r], dist.get_global_rank(group, r), group=group)
        return received
    if most * ranks <= 2 * sum(totals):
        padded = torch.nn.functional.pad(sent, (0, most - sent.numel()))
        table = sent.new_empty(ranks * most)
        dist.all_gather_into_tensor(table, padded, group=group)
        return [table[r * most : r * most + n] for r, n in enumerate(totals)]
    # One rank holds most of the changes: padding would multiply them by the size of the group.
    received = [sent if r == rank else sent.new_empty(n) for r, n in enumerate(totals)]
    for r, n in enumerate(totals):
        if n:
            dist.broadcast(received[r], dist.get_global_rank(group, r), group=group)
    return received
