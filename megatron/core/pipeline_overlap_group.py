"""The second communicator of a two-stage pipeline.

In a pipeline of two stages both directions join the same two ranks. On one communicator their messages run
one after the other, so the point-to-point calls that are not batched use a second one for what odd stages
send. This module creates it, a group of the same two ranks, and finds it again; the group of all ranks takes
no part.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist

if TYPE_CHECKING:
    from megatron.core.model_parallel_config import ModelParallelConfig

logger = logging.getLogger(__name__)

# Weak keys: a pipeline group may be destroyed and made anew, and its companion goes with it.
_OVERLAP_GROUPS: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()
_WARNED: WeakSet[dist.ProcessGroup] = WeakSet()


def create_overlap_group(
    pp_group: dist.ProcessGroup,
    pp_ranks: Sequence[int],
    new_group: Callable[..., dist.ProcessGroup] | None = None,
    **options: Any,
) -> None:
    """Create the second communicator of one pipeline group, if that has two stages.

    Collective in the way of ``torch.distributed.new_group``: every rank of the job calls it for every
    pipeline group, in the same order, also the ranks that belong to none. ``initialize_model_parallel`` and
    ``HyperCommGrid.create_pg("pp")`` do so for theirs; code that makes pipeline groups itself calls this
    right after. It does nothing for another number of stages, nor on UCC, which gains nothing from it.

    Args:
        pp_group: the pipeline group, as ``new_group`` returned it on this rank.
        pp_ranks: global ranks of that group, in stage order.
        new_group: makes the group; ``torch.distributed.new_group`` unless given.
        options: keyword arguments for it (``backend``, ``timeout``, ``pg_options``).
    """
    if len(pp_ranks) != 2 or options.get("backend") == "ucc" or not dist.is_initialized():
        return
    options["group_desc"] = "PIPELINE_MODEL_PARALLEL_OVERLAP_GROUP"
    group = (new_group or dist.new_group)(list(pp_ranks), **options)
    if dist.get_rank() in pp_ranks:
        _OVERLAP_GROUPS[pp_group] = group


def destroy_overlap_group(pp_group: dist.ProcessGroup) -> None:
    """Destroy the second communicator of ``pp_group``, if there is one."""
    if (group := _OVERLAP_GROUPS.pop(pp_group, None)) is not None:
        dist.destroy_process_group(group)


def overlap_group(pp_group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The second communicator of ``pp_group``; ``pp_group`` itself, with a warning, where none was created.

    The results are the same without one: both stages issue their messages in mirrored order (check_two_stages
    refuses the schedule that does not), so that one communicator carries both directions, one message at a
    time. None is created here on demand: that is a collective, and a group made by its members alone need not
    get the same name on both.
    """
    if (group := _OVERLAP_GROUPS.get(pp_group)) is not None:
        return group
    if pp_group not in _WARNED:
        _WARNED.add(pp_group)
        logger.warning(
            "the two directions of this two-stage pipeline share one communicator and do not overlap: call "
            "megatron.core.pipeline_overlap_group.create_overlap_group where its group is created"
        )
    return pp_group


def check_two_stages(pp_group: dist.ProcessGroup, config: ModelParallelConfig, forward_only: bool) -> None:
    """Refuse an interleaved schedule whose messages between two stages would be mixed up or wait forever.

    A batch holds activations and gradients. With two stages both go to the same rank, which tells them apart
    by their order alone, and that differs between sender and receiver: gradients would be taken for
    activations. Nothing is mixed in a forward-only run, nor by ring_exchange, which names each tensor.

    Overlap in warm-up and flush posts receives ahead, so that on a single communicator both stages may send
    first, which blocks NCCL.

    Raises:
        ValueError: two stages, ``config.batch_p2p_comm``, and a backward pass.
        RuntimeError: two stages, ``config.overlap_p2p_comm_warmup_flush``, and no second communicator.
    """
    if pp_group.size() != 2:
        return
    if config.batch_p2p_comm and not (config.use_ring_exchange_p2p or forward_only):
        raise ValueError(
            "batch_p2p_comm=True cannot be used with virtual_pipeline_model_parallel_size on "
            "pipeline_model_parallel_size=2: activations and gradients between the same two ranks would be "
            "mixed up; set batch_p2p_comm=False (overlap_p2p_comm may be True or False)"
        )
    if config.overlap_p2p_comm_warmup_flush and pp_group not in _OVERLAP_GROUPS:
        if dist.get_backend(pp_group) != "ucc":
            raise RuntimeError(
                "overlap_p2p_comm_warmup_flush on a two-stage pipeline needs a second communicator: call "
                "megatron.core.pipeline_overlap_group.create_overlap_group where its group is created"
            )
