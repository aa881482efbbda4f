"""Which blocks of the attention matrix a tree touches, from per-block extremes of ``subtree_end``.

Query q attends to key k iff k <= q < subtree_end[k]. For a block of queries [q0, q1] and a block of keys
[k0, k1] (inclusive), with the least and the greatest subtree_end of the key block:

- something is visible  iff  k0 <= q1 and q0 < greatest,
- everything is visible iff  k1 <= q0 and q1 < least.

Both are exact: where the blocks overlap a token sees itself, and elsewhere k <= q holds for all or for none.
T tokens, Q query blocks, K key blocks; T^2 never appears, Q x K booleans do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.core.transformer.tree_metadata import TreeMetadata


@dataclass(frozen=True)
class BlockLists:
    """For every row (a block of queries, or of keys when transposed) the columns that it meets.

    ``count`` int32 [rows], ``index`` int32 [rows, columns]: the first ``count`` entries of a row are its
    columns in rising order, the rest are others. ``partial`` columns need the mask, ``full`` ones do not.
    """

    partial_count: torch.Tensor
    partial_index: torch.Tensor
    full_count: torch.Tensor
    full_index: torch.Tensor

    def all_partial(self) -> BlockLists:
        """The same blocks, every one of them partial: for masks that hide more than the tree does."""
        columns = self.partial_index.shape[1]
        place = torch.arange(columns, device=self.partial_index.device)
        chosen = torch.zeros_like(self.partial_index, dtype=torch.bool)
        for count, index in ((self.partial_count, self.partial_index), (self.full_count, self.full_index)):
            chosen |= torch.zeros_like(chosen).scatter(1, index.long(), place < count[:, None])
        return BlockLists(*_compact(chosen), *_compact(torch.zeros_like(chosen)))


def block_lists(
    metadata: TreeMetadata, q_block: int, k_block: int, *, transposed: bool = False
) -> BlockLists:
    """Key blocks of every query block, or with ``transposed`` query blocks of every key block.

    Computed on the metadata's device without reading anything back, once per instance. The last block may be
    short; it is full when every token that exists in it is visible.

    Args:
        q_block, k_block: tokens per block, any positive sizes.
        transposed: rows are key blocks, as backward passes want them.
    """
    return metadata.cached(
        ("block_lists", q_block, k_block, transposed),
        lambda m: _lists(*visible_blocks(m, q_block, k_block), transposed),
    )


def visible_blocks(
    metadata: TreeMetadata, q_block: int, k_block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two bool [Q, K]: blocks in which something is visible, and blocks in which everything is."""
    size = metadata.padded_size
    end = metadata.subtree_end
    q_blocks, k_blocks = -(-size // q_block), -(-size // k_block)
    spare = k_blocks * k_block - size
    least_K = torch.nn.functional.pad(end, (0, spare), value=size).view(k_blocks, k_block).amin(1)
    greatest_K = torch.nn.functional.pad(end, (0, spare), value=0).view(k_blocks, k_block).amax(1)
    first_q = torch.arange(q_blocks, device=end.device)[:, None] * q_block
    last_q = (first_q + q_block - 1).clamp(max=size - 1)
    first_k = torch.arange(k_blocks, device=end.device)[None, :] * k_block
    last_k = (first_k + k_block - 1).clamp(max=size - 1)
    some = (first_k <= last_q) & (first_q < greatest_K)
    every = (last_k <= first_q) & (last_q < least_K)
    return some, every


def _lists(some: torch.Tensor, every: torch.Tensor, transposed: bool) -> BlockLists:
    if transposed:
        some, every = some.t(), every.t()
    return BlockLists(*_compact(some & ~every), *_compact(every))


def _compact(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # A stable sort of the negation puts the chosen columns first, both groups in rising order.
    index = torch.argsort((~chosen).to(torch.uint8).contiguous(), dim=1, stable=True)
    return chosen.sum(1, dtype=torch.int32), index.to(torch.int32)
