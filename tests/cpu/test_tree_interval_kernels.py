"""The Triton kernels of block lists: interpreted on the CPU against plain torch, and compiled for Hopper."""

import pytest
import torch

from megatron.core.transformer.tree_attention import intervals
from megatron.core.transformer.tree_metadata import TreeMetadata
from tests.cpu import interpreted
from tests.cpu.test_tree_metadata import random_tree


@interpreted.outside
def test_interpreted():
    interpreted.run(__file__, len(CASES) + 1)


CASES = [
    # parents, lengths, padded to, (query block, key block), window
    (*random_tree(0, nodes=83, longest=9), 1, (64, 96), None),
    (*random_tree(1, nodes=43, longest=30), 128, (128, 80), 17),
    (*random_tree(2, nodes=123, longest=3), 7, (16, 32), None),
    (*random_tree(3, nodes=43, longest=60), 1, (16, 16), 40),  # more columns than one program takes at a time
    ([-1], [1], 1, (128, 128), None),
    ([-1], [1041], 1, (128, 128), 100),
    ([-1, *range(299)], [1] * 300, 1, (16, 32), None),  # more nodes than one step of the search
    ([-1] * 97, [1 + 13 * i % 29 for i in range(97)], 1, (128, 128), None),
    ([-1, 0, 0], [130, 70, 61], 128, (128, 128), None),
    ([-1, 0, 0], [130, 70, 57], 1, (128, 128), None),  # one token in the last block
    ([-1, *[0] * 20], [200] + [37] * 20, 1, (64, 128), None),
]


@interpreted.inside
@pytest.mark.parametrize("case", range(len(CASES)))
def test_kernels_against_torch(case):
    from megatron.core.transformer.tree_attention import interval_kernels

    parents, lengths, padded_to, blocks, window = CASES[case]
    metadata = TreeMetadata.from_nodes(parents, lengths, padded_to=padded_to)
    assert torch.equal(interval_kernels.subtree_end(metadata), metadata.subtree_end)
    for transposed in (False, True):
        want = intervals.block_lists(metadata, *blocks, transposed=transposed, window=window)
        got = intervals.BlockLists(*interval_kernels.block_lists(metadata, *blocks, transposed, window))
        for kind in ("partial", "full"):
            count, index = getattr(got, f"{kind}_count"), getattr(got, f"{kind}_index")
            want_index = getattr(want, f"{kind}_index")
            assert torch.equal(count, getattr(want, f"{kind}_count")) and count.dtype == torch.int32
            assert index.shape == want_index.shape and index.is_contiguous() and index.dtype == torch.int32
            for row, n in enumerate(count.tolist()):
                assert torch.equal(index[row, :n], want_index[row, :n])
                assert not index[row, n:].any()  # a block that exists


@interpreted.inside
def test_block_sizes_are_checked():
    from megatron.core.transformer.tree_attention import interval_kernels

    with pytest.raises(ValueError, match="k_block: expected a multiple of 16, got 72"):
        interval_kernels.block_lists(TreeMetadata.from_nodes([-1], [9]), 64, 72, False, None)


@interpreted.outside
@pytest.mark.parametrize("window", [False, True])
def test_kernels_compile_for_hopper_without_one(window):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron.core.transformer.tree_attention import interval_kernels as kernels

    lists = dict(Q_BLOCK=64, K_BLOCK=96, TRANSPOSED=window, WINDOW=window, Q_WIDE=4, K_WIDE=8, COLUMNS=64)
    for kernel, constants in (
        (kernels._depths_kernel, dict(GRANULE=16, TOKENS=1024))
        if window
        else (kernels._token_ends_kernel, dict(GRANULE=16, TOKENS=1024)),
        (kernels._node_ends_kernel, dict(NODES=16, SCAN=256)),
        (kernels._lists_kernel, dict(GRANULE=16, **lists)),
    ):
        numbers = ("nodes", "count", "steps", "size", "columns", "window")
        signature = {
            name: "constexpr" if name in constants else "i32" if name in numbers else "*i32"
            for name in kernel.arg_names
        }
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        assert "sm_90" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
