"""What a tree pack must not reach, because it would be ignored there or computed wrongly.

Every refusal is a ``TreeUnsupportedError`` that names the cause and the way out. Most can be read from the
configuration, so that every rank of a job raises and none waits for another; the rest from the modules.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import nn

from megatron.core.transformer.tree_attention.case import TreeUnsupportedError
from megatron.core.transformer.tree_metadata import TreeMetadata

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.attention import Attention
    from megatron.core.transformer.transformer_config import TransformerConfig

_LINEAR = "train this model on linear micro-batches"
_REFUSED_SYMBOLS = {"M": "Mamba", "G": "gated delta net", "D": "DSA"}  # of hybrid_layer_pattern

_checked_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def refuse_unsupported_model(
    model: nn.Module, packed_seq_params: PackedSeqParams | None, inference_context=None
) -> None:
    """Called by the forward of GPTModel and HybridModel: may every part of the model see the pack's tree?

    Raises:
        TreeUnsupportedError: some part would ignore the tree, or compute it wrongly.
        TypeError: ``tree_metadata`` is something else than a TreeMetadata.
    """
    metadata = getattr(packed_seq_params, "tree_metadata", None)
    if metadata is None:
        return
    check_metadata(metadata)
    if inference_context is not None:
        raise _unsupported(
            "an inference context", "generate from linear sequences; trees are for training and scoring"
        )
    _refuse_configuration(model.config, packed_seq_params, model.training)
    pattern = getattr(model, "hybrid_layer_pattern", None)
    if pattern and "/" in pattern:
        raise _mtp()
    for symbol, layer in _REFUSED_SYMBOLS.items():
        if pattern and symbol in pattern:
            raise _unsupported(f"{layer} layers (hybrid_layer_pattern {pattern!r})", _LINEAR)
    if model not in _checked_models:
        for layer in model.decoder.layers:
            _refuse_layer(layer)
        _checked_models.add(model)


def check_metadata(metadata) -> None:
    """Raise TypeError unless it is a TreeMetadata."""
    if not isinstance(metadata, TreeMetadata):
        raise TypeError(
            "tree_metadata: expected a TreeMetadata (packed_seq_params.tree_metadata), got "
            f"{type(metadata).__name__}"
        )


def refuse_labels(packed_seq_params: PackedSeqParams | None, **given) -> None:
    """Called by the forward of GPTModel and HybridModel with labels and loss_mask.

    They have one entry for each packed token, and a token where branches part predicts several. In a pack of
    roots each token has at most one target, and the caller's labels can be right.

    Raises:
        TreeUnsupportedError: one of them is given for a tree.
    """
    metadata = getattr(packed_seq_params, "tree_metadata", None)
    if metadata is None or getattr(metadata, "roots_only", False):
        return
    for name, value in given.items():
        if value is not None:
            raise _unsupported(
                f"{name} passed to the model",
                f"leave {name} out and take megatron.core.tree_training.log_probs(logits, batch) (where "
                "branches part, a token has several targets)",
            )


def refuse_unsupported_call(
    attention: Attention, packed_seq_params: PackedSeqParams, extra_kwargs: dict
) -> None:
    """Called by every attention layer, so that models other than GPTModel and HybridModel are guarded too."""
    from megatron.core.inference.utils import InferenceMode
    from megatron.core.transformer.enums import AttnMaskType

    _refuse_configuration(attention.config, packed_seq_params, attention.training)
    if InferenceMode.is_active():
        raise _unsupported(
            "inference mode", "generate from linear sequences; trees are for training and scoring"
        )
    if attention.attention_type != "self":
        raise _unsupported(f"{attention.attention_type} attention", "use trees with self-attention only")
    if attention.attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
        raise _unsupported(
            f"attn_mask_type {attention.attn_mask_type.name}", "a tree is causal: use AttnMaskType.causal"
        )
    for name, given in extra_kwargs.items():
        if given is not None:
            raise _unsupported(f"{name} passed to the attention layer", f"leave {name} out")
    _refuse_core_attention(attention)


def refuse_low_precision_attention(config: TransformerConfig, backend: str) -> None:
    """fp8 attention is Transformer Engine's own; another backend would silently compute in bf16."""
    for name in ("fp8_dot_product_attention", "fp8_multi_head_attention"):
        if getattr(config, name):
            raise _unsupported(
                f"{name} and backend {backend!r}",
                f"set {name}=False or install a TE that takes tree_metadata",
            )


def is_te_attention(module: nn.Module) -> bool:
    """Whether a layer's core attention is Transformer Engine's."""
    from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention

    return HAVE_TE and isinstance(module, TEDotProductAttention)


def _unsupported(cause: str, way_out: str) -> TreeUnsupportedError:
    return TreeUnsupportedError(f"tree_metadata is not supported with {cause}: {way_out}")


def _mtp() -> TreeUnsupportedError:
    return _unsupported(
        "multi-token prediction",
        "set mtp_num_layers=None, or use linear micro-batches (its targets are shifted across branch ends)",
    )


def _refuse_configuration(
    config: TransformerConfig, packed_seq_params: PackedSeqParams, training: bool
) -> None:
    from megatron.core.transformer.enums import CudaGraphModule

    if training:
        for name in ("attention_dropout", "hidden_dropout"):
            if getattr(config, name) > 0:
                raise _unsupported(
                    f"{name}={getattr(config, name)} in training",
                    f"set {name}=0.0 (branches would share the mask of their prefix)",
                )
    if config.num_moe_experts is not None:
        # Drawn for each packed token, or forward pass; upstream draws them in evaluation, too.
        for name in ("moe_input_jitter_eps", "moe_router_force_load_balancing", "moe_router_force_biased"):
            if getattr(config, name) not in (None, False):
                raise _unsupported(
                    f"{name}={getattr(config, name)}",
                    f"leave {name} unset (branches would share the noise of their prefix)",
                )
        if training and config.overlap_moe_expert_parallel_comm:
            raise _unsupported(
                "overlap_moe_expert_parallel_comm=True in training",
                "set it to False (its schedule calls routers without the tree's token weights)",
            )
    if config.mtp_num_layers:
        raise _mtp()
    variant = config.experimental_attention_variant
    if variant is not None:
        raise _unsupported(f"experimental_attention_variant={variant!r}", _LINEAR)
    for holder, name in ((config, "context_parallel_size"), (packed_seq_params, "local_cp_size")):
        if (size := getattr(holder, name) or 1) > 1:
            raise _unsupported(
                f"context parallelism ({name}={size})",
                f"set {name}=1 and split long trees into micro-batches, or use tensor parallelism",
            )
    if config.cuda_graph_impl != "none" and (
        config.cuda_graph_impl == "full_iteration"
        or not config.cuda_graph_modules
        or CudaGraphModule.attn in config.cuda_graph_modules
    ):
        raise _unsupported(
            f"CUDA graphs that capture attention (cuda_graph_impl={config.cuda_graph_impl!r})",
            "set cuda_graph_impl='none', or cuda_graph_modules without 'attn' (a graph replays one tree)",
        )
    if config.batch_invariant_mode:
        raise _unsupported("batch_invariant_mode=True", "set batch_invariant_mode=False")
    heads = config.num_attention_heads // config.tensor_model_parallel_size
    if config.multi_latent_attention and config.apply_rope_fusion and heads & (heads - 1):
        # Its kernels take heads in blocks of a power of two; the last block runs into the next token.
        raise _unsupported(
            f"upstream's fused rope of MLA and {heads} heads on a rank", "set apply_rope_fusion=False"
        )
    for name in ("qk_clip", "log_max_attention_logit"):
        if getattr(config, name):
            raise _unsupported(
                f"{name}=True", f"set {name}=False (the backends do not report the largest logit)"
            )


def _refuse_layer(layer: nn.Module) -> None:
    from megatron.core.transformer.attention import Attention
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.transformer_layer import TransformerLayer

    # A layer that mixes tokens in any way but through `Attention._run_core_attention` would ignore the tree.
    if not isinstance(layer, TransformerLayer):
        mixer = getattr(layer, "mixer", layer)
        raise _unsupported(f"{type(mixer).__name__} layers", _LINEAR)
    mixer = layer.self_attention
    if isinstance(mixer, IdentityOp):
        return
    if not isinstance(mixer, Attention):
        raise _unsupported(f"{type(mixer).__name__} layers", _LINEAR)
    _refuse_core_attention(mixer)


def _refuse_core_attention(attention: Attention) -> None:
    from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.experimental_attention_variant.absorbed_mla import (
        AbsorbedMLASelfAttention,
    )

    if isinstance(attention, AbsorbedMLASelfAttention):
        raise _unsupported("absorbed MLA", "use MLASelfAttention in the layer spec")
    core = attention.core_attention
    # A forward of its own may compute anything; softmax attention must not stand in for it unasked.
    known = [DotProductAttention.forward] + ([TEDotProductAttention.forward] if HAVE_TE else [])
    if type(core).forward not in known and not getattr(core, "plain_softmax_attention", False):
        raise _unsupported(
            f"core attention {type(core).__name__}",
            "use DotProductAttention or TEDotProductAttention, or set plain_softmax_attention = True on the "
            "class if it computes causal softmax attention with the scale, window and sink of its config "
            "(softmax_offset)",
        )
