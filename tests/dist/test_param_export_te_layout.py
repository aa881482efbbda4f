"""Layers as Transformer Engine lays them out: fused norms, grouped experts, duplicated projections. With
stand-ins everywhere; with its own layers where it is installed, those that test_param_export_families.py has
not.
"""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from tests.dist.export_references import reference
from tests.dist.world import parallel

GROUPS = {
    "tp1": (1, {}),
    "tp2": (2, dict(tp=2)),
    "tp4": (4, dict(tp=4)),
    "ep2": (2, dict(ep=2)),
    "ep2-etp2": (4, dict(tp=2, ep=2, etp=2)),
}


def round_trip(groups, fields, path, interleave, **layout):
    from safetensors.torch import load_file

    from megatron.core.param_export import build_plan, export, load
    from tests.dist import export_models, te_stand_ins

    state, hf = load_file(path), SimpleNamespace(**fields)
    with parallel(**groups):
        chunks = export_models.build(hf, mtp=0)
        for chunk in chunks:
            chunk.config.moe_mlp_glu_interleave_size = interleave
            te_stand_ins.as_transformer_engine(chunk, **layout)
        plan = build_plan(chunks, hf).prove()
        load(plan, state)
        for name, tensor in export(plan, bucket_bytes=30_000):
            assert torch.equal(tensor, state[name]), name
        tensors = {entry.global_name: entry.tensor.detach() for entry in plan.entries}
    prefix = "decoder.layers.2.mlp.experts.linear_fc1."
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}, state


@pytest.mark.parametrize(
    "case, groups, layout",
    [
        ("qwen3", "tp2", {}),
        ("qwen3-8-heads", "tp4", {}),
        ("qwen3_moe", "ep2-etp2", {}),
        ("qwen3_moe", "ep2", dict(interleave=5)),
        ("qwen3_moe", "ep2-etp2", dict(single_grouped=True, interleave=2)),
        ("deepseek_v3", "tp2", {}),
        ("deepseek_v3", "tp2", dict(fused_down=True)),
        ("glm4_moe", "ep2-etp2", {}),
        ("gpt_oss", "tp1", {}),
        ("gpt_oss", "ep2", dict(single_grouped=True)),
    ],
)
def test_round_trip(world, case, groups, layout):
    size, groups = GROUPS[groups]
    fields, path, _, _ = reference(case)
    world(size, round_trip, groups, fields, path, **(dict(interleave=None) | layout))


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("interleave", [None, 5])
def test_what_lies_in_a_grouped_parameter(world, single, interleave):
    """Against plain slicing: gate rows then up rows, or blocks in turn; experts 2 and 3 on rank 1."""
    fields, path, _, _ = reference("qwen3_moe")
    results = world(2, round_trip, dict(ep=2), fields, path, interleave, single_grouped=single)
    for rank, (tensors, state) in enumerate(results):
        for i in range(2):
            name = f"model.layers.2.mlp.experts.{2 * rank + i}.{{}}_proj.weight"
            gate, up = (state[name.format(part)] for part in ("gate", "up"))
            want = torch.cat([gate, up])
            if interleave:
                want = torch.stack([gate.unflatten(0, (-1, 5)), up.unflatten(0, (-1, 5))], 1).flatten(0, 2)
            local = (
                tensors[f"weight{2 * rank}-{2 * rank + 1}"][i] if single else tensors[f"weight{2 * rank + i}"]
            )
            assert torch.equal(local, want)


SINGLE = dict(moe_single_grouped_weight=True, use_transformer_engine_op_fuser=True)


def real_round_trip(groups, fields, path, model):
    from safetensors.torch import load_file

    from megatron.core.param_export import build_plan, export, export_changed, load
    from tests.dist import export_models

    state, hf = load_file(path), SimpleNamespace(**fields)
    with parallel(**groups):
        plan = build_plan(export_models.build(hf, te=True, **model), hf).prove()
        load(plan, state)
        for name, tensor in export(plan, bucket_bytes=30_000):
            assert torch.equal(tensor, state[name]), name
        whole = []
        for entry in plan.entries:
            flat = entry.tensor.detach().view(-1)
            whole.append((entry.tensor, torch.arange(len(flat)), flat))
        for name, index, value in export_changed(plan, whole):
            assert torch.equal(value, state[name].view(-1)[index]) and len(index) == state[name].numel(), name
        return {entry.name.removeprefix("decoder.layers.2."): type(entry.tensor) for entry in plan.entries}


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine")
@pytest.mark.parametrize(
    "case, groups, model, part",
    [
        ("qwen3_moe", "ep2", SINGLE, "mlp.experts.linear_fc1.weight"),
        ("qwen3_moe", "ep2", SINGLE | dict(moe_mlp_glu_interleave_size=5), "mlp.experts.linear_fc2.weight"),
        ("gpt_oss", "ep2", SINGLE | dict(moe_single_grouped_bias=True), "mlp.experts.linear_fc1.bias"),
        ("deepseek_v3", "tp2", dict(mla_down_proj_fusion=True), "self_attention.linear_qkv_down_proj.weight"),
    ],
)
def test_round_trip_of_real_layers(world, case, groups, model, part):
    size, groups = GROUPS[groups]
    fields, path, _, _ = reference(case)
    for types in world(size, real_round_trip, groups, fields, path, model):
        assert types[part].__name__ == ("GroupedTensor" if "experts" in part else "Parameter")
