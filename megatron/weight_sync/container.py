"""The byte container of weight sync: a safetensors file with a checked header and checked data (FORMAT.md).

A container is a uint8 tensor, on the device where its data is. The header is hashed (SHA-256) with its own
digest zeroed, the data section has a 64-bit checksum in the header; together they cover every byte.

The reader here is ours, not the safetensors library's, because it must work on device memory, must not copy,
and must answer any input whatever with :class:`CorruptPayload`. What the writer writes, the library reads.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron.weight_sync.errors import CorruptPayload
from megatron.weight_sync.fingerprints import MODULUS, word_sum

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_MAX_HEADER = 100_000_000  # the safetensors limit
_MAX_DIM = 16
_DIGEST = re.compile(rb'"digest":"([0-9a-f]{64})"')
_ZEROS = "0" * 64


@dataclass(frozen=True)
class Container:
    """A parsed container: ``entries`` maps names to tensors that view the container's memory."""

    metadata: dict[str, str]
    entries: dict[str, torch.Tensor]
    digest: str


def as_bytes_tensor(data) -> torch.Tensor:
    """bytes-like or uint8 tensor → uint8 [n], without a copy where the memory is writable."""
    if isinstance(data, torch.Tensor):
        if data.dtype != torch.uint8 or data.dim() != 1:
            raise ValueError(
                f"a container is a uint8 tensor of one dimension, got {data.dtype} {tuple(data.shape)}"
            )
        return data.contiguous()
    view = memoryview(data)
    if view.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)


def write(
    entries: Mapping[str, torch.Tensor], metadata: Mapping[str, str], device=None
) -> tuple[torch.Tensor, str]:
    """Build a container.

    Args:
        entries: name → contiguous tensor of a dtype that safetensors has.
        metadata: strings; ``digest`` and ``checksum`` are added.
        device: where the container lies; by default where the first entry does.

    Returns:
        (uint8 [n], the digest by which a manifest refers to it).
    """
    order = sorted(entries, key=lambda name: (-entries[name].element_size(), name))
    if device is None:
        device = entries[order[0]].device if order else "cpu"
    header: dict = {}
    offset = 0
    for name in order:
        tensor = entries[name]
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    # Checksum and digest have fixed lengths: the header's size is known before they are.
    meta = {**metadata, "checksum": "0" * 16, "digest": _ZEROS}
    size = len(_header(meta, header))
    out = torch.empty(size + offset, dtype=torch.uint8, device=device)
    data = out[size:]
    for name in order:
        begin, end = header[name]["data_offsets"]
        data[begin:end].copy_(entries[name].detach().contiguous().reshape(-1).view(torch.uint8))
    meta["checksum"] = f"{int(word_sum(data)) % MODULUS:016x}"
    meta["digest"] = hashlib.sha256(_header(meta, header)).hexdigest()
    out[:size].copy_(torch.frombuffer(bytearray(_header(meta, header)), dtype=torch.uint8))
    return out, meta["digest"]


def _header(metadata: Mapping[str, str], entries: dict) -> bytes:
    text = json.dumps(
        {"__metadata__": metadata, **entries}, separators=(",", ":"), ensure_ascii=True
    ).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _no_duplicates(pairs):
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a JSON object has a key twice")
    return out


def _no_constant(text):
    raise ValueError(f"{text} is not JSON")


def parse_json(text: str | bytes):
    """Strict JSON: no duplicate keys, no NaN; anything wrong is :class:`CorruptPayload`."""
    try:
        return json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise CorruptPayload(f"header is not valid JSON: {error}") from None


def check_shape(shape) -> tuple[int, ...]:
    """A JSON value as a tensor shape whose element count fits into int64, or :class:`CorruptPayload`."""
    good = isinstance(shape, list) and len(shape) <= _MAX_DIM
    good = good and all(type(n) is int and 0 <= n < 1 << 62 for n in shape)
    if not good or math.prod(shape) >= 1 << 60:
        raise CorruptPayload(f"not a tensor shape: {str(shape)[:80]}")
    return tuple(shape)


def read(data, verify: bool = True) -> Container:
    """Parse and verify a container.

    Args:
        data: bytes-like or uint8 [n], on any device.
        verify: also checksum the data section (the header is always checked).

    Raises:
        CorruptPayload: for any input that :func:`write` did not write.
    """
    raw = as_bytes_tensor(data)
    if raw.numel() < 8:
        raise CorruptPayload(f"container is truncated: {raw.numel()} bytes")
    length = int.from_bytes(bytes(raw[:8].tolist()), "little")
    if length > min(_MAX_HEADER, raw.numel() - 8):
        raise CorruptPayload(f"container is truncated: header of {length} bytes in {raw.numel()}")
    head = raw[: 8 + length].cpu().numpy().tobytes()
    found = _DIGEST.findall(head)
    if len(found) != 1:
        raise CorruptPayload("container has no header digest: not a weight-sync container, or damaged")
    at = _DIGEST.search(head).start(1)
    if hashlib.sha256(head[:at] + _ZEROS.encode() + head[at + 64 :]).hexdigest() != found[0].decode():
        raise CorruptPayload("header digest does not match: the container was altered or truncated")
    header = parse_json(head[8:])
    if not isinstance(header, dict):
        raise CorruptPayload("header is not a JSON object")
    metadata = header.pop("__metadata__", None)
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CorruptPayload("header has no metadata of strings")
    body = raw[8 + length :]
    entries = _entries(header, body)
    if verify and metadata.get("checksum") != f"{int(word_sum(body)) % MODULUS:016x}":
        raise CorruptPayload("data checksum does not match: the container was altered")
    return Container(metadata, entries, found[0].decode())


def _entries(header: dict, body: torch.Tensor) -> dict[str, torch.Tensor]:
    spans = []
    for name, entry in header.items():
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise CorruptPayload(f"entry {name[:80]!r} is malformed")
        offsets = entry["data_offsets"]
        if not isinstance(entry["dtype"], str) or entry["dtype"] not in DTYPES:
            raise CorruptPayload(f"entry {name[:80]!r} has an unknown dtype")
        if not isinstance(offsets, list) or len(offsets) != 2 or any(type(n) is not int for n in offsets):
            raise CorruptPayload(f"entry {name[:80]!r} has no offsets")
        spans.append((offsets[0], offsets[1], name, DTYPES[entry["dtype"]], check_shape(entry["shape"])))
    spans.sort(key=lambda span: span[:2])
    out, at = {}, 0
    for begin, end, name, dtype, shape in spans:
        if begin != at or end < begin or math.prod(shape) * dtype.itemsize != end - begin:
            raise CorruptPayload(
                f"entry {name[:80]!r} does not fit: bytes {begin} to {end} for {dtype} {shape}"
            )
        if end > body.numel():
            raise CorruptPayload(
                f"container is truncated: {body.numel()} bytes of data, {name[:80]!r} ends at {end}"
            )
        piece = body[begin:end]
        if piece.storage_offset() % dtype.itemsize or piece.data_ptr() % dtype.itemsize:
            piece = piece.clone()
        out[name] = piece.view(dtype).view(shape)
        at = end
    if at != body.numel():
        raise CorruptPayload(f"container has {body.numel() - at} bytes after its last entry")
    return out
