"""Encodings of one tensor's changes: flat int64 indices, strictly rising, and the new values' bit patterns.

``dense``  the whole tensor, in its own dtype and shape;
``raw``    ``index`` (int32, or int64 from 2**31 elements on) and ``value``.

An encoder turns (index, bits) into named parts; a decoder turns parts into (index, bits) and answers any
parts whatever with a result that fits the tensor or with :class:`CorruptPayload`.
"""

from __future__ import annotations

import torch

from megatron.weight_sync.errors import CorruptPayload

_INT = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_INT32_LIMIT = 1 << 31

ENCODINGS = ("raw",)


def raw_nbytes(count: int, numel: int, itemsize: int) -> int:
    return count * ((4 if numel < _INT32_LIMIT else 8) + itemsize)


def encode_raw(index: torch.Tensor, bits: torch.Tensor, numel: int) -> dict[str, torch.Tensor]:
    return {"index": index.to(torch.int32 if numel < _INT32_LIMIT else torch.int64), "value": bits}


def decode_raw(
    parts: dict[str, torch.Tensor], numel: int, itemsize: int
) -> tuple[torch.Tensor, torch.Tensor]:
    index, value = _parts(parts, "index", "value")
    if index.dtype != (torch.int32 if numel < _INT32_LIMIT else torch.int64) or index.dim() != 1:
        raise CorruptPayload(f"raw index has dtype {index.dtype} for {numel} elements")
    if value.dtype != _INT[itemsize] or value.shape != index.shape:
        raise CorruptPayload(f"raw values are {value.dtype} {tuple(value.shape)} for {index.numel()} indices")
    return check_index(index.to(torch.int64), numel), value


def check_index(index: torch.Tensor, numel: int) -> torch.Tensor:
    """Indices must rise strictly and stay inside the tensor: then no element is written twice."""
    if index.numel():
        if int(index[0]) < 0 or int(index[-1]) >= numel:
            raise CorruptPayload(f"an index lies outside a tensor of {numel} elements")
        if index.numel() > 1 and not bool((index[1:] > index[:-1]).all()):
            raise CorruptPayload("indices do not rise strictly")
    return index


def _parts(parts: dict[str, torch.Tensor], *names: str) -> list[torch.Tensor]:
    if set(parts) != set(names):
        raise CorruptPayload(f"expected the parts {sorted(names)}, got {sorted(parts)}")
    return [parts[name] for name in names]


def decode(encoding: str, parts: dict[str, torch.Tensor], numel: int, itemsize: int, record: dict):
    """Parts of one tensor → (index int64 [n], bits [n]). ``record`` is the tensor's entry in the bucket
    header."""
    if encoding == "raw":
        return decode_raw(parts, numel, itemsize)
    raise CorruptPayload(f"unknown encoding {encoding[:40]!r}")


def encode_smallest(
    index: torch.Tensor, bits: torch.Tensor, numel: int, allowed: tuple[str, ...]
) -> tuple[str, dict[str, torch.Tensor], dict]:
    """The smallest of the ``allowed`` sparse encodings: (encoding, parts, extra header fields)."""
    return "raw", encode_raw(index, bits, numel), {}
