"""Fingerprints against a twin in plain Python integers, and their shares against the whole."""

import hashlib
import struct

import pytest
import torch

from megatron.weight_sync import Box, add, fingerprint, fingerprint_boxes, total
from megatron.weight_sync.boxes import Box as SharedBox

MASK = (1 << 64) - 1
WORDS = {1: "B", 2: "H", 4: "I", 8: "Q"}


def mix(z):
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def naive(name, tensor):
    data = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
    code = WORDS[tensor.element_size()]
    key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    out = 0
    for i, (bits,) in enumerate(struct.iter_unpack("<" + code, data)):
        out += mix(((key + i * 0x9E3779B97F4A7C15) & MASK) ^ (bits * 0xD1342543DE82EF95 & MASK))
    return out & MASK


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bfloat16,
        torch.float16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.float8_e4m3fn,
        torch.bool,
    ],
)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7, 13), (3, 0, 5), (3, 5, 7, 2)], ids=str)
def test_equals_plain_integers(dtype, shape):
    torch.manual_seed(hash(shape) % 1000)
    tensor = (torch.randn(shape) * 3).to(dtype)
    assert fingerprint({"a.weight": tensor}) == {"a.weight": naive("a.weight", tensor)}


def test_chunks_add_up():
    torch.manual_seed(3)
    for shape in ((70001,), (3, 40001), (40001, 3), (2, 3, 33001)):
        tensor = torch.randn(shape).bfloat16()
        assert fingerprint([("w", tensor)])["w"] == naive("w", tensor), shape


def test_non_contiguous_counts_logical_indices():
    tensor = torch.randn(11, 6).half().t()
    assert fingerprint({"w": tensor}) == {"w": naive("w", tensor.contiguous())}


@pytest.mark.parametrize(
    ("one", "other"),
    [(0x0000, -0x8000), (0x7FC0, 0x7FC1), (0x7F80, -0x80), (0x3F80, 0x3F81)],
    ids=["signed zero", "nan payload", "inf", "ulp"],
)
def test_every_bit_counts(one, other):
    a, b = (torch.tensor([2, x, 3], dtype=torch.int16).view(torch.bfloat16) for x in (one, other))
    assert fingerprint({"w": a}) != fingerprint({"w": b})


def test_place_and_name_count():
    a = torch.tensor([1.0, 2.0, 3.0])
    assert fingerprint({"w": a}) != fingerprint({"w": a.flip(0)})
    assert total(fingerprint({"w": a, "v": a})) != total(fingerprint({"w": a, "u": a}))
    swapped = {"w": torch.zeros(3), "v": a}
    assert total(fingerprint({"w": a, "v": torch.zeros(3)})) != total(fingerprint(swapped))


def test_shares_of_boxes_add_up_to_the_whole():
    """Two ranks, each with rows of a transposed, interleaved piece and a column slice."""
    assert SharedBox is Box
    torch.manual_seed(5)
    full = torch.randn(6, 8).bfloat16()
    left = full[:, :3].t().contiguous()  # rank 0 holds columns 0-2, transposed: local [3, 6]
    right = full[:, 3:].contiguous()  # rank 1 holds columns 3-7: local [6, 5]
    one = Box("w", (3, 6), 0, (6, 1), 0, (1, 8))
    two = [Box("w", (6, 2), 0, (5, 1), 3, (8, 1)), Box("w", (6, 3), 2, (5, 1), 5, (8, 1))]
    shares = [fingerprint_boxes([(left, [one])]), fingerprint_boxes([(right, two)])]
    assert add(*shares) == fingerprint({"w": full})
    assert shares[0] != fingerprint({"w": full})


def test_a_view_into_larger_storage():
    base = torch.randn(30)
    view = base[7:19].view(3, 4)
    assert fingerprint({"w": view}) == {"w": naive("w", view)}
    assert fingerprint_boxes([(base[7:19], [Box("w", (3, 4), 0, (4, 1), 0, (4, 1))])]) == fingerprint(
        {"w": view}
    )
