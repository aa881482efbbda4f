"""The layout plan: every local tensor as boxes in Hugging Face tensors, agreed and proven over all ranks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
import torch.distributed as dist

from megatron.core.param_export.agreement import agree
from megatron.core.param_export.families import family_of
from megatron.core.param_export.families.family import BoundFamily
from megatron.core.param_export.layout import (
    COUNTED,
    LocalTensor,
    Snapshot,
    is_ordinary,
    model_chunks,
    named_tensors,
    read_chunk,
    unwrap,
)
from megatron.core.param_export.members import (
    REPLICA,
    Content,
    EntryRecord,
    Member,
    asymmetries,
    exchange,
    position,
    unequal_divisions,
)
from megatron.core.param_export.pieces import Loop, Piece
from megatron.core.param_export.tiling import Affine, faults
from megatron.weight_sync.boxes import Box

SHOWN = 10
DIVISIBLE_BY = 128
"""Upstream's default of ``make_vocab_size_divisible_by``, which it multiplies by the tensor-parallel size."""
_VOCABULARY = ("embed.weight", "lm_head.weight", "lm_head.bias")


class LayoutError(ValueError):
    """The plan does not cover the model exactly; raised with the same text on every rank."""


class StalePlanError(ValueError):
    """The model's tensors were replaced, converted or emptied since the plan was built; raised with the same
    text on every rank."""

    @classmethod
    def on(cls, stale: Sequence[int]) -> StalePlanError:
        """The error for flags by rank."""
        ranks = ", ".join(str(rank) for rank, flag in enumerate(stale) if flag)
        return cls(
            f"the model's tensors were replaced, converted or emptied on rank {ranks}: build a new plan"
        )


@dataclass(frozen=True)
class PlanEntry:
    """A live parameter or persistent buffer of this rank.

    Args:
        chunk, name: the model chunk's number, and the name in the unwrapped chunk.
        boxes: where its elements go.
        cut: the affine pieces that go nowhere (padded vocabulary rows).
        owner: in the proof, this rank owns the values; the other holders are declared replicas.
        record: what the other ranks know of it.
        form: tensors of one form are divided alike; only where their boxes lie in full tensors differs.
        shape: that the tensor had when the plan was built (its dtype: ``record.dtype``).
    """

    chunk: int
    name: str
    tensor: torch.Tensor
    cut: tuple[Affine, ...]
    owner: bool
    record: EntryRecord
    form: int
    shape: torch.Size

    @property
    def global_name(self) -> str:
        """The name with global layer and expert numbers."""
        return self.record.name

    @property
    def boxes(self) -> tuple[Box, ...]:
        return self.record.boxes

    def contiguous(self) -> torch.Tensor:
        """Its elements in the order that boxes count them: the tensor itself, or a copy of one in another."""
        data = self.tensor.detach()
        return data.contiguous() if is_ordinary(data) else data


def build_plan(
    model: torch.nn.Module | Iterable[torch.nn.Module],
    hf_config,
    group: dist.ProcessGroup | None = None,
    *,
    padded_vocab_size: int | None = None,
) -> Plan:
    """Read the model's chunks on every rank and exchange what each holds. Collective over ``group``.

    Multi-token prediction layers are exported if the model was built with them (``mtp_num_layers``). Adapters
    (LoRA) have no place in Hugging Face tensors: merge them first.

    Build it of the model as it trains. A tensor of another type or shape makes the plan stale: upstream turns
    the expert bias of a Float16Module into float32 in the first forward pass, for example.

    The model's vocabulary may be larger than the configuration's: rows from ``hf_config.vocab_size`` on are
    padding, which is not exported. So that a wrong ``vocab_size`` does not cut trained rows, no more are
    taken for padding than rounding up to a multiple of 128 for each tensor-parallel rank can add (upstream's
    default), unless ``padded_vocab_size`` says so.

    Args:
        model: a GPTModel, or its chunks under virtual pipelining; each may be wrapped in
            DistributedDataParallel, Float16Module and ``torch.compile``. Of other wrappers pass the model
            inside.
        hf_config: the Hugging Face configuration; its ``model_type`` selects the family.
        group: all ranks of the model, those of its data-parallel replicas too; default: the whole world.
        padded_vocab_size: rows of the model's embedding, where it was padded to a larger multiple (for more
            ranks than it has now, for example).

    Raises:
        TypeError: ``model`` is no GPTModel.
        ValueError: no family for this configuration, or it lacks a field; a model without process groups.

    Both are raised on every rank, if on any. Everything else is reported by :meth:`Plan.prove`.
    """
    failed = None
    try:
        chunks = model_chunks(model)
        configs = [getattr(unwrap(chunk), "config", None) for chunk in chunks]
        mtp = any(getattr(config, "mtp_num_layers", None) for config in configs)
        try:
            family = family_of(hf_config).bind(hf_config, mtp)
            family.expected()
        except AttributeError as error:
            raise ValueError(f"hf_config: {error}") from error
    except Exception as error:
        failed = error
    agree(failed, group)
    return Plan(chunks, family, group, padded_vocab_size)


class Plan:
    """The layout of one model in Hugging Face tensors. See :func:`build_plan`.

    Attributes:
        expected: every Hugging Face tensor and its shape, in export order.
        numbers: their numbers in that order.
        starts: where each would begin, in elements, if all were laid end to end; and the end.
        entries: this rank's tensors.
        members: what every rank holds.
        sources: full tensor -> ``(rank, entry number, box)`` of its owners.
        digest: hash of all of it, the same on every rank of a proven plan.
    """

    def __init__(
        self,
        chunks: list[torch.nn.Module],
        family: BoundFamily,
        group=None,
        padded_vocab_size: int | None = None,
    ):
        self.family = family
        self.group = group
        self._padded_vocab_size = padded_vocab_size
        alone = not dist.is_initialized()
        self.rank = 0 if alone else dist.get_rank(group)
        self.ranks = 1 if alone else dist.get_world_size(group)
        self.models = [unwrap(chunk) for chunk in chunks]
        self.process_groups = getattr(self.models[0], "pg_collection", None)
        self.expected = family.expected()
        self.numbers = {name: number for number, name in enumerate(self.expected)}
        self.starts = list(accumulate(map(math.prod, self.expected.values()), initial=0))
        self.entries: list[PlanEntry] = []
        self.proven = False
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._forms: dict[tuple, int] = {}
        problems: list[str] = []
        try:
            self.position = position(self.process_groups, group)
        except ValueError as error:
            problems.append(str(error))
            self.position = position(None, group)
        for number, chunk in enumerate(chunks):
            problems += [f"chunk {number}: {problem}" for problem in self._read(number, chunk)]
        self._by_tensor = {id(entry.tensor): entry for entry in self.entries}
        self._as_read = [(e.tensor, e.record.dtype, e.shape, _shows_emptying(e.tensor)) for e in self.entries]
        self._snapshot = Snapshot(self.models)
        entries = tuple(entry.record for entry in self.entries)
        content = Content(tuple(problems), self._shapes, self.expected, entries)
        self.members: list[Member] = exchange(self.position, content, group)
        self.sources: dict[str, list[tuple[int, int, Box]]] = {name: [] for name in self.expected}
        for rank, member in enumerate(self.members):
            for number, record in enumerate(member.content.entries):
                if record.sharer and member.position.replica[record.kind] == 0:
                    for box in record.boxes:
                        self.sources.setdefault(box.full_name, []).append((rank, number, box))
        self.digest = self._digest()
        self.schedules: dict = {}  # filled by the exporter, as is
        self.units: list | None = None

    def __repr__(self) -> str:
        return f"Plan({self.family.family.model_type}, {len(self.expected)} tensors, hash {self.digest[:12]})"

    # Reading.

    def _read(self, number: int, chunk: torch.nn.Module) -> list[str]:
        read = read_chunk(chunk)
        problems = []
        for (size, count), path in read.counts.items():
            expected = self.family.sizes.get(size, count)
            if count != expected:
                problems.append(
                    f"{path}: {count} {COUNTED[size]} in the model, {expected} in the configuration"
                )
        problems += read.problems
        for local in read.tensors:
            try:
                self.entries.append(self._entry(number, local))
            except ValueError as error:
                problems.append(f"{local.name}: {error}")
        return problems

    def _entry(self, number: int, local: LocalTensor) -> PlanEntry:
        family = self.family.family.model_type
        boxes: list[Box] = []
        cut: list[Affine] = []
        for piece in local.pieces:
            kept, removed = self._cut_vocabulary(piece)
            cut += removed
            if kept is None:
                continue
            placed = self.family.boxes(kept)
            if len(placed) != 1:
                raise ValueError(
                    f"the {family} family has {'two rules' if placed else 'no rule'} for {piece.role}"
                )
            ((box, shape),) = placed
            boxes.append(box)
            self._shapes[box.full_name] = shape
        for fault in faults(tuple(local.tensor.shape), [_local(box) for box in boxes] + cut):
            raise ValueError(f"its boxes leave a {fault} of shape {list(local.tensor.shape)}")
        kind = "expert" if local.expert else "dense"
        spare = local.replicated and _rank(self.process_groups, "expt_tp" if local.expert else "tp") != 0
        sharer = not local.duplicate and not spare
        record = EntryRecord(
            name=local.global_name,
            numel=local.tensor.numel(),
            dtype=local.tensor.dtype,
            kind=kind,
            replicated=local.replicated,
            duplicate=local.duplicate,
            sharer=sharer,
            uniform=local.uniform and not any(p.role in _VOCABULARY for p in local.pieces),
            boxes=tuple(boxes),
        )
        owner = sharer and _rank(self.process_groups, REPLICA[kind]) == 0
        division = record.numel, *((b.size, b.local_offset, b.local_stride, b.full_stride) for b in boxes)
        form = self._forms.setdefault(division, len(self._forms))
        shape = local.tensor.shape
        return PlanEntry(number, local.name, local.tensor, tuple(cut), owner, record, form, shape)

    def _cut_vocabulary(self, piece: Piece) -> tuple[Piece | None, list[Affine]]:
        """Rows from the vocabulary size on are padding: (kept piece or None, removed local boxes)."""
        vocabulary = self.family.sizes.get("vocab")
        if piece.role not in _VOCABULARY or vocabulary is None:
            return piece, []
        self._check_padding(piece.shape[0], vocabulary)
        if piece.shape[0] <= vocabulary:
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

    def _check_padding(self, rows: int, vocabulary: int) -> None:
        stated = self._padded_vocab_size
        if stated is not None and rows != stated:
            raise ValueError(f"{rows} rows in the model, padded_vocab_size is {stated}")
        multiple = DIVISIBLE_BY * len(self.position.gather["dense"])
        if stated is None and rows - vocabulary >= multiple:
            raise ValueError(
                f"{rows} rows in the model, vocab_size of the configuration is {vocabulary}: padding to a "
                f"multiple of {multiple} adds less. If all the others are padding, say so: "
                f"build_plan(..., padded_vocab_size={rows})"
            )

    # Proof.

    def _digest(self) -> str:
        text = hashlib.sha256()
        seen: dict[int, bytes] = {}
        for member in self.members:
            mark = seen.get(id(member.content))
            if mark is None:
                content = member.content
                parts = (content.problems, sorted(content.shapes.items()), list(content.expected.items()))
                mark = hashlib.sha256(repr((parts, content.entries)).encode()).digest()
                seen[id(member.content)] = mark
            where = member.position
            text.update(mark + repr((where.stage, where.pipeline, where.gather, where.replica)).encode())
        return text.hexdigest()

    def prove(self) -> Plan:
        """Prove that the owners' boxes tile every full tensor exactly once, everywhere alike. Collective.

        What this cannot see: two equal shapes exchanged on all ranks alike (a family's table with gate and up
        the wrong way round). Comparing logits with the Hugging Face model shows that.

        Raises:
            LayoutError: on every rank, with the same text: the number of faults and the first ten of them.
        """
        found = [
            f"rank {rank}: {p}" for rank, member in enumerate(self.members) for p in member.content.problems
        ]
        reference = self.members[0].content.expected
        for rank, member in enumerate(self.members):
            if list(member.content.expected.items()) != list(reference.items()):
                found.append(f"rank {rank}: its configuration asks for other tensors than that of rank 0")
        found += unequal_divisions(self.members) + asymmetries(self.members)
        names = list(self.sources)  # the expected ones in order, then those that no rule expects
        numbers = range(self.rank, len(names), self.ranks)  # the ranks share the work
        mine = self.digest, [(number, line) for number in numbers for line in self._faults(names[number])]
        everyone = [mine]
        if self.ranks > 1:
            everyone = [None] * self.ranks
            dist.all_gather_object(everyone, mine, group=self.group)
        for rank, (digest, _) in enumerate(everyone):
            if digest != everyone[0][0]:
                found.append(f"rank {rank}: its plan differs from that of rank 0")
        found += [line for _, line in sorted(line for _, lines in everyone for line in lines)]
        if found:
            count = f"{len(found)} fault{'s' * (len(found) > 1)}"
            more = f"\n  and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
            lines = "".join(f"\n  {line}" for line in found[:SHOWN])
            raise LayoutError(f"the layout plan is not exact: {count}{lines}{more}")
        self.proven = True
        return self

    def _record(self, rank: int, number: int) -> EntryRecord:
        return self.members[rank].content.entries[number]

    def _faults(self, name: str) -> list[str]:
        sources = self.sources[name]
        if name not in self.expected:
            return [f"{name}: written by {self._who(sources)}, but not a tensor of this configuration"]
        shape = self.expected[name]
        if not sources:
            return [f"{name}: no rank owns any part of it"]
        out = []
        for member in self.members:
            other = member.content.shapes.get(name, shape)
            if other != shape:
                out.append(f"{name}: shape {other} on one rank, {shape} expected")
                break
        dtypes = sorted({str(self._record(rank, number).dtype) for rank, number, _ in sources})
        if len(dtypes) > 1:
            out.append(f"{name}: parts of different dtypes: {', '.join(dtypes)}")
        boxes = [(box.full_offset, box.size, box.full_stride) for _, _, box in sources]
        for fault in faults(shape, boxes):
            by = self._who([sources[b] for b in fault.boxes]) if fault.boxes else "no rank"
            out.append(f"{name}: {fault} of {list(shape)}, covered by {by}")
        return out

    def _who(self, sources) -> str:
        return ", ".join(sorted({f"rank {rank} {self._record(rank, n).name}" for rank, n, _ in sources}))

    def require_proof(self) -> None:
        """Refuse to move a byte with a plan that was not proven."""
        if not self.proven:
            raise ValueError("the plan is not proven: call prove() on every rank first")

    # Use.

    def entry_of(self, tensor: torch.Tensor) -> PlanEntry:
        """The entry of a live parameter or buffer.

        Raises:
            KeyError: the tensor is not in the plan.
        """
        entry = self._by_tensor.get(id(tensor))
        if entry is None or entry.tensor is not tensor:
            raise KeyError(f"a tensor of shape {list(tensor.shape)} is not in this plan")
        return entry

    def is_current(self) -> bool:
        """Whether the model still holds the very tensors that the plan was built from, with the type and the
        shape that they had, and memory."""
        return self.is_readable() and self._is_whole()

    def is_readable(self) -> bool:
        """Whether the plan's tensors have the type and the shape that they had, and memory."""
        return all(
            tensor.dtype is dtype and tensor.shape == shape and not (plain and tensor.data_ptr() == 0)
            for tensor, dtype, shape, plain in self._as_read
        )

    def _is_whole(self) -> bool:
        """Whether the model holds the plan's tensors under their names. That is so if every module holds the
        very objects that it held; else the model is walked, and a change that concerns no tensor is
        remembered."""
        if self._snapshot.holds():
            return True
        models = enumerate(self.models)
        found = {(k, name, id(tensor)) for k, model in models for name, tensor in named_tensors(model)}
        if found != {(entry.chunk, entry.name, id(entry.tensor)) for entry in self.entries}:
            return False
        self._snapshot = Snapshot(self.models)
        return True

    def require_current(self, readable: bool | None = None) -> None:
        """Refuse to export tensors that the model no longer uses. Collective; one small reduction.

        Args:
            readable: what ``is_readable`` has just said on this rank, or that somebody else reads the values.

        Raises:
            StalePlanError: on every rank alike, if any rank's model holds other tensors than its plan.
        """
        if readable is None:
            readable = self.is_readable()
        stale = self.everyones(torch.tensor(int(not (readable and self._is_whole())))).tolist()
        if any(stale):
            raise StalePlanError.on(stale)

    @property
    def device(self) -> torch.device:
        """Of this rank's tensors."""
        return self.entries[0].tensor.device if self.entries else torch.device("cpu")

    def everyones(self, numbers: torch.Tensor) -> torch.Tensor:
        """A few numbers of every rank, [ranks, *shape], on the plan's device. Collective."""
        numbers = numbers.to(self.device)
        if self.ranks == 1:
            return numbers[None]
        everyone = [torch.empty_like(numbers) for _ in range(self.ranks)]
        dist.all_gather(everyone, numbers, group=self.group)
        return torch.stack(everyone)

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

    def dtype(self, name: str) -> torch.dtype:
        """Element type of a full tensor."""
        rank, number, _ = self.sources[name][0]
        return self._record(rank, number).dtype

    @cached_property
    def dtypes(self) -> list[torch.dtype]:
        """Element types of the full tensors, in an order that all ranks share."""
        return sorted({self.dtype(name) for name in self.expected}, key=str)

    @cached_property
    def largest(self) -> int:
        """Elements of the largest full tensor."""
        return max(map(math.prod, self.expected.values()))

    def nbytes(self, name: str) -> int:
        """Bytes of a full tensor."""
        return math.prod(self.expected[name]) * self.dtype(name).itemsize


def _local(box: Box) -> Affine:
    return box.local_offset, box.size, box.local_stride


def _rank(groups, name: str) -> int:
    group = getattr(groups, name, None) if groups is not None else None
    return group.rank() if group is not None else 0


def _shows_emptying(tensor: torch.Tensor) -> bool:
    """Whether an address of 0 would mean that its memory was given up, as by
    ``untyped_storage().resize_(0)``."""
    return is_ordinary(tensor) and tensor.numel() > 0 and tensor.device.type != "meta"
