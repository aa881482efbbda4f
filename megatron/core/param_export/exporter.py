"""Exporting full Hugging Face tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral

import torch
import torch.distributed as dist

from megatron.core.param_export.plan import Plan
from megatron.core.param_export.schedule import Part, Place, Run, Schedule, Step, schedule

DEFAULT_BUCKET_BYTES = 1024**3


def receiving_ranks(plan: Plan, receivers: str | int | Sequence[int]) -> list[int]:
    """Ranks of the plan's group named by "all", "nodes" (the first rank of every host), a rank or several.

    Raises:
        ValueError: anything else.
    """
    given = receivers.tolist() if hasattr(receivers, "tolist") else receivers  # of a tensor or an array
    if given == "all":
        return list(range(plan.ranks))
    if given == "nodes":
        first: dict[str, int] = {}
        for rank, member in enumerate(plan.members):
            first.setdefault(member.position.host, rank)
        return sorted(first.values())
    ranks = [given] if isinstance(given, Integral) else given
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

    Every rank of the plan must pass the same arguments and run the iterator to its end, on one CUDA stream;
    ranks that do not receive get no items. Tensors travel in steps of at most half a bucket. Three are in
    memory at a time: one that was handed out, and that the caller may still look at, one that is gathered and
    handed out, and one that is packed meanwhile. With the tensors that had to be put together that is two
    buckets at most, and what the caller keeps.

    Args:
        plan: a proven plan.
        receivers: "all", "nodes" (the first rank of every host), a rank, or several ranks of the plan's
            group.
        bucket_bytes: half of the extra memory. A tensor of more than half of this travels alone, and three
            such may be in memory at a time.
        to_host: hand the tensors out in pinned host memory instead of on the parameters' device.
        read: gives the current values of a live parameter or buffer, on any device, in its dtype; for
            parameters whose own memory is released for the moment (``compat.memory_saver_backups()``).
            Default: the tensor itself. Given on every rank or on none.
        names: only these full tensors. Default: all.
        current: every rank has just called ``plan.require_current()``; it is not asked again.

    Yields:
        ``(name, tensor)``: the name as in checkpoint files (transformers 5 has others in memory for routed
        experts, which it fuses); the tensor contiguous, in the parameter's dtype. It never aliases a
        parameter; it may share memory with other tensors of its bucket, so a caller that keeps few of them
        keeps clones.

    Raises:
        ValueError: the plan is not proven, a receiver is not one of its ranks, the bucket size is not
            positive, or a name is not one of the model's.
        TypeError: ``plan`` is something else, for instance the model.
        StalePlanError: before the first tensor, on every rank: the model's tensors were replaced, converted
            or emptied since the plan was built.
        RuntimeError: at the end, on the ranks that could read: ``read`` failed on others, which raise its
            error.

    An error while tensors are put together on a receiving rank is raised when the collectives are over, so
    that no other rank waits for them.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"plan: expected what build_plan returns, got {type(plan).__name__}")
    plan.require_proof()
    if isinstance(bucket_bytes, bool) or not isinstance(bucket_bytes, int | float) or not bucket_bytes > 0:
        raise ValueError(f"bucket_bytes: expected a positive number of bytes, got {bucket_bytes!r}")
    if names is not None:
        names = set(names)
        if unknown := sorted(names - plan.expected.keys()):
            raise ValueError(f"names: {len(unknown)} are not tensors of this model: {unknown[:10]}")
    steps = schedule(plan, receiving_ranks(plan, receivers), bucket_bytes // 2, names)
    return _Export(plan, steps, to_host, read).run(current)


@dataclass
class _Started:
    """A step under way: its bytes by part, and what they wait for."""

    step: Step
    held: list[torch.Tensor | None]
    works: list[dist.Work]
    packed: torch.cuda.Event | None


class _Export:
    """Memory is taken, and tensors are handed out, on the caller's stream: what the caller has let go of is
    used again without the host waiting for the device. Packing and gathering run on a stream of their own.
    """

    def __init__(self, plan: Plan, schedule: Schedule, to_host: bool, read):
        self.plan, self.schedule, self.to_host, self.read = plan, schedule, to_host, read
        self.failed: Exception | None = None
        self.device = plan.device
        self.side = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        groups = plan.process_groups
        self.groups = {"dense": getattr(groups, "tp", None), "expert": getattr(groups, "tp_ep", None)}
        self.pipeline = getattr(groups, "pp", None)

    def run(self, current: bool) -> Iterator[tuple[str, torch.Tensor]]:
        self.main = torch.cuda.current_stream(self.device) if self.side is not None else None
        self.readable = current or self.read is not None or self.plan.is_readable()
        ahead = None
        try:
            for step in [*self.schedule.steps, None]:
                # Before the one ahead is waited for, so that it is packed while that one is gathered.
                started = None if step is None else self.start(step)
                # Two are gathered meanwhile, or all that there are; nothing is handed out before.
                if not current and (ahead is not None or step is None):
                    self.plan.require_current(self.readable)
                    current = True
                if ahead is not None:
                    self.wait(ahead)
                    if self.schedule.receives and self.failed is None:
                        try:
                            yield from self.hand_out(ahead)
                        except Exception as error:
                            self.failed = error
                ahead = started
        finally:  # also for a caller who does not go on: memory is free again only when it is packed
            if self.side is not None:
                self.main.wait_stream(self.side)
        if self.read is not None:
            self.agree_on_reading()
        if self.failed is not None:
            raise self.failed

    # Gathering.

    def start(self, step: Step) -> _Started:
        """Pack, pass on and begin to gather."""
        held = [self.memory(part) for part in step.parts]
        if self.side is not None:
            self.side.wait_stream(self.main)
        with torch.cuda.stream(self.side):
            parts = [
                (part, *self.runs(part, bytes_))
                for part, bytes_ in zip(step.parts, held, strict=True)
                if bytes_ is not None
            ]
            self.pack(
                [pair for part, _, row, whole in parts for pair in ((part.row, row), (part.whole, whole))]
            )
            works = [work for part in parts for work in self.pass_on_and_gather(*part)]
            return _Started(step, held, works, None if self.side is None else self.side.record_event())

    def memory(self, part: Part) -> torch.Tensor | None:
        """For the rows of the group and the whole tensors, if this rank has or gets any of it."""
        passes_on = part.stage == self.plan.position.stage and self.schedule.needed_by[part.kind]
        if not passes_on and not self.schedule.gathers[part.kind]:
            return None
        rows = len(self.plan.position.gather[part.kind])
        return torch.empty(rows * part.row.nbytes + part.whole.nbytes, dtype=torch.uint8, device=self.device)

    def runs(self, part: Part, held: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The bytes of all rows, of the row that is this rank's, and of the whole tensors."""
        peers = self.plan.position.gather[part.kind]
        rows, whole = held.split([len(peers) * part.row.nbytes, part.whole.nbytes])
        return rows, rows.view(len(peers), -1)[peers.index(self.plan.rank)], whole

    @torch.no_grad()
    def pack(self, runs: list[tuple[Run, torch.Tensor]]) -> None:
        """Copy local tensors to their places, in one operation; but not from a stale plan, which is refused
        soon after."""
        if not self.readable:
            return
        places: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for run, run_bytes in runs:
            for fill in run.fills:
                into = fill.places(run_bytes)
                places += into
                if self.read is None and fill.ordinary:
                    values += fill.tensors
                else:
                    values += [self.read_one(tensor).reshape(into[0].shape) for tensor in fill.tensors]
        if places:
            torch._foreach_copy_(places, values)

    def pass_on_and_gather(self, part: Part, rows, row, whole) -> Iterator[dist.Work]:
        for run, place in ((part.row, row), (part.whole, whole)):
            if run.nbytes:
                self.pass_on(place, part.stage, self.schedule.needed_by[part.kind])
        if rows.numel() > row.numel() and self.schedule.gathers[part.kind]:
            group = self.groups[part.kind]
            # in place under NCCL: the row is already where it belongs
            given = row if dist.get_backend(group) == "nccl" else row.clone()
            yield dist.all_gather_into_tensor(rows, given, group=group, async_op=True)

    def read_one(self, tensor: torch.Tensor) -> torch.Tensor:
        """What ``read`` gives for a tensor; or if that is of no use, anything, and the error is for later."""
        if self.read is None:
            return tensor
        try:
            found = self.read(tensor)
            if (found.dtype, found.numel()) == (tensor.dtype, tensor.numel()):
                return found
            got = f"{found.dtype} {list(found.shape)}"
            name, wanted = self.plan.entry_of(tensor).name, f"{tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"read: expected {wanted} for {name}, got {got}")
        except Exception as error:
            self.failed = self.failed or error
            return torch.empty_like(tensor)

    def agree_on_reading(self) -> None:
        """Others have handed out what this rank could not read: all of them must know."""
        failed = self.plan.everyones(torch.tensor(int(self.failed is not None))).tolist()
        ranks = ", ".join(str(rank) for rank, flag in enumerate(failed) if flag)
        if ranks and self.failed is None:
            raise RuntimeError(f"the values could not be read on rank {ranks}: what was handed out is wrong")

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

    def wait(self, started: _Started) -> None:
        """What the caller's stream does from here on, it does with the bytes in place."""
        for work in started.works:
            work.wait()
        if started.packed is not None:
            self.main.wait_event(started.packed)

    # Handing out.

    def hand_out(self, started: _Started) -> Iterator[tuple[str, torch.Tensor]]:
        tensors = self.put_together(started)
        if self.to_host and self.side is not None:
            tensors = self.on_host(tensors)
        yield from zip(started.step.names, tensors, strict=True)

    def put_together(self, started: _Started) -> list[torch.Tensor]:
        """The step's tensors: views of the gathered bytes, or of memory into which all copies go at once."""
        step, buffers = started.step, [*started.held]
        if step.built:
            buffers.append(torch.empty(step.built, dtype=torch.uint8, device=self.device))
        views = [buffers[buffer].view(dtype) for buffer, dtype in step.views]
        started.held.clear()  # what no tensor is a view of is free

        def at(place: Place) -> torch.Tensor:
            return views[place.view].as_strided(place.size, place.stride, place.offset)

        if step.copies:
            here, there = zip(*((at(a), at(b)) for a, b in step.copies), strict=True)
            torch._foreach_copy_(there, here)
        out: dict[int, torch.Tensor] = {}
        for group in step.groups:
            tensor = at(group.place)
            out.update(
                zip(group.members, tensor.unbind() if len(group.members) > 1 else [tensor], strict=True)
            )
        return [out[member] for member in range(len(out))]

    def on_host(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        out = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True) for t in tensors]
        for host, tensor in zip(out, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        self.main.synchronize()
        return out
