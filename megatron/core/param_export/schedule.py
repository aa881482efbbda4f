"""Which tensors travel together, and where each shard lies in the gathered bytes.

Within a pipeline stage, the ranks of a tensor-parallel group (and for experts of an expert-tensor-parallel ×
expert-parallel group) hold every tensor of the stage between them. So one step is gathered so: the rank of
the owning stage packs its shards into one run of bytes (its row); if other stages need them, it passes the
row to the ranks at its place in those stages; and in every stage the group gathers its rows. Rows are laid
out alike on all ranks, because the proof has shown that the ranks of such a group hold the same kinds of
shards.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from megatron.core.param_export.plan import Plan
from megatron.weight_sync.boxes import Box

ALIGN = 128  # bytes


@dataclass
class Run:
    """Local tensors of a rank, one behind another in bytes.

    ``places``: (number among the kind's entries, byte offset) each. ``fill``, on the ranks that pack it: per
    type its tensors, and the run cut into a gap, a tensor, a gap, a tensor, ..., a gap, in elements.
    """

    nbytes: int = 0
    places: list[tuple[int, int]] = field(default_factory=list)
    fill: list[tuple[torch.dtype, list[torch.Tensor], list[int]]] = field(default_factory=list)

    def add(self, number: int, nbytes: int) -> int:
        """The offset of one more tensor."""
        offset = self.nbytes
        self.places.append((number, offset))
        self.nbytes += _aligned(nbytes)
        return offset

    def fill_from(self, tensors: Sequence[torch.Tensor]) -> None:
        """The tensors are those of the kind's entries on this rank."""
        by_dtype: dict[torch.dtype, tuple[list[torch.Tensor], list[int]]] = {}
        for number, offset in self.places:
            tensor = tensors[number]
            of_dtype, bounds = by_dtype.setdefault(tensor.dtype, ([], [0]))
            of_dtype.append(tensor)
            bounds += [offset // tensor.itemsize, offset // tensor.itemsize + tensor.numel()]
        for dtype, (of_dtype, bounds) in by_dtype.items():
            bounds.append(self.nbytes // dtype.itemsize)
            self.fill.append((dtype, of_dtype, [end - start for start, end in pairwise(bounds)]))


@dataclass
class Part:
    """Tensors of one stage and kind in a step: a row of shards, and whole tensors that need no gather."""

    stage: int
    kind: str
    row: Run = field(default_factory=Run)
    whole: Run = field(default_factory=Run)


@dataclass(frozen=True)
class Source:
    """A box of a full tensor, and where its shard lies in a view of the step.

    The box counts units of ``unit``, an integer type as wide as whole runs of elements allow: elements are
    only moved, and wide ones move faster. ``offset`` and ``size`` of the shard count the same units.
    """

    view: int
    unit: torch.dtype
    offset: int
    size: int
    box: Box


@dataclass(frozen=True)
class FullTensor:
    """A tensor to hand out, contiguous. ``run``: (view, element offset) where the gathered bytes hold it as
    it is; then it has no sources.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    sources: tuple[Source, ...]
    run: tuple[int, int] | None


@dataclass
class Step:
    """Tensors that travel together. ``views``: (part, type), the gathered bytes as elements."""

    parts: list[Part]
    views: list[tuple[int, torch.dtype]]
    tensors: list[FullTensor]
    nbytes: int


@dataclass(frozen=True)
class Schedule:
    """The steps, and what this rank does in each, for one choice of receivers and limit."""

    steps: list[Step]
    receives: bool
    gathers: dict[str, bool]  # kind -> a rank of my gather group receives
    needed_by: dict[str, tuple[int, ...]]  # kind -> stages in which a rank at my place gathers


def schedule(
    plan: Plan, receivers: Sequence[int], limit: int, names: Collection[str] | None = None
) -> Schedule:
    """The schedule of an export; that of all tensors is cached on the plan."""
    if names is not None:
        return _Scheduler(plan, set(receivers), limit).run(set(names))
    key = tuple(receivers), limit
    if key not in plan.schedules:
        plan.schedules[key] = _Scheduler(plan, set(receivers), limit).run()
    return plan.schedules[key]


class _Scheduler:
    def __init__(self, plan: Plan, receivers: set[int], limit: int):
        self.plan, self.receivers, self.limit = plan, receivers, limit
        self.members = plan.members
        self.lists = [
            {kind: member.of_kind(kind) for kind in member.position.gather} for member in plan.members
        ]
        self.tensors = {
            kind: [entry.tensor for entry in plan.entries if entry.record.kind == kind]
            for kind in plan.position.gather
        }

    def run(self, wanted: set[str] | None = None) -> Schedule:
        plan, me = self.plan, self.plan.position
        wants = {
            kind: [not self.receivers.isdisjoint(member.position.gather[kind]) for member in self.members]
            for kind in me.gather
        }
        steps: list[list[tuple[list[tuple], list[str], int]]] = []
        filled = 0
        for keys, together in self.units():
            names = [name for name in together if wanted is None or name in wanted]
            if not names:
                continue
            size = sum(self.unit_bytes(key) for key in keys)
            if not steps or filled + size > self.limit:
                steps.append([])
                filled = 0
            steps[-1].append((keys, names, size))
            filled += size
        return Schedule(
            steps=[self.step(units) for units in steps],
            receives=plan.rank in self.receivers,
            gathers={kind: wants[kind][plan.rank] for kind in me.gather},
            needed_by={
                kind: tuple(stage for stage, rank in enumerate(me.pipeline) if wants[kind][rank])
                for kind in me.gather
            },
        )

    def units(self) -> list[tuple[list[tuple], list[str]]]:
        """``(entries, full tensors)`` that can only travel together, in export order; cached on the plan.

        An entry is (stage, kind, number); on each rank of its group it holds shards of some full tensors.
        """
        if self.plan.units is None:
            self.plan.units = self.find_units()
        return self.plan.units

    def find_units(self) -> list[tuple[list[tuple], list[str]]]:
        parent: dict = {}

        def root(node):
            parent.setdefault(node, node)
            while parent[node] != node:
                parent[node] = node = parent[parent[node]]
            return node

        for lists, member in zip(self.lists, self.members, strict=True):
            for kind, entries in lists.items():
                if member.position.replica[kind]:
                    continue
                for number, entry in enumerate(entries):
                    if not entry.duplicate:
                        for name in dict.fromkeys(box.full_name for box in entry.boxes):
                            parent[root(name)] = root((member.position.stage, kind, number))
        units: dict = {}
        for name in self.plan.expected:
            units.setdefault(root(name), ([], []))[1].append(name)
        for node in list(parent):
            if isinstance(node, tuple) and root(node) in units:
                units[root(node)][0].append(node)
        return [(sorted(keys), names) for keys, names in units.values()]

    def entry(self, key, row: int | None = None):
        """An entry as held by the rank at ``row`` (default: mine) of my group's place in the owning stage."""
        stage, kind, number = key
        peers = self.plan.position.gather[kind]
        peer = self.plan.rank if row is None else peers[row]
        source = self.members[peer].position.pipeline[stage]
        return self.lists[source][kind][number]

    def unit_bytes(self, key) -> int:
        entry = self.entry(key)
        rows = 1 if entry.replicated and key[1] == "dense" else len(self.plan.position.gather[key[1]])
        return _aligned(entry.nbytes) * rows

    def step(self, units) -> Step:
        me = self.plan.position
        parts: dict[tuple, Part] = {}
        where: dict[str, list[tuple[int, int, int, Box]]] = {}
        pending = []
        for keys, _, _ in units:
            for key in keys:
                entry = self.entry(key)
                part = parts.setdefault(key[:2], Part(*key[:2]))
                if entry.replicated and key[1] == "dense":
                    pending.append((key, part, None, part.whole.add(key[2], entry.nbytes)))
                else:
                    offset = part.row.add(key[2], entry.nbytes)
                    pending += [(key, part, row, offset) for row in range(len(me.gather[key[1]]))]
        for part in parts.values():
            if part.stage == me.stage:
                part.row.fill_from(self.tensors[part.kind])
                part.whole.fill_from(self.tensors[part.kind])
        numbers = {id(part): k for k, part in enumerate(parts.values())}
        for key, part, row, offset in pending:
            entry = self.entry(key, row)
            rows = len(me.gather[key[1]])
            start = offset + (rows if row is None else row) * part.row.nbytes
            if row is None or not entry.replicated or entry.sharer:
                for box in entry.boxes:
                    place = numbers[id(part)], start, entry.nbytes, box
                    where.setdefault(box.full_name, []).append(place)
        views: dict[tuple[int, torch.dtype], int] = {}
        tensors = [self.full_tensor(name, where[name], views) for _, names, _ in units for name in names]
        return Step(list(parts.values()), list(views), tensors, sum(size for _, _, size in units))

    def full_tensor(self, name: str, places: list[tuple[int, int, int, Box]], views) -> FullTensor:
        """``views`` of the step grow by what this tensor needs."""
        shape, dtype = self.plan.expected[name], self.plan.dtype(name)
        stride = tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))
        # Where the tensor's first element would lie, were all of it laid out like this box.
        begins = {
            (part, start // dtype.itemsize + box.local_offset - box.full_offset)
            for part, start, _, box in places
        }
        if len(begins) == 1 and all(box.local_stride == box.full_stride for *_, box in places):
            part, begin = begins.pop()
            return FullTensor(name, shape, stride, dtype, (), (_view(views, part, dtype), begin))
        numel = math.prod(shape)
        sources = tuple(_source(views, *place, dtype.itemsize, numel) for place in places)
        return FullTensor(name, shape, stride, dtype, sources, None)


def _view(views: dict[tuple[int, torch.dtype], int], part: int, dtype: torch.dtype) -> int:
    return views.setdefault((part, dtype), len(views))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


_UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def _source(views, part: int, start: int, nbytes: int, box: Box, itemsize: int, numel: int) -> Source:
    """A box in the widest units that its runs of elements, its strides and both tensors are made of."""
    inner = [k for k in range(len(box.size)) if box.local_stride[k] == box.full_stride[k] == 1]
    unit = itemsize
    if inner:
        (k,) = inner[:1]
        others = [
            s for j in range(len(box.size)) if j != k for s in (box.local_stride[j], box.full_stride[j])
        ]
        run = math.gcd(box.size[k], box.local_offset, box.full_offset, numel, nbytes // itemsize, *others)
        unit = math.gcd(run * itemsize, 8)
    wide = unit // itemsize
    if wide > 1:
        box = Box(
            box.full_name,
            tuple(n // wide if j == k else n for j, n in enumerate(box.size)),
            box.local_offset // wide,
            tuple(1 if j == k else s // wide for j, s in enumerate(box.local_stride)),
            box.full_offset // wide,
            tuple(1 if j == k else s // wide for j, s in enumerate(box.full_stride)),
        )
    view = _view(views, part, _UNITS[unit])
    return Source(view, _UNITS[unit], start // unit, nbytes // unit, box)
