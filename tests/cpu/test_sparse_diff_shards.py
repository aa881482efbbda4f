"""Bitmask, shards and their seals against a comparison of whole copies."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from megatron.core.optimizer.sparse_diff import bitmask
from megatron.core.optimizer.sparse_diff.bitmask import Bitmask
from megatron.core.optimizer.sparse_diff.shards import (
    DenseShard,
    DigestShard,
    HookedShard,
    ShadowShard,
    digest,
    seal,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def differing(a, b):
    return (bitmask.as_bits(a) != bitmask.as_bits(b)).nonzero().view(-1)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(
    numel=st.integers(0, 400),
    seed=st.integers(0, 2**31),
    density=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    dtype=st.sampled_from(DTYPES),
    steps=st.integers(1, 4),
)
def test_the_mask_is_the_exact_union_over_steps(numel, seed, density, dtype, steps):
    gen = torch.Generator().manual_seed(seed)
    target = torch.randn(numel, generator=gen).to(dtype)
    [_, mask], expected = Bitmask.zeros([45, numel], "cpu"), torch.zeros(numel, dtype=torch.bool)
    for _ in range(steps):
        before = target.clone()
        move = torch.rand(numel, generator=gen) < density
        source = torch.where(move, torch.randn(numel, generator=gen), target.float())
        mask.copy(target, source)
        assert torch.equal(target, source.to(dtype))
        expected[differing(before, target)] = True
    assert mask.indices().dtype == torch.int64
    assert torch.equal(mask.indices(), expected.nonzero().view(-1))
    assert mask.words.numel() == -(-numel // 32) and mask.canary == bitmask.CANARY


def test_long_copies_are_cut_into_chunks(monkeypatch):
    monkeypatch.setattr(bitmask, "_CHUNK", 64)
    gen = torch.Generator().manual_seed(3)
    target = torch.randn(64 * 5 + 7, generator=gen).bfloat16()
    before, source = target.clone(), target.float()
    for i in (0, 63, 64, 255, 256, 320, 326):
        source[i] += 1
    [mask] = Bitmask.zeros([target.numel()], "cpu")
    mask.copy(target, source)
    assert mask.indices().tolist() == [0, 63, 64, 255, 256, 320, 326] == differing(before, target).tolist()


def test_comparison_is_of_bit_patterns():
    nan_1, nan_2 = (torch.tensor([p], dtype=torch.int16).view(torch.bfloat16) for p in (0x7FC0, 0x7FC1))
    denormal = torch.tensor([1], dtype=torch.int16).view(torch.bfloat16)
    inf = torch.tensor([float("inf")]).bfloat16()
    zero, minus = torch.tensor([0.0]).bfloat16(), torch.tensor([-0.0]).bfloat16()
    cases = [  # before, after, changed
        (zero, minus, True),
        (minus, zero, True),
        (zero, zero, False),
        (nan_1, nan_1, False),
        (nan_1, nan_2, True),
        (inf, -inf, True),
        (inf, inf, False),
        (zero, denormal, True),
        (denormal, denormal, False),
        (denormal, zero, True),
        (nan_1, inf, True),
    ]
    target, source = (torch.cat([case[i] for case in cases]) for i in (0, 1))
    [mask] = Bitmask.zeros([len(cases)], "cpu")
    mask.copy(target, source)
    assert mask.indices().tolist() == [i for i, case in enumerate(cases) if case[2]]


def test_a_type_without_integers_of_its_size_is_an_error():
    with pytest.raises(TypeError, match=r"1, 2, 4 or 8 bytes, got torch.complex64"):
        bitmask.as_bits(torch.zeros(3, dtype=torch.complex64))


def make(kind, numel=101, start=7, end=90, seed=0):
    tensor = torch.nn.Parameter(torch.randn(numel, generator=torch.Generator().manual_seed(seed)).bfloat16())
    return tensor, kind(tensor, start, end)


def write(tensor, shard, **values):
    """Write `i=value` of the whole tensor as an optimizer would: through the shard's copy, or in place."""
    flat = shard.values()
    source = flat.float()
    for index, value in values.items():
        source[int(index[1:]) - shard.start] = value
    if isinstance(shard, HookedShard):
        shard.copy_captured(flat, source, False)
    else:
        flat.copy_(source)


def sealed(shard):
    """Indices of the changes that a seal finds; "whole" where everything counts as changed."""
    [changes] = seal([shard])
    assert shard.sealed and shard.whole == (changes is None)
    if changes is None:
        return "whole"
    assert torch.equal(changes.values, shard.tensor.detach()[changes.indices])
    return changes.indices.tolist()


@pytest.mark.parametrize("kind", [HookedShard, ShadowShard])
def test_a_seal_separates_what_was_sent_from_what_follows(kind):
    tensor, shard = make(kind)
    write(tensor, shard, i10=5.0, i50=6.0)
    assert sealed(shard) == [10, 50]
    write(tensor, shard, i50=7.0, i60=8.0)  # before the acknowledgement of the first
    shard.clear()
    assert sealed(shard) == [50, 60]
    shard.clear()
    assert sealed(shard) == []


@pytest.mark.parametrize("kind", [HookedShard, ShadowShard])
def test_a_seal_that_is_never_acknowledged_is_part_of_the_next(kind):
    tensor, shard = make(kind)
    for step in range(3):
        write(tensor, shard, **{f"i{20 + step}": 5.0})
        assert sealed(shard) == [20 + i for i in range(step + 1)]
    shard.clear()
    assert sealed(shard) == []


@pytest.mark.parametrize("kind, expected", [(HookedShard, [10]), (ShadowShard, [10]), (DigestShard, "whole")])
def test_a_value_that_returns_after_a_seal_is_part_of_the_next(kind, expected):
    """Some receiver may have applied the first seal, although its acknowledgement never came."""
    tensor, shard = make(kind)
    old = tensor[10].item()
    write(tensor, shard, i10=5.0)
    assert sealed(shard) == expected
    write(tensor, shard, i10=old)
    assert sealed(shard) == expected
    shard.clear()
    assert sealed(shard) == []


@pytest.mark.parametrize("kind", [HookedShard, ShadowShard])
def test_clear_without_a_seal_forgets_everything(kind):
    tensor, shard = make(kind)
    write(tensor, shard, i10=5.0)
    shard.clear()
    write(tensor, shard, i11=5.0)
    assert sealed(shard) == [11]


def test_a_value_that_returns_is_in_the_union_and_not_in_the_comparison():
    for kind, expected in ((HookedShard, [10]), (ShadowShard, [])):
        tensor, shard = make(kind)
        old = tensor[10].item()
        write(tensor, shard, i10=5.0)
        write(tensor, shard, i10=old)
        assert sealed(shard) == expected


def test_memory_beside_the_parameter():
    tensor, hooked = make(HookedShard, numel=4096, start=0, end=4096)
    assert hooked.nbytes == 4096 // 8 + 4  # 1/16 of bf16, and the canary
    write(tensor, hooked, i2=1.0)
    seal([hooked])
    assert hooked.nbytes == 4096 // 8 + 4  # a sync costs nothing more while no step intervenes
    write(tensor, hooked, i3=1.0)
    assert hooked.nbytes == 2 * (4096 // 8 + 4)
    hooked.clear()
    assert hooked.nbytes == 4096 // 8 + 4
    assert make(ShadowShard, numel=4096, start=0, end=4096)[1].nbytes == 4096 * 2 + 8


def test_invalid_until_an_acknowledged_sync():
    tensor, shard = make(HookedShard)
    write(tensor, shard, i10=5.0)
    shard.invalidate("weights were loaded")
    assert sealed(shard) == "whole"
    shard.invalidate("again, after the seal")
    shard.clear()
    assert shard.whole  # the second one was not part of what arrived
    seal([shard])
    shard.clear()
    assert not shard.whole


def lose(shard, masks=("bits", "sealed_bits")):
    """What torch_memory_saver leaves of a pool that slept: pages of other content."""
    if isinstance(shard, ShadowShard):
        shard._store.fill_(0)
        return
    for mask in filter(None, (getattr(shard, name) for name in masks)):
        mask.words.zero_()
        mask.canary.zero_()


@pytest.mark.parametrize("kind", [HookedShard, ShadowShard])
def test_lost_memory_makes_the_shard_whole(kind):
    tensor, shard = make(kind)
    write(tensor, shard, i10=5.0)
    lose(shard)
    assert sealed(shard) == "whole" and "memory" in shard.invalid
    shard.clear()
    write(tensor, shard, i12=5.0)
    assert sealed(shard) == [12]


def test_a_digest_finds_any_change_and_sends_the_whole():
    tensor, shard = make(DigestShard)
    assert sealed(shard) == []
    with torch.no_grad():
        tensor[20], tensor[21] = tensor[21].clone(), tensor[20].clone()  # the same values in another order
    assert sealed(shard) == "whole"
    shard.clear()
    seal([shard])
    assert not shard.whole
    with torch.no_grad():
        tensor[3] = 9.0  # outside the range
    seal([shard])
    assert not shard.whole


def test_digests_of_all_single_bit_flips_differ():
    values = torch.zeros(13, dtype=torch.bfloat16)
    seen = {int(digest(values))}
    for i in range(13):
        for bit in range(16):
            flipped = values.clone()
            flipped.view(torch.int16)[i] = -(1 << 15) if bit == 15 else 1 << bit
            seen.add(int(digest(flipped)))
    assert len(seen) == 13 * 16 + 1


def test_dense_is_always_everything():
    _, shard = make(DenseShard)
    for _ in range(2):
        assert sealed(shard) == "whole"
        shard.clear()


def test_a_rebuilt_optimizer_is_noticed():
    _, shard = make(HookedShard)
    with pytest.raises(RuntimeError, match=r"a copy of 5 elements into a shard of 83.*attach again"):
        shard.copy_captured(torch.zeros(5).bfloat16(), torch.zeros(5), False)
