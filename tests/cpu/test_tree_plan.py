"""Micro-batches under a budget: nothing lost, close to the optimum, evenly dealt."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import shapes
from megatron.core.tree_training import StepTotals, Trajectory, partition, plan_micro_batches, trie


def trajectories(sequences):
    return [
        Trajectory(s, [0] + [1] * (len(s) - 1), {"n": np.full(len(s), i)}) for i, s in enumerate(sequences)
    ]


def distinct_prefixes(sequences):
    return len({tuple(s[: j + 1]) for s in sequences for j in range(len(s))})


def set_partitions(items):
    """All ways to cut a list into non-empty sets."""
    if not items:
        yield []
        return
    head, *tail = items
    for rest in set_partitions(tail):
        yield [[head], *rest]
        for i in range(len(rest)):
            yield [*rest[:i], [head, *rest[i]], *rest[i + 1 :]]


def optimum(sequences, budget, limit):
    best = None
    for sets in set_partitions(list(range(len(sequences)))):
        sizes = [distinct_prefixes([sequences[i] for i in s]) for s in sets]
        if max(sizes) <= budget and max(map(len, sets)) <= limit:
            best = min(best or sum(sizes), sum(sizes))
    return best


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=6),
    st.integers(7, 16),
    st.sampled_from([None, 2]),
    st.sampled_from([(1, 1), (2, 1), (3, 2)]),
    st.sampled_from([1, 3]),
)
def test_every_plan_is_sound(sequences, budget, limit, ranks, multiple):
    data_parallel_size, micro_batch_multiple = ranks
    budget = max(budget, 9) if multiple > 1 else budget
    plan = plan_micro_batches(
        trajectories(sequences),
        budget,
        max_trajectories=limit,
        data_parallel_size=data_parallel_size,
        micro_batch_multiple=micro_batch_multiple,
        pad_to_multiple_of=multiple,
    )
    assert len(plan.trajectory_ids) == data_parallel_size
    assert plan.num_microbatches % micro_batch_multiple == 0
    seen, packed, padding = [], 0, 0
    for rank, micro_batches in enumerate(plan.trajectory_ids):
        assert len(micro_batches) == plan.num_microbatches
        for ids, batch in zip(micro_batches, plan.micro_batches(rank), strict=True):
            seen += ids
            packed += batch.packed_tokens
            padding += batch.padded_size - batch.packed_tokens
            assert ids == sorted(ids) == batch.trajectory_ids and len(ids) <= (limit or 99)
            assert batch.padded_size <= budget and batch.padded_size % multiple == 0
            assert batch.packed_tokens == distinct_prefixes([sequences[i] for i in ids])
            assert [t.tolist() for t in batch.unpack(batch.tokens)] == [list(sequences[i]) for i in ids]
            assert [set(v.tolist()) for v in batch.values["n"]] == [{i} for i in ids]
            assert batch.totals == plan.totals
            batch.tree_metadata.validate()
    assert sorted(seen) == list(range(len(sequences)))
    assert plan.totals.loss_tokens == sum(len(s) - 1 for s in sequences)
    assert plan.totals.trajectories == len(sequences)
    counts = plan.tokens
    assert counts.linear == sum(map(len, sequences)) and counts.trie == distinct_prefixes(sequences)
    assert counts.packed == packed and counts.padding == padding and counts.repeated == packed - counts.trie
    assert counts.reuse_ratio == counts.linear / packed
    best = optimum(sequences, budget // multiple * multiple, limit or 99)
    assert counts.trie <= counts.lower_bound <= best <= packed


def test_close_to_the_optimum_on_small_tries():
    rng = np.random.default_rng(0)
    ours = best = bound = 0
    for _ in range(60):
        sequences = [rng.integers(0, 3, rng.integers(3, 9)).tolist() for _ in range(6)]
        budget = int(rng.integers(9, 20))
        order = trie.PrefixOrder.of([np.array(s) for s in sequences])
        sets = partition.fewest_tokens(order, budget)
        ours += sum(order.subset(s).packed_tokens for s in sets)
        best += optimum(sequences, budget, 99)
        bound += partition.lower_bound(order, budget)
    assert best <= ours <= 1.01 * best and 0.9 * best <= bound <= best


@pytest.mark.parametrize("room", [1.0, 1.3, 2.0, 4.0])
@pytest.mark.parametrize("name", shapes.SHAPES)
def test_within_five_percent_on_the_six_shapes(name, room):
    paths = shapes.token_paths(shapes.SHAPES[name])
    order = trie.PrefixOrder.of(paths)
    assert order.packed_tokens == shapes.stats(shapes.SHAPES[name])["packed tokens"]
    budget = int(room * max(map(len, paths)))
    sets = partition.fewest_tokens(order, budget)
    sizes = [order.subset(s).packed_tokens for s in sets]
    assert max(sizes) <= budget and sorted(itertools.chain(*sets)) == list(range(len(paths)))
    bound = partition.lower_bound(order, budget)
    # Leaves of 1,024 tokens do not divide: two fit beside the prompt, so 8 micro-batches of it are the
    # optimum. The caterpillar's 58,880 is the best known.
    best_known = {("grpo 4k+16x1k", 1.3): 49152, ("caterpillar", 1.0): 58880}.get((name, room), bound)
    assert bound <= best_known and sum(sizes) <= 1.05 * best_known


def test_splitting_a_subtree_that_would_fit():
    # Three subtrees of 4 under a root of 6, room for 6 more: bottom-up keeps each whole and repeats the root
    # three times; cutting one subtree in two repeats it twice and one token more.
    root = [9, 9, 9, 9, 9, 9]
    sequences = [[*root, a, b] for a in range(3) for b in range(3)]
    order = trie.PrefixOrder.of([np.array(s) for s in sequences])
    assert sum(order.subset(s).packed_tokens for s in partition.bottom_up(order, 13, 99)) == 30
    assert sum(order.subset(s).packed_tokens for s in partition.fewest_tokens(order, 13)) == 25


def groups(seed, count, size, prompt, response):
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(count):
        head = rng.integers(0, 1000, rng.integers(prompt // 2, prompt * 2))
        for _ in range(size):
            out.append(np.concatenate([head, rng.integers(0, 1000, 1 + int(rng.exponential(response)))]))
    return out


def test_data_parallel_ranks_get_even_work():
    sequences = [s[:900] for s in groups(1, 16, 8, 100, 150)]
    plan = plan_micro_batches(trajectories(sequences), 1024, data_parallel_size=4, micro_batch_multiple=2)
    assert plan.imbalance < 1.05 and plan.num_microbatches % 2 == 0
    for step in zip(*plan.costs, strict=True):
        assert max(step) - min(step) < 0.5 * max(max(c) for c in plan.costs)
    assert plan.tokens.packed <= 1.1 * plan.tokens.lower_bound
    # One tree that fits a single micro-batch is still spread over the ranks: three idle ranks would be
    # slower.
    one = plan_micro_batches(trajectories(groups(2, 1, 16, 20, 300)), 1 << 20, data_parallel_size=4)
    assert one.num_microbatches == 1 and all(ids[0] for ids in one.trajectory_ids) and one.imbalance < 1.4


def test_dummies_fill_up():
    plan = plan_micro_batches(
        trajectories([[1, 2, 3]]), 8, data_parallel_size=3, pad_to_multiple_of=4, micro_batch_multiple=2
    )
    sizes = [[len(ids) for ids in rank] for rank in plan.trajectory_ids]
    assert sorted(map(tuple, sizes)) == [(0, 0), (0, 0), (1, 0)]
    dummy = plan.micro_batch(1, 1)
    assert (
        dummy.tokens.tolist() == [[0] * 4] and dummy.num_loss_tokens == 0 and dummy.unpack(dummy.tokens) == []
    )
    assert dummy.values_L["n"].shape == (0,) and dummy.totals == plan.totals
    assert plan.totals.num_microbatches == 2 and plan.tokens.padding == 1 + 5 * 4
    empty = plan_micro_batches([], 8, data_parallel_size=2)
    assert empty.trajectory_ids == [[[]], [[]]] and empty.tokens.reuse_ratio == 1 and empty.imbalance == 1


def test_losses_of_dummies_are_zero():
    """Whatever a mean makes of no token; and it still hangs on the logits."""
    two = [Trajectory([1, 2, 3], [0, 1, 1], {"a": [0.0, 1.0, 2.0]}), Trajectory([4], [0], {"a": [0.5]})]
    plan = plan_micro_batches(two, 8, data_parallel_size=3, loss_per="trajectory")
    (dummy,) = (plan.micro_batch(rank, 0) for rank in range(3) if not plan.trajectory_ids[rank][0])
    for reduce in (
        lambda v: v.mean(),
        lambda v: (v * dummy.loss_mask_L).sum() / dummy.loss_mask_L.sum(),
        lambda v: dummy.trajectory_means(v).sum(),
        lambda v: v.sum() + float("inf"),
        lambda v: v.sum() + 7,
    ):
        values = torch.ones(dummy.padded_size, requires_grad=True)
        loss = dummy.averaged_loss(reduce(dummy.unpack_linear(values)))
        assert loss.item() == 0
        loss.backward()
        assert values.grad.tolist() == [0] * dummy.padded_size
        assert [x.item() for x in dummy.summed_loss(reduce(dummy.unpack_linear(values)))] == [0, 0]


def test_trajectory_means():
    masks = [[0, 1, 0, 1], [0, 0], [0, 1, 1]]
    sequences = [[1, 2, 3, 4], [1, 2], [1, 2, 7]]
    batch = plan_micro_batches([Trajectory(s, m) for s, m in zip(sequences, masks, strict=True)], 16)
    batch = batch.micro_batch(0, 0)
    values = torch.tensor([9.0, 1, 9, 4, 9, 9, 9, 3, 8], requires_grad=True)
    poisoned = values.clone()
    poisoned[4] = float("nan")  # of a token that is not trained
    means = batch.trajectory_means(poisoned)
    assert means.tolist() == [2.5, 0, 5.5]
    (means * torch.tensor([2.0, 3, 4])).sum().backward()
    assert values.grad.tolist() == [0, 1, 0, 1, 0, 0, 0, 2, 2]


def test_what_is_printed_is_short():
    plan = plan_micro_batches(trajectories([list(range(500)), list(range(400))]), 512, data_parallel_size=2)
    assert repr(plan) == (
        "MicroBatchPlan(2 trajectories, 900 tokens packed as 500; 1 micro-batches on each of 2 ranks)"
    )
    batch = next(b for b in (plan.micro_batch(0, 0), plan.micro_batch(1, 0)) if b.num_trajectories)
    assert repr(batch) == "TreeBatch(2 trajectories, 900 tokens packed as 500, 500 with padding, on cpu)"
    assert repr(trajectories([[1, 2]])[0]) == "Trajectory(2 tokens, with n)"


def test_linear_layout_through_the_same_plan():
    sequences = groups(3, 4, 8, 10, 20)
    plan = plan_micro_batches(trajectories(sequences), 200, share_prefixes=False)
    assert plan.tokens.packed == plan.tokens.linear == plan.tokens.lower_bound
    batch = next(plan.micro_batches(0))
    assert (batch.tree_metadata.node_parent == -1).all() and batch.num_trajectories > 1
    assert batch.packed_tokens == batch.linear_tokens <= 200


def test_ten_thousand_short_trajectories():
    sequences = groups(4, 1250, 8, 8, 12)
    plan = plan_micro_batches(trajectories(sequences), 4096)
    assert plan.tokens.packed <= 1.01 * plan.tokens.lower_bound


@pytest.mark.parametrize("convert", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_a_plan_keeps_what_it_was_given(convert):
    tokens, values = convert([1, 2, 3]), convert([0.0, 1.0, 2.0])
    given = [Trajectory(tokens, [0, 1, 1], {"a": values}), Trajectory([1, 2, 4], [0, 1, 1], {"a": values})]
    plan = plan_micro_batches(given, 8)
    tokens += 5  # a rollout buffer that is filled anew
    values += 5
    batch = plan.micro_batch(0, 0)
    assert sorted(batch.tokens[0].tolist()) == [1, 2, 3, 4]
    assert batch.values_L["a"].tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("loss_per, count", [("token", 4), ("trajectory", 10)])
def test_loss_scales(loss_per, count):
    two = trajectories([[1, 2, 3], [1, 2]])
    batch = plan_micro_batches(two, 8, data_parallel_size=2, loss_per=loss_per).micro_batch(0, 0)
    assert batch.totals == StepTotals(1, 2, 1, 3, 2, loss_per)
    batch.totals = StepTotals(5, 2, 1, 4, 10, loss_per)
    loss = torch.tensor(3.0)
    assert batch.averaged_loss(loss).item() == pytest.approx(3 * 5 * 2 / count)
    summed, own = batch.summed_loss(loss)
    assert summed.item() == 3 and own.dtype == torch.int32
    assert own.item() == (batch.num_loss_tokens if loss_per == "token" else batch.num_trajectories)
    for scale in (batch.averaged_loss, batch.summed_loss):  # what sum() makes of a dummy's empty list
        with pytest.raises(TypeError, match=r"got int\. A plan's dummy .* loss from unpack_linear"):
            scale(sum([]))
        with pytest.raises(ValueError, match=r"loss_sum: expected one number, a sum, got shape \(3,\)"):
            scale(torch.ones(3))


def test_refusals():
    three = trajectories([[1, 2], [1, 2, 3, 4, 5, 6, 7], [4]])
    with pytest.raises(
        ValueError, match=r"^trajectory 1: 7 tokens, 3 more than fit into max_tokens = 7 with"
    ):
        plan_micro_batches(three, 7, pad_to_multiple_of=4)
    with pytest.raises(ValueError, match=r"^trajectory 1: 7 tokens, 2 more than fit into max_tokens = 5"):
        plan_micro_batches(three, 5)
    with pytest.raises(ValueError, match="max_tokens must be at least pad_to_multiple_of = 4, got 3"):
        plan_micro_batches(three, 3, pad_to_multiple_of=4)
    for name in ("data_parallel_size", "max_trajectories", "pad_to_multiple_of", "micro_batch_multiple"):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            plan_micro_batches(three, 8, **{name: 0})
        with pytest.raises(TypeError, match=f"{name} must be an integer, got 1.5"):
            plan_micro_batches(three, 8, **{name: 1.5})
    with pytest.raises(TypeError, match=r"max_tokens must be an integer, got 16\.5"):
        plan_micro_batches(three, 16.5)
    for wrong in (-1e-9, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"pair_cost must be finite and not negative, got {wrong}"):
            plan_micro_batches(three, 8, pair_cost=wrong)
    plan = plan_micro_batches(three, 8, data_parallel_size=2)
    for rank, number, message in (
        (-1, 0, r"^rank: expected 0\.\.1, got -1"),
        (2, 0, r"^rank: expected 0\.\.1, got 2"),
        (0, -1, rf"^number: expected 0\.\.{plan.num_microbatches - 1}, got -1"),
        (0, plan.num_microbatches, "^number: expected 0"),
    ):
        with pytest.raises(ValueError, match=message):
            plan.micro_batch(rank, number)
    with pytest.raises(ValueError, match="loss_per must be 'token' or 'trajectory', got 'sequence'"):
        plan_micro_batches(three, 8, loss_per="sequence")
