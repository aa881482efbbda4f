"""A trainer's stream of versions: receivers that need different things, faults on every side, equal bits."""

import contextlib
import math
import os

import pytest

from tests.dist.world import parallel

FULL = os.environ.get("TEST_FULL") == "1"
LAYOUTS = [dict(tp=2), dict(pp=2), dict()]
IDS = ["tp2", "pp2", "dp2"]


def small_shape(layers=2):
    from examples.quickstart import policy

    return policy.Shape(layers=layers, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48)


class Trainer:
    """A small Qwen3-shaped policy, its publisher, and random trajectories, the same on every rank."""

    def __init__(self, transport=None, layers=2, seed=3, shape=None, distributed=True, **options):
        import torch

        from examples.quickstart import policy, rollout
        from megatron.core.optimizer.sparse_diff import attach
        from megatron.core.param_export import build_plan
        from megatron.core.param_export.publisher import Publisher

        self.shape = shape or small_shape(layers)
        self.policy = policy.Policy(self.shape, 32, 64, 1e-6, "cpu", distributed)
        self.plan = build_plan(self.policy.ddp, rollout.model(self.shape, 32, 64, "meta").config).prove()
        self.diff = attach(self.policy.optimizer, model_chunks=[self.policy.ddp])
        self.publisher = Publisher(self.plan, self.diff, transport, **options)
        self.generator = torch.Generator().manual_seed(seed)

    def step(self, lr=1e-6):
        import torch

        from megatron.core.tree_training import Trajectory, TreeBatch

        prompt = torch.randint(4, 30, (9,), generator=self.generator).tolist()
        trajectories = []
        for _ in range(3):
            tokens = prompt + torch.randint(4, 30, (5,), generator=self.generator).tolist()
            values = {
                "advantage": torch.randn(14, generator=self.generator),
                "rollout_log_probs": torch.zeros(14),
            }
            trajectories.append(Trajectory(tokens, [0] * 9 + [1] * 5, values))
        self.policy.set_lr(lr)
        self.policy.step([TreeBatch.from_trajectories(trajectories, pad_to_multiple_of=4)])

    def exported(self):
        """The model's tensors on rank 0, by an export of their own."""
        from megatron.core.param_export import export

        return dict(export(self.plan, receivers=[0]))


def engine(shape):
    from examples.quickstart import rollout

    return rollout.model(shape, 32, 64, "cpu")


def same(module, expected) -> bool:
    import torch

    held = module.state_dict()
    assert set(held) == set(expected)
    return all(torch.equal(held[n].view(torch.int16), t.view(torch.int16)) for n, t in expected.items())


def outcome(call):
    """What a call says of itself, comparable between ranks."""
    try:
        return vars(call())
    except Exception as error:
        return type(error).__name__, str(error)


# ---- thirty steps through publish and acknowledge ----------------------------------------------------------


def stream(groups, steps=30):
    """Feed a transformers model by hand; what happened, on rank 0."""
    import torch.distributed as dist

    from megatron.weight_sync import CorruptPayload, ModuleReceiver, Payload, WrongBase
    from megatron.weight_sync.fingerprints import bits_of

    with parallel(**groups):
        main = dist.get_rank() == 0
        trainer = Trainer()
        publisher, module = trainer.publisher, engine(trainer.shape)
        publisher.register("engine")
        receiver = ModuleReceiver(module) if main else None
        seen, lost = [], []
        for step in range(steps):
            trainer.step(1e-3 if step < 5 else 1e-6)
            payload = publisher.publish().get("engine")
            event, ack, before = "sent", None, {}
            if main:
                event = "dense" if payload.base is None else "delta"
                before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
                if step == 12:  # lost on the way: the next delta carries both
                    lost.append(payload)
                    event = "lost"
                elif step == 15:  # damaged on the way, then sent again as it was
                    bucket = payload.buckets[0].clone()
                    bucket[bucket.numel() // 2] ^= 1
                    damaged = Payload(
                        payload.manifest, [bucket], payload.version, payload.base, payload.stats
                    )
                    with pytest.raises(CorruptPayload):
                        receiver.apply(damaged)
                    assert same(module, before)
                    ack = receiver.apply(payload)
                elif step == 20:  # the engine restarts and has nothing
                    module = engine(trainer.shape)
                    receiver = ModuleReceiver(module)
                    with pytest.raises(WrongBase):
                        receiver.apply(payload)
                    publisher.register("engine")
                    event = "restarted"
                else:
                    ack = receiver.apply(payload)
            done = publisher.acknowledge({"engine": ack} if ack else {})
            expected = trainer.exported()
            if main:
                changed = {n: int((bits_of(t) != bits_of(before[n])).sum()) for n, t in expected.items()}
                size, density = payload.nbytes, publisher.report.density
                seen.append((event, same(module, expected), done, size, density, smallest(changed, expected)))
        return seen


def smallest(changed, tensors):
    """Bytes of the smaller form of each tensor, in raw or packed bf16, with room for headers."""
    total = 0
    for name, count in changed.items():
        numel = tensors[name].numel()
        each = 3.1 if count > numel / 10 else 6
        total += min(each * count, 2 * numel) + 180
    return total + 2000


@pytest.mark.parametrize("groups, size", [(dict(tp=2), 4), (dict(pp=2), 2)], ids=["tp2-dp2", "pp2"])
def test_receiver_is_bit_identical_after_every_sync(world, groups, size):
    seen = world(size, stream, groups=groups)[0]
    assert len(seen) == 30
    for step, (event, equal, done, nbytes, density, bound) in enumerate(seen):
        arrived = event in ("dense", "delta")
        assert (equal, done) == (arrived, arrived), (step, event)
        if 0 < step < 5:  # at a large learning rate nearly everything changes, and most tensors go whole
            assert 0.5 < density < 1 and nbytes < bound, (step, nbytes, bound)
        elif event == "delta":
            assert nbytes < seen[0][3] / 2 and 0 < density < 0.5
            assert step == 13 or nbytes < bound, (step, nbytes, bound)
    events = [entry[0] for entry in seen]
    assert events[12] == "lost" and events[20] == "restarted" and events[0] == events[21] == "dense"
    assert set(events[1:12] + events[13:20] + events[22:]) == {"delta"}
    # After the loss the delta carries the changes of two steps.
    assert seen[13][4] > 1.2 * seen[14][4]


# ---- uneven receivers --------------------------------------------------------------------------------------


def faulty_transport(receivers):
    """Receivers in this process. ``lost``: names whose payload does not arrive. ``log``: what was delivered
    to whom."""
    from megatron.weight_sync import LocalTransport

    class Faulty(LocalTransport):
        lost, log = (), []

        def deliver(self, payload, receiver_ids):
            self.log.append(("dense" if payload.dense else payload.base, sorted(receiver_ids)))
            here = super().deliver(payload, [name for name in receiver_ids if name not in self.lost])
            return here | {name: TimeoutError("no answer") for name in receiver_ids if name in self.lost}

    return Faulty(receivers)


def dies_once(receiver):
    """The next apply fails after the weights were written."""
    whole = receiver._after_writing

    def fail():
        receiver._after_writing = whole
        raise OSError("the disk is full")

    receiver._after_writing = fail


def uneven(groups):
    import torch.distributed as dist

    from megatron.weight_sync import ModuleReceiver

    with parallel(**groups):
        main = dist.get_rank() == 0
        names = ["synced", "behind", "poisoned", "dying", "fresh"]
        engines = {name: engine(small_shape()) for name in names} if main else {}
        transport = faulty_transport({n: ModuleReceiver(m) for n, m in engines.items()}) if main else None
        trainer = Trainer(transport)
        publisher, told = trainer.publisher, []

        def sync(*expected, **how):
            found = outcome(lambda: publisher.sync(**how))
            if isinstance(found, dict):
                for name in ("encode_ms", "deliver_ms", "dense_bytes", "delta_bytes"):
                    found[name] = found[name] > 0
            now, equal = trainer.exported(), {}
            if main:
                equal = {name for name, module in engines.items() if same(module, now)}
                assert equal == set(expected), equal
                found = (found, transport.log[:])
                transport.log.clear()
            told.append(found)

        for name in names[:-1]:
            publisher.register(name)
        sync(*names[:-1])
        trainer.step()
        if main:
            transport.lost = ("behind",)
        sync("synced", "poisoned", "dying")
        trainer.step()
        publisher.register("fresh")
        if main:
            transport.lost = ()
            next(engines["poisoned"].parameters()).data.view(-1)[5] += 1
            dies_once(transport.receivers["dying"])
        sync(*names, on_failure="resync")
        trainer.step()
        sync(*names)
        trainer.step()
        if main:
            dies_once(transport.receivers["dying"])
        old = {n: t.clone() for n, t in engines["dying"].state_dict().items()} if main else {}
        sync(*(set(names) - {"dying"}))
        trainer.step()
        now = trainer.exported()
        sync(*names)
        if main:
            # Two steps' changes, because one receiver lacks them. (Few have changed back meanwhile.)
            count = sum(int((old[n] != t).sum()) for n, t in now.items())
            assert count <= told[5][0]["changed"] < 1.1 * count + 5
            states = {name: publisher.sender.state(name) for name in names}
            assert set(states.values()) == {"synced"}
        return told


@pytest.mark.parametrize("groups", LAYOUTS, ids=IDS)
def test_each_receiver_gets_what_it_needs(world, groups):
    ranks = world(2, uneven, groups=groups)
    told = [entry[0] for entry in ranks[0]]
    deliveries = [entry[1] for entry in ranks[0]]
    assert ranks[1] == told  # the other rank has heard the same
    four = sorted(["synced", "behind", "poisoned", "dying"])
    five = sorted([*four, "fresh"])
    assert deliveries == [
        [("dense", four)],
        [((1, 1), four)],
        [((1, 2), four), ("dense", ["fresh"]), ("dense", ["dying", "poisoned"])],
        [((3, 3), five)],
        [((4, 4), five)],
        [((4, 5), five)],
    ]
    assert told[1] == ("SyncFailed", "version 2 did not reach 1 receivers: behind: TimeoutError: no answer")
    assert told[4] == ("SyncFailed", "version 5 did not reach 1 receivers: dying: OSError: the disk is full")
    elements = told[0]["elements"]
    assert [report["version"] for report in told if isinstance(report, dict)] == [1, 3, 4, 6]
    assert told[0]["changed"] == elements and told[0]["healed"] == []
    assert sorted(told[2]["healed"]) == ["dying", "poisoned"] and told[2]["dense_bytes"]
    for k in (2, 3, 5):
        assert told[k]["delta_bytes"] and told[k]["clear_bits"] and 0 < told[k]["changed"] < elements / 2
    assert not told[3]["dense_bytes"] and not told[5]["dense_bytes"]


def replaced(groups):
    """A rollout model moves, as offloading does, between syncs; every sync that reports success holds."""
    import torch
    import torch.distributed as dist

    from megatron.weight_sync import LocalTransport, ModuleReceiver, SyncFailed

    with parallel(**groups):
        main = dist.get_rank() == 0
        module = engine(small_shape())
        transport = LocalTransport({"engine": ModuleReceiver(module)}) if main else None
        trainer, told = Trainer(transport), []
        trainer.publisher.register("engine")

        def sync(how="raise"):
            trainer.step()
            try:
                report = trainer.publisher.sync(on_failure=how)
            except SyncFailed as error:
                return str(error)
            now = trainer.exported()
            assert not main or same(module, now)
            return report.dense_bytes > 0, report.healed

        def new_head():
            module.lm_head.weight = torch.nn.Parameter(module.lm_head.weight.detach().clone())

        def new_data():
            for parameter in module.parameters():
                parameter.data = parameter.data.clone()

        told.append(sync())
        for change in (new_head, new_data, lambda: module.float().bfloat16()):
            change()
            told += [sync(), sync(), sync()]
            change()
            told += [sync("resync"), sync()]
        module.lm_head.float()
        told += [sync("resync"), sync()]
        module.lm_head.bfloat16()
        told += [sync(), sync()]
        return told


def test_replaced_tensors_of_a_rollout_model(world):
    first, second = world(2, replaced, groups=dict(tp=2))
    assert first == second and first[0] == (True, [])
    poisoned = "engine: ReceiverPoisoned: this receiver's weights are no known version"
    for k in (1, 6, 11):
        assert poisoned in first[k] and "tensors were replaced by others" in first[k]
        assert first[k + 1 : k + 5] == [(True, []), (False, []), (True, ["engine"]), (False, [])]
    for told in first[16:18]:
        assert "LayoutMismatch: lm_head.weight: payload has torch.bfloat16" in told
        assert "receiver has torch.float32" in told
    assert first[18:] == [(True, []), (False, [])]


# ---- failures on one rank ----------------------------------------------------------------------------------


@contextlib.contextmanager
def broken(owner, name, error, after=0):
    """``owner.name`` raises from its call number ``after`` on."""
    sound, calls = getattr(owner, name), []

    def call(*args, **kwargs):
        calls.append(name)
        if len(calls) > after:
            raise error
        return sound(*args, **kwargs)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, sound)
    assert len(calls) > after, f"{name} was not reached"


def failing(groups):
    """Something breaks on one rank at a time; what each rank is told, and that the next sync is whole."""
    import functools

    import torch.distributed as dist

    from megatron.core.param_export import changed, exporter, publisher
    from megatron.weight_sync import LocalTransport, ModuleReceiver, Update

    with parallel(**groups), pytest.MonkeyPatch.context() as patch:
        # Many buckets: a rank that stops in the middle of them leaves the others waiting.
        patch.setattr(publisher, "export", functools.partial(publisher.export, bucket_bytes=4096))
        rank = dist.get_rank()
        module = engine(small_shape())
        transport = LocalTransport({"engine": ModuleReceiver(module)}) if rank == 0 else None
        trainer = Trainer(transport)
        trainer.publisher.register("engine")
        told = []
        faults = [
            (0, Update, "add_dense", MemoryError("encode"), 2),
            (0, exporter._Export, "put_together", MemoryError("assemble"), 0),
            (0, Update, "finish", RuntimeError("finish"), 0),
            (0, transport, "deliver", ConnectionError("deliver"), 0),
            (1, trainer.publisher, "_share", RuntimeError("read"), 0),
            (None,) * 5,  # none: the first whole sync
            (0, Update, "add_delta", MemoryError("encode"), 1),
            (0, changed, "_merge", MemoryError("merge"), 0),
            (0, publisher, "synchronise", KeyboardInterrupt(), 0),
            (None,) * 5,
        ]
        for where, *fault in faults:
            trainer.step()
            with broken(*fault) if where == rank else contextlib.nullcontext():
                try:
                    trainer.publisher.sync()
                    told.append("done")
                except BaseException as error:
                    told.append((type(error).__name__, str(error)))
        now = trainer.exported()
        return told, trainer.publisher.version, rank != 0 or same(module, now)


@pytest.mark.parametrize("groups", LAYOUTS, ids=IDS)
def test_a_failure_on_one_rank_is_told_to_all(world, groups):
    first, second = world(2, failing, groups=groups, timeout=60)
    kinds = ["MemoryError", "MemoryError", "RuntimeError", "ConnectionError"]
    texts = ["encode", "assemble", "finish", "deliver"]
    again = [("MemoryError", "encode"), ("MemoryError", "merge"), ("KeyboardInterrupt", "")]
    peer = ("PeerFailed", "rank 1 could not read its weights, and says there why")
    whole = list(zip(kinds, texts, strict=True))
    assert first[0] == [*whole, peer, "done", *again, "done"]
    heard = [("SyncFailed", f"the sending rank 0 failed: {k}: {t}") for k, t in [*whole, *again]]
    assert second[0] == [*heard[:4], ("RuntimeError", "read"), "done", *heard[4:], "done"]
    # A version is used up once its payload may be on its way: that of the failed delivery.
    assert first[1:] == second[1:] == (3, True)


def late():
    """Version 2 is acknowledged after an attempt at version 3 has read newer changes and failed."""
    import torch.distributed as dist

    from megatron.weight_sync import ModuleReceiver, SyncFailed, Update

    with parallel(tp=2):
        main = dist.get_rank() == 0
        trainer, module = Trainer(), engine(small_shape())
        publisher, receiver = trainer.publisher, ModuleReceiver(module)
        publisher.register("engine")
        acks = []

        def publish():
            for payload in publisher.publish().values():
                acks.append(receiver.apply(payload))

        publish()
        publisher.acknowledge({"engine": acks[-1]} if main else None)
        trainer.step()
        publish()
        trainer.step()
        with broken(Update, "finish", RuntimeError("finish")) if main else contextlib.nullcontext():
            with pytest.raises(RuntimeError if main else SyncFailed):
                publisher.publish()
        done = publisher.acknowledge({"engine": acks[-1]} if main else None)
        publish()
        now = trainer.exported()
        return done, not main or same(module, now)


def test_a_late_acknowledgement_forgets_nothing_newer(world):
    assert world(2, late) == [(True, True)] * 2


# ---- bf16 training at a small learning rate ----------------------------------------------------------------


def bf16_training(groups, distributed, steps):
    """A policy of a million parameters at 1e-6, through the whole optimizer; what every sync sent."""
    import torch.distributed as dist

    from examples.quickstart import policy
    from megatron.weight_sync import LocalTransport, ModuleReceiver

    with parallel(**groups):
        main = dist.get_rank() == 0
        shape = policy.Shape(layers=4, hidden=160, heads=6, kv_heads=2, head_dim=32, ffn=384)
        module = engine(shape)
        transport = LocalTransport({"engine": ModuleReceiver(module)}) if main else None
        trainer = Trainer(transport, shape=shape, distributed=distributed)
        trainer.publisher.register("engine")
        reports = [trainer.publisher.sync()]
        for _ in range(steps):
            trainer.step()
            old = {name: tensor.clone() for name, tensor in module.state_dict().items()}
            reports.append(trainer.publisher.sync())
            now = trainer.exported()
            if main:
                assert same(module, now)
                assert reports[-1].changed == sum(int((old[n] != t).sum()) for n, t in now.items())
        return [(r.density, r.delta_bytes, r.changed, r.dense_bytes) for r in reports]


@pytest.mark.parametrize(
    "groups, distributed", [({}, True), (dict(tp=2), False)], ids=["dp2-distributed", "tp2-whole-optimizer"]
)
def test_bf16_training_at_a_small_learning_rate(world, groups, distributed):
    steps = 50 if FULL else 4
    reports, other = world(2, bf16_training, groups=groups, distributed=distributed, steps=steps)
    assert reports == other and len(reports) == steps + 1
    assert reports[0][0] == 1 and reports[0][1] == 0 and reports[0][3] > 2_000_000
    for density, nbytes, changed, dense in reports[1:]:
        assert 0.0005 < density < 0.06 and dense == 0
        assert nbytes < 6 * changed + 12_000  # names, shapes and fingerprints of 47 tensors
    density, nbytes = (sum(report[k] for report in reports[1:]) / steps for k in (0, 1))
    print(f"density {density:.4%}, {nbytes:.0f} of {reports[0][3]} bytes per sync")
    assert nbytes < reports[0][3] / 10


# ---- what travels ------------------------------------------------------------------------------------------


def whole_in_delta(groups):
    """A layer's weights are loaded anew: its tensors go whole, in the delta. And how often ranks talk."""
    import torch.distributed as dist

    from megatron.weight_sync import LocalTransport, ModuleReceiver

    with parallel(**groups):
        rank = dist.get_rank()
        module = engine(small_shape())
        transport = LocalTransport({"engine": ModuleReceiver(module)}) if rank == 0 else None
        trainer = Trainer(transport)
        trainer.publisher.register("engine")
        trainer.publisher.sync()
        trainer.step()
        layers = trainer.policy.core.decoder.layers
        if getattr(layers[0], "layer_number", 1) == 1:
            mlp = layers[0].mlp
            mlp.load_state_dict({n: t * 1.5 if t is not None else t for n, t in mlp.state_dict().items()})
        talk, sound = {}, {}
        for name in ("broadcast", "all_reduce"):
            sound[name] = getattr(dist, name)

            def counted(*args, name=name, **kwargs):
                talk[name] = talk.get(name, 0) + 1
                return sound[name](*args, **kwargs)

            setattr(dist, name, counted)
        stats = []
        if rank == 0:
            deliver = transport.deliver

            def record(payload, names):
                stats.append(payload.stats["encodings"])
                return deliver(payload, names)

            transport.deliver = record
        try:
            report = trainer.publisher.sync()
        finally:
            for name, call in sound.items():
                setattr(dist, name, call)
        now = trainer.exported()
        return talk, stats, report.dense_bytes, rank != 0 or same(module, now)


@pytest.mark.parametrize("groups", LAYOUTS, ids=IDS)
def test_the_smaller_form_of_each_tensor_travels(world, groups):
    first, second = world(2, whole_in_delta, groups=groups)
    assert first[0] == second[0] == {"all_reduce": 1, "broadcast": 3}
    assert first[1][0]["dense"] == 3 and sum(first[1][0].values()) > 10  # gate, up and down of one layer
    assert first[2] == second[2] == 0 and first[3]


def another_layout():
    """A trainer comes back from its checkpoint in another layout: the receiver goes on, by whole tensors."""
    import torch.distributed as dist

    from megatron.weight_sync import LocalTransport, ModuleReceiver

    main, state, reports = dist.get_rank() == 0, None, []
    module = engine(small_shape())
    transport = LocalTransport({"engine": ModuleReceiver(module)}) if main else None
    for groups in (dict(tp=2), dict(pp=2)):
        with parallel(**groups):
            trainer = Trainer(transport)
            if state is None:
                trainer.publisher.register("engine")
            elif main:
                trainer.publisher.sender.load_state_dict(state)
            for _ in range(2):
                reports.append(trainer.publisher.sync())
                trainer.step()
            state = trainer.publisher.sender.state_dict() if main else {}
            reports.append(trainer.publisher.sync())
            now = trainer.exported()
            assert not main or same(module, now)
    return [(report.version, report.dense_bytes > 0) for report in reports]


def test_a_trainer_comes_back_in_another_layout(world):
    again = [(1, True), (2, False), (3, False), (3, True), (4, False), (5, False)]
    assert world(2, another_layout) == [again] * 2


def by_directory(where):
    """Payloads in a folder, with an anchor every third version; a second receiver starts from the folder."""
    import torch.distributed as dist

    from megatron.weight_sync import ModuleReceiver
    from megatron.weight_sync.transport.directory import DirectoryReceiver, DirectoryTransport

    with parallel(tp=2):
        main = dist.get_rank() == 0
        module = engine(small_shape())
        follower = DirectoryReceiver(ModuleReceiver(module), "engine", where)
        transport = DirectoryTransport(where, anchor_every=3)
        publish = transport.publish
        transport.publish = lambda *payload: (publish(*payload), follower.poll())
        trainer = Trainer(transport if main else None)
        trainer.publisher.register("engine")
        for _ in range(5):
            trainer.publisher.sync()
            trainer.step()
        trainer.publisher.sync()
        now = trainer.exported()
        if main:
            late = engine(small_shape())
            DirectoryReceiver(ModuleReceiver(late), "late", where).poll()
            assert same(module, now) and same(late, now)
        return sorted((stored.version, stored.base) for stored in transport.payloads() if stored.base is None)


def test_payloads_in_a_directory(world, tmp_path):
    assert world(2, by_directory, where=str(tmp_path))[0] == [(1, None), (4, None)]


# ---- refusals ----------------------------------------------------------------------------------------------


def refused():
    """What cannot be done, told on every rank."""
    from megatron.weight_sync import Ack, LocalTransport

    trainer_args = [lambda p: p.sync(), lambda p: p.publish(), lambda p: p.sync(on_failure="hope")]
    with parallel(tp=2):
        trainer = Trainer(layers=1)
        told = [outcome(lambda call=call: call(trainer.publisher)) for call in trainer_args[:2]]
        trainer.publisher.transport = LocalTransport({"engine": None})
        told.append(outcome(lambda: trainer.publisher.sync()))
        trainer.publisher.register("engine")
        told.append(outcome(lambda: trainer.publisher.acknowledge({"engine": "yes"})))
        ack = Ack("", 1, 1)
        told.append(outcome(lambda: trainer.publisher.acknowledge({"engine": ack, "engin": ack})))
        trainer.publisher.transport = object()
        told.append(outcome(lambda: trainer_args[2](trainer.publisher)))
        return told


def test_refusals_on_every_rank(world):
    first, second = world(2, refused)
    assert first == [
        ("ValueError", "sync() needs a transport: give one, or use publish() and acknowledge()"),
        ("ValueError", "publish() has no receivers: register them first"),
        ("ValueError", "there are no receivers to synchronise: register them first"),
        ("TypeError", "engine: expected an Ack (what Receiver.apply or status() returned), got str"),
        ("ValueError", "acknowledge() got receivers ['engin'], registered are ['engine']"),
        ("ValueError", "on_failure is 'raise' or 'resync', got 'hope'"),
    ]
    assert second == [("SyncFailed", f"the sending rank 0 failed: {kind}: {text}") for kind, text in first]


def stale():
    """One rank's model gets another tensor: whatever reads through the plan is refused on every rank."""
    import torch

    from examples.quickstart import policy, rollout
    from megatron.core.param_export import StalePlanError, build_plan, export, export_changed
    from megatron.core.param_export.publisher import Publisher

    with parallel(tp=2):
        shape = small_shape(layers=1)
        model = policy.gpt(shape, 32, 64, torch.bfloat16, "cpu")
        plan = build_plan(model, rollout.model(shape, 32, 64, "meta").config).prove()
        publisher = Publisher(plan)
        publisher.register("engine")
        publisher.publish()
        assert publisher.fingerprint() and publisher.report.changed == sum(
            math.prod(size) for size in plan.expected.values()
        )
        if plan.rank == 1:
            norm = model.decoder.final_layernorm
            norm.weight = torch.nn.Parameter(norm.weight.detach().clone())
        told = []
        for use in (
            lambda: next(export(plan), None),
            lambda: next(export_changed(plan, []), None),
            publisher.publish,
            publisher.fingerprint,
        ):
            with pytest.raises(StalePlanError) as found:
                use()
            told.append(str(found.value))
        return told


def test_a_stale_plan_is_refused_on_every_rank(world):
    told = ["the model's tensors were replaced, converted or emptied on rank 1: build a new plan"] * 4
    assert world(2, stale) == [told] * 2
