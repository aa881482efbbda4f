"""The functions that RL trainers call today, with the names and the tensors that they expect.

Stateless: everything is decided from a name, the tensor-parallel attributes on the tensor, and Megatron's
process groups. Trainers pass tensors that belong to no module (placeholders filled by a broadcast over
pipeline or expert ranks, copies with copied attributes), and write through the tensors that are yielded. Code
that can choose uses :func:`megatron.core.param_export.export`, whose layout is proven.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.param_export.layout import is_one_chunk, unwrap

_PREFIX = "module.module."


def all_gather_param(name: str, param: torch.Tensor, gated: bool = True) -> torch.Tensor:
    """The full tensor of a tensor-parallel parameter; the parameter's own data where it is not sharded.
    Collective.

    Rows stay in the order in which they are stored: ``moe_mlp_glu_interleave_size`` is not undone here.

    Args:
        name: global name; says whether the tensor is a routed expert's (``.experts.``, sharded over the
            expert tensor-parallel group), a gated first layer (``linear_fc1``) or an attention sink.
        param: a tensor with ``tensor_model_parallel`` and, where that is true, ``partition_dim``.
        gated: ``linear_fc1`` holds gate rows, then up rows, on every rank.

    Raises:
        ValueError: a parameter without the ``tensor_model_parallel`` attribute.
    """
    gathered, work = _start(name, param)
    if work is not None:
        work.wait()
    return _arrange(name, param, gathered, gated)


def all_gather_params_async(
    infos_and_params: Iterable[tuple[object, torch.Tensor]], gated: bool = True
) -> list[torch.Tensor]:
    """:func:`all_gather_param` of many: all gathers are started before the first is waited for. Collective.

    Args:
        infos_and_params: ``(info, param)`` with the global name as ``info.name``.

    Returns:
        The full tensors, in the same order.
    """
    pairs = [(info.name, param) for info, param in infos_and_params]
    started = [_start(name, param) for name, param in pairs]
    out = []
    for (name, param), (gathered, work) in zip(pairs, started, strict=True):
        if work is not None:
            work.wait()
        out.append(_arrange(name, param, gathered, gated))
    return out


def _group(name: str, param: torch.Tensor):
    """The group that the parameter is sharded over; None where every rank has all of it."""
    if name.endswith(("expert_bias", "qb_beta")) or getattr(param, "parallel_mode", None) == "duplicated":
        return None
    if name.endswith("core_attention.softmax_offset"):  # sharded by heads, which its attributes do not say
        return parallel_state.get_tensor_model_parallel_group()
    if not hasattr(param, "tensor_model_parallel"):
        raise ValueError(
            f"{name}: no tensor_model_parallel attribute, so its sharding is unknown; Megatron-Core's "
            "tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes marks whole tensors"
        )
    if not param.tensor_model_parallel:
        return None
    if ".experts." in name:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def _start(name: str, param: torch.Tensor):
    group = _group(name, param)
    if group is None or group.size() == 1:
        return None, None
    local = param.data.contiguous()
    gathered = torch.empty((group.size(), *local.shape), dtype=local.dtype, device=local.device)
    return gathered, dist.all_gather_into_tensor(gathered.flatten(0, 1), local, group=group, async_op=True)


def _arrange(name: str, param: torch.Tensor, gathered: torch.Tensor | None, gated: bool) -> torch.Tensor:
    """[ranks, *local] → the full tensor."""
    if gathered is None:
        return param.data
    if gated and re.search(r"linear_fc1\.(weight|bias)\d*$", name):
        # [ranks, 2, rows, …] → all gate rows, then all up rows
        return gathered.unflatten(1, (2, -1)).transpose(0, 1).flatten(0, 2).contiguous()
    # Upstream marked the second layer of grouped experts as sharded by rows until 0.16: it never was.
    second = re.search(r"linear_fc2\.weight\d*$", name) is not None
    dim = 1 if second else max(0, getattr(param, "partition_dim", 0))
    if dim == 0:
        return gathered.flatten(0, 1)
    return gathered.movedim(0, dim).flatten(dim, dim + 1).contiguous()


def named_params_and_buffers(
    args,
    model: torch.nn.Module | Sequence[torch.nn.Module],
    convert_to_global_name: bool = True,
    translate_gpu_to_cpu: bool = False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters, and the routers' expert biases, of the model chunks; the live objects.

    Args:
        args: unused: layer and expert numbers are read from the modules, not computed from arguments.
        model: the model chunks, wrapped or not; or the one that there is.
        convert_to_global_name: ``module.module.decoder.layers.N.…`` with N counted over the whole model,
            experts numbered over all ranks, and MTP layers as
            ``module.module.mtp.layers.N.transformer_layer.…``. False: ``vp_stages.I.…`` with the names of
            chunk I.
        translate_gpu_to_cpu: yield torch_memory_saver's host copy where the tensor's memory is released.

    Raises:
        RuntimeError: ``translate_gpu_to_cpu`` without torch_memory_saver.
    """
    del args
    backup = memory_saver_backups() if translate_gpu_to_cpu else lambda tensor: tensor
    for stage, chunk in enumerate([model] if is_one_chunk(model) else model):
        inner = unwrap(chunk)
        rename = _global_names(inner) if convert_to_global_name else None
        for name, tensor in _live(inner):
            yield (rename(name) if rename else f"vp_stages.{stage}.{name}"), backup(tensor)


def _live(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            yield name, buffer


def _global_names(model: torch.nn.Module):
    layers: dict[str, str] = {}
    experts: dict[str, list[int]] = {}
    for path, module in model.named_modules():
        head, _, last = path.rpartition(".")
        number = getattr(module, "layer_number", None)
        if last.isdigit() and head.endswith("layers") and isinstance(number, int):
            layers[path] = f"{head}.{number - 1}"
        if hasattr(module, "local_expert_indices") and hasattr(module, "experts"):
            experts[f"{path}.experts"] = module.local_expert_indices

    def rename(name: str) -> str:
        for path, indices in experts.items():
            if name.startswith(path + "."):
                name = path + _global_experts(name[len(path) :], indices)
                break
        for path, path_everywhere in layers.items():
            if name.startswith(path + "."):
                name = path_everywhere + name[len(path) :]
                break
        return _PREFIX + name.replace(".mtp_model_layer.", ".transformer_layer.")

    return rename


def _global_experts(rest: str, indices: list[int]) -> str:
    rest = re.sub(r"^\.local_experts\.(\d+)\.", lambda m: f".local_experts.{indices[int(m[1])]}.", rest)
    return re.sub(r"\.(weight|bias)(\d+)$", lambda m: f".{m[1]}{indices[int(m[2])]}", rest)


def memory_saver_backups() -> Callable[[torch.Tensor], torch.Tensor]:
    """Reads a tensor from torch_memory_saver's host copy if its device memory is released, else the tensor
    itself: the ``read`` of :func:`~megatron.core.param_export.export`.

    Raises:
        RuntimeError: torch_memory_saver is not installed.
    """
    try:
        from torch_memory_saver import torch_memory_saver
    except ImportError as error:
        raise RuntimeError(
            "translate_gpu_to_cpu and memory_saver_backups need the torch_memory_saver package"
        ) from error

    def backup(tensor):
        copy = torch_memory_saver.get_cpu_backup(tensor)
        return tensor if copy is None else copy

    return backup
