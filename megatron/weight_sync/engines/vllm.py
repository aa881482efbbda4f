"""vLLM: a backend of its weight-transfer engine, and a worker extension for releases without one.

Backend (vLLM with ``vllm.distributed.weight_transfer``): installed as a plugin by this package's entry point,
or by calling :func:`register` in every worker. Start vLLM with
``WeightTransferConfig(backend="megatron_weight_sync")``, and give ``EngineTransport`` a ``send`` that calls
``start_weight_update``, ``update_weights(encode(named))`` and ``finish_weight_update``.

Extension: ``worker_extension_cls="megatron.weight_sync.engines.vllm.WorkerExtension"``, and a ``send`` that
calls ``collective_rpc("weight_sync_call", args=(encode(named),))``.

Written against vLLM 0.33.
"""

from __future__ import annotations

import base64

import torch

from megatron.weight_sync.engines import calls
from megatron.weight_sync.engines.receiver import EngineReceiver, refuse_quantised
from megatron.weight_sync.errors import CorruptPayload
from megatron.weight_sync.receiver import Peers
from megatron.weight_sync.transport import cuda_ipc

BACKEND = "megatron_weight_sync"


def register() -> None:
    """Make the backend known to vLLM's factory; does nothing where it is already, or where vLLM has no
    factory."""
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    except ImportError:
        return
    try:
        WeightTransferEngineFactory.register_engine(
            BACKEND, f"{__package__}.vllm_backend", "WeightSyncEngine"
        )
    except ValueError:
        pass  # registered before


def encode(named: calls.Named) -> dict:
    """Named uint8 tensors as JSON values, for the calls that vLLM passes to its workers.

    Tensors on a GPU travel as CUDA IPC handles: the workers must see that GPU, and the payload must live
    until they have answered (:class:`EngineTransport` keeps it). Tensors in host memory travel in the call,
    as base64: right for deltas; for a dense sync of a large model use a GPU, or a directory.
    """
    pairs = []
    for name, tensor in named:
        if tensor.is_cuda:
            pairs.append([name, cuda_ipc.share(tensor)])
        else:
            pairs.append([name, base64.b64encode(tensor.numpy().tobytes()).decode()])
    return {"named": pairs}


def decode(update_info: dict) -> calls.Named:
    """The inverse of :func:`encode`."""
    out = []
    try:
        for name, data in update_info["named"]:
            if isinstance(data, dict):
                out.append((str(name), cuda_ipc.open_shared(data)))
            else:
                raw = bytearray(base64.b64decode(data, validate=True))
                out.append((str(name), torch.frombuffer(raw, dtype=torch.uint8)))
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptPayload(f"not a weight-sync update: {error}") from None
    return out


def serve(model: torch.nn.Module, update_info: dict, device=None):
    """Do what the trainer asks on this worker; returns the answer."""
    group, rank = _group()
    named = [
        (name, tensor.to(device) if device is not None else tensor) for name, tensor in decode(update_info)
    ]
    return calls.serve(named, rank, lambda: calls.receiver_of(model, lambda: make_receiver(model, group)))


def make_receiver(model: torch.nn.Module, group=None) -> EngineReceiver:
    """A receiver for a vLLM model on this rank; ``group``: a gloo group of the engine's ranks, None for
    one."""
    live = calls.live_tensors(model)
    refuse_quantised(live)
    return EngineReceiver(live, model.load_weights, peers=Peers(group) if group is not None else None)


def _group():
    """(gloo group of all ranks of this engine or None, this rank)."""
    from vllm.distributed.parallel_state import get_world_group

    world = get_world_group()
    return (world.cpu_group if world.world_size > 1 else None), world.rank_in_group


class WorkerExtension:
    """Mixed into vLLM's worker by ``worker_extension_cls``; uses its ``model_runner`` and ``device``."""

    def weight_sync_call(self, update_info: dict) -> str:
        """Returns the answer as text, too."""
        return str(serve(self.model_runner.get_model(), update_info, self.device))
