"""Triton kernels for GPU-resident weights: fingerprints, and changes into live parameters. One launch for all
tensors.

Fingerprint of a box (see :mod:`~megatron.weight_sync.fingerprints`), with its elements as a matrix of rows
(up to three outer loops) and columns (the inner loop):

    sum over r, c of  mix((start + frow_r * G + c * fcol * G) xor (bits[lrow_r + c * lcol] * C))   mod 2**64

2 bytes are read per bf16 element and nothing is written; at memory speed it is bound by five 64-bit
multiplications per element. Partial sums are added with integer atomics, whose order does not matter.

Changes: each index is taken apart by the box's loops in order of falling full stride, the remainder must be
0; the old value is kept, the new one stored. Random access: a sector of 32 bytes per change each way.

The kernels take addresses, not tensors: a table of int64 describes each piece. ``TRITON_INTERPRET=1`` runs
them on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from megatron.weight_sync.boxes import Box
from megatron.weight_sync.fingerprints import M1, M2, MODULUS, C, G, name_id, signed

_UNSIGNED = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}
_SIGNED = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
_TILE = 4096
_FIELDS = 16

_C = tl.constexpr(C % MODULUS)
_M1 = tl.constexpr(M1 % MODULUS)
_M2 = tl.constexpr(M2 % MODULUS)


# ---- fingerprints ------------------------------------------------------------------------------------------


@triton.jit
def _box_sums(
    pieces, tile_piece, sums, ITEM: tl.constexpr, R: tl.constexpr, K: tl.constexpr, F: tl.constexpr
):
    piece = tl.load(tile_piece + tl.program_id(0)).to(tl.int64)
    d = pieces + piece * F
    live = tl.load(d).to(tl.pointer_type(ITEM))
    start = tl.load(d + 1)
    first_tile, inner, l_inner, f_inner = tl.load(d + 2), tl.load(d + 3), tl.load(d + 4), tl.load(d + 5)
    s0, s1, s2 = tl.load(d + 6), tl.load(d + 7), tl.load(d + 8)
    tile = tl.program_id(0).to(tl.int64) - first_tile
    across = (inner + K - 1) // K
    row = (tile // across) * R + tl.arange(0, R)
    col = (tile % across) * K + tl.arange(0, K)
    i2 = row % s2
    i1 = (row // s2) % s1
    i0 = row // (s2 * s1)
    l_row = i0 * tl.load(d + 9) + i1 * tl.load(d + 10) + i2 * tl.load(d + 11)
    f_row = i0 * tl.load(d + 12) + i1 * tl.load(d + 13) + i2 * tl.load(d + 14)
    inside = (row < s0 * s1 * s2)[:, None] & (col < inner)[None, :]
    bits = tl.load(live + (l_row[:, None] + (col * l_inner)[None, :]), mask=inside, other=0).to(tl.uint64)
    key = (start + f_row)[:, None] + (col * f_inner)[None, :]
    z = key.to(tl.uint64, bitcast=True) ^ (bits * _C)
    z = (z ^ (z >> 30)) * _M1
    z = (z ^ (z >> 27)) * _M2
    z = z ^ (z >> 31)
    z = tl.where(inside, z, 0).to(tl.int64, bitcast=True)
    tl.atomic_add(sums + piece, tl.sum(tl.sum(z, axis=1), axis=0))


def _collapse(box: Box) -> list[tuple[int, int, int]] | None:
    """(size, local stride, full stride) of a box's loops, outermost first, neighbours merged where both sides
    are contiguous; None if more than four remain."""
    loops: list[tuple[int, int, int]] = []
    for size, local, full in zip(box.size, box.local_stride, box.full_stride, strict=True):
        if size == 1:
            continue
        if loops and loops[-1][1] == size * local and loops[-1][2] == size * full:
            loops[-1] = (loops[-1][0] * size, local, full)
        else:
            loops.append((size, local, full))
    return loops if len(loops) <= 4 else None


@dataclass
class _Launch:
    itemsize: int
    cols: int
    pieces: torch.Tensor
    tile_piece: torch.Tensor
    order: torch.Tensor


class Sums:
    """Fingerprint shares of pieces of memory, described once and computed often.

    Args:
        pieces: (item size, address, key of the first element, loops) of each.
        device: where they all are.
    """

    def __init__(
        self, pieces: Sequence[tuple[int, int, int, list[tuple[int, int, int]]]], device: torch.device
    ):
        self._count, self._device = len(pieces), device
        classes: dict[tuple[int, int], list[tuple[int, list[int], int]]] = {}
        for k, (itemsize, address, start, loops) in enumerate(pieces):
            row, cols, tiles = _describe(address, start, loops)
            if tiles:
                classes.setdefault((itemsize, cols), []).append((k, row, tiles))
        self._launches = [self._table(*key, rows) for key, rows in classes.items()]

    def _table(self, itemsize: int, cols: int, rows: list[tuple[int, list[int], int]]) -> _Launch:
        first = 0
        for _, row, tiles in rows:
            row[2] = first
            first += tiles
        if first >= 1 << 31:
            raise ValueError(f"{first} tiles are more than one launch takes")
        counts = torch.tensor([tiles for _, _, tiles in rows], device=self._device)
        owner = torch.arange(len(rows), dtype=torch.int32, device=self._device).repeat_interleave(counts)
        table = torch.tensor([row for _, row, _ in rows], dtype=torch.int64, device=self._device)
        order = torch.tensor([k for k, _, _ in rows], device=self._device)
        return _Launch(itemsize, cols, table, owner, order)

    def __call__(self) -> torch.Tensor:
        """int64 [pieces], not synchronised."""
        out = torch.zeros(self._count, dtype=torch.int64, device=self._device)
        for launch in self._launches:
            sums = torch.zeros(len(launch.order), dtype=torch.int64, device=self._device)
            _box_sums[(len(launch.tile_piece),)](
                launch.pieces,
                launch.tile_piece,
                sums,
                ITEM=_UNSIGNED[launch.itemsize],
                R=_TILE // launch.cols,
                K=launch.cols,
                F=_FIELDS,
                num_warps=8,
            )
            out[launch.order] = sums
        return out


class BoxSums(Sums):
    """Fingerprint shares of boxes: (live flat tensor, box) pairs on one device, each box of at most four
    loops (:func:`few_loops`). The tensors are kept alive."""

    def __init__(self, pieces: Sequence[tuple[torch.Tensor, Box]]):
        self._alive = [live for live, _ in pieces]
        rows = []
        for live, box in pieces:
            address = live.data_ptr() + box.local_offset * live.element_size()
            start = signed(name_id(box.full_name) + box.full_offset * G)
            rows.append((live.element_size(), address, start, _collapse(box) if box.numel else [(0, 1, 1)]))
        super().__init__(rows, pieces[0][0].device)


def few_loops(box: Box) -> bool:
    """Whether the kernels take this box."""
    return box.numel == 0 or _collapse(box) is not None


def words_sum(data: torch.Tensor, start: int) -> torch.Tensor:
    """Sum of mix over the 64-bit words of ``data``, uint8 [8 n] at an address that is a multiple of 8: int64
    []."""
    return Sums([(8, data.data_ptr(), start, [(data.numel() // 8, 1, 1)])], data.device)()[0]


def _describe(address: int, start: int, loops) -> tuple[list[int], int, int]:
    """(table row, columns of a tile, number of tiles)."""
    inner, l_inner, f_inner = loops[-1] if loops else (1, 1, 1)
    outer = [(1, 0, 0)] * (3 - len(loops[:-1])) + list(loops[:-1])
    cols = _TILE if inner >= _TILE else 512 if inner >= 512 else 64
    rows = outer[0][0] * outer[1][0] * outer[2][0]
    tiles = -(-inner // cols) * -(-rows // (_TILE // cols))
    row = [address, start, 0, inner, l_inner, signed(f_inner * G)]
    row += [size for size, _, _ in outer] + [local for _, local, _ in outer]
    row += [signed(full * G) for _, _, full in outer]
    return row + [0] * (_FIELDS - len(row)), cols, tiles


# ---- changes into live weights -----------------------------------------------------------------------------


@triton.jit
def _monotone(bits, ITEM: tl.constexpr, WIDTH: tl.constexpr):
    """Sign-magnitude bits ↔ integers in the order of the floats."""
    LARGEST: tl.constexpr = (1 << (WIDTH - 1)) - 1
    return (bits ^ ((bits >> (WIDTH - 1)) & LARGEST)).to(ITEM)


@triton.jit
def _swap(
    pieces,
    tile_piece,
    kept,
    ITEM: tl.constexpr,
    WIDTH: tl.constexpr,
    RELATIVE: tl.constexpr,
    RESTORE: tl.constexpr,
    N: tl.constexpr,
    F: tl.constexpr,
):
    piece = tl.load(tile_piece + tl.program_id(0)).to(tl.int64)
    d = pieces + piece * F
    live = tl.load(d).to(tl.pointer_type(ITEM))
    index_at = tl.load(d + 1).to(tl.pointer_type(tl.int64))
    value_at = tl.load(d + 2).to(tl.pointer_type(ITEM))
    count, first_tile, kept_at = tl.load(d + 3), tl.load(d + 4), tl.load(d + 5)
    k = (tl.program_id(0).to(tl.int64) - first_tile) * N + tl.arange(0, N)
    there = k < count
    rest = tl.load(index_at + k, mask=there, other=0) - tl.load(d + 6)
    inside = there & (rest >= 0)
    at = tl.zeros([N], dtype=tl.int64)
    for loop in tl.static_range(4):
        size = tl.load(d + 7 + 3 * loop)
        local = tl.load(d + 8 + 3 * loop)
        full = tl.load(d + 9 + 3 * loop)
        i = tl.minimum(rest // full, size - 1)
        rest -= i * full
        at += i * local
    inside = inside & (rest == 0)
    if RESTORE:
        tl.store(live + at, tl.load(kept + kept_at + k, mask=inside), mask=inside)
    else:
        old = tl.load(live + at, mask=inside, other=0)
        tl.store(kept + kept_at + k, old, mask=there)
        new = tl.load(value_at + k, mask=there, other=0)
        if RELATIVE:
            new = _monotone((_monotone(old, ITEM, WIDTH) + new).to(ITEM), ITEM, WIDTH)
        tl.store(live + at, new, mask=inside)


@dataclass(frozen=True)
class Change:
    """Changes of one tensor, for one piece of it: ``index`` int64 [n] counts from ``base`` (so that one list
    may serve many tensors); ``bits`` [n]."""

    live: torch.Tensor
    box: Box
    index: torch.Tensor
    bits: torch.Tensor
    base: int


class Swap:
    """Many tensors' changes: stored into live weights, the old values kept, and put back on demand.

    Args:
        changes: all of one element size and on one device.
        relative: bits are distances in units in the last place.

    Raises:
        ValueError: a box has more than four loops.
    """

    _N = 1024

    def __init__(self, changes: Sequence[Change], relative: bool):
        self._alive = list(changes)
        device = changes[0].live.device
        itemsize = changes[0].live.element_size()
        self.itemsize, self.relative = itemsize, relative
        rows, counts, first, kept = [], [], 0, 0
        for change in changes:
            n = change.index.numel()
            tiles = -(-n // self._N)
            loops = _collapse(change.box)
            if loops is None:
                raise ValueError(f"{change.box.full_name}: a box with more than four loops")
            loops = sorted(loops, key=lambda loop: -loop[2])
            # A loop of size 1 takes nothing off; any stride that is not 0 will do.
            loops = loops + [(1, 0, 1)] * (4 - len(loops))
            address = change.live.data_ptr() + change.box.local_offset * itemsize
            row = [address, change.index.data_ptr(), change.bits.data_ptr(), n, first, kept]
            row += [change.base + change.box.full_offset, *(x for loop in loops for x in loop)]
            rows.append(row)
            counts.append(tiles)
            first += tiles
            kept += n
        self._pieces = torch.tensor(rows, dtype=torch.int64, device=device)
        owner = torch.arange(len(rows), dtype=torch.int32, device=device)
        self._tiles = owner.repeat_interleave(torch.tensor(counts, device=device))
        self._kept = torch.empty(kept, dtype=changes[0].bits.dtype, device=device)

    def store(self) -> None:
        """Write the new values, keep the old ones."""
        self._run(restore=False)

    def put_back(self) -> None:
        """Write the kept values."""
        self._run(restore=True)

    def _run(self, restore: bool) -> None:
        if not len(self._tiles):
            return
        _swap[(len(self._tiles),)](
            self._pieces,
            self._tiles,
            self._kept,
            ITEM=_SIGNED[self.itemsize],
            WIDTH=8 * self.itemsize,
            RELATIVE=self.relative,
            RESTORE=restore,
            N=self._N,
            F=self._pieces.shape[1],
            num_warps=4,
        )
