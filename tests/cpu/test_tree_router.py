"""Router statistics of a tree against upstream's router on the concatenated linear layout; upstream's own
failures."""

import copy
import dataclasses
import pickle
from types import SimpleNamespace

import pytest
import torch

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.tree_router import router_weights
from megatron.core.transformer.tree_attention import TreeUnsupportedError
from megatron.core.transformer.tree_metadata import TreeMetadata
from megatron.core.tree_training import StepTotals, Trajectory, TreeBatch, replay_experts
from tests.dist import small_gpt

HIDDEN = 32
PROMPT = [5, 1, 2, 6]
SEQUENCES = [[*PROMPT, 7, 8], [*PROMPT, 9, 3, 3], [*PROMPT, 9, 4], [11, 2], [*PROMPT, 7, 8]]


def batch_of(totals=None, **options):
    made = TreeBatch.from_trajectories(
        [Trajectory(s, [0] + [1] * (len(s) - 1)) for s in SEQUENCES], pad_to_multiple_of=8, **options
    )
    if totals:
        scale = totals.num_microbatches * totals.data_parallel_size / totals.real_microbatches
        made.tree_metadata.router_statistics = made.tree_metadata.router_statistics._replace(
            averaged_scale=scale
        )
    return made


def router_of(**overrides):
    config = small_gpt.config(moe=True, moe_router_dtype="fp32", **overrides)
    router = TopKRouter(config, ProcessGroupCollection.use_mpu_process_groups())
    router.set_layer_number(1)
    with torch.no_grad():
        router.weight.copy_(torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(1)))
    return router.train()


def layer_of(router, **attributes):
    mlp = SimpleNamespace(router=router)
    return SimpleNamespace(
        config=router.config, is_moe_layer=True, pg_collection=None, mlp=mlp, **attributes
    )


def tree_route(router, batch, hidden_T):
    weights = router_weights(layer_of(router), None, batch.packed_seq_params)
    return router(hidden_T[:, None], weights.transpose(0, 1))


def statistics(router):
    names = ("local_tokens_per_expert", "global_tokens_per_expert", "ga_steps")
    return {n: getattr(router, n).clone() for n in names if getattr(router, n) is not None}


def run(overrides, tree=True):
    """Gradients of the router and of the hidden states, and the counts, after two micro-batches."""
    router = router_of(**overrides)
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(0.7))
    grads = []
    for seed in (2, 3):
        batch = batch_of(StepTotals(1, 1, 1, sum(map(len, SEQUENCES)), len(SEQUENCES)))
        g = torch.Generator().manual_seed(seed)
        hidden_T = torch.randn(batch.padded_size, HIDDEN, generator=g).requires_grad_()
        c_LE = torch.randn(batch.linear_tokens, 4, generator=g)
        if tree:
            probs, routing_map = tree_route(router, batch, hidden_T)
            probs_LE, map_LE = batch.unpack_linear(probs), batch.unpack_linear(routing_map)
        else:
            probs_LE, map_LE = router(batch.unpack_linear(hidden_T)[:, None])
        assert (map_LE.sum(1) == 2).all()
        (probs_LE * c_LE).sum().backward()
        grads.append(hidden_T.grad)
    return router.weight.grad, torch.stack(grads), statistics(router)


CASES = {
    "aux": dict(moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.3),
    "seq": dict(moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=0.3),
    "global": dict(moe_router_load_balancing_type="global_aux_loss", moe_aux_loss_coeff=0.3),
    "several": dict(
        moe_router_load_balancing_type=["aux_loss", "global_aux_loss"], moe_aux_loss_coeff=[0.2, 0.3]
    ),
    "z": dict(moe_router_load_balancing_type="none", moe_z_loss_coeff=0.2),
    "bias": dict(
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=0.3,
        moe_router_enable_expert_bias=True,
        moe_router_score_function="sigmoid",
        moe_z_loss_coeff=0.1,
    ),
    "groups": dict(
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=0.3,
        moe_router_num_groups=2,
        moe_router_group_topk=1,
        moe_router_pre_softmax=True,
        moe_router_topk_scaling_factor=1.5,
    ),
}


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_equals_upstream_on_the_linear_micro_batch(single, case, per_token):
    overrides = dict(CASES[case], calculate_per_token_loss=per_token)
    weight, hidden, counts = run(overrides)
    want_weight, want_hidden, want_counts = run(overrides, tree=False)
    off = dict(overrides, moe_router_load_balancing_type="none", moe_z_loss_coeff=None)
    without, _, _ = run(off, tree=False)
    assert (want_weight - without).abs().max() > 1e-3  # the losses matter here
    torch.testing.assert_close(weight, want_weight, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(hidden, want_hidden, rtol=2e-5, atol=2e-5)
    assert counts.keys() == want_counts.keys()
    for name, value in counts.items():
        assert torch.equal(value, want_counts[name]), name


def test_shared_tokens_once_if_asked(single):
    overrides = dict(CASES["bias"])
    router = router_of(**overrides)
    batch = batch_of(router_counts_once=True)
    hidden = torch.randn(batch.padded_size, HIDDEN, generator=torch.Generator().manual_seed(2))
    _, routing_map = tree_route(router, batch, hidden)
    real = routing_map[: batch.packed_tokens].sum(0)
    assert torch.equal(router.local_tokens_per_expert, real.float())
    branches = (routing_map * batch.branches_T[:, None]).sum(0)
    assert not torch.equal(branches, real)
    # Metadata that no TreeBatch made counts the same way.
    bare = TreeMetadata.from_nodes(
        batch.tree_metadata.node_parent.tolist(),
        batch.tree_metadata.cu_node_lens.diff()[:-1].tolist(),
        padded_size=batch.padded_size,
    )
    weights = router_weights(layer_of(router), None, bare.packed_seq_params())
    want = router_weights(layer_of(router), None, batch.packed_seq_params)
    assert torch.equal(weights[..., 0], want[..., 0]) and torch.equal(weights[..., 2], want[..., 2])


@pytest.mark.parametrize("per_token", [False, True])
def test_a_dummy_counts_for_nothing(single, per_token):
    overrides = dict(
        moe_router_load_balancing_type=["aux_loss", "seq_aux_loss", "global_aux_loss"],
        moe_aux_loss_coeff=[0.2, 0.3, 0.4],
        moe_z_loss_coeff=0.1,
        calculate_per_token_loss=per_token,
        moe_router_enable_expert_bias=True,
        moe_router_score_function="sigmoid",
    )
    router = router_of(**overrides)
    batch = TreeBatch.from_trajectories([], pad_to_multiple_of=8)
    hidden = torch.randn(8, HIDDEN).requires_grad_()
    probs, _ = tree_route(router, batch, hidden)
    (0 * probs.sum()).backward()
    assert (router.weight.grad == 0).all() and (hidden.grad == 0).all()
    assert all((value == 0).all() for value in statistics(router).values())


def test_dummies_do_not_dilute(single):
    """Two of four micro-batches are real: each auxiliary loss weighs a half of the step, not a quarter. Per
    token the router's tokens are its weight, whatever the step has."""
    totals = StepTotals(2, 2, 2, 40, 10)
    for per_token, want in ((False, 2.0), (True, sum(map(len, SEQUENCES)))):
        router = router_of(**CASES["aux"], calculate_per_token_loss=per_token)
        weights = router_weights(layer_of(router), None, batch_of(totals=totals).packed_seq_params)
        assert (weights[..., 1] == want).all()


def test_weights_of_a_tree():
    from tests.dist.world import parallel

    with parallel():
        router = router_of(**CASES["aux"])
        batch = batch_of()
        weights = router_weights(layer_of(router), None, batch.packed_seq_params)
        assert weights.shape == (1, batch.padded_size, 3)
        assert (
            weights[0, :, 0].tolist() == batch.branches_T.tolist()
            and (weights[0, :, 2] == batch.linear_tokens).all()
        )
        mask = torch.ones(1, 3)
        assert router_weights(layer_of(router), mask, None) is mask
        assert router_weights(SimpleNamespace(is_moe_layer=False), None, batch.packed_seq_params) is None
        moved = batch.to("meta")
        assert router_weights(layer_of(router), None, moved.packed_seq_params).device.type == "meta"


CARRIED = {
    "moved": lambda batch: batch.to("meta"),
    "pickled": lambda batch: pickle.loads(pickle.dumps(batch)),
    "deep-copied": copy.deepcopy,
    "metadata pickled": lambda batch: with_metadata(batch, lambda m: pickle.loads(pickle.dumps(m))),
    "metadata copied": lambda batch: with_metadata(batch, copy.copy),
    "metadata replaced": lambda batch: with_metadata(batch, dataclasses.replace),
    "metadata moved": lambda batch: with_metadata(batch, lambda m: m.to("meta")),
}


def with_metadata(batch, change):
    return dataclasses.replace(
        batch, packed_seq_params=change(batch.tree_metadata).packed_seq_params()
    )


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("way", CARRIED)
def test_weights_go_wherever_the_tree_goes(single, way, per_token):
    layer = layer_of(router_of(**CASES["aux"], calculate_per_token_loss=per_token))
    batch = batch_of(totals=StepTotals(2, 2, 2, 40, 10))
    want = router_weights(layer, None, batch.packed_seq_params)
    carried = CARRIED[way](batch)
    got = router_weights(layer, None, carried.packed_seq_params)
    assert carried.tree_metadata is not batch.tree_metadata and got.shape == want.shape
    assert carried.tree_metadata.router_statistics[1:] == batch.tree_metadata.router_statistics[1:]
    if got.device.type != "meta":
        assert torch.equal(got, want) and want[..., 0].max() > 1


# Upstream's failures with an ordinary padding mask.
@pytest.mark.parametrize("tokens", [12, 4], ids=["tokens differ from experts", "tokens equal experts"])
def test_expert_bias_leaves_padding_out(single, tokens):
    router = router_of(moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid")
    hidden = torch.randn(tokens, 1, HIDDEN, generator=torch.Generator().manual_seed(tokens))
    mask = torch.zeros(tokens, 1, dtype=torch.bool)
    mask[1::3] = True
    _, routing_map = router(hidden, mask)
    want = routing_map[~mask[:, 0]].sum(0).float()
    assert torch.equal(router.local_tokens_per_expert, want)
    assert not torch.equal(want, routing_map.sum(0).float())


@pytest.mark.parametrize("kind", ["aux_loss", "seq_aux_loss", "global_aux_loss"])
def test_all_padding_is_not_a_number_no_more(single, kind):
    router = router_of(moe_router_load_balancing_type=kind, moe_aux_loss_coeff=0.3)
    hidden = torch.randn(6, 1, HIDDEN).requires_grad_()
    probs, _ = router(hidden, torch.ones(6, 1, dtype=torch.bool))
    (0 * probs.sum()).backward()
    assert (router.weight.grad == 0).all() and (hidden.grad == 0).all()


def test_refusals(single):
    batch = batch_of()

    def refused(match, mask=None, attributes=None, **overrides):
        layer = layer_of(router_of(), **(attributes or {}))
        for name, value in overrides.items():
            setattr(layer.config, name, value)
        with pytest.raises(TreeUnsupportedError, match=match):
            router_weights(layer, mask, batch.packed_seq_params)

    refused("with a padding_mask: leave it out", mask=torch.zeros(1, batch.padded_size))
    refused("with moe_router_load_balancing_type='sinkhorn'", moe_router_load_balancing_type="sinkhorn")
    refused("type='quantile_balancing'", moe_router_load_balancing_type="quantile_balancing")
    refused("with moe_expert_capacity_factor: set it to None", moe_expert_capacity_factor=1.0)
    refused("with mlp_chunks_for_training > 1 and experts", mlp_chunks_for_training=2)
    refused("with CUDA graphs that capture the router", attributes=dict(use_partial_cudagraphs=True))


def test_replayed_experts_reach_their_tokens(single):
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    RouterReplay.clear_global_router_replay_instances()
    router = router_of(moe_enable_routing_replay=True)
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2), router])
    g = torch.Generator().manual_seed(4)
    recorded = [torch.stack([torch.randperm(4, generator=g)[:2] for _ in s])[:, None] for s in SEQUENCES]
    recorded[1][:2] = recorded[0][:2]  # the first two prompt tokens were routed alike, the third was not
    trajectories = [
        Trajectory(s, [0] + [1] * (len(s) - 1), {"experts": e}, identity=e)
        for s, e in zip(SEQUENCES, recorded, strict=True)
    ]
    batch = TreeBatch.from_trajectories(trajectories, pad_to_multiple_of=32)
    assert batch.padded_size > batch.packed_tokens
    replay_experts(model, batch, batch.values["experts"])
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    _, routing_map = tree_route(router, batch, torch.randn(batch.padded_size, HIDDEN))
    for got, want in zip(batch.unpack(routing_map), recorded, strict=True):
        assert torch.equal(got, torch.zeros(len(want), 4, dtype=torch.bool).scatter(1, want[:, 0], True))
    assert (routing_map.sum(1) == 2).all()  # padding too
    shared = TreeBatch.from_trajectories([Trajectory(s, [0] * len(s)) for s in SEQUENCES])
    assert batch.packed_tokens > shared.packed_tokens
    with pytest.raises(ValueError, match=r"share the token at position"):
        replay_experts(model, shared, recorded)
    with pytest.raises(ValueError, match=r"experts must be integers \[.*got torch.float32"):
        replay_experts(model, batch, torch.zeros(batch.padded_size, 1, 2))
    with pytest.raises(
        ValueError, match=r"layer 1 needs experts\[:, 0\] with 2 experts, got shape \(.*, 1, 3\)"
    ):
        replay_experts(model, batch, torch.zeros(batch.padded_size, 1, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="no router replays: set moe_enable_routing_replay"):
        replay_experts(model[0], batch, batch.values["experts"])

    # NumPy, also of types that torch hardly knows; and a whole pack.
    targets = router.router_replay.target_topk_idx
    for convert in (lambda e: e.numpy().astype("uint16"), lambda e: e.numpy().astype("int8")):
        replay_experts(model, batch, [convert(e) for e in recorded])
        assert torch.equal(router.router_replay.target_topk_idx, targets)
    replay_experts(model, batch, batch.pack_values(recorded).numpy())
    assert torch.equal(router.router_replay.target_topk_idx, targets)

    # Experts that the router does not have, or has once.
    for bad in ([0, 4], [-1, 2], [3, 3]):
        wrong = [e.clone() for e in recorded]
        wrong[2][5, 0] = torch.tensor(bad)
        message = rf"trajectory 2: the token at position 5 has experts \[{bad[0]}, {bad[1]}\] in layer 1, "
        with pytest.raises(ValueError, match=message + r"expected 2 different ones of 0\.\.3; were they rec"):
            replay_experts(model, batch, wrong)
    assert torch.equal(router.router_replay.target_topk_idx, targets)

    # The experts of the batch before, though it is as long; what others set is theirs to get right.
    later = TreeBatch.from_trajectories(trajectories, pad_to_multiple_of=32)
    hidden = torch.randn(later.padded_size, HIDDEN)
    with pytest.raises(ValueError, match="layer 1 is to replay recorded experts, and has those of another"):
        tree_route(router, later, hidden)
    router.router_replay.set_target_indices(targets.clone())
    tree_route(router, later, hidden)
    RouterReplay.clear_global_indices()
    with pytest.raises(ValueError, match=r"and has none: call replay_experts\(model, batch, experts\)"):
        tree_route(router, later, hidden)
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    tree_route(router, later, hidden)
    RouterReplay.clear_global_router_replay_instances()
