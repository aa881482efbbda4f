"""Trajectories as one micro-batch: a prefix trie packed depth-first into one THD sequence, and the way back.

T packed tokens (padding included), L tokens of all trajectories one after another (the linear layout),
M packed tokens that have a predecessor, n trajectories, N nodes.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.tree_metadata import RouterStatistics, TreeMetadata
from megatron.core.tree_training import partition, trie
from megatron.core.tree_training.trajectory import at_least_one, check_all


@dataclass(frozen=True)
class StepTotals:
    """What a micro-batch must know of the whole training step, so that its loss weighs as in the linear
    layout."""

    num_microbatches: int
    """On every data-parallel rank, dummies included: upstream's schedules divide by it."""
    data_parallel_size: int
    """DistributedDataParallel divides by it."""
    real_microbatches: int
    """Of all ranks together, without dummies."""
    loss_tokens: int
    """Linear tokens whose loss mask is 1, over all ranks and micro-batches."""
    trajectories: int
    """Over all ranks and micro-batches."""
    loss_per: str = "token"
    """What the mean over the step counts: "token" or "trajectory"."""

    def __post_init__(self):
        if self.loss_per not in ("token", "trajectory"):
            raise ValueError(f"loss_per must be 'token' or 'trajectory', got {self.loss_per!r}")

    @property
    def count(self):
        """The mean's denominator."""
        return self.trajectories if self.loss_per == "trajectory" else self.loss_tokens


@dataclass(eq=False, repr=False)
class TreeBatch:
    """One micro-batch; made by `from_trajectories`.

    Every packed token t but the first of a root has a source: the packed token before it on its path, whose
    logits predict t. Where paths part, one source has several targets.
    """

    tokens: torch.Tensor
    """int64 [1, T]."""
    position_ids: torch.Tensor
    """int64 [1, T], position on the token's own path."""
    packed_seq_params: PackedSeqParams
    """qkv_format "thd", with `tree_metadata`."""
    source_T: torch.Tensor
    """int64 [T], packed index of each token's predecessor; -1 for first tokens of roots and for padding."""
    target_M: torch.Tensor
    """int64 [M], packed tokens that have a source, ordered by it."""
    target_start_T: torch.Tensor
    """int32 [T + 1]: target_M[target_start_T[s]:target_start_T[s + 1]] are the targets of source s."""
    distinct_targets: bool
    """No source has two targets of the same token; they can have where identity keys tell them apart."""
    branches_T: torch.Tensor
    """int32 [T], trajectories through each packed token; 0 for padding."""
    index_L: torch.Tensor
    """int64 [L], packed index of every token of every trajectory, trajectories in their given order."""
    lengths: list[int]
    """Tokens of each trajectory."""
    loss_mask_L: torch.Tensor
    """bool [L]."""
    values_L: dict[str, torch.Tensor]
    """The trajectories' per-token values, [L, ...] each."""
    trajectory_values: dict[str, list[Any]]
    """The trajectories' own values, one list for each name."""
    max_token: int
    """Largest token id, known on the host; -1 without trajectories."""
    packed_tokens: int
    """Tokens of the trie, without padding."""
    attended_pairs: int
    """(query, key) pairs that attention visits for them."""
    num_loss_tokens: int
    """Linear tokens whose loss mask is 1: a shared token counts once for every trajectory that trains on
    it."""
    trajectory_ids: list[int]
    """The number of each trajectory in the list that a plan was made from; 0 … n-1 without a plan."""
    totals: StepTotals
    """Of the step; of this micro-batch alone without a plan."""

    def __repr__(self):
        return (
            f"TreeBatch({self.num_trajectories} trajectories, {self.linear_tokens} tokens packed as "
            f"{self.packed_tokens}, {self.padded_size} with padding, on {self.tokens.device})"
        )

    @classmethod
    def from_trajectories(
        cls,
        trajectories,
        *,
        pad_to_multiple_of=1,
        share_prefixes=True,
        vocab_size=None,
        loss_per="token",
        router_counts_once=False,
        device="cpu",
    ):
        """Merge trajectories into one packed micro-batch.

        Args:
            trajectories: Trajectory objects, in any order; none at all gives a batch of padding only.
            pad_to_multiple_of: the packed length becomes a multiple of it. Sequence parallelism takes only
                multiples of the tensor-parallel size, kernels like 128 times that. Padding is a root of its
                own, of token 0, and trains nothing.
            share_prefixes: False packs every trajectory as a chain of its own in the given order: the linear
                layout through the same model, backend and loss.
            vocab_size: refuse token ids at or above it.
            loss_per: "token" or "trajectory", what the step's mean loss counts, see `averaged_loss`.
            router_counts_once: MoE routers count a shared token once, as it is computed. Off, they count it
                for every trajectory through it, as in the linear layout.
            device: where the batch's tensors go.

        Raises:
            ValueError: naming the trajectory, see `megatron.core.tree_training.trajectory.check`.
        """
        checked = check_all(trajectories, vocab_size)
        identities = [t.identity for t in checked] if checked and checked[0].identity is not None else None
        order = trie.PrefixOrder.of([t.tokens for t in checked], identities, share_prefixes)
        return cls.from_order(
            checked,
            order,
            pad_to_multiple_of=pad_to_multiple_of,
            device=device,
            loss_per=loss_per,
            router_counts_once=router_counts_once,
        )

    @classmethod
    def from_order(
        cls,
        checked,
        order,
        *,
        pad_to_multiple_of=1,
        device="cpu",
        trajectory_ids=None,
        totals=None,
        loss_per="token",
        router_counts_once=False,
        like=None,
    ):
        """`from_trajectories` with checks and sorting already done; `order` numbers `checked` 0 … n-1.

        like: a CheckedTrajectory whose value names, types and row shapes a batch without trajectories takes
            over.
        """
        at_least_one("pad_to_multiple_of", pad_to_multiple_of)
        packed = trie.pack(order)
        num_packed = packed.source_T.size
        # A model cannot run on nothing: a batch without trajectories is one stretch of padding.
        padded = max(-(-num_packed // pad_to_multiple_of), 1) * pad_to_multiple_of
        padding = padded - num_packed

        tokens_L = np.concatenate([t.tokens for t in checked]) if checked else np.zeros(0, np.int64)
        tokens = np.concatenate([tokens_L[packed.first_L], np.zeros(padding, np.int64)])
        positions = np.concatenate([packed.position_T, np.zeros(padding, np.int64)])
        source = np.concatenate([packed.source_T, np.full(padding, -1)])
        branches = np.concatenate([packed.branches_T, np.zeros(padding, np.int64)])
        node_lens = np.append(packed.node_lens_N, padding) if padding else packed.node_lens_N
        cu_node_lens = np.concatenate([[0], np.cumsum(node_lens)])

        has_source = np.flatnonzero(source >= 0)
        target = has_source[np.argsort(source[has_source], kind="stable")]
        per_source = np.bincount(source[has_source], minlength=padded)
        target_start = np.concatenate([[0], np.cumsum(per_source)])
        distinct = True
        if checked and checked[0].identity is not None:
            pairs = np.stack([source[target], tokens[target]])
            distinct = np.unique(pairs, axis=1).shape[1] == target.size

        def put(array, dtype):
            return torch.as_tensor(array, dtype=dtype).to(device)

        position_ids = put(positions, torch.int64)
        branches_T = put(branches, torch.int32)
        mask_L = torch.cat([t.loss_mask for t in checked]) if checked else torch.zeros(0, dtype=torch.bool)
        num_loss_tokens = int(mask_L.sum())
        totals = totals or StepTotals(1, 1, min(len(checked), 1), num_loss_tokens, len(checked), loss_per)
        router_statistics = RouterStatistics(
            weights_T=(branches_T.clamp(max=1) if router_counts_once else branches_T).float(),
            averaged_scale=totals.num_microbatches
            * totals.data_parallel_size
            / max(totals.real_microbatches, 1),
            per_token_scale=float(packed.index_L.size),
        )
        metadata = TreeMetadata(
            cu_node_lens=put(cu_node_lens, torch.int32),
            node_parent=put(packed.node_parent_N, torch.int32),
            tree_position_ids=position_ids,
            padded_size=padded,
            num_nodes=packed.node_parent_N.size,
            max_position=int(positions.max()),
            router_statistics=router_statistics,
            roots_only=bool((packed.node_parent_N < 0).all()),
        )
        like = checked[0] if checked else like
        values_L = {
            name: torch.cat([value[:0], *(t.values[name] for t in checked)]).to(device)
            for name, value in (like.values.items() if like else ())
        }
        trajectory_values = {
            name: [t.trajectory_values[name] for t in checked]
            for name in (like.trajectory_values if like else ())
        }
        return cls(
            tokens=put(tokens, torch.int64)[None],
            position_ids=position_ids[None],
            packed_seq_params=metadata.packed_seq_params(),
            source_T=put(source, torch.int64),
            target_M=put(target, torch.int64),
            target_start_T=put(target_start, torch.int32),
            distinct_targets=distinct,
            branches_T=branches_T,
            index_L=put(packed.index_L, torch.int64),
            lengths=np.diff(packed.offsets).tolist(),
            loss_mask_L=mask_L.to(device),
            values_L=values_L,
            trajectory_values=trajectory_values,
            max_token=int(tokens_L.max()) if tokens_L.size else -1,
            packed_tokens=num_packed,
            attended_pairs=partition.attended_pairs(order),
            num_loss_tokens=num_loss_tokens,
            trajectory_ids=list(range(len(checked))) if trajectory_ids is None else list(trajectory_ids),
            totals=totals,
        )

    def averaged_loss(self, loss_sum):
        """The loss that a loss function returns first, where upstream averages over micro-batches and ranks.

        Args:
            loss_sum: a tensor, this micro-batch's sum of loss terms in the linear layout, divided by nothing.
                loss_per="token": the sum over trained tokens, (terms_L * batch.loss_mask_L).sum().
                loss_per="trajectory": the sum of one term for each trajectory, as of its masked mean,
                batch.trajectory_means(terms_L).sum().

        Returns:
            loss_sum · num_microbatches · data_parallel_size / count of the step, where the count is of tokens
            whose loss mask is 1, or of trajectories: after upstream's division by the number of micro-batches
            and DistributedDataParallel's mean over ranks, the mean over the step. For a loss function that
            returns (loss, report), with calculate_per_token_loss off. Of a dummy 0, whatever loss_sum is: NaN
            is what a mean over no token gives.
        """
        totals = self.totals
        scale = totals.num_microbatches * totals.data_parallel_size / max(totals.count, 1)
        return self._harmless(loss_sum) * scale

    def summed_loss(self, loss_sum):
        """(loss, count) for a loss function that returns (loss, count, report), with calculate_per_token_loss
        on.

        finalize_model_grads divides all gradients by the counts of all micro-batches and ranks together;
        `count` is int32 on the loss's device. loss_sum is as for `averaged_loss`, of a dummy 0 too.
        """
        loss_sum = self._harmless(loss_sum)
        count = self.num_trajectories if self.totals.loss_per == "trajectory" else self.num_loss_tokens
        return loss_sum, torch.tensor(count, dtype=torch.int32, device=loss_sum.device)

    def _harmless(self, loss_sum):
        _require_tensor(loss_sum)
        if self.num_trajectories:
            return loss_sum
        # Still a function of the logits: all ranks and stages run the same backward pass.
        return loss_sum.nan_to_num(0.0, 0.0, 0.0) * 0

    def trajectory_means(self, values_L):
        """[n]: each trajectory's mean of per-token values [L] over the tokens whose loss mask is 1, or 0.

        Differentiable; [0] of a dummy.
        """
        which_L = torch.repeat_interleave(
            torch.arange(self.num_trajectories, device=values_L.device),
            torch.tensor(self.lengths, dtype=torch.int64, device=values_L.device),
            output_size=self.linear_tokens,
        )
        sums = values_L.new_zeros(self.num_trajectories)
        kept = torch.where(self.loss_mask_L, values_L, 0)
        counts = sums.index_add(0, which_L, self.loss_mask_L.to(values_L.dtype))
        return sums.index_add(0, which_L, kept) / counts.clamp(min=1)

    @property
    def tree_metadata(self):
        return self.packed_seq_params.tree_metadata

    @property
    def num_trajectories(self):
        return len(self.lengths)

    @property
    def padded_size(self):
        """Packed length T, padding included."""
        return self.tokens.shape[1]

    @property
    def linear_tokens(self):
        return self.index_L.shape[0]

    @property
    def loss_mask(self):
        """bool [length] for each trajectory."""
        return self.split(self.loss_mask_L)

    @property
    def values(self):
        """Per-token values by name: a list with one tensor [length, ...] for each trajectory."""
        return {name: self.split(value) for name, value in self.values_L.items()}

    def varlen_packed_seq_params(self):
        """Ordinary packed parameters, without tree metadata: one sequence for each trajectory, padding as the
        last.

        For a batch that shares nothing (share_prefixes=False): the plain varlen layout of any attention
        backend.

        Raises:
            ValueError: trajectories share tokens.
        """
        metadata = self.tree_metadata
        if metadata.num_nodes != self.num_trajectories or self.linear_tokens != self.packed_tokens:
            raise ValueError(
                f"{self.num_trajectories} trajectories of {self.linear_tokens} tokens are packed "
                f"as {metadata.num_nodes} nodes of {self.packed_tokens}: make the batch with "
                "share_prefixes=False"
            )
        longest = max([*self.lengths, self.padded_size - self.packed_tokens])
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=metadata.cu_node_lens,
            cu_seqlens_kv=metadata.cu_node_lens,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )

    def split(self, values_L):
        """Cut a tensor in the linear layout [L, ...] into one view [length, ...] for each trajectory."""
        if values_L.shape[0] != self.linear_tokens:
            raise ValueError(
                f"expected {self.linear_tokens} linear tokens, got shape {tuple(values_L.shape)}"
            )
        return list(values_L.split(self.lengths)) if self.lengths else []

    def unpack_linear(self, values_T):
        """Packed values [T, ...] in the linear layout, [L, ...]; a shared token's value is repeated.

        Also takes [1, T, ...]. Differentiable: gradients of repeated values add up.
        """
        T = self.padded_size
        if values_T.dim() > 1 and values_T.shape[0] == 1 and values_T.shape[1] == T:
            values_T = values_T[0]
        if values_T.dim() == 0 or values_T.shape[0] != T:
            raise ValueError(f"expected packed values with {T} rows, got shape {tuple(values_T.shape)}")
        return values_T.index_select(0, self.index_L)

    def unpack(self, values_T):
        """Packed values [T, ...] as one tensor [length, ...] for each trajectory, in the order they were
        given.

        Row j belongs to token j; row 0 of log-probabilities is 0, because a first token has none. Of a plan's
        dummy an empty list, which torch.cat refuses: `unpack_linear` is torch.cat of this, of dummies too.
        """
        return self.split(self.unpack_linear(values_T))

    def pack_values(self, values):
        """The inverse of `unpack`: per-token values of the linear layout on packed tokens, [T, ...].

        Args:
            values: [length, ...] for each trajectory, or [L, ...], on the batch's device.

        Returns:
            [T, ...]; 0 for padding.

        Raises:
            ValueError: trajectories that share a token disagree about its value: it has no packed form, use
                it in the linear layout. Naming both trajectories and the position.
        """
        values_L = values if isinstance(values, torch.Tensor) else torch.cat(list(values)) if values else None
        if values_L is None or values_L.shape[0] != self.linear_tokens:
            got = None if values_L is None else tuple(values_L.shape)
            if values_L is None and self.linear_tokens == 0:
                return torch.zeros(self.padded_size, device=self.index_L.device)
            raise ValueError(f"expected values for {self.linear_tokens} linear tokens, got {got}")
        packed_T = values_L.new_zeros(self.padded_size, *values_L.shape[1:])
        packed_T = packed_T.index_copy(0, self.index_L, values_L)
        differs_L = _differs(packed_T[self.index_L], values_L)
        if differs_L.any():
            differs_L = differs_L.flatten(1).any(1) if differs_L.dim() > 1 else differs_L
            raise ValueError(self._disagreement(int(differs_L.int().argmax()), values_L))
        return packed_T

    def _disagreement(self, linear, values_L):
        bounds = np.cumsum([0, *self.lengths])
        places = (self.index_L == self.index_L[linear]).nonzero()[:, 0].tolist()
        other = next(p for p in places if _differs(values_L[p], values_L[linear]).any())
        one, two = sorted((linear, other))
        first, second = (int(np.searchsorted(bounds, p, side="right")) - 1 for p in (one, two))
        return (
            f"trajectories {first} and {second} share the token at position {one - bounds[first]}, but their "
            f"values there are {values_L[one].tolist()} and {values_L[two].tolist()}"
        )

    def to(self, device, non_blocking=False):
        """The same batch on another device."""
        metadata = self.tree_metadata.to(device, non_blocking)
        return self._moved(metadata, lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self):
        """The same batch in pinned memory, from where `to` copies without blocking.

        A torch DataLoader with batch_size=None and pin_memory=True calls it.
        """
        metadata = self.tree_metadata
        statistics = metadata.router_statistics
        metadata = replace(
            metadata,
            cu_node_lens=metadata.cu_node_lens.pin_memory(),
            node_parent=metadata.node_parent.pin_memory(),
            tree_position_ids=metadata.tree_position_ids.pin_memory(),
            router_statistics=statistics and statistics._replace(weights_T=statistics.weights_T.pin_memory()),
        )
        return self._moved(metadata, torch.Tensor.pin_memory)

    def _moved(self, metadata, move_tensor):
        def move(value):
            if isinstance(value, torch.Tensor):
                return move_tensor(value)
            return {name: move(v) for name, v in value.items()} if isinstance(value, dict) else value

        params = metadata.packed_seq_params()
        keep = {"packed_seq_params": params, "trajectory_values": self.trajectory_values}
        return type(self)(
            **{f.name: keep[f.name] if f.name in keep else move(getattr(self, f.name)) for f in fields(self)}
        )


def _differs(a, b):
    """Elementwise; NaN equals NaN."""
    return (a != b) & ~((a != a) & (b != b))


def _require_tensor(loss_sum):
    if not isinstance(loss_sum, torch.Tensor):
        raise TypeError(
            f"loss_sum: expected a tensor that depends on the logits, got {type(loss_sum).__name__}. A "
            "plan's dummy micro-batch has no trajectories; the sum of an empty list is no tensor: form the "
            "loss from unpack_linear, values_L and loss_mask_L, or trajectory_means"
        )
    if loss_sum.numel() != 1:
        raise ValueError(f"loss_sum: expected one number, a sum, got shape {tuple(loss_sum.shape)}")
