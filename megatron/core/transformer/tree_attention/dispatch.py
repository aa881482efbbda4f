"""Choose the backend for a tree pack, and connect it to Megatron's attention layers."""

from __future__ import annotations

import functools
import importlib
import logging
import math
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from megatron.core.transformer.tree_attention import refusals
from megatron.core.transformer.tree_attention.case import TreeAttentionCase, TreeUnsupportedError
from megatron.core.transformer.tree_metadata import TreeMetadata

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.attention import Attention

logger = logging.getLogger(__name__)

BACKENDS = ("te", "flash", "flex", "reference")
"""Every backend, fastest first: the order in which ``auto`` asks."""


def tree_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    metadata: TreeMetadata,
    *,
    softmax_scale: float | None = None,
    window: int | None = None,
    sink: torch.Tensor | None = None,
    softcap: float | None = None,
    backend: str = "auto",
    deterministic: bool = False,
) -> torch.Tensor:
    """Attention in which every token sees exactly its own path from the root.

    Args:
        q: [T, H, D], any float dtype that the backend takes; THD layout, contiguous or not.
        k: [T, Hkv, D] where Hkv divides H.
        v: [T, Hkv, Dv].
        metadata: of the same T, on the same device. On the CPU its first use validates it; elsewhere that is
            the duty of whoever builds one by hand, see ``TreeMetadata.validate``.
        softmax_scale: factor on q.k, 1/sqrt(D) when None.
        window: attend at most this many positions back on the path.
        sink: [H], one more logit per head in the softmax denominator.
        softcap: logits become softcap * tanh(logit / softcap).
        backend: ``auto`` or a name of BACKENDS.
        deterministic: ask for equal bits on equal inputs.

    Returns:
        [T, H, Dv] in the dtype of q.

    Raises:
        ValueError: shapes, dtypes, devices, the metadata or the backend's name do not fit.
        TypeError: ``metadata`` is something else, for instance the PackedSeqParams that carry it.
        TreeUnsupportedError: the backend, or with ``auto`` every backend, cannot serve this case.
    """
    _check(q, k, v, metadata, sink)
    if window is not None and (not isinstance(window, int) or window < 0):
        raise ValueError(f"window: expected an int >= 0, or None for no limit, got {window!r}")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap: expected a positive number, or None for no cap, got {softcap!r}")
    case = _case(q, k, v, window=window, sink=sink, softcap=softcap, deterministic=deterministic)
    chosen = select_backend(backend, case)
    return _module(chosen).attend(
        q,
        k,
        v,
        metadata,
        softmax_scale=1.0 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale,
        window=window,
        sink=sink,
        softcap=softcap,
    )


def check_backend_name(backend: str) -> None:
    """Raise ValueError unless it is ``auto`` or a name of BACKENDS."""
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(
            f"tree_attention_backend: expected auto or one of {', '.join(BACKENDS)}, got {backend!r}"
        )


@functools.cache
def select_backend(backend: str, case: TreeAttentionCase) -> str:
    """Name of the backend that serves the case: the one asked for or, with ``auto``, the first that can.

    ``auto`` does not take ``reference`` on an accelerator, where its dense mask is hardly ever wanted.

    Raises:
        ValueError: unknown name.
        TreeUnsupportedError: with the reason of every backend that was asked, and who would serve instead.
    """
    check_backend_name(backend)
    reasons = {name: _supports(name, case) for name in BACKENDS}
    if backend != "auto":
        if reasons[backend] is not None:
            able = [name for name in BACKENDS if reasons[name] is None]
            raise TreeUnsupportedError(
                f"tree attention backend {backend!r} cannot serve {case}: {reasons[backend]}. "
                + (f"Backends that can: {', '.join(able)}." if able else f"No other can: {_listed(reasons)}.")
            )
        return backend
    if case.device_type == "cpu":
        reasons["flex"] = "on CPU it runs uncompiled, no better than reference: choose it by name"
    else:
        reasons["reference"] = "its dense mask takes O(T^2) memory: choose it by name for a small pack"
    for name in BACKENDS:
        if reasons[name] is None:
            missing = _module("flash").package_problem()
            passed_over = reasons["flash"] is not None and reasons["flash"] == missing
            _log_choice(
                f"tree attention: auto chose backend {name!r} for {case}"
                + (f"; flash would be faster, but {missing}" if passed_over else ""),
                logging.WARNING if passed_over else logging.INFO,
            )
            return name
    raise TreeUnsupportedError(f"no tree attention backend can serve {case}: {_listed(reasons)}.")


def tree_core_attention(
    attention: Attention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    packed_seq_params: PackedSeqParams | None,
    **extra_kwargs,
) -> torch.Tensor | None:
    """Core attention of a layer for a tree pack; None when the layer's own module is to run.

    That is so without ``tree_metadata``, and when Transformer Engine takes the metadata itself. Scale, window
    and sink come from the layer. Shapes as in ``tree_attention``; the result is [T, H * Dv], as from TE.
    ``attention_mask`` is not read, as in every THD run.
    """
    metadata = getattr(packed_seq_params, "tree_metadata", None)
    if metadata is None:
        return None
    refusals.refuse_unsupported_call(attention, packed_seq_params, extra_kwargs)
    config = attention.config
    window, sink = _window(attention), _sink(attention)
    _check(query, key, value, metadata, sink)
    case = _case(
        query,
        key,
        value,
        window=window,
        sink=sink,
        softcap=None,
        deterministic=config.deterministic_mode,
        te_core=refusals.is_te_attention(attention.core_attention),
    )
    chosen = select_backend(config.tree_attention_backend, case)
    if chosen == "te":
        return None
    refusals.refuse_low_precision_attention(config, chosen)
    output = _module(chosen).attend(
        query,
        key,
        value,
        metadata,
        softmax_scale=_scale(attention),
        window=window,
        sink=sink,
        softcap=None,
    )
    return output.reshape(output.shape[0], -1)


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{__package__}.{name}")


def _supports(name: str, case: TreeAttentionCase) -> str | None:
    return _module(name).supports(case)


def _listed(reasons: dict[str, str | None]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in reasons.items())


@functools.cache
def _log_choice(message: str, level: int) -> None:
    # Cached on the text, so that cases that differ only in what the text leaves out are logged once.
    from megatron.core.utils import log_single_rank

    log_single_rank(logger, level, message)


def _check(q, k, v, metadata: TreeMetadata, sink) -> None:
    refusals.check_metadata(metadata)
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3:
        raise ValueError(
            f"q, k, v: expected [T, heads, size], got {list(q.shape)}, {list(k.shape)}, {list(v.shape)}; a "
            "tree pack is one sequence: tokens of shape [1, T]"
        )
    if metadata.device.type == "cpu" and not torch.compiler.is_compiling():
        metadata.validate_once()
    tokens = metadata.padded_size
    if not q.shape[0] == k.shape[0] == v.shape[0] == tokens:
        raise ValueError(
            f"q, k, v: expected {tokens} tokens (tree_metadata.padded_size), got {q.shape[0]}, {k.shape[0]}, "
            f"{v.shape[0]}. On a later pipeline stage: micro-batches differ in length; set "
            "variable_seq_lengths=True (with moe_token_dispatcher_type='alltoall'), or give them one length "
            "by plan_micro_batches(..., pad_to_multiple_of=max_tokens)"
        )
    if k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"k, v: expected a head count that divides {q.shape[1]} (of q), got {k.shape[1]}, {v.shape[1]}"
        )
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"k: expected head size {q.shape[2]} of q, got {k.shape[2]}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"k, v: expected dtype {q.dtype} of q, got {k.dtype}, {v.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"k, v: expected device {q.device} of q, got {k.device}, {v.device}")
    if metadata.device != q.device:
        raise ValueError(
            f"tree_metadata: expected device {q.device} of the query, got {metadata.device}; move it "
            "once per micro-batch with TreeMetadata.to"
        )
    if sink is not None and getattr(sink, "shape", None) != (q.shape[1],):
        got = list(sink.shape) if isinstance(sink, torch.Tensor) else type(sink).__name__
        raise ValueError(f"sink: expected a tensor of shape [{q.shape[1]}], got {got}")


def _case(q, k, v, *, window, sink, softcap, deterministic, te_core=False) -> TreeAttentionCase:
    return TreeAttentionCase(
        device_type=q.device.type,
        capability=torch.cuda.get_device_capability(q.device) if q.is_cuda else None,
        dtype=q.dtype,
        heads=q.shape[1],
        kv_heads=k.shape[1],
        qk_dim=q.shape[2],
        v_dim=v.shape[2],
        window=window,
        sink=sink is not None,
        softcap=softcap is not None,
        needs_grad=torch.is_grad_enabled()
        and any(t is not None and t.requires_grad for t in (q, k, v, sink)),
        deterministic=deterministic
        or (
            torch.are_deterministic_algorithms_enabled()
            and not torch.is_deterministic_algorithms_warn_only_enabled()
        ),
        te_core=te_core,
    )


def _scale(attention: Attention) -> float:
    # MLA keeps its own (with the yarn factor). apply_query_key_layer_scaling cancels out.
    scale = getattr(attention, "softmax_scale", None)
    if scale is None:
        scale = attention.config.softmax_scale
    return 1.0 / math.sqrt(attention.hidden_size_per_attention_head) if scale is None else scale


def _window(attention: Attention) -> int | None:
    from megatron.core.transformer.utils import is_layer_window_attention

    config = attention.config
    if not is_layer_window_attention(
        config.window_size, config.window_attn_skip_freq, attention.layer_number
    ):
        return None
    left, right = config.window_size
    if right > 0 or left < -1:
        raise TreeUnsupportedError(
            f"tree_metadata with window_size={config.window_size}: a tree window reaches back only; use "
            "(left, 0) with left >= 0, or -1 for no limit"
        )
    return None if left == -1 else left


def _sink(attention: Attention) -> torch.Tensor | None:
    if attention.config.softmax_type == "vanilla":
        return None
    offset = getattr(attention.core_attention, "softmax_offset", None)
    if offset is None:
        raise TreeUnsupportedError(
            f"tree_metadata with softmax_type={attention.config.softmax_type!r}: core attention "
            f"{type(attention.core_attention).__name__} has no softmax_offset, the sink's logit of each head"
        )
    return offset.reshape(-1)
