"""The Triton kernels, interpreted on the CPU, against plain comparisons of whole copies."""

import os
import subprocess
import sys

import pytest

# Triton reads TRITON_INTERPRET when it is imported, so the cases run in a process of their own.
CASES = """
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location("kernels", sys.argv[1])
kernels = importlib.util.module_from_spec(spec); spec.loader.exec_module(kernels)

gen = torch.Generator().manual_seed(11)
for numel in (0, 1, 7, 9, 31, 33, 4096, 4097, 9001):
    for dtype in (torch.bfloat16, torch.float16):
        for density in (0.0, 0.01, 1.0):
            for skip in (False, True):
                model = torch.randn(numel, generator=gen).to(dtype)
                move = torch.rand(numel, generator=gen) < density
                # representable: the interpreter truncates where the hardware rounds to nearest even
                main = torch.where(move, torch.randn(numel, generator=gen).to(dtype), model).float()
                words = torch.randint(0, 4, (-(-numel // 32),), generator=gen, dtype=torch.int32)
                if numel % 32 == 1:
                    words[-1:] &= 1
                words_before, before = words.clone(), model.clone()
                kernels.capture(model, main, words, skip)
                assert torch.equal(model, main.to(dtype)), (numel, dtype, density, skip)
                lanes = torch.arange(32)
                was = ((words_before[:, None] >> lanes) & 1).view(-1)[:numel].bool()
                expected = (was | (before.view(torch.int16) != model.view(torch.int16))).nonzero().view(-1)
                got = ((words[:, None] >> lanes) & 1).view(-1)
                assert torch.equal(got[:numel].nonzero().view(-1), expected) and not got[numel:].any()

masks, models, firsts, expected = [], [], [], []
sizes = (0, 0), (5, 1.0), (16384, 0.001), (16385, 0.02), (40000, 0.3), (33, 0.0), (20011, 1.0)
for numel, density in sizes:
    set_ = torch.rand(numel, generator=gen) < density
    padded = torch.nn.functional.pad(set_, (0, -numel % 32)).view(-1, 32).to(torch.int64)
    words = (padded << torch.arange(32)).sum(1).to(torch.int32)
    masks.append(words); models.append(torch.randn(numel, generator=gen).bfloat16()); firsts.append(7 * numel)
    expected.append(set_.nonzero().view(-1))
firsts[2] = 2**33 + 5  # indices are 64-bit
found, probes = kernels.expand(masks, models, firsts, torch.tensor([5, -6]))
assert probes == [5, -6]
for (indices, values), want, model, first in zip(found, expected, models, firsts, strict=True):
    assert indices.dtype == torch.int64 and torch.equal(indices, want + first)
    assert torch.equal(values, model[want])
assert kernels.expand([], [], [], torch.tensor([3])) == ([], [3])
print("kernels agree")
"""


def test_capture_and_expand_interpreted():
    triton = pytest.importorskip("triton")
    import megatron.core.optimizer.sparse_diff as package

    path = os.path.join(os.path.dirname(package.__file__), "kernels.py")
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CASES, path],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.stdout.strip() == "kernels agree", (triton.__version__, result.stderr[-3000:])
