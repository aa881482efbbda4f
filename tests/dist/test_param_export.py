"""Sharded Megatron models export the very tensors of the Hugging Face model, in every layout."""

from types import SimpleNamespace

import pytest
import torch

from tests.dist.world import parallel

SIZES = dict(
    vocab_size=53,
    hidden_size=36,
    intermediate_size=44,
    num_hidden_layers=5,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=10,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
)
THETA = 10000.0


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """``reference(tied)``: (configuration as plain fields, file with weights, tokens, logits)."""
    made = {}

    def make(tied):
        if tied not in made:
            from safetensors.torch import save_file
            from transformers import Qwen3Config, Qwen3ForCausalLM

            torch.manual_seed(11 + tied)
            config = Qwen3Config(
                **SIZES,
                tie_word_embeddings=tied,
                rope_parameters={"rope_type": "default", "rope_theta": THETA},
                use_cache=False,
            )
            model = Qwen3ForCausalLM(config).float().eval()
            with torch.no_grad():
                for name, p in model.named_parameters():
                    p.copy_(1 + 0.3 * torch.randn_like(p) if "norm" in name else 0.2 * torch.randn_like(p))
            tokens = torch.randint(0, SIZES["vocab_size"], (2, 13))
            with torch.no_grad():
                logits = model(tokens).logits
            state = {
                n: t.clone() for n, t in model.state_dict().items() if not (tied and n == "lm_head.weight")
            }
            path = str(tmp_path_factory.mktemp("hf") / "model.safetensors")
            save_file(state, path)
            fields = config.to_dict() | {"rope_theta": THETA}
            made[tied] = fields, path, tokens, logits
        return made[tied]

    return make


LAYOUTS = {
    "tp1": (1, {}, {}),
    "tp2": (2, dict(tp=2), {}),
    "pp2": (2, dict(pp=2), {}),
    "dp2": (2, {}, {}),
    "tp2-pp2": (4, dict(tp=2, pp=2), {}),
    "kv-heads-below-tp": (4, dict(tp=4), dict(heads=8)),
}


def round_trip(groups, fields, path, tokens, bucket_bytes, receivers="all"):
    from safetensors.torch import load_file

    from megatron.core.param_export import build_plan, export, load
    from tests.dist import export_models

    state = load_file(path)
    hf = SimpleNamespace(**fields)
    with parallel(**groups):
        chunks = export_models.build(hf)
        plan = build_plan(chunks, hf).prove()
        load(plan, state)
        names = []
        for name, tensor in export(plan, receivers=receivers, bucket_bytes=bucket_bytes):
            assert tensor.dtype == state[name].dtype and tensor.shape == state[name].shape, name
            assert torch.equal(tensor, state[name]), name
            names.append(name)
        out = export_models.logits(chunks, tokens)
        return names, out, plan.digest


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", ["tp1", "tp2", "pp2", "dp2", "tp2-pp2"])
def test_round_trip_and_logits(world, reference, layout, tied):
    size, groups, _ = LAYOUTS[layout]
    fields, path, tokens, want = reference(tied)
    results = world(size, round_trip, groups, fields, path, tokens, bucket_bytes=20_000)
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        expected = sorted(file.keys())
    seen = 0
    for names, logits, digest in results:
        assert sorted(names) == expected
        assert names == results[0][0] and digest == results[0][2]
        if logits is not None:
            seen += 1
            torch.testing.assert_close(logits[..., : fields["vocab_size"]], want, rtol=2e-5, atol=2e-5)
    assert seen == (size if "pp2" not in layout else size // 2)


def changed_elements(groups, fields, path, receiver):
    """Change a few elements, report them as a distributed optimizer would, apply them to the old weights."""
    import torch.distributed as dist
    from safetensors.torch import load_file

    from megatron.core import parallel_state
    from megatron.core.param_export import build_plan, export, export_changed, load
    from tests.dist import export_models

    state = load_file(path)
    hf = SimpleNamespace(**fields)
    with parallel(**groups):
        chunks = export_models.build(hf)
        plan = build_plan(chunks, hf).prove()
        load(plan, state)
        dp, dps = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        changed = []
        for entry in plan.entries:
            seed = sum(entry.global_name.encode()) + (0 if entry.sharer else 0)
            # replicas and data-parallel ranks change alike; shards differ through their tensor-parallel rank
            shard = 0 if "norm" in entry.name else parallel_state.get_tensor_model_parallel_rank()
            generator = torch.Generator().manual_seed(1000 * seed + shard)
            flat = entry.tensor.detach().view(-1)
            index = torch.randperm(flat.numel(), generator=generator)[: 1 + flat.numel() // 50].sort().values
            if entry.name == "output_layer.weight" and hf.tie_word_embeddings:
                index = index[:0]
            flat[index] += 1 + torch.rand(len(index), generator=generator)
            part = index[index % dps == dp]
            changed.append((entry.tensor, part, flat[part].clone()))
        updated = {name: tensor.clone() for name, tensor in state.items()}
        count = 0
        for name, index, value in export_changed(plan, changed, receiver=receiver):
            assert index.dtype == torch.int64 and (index[1:] > index[:-1]).all()
            updated[name].view(-1)[index] = value
            count += len(index)
        if hf.tie_word_embeddings and parallel_state.get_pipeline_model_parallel_world_size() > 1:
            for chunk in chunks:  # the tied copy follows, as the optimizer would do
                if not chunk.pre_process and chunk.post_process:
                    chunk.output_layer.weight.data.zero_()
                group = parallel_state.get_embedding_group(check_initialized=False)
                dist.all_reduce(chunk.shared_embedding_or_output_weight().data, group=group)
        full = dict(export(plan))
        if dist.get_rank() != receiver:
            assert count == 0
            return None
        differing = sum(int((full[name] != state[name]).sum()) for name in state)
        assert count == differing > 0
        for name in state:
            assert torch.equal(full[name], updated[name]), name
        return count


@pytest.mark.parametrize("layout", ["tp1", "tp2", "pp2", "dp2", "tp2-pp2"])
def test_changed_elements_arrive(world, reference, layout):
    size, groups, _ = LAYOUTS[layout]
    fields, path, _, _ = reference(layout == "pp2")
    receiver = size - 1
    counts = world(size, changed_elements, groups, fields, path, receiver)
    assert counts[receiver] > 500 and all(c is None for r, c in enumerate(counts) if r != receiver)


def given_receivers(fields, path, receivers):
    from safetensors.torch import load_file

    from megatron.core.param_export import build_plan, export, load
    from tests.dist import export_models

    state, hf = load_file(path), SimpleNamespace(**fields)
    with parallel(tp=2):
        plan = build_plan(export_models.build(hf), hf).prove()
        load(plan, state)
        return sum(torch.equal(t, state[n]) for n, t in export(plan, receivers=receivers))


def test_only_the_given_receivers_get_tensors(world, reference):
    fields, path, _, _ = reference(False)
    count = len(set(torch_names(path)))
    assert world(2, given_receivers, fields, path, [1]) == [0, count]
    assert world(2, given_receivers, fields, path, [0, 1]) == [count, count]


def torch_names(path):
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return list(file.keys())


def broken(how, fields):
    """Prove the plan of a model that was broken on one rank; the message, which all ranks must share."""
    import torch.distributed as dist

    from megatron.core.param_export import LayoutError, build_plan, layout
    from megatron.core.param_export import plan as plan_module
    from tests.dist import export_models

    hf = SimpleNamespace(**fields)
    one = dist.get_rank() == 1
    undo = lambda: None  # noqa: E731
    with parallel(tp=2):
        chunks = export_models.build(hf)
        layers = chunks[0].decoder.layers
        if how == "layer number repeated" and one:
            layers[3].layer_number = 3
        elif how == "parameter without a rule" and one:
            layers[1].mlp.register_parameter("temperature", torch.nn.Parameter(torch.ones(3)))
        elif how == "buffer without a rule" and one:
            layers[1].mlp.register_buffer("running", torch.ones(3))
        elif how == "other configuration" and one:
            hf.intermediate_size += 4
        elif how == "missing module" and not one:
            layers[2].self_attention.q_layernorm = None
        elif how == "glu halves swapped" and one:
            kept = layout.glu
            layout.glu = lambda place, roles, *rest: kept(place, roles[::-1], *rest)
            undo = lambda: setattr(layout, "glu", kept)  # noqa: E731
        elif how == "padding kept":
            kept = plan_module._VOCABULARY
            plan_module._VOCABULARY = ()
            undo = lambda: setattr(plan_module, "_VOCABULARY", kept)  # noqa: E731
        elif how == "owner missing" and one:
            kept = plan_module._rank
            plan_module._rank = lambda groups, name: 1
            undo = lambda: setattr(plan_module, "_rank", kept)  # noqa: E731
        elif how == "two owners" and one:
            kept = plan_module._rank
            plan_module._rank = lambda groups, name: 0
            undo = lambda: setattr(plan_module, "_rank", kept)  # noqa: E731
        try:
            build_plan(chunks, hf).prove()
        except LayoutError as error:
            return str(error)
        finally:
            undo()
        return None


@pytest.mark.parametrize(
    "how, message",
    [
        ("layer number repeated", r"layers.2.self_attn.q_proj.weight: overlap at \[30, 0\] of \[60, 36\]"),
        ("parameter without a rule", r"rank 1: chunk 0: decoder.layers.1.mlp.temperature: no rule .*\(MLP\)"),
        ("buffer without a rule", r"rank 1: chunk 0: decoder.layers.1.mlp.running: no rule"),
        ("other configuration", r"rank 1: its configuration asks for other tensors"),
        ("missing module", r"1 fault\n  model.layers.2.self_attn.q_norm.weight: no rank owns any part of it"),
        (
            "glu halves swapped",
            r"rank 1: decoder.layers.0.mlp.linear_fc1.weight is divided otherwise than on rank 0",
        ),
        (
            "padding kept",
            r"embed_tokens.weight: the configuration says \(53, 36\), but .* \(72, 36\) in the model",
        ),
        ("owner missing", r"gap at \[\d+, \d+\] of \[\d+, \d+\], covered by no rank"),
        ("two owners", r"norm.weight: overlap at \[0\] of \[36\], covered by rank 0 (\S+), rank 1 \1"),
    ],
)
def test_a_broken_layout_is_refused_alike_on_all_ranks(world, reference, how, message):
    import re

    fields, _, _, _ = reference(False)
    first, second = world(2, broken, how, fields)
    assert first == second is not None
    assert re.search(message, first), first
    assert first.startswith("the layout plan is not exact: ")
    assert first.count("\n") <= 11
