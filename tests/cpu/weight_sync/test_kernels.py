"""The Triton kernels, interpreted on the CPU, against the plain versions; and a receiver that uses them."""

import pytest
import torch

from tests.cpu import interpreted


@interpreted.outside
def test_kernels_interpreted():
    interpreted.run(__file__, 21)


def boxes(numel_rows=7, cols=13):
    from megatron.weight_sync import Box

    r, c = numel_rows, cols
    return {
        "whole": Box("w", (r * c,), 0, (1,), 0, (1,)),
        "rows": Box("w", (3, c), 2 * c, (c, 1), c, (c, 1)),
        "columns": Box("w", (r, 4), 0, (c, 1), 5, (c, 1)),
        "transposed": Box("w", (c, r), 0, (r, 1), 0, (1, c)),
        "interleaved": Box("w", (3, 2, 5), 1, (30, 10, 2), 0, (13, 6, 1)),
        "four loops": Box("w", (2, 2, 2, 3), 0, (30, 12, 5, 1), 1, (40, 17, 7, 2)),
        "one": Box("w", (1,), 5, (1,), 9, (1,)),
        "none": Box("w", (0,), 0, (1,), 0, (1,)),
        "beyond 2**31": Box("w", (r, 4), 0, (c, 1), 1 << 33, (1 << 32, 3)),
    }


@interpreted.inside
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.float64], ids=str)
def test_box_sums(dtype):
    from megatron.weight_sync import kernels
    from megatron.weight_sync.fingerprints import box_sum

    torch.manual_seed(1)
    live = (torch.randn(7 * 13 + 40) * 9).to(dtype)
    pieces = [(live, box) for box in boxes().values()]
    assert all(kernels.few_loops(box) for _, box in pieces)
    sums = kernels.BoxSums(pieces)
    expected = [int(box_sum(*piece)) for piece in pieces]
    assert sums().tolist() == expected
    live[3] += 1  # described once, computed again
    assert sums().tolist() == [int(box_sum(*piece)) for piece in pieces] != expected


@interpreted.inside
@pytest.mark.parametrize("shape", [(9001,), (3, 4097), (700, 65), (130, 3, 5)], ids=str)
def test_box_sums_of_many_tiles(shape):
    from megatron.weight_sync import Box, kernels
    from megatron.weight_sync.fingerprints import tensor_sum

    torch.manual_seed(2)
    tensor = torch.randn(shape).bfloat16()
    strided = torch.zeros(*shape[:-1], shape[-1] + 3).bfloat16()
    strided[..., :-3] = tensor
    box = Box("w", shape, 0, strided.stride(), 0, tensor.stride())
    assert kernels.BoxSums([(strided.view(-1), box)])().tolist() == [int(tensor_sum("w", tensor))]


@interpreted.inside
def test_too_many_loops_take_the_slow_way():
    from megatron.weight_sync import Box, fingerprint_boxes, kernels
    from megatron.weight_sync.fingerprints import box_sum

    live = torch.randn(400)
    box = Box("w", (2, 2, 2, 2, 2), 0, (170, 70, 30, 10, 1), 0, (300, 100, 40, 15, 2))
    assert not kernels.few_loops(box)
    assert fingerprint_boxes([(live, [box])])["w"] == int(box_sum(live, box)) % (1 << 64)


@interpreted.inside
@pytest.mark.parametrize("nbytes", [8, 64, 4096 * 8 + 8, 70001 * 8])
def test_words(nbytes):
    from megatron.weight_sync import kernels
    from megatron.weight_sync.fingerprints import G, _sum_affine

    data = torch.randint(
        0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(nbytes)
    )
    assert int(kernels.words_sum(data, nbytes)) == int(
        _sum_affine(data.view(torch.int64), nbytes, (G,), 4096)
    )


@interpreted.inside
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8], ids=str)
@pytest.mark.parametrize("relative", [False, True])
def test_swap(dtype, relative):
    from megatron.weight_sync import codec, kernels
    from megatron.weight_sync.fingerprints import bits_of

    if relative and dtype == torch.uint8:
        pytest.skip("integers have no units in the last place")
    torch.manual_seed(3)
    changes, check = [], []
    for k, box in enumerate(boxes(700, 13).values()):
        if not box.numel:
            continue
        live = (torch.randn(700 * 13 + 40) * 9).to(dtype)
        base = 1000 * k
        top = 1 + box.full_offset + sum((n - 1) * s for n, s in zip(box.size, box.full_stride, strict=True))
        index = torch.unique(torch.randint(0, top, (3000,)))
        inside, position = box.map_to_local(index)
        extra = torch.tensor([top + 5])  # not in the box
        index = torch.cat([index, extra])
        inside = torch.cat([inside, torch.tensor([False])])
        bits = torch.randint(-90, 90, index.shape).to(bits_of(live).dtype)
        changes.append(kernels.Change(live, box, index + base, bits, base))
        expected = live.clone()
        flat = bits_of(expected)
        flat[position] = codec.ulp_apply(flat[position], bits[inside]) if relative else bits[inside]
        check.append((live, live.clone(), expected))
    swap = kernels.Swap(changes, relative)
    swap.store()
    assert all(torch.equal(bits_of(live), bits_of(new)) for live, _, new in check)
    assert any(not torch.equal(bits_of(old), bits_of(new)) for _, old, new in check)
    swap.put_back()
    assert all(torch.equal(bits_of(live), bits_of(old)) for live, old, _ in check)


@interpreted.inside
@pytest.mark.parametrize("encodings", [("raw",), ("packed",), ("entropy",)], ids="+".join)
def test_a_receiver_with_kernels(tiny, tensors_of, bits, encodings):
    """Dense, deltas, a refused update that is taken back; tied weights and a shape of no elements
    included."""
    from megatron import weight_sync as ws
    from megatron.weight_sync.fingerprints import bits_of, kernels_for

    tensors, module = tensors_of(tiny(1)), tiny(2)
    assert kernels_for(module.proj.weight) is not None
    receiver, sender = ws.ModuleReceiver(module), ws.Sender("m", lineage=1, encodings=encodings)
    sender.register("r")
    gen = torch.Generator().manual_seed(4)
    for k in range(5):
        old = {n: t.clone() for n, t in tensors.items()}
        for tensor in tensors.values():
            hit = torch.rand(tensor.shape, generator=gen) < 0.2
            tensor[hit] = torch.randn(int(hit.sum()), generator=gen).to(tensor.dtype)
        wrong = k == 3
        for attempt in (True, False) if wrong else (False,):
            update = sender.begin()
            for name, tensor in tensors.items():
                if update.dense:
                    update.add_dense(name, tensor)
                    continue
                index = (bits_of(tensor) != bits_of(old[name])).view(-1).nonzero().view(-1)
                values = tensor.view(-1)[index] + (1 if attempt else 0)
                update.add_delta(name, index, values, tensor.shape, old=old[name].view(-1)[index])
            payload = update.finish(ws.fingerprint(tensors))
            if attempt:
                before = bits(module)
                with pytest.raises(ws.FingerprintMismatch):
                    receiver.apply(payload)
                assert all(torch.equal(before[n], b) for n, b in bits(module).items())
                sender.version -= 1
                sender._published.pop(sender.version + 1)
            else:
                assert sender.acknowledge("r", receiver.apply(payload))
        assert all(torch.equal(bits_of(t), bits_of(module.state_dict()[n])) for n, t in tensors.items())
    assert module.head.weight is module.embed.weight
