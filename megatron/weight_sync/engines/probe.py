"""Find where every checkpoint element lives in an engine's fused and sharded parameters.

Nobody has to write the mapping down: the engine's own ``load_weights`` is run on tensors whose elements say
where they are. Each pass carries one digit of the element's flat index, as a bit pattern that is a positive,
normal, finite number in both bf16 and fp16 and survives a copy. What the passes leave in the live parameters
is read back, and fitted to boxes (:class:`~megatron.weight_sync.boxes.Box`). Two passes with one constant
each show which live elements a tensor reaches at all.

A layout that is not made of boxes of the tensor's own dtype (repacked, quantised, transformed) cannot be
reached by a delta; its tensors are refused by name.

Probing overwrites the live weights with patterns: run it right before a dense sync.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce

import torch

from megatron.weight_sync.boxes import Box
from megatron.weight_sync.errors import UnsupportedLayout
from megatron.weight_sync.fingerprints import bits_of
from megatron.weight_sync.receiver import Target

Table = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]

_BITS = 14  # of a digit
_BASE = 1 << _BITS
_FIRST = 0x0400  # the smallest normal number in fp16; also a normal number in bf16
_FIRST_SEEN, _THEN_SEEN = 1, _BASE - 2  # the digits of the two passes that show what is reached
# For each element of a span at most: two masks, the digit of a name and three of an index; where others lie
# in between, also its position and those digits once more.
_BYTES_READ = 24
_MAX_BOXES = 64
_CHUNK = 1 << 24  # elements that are computed with at a time: 0.3 GB of the engine's device


def discover(
    table: Table, live: Mapping[str, torch.Tensor], load: Load, batch_elements: int = 1 << 27
) -> dict[str, Target]:
    """Targets for every tensor of ``table``, on this rank.

    Time grows with the checkpoint. The engine's device computes, in chunks, and holds one full tensor at a
    time as in any load. What is read back stays on the device if it fits into half of the memory that is free
    there, else it goes to the host, which is far slower.

    Args:
        table: checkpoint name → (full shape, dtype).
        live: the engine's parameters and persistent buffers. Tensors that share storage may be listed twice.
        load: the engine's own loader: called with (name, full tensor) pairs, any subset of the names at a
            time.
        batch_elements: how many checkpoint elements are probed at a time, or one tensor if that has more. Up
            to 24 bytes are taken for each live element from the first to the last that they reach in a
            storage; names are taken in natural order, so that those lie together.

    Raises:
        UnsupportedLayout: for a tensor whose live form is not boxes of its own dtype. Tensors that this rank
            does not hold have no pieces; the receiver checks that the ranks hold all of them together.
    """
    for name, (_, dtype) in table.items():
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise UnsupportedLayout(f"{name}: {dtype} cannot be found in a live model")
    storages = _storages(live)
    found: dict[str, list[tuple[torch.Tensor, Box]]] = {name: [] for name in table}
    names = sorted((name for name, (shape, _) in table.items() if math.prod(shape)), key=_natural)
    # Of names that share storage the last writer wins: look again at those that seem to be nowhere, until
    # that finds nothing more. What is then left is on other ranks, or in no live tensor.
    while names:
        for batch, near in _batches(names, table, storages, load, batch_elements):
            found |= _probe(batch, table, near, load)
        lost = [name for name in names if not found[name]]
        if len(lost) == len(names):
            break
        names = lost
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # others on this device may need what was read back here
    return {name: Target(*table[name], tuple(pieces)) for name, pieces in found.items()}


def _natural(name: str) -> list[str | int]:
    """Sorts ``experts.10`` behind ``experts.2``."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", name)]


def _storages(live: Mapping[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
    """Live tensors as flat views of what they span, every element once: engines keep views of a parameter
    (the halves of ``kv_b_proj``) as parameters of their own."""
    spans: dict[tuple, list] = {}
    for name, tensor in live.items():
        tensor = tensor.detach()
        if tensor.numel() == 0 or tensor.device.type == "meta" or not tensor.is_floating_point():
            continue
        span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        begin, key = tensor.storage_offset(), (tensor.untyped_storage().data_ptr(), tensor.dtype)
        spans.setdefault(key, []).append((begin, begin + span, name, tensor))
    out = []
    for parts in spans.values():
        parts.sort(key=lambda part: (part[0], -part[1]))
        begin, end, name, tensor = parts[0]
        for a, b, other, view in [*parts[1:], (math.inf, 0, None, None)]:
            if a < end:
                end = max(end, b)
                continue
            out.append((name, tensor.as_strided((end - begin,), (1,), begin)))
            begin, end, name, tensor = a, b, other, view
    return out


def _batches(names: list[str], table: Table, storages, load: Load, limit: int):
    """(names, the storages that may hold them), a batch at a time; without names that no storage holds."""
    if len(names) < _BASE and sum(math.prod(table[name][0]) for name in names) <= limit:
        yield names, storages
        return
    held, holders = _holders(names, table, storages, load), {}
    for storage, some in zip(storages, held, strict=True):
        for place in some:
            holders.setdefault(place, []).append(storage)
    batch, near, size = [], {}, 0
    for place, name in enumerate(names):
        if place not in holders:
            continue
        numel = math.prod(table[name][0])
        if batch and (size + numel > limit or len(batch) == _BASE - 1):
            yield batch, list(near.values())
            batch, near, size = [], {}, 0
        batch.append(name)
        near |= {id(storage): storage for storage in holders[place]}
        size += numel
    if batch:
        yield batch, list(near.values())


def _holders(names: list[str], table: Table, storages, load: Load) -> list[list[int]]:
    """For each storage the places in ``names`` of the tensors that it may hold; it holds no others, but for
    those that a later name overwrites."""
    device = _device(storages)
    places = torch.arange(len(names))
    may = [torch.ones(len(names), dtype=torch.bool) for _ in storages]
    for shift in range(0, (len(names) - 1).bit_length(), _BITS):
        digits = places >> shift & _BASE - 1
        _run(load, _constants(names, table, digits.tolist(), device), names)
        for (_, flat), mask in zip(storages, may, strict=True):
            seen = torch.zeros(_BASE + 1, dtype=torch.bool)
            for part in flat.split(_CHUNK) if flat.element_size() in (2, 4) else ():
                seen[_digits(part).unique_consecutive().unique().cpu().long()] = True
            mask &= seen[digits]  # -1, what is no digit, is the last one
    return [mask.nonzero().view(-1).tolist() for mask in may]


# ---- patterns ----------------------------------------------------------------------------------------------


def _device(storages) -> torch.device | str:
    return storages[0][1].device if storages else "cpu"


def _pattern(digit: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Digits below _BASE as numbers of ``dtype``; fp32 carries the bf16 number, which a cast to bf16
    keeps."""
    bits = digit.to(torch.int16) + _FIRST
    return bits.view(torch.float16) if dtype == torch.float16 else bits.view(torch.bfloat16).to(dtype)


def _digits(values: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`_pattern` on live values, int16; what is no pattern becomes -1."""
    bits = bits_of(values)
    if values.dtype == torch.float32:
        bits = torch.where(bits & 0xFFFF == 0, bits >> 16, 0).to(torch.int16)
    digit = bits - _FIRST  # may wrap around, to more than a digit
    return torch.where(digit & -_BASE == 0, digit, -1)


def _constants(names: list[str], table: Table, digits: list[int], device) -> Iterator:
    """(name, tensor that is one digit's pattern everywhere)."""
    digits = torch.tensor(digits)
    values = {dtype: _pattern(digits, dtype).tolist() for dtype in {table[name][1] for name in names}}
    for k, name in enumerate(names):
        shape, dtype = table[name]
        yield name, torch.full(shape, values[dtype][k], dtype=dtype, device=device)


def _indices(names: list[str], table: Table, shift: int, device) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor whose elements are the patterns of one digit of their flat index)."""
    for name in names:
        shape, dtype = table[name]
        out = torch.empty(shape, dtype=dtype, device=device)
        for k, part in enumerate(out.view(-1).split(_CHUNK)):
            index = torch.arange(k * _CHUNK, k * _CHUNK + part.numel(), device=device)
            part.copy_(_pattern(index >> shift & _BASE - 1, dtype))
        yield name, out


def _run(load: Load, tensors: Iterator, names: list[str]) -> None:
    try:
        load(tensors)
    except Exception as error:
        text = f"the engine's loader refused probe tensors ({names[0]}, …): {type(error).__name__}: {error}"
        raise UnsupportedLayout(text) from error


# ---- reading back ------------------------------------------------------------------------------------------


def _memory_for(nbytes: int, device: torch.device) -> torch.device:
    """The engine's device if half of what is free there holds as much, else the host's memory."""
    fits = device.type == "cuda" and nbytes <= torch.cuda.mem_get_info(device)[0] // 2
    return device if fits else torch.device("cpu")


class _Reached:
    """Live elements that a batch reaches: a span of one storage. What is read there is kept in ``memory``."""

    def __init__(self, live_name: str, flat: torch.Tensor, begin: int, end: int, memory: torch.device):
        self.live_name, self.flat, self.begin, self.span = live_name, flat, begin, flat[begin:end]
        self.memory = memory
        self.mask = self._of_chunks(lambda part: _digits(part) == _FIRST_SEEN, torch.bool)

    def _of_chunks(self, compute: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(len(self.span), dtype=dtype, device=self.memory)
        for there, part in zip(out.split(_CHUNK), self.span.split(_CHUNK), strict=True):
            there.copy_(compute(part))
        return out

    def read(self) -> torch.Tensor:
        """int16: the digits that are there now; -1 where none is."""
        return self._of_chunks(_digits, torch.int16)

    def clear(self) -> None:
        """Leave no pattern behind, which the next batch could take for its own."""
        for part, mask in zip(self.span.split(_CHUNK), self.mask.split(_CHUNK), strict=True):
            part.masked_fill_(mask.to(part.device), 0)


def _probe(names, table: Table, storages, load: Load) -> dict[str, list[tuple[torch.Tensor, Box]]]:
    device = _device(storages)
    reached = _reached(names, table, storages, load)
    _run(load, _constants(names, table, list(range(len(names))), device), names)
    which = [part.read() for part in reached]
    largest = max(math.prod(table[name][0]) for name in names)
    index: list[list[torch.Tensor]] = [[] for _ in reached]
    for shift in range(0, max(largest - 1, 1).bit_length(), _BITS):
        _run(load, _indices(names, table, shift, device), names)
        for part, digits in zip(reached, index, strict=True):
            digits.append(part.read())
    found: dict[str, list[tuple[torch.Tensor, Box]]] = {name: [] for name in names}
    for part, ids, digits in zip(reached, which, index, strict=True):
        for k, begin, end, count in _extents(ids.masked_fill_(~part.mask, -2), device):
            if not 0 <= k < len(names):
                raise UnsupportedLayout(f"{part.live_name}: its values are not copies of checkpoint values")
            name, (shape, dtype) = names[k], table[names[k]]
            if part.flat.dtype != dtype:
                raise UnsupportedLayout(
                    f"{name}: the checkpoint has {dtype}, the engine keeps it as {part.flat.dtype} in "
                    f"{part.live_name}"
                )
            positions, places = range(part.begin + begin, part.begin + end), [d[begin:end] for d in digits]
            if count < end - begin:
                mine = (ids[begin:end] == k).nonzero().view(-1)
                places = [place[mine] for place in places]
                positions = mine.add_(part.begin + begin)
            pairs = Pairs(positions, places, device)
            if pairs.any_outside(math.prod(shape)):
                raise UnsupportedLayout(
                    f"{name}: {part.live_name} holds something else than copies of its values"
                )
            boxes = fit(name, pairs)
            if boxes is None:
                raise UnsupportedLayout(
                    f"{name}: its place in {part.live_name} is not made of boxes (repacked?)"
                )
            found[name] += [(part.flat, box) for box in boxes]
        part.clear()
    return found


def _reached(names, table: Table, storages, load: Load) -> list[_Reached]:
    """Where live elements take one constant after the other."""
    device = _device(storages)
    _run(load, _constants(names, table, [_FIRST_SEEN] * len(names), device), names)
    spans = []
    for live_name, flat in storages:
        parts = flat.split(_CHUNK) if flat.element_size() in (2, 4) else ()
        chunks = [k for k, part in enumerate(parts) if (_digits(part) == _FIRST_SEEN).any()]
        if chunks:
            spans.append((live_name, flat, chunks[0] * _CHUNK, min((chunks[-1] + 1) * _CHUNK, len(flat))))
    memory = _memory_for(_BYTES_READ * sum(end - begin for _, _, begin, end in spans), torch.device(device))
    out = [_Reached(*span, memory) for span in spans]
    _run(load, _constants(names, table, [_THEN_SEEN] * len(names), device), names)
    for part in out:
        part.mask &= part.read() == _THEN_SEEN
    return [part for part in out if part.mask.any()]


def _extents(ids: torch.Tensor, device) -> list[tuple[int, int, int, int]]:
    """(id, its first position, one past its last, how often it is there) for every id but -2, which is not
    reached; -1 is no pattern."""
    first = torch.full((_BASE + 2,), len(ids))
    last, often = torch.zeros(2, _BASE + 2, dtype=torch.int64)
    begin = 0
    for part in ids.split(_CHUNK):
        values, counts = (t.cpu().long() for t in part.to(device).unique_consecutive(return_counts=True))
        ends = counts.cumsum(0) + begin
        first.scatter_reduce_(0, values + 2, ends - counts, "amin")
        last.scatter_reduce_(0, values + 2, ends, "amax")
        often.scatter_add_(0, values + 2, counts)
        begin += len(part)
    present = often[1:].nonzero().view(-1) + 1
    return [(k - 2, *(int(of[k]) for of in (first, last, often))) for k in present.tolist()]


# ---- fitting -----------------------------------------------------------------------------------------------


class Pairs:
    """Live positions, rising, and the checkpoint indices that are there. ``device`` computes indices: up to
    ``_CHUNK`` of them once, of more a part at a time when asked for."""

    def __init__(
        self,
        positions: range | torch.Tensor,
        digits: list[torch.Tensor],
        device: torch.device | str = "cpu",
    ):
        self.positions, self.digits, self.device = positions, digits, device
        self.computed: torch.Tensor | None = None
        if 0 < len(positions) <= _CHUNK:
            self.computed = self.indices(0, len(positions))

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, i: int) -> tuple[int, int]:
        """(position, index)."""
        return int(self.positions[i]), int(self.indices(i, i + 1))

    def indices(self, a: int, b: int) -> torch.Tensor:
        """Of pairs a to b - 1, int64; negative where no digit was found."""
        if self.computed is not None:
            return self.computed[a:b]
        digits = (digit[a:b].to(self.device).long() << _BITS * k for k, digit in enumerate(self.digits))
        return reduce(torch.bitwise_or, digits)

    def any_outside(self, limit: int) -> bool:
        """Whether an index is none, or not below ``limit``."""
        for a in range(0, len(self), _CHUNK):
            low, high = torch.stack(self.indices(a, min(a + _CHUNK, len(self))).aminmax()).tolist()
            if low < 0 or high >= limit:
                return True
        return False

    def differ(self, a: int, b: int, block: int, step: tuple[int, int]) -> torch.Tensor:
        """bool: which of the pairs a to b - 1 are not those ``block`` before them, shifted by ``step``."""
        out = self.indices(a, b) - self.indices(a - block, b - block) != step[1]
        if isinstance(self.positions, range):
            return out  # step[0] is block, everywhere
        now, before = self.positions[a:b], self.positions[a - block : b - block]
        return out | (now.to(self.device) - before.to(self.device) != step[0])


def fit(name: str, pairs: Pairs, limit: int = _MAX_BOXES) -> list[Box] | None:
    """Boxes that map the positions of ``pairs`` to the indices, or None if it takes more than ``limit``."""
    boxes: list[Box] = []
    begin = 0
    while begin < len(pairs):
        if len(boxes) == limit:
            return None
        position, index = pairs[begin]
        size, local, full = _longest_nest(pairs, begin)
        boxes.append(Box(name, size, position, local, index, full))
        begin += math.prod(size)
    return boxes


def _longest_nest(pairs: Pairs, begin: int):
    """(sizes, local strides, full strides), outermost first, of the longest affine loop nest that starts
    at ``begin``.

    Grown from the inside: the first run of equal steps, then as many repetitions of it as follow at equal
    steps, then repetitions of those.
    """
    sizes: list[int] = []
    strides: list[tuple[int, int]] = []
    block, (position, index) = 1, pairs[begin]
    while len(pairs) - begin >= 2 * block:
        there = pairs[begin + block]
        step = there[0] - position, there[1] - index
        times = _repeats(pairs, begin, block, step) if step[1] > 0 else 1  # boxes go forward in both
        if times == 1:
            break
        sizes.append(times)
        strides.append(step)
        block *= times
    if not sizes:
        return (1,), (1,), (1,)
    return tuple(sizes[::-1]), tuple(a for a, _ in strides[::-1]), tuple(b for _, b in strides[::-1])


def _repeats(pairs: Pairs, begin: int, block: int, step: tuple[int, int]) -> int:
    """How often the ``block`` pairs from ``begin`` are there one after the other, each time shifted by
    ``step``: how far every pair is the one a block before it, shifted."""
    first = begin + block
    same, size = 0, min(1 << 14, _CHUNK)
    while first + same < len(pairs):
        a = first + same
        b = min(a + size, len(pairs))
        others = pairs.differ(a, b, block, step).nonzero()
        if len(others):
            same += int(others[0])
            break
        same, size = b - first, min(16 * size, _CHUNK)
    return 1 + same // block
