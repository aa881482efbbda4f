"""SGLang: a custom weight loader.

Start the server with ``--custom-weight-loader megatron.weight_sync.engines.sglang.load``, and give
:class:`~megatron.weight_sync.engines.calls.EngineTransport` a ``send`` that calls ``begin_weight_update``,
``update_weights_from_tensor`` with ``load_format="megatron.weight_sync.engines.sglang.load"`` and
``serialized_named_tensors=encode(named, ranks)``, and ``end_weight_update``. SGLang imports the function by
that path and calls it in every scheduler process, for the model and for every draft model, as
``load(model, named_tensors)``.

Written against SGLang 0.5.23.
"""

from __future__ import annotations

import base64
import functools
import io
import logging
import pickle
import types
import weakref
from typing import ClassVar

import torch

from megatron.weight_sync.engines import calls
from megatron.weight_sync.engines.receiver import EngineReceiver
from megatron.weight_sync.errors import UnsupportedLayout
from megatron.weight_sync.receiver import Peers

logger = logging.getLogger(__name__)

_last: tuple = (None, None)  # the last call's key, and the model that it went to


def load(model: torch.nn.Module, named_tensors) -> None:
    """Apply a payload, or answer a status call; the answer goes to the trainer's mailbox.

    SGLang hands one call to the model first and then to its draft models, unless ``selector="target"`` was
    asked for: those keep their weights, and a warning says so.
    """
    global _last
    named = list(named_tensors)
    key = calls.key_of(named)
    if key is not None and key == _last[0] and _last[1]() is not model:
        logger.warning("weight sync: %s, a draft model, keeps its weights", type(model).__name__)
        return
    _last = (key, weakref.ref(model))
    group, rank = _group()
    calls.serve(named, rank, lambda: calls.receiver_of(model, lambda: make_receiver(model, group)))


def encode(named: calls.Named, ranks: int) -> list[str]:
    """``serialized_named_tensors`` of a request to ``/update_weights_from_tensor``: an entry for every
    tensor-parallel rank.

    Tensors in host memory travel by value: SGLang's serialiser would share memory, which only its child
    processes may open. Where one is on a GPU, all travel as CUDA IPC handles by SGLang's serialiser: then
    this process needs ``sglang``, and the engine must see that GPU.
    """
    gpu = next((tensor.device for _, tensor in named if tensor.is_cuda), None)
    if gpu is None:
        whole = io.BytesIO()
        _ByValue(whole).dump([(name, tensor.clone()) for name, tensor in named])
        return [base64.b64encode(whole.getvalue()).decode()] * ranks
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

    monkey_patch_torch_reductions()
    named = [(name, tensor.to(gpu)) for name, tensor in named]
    return [MultiprocessingSerializer.serialize(named, output_str=True) for _ in range(ranks)]


class _ByValue(pickle._Pickler):
    """Pickles host tensors under the names that SGLang's unpickler lets pass: Megatron-Core replaces torch's
    function for storages by one of its own when it is imported."""

    def save_global(self, value, name=None):
        if value is not torch.storage._load_from_bytes:
            return super().save_global(value, name)
        self.write(pickle.GLOBAL + b"torch.storage\n_load_from_bytes\n")
        self.memoize(value)

    dispatch: ClassVar[dict] = {**pickle._Pickler.dispatch, types.FunctionType: save_global}


def make_receiver(model: torch.nn.Module, group=None) -> EngineReceiver:
    """A receiver for an SGLang model on this rank; ``group``: a gloo group of the engine's ranks, None for
    one."""
    if _moves_experts():
        raise UnsupportedLayout("expert load balancing (--enable-eplb) moves experts between updates")
    return EngineReceiver(
        lambda: calls.live_tensors(model),
        model.load_weights,
        reload=functools.partial(_reload, model),
        recover=model.load_weights,  # end_weight_update does the rest
        peers=Peers(group) if group is not None else None,
        after_write=getattr(model, "post_load_weights", None),
    )


def _reload(model: torch.nn.Module, weights) -> None:
    """A whole checkpoint, then what ``end_weight_update`` and the next ``begin_weight_update`` do."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    device = next(model.parameters()).device
    model.load_weights(weights)
    DefaultModelLoader.postprocess_weights(model, device)
    DefaultModelLoader.restore_weights_before_loading(model, device)


def _moves_experts() -> bool:
    from sglang.srt.runtime_context import get_exec

    return bool(get_exec().moe.enable_eplb)


def _group():
    """(gloo group of all ranks of this engine or None, this rank)."""
    from sglang.srt.distributed.parallel_state import get_world_group

    world = get_world_group()
    return (world.cpu_group if world.world_size > 1 else None), world.rank_in_group
