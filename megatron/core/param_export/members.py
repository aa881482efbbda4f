"""What every rank of the plan holds and which ranks it gathers with, exchanged when the plan is built."""

from __future__ import annotations

import hashlib
import pickle
import socket
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.weight_sync.boxes import Box

KINDS = ("dense", "expert")
# per kind: the group that holds the shards of one replica between them, and the group of its replicas
GATHER = {"dense": "tp", "expert": "tp_ep"}
REPLICA = {"dense": "dp_cp", "expert": "expt_dp"}


@dataclass(frozen=True)
class EntryRecord:
    """What all ranks know of a parameter or buffer of one rank.

    Args:
        kind: "expert" for routed experts' tensors, else "dense".
        replicated: all ranks of its tensor-parallel group hold the same values.
        sharer: of the ranks of one replica, this one owns the values (no tied copy, first of the replicated).
        uniform: every rank that holds part of this tensor must divide it alike.
    """

    name: str
    numel: int
    dtype: torch.dtype
    kind: str
    replicated: bool
    duplicate: bool
    sharer: bool
    uniform: bool
    boxes: tuple[Box, ...]

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def division(self):
        """How the local tensor is divided, apart from which slice of the full tensors this rank has."""
        return (
            self.numel,
            self.dtype,
            [(b.full_name, b.local_offset, b.size, b.local_stride) for b in self.boxes],
        )


@dataclass(frozen=True)
class Content:
    """What a rank read from its model; ranks with equal content share one object."""

    problems: tuple[str, ...]
    shapes: dict[str, tuple[int, ...]]
    expected: dict[str, tuple[int, ...]]
    entries: tuple[EntryRecord, ...]


@dataclass(frozen=True)
class Position:
    """Where a rank stands. Ranks are of the plan's group; tuples are ordered as the process groups are."""

    stage: int
    pipeline: tuple[int, ...]
    gather: dict[str, tuple[int, ...]]
    replica: dict[str, int]
    host: str


@dataclass(frozen=True)
class Member:
    """One rank: where it stands and what it holds."""

    position: Position
    content: Content

    def of_kind(self, kind: str) -> list[EntryRecord]:
        return [entry for entry in self.content.entries if entry.kind == kind]


def position(groups, plan_group=None) -> Position:
    """This rank's position from a ProcessGroupCollection.

    Raises:
        ValueError: a group that the layout needs is missing, or contains ranks outside of the plan's group.
    """
    if not dist.is_initialized():
        one = {kind: (0,) for kind in KINDS}
        return Position(0, (0,), one, dict.fromkeys(KINDS, 0), socket.gethostname())
    inside = dist.get_process_group_ranks(plan_group or dist.group.WORLD)
    number = {rank: k for k, rank in enumerate(inside)}
    me = number[dist.get_rank()]

    def ranks(name):
        group = getattr(groups, name, None)
        if group is None:
            return (me,)
        outside = [rank for rank in dist.get_process_group_ranks(group) if rank not in number]
        if outside:
            raise ValueError(
                f"the {name} group has ranks outside of the plan's group: {outside}; a plan's group has all "
                "ranks of the model and of its replicas (without group=, the whole world)"
            )
        return tuple(number[rank] for rank in dist.get_process_group_ranks(group))

    gather = {kind: ranks(name) for kind, name in GATHER.items()}
    parts = [len(ranks(name)) for name in ("ep", "expt_tp")]
    if parts[0] * parts[1] != len(gather["expert"]):
        raise ValueError(
            f"the tp_ep group has {len(gather['expert'])} ranks, expected {parts[0]} x {parts[1]}"
        )
    pipeline = ranks("pp")
    replica = {kind: ranks(name).index(me) for kind, name in REPLICA.items()}
    return Position(pipeline.index(me), pipeline, gather, replica, socket.gethostname())


def exchange(where: Position, content: Content, group=None) -> list[Member]:
    """Every rank's member record, by rank. Each distinct content travels once. Collective."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return [Member(where, content)]
    blob = pickle.dumps(content)
    mark = hashlib.sha256(blob).digest()
    heads: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(heads, (where, mark), group=group)
    marks = [mark for _, mark in heads]
    bodies: list = [None] * len(heads)
    first = marks.index(mark) == dist.get_rank(group)
    dist.all_gather_object(bodies, blob if first else None, group=group)
    known = {mark: pickle.loads(body) for mark, body in zip(marks, bodies, strict=True) if body is not None}
    return [Member(where, known[mark]) for where, mark in heads]


def asymmetries(members: list[Member]) -> list[str]:
    """Ranks that should hold the same kind of shards, but do not: gathering would mix tensors up."""
    out = []
    for rank, member in enumerate(members):
        for kind in KINDS:
            peers = member.position.gather[kind]
            if rank != peers[0]:
                mine = [(e.numel, e.dtype, e.replicated, e.duplicate) for e in member.of_kind(kind)]
                first = [
                    (e.numel, e.dtype, e.replicated, e.duplicate) for e in members[peers[0]].of_kind(kind)
                ]
                if mine != first:
                    out.append(f"rank {rank}: its {kind} tensors are not the shards that rank {peers[0]} has")
            place = peers.index(rank)
            for other in member.position.pipeline:
                theirs = members[other].position.gather[kind]
                if place >= len(theirs) or theirs[place] != other:
                    out.append(f"rank {rank}: its pipeline peer {other} stands elsewhere in its {kind} group")
    first_at: dict[tuple, int] = {}
    for rank, member in enumerate(members):
        for kind in KINDS:
            place = member.position.gather[kind].index(rank)
            other = first_at.setdefault((kind, member.position.stage, place), rank)
            if members[other].content is not member.content and members[other].of_kind(
                kind
            ) != member.of_kind(kind):
                out.append(f"rank {rank}: its {kind} tensors differ from those of its replica, rank {other}")
    return out


def unequal_divisions(members: list[Member]) -> list[str]:
    """A half swapped with its neighbour on one rank still tiles; then the ranks no longer divide alike."""
    first: dict[str, tuple[int, EntryRecord]] = {}
    out = []
    for rank, member in enumerate(members):
        for entry in member.content.entries:
            other, reference = first.setdefault(entry.name, (rank, entry))
            if entry.uniform and reference.uniform and entry is not reference:
                if entry.division() != reference.division():
                    out.append(f"rank {rank}: {entry.name} is divided otherwise than on rank {other}")
    return out
