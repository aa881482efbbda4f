"""Tree attention in plain torch with a dense T x T mask: the oracle, and the backend for CPU.

    out[q] = sum_k p[q, k] v[k],   p[q, :] = softmax over { k : k <= q < subtree_end[k] } of scale * q.k

With a sink, exp(sink) is added to the softmax denominator. O(T^2 H) memory, forward and backward: for tests
and small packs. float64 and float32 are computed as they are, bfloat16 and float16 in float32.
"""

from __future__ import annotations

import torch

from megatron.core.transformer.tree_attention.case import TreeAttentionCase
from megatron.core.transformer.tree_metadata import TreeMetadata

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def supports(case: TreeAttentionCase) -> str | None:
    """Everything that floating-point torch can do, on any device."""
    if case.dtype not in _DTYPES:
        return f"it computes {', '.join(str(d).removeprefix('torch.') for d in _DTYPES)}, not {case.dtype}"
    return None


def visible(metadata: TreeMetadata, window: int | None = None) -> torch.Tensor:
    """bool [T, T]: whether query (row) attends to key (column)."""
    index = torch.arange(metadata.padded_size, device=metadata.device)
    mask_TT = (index[None, :] <= index[:, None]) & (index[:, None] < metadata.subtree_end[None, :])
    if window is not None:
        ids = metadata.tree_position_ids
        mask_TT &= ids[:, None] - ids[None, :] <= window
    return mask_TT


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
    """q [T, H, D], k [T, Hkv, D], v [T, Hkv, Dv], sink [H] -> [T, H, Dv]; see ``case`` for the contract."""
    mask_TT = metadata.cached(("reference", window), lambda m: visible(m, window))
    tokens, heads, _ = q.shape
    groups = k.shape[1]
    compute = q.dtype if q.dtype in (torch.float64, torch.float32) else torch.float32
    q_GRTD = q.to(compute).view(tokens, groups, heads // groups, -1).permute(1, 2, 0, 3)
    k_G1DT = k.to(compute).permute(1, 2, 0)[:, None]
    v_G1TD = v.to(compute).transpose(0, 1)[:, None]
    logits_GRTT = (q_GRTD @ k_G1DT) * softmax_scale
    if softcap is not None:
        logits_GRTT = softcap * torch.tanh(logits_GRTT / softcap)
    logits_GRTT = logits_GRTT.masked_fill(~mask_TT, float("-inf"))
    if sink is not None:
        sink_GRT1 = sink.to(compute).view(groups, heads // groups, 1, 1).expand(-1, -1, tokens, 1)
        probs_GRTT = torch.cat([logits_GRTT, sink_GRT1], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        probs_GRTT = logits_GRTT.softmax(dim=-1)
    return (probs_GRTT @ v_G1TD).permute(2, 0, 1, 3).reshape(tokens, heads, -1).to(q.dtype)
