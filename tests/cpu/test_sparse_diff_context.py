"""The hook around the copy to model parameters: who is called, when, and that it is free otherwise."""

import gc
import sys
import types

import pytest
import torch

from megatron.core.optimizer import sparse_diff
from megatron.core.optimizer.sparse_diff import SparseState, context, sparse_diff_context


class Recorder:
    """A manager of the SparseRL-Sync shape: keeps what the shard held before and after each copy."""

    def __init__(self, model_param, shard_model_weight, shard_main_weight, param_range):
        self.param, self.range = model_param, param_range
        self.given = (shard_model_weight, shard_main_weight)
        self.events = []

    def before_copy(self, shard_model_weight):
        self.events.append(("before", shard_model_weight.detach().clone()))

    def after_copy(self, shard_model_weight, shard_main_weight):
        self.events.append(("after", shard_model_weight.detach().clone(), shard_main_weight.detach().clone()))


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.delenv("SPARSERL_STATE", raising=False)
    monkeypatch.delenv("SPARSERL_MANAGER", raising=False)
    previous = sparse_diff.register_manager_factory(None)
    yield
    sparse_diff.register_manager_factory(previous)


def shards(n=37, seed=0):
    gen = torch.Generator().manual_seed(seed)
    param = torch.nn.Parameter(torch.randn(n, generator=gen).bfloat16())
    main = torch.randn(n - 5, generator=gen)
    return param, param.detach().view(-1)[2 : n - 3], main


@pytest.mark.parametrize(
    "text, expected",
    [
        *[
            (off, None)
            for off in (None, "", "none", "None", "FALSE", "off", "0", "disable", "Disabled", " off ")
        ],
        ("observe", (False, False, True)),
        ("Update", (True, False, False)),
        ("update_and_validate", (True, True, False)),
        ("UPDATE_AND_OBSERVE", (True, False, True)),
        ("update_and_validate_and_observe", (True, True, True)),
    ],
)
def test_state_values(monkeypatch, text, expected):
    if text is not None:
        monkeypatch.setenv("SPARSERL_STATE", text)
    assert sparse_diff.sparse_state() == expected
    if expected is not None:
        assert str(SparseState(*expected)) == text.lower()


@pytest.mark.parametrize(
    "text", ["true", "1", "validate", "update,observe", "update_and_", "observe_and_update"]
)
def test_any_other_state_is_an_error_that_lists_the_known_ones(monkeypatch, text):
    monkeypatch.setenv("SPARSERL_STATE", text)
    with pytest.raises(
        ValueError, match=f"SPARSERL_STATE='{text}'.*update_and_validate_and_observe.*disable"
    ):
        sparse_diff.sparse_state()


def test_without_a_manager_the_copy_is_plain_and_nothing_is_kept():
    param, shard, main = shards()
    before = set(vars(param)), set(vars(main)), set(vars(shard))
    assert sparse_diff.init_sparse_manager(param, shard, main, None) is None
    with sparse_diff_context(shard, main) as copy:
        copy()
    assert torch.equal(param[2:34], main.bfloat16())
    assert (set(vars(param)), set(vars(main)), set(vars(shard))) == before
    # no tensor was made: only the copy itself ran
    gc.collect()
    alive = sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())
    for _ in range(3):
        with sparse_diff_context(shard, main) as copy:
            copy()
    assert sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()) == alive


def test_a_registered_manager_sees_before_and_after_of_every_copy_once():
    sparse_diff.register_manager_factory(Recorder)
    param, shard, main = shards()
    manager = sparse_diff.init_sparse_manager(
        model_param=param, shard_model_weight=shard, shard_main_weight=main, param_range=slice(2, 34)
    )
    assert param._sparse_manager is manager and main._sparse_owner is param and manager.range == slice(2, 34)
    old = shard.clone()
    fresh_view = param.detach().view(-1)[2:34]  # as DistributedOptimizer makes it: carries no attribute
    with sparse_diff_context(fresh_view, main) as copy:
        copy()
    (first, before), (second, after, main_seen) = manager.events
    assert (first, second) == ("before", "after")
    assert torch.equal(before, old) and torch.equal(after, main.bfloat16()) and torch.equal(main_seen, main)
    # a copy from a host tensor that knows no owner is found through the model shard
    with sparse_diff_context(shard, main.clone()) as copy:
        copy(non_blocking=True)
    assert [e[0] for e in manager.events] == ["before", "after"] * 2


def test_host_copies_are_counted_once():
    """HybridDeviceOptimizer writes main weights, or an fp32 shard (its own main weight), from the host."""
    sparse_diff.register_manager_factory(Recorder)
    param, shard, main = shards()
    param.main_param = main
    manager = sparse_diff.init_sparse_manager(param, shard, main, None)
    with sparse_diff_context(main, torch.full_like(main, 3.0)) as copy:  # host to device, not yet the model
        copy()
    assert manager.events == [] and torch.all(main == 3.0)
    with sparse_diff_context(param.detach()[2:34], main) as copy:
        copy()
    assert len(manager.events) == 2 and torch.all(manager.events[1][1] == 3.0)

    own = torch.nn.Parameter(torch.arange(11, dtype=torch.float32))
    own_shard = own.detach()[3:9]
    manager = sparse_diff.init_sparse_manager(own, own_shard, own_shard, None)
    for value in (5.0, 7.0):
        with sparse_diff_context(own_shard, torch.full((6,), value)) as copy:
            copy()
        with sparse_diff_context(own.detach()[3:9], own_shard) as copy:  # onto itself
            copy()
    assert [e[0] for e in manager.events] == ["before", "after"] * 2
    assert torch.equal(own.detach(), torch.tensor([0, 1, 2, 7, 7, 7, 7, 7, 7, 9, 10.0]))


def test_after_copy_is_not_called_when_the_copy_fails_and_the_copy_must_run_once():
    sparse_diff.register_manager_factory(Recorder)
    param, shard, main = shards()
    manager = sparse_diff.init_sparse_manager(param, shard, main, None)
    with pytest.raises(RuntimeError, match="size"):
        with sparse_diff_context(shard[1:], main) as copy:
            copy()
    assert [e[0] for e in manager.events] == ["before"]
    for times in (0, 2):
        with pytest.raises(RuntimeError, match=f"called {times} times, expected once"):
            with sparse_diff_context(shard, main) as copy:
                for _ in range(times):
                    copy()


def test_a_manager_may_perform_the_copy_itself():
    class Fused:
        def copy_captured(self, shard_model, shard_main, non_blocking):
            self.saw = (shard_model.clone(), shard_main.clone(), non_blocking)
            shard_model.copy_(shard_main)

    fused = Fused()
    sparse_diff.register_manager_factory(lambda **_: fused)
    param, shard, main = shards()
    sparse_diff.init_sparse_manager(param, shard, main, None)
    old = shard.clone()
    with sparse_diff_context(shard, main) as copy:
        copy()
    assert torch.equal(fused.saw[0], old) and torch.equal(fused.saw[1], main) and fused.saw[2] is False
    assert torch.equal(shard, main.bfloat16())


def test_the_environment_names_a_factory(monkeypatch):
    module = types.ModuleType("a_sync_package")
    module.make = Recorder
    monkeypatch.setitem(sys.modules, "a_sync_package", module)
    monkeypatch.setenv("SPARSERL_MANAGER", "a_sync_package:make")
    param, shard, main = shards()
    assert sparse_diff.init_sparse_manager(param, shard, main, None) is None  # SPARSERL_STATE is unset: off
    monkeypatch.setenv("SPARSERL_STATE", "update")
    manager = sparse_diff.init_sparse_manager(param, shard, main, None)
    assert type(manager) is Recorder
    assert (manager.range.start, manager.range.end, manager.range.size) == (0, 37, 37)
    # the explicit call wins
    sparse_diff.register_manager_factory(lambda **_: None)
    assert sparse_diff.init_sparse_manager(*shards(), None) is None
    sparse_diff.register_manager_factory(None)
    monkeypatch.setenv("SPARSERL_MANAGER", context.BUILTIN)
    assert sparse_diff.init_sparse_manager(*shards(), None) is None


@pytest.mark.parametrize("name", [None, "no_such_package_at_all:make", "json:no_such_function", ":", "json"])
def test_a_manager_that_cannot_be_imported_is_an_error_naming_both(monkeypatch, name):
    monkeypatch.setenv("SPARSERL_STATE", "Update_And_Validate")
    monkeypatch.setitem(sys.modules, "sparse_update", None)
    if name is not None:
        monkeypatch.setenv("SPARSERL_MANAGER", name)
    with pytest.raises(
        RuntimeError, match=f"SPARSERL_STATE=update_and_validate.*{name or 'sparse_update'}"
    ) as error:
        sparse_diff.init_sparse_manager(*shards(), None)
    assert "SPARSERL_MANAGER=module:function" in str(error.value)


def test_a_multi_tensor_copy_is_left_alone_unless_a_parameter_has_a_manager():
    params, mains = zip(*[(p, m) for p, _, m in (shards(n + 5, n) for n in (9, 17))], strict=True)
    params = [torch.nn.Parameter(p.detach()[: m.numel()].clone()) for p, m in zip(params, mains, strict=True)]
    old = [p.detach().clone() for p in params]
    assert sparse_diff.copy_with_sparse_diff([params], [mains]) is False
    assert all(torch.equal(p, o) for p, o in zip(params, old, strict=True))
    sparse_diff.register_manager_factory(Recorder)
    manager = sparse_diff.init_sparse_manager(params[1], params[1], mains[1])
    assert sparse_diff.copy_with_sparse_diff([params], [mains]) is True
    assert all(torch.equal(p, m.bfloat16()) for p, m in zip(params, mains, strict=True))
    assert len(manager.events) == 2 and torch.equal(manager.events[0][1], old[1])


def test_a_manager_that_will_see_nothing_of_a_parameter_is_warned_about_once(monkeypatch, caplog):
    monkeypatch.setattr(context, "_warned", False)
    sparse_diff.register_manager_factory(Recorder)
    param, shard, main = shards()
    sparse_diff.init_sparse_manager(param, shard, main, None)
    assert not caplog.records
    own = torch.nn.Parameter(torch.zeros(5))
    for _ in range(2):
        sparse_diff.init_sparse_manager(own, own.detach(), None, None)
    [record] = caplog.records
    assert "precision-aware parameters in place" in record.message and "attach compares" in record.message
