"""Tree attention on torch FlexAttention: any CUDA GPU, no package beside torch and Triton.

The block mask is built from per-block extremes of ``subtree_end`` (see ``intervals``); the mask is evaluated
inside blocks that are visible in part. FlexAttention is compiled per model, with lengths left open. On CPU it
runs uncompiled, with a dense mask: for tests.
"""

from __future__ import annotations

import functools

import torch

from megatron.core.transformer.tree_attention.case import TreeAttentionCase
from megatron.core.transformer.tree_attention.intervals import block_lists
from megatron.core.transformer.tree_metadata import TreeMetadata

BLOCK = 128
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_HEAD = 256


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
    deterministic: bool = False,
) -> torch.Tensor:
    """q [T, H, D], k [T, Hkv, D], v [T, Hkv, Dv], sink [H] -> [T, H, Dv]; see ``case`` for the contract."""
    if q.device.type == "cpu":  # torch looks at requires_grad even where no gradient is recorded
        q, k, v = q.detach(), k.detach(), v.detach()
    q_1HTD, k_1GTD, v_1GTD = (_sized(t.transpose(0, 1)[None], 2) for t in (q, k, v))
    out_1HTD, lse_1HT = _function(q.device.type)(
        q_1HTD,
        k_1GTD,
        v_1GTD,
        score_mod=None if softcap is None else _softcap(float(softcap)),
        block_mask=metadata.cached(("flex", window), lambda m: block_mask(m, window)),
        scale=softmax_scale,
        enable_gqa=q.shape[1] != k.shape[1],
        return_lse=True,
    )
    if sink is not None:
        # One more logit s in the denominator: out * exp(lse) / (exp(lse) + exp(s)).
        keep = torch.sigmoid(lse_1HT - sink.to(lse_1HT.dtype)[None, :, None])
        out_1HTD = (out_1HTD * keep[..., None]).to(q.dtype)
    return out_1HTD[0].transpose(0, 1)


def block_mask(metadata: TreeMetadata, window: int | None = None):
    """FlexAttention's BlockMask of a pack; nothing is read back from the device, and nothing is T x T."""
    from torch.nn.attention.flex_attention import BlockMask

    end_T = _sized(metadata.subtree_end, 0)
    position_T = _sized(metadata.tree_position_ids, 0)

    def tree(batch, head, query, key):
        return (key <= query) & (query < end_T[key])

    def tree_and_window(batch, head, query, key):
        return tree(batch, head, query, key) & (position_T[query] - position_T[key] <= window)

    def lists(transposed):
        found = block_lists(metadata, BLOCK, BLOCK, transposed=transposed)
        if window is not None:  # the mask must be evaluated everywhere
            found = found.all_partial()
        parts = (found.partial_count, found.partial_index, found.full_count, found.full_index)
        return [_sized(part[None, None], *range(2, part.dim() + 2)) for part in parts]

    kv, queries = lists(False), lists(True)
    return BlockMask(
        (metadata.padded_size, metadata.padded_size),
        *kv,
        *queries,
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=tree if window is None else tree_and_window,
    )


@functools.cache
def _softcap(softcap: float):
    def capped(score, batch, head, query, key):
        return softcap * torch.tanh(score / softcap)

    return capped


@functools.cache
def _function(device_type: str):
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention if device_type == "cpu" else torch.compile(flex_attention)


def _sized(tensor: torch.Tensor, *lengths: int) -> torch.Tensor:
    """Tell the compiler which dimensions follow the pack's length; heads and head sizes are the model's."""
    if tensor.is_cuda:
        for dim in range(tensor.dim()):
            if dim in lengths:
                torch._dynamo.maybe_mark_dynamic(tensor, dim)
            else:
                torch._dynamo.mark_static(tensor, dim)
    return tensor
