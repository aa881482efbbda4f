"""CUDA kernels of the bitmask, in Triton: the copy that captures, and the expansion of bits to indices.

Capture. With old_i the model's element and new_i = round(main_i) to its type, for byte b of eight elements

    mask_b |= sum over l of [bits(old_8b+l) != bits(new_8b+l)] * 2^l;   model_i = new_i

in one pass: 8.125 to 8.25 bytes an element for bf16 from fp32, where the plain copy moves 6. Eight neighbours
that all keep their bits need no store, so where few change the traffic falls towards 6.125 bytes.

Expansion. Words are cut into blocks. One kernel counts the bits of each block, a prefix sum over the counts
gives each block its place, and a second kernel writes the indices. Where few bits are set every word gives up
its lowest one per round, for as many rounds as the fullest word of the block has bits: work follows words and
changes, not elements. Where many are set, every element finds its own place, so that neighbours write to
neighbouring places.

`TRITON_INTERPRET=1` runs them on the CPU.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

__all__ = ["capture", "expand"]

CAPTURE_BYTES = 1024  # of the mask to a program: 8192 elements
EXPAND_WORDS = 512
DENSE_BITS: tl.constexpr = tl.constexpr(4)  # set bits per word from which every element is looked at
DENSE_WORDS: tl.constexpr = tl.constexpr(32)  # at a time


@triton.jit
def _capture_kernel(model, main, mask, numel, BYTES: tl.constexpr, SKIP: tl.constexpr):
    # One row is one byte of the mask: eight elements, which one thread loads and stores as a vector.
    start = tl.program_id(0).to(tl.int64) * BYTES
    left = tl.minimum(numel - start * 8, BYTES * 8).to(tl.int32)
    row = tl.arange(0, BYTES)
    lane = tl.arange(0, 8)
    index = row[:, None] * 8 + lane[None, :]
    inside = index < left
    old = tl.load(model + start * 8 + index, mask=inside, other=0.0)
    new = tl.load(main + start * 8 + index, mask=inside, other=0.0).to(old.dtype)
    changed = old.to(tl.int16, bitcast=True) != new.to(tl.int16, bitcast=True)
    byte = tl.sum(tl.where(changed, 1 << lane[None, :], 0), axis=1)
    if SKIP:
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
def _count_kernel(words, counts, num_words, WORDS: tl.constexpr):
    block = tl.program_id(0)
    row = block.to(tl.int64) * WORDS + tl.arange(0, WORDS)
    word = tl.load(words + row, mask=row < num_words, other=0).to(tl.uint32, bitcast=True)
    tl.store(counts + block, tl.sum(_popcount(word)))


@triton.jit
def _compact_kernel(words, ends, counts, model, indices, values, num_words, first, WORDS: tl.constexpr):
    block = tl.program_id(0)
    count = tl.load(counts + block)
    start = block.to(tl.int64) * WORDS
    place = tl.load(ends + block) - count
    if count > WORDS * DENSE_BITS:
        for begin in range(0, WORDS, DENSE_WORDS):
            row = start + begin + tl.arange(0, DENSE_WORDS)
            word = tl.load(words + row, mask=row < num_words, other=0).to(tl.uint32, bitcast=True)
            bits = _popcount(word)
            before = place + tl.cumsum(bits, 0) - bits
            lane = tl.arange(0, 32)[None, :].to(tl.uint32)
            present = ((word[:, None] >> lane) & 1) != 0
            lower = word[:, None] & ((tl.full([1, 32], 1, tl.uint32) << lane) - 1)
            at = before[:, None] + _popcount(lower)
            index = row[:, None] * 32 + lane.to(tl.int32)
            tl.store(indices + at, index + first, mask=present)
            tl.store(values + at, tl.load(model + index, mask=present), mask=present)
            place += tl.sum(bits)
    elif count > 0:
        row = start + tl.arange(0, WORDS)
        word = tl.load(words + row, mask=row < num_words, other=0).to(tl.uint32, bitcast=True)
        bits = _popcount(word)
        at = place + tl.cumsum(bits, 0) - bits
        rounds = tl.max(bits)
        while rounds > 0:
            present = word != 0
            lower = word & (word - 1)  # without its lowest set bit
            power = (word ^ lower).to(tl.float32)  # a power of two: its exponent is the bit's position
            lane = (power.to(tl.int32, bitcast=True) >> 23) - 127
            index = row * 32 + lane
            tl.store(indices + at, index + first, mask=present)
            tl.store(values + at, tl.load(model + index, mask=present), mask=present)
            at += present.to(tl.int64)
            word = lower
            rounds -= 1


def capture(
    model: torch.Tensor,
    main: torch.Tensor,
    words: torch.Tensor,
    skip: bool = True,
    tile: int = CAPTURE_BYTES,
    warps: int = 4,
) -> None:
    """`model.copy_(main)`, setting the bits of elements of `model` whose bits change.

    Args:
        model: flat bf16 or fp16 [numel], contiguous.
        main: flat, any floating type, [numel], contiguous, same device.
        words: int32 [ceil(numel / 32)].
        skip: do not store where eight neighbours all keep their bits.
        tile: bytes of the mask to a program.
    """
    numel = model.numel()
    if numel:
        grid = (triton.cdiv(numel, 8 * tile),)
        mask = words.view(torch.uint8)
        _capture_kernel[grid](model, main, mask, numel, BYTES=tile, SKIP=skip, num_warps=warps)


def expand(
    masks: Sequence[torch.Tensor], models: Sequence[torch.Tensor], firsts: Sequence[int], probes: torch.Tensor
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[int]]:
    """Indices and values of the set bits of many masks, with one transfer to the host in all.

    Args:
        masks: int32 words each.
        models: flat 16-bit tensors, one for each mask.
        firsts: what to add to the indices of each mask.
        probes: int64 [n], read back in the same transfer.

    Returns:
        Per mask `(indices, values)`, ascending int64 and the model's type; and the probes.
    """
    blocks = [triton.cdiv(words.numel(), EXPAND_WORDS) for words in masks]
    counts = torch.empty(sum(blocks), dtype=torch.int64, device=probes.device)
    for words, mine in zip(masks, counts.split(blocks), strict=True):
        if mine.numel():
            _count_kernel[(mine.numel(),)](words, mine, words.numel(), WORDS=EXPAND_WORDS, num_warps=4)
    sums = torch.cumsum(counts, 0)
    edges = torch.tensor(blocks, dtype=torch.int64).cumsum(0)
    ends = torch.cat([sums.new_zeros(1), sums])[edges.to(sums.device, non_blocking=True)]
    read = torch.cat([ends, probes]).tolist()
    ends, probes_read = read[: len(masks)], read[len(masks) :]
    total = ends[-1] if ends else 0
    indices = torch.empty(total, dtype=torch.int64, device=counts.device)
    result, begin = [], 0
    for words, mine, mine_ends, model, first, end in zip(
        masks, counts.split(blocks), sums.split(blocks), models, firsts, ends, strict=True
    ):
        here = indices[begin:end]
        values = torch.empty(end - begin, dtype=model.dtype, device=model.device)
        if end > begin:
            _compact_kernel[(mine.numel(),)](
                words, mine_ends - begin, mine, model, here, values, words.numel(), first,
                WORDS=EXPAND_WORDS, num_warps=4,
            )  # fmt: skip
        result.append((here, values))
        begin = end
    return result, probes_read
