"""Tree attention in plain torch with a dense T x T mask: the oracle, and the backend for CPU.

    out[q] = sum_k p[q, k] v[k],   p[q, :] = softmax over { k : k <= q < subtree_end[k] } of scale * q.k

With a sink, exp(sink) is added to the softmax denominator. O(T^2 H) memory, forward and backward: for tests
and small packs. A NaN or an infinity reaches only queries that see its token, and the gradients of their
paths; it takes O(T^2 H D) memory for that. float64 and float32 are computed as they are, bfloat16 and float16
in float32.
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
    mask_TK = metadata.cached(("reference", window), lambda m: visible(m, window))
    tokens, heads, _ = q.shape
    groups = k.shape[1]
    compute = q.dtype if q.dtype in (torch.float64, torch.float32) else torch.float32
    q_GRTD = q.to(compute).view(tokens, groups, heads // groups, -1).permute(1, 2, 0, 3)
    k_GTD, v_GTD = k.to(compute).transpose(0, 1), v.to(compute).transpose(0, 1)
    finite = all(bool(t.isfinite().all()) for t in (q, k, v))
    if finite:
        logits_GRTK = q_GRTD @ k_GTD.mT[:, None]
    else:
        # 0 * NaN is NaN: leave out what a query does not see instead of giving it the weight 0.
        seen_TK, key_TK = mask_TK.sort(dim=1, descending=True, stable=True)
        seen_TK, key_TK = (t[:, : int(mask_TK.sum(1).max())] for t in (seen_TK, key_TK))
        key_TK = torch.where(seen_TK, key_TK, torch.arange(tokens, device=q.device)[:, None])
        mask_TK = seen_TK
        logits_GRTK = (q_GRTD[..., None, :] * k_GTD[:, key_TK][:, None]).sum(-1)
    logits_GRTK = logits_GRTK * softmax_scale
    if softcap is not None:
        logits_GRTK = softcap * torch.tanh(logits_GRTK / softcap)
    logits_GRTK = logits_GRTK.masked_fill(~mask_TK, float("-inf"))
    if sink is not None:
        sink_GRT1 = sink.to(compute).view(groups, heads // groups, 1, 1).expand(-1, -1, tokens, 1)
        probs_GRTK = torch.cat([logits_GRTK, sink_GRT1], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        probs_GRTK = logits_GRTK.softmax(dim=-1)
    if finite:
        out_GRTD = probs_GRTK @ v_GTD[:, None]
    else:
        out_GRTD = (probs_GRTK[..., None] * v_GTD[:, key_TK][:, None]).sum(-2)
    return out_GRTD.permute(2, 0, 1, 3).reshape(tokens, heads, -1).to(q.dtype)
