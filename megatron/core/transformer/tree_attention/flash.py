"""Tree attention on flash-attn-4 (``flash_attn.cute``), forward and backward, Hopper and newer.

The pack is one batch entry. Blocks of the attention matrix that a tree does not touch are skipped, blocks in
which everything is visible run without a mask, and the rest evaluate ``key <= query < subtree_end[key]`` (see
``flash_masks``). Block lists come from per-block extremes of ``subtree_end`` (see ``intervals``).
A pack of roots only is ordinary sequences, and is computed as such.
Tested and measured on Hopper. For Blackwell the kernels compile with the block sizes below; untested there.
"""

from __future__ import annotations

import functools
import importlib.metadata

import torch

from megatron.core.transformer.tree_attention.case import TreeAttentionCase
from megatron.core.transformer.tree_attention.intervals import block_lists
from megatron.core.transformer.tree_metadata import TreeMetadata

PACKAGE = "flash-attn-4"
MINIMUM = "4.0.0b26"
"""Older wheels have a race in the log-sum-exp of block-sparse forward passes."""


def supports(case: TreeAttentionCase) -> str | None:
    """bfloat16 and float16; head sizes in steps of 8, up to 256 on compute capability 9.x, 128 on 10.x."""
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
    if case.capability[0] == 10 and case.qk_dim > 128 and case.v_dim > 128:
        return f"on compute capability 10.x it takes head sizes up to 128, and 192/128, not {case.qk_dim}"
    if case.softcap:
        return "its softcap has no tested backward together with a mask"
    if case.deterministic:
        return "its backward over block lists adds gradients up in any order"
    return package_problem()


@functools.cache
def package_problem() -> str | None:
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
) -> torch.Tensor:
    """q [T, H, D], k [T, Hkv, D], v [T, Hkv, Dv], sink [H] -> [T, H, Dv]; see ``case`` for the contract."""
    options = dict(softmax_scale=softmax_scale, return_lse=sink is not None)
    if metadata.roots_only:
        out_THD, lse_HT = _sequences(q, k, v, metadata, window, options)
    else:
        out_THD, lse_HT = _tree(q, k, v, metadata, window, options)
    if sink is not None:
        # One more logit s in the denominator: out * exp(lse) / (exp(lse) + exp(s)).
        keep_HT = torch.sigmoid(lse_HT - sink.to(lse_HT.dtype)[:, None])
        out_THD = (out_THD * keep_HT.t()[..., None]).to(q.dtype)
    return out_THD


def _sequences(q, k, v, metadata: TreeMetadata, window: int | None, options):
    """Without children nodes are sequences of their own: plain causal attention, which needs no mask."""
    from flash_attn.cute import flash_attn_varlen_func

    ends = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), metadata.cu_node_lens)
    longest = dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), metadata.padded_size)
    reach = {} if window is None else dict(window_size=(window, 0))
    return flash_attn_varlen_func(q, k, v, causal=True, **ends, **longest, **reach, **options)


def _tree(q, k, v, metadata: TreeMetadata, window: int | None, options):
    from flash_attn.cute import flash_attn_func

    blocks = block_sizes(max(q.shape[-1], v.shape[-1]), torch.cuda.get_device_capability(q.device)[0])
    forward, backward = metadata.cached(("flash", blocks, window), lambda m: _lists(m, blocks, window))
    out_1THD, lse_1HT = flash_attn_func(
        q[None],
        k[None],
        v[None],
        mask_mod=_mask(window),
        aux_tensors=mask_tensors(metadata, window),
        block_sparse_tensors=forward,
        block_sparse_tensors_bwd=backward,
        **options,
    )
    return out_1THD[0], None if lse_1HT is None else lse_1HT[0]


def block_sizes(head_size: int, capability_major: int = 9) -> tuple[tuple[int, int], tuple[int, int]]:
    """(query, key) block sizes of the lists that the forward and the backward kernel take.

    They follow the kernels' own tiles, which depend on the head size.
    """
    if capability_major == 10:
        return (256, 128), (128, 128) if head_size <= 128 else (128, 256)
    if head_size <= 64:
        return (128, 128), (128, 128)
    if head_size <= 128:
        return (128, 128), (64, 128)
    if head_size <= 192:
        return (128, 128), (64, 96)
    return (128, 80), (64, 64)


def _lists(metadata: TreeMetadata, blocks, window: int | None):
    """Block lists of the forward and the backward kernel; ``blocks`` as from ``block_sizes``."""
    forward_blocks, backward_blocks = blocks
    forward = sparse_tensors(metadata, forward_blocks, transposed=False, window=window)
    backward = sparse_tensors(metadata, backward_blocks, transposed=True, window=window)
    return forward, backward


def sparse_tensors(metadata: TreeMetadata, blocks: tuple[int, int], *, transposed: bool, window: int | None):
    """Block lists as flash-attn-4 takes them; ``blocks`` are tokens per (query, key) block."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    found = block_lists(metadata, *blocks, transposed=transposed, window=window)
    parts = (found.partial_count, found.partial_index, found.full_count, found.full_index)
    return BlockSparseTensorsTorch(*(part[None, None] for part in parts), block_size=blocks)


def mask_tensors(metadata: TreeMetadata, window: int | None) -> list[torch.Tensor]:
    """What the masks of ``flash_masks`` read, int32 [T] each."""
    tensors = [metadata.cached("reach", _reach)]
    return tensors if window is None else [*tensors, metadata.cached("position32", _position32)]


def _reach(metadata: TreeMetadata) -> torch.Tensor:
    end = metadata.subtree_end
    return end - torch.arange(len(end), dtype=end.dtype, device=end.device)


def _position32(metadata: TreeMetadata) -> torch.Tensor:
    return metadata.tree_position_ids.to(torch.int32)


@functools.cache
def _mask(window: int | None):
    from megatron.core.transformer.tree_attention import flash_masks

    return flash_masks.tree if window is None else flash_masks.tree_and_window(window)
