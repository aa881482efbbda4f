"""The micro-batches of one training step: which trajectories go together, on which rank, and with what loss
scale."""

import hashlib
from dataclasses import asdict, dataclass, replace

import numpy as np
import torch.distributed as dist

from megatron.core.tree_training import partition, trie
from megatron.core.tree_training.batch import StepTotals, TreeBatch
from megatron.core.tree_training.trajectory import at_least_one, check_all

PAIR_COST = 4e-5
"""An attended pair in tokens of everything else. 4·H·D·layers / (2·parameters): 3.7e-5 for 32 layers, 4096
wide, 7 B."""


@dataclass(frozen=True)
class TokenCounts:
    """What sharing saves in a step, in tokens without padding."""

    linear: int
    """Of all trajectories, one by one."""
    trie: int
    """Of one trie over everything, were there no budget."""
    packed: int
    """Of all micro-batches."""
    padding: int
    """Added to those, dummies included."""
    lower_bound: int
    """No plan under the same budget packs fewer."""

    @property
    def repeated(self):
        """Packed more than once, because trees were split."""
        return self.packed - self.trie

    @property
    def reuse_ratio(self):
        """Linear tokens for each packed token."""
        return self.linear / self.packed if self.packed else 1.0


@dataclass(frozen=True, eq=False, repr=False)
class MicroBatchPlan:
    """A step's trajectories, dealt to data-parallel ranks. The same on every rank that gives the same
    arguments, which `check` proves."""

    trajectory_ids: list[list[list[int]]]
    """[rank][micro-batch]: increasing numbers of trajectories; none at all is a dummy."""
    tokens: TokenCounts
    costs: list[list[float]]
    """[rank][micro-batch]: packed tokens plus the cost of attended pairs, in tokens."""
    totals: StepTotals
    _checked: list
    _order: trie.PrefixOrder
    _place_of: dict
    _pad_to_multiple_of: int
    _router_counts_once: bool

    def __repr__(self):
        return (
            f"MicroBatchPlan({self.totals.trajectories} trajectories, {self.tokens.linear} tokens packed as "
            f"{self.tokens.packed}; {self.num_microbatches} micro-batches on each of "
            f"{len(self.trajectory_ids)} ranks)"
        )

    @property
    def num_microbatches(self):
        """Of every rank, dummies included."""
        return self.totals.num_microbatches

    @property
    def imbalance(self):
        """The most expensive rank against the mean, 1 at best."""
        sums = [sum(costs) for costs in self.costs]
        return max(sums) * len(sums) / sum(sums) if sum(sums) else 1.0

    def check(self, group=None):
        """Prove that all ranks planned the same step, with one small all-gather; call it on all of them.

        A rank that plans its own trajectories, instead of the same list as the others, drops part of what
        the others give it, and nothing else would notice.

        Args:
            group: all ranks that train, data, tensor and pipeline parallel. None: torch's default group; in a
                world that has other ranks too, as of rollouts, it would wait for them. It does nothing in a
                process without torch.distributed.

        Raises:
            ValueError: on every rank, with the first thing that differs: numbers and contents of tokens and
                loss masks, or the plan's options. Values, which may be rounded differently, are not compared.
        """
        if not dist.is_initialized():
            return
        mine = self._summary()
        everyone = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, mine, group=group)
        for what in mine:
            for rank, theirs in enumerate(everyone):
                if theirs[what] != everyone[0][what]:
                    raise ValueError(
                        f"{what} differ between ranks of the group: {everyone[0][what]} on rank 0, "
                        f"{theirs[what]} on rank {rank}. plan_micro_batches takes the trajectories of all "
                        "data-parallel ranks, the same list in the same order on every rank, and deals them "
                        "to the ranks itself: gather them before (torch.distributed.all_gather_object)"
                    )

    def _summary(self):
        """What must be equal on all ranks, by name; digests of what is large."""
        tokens, masks = hashlib.blake2b(digest_size=8), hashlib.blake2b(digest_size=8)
        for t in self._checked:
            tokens.update(t.tokens.size.to_bytes(8, "little") + t.tokens.tobytes())
            masks.update(t.loss_mask.numpy().tobytes())
        options = asdict(self.totals) | {
            "pad_to_multiple_of": self._pad_to_multiple_of,
            "router_counts_once": self._router_counts_once,
        }
        dealt = hashlib.blake2b(repr(self.trajectory_ids).encode(), digest_size=8)
        return {
            "numbers of trajectories": self.totals.trajectories,
            "numbers of tokens": self.tokens.linear,
            "digests of the tokens": tokens.hexdigest(),
            "digests of the loss masks": masks.hexdigest(),
            "plans": options | {"digest of trajectory_ids": dealt.hexdigest()},
        }

    def micro_batch(self, rank, number, device="cpu"):
        """One TreeBatch, which knows the totals of the step.

        Raises:
            ValueError: the plan has no such rank or micro-batch.
        """
        for name, value, count in (
            ("rank", rank, len(self.trajectory_ids)),
            ("number", number, self.num_microbatches),
        ):
            if not 0 <= value < count:
                raise ValueError(f"{name}: expected 0..{count - 1}, got {value}")
        ids = self.trajectory_ids[rank][number]
        order = self._order.subset(sorted(self._place_of[i] for i in ids))
        within = {trajectory: i for i, trajectory in enumerate(ids)}
        order = replace(order, order=np.array([within[i] for i in order.order.tolist()], np.int64))
        return TreeBatch.from_order(
            [self._checked[i] for i in ids],
            order,
            pad_to_multiple_of=self._pad_to_multiple_of,
            device=device,
            trajectory_ids=ids,
            totals=self.totals,
            router_counts_once=self._router_counts_once,
            like=self._checked[0] if self._checked else None,
        )

    def micro_batches(self, rank, device="cpu"):
        """The TreeBatches of a data-parallel rank, in the order in which it runs them, made one by one.

        An iterator, used up by one step; an interleaved pipeline takes one for each model chunk.
        """
        return (self.micro_batch(rank, i, device) for i in range(self.num_microbatches))


def plan_micro_batches(
    trajectories,
    max_tokens,
    *,
    data_parallel_size=1,
    max_trajectories=None,
    pad_to_multiple_of=1,
    micro_batch_multiple=1,
    share_prefixes=True,
    vocab_size=None,
    loss_per="token",
    router_counts_once=False,
    pair_cost=PAIR_COST,
):
    """Cut all ranks' trajectories, the same list on every rank, into micro-batches and deal those to ranks.

    Args:
        trajectories: Trajectory objects of the whole step, of all data-parallel ranks together, in the same
            order on every rank. Never a rank's own ones: `MicroBatchPlan.check` finds that.
        max_tokens: budget for a micro-batch, padding included.
        data_parallel_size: ranks to deal to; each gets equally many micro-batches and about equal work. Where
            there are too few, dummies fill up: no trajectory, padding only, exactly no gradient, but counted.
            Losses formed from `TreeBatch.unpack_linear` or `trajectory_means` need no special case for them;
            `unpack` of a dummy is an empty list, which torch.cat and torch.stack refuse.
        max_trajectories: most trajectories in a micro-batch, if there is a limit.
        pad_to_multiple_of, share_prefixes, vocab_size, loss_per, router_counts_once: as in
            TreeBatch.from_trajectories.
        micro_batch_multiple: the number of micro-batches on a rank becomes a multiple of it. Interleaved
            pipeline schedules ask for a multiple of the pipeline size, and for an iterator for each model
            chunk.
        pair_cost: cost of an attended (query, key) pair, in tokens, for the balance; see ModelCost.pair_cost.

    Micro-batches differ in length. A pipeline needs TransformerConfig.variable_seq_lengths=True, which
    upstream takes with moe_token_dispatcher_type="alltoall" alone, in dense models too; or micro-batches of
    one length: pad_to_multiple_of=max_tokens. Sequence parallelism needs pad_to_multiple_of a multiple of
    the tensor-parallel size.

    Returns:
        MicroBatchPlan. Every trajectory is in exactly one micro-batch.

    Raises:
        ValueError: naming the trajectory, when one alone exceeds the budget, or as
            TreeBatch.from_trajectories; when a number is too small.
        TypeError: a number is no integer.
    """
    for name, value in (
        ("max_tokens", max_tokens),
        ("data_parallel_size", data_parallel_size),
        ("max_trajectories", 1 if max_trajectories is None else max_trajectories),
        ("pad_to_multiple_of", pad_to_multiple_of),
        ("micro_batch_multiple", micro_batch_multiple),
    ):
        at_least_one(name, value)
    if not 0 <= pair_cost < float("inf"):
        raise ValueError(f"pair_cost must be finite and not negative, got {pair_cost}")
    budget = max_tokens // pad_to_multiple_of * pad_to_multiple_of
    if budget < 1:
        raise ValueError(
            f"max_tokens must be at least pad_to_multiple_of = {pad_to_multiple_of}, got {max_tokens}"
        )
    checked = check_all(trajectories, vocab_size)
    for i, trajectory in enumerate(checked):
        if trajectory.tokens.size > budget:
            raise ValueError(
                f"trajectory {i}: {trajectory.tokens.size} tokens, {trajectory.tokens.size - budget} more "
                f"than fit into max_tokens = {max_tokens} with padding to a multiple of {pad_to_multiple_of}"
            )
    identities = [t.identity for t in checked] if checked and checked[0].identity is not None else None
    order = trie.PrefixOrder.of([t.tokens for t in checked], identities, share_prefixes)
    sets, hands = partition.balanced(
        order, budget, max_trajectories, data_parallel_size, micro_batch_multiple, pair_cost
    )
    subsets = [order.subset(s) for s in sets]
    costs = [s.packed_tokens + pair_cost * partition.attended_pairs(s) for s in subsets]
    packed = sum(s.packed_tokens for s in subsets)
    dummies = sum(i is None for hand in hands for i in hand)
    padding = sum(-s.packed_tokens % pad_to_multiple_of for s in subsets) + dummies * pad_to_multiple_of
    return MicroBatchPlan(
        trajectory_ids=[
            [[] if i is None else sorted(subsets[i].order.tolist()) for i in hand] for hand in hands
        ],
        costs=[[0.0 if i is None else costs[i] for i in hand] for hand in hands],
        tokens=TokenCounts(
            linear=order.linear_tokens,
            trie=order.packed_tokens,
            packed=packed,
            padding=padding,
            lower_bound=partition.lower_bound(order, budget, max_trajectories),
        ),
        totals=StepTotals(
            num_microbatches=len(hands[0]),
            data_parallel_size=data_parallel_size,
            real_microbatches=len(subsets),
            loss_tokens=sum(int(t.loss_mask.sum()) for t in checked),
            trajectories=len(checked),
            loss_per=loss_per,
        ),
        _checked=checked,
        _order=order,
        _place_of={trajectory: place for place, trajectory in enumerate(order.order.tolist())},
        _pad_to_multiple_of=pad_to_multiple_of,
        _router_counts_once=router_counts_once,
    )
