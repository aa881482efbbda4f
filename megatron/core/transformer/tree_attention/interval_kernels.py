"""``subtree_end`` and block lists in Triton: four launches for a micro-batch instead of about a hundred.

1. Every node: the token where its subtree ends. In preorder that is where the first later node starts whose
   parent precedes the node, for then its parent lies outside the subtree.
2. Every token: its node by binary search in ``cu_node_lens``, hence its ``subtree_end``; and the least and
   the greatest of every granule of 16 tokens, from which those of blocks of any multiple of 16 follow.
3. Every row of a list: compare its block with all columns, by the rules in ``intervals``, and write the
   columns that are visible in part and in full, in rising order, each at its running count.

Nothing is specialised on sizes, so packs of other lengths compile nothing. `TRITON_INTERPRET=1` runs the
kernels on the CPU. T packed tokens, G granules.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron.core.transformer.tree_metadata import TreeMetadata

GRANULE = 16
_NODES, _SCAN, _TOKENS, _COLUMNS = 16, 256, 1024, 64
_TOP: tl.constexpr = tl.constexpr(2**31 - 1)


def subtree_end(metadata: TreeMetadata) -> torch.Tensor:
    """int32 [T]; see ``TreeMetadata.subtree_end``."""
    return metadata.cached("ends", _ends)[0]


def block_lists(
    metadata: TreeMetadata, q_block: int, k_block: int, transposed: bool, window: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The four tensors of ``intervals.BlockLists``.

    Raises:
        ValueError: a block size is not a multiple of 16.
    """
    for name, size in (("q_block", q_block), ("k_block", k_block)):
        if size < GRANULE or size % GRANULE:
            raise ValueError(f"{name}: expected a multiple of {GRANULE}, got {size}")
    _, least_G, greatest_G = metadata.cached("ends", _ends)
    depths = (least_G, greatest_G) if window is None else metadata.cached("depths", _depths)
    size = metadata.padded_size
    rows, columns = -(-size // q_block), -(-size // k_block)
    if transposed:
        rows, columns = columns, rows
    lists = [_new(least_G, *shape) for shape in ((rows,), (rows, columns)) * 2]
    _lists_kernel[(rows,)](
        least_G,
        greatest_G,
        *depths,  # not read without a window
        *lists,
        size,
        columns,
        0 if window is None else window,
        Q_BLOCK=q_block,
        K_BLOCK=k_block,
        TRANSPOSED=transposed,
        WINDOW=window is not None,
        GRANULE=GRANULE,
        Q_WIDE=triton.next_power_of_2(q_block // GRANULE),
        K_WIDE=triton.next_power_of_2(k_block // GRANULE),
        COLUMNS=_COLUMNS,
    )
    return tuple(lists)


def _ends(metadata: TreeMetadata) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """subtree_end [T], and its least and greatest per granule [G]."""
    bounds, parents = metadata.cu_node_lens, metadata.node_parent
    count, size = bounds.numel() - 1, metadata.padded_size
    # Separate tensors, not slices of one: Triton compiles anew for pointers of another alignment.
    node_end, end_T = _new(bounds, count), _new(bounds, size)
    least_G, greatest_G = (_new(bounds, -(-size // GRANULE)) for _ in range(2))
    _node_ends_kernel[(triton.cdiv(count, _NODES),)](
        parents, bounds, node_end, metadata.num_nodes, count, NODES=_NODES, SCAN=_SCAN
    )
    _token_ends_kernel[(triton.cdiv(size, _TOKENS),)](
        bounds,
        node_end,
        end_T,
        least_G,
        greatest_G,
        count,
        count.bit_length(),
        size,
        GRANULE=GRANULE,
        TOKENS=_TOKENS,
    )
    return end_T, least_G, greatest_G


def _depths(metadata: TreeMetadata) -> tuple[torch.Tensor, torch.Tensor]:
    """Least and greatest position per granule, int32 [G]."""
    size = metadata.padded_size
    least_G, greatest_G = (_new(metadata.cu_node_lens, -(-size // GRANULE)) for _ in range(2))
    _depths_kernel[(triton.cdiv(size, _TOKENS),)](
        metadata.tree_position_ids, least_G, greatest_G, size, GRANULE=GRANULE, TOKENS=_TOKENS
    )
    return least_G, greatest_G


def _new(like: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32, device=like.device)


@triton.jit(do_not_specialize=["nodes", "count"])
def _node_ends_kernel(parents, bounds, node_end, nodes, count, NODES: tl.constexpr, SCAN: tl.constexpr):
    node = tl.program_id(0) * NODES + tl.arange(0, NODES)
    after = tl.where(node < count, count, 0)  # the first later node outside the subtree; lanes beyond: none
    first = tl.program_id(0) * NODES
    while (first < nodes) & (tl.max(after, 0) == count):
        later = first + tl.arange(0, SCAN)
        # A padding node, and whatever is past the end, is a root.
        parent = tl.load(parents + later, mask=later < nodes, other=-1)
        outside = (later[None, :] > node[:, None]) & (parent[None, :] < node[:, None])
        after = tl.minimum(after, tl.min(tl.where(outside, later[None, :], count), 1))
        first += SCAN
    tl.store(node_end + node, tl.load(bounds + after, mask=node < count, other=0), mask=node < count)


@triton.jit(do_not_specialize=["count", "steps", "size"])
def _token_ends_kernel(
    bounds,
    node_end,
    end_T,
    least_G,
    greatest_G,
    count,
    steps,
    size,
    GRANULE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    low = tl.zeros([TOKENS], tl.int32)
    high = low + count
    while steps > 0:  # bounds[low] <= token < bounds[high]
        middle = (low + high) // 2
        right = tl.load(bounds + middle) <= token
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle)
        steps -= 1
    end = tl.load(node_end + low)
    tl.store(end_T + token, end, mask=token < size)
    _store_extremes(end, token, least_G, greatest_G, size, GRANULE, TOKENS)


@triton.jit(do_not_specialize=["size"])
def _depths_kernel(position_T, least_G, greatest_G, size, GRANULE: tl.constexpr, TOKENS: tl.constexpr):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    position = tl.load(position_T + token, mask=token < size, other=0).to(tl.int32)
    _store_extremes(position, token, least_G, greatest_G, size, GRANULE, TOKENS)


@triton.jit
def _store_extremes(value, token, least_G, greatest_G, size, GRANULE: tl.constexpr, TOKENS: tl.constexpr):
    least = tl.min(tl.reshape(tl.where(token < size, value, _TOP), [TOKENS // GRANULE, GRANULE]), 1)
    greatest = tl.max(tl.reshape(tl.where(token < size, value, -1), [TOKENS // GRANULE, GRANULE]), 1)
    granule = tl.program_id(0) * (TOKENS // GRANULE) + tl.arange(0, TOKENS // GRANULE)
    tl.store(least_G + granule, least, mask=granule * GRANULE < size)
    tl.store(greatest_G + granule, greatest, mask=granule * GRANULE < size)


@triton.jit
def _granules(values_G, block, size, other, BLOCK: tl.constexpr, GRANULE: tl.constexpr, WIDE: tl.constexpr):
    """[blocks, WIDE]: a block's granules, and ``other`` where there is none."""
    place = tl.arange(0, WIDE)[None, :]
    granule = block[:, None] * (BLOCK // GRANULE) + place
    here = (place < BLOCK // GRANULE) & (granule * GRANULE < size)
    return tl.load(values_G + granule, mask=here, other=other)


@triton.jit(do_not_specialize=["size", "columns", "window"])
def _lists_kernel(
    least_G,
    greatest_G,
    shallowest_G,
    deepest_G,
    partial_count,
    partial_index,
    full_count,
    full_index,
    size,
    columns,
    window,
    Q_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    WINDOW: tl.constexpr,
    GRANULE: tl.constexpr,
    Q_WIDE: tl.constexpr,
    K_WIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0)
    partial_index += row.to(tl.int64) * columns
    full_index += row.to(tl.int64) * columns
    partials = 0
    fulls = 0
    first = 0
    while first < columns:
        column = first + tl.arange(0, COLUMNS)
        if TRANSPOSED:
            q, k = column, row + tl.zeros([COLUMNS], tl.int32)
        else:
            q, k = row + tl.zeros([COLUMNS], tl.int32), column
        first_q, last_q = q * Q_BLOCK, tl.minimum(q * Q_BLOCK + Q_BLOCK, size) - 1
        first_k, last_k = k * K_BLOCK, tl.minimum(k * K_BLOCK + K_BLOCK, size) - 1
        least = tl.min(_granules(least_G, k, size, _TOP, K_BLOCK, GRANULE, K_WIDE), 1)
        greatest = tl.max(_granules(greatest_G, k, size, -1, K_BLOCK, GRANULE, K_WIDE), 1)
        some = (first_k <= last_q) & (first_q < greatest)
        every = (last_k <= first_q) & (last_q < least)
        if WINDOW:
            shallow_q = tl.min(_granules(shallowest_G, q, size, _TOP, Q_BLOCK, GRANULE, Q_WIDE), 1)
            deep_q = tl.max(_granules(deepest_G, q, size, -1, Q_BLOCK, GRANULE, Q_WIDE), 1)
            shallow_k = tl.min(_granules(shallowest_G, k, size, _TOP, K_BLOCK, GRANULE, K_WIDE), 1)
            deep_k = tl.max(_granules(deepest_G, k, size, -1, K_BLOCK, GRANULE, K_WIDE), 1)
            some = some & (shallow_q - deep_k <= window)
            every = every & (deep_q - shallow_k <= window)
        full = (every & (column < columns)).to(tl.int32)
        partial = (some & (column < columns)).to(tl.int32) - full
        tl.store(partial_index + partials + tl.cumsum(partial, 0) - 1, column, mask=partial != 0)
        tl.store(full_index + fulls + tl.cumsum(full, 0) - 1, column, mask=full != 0)
        partials += tl.sum(partial, 0)
        fulls += tl.sum(full, 0)
        first += COLUMNS
    tl.store(partial_count + row, partials)
    tl.store(full_count + row, fulls)
    first = 0
    while first < columns:  # consumers load some of the rest ahead: give them a block
        column = first + tl.arange(0, COLUMNS)
        zero = tl.zeros([COLUMNS], tl.int32)
        tl.store(partial_index + column, zero, mask=(column >= partials) & (column < columns))
        tl.store(full_index + column, zero, mask=(column >= fulls) & (column < columns))
        first += COLUMNS
