"""Copies into hooked shards that are collected and happen together, as they do on a GPU."""

import sys
import threading
import types

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.optimizer import sparse_diff
from megatron.core.optimizer.sparse_diff import attach, context, copies_together, shards, sparse_diff_context
from megatron.core.optimizer.sparse_diff.bitmask import Bitmask
from megatron.core.optimizer.sparse_diff.shards import HookedShard, seal
from tests.dist.small_optimizer import build, snapshot, step

KERNELS = "megatron.core.optimizer.sparse_diff.kernels"


@pytest.fixture
def launches(monkeypatch):
    """Copies on the CPU are collected too; the tensors of each launch, which plain torch performs."""
    launches = []

    def capture(models, mains, masks):
        launches.append(list(models))
        for model, main, words in zip(models, mains, masks, strict=True):
            Bitmask(words, None).copy(model.view(-1), main.view(-1))

    monkeypatch.setitem(sys.modules, KERNELS, types.SimpleNamespace(capture=capture))
    fits = staticmethod(lambda values: values.dtype in shards._TOGETHER and values.is_contiguous())
    monkeypatch.setattr(shards._Together, "fits", fits)
    return launches


class Foreign:
    """A manager of the SparseRL-Sync shape."""

    def __init__(self):
        self.seen = []

    def before_copy(self, shard_model):
        self.seen.append(shard_model.clone())

    def after_copy(self, shard_model, shard_main):
        self.seen.append(shard_model.clone())


def make(count=3, manager=HookedShard, first=0):
    """Parameters whose optimizer shards have managers, and main weights with one changed element each."""
    params, mains, managers = [], [], []
    for i in range(first, first + count):
        gen = torch.Generator().manual_seed(i)
        param = torch.nn.Parameter(torch.randn(40 + 7 * i, generator=gen).bfloat16())
        main = param.detach()[3:-2].float()
        main[i] += 1
        params.append(param)
        mains.append(main)
        if manager is not None:
            mine = manager(param, 3, param.numel() - 2) if manager is HookedShard else manager()
            context.bind(mine, param, main)
            managers.append(mine)
    return params, mains, managers


def copy_all(params, mains):
    for param, main in zip(params, mains, strict=True):
        with sparse_diff_context(param.detach()[3:-2], main) as copy:  # fresh views, as the optimizer makes
            copy()


def up_to_date(params, mains):
    return [torch.equal(p.detach()[3:-2], m.bfloat16()) for p, m in zip(params, mains, strict=True)]


def test_they_happen_in_one_launch_before_the_method_returns(launches):
    params, mains, managers = make()

    @copies_together
    def method(self, *, result):
        """Its documentation."""
        copy_all(params, mains)
        assert not any(up_to_date(params, mains)) and not launches
        return self, result

    assert method(1, result=2) == (1, 2) and method.__doc__ == "Its documentation."
    assert all(up_to_date(params, mains)) and [len(launch) for launch in launches] == [3]
    assert [c.indices.tolist() for c in seal(managers)] == [[3], [4], [5]]
    copy_all(params, mains)  # outside, each at once
    assert len(launches) == 1 and all(manager.bits is not None for manager in managers)


def test_one_allocation_serves_all_that_need_a_mask(launches):
    params, mains, managers = make()
    method = copies_together(lambda: copy_all(params, mains))

    def storages(name):
        return [getattr(manager, name).words.untyped_storage().data_ptr() for manager in managers]

    method()
    assert len(set(storages("bits"))) == 1 and len({id(m.bits.canary) for m in managers}) == 1
    first = storages("bits")
    seal(managers)
    assert storages("sealed_bits") == first and all(manager.bits is None for manager in managers)
    for main in mains:
        main[20] += 1
    method()  # while the sync is in flight
    assert len(set(storages("bits"))) == 1 and storages("sealed_bits") == first != storages("bits")
    managers[0].clear()
    assert [c.indices.tolist() for c in seal(managers)] == [[23], [4, 23], [5, 23]]


def test_the_device_does_not_wait_for_the_last(launches, monkeypatch):
    monkeypatch.setattr(shards, "_LAUNCH", 70)
    params, mains, managers = make(5)  # 35, 42, 49, 56 and 63 elements
    progress = []

    @copies_together
    def method():
        for i in range(5):
            copy_all(params[i : i + 1], mains[i : i + 1])
            progress.append(sum(up_to_date(params, mains)))

    for _ in range(2):
        method()
        assert all(up_to_date(params, mains)) and [len(launch) for launch in launches] == [2, 2, 1]
        launches.clear()
    assert progress[:5] == [0, 2, 2, 4, 4]
    assert [c.indices.tolist() for c in seal(managers)] == [[3], [4], [5], [6], [7]]


def test_a_method_that_raises_has_copied_what_was_asked_for(launches):
    params, mains, managers = make()

    @copies_together
    def method():
        copy_all(params[:2], mains[:2])
        raise KeyError("in the middle")

    with pytest.raises(KeyError, match="in the middle"):
        method()
    assert up_to_date(params, mains) == [True, True, False] and len(launches[0]) == 2
    copy_all(params[2:], mains[2:])  # nothing is collected any more
    assert all(up_to_date(params, mains)) and len(launches) == 1
    assert [c.indices.tolist() for c in seal(managers)] == [[3], [4], [5]]


def test_a_launch_that_fails_is_not_repeated(launches, monkeypatch):
    params, mains, _ = make()
    real = sys.modules[KERNELS].capture

    def broken(*_):
        raise RuntimeError("no memory")

    sys.modules[KERNELS].capture = broken
    with pytest.raises(RuntimeError, match="no memory"):
        copies_together(copy_all)(params, mains)
    sys.modules[KERNELS].capture = real
    copies_together(copy_all)(params[:1], mains[:1])
    assert [len(launch) for launch in launches] == [1]


def test_an_inner_method_has_copied_when_it_returns_and_order_is_kept(launches):
    params, mains, managers = make()
    newer = [main.clone() for main in mains]
    for main in newer:
        main[10] = 50.0
    newer[2][2] -= 1  # as it was: the first of two copies is known by its bit

    @copies_together
    def inner():
        copy_all(params[1:2], newer[1:2])

    @copies_together
    def outer():
        copy_all(params[:2], mains[:2])
        inner()
        assert torch.equal(params[1].detach()[3:-2], newer[1].bfloat16())  # it has, and came last
        copy_all(params[2:], mains[2:])
        copy_all(params[2:], newer[2:])  # again: the first one comes first
        assert not up_to_date(params, newer)[2]

    for newer_main, param in zip(newer, params, strict=True):
        newer_main._sparse_owner = param
    outer()
    assert up_to_date(params, mains)[0] and up_to_date(params, newer)[1:] == [True, True]
    assert [c.indices.tolist() for c in seal(managers)] == [[3], [4, 13], [5, 13]]


def test_other_managers_and_plain_copies_happen_where_they_are_called(launches):
    ours, foreign, plain = make(2), make(2, Foreign, first=2), make(2, None, first=4)
    old = [param.detach()[3:-2].clone() for param in foreign[0]]

    @copies_together
    def method():
        copy_all(*ours[:2])
        copy_all(*foreign[:2])
        copy_all(*plain[:2])
        assert up_to_date(*ours[:2]) == [False, False]
        assert all(up_to_date(*foreign[:2])) and all(up_to_date(*plain[:2]))

    method()
    assert all(up_to_date(*ours[:2])) and [len(launch) for launch in launches] == [2]
    for manager, before, main in zip(foreign[2], old, foreign[1], strict=True):
        first, second = manager.seen
        assert torch.equal(first, before) and torch.equal(second, main.bfloat16())


def test_what_the_kernel_does_not_take_happens_at_once(launches):
    params, mains, managers = make(3)
    mains[1] = mains[1].double()
    mains[1]._sparse_owner = params[1]

    @copies_together
    def method():
        copy_all(params, mains)
        assert up_to_date(params, mains) == [False, True, False]

    method()
    assert all(up_to_date(params, mains)) and [len(launch) for launch in launches] == [2]
    assert [c.indices.tolist() for c in seal(managers)] == [[3], [4], [5]]


def test_on_a_cpu_nothing_is_collected():
    params, mains, managers = make()

    @copies_together
    def method():
        copy_all(params, mains)
        assert all(up_to_date(params, mains))

    method()
    assert [c.indices.tolist() for c in seal(managers)] == [[3], [4], [5]]


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_without_a_manager_there_is_nothing_but_the_copies(launches):
    params, mains, _ = make(3, None)
    views = [param.detach()[3:-2] for param in params]

    @copies_together
    def method():
        for view, main in zip(views, mains, strict=True):
            with sparse_diff_context(view, main) as copy:
                copy()

    with Operations() as seen:
        method()
    assert [name for name in seen.names if "detach" not in name] == ["aten.copy_.default"] * 3
    assert all(up_to_date(params, mains)) and launches == []


def test_threads_collect_apart(launches):
    params, mains, _ = make()
    other = make(1, first=3)

    @copies_together
    def method():
        copy_all(params, mains)
        thread = threading.Thread(target=copy_all, args=other[:2])
        thread.start()
        thread.join()
        assert up_to_date(*other[:2]) == [True] and not launches

    method()
    assert all(up_to_date(params, mains)) and len(launches) == 1


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize("distributed", [True, False])
def test_optimizers_copy_together_and_compute_the_same(launches, distributed):
    def train(attached):
        torch.manual_seed(4)
        chunk, optimizer = build(distributed=distributed)
        diff = attach(optimizer, model_chunks=[chunk]) if attached else None
        leaf = getattr(optimizer, "chained_optimizers", [optimizer])[0]
        for version in range(3):
            step(chunk, optimizer, version + 1, density=0.1)
            for entry in diff or ():
                if entry.shard.route == "hooked":
                    main = entry.tensor.main_param
                    assert torch.equal(entry.shard.values(), main.view(-1).bfloat16()), entry.name
        assert hasattr(type(leaf)._copy_main_params_to_model_params, "__wrapped__") == distributed
        return {name: value.float().numpy().tobytes() for name, value in snapshot(chunk).items()}

    without = train(False)
    assert launches == []
    assert train(True) == without
    assert [len(launch) for launch in launches] == [4] * 3


def test_a_seal_that_fails_makes_the_next_sync_whole(monkeypatch):
    params, mains, managers = make()
    copy_all(params, mains)
    seal(managers)
    for main in mains:
        main[20] += 1
    copy_all(params, mains)

    def broken(*_):
        raise RuntimeError("no memory")

    with monkeypatch.context() as patched:
        patched.setattr(shards, "expand", broken)
        with pytest.raises(RuntimeError, match="no memory"):
            seal(managers)
    for manager in managers:
        manager.clear()  # the acknowledgement of the first
    assert seal(managers) == [None] * 3 and "a seal failed" in managers[0].invalid
    for manager in managers:
        manager.clear()
    assert [c.indices.tolist() for c in seal(managers)] == [[]] * 3


def test_the_decorator_is_public():
    assert sparse_diff.copies_together is shards.copies_together
