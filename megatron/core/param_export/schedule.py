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

import torch

from megatron.core.param_export.layout import is_ordinary
from megatron.core.param_export.plan import Plan, PlanEntry
from megatron.weight_sync.boxes import Box

ALIGN = 128  # bytes


@dataclass(frozen=True)
class Fill:
    """Local tensors of one type and shape, at equal distances in a run: sizes, strides and offset of where
    they go, in elements, with a dimension more for several. Those that are not ``ordinary`` are copied flat.
    """

    tensors: list[torch.Tensor]
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    ordinary: bool

    def places(self, run: torch.Tensor) -> Sequence[torch.Tensor]:
        """Where the tensors go in a run's bytes."""
        run = run.view(self.dtype)
        place = run.as_strided(self.size, self.stride, run.storage_offset() + self.offset)
        return place.unbind() if len(self.tensors) > 1 else [place]


@dataclass
class Run:
    """Local tensors of a rank, one behind another in bytes.

    ``places``: (number among the kind's entries, byte offset) each. ``fills``, on the ranks that pack it: the
    tensors, and where they go.
    """

    nbytes: int = 0
    places: list[tuple[int, int]] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)

    def add(self, number: int, nbytes: int) -> int:
        """The offset of one more tensor."""
        offset = self.nbytes
        self.places.append((number, offset))
        self.nbytes += _aligned(nbytes)
        return offset

    def fill_from(self, entries: Sequence[PlanEntry]) -> None:
        """The entries are those of the kind on this rank. Types and shapes are those that the plan read: a
        stale plan is refused later, and the model may be as it was by the next export."""
        alike: dict[tuple[bool, torch.dtype, tuple[int, ...]], list[tuple[int, int]]] = {}
        for number, offset in self.places:
            entry = entries[number]
            ordinary, dtype = is_ordinary(entry.tensor), entry.record.dtype
            shape = tuple(entry.shape) if ordinary else (entry.shape.numel(),)
            alike.setdefault((ordinary, dtype, shape), []).append((offset // dtype.itemsize, number))
        for (ordinary, dtype, shape), members in alike.items():
            for run in _equal_distances(sorted(members), 1):
                place = _spread(shape, _contiguous(shape), run)
                tensors = [entries[number].tensor for _, number in run]
                self.fills.append(Fill(tensors, dtype, *place, ordinary))


@dataclass
class Part:
    """Tensors of one stage and kind in a step: a row of shards, and whole tensors that need no gather."""

    stage: int
    kind: str
    row: Run = field(default_factory=Run)
    whole: Run = field(default_factory=Run)


@dataclass(frozen=True)
class Place:
    """Some elements of a view of the step: sizes, strides and offset, as of ``as_strided``."""

    view: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Group:
    """Full tensors of one shape at equal distances: ``members`` are their numbers in the step. ``place`` is
    that of one, or has a dimension more for several.
    """

    place: Place
    members: tuple[int, ...]


@dataclass
class Step:
    """Tensors that travel together, by ``names`` in the order in which they are handed out.

    The gathered bytes hold some of them as they are. The others are put together in memory of ``built`` bytes
    by ``copies``, (from, to) each, which count units of an integer type as wide as whole runs of elements
    allow: elements are only moved, and wide ones move faster. ``views`` are (buffer, type): the bytes of a
    part, or after those of the last part what is built, as elements.
    """

    parts: list[Part]
    names: list[str] = field(default_factory=list)
    views: list[tuple[int, torch.dtype]] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    copies: list[tuple[Place, Place]] = field(default_factory=list)
    built: int = 0
    nbytes: int = 0


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
        self.entries_of = {
            kind: [entry for entry in plan.entries if entry.record.kind == kind]
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
                part.row.fill_from(self.entries_of[part.kind])
                part.whole.fill_from(self.entries_of[part.kind])
        numbers = {id(part): k for k, part in enumerate(parts.values())}
        for key, part, row, offset in pending:
            entry = self.entry(key, row)
            rows = len(me.gather[key[1]])
            start = offset + (rows if row is None else row) * part.row.nbytes
            if row is None or not entry.replicated or entry.sharer:
                for box in entry.boxes:
                    place = numbers[id(part)], start, entry.nbytes, box
                    where.setdefault(box.full_name, []).append(place)
        step = _StepBuilder(list(parts.values()))
        for _, names, nbytes in units:
            step.nbytes += nbytes
            for name in names:
                step.add(name, self.plan.expected[name], self.plan.dtype(name), where[name])
        return step.done()


class _StepBuilder:
    """Finds out where each full tensor of a step lies, or what puts it together."""

    def __init__(self, parts: list[Part]):
        self.step = Step(parts)
        self.nbytes = 0
        self.views: dict[tuple[int, torch.dtype], int] = {}
        self.places: list[Place] = []  # of each tensor
        self.boxes: dict[tuple, list[tuple[int, int]]] = {}  # to copy, by what is alike: offsets from and to

    def add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, boxes: list) -> None:
        """``boxes``: (part, byte where the shard starts, bytes of the shard, box) each."""
        step, itemsize = self.step, dtype.itemsize
        stride = _contiguous(shape)
        # Where the tensor's first element would lie, were all of it laid out like this box.
        begins = {
            (part, start // itemsize + box.local_offset - box.full_offset) for part, start, _, box in boxes
        }
        if len(begins) == 1 and all(box.local_stride == box.full_stride for *_, box in boxes):
            [(buffer, begin)] = begins
        else:
            buffer, begin = len(step.parts), step.built // itemsize
            numel = math.prod(shape)
            for part, start, nbytes, box in boxes:
                unit, wide = _widest(box, nbytes // itemsize, numel, itemsize)
                here, there = (self.view(number, unit) for number in (part, buffer))
                offsets = (
                    start // unit.itemsize + wide.local_offset,
                    step.built // unit.itemsize + wide.full_offset,
                )
                alike = here, there, wide.size, wide.local_stride, wide.full_stride
                self.boxes.setdefault(alike, []).append(offsets)
            step.built += _aligned(numel * itemsize)
        step.names.append(name)
        self.places.append(Place(self.view(buffer, dtype), shape, stride, begin))

    def view(self, buffer: int, dtype: torch.dtype) -> int:
        return self.views.setdefault((buffer, dtype), len(self.views))

    def done(self) -> Step:
        step = self.step
        step.nbytes, step.views = self.nbytes, list(self.views)
        for (here, there, size, local, full), offsets in self.boxes.items():
            for run in _equal_distances(sorted(offsets)):
                back = [(to, from_) for from_, to in run]
                step.copies.append(
                    (Place(here, *_spread(size, local, run)), Place(there, *_spread(size, full, back)))
                )
        alike: dict[tuple, list[tuple[int, int]]] = {}
        for member, place in enumerate(self.places):
            alike.setdefault((place.view, place.size, place.stride), []).append((place.offset, member))
        for (view, size, stride), members in alike.items():
            for run in _equal_distances(sorted(members), 1):
                place = Place(view, *_spread(size, stride, run))
                step.groups.append(Group(place, tuple(member for _, member in run)))
        return step


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))


def _spread(size: tuple[int, ...], stride: tuple[int, ...], run: list[tuple[int, ...]]):
    """(sizes, strides, offset) of what lies at the first numbers of ``run``, at equal distances: a dimension
    more if there are several."""
    (begin, *_), *others = run
    if not others:
        return size, stride, begin
    return (len(run), *size), (others[0][0] - begin, *stride), begin


def _equal_distances(rows: list[tuple[int, ...]], columns: int | None = None) -> list[list[tuple[int, ...]]]:
    """Cut where the differences between neighbours, in the first ``columns``, change or are negative."""
    out: list[list[tuple[int, ...]]] = []
    distance: list[int] = []
    for row in rows:
        between = [b - a for a, b in zip(out[-1][-1], row, strict=True)][:columns] if out else [-1]
        if min(between) >= 0 and (len(out[-1]) == 1 or between == distance):
            out[-1].append(row)
            distance = between
        else:
            out.append([row])
    return out


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


_UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def _widest(box: Box, local: int, full: int, itemsize: int) -> tuple[torch.dtype, Box]:
    """A type, and the box in its units: the widest that the runs of elements, the strides, and both tensors
    (``local`` and ``full`` elements) are made of."""
    inner = [k for k in range(len(box.size)) if box.local_stride[k] == box.full_stride[k] == 1]
    if not inner:
        return _UNITS[itemsize], box
    (k,) = inner[:1]
    others = [s for j in range(len(box.size)) if j != k for s in (box.local_stride[j], box.full_stride[j])]
    run = math.gcd(box.size[k], box.local_offset, box.full_offset, full, local, *others)
    unit = math.gcd(run * itemsize, 8)
    wide = unit // itemsize
    return _UNITS[unit], Box(
        box.full_name,
        tuple(n // wide if j == k else n for j, n in enumerate(box.size)),
        box.local_offset // wide,
        tuple(1 if j == k else s // wide for j, s in enumerate(box.local_stride)),
        box.full_offset // wide,
        tuple(1 if j == k else s // wide for j, s in enumerate(box.full_stride)),
    )
