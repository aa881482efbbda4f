"""Every path by which values reach the model: what a hook around the copy sees of it, and what the diff says.

A naive hook compares a shard before and after the copy. Where that is wrong, `naive` shows it; the diff must
let a receiver's copy follow the model exactly all the same, or refuse.
"""

import types

import pytest
import torch
from torch.overrides import TorchFunctionMode

import megatron.core.optimizer as optimizers
from megatron.core.optimizer import sparse_diff
from megatron.core.optimizer.sparse_diff import attach
from tests.dist.small_optimizer import bits, build, changed_since, snapshot, step

pytestmark = pytest.mark.usefixtures("single")


@pytest.fixture(autouse=True)
def off(monkeypatch):
    monkeypatch.delenv("SPARSERL_STATE", raising=False)
    previous = sparse_diff.register_manager_factory(None)
    yield
    sparse_diff.register_manager_factory(previous)


class NaiveHook:
    """The union of what differs before and after each copy."""

    def __init__(self, model_param, shard_model_weight, shard_main_weight, param_range):
        self.start, self.indices, self.copies = param_range.start, set(), 0

    def before_copy(self, shard_model_weight):
        self.before = shard_model_weight.clone()

    def after_copy(self, shard_model_weight, shard_main_weight):
        self.copies += 1
        self.indices |= {i + self.start for i in changed_since(self.before, shard_model_weight).tolist()}


def tensors_of(chunk):
    tensors = dict([*chunk.named_parameters(), *chunk.named_buffers()])
    return {name: tensor for name, tensor in tensors.items() if "scratch" not in name}


def naive(make, play):
    """Names of the tensors for which the naive hook misses a change that `play` makes."""
    sparse_diff.register_manager_factory(NaiveHook)
    chunk, optimizer = make()
    sparse_diff.register_manager_factory(None)
    base = snapshot(chunk)
    play(chunk, optimizer)
    missed = set()
    for name, tensor in tensors_of(chunk).items():
        known = getattr(getattr(tensor, "_sparse_manager", None), "indices", set())
        if set(changed_since(base[name], tensor).tolist()) - known:
            missed.add(name.removeprefix("module."))
    return missed


def follow(make, play, syncs=2, **options):
    """Play, sync to a receiver's copy and compare, `syncs` times; the diff, and the last sync's indices."""
    chunk, optimizer = make()
    diff = attach(optimizer, model_chunks=[chunk], **options)
    receiver = snapshot(chunk)
    for version in range(syncs):
        play(chunk, optimizer)
        diff.gather_changed()
        sent = {}
        for name, tensor in tensors_of(chunk).items():
            indices, values = diff.changed(tensor)
            receiver[name].view(-1)[indices] = values
            assert torch.equal(bits(receiver[name]), bits(tensor)), name
            sent[name.removeprefix("module.")] = indices.tolist()
        diff.clear(version)
    return diff, sent


def routes(diff):
    return {entry.name.removeprefix("module."): entry.shard.route for entry in diff}


def steps(chunk, optimizer, seeds=(1, 2), density=0.05):
    for seed in seeds:
        step(chunk, optimizer, seed, density=density)


# Parameters without a main copy


@pytest.mark.parametrize("distributed", [True, False])
def test_fp32_parameters_are_written_in_place(distributed):
    def make():
        return build(torch.float32, distributed=distributed)

    assert naive(make, steps) == {"first", "second", "bias", "last", "scale"}
    diff, sent = follow(make, steps)
    assert {name for name, route in routes(diff).items() if route != "shadow"} == {"fixed"}
    assert routes(diff)["fixed"] == "digest" and "digest" in diff.report()
    assert sent["second"] and sent["counts"] == []


def test_an_fp32_parameter_beside_bf16_ones():
    assert naive(build, steps) == {"scale"}
    diff, sent = follow(build, steps)
    assert {n for n, r in routes(diff).items() if r == "hooked"} == {"first", "second", "bias", "last"}
    assert sent["scale"] and len(sent["second"]) < 0.3 * 65 * 33


@pytest.mark.parametrize("distributed", [True, False])
def test_fp16_with_a_loss_scale_and_skipped_steps(distributed):
    def make():
        scaler = {"initial_loss_scale": 2.0**8}
        return build(torch.float16, distributed=distributed, fp32=False, config=scaler)

    def play(chunk, optimizer):
        for seed, scale in ((1, 2.0**8), (2, float("inf")), (3, 2.0**8)):
            done, *_ = step(chunk, optimizer, seed, density=0.1, scale=scale)
            assert done == (scale != float("inf"))

    diff, sent = follow(make, play)
    assert routes(diff)["second"] == "hooked" and 0 < len(sent["second"]) < 65 * 33

    def only_overflow(chunk, optimizer):
        assert not step(chunk, optimizer, 4, scale=float("nan"))[0]

    assert not any(follow(make, only_overflow)[1].values())


class FusedAdamStandIn(torch.optim.AdamW):
    """Writes 16-bit parameters itself from masters of its own, as TE's precision-aware FusedAdam does."""

    def __init__(self, params, lr, weight_decay, betas, eps, **_):
        super().__init__(params, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps)
        self.masters = {}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                master = self.masters.setdefault(param, param.detach().clone().float())
                master -= group["lr"] * param.decoupled_grad.sign()
                param.copy_(master)


def test_a_precision_aware_optimizer_writes_parameters_itself(monkeypatch):
    monkeypatch.setattr(optimizers, "Adam", FusedAdamStandIn)
    monkeypatch.setattr(optimizers, "USING_PYTORCH_OPTIMIZER", False)

    def make():
        aware = ("use_precision_aware_optimizer", "use_precision_aware_optimizer_no_fp8_or_ds_fp8")
        return build(fp32=False, forced=dict.fromkeys(aware, True))

    assert naive(make, steps) == {"first", "second", "bias", "last"}
    diff, sent = follow(make, steps)
    assert routes(diff)["second"] == "shadow" and 0 < len(sent["second"]) < 0.3 * 65 * 33
    assert "precision-aware" in diff.report()


# HybridDeviceOptimizer, on a machine without a second device


class TwoPlaces(TorchFunctionMode):
    """Tensors count as on the device unless they, or what they were made from, went through `cpu()`."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func == torch.Tensor.is_cuda.__get__:
            return not getattr(args[0], "_on_host", False)
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.cpu:
            result = result.clone()
            result._on_host = True
        elif func in (torch.Tensor.detach, torch.Tensor.clone, torch.Tensor.float, torch.Tensor.pin_memory):
            if getattr(args[0], "_on_host", False):
                result._on_host = True
        return result


@pytest.mark.parametrize("aware", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fraction", [0.0, 0.4, 1.0])
def test_hybrid_device_optimizer(monkeypatch, aware, overlap, fraction):
    monkeypatch.setattr(optimizers, "USING_PYTORCH_OPTIMIZER", False)

    def make():
        return build(
            lr=1e-2,
            fp32=False,  # upstream's HybridDeviceOptimizer takes no fp32 parameters from DistributedOptimizer
            config={
                "optimizer_cpu_offload": True,
                "optimizer_offload_fraction": fraction,
                "overlap_cpu_optimizer_d2h_h2d": overlap,
                "use_precision_aware_optimizer": aware,
            },
        )

    with TwoPlaces():
        sparse_diff.register_manager_factory(NaiveHook)
        chunk, optimizer = make()
        sparse_diff.register_manager_factory(None)
        hybrid = optimizer.chained_optimizers[0].optimizer
        offloaded = sum(p.numel() for p in hybrid.cpu_copys_map_gpu_param)
        assert (offloaded > 0) == (fraction > 0) and (hybrid.gpu_optimizer is None) == (fraction == 1.0)
        steps(chunk, optimizer)
        managers = {n: p._sparse_manager for n, p in chunk.named_parameters() if p.requires_grad}
        assert {manager.copies for manager in managers.values()} == {2}  # once per step, never twice
        assert managers["module.second"].indices

        diff, sent = follow(make, steps)
        assert routes(diff)["second"] == "hooked" and 0 < len(sent["second"])
        assert ("HybridDeviceOptimizer" in diff.report()) == aware


# Written outside of the step


def test_qk_clip_scales_weights_after_the_step():
    def make():
        chunk, optimizer = build()
        attention = torch.nn.Module()
        attention.config = types.SimpleNamespace(qk_clip=True)
        attention.clip_qk = lambda: None
        attention.linear_qkv = torch.nn.Module()
        attention.linear_qkv.weight = chunk.module.second
        del chunk.module.second
        chunk.module.attention = attention
        return chunk, optimizer

    def play(chunk, optimizer):
        steps(chunk, optimizer)
        chunk.module.attention.linear_qkv.weight.data[3:9] *= 0.5  # as clip_qk: after the optimizer's step

    assert naive(make, play) == {"scale", "attention.linear_qkv.weight"}
    diff, sent = follow(make, play, syncs=1)
    assert routes(diff)["attention.linear_qkv.weight"] == "shadow" and routes(diff)["first"] == "hooked"
    assert set(range(3 * 33, 9 * 33)) <= set(sent["attention.linear_qkv.weight"])
    assert "then qk_clip" in diff.report()
    follow(make, play, syncs=3)


def test_buffers_and_frozen_parameters():
    def play(chunk, optimizer):
        chunk.module.counts[2] += 1  # as expert_bias: before the step
        steps(chunk, optimizer)
        chunk.module.fixed.data[5] += 1

    assert naive(build, play) == {"scale", "counts", "fixed"}
    _, sent = follow(build, play)
    assert sent["counts"] == [2] and sent["fixed"] == list(range(11))
    assert follow(build, steps)[1]["fixed"] == []


def test_parameters_without_a_gradient_are_not_sent():
    def play(chunk, optimizer):
        chunk.zero_grad_buffer()
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0
        optimizer.step()

    assert not any(follow(build, play)[1].values())


@pytest.mark.parametrize("distributed", [True, False])
def test_a_main_weight_without_a_gradient(distributed):
    """The inner optimizer passes over it, and it is still copied; what was written past it is put back."""

    def make():
        return build(distributed=distributed)

    def play(chunk, optimizer, write=()):
        step(chunk, optimizer, 1, density=0.05)
        for index in write:
            chunk.module.second.data.view(-1)[index] = 7.0
        chunk.zero_grad_buffer()
        for param in chunk.parameters():
            if param.requires_grad:
                param.main_grad.fill_(1e-3)
        optimizer.prepare_grads()
        chunk.module.second.main_param.grad = None
        optimizer.step_with_ready_grads()

    diff, sent = follow(make, play)
    assert routes(diff)["second"] == "hooked" and 0 < len(sent["second"]) < 0.3 * 65 * 33
    assert len(sent["first"]) > 60  # it has a gradient, and a step changes nearly all of it

    def written(chunk, optimizer):
        play(chunk, optimizer, write=(5, 700))

    _, sent = follow(make, written)
    assert {5, 700} <= set(sent["second"])


@pytest.mark.parametrize("distributed", [True, False])
def test_a_value_that_returns_between_two_syncs(distributed):
    def make():
        return build(distributed=distributed)

    def play(chunk, optimizer):
        main = chunk.module.second.main_param
        old = main.detach().clone()
        steps(chunk, optimizer, density=0.02)
        main.data.copy_(old)
        for leaf in optimizer.chained_optimizers:
            leaf._copy_main_params_to_model_params()

    _, sent = follow(make, play)
    assert sent["second"] and sent["first"]


# Weights that are replaced


def test_load_state_dict_makes_the_next_sync_whole():
    def play(chunk, optimizer):
        steps(chunk, optimizer)
        state = {k: v + 1 if v.is_floating_point() else v for k, v in chunk.module.state_dict().items()}
        chunk.module.load_state_dict(state)
        optimizer.reload_model_params()
        steps(chunk, optimizer, seeds=(3,))

    assert {"first", "second", "bias", "last"} <= naive(build, play)
    _, sent = follow(build, play)
    assert sent["second"] == list(range(65 * 33)) and sent["first"] == list(range(91))
    chunk, optimizer = build()
    diff = attach(optimizer)
    chunk.module.load_state_dict(chunk.module.state_dict())
    assert "whole next: load_state_dict" in diff.report() and diff.is_dense(chunk.module.first)
    assert not diff.is_dense(chunk.module.scale)  # compared, so nothing is unknown


@pytest.mark.parametrize("distributed", [True, False])
def test_weights_written_past_everything_are_noticed_by_the_reload(distributed):
    def make():
        return build(distributed=distributed)

    def play(chunk, optimizer):
        steps(chunk, optimizer)
        chunk.module.second.data.add_(1)
        optimizer.reload_model_params()
        steps(chunk, optimizer, seeds=(3,), density=0.01)

    assert "second" in naive(make, play)
    assert len(follow(make, play)[1]["second"]) == 65 * 33


@pytest.mark.parametrize("distributed", [True, False])
def test_a_checkpoint_of_the_optimizer_reaches_the_model_through_the_copy(distributed):
    """Main weights are loaded, the model is not: until the next step it has not changed."""

    def make():
        return build(distributed=distributed, fp32=False)

    def mains(chunk):
        return [p.main_param for p in chunk.parameters() if p.requires_grad]

    def play(chunk, optimizer):
        held = [main.detach().clone() for main in mains(chunk)]
        steps(chunk, optimizer)
        for main, old in zip(mains(chunk), held, strict=True):
            main.data.copy_(old * 1.5)  # as loading does, in place
        steps(chunk, optimizer, seeds=(3,), density=0.01)

    assert naive(make, play) == set()
    _, sent = follow(make, play)
    assert len(sent["second"]) > 0.9 * 65 * 33


def test_memory_that_was_lost_makes_the_next_sync_whole():
    """What torch_memory_saver leaves when it puts a pool to sleep and wakes it: pages of other content."""
    chunk, optimizer = build()
    diff = attach(optimizer)
    receiver = snapshot(chunk)
    for version, lost in enumerate((False, True, False)):
        steps(chunk, optimizer, seeds=(5 * version + 1,))
        if lost:
            for entry in diff:
                if entry.shard.route == "hooked":
                    entry.shard.bits.words.zero_()
                    entry.shard.bits.canary.zero_()
                elif hasattr(entry.shard, "_store"):
                    entry.shard._store.fill_(0)
            steps(chunk, optimizer, seeds=(5 * version + 2,))  # and training went on before anybody looked
        diff.gather_changed()
        for name, tensor in tensors_of(chunk).items():
            assert diff.is_dense(tensor) == (lost and not name.endswith("fixed")), name
            indices, values = diff.changed(tensor)
            receiver[name].view(-1)[indices] = values
            assert torch.equal(bits(receiver[name]), bits(tensor)), name
        assert ("memory of its" in diff.report()) == lost
        diff.clear(version)


def test_validation_finds_what_nothing_announced():
    chunk, optimizer = build()
    diff = attach(optimizer, mode="update_and_validate")
    steps(chunk, optimizer)
    diff.gather_changed()
    steps(chunk, optimizer, seeds=(5,))
    diff.clear(0)
    diff.gather_changed()
    diff.clear(1)
    assert follow(build, steps, syncs=3, mode="update_and_validate")[1]["second"]
    chunk.module.second.data.view(-1)[[700, 33, 801]] += 1
    message = r"module.second: 3 elements changed unseen, first flat index 33; .* Call invalidate\(\)"
    with pytest.raises(RuntimeError, match=message):
        diff.gather_changed()
    with pytest.raises(RuntimeError, match=message):
        diff.changed(chunk.module.second)
    diff.invalidate("weights were edited")
    diff.gather_changed()
    assert diff.is_dense(chunk.module.second)
    diff.clear(2)
    diff.gather_changed()
    assert not diff.changed(chunk.module.second).indices.numel()


def test_other_weights_in_the_model_are_not_compared():
    chunk, optimizer = build()
    diff = attach(optimizer)
    base = snapshot(chunk)
    steps(chunk, optimizer)
    actor = {k: v.clone() for k, v in chunk.module.state_dict().items()}
    with diff.weights_role("reference"):
        chunk.module.load_state_dict({k: torch.zeros_like(v) for k, v in actor.items()})
        message = "the model holds the weights of 'reference'; leave weights_role first"
        for read in (diff.gather_changed, lambda: diff.changed(chunk.module.first), lambda: diff.clear(1)):
            with pytest.raises(RuntimeError, match=message):
                read()
        chunk.module.load_state_dict(actor)
    diff.gather_changed()
    for name, tensor in tensors_of(chunk).items():
        assert diff.changed(tensor).indices.tolist() == changed_since(base[name], tensor).tolist(), name
    assert not diff.is_dense(chunk.module.second)
    diff.clear(1)
    with diff.weights_role("teacher"):
        chunk.module.second.data[1, 2] = 9  # and not restored
    assert diff.is_dense(chunk.module.second) and not diff.is_dense(chunk.module.first)
    assert "not restored after the weights of 'teacher'" in diff.report()


def test_offloaded_weights_are_not_read():
    chunk, optimizer = build()
    diff = attach(optimizer)
    steps(chunk, optimizer)
    optimizer.offload_to_cpu()
    optimizer.restore_from_cpu()
    steps(chunk, optimizer, seeds=(3,))
    data = {b: b.param_data.clone() for b in chunk.buffers}
    for buffer in chunk.buffers:
        buffer.param_data_cpu = buffer.param_data.clone()
        buffer.offload_to_cpu()
    with pytest.raises(RuntimeError, match=r"module\.\w+ is offloaded; reload the weights first"):
        diff.gather_changed()
    for buffer in chunk.buffers:
        buffer.reload_from_cpu()
        assert torch.equal(buffer.param_data, data[buffer])
    diff.gather_changed()
    assert diff.changed(chunk.module.second).indices.numel()


def test_a_buffer_that_changes_its_type_is_sent_whole_once():
    chunk, optimizer = build()
    chunk.module.counts = chunk.module.counts.bfloat16()
    diff = attach(optimizer)
    counts = chunk.module.counts
    counts.data = counts.data.float() + 0.3
    indices, values = diff.changed(counts)
    assert diff.is_dense(counts) and values.dtype == torch.float32 and indices.tolist() == [0, 1, 2, 3, 4]
    assert "its type changed from torch.bfloat16 to torch.float32" in diff.report()
    diff.clear(1)
    counts[3] += 1
    assert diff.changed(counts).indices.tolist() == [3]


def test_a_tensor_that_is_replaced_is_an_error():
    chunk, optimizer = build()
    diff = attach(optimizer)
    chunk.module.counts = torch.ones(5)
    with pytest.raises(
        RuntimeError, match=r"module\.counts was replaced by another tensor after attach; detach"
    ):
        diff.gather_changed()


def test_unhooked_parameters_may_go_whole_and_keep_no_memory():
    _, optimizer = build(torch.float32)
    with pytest.raises(ValueError, match="unhooked='none': expected one of shadow, dense"):
        attach(optimizer, unhooked="none")
    diff, sent = follow(lambda: build(torch.float32), steps, unhooked="dense")
    assert len(sent["second"]) == 65 * 33 and routes(diff)["second"] == "dense"
    assert diff.nbytes < 100


def test_a_copy_of_the_model_does_not_copy_the_diff():
    import copy

    chunk, optimizer = build()
    diff = attach(optimizer)
    reference = copy.deepcopy(chunk.module)
    reference.load_state_dict(chunk.module.state_dict())
    assert not any(diff.is_dense(p) for p in chunk.parameters())
    assert not any(hasattr(p, "_sparse_manager") for p in reference.parameters())


# Refusals


def refusal(**changes):
    chunk, optimizer = build()
    leaf = optimizer.chained_optimizers[0]
    for path, value in changes.items():
        owner, _, name = path.rpartition("__")
        setattr(getattr(leaf, owner), name, value)
    with pytest.raises(NotImplementedError) as error:
        attach(optimizer)
    assert not any(hasattr(p, "_sparse_manager") for p in chunk.parameters())
    return str(error.value)


@pytest.mark.parametrize(
    "change, path, why",
    [
        ("config__optimizer_cuda_graph", "optimizer_cuda_graph", "captured and not when it is replayed"),
        ("ddp_config__use_megatron_fsdp", "Megatron-FSDP", "its own weight buffers"),
        (
            "config__reuse_grad_buf_for_mxfp8_param_ag",
            "reuse_grad_buf_for_mxfp8_param_ag",
            "with the gradients",
        ),
    ],
)
def test_paths_that_no_route_sees_are_refused_by_name(change, path, why):
    message = refusal(**{change: True})
    assert message.startswith(f"sparse diff: {path} is not supported: ") and why in message
    assert "Send whole weights instead" in message


def test_quantised_parameters_are_refused_by_name():
    class Float8Tensor(torch.nn.Parameter):
        pass

    chunk, optimizer = build()
    chunk.module.fixed = Float8Tensor(torch.zeros(3), requires_grad=False)
    with pytest.raises(NotImplementedError, match=r"module\.fixed \(Float8Tensor\) is not supported: .*bf16"):
        attach(optimizer)


@pytest.mark.parametrize("distributed", [False, True])
def test_another_model_is_refused(distributed):
    _, optimizer = build(distributed=distributed)
    other, _ = build(distributed=distributed)
    with pytest.raises(ValueError, match=r"owns a parameter of shape .* not in model_chunks; expected the"):
        attach(optimizer, model_chunks=[other])


def test_an_unknown_optimizer_is_refused_by_name():
    class Novel:
        config = types.SimpleNamespace()
        model_chunks = (torch.nn.Linear(2, 2),)

    with pytest.raises(
        NotImplementedError, match="Novel is not supported: how it writes the model is not known"
    ):
        attach(Novel())


# Densities


def test_densities_are_written_and_plotted(tmp_path):
    from megatron.core.optimizer.sparse_diff.observe import densities, plot

    chunk, optimizer = build()
    chunk.module.layers = torch.nn.ModuleList([torch.nn.Module(), torch.nn.Module()])
    chunk.module.layers[0].weight, chunk.module.layers[1].weight = chunk.module.first, chunk.module.second
    del chunk.module.first, chunk.module.second
    diff = attach(optimizer, mode="observe", observe_dir=tmp_path)
    expected = []
    for seed in range(3):
        before = snapshot(chunk)
        step(chunk, optimizer, seed, density=0.1 * (seed + 1))
        diff.observe()
        after = dict(chunk.named_parameters())
        expected.append(
            {
                layer: changed_since(
                    before[f"module.layers.{layer}.weight"], after[f"module.layers.{layer}.weight"]
                ).numel()
                / after[f"module.layers.{layer}.weight"].numel()
                for layer in range(2)
            }
        )
    found = densities(tmp_path)
    assert [{k: found[s][k] for k in range(2)} for s in range(3)] == expected and expected[2][1] > 0.1
    assert set(found[0]) == {0, 1, None}
    assert densities(tmp_path, by="name")[1]["module.counts"] == 0
    plot(tmp_path, tmp_path / "density.png")
    assert (tmp_path / "density.png").read_bytes()[:4] == b"\x89PNG"
    diff.detach()
    plain = attach(optimizer)
    with pytest.raises(ValueError, match="mode update does not observe; attach with mode='observe'"):
        plain.observe()
    with pytest.raises(FileNotFoundError, match=r"no rank\*.jsonl in .*update_and_observe"):
        densities(tmp_path / "nowhere")


def test_an_observing_update_writes_at_each_gather(tmp_path, monkeypatch):
    from megatron.core.optimizer.sparse_diff.observe import densities

    monkeypatch.setenv("SPARSE_STATS_SAVED_DIR", str(tmp_path))
    _, sent = follow(build, steps, mode="update_and_observe")
    found = densities(tmp_path, by="name")
    assert sorted(found) == [0, 1]
    assert found[1]["module.second"] == len(sent["second"]) / (65 * 33)
    with (tmp_path / "rank0.jsonl").open("a") as file:
        file.write('{"sync": 1, "rank": 0, "na')  # the run was stopped here; the next goes on counting
    _, sent = follow(build, steps, syncs=1, mode="update_and_observe")
    found = densities(tmp_path, by="name")
    assert sorted(found) == [0, 1, 2]
    assert found[2]["module.second"] == len(sent["second"]) / (65 * 33)


def test_a_plot_of_no_change_and_of_missing_syncs(tmp_path):
    import matplotlib.pyplot as plt

    from megatron.core.optimizer.sparse_diff import observe

    log = observe.DensityLog(tmp_path, 0)
    for log.sync in (2, 4):
        log.write([("layers.1.weight", 5, 10, 0), ("bias", None, 4, 0)])
    observe.plot(tmp_path, tmp_path / "still.png")
    log.write([("layers.1.weight", 5, 10, 1), ("layers.2.weight", 7, 10, 10)])
    shown = []

    class Axes:
        def __getattr__(self, name):
            return getattr(axes, name)

        def imshow(self, grid, **options):
            shown.append((grid, options["extent"]))
            return axes.imshow(grid, **options)

    figure, axes = plt.subplots()
    observe._layers(figure, Axes(), observe.densities(tmp_path))
    plt.close(figure)
    (zero, extent), (changed, same) = shown
    assert extent == same == [1.5, 5.5, 4.5, 7.5]
    nan = pytest.approx(float("nan"), nan_ok=True)
    assert changed == [[nan, nan, nan, 0.1], [nan] * 4, [nan, nan, nan, 1.0]]
    assert zero == [[0.8, nan, 0.8, nan], [nan] * 4, [nan] * 4]
