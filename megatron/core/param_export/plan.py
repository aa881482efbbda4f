"""The layout plan: every local tensor as boxes in Hugging Face tensors, agreed and proven over all ranks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron.core.param_export.families import family_of
from megatron.core.param_export.families.family import BoundFamily
from megatron.core.param_export.layout import LocalTensor, named_tensors, read_chunk, unwrap
from megatron.core.param_export.pieces import Loop, Piece
from megatron.core.param_export.tiling import faults
from megatron.weight_sync.boxes import Box

SHOWN = 10
_VOCABULARY = ("embed.weight", "lm_head.weight", "lm_head.bias")


class LayoutError(ValueError):
    """The plan does not cover the model exactly; raised with the same text on every rank."""


@dataclass(frozen=True)
class Entry:
    """A local parameter or persistent buffer in the plan.

    Args:
        name: as in the unwrapped chunk, with ``chunk`` the number of the model chunk.
        owner: this rank sends it; the other holders of the same values are declared replicas.
        sharer: as ``owner``, apart from data parallelism: true on every data-parallel replica of the owner.
    """

    chunk: int
    name: str
    global_name: str
    tensor: torch.Tensor
    boxes: tuple[Box, ...]
    cut: tuple[tuple[int, tuple[int, ...], tuple[int, ...]], ...]
    owner: bool
    sharer: bool
    uniform: bool


@dataclass(frozen=True)
class Remote:
    """What every rank knows of an entry of any rank."""

    name: str
    numel: int
    dtype: torch.dtype
    owner: bool
    uniform: bool
    boxes: tuple[Box, ...]

    def cut(self):
        """How the local tensor is divided, apart from which slice of the full tensors this rank has."""
        return (
            self.numel,
            self.dtype,
            [(b.full_name, b.local_offset, b.size, b.local_stride) for b in self.boxes],
        )


def build_plan(
    model: torch.nn.Module | Sequence[torch.nn.Module], hf_config, group: dist.ProcessGroup | None = None
) -> Plan:
    """Read the model's chunks on every rank and exchange what each holds. Collective over ``group``.

    Args:
        model: a GPTModel, or its chunks under virtual pipelining, wrapped or not.
        hf_config: the Hugging Face configuration; its ``model_type`` selects the family.
        group: the ranks that hold the model between them; default: all.

    Raises:
        ValueError: no family for this configuration. Everything else is reported by :meth:`Plan.prove`.
    """
    chunks = list(model) if isinstance(model, Sequence) else [model]
    return Plan(chunks, family_of(hf_config).bind(hf_config), group)


class Plan:
    """The layout of one model in Hugging Face tensors. See :func:`build_plan`."""

    def __init__(self, chunks: list[torch.nn.Module], family: BoundFamily, group=None):
        self.family = family
        self.group = group
        alone = not dist.is_initialized()
        self.rank = 0 if alone else dist.get_rank(group)
        self.ranks = 1 if alone else dist.get_world_size(group)
        self.expected = family.expected()
        self.problems: list[str] = []
        self.entries: list[Entry] = []
        self.shapes: dict[str, tuple[int, ...]] = {}
        for number, chunk in enumerate(chunks):
            self._read(number, chunk)
        self._by_tensor = {id(entry.tensor): entry for entry in self.entries}
        self._models = [unwrap(chunk) for chunk in chunks]
        self._exchange()
        self.proven = False

    def __repr__(self) -> str:
        return f"Plan({self.family.family.model_type}, {len(self.expected)} tensors, hash {self.digest[:12]})"

    # Reading.

    def _read(self, number: int, chunk: torch.nn.Module) -> None:
        read = read_chunk(chunk)
        self.problems += [f"chunk {number}: {problem}" for problem in read.problems]
        groups = getattr(read.model, "pg_collection", None)
        for local in read.tensors:
            try:
                self.entries.append(self._entry(number, local, groups))
            except ValueError as error:
                self.problems.append(f"chunk {number}: {local.name}: {error}")

    def _entry(self, number: int, local: LocalTensor, groups) -> Entry:
        boxes: list[Box] = []
        cut = []
        for piece in local.pieces:
            kept, removed = self._cut_vocabulary(piece)
            cut += removed
            if kept is None:
                continue
            placed = self.family.boxes(kept)
            if not placed:
                raise ValueError(f"the {self.family.family.model_type} family has no rule for {piece.role}")
            if len(placed) > 1:
                raise ValueError(f"the {self.family.family.model_type} family has two rules for {piece.role}")
            for box, shape in placed:
                boxes.append(box)
                self.shapes[box.full_name] = shape
        for fault in faults(tuple(local.tensor.shape), [_local(box) for box in boxes] + cut):
            raise ValueError(f"its boxes leave a {fault} of shape {list(local.tensor.shape)}")
        tp, dp = ("expt_tp", "expt_dp") if local.expert else ("tp", "dp_cp")
        sharer = not local.duplicate and not (local.replicated and _rank(groups, tp) != 0)
        owner = sharer and _rank(groups, dp) == 0
        uniform = local.uniform and not any(p.role in _VOCABULARY for p in local.pieces)
        return Entry(
            number,
            local.name,
            local.global_name,
            local.tensor,
            tuple(boxes),
            tuple(cut),
            owner,
            sharer,
            uniform,
        )

    def _cut_vocabulary(self, piece: Piece):
        """Rows from the vocabulary size on are padding: (kept piece or None, removed local boxes)."""
        vocabulary = self.family.sizes.get("vocab")
        if piece.role not in _VOCABULARY or vocabulary is None or piece.shape[0] <= vocabulary:
            return piece, []
        first, *rest = piece.loops
        rows = min(first.size, max(0, vocabulary - piece.start[0]))
        shape = (vocabulary, *piece.shape[1:])
        removed = []
        if rows < first.size:
            loops = (Loop(first.size - rows, first.local_stride, first.axis), *rest)
            offset = piece.local_offset + rows * first.local_stride
            removed = [(offset, tuple(p.size for p in loops), tuple(p.local_stride for p in loops))]
        if rows == 0:
            return None, removed
        loops = (Loop(rows, first.local_stride, first.axis), *rest)
        kept = Piece(
            piece.role, piece.scope, piece.layer, piece.expert, shape, piece.start, piece.local_offset, loops
        )
        return kept, removed

    # Agreement.

    def _exchange(self) -> None:
        mine = (
            self.problems,
            self.shapes,
            list(self.expected.items()),
            [
                Remote(e.global_name, e.tensor.numel(), e.tensor.dtype, e.owner, e.uniform, e.boxes)
                for e in self.entries
            ],
        )
        everyone = [mine]
        if self.ranks > 1:
            everyone = [None] * self.ranks
            dist.all_gather_object(everyone, mine, group=self.group)
        self.world: list[list[Remote]] = [entries for *_, entries in everyone]
        self._reports = everyone
        text = hashlib.sha256()
        for problems, shapes, expected, entries in everyone:
            for part in (problems, sorted(shapes.items()), expected):
                text.update(repr(part).encode())
            for entry in entries:
                text.update(repr(entry).encode())
        self.digest = text.hexdigest()
        # full tensor -> the owners' boxes in it: (rank, entry number, box)
        self.sources: dict[str, list[tuple[int, int, Box]]] = {name: [] for name in self.expected}
        for rank, entries in enumerate(self.world):
            for number, entry in enumerate(entries):
                for box in entry.boxes if entry.owner else ():
                    self.sources.setdefault(box.full_name, []).append((rank, number, box))

    def prove(self) -> Plan:
        """Prove that the owners' boxes tile every full tensor exactly once, everywhere alike. Collective.

        Raises:
            LayoutError: on every rank, with the same text: the number of faults and the first ten of them.
        """
        found = [f"rank {rank}: {p}" for rank, (problems, *_) in enumerate(self._reports) for p in problems]
        for rank, (_, _, expected, _) in enumerate(self._reports):
            if expected != self._reports[0][2]:
                found.append(f"rank {rank}: its configuration asks for other tensors than that of rank 0")
        found += self._unequal_cuts()
        mine = []
        names = list(self.sources)  # the expected ones in order, then those that no rule expects
        for number in range(self.rank, len(names), self.ranks):
            mine += [(number, line) for line in self._faults(names[number])]
        everyone = [(self.digest, mine)]
        if self.ranks > 1:
            everyone = [None] * self.ranks
            dist.all_gather_object(everyone, (self.digest, mine), group=self.group)
        for rank, (digest, _) in enumerate(everyone):
            if digest != everyone[0][0]:
                found.append(f"rank {rank}: its plan differs from that of rank 0")
        found += [line for _, line in sorted(line for _, lines in everyone for line in lines)]
        if found:
            more = f"\n  and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
            lines = "".join(f"\n  {line}" for line in found[:SHOWN])
            raise LayoutError(
                f"the layout plan is not exact: {len(found)} fault{'s' * (len(found) > 1)}{lines}{more}"
            )
        self.proven = True
        return self

    def _unequal_cuts(self) -> list[str]:
        """A half swapped with its neighbour on one rank still tiles; then the ranks no longer cut alike."""
        first: dict[str, tuple[int, Remote]] = {}
        out = []
        for rank, entries in enumerate(self.world):
            for entry in entries:
                other, reference = first.setdefault(entry.name, (rank, entry))
                if entry.uniform and reference.uniform and entry.cut() != reference.cut():
                    out.append(f"rank {rank}: {entry.name} is divided otherwise than on rank {other}")
        return out

    def _faults(self, name: str) -> list[str]:
        sources = self.sources[name]
        if name not in self.expected:
            return [f"{name}: written by {self._who(sources)}, but not a tensor of this configuration"]
        shape = self.expected[name]
        if not sources:
            return [f"{name}: no rank owns any part of it"]
        out = []
        for _, shapes, _, _ in self._reports:
            if shapes.get(name, shape) != shape:
                out.append(f"{name}: shape {shapes[name]} on one rank, {shape} expected")
                break
        dtypes = sorted({str(self.world[rank][number].dtype) for rank, number, _ in sources})
        if len(dtypes) > 1:
            out.append(f"{name}: parts of different dtypes: {', '.join(dtypes)}")
        boxes = [(box.full_offset, box.size, box.full_stride) for _, _, box in sources]
        for fault in faults(shape, boxes):
            by = self._who([sources[b] for b in fault.boxes]) if fault.boxes else "no rank"
            out.append(f"{name}: {fault} of {list(shape)}, covered by {by}")
        return out

    def _who(self, sources) -> str:
        return ", ".join(
            sorted({f"rank {rank} {self.world[rank][number].name}" for rank, number, _ in sources})
        )

    # Use.

    def entry_of(self, tensor: torch.Tensor) -> Entry:
        """The entry of a live parameter or buffer.

        Raises:
            KeyError: the tensor is not in the plan.
        """
        entry = self._by_tensor.get(id(tensor))
        if entry is None or entry.tensor is not tensor:
            raise KeyError(f"a tensor of shape {list(tensor.shape)} is not in this plan")
        return entry

    def is_current(self) -> bool:
        """Whether the model still holds the very tensors that the plan was built from."""
        live = [id(tensor) for model in self._models for _, tensor in named_tensors(model)]
        return set(live) == set(self._by_tensor)

    def to_full(self, tensor: torch.Tensor, index: torch.Tensor):
        """Map flat indices into a local tensor to full tensors.

        Args:
            tensor: a live parameter or buffer of the plan.
            index: int64 [n].

        Returns:
            A list of ``(hf_name, inside, flat)``: bool [n], which of ``index`` lie in that tensor, and int64
            [inside.sum()], their flat indices there. Indices of padded vocabulary rows appear in none.
        """
        return [(box.full_name, *box.map_to_full(index)) for box in self.entry_of(tensor).boxes]

    def nbytes(self, name: str) -> int:
        """Bytes of a full tensor."""
        rank, number, _ = self.sources[name][0]
        return math.prod(self.expected[name]) * self.world[rank][number].dtype.itemsize

    def dtype(self, name: str) -> torch.dtype:
        """Element type of a full tensor."""
        rank, number, _ = self.sources[name][0]
        return self.world[rank][number].dtype


def _local(box: Box):
    return box.local_offset, box.size, box.local_stride


def _rank(groups, name: str) -> int:
    group = getattr(groups, name, None) if groups is not None else None
    return group.rank() if group is not None else 0
