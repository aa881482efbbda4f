"""Which path writes each parameter and persistent buffer, and hence how its changes are known.

`audit` gives every tensor of the model one route: `hooked` (the copy itself records the change), `shadow`
(compared at sync), `digest` (frozen: a digest is compared at sync, and a change sends it whole), `dense`
(sent whole), or refuses with the name of the path. A path that is not known is refused: no path may yield an
empty delta unseen.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .shards import DenseShard, DigestShard, HookedShard, ShadowShard, Shard, ValidatedShard

__all__ = ["Domain", "Entry", "audit", "leaves"]


@dataclass
class Entry:
    """One tensor of the model on this rank."""

    name: str
    tensor: torch.Tensor
    shard: Shard
    path: str
    """What writes the tensor, in words."""
    leads: tuple[torch.Tensor, ...] = ()
    """Shards by which `sparse_diff_context` finds the parameter; only where hooked."""
    home: tuple[torch.nn.Module, str] | None = None
    """The module and attribute that hold the tensor."""
    layer: int | None = None
    """The decoder layer, counted over all pipeline stages; None outside of them."""

    def check(self) -> None:
        """Raise RuntimeError where the tensor cannot be read, or is not the model's any more."""
        if self.shard.numel and not self.tensor.untyped_storage().size():
            raise RuntimeError(f"sparse diff: {self.name} is offloaded; reload the weights first")
        if self.home is not None:
            module, attribute = self.home
            held = module._parameters if attribute in module._parameters else module._buffers
            if held.get(attribute) is not self.tensor:
                raise RuntimeError(
                    f"sparse diff: {self.name} was replaced by another tensor after attach; detach, and "
                    "attach again when the model is complete"
                )


@dataclass
class Domain:
    """Tensors of which each rank of `group` owns a part; the same tensors in the same order on all its ranks.
    `group` is None where every rank owns them whole."""

    group: Any | None
    entries: list[Entry] = field(default_factory=list)
    complete: Callable[[], None] | None = None
    """Fetch what other ranks own into the local tensors, where the optimizer leaves that to the next forward;
    collective over `group`."""


def leaves(optimizer: Any) -> list[Any]:
    """The optimizers that own parameters, through any depth of chaining."""
    if hasattr(optimizer, "chained_optimizers"):
        return [leaf for inner in optimizer.chained_optimizers for leaf in leaves(inner)]
    return [optimizer]


def _refuse(path: str, why: str, way_out: str) -> None:
    raise NotImplementedError(f"sparse diff: {path} is not supported: {why}. {way_out}")


def _refuse_config(leaf: Any) -> None:
    config = getattr(leaf, "config", None)  # an optimizer of torch has none, and is refused after this
    dense = "Send whole weights instead, or switch it off"
    if getattr(config, "optimizer_cuda_graph", False):
        _refuse(
            "optimizer_cuda_graph",
            "the copy's hook runs while the graph is captured and not when it is replayed",
            dense,
        )
    if getattr(getattr(leaf, "ddp_config", None), "use_megatron_fsdp", False):
        _refuse(
            "Megatron-FSDP",
            "it writes its own weight buffers, which the model's parameters do not alias",
            dense,
        )
    if getattr(config, "reuse_grad_buf_for_mxfp8_param_ag", False):
        _refuse(
            "reuse_grad_buf_for_mxfp8_param_ag",
            "weights reach the model through a buffer that is shared with the gradients",
            dense,
        )


def _refuse_tensor(name: str, tensor: torch.Tensor) -> None:
    kind = type(tensor).__name__
    if kind not in ("Parameter", "Tensor", "Buffer"):
        _refuse(
            f"{name} ({kind})",
            "its values are quantised, and a change of a scale changes elements whose bits stay",
            "Keep this parameter in bf16, or send whole weights",
        )
    if not tensor.is_contiguous():
        _refuse(f"{name} (not contiguous)", "its elements have no flat order", "Make it contiguous")
    as_integers = tensor.dtype.itemsize in (1, 2, 4, 8) and not tensor.is_complex()
    if not as_integers:
        _refuse(f"{name} ({tensor.dtype})", "it has no integers of its size to compare", "Cast it")


def _clipped_after_the_step(model_chunks: Sequence[torch.nn.Module]) -> set[torch.Tensor]:
    """Weights that qk_clip scales after the optimizer step, past the hook."""
    clipped = set()
    for chunk in model_chunks:
        for module in chunk.modules():
            if hasattr(module, "clip_qk") and getattr(getattr(module, "config", None), "qk_clip", False):
                for name, parameter in module.named_parameters():
                    if name.startswith(("linear_q", "linear_kv")):
                        clipped.add(parameter)
    return clipped


@dataclass(frozen=True)
class _Place:
    """Where the model holds a tensor."""

    name: str
    home: tuple[torch.nn.Module, str]
    layer: int | None


_LAYER = re.compile(r"(?:(?P<above>.*)\.)?layers\.(?P<index>\d+)")


def _layers(chunk: torch.nn.Module) -> dict[str, int]:
    """The layer of each module inside one; those of multi-token prediction count apart, and are left out."""
    layers: dict[str, int] = {}
    for name, module in chunk.named_modules():  # outer ones first
        found = _LAYER.fullmatch(name)
        if found and (found["above"] or "").rpartition(".")[2] != "mtp":
            number = getattr(module, "layer_number", None)  # from 1, over all stages; the name counts locally
            layers[name] = number - 1 if isinstance(number, int) else int(found["index"])
        elif (above := name.rpartition(".")[0]) in layers:
            layers[name] = layers[above]
    return layers


def _places(model_chunks: Sequence[torch.nn.Module]) -> dict[torch.Tensor, _Place]:
    """Parameters and persistent buffers by tensor; with several chunks, names carry `vp_stages.N.`."""
    places: dict[torch.Tensor, _Place] = {}
    for index, chunk in enumerate(model_chunks):
        prefix = f"vp_stages.{index}." if len(model_chunks) > 1 else ""
        layers = _layers(chunk)
        for module_name, module in chunk.named_modules():
            tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            for attribute, tensor in tensors:
                if attribute not in module._non_persistent_buffers_set:
                    name = prefix + ".".join(filter(None, (module_name, attribute)))
                    places.setdefault(tensor, _Place(name, (module, attribute), layers.get(module_name)))
    return places


def _complete(model_chunks: Sequence[torch.nn.Module], domain: Domain) -> Callable[[], None] | None:
    """The parameter gather of the bucket groups that hold `domain`, where it is left to the forward pass."""
    owned = {entry.tensor for entry in domain.entries}
    deferred = []
    for chunk in model_chunks:
        if getattr(getattr(chunk, "ddp_config", None), "overlap_param_gather", False):
            for bucket_group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                if any(param in owned for bucket in bucket_group.buckets for param in bucket.params_list):
                    deferred.append((chunk, bucket_group))
    if not deferred:
        return None

    def complete() -> None:
        for chunk, bucket_group in deferred:
            if bucket_group.param_gather_handle is not None:
                # To force one under way only waits; the layer-wise form has still to copy to the model.
                bucket_group.finish_param_sync(skip_next_bucket_dispatch=True)
            else:
                chunk._start_bucket_group_param_sync(bucket_group, force_sync=True)

    return complete


class _Auditor:
    def __init__(
        self, model_chunks: Sequence[torch.nn.Module], hooked: type[Shard], unhooked: type[Shard]
    ) -> None:
        self.model_chunks, self.hooked, self.unhooked = model_chunks, hooked, unhooked
        self.places = _places(model_chunks)
        self.clipped = _clipped_after_the_step(model_chunks)
        self.seen: set[torch.Tensor] = set()

    def entry(
        self,
        tensor: torch.Tensor,
        start: int,
        end: int,
        path: str,
        hooked: bool = False,
        leads: Iterable[torch.Tensor | None] = (),
    ) -> Entry:
        place = self.places.get(tensor)
        if place is None:
            raise ValueError(
                f"sparse diff: the optimizer owns a parameter of shape {tuple(tensor.shape)} that is not in "
                "model_chunks; expected the chunks that the optimizer was made for, all of them"
            )
        name, of = place.name, {"home": place.home, "layer": place.layer}
        _refuse_tensor(name, tensor)
        if tensor in self.seen:
            _refuse(name, "two optimizers own it", "Give each parameter to one optimizer")
        self.seen.add(tensor)
        if tensor in self.clipped:
            path, hooked = f"{path}, then qk_clip", False
        if not hooked:
            return Entry(name, tensor, self.unhooked(tensor, start, end), path, **of)
        leads = tuple(lead for lead in leads if lead is not None)
        return Entry(name, tensor, self.hooked(tensor, start, end), path, leads, **of)

    def distributed(self, leaf: Any) -> Domain:
        """DistributedOptimizer: each rank owns a range of each bucket, which may begin and end mid-tensor."""
        from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

        hybrid = isinstance(leaf.optimizer, HybridDeviceOptimizer)
        aware = leaf.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
        main_of: dict[torch.Tensor, tuple[torch.Tensor | None, torch.Tensor | None]] = {}
        for models, shards, mains in zip(
            leaf.model_float16_groups,
            leaf.shard_float16_groups,
            leaf.shard_fp32_from_float16_groups,
            strict=True,
        ):
            main_of.update(zip(models, zip(shards, mains, strict=True), strict=True))
        owned = self._owned_parameters(leaf)
        domain = Domain(leaf.data_parallel_group)
        for tensor in owned:
            if tensor not in leaf.model_param_gbuf_map:
                start = end = 0
            else:
                found = leaf._get_model_param_range_map(tensor)["param"]
                start, end = found.start, found.end
            shard_model, shard_main = main_of.get(tensor, (None, None))
            if tensor.dtype == torch.float32:
                route = "in place by the inner optimizer (DistributedOptimizer, fp32)", False
            elif not aware:
                route = "copy of main weights (DistributedOptimizer)", True, (shard_main,)
            elif hybrid and leaf.optimizer.param_update_in_fp32:
                route = "copy from the host or from fp32 (HybridDeviceOptimizer)", True, (shard_model,)
            else:
                route = "in place by a precision-aware inner optimizer", False
            domain.entries.append(self.entry(tensor, start, end, *route))
        domain.complete = _complete(self.model_chunks, domain)
        return domain

    def _owned_parameters(self, leaf: Any) -> list[torch.Tensor]:
        """The parameters of the leaf's buffers: the same list on every rank of its data-parallel group."""
        parameters = []
        for buffer in leaf.buffers:
            for bucket in buffer.buckets:
                parameters += [p for p in bucket.params_list if p.requires_grad]
        return parameters

    def float16(self, leaf: Any) -> list[Entry]:
        entries = []
        for models, mains in zip(leaf.float16_groups, leaf.fp32_from_float16_groups, strict=True):
            for tensor, main in zip(models, mains, strict=True):
                path = "copy of main weights (Float16Optimizer)"
                entries.append(self.entry(tensor, 0, tensor.numel(), path, True, (main,)))
        for group in leaf.fp32_from_fp32_groups:
            for tensor in group:
                path = "in place by the inner optimizer (Float16Optimizer, fp32)"
                entries.append(self.entry(tensor, 0, tensor.numel(), path))
        return entries

    def fp32(self, leaf: Any) -> list[Entry]:
        path = f"in place by the inner optimizer ({type(leaf).__name__})"
        return [
            self.entry(tensor, 0, tensor.numel(), path)
            for group in getattr(leaf, "optimizer", leaf).param_groups
            for tensor in group["params"]
        ]

    def layer_wise(self, optimizer: Any) -> list[Domain]:
        """LayerWiseDistributedOptimizer: each parameter whole on one rank, which the others copy from."""
        mine: dict[torch.Tensor, Entry] = {}
        for leaf in optimizer.chained_optimizers:
            _refuse_config(leaf if hasattr(leaf, "config") else optimizer)
            if not getattr(leaf, "is_stub_optimizer", False):
                rows = self.float16(leaf) if hasattr(leaf, "float16_groups") else self.fp32(leaf)
                mine.update((entry.tensor, entry) for entry in rows)
        domains = []
        for lists, group in (
            (optimizer.dp_cp_params_list, getattr(optimizer, "dp_cp", None)),
            (optimizer.expt_dp_params_list, getattr(optimizer, "expt_dp", None)),
        ):
            if lists:
                entries = [
                    mine.pop(tensor, None) or self.entry(tensor, 0, 0, "copied from its owner (LayerWise)")
                    for tensors in lists
                    for tensor in tensors
                ]
                domain = Domain(group, entries)
                domain.complete = _complete(self.model_chunks, domain)
                domains.append(domain)
        return [*domains, Domain(None, list(mine.values()))]

    def rest(self) -> Domain:
        """Tensors of the model that no optimizer owns."""
        domain = Domain(None)
        for tensor, place in self.places.items():
            if tensor in self.seen:
                continue
            _refuse_tensor(place.name, tensor)
            if isinstance(tensor, torch.nn.Parameter):
                shard: Shard = DigestShard(tensor, 0, tensor.numel())
                path = "nothing: frozen, checked by a digest"
            else:
                shard, path = ShadowShard(tensor, 0, tensor.numel()), "a persistent buffer of the module"
            entry = Entry(place.name, tensor, shard, path, home=place.home, layer=place.layer)
            domain.entries.append(entry)
        return domain


def audit(
    optimizer: Any,
    model_chunks: Sequence[torch.nn.Module] | None = None,
    validate: bool = False,
    unhooked: str = "shadow",
) -> tuple[list[Domain], list[torch.nn.Module]]:
    """A route for every tensor that `optimizer` or its model holds on this rank; and the model's chunks.

    `validate` has hooked shards keep the acknowledged values too; `unhooked` is as in `attach`.

    Raises:
        NotImplementedError: for a path that would not be seen exactly; names the path and a way out.
        ValueError: where the model cannot be found from the optimizer and `model_chunks` is not given, or is
            another model.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer

    tops = [optimizer]
    if type(optimizer).__name__ == "ChainedOptimizer":
        tops = list(optimizer.chained_optimizers)
    if model_chunks is None:
        model_chunks = getattr(optimizer, "model_chunks", None) or [
            chunk for top in tops for chunk in getattr(top, "model_chunks", ())
        ]
    if not model_chunks and any(not getattr(leaf, "is_stub_optimizer", False) for leaf in leaves(optimizer)):
        raise ValueError(
            f"sparse diff: {type(optimizer).__name__} does not know its model, whose buffers and frozen "
            "parameters would go unseen; expected attach(optimizer, model_chunks=[...])"
        )
    kinds = {"shadow": ShadowShard, "dense": DenseShard}
    if unhooked not in kinds:
        raise ValueError(f"unhooked={unhooked!r}: expected one of {', '.join(kinds)}")
    auditor = _Auditor(model_chunks, ValidatedShard if validate else HookedShard, kinds[unhooked])
    domains: list[Domain] = []
    for top in tops:
        if isinstance(top, LayerWiseDistributedOptimizer):
            domains += auditor.layer_wise(top)
            continue
        for leaf in leaves(top):
            if getattr(leaf, "is_stub_optimizer", False):
                continue
            _refuse_config(leaf)
            if isinstance(leaf, DistributedOptimizer):
                domains.append(auditor.distributed(leaf))
            elif isinstance(leaf, Float16OptimizerWithFloat16Params):
                domains.append(Domain(None, auditor.float16(leaf)))
            elif isinstance(leaf, FP32Optimizer):
                domains.append(Domain(None, auditor.fp32(leaf)))
            else:
                _refuse(type(leaf).__name__, "how it writes the model is not known", "Send whole weights")
    domains.append(auditor.rest())
    return [domain for domain in domains if domain.entries], list(model_chunks)
