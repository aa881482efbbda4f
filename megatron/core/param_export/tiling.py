"""Proof that boxes tile a tensor: every element covered exactly once, without memory of the tensor's size.

A box is a product of one-dimensional index sets, one per axis of the tensor, so elements that lie in the same
sets on every axis are covered alike. Each axis is cut into classes of indices with equal membership, and
coverage is counted once per combination of classes. For sharded and interleaved weights these are a handful.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Affine = tuple[int, tuple[int, ...], tuple[int, ...]]  # offset, size, stride; all in elements


@dataclass(frozen=True)
class Fault:
    """One way in which boxes fail to tile. ``index`` is the first element concerned, as a coordinate."""

    kind: str  # "gap", "overlap" or "outside"
    index: tuple[int, ...]
    boxes: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind} at {list(self.index)}"


def faults(shape: Sequence[int], boxes: Sequence[Affine]) -> list[Fault]:
    """How ``boxes`` fail to tile a contiguous tensor of this shape; empty if they tile it.

    Args:
        shape: the tensor's shape.
        boxes: affine loop nests ``(offset, size, stride)`` over flat indices. Each loop must stay within one
            axis of the shape.

    Returns:
        At most one fault per box and per class of elements, in order of position.
    """
    shape = tuple(shape) or (1,)
    keys: list[tuple] = []
    found: list[Fault] = []
    kept: list[int] = []
    for number, box in enumerate(boxes):
        key = _per_axis(shape, box)
        if key is None:
            at = tuple(int(i) for i in np.unravel_index(max(0, min(box[0], math.prod(shape) - 1)), shape))
            found.append(Fault("outside", at, (number,)))
        else:
            keys.append(key)
            kept.append(number)
    classes = [_classes(size, [key[axis] for key in keys]) for axis, size in enumerate(shape)]
    count = np.zeros([len(first) for first, _ in classes], dtype=np.int32)
    members = []
    for k in range(len(keys)):
        per_axis = [np.flatnonzero(member[k]) for _, member in classes]
        members.append(per_axis)
        count[np.ix_(*per_axis)] += 1
    for k, number in enumerate(kept):
        if any(twice for twice in (_repeats(part) for part in keys[k])):
            at = tuple(start for start, _ in keys[k])
            found.append(Fault("overlap", at, (number,)))
    for cell in np.argwhere(count != 1):
        at = tuple(int(first[c]) for (first, _), c in zip(classes, cell, strict=True))
        here = tuple(
            number
            for number, per_axis in zip(kept, members, strict=True)
            if all(c in part for c, part in zip(cell, per_axis, strict=True))
        )
        found.append(Fault("gap" if count[tuple(cell)] == 0 else "overlap", at, here))
    return found


def _per_axis(shape, box):
    """``(start, ((size, step), …))`` per axis, or None when the box does not lie in the tensor."""
    offset, sizes, strides = box
    total = math.prod(shape)
    if not 0 <= offset < total:
        return None
    axis_stride = [math.prod(shape[k + 1 :]) for k in range(len(shape))]
    start = [int(i) for i in np.unravel_index(offset, shape)]
    end = list(start)
    loops: list[list[tuple[int, int]]] = [[] for _ in shape]
    for size, stride in zip(sizes, strides, strict=True):
        if size == 1:
            continue
        if stride <= 0:
            return None
        axis = next(
            k for k in range(len(shape)) if (axis_stride[k] <= stride and shape[k] > 1) or k == len(shape) - 1
        )
        if stride % axis_stride[axis]:
            return None
        step = stride // axis_stride[axis]
        end[axis] += (size - 1) * step
        loops[axis].append((size, step))
    if any(e >= n for e, n in zip(end, shape, strict=True)):
        return None
    return tuple((s, tuple(sorted(part))) for s, part in zip(start, loops, strict=True))


def _indices(part) -> np.ndarray:
    start, loops = part
    out = np.array([start], dtype=np.int64)
    for size, step in loops:
        out = (out[:, None] + np.arange(size, dtype=np.int64) * step).ravel()
    return out


def _repeats(part) -> bool:
    if len(part[1]) < 2:
        return False
    indices = _indices(part)
    return len(np.unique(indices)) != len(indices)


def _classes(size: int, parts: list) -> tuple[np.ndarray, np.ndarray]:
    """First index of every class, and bool [parts, classes]: which parts hold it."""
    distinct = {part: k for k, part in enumerate(dict.fromkeys(parts))}
    if all(part == (0, ((size, 1),)) or (size == 1 and part == (0, ())) for part in distinct):
        return np.zeros(1, dtype=np.int64), np.ones((len(parts), 1), dtype=bool)
    inside = np.zeros((len(distinct), size), dtype=bool)
    for part, k in distinct.items():
        inside[k, _indices(part)] = True
    packed = np.ascontiguousarray(np.packbits(inside, axis=0).T)
    codes = (
        packed.view([("", packed.dtype)] * packed.shape[1]).ravel() if packed.shape[1] > 1 else packed[:, 0]
    )
    first = np.sort(np.unique(codes, return_index=True)[1])
    return first, inside[:, first][[distinct[part] for part in parts]] if parts else np.zeros(
        (0, 1), dtype=bool
    )
