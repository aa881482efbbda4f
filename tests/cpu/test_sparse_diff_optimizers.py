"""Real Megatron optimizers in one process: the hook and the diff against copies of the whole model."""

import pytest
import torch

from megatron.core.optimizer import sparse_diff
from megatron.core.optimizer.sparse_diff import attach
from tests.dist.small_optimizer import build, changed_since, snapshot, step

from .test_sparse_diff_context import Recorder

pytestmark = pytest.mark.usefixtures("single")


@pytest.fixture(autouse=True)
def off(monkeypatch):
    monkeypatch.delenv("SPARSERL_STATE", raising=False)
    previous = sparse_diff.register_manager_factory(None)
    yield
    sparse_diff.register_manager_factory(previous)


@pytest.mark.parametrize("distributed", [True, False])
def test_a_foreign_manager_sees_every_copy_once(distributed):
    sparse_diff.register_manager_factory(Recorder)
    chunk, optimizer = build(distributed=distributed, fp32=distributed)
    managers = {n: p._sparse_manager for n, p in chunk.named_parameters() if p.requires_grad}
    assert len(managers) == 5 if distributed else 4
    for seed in range(3):
        before = snapshot(chunk)
        step(chunk, optimizer, seed)
        for name, manager in managers.items():
            param = dict(chunk.named_parameters())[name]
            assert (manager.range.start, manager.range.end) == (0, param.numel())
            (first, old), (second, new, main) = manager.events[2 * seed :]
            assert (first, second) == ("before", "after")
            assert torch.equal(new.view(-1), param.view(-1)) and torch.equal(main.to(new.dtype), new)
            if param.dtype == torch.bfloat16:
                assert torch.equal(old.view(-1), before[name].view(-1)) and not torch.equal(old, new)
            else:  # an fp32 shard is its own main weight: the copy is onto itself
                assert torch.equal(old, new)


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_changed_equals_a_comparison_of_whole_copies(distributed, dtype):
    chunk, optimizer = build(dtype, distributed=distributed)
    diff = attach(optimizer, model_chunks=[chunk])
    tensors = dict([*chunk.named_parameters(), *chunk.named_buffers()])
    tensors.pop(next(n for n in tensors if "scratch" in n))
    for version in range(3):
        base = snapshot(chunk)
        union = {name: set() for name in tensors}
        for seed in range(2):
            before = snapshot(chunk)
            step(chunk, optimizer, 10 * version + seed, density=0.05)
            for name, tensor in tensors.items():
                union[name] |= set(changed_since(before[name], tensor).tolist())
        chunk.module.counts[version] += 1
        found = 0
        for name, tensor in tensors.items():
            indices, values = diff.changed(tensor)
            found += indices.numel()
            hooked = tensor.dtype == torch.bfloat16 and tensor.requires_grad
            expected = sorted(union[name]) if hooked else changed_since(base[name], tensor).tolist()
            assert indices.dtype == torch.int64 and indices.tolist() == expected, name
            assert torch.equal(values, tensor.detach().view(-1)[indices])
            base[name].view(-1)[indices] = values  # what a receiver does
            assert torch.equal(base[name], tensor), name
        assert found > 10
        diff.clear(version)
    assert diff.changed(chunk.module.counts).indices.tolist() == []
    assert "fixed" in diff.report()


@pytest.mark.parametrize("distributed", [True, False])
def test_training_is_bit_for_bit_the_same_with_and_without(distributed):
    results = []
    for attached in (False, True):
        torch.manual_seed(5)
        chunk, optimizer = build(distributed=distributed, fp32=distributed)
        diff = attach(optimizer, model_chunks=[chunk]) if attached else None
        for seed in range(4):
            step(chunk, optimizer, seed)
            if attached and seed % 2:
                diff.gather_changed()
                diff.clear(seed)
        state = [s for leaf in optimizer.chained_optimizers for s in leaf.optimizer.state.values()]
        results.append((snapshot(chunk), state))
    for name, value in results[0][0].items():
        assert torch.equal(value, results[1][0][name]), name
    for one, other in zip(results[0][1], results[1][1], strict=True):
        assert all(torch.equal(one[k], other[k]) for k in ("exp_avg", "exp_avg_sq"))


def test_detach_leaves_nothing_behind():
    chunk, optimizer = build()
    marks = [set(vars(p)) for p in chunk.parameters()]
    mains = [
        set(vars(p.main_param)) for p in chunk.parameters() if getattr(p, "main_param", None) is not None
    ]
    diff = attach(optimizer)
    with pytest.raises(RuntimeError, match=r"parameters already have a manager, first module\.\w+; detach"):
        attach(optimizer)
    diff.detach()
    assert marks == [set(vars(p)) for p in chunk.parameters()]
    assert mains == [
        set(vars(p.main_param)) for p in chunk.parameters() if getattr(p, "main_param", None) is not None
    ]
    attach(optimizer).detach()


def test_errors_say_what_was_expected():
    chunk, optimizer = build(distributed=False)
    with pytest.raises(ValueError, match=r"does not know its model.*model_chunks=\[...\]"):
        attach(optimizer)
    with pytest.raises(ValueError, match="mode='everything': expected one of observe, update"):
        attach(optimizer, mode="everything", model_chunks=[chunk])
    with pytest.raises(ValueError, match="mode='off' disables sparse diff"):
        attach(optimizer, mode="off", model_chunks=[chunk])
    with pytest.raises(NotImplementedError, match="SGD is not supported: how it writes the model"):
        attach(torch.optim.SGD(chunk.parameters()), model_chunks=[chunk])
    diff = attach(optimizer, model_chunks=[chunk])
    with pytest.raises(ValueError, match=r"shape \(3,\) is no parameter or persistent buffer"):
        diff.changed(torch.zeros(3))
    with pytest.raises(TypeError, match=r"clear\(version\): expected an int, got 'a'"):
        diff.clear("a")
    diff.clear(4)
    with pytest.raises(ValueError, match=r"clear\(4\): expected a version after 4"):
        diff.clear(4)


def test_the_mode_is_that_of_the_call_then_of_the_environment(monkeypatch):
    _, optimizer = build()
    for variable, mode, expected in (
        ("off", None, "update"),
        ("observe", None, "observe"),
        ("observe", "update_and_validate", "update_and_validate"),
    ):
        monkeypatch.setenv("SPARSERL_STATE", variable)
        diff = attach(optimizer, mode)
        assert str(diff.state) == expected
        diff.detach()
