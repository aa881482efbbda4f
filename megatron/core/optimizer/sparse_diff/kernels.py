"""CUDA kernels of the bitmask, in Triton: the copy that captures, and the expansion of bits to indices.

Every launch serves any number of tensors: a table on the device holds their addresses and sizes, each tensor
is cut into blocks, one to a program, and a program learns from a second table whose block it has. Launching
for each tensor would cost the host more than the plain copies do.

Capture. With old_i the model's element and new_i = round(main_i) to its type, for byte b of eight elements

    mask_b |= sum over l of [bits(old_8b+l) != bits(new_8b+l)] * 2^l;   model_i = new_i

in one pass: 8.125 to 8.25 bytes an element for bf16 from fp32, where the plain copy moves 6. Eight neighbours
that all keep their bits need no store, so where few change the traffic falls towards 6.125 bytes.

Expansion. One kernel counts the bits of each block of words, a prefix sum over the counts gives each block
its place, and another kernel writes the indices. Where few bits are set every word gives up its lowest one
per round, for as many rounds as the fullest word of the block has bits: work follows words and changes, not
elements. Where many are set, every element finds its own place, so that neighbours write to neighbouring
places.

`TRITON_INTERPRET=1` runs them on the CPU.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl

__all__ = ["capture", "expand"]

CAPTURE_BYTES = 1024  # of the mask to a program: 8192 elements
EXPAND_WORDS = 512
DENSE_BITS = 4  # set bits per word from which every element is looked at
DENSE_TILE = 1024  # elements at a time
ALIGNMENT: tl.constexpr = tl.constexpr(16)  # bytes of a vector load
ROW: tl.constexpr = tl.constexpr(5)  # of the table

_TYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Launch(NamedTuple):
    """Blocks of many tensors; all on the device but `blocks`, their number."""

    table: torch.Tensor
    """int64, `ROW` numbers to a tensor, of which the last is its first block."""
    owners: torch.Tensor
    """int32 [blocks]: one more than the row of the tensor that a block belongs to."""
    last: torch.Tensor
    """int64: the last block of each tensor."""
    blocks: int


def _launch(
    rows: Sequence[tuple[int, ...]], sizes: Sequence[int], block: int, device: torch.device
) -> _Launch:
    """Cut tensors of `sizes`, none of them 0, into blocks; `rows` are the rows of the table but for the last
    number. The host does not wait."""
    ends = list(accumulate(-(-size // block) for size in sizes))
    firsts = [0, *ends[:-1]]
    numbers = [number for row, first in zip(rows, firsts, strict=True) for number in (*row, first)]
    numbers += firsts
    numbers += [end - 1 for end in ends]
    # The allocator of pinned memory keeps the block until the transfer is done.
    host = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
    table, first, last = host.to(device, non_blocking=True).split(
        [len(numbers) - 2 * len(rows), *[len(rows)] * 2]
    )
    owners = torch.searchsorted(first, torch.arange(ends[-1], device=device), right=True, out_int32=True)
    return _Launch(table, owners, last, ends[-1])


@triton.jit
def _row_of(table, owners, block):
    return table + (tl.load(owners + block) - 1).to(tl.int64) * ROW


@triton.jit
def _capture_kernel(
    table, owners, MODEL: tl.constexpr, MAIN: tl.constexpr, ALIGNED: tl.constexpr, BYTES: tl.constexpr
):  # fmt: skip
    # One row is one byte of the mask: eight elements, which one thread loads and stores as a vector.
    block = tl.program_id(0)
    entry = _row_of(table, owners, block)
    model = tl.load(entry).to(tl.pointer_type(MODEL))
    main = tl.load(entry + 1).to(tl.pointer_type(MAIN))
    mask = tl.load(entry + 2).to(tl.pointer_type(tl.uint8))
    numel = tl.load(entry + 3)
    if ALIGNED:
        model = tl.multiple_of(model, ALIGNMENT)
        main = tl.multiple_of(main, ALIGNMENT)
        numel = tl.multiple_of(numel, 8)
    start = (block - tl.load(entry + 4)) * BYTES
    left = tl.minimum(numel - start * 8, BYTES * 8).to(tl.int32)
    row = tl.arange(0, BYTES)
    lane = tl.arange(0, 8)
    index = row[:, None] * 8 + lane[None, :]
    inside = index < left
    old = tl.load(model + start * 8 + index, mask=inside, other=0.0)
    new = tl.load(main + start * 8 + index, mask=inside, other=0.0).to(old.dtype)
    changed = old.to(tl.int16, bitcast=True) != new.to(tl.int16, bitcast=True)
    byte = tl.sum(tl.where(changed, 1 << lane[None, :], 0), axis=1)
    inside &= (byte != 0)[:, None]  # the same for a whole row, so the store stays a vector
    tl.store(model + start * 8 + index, new, mask=inside)
    row_inside = row * 8 < left
    known = tl.load(mask + start + row, mask=row_inside, other=0)
    tl.store(
        mask + start + row, known | byte.to(tl.uint8), mask=row_inside & ((byte & ~known.to(tl.int32)) != 0)
    )


@triton.jit
def _popcount(word):
    """Set bits of each uint32."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    return ((word * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _load_words(entry, start, WORDS: tl.constexpr):
    """Numbers of `WORDS` words from `start`, and the words as uint32, 0 past the end. Loaded one by one: were
    a thread given neighbours, its indices would change threads before each store."""
    words = tl.load(entry).to(tl.pointer_type(tl.int32))
    row = start + tl.arange(0, WORDS)
    inside = row * 32 < tl.load(entry + 2)
    return row, tl.load(words + row, mask=inside, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def _count_kernel(table, owners, counts, WORDS: tl.constexpr):
    block = tl.program_id(0)
    entry = _row_of(table, owners, block)
    start = (block - tl.load(entry + 4)) * WORDS
    _, word = _load_words(entry, start, WORDS)
    tl.store(counts + block, tl.sum(_popcount(word)))


@triton.jit
def _sparse_kernel(table, owners, counts, ends, indices, values, most, WORDS: tl.constexpr):
    """Blocks of up to `most` set bits."""
    block = tl.program_id(0)
    count = tl.load(counts + block)
    if (count > 0) & (count <= most):
        entry = _row_of(table, owners, block)
        model = tl.load(entry + 1).to(tl.pointer_type(values.dtype.element_ty))
        numel = tl.load(entry + 2)
        added = tl.load(entry + 3)
        start = (block - tl.load(entry + 4)) * WORDS
        row, word = _load_words(entry, start, WORDS)
        bits = _popcount(word)
        at = tl.load(ends + block) - count + tl.cumsum(bits, 0) - bits
        rounds = tl.max(bits)
        while rounds > 0:
            present = word != 0
            lower = word & (word - 1)  # without its lowest set bit
            power = (word ^ lower).to(tl.float32)  # a power of two: its exponent is the bit's position
            lane = (power.to(tl.int32, bitcast=True) >> 23) - 127
            index = row * 32 + lane
            tl.store(indices + at, index + added, mask=present)
            # memory that was lost may hold bits past the end
            value = tl.load(model + index, mask=present & (index < numel))
            tl.store(values + at, value, mask=present)
            at += present.to(tl.int64)
            word = lower
            rounds -= 1


@triton.jit
def _dense_kernel(
    table, owners, counts, ends, indices, values, least, WORDS: tl.constexpr, TILE: tl.constexpr
):
    """Blocks of more than `least` set bits. A thread's elements are apart, its neighbours' are adjacent."""
    block = tl.program_id(0)
    count = tl.load(counts + block)
    if count > least:
        entry = _row_of(table, owners, block)
        words = tl.load(entry).to(tl.pointer_type(tl.int32))
        model = tl.load(entry + 1).to(tl.pointer_type(values.dtype.element_ty))
        numel = tl.load(entry + 2)
        added = tl.load(entry + 3)
        start = (block - tl.load(entry + 4)) * WORDS
        place = tl.load(ends + block) - count
        for begin in range(0, WORDS * 32, TILE):
            element = begin + tl.arange(0, TILE)
            index = start * 32 + element
            inside = index < numel
            word = tl.load(words + start + (element >> 5), mask=inside, other=0)
            bit = (word >> (element & 31)) & 1
            present = bit != 0
            at = place + (tl.cumsum(bit, 0) - bit)
            tl.store(indices + at, index + added, mask=present)
            tl.store(values + at, tl.load(model + index, mask=present), mask=present)
            place += tl.sum(bit)


def capture(
    models: Sequence[torch.Tensor],
    mains: Sequence[torch.Tensor],
    masks: Sequence[torch.Tensor],
    tile: int = CAPTURE_BYTES,
    warps: int = 4,
) -> None:
    """`model.copy_(main)` of each pair, setting the bits of elements of `model` whose bits change.

    One launch for all that agree in types and alignment; the tensors share no memory.

    Args:
        models: bf16 or fp16 [numel] each, contiguous, any shape.
        mains: a floating type, numel elements each, contiguous, same device.
        masks: int32 [at least ceil(numel / 32)] each.
        tile: bytes of a mask to a program.
    """
    groups: dict[tuple, tuple[list, list]] = defaultdict(lambda: ([], []))
    for model, main, words in zip(models, mains, masks, strict=True):
        numel = model.numel()
        if numel:
            row = model.data_ptr(), main.data_ptr(), words.data_ptr(), numel
            rows, sizes = groups[
                model.dtype, main.dtype, (row[0] | row[1] | 2 * numel) % ALIGNMENT.value == 0
            ]
            rows.append(row)
            sizes.append(numel)
    for (to, of, aligned), (rows, sizes) in groups.items():
        launch = _launch(rows, sizes, 8 * tile, models[0].device)
        _capture_kernel[(launch.blocks,)](
            launch.table, launch.owners, MODEL=_TYPES[to], MAIN=_TYPES[of], ALIGNED=aligned, BYTES=tile,
            num_warps=warps,
        )  # fmt: skip


class _Expansion:
    """Masks whose values have one type: the bits are counted, then, with the numbers read, written."""

    def __init__(self, items: Sequence[tuple[torch.Tensor, torch.Tensor, int]]) -> None:
        words, model, _ = items[0]
        self.dtype, self.device = model.dtype, words.device
        self.sizes = [model.numel() for _, model, _ in items]
        rows = [(words.data_ptr(), model.data_ptr(), model.numel(), first) for words, model, first in items]
        self.launch = _launch(rows, self.sizes, 32 * EXPAND_WORDS, self.device)
        self.counts = torch.empty(self.launch.blocks, dtype=torch.int64, device=self.device)
        _count_kernel[(self.launch.blocks,)](
            self.launch.table, self.launch.owners, self.counts, WORDS=EXPAND_WORDS, num_warps=4
        )
        self.sums = torch.cumsum(self.counts, 0)
        self.ends = self.sums[self.launch.last]

    def write(self, ends: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Indices and values of each mask, given `self.ends` on the host."""
        found = [end - begin for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
        indices = torch.empty(ends[-1], dtype=torch.int64, device=self.device)
        values = torch.empty(ends[-1], dtype=self.dtype, device=self.device)
        tables = self.launch.table, self.launch.owners, self.counts, self.sums
        out = indices, values.view(_INTEGERS[self.dtype.itemsize])
        grid = (self.launch.blocks,)
        limit = EXPAND_WORDS * 32
        if any(count * 32 > numel * DENSE_BITS for count, numel in zip(found, self.sizes, strict=True)):
            limit = EXPAND_WORDS * DENSE_BITS
            _dense_kernel[grid](*tables, *out, limit, WORDS=EXPAND_WORDS, TILE=DENSE_TILE, num_warps=4)
        if ends[-1]:
            _sparse_kernel[grid](*tables, *out, limit, WORDS=EXPAND_WORDS, num_warps=4)
        return list(zip(indices.split(found), values.split(found), strict=True))


def expand(
    masks: Sequence[torch.Tensor], models: Sequence[torch.Tensor], firsts: Sequence[int], probes: torch.Tensor
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[int]]:
    """Indices and values of the set bits of many masks, with one transfer to the host in all.

    Args:
        masks: int32 words each, at least one bit for each element of its model.
        models: flat tensors of 1, 2, 4 or 8 bytes an element, one for each mask.
        firsts: what to add to the indices of each mask.
        probes: int64 [n], read back in the same transfer.

    Returns:
        Per mask `(indices, values)`, ascending int64 and the model's type; and the probes. Those of all masks
        whose models have one type are views of the same two tensors.
    """
    result: list[tuple[torch.Tensor, torch.Tensor] | None] = [None] * len(masks)
    groups: dict[torch.dtype, list[int]] = defaultdict(list)
    for i, model in enumerate(models):
        if model.numel():
            groups[model.dtype].append(i)
        else:
            result[i] = torch.empty(0, dtype=torch.int64, device=model.device), torch.empty_like(model)
    expansions = [_Expansion([(masks[i], models[i], firsts[i]) for i in group]) for group in groups.values()]
    read = iter(torch.cat([probes, *(expansion.ends for expansion in expansions)]).tolist())
    probes_read = [next(read) for _ in range(probes.numel())]
    for group, expansion in zip(groups.values(), expansions, strict=True):
        for i, pair in zip(group, expansion.write([next(read) for _ in group]), strict=True):
            result[i] = pair
    return result, probes_read
