"""The Triton kernels, interpreted on the CPU, against plain comparisons of whole copies."""

import os
import subprocess
import sys

import pytest

# Triton reads TRITON_INTERPRET when it is imported, so the cases run in a process of their own.
CASES = """
import torch
import megatron.cpu_runtime
megatron.cpu_runtime.install()
from megatron.core.optimizer.sparse_diff import copies_together, kernels, shards

gen = torch.Generator().manual_seed(11)
LANES = torch.arange(32)


def random(numel, dtype):
    return torch.randn(numel, generator=gen).to(dtype)


def bits(words, numel):
    set_ = ((words[:, None] >> LANES) & 1).view(-1).bool()
    assert not set_[numel:].any()
    return set_[:numel]


def pairs(density):
    '''Models and mains of many sizes, types and alignments; in memory with other values around them.'''
    for numel in (0, 1, 7, 8, 9, 31, 33, 4096, 4097, 8192, 9001, 16392):
        for dtype in (torch.bfloat16, torch.float16):
            for of in (torch.float32, dtype):
                for shift in (0, 3):
                    around = random(numel + 5, dtype), random(numel + 5, of)
                    model, main = (tensor[shift : shift + numel] for tensor in around)
                    # representable: the interpreter truncates where the hardware rounds to nearest even
                    stay = torch.rand(numel, generator=gen) >= density
                    main.copy_(torch.where(stay, model, random(numel, dtype)))
                    yield around[0], model, main


for density in (0.0, 0.01, 1.0):
    arounds, models, mains = zip(*pairs(density))
    masks = []
    for model in models:
        words = torch.randint(0, 4, (-(-model.numel() // 32),), generator=gen, dtype=torch.int32)
        if model.numel() % 32 == 1:
            words[-1:] &= 1
        masks.append(words)
    befores = [(around.clone(), model.clone(), words.clone())
               for around, model, words in zip(arounds, models, masks)]
    launches, real = [], kernels._capture_kernel
    class Counted:
        def __getitem__(self, grid):
            launches.append(grid)
            return real[grid]
    kernels._capture_kernel = Counted()
    kernels.capture(models, mains, masks, tile=128)
    kernels._capture_kernel = real
    assert len(launches) == 2 * 2 * 2  # types of the model and main, aligned or not
    for around, model, main, words, (around_before, before, was) in zip(
        arounds, models, mains, masks, befores, strict=True
    ):
        numel = model.numel()
        assert torch.equal(model, main.to(model.dtype))
        changed = before.view(torch.int16) != model.view(torch.int16)
        assert torch.equal(bits(words, numel), bits(was, numel) | changed)
        start = model.storage_offset()
        outside = torch.ones(around.numel(), dtype=torch.bool)
        outside[start : start + numel] = False
        assert torch.equal(around[outside], around_before[outside])
kernels.capture([], [], [])

sizes = [(0, 0), (5, 1.0), (16384, 0.001), (16385, 0.02), (40000, 0.3), (33, 0.0), (20011, 1.0), (7, 0.5)]
for dtypes in ((torch.bfloat16,), (torch.bfloat16, torch.float32, torch.uint8, torch.int64)):
    for most in (0.02, 1.0):  # the second kernel runs from a density on
        masks, models, firsts, expected = [], [], [], []
        for i, (numel, density) in enumerate(s for s in sizes if s[1] <= most):
            set_ = torch.rand(numel, generator=gen) < density
            set_[2000:2400] |= numel > 20000  # dense in one place
            padded = torch.nn.functional.pad(set_, (0, -numel % 32)).view(-1, 32).to(torch.int64)
            masks.append((padded << LANES).sum(1).to(torch.int32))
            models.append((random(numel + 1, torch.float32) * 100).to(dtypes[i % len(dtypes)])[1:])
            firsts.append(7 * numel)
            expected.append(set_.nonzero().view(-1))
        firsts[1] = 2**33 + 5  # indices are 64-bit
        found, probes = kernels.expand(masks, models, firsts, torch.tensor([5, -6]))
        assert probes == [5, -6] and len(found) == len(masks) > 3
        for (indices, values), want, model, first in zip(found, expected, models, firsts, strict=True):
            assert indices.dtype == torch.int64 and torch.equal(indices, want + first)
            assert values.dtype == model.dtype and torch.equal(values, model[want])
        storages = {(v.dtype, v.untyped_storage().data_ptr()) for _, v in found if v.numel()}
        assert len(storages) == len({dtype for dtype, _ in storages})
assert kernels.expand([], [], [], torch.tensor([3])) == ([], [3])
[(indices, values)], _ = kernels.expand([masks[0] * 0], [models[0]], [0], torch.tensor([3]))
assert indices.numel() == values.numel() == 0

# memory that was lost may have bits past the end of the tensor: nothing is read there
model = random(40, torch.bfloat16)
[(indices, _)], _ = kernels.expand([torch.full((2,), -1, dtype=torch.int32)], [model], [0], torch.tensor([3]))
assert indices.tolist()[:40] == list(range(40)) and indices.numel() in (40, 64)

# the whole path: shards that ask together, as on a GPU
shards._Together.fits = staticmethod(lambda values: values.is_contiguous())
tensors = [torch.nn.Parameter(random(n, torch.bfloat16)) for n in (4099, 33, 5000)]
hooked = [shards.HookedShard(t, 3, t.numel() - 2) for t in tensors]
for step in range(4):
    base = [t.detach().clone() for t in tensors]
    sources = [shard.values().float() for shard in hooked]
    for source in sources:
        source[step::10] += 1

    @copies_together
    def copy_all():
        for shard, source in zip(hooked, sources):
            shard.copy_captured(shard.values(), source.bfloat16().float(), False)
        assert torch.equal(tensors[0].detach(), base[0])  # later, together

    copy_all()
    assert len({shard.bits.words.untyped_storage().data_ptr() for shard in hooked}) == 1
    if step == 1:
        continue  # two steps to a sync
    if step == 2:
        base = kept
    for tensor, before, changes in zip(tensors, base, shards.seal(hooked), strict=True):
        union = (before.view(torch.int16) != tensor.detach().view(torch.int16)).nonzero().view(-1)
        assert torch.equal(changes.indices, union) and union.numel() > 2
        assert torch.equal(changes.values, tensor.detach()[union])
    kept = [t.detach().clone() for t in tensors]
    for shard in hooked:
        shard.clear()
print("kernels agree")
"""


def test_capture_and_expand_interpreted():
    triton = pytest.importorskip("triton")
    import megatron.core

    tree = os.path.dirname(os.path.dirname(os.path.dirname(megatron.core.__file__)))
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CASES],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": tree},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.stdout.strip() == "kernels agree", (triton.__version__, result.stderr[-3000:])
