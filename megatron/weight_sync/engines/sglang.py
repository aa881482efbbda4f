"""SGLang: a custom weight loader.

Start the server with ``--custom-weight-loader megatron.weight_sync.engines.sglang.load`` and call
``update_weights_from_tensor`` with ``load_format="megatron.weight_sync.engines.sglang.load"`` and the tensors
that :class:`~megatron.weight_sync.engines.calls.EngineTransport` hands to its ``send``. SGLang imports the
function by that path and calls it on every rank as ``load(model, named_tensors)``.

Written against SGLang 0.5.23.
"""

from __future__ import annotations

import torch

from megatron.weight_sync.engines import calls
from megatron.weight_sync.engines.receiver import EngineReceiver, refuse_quantised
from megatron.weight_sync.receiver import Peers


def load(model: torch.nn.Module, named_tensors) -> None:
    """Apply a payload, or answer a status call; the answer goes to the trainer's mailbox."""
    group, rank = _group()
    calls.serve(named_tensors, rank, lambda: calls.receiver_of(model, lambda: make_receiver(model, group)))


def make_receiver(model: torch.nn.Module, group=None) -> EngineReceiver:
    """A receiver for an SGLang model on this rank; ``group``: a gloo group of the engine's ranks, None for
    one."""
    live = calls.live_tensors(model)
    refuse_quantised(live)
    return EngineReceiver(
        live,
        model.load_weights,
        peers=Peers(group) if group is not None else None,
        after_write=getattr(model, "post_load_weights", None),
    )


def _group():
    """(gloo group of all ranks of this engine or None, this rank)."""
    from sglang.srt.distributed.parallel_state import get_world_group

    world = get_world_group()
    return (world.cpu_group if world.world_size > 1 else None), world.rank_in_group
