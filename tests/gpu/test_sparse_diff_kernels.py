"""The capture and expansion kernels on a GPU: bit patterns of every kind, odd sizes, indices past 2^31."""

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def words_of(numel):
    return torch.zeros(-(-numel // 32), dtype=torch.int32, device="cuda")


def set_bits(words, numel):
    lanes = torch.arange(32, device=words.device)
    return ((words[:, None] >> lanes) & 1).view(-1)[:numel].nonzero().view(-1)


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [1, 31, 33, 4097, 100_003])
def test_capture_equals_copy_for_all_bit_patterns(numel, dtype, skip):
    from megatron.core.optimizer.sparse_diff import kernels

    gen = torch.Generator(device="cuda").manual_seed(numel)

    def random_bits(low, high, kind):
        return torch.randint(low, high, (numel,), generator=gen, device="cuda").to(kind)

    model = random_bits(-(2**15), 2**15, torch.int16).view(
        dtype
    )  # NaN payloads, infinities, denormals, zeros
    main = random_bits(-(2**31), 2**31, torch.int32).view(torch.float32)
    keep = torch.rand(numel, generator=gen, device="cuda") < 0.9
    main = torch.where(keep, model.float(), main)
    before, plain = model.clone(), model.clone()
    plain.copy_(main)
    words = words_of(numel)
    kernels.capture(model, main, words, skip)
    assert torch.equal(model.view(torch.int16), plain.view(torch.int16))
    expected = (before.view(torch.int16) != plain.view(torch.int16)).nonzero().view(-1)
    assert torch.equal(set_bits(words, numel), expected)


@pytest.mark.parametrize("density", [0.0, 0.001, 0.01, 0.5, 1.0])
def test_expand_equals_nonzero(density):
    from megatron.core.optimizer.sparse_diff import kernels

    gen = torch.Generator(device="cuda").manual_seed(5)
    masks, models, firsts, expected = [], [], [], []
    for numel in (0, 7, 16384, 16385, 1_000_003):
        chosen = torch.rand(numel, generator=gen, device="cuda") < density
        padded = torch.nn.functional.pad(chosen, (0, -numel % 32)).view(-1, 32).long()
        masks.append((padded << torch.arange(32, device="cuda")).sum(1).to(torch.int32))
        models.append(torch.randn(numel, generator=gen, device="cuda").bfloat16())
        firsts.append(3 * numel)
        expected.append(chosen.nonzero().view(-1))
    found, probes = kernels.expand(masks, models, firsts, torch.tensor([7], device="cuda"))
    assert probes == [7]
    for (indices, values), want, model, first in zip(found, expected, models, firsts, strict=True):
        assert torch.equal(indices, want + first) and torch.equal(values, model[want])


def test_more_than_two_to_the_31_elements():
    from megatron.core.optimizer.sparse_diff import kernels

    numel = 2**31 + 77
    if torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs 20 GiB")
    model = torch.zeros(numel, dtype=torch.bfloat16, device="cuda")
    main = torch.zeros(numel, dtype=torch.float32, device="cuda")
    places = [0, 31, 2**31 - 1, 2**31, 2**31 + 1, numel - 1]
    main[places] = torch.arange(1.0, 7.0, device="cuda")
    words = words_of(numel)
    kernels.capture(model, main, words)
    [(indices, values)], _ = kernels.expand(
        [words], [model], [0], torch.zeros(1, dtype=torch.int64, device="cuda")
    )
    assert indices.tolist() == places and values.tolist() == [1, 2, 3, 4, 5, 6]


def test_a_shard_on_the_device_uses_the_kernels():
    from megatron.core.optimizer.sparse_diff.shards import HookedShard, ShadowShard, seal

    tensors = [torch.nn.Parameter(torch.randn(4099, device="cuda").bfloat16()) for _ in range(2)]
    hooked, shadow = HookedShard(tensors[0], 3, 4000), ShadowShard(tensors[1], 3, 4000)
    for step in range(2):
        base = [t.detach().clone() for t in tensors]
        source = hooked.values().float()
        source[step::100] += 1
        hooked.copy_captured(hooked.values(), source.cpu().pin_memory() if step else source, True)
        shadow.values()[step::50] += 1
        for tensor, before, changes in zip(tensors, base, seal([hooked, shadow]), strict=True):
            expected = (before.view(torch.int16) != tensor.detach().view(torch.int16)).nonzero().view(-1)
            assert torch.equal(changes.indices, expected) and expected.numel() > 30
            assert torch.equal(changes.values, tensor.detach()[expected])
        hooked.clear()
        shadow.clear()
