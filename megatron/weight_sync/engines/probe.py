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
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from megatron.weight_sync.boxes import Box
from megatron.weight_sync.errors import UnsupportedLayout
from megatron.weight_sync.fingerprints import bits_of
from megatron.weight_sync.receiver import Target

Table = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]

_BASE = 1 << 14
_FIRST = 0x0400  # the smallest normal number in fp16; also a normal number in bf16
_MAX_BOXES = 64


def discover(
    table: Table, live: Mapping[str, torch.Tensor], load: Load, batch_elements: int = 1 << 26
) -> dict[str, Target]:
    """Targets for every tensor of ``table``, on this rank.

    Args:
        table: checkpoint name → (full shape, dtype).
        live: the engine's parameters and persistent buffers. Tensors that share storage may be listed twice.
        load: the engine's own loader: called with (name, full tensor) pairs, any subset of the names at a
            time.
        batch_elements: how many checkpoint elements are probed at a time; about 64 bytes of host memory each.

    Raises:
        UnsupportedLayout: for a tensor whose live form is not boxes of its own dtype. Tensors that this rank
            does not hold have no pieces; the receiver checks that the ranks hold all of them together.
    """
    storages = _storages(live)
    targets: dict[str, Target] = {}
    for names in _batches(table, batch_elements):
        found = _probe(names, table, storages, load)
        # Of names that share storage the last writer wins: look again at those that seem to be nowhere, until
        # that finds nothing more. What is then left is on other ranks, or in no live tensor.
        seen, lost = names, _lost(names, found, table)
        while lost and len(lost) < len(seen):
            found |= _probe(lost, table, storages, load)
            seen, lost = lost, _lost(lost, found, table)
        for name in names:
            shape, dtype = table[name]
            targets[name] = Target(shape, dtype, tuple(found[name]))
    return targets


def _lost(names: list[str], found: Mapping[str, list], table: Table) -> list[str]:
    return [name for name in names if not found[name] and math.prod(table[name][0])]


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


def _batches(table: Table, limit: int) -> Iterator[list[str]]:
    batch, size = [], 0
    for name, (shape, dtype) in table.items():
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise UnsupportedLayout(f"{name}: {dtype} cannot be found in a live model")
        if batch and size + math.prod(shape) > limit:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += math.prod(shape)
    if batch:
        yield batch


def _pattern(digit: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Digits below _BASE as numbers of ``dtype``; fp32 carries the bf16 number, which a cast to bf16
    keeps."""
    bits = (digit + _FIRST).to(torch.int16)
    return bits.view(torch.float16) if dtype == torch.float16 else bits.view(torch.bfloat16).to(dtype)


def _digits(values: torch.Tensor) -> torch.Tensor:
    """The inverse of :func:`_pattern` on live values, int64; what is no pattern becomes -1."""
    bits = bits_of(values)
    if values.dtype == torch.float32:
        bits = torch.where(bits & 0xFFFF == 0, bits >> 16, 0)
    digit = bits.to(torch.int64) - _FIRST
    return torch.where((digit >= 0) & (digit < _BASE), digit, -1)


def _is(values: torch.Tensor, digit: int) -> torch.Tensor:
    """Where live values are the pattern of one digit; needs one byte for each."""
    bits = digit + _FIRST
    return bits_of(values) == (bits << 16 if values.dtype == torch.float32 else bits)


def _where(flat: torch.Tensor, digit: int, step: int = 1 << 24) -> torch.Tensor:
    """Positions of one digit's pattern, in host memory; little of the engine's device is used at a time."""
    parts = [_is(part, digit).nonzero().view(-1).cpu() + k * step for k, part in enumerate(flat.split(step))]
    return torch.cat(parts)


def _constant(names: list[str], table: Table, digit: int, device) -> Iterator[tuple[str, torch.Tensor]]:
    one = torch.tensor([digit])
    for name in names:
        shape, dtype = table[name]
        yield name, _pattern(one, dtype).to(device).expand(math.prod(shape)).reshape(shape).contiguous()


def _index_digits(numel: int, scale: int, step: int = 1 << 24) -> torch.Tensor:
    """int32 [numel]: one digit of every flat index."""
    out = torch.empty(numel, dtype=torch.int32)
    for a in range(0, numel, step):
        b = min(a + step, numel)
        out[a:b] = (torch.arange(a, b) // scale) % _BASE
    return out


def _run(load: Load, tensors: Iterator, names: list[str]) -> None:
    try:
        load(tensors)
    except Exception as error:
        text = f"the engine's loader refused probe tensors ({names[0]}, …): {type(error).__name__}: {error}"
        raise UnsupportedLayout(text) from error


def _probe(names, table: Table, storages, load: Load) -> dict[str, list[tuple[torch.Tensor, Box]]]:
    device = storages[0][1].device if storages else "cpu"
    reached = _reached(names, table, storages, load, device)

    def own_id(place: int, numel: int, scale: int) -> torch.Tensor:
        return torch.tensor(place // scale % _BASE).expand(numel)

    def own_index(place: int, numel: int, scale: int) -> torch.Tensor:
        return _index_digits(numel, scale)

    largest = max(math.prod(table[name][0]) for name in names)
    which = _read_number(load, names, reached, len(names), own_id, table, device)
    where = _read_number(load, names, reached, largest, own_index, table, device)
    found: dict[str, list[tuple[torch.Tensor, Box]]] = {name: [] for name in names}
    for (live_name, flat, position), tensor_id, index in zip(reached, which, where, strict=True):
        ids = (tensor_id.clamp(-1, len(names)) + 1).bincount().nonzero().view(-1) - 1
        for k in ids.tolist():
            name = names[k] if 0 <= k < len(names) else None
            if name is None:
                raise UnsupportedLayout(f"{live_name}: its values are not copies of checkpoint values")
            shape, dtype = table[name]
            if flat.dtype != dtype:
                raise UnsupportedLayout(
                    f"{name}: the checkpoint has {dtype}, the engine keeps it as {flat.dtype} in {live_name}"
                )
            mine = tensor_id == k
            p, f = position[mine], index[mine]
            if f.min() < 0 or f.max() >= math.prod(shape):
                raise UnsupportedLayout(f"{name}: {live_name} holds something else than copies of its values")
            boxes = fit(name, p, f)
            if boxes is None:
                raise UnsupportedLayout(f"{name}: its place in {live_name} is not made of boxes (repacked?)")
            found[name] += [(flat, box) for box in boxes]
    return found


def _reached(
    names, table: Table, storages, load: Load, device
) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """Live elements that take one constant after the other: (live name, flat live tensor, positions in host
    memory, rising)."""
    first, second = 1, _BASE - 2
    candidates, out = [], []
    _run(load, _constant(names, table, first, device), names)
    for name, flat in storages:
        position = _where(flat, first) if flat.element_size() in (2, 4) else ()
        if len(position):
            candidates.append((name, flat, position))
    _run(load, _constant(names, table, second, device), names)
    for name, flat, position in candidates:
        position = position[_is(flat.cpu().index_select(0, position), second)]
        if len(position):
            out.append((name, flat, position))
    return out


def _read_number(load, names, reached, limit: int, digits, table, device) -> list[torch.Tensor]:
    """Send a number below ``limit`` with every element, digit by digit, and read it back at ``reached``; -1
    where what arrives is no digit. ``digits(place of the tensor in names, its elements, scale)`` gives the
    digits."""
    totals = [torch.zeros_like(position) for _, _, position in reached]
    spoilt = [torch.zeros_like(position, dtype=torch.bool) for _, _, position in reached]
    scale = 1
    while scale < limit:

        def tensors(scale=scale):
            for place, name in enumerate(names):
                shape, dtype = table[name]
                digit = digits(place, math.prod(shape), scale)
                yield name, _pattern(digit, dtype).to(device).reshape(shape)

        _run(load, tensors(), names)
        for k, (_, flat, position) in enumerate(reached):
            digit = _digits(flat.cpu().index_select(0, position))
            spoilt[k] |= digit < 0
            totals[k] += digit * scale
        scale *= _BASE
    for total, bad in zip(totals, spoilt, strict=True):
        total[bad] = -1
    return totals


# ---- fitting -----------------------------------------------------------------------------------------------


def fit(name: str, position: torch.Tensor, index: torch.Tensor, limit: int = _MAX_BOXES) -> list[Box] | None:
    """Boxes that map live ``position`` (rising) to checkpoint ``index``, or None if it takes more than
    ``limit``."""
    boxes: list[Box] = []
    while len(position):
        if len(boxes) == limit:
            return None
        size, local, full = _longest_nest(position, index)
        boxes.append(Box(name, size, int(position[0]), local, int(index[0]), full))
        n = math.prod(size)
        position, index = position[n:], index[n:]
    return boxes


def _longest_nest(position: torch.Tensor, index: torch.Tensor):
    """(sizes, local strides, full strides), outermost first, of the longest affine loop nest that starts
    here.

    Grown from the inside: the first run of equal steps, then as many repetitions of it as follow at equal
    steps, then repetitions of those.
    """
    sizes: list[int] = []
    strides: list[tuple[int, int]] = []
    block = 1
    while len(position) >= 2 * block:
        step = int(position[block] - position[0]), int(index[block] - index[0])
        times = _repeats(position, index, block, step)
        if times == 1:
            break
        sizes.append(times)
        strides.append(step)
        block *= times
    if not sizes:
        return (1,), (1,), (1,)
    return tuple(sizes[::-1]), tuple(a for a, _ in strides[::-1]), tuple(b for _, b in strides[::-1])


def _repeats(position: torch.Tensor, index: torch.Tensor, block: int, step: tuple[int, int]) -> int:
    """How often the first ``block`` pairs are there one after the other, each time shifted by ``step``."""
    whole = len(position) // block * block
    times = torch.arange(whole // block, device=position.device)[:, None]
    p, f = position[:whole].view(-1, block), index[:whole].view(-1, block)
    good = ((p == p[0] + times * step[0]) & (f == f[0] + times * step[1])).all(dim=1)
    bad = (~good).nonzero()
    return int(bad[0]) if len(bad) else len(good)
