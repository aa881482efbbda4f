"""Run Megatron-Core on CPU with gloo: training, pipelines, MoE and the distributed optimizer, without a GPU.

Megatron-Core names CUDA outright in many places (``torch.cuda.current_device()``, ``device='cuda'``,
streams, the CUDA random states). :func:`install` redirects those to the CPU for the calling process. It
exists for the quickstart and the tests; nothing else in this package changes another module at run time.

    import megatron.cpu_runtime
    megatron.cpu_runtime.install()       # before the first import of megatron.core
    import megatron.core

Limits: one thread per process runs Megatron (the redirection of ``device='cuda'`` is thread-local);
``batch_p2p_comm=False`` is needed for pipelines, because gloo has no batched sends on one tag; timing events
and memory figures read zero. gloo drops a message whose ``isend`` handle is gone before its receiver asks for
it: keep handles until they are waited for, and leave ``overlap_p2p_comm_warmup_flush`` off in forward-only
runs, whose schedule lets go of its last one.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

_undo: list = []  # callables that restore what install() changed, run in reverse order


def installed() -> bool:
    """Whether :func:`install` is in force in this process."""
    return bool(_undo)


def install() -> None:
    """Redirect Megatron-Core's uses of CUDA to the CPU. A second call does nothing.

    Raises:
        RuntimeError: ``megatron.core`` is imported already. Some of its defaults are bound at import.
    """
    if _undo:
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError(
            "cpu_runtime.install() must run before megatron.core is imported: call it first in the program"
        )
    _redirect_torch_cuda()
    _redirect_collectives()
    _redirect_megatron()


def uninstall() -> None:
    """Restore everything :func:`install` changed. Does nothing when not installed."""
    while _undo:
        _undo.pop()()


def _set(owner: Any, name: str, value: Any) -> None:
    """Set an attribute and remember how to restore it."""
    if name in vars(owner):
        old = vars(owner)[name]
        _undo.append(lambda: setattr(owner, name, old))
    else:
        _undo.append(lambda: delattr(owner, name))
    setattr(owner, name, value)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, int) and not isinstance(device, bool)


class _CudaToCpu(TorchFunctionMode):
    """Rewrites ``device='cuda'`` to CPU and makes ``Tensor.cuda()`` and pinning the identity."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _is_cuda(kwargs.get("device")):
            kwargs = dict(kwargs, device="cpu")
        if kwargs.get("pin_memory"):
            kwargs = dict(kwargs, pin_memory=False)
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]) and not isinstance(args[1], int):
            args = (args[0], "cpu", *args[2:])
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron's bucketing compares with 'torch.cuda.FloatTensor' and its like.
            return result.replace("torch.", "torch.cuda.", 1) if ".cuda." not in result else result
        return result


class _NoStream:
    """Stands for torch.cuda.Stream and torch.cuda.Event: every operation is in order and done at once."""

    cuda_stream = 0

    def __init__(self, *args, **kwargs):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return False

    def record(self, *args, **kwargs):
        pass

    wait = synchronize = wait_event = wait_stream = record

    def record_event(self, *args, **kwargs):
        return _NoStream()

    def query(self):
        return True

    def elapsed_time(self, other):
        return 0.0


def _redirect_torch_cuda() -> None:
    cuda = torch.cuda

    def returning(value):
        return lambda *args, **kwargs: value

    for name, value in {
        "current_device": torch.device("cpu"),
        "synchronize": None,
        "set_device": None,
        "empty_cache": None,
        "is_current_stream_capturing": False,
        "get_device_capability": (9, 0),
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "_lazy_init": None,
    }.items():
        _set(cuda, name, returning(value))

    def seed(value):
        torch.default_generator.manual_seed(int(value))

    def get_rng_state(device="cuda"):
        return torch.get_rng_state()

    def set_rng_state(state, device="cuda"):
        torch.set_rng_state(state)

    _set(cuda, "manual_seed", seed)
    _set(cuda, "manual_seed_all", seed)
    for owner in (cuda, cuda.random):
        _set(owner, "get_rng_state", get_rng_state)
        _set(owner, "set_rng_state", set_rng_state)
    _set(cuda, "default_generators", (torch.default_generator,))
    _set(cuda, "_lazy_call", lambda call, **kwargs: call())
    _set(cuda, "Stream", _NoStream)
    _set(cuda, "Event", _NoStream)
    _set(cuda, "current_stream", lambda *args, **kwargs: _NoStream())
    _set(cuda, "default_stream", lambda *args, **kwargs: _NoStream())
    _set(cuda, "stream", lambda stream: contextlib.nullcontext())
    for name in ("range_push", "range_pop", "mark"):
        _set(cuda.nvtx, name, returning(None))

    # Megatron compiles small functions at import (jit_fuser). On CPU that costs minutes and gains nothing.
    if "TORCHDYNAMO_DISABLE" not in os.environ:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        _undo.append(lambda: os.environ.pop("TORCHDYNAMO_DISABLE", None))

    mode = _CudaToCpu()
    mode.__enter__()
    _undo.append(lambda: mode.__exit__(None, None, None))


def _redirect_collectives() -> None:
    """gloo has no uneven all_gather and reduce_scatter; expert tensor parallelism uses both."""
    even_all_gather, even_reduce_scatter = dist.all_gather, dist.reduce_scatter

    def all_gather(tensor_list, tensor, group=None, async_op=False):
        if len({out.shape for out in tensor_list}) == 1:
            return even_all_gather(tensor_list, tensor, group=group, async_op=async_op)
        if async_op:
            raise NotImplementedError("cpu_runtime: uneven all_gather is synchronous")
        longest = max(out.shape[0] for out in tensor_list)
        padded = tensor.new_zeros((longest, *tensor.shape[1:]))
        padded[: tensor.shape[0]] = tensor
        received = [torch.empty_like(padded) for _ in tensor_list]
        even_all_gather(received, padded, group=group)
        for out, rows in zip(tensor_list, received, strict=True):
            out.copy_(rows[: out.shape[0]])

    def reduce_scatter(output, input_list, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if len({part.shape for part in input_list}) == 1:
            return even_reduce_scatter(output, list(input_list), op=op, group=group, async_op=async_op)
        if async_op:
            raise NotImplementedError("cpu_runtime: uneven reduce_scatter is synchronous")
        full = torch.cat([part.contiguous() for part in input_list])
        dist.all_reduce(full, op=op, group=group)
        output.copy_(full.split([part.shape[0] for part in input_list])[dist.get_rank(group)])

    for owner in (dist, dist.distributed_c10d):
        _set(owner, "all_gather", all_gather)
        _set(owner, "reduce_scatter", reduce_scatter)


def _redirect_megatron() -> None:
    import megatron.core.tensor_parallel.random as tp_random
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    def set_rng_state(state, device=-1, graph_safe=False):
        torch.set_rng_state(state)

    _set(tp_random, "_set_cuda_rng_state", set_rng_state)
    _set(tp_random, "_lazy_call", torch.cuda._lazy_call)

    def splits_to_numpy(tensor, as_numpy=False, record_stream=False):
        # Upstream converts only CUDA tensors, and all_to_all_single takes no tensors as splits.
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    _set(token_dispatcher, "maybe_move_tensor_to_cpu", splits_to_numpy)
    # Upstream's router takes it, where Transformer Engine is installed, on any device.
    _set(moe_utils, "te_general_gemm", None)

    # The torch norm refuses sequence parallelism only because nobody marks its weights; mark them, so that
    # finalize_model_grads reduces their gradients over the tensor-parallel group as for the fused norms.
    refusing_new = WrappedTorchNorm.__new__

    def marking_new(cls, config, hidden_size, eps=1e-5, **kwargs):
        sequence_parallel, config.sequence_parallel = config.sequence_parallel, False
        try:
            norm = refusing_new(cls, config, hidden_size, eps, **kwargs)
        finally:
            config.sequence_parallel = sequence_parallel
        for parameter in norm.parameters():
            parameter.sequence_parallel = sequence_parallel
        return norm

    _set(WrappedTorchNorm, "__new__", marking_new)
