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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [1, 31, 33, 4097, 100_003])
def test_capture_equals_copy_for_all_bit_patterns(numel, dtype):
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
    kernels.capture([model], [main], [words])
    assert torch.equal(model.view(torch.int16), plain.view(torch.int16))
    expected = (before.view(torch.int16) != plain.view(torch.int16)).nonzero().view(-1)
    assert torch.equal(set_bits(words, numel), expected)


@pytest.mark.parametrize("density", [0.0, 0.02, 1.0])
def test_many_tensors_of_all_sizes_types_and_alignments(density):
    """In one launch for each kind, into memory with other values around every tensor."""
    from megatron.core.optimizer.sparse_diff import kernels

    gen = torch.Generator(device="cuda").manual_seed(3)

    def random_bits(numel, dtype):
        kind = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
        limit = 1 << (8 * dtype.itemsize - 1)
        return torch.randint(-limit, limit, (numel,), generator=gen, device="cuda").to(kind).view(dtype)

    arounds, models, mains, masks = [], [], [], []
    for numel in (0, 1, 7, 8, 31, 33, 4096, 8191, 8192, 8193, 100_000, 100_003, 3_000_008):
        for dtype in (torch.bfloat16, torch.float16):
            for of in (torch.float32, dtype):
                for shift in (0, 3, 8):
                    around, source = random_bits(numel + 11, dtype), random_bits(numel + 11, of)
                    model, main = around[shift : shift + numel], source[shift : shift + numel]
                    stay = torch.rand(numel, generator=gen, device="cuda") >= density
                    main.copy_(torch.where(stay, model.to(of), main))
                    arounds.append(around)
                    models.append(model)
                    mains.append(main)
                    masks.append(words_of(numel))
                    masks[-1].copy_(random_bits(2 * masks[-1].numel(), torch.bfloat16).view(torch.int32) & 1)
    befores = [(around.clone(), words.clone()) for around, words in zip(arounds, masks, strict=True)]
    kernels.capture(models, mains, masks)
    plain = [around.clone() for around, _ in befores]
    firsts = list(range(len(models)))
    found, _ = kernels.expand(masks, models, firsts, torch.zeros(1, dtype=torch.int64, device="cuda"))
    for i, (model, main, (around_before, was), copy) in enumerate(
        zip(models, mains, befores, plain, strict=True)
    ):
        numel, start = model.numel(), model.storage_offset()
        copy[start : start + numel].copy_(main)
        assert torch.equal(arounds[i].view(torch.int16), copy.view(torch.int16)), i
        before = around_before[start : start + numel].view(torch.int16)
        expected = before != model.view(torch.int16)
        expected[set_bits(was, numel)] = True
        expected = expected.nonzero().view(-1)
        assert torch.equal(set_bits(masks[i], numel), expected), i
        indices, values = found[i]
        assert torch.equal(indices, expected + i), i
        assert torch.equal(values.view(torch.int16), model[expected].view(torch.int16)), i


def test_the_next_work_on_the_stream_sees_the_copies():
    """The kernel is queued like the plain copies: nobody has to wait, and tables live long enough."""
    from megatron.core.optimizer.sparse_diff import copies_together, sparse_diff_context
    from megatron.core.optimizer.sparse_diff.context import bind
    from megatron.core.optimizer.sparse_diff.shards import HookedShard, seal

    params = [
        torch.nn.Parameter(torch.zeros(n, dtype=torch.bfloat16, device="cuda")) for n in (5, 4096, 70_001)
    ]
    mains = [torch.zeros(param.numel(), device="cuda") for param in params]
    managers = [HookedShard(param, 0, param.numel()) for param in params]
    for param, main, manager in zip(params, mains, managers, strict=True):
        bind(manager, param, main)
    seen = [torch.empty(20, param.numel(), dtype=torch.bfloat16, device="cuda") for param in params]

    @copies_together
    def copy_all():
        for param, main in zip(params, mains, strict=True):
            with sparse_diff_context(param.detach().view(-1)[:], main) as copy:
                copy()

    copy_all()
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)  # the host runs ahead of all of this
            for step in range(20):
                for main in mains:
                    main.fill_(step + 1.0)
                copy_all()
                for row, param in zip(seen, params, strict=True):
                    row[step].copy_(param.detach())
        torch.cuda.synchronize()
        expected = torch.arange(1.0, 21.0, device="cuda")[:, None]
        assert all(bool((rows == expected).all()) for rows in seen)
        for param, changes in zip(params, seal(managers), strict=True):
            assert torch.equal(changes.indices, torch.arange(param.numel(), device="cuda"))
            assert bool((changes.values == 20).all())
        for manager in managers:
            manager.clear()


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("density", [0.0, 0.001, 0.01, 0.5, 1.0])
def test_expand_equals_nonzero(density, mixed):
    from megatron.core.optimizer.sparse_diff import kernels

    gen = torch.Generator(device="cuda").manual_seed(5)
    masks, models, firsts, expected = [], [], [], []
    for i, numel in enumerate((0, 7, 16384, 16385, 1_000_003, 4096, 500_000)):
        chosen = torch.rand(numel, generator=gen, device="cuda") < (0.001 if i == 6 else density)
        chosen[1000:1500] |= numel > 20_000  # dense in one place
        padded = torch.nn.functional.pad(chosen, (0, -numel % 32)).view(-1, 32).long()
        masks.append((padded << torch.arange(32, device="cuda")).sum(1).to(torch.int32))
        kind = (torch.bfloat16, torch.float32, torch.uint8, torch.int64)[i % 4 if mixed else 0]
        models.append((50 * torch.randn(numel + 1, generator=gen, device="cuda")).abs().to(kind)[1:])
        firsts.append(3 * numel)
        expected.append(chosen.nonzero().view(-1))
    found, probes = kernels.expand(masks, models, firsts, torch.tensor([7], device="cuda"))
    assert probes == [7]
    for (indices, values), want, model, first in zip(found, expected, models, firsts, strict=True):
        assert torch.equal(indices, want + first) and torch.equal(values, model[want])


@pytest.mark.xdist_group("memory")
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
    small = torch.zeros(100, dtype=torch.bfloat16, device="cuda")  # before and after it: blocks far along
    ones, small_words = torch.ones(100, device="cuda"), [words_of(100), words_of(100)]
    others = [small, small.clone()]
    masks = [small_words[0], words, small_words[1]]
    models = [others[0], model, others[1]]
    kernels.capture(models, [ones, main, ones], masks)
    probe = torch.zeros(1, dtype=torch.int64, device="cuda")
    before, (indices, values), after = kernels.expand(masks, models, [0, 2**33, 0], probe)[0]
    assert (indices - 2**33).tolist() == places and values.tolist() == [1, 2, 3, 4, 5, 6]
    for found in (before, after):
        assert found[0].tolist() == list(range(100)) and bool((found[1] == 1).all())
    words.zero_()
    words[-4:] = -1  # a block far along
    words[-1] = (1 << (numel % 32)) - 1
    [(indices, values)], _ = kernels.expand([words], [model], [0], probe)
    expected = torch.arange(numel - 96 - numel % 32, numel, device="cuda")
    assert torch.equal(indices, expected) and torch.equal(values, model[expected])
    del main, ones, indices, values
    words.fill_(-1)
    words[-1] = (1 << (numel % 32)) - 1
    if torch.cuda.mem_get_info()[0] > 60 * 2**30:
        [(indices, values)], _ = kernels.expand([words], [model], [5], probe)
        assert torch.equal(values.view(torch.int16), model.view(torch.int16)) and indices.numel() == numel
        assert int(indices[0]) == 5 and bool((indices[1:] - indices[:-1] == 1).all())


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
