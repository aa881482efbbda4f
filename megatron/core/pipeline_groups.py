"""The groups beside a pipeline group: a second communicator, and one on the CPU for shapes.

In a pipeline of two stages both directions join the same two ranks. On one communicator their messages run
one after the other, so the point-to-point calls that are not batched use a second one for what odd stages
send.

With variable sequence lengths each tensor is preceded by its shape. Shapes travel over a gloo group: the host
knows them, so that no device waits; a shape queues behind no tensor; and sending one waits for nothing.
On the tensors' communicator a shape is a batch of sends and receives that NCCL starts only when both ends
have come to it, behind every tensor before it, which stops an interleaved schedule for ever.

This module creates these groups, of the same ranks as the pipeline group, and finds them again; the group of
all ranks takes no part.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from megatron.core.model_parallel_config import ModelParallelConfig

logger = logging.getLogger(__name__)

# Weak keys: a pipeline group may be destroyed and made anew, and its companions go with it.
_OVERLAP_GROUPS: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
_SHAPE_CHANNELS: WeakKeyDictionary[dist.ProcessGroup, ShapeChannel] = WeakKeyDictionary()
_WARNED: WeakSet[dist.ProcessGroup] = WeakSet()


class ShapeChannel:
    """Sends and receives shapes of pipeline tensors over a group of the pipeline's ranks on the CPU.

    Messages of one direction arrive in the order in which they were sent; those of the other do not matter.
    """

    FORWARD, BACKWARD = 1, 2  # tags: with two stages both directions come from the same rank
    MOST_UNDELIVERED = 4096  # far more than the tensors that a schedule has in flight

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        stages, stage = group.size(), group.rank()
        self.next_rank = dist.get_global_rank(group, (stage + 1) % stages)
        self.prev_rank = dist.get_global_rank(group, (stage - 1) % stages)
        self._sent: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def exchange(
        self,
        tensor_send_next: torch.Tensor | None,
        tensor_send_prev: torch.Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[list[int], list[int]]:
        """Send the shapes of these tensors, and wait for those of the tensors to come.

        Args:
            tensor_send_next: activations for the next stage, [sequence, micro-batch, hidden], or None.
            tensor_send_prev: gradients for the previous stage, of three dimensions too, or None.
            recv_prev: whether activations come from the previous stage.
            recv_next: whether gradients come from the next stage.

        Returns:
            The shapes of what comes from the previous and from the next stage; [0, 0, 0] where nothing does.
        """
        sends = ((tensor_send_next, self.next_rank, self.FORWARD),
                 (tensor_send_prev, self.prev_rank, self.BACKWARD))  # fmt: skip
        for tensor, rank, tag in sends:
            if tensor is not None:
                shape = torch.tensor(tensor.shape, dtype=torch.int64)
                # gloo delivers when the receiver asks, and drops a message whose handle is gone
                self._sent.append((dist.isend(shape, rank, self.group, tag), shape))
        while len(self._sent) > self.MOST_UNDELIVERED:
            self._sent.popleft()[0].wait()
        shapes = torch.zeros(2, 3, dtype=torch.int64)
        if recv_prev:
            dist.recv(shapes[0], self.prev_rank, self.group, self.FORWARD)
        if recv_next:
            dist.recv(shapes[1], self.next_rank, self.group, self.BACKWARD)
        return shapes[0].tolist(), shapes[1].tolist()


def create_companion_groups(
    pp_group: dist.ProcessGroup,
    pp_ranks: Sequence[int],
    new_group: Callable[..., dist.ProcessGroup] | None = None,
    gloo: bool = True,
    **options: Any,
) -> None:
    """Create the groups beside one pipeline group: with two stages the second communicator, with two or more
    the group for shapes.

    Collective in the way of ``torch.distributed.new_group``: every rank of the job calls it for every
    pipeline group, in the same order, also the ranks that belong to none. ``initialize_model_parallel`` and
    ``HyperCommGrid.create_pg("pp")`` do so for theirs; code that makes pipeline groups itself calls this
    right after. UCC gets no second communicator, as it gains nothing from it.

    Args:
        pp_group: the pipeline group, as ``new_group`` returned it on this rank.
        pp_ranks: global ranks of that group, in stage order.
        new_group: makes the groups; ``torch.distributed.new_group`` unless given.
        gloo: whether to make the group for shapes, which is gloo's
            (``initialize_model_parallel(create_gloo_process_groups=...)``).
        options: keyword arguments for ``new_group`` (``backend``, ``timeout``, ``pg_options``).
    """
    if len(pp_ranks) < 2 or not dist.is_initialized():
        return
    new_group = new_group or dist.new_group
    if len(pp_ranks) == 2 and options.get("backend") != "ucc":
        options["group_desc"] = "PIPELINE_MODEL_PARALLEL_OVERLAP_GROUP"
        group = new_group(list(pp_ranks), **options)
        if dist.get_rank() in pp_ranks:
            _OVERLAP_GROUPS[pp_group] = group
    if gloo and dist.is_gloo_available():
        options |= dict(group_desc="PIPELINE_MODEL_PARALLEL_SHAPE_GROUP", backend="gloo", pg_options=None)
        group = new_group(list(pp_ranks), **options)
        if dist.get_rank() in pp_ranks:
            _SHAPE_CHANNELS[pp_group] = ShapeChannel(group)


def destroy_companion_groups(pp_group: dist.ProcessGroup) -> None:
    """Destroy the groups beside ``pp_group``, those that there are."""
    if (group := _OVERLAP_GROUPS.pop(pp_group, None)) is not None:
        dist.destroy_process_group(group)
    if (channel := _SHAPE_CHANNELS.pop(pp_group, None)) is not None:
        dist.destroy_process_group(channel.group)


def shape_channel(pp_group: dist.ProcessGroup) -> ShapeChannel | None:
    """What carries the shapes of ``pp_group``; None where it was not created: then ``pp_group`` does."""
    return _SHAPE_CHANNELS.get(pp_group)


def overlap_group(pp_group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The second communicator of ``pp_group``; ``pp_group`` itself, with a warning, where none was created.

    The results are the same without one: both stages issue their messages in mirrored order
    (check_interleaving refuses the schedule that does not), so that one communicator carries both directions,
    one message at a time. None is created here on demand: that is a collective, and a group made by its
    members alone need not get the same name on both.
    """
    if (group := _OVERLAP_GROUPS.get(pp_group)) is not None:
        return group
    if pp_group not in _WARNED:
        _WARNED.add(pp_group)
        logger.warning(
            "the two directions of this two-stage pipeline share one communicator and do not overlap: call "
            "megatron.core.pipeline_groups.create_companion_groups where its group is created"
        )
    return pp_group


def check_interleaving(pp_group: dist.ProcessGroup, config: ModelParallelConfig, forward_only: bool) -> None:
    """Refuse an interleaved schedule whose messages would be mixed up or wait for ever.

    A batch holds activations and gradients. With two stages both go to the same rank, which tells them apart
    by their order alone, and that differs between sender and receiver: gradients would be taken for
    activations. Nothing is mixed in a forward-only run, nor by ring_exchange, which names each tensor.

    Overlap in warm-up and flush posts receives ahead, so that on a single communicator both of two stages may
    send first, which blocks NCCL; so do shapes of variable lengths on it.

    Raises:
        ValueError: two stages, ``config.batch_p2p_comm``, and a backward pass.
        RuntimeError: ``config.overlap_p2p_comm_warmup_flush``, and two stages have no second communicator,
            or variable lengths no group for shapes.
    """
    two, made = pp_group.size() == 2, "megatron.core.pipeline_groups.create_companion_groups"
    if two and config.batch_p2p_comm and not (config.use_ring_exchange_p2p or forward_only):
        raise ValueError(
            "batch_p2p_comm=True cannot be used with virtual_pipeline_model_parallel_size on "
            "pipeline_model_parallel_size=2: activations and gradients between the same two ranks would be "
            "mixed up; set batch_p2p_comm=False (overlap_p2p_comm may be True or False)"
        )
    if not config.overlap_p2p_comm_warmup_flush:
        return
    if two and pp_group not in _OVERLAP_GROUPS and dist.get_backend(pp_group) != "ucc":
        raise RuntimeError(
            "overlap_p2p_comm_warmup_flush on a two-stage pipeline needs a second communicator: call "
            f"{made} where its group is created"
        )
    if (config.variable_seq_lengths or config.mtp_standalone) and pp_group not in _SHAPE_CHANNELS:
        raise RuntimeError(
            "overlap_p2p_comm_warmup_flush with variable sequence lengths needs a gloo group for their "
            "shapes: leave create_gloo_process_groups at True in initialize_model_parallel, or call "
            f"{made} where the pipeline's group is created"
        )
