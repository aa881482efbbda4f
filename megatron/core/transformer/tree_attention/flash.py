"""Tree attention on flash-attn-4 (``flash_attn.cute``), forward and backward, Hopper and newer.

The pack is one batch entry. Blocks of the attention matrix that a tree does not touch are skipped, blocks in
which everything is visible run without a mask, and the rest evaluate ``key <= query < subtree_end[key]``.
Block lists come from per-block extremes of ``subtree_end`` (see ``intervals``).
Measured on Hopper. Blackwell takes the same path and is untested.
"""

from __future__ import annotations

import functools
import importlib.metadata

import torch

from megatron.core.transformer.tree_attention.case import TreeAttentionCase
from megatron.core.transformer.tree_attention.intervals import BlockLists, block_lists
from megatron.core.transformer.tree_metadata import TreeMetadata

PACKAGE = "flash-attn-4"
MINIMUM = "4.0.0b26"
"""Older wheels have a race in the log-sum-exp of block-sparse forward passes."""


def supports(case: TreeAttentionCase) -> str | None:
    """bfloat16 and float16 on compute capability 9.x and 10.x, head sizes in steps of 8 up to 256."""
    if case.device_type != "cuda":
        return f"it runs on CUDA devices, not on {case.device_type}"
    if case.capability[0] not in (9, 10):
        return "it needs compute capability 9.x or 10.x, not {}.{}".format(*case.capability)
    if case.dtype not in (torch.bfloat16, torch.float16):
        return f"it computes bfloat16 and float16, not {str(case.dtype).removeprefix('torch.')}"
    for name, size in (("query/key", case.qk_dim), ("value", case.v_dim)):
        if not 8 <= size <= 256 or size % 8:
            return f"it takes {name} head sizes from 8 to 256 in steps of 8, not {size}"
    if case.v_dim != case.qk_dim and (case.qk_dim, case.v_dim) != (192, 128):
        return f"of unequal query/key and value head sizes it takes 192/128, not {case.qk_dim}/{case.v_dim}"
    if case.softcap:
        return "its softcap has no tested backward together with a mask"
    return _package()


@functools.cache
def _package() -> str | None:
    """Why the installed package cannot be used, or None."""
    from packaging.version import Version

    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        return f"{PACKAGE} is not installed (pip install 'megatron-core[flash]')"
    if Version(version) < Version(MINIMUM):
        return f"it needs {PACKAGE} >= {MINIMUM}, older ones have a race; installed is {version}"
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
    from flash_attn.cute import flash_attn_func

    size = max(q.shape[-1], v.shape[-1])
    forward, backward = metadata.cached(
        ("flash", size, window, deterministic), lambda m: _lists(m, size, window, deterministic)
    )
    end_T = metadata.subtree_end
    aux = [end_T] if window is None else [end_T, metadata.cached("position32", _position32)]
    out_1THD, lse_1HT = flash_attn_func(
        q[None],
        k[None],
        v[None],
        softmax_scale=softmax_scale,
        mask_mod=_mask(window),
        aux_tensors=aux,
        block_sparse_tensors=forward,
        block_sparse_tensors_bwd=backward,
        deterministic=deterministic,
        return_lse=True,
    )
    if sink is not None:
        # One more logit s in the denominator: out * exp(lse) / (exp(lse) + exp(s)).
        keep_1HT = torch.sigmoid(lse_1HT - sink.to(lse_1HT.dtype)[None, :, None])
        out_1THD = (out_1THD * keep_1HT.transpose(1, 2)[..., None]).to(q.dtype)
    return out_1THD[0]


def block_sizes(head_size: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """(query, key) block sizes of the lists that the forward and the backward kernel take.

    They follow the kernels' own tiles on Hopper, which depend on the head size.
    """
    if head_size <= 64:
        return (128, 128), (128, 128)
    if head_size <= 128:
        return (128, 128), (64, 128)
    if head_size <= 192:
        return (128, 128), (64, 96)
    return (128, 80), (64, 64)


def _lists(metadata: TreeMetadata, head_size: int, window: int | None, deterministic: bool):
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch, compute_dq_write_order

    (fwd_q, fwd_k), (bwd_q, bwd_k) = block_sizes(head_size)

    def four(q_block, k_block, transposed):
        found = block_lists(metadata, q_block, k_block, transposed=transposed, window=window)
        return tuple(part[None, None] for part in _fields(found))

    forward = BlockSparseTensorsTorch(*four(fwd_q, fwd_k, False), block_size=(fwd_q, fwd_k))
    backward = BlockSparseTensorsTorch(*four(bwd_q, bwd_k, True), block_size=(bwd_q, bwd_k))
    if deterministic:
        order, order_full = compute_dq_write_order(*four(bwd_q, bwd_k, False), *backward[:4])
        backward = backward._replace(dq_write_order=order, dq_write_order_full=order_full, spt=False)
    return forward, backward


def _fields(found: BlockLists):
    return found.partial_count, found.partial_index, found.full_count, found.full_index


def _position32(metadata: TreeMetadata) -> torch.Tensor:
    return metadata.tree_position_ids.to(torch.int32)


@functools.cache
def _mask(window: int | None):
    """The mask as CuTe code; indices are Int32 vectors of one element."""
    import cutlass
    import cutlass.cute as cute
    from flash_attn.cute.utils import scalar_to_ssa

    @cute.jit
    def tree(batch, head, query, key, seqlen_info, aux_tensors):
        end = scalar_to_ssa(aux_tensors[0][key[0]], cutlass.Int32)
        return (key <= query) & (query < end)

    @cute.jit
    def tree_and_window(batch, head, query, key, seqlen_info, aux_tensors):
        end = scalar_to_ssa(aux_tensors[0][key[0]], cutlass.Int32)
        near = scalar_to_ssa(aux_tensors[1][key[0]] + window, cutlass.Int32)
        at = scalar_to_ssa(aux_tensors[1][query[0]], cutlass.Int32)
        return (key <= query) & (query < end) & (at <= near)

    return tree if window is None else tree_and_window
