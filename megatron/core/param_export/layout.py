"""Reads a Megatron model chunk: every parameter and persistent buffer, what it means and how it is sharded.

Sharding comes from the modules (their class, process group and sizes) and not from attributes on the
parameters, which at TP 1, for grouped experts and for duplicated layers do not say how a tensor lies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import attrgetter, is_

import torch

from megatron.core.param_export.pieces import Piece, Place, Span, dense, glu, grouped_query, row_runs

_COLUMN = {"ColumnParallelLinear", "TEColumnParallelLinear", "TELayerNormColumnParallelLinear"}
_COLUMN |= {"TEColumnParallelGroupedLinear", "VocabParallelEmbedding"}
_ROW = {"RowParallelLinear", "TERowParallelLinear", "TERowParallelGroupedLinear"}
_WHOLE = {"TELinear", "Linear"}
# wrapper → its attribute that is the model inside
_WRAPPERS = {"DistributedDataParallel": "module", "Float16Module": "module", "OptimizedModule": "_orig_mod"}
_FULLY_SHARDED = ("FullyShardedDataParallel", "TorchFullyShardedDataParallel")
COUNTED = {
    "heads": "attention heads",
    "groups": "key-value heads",
    "head": "elements of a head",
}
"""Sizes of grouped-query attention, which shapes show only as products: the model's and the Hugging Face
configuration must have them alike. Those of latent attention and experts all follow from shapes."""
# Their kernels take gate and up rows in blocks, but whether the parameters are stored so depends on the
# kernel.
_INTERLEAVED = {"FusedSharedExpertMLP", "TEFusedMLPWithGroupedLinear"}


@dataclass(frozen=True)
class LocalTensor:
    """A parameter or persistent buffer of this rank.

    Args:
        name: as in ``chunk.named_parameters()`` of the unwrapped chunk.
        global_name: the same with global layer and expert numbers.
        replicated: every rank of its tensor-parallel group holds the same values.
        expert: a routed expert's parameter, sharded and replicated over the expert groups.
        duplicate: a second copy of a tensor that another module owns (tied or MTP embedding).
        uniform: every rank that holds part of this tensor cuts it alike; not so where ranks' rows end inside
            a group.
    """

    name: str
    global_name: str
    tensor: torch.Tensor
    pieces: tuple[Piece, ...]
    replicated: bool
    expert: bool
    duplicate: bool = False
    uniform: bool = True


@dataclass
class Chunk:
    """One model chunk, read."""

    model: torch.nn.Module
    tensors: list[LocalTensor] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    counts: dict[tuple[str, int], str] = field(default_factory=dict)
    """``(name of a size, value)`` → the first module with it; names are those of ``COUNTED``."""


def model_chunks(model) -> list[torch.nn.Module]:
    """The model's chunks as a list.

    Raises:
        TypeError: something else than GPTModels, in the wrappers that :func:`unwrap` knows.
        ValueError: a model without process groups.
    """
    wrappers = ", ".join(_WRAPPERS)
    expected = f"model: expected a GPTModel or its chunks, which may be in {wrappers}"
    if is_one_chunk(model):
        chunks = [model]
    elif isinstance(model, Iterable):
        chunks = list(model)
    else:
        raise TypeError(f"{expected}; got {type(model).__name__}")
    if not chunks:
        raise TypeError(f"{expected}; got an empty {type(model).__name__}")
    for chunk in chunks:
        inner = unwrap(chunk)
        kind = type(inner).__name__
        if kind in _FULLY_SHARDED:
            continue
        is_model = isinstance(inner, torch.nn.Module) and "decoder" in inner._modules
        if not (is_model and hasattr(inner, "config")):
            got = kind if chunk is model else f"{type(model).__name__} of {kind}"
            hint = ": if it is a wrapper, pass the model inside" if isinstance(inner, torch.nn.Module) else ""
            raise TypeError(f"{expected}; got {got}{hint}")
        if getattr(inner, "pg_collection", None) is None:
            raise ValueError(f"model: {kind} has no pg_collection, the process groups that it was built with")
    return chunks


def is_one_chunk(model) -> bool:
    """Whether it is a model, and not a sequence of chunks."""
    return isinstance(model, torch.nn.Module) and not isinstance(model, torch.nn.ModuleList)


def unwrap(chunk: torch.nn.Module) -> torch.nn.Module:
    """The model inside DistributedDataParallel, Float16Module and what ``torch.compile`` returns."""
    while type(chunk).__name__ in _WRAPPERS:
        chunk = getattr(chunk, _WRAPPERS[type(chunk).__name__])
    return chunk


def read_chunk(chunk: torch.nn.Module) -> Chunk:
    """Read one chunk of a GPTModel. What has no rule is listed in ``problems``, by name."""
    model = unwrap(chunk)
    out = Chunk(model)
    if type(model).__name__ in _FULLY_SHARDED:
        out.problems.append(
            f"{type(model).__name__} is not supported: its parameters are sharded by rows of a flat buffer"
        )
        return out
    config = model.config
    if getattr(config, "layernorm_zero_centered_gamma", False):
        out.problems.append(
            "layernorm_zero_centered_gamma is not supported: norm weights are stored minus one"
        )
    for axis in ("gtp_remat", "expt_gtp_remat"):
        group = getattr(model.pg_collection, axis, None)
        if group is not None and group.size() > 1:
            out.problems.append(f"{axis} groups are not supported: weights are sharded a second time")
    reader = _Reader(model)
    try:
        reader.gpt()
    except (ValueError, AttributeError) as error:
        out.problems.append(f"{type(model).__name__}: {error}")
    known = {t.name for t in reader.found}
    for name, tensor in named_tensors(model):
        if name not in known:
            out.problems.append(f"{name}: no rule for this tensor ({type(_owner(model, name)).__name__})")
        elif not _is_plain(tensor.data):
            out.problems.append(f"{name}: storage of type {type(tensor.data).__name__} is not supported")
    out.tensors, out.counts = reader.found, reader.counts
    return out


def _is_plain(data: torch.Tensor) -> bool:
    """Whether ``view(-1)`` gives the elements. Transformer Engine's grouped parameter does, unquantised."""
    grouped = type(data).__name__ == "GroupedTensor" and data.quantizer is None
    return grouped or is_ordinary(data)


def is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether operations take it as it is: no subclass, as Transformer Engine's grouped parameter is."""
    return type(tensor) in (torch.nn.Parameter, torch.Tensor)


def named_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter and persistent buffer, by name."""
    yield from model.named_parameters()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield (f"{prefix}.{name}" if prefix else name), buffer


class Snapshot:
    """What the modules of some models hold, to see in a moment whether they still do: every export asks. It
    keeps all of it alive."""

    _REGISTRIES = attrgetter("_parameters", "_buffers", "_modules")

    def __init__(self, models: Iterable[torch.nn.Module]):
        self.modules = [module for model in models for module in model.modules()]
        self.held = self._look()

    def _look(self) -> list:
        registries = chain.from_iterable(map(self._REGISTRIES, self.modules))
        return list(chain.from_iterable(registry.values() for registry in registries))

    def holds(self) -> bool:
        now = self._look()
        return len(now) == len(self.held) and all(map(is_, now, self.held))


def _owner(model, name):
    return model.get_submodule(name.rpartition(".")[0])


def _sharding(module) -> str:
    for cls in type(module).__mro__:
        if cls.__name__ in _COLUMN:
            return "column"
        if cls.__name__ in _ROW:
            return "row"
        if cls.__name__ in _WHOLE:
            return "whole"
    raise ValueError(f"no sharding rule for a linear layer of class {type(module).__name__}")


def _group(module):
    """Rank and size of the tensor-parallel group that a linear layer was built with."""
    group = getattr(module, "tp_group", None)
    if group is None:
        group = getattr(module, "_tp_group", None)
    return (group.rank(), group.size()) if group is not None else (0, 1)


class _Reader:
    def __init__(self, model):
        self.model = model
        self.config = model.config
        self.found: list[LocalTensor] = []
        self.counts: dict[tuple[str, int], str] = {}

    def add(
        self,
        path,
        tensor,
        pieces,
        *,
        replicated,
        expert=False,
        duplicate=False,
        uniform=True,
        global_path=None,
    ):
        path_everywhere = global_path or path
        pieces = tuple(pieces)
        self.found.append(
            LocalTensor(path, path_everywhere, tensor, pieces, replicated, expert, duplicate, uniform)
        )

    def count(self, path: str, **sizes: int) -> None:
        for size in sizes.items():
            self.counts.setdefault(size, path)

    def vector(self, path, global_path, module, role, place, replicated=True, kinds=("weight", "bias")):
        """Replicated vectors of a norm layer."""
        for kind in kinds:
            tensor = getattr(module, kind, None)
            if tensor is not None:
                piece = dense(place, f"{role}.{kind}", Span.even(tensor.numel()))
                self.add(
                    f"{path}.{kind}",
                    tensor,
                    [piece],
                    replicated=replicated,
                    global_path=f"{global_path}.{kind}",
                )

    def linear(
        self,
        path,
        global_path,
        module,
        split,
        *,
        expert=False,
        duplicate=False,
        uniform=True,
        fused_norm=None,
    ):
        """A linear layer. ``split(kind, rows, cols, rank, ranks)`` gives the pieces of weight or bias.

        ``rows`` and ``cols`` are this rank's spans of the full matrix; ``cols`` is None for a bias.
        """
        sharding = _sharding(module)
        rank, ranks = (0, 1) if sharding == "whole" else _group(module)
        row = (rank, ranks) if sharding == "column" else (0, 1)
        col = (rank, ranks) if sharding == "row" else (0, 1)
        for kind in ("weight", "bias"):
            tensor = getattr(module, kind, None)
            if tensor is None or tensor.numel() == 0:
                continue
            rows = Span.even(tensor.shape[0], *row)
            cols = Span.even(tensor.shape[1], *col) if tensor.dim() == 2 else None
            replicated = sharding == "whole" or (sharding == "row" and cols is None)
            self.add(
                f"{path}.{kind}",
                tensor,
                split(kind, rows, cols, *row),
                replicated=replicated,
                expert=expert,
                duplicate=duplicate,
                uniform=uniform,
                global_path=f"{global_path}.{kind}",
            )
        if fused_norm:
            for kind in ("weight", "bias"):
                tensor = getattr(module, f"layer_norm_{kind}", None)
                if tensor is not None:
                    role, place = fused_norm
                    self.add(
                        f"{path}.layer_norm_{kind}",
                        tensor,
                        [dense(place, f"{role}.{kind}", Span.even(tensor.numel()))],
                        replicated=True,
                        global_path=f"{global_path}.layer_norm_{kind}",
                    )

    def plain(self, path, global_path, module, role, place, **kwargs):
        def split(kind, rows, cols, rank, ranks):
            return [dense(place, f"{role}.{kind}", rows, cols)]

        self.linear(path, global_path, module, split, **kwargs)

    # The model, from the top.

    def gpt(self):
        model = self.model
        top = Place()
        embedding = getattr(model, "embedding", None)
        if embedding is not None:
            self.plain(
                "embedding.word_embeddings",
                "embedding.word_embeddings",
                embedding.word_embeddings,
                "embed",
                top,
                duplicate=not model.pre_process,
            )
            if getattr(embedding, "position_embeddings", None) is not None:
                self.vector(
                    "embedding.position_embeddings",
                    "embedding.position_embeddings",
                    embedding.position_embeddings,
                    "position",
                    top,
                )
        for i, layer in enumerate(model.decoder.layers):
            number = layer.layer_number - 1
            place = Place("layer", number)
            self.layer(f"decoder.layers.{i}", f"decoder.layers.{number}", layer, place)
        norm = getattr(model.decoder, "final_layernorm", None)
        if norm is not None:
            self.vector("decoder.final_layernorm", "decoder.final_layernorm", norm, "final_norm", top)
        mtp = getattr(model, "mtp", None)
        for i, layer in enumerate(mtp.layers if mtp is not None else ()):
            self.mtp(f"mtp.layers.{i}", layer)
        output = getattr(model, "output_layer", None)
        if output is not None and output.weight is not None:
            tied = model.share_embeddings_and_output_weights
            role = "embed" if tied else "lm_head"
            self.plain("output_layer", "output_layer", output, role, top, duplicate=tied)

    def mtp(self, path, layer):
        depth = layer.layer_number - 1
        place = Place("mtp", depth)
        full = f"mtp.layers.{depth}"
        for norm in ("enorm", "hnorm", "final_layernorm"):
            role = "mtp.final_norm" if norm == "final_layernorm" else f"mtp.{norm}"
            self.vector(f"{path}.{norm}", f"{full}.{norm}", getattr(layer, norm), role, place)
        self.plain(f"{path}.eh_proj", f"{full}.eh_proj", layer.eh_proj, "mtp.eh_proj", place)
        inner = layer.mtp_model_layer
        if hasattr(inner, "self_attention"):
            self.layer(f"{path}.mtp_model_layer", f"{full}.mtp_model_layer", inner, place)

    def layer(self, path, full, layer, place):
        for norm, role in (("input_layernorm", "attn_norm"), ("pre_mlp_layernorm", "mlp_norm")):
            module = getattr(layer, norm, None)
            if module is not None:
                self.vector(f"{path}.{norm}", f"{full}.{norm}", module, role, place)
        attention = getattr(layer, "self_attention", None)
        if hasattr(attention, "linear_qkv"):
            self.attention(f"{path}.self_attention", f"{full}.self_attention", attention, place)
        elif hasattr(attention, "linear_kv_up_proj"):
            self.latent_attention(f"{path}.self_attention", f"{full}.self_attention", attention, place)
        mlp = getattr(layer, "mlp", None)
        if hasattr(mlp, "router"):
            self.moe(f"{path}.mlp", f"{full}.mlp", mlp, place)
        elif hasattr(mlp, "linear_fc1"):
            self.mlp(f"{path}.mlp", f"{full}.mlp", mlp, place, "mlp", fused_norm=("mlp_norm", place))

    def attention(self, path, full, module, place):
        config = module.config
        heads, groups = config.num_attention_heads, config.num_query_groups
        self.count(full, heads=heads, groups=groups, head=config.kv_channels)

        def split(kind, rows, cols, rank, ranks):
            gated = bool(getattr(config, "attention_output_gate", False))
            pieces = list(
                grouped_query(place, kind, heads, groups, config.kv_channels, cols, rank, ranks, gated)
            )
            expected = (heads * (1 + gated) + 2 * groups) * config.kv_channels
            if rows.full != expected:
                raise ValueError(f"{full}.linear_qkv: {rows.full} rows, expected {expected}")
            return pieces

        self.linear(
            f"{path}.linear_qkv",
            f"{full}.linear_qkv",
            module.linear_qkv,
            split,
            uniform=groups % _group(module.linear_qkv)[1] == 0,
            fused_norm=("attn_norm", place),
        )
        self.plain(f"{path}.linear_proj", f"{full}.linear_proj", module.linear_proj, "attn.o", place)
        for part in ("q", "k"):
            norm = getattr(module, f"{part}_layernorm", None)
            if norm is not None:
                role = f"attn.{part}_norm"
                self.vector(f"{path}.{part}_layernorm", f"{full}.{part}_layernorm", norm, role, place)
        sinks = getattr(module.core_attention, "softmax_offset", None)
        if isinstance(sinks, torch.nn.Parameter):
            rows = Span.even(sinks.numel(), module.pg_collection.tp.rank(), module.pg_collection.tp.size())
            self.add(
                f"{path}.core_attention.softmax_offset",
                sinks,
                [dense(place, "attn.sinks", rows)],
                replicated=False,
                global_path=f"{full}.core_attention.softmax_offset",
            )

    def latent_attention(self, path, full, module, place):
        config = module.config
        rope = config.qk_pos_emb_head_dim
        plain = (
            ("linear_q_proj", "attn.q", None),
            ("linear_q_down_proj", "attn.q_down", ("attn_norm", place)),
            ("linear_q_up_proj", "attn.q_up", ("attn.q_down_norm", place)),
            ("linear_kv_down_proj", "attn.kv_down", ("attn_norm", place)),
            ("linear_kv_up_proj", "attn.kv_up", ("attn.kv_down_norm", place)),
            ("linear_proj", "attn.o", None),
        )
        for name, role, norm in plain:
            linear = getattr(module, name, None)
            if linear is not None:
                self.plain(f"{path}.{name}", f"{full}.{name}", linear, role, place, fused_norm=norm)

        def split(kind, rows, cols, rank, ranks):
            at = 0
            for role, size in (
                ("attn.q_down", config.q_lora_rank),
                ("attn.kv_down", config.kv_lora_rank + rope),
            ):
                low, high = max(at, rows.start), min(at + size, rows.start + rows.size)
                if low < high:
                    run = (1, high - low, low - rows.start, 0, low - at)
                    yield from row_runs(place, f"{role}.{kind}", size, cols, [run])
                at += size

        fused = getattr(module, "linear_qkv_down_proj", None)
        if fused is not None:
            name = "linear_qkv_down_proj"
            norm = ("attn_norm", place)
            self.linear(f"{path}.{name}", f"{full}.{name}", fused, split, uniform=False, fused_norm=norm)
        for norm, role in (("q_layernorm", "attn.q_down_norm"), ("kv_layernorm", "attn.kv_down_norm")):
            module_norm = getattr(module, norm, None)
            if module_norm is not None:
                self.vector(f"{path}.{norm}", f"{full}.{norm}", module_norm, role, place)

    def mlp(self, path, full, module, place, prefix, expert=False, fused_norm=None):
        interleaved = _INTERLEAVED.intersection(cls.__name__ for cls in type(module).__mro__)
        if interleaved:
            raise ValueError(
                f"{full}: {interleaved.pop()} is not supported: it may store gate and up interleaved"
            )
        glu_split = self._fc1(prefix, place, module.config.gated_linear_unit)
        self.linear(
            f"{path}.linear_fc1",
            f"{full}.linear_fc1",
            module.linear_fc1,
            glu_split,
            expert=expert,
            fused_norm=fused_norm,
        )
        fc2 = module.linear_fc2
        self.plain(f"{path}.linear_fc2", f"{full}.linear_fc2", fc2, f"{prefix}.down", place, expert=expert)

    @staticmethod
    def _fc1(prefix, place, gated, interleave=None):
        def split(kind, rows, cols, rank, ranks):
            if not gated:
                return [dense(place, f"{prefix}.up.{kind}", rows, cols)]
            half = Span.even(rows.size // 2, rank, ranks)
            return glu(place, (f"{prefix}.gate.{kind}", f"{prefix}.up.{kind}"), half, cols, interleave)

        return split

    def moe(self, path, full, module, place):
        router = module.router
        for name, role in (
            ("weight", "moe.router.weight"),
            ("bias", "moe.router.bias"),
            ("expert_bias", "moe.expert_bias"),
            ("qb_beta", "moe.qb_beta"),
        ):
            tensor = getattr(router, name, None)
            if tensor is None:
                continue
            rows = Span.even(tensor.shape[0])
            cols = Span.even(tensor.shape[1]) if tensor.dim() == 2 else None
            self.add(
                f"{path}.router.{name}",
                tensor,
                [dense(place, role, rows, cols)],
                replicated=True,
                global_path=f"{full}.router.{name}",
            )
        shared = getattr(module, "shared_experts", None)
        if shared is not None:
            self.mlp(f"{path}.shared_experts", f"{full}.shared_experts", shared, place, "moe.shared")
            if shared.gate_weight is not None:
                cols = Span.even(shared.gate_weight.shape[1])
                self.add(
                    f"{path}.shared_experts.gate_weight",
                    shared.gate_weight,
                    [dense(place, "moe.shared.router.weight", Span.even(1), cols)],
                    replicated=True,
                    global_path=f"{full}.shared_experts.gate_weight",
                )
        experts = module.experts
        where = [Place(place.scope, place.layer, index) for index in module.local_expert_indices]
        if hasattr(experts, "local_experts"):
            for i, (expert, at) in enumerate(zip(experts.local_experts, where, strict=True)):
                name, full_name = (
                    f"{p}.experts.local_experts.{k}" for p, k in ((path, i), (full, at.expert))
                )
                self.mlp(name, full_name, expert, at, "moe.experts", expert=True)
        elif hasattr(experts, "linear_fc1"):
            self.grouped(f"{path}.experts", f"{full}.experts", experts, where)

    def grouped(self, path, full, experts, where):
        config = experts.config
        interleave = config.moe_mlp_glu_interleave_size if config.gated_linear_unit else None
        for name, module in (("linear_fc1", experts.linear_fc1), ("linear_fc2", experts.linear_fc2)):
            sharding = _sharding(module)
            rank, ranks = _group(module)
            row = (rank, ranks) if sharding == "column" else (0, 1)
            col = (rank, ranks) if sharding == "row" else (0, 1)

            def pieces(kind, shape, place, name=name, row=row, col=col):
                rows = Span.even(shape[0], *row)
                cols = Span.even(shape[1], *col) if len(shape) == 2 else None
                if name == "linear_fc2":
                    return [dense(place, f"moe.experts.down.{kind}", rows, cols)]
                split = self._fc1("moe.experts", place, config.gated_linear_unit, interleave)
                return list(split(kind, rows, cols, *row))

            for kind in ("weight", "bias"):
                replicated = sharding == "row" and kind == "bias"
                single = getattr(module, kind, None)
                if single is not None and single.dim() == (3 if kind == "weight" else 2):
                    numel = single.numel() // len(where)
                    parts = [
                        replace(p, local_offset=p.local_offset + i * numel)
                        for i, at in enumerate(where)
                        for p in pieces(kind, single.shape[1:], at)
                    ]
                    self.add(
                        f"{path}.{name}.{kind}",
                        single,
                        parts,
                        replicated=replicated,
                        expert=True,
                        global_path=f"{full}.{name}.{kind}{where[0].expert}-{where[-1].expert}",
                    )
                    continue
                for i, at in enumerate(where):
                    tensor = getattr(module, f"{kind}{i}", None)
                    if tensor is None or tensor.numel() == 0:
                        continue
                    self.add(
                        f"{path}.{name}.{kind}{i}",
                        tensor,
                        pieces(kind, tensor.shape, at),
                        replicated=replicated,
                        expert=True,
                        global_path=f"{full}.{name}.{kind}{at.expert}",
                    )
