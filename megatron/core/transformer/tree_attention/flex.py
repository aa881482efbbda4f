"""Tree attention on torch FlexAttention: any CUDA GPU, no package beside torch and Triton.

The block mask is built from per-block extremes of ``subtree_end`` (see ``intervals``); the mask is evaluated
inside blocks that are visible in part. FlexAttention is compiled once per head configuration, with the pack's
length left open, and once more for passes without gradients. On CPU it runs uncompiled, with a dense mask:
for tests.
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable

import torch

from megatron.core.transformer.tree_attention.case import TreeAttentionCase
from megatron.core.transformer.tree_attention.intervals import block_lists, padded
from megatron.core.transformer.tree_metadata import TreeMetadata

BLOCK = 128
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_HEAD = 256
# Lengths are always multiples of BLOCK here, and the decoding kernel for short queries would be one more.
_KERNEL_OPTIONS = {"IS_DIVISIBLE": True, "BACKEND": "TRITON"}


def supports(case: TreeAttentionCase) -> str | None:
    """CUDA with compute capability 8.0 or newer, head sizes from 16 to 256; on CPU forward passes only."""
    if case.device_type == "cpu":
        return "torch's FlexAttention has no backward on CPU" if case.needs_grad else None
    if case.device_type != "cuda":
        return f"it runs on CUDA devices, not on {case.device_type}"
    if case.capability < (8, 0):
        return "it needs compute capability 8.0 or newer, not {}.{}".format(*case.capability)
    if case.dtype not in _DTYPES:
        return f"it computes {', '.join(str(d).removeprefix('torch.') for d in _DTYPES)}, not {case.dtype}"
    for name, size in (("query/key", case.qk_dim), ("value", case.v_dim)):
        if not 16 <= size <= _MAX_HEAD:
            return f"it takes {name} head sizes from 16 to {_MAX_HEAD}, not {size}"
    return None


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    metadata: TreeMetadata,
    *,
    softmax_scale: float,
    window: int | None = None,
    sink: torch.Tensor | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """q [T, H, D], k [T, Hkv, D], v [T, Hkv, Dv], sink [H] -> [T, H, Dv]; see ``case`` for the contract.

    A pack whose length is not a multiple of 128, or is less than 256, is padded on the way in: with whole
    blocks the kernels check no bounds, and with two or more no size is 1, for which torch would compile anew.
    """
    if q.device.type == "cpu":
        q, k, v = _detached(q, k, v)
    tokens = q.shape[0]
    whole = max(-(-tokens // BLOCK), 2) * BLOCK
    if whole != tokens:
        metadata = metadata.cached(("padded", whole), lambda m: padded(m, whole))
        q, k, v = (torch.nn.functional.pad(t, (0, 0, 0, 0, 0, whole - tokens)) for t in (q, k, v))
    run = _function(
        q.device.type,
        (q.dtype, *q.shape[1:], *v.shape[1:]),
        softmax_scale,
        window,
        softcap,
        sink is not None,
    )
    inputs = metadata.cached(("flex", window), lambda m: _mask_inputs(m, window))
    out = run(*(_sized(t, 0) for t in (q, k, v)), sink, *inputs)
    return out if whole == tokens else out[:tokens]


def _detached(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    # On CPU torch refuses tensors that require gradients, even where none is recorded.
    return tuple(t.detach() for t in tensors)


def _mask_inputs(metadata: TreeMetadata, window: int | None) -> list[torch.Tensor]:
    """Ends, positions and both directions' block lists; nothing is read back from the device."""
    kv = block_lists(metadata, BLOCK, BLOCK, window=window)
    queries = block_lists(metadata, BLOCK, BLOCK, transposed=True, window=window)
    made = [metadata.subtree_end, metadata.tree_position_ids]
    for found in (kv, queries):
        made += [found.partial_count, found.partial_index, found.full_count, found.full_index]
    return [_sized(t, *range(t.dim())) for t in made]


@functools.cache
def _function(
    device_type: str,
    heads: tuple,
    scale: float,
    window: int | None,
    softcap: float | None,
    has_sink: bool,
) -> Callable:
    """The function of one configuration: ``heads`` is what the compiler is to see as one, see below."""
    attention = _attention(scale, window, softcap, has_sink)
    if device_type == "cpu":
        return attention
    # The compiler keeps what it compiled, how often, and which numbers it saw change by code object and name.
    # With a code of its own a configuration cannot use up another's limit or turn its constants dynamic.
    # fullgraph: past the limit it raises, where it would otherwise run uncompiled, with a dense T x T mask.
    code = attention.__code__.replace(co_name=f"tree_attention_{next(_numbers)}")
    own = types.FunctionType(code, attention.__globals__, code.co_name, None, attention.__closure__)
    return torch.compile(own, fullgraph=True)


_numbers = itertools.count()


def _attention(scale: float, window: int | None, softcap: float | None, has_sink: bool) -> Callable:
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

    def capped(score, batch, head, query, key):
        return softcap * torch.tanh(score / softcap)

    def attention(q_THD, k_TGD, v_TGE, sink_H, end_T, position_T, *lists):
        def tree(batch, head, query, key):
            return (key <= query) & (query < end_T[key])

        def tree_and_window(batch, head, query, key):
            return tree(batch, head, query, key) & (position_T[query] - position_T[key] <= window)

        tokens = q_THD.shape[0]
        mask = BlockMask(
            (tokens, tokens),
            *[part[None, None] for part in lists],
            BLOCK_SIZE=(BLOCK, BLOCK),
            mask_mod=tree if window is None else tree_and_window,
        )
        out_1HTE, aux = flex_attention(
            *[t.transpose(0, 1)[None] for t in (q_THD, k_TGD, v_TGE)],
            score_mod=None if softcap is None else capped,
            block_mask=mask,
            scale=scale,
            enable_gqa=q_THD.shape[1] != k_TGD.shape[1],
            kernel_options=_KERNEL_OPTIONS,
            return_aux=AuxRequest(lse=has_sink),
        )
        if has_sink:
            # One more logit s in the denominator: out * exp(lse) / (exp(lse) + exp(s)).
            keep_1HT = torch.sigmoid(aux.lse - sink_H.to(aux.lse.dtype)[None, :, None])
            out_1HTE = (out_1HTE * keep_1HT[..., None]).to(q_THD.dtype)
        return out_1HTE[0].transpose(0, 1)

    return attention


def _sized(tensor: torch.Tensor, *lengths: int) -> torch.Tensor:
    """Tell the compiler which dimensions follow the pack's length; heads and head sizes are the model's."""
    for dim in range(tensor.dim()):
        if dim in lengths:
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
        else:
            torch._dynamo.mark_static(tensor, dim)
    return tensor
