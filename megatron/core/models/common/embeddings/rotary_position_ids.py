"""Rotary embeddings of explicit position ids: one table row per token.

Megatron-Core derives rotary positions from where a token stands: from its index in the sequence (batch
layout) or from cu_seqlens (packed layout). In a packed trie the same positions occur once per branch, so each
token brings its own. Its row is gathered from the table that RotaryEmbedding caches, and the packed tokens
then take the batch path of `apply_rotary_pos_emb`, where row i of the embeddings belongs to token i whatever
cu_seqlens says.

Position ids come from `packed_seq_params.tree_metadata.tree_position_ids`, on every pipeline stage, or, where
`TransformerConfig.rotary_use_position_ids` is set, from the `position_ids` of the model's forward. With
neither, nothing here runs and positions are derived as upstream does.

`rows_per_token` answers the same question in the attention layers. It reads the config and the packed
parameters and nothing else: a mark on the embedding tensor would not survive the detached copies that
activation recomputation makes of a layer's inputs.

Shapes: T packed tokens, B batch, S sequence length, L table length, D rotary dimension.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def gather_rows(table_L11D: Tensor, position_ids: Tensor) -> Tensor:
    """Rows of a rotary table for explicit positions.

    Args:
        table_L11D: embeddings (or cosines, or sines) of positions 0..L-1, [L, 1, 1, D].
        position_ids: int32 or int64, [T], [1, T] or [B, S], on the device of the table.

    Returns:
        [T, 1, 1, D] for [T] and [1, T], [S, B, 1, D] for [B, S]; bitwise the rows of the table, contiguous.

    Raises:
        TypeError: position ids are not integers.
        ValueError: wrong number of dimensions, or (host tensors) a position outside 0..L-1. On a GPU the
            values are not read back, as that would stall the stream: there the device-side assertion of the
            index kernel stops a position outside the table, negative ones included.
    """
    if position_ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"position ids must be int64 or int32, got {position_ids.dtype}")
    if position_ids.dim() not in (1, 2):
        raise ValueError(f"position ids must be [T], [1, T] or [b, s], got {list(position_ids.shape)}")
    length = table_L11D.size(0)
    if position_ids.device.type == "cpu" and position_ids.numel() > 0:
        low, high = int(position_ids.min()), int(position_ids.max())
        if low < 0 or high >= length:
            raise ValueError(
                f"position ids must lie in 0..{length - 1}, got {low}..{high}: the rotary table has {length} "
                "rows (the sequence length, or the larger of max_seqlen_q and max_seqlen_kv of a pack)"
            )
    # index_select, not table[ids]: indexing would wrap a negative position to the end of the table.
    if position_ids.dim() == 1 or position_ids.size(0) == 1:
        return table_L11D.index_select(0, position_ids.reshape(-1))
    ids_SB = position_ids.t()
    return table_L11D.index_select(0, ids_SB.reshape(-1)).view(*ids_SB.shape, 1, table_L11D.size(-1))


def gathers_position_ids(cached_forward: Callable) -> Callable:
    """Decorator for a cached `forward` of RotaryEmbedding: adds `position_ids`, gathered outside the cache.

    `functools.lru_cache` hashes tensors by identity, so ids inside it would never hit, and would keep 32
    gathered embeddings alive. Works for a forward that returns the table and for one that returns
    (table, mscale).
    """

    @functools.wraps(cached_forward)
    def forward(self, max_seq_len, offset=0, packed_seq=False, cp_group=None, position_ids=None):
        if position_ids is None:
            return cached_forward(self, max_seq_len, offset, packed_seq, cp_group)
        group = self.cp_group if cp_group is None else cp_group
        if group is not None and group.size() > 1:
            raise ValueError(
                "explicit rotary position ids do not support context parallelism, got a group of "
                f"{group.size()} ranks"
            )
        table = cached_forward(self, max_seq_len, offset, packed_seq, cp_group)
        if isinstance(table, tuple):
            return (gather_rows(table[0], position_ids), *table[1:])
        return gather_rows(table, position_ids)

    del forward.__wrapped__  # inspect.signature must show position_ids
    forward.cache_clear = cached_forward.cache_clear
    forward.cache_info = cached_forward.cache_info
    return forward


def rows_per_token(config: Any, packed_seq_params: Any | None, inference_context: Any | None = None) -> bool:
    """Whether the rotary embeddings of a packed micro-batch have one row per packed token."""
    if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
        return False
    if getattr(packed_seq_params, "tree_metadata", None) is not None:
        return True
    return config.rotary_use_position_ids and inference_context is None


def check_rows(rows: Tensor, num_tokens: int) -> None:
    """Raise ValueError unless position ids, or embeddings, have one row for each packed token."""
    if rows.size(0) != num_tokens:
        raise ValueError(
            f"rotary embeddings have {rows.size(0)} rows for {num_tokens} packed tokens: with tree metadata "
            "or rotary_use_position_ids each packed token brings its own row. Position ids must cover the "
            "whole pack, padding included, and a model that builds its own embeddings must gather them. On a "
            "later pipeline stage: micro-batches differ in length; set variable_seq_lengths=True (with "
            "moe_token_dispatcher_type='alltoall'), or give them one length by "
            "plan_micro_batches(..., pad_to_multiple_of=max_tokens)"
        )


def tree_position_ids(config: Any, packed_seq_params: Any | None) -> Tensor | None:
    """Position ids [T] of the pack's tree metadata; None without tree metadata.

    Raises:
        TreeUnsupportedError: context parallelism.
        ValueError: metadata without ids, in another layout than THD, without max_seqlen_q/max_seqlen_kv, or
            with a position outside the rotary table that these two give.
    """
    metadata = getattr(packed_seq_params, "tree_metadata", None)
    if metadata is None:
        return None
    if packed_seq_params.qkv_format != "thd":
        raise ValueError(f"tree_metadata needs qkv_format='thd', got {packed_seq_params.qkv_format!r}")
    if config.context_parallel_size > 1:
        raise _unsupported(
            f"context parallelism (context_parallel_size={config.context_parallel_size})",
            "set context_parallel_size=1",
        )
    position_ids = metadata.tree_position_ids
    if position_ids is None:
        raise ValueError(
            "tree_metadata.tree_position_ids is None: rotary positions of a tree cannot be derived from "
            "cu_seqlens"
        )
    if position_ids.dim() != 1:
        raise ValueError(f"tree_metadata.tree_position_ids must be [T], got {list(position_ids.shape)}")
    lengths = (packed_seq_params.max_seqlen_q, packed_seq_params.max_seqlen_kv)
    if None in lengths:
        raise ValueError(
            "a packed tree needs max_seqlen_q and max_seqlen_kv (max_position + 1), which give the length of "
            f"the rotary table; got {lengths[0]} and {lengths[1]}"
        )
    if metadata.max_position is not None and metadata.max_position >= max(lengths):
        raise ValueError(
            f"tree_metadata.max_position is {metadata.max_position}, but max_seqlen_q={lengths[0]} and "
            f"max_seqlen_kv={lengths[1]} give a rotary table of {max(lengths)} rows: they must be "
            "max_position + 1"
        )
    return position_ids


def model_position_ids(
    model: Any,
    position_ids: Tensor | None,
    packed_seq_params: Any | None,
    decoder_input: Tensor | None,
    inference_context: Any | None = None,
) -> Tensor | None:
    """Position ids for the rotary embeddings of a GPTModel or HybridModel; None for upstream's own positions.

    Args:
        model: read for config, position_embedding_type, pre_process and decoder.input_tensor.
        position_ids: what the model's forward was given, [1, T] packed, [1, S] or [B, S] otherwise; used only
            where config.rotary_use_position_ids is set and there is no tree metadata. None means sequential.
        decoder_input: [S, B, H] of the first stage; under sequence parallelism a tensor parallel share of S.
        inference_context: an inference engine keeps positions of its own: with one, no ids are used.

    Raises:
        TreeUnsupportedError: tree metadata during inference; see `tree_position_ids`.
        ValueError: see `tree_position_ids`; or, with the flag, ids of the wrong shape, None on a later
            pipeline stage, or ids that differ between samples where a fused kernel takes one table for the
            batch.
    """
    config = model.config
    if model.position_embedding_type not in ("rope", "yarn"):
        return None
    tree_ids = tree_position_ids(config, packed_seq_params)
    if tree_ids is not None:
        if inference_context is not None:
            raise _unsupported("an inference context", "generate from linear sequences")
        return tree_ids
    if not config.rotary_use_position_ids or inference_context is not None:
        return None

    packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
    if position_ids is None and not model.pre_process:
        raise ValueError(
            "rotary_use_position_ids is set, but position_ids is None on a pipeline stage after the first, "
            "where sequential positions could contradict the ids of the first stage: pass the same "
            "position_ids on every stage"
        )
    if position_ids is None and not packed:
        return None
    hidden = decoder_input if decoder_input is not None else model.decoder.input_tensor
    num_rows = _full_length(config, hidden)
    if position_ids is None:
        return _sequential_in_pack(packed_seq_params, num_rows, hidden.device)
    if position_ids.dim() != 2 or position_ids.size(1) != num_rows or (packed and position_ids.size(0) != 1):
        expected = f"[1, {num_rows}]" if packed else f"[b, {num_rows}]"
        raise ValueError(
            f"rotary_use_position_ids: position_ids must be {expected}, got {list(position_ids.shape)}"
        )
    if position_ids.size(0) > 1 and (config.apply_rope_fusion or config.fused_single_qkv_rope):
        raise ValueError(
            "rotary_use_position_ids: fused rope applies one table to the whole batch, got position_ids "
            f"{list(position_ids.shape)}. Unset apply_rope_fusion and fused_single_qkv_rope, or pass [1, s]"
        )
    return position_ids


def layer_position_ids(config: Any, packed_seq_params: Any | None, hidden_states: Tensor) -> Tensor | None:
    """Position ids [T] for an attention layer that builds its own rotary embeddings; None without a tree.

    Args:
        hidden_states: input of the layer [T, 1, H]; under sequence parallelism a tensor parallel share of T.

    Raises:
        ValueError: see `tree_position_ids`; or the ids are not one per packed token.
    """
    position_ids = tree_position_ids(config, packed_seq_params)
    if position_ids is not None:
        check_rows(position_ids, _full_length(config, hidden_states))
    return position_ids


def one_sequence(position_ids_T: Tensor) -> Tensor:
    """cu_seqlens [0, T], made on the device: for a THD kernel, row i of a gathered table is then token i."""
    num_tokens = position_ids_T.size(0)
    return torch.arange(0, num_tokens + 1, num_tokens, dtype=torch.int32, device=position_ids_T.device)


def check_config(config: Any) -> None:
    """Raise ValueError where config.rotary_use_position_ids is set and cannot be honoured."""
    if config.multi_latent_attention:
        raise ValueError(
            "rotary_use_position_ids does not work with multi_latent_attention, whose layers build their own "
            "rotary embeddings and are not given position_ids; packed trees bring theirs in tree_metadata"
        )
    if config.mrope_section is not None:
        raise ValueError(
            "rotary_use_position_ids has no meaning with mrope_section: M-RoPE always takes position_ids"
        )
    if config.context_parallel_size > 1:
        raise ValueError(
            "rotary_use_position_ids does not support context parallelism, got "
            f"context_parallel_size={config.context_parallel_size}"
        )
    if config.cuda_graph_impl != "none":
        # A replay copies a layer's new inputs into those of its capture; Transformer Engine's graphs capture
        # the cached rotary table itself, which the rows of the next micro-batch would overwrite.
        raise ValueError(
            "rotary_use_position_ids does not work with CUDA graphs, got "
            f"cuda_graph_impl={config.cuda_graph_impl!r}"
        )


def _unsupported(cause: str, way_out: str) -> Exception:
    from megatron.core.transformer.tree_attention import TreeUnsupportedError

    return TreeUnsupportedError(f"tree_metadata is not supported with {cause}: {way_out}")


def _full_length(config: Any, hidden: Tensor) -> int:
    return hidden.size(0) * (config.tensor_model_parallel_size if config.sequence_parallel else 1)


def _sequential_in_pack(packed_seq_params: Any, num_tokens: int, device: torch.device) -> Tensor:
    """Positions [1, T]: 0, 1, ... in every sequence of a pack, 0 past the last one; no device sync."""
    cu_seqlens = packed_seq_params.cu_seqlens_q_padded
    if cu_seqlens is None:
        cu_seqlens = packed_seq_params.cu_seqlens_q
    cu_seqlens = cu_seqlens.to(device=device, dtype=torch.int64)
    index_T = torch.arange(num_tokens, dtype=torch.int64, device=device)
    start_T = cu_seqlens[torch.searchsorted(cu_seqlens, index_T, right=True) - 1]
    return torch.where(index_T < cu_seqlens[-1], index_T - start_T, 0)[None]
