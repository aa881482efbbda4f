"""Block lists against the dense mask, for block sizes that fit and that do not."""

import pytest
import torch

from megatron.core.transformer.tree_attention import flash
from megatron.core.transformer.tree_attention.intervals import block_lists, padded, visible_blocks
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
            assert 0 <= index.min() and index.max() < want.shape[1]
            # FlexAttention's kernels walk a row by one element at a time, whatever the strides say.
            assert count.is_contiguous() and index.is_contiguous()


@pytest.mark.parametrize("window", [0, 3, 20])
@pytest.mark.parametrize("q_block, k_block, seed", CASES[::3])
def test_blocks_under_a_window(q_block, k_block, seed, window):
    tree = random_tree(seed, nodes=3 + 8 * seed, longest=9)
    metadata = TreeMetadata.from_nodes(*tree, padded_to=1 + seed % 2)
    some, every = naive_blocks(visible(metadata, window), q_block, k_block)
    got_some, got_every = visible_blocks(metadata, q_block, k_block, window)
    assert torch.equal(got_every, every)
    assert (some <= got_some).all()  # it may keep blocks with nothing in them, within those of the tree
    assert (got_some <= visible_blocks(metadata, q_block, k_block)[0]).all()


def test_a_window_leaves_few_blocks_of_a_chain():
    some, every = visible_blocks(TreeMetadata.from_nodes([-1], [160]), 16, 16, window=16)
    assert some.sum(1).tolist() == [1] + [2] * 9 and not every.any()


@pytest.mark.parametrize("head", [64, 96, 128, 192, 256])
def test_the_sizes_of_flash_are_multiples_of_what_the_kernels_take(head):
    assert all(size % 16 == 0 for pair in flash.block_sizes(head) for size in pair)


@pytest.mark.parametrize("padded_to", [1, 7])
@pytest.mark.parametrize("tree", [([-1, 0, 0], [5, 3, 9]), ([], [])])
def test_padded(tree, padded_to):
    metadata = TreeMetadata.from_nodes(*tree, padded_size=21 if padded_to == 7 else sum(tree[1]) or 4)
    longer = padded(metadata, 32).validate()
    want = TreeMetadata.from_nodes(*tree, padded_size=32)
    for name in ("cu_node_lens", "node_parent", "tree_position_ids", "subtree_end"):
        assert torch.equal(getattr(longer, name), getattr(want, name)), name
    assert longer.has_padding and longer.num_nodes == len(tree[0]) and longer.padded_size == 32


def test_siblings_share_no_block_that_holds_only_them():
    metadata = TreeMetadata.from_nodes([-1, 0, 0], [8, 8, 8])
    some, every = visible_blocks(metadata, 8, 8)
    assert some.tolist() == [[True, False, False], [True, True, False], [True, False, True]]
    assert every.tolist() == [[False] * 3, [True, False, False], [True, False, False]]
