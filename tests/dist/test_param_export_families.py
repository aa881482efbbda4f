"""Every family: Hugging Face weights load into shards, compute the same logits, and export bit for bit.

TEST_FULL=1 runs every family in every layout that it has, with local layers and, where it is installed, with
those of Transformer Engine (which without a GPU are loaded and exported, but not run). With RECORD=1 besides,
such a run writes its outcomes to param_export_layouts.md:

    TEST_FULL=1 RECORD=1 python -m pytest tests/dist/test_param_export_families.py
"""

import importlib.util
import os
import re
from types import SimpleNamespace

import pytest
import torch

from tests.dist import export_layout_record
from tests.dist.export_references import reference
from tests.dist.world import parallel

FULL = os.environ.get("TEST_FULL") == "1"
HAVE_TE = importlib.util.find_spec("transformer_engine") is not None
LAYOUTS = {
    "tp1": (1, {}, {}),
    "tp2": (2, dict(tp=2), {}),
    "tp4": (4, dict(tp=4), {}),
    "pp2": (2, dict(pp=2), {}),
    "pp2-vpp2": (2, dict(pp=2, vpp=2), {}),
    "dp2": (2, {}, {}),
    "ep2": (2, dict(ep=2), {}),
    "tp2-etp1": (2, dict(tp=2, etp=1), {}),
    "tp2-ep2": (4, dict(tp=2, ep=2, etp=1), {}),
    "ep2-etp2": (4, dict(tp=2, ep=2, etp=2), {}),
    "tp2-pp2": (4, dict(tp=2, pp=2), {}),
    "tp2-pp2-etp1": (4, dict(tp=2, pp=2, etp=1), {}),
    "ep2-pp2": (4, dict(ep=2, pp=2), {}),
    "custom": (2, dict(pp=2), dict(pipeline_model_parallel_layout="Et|ttttL")),
    "custom-vpp2": (2, dict(pp=2, vpp=2), dict(pipeline_model_parallel_layout="E|tt|ttt|L")),
    "mtp": (1, {}, dict(mtp=1)),
    "mtp-pp2": (2, dict(pp=2), dict(mtp=1)),
    "mtp-alone": (2, dict(pp=2), dict(mtp=1, pipeline_model_parallel_layout="Ettttt|mL")),
}
DENSE = ("tp1", "tp2", "pp2", "tp2-pp2")
MOE = ("tp1", "tp2", "ep2", "ep2-etp2")
CASES = {
    "qwen3": (*DENSE, "dp2", "custom", "custom-vpp2"),
    "qwen3-6-layers": ("pp2-vpp2",),
    "qwen3-tied": DENSE,
    "qwen3-8-heads": ("tp4",),
    "llama": ("tp1", "tp2"),
    "qwen2": ("tp1", "tp2", "tp2-pp2"),
    "qwen3_moe": (*MOE, "tp2-etp1", "tp2-ep2", "ep2-pp2", "custom-vpp2"),
    "mixtral": MOE,
    "deepseek_v3": (*MOE, "mtp", "mtp-pp2", "mtp-alone"),
    "glm4_moe": (*MOE, "mtp-pp2"),
    "gpt_oss": ("tp1", "tp2-etp1", "ep2", "tp2-ep2"),  # upstream refuses biased experts at ETP > 1
}


# The full product. Of the layouts that are not listed in CASES, "pp2-vpp2" is uneven, with six layers.
FAMILIES = {
    "llama": "",
    "qwen2": "",
    "qwen3": "",
    "qwen3-tied": "",
    "qwen3_moe": "experts",
    "mixtral": "experts",
    "deepseek_v3": "experts mtp",
    "glm4_moe": "experts mtp",
    "gpt_oss": "experts",
}
EVERY_LAYOUT = {  # and what a family must have for it
    "tp2": "",
    "pp2": "",
    "tp2-pp2": "",
    "pp2-vpp2": "",
    "custom": "",
    "custom-vpp2": "",
    "ep2": "experts",
    "tp2-ep2": "experts",
    "tp2-etp1": "experts",
    "tp2-pp2-etp1": "experts",
    "ep2-etp2": "experts",
    "mtp-alone": "mtp",
}
REFUSED = {  # by upstream, when the model is built
    ("gpt_oss", layout): "Bias in Moe is only supported when ETP==1"
    for layout in ("tp2", "tp2-pp2", "ep2-etp2")
}


def chosen():
    """(case, layout, layers), each once."""
    found = [(case, layout, "local") for case in CASES for layout in CASES[case]]
    if FULL:
        found += product()
    return list(dict.fromkeys(found))


def product():
    return [
        (case, layout, layers)
        for layers in ("local", "te")[: 1 + HAVE_TE]
        for case, has in FAMILIES.items()
        for layout, needs in EVERY_LAYOUT.items()
        if needs in has
    ]


@pytest.fixture(scope="module")
def outcomes():
    """(case, layout, layers) -> "passed" or "refused"; recorded at the end."""
    found = {}
    yield found
    if FULL and os.environ.get("RECORD") == "1":
        export_layout_record.write(product(), found, list(EVERY_LAYOUT), HAVE_TE)


def refusal(groups, model, fields, te):
    """What upstream says when it refuses to build such a model."""
    from tests.dist import export_models

    with parallel(**groups):
        try:
            export_models.build(SimpleNamespace(**fields), te=te, **model)
        except (AssertionError, ValueError) as error:
            return str(error)
    return None


def round_trip(groups, model, fields, path, tokens, te):
    from safetensors.torch import load_file

    from megatron.core.param_export import build_plan, export, load
    from tests.dist import export_models

    state = load_file(path)
    hf = SimpleNamespace(**fields)
    with parallel(**groups):
        chunks = export_models.build(hf, te=te, **model)
        plan = build_plan(chunks, hf).prove()
        for k, (name, shape) in enumerate(plan.expected.items()):
            if name not in state:  # the Hugging Face model has no MTP layers
                assert name.startswith(f"model.layers.{hf.num_hidden_layers}."), name
                state[name] = torch.randn(shape, generator=torch.Generator().manual_seed(k))
        plan._snapshot.held.clear()  # as after any change of the modules: then they are walked
        assert plan.is_current()
        load(plan, state)
        for chunk in chunks:
            for name, tensor in chunk.named_parameters():
                assert not tensor.isnan().any(), name
        names = []
        for name, tensor in export(plan, bucket_bytes=20_000):
            assert tensor.dtype == state[name].dtype and tensor.is_contiguous(), name
            assert torch.equal(tensor, state[name]), name
            names.append(name)
        assert sorted(names) == sorted(state)
        for chunk in chunks:
            for layer in chunk.mtp.layers if getattr(chunk, "mtp", None) is not None else ():
                assert torch.equal(layer.eh_proj.weight, state["model.layers.5.eh_proj.weight"])
                inner = layer.mtp_model_layer
                norm = getattr(inner.input_layernorm, "weight", None)
                if norm is None:  # fused into the layer behind it
                    norm = inner.self_attention.linear_qkv.layer_norm_weight
                assert torch.equal(norm, state["model.layers.5.input_layernorm.weight"])
        return names, None if te else export_models.logits(chunks, tokens), plan.digest


@pytest.mark.parametrize("case, layout, layers", chosen())
def test_round_trip_and_logits(world, outcomes, case, layout, layers):
    size, groups, model = LAYOUTS[layout]
    six = layout == "pp2-vpp2" and not case.endswith("-6-layers")
    fields, path, tokens, want = reference(f"{case}-6-layers" if six else case)
    te = layers == "te"
    outcomes[case, layout, layers] = "FAILED"  # until the end
    if (case, layout) in REFUSED:
        for message in world(size, refusal, groups, model, fields, te):
            assert re.search(REFUSED[case, layout], message), message
        outcomes[case, layout, layers] = "refused"
        return
    results = world(size, round_trip, groups, model, fields, path, tokens, te)
    computed = 0
    for names, logits, digest in results:
        assert (names, digest) == (results[0][0], results[0][2])
        if logits is not None:
            computed += 1
            torch.testing.assert_close(logits[..., : fields["vocab_size"]], want, rtol=3e-5, atol=3e-5)
    assert computed == (0 if te else size // groups.get("pp", 1))
    outcomes[case, layout, layers] = "passed"


def test_only_a_whole_run_is_recorded(tmp_path):
    wanted = [("a", "tp2", "local"), ("b", "ep2", "local"), ("a", "tp2", "te")]
    outcomes = {wanted[0]: "passed", wanted[1]: "refused"}
    for have_te in (False, True):
        with pytest.raises(RuntimeError, match="not recorded: the whole product must run, with Transformer"):
            export_layout_record.write(wanted, outcomes, ["tp2", "ep2"], have_te, tmp_path / "x.md")
    outcomes[wanted[2]] = "FAILED"
    export_layout_record.write(wanted, outcomes, ["tp2", "ep2"], True, tmp_path / "x.md")
    text = (tmp_path / "x.md").read_text()
    assert "| a | passed | – |\n| b | – | refused |" in text
    assert text.endswith("| a | FAILED | – |\n| b | – | – |\n")
