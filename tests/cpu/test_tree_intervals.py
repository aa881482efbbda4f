"""Block lists against the dense mask, for block sizes that fit and that do not."""

import pytest
import torch

from megatron.core.transformer.tree_attention.intervals import block_lists, visible_blocks
from megatron.core.transformer.tree_attention.reference import visible
from megatron.core.transformer.tree_metadata import TreeMetadata
from tests.cpu.test_tree_metadata import random_tree

CASES = [(q, k, seed) for q, k in ((4, 4), (8, 4), (3, 7), (16, 16), (1, 1), (64, 128)) for seed in range(5)]


def naive_blocks(mask, q_block, k_block):
    some = [[bool(part.any()) for part in row.split(k_block, 1)] for row in mask.split(q_block)]
    every = [[bool(part.all()) for part in row.split(k_block, 1)] for row in mask.split(q_block)]
    return torch.tensor(some), torch.tensor(every)


@pytest.mark.parametrize("q_block, k_block, seed", CASES)
def test_blocks_and_lists(q_block, k_block, seed):
    tree = random_tree(seed, nodes=3 + 8 * seed, longest=9)
    metadata = TreeMetadata.from_nodes(*tree, padded_to=1 + seed % 2)
    some, every = naive_blocks(visible(metadata), q_block, k_block)
    got_some, got_every = visible_blocks(metadata, q_block, k_block)
    assert torch.equal(got_some, some) and torch.equal(got_every, every)
    for transposed in (False, True):
        lists = block_lists(metadata, q_block, k_block, transposed=transposed)
        assert lists is block_lists(metadata, q_block, k_block, transposed=transposed)
        for count, index, want in (
            (lists.partial_count, lists.partial_index, some & ~every),
            (lists.full_count, lists.full_index, every),
        ):
            want = want.t() if transposed else want
            assert count.dtype == index.dtype == torch.int32
            assert [row[:n].tolist() for n, row in zip(count, index, strict=True)] == [
                row.nonzero()[:, 0].tolist() for row in want
            ]
            assert index.sort(dim=1).values.tolist() == [list(range(want.shape[1]))] * want.shape[0]


def test_siblings_share_no_block_that_holds_only_them():
    metadata = TreeMetadata.from_nodes([-1, 0, 0], [8, 8, 8])
    some, every = visible_blocks(metadata, 8, 8)
    assert some.tolist() == [[True, False, False], [True, True, False], [True, False, True]]
    assert every.tolist() == [[False] * 3, [True, False, False], [True, False, False]]
