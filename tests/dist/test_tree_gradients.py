"""A trainer's step over trees: loss and every gradient equal those of its trajectories one by one, in every
layout.

The linear side is always one process, one trajectory a micro-batch, each a chain through the same backend,
and for dense models also the plain unpacked layout. fp64; MoE computes its router in fp32.
"""

import pytest

from tests.dist.tree_trainer import (
    BREAKS,
    CORE,
    FULL,
    ONE_BY_ONE,
    difference,
    difference_by_rank,
    replay,
    step,
)

# The fields that GPTModel reads, but that TransformerConfig does not have.
YARN = dict(
    yarn_rotary_scaling_factor=4.0, yarn_original_max_position_embeddings=8, yarn_beta_fast=32.0,
    yarn_beta_slow=1.0, yarn_mscale=1.0, yarn_mscale_all_dim=0.0, yarn_correction_range_round_to_int=True,
)  # fmt: skip
MODELS = {
    "gqa": dict(model={}),
    "tied": dict(model={}, options=dict(tied=True)),
    "partial-rope": dict(model={}, options=dict(rotary_percent=0.5)),
    "yarn": dict(model={}, options=dict(position_embedding_type="yarn"), attributes=YARN),
    "mla-yarn": dict(model=dict(mla=True, rope_type="yarn")),
    "moe": dict(model=dict(moe=True)),
}
TOLERANCE = {name: 2e-5 if name == "moe" else 1e-10 for name in MODELS}
_references = {}


def reference(world, name, loss, plain=False):
    """One by one, one process; computed once."""
    key = name, loss, plain
    if key not in _references:
        _references[key] = world(1, step, {}, loss=loss, plain=plain, **ONE_BY_ONE, **MODELS[name])
    return _references[key]


def check(world, name, loss, size=1, groups=None, model=None, **plan):
    case = {**MODELS[name], "model": {**MODELS[name]["model"], **(model or {})}}
    ranks = world(size, step, groups or {}, loss=loss, **case, **plan)
    error, where = difference(ranks, reference(world, name, loss))
    # Upstream divides by the number of tokens through a fp32 reciprocal.
    assert error < max(TOLERANCE[name], 1e-7 if plan.get("per_token_loss") else 0), where
    return ranks


@pytest.mark.parametrize("loss", ["nll", "ppo", "gspo"])
@pytest.mark.parametrize("name", MODELS)
def test_one_process(world, name, loss):
    check(world, name, loss)
    if loss == "ppo":
        check(world, name, loss, per_token_loss=True)


@pytest.mark.parametrize("loss", ["nll", "ppo", "gspo"])
def test_plain_unpacked_layout(world, loss):
    plain = reference(world, "gqa", loss, plain=True)
    error, where = difference(world(1, step, {}, loss=loss, **MODELS["gqa"]), plain)
    assert error < 1e-10, where


# Pipeline stages exchange micro-batches of different lengths; even a dense model must then name alltoall.
LENGTHS = dict(variable_seq_lengths=True, moe_token_dispatcher_type="alltoall")
LAYOUTS = {
    "tp2": (2, dict(tp=2), {}),
    "tp2-sp-full-recompute": (2, dict(tp=2), dict(sequence_parallel=True, **FULL)),
    "pp2": (2, dict(pp=2), LENGTHS),
    "dp2": (2, {}, {}),
    "tp2-pp2-sp": (4, dict(tp=2, pp=2), dict(sequence_parallel=True, **LENGTHS)),
    "dp2-pp2-core-recompute": (4, dict(pp=2), {**CORE, **LENGTHS}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["gqa", "moe"])
def test_layouts(world, name, layout):
    size, groups, model = LAYOUTS[layout]
    if name == "moe" and layout == "tp2":
        model = dict(sequence_parallel=True)  # upstream asks for it with experts
    check(world, name, "ppo", size, groups, model)


def test_layouts_of_other_models(world):
    check(world, "tied", "gspo", 4, dict(tp=2, pp=2), dict(sequence_parallel=True, **LENGTHS))
    # Not tensor-parallel: upstream's local MLA then loses a part of the gradient, trees or not.
    check(world, "mla-yarn", "gspo", 4, dict(pp=2), LENGTHS)


INTERLEAVED = {
    "one-length": (2, dict(pad_to_multiple_of=40), FULL),
    "all-in-warm-up": (2, dict(max_tokens=50), LENGTHS),
    "recompute": (2, dict(max_tokens=30), {**LENGTHS, **FULL}),
    "overlap": (2, dict(max_tokens=30), dict(overlap_p2p_comm=True, **LENGTHS)),
    "overlap-all-in-warm-up": (
        2,
        dict(max_tokens=50),
        dict(overlap_p2p_comm=True, overlap_p2p_comm_warmup_flush=True, **LENGTHS),
    ),
    "four-stages": (4, dict(max_tokens=30), LENGTHS),
    "four-stages-batched": (4, dict(max_tokens=30), dict(batch_p2p_comm=True, **LENGTHS)),
}


@pytest.mark.parametrize("case, name", [*((case, "gqa") for case in INTERLEAVED), ("recompute", "moe")])
def test_virtual_pipeline(world, case, name):
    stages, plan, model = INTERLEAVED[case]
    layers = {**MODELS[name]["model"], "num_layers": 2 * stages}
    want = world(1, step, {}, layers, **ONE_BY_ONE)
    groups = dict(pp=stages, vpp=2)
    got = world(stages, step, groups, {**layers, **model}, micro_batch_multiple=stages, **plan, timeout=90)
    error, where = difference(got, want)
    assert error < TOLERANCE[name], where
    # The first stage runs all forward passes before any backward pass; the last one does not.
    assert {count for *_, count in got} == {2 if "warm-up" in case or "one" in case else 4}


def test_expert_parallel(world):
    check(world, "moe", "gspo", 2, dict(ep=2))


@pytest.mark.parametrize("per_token_loss", [False, True])
@pytest.mark.parametrize("loss", ["ppo", "gspo"])
def test_data_parallel_with_dummies(world, loss, per_token_loss):
    # Two micro-batches of everything, at least four a rank: most of them are dummies.
    options = dict(max_tokens=60, micro_batch_multiple=4, per_token_loss=per_token_loss)
    ranks = check(world, "gqa", loss, 2, **options)
    assert [count for _, _, count in ranks] == [4, 4]


def test_bf16_is_no_further_from_fp64_than_linear_bf16(world):
    import torch

    bf16 = dict(params_dtype=torch.bfloat16)
    tree = world(1, step, {}, bf16)[0][0]
    linear = world(1, step, {}, bf16, **ONE_BY_ONE)[0][0]
    exact = reference(world, "gqa", "ppo")[0][0]

    def distance(found):
        # Weights are rounded to bf16 too, so both distances hold the same share of that.
        return sum((found[n][0].double() - v[0]).square().sum() for n, v in exact.items()).sqrt()

    norm = sum(v[0].square().sum() for v in exact.values()).sqrt()
    assert 1e-4 * norm < distance(tree) < 1.05 * distance(linear) and distance(linear) < 0.1 * norm


BALANCED = dict(
    moe=True,
    moe_router_load_balancing_type=["seq_aux_loss", "global_aux_loss"],
    moe_aux_loss_coeff=[0.05, 0.03],
    moe_z_loss_coeff=0.02,
    moe_router_enable_expert_bias=True,
    moe_router_score_function="sigmoid",
    # Ties between rounding errors would send a token elsewhere.
    moe_router_dtype="fp64",
)
ROUTER_LAYOUTS = {
    "one": (1, {}, {}),
    "tp2-sp": (2, dict(tp=2), dict(sequence_parallel=True)),
    "pp2": (2, dict(pp=2), LENGTHS),
    "ep2": (2, dict(ep=2), {}),
    "tp2-pp2-sp": (4, dict(tp=2, pp=2), dict(sequence_parallel=True, **LENGTHS)),
    "pp2-full-recompute": (2, dict(pp=2), {**LENGTHS, **FULL}),
    "pp2-vpp2": (2, dict(pp=2, vpp=2), dict(num_layers=4, **LENGTHS)),
}


@pytest.mark.parametrize("per_token_loss", [False, True])
@pytest.mark.parametrize("layout", ROUTER_LAYOUTS)
def test_router_losses_and_bias_count_as_the_linear_layout(world, layout, per_token_loss):
    """Against the same micro-batches unshared: auxiliary losses are quadratic in a micro-batch."""
    size, groups, model = ROUTER_LAYOUTS[layout]
    model = {**BALANCED, **model}
    # Padding to 16 and a dummy or more, so that both have something to spoil.
    options = dict(
        per_token_loss=per_token_loss, pad_to_multiple_of=16, micro_batch_multiple=4, max_tokens=48
    )
    want = world(size, step, groups, model, linear=True, **options)
    got = world(size, step, groups, model, **options)
    error, where = difference_by_rank(got, want)
    assert error < 2e-5, where
    if layout in ("one", "pp2"):
        spoiled = world(size, step, groups, model, alter="padding reaches the router", **options)
        assert difference_by_rank(spoiled, want)[0] > 1e-2
        once = world(size, step, groups, model, router_counts_once=True, **options)
        assert difference_by_rank(once, want)[0] > 1e-2


ALL_LOSSES = dict(
    moe_router_load_balancing_type=["aux_loss", "seq_aux_loss", "global_aux_loss"],
    moe_aux_loss_coeff=[0.5, 0.3, 0.7],
    moe_z_loss_coeff=0.2,
)
EACH_LOSS = {
    **{
        kind: dict(moe_router_load_balancing_type=kind, moe_aux_loss_coeff=0.5)
        for kind in ("aux_loss", "seq_aux_loss", "global_aux_loss")
    },
    "z_loss": dict(moe_z_loss_coeff=0.2),
    "all": ALL_LOSSES,
}
# A sequence of seq_aux_loss is a row there, and a pack here.
BY_ROWS = {**ALL_LOSSES, "moe_aux_loss_coeff": [0.5, 0.0, 0.7]}
UPSTREAM_LAYOUTS = {
    **{kind: ("end to end", 1, {}, losses, {}) for kind, losses in EACH_LOSS.items()},
    "dummies": ("end to end", 1, {}, ALL_LOSSES, dict(micro_batch_multiple=4)),
    # Upstream's global_aux_loss takes other ranks' micro-batches for as long as its own: see rows-dp2.
    "dp2": ("end to end", 2, {}, {**ALL_LOSSES, "moe_aux_loss_coeff": [0.5, 0.3, 0.0]}, dict(max_tokens=30)),
    "rows": ("rows", 1, {}, BY_ROWS, {}),
    "rows-dp2": ("rows", 2, {}, BY_ROWS, dict(max_trajectories=2)),
    "rows-tp2-sp": ("rows", 2, dict(tp=2), dict(sequence_parallel=True, **BY_ROWS), {}),
}


@pytest.mark.parametrize("per_token_loss", [False, True])
@pytest.mark.parametrize("layout", UPSTREAM_LAYOUTS)
def test_router_losses_are_those_of_upstreams_own_linear_layout(world, layout, per_token_loss):
    """No tree metadata and upstream's router there: [b, s], or [1, s] with a mask between trajectories."""
    upstream, size, groups, losses, plan = UPSTREAM_LAYOUTS[layout]
    model = dict(moe=True, moe_router_dtype="fp64", **losses)
    options = {"upstream": upstream, "per_token_loss": per_token_loss, "max_tokens": 45, **plan}
    unpadded = dict(pad_to_multiple_of=1, linear=True)
    want = world(size, step, groups, model, **{**options, **unpadded})
    got = world(size, step, groups, model, **options)
    assert min(count for *_, count in want) > 1
    error, where = difference_by_rank(got, want)
    assert error < 2e-5, where
    if per_token_loss:
        spoiled = world(size, step, groups, model, alter="router weighs by loss tokens", **options)
        assert difference_by_rank(spoiled, want)[0] > 1e-2


@pytest.mark.parametrize("broken", [name for name in BREAKS if "router" not in name])
@pytest.mark.parametrize("name", ["gqa", "moe"])
def test_a_broken_rule_is_seen(world, name, broken):
    options = dict(micro_batch_multiple=4) if broken == "dummies not counted" else {}
    ranks = world(1, step, {}, loss="ppo", alter=broken, **MODELS[name], **options)
    error, _ = difference(ranks, reference(world, name, "ppo"))
    assert error > 1e-2


@pytest.mark.parametrize("size, groups, model", [(1, {}, {}), (2, dict(tp=2), dict(sequence_parallel=True))])
def test_recorded_routing_is_replayed_on_a_tree(world, size, groups, model):
    for tree, chains, free in world(size, replay, groups, dict(moe=True, **model)):
        assert (tree - chains).abs().max() < 1e-5 < 1e-2 < (free - chains).abs().max()
