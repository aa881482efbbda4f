"""How an export overlaps its steps, what memory that takes, and what is cached between exports."""

import copy
import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.dist.export_references import reference
from tests.dist.world import parallel

LAYOUTS = {"tp2": ("qwen3", dict(tp=2)), "ep2": ("qwen3_moe", dict(ep=2))}


def proven(fields, path):
    from safetensors.torch import load_file

    from megatron.core.param_export import build_plan, load
    from tests.dist import export_models

    state, hf = load_file(path), SimpleNamespace(**fields)
    chunks = export_models.build(hf)
    plan = build_plan(chunks, hf).prove()
    load(plan, state)
    return chunks, plan, state


class Memory(TorchDispatchMode):
    """The most bytes of ``torch.empty`` that were alive at a time."""

    def __init__(self):
        super().__init__()
        self.taken, self.peak = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format:
            storage = out.untyped_storage()
            alive = [(ref, nbytes) for ref, nbytes in self.taken if not ref.expired()]
            self.taken = [*alive, (StorageWeakRef(storage), storage.nbytes())]
            self.peak = max(self.peak, sum(nbytes for _, nbytes in self.taken))
        return out


def gather_aside(rows, row, **kwargs):
    """As all_gather_into_tensor; but gloo's threads, which let go of memory late, never have ``rows``."""
    import torch.distributed as dist

    aside = torch.empty_like(rows)
    dist.all_gather_into_tensor(aside, row, group=kwargs["group"])
    rows.copy_(aside)
    return SimpleNamespace(wait=lambda: None)


def peak(groups, fields, path):
    """Bytes at most in memory, for a caller who looks at one tensor at a time; and how many steps."""
    from megatron.core.param_export import export, exporter

    with parallel(**groups):
        _, plan, state = proven(fields, path)
        list(export(plan, bucket_bytes=1))
        [alone] = plan.schedules.values()
        bucket = 2 * max(step.nbytes for step in alone.steps)
        gathering = {**vars(exporter.dist), "all_gather_into_tensor": gather_aside}
        with Memory() as memory, mock.patch.object(exporter, "dist", SimpleNamespace(**gathering)):
            for name, tensor in export(plan, bucket_bytes=bucket):
                assert torch.equal(tensor, state[name]), name
        steps = list(plan.schedules.values())[-1].steps
        return memory.peak / bucket, len(steps)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_buckets_are_in_memory(world, layout):
    case, groups = LAYOUTS[layout]
    fields, path, _, _ = reference(case)
    for buckets, steps in world(2, peak, groups, fields, path):
        assert 1 < buckets <= 2 and steps > 5


def order(groups, fields, path):
    """What was done, in order: steps begun, steps waited for, tensors handed out."""
    from megatron.core.param_export import export
    from megatron.core.param_export.exporter import _Export

    with parallel(**groups):
        _, plan, _ = proven(fields, path)
        done, number = [], {}
        start, wait = _Export.start, _Export.wait

        def noted_start(self, step):
            number.setdefault(id(step), len(number))
            done.append(("start", number[id(step)]))
            return start(self, step)

        def noted_wait(self, started):
            done.append(("wait", number[id(started.step)]))
            wait(self, started)

        with mock.patch.multiple(_Export, start=noted_start, wait=noted_wait):
            for _ in export(plan, bucket_bytes=30_000):
                if done[-1] != "tensor":
                    done.append("tensor")
        return done, len(number)


def test_the_next_step_is_packed_and_gathered_before_one_is_waited_for(world):
    case, groups = LAYOUTS["tp2"]
    fields, path, _, _ = reference(case)
    for done, steps in world(2, order, groups, fields, path):
        want = [("start", 0)]
        for k in range(steps):
            want += [("start", k + 1)] * (k + 1 < steps) + [("wait", k), "tensor"]
        assert done == want


class Operations(TorchDispatchMode):
    """How much was done with tensors."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations(fields, path):
    """What is done to bring the changes of two layers and of all of them, and how many tensors those are."""
    from megatron.core.param_export import export_changed

    with parallel():
        _, plan, _ = proven(fields, path)
        out = []
        for layers in ("01", "0123456789"):
            chosen = [e for e in plan.entries if "layers." not in e.name or e.name.split(".")[2] in layers]
            index = [torch.arange(0, e.tensor.numel(), 7) for e in chosen]
            value = [e.tensor.detach().view(-1)[i] for e, i in zip(chosen, index, strict=True)]
            changed = [(e.tensor, i, v) for e, i, v in zip(chosen, index, value, strict=True)]
            with Operations() as operations:
                names = [name for name, _, _ in export_changed(plan, changed)]
            out.append((operations.count, len(names)))
        return out


def test_changes_of_more_layers_take_no_more_operations(world):
    fields, path, _, _ = reference("qwen3_moe")
    [((of_two, few), (of_all, many))] = world(1, operations, fields, path)
    assert many > 2 * few and of_all <= of_two + 5


def other_storage(groups, fields, path):
    from megatron.core.param_export import export

    with parallel(**groups):
        _, plan, state = proven(fields, path)
        before = dict(export(plan))
        for entry in plan.entries:
            old = entry.tensor.data
            entry.tensor.data = old + 1
            old.fill_(float("nan"))
        after = dict(export(plan))
        assert len(plan.schedules) == 1
        return all(torch.equal(before[n], t) and torch.equal(after[n], t + 1) for n, t in state.items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_later_export_reads_the_memory_that_parameters_have_by_then(world, layout):
    case, groups = LAYOUTS[layout]
    fields, path, _, _ = reference(case)
    assert world(2, other_storage, groups, fields, path) == [True, True]


def emptied(tensor):
    tensor.untyped_storage().resize_(0)


CHANGES = {
    "converted": lambda tensor: setattr(tensor, "data", tensor.data.half()),
    "reshaped": lambda tensor: setattr(tensor, "data", tensor.data.t().contiguous()),
    "offloaded": lambda tensor: setattr(tensor, "data", torch.empty(0)),
    "emptied": emptied,
}


def changed_after_planning(how, fields, path):
    """On one of two ranks, one tensor is no longer what the plan knows; later it is again."""
    import torch.distributed as dist

    from megatron.core.param_export import StalePlanError, export

    with parallel(tp=2):
        chunks, plan, state = proven(fields, path)
        tensor = chunks[0].decoder.layers[1].mlp.linear_fc1.weight
        old, values = tensor.data, tensor.data.clone()
        if dist.get_rank() == 1:
            CHANGES[how](tensor)
            assert not plan.is_current()
        with pytest.raises(StalePlanError) as error:
            next(export(plan))
        with pytest.raises(StalePlanError, match=re.escape(str(error.value))):
            next(export(plan, bucket_bytes=30_000))  # in several steps
        old.untyped_storage().resize_(values.nbytes)
        tensor.data = old.copy_(values)
        for bucket in ({}, dict(bucket_bytes=30_000)):
            assert all(torch.equal(tensor, state[name]) for name, tensor in export(plan, **bucket))
        return str(error.value)


@pytest.mark.parametrize("how", CHANGES)
def test_tensors_that_were_converted_or_emptied_are_refused(world, how):
    fields, path, _, _ = reference("qwen3")
    text = "the model's tensors were replaced, converted or emptied on rank 1: build a new plan"
    assert world(2, changed_after_planning, how, fields, path) == [text] * 2


def replace_submodule(model):
    layer = model.decoder.layers[0]
    other = copy.copy(layer.mlp.linear_fc2)
    other._parameters = {"weight": torch.nn.Parameter(other.weight.detach().clone())}
    layer.mlp.linear_fc2 = other


def replace_parameter_behind_its_back(model):
    linear = model.decoder.layers[0].mlp.linear_fc2
    linear._parameters["weight"] = torch.nn.Parameter(linear.weight.detach().clone())


def remove_layer(model):
    del model.decoder.layers[-1]


def swap_layers(model):
    layers = model.decoder.layers
    layers[0], layers[1] = layers[1], layers[0]


def swap_parameters(model):
    first, second = (layer.mlp.linear_fc2 for layer in model.decoder.layers[:2])
    first.weight, second.weight = second.weight, first.weight


def add_cache(model):
    model.register_buffer("cache", torch.zeros(1), persistent=False)


def add_scripted(model):
    model.extra = torch.jit.script(torch.nn.Identity())


STRUCTURES = {  # a change, and whether the plan is still current
    "submodule replaced": (replace_submodule, False),
    "parameter replaced": (replace_parameter_behind_its_back, False),
    "layer removed": (remove_layer, False),
    "layers swapped": (swap_layers, False),
    "parameters swapped": (swap_parameters, False),
    "parameter added": (lambda m: m.register_parameter("scale", torch.nn.Parameter(torch.ones(1))), False),
    "buffer added": (lambda m: m.decoder.register_buffer("count", torch.zeros(1)), False),
    "parameter removed": (lambda m: setattr(m.decoder.final_layernorm, "weight", None), False),
    "buffer that is not persistent": (add_cache, True),
    "submodule without tensors": (lambda m: setattr(m, "extra", torch.nn.Identity()), True),
    "scripted submodule": (add_scripted, True),
}


def restructured(how, fields, path):
    """What a plan says twice after a change of the modules, and once after it is undone."""
    change, _ = STRUCTURES[how]
    with parallel():
        (model,), plan, _ = proven(fields, path)
        names = ("_parameters", "_buffers", "_modules")
        before = [(module, {name: {**getattr(module, name)} for name in names}) for module in model.modules()]
        said = [plan.is_current()]
        change(model)
        said += [plan.is_current(), plan.is_current()]
        for module, registries in before:
            vars(module).update(registries)
        return [*said, plan.is_current()]


@pytest.mark.parametrize("how", STRUCTURES)
def test_changes_of_the_modules_are_noticed(world, how):
    fields, path, _, _ = reference("qwen3")
    (said,) = world(1, restructured, how, fields, path)
    _, still_current = STRUCTURES[how]
    assert said == [True, still_current, still_current, True]


def read_fails(how, fields, path):
    """One rank cannot read one parameter: every rank is told, at the end."""
    import torch.distributed as dist

    from megatron.core.param_export import export

    with parallel(tp=2):
        chunks, plan, state = proven(fields, path)
        bad = chunks[0].decoder.layers[1].mlp.linear_fc1.weight

        def read(tensor):
            if tensor is bad and dist.get_rank() == 1:
                if how == "raises":
                    raise OSError("no backup")
                return tensor.double() if how == "dtype" else tensor[:1]
            return tensor

        told, count = None, 0
        try:
            for _ in export(plan, read=read, bucket_bytes=30_000):
                count += 1
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
        again = dict(export(plan, read=lambda tensor: tensor))
        assert all(torch.equal(again[name], tensor) for name, tensor in state.items())
        return told, count


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("raises", "OSError: no backup"),
        ("dtype", r"ValueError: read: expected torch.float32 \[\d+, 36\] for .*linear_fc1.weight, got torch"),
        ("size", r"ValueError: read: expected torch.float32 \[\d+, 36\] for .*, got torch.float32 \[1, 36\]"),
    ],
)
def test_what_one_rank_cannot_read_all_are_told(world, how, cause):
    fields, path, _, _ = reference("qwen3")
    (first, count), (second, _) = world(2, read_fails, how, fields, path)
    assert first == "RuntimeError: the values could not be read on rank 1: what was handed out is wrong"
    assert re.match(cause, second) and count > 50  # to the end


def arguments(fields, path):
    from megatron.core.param_export import export

    with parallel():
        chunks, plan, state = proven(fields, path)
        for wrong, kind in ((chunks, "list"), (chunks[0], "GPTModel")):
            with pytest.raises(TypeError, match=f"plan: expected what build_plan returns, got {kind}"):
                export(wrong)
        for size in ("512MB", None, True, 0):
            with pytest.raises(ValueError, match="bucket_bytes: expected a positive number of bytes, got"):
                export(plan, bucket_bytes=size)
        some = sorted(state)[3:5]
        assert sorted(name for name, _ in export(plan, names=(name for name in some))) == some


def test_arguments(world):
    fields, path, _, _ = reference("qwen3")
    world(1, arguments, fields, path)
