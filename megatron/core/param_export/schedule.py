"""Which tensors travel together, and where each shard lies in the gathered bytes.

Within a pipeline stage, the ranks of a tensor-parallel group (and for experts of an expert-tensor-parallel ×
expert-parallel group) hold every tensor of the stage between them. So one bucket is gathered so: the rank of
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

from megatron.core.param_export.plan import Plan
from megatron.weight_sync.boxes import Box

ALIGN = 128  # bytes


@dataclass
class Part:
    """Tensors of one stage and kind in a bucket: shards of a row, and whole tensors that need no gather."""

    stage: int
    kind: str
    # (number among the kind's entries, byte offset) each
    shards: list[tuple[int, int]] = field(default_factory=list)
    whole: list[tuple[int, int]] = field(default_factory=list)
    row_bytes: int = 0
    whole_bytes: int = 0


@dataclass(frozen=True)
class Source:
    """A box of a full tensor, and where its shard lies in the part's bytes.

    The box counts units of ``unit``, an integer type as wide as whole runs of elements allow: elements are
    only moved, and wide ones move faster. ``offset`` and ``size`` of the shard count the same units.
    """

    part: int
    unit: torch.dtype
    offset: int
    size: int
    box: Box


@dataclass(frozen=True)
class FullTensor:
    """A tensor to hand out, contiguous. ``run``: (part, element offset) where the gathered bytes hold it as
    it is; then it has no sources.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    sources: tuple[Source, ...]
    run: tuple[int, int] | None


@dataclass
class Bucket:
    """One step of the export."""

    parts: list[Part]
    tensors: list[FullTensor]
    nbytes: int


@dataclass(frozen=True)
class Schedule:
    """The buckets, and what this rank does in each, for one choice of receivers and limit."""

    buckets: list[Bucket]
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

    def run(self, wanted: set[str] | None = None) -> Schedule:
        plan, me = self.plan, self.plan.position
        wants = {
            kind: [not self.receivers.isdisjoint(member.position.gather[kind]) for member in self.members]
            for kind in me.gather
        }
        buckets: list[list[tuple[list[tuple], list[str], int]]] = []
        filled = 0
        for keys, together in self.units():
            names = [name for name in together if wanted is None or name in wanted]
            if not names:
                continue
            size = sum(self.unit_bytes(key) for key in keys)
            if not buckets or filled + size > self.limit:
                buckets.append([])
                filled = 0
            buckets[-1].append((keys, names, size))
            filled += size
        return Schedule(
            buckets=[self.bucket(units) for units in buckets],
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

    def bucket(self, units) -> Bucket:
        parts: dict[tuple, Part] = {}
        where: dict[str, list[tuple[int, int, int, Box]]] = {}
        pending = []
        for keys, _, _ in units:
            for key in keys:
                entry = self.entry(key)
                part = parts.setdefault(key[:2], Part(*key[:2]))
                if entry.replicated and key[1] == "dense":
                    pending.append((key, part, None, part.whole_bytes))
                    part.whole.append((key[2], part.whole_bytes))
                    part.whole_bytes += _aligned(entry.nbytes)
                else:
                    rows = range(len(self.plan.position.gather[key[1]]))
                    pending += [(key, part, row, part.row_bytes) for row in rows]
                    part.shards.append((key[2], part.row_bytes))
                    part.row_bytes += _aligned(entry.nbytes)
        numbers = {id(part): k for k, part in enumerate(parts.values())}
        for key, part, row, offset in pending:
            entry = self.entry(key, row)
            rows = len(self.plan.position.gather[key[1]])
            start = offset + (rows if row is None else row) * part.row_bytes
            if row is None or not entry.replicated or entry.sharer:
                for box in entry.boxes:
                    place = numbers[id(part)], start, entry.nbytes, box
                    where.setdefault(box.full_name, []).append(place)
        tensors = [self.full_tensor(name, where[name]) for _, names, _ in units for name in names]
        return Bucket(list(parts.values()), tensors, sum(size for _, _, size in units))

    def full_tensor(self, name: str, places: list[tuple[int, int, int, Box]]) -> FullTensor:
        shape, dtype = self.plan.expected[name], self.plan.dtype(name)
        stride = tuple(math.prod(shape[k + 1 :]) for k in range(len(shape)))
        # Where the tensor's first element would lie, were all of it laid out like this box.
        begins = {
            (part, start // dtype.itemsize + box.local_offset - box.full_offset)
            for part, start, _, box in places
        }
        alike = all(box.local_stride == box.full_stride for *_, box in places)
        run = begins.pop() if alike and len(begins) == 1 else None
        sources = () if run else tuple(_source(*place, dtype.itemsize, math.prod(shape)) for place in places)
        return FullTensor(name, shape, stride, dtype, sources, run)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


_UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def _source(part: int, start: int, nbytes: int, box: Box, itemsize: int, numel: int) -> Source:
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
    return Source(part, _UNITS[unit], start // unit, nbytes // unit, box)
