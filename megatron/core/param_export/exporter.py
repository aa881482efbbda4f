"""Exporting full Hugging Face tensors, and loading them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from numbers import Integral

import torch
import torch.distributed as dist

from megatron.core.param_export.plan import Plan
from megatron.core.param_export.schedule import Bucket, FullTensor, Part, Schedule, schedule

DEFAULT_BUCKET_BYTES = 512 * 1024**2


def receiving_ranks(plan: Plan, receivers: str | int | Sequence[int]) -> list[int]:
    """Ranks of the plan's group named by "all", "nodes" (the first rank of every host), a rank or several.

    Raises:
        ValueError: anything else.
    """
    if receivers == "all":
        return list(range(plan.ranks))
    if receivers == "nodes":
        first: dict[str, int] = {}
        for rank, member in enumerate(plan.members):
            first.setdefault(member.position.host, rank)
        return sorted(first.values())
    ranks = [receivers] if isinstance(receivers, Integral) else receivers
    if not (isinstance(ranks, Collection) and len(ranks) and all(_is_rank(rank, plan) for rank in ranks)):
        raise ValueError(f"receivers: 'all', 'nodes' or ranks of 0..{plan.ranks - 1}, got {receivers!r}")
    return sorted(set(ranks))


def _is_rank(rank, plan: Plan) -> bool:
    return isinstance(rank, Integral) and not isinstance(rank, bool) and 0 <= rank < plan.ranks


def export(
    plan: Plan,
    receivers: str | int | Sequence[int] = "all",
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    to_host: bool = False,
    read: Callable[[torch.Tensor], torch.Tensor] | None = None,
    names: Collection[str] | None = None,
    current: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over the full tensors under their Hugging Face names, in a fixed order. Collective.

    Every rank of the plan must run the iterator to its end; ranks that do not receive get no items. At most
    two buckets are in flight: the next one is gathered while the current one is handed out. So the extra
    memory is two buckets, and the full tensors that had to be put together and that the caller holds.

    Args:
        plan: a proven plan.
        receivers: "all", "nodes" (the first rank of every host), a rank, or several ranks of the plan's
            group.
        bucket_bytes: ceiling of the gathered bytes of one bucket; a tensor larger than it has one of its own.
        to_host: hand the tensors out in pinned host memory instead of on the parameters' device.
        read: gives the current values of a live parameter or buffer, on any device; for parameters whose own
            memory is released for the moment (``compat.memory_saver_backups()``). Default: the tensor itself.
        names: only these full tensors, the same ones on every rank. Default: all.
        current: every rank has just called ``plan.require_current()``; it is not asked again.

    Yields:
        ``(name, tensor)``: contiguous, in the parameter's dtype. The tensor never aliases a parameter; it may
        share memory with other tensors of its bucket, so a caller that keeps few of them keeps clones.

    Raises:
        ValueError: the plan is not proven, a receiver is not one of its ranks, the bucket size is not
            positive, or a name is not one of the model's.
        StalePlanError: when the iteration begins, on every rank: the model's tensors were replaced since the
            plan was built.

    An error while tensors are put together on a receiving rank is raised when the collectives are over, so
    that no other rank waits for them.
    """
    plan.require_proof()
    if not bucket_bytes > 0:
        raise ValueError(f"bucket_bytes: expected a positive number of bytes, got {bucket_bytes!r}")
    unknown = sorted(set(names or ()) - plan.expected.keys())
    if unknown:
        raise ValueError(f"names: {len(unknown)} are not tensors of this model: {unknown[:10]}")
    steps = schedule(plan, receiving_ranks(plan, receivers), bucket_bytes, names)
    return _Export(plan, steps, to_host, read or (lambda tensor: tensor)).run(current)


class _Export:
    def __init__(self, plan: Plan, steps: Schedule, to_host: bool, read):
        self.plan, self.steps, self.to_host, self.read = plan, steps, to_host, read
        self.device = plan.entries[0].tensor.device if plan.entries else torch.device("cpu")
        self.cuda = self.device.type == "cuda"
        self.entries = {
            kind: [entry for entry in plan.entries if entry.record.kind == kind]
            for kind in plan.position.gather
        }
        groups = plan.process_groups
        self.groups = {"dense": getattr(groups, "tp", None), "expert": getattr(groups, "tp_ep", None)}
        self.pipeline = getattr(groups, "pp", None)

    def run(self, current: bool) -> Iterator[tuple[str, torch.Tensor]]:
        if not current:
            self.plan.require_current()
        # Packing and gathering run on a stream of their own; what is handed out, on the caller's.
        side = torch.cuda.Stream(self.device) if self.cuda else None
        if side:
            side.wait_stream(torch.cuda.current_stream(self.device))
        ahead = done = failed = None
        for bucket in [*self.steps.buckets, None]:
            started = None
            if bucket is not None:
                if done:  # else the host would run on, and every bucket be in memory at once
                    done.synchronize()
                with torch.cuda.stream(side):
                    started = bucket, *self.start(bucket), side.record_event() if side else None
            if ahead is not None and failed is None:
                try:
                    yield from self.finish(*ahead)
                except Exception as error:
                    failed = error
            ahead = started
            del started
            done = torch.cuda.current_stream(self.device).record_event() if side else None
        if failed is not None:
            raise failed

    # Gathering.

    def start(self, bucket: Bucket):
        """Pack, pass on and begin to gather a bucket: its bytes per part, and what must be waited for."""
        held, works = [], []
        for part in bucket.parts:
            bytes_, work = self.start_part(part)
            held.append(bytes_)
            works += work
        return held, works

    def start_part(self, part: Part):
        me, kind = self.plan.position, part.kind
        rows = len(me.gather[kind])
        row = me.gather[kind].index(self.plan.rank)
        stages = self.steps.needed_by[kind]
        source = me.stage == part.stage
        if not (source and stages) and not self.steps.gathers[kind]:
            return None, []
        bytes_ = torch.empty(rows * part.row_bytes + part.whole_bytes, dtype=torch.uint8, device=self.device)
        mine = bytes_[row * part.row_bytes : (row + 1) * part.row_bytes]
        whole = bytes_[rows * part.row_bytes :]
        if source:
            self.pack(kind, part.shards, mine)
            self.pack(kind, part.whole, whole)
        for run in (mine, whole):
            if run.numel():
                self.pass_on(run, part.stage, stages)
        work = []
        if rows > 1 and self.steps.gathers[kind] and part.row_bytes:
            group = self.groups[kind]
            gathered = bytes_[: rows * part.row_bytes]
            # in place under NCCL: the row is already where it belongs
            given = mine if dist.get_backend(group) == "nccl" else mine.clone()
            work.append(dist.all_gather_into_tensor(gathered, given, group=group, async_op=True))
        return bytes_, work

    @torch.no_grad()
    def pack(self, kind: str, places, run: torch.Tensor) -> None:
        entries = self.entries[kind]
        by_dtype: dict[torch.dtype, list[tuple[torch.Tensor, int]]] = {}
        for number, offset in places:
            flat = self.read(entries[number].tensor).reshape(-1)
            by_dtype.setdefault(flat.dtype, []).append((flat, offset // flat.itemsize))
        for dtype, given in by_dtype.items():
            whole = run.view(dtype)
            to = [whole[start : start + len(flat)] for flat, start in given]
            torch._foreach_copy_(to, [flat for flat, _ in given])

    def pass_on(self, run: torch.Tensor, stage: int, stages: tuple[int, ...]) -> None:
        """Send a row from the owning stage to the ranks at its place in the stages that need it."""
        me, pipeline = self.plan.position.stage, self.plan.position.pipeline
        others = [s for s in stages if s != stage]
        if not others or (me != stage and me not in others):
            return
        if len(others) == len(pipeline) - 1 and len(pipeline) > 2:
            dist.broadcast(run, group=self.pipeline, group_src=stage)
        elif me == stage:
            for other in others:
                dist.send(run, group=self.pipeline, group_dst=other)
        else:
            dist.recv(run, group=self.pipeline, group_src=stage)

    # Handing out.

    def finish(self, bucket: Bucket, held, works, packed) -> Iterator[tuple[str, torch.Tensor]]:
        for work in works:
            work.wait()
        if packed is not None:
            current = torch.cuda.current_stream(self.device)
            current.wait_event(packed)
            for bytes_ in held:
                if bytes_ is not None:
                    bytes_.record_stream(current)
        if not self.steps.receives:
            return
        if self.cuda and self.to_host:
            yield from self.on_host(bucket, held)
            return
        bytes_ = _Bytes(held)
        for tensor in bucket.tensors:
            yield tensor.name, bytes_.assemble(tensor)

    def on_host(self, bucket: Bucket, held) -> Iterator[tuple[str, torch.Tensor]]:
        bytes_, out = _Bytes(held), []
        for tensor in bucket.tensors:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(bytes_.assemble(tensor), non_blocking=True)
            out.append((tensor.name, host))
        torch.cuda.current_stream(self.device).synchronize()
        yield from out


class _Bytes:
    """A gathered bucket, viewed as elements of several types."""

    def __init__(self, held: list[torch.Tensor | None]):
        self.held = held
        self.views: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def typed(self, part: int, dtype: torch.dtype) -> torch.Tensor:
        if (part, dtype) not in self.views:
            self.views[part, dtype] = _typed(self.held[part], dtype)
        return self.views[part, dtype]

    def assemble(self, tensor: FullTensor) -> torch.Tensor:
        if tensor.run:
            part, start = tensor.run
            return self.typed(part, tensor.dtype).as_strided(tensor.shape, tensor.stride, start)
        full = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.held[tensor.sources[0].part].device)
        for source in tensor.sources:
            local = self.typed(source.part, source.unit)[source.offset : source.offset + source.size]
            source.box.copy_to_full(local, full.view(-1).view(source.unit))
        return full


def _typed(bytes_: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Bytes as elements; what is left over at the end is left out."""
    return bytes_[: len(bytes_) // dtype.itemsize * dtype.itemsize].view(dtype)


@torch.no_grad()
def load(plan: Plan, source: Mapping[str, torch.Tensor] | Callable[[str], torch.Tensor]) -> None:
    """Write Hugging Face tensors into the local parameters: the inverse of :func:`export`. Not collective.

    Replicas, tied copies and padding are written too; padded vocabulary rows become zero.

    Args:
        plan: a plan of the model, proven.
        source: a mapping, or a function, from a Hugging Face name to the full tensor.

    Raises:
        ValueError: a tensor has another shape than the configuration says; nothing of it was written.
    """
    plan.require_proof()
    get = source if callable(source) else source.__getitem__
    writers: dict[str, list] = {}
    for entry in plan.entries:
        for box in entry.boxes:
            writers.setdefault(box.full_name, []).append((entry.tensor, box))
        for offset, size, stride in entry.cut:
            flat = entry.tensor.detach().view(-1)
            flat.as_strided(size, stride, flat.storage_offset() + offset).zero_()
    for name, targets in writers.items():
        full = get(name)
        if tuple(full.shape) != plan.expected[name]:
            raise ValueError(f"{name}: shape {tuple(full.shape)}, expected {plan.expected[name]}")
        full = full.to(targets[0][0].device).contiguous().view(-1)
        for tensor, box in targets:
            box.copy_to_local(full, tensor.detach().view(-1))
