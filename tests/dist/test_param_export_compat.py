"""The functions that trainers call: names, live tensors, placeholders, copies; against checkpoints."""

import re
import sys
from types import SimpleNamespace

import pytest
import torch

from tests.dist.export_references import reference
from tests.dist.world import parallel


def named(groups, fields, mtp, layout=None, te=False):
    import torch.distributed as dist

    from megatron.core.param_export.compat import named_params_and_buffers
    from tests.dist import export_models, te_stand_ins

    hf = SimpleNamespace(**fields)
    with parallel(**groups):
        more = dict(pipeline_model_parallel_layout=layout) if layout else {}
        chunks = export_models.build(hf, mtp=mtp, **more)
        if te:
            for chunk in chunks:
                te_stand_ins.as_transformer_engine(chunk)
        pairs = list(named_params_and_buffers(None, chunks))
        if len(chunks) == 1:
            assert [name for name, _ in named_params_and_buffers(None, chunks[0])] == [n for n, _ in pairs]
        plain = [name for name, _ in named_params_and_buffers(None, chunks, convert_to_global_name=False)]
        live = {id(p) for chunk in chunks for p in [*chunk.parameters(), *chunk.buffers()]}
        assert all(id(tensor) in live for _, tensor in pairs)
        for _, tensor in pairs:
            tensor.data.fill_(7)
        assert all((p == 7).all() for chunk in chunks for p in chunk.parameters())
        assert len(plain) == len(pairs) == len({name for name, _ in pairs})
        assert all(name.startswith("vp_stages.") for name in plain)
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, [name for name, _ in pairs])
        return everyone, plain


def test_names_at_pp2_with_uneven_stages(world):
    fields, _, _, _ = reference("qwen3")
    everyone, plain = world(2, named, dict(pp=2), fields, 0)[1]
    assert not set(everyone[0]) & set(everyone[1])
    for layer in range(5):
        name = f"module.module.decoder.layers.{layer}.self_attention.linear_qkv.weight"
        assert (name in everyone[0], name in everyone[1]) == (layer < 2, layer >= 2)
    assert "module.module.embedding.word_embeddings.weight" in everyone[0]
    assert "module.module.output_layer.weight" in everyone[1]
    assert "vp_stages.0.decoder.layers.0.self_attention.linear_qkv.weight" in plain


def test_names_at_pp2_vpp2(world):
    fields, _, _, _ = reference("qwen3-6-layers")
    everyone, plain = world(2, named, dict(pp=2, vpp=2), fields, 0)[0]
    layers = [sorted({int(n.split(".")[4]) for n in names if ".layers." in n}) for names in everyone]
    assert layers == [[0, 3], [1, 2, 4, 5]]
    assert "vp_stages.1.decoder.layers.0.self_attention.linear_qkv.weight" in plain


@pytest.mark.parametrize("te", [False, True])
def test_expert_and_mtp_names(world, te):
    fields, _, _, _ = reference("deepseek_v3")
    results = world(4, named, dict(pp=2, ep=2), fields, 1, te=te)
    everyone, _ = results[0]
    all_names = {name for names in everyone for name in names}
    kind = "linear_fc1.weight{}" if te else "local_experts.{}.linear_fc1.weight"
    for expert in range(4):
        for prefix in ("decoder.layers.3", "mtp.layers.0.transformer_layer"):
            name = f"module.module.{prefix}.mlp.experts.{kind.format(expert)}"
            holders = [rank for rank, names in enumerate(everyone) if name in names]
            assert len(holders) == 1 and holders[0] % 2 == expert // 2, name
    assert "module.module.decoder.layers.3.mlp.router.expert_bias" in all_names
    assert "module.module.mtp.layers.0.transformer_layer.mlp.router.expert_bias" in all_names
    assert "module.module.mtp.layers.0.eh_proj.weight" in all_names
    assert not any("mtp_model_layer" in name for name in all_names)


def gathered(groups, fields, path, te, asynchronous):
    """Gather every tensor by name alone, from copies that belong to no module; compare with the plan."""
    from safetensors.torch import load_file

    from megatron.core.param_export import build_plan, load
    from megatron.core.param_export.compat import (
        all_gather_param,
        all_gather_params_async,
        named_params_and_buffers,
    )
    from megatron.core.tensor_parallel import set_defaults_if_not_set_tensor_model_parallel_attributes
    from tests.dist import export_models, te_stand_ins

    state, hf = load_file(path), SimpleNamespace(**fields)
    with parallel(**groups):
        chunks = export_models.build(hf)
        if te:
            for chunk in chunks:
                before = {n: p for n, p in chunk.named_parameters()}
                te_stand_ins.as_transformer_engine(chunk)
                te_stand_ins.mark(chunk, before)
        plan = build_plan(chunks, hf).prove()
        load(plan, state)
        infos, copies = [], []
        for name, tensor in named_params_and_buffers(None, chunks):
            copy = torch.full_like(tensor, float("nan"))
            copy.data.copy_(tensor.data)
            for attribute in ("tensor_model_parallel", "partition_dim", "partition_stride", "parallel_mode"):
                if hasattr(tensor, attribute):
                    setattr(copy, attribute, getattr(tensor, attribute))
            set_defaults_if_not_set_tensor_model_parallel_attributes(copy)
            infos.append(SimpleNamespace(name=name))
            copies.append(copy)
        if asynchronous:
            full = all_gather_params_async(zip(infos, copies, strict=True))
        else:
            full = [all_gather_param(info.name, copy) for info, copy in zip(infos, copies, strict=True)]
        return {info.name: tensor for info, tensor in zip(infos, full, strict=True)}


def check(full, state, fields, expert_kind):
    """Against the Hugging Face tensors, put together as Megatron lays them out at TP 1."""
    prefix, hf = "module.module.decoder.layers.2.", "model.layers.2."
    q, k, v = (state[f"{hf}self_attn.{p}_proj.weight"] for p in "qkv")
    groups, head = fields["num_key_value_heads"], fields["head_dim"]
    parts = [t.unflatten(0, (groups, -1, head)) for t in (q, k, v)]
    qkv = torch.cat(parts, 1).flatten(0, 2)
    assert torch.equal(full[prefix + "self_attention.linear_qkv.weight"], qkv)
    assert torch.equal(
        full[prefix + "self_attention.linear_proj.weight"], state[hf + "self_attn.o_proj.weight"]
    )
    vocabulary = full["module.module.embedding.word_embeddings.weight"]
    assert torch.equal(vocabulary[:53], state["model.embed_tokens.weight"]) and not vocabulary[53:].any()
    if expert_kind is None:
        gate, up, down = (state[f"{hf}mlp.{p}_proj.weight"] for p in ("gate", "up", "down"))
        assert torch.equal(full[prefix + "mlp.linear_fc1.weight"], torch.cat([gate, up]))
        assert torch.equal(full[prefix + "mlp.linear_fc2.weight"], down)
        return
    for expert in range(4):
        gate, up, down = (state[f"{hf}mlp.experts.{expert}.{p}_proj.weight"] for p in ("gate", "up", "down"))
        first, second = (f"{prefix}mlp.experts.{expert_kind.format(n, expert)}" for n in (1, 2))
        if first in full:
            assert torch.equal(full[first], torch.cat([gate, up]))
            assert torch.equal(full[second], down)
    assert torch.equal(full[prefix + "mlp.router.weight"], state[hf + "mlp.gate.weight"])


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    "case, size, groups, te, expert_kind",
    [
        ("qwen3", 2, dict(tp=2), False, None),
        ("qwen3_moe", 4, dict(tp=2, ep=2, etp=2), False, "local_experts.{1}.linear_fc{0}.weight"),
        ("qwen3_moe", 4, dict(tp=2, ep=2, etp=2), True, "linear_fc{0}.weight{1}"),
        ("qwen3_moe", 2, dict(tp=2, etp=1), True, "linear_fc{0}.weight{1}"),
    ],
)
def test_gathered_by_name_and_attributes(world, case, size, groups, te, expert_kind, asynchronous):
    from safetensors.torch import load_file

    fields, path, _, _ = reference(case)
    state = load_file(path)
    for full in world(size, gathered, groups, fields, path, te, asynchronous):
        check(full, state, fields, expert_kind)


def placeholders(fields, path):
    """A trainer's way: every rank makes placeholders for what other stages hold, fills them by broadcasts
    over the pipeline and expert groups, and gathers them with attributes set by hand."""
    import torch.distributed as dist
    from safetensors.torch import load_file

    from megatron.core import parallel_state
    from megatron.core.param_export import build_plan, load
    from megatron.core.param_export.compat import all_gather_params_async, named_params_and_buffers
    from tests.dist import export_models

    state, hf = load_file(path), SimpleNamespace(**fields)
    with parallel(pp=2, ep=2):
        chunks = export_models.build(hf)
        plan = build_plan(chunks, hf).prove()
        load(plan, state)
        mine = dict(named_params_and_buffers(None, chunks))
        known = [None] * dist.get_world_size()
        dist.all_gather_object(known, {name: tensor.shape for name, tensor in mine.items()})
        infos, params = [], []
        for name in sorted({name for names in known for name in names}):
            source = next(rank for rank, names in enumerate(known) if name in names)
            param = mine.get(name)
            if param is None:
                param = torch.full(known[source][name], float("nan"))
                param.tensor_model_parallel = "norm" not in name
                param.partition_dim, param.partition_stride = 0, 1
            dist.broadcast(param.data, source)
            infos.append(SimpleNamespace(name=name))
            params.append(param)
        assert parallel_state.get_tensor_model_parallel_world_size() == 1
        for info, param in zip(infos, params, strict=True):
            if not hasattr(param, "tensor_model_parallel") and not info.name.endswith("expert_bias"):
                param.tensor_model_parallel = False
        full = all_gather_params_async(zip(infos, params, strict=True))
        assert all(tensor.data_ptr() == p.data_ptr() for tensor, p in zip(full, params, strict=True))
        return {info.name: tensor for info, tensor in zip(infos, full, strict=True)}


def test_placeholders_filled_by_broadcasts(world):
    from safetensors.torch import load_file

    fields, path, _, _ = reference("qwen3_moe")
    for full in world(4, placeholders, fields, path):
        check(full, load_file(path), fields, "local_experts.{1}.linear_fc{0}.weight")
        assert not any(tensor.isnan().any() for tensor in full.values())


def edges():
    from megatron.core import tensor_parallel
    from megatron.core.param_export.compat import all_gather_param, named_params_and_buffers

    with parallel(tp=2):
        told = r"x.weight: no tensor_model_parallel attribute, .*parallel\.(set_defaults_if_not_set_\w+) "
        bare = torch.zeros(2)
        with pytest.raises(ValueError, match=told) as error:
            all_gather_param("x.weight", bare)
        getattr(tensor_parallel, re.search(told, str(error.value))[1])(bare)
        assert torch.equal(all_gather_param("x.weight", bare), bare)
        rank = torch.distributed.get_rank()
        bias = torch.full((3,), float(rank))
        assert all_gather_param("a.mlp.router.expert_bias", bias) is not None
        assert torch.equal(all_gather_param("a.mlp.router.expert_bias", bias), bias)
        sinks = torch.full((2,), float(rank))
        sinks.tensor_model_parallel = False  # what upstream says
        found = all_gather_param("a.core_attention.softmax_offset", sinks)
        assert found.tolist() == [0, 0, 1, 1]
        whole = torch.zeros(2)
        whole.tensor_model_parallel, whole.parallel_mode = True, "duplicated"
        assert all_gather_param("a.linear_q_down_proj.weight", whole).shape == (2,)
        plain = torch.full((2, 1), float(rank))
        plain.tensor_model_parallel, plain.partition_dim = True, 0
        assert all_gather_param("a.linear_fc1.weight", plain)[:, 0].tolist() == [0, 1, 0, 1]
        assert all_gather_param("a.linear_fc1.weight", plain, gated=False)[:, 0].tolist() == [0, 0, 1, 1]
        with pytest.raises(RuntimeError, match=r"translate_gpu_to_cpu .* need the torch_memory_saver"):
            sys.modules["torch_memory_saver"] = None
            next(named_params_and_buffers(None, [torch.nn.Linear(1, 1)], translate_gpu_to_cpu=True))
        saver = SimpleNamespace(get_cpu_backup=lambda t: torch.full_like(t, 9) if t.dim() == 2 else None)
        sys.modules["torch_memory_saver"] = SimpleNamespace(torch_memory_saver=saver)
        linear = torch.nn.Linear(1, 1)
        pairs = dict(named_params_and_buffers(None, [linear], translate_gpu_to_cpu=True))
        del sys.modules["torch_memory_saver"]
        assert pairs["module.module.weight"].item() == 9 and pairs["module.module.bias"] is linear.bias


def test_edges(world):
    world(2, edges)
