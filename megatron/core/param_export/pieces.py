"""Pieces: what a stretch of a Megatron parameter means, before any external name is given to it.

A piece says: these elements of the local parameter are that part of the *semantic* tensor ``role``, for
example the query rows of layer 3. A semantic tensor has named axes: ``r`` (rows, or the only axis of a
vector), ``c`` (columns) and, for routed experts, ``e`` (the expert). A family then places semantic tensors
inside Hugging Face tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

R, C = 0, 1


@dataclass(frozen=True)
class Loop:
    """``size`` steps, each ``local_stride`` elements on in the parameter and ``step`` on along ``axis``."""

    size: int
    local_stride: int
    axis: int
    step: int = 1


@dataclass(frozen=True)
class Piece:
    """Part of a local parameter and its place in a semantic tensor.

    ``shape`` is the semantic tensor's full shape (without the expert axis), ``start`` the coordinate of the
    piece's first element. ``layer`` counts from 0 over the whole model; ``None`` outside of layers. ``scope``
    is "model", "layer" or "mtp"; for "mtp", ``layer`` counts the prediction depths from 0.
    """

    role: str
    scope: str
    layer: int | None
    expert: int | None
    shape: tuple[int, ...]
    start: tuple[int, ...]
    local_offset: int
    loops: tuple[Loop, ...]


@dataclass(frozen=True)
class Place:
    """Where the roles of one module live."""

    scope: str = "model"
    layer: int | None = None
    expert: int | None = None


@dataclass(frozen=True)
class Span:
    """One axis of a linear layer as this rank holds it: ``size`` elements from ``start`` of ``full``."""

    full: int
    start: int
    size: int

    @classmethod
    def even(cls, local: int, rank: int = 0, ranks: int = 1) -> Span:
        return cls(local * ranks, local * rank, local)


def dense(place: Place, role: str, rows: Span, cols: Span | None = None, local_offset: int = 0) -> Piece:
    """A matrix shard (``cols`` given) or vector shard, stored row by row."""
    if cols is None:
        return _piece(place, role, (rows.full,), (rows.start,), local_offset, (Loop(rows.size, 1, R),))
    loops = (Loop(rows.size, cols.size, R), Loop(cols.size, 1, C))
    return _piece(place, role, (rows.full, cols.full), (rows.start, cols.start), local_offset, loops)


def row_runs(
    place: Place, role: str, full_rows: int, cols: Span | None, runs: list[tuple[int, int, int, int, int]]
) -> Iterator[Piece]:
    """Runs of rows: each run is ``(count, rows, local_row, local_pitch, full_row)``.

    ``count`` blocks of ``rows`` rows; blocks lie ``local_pitch`` rows apart in the parameter and directly
    after one another in the semantic tensor, from ``full_row``.
    """
    width = 1 if cols is None else cols.size
    shape, start = ((full_rows,), ()) if cols is None else ((full_rows, cols.full), (cols.start,))
    tail = () if cols is None else (Loop(cols.size, 1, C),)
    for count, rows, local_row, local_pitch, full_row in runs:
        head = (Loop(count, local_pitch * width, R, rows),) if count > 1 else ()
        yield _piece(
            place, role, shape, (full_row, *start), local_row * width, (*head, Loop(rows, width, R), *tail)
        )


def glu(
    place: Place, roles: tuple[str, str], rows: Span, cols: Span | None, interleave: int | None = None
) -> Iterator[Piece]:
    """Gate and up halves of a gated linear unit. ``rows`` is the span of *one* half.

    Each rank stores its gate rows, then its up rows; with ``interleave``, blocks of that many rows in turn.
    """
    block = interleave or rows.size
    if rows.size % block:
        raise ValueError(f"{roles[0]}: {rows.size} rows per rank do not divide into blocks of {block}")
    for half, role in enumerate(roles):
        runs = [(rows.size // block, block, half * block, 2 * block, rows.start)]
        yield from row_runs(place, role, rows.full, cols, runs)


def grouped_query(
    place: Place,
    kind: str,
    heads: int,
    groups: int,
    head_dim: int,
    cols: Span | None,
    rank: int,
    ranks: int,
    gated: bool = False,
) -> Iterator[Piece]:
    """Query, (output gate,) key and value rows of a fused QKV projection; ``kind`` is "weight" or "bias".

    The full projection is, for each key-value group: the group's query heads, its gate heads if there are
    any, one key head, one value head. Ranks hold equal runs of these rows, which end inside a group when
    there are fewer groups than ranks.
    """
    q = heads // groups * head_dim
    parts = [("q", q)] + ([("gate", q)] if gated else []) + [("k", head_dim), ("v", head_dim)]
    pitch = sum(rows for _, rows in parts)
    if groups * pitch % ranks:
        raise ValueError(f"attn.qkv: {groups * pitch} rows do not divide over {ranks} ranks")
    here = groups * pitch // ranks
    first = here * rank
    at = 0
    for part, rows in parts:
        runs = []
        if here % pitch == 0:
            runs = [(here // pitch, rows, at, pitch, first // pitch * rows)]
        else:
            for group in range(first // pitch, -(-(first + here) // pitch)):
                low, high = max(group * pitch + at, first), min(group * pitch + at + rows, first + here)
                if low < high:
                    runs.append((1, high - low, low - first, 0, low - group * pitch - at + group * rows))
        yield from row_runs(place, f"attn.{part}.{kind}", groups * rows, cols, runs)
        at += rows


def _piece(place, role, shape, start, local_offset, loops) -> Piece:
    loops = tuple(loop for loop in loops if loop.size != 1) or (Loop(1, 1, R),)
    return Piece(role, place.scope, place.layer, place.expert, shape, start, local_offset, loops)
