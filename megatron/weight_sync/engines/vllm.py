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
import functools
from collections.abc import Callable

import torch

from megatron.weight_sync.engines import calls
from megatron.weight_sync.engines.receiver import EngineReceiver
from megatron.weight_sync.errors import CorruptPayload, UnsupportedLayout
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


def decode(update_info: dict) -> list[tuple[str, Callable[[], torch.Tensor]]]:
    """The inverse of :func:`encode`; tensors are opened when their function is called.

    Raises:
        CorruptPayload: here, or from those functions.
    """
    try:
        return [(str(name), functools.partial(_open, data)) for name, data in update_info["named"]]
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptPayload(f"not a weight-sync update: {error}") from None


def _open(data) -> torch.Tensor:
    if isinstance(data, dict):
        return cuda_ipc.open_shared(data)
    try:
        return torch.frombuffer(bytearray(base64.b64decode(data, validate=True)), dtype=torch.uint8)
    except (TypeError, ValueError) as error:
        raise CorruptPayload(f"not a weight-sync update: {error}") from None


def serve(model: torch.nn.Module, update_info: dict, vllm_config=None, device=None):
    """Do what the trainer asks on this worker; returns the answer.

    Args:
        vllm_config: the worker's; None only for a model that vLLM did not build.
        device: where payloads go; None leaves them where they are.
    """
    group, rank = _group(vllm_config)
    named = decode(update_info)
    if device is not None:
        named = [(name, functools.partial(_open_on, device, get)) for name, get in named]
    return calls.serve(
        named, rank, lambda: calls.receiver_of(model, lambda: make_receiver(model, vllm_config, group))
    )


def _open_on(device, get: Callable[[], torch.Tensor]) -> torch.Tensor:
    return get().to(device)


def make_receiver(model: torch.nn.Module, vllm_config=None, group=None) -> EngineReceiver:
    """A receiver for a vLLM model on this rank.

    Args:
        vllm_config: the worker's; None only for a model that vLLM did not build.
        group: a gloo group of the engine's ranks, None for one.
    """
    if vllm_config is not None and vllm_config.parallel_config.enable_eplb:
        raise UnsupportedLayout("expert load balancing (enable_eplb) moves experts between updates")
    return EngineReceiver(
        lambda: calls.live_tensors(model),
        model.load_weights,
        reload=None if vllm_config is None else functools.partial(_reload, model, vllm_config),
        peers=Peers(group) if group is not None else None,
        after_write=None if vllm_config is None else functools.partial(_derive, model, vllm_config),
    )


def _reload(model: torch.nn.Module, vllm_config, weights) -> None:
    """A whole checkpoint as vLLM takes it while running: layer by layer, processed, into the live storage."""
    config = vllm_config.model_config
    try:
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )
    except ImportError:  # older releases: load, and process in place
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        model.load_weights(weights)
        process_weights_after_loading(model, config, next(model.parameters()).device)
        return
    initialize_layerwise_reload(model)
    model.load_weights(weights)
    finalize_layerwise_reload(model, config)


def _derive(model: torch.nn.Module, vllm_config) -> None:
    """Latent attention keeps products of ``kv_b_proj`` that only vLLM's own processing renews."""
    for module in model.modules():
        if hasattr(module, "kv_b_proj") and hasattr(module, "process_weights_after_loading"):
            module.process_weights_after_loading(vllm_config.model_config.dtype)


def _group(vllm_config):
    """(gloo group of the ranks that hold one model together or None, this rank among all ranks of the
    engine). Data-parallel replicas of a model without experts have a group each, and every one of them gets
    every call."""
    from vllm.distributed.parallel_state import get_world_group

    world = get_world_group()
    rank = world.rank_in_group
    if vllm_config is not None and world.world_size == vllm_config.parallel_config.world_size:
        rank += vllm_config.parallel_config.data_parallel_index * world.world_size
    return (world.cpu_group if world.world_size > 1 else None), rank


class WorkerExtension:
    """Mixed into vLLM's worker by ``worker_extension_cls``; uses its ``model_runner``, ``vllm_config`` and
    ``device``."""

    def weight_sync_call(self, update_info: dict) -> str:
        """Returns the answer as text, too."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config):
            return str(serve(self.model_runner.get_model(), update_info, self.vllm_config, self.device))
