"""A tree trains as its branches do one by one: logits, loss and every gradient, in every layout.

Dense models run in float64 and agree to 1e-10 relative: nothing on either side is then computed in less,
except the rotary table, which both sides share.
"""

import dataclasses

import pytest
import torch

from tests.dist.world import parallel

FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
CORE = dict(recompute_granularity="selective", recompute_modules=["core_attn"])


def compare(groups, model, branches, *, tied=False, hybrid=None, embedding="rope", broken=None):
    """Both sides on this rank: {"logits"|"loss"|"gradients": (where, relative difference)}."""
    from tests.dist import tree_against_branches as t
    from tests.dist.small_gpt import build, config

    with parallel(**groups):
        model = {"params_dtype": torch.float64, "num_layers": 4 if groups.get("vpp") else 2, **model}
        multiple = groups.get("tp", 1)
        trees = t.make_trees(branches, count=2, multiple=multiple)
        results = []
        for trees_side in (True, False):
            cfg = config(**model)
            options = dict(tied=tied, position_embedding_type=embedding)
            chunks = t.build_hybrid(cfg, hybrid, **options) if hybrid else build(cfg, **options)
            side = t.Side(cfg, chunks)
            results.append(
                t.run_trees(side, trees, BREAKS[broken] if broken else None)
                if trees_side
                else t.run_branches(side, trees, multiple)
            )
        (gradients, logits, loss), (want_gradients, want_logits, want_loss) = results
        return {
            "logits": t.difference(logits, want_logits),
            "gradients": t.difference(gradients, want_gradients),
            "loss": ("", abs(loss - want_loss) / want_loss if want_loss else 0.0),
            "stages": bool(want_logits),
        }


def worst(world, size, *args, **kwargs):
    """The largest difference over the ranks, and where it is."""
    ranks = world(size, compare, *args, **kwargs)
    assert any(rank["stages"] for rank in ranks)
    return {
        what: max((rank[what] for rank in ranks), key=lambda pair: pair[1])
        for what in ("logits", "gradients", "loss")
    }


def assert_equal(found, tolerance):
    for what, (where, error) in found.items():
        assert error < tolerance, f"{what} {where}: {error}"


MODELS = {
    "gqa": dict(model={}),
    "gqa-tied": dict(model={}, tied=True),
    "gqa-learned-positions": dict(model={}, embedding="learned_absolute"),
    "gqa-qk-norm-interleaved-rope": dict(model=dict(qk_layernorm=True, rotary_interleaved=True)),
    "gqa-mrope": dict(model=dict(mrope_section=[2, 1, 1]), embedding="mrope"),
    "mqa": dict(model=dict(num_query_groups=1)),
    "gqa-window": dict(model=dict(window_size=(3, 0), window_attn_skip_freq=2)),
    "gqa-learnable-sink": dict(model=dict(softmax_type="learnable")),
    "gqa-off-by-one": dict(model=dict(softmax_type="off-by-one")),
    "gqa-softmax-scale": dict(model=dict(softmax_scale=0.9, no_rope_freq=[0, 1])),
    "gqa-layer-scaling": dict(model=dict(apply_query_key_layer_scaling=True)),
    "gqa-output-gate": dict(model=dict(attention_output_gate=True)),
    "mla": dict(model=dict(mla=True)),
    "mla-yarn": dict(model=dict(mla=True, rope_type="yarn")),
    "moe": dict(model=dict(moe=True)),
    "hybrid": dict(model={}, hybrid="*-*-"),
    "hybrid-tied": dict(model={}, hybrid="*-*-", tied=True),
}
# The router and the sigmoid of the output gate are float32 upstream.
TOLERANCE = {name: 2e-5 if name in ("moe", "gqa-output-gate") else 1e-10 for name in MODELS}


@pytest.mark.parametrize("branches", [2, 5, 40])
@pytest.mark.parametrize("name", MODELS)
def test_one_process(world, name, branches):
    assert_equal(worst(world, 1, {}, branches=branches, **MODELS[name]), TOLERANCE[name])


RECOMPUTE = {"full": FULL, "core_attn": CORE}


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("name", ["gqa", "mla", "moe", "hybrid"])
def test_recompute(world, name, recompute):
    case = {**MODELS[name], "model": {**MODELS[name]["model"], **RECOMPUTE[recompute]}}
    assert_equal(worst(world, 1, {}, branches=5, **case), TOLERANCE[name])


def bf16_noise(model):
    """Distance of all gradients (and logits) from float64: of bf16 trees, and of bf16 branches."""
    from tests.dist import tree_against_branches as t
    from tests.dist.small_gpt import build, config

    with parallel():
        trees = t.make_trees(5, count=2)
        found = {}
        for name, run, dtype in (
            ("exact", t.run_branches, torch.float64),
            ("trees", t.run_trees, torch.bfloat16),
            ("branches", t.run_branches, torch.bfloat16),
        ):
            cfg = config(params_dtype=dtype, num_layers=2, **model)
            gradients, logits, _ = run(t.Side(cfg, build(cfg)), trees)
            found[name] = [torch.cat([v.double().flatten() for v in d.values()]) for d in (gradients, logits)]
        return {
            name: [float((a - b).norm() / b.norm()) for a, b in zip(found[name], found["exact"], strict=True)]
            for name in ("trees", "branches")
        }


@pytest.mark.parametrize("name", ["gqa", "mla"])
def test_bf16_trees_are_no_further_from_float64_than_bf16_branches(world, name):
    [noise] = world(1, bf16_noise, MODELS[name]["model"])
    for trees, branches in zip(noise["trees"], noise["branches"], strict=True):
        assert 1e-4 < trees < 1.25 * branches < 0.1  # one draw of rounding noise each


LAYOUTS = {
    "tp2": (2, dict(tp=2), {}),
    "tp2-sp": (2, dict(tp=2), dict(sequence_parallel=True)),
    "pp2": (2, dict(pp=2), {}),
    "pp2-recompute-full": (2, dict(pp=2), FULL),
    "tp2-sp-recompute-core-attn": (2, dict(tp=2), dict(sequence_parallel=True, **CORE)),
    "tp2-pp2-sp": (4, dict(tp=2, pp=2), dict(sequence_parallel=True)),
}


@pytest.mark.parametrize("name", ["gqa", "gqa-tied", "mqa", "mla", "moe", "hybrid"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parallel(world, layout, name):
    size, groups, model = LAYOUTS[layout]
    case = {**MODELS[name], "model": {**MODELS[name]["model"], **model}}
    if name == "hybrid" and "pp" in groups:
        case["hybrid"] = "*-|*-"
    assert_equal(worst(world, size, groups, branches=5, **case), TOLERANCE[name])


@pytest.mark.parametrize("name", ["gqa", "gqa-tied", "mla", "moe"])
@pytest.mark.parametrize("model", [{}, FULL], ids=["", "recompute-full"])
def test_virtual_pipeline(world, name, model):
    case = {**MODELS[name], "model": {**MODELS[name]["model"], **model}}
    assert_equal(worst(world, 2, dict(pp=2, vpp=2), branches=5, **case), TOLERANCE[name])


def sequential(metadata):
    size = metadata.padded_size
    broken = dataclasses.replace(metadata, tree_position_ids=torch.arange(size), max_position=size - 1)
    broken._cache["validated"] = True  # its first use would refuse it
    return broken


def siblings_visible(metadata):
    broken = dataclasses.replace(metadata)
    broken._cache["subtree_end"] = torch.full_like(metadata.subtree_end, metadata.padded_size)
    return broken


def padding_visible(metadata):
    from megatron.core.transformer.tree_attention.reference import visible

    broken = dataclasses.replace(metadata)
    broken._cache["reference", None] = visible(metadata)
    broken._cache["reference", None][:, int(metadata.cu_node_lens[metadata.num_nodes]) :] = True
    return broken


def ids_lost_on_later_stages(metadata):
    from megatron.core import parallel_state

    return metadata if parallel_state.is_pipeline_first_stage() else sequential(metadata)


def mask_lost_under_recompute(metadata):
    from megatron.core.transformer.tree_metadata import TreeMetadata

    class Forgetful(TreeMetadata):
        # The first pass of a recomputed region runs without gradients, the second with them.
        def cached(self, key, build):
            if key == ("reference", None) and torch.is_grad_enabled():
                return torch.ones(self.padded_size, self.padded_size, dtype=torch.bool).tril()
            return super().cached(key, build)

    values = {f.name: getattr(metadata, f.name) for f in dataclasses.fields(metadata) if f.init}
    return Forgetful(**values)


BREAKS = {
    "nothing": dataclasses.replace,
    "sequential positions": sequential,
    "siblings visible": siblings_visible,
    "padding visible": padding_visible,
    "ids lost on later stages": ids_lost_on_later_stages,
    "mask lost under recompute": mask_lost_under_recompute,
}


@pytest.mark.parametrize(
    "broken, size, groups, model",
    [
        ("sequential positions", 1, {}, {}),
        ("siblings visible", 1, {}, {}),
        ("padding visible", 1, {}, {}),
        ("ids lost on later stages", 2, dict(pp=2), {}),
        ("mask lost under recompute", 1, {}, FULL),
        ("mask lost under recompute", 1, {}, CORE),
    ],
)
@pytest.mark.parametrize("name", ["gqa", "mla", "moe", "hybrid"])
def test_the_comparison_sees_a_break(world, name, broken, size, groups, model):
    """Each injected break moves a gradient by at least a thousand times the tolerance above."""
    case = {**MODELS[name], "model": {**MODELS[name]["model"], **model}}
    if name == "hybrid" and "pp" in groups:
        case["hybrid"] = "*-|*-"
    found = worst(world, size, groups, branches=5, broken=broken, **case)
    assert found["gradients"][1] > 2e-2
    if broken != "mask lost under recompute":
        assert found["logits"][1] > 1e-3
    assert_equal(worst(world, size, groups, branches=5, broken="nothing", **case), TOLERANCE[name])
