"""Changed elements, receivers, and layouts that the proof must refuse. Round trips: with the families."""

import copy
import dataclasses
import zlib
from itertools import pairwise
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from tests.dist.export_references import reference
from tests.dist.world import parallel

LAYOUTS = {
    "tp1": (1, {}),
    "tp2": (2, dict(tp=2)),
    "pp2": (2, dict(pp=2)),
    "dp2": (2, {}),
    "tp2-pp2": (4, dict(tp=2, pp=2)),
    "ep2": (2, dict(ep=2)),
    "tp2-etp1": (2, dict(tp=2, etp=1)),
    "ep2-pp2": (4, dict(ep=2, pp=2)),
    "ep2-etp2": (4, dict(tp=2, ep=2, etp=2)),
}


def changed_elements(groups, fields, path, receiver, known="parts", batch=2**24):
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
        ps = parallel_state
        ranks = {  # kind of tensor -> data-parallel rank and size, tensor-parallel rank
            "dense": (
                ps.get_data_parallel_rank(),
                ps.get_data_parallel_world_size(),
                ps.get_tensor_model_parallel_rank(),
            ),
            "expert": (
                ps.get_expert_data_parallel_rank(),
                ps.get_expert_data_parallel_world_size(),
                ps.get_expert_tensor_parallel_rank(),
            ),
        }
        changed = []
        for entry in plan.entries:
            dp, dps, tp = ranks[entry.record.kind]
            # replicas and data-parallel ranks change alike; shards differ through their tensor-parallel rank
            shard = 0 if entry.record.replicated else tp
            generator = torch.Generator().manual_seed(zlib.crc32(entry.global_name.encode()) * 8 + shard)
            flat = entry.tensor.detach().view(-1)
            index = torch.randperm(flat.numel(), generator=generator)[: 1 + flat.numel() // 50].sort().values
            if entry.name == "output_layer.weight" and hf.tie_word_embeddings:
                index = index[:0]
            flat[index] += 1 + torch.rand(len(index), generator=generator)
            part = index[index % dps == dp] if known == "parts" else index
            changed.append((entry.tensor, part, flat[part].clone()))
        updated = {name: tensor.clone() for name, tensor in state.items()}
        count, order = 0, []
        with mock.patch("megatron.core.param_export.changed.BATCH", batch):
            for name, index, value in export_changed(plan, changed, receiver, sharded=known != "owners"):
                assert index.dtype == torch.int64 and (index[1:] > index[:-1]).all()
                updated[name].view(-1)[index] = value
                count += len(index)
                order.append(plan.numbers[name])
        assert all(a < b for a, b in pairwise(order))
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


@pytest.mark.parametrize(
    "case, layout",
    [
        ("qwen3", "tp1"),
        ("qwen3", "tp2"),
        ("qwen3-tied", "pp2"),
        ("qwen3", "dp2"),
        ("qwen3", "tp2-pp2"),
        ("qwen3_moe", "ep2"),
        ("deepseek_v3", "ep2-etp2"),
        ("gpt_oss", "ep2"),
    ],
)
def test_changed_elements_arrive(world, case, layout):
    size, groups = LAYOUTS[layout]
    fields, path, _, _ = reference(case)
    receiver = size - 1
    counts = world(size, changed_elements, groups, fields, path, receiver)
    assert counts[receiver] > 500 and all(c is None for r, c in enumerate(counts) if r != receiver)


@pytest.mark.parametrize("batch", [1, 100])
@pytest.mark.parametrize("case, layout", [("qwen3", "tp2-pp2"), ("gpt_oss", "ep2")])
def test_changed_elements_arrive_in_small_batches(world, case, layout, batch):
    size, groups = LAYOUTS[layout]
    fields, path, _, _ = reference(case)
    assert world(size, changed_elements, groups, fields, path, 0, batch=batch)[0] > 500


@pytest.mark.parametrize("known", ["all", "owners"])
@pytest.mark.parametrize("case, layout", [("qwen3", "dp2"), ("qwen3_moe", "tp2-etp1")])
def test_changes_that_several_ranks_report_count_once(world, case, layout, known):
    size, groups = LAYOUTS[layout]
    fields, path, _, _ = reference(case)
    assert world(size, changed_elements, groups, fields, path, 0, known=known)[0] > 500


def given_receivers(groups, fields, path, receivers):
    """How many tensors arrived here, all of them right."""
    from safetensors.torch import load_file

    from megatron.core.param_export import build_plan, export, load
    from tests.dist import export_models

    state, hf = load_file(path), SimpleNamespace(**fields)
    with parallel(**groups):
        plan = build_plan(export_models.build(hf), hf).prove()
        load(plan, state)
        live = {e.tensor.untyped_storage().data_ptr() for e in plan.entries}
        count = 0
        for name, tensor in export(plan, receivers, bucket_bytes=30_000):
            assert torch.equal(tensor, state[name]), name
            assert tensor.untyped_storage().data_ptr() not in live, name
            tensor.fill_(float("nan"))  # ours to write: neither parameters nor later tensors may suffer
            count += 1
        assert len(plan.schedules) == 1
        for step in next(iter(plan.schedules.values())).steps:
            assert step.nbytes <= 15_000 or len({name.split(".")[2] for name in step.names}) == 1
        again = dict(export(plan, receivers, bucket_bytes=30_000))
        assert len(plan.schedules) == 1 and len(again) == count
        assert all(torch.equal(tensor, state[name]) for name, tensor in again.items())
        return count


@pytest.mark.parametrize(
    "case, layout, receivers",
    [
        ("qwen3", "tp2", [1]),
        ("qwen3", "tp2", 0),
        ("qwen3", "pp2", [0]),
        ("qwen3", "pp2", 1),
        ("qwen3-tied", "tp2-pp2", [3]),
        ("qwen3", "tp2-pp2", [1, 2]),
        ("qwen3_moe", "ep2", [1]),
        ("qwen3_moe", "ep2-pp2", [2]),
        ("qwen3_moe", "ep2-pp2", "nodes"),
        ("gpt_oss", "ep2-pp2", "all"),
    ],
)
def test_only_the_given_receivers_get_tensors(world, case, layout, receivers):
    size, groups = LAYOUTS[layout]
    fields, path, _, _ = reference(case)
    named = {"nodes": [0], "all": range(size)}.get(receivers if isinstance(receivers, str) else "")
    named = named or ([receivers] if isinstance(receivers, int) else receivers)
    counts = world(size, given_receivers, groups, fields, path, receivers)
    assert counts == [len(torch_names(path)) if rank in named else 0 for rank in range(size)]


def rearranged(fields, path):
    """The tensors that need a copy after the gather when each travels alone; and that all are right."""
    from safetensors.torch import load_file

    from megatron.core.param_export import build_plan, export, load
    from tests.dist import export_models

    state, hf = load_file(path), SimpleNamespace(**fields)
    with parallel(tp=2):
        plan = build_plan(export_models.build(hf), hf).prove()
        load(plan, state)
        for name, tensor in export(plan, bucket_bytes=1):
            assert torch.equal(tensor, state[name]) and tensor.is_contiguous(), name
        [schedule] = plan.schedules.values()
        built = set()
        for step in schedule.steps:
            for group in step.groups:
                if step.views[group.place.view][0] == len(step.parts):  # no part's bytes
                    built |= {step.names[member] for member in group.members}
        return built


def test_shards_that_lie_whole_in_the_gathered_bytes_are_not_copied(world):
    """Halves of the vocabulary (padding and all) and the replicated norms; not what rows of two ranks mix."""
    fields, path, _, _ = reference("qwen3-8-heads")
    for names in world(2, rearranged, fields, path):
        kinds = {name.split(".")[-2] for name in names}
        assert kinds == {f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")}


def torch_names(path):
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return list(file.keys())


def broken(how, fields):
    """Prove the plan of a model that was broken on one rank; the message, which all ranks must share."""
    import torch.distributed as dist

    from megatron.core.param_export import LayoutError, build_plan, layout, pieces
    from megatron.core.param_export import plan as plan_module
    from megatron.core.param_export.families.family import BoundFamily
    from tests.dist import export_models

    hf = SimpleNamespace(**fields)
    one = dist.get_rank() == 1
    undo = lambda: None  # noqa: E731
    with parallel(tp=2):
        biased = how == "bias that the family does not have"
        chunks = export_models.build(hf, add_qkv_bias=biased)
        layers = chunks[0].decoder.layers
        if how == "layer number repeated" and one:
            layers[3].layer_number = 3
        elif how == "parameter without a rule" and one:
            layers[1].mlp.register_parameter("temperature", torch.nn.Parameter(torch.ones(3)))
        elif how == "buffer without a rule" and one:
            layers[1].mlp.register_buffer("running", torch.ones(3))
        elif how == "other configuration" and one:
            hf.intermediate_size += 4
        elif how == "fewer layers in the configuration":
            hf.num_hidden_layers -= 1
        elif how == "other head counts":
            layers[0].self_attention.config = copy.copy(chunks[0].config)
            layers[0].self_attention.config.num_query_groups = 4
        elif how == "dtype of one shard" and one:
            layers[1].mlp.linear_fc2.weight.data = layers[1].mlp.linear_fc2.weight.data.bfloat16()
        elif how == "zero-centred norms":
            chunks[0].config.layernorm_zero_centered_gamma = True
        elif how == "sharded a second time":
            chunks[0].pg_collection = copy.copy(chunks[0].pg_collection)
            chunks[0].pg_collection.gtp_remat = SimpleNamespace(size=lambda: 2)
        elif how == "quantised storage":
            data = layers[0].mlp.linear_fc2.weight.detach()
            quantised = torch.Tensor._make_subclass(type("Float8Tensor", (torch.Tensor,), {}), data)
            layers[0].mlp.linear_fc2.weight = torch.nn.Parameter(quantised)
        elif how == "fully sharded":
            chunks = [type("FullyShardedDataParallel", (torch.nn.Module,), {})()]
        elif how == "unknown linear layer":
            layers[0].self_attention.linear_proj.__class__ = type("LoraLinear", (torch.nn.Module,), {})
        elif how == "fused multi-layer perceptron":
            layers[0].mlp.__class__ = type("TEFusedMLPWithGroupedLinear", (type(layers[0].mlp),), {})
        elif how == "missing module" and not one:
            layers[2].self_attention.q_layernorm = None
        elif how == "glu halves swapped" and one:
            kept = layout.glu
            layout.glu = lambda place, roles, *rest: kept(place, roles[::-1], *rest)
            undo = lambda: setattr(layout, "glu", kept)  # noqa: E731
        elif how == "glu halves overlap" and one:
            kept = layout.glu
            layout.glu = lambda place, roles, *rest: kept(place, (roles[0], roles[0]), *rest)
            undo = lambda: setattr(layout, "glu", kept)  # noqa: E731
        elif how == "glu half missing" and one:
            kept = layout.glu
            layout.glu = lambda *args: list(kept(*args))[:1]
            undo = lambda: setattr(layout, "glu", kept)  # noqa: E731
        elif how == "two rules" and one:
            kept = BoundFamily.boxes
            BoundFamily.boxes = lambda self, piece: kept(self, piece) * (1 + (piece.role == "lm_head.weight"))
            undo = lambda: setattr(BoundFamily, "boxes", kept)  # noqa: E731
        elif how == "another plan" and one:
            kept = plan_module.Plan._digest
            plan_module.Plan._digest = lambda plan: "0" * 64
            undo = lambda: setattr(plan_module.Plan, "_digest", kept)  # noqa: E731
        elif how == "columns of another rank" and one:
            kept = pieces.Span.even
            pieces.Span.even = lambda local, rank=0, ranks=1: kept(local, 0, ranks)
            undo = lambda: setattr(pieces.Span, "even", kept)  # noqa: E731
        elif how == "padding kept":
            kept = plan_module._VOCABULARY
            plan_module._VOCABULARY = ()
            undo = lambda: setattr(plan_module, "_VOCABULARY", kept)  # noqa: E731
        elif how == "owner missing" and one:
            kept = plan_module.position
            replica = {"dense": 1, "expert": 1}
            plan_module.position = lambda *args: dataclasses.replace(kept(*args), replica=replica)
            undo = lambda: setattr(plan_module, "position", kept)  # noqa: E731
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
        (
            "missing module",
            r"rank 1: its dense tensors are not the shards .*\n"
            r"  model.layers.2.self_attn.q_norm.weight: no rank owns",
        ),
        (
            "fewer layers in the configuration",
            r"layers.4.input_layernorm.weight: written by rank 0 decoder.layers.4.*, but not a tensor of",
        ),
        ("other head counts", r"layers.0.self_attention.linear_qkv: 100 rows, expected 140"),
        (
            "dtype of one shard",
            r"layers.1.mlp.down_proj.weight: parts of different dtypes: torch.bfloat16, torch.float32",
        ),
        (
            "bias that the family does not have",
            r"linear_qkv.bias: the qwen3 family has no rule for attn.q.bias",
        ),
        ("glu half missing", r"rank 1: .*linear_fc1.weight: its boxes leave a gap at \[22, 0\] of shape"),
        ("two rules", r"rank 1: .*output_layer.weight: the qwen3 family has two rules for lm_head.weight"),
        ("another plan", r"rank 1: its plan differs from that of rank 0"),
        ("zero-centred norms", r"layernorm_zero_centered_gamma is not supported"),
        ("sharded a second time", r"gtp_remat groups are not supported"),
        (
            "quantised storage",
            r"layers.0.mlp.linear_fc2.weight: storage of type Float8Tensor is not supported",
        ),
        ("fully sharded", r"FullyShardedDataParallel is not supported"),
        ("unknown linear layer", r"no sharding rule for a linear layer of class LoraLinear"),
        ("fused multi-layer perceptron", r"TEFusedMLPWithGroupedLinear is not supported: it may store"),
        (
            "glu halves swapped",
            r"rank 1: decoder.layers.0.mlp.linear_fc1.weight is divided otherwise than on rank 0",
        ),
        (
            "glu halves overlap",
            r"layers.0.mlp.gate_proj.weight: overlap at \[22, 0\] of \[44, 36\], covered by rank 1",
        ),
        ("columns of another rank", r"layers.0.self_attn.o_proj.weight: overlap at \[0, 0\] of \[36, 60\]"),
        (
            "padding kept",
            r"embed_tokens.weight: the configuration says \(53, 36\), but .* \(72, 36\) in the model",
        ),
        ("owner missing", r"gap at \[\d+, \d+\] of \[\d+, \d+\], covered by no rank"),
        ("two owners", r"norm.weight: overlap at \[0\] of \[36\], covered by rank 0 (\S+), rank 1 \1"),
    ],
)
def test_a_broken_layout_is_refused_alike_on_all_ranks(world, how, message):
    import re

    fields, _, _, _ = reference("qwen3")
    first, second = world(2, broken, how, fields)
    assert first == second is not None
    assert re.search(message, first), first
    assert first.startswith("the layout plan is not exact: ")
    assert first.count("\n") <= 11


def broken_experts(how, fields):
    import torch.distributed as dist

    from megatron.core.param_export import LayoutError, build_plan
    from tests.dist import export_models

    hf = SimpleNamespace(**fields)
    with parallel(ep=2):
        chunks = export_models.build(hf)
        moe = chunks[0].decoder.layers[2].mlp
        if dist.get_rank() == 1:
            if how == "expert offset":
                moe.local_expert_indices = [1, 2]
            elif how == "expert order":
                moe.local_expert_indices = [3, 2]
            elif how == "expert missing":
                del moe.experts.local_experts[1], moe.local_expert_indices[1]
        try:
            build_plan(chunks, hf).prove()
        except LayoutError as error:
            return str(error)


@pytest.mark.parametrize(
    "how, message",
    [
        (
            "expert offset",
            r"experts.1.gate_proj.weight: overlap at \[0, 0\] of .*, covered by rank 0 (.*), rank 1 \1",
        ),
        ("expert missing", r"rank 1: its expert tensors are not the shards that rank 0 has"),
        ("expert order", None),  # a permutation of the experts that the module itself states is no fault
    ],
)
def test_broken_experts_are_refused(world, how, message):
    import re

    fields, _, _, _ = reference("qwen3_moe")
    first, second = world(2, broken_experts, how, fields)
    assert first == second
    assert (message is None) == (first is None)
    assert message is None or re.search(message, first), first


def misuse(fields):
    from megatron.core.param_export import StalePlanError, build_plan, export, export_changed, load
    from megatron.core.param_export.exporter import receiving_ranks
    from tests.dist import export_models

    hf = SimpleNamespace(**fields)
    told = []
    with parallel():
        chunks = export_models.build(hf)
        plan = build_plan(chunks, hf)
        for use in (lambda: export(plan), lambda: load(plan, {}), lambda: next(export_changed(plan, []))):
            with pytest.raises(ValueError, match="the plan is not proven: call prove"):
                use()
        plan.prove()
        assert receiving_ranks(plan, torch.tensor(0)) == receiving_ranks(plan, torch.tensor([0])) == [0]
        assert receiving_ranks(plan, np.array([0])) == receiving_ranks(plan, np.int64(0)) == [0]
        wrong = ([1], "some", [], -1, True, [True], 1.0, [0.0], None, {"a": 1}, object())
        for receivers in (*wrong, torch.tensor(1), torch.tensor([0.0]), torch.tensor([[0]]), np.array([])):
            with pytest.raises(ValueError, match=r"receivers: 'all', 'nodes' or ranks of 0..0, got") as error:
                export(plan, receivers)
            told.append(str(error.value))
        for size in (0, -1):
            with pytest.raises(ValueError, match=f"bucket_bytes: expected a positive number.*, got {size}$"):
                export(plan, bucket_bytes=size)
        with pytest.raises(ValueError, match=r"names: 2 are not tensors of this model: \['a', 'b'\]"):
            export(plan, names=["b", "lm_head.weight", "a"])
        weight = chunks[0].output_layer.weight
        with pytest.raises(KeyError, match=r"a tensor of shape \[3\] is not in this plan"):
            plan.to_full(torch.zeros(3), torch.zeros(1, dtype=torch.int64))
        with pytest.raises(
            ValueError, match=r"output_layer.weight: values are torch.float64, the parameter is"
        ):
            next(export_changed(plan, [(weight, torch.tensor([1]), torch.zeros(1, dtype=torch.float64))]))
        for index in (torch.tensor([1]), torch.tensor([1, 2]).int(), torch.ones(2, dtype=torch.bool)):
            message = r"output_layer.weight: expected int64 indices \[n\] for n = 2 values, got torch"
            with pytest.raises(ValueError, match=message):
                next(export_changed(plan, [(weight, index, torch.zeros(2))]))
        with pytest.raises(ValueError, match=r"lm_head.weight: shape \(1,\), expected \(53, 36\)"):
            load(plan, lambda name: torch.zeros(1 if name == "lm_head.weight" else plan.expected[name]))
        assert plan.is_current()
        chunks[0].output_layer.weight = torch.nn.Parameter(weight.detach().clone())
        assert not plan.is_current()
        with pytest.raises(StalePlanError, match=r"^the model's tensors were replaced, .* on rank 0: build"):
            load(plan, plan.expected.__getitem__)
    return told


def test_misuse_is_told(world):
    fields, _, _, _ = reference("qwen3")
    (told,) = world(1, misuse, fields)
    assert told[0].endswith("got [1]")


def released(fields, path):
    """Parameters whose memory is gone are read from torch_memory_saver's host copies; the others are not."""
    import sys

    from safetensors.torch import load_file

    from megatron.core.param_export import build_plan, compat, export, load
    from tests.dist import export_models

    state, hf = load_file(path), SimpleNamespace(**fields)
    with parallel(tp=2):
        chunks = export_models.build(hf)
        plan = build_plan(chunks, hf).prove()
        load(plan, state)
        backup = {id(e.tensor): e.tensor.detach().clone() for e in plan.entries if "norm" not in e.name}
        for entry in plan.entries:
            if id(entry.tensor) in backup:
                entry.tensor.data.fill_(float("nan"))
        saver = SimpleNamespace(get_cpu_backup=lambda tensor: backup.get(id(tensor)))
        sys.modules["torch_memory_saver"] = SimpleNamespace(torch_memory_saver=saver)
        read = compat.memory_saver_backups()
        del sys.modules["torch_memory_saver"]
        return all(torch.equal(tensor, state[name]) for name, tensor in export(plan, read=read))


def test_parameters_can_be_read_from_a_backup(world):
    fields, path, _, _ = reference("qwen3")
    assert world(2, released, fields, path) == [True, True]


def shares(fields, path):
    import torch.distributed as dist
    from safetensors.torch import load_file

    from megatron.core.param_export import build_plan, load
    from megatron.weight_sync import fingerprint, fingerprint_boxes
    from tests.dist import export_models

    state, hf = load_file(path), SimpleNamespace(**fields)
    with parallel(tp=2, etp=1, ep=2):
        plan = build_plan(export_models.build(hf), hf).prove()
        load(plan, state)
        mine = fingerprint_boxes((e.tensor, e.boxes) for e in plan.entries if e.owner)
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        return everyone, fingerprint(state)


def test_fingerprint_shares_of_the_owners_add_up(world):
    from megatron.weight_sync import add

    fields, path, _, _ = reference("gpt_oss")
    for everyone, want in world(4, shares, fields, path):
        assert add(*everyone) == want


def replaced(fields):
    """Replace a parameter on one rank, then one by its equal in place, which is no replacement."""
    import torch.distributed as dist

    from megatron.core.param_export import build_plan, export, export_changed
    from tests.dist import export_models

    hf = SimpleNamespace(**fields)
    with parallel(tp=2):
        chunks = export_models.build(hf)
        plan = build_plan(chunks, hf).prove()
        linear = chunks[0].decoder.layers[0].mlp.linear_fc2
        linear.weight.data = linear.weight.data.clone()
        assert len(list(export(plan))) == len(plan.expected)
        if dist.get_rank() == 1:
            linear.weight = torch.nn.Parameter(linear.weight.detach())
        told = []
        for use in (lambda: next(export(plan)), lambda: next(export_changed(plan, []))):
            with pytest.raises(ValueError) as error:
                use()
            told.append(str(error.value))
        return told


def test_replaced_parameters_are_noticed_on_all_ranks(world):
    fields, _, _, _ = reference("qwen3")
    message = "the model's tensors were replaced, converted or emptied on rank 1: build a new plan"
    assert world(2, replaced, fields) == [[message, message]] * 2


def mixed_dtypes(groups, fields, path):
    """Parameters in bf16, expert biases in fp32."""
    from safetensors.torch import load_file

    from megatron.core.param_export import build_plan, export, export_changed, load
    from tests.dist import export_models

    hf = SimpleNamespace(**fields)
    state = load_file(path)
    state = {n: t if n.endswith("correction_bias") else t.bfloat16() for n, t in state.items()}
    with parallel(**groups):
        chunks = export_models.build(hf)
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.data = parameter.data.bfloat16()
        plan = build_plan(chunks, hf).prove()
        load(plan, state)
        for name, tensor in export(plan, bucket_bytes=20_000):
            assert tensor.dtype == state[name].dtype and torch.equal(tensor, state[name]), name
        whole = [(e.tensor, torch.arange(e.tensor.numel()), e.tensor.detach().view(-1)) for e in plan.entries]
        found = {name: torch.full_like(tensor, float("nan")) for name, tensor in state.items()}
        for name, index, value in export_changed(plan, whole):
            assert value.dtype == state[name].dtype
            found[name].view(-1)[index] = value
        if plan.rank == 0:
            assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
        return sorted({str(entry.tensor.dtype) for entry in plan.entries})


@pytest.mark.parametrize("layout", ["tp2", "ep2-pp2"])
def test_dtypes_are_kept(world, layout):
    size, groups = LAYOUTS[layout]
    fields, path, _, _ = reference("deepseek_v3")
    for dtypes in world(size, mixed_dtypes, groups, fields, path):
        assert dtypes == ["torch.bfloat16", "torch.float32"]


def no_expert_group(fields):
    import torch.distributed as dist

    from megatron.core.param_export import LayoutError, build_plan
    from tests.dist import export_models

    hf = SimpleNamespace(**fields)
    with parallel(ep=2):
        chunks = export_models.build(hf)
        if dist.get_rank() == 1:
            chunks[0].pg_collection = copy.copy(chunks[0].pg_collection)
            chunks[0].pg_collection.tp_ep = None
        with pytest.raises(LayoutError, match=r"rank 1: the tp_ep group has 1 ranks, expected 2 x 1"):
            build_plan(chunks, hf).prove()
        with pytest.raises(LayoutError, match=r"rank 1: the tp_ep group has 1 ranks, expected 2 x 1"):
            build_plan(chunks, hf).prove()


def test_a_missing_process_group_is_named(world):
    fields, _, _, _ = reference("qwen3_moe")
    world(2, no_expert_group, fields)


def unlike_replica(fields):
    import torch.distributed as dist

    from megatron.core.param_export import LayoutError, build_plan
    from tests.dist import export_models

    hf = SimpleNamespace(**fields)
    with parallel():
        chunks = export_models.build(hf)
        if dist.get_rank() == 1:
            chunks[0].output_layer.weight.data = chunks[0].output_layer.weight.data.bfloat16()
        with pytest.raises(LayoutError, match=r"dense tensors differ from those of its replica, rank 0"):
            build_plan(chunks, hf).prove()


def test_replicas_hold_the_same_kinds_of_tensors(world):
    fields, _, _, _ = reference("qwen3")
    world(2, unlike_replica, fields)


def part_of_the_ranks(fields):
    """A plan over fewer ranks than the model's groups have."""
    import torch.distributed as dist

    from megatron.core.param_export import LayoutError, build_plan
    from tests.dist import export_models

    hf = SimpleNamespace(**fields)
    with parallel(tp=2):
        chunks = export_models.build(hf)
        alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
        with pytest.raises(LayoutError, match=r"the tp group has ranks outside of the plan's group: \["):
            build_plan(chunks, hf, group=alone).prove()


def test_a_plan_over_too_few_ranks_is_refused(world):
    fields, _, _, _ = reference("qwen3")
    world(2, part_of_the_ranks, fields)
