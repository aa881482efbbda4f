"""Encodings of changed elements.

The tensors of a bucket that share a dtype form *groups*. A group is its tensors laid end to end; its changes
are one list of flat indices into that, strictly rising, and one value each. So a model of many small tensors
costs no more than one of few large ones, and every step below is one pass over all changes.

``raw``      index (int32, or int64 where the group has 2**31 elements or more) and value
``packed``   the gaps between indices in a ladder of widths, and value
``entropy``  the same gaps, and either the distance in units in the last place from the old value or the new
             value, split into byte planes and compressed into zstandard frames (on a GPU by nvCOMP, if it is
             installed)

A *ladder* codes unsigned integers: each goes into the first level if it is smaller than that level's largest
number; otherwise that largest number stands there, and the integer goes on to the next level.

Encoders turn tensors into named parts. Decoders answer any parts whatever with a result that fits the group,
or with :class:`CorruptPayload`; they allocate in proportion to the changes, whose number is bounded before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from megatron.weight_sync import gpu_zstd
from megatron.weight_sync.errors import CorruptPayload, UnsupportedLayout

ENCODINGS = ("raw", "packed", "entropy")

INT = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
INT32_LIMIT = 1 << 31
_NEXT = {4: 16, 8: 16, 16: 64}
_LEVEL_DTYPE = {8: torch.uint8, 16: torch.uint16, 64: torch.int64}
_ZSTD_LEVEL = 1  # the streams have no repeats to find, only skewed symbols


# ---- units in the last place -------------------------------------------------------------------------------


def has_ulp(dtype: torch.dtype) -> bool:
    return dtype in (torch.bfloat16, torch.float16, torch.float32)


def _monotone(bits: torch.Tensor) -> torch.Tensor:
    """Sign-magnitude bit patterns ↔ integers in the order of the floats; its own inverse. -0.0 comes just
    below 0.0, infinities just beyond the largest numbers, NaNs beyond them."""
    largest = torch.iinfo(bits.dtype).max
    return bits ^ ((bits >> (8 * bits.element_size() - 1)) & largest)


def ulp_between(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Signed distance from ``old`` to ``new`` bits, modulo 2**width; same dtype as the bits."""
    return _monotone(new) - _monotone(old)


def ulp_apply(old: torch.Tensor, distance: torch.Tensor) -> torch.Tensor:
    """The bits that lie ``distance`` from ``old``: the inverse of :func:`ulp_between`."""
    return _monotone(_monotone(old) + distance)


def _zigzag(x: torch.Tensor) -> torch.Tensor:
    x = x.to(torch.int64)
    return (x << 1) ^ (x >> 63)


def _unzigzag(x: torch.Tensor) -> torch.Tensor:
    return (x >> 1) ^ -(x & 1)


# ---- ladders -----------------------------------------------------------------------------------------------


def _climb(x: torch.Tensor, start: int) -> dict[int, torch.Tensor]:
    """Level width → what stands there, int64."""
    levels, width = {}, start
    while width != 64:
        largest = (1 << width) - 1
        levels[width] = x.clamp(max=largest)
        x = x[x >= largest]
        if not x.numel():
            return levels
        width = _NEXT[width]
    levels[64] = x
    return levels


def _descend(read_level, start: int, count: int) -> torch.Tensor:
    """``read_level(width, count)`` → int64 [count]; the inverse of :func:`_climb`."""
    x = read_level(start, count)
    if start == 64:
        if count and bool((x < 0).any()):
            raise CorruptPayload("a number in a ladder is negative")
        return x
    escaped = x == (1 << start) - 1
    beyond = int(escaped.sum())
    if beyond:
        x[escaped] = _descend(read_level, _NEXT[start], beyond)
    return x


def _gaps(index: torch.Tensor) -> torch.Tensor:
    gap = index.clone()
    gap[1:] -= index[:-1] + 1
    return gap


def _index(gap: torch.Tensor, numel: int) -> torch.Tensor:
    if gap.numel() and (int(gap.max()) >= numel or float(gap.double().sum()) >= float(1 << 61)):
        raise CorruptPayload(f"an index lies outside a group of {numel} elements")
    index = (gap + 1).cumsum(0) - 1
    if index.numel() and int(index[-1]) >= numel:
        raise CorruptPayload(f"an index lies outside a group of {numel} elements")
    return index


def check_index(index: torch.Tensor, numel: int) -> torch.Tensor:
    """Indices must rise strictly and stay inside: then no element is written twice."""
    if index.numel():
        if int(index[0]) < 0 or int(index[-1]) >= numel:
            raise CorruptPayload(f"an index lies outside a group of {numel} elements")
        if index.numel() > 1 and not bool((index[1:] > index[:-1]).all()):
            raise CorruptPayload("indices do not rise strictly")
    return index


# ---- choosing ----------------------------------------------------------------------------------------------


def gap_counts(indices: list[torch.Tensor]) -> list[tuple[int, int]]:
    """For each tensor's indices, how many gaps do not fit into 8 and into 16 bits; one synchronisation for
    all."""
    device, sizes = indices[0].device, [index.numel() for index in indices]
    counts = torch.tensor(sizes, device=device)
    owner = torch.arange(len(sizes), device=device).repeat_interleave(counts, output_size=sum(sizes))
    index = torch.cat(indices)
    gap = index.clone()
    gap[1:] -= torch.where(owner[1:] == owner[:-1], index[:-1] + 1, 0)
    ends = counts.cumsum(0)
    beyond = []
    for width in (8, 16):
        running = torch.nn.functional.pad((gap >= (1 << width) - 1).cumsum(0), (1, 0))
        beyond.append(running[ends] - running[ends - counts])
    return list(zip(*torch.stack(beyond).tolist(), strict=True))


def estimate(count: int, numel: int, itemsize: int, encodings: Iterable[str]) -> float:
    """About how many bytes ``count`` changes of a tensor of ``numel`` elements take in the best of some
    encodings, before the changes themselves are known; for entropy, with values that do not compress."""
    sizes = []
    if "raw" in encodings:
        sizes.append(4 if numel < INT32_LIMIT else 8)
    if "packed" in encodings:
        sizes.append(1)  # where this matters changes are dense and gaps fit into 8 bits
    if "entropy" in encodings:
        share = count / numel if numel else 0.0
        unchanged = 1 - share
        bits = -share * math.log2(share) if share else 0.0
        bits -= unchanged * math.log2(unchanged) if unchanged else 0.0
        sizes.append(bits / share / 8 if share else 0.0)
    return count * (min(sizes) + itemsize)


def plan_tensor(
    index: torch.Tensor,
    bits: torch.Tensor,
    distance: torch.Tensor | None,
    gaps: tuple[int, int],
    encodings: tuple[str, ...],
    numel: int,
) -> tuple[int, int]:
    """How one tensor's changes are best coded: (first gap width, estimated bytes).

    The estimate is exact for raw and packed. For entropy, where it decides between sparse and dense, it is
    the order-0 entropy of the byte planes; where packed is far below dense already, entropy is not estimated.
    """
    count, itemsize = index.numel(), bits.element_size()
    narrow, wide = count + 2 * gaps[0] + 8 * gaps[1], 2 * count + 8 * gaps[1]
    start = 8 if narrow <= wide else 16
    sizes = []
    if "raw" in encodings:
        sizes.append(count * (4 + itemsize))
    if "packed" in encodings or "entropy" in encodings:
        sizes.append(min(narrow, wide) + count * itemsize)
    if "entropy" in encodings and sizes[-1] * 2 > numel * itemsize:
        planes = [p for level, x in _climb(_gaps(index), start).items() for p in _planes(x, level)]
        values = _climb(_zigzag(distance), 8).items() if distance is not None else [(8 * itemsize, bits)]
        planes += [p for level, x in values for p in _planes(x, level)]
        sizes.append(sum(_order0_nbytes(p) for p in planes))
    return start, min(sizes)


def _order0_nbytes(plane: torch.Tensor) -> int:
    count = torch.bincount(plane.to(torch.int64), minlength=256).double()
    share = count[count > 0] / max(1, plane.numel())
    return int(-(share * share.log2()).sum() * plane.numel() / 8) + 1


def encode_group(
    index: torch.Tensor,
    bits: torch.Tensor,
    distance: torch.Tensor | None,
    numel: int,
    start: int,
    encodings: tuple[str, ...],
) -> tuple[dict[str, torch.Tensor], dict]:
    """The smallest of the allowed encodings of one group: (parts, header fields)."""
    gap = _gaps(index)
    head = {"count": index.numel()}
    made = []
    if "entropy" in encodings:
        made.append(_encode_entropy(gap, bits, distance, start, head))
    if "packed" in encodings:
        levels = {
            f"gap{w}": x.to(torch.int16).view(torch.uint16) if w == 16 else x.to(_LEVEL_DTYPE[w])
            for w, x in _climb(gap, start).items()
        }
        made.append(({**levels, "value": bits}, {**head, "encoding": "packed", "gap": start}))
    if "raw" in encodings:
        dtype = torch.int32 if numel < INT32_LIMIT else torch.int64
        made.append(({"index": index.to(dtype), "value": bits}, {**head, "encoding": "raw"}))
    return min(made, key=lambda pair: sum(t.numel() * t.element_size() for t in pair[0].values()))


# ---- entropy -----------------------------------------------------------------------------------------------


def _planes(x: torch.Tensor, width: int) -> list[torch.Tensor]:
    """Integers of ``width`` bits → uint8 planes, lowest byte first; two of 4 bits share a byte, the first
    low."""
    if width == 4:
        x = torch.nn.functional.pad(x, (0, x.numel() % 2)).view(-1, 2)
        return [(x[:, 0] | x[:, 1] << 4).to(torch.uint8)]
    if width == 8:
        return [x.to(torch.uint8)]
    if x.element_size() * 8 != width:
        x = x.to(INT[width // 8])
    return list(x.contiguous().view(torch.uint8).view(-1, width // 8).t().contiguous())


def _compress(plane: torch.Tensor) -> torch.Tensor:
    library = gpu_zstd.nvcomp() if plane.is_cuda and plane.numel() else None
    if library is not None:
        return gpu_zstd.compress(plane, library, torch.cuda.current_stream(plane.device).cuda_stream)
    squeezed = require_zstandard().ZstdCompressor(level=_ZSTD_LEVEL).compress(plane.cpu().numpy().tobytes())
    return torch.frombuffer(bytearray(squeezed), dtype=torch.uint8)


def _compressed(levels, prefix: str) -> dict[str, torch.Tensor]:
    out = {}
    for width, x in levels:
        for k, plane in enumerate(_planes(x, width)):
            out[f"{prefix}{width}.{k}"] = _compress(plane)
    return out


def _nbytes(parts: dict[str, torch.Tensor]) -> int:
    return sum(part.numel() for part in parts.values())


def _encode_entropy(gap, bits, distance, start, head):
    parts = _compressed(_climb(gap, start).items(), "gap")
    head = {**head, "encoding": "entropy", "codec": "zstd", "gap": start}
    width = 8 * bits.element_size()
    if distance is None:
        return {**parts, **_compressed([(width, bits)], "value")}, {**head, "value": "bits"}
    symbol = _zigzag(distance)
    options = {first: _compressed(_climb(symbol, first).items(), "ulp") for first in (4, 8)}
    first = min(options, key=lambda k: _nbytes(options[k]))
    return {**parts, **options[first]}, {**head, "value": "ulp", "ulp": first}


class _Planes:
    """Reads compressed planes out of a group's parts."""

    def __init__(self, parts: dict[str, torch.Tensor], prefix: str, device):
        self.parts, self.prefix, self.device = parts, prefix, device
        self.zstandard = require_zstandard(UnsupportedLayout)

    def plane(self, width: int, k: int, size: int) -> torch.Tensor:
        data = self.parts.pop(f"{self.prefix}{width}.{k}", None)
        if data is None or data.dtype != torch.uint8 or data.dim() != 1:
            raise CorruptPayload(f"plane {self.prefix}{width}.{k} is missing")
        squeezed = data.cpu().numpy().tobytes()
        zstandard = self.zstandard
        try:
            if not 0 <= zstandard.frame_content_size(squeezed) <= size:
                raise CorruptPayload(f"plane {self.prefix}{width}.{k} does not hold {size} bytes")
            plain = torch.empty(size, dtype=torch.uint8)  # whatever further frames state, no more is read
            frames = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(
                squeezed, read_across_frames=True
            )
            held = frames.readinto(memoryview(plain.numpy())) if size else 0
            beyond = frames.read(1)
        except zstandard.ZstdError as error:
            raise CorruptPayload(f"plane {self.prefix}{width}.{k}: {error}") from None
        if held != size or beyond:
            raise CorruptPayload(f"plane {self.prefix}{width}.{k} does not hold {size} bytes")
        return plain

    def read(self, width: int, count: int) -> torch.Tensor:
        """int64 [count] on the group's device."""
        if width == 4:
            pair = self.plane(4, 0, (count + 1) // 2)
            both = torch.stack([pair & 15, pair >> 4], dim=1).view(-1)[:count]
            return both.to(self.device).to(torch.int64)
        planes = [self.plane(width, k, count) for k in range(width // 8)]
        if width == 8:
            return planes[0].to(self.device).to(torch.int64)
        joined = torch.stack(planes, dim=1).contiguous().view(INT[width // 8]).view(-1).to(self.device)
        joined = joined.to(torch.int64)
        return joined & 0xFFFF if width == 16 else joined


# ---- decoding ----------------------------------------------------------------------------------------------


def decode_group(
    head: dict, parts: dict[str, torch.Tensor], numel: int, itemsize: int, limit: int
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Parts of a group → (index int64 [n], bits or distances [n], whether they are distances).

    Args:
        head: the group's JSON object.
        parts: part name → tensor; emptied.
        numel: elements of the group's tensors together.
        limit: largest number of changes that may be allocated for.
    """
    count, encoding = head.get("count"), head.get("encoding")
    if type(count) is not int or not 0 <= count <= min(numel, limit):
        raise CorruptPayload(f"a group of {numel} elements cannot have {str(count)[:40]} changes")
    decoders = {"raw": _decode_raw, "packed": _decode_packed, "entropy": _decode_entropy}
    if not isinstance(encoding, str) or encoding not in decoders:
        raise CorruptPayload(f"unknown encoding {str(encoding)[:40]!r}")
    index, value, relative = decoders[encoding](head, parts, numel, itemsize, count)
    if parts:
        raise CorruptPayload(f"group has parts that its encoding does not use: {sorted(parts)[:5]}")
    return index, value, relative


def _value(parts, itemsize: int, count: int) -> torch.Tensor:
    value = parts.pop("value", None)
    if value is None or value.dtype != INT[itemsize] or value.shape != (count,):
        raise CorruptPayload(f"group has no {count} values of {itemsize} bytes")
    return value


def _decode_raw(head, parts, numel, itemsize, count):
    index = parts.pop("index", None)
    dtype = torch.int32 if numel < INT32_LIMIT else torch.int64
    if index is None or index.dtype != dtype or index.shape != (count,):
        raise CorruptPayload(f"group has no {count} indices of {dtype}")
    return check_index(index.to(torch.int64), numel), _value(parts, itemsize, count), False


def _start(head, key: str, allowed: tuple[int, ...]) -> int:
    if type(head.get(key)) is not int or head[key] not in allowed:
        raise CorruptPayload(f"first width of {key} is {str(head.get(key))[:40]}, expected one of {allowed}")
    return head[key]


def _decode_packed(head, parts, numel, itemsize, count):
    def level(width: int, n: int) -> torch.Tensor:
        x = parts.pop(f"gap{width}", None)
        if x is None or x.dtype != _LEVEL_DTYPE[width] or x.shape != (n,):
            raise CorruptPayload(f"level gap{width} does not hold {n} numbers")
        if width == 16:
            return x.view(torch.int16).to(torch.int64) & 0xFFFF
        return x.to(torch.int64)

    value = _value(parts, itemsize, count)
    return _index(_descend(level, _start(head, "gap", (8, 16)), count), numel), value, False


def _decode_entropy(head, parts, numel, itemsize, count):
    if head.get("codec") != "zstd":
        raise CorruptPayload(f"unknown codec {str(head.get('codec'))[:40]!r}")
    device = next(iter(parts.values())).device if parts else "cpu"
    gap = _descend(_Planes(parts, "gap", device).read, _start(head, "gap", (8, 16)), count)
    index = _index(gap, numel)
    if head.get("value") == "bits":
        value = _Planes(parts, "value", device).read(8 * itemsize, count)
        return index, value.to(INT[itemsize]), False
    if head.get("value") != "ulp" or itemsize not in (2, 4):
        raise CorruptPayload(f"values of {itemsize} bytes cannot be {str(head.get('value'))[:40]!r}")
    symbol = _descend(_Planes(parts, "ulp", device).read, _start(head, "ulp", (4, 8)), count)
    if count and int(symbol.max()) >= 1 << 8 * itemsize:
        raise CorruptPayload("a distance is larger than the dtype")
    return index, _unzigzag(symbol).to(INT[itemsize]), True


def require_zstandard(error: type[Exception] = RuntimeError):
    """The optional package that the entropy encoding needs, imported when it is first used; else
    ``error``."""
    try:
        import zstandard
    except ImportError:
        raise error("the entropy encoding needs the zstandard package: pip install zstandard") from None
    return zstandard


def has_zstandard() -> bool:
    try:
        require_zstandard(ImportError)
    except ImportError:
        return False
    return True
