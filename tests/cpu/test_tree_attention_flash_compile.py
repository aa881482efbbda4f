"""The CuTe masks of flash compile for Hopper; needs flash-attn-4 but no GPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
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
        forward, backward = flash.block_sizes(size)
        mask = flash_masks.tree if window is None else flash_masks.tree_and_window(window)
        options = dict(mask_mod=mask, aux_tensors=[new(T)] * (1 if window is None else 2))
        interface._flash_attn_fwd(
            q, k, v, softmax_scale=0.1, return_lse=True, block_sparse_tensors=lists(forward, False), **options
        )
        lse = new(1, H, T, dtype=torch.float32)
        interface._flash_attn_bwd(
            q, k, v, out, out, lse, 0.1, block_sparse_tensors=lists(backward, True), **options
        )
caches = (interface._flash_attn_fwd.compile_cache, interface._flash_attn_bwd.compile_cache)
print("compiled", *(len(c.cache) for c in caches))
"""


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="flash-attn-4 is not installed")
def test_masks_compile():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        env={
            **os.environ,
            "FLASH_ATTENTION_ARCH": "sm_90",
            "CUTE_DSL_ARCH": "sm_90a",
            "FLASH_ATTENTION_NUM_SMS": "132",
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        },
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and "compiled 3 3" in done.stdout, done.stdout + done.stderr
