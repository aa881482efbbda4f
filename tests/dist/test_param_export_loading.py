"""Loading: what is refused before anything is written, and parameters in another memory order."""

from types import SimpleNamespace

import pytest
import torch

from tests.dist.export_references import reference
from tests.dist.world import parallel


def stale(fields, path):
    import torch.distributed as dist
    from safetensors.torch import load_file

    from megatron.core.param_export import StalePlanError, build_plan, load
    from tests.dist import export_models

    state, hf = load_file(path), SimpleNamespace(**fields)
    with parallel(tp=2):
        chunks = export_models.build(hf)
        plan = build_plan(chunks, hf).prove()
        linear = chunks[0].decoder.layers[0].mlp.linear_fc2
        if dist.get_rank() == 1:
            linear.weight = torch.nn.Parameter(torch.zeros_like(linear.weight))
            with pytest.raises(StalePlanError, match=r"^the model's .* replaced, .* on rank 1: build"):
                load(plan, state)
            assert all(entry.tensor.isnan().all() for entry in plan.entries)
        else:
            load(plan, state)  # not collective: this rank's tensors are the plan's
            assert not linear.weight.isnan().any()


def test_a_stale_plan_is_refused(world):
    fields, path, _, _ = reference("qwen3")
    world(2, stale, fields, path)


def refused(fields, path):
    from safetensors.torch import load_file

    from megatron.core.param_export import build_plan, load
    from tests.dist import export_models

    state, hf = load_file(path), SimpleNamespace(**fields)
    names = list(state)
    with parallel():
        plan = build_plan(export_models.build(hf), hf).prove()
        bad = {
            "numpy": ({**state, names[3]: state[names[3]].numpy()}, TypeError, "expected a tensor, got nda"),
            "shape": ({**state, names[3]: torch.zeros(1)}, ValueError, r"shape \(1,\), expected \("),
            "pairs": (list(state.items()), TypeError, "source: expected a mapping or a function .*, got l"),
            "model": (torch.nn.Linear(1, 1), TypeError, "source: expected a mapping .*, got Linear"),
            "missing": (
                {n: t for n, t in state.items() if "norm" not in n},
                KeyError,
                r"source: 21 tensors of the qwen3 family are missing, first model.layers.0.input_layernorm.w",
            ),
        }
        for source, kind, message in bad.values():
            with pytest.raises(kind, match=message):
                load(plan, source)
            assert all(entry.tensor.isnan().all() for entry in plan.entries)  # poisoned: nothing was written


def test_nothing_is_written_of_a_mapping_with_a_bad_tensor(world):
    fields, path, _, _ = reference("qwen3")
    world(1, refused, fields, path)


def fused_in_memory(fields, names):
    from megatron.core.param_export import build_plan, load
    from tests.dist import export_models

    hf = SimpleNamespace(**fields)
    with parallel():
        plan = build_plan(export_models.build(hf), hf).prove()
        with pytest.raises(KeyError) as error:
            load(plan, dict.fromkeys(names, torch.zeros(1)))
        return str(error.value)


def test_a_state_dict_with_fused_experts_is_told_from_a_checkpoint(world):
    from transformers import AutoConfig, AutoModelForCausalLM

    fields, _, _, _ = reference("qwen3_moe")
    config = AutoConfig.for_model("qwen3_moe", **{k: v for k, v in fields.items() if k != "model_type"})
    names = list(AutoModelForCausalLM.from_config(config).state_dict())
    assert any(name.endswith("experts.gate_up_proj") for name in names)
    (told,) = world(1, fused_in_memory, fields, names)
    for part in (
        "48 tensors of the qwen3_moe family are missing, first model.layers.0.mlp.experts.0.gate_proj.weight",
        "Names are those of checkpoint files",
        "load the files that save_pretrained writes",
    ):
        assert part in told, told


def another_memory_order(groups, fields, path):
    """Some parameters lie column by column: their elements count row by row all the same."""
    from safetensors.torch import load_file

    from megatron.core.param_export import build_plan, export, export_changed, load
    from megatron.core.param_export.publisher import Publisher
    from megatron.weight_sync import fingerprint
    from tests.dist import export_models

    state, hf = load_file(path), SimpleNamespace(**fields)
    with parallel(**groups):
        chunks = export_models.build(hf)
        turned = 0
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if name.endswith(("linear_qkv.weight", "linear_fc1.weight", "word_embeddings.weight")):
                    parameter.data = parameter.data.t().contiguous().t()
                    turned += not parameter.is_contiguous()
        assert turned > 3
        plan = build_plan(chunks, hf).prove()
        load(plan, state)
        assert all(torch.equal(tensor, state[name]) for name, tensor in export(plan))
        assert not any(entry.tensor.isnan().any() for entry in plan.entries)  # padded rows are written too
        for index in (None, torch.arange):
            given = []
            for entry in plan.entries:
                flat = entry.tensor.detach().reshape(-1)
                given.append((entry.tensor, *((None, None) if index is None else (index(len(flat)), flat))))
            for name, at, value in export_changed(plan, given):
                assert torch.equal(value, state[name].view(-1)[at]) and len(at) == state[name].numel(), name
        assert Publisher(plan).fingerprint() == fingerprint(state)


@pytest.mark.parametrize("size, groups", [(1, {}), (2, dict(tp=2))], ids=["tp1", "tp2"])
def test_parameters_in_another_memory_order(world, size, groups):
    fields, path, _, _ = reference("qwen3")
    world(size, another_memory_order, groups, fields, path)
