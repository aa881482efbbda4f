"""The kernels of flash compile with our masks and block sizes for Hopper and Blackwell.

Needs flash-attn-4 but no GPU. Blackwell's forward kernel asks a driver how many clusters fit: left out.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from flash_attn.cute import interface
from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
from megatron.core.transformer.tree_attention import flash, flash_masks

T, H, G = 4096, 8, 2
def new(*shape, dtype=torch.int32):
    return torch.empty(shape, dtype=dtype, device="cuda:0")

def lists(blocks, transposed):
    rows, columns = (-(-T // size) for size in (blocks[::-1] if transposed else blocks))
    return BlockSparseTensorsTorch(*2 * (new(1, 1, rows), new(1, 1, rows, columns)), block_size=blocks)

with FakeTensorMode():
    for size, window in ((64, None), (128, None), (128, 77)):
        q, k, v, out = (new(1, T, heads, size, dtype=torch.bfloat16) for heads in (H, G, G, H))
        forward, backward = flash.block_sizes(size, int(sys.argv[1]))
        mask = flash_masks.tree if window is None else flash_masks.tree_and_window(window)
        options = dict(mask_mod=mask, aux_tensors=[new(T)] * (1 if window is None else 2))
        if sys.argv[1] == "9":
            sparse = lists(forward, False)
            interface._flash_attn_fwd(
                q, k, v, softmax_scale=0.1, return_lse=True, block_sparse_tensors=sparse, **options
            )
        lse = new(1, H, T, dtype=torch.float32)
        interface._flash_attn_bwd(
            q, k, v, out, out, lse, 0.1, block_sparse_tensors=lists(backward, True), **options
        )
caches = (interface._flash_attn_fwd.compile_cache, interface._flash_attn_bwd.compile_cache)
print("compiled", *(len(c.cache) for c in caches))
"""


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="flash-attn-4 is not installed")
@pytest.mark.parametrize("major, compiled", [(9, "3 3"), (10, "0 3")])
def test_kernels_compile(major, compiled):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(major)],
        env={
            **os.environ,
            "FLASH_ATTENTION_ARCH": f"sm_{major}0",
            "CUTE_DSL_ARCH": f"sm_{major}0a",
            "FLASH_ATTENTION_NUM_SMS": "132",
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        },
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and f"compiled {compiled}" in done.stdout, done.stdout + done.stderr
