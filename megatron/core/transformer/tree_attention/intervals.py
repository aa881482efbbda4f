"""Which blocks of the attention matrix a tree touches, from per-block extremes of ``subtree_end``.

Query q attends to key k iff k <= q < subtree_end[k]. For a block of queries [q0, q1] and a block of keys
[k0, k1] (inclusive), with the least and the greatest subtree_end of the key block:

- something is visible  iff  k0 <= q1 and q0 < greatest,
- everything is visible iff  k1 <= q0 and q1 < least.

Both are exact: where the blocks overlap a token sees itself, and elsewhere k <= q holds for all or for none.
A window w also hides keys more than w positions back. From the extremes of both blocks' positions: nothing is
left if even the shallowest query is too far below the deepest key, and everything is if the deepest query
still reaches the shallowest key. The first may keep a block in which nothing is visible.

T tokens, Q query blocks, K key blocks; T^2 never appears, Q x K integers do. On CUDA the lists come from
``interval_kernels``; what is here is plain torch, and what those are tested against.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.core.transformer.tree_metadata import TreeMetadata


@dataclass(frozen=True)
class BlockLists:
    """For every row (a block of queries, or of keys when transposed) the columns that it meets.

    ``count`` int32 [rows], ``index`` int32 [rows, columns]: the first ``count`` entries of a row are its
    columns in rising order, the rest are any columns. ``partial`` columns need the mask, ``full`` ones do
    not. Rows are contiguous: torch's FlexAttention kernels step along them by one element, whatever the
    tensor's stride says.
    """

    partial_count: torch.Tensor
    partial_index: torch.Tensor
    full_count: torch.Tensor
    full_index: torch.Tensor


def block_lists(
    metadata: TreeMetadata,
    q_block: int,
    k_block: int,
    *,
    transposed: bool = False,
    window: int | None = None,
) -> BlockLists:
    """Key blocks of every query block, or with ``transposed`` query blocks of every key block.

    Computed on the metadata's device without reading anything back, once per instance. The last block may be
    short; it is full when every token that exists in it is visible.

    Args:
        q_block, k_block: tokens per block, any positive sizes; on CUDA multiples of 16.
        transposed: rows are key blocks, as backward passes want them.
        window: keys more than this many positions back are hidden.
    """
    return metadata.cached(
        ("block_lists", q_block, k_block, transposed, window),
        lambda m: _build(m, q_block, k_block, transposed, window),
    )


def _build(metadata, q_block, k_block, transposed, window) -> BlockLists:
    if metadata.device.type == "cuda":
        from megatron.core.transformer.tree_attention import interval_kernels

        return BlockLists(*interval_kernels.block_lists(metadata, q_block, k_block, transposed, window))
    some, every = visible_blocks(metadata, q_block, k_block, window)
    if transposed:
        some, every = some.t(), every.t()
    return BlockLists(*_compact(some & ~every), *_compact(every))


def visible_blocks(
    metadata: TreeMetadata, q_block: int, k_block: int, window: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two bool [Q, K]: blocks in which something is visible, and blocks in which everything is."""
    size = metadata.padded_size
    least_K, greatest_K = _extremes(metadata.subtree_end, k_block)
    first_q, last_q = _bounds(size, q_block, metadata.device)
    first_k, last_k = _bounds(size, k_block, metadata.device)
    some = (first_k <= last_q[:, None]) & (first_q[:, None] < greatest_K)
    every = (last_k <= first_q[:, None]) & (last_q[:, None] < least_K)
    if window is not None:
        shallowest_Q, deepest_Q = _extremes(metadata.tree_position_ids, q_block)
        shallowest_K, deepest_K = _extremes(metadata.tree_position_ids, k_block)
        some &= shallowest_Q[:, None] - deepest_K <= window
        every &= deepest_Q[:, None] - shallowest_K <= window
    return some, every


def padded(metadata: TreeMetadata, size: int) -> TreeMetadata:
    """The same pack with padding up to ``size`` tokens, on the same device, nothing read back."""
    real = metadata.num_nodes + 1
    return TreeMetadata(
        torch.nn.functional.pad(metadata.cu_node_lens[:real], (0, 1), value=size),
        metadata.node_parent,
        torch.nn.functional.pad(metadata.tree_position_ids, (0, size - metadata.padded_size)),
        size,
        metadata.num_nodes,
        max_position=metadata.max_position,
    )


def _bounds(size: int, block: int, device) -> tuple[torch.Tensor, torch.Tensor]:
    """First and last token of every block."""
    first = torch.arange(0, size, block, device=device)
    return first, (first + block - 1).clamp(max=size - 1)


def _extremes(values_T: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Least and greatest value of every block; the last may be short."""
    spare = -len(values_T) % block
    # Repeating the last value changes neither extreme of its block.
    filled = torch.cat([values_T, values_T[-1:].expand(spare)]).view(-1, block)
    return filled.amin(1), filled.amax(1)


def _compact(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # A stable sort of the negation puts the chosen columns first, both groups in rising order.
    index = torch.argsort((~chosen).to(torch.uint8).contiguous(), dim=1, stable=True)
    return chosen.sum(1, dtype=torch.int32), index.to(torch.int32)
