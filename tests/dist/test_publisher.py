"""A trainer's stream of versions: thirty steps, faults on the way, the receiver equal bit for bit."""

import pytest

from tests.dist.world import parallel


def stream(groups, steps=30):
    """Train a small Qwen3-shaped policy and feed a transformers model; what happened, on rank 0."""
    import torch
    import torch.distributed as dist

    from examples.quickstart import policy, rollout
    from megatron.core.optimizer.sparse_diff import attach
    from megatron.core.param_export import build_plan, export
    from megatron.core.param_export.publisher import Publisher
    from megatron.core.tree_training import Trajectory, TreeBatch
    from megatron.weight_sync import CorruptPayload, ModuleReceiver, Payload, Sender, WrongBase

    with parallel(**groups):
        main = dist.get_rank() == 0
        shape = policy.Shape(layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48)
        trainer = policy.Policy(shape, 32, 64, 1e-3, "cpu")
        engine = rollout.model(shape, 32, 64, "cpu")
        plan = build_plan(trainer.ddp, engine.config).prove()
        sender = Sender(plan.digest) if main else None
        publisher = Publisher(plan, attach(trainer.optimizer), sender)
        receiver = ModuleReceiver(engine) if main else None
        if main:
            sender.register("engine")
        generator = torch.Generator().manual_seed(3)
        seen = []
        lost = []
        for step in range(steps):
            prompt = torch.randint(4, 30, (9,), generator=generator).tolist()
            trajectories = []
            for _ in range(3):
                tokens = prompt + torch.randint(4, 30, (5,), generator=generator).tolist()
                values = {
                    "advantage": torch.randn(14, generator=generator),
                    "rollout_log_probs": torch.zeros(14),
                }
                trajectories.append(Trajectory(tokens, [0] * 9 + [1] * 5, values))
            batch = TreeBatch.from_trajectories(trajectories, pad_to_multiple_of=4)
            trainer.set_lr(1e-3 if step < 5 else 1e-6)
            trainer.step([batch])
            payload = publisher.publish()
            event, ack = "sent", None
            if main:
                event = "dense" if payload.base is None else "delta"
                before = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
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
                    assert all(torch.equal(before[n], t) for n, t in engine.state_dict().items())
                    ack = receiver.apply(payload)
                elif step == 20:  # the engine restarts and has nothing
                    engine = rollout.model(shape, 32, 64, "cpu")
                    receiver = ModuleReceiver(engine)
                    with pytest.raises(WrongBase):
                        receiver.apply(payload)
                    sender.register("engine")
                    event = "restarted"
                else:
                    ack = receiver.apply(payload)
            done = publisher.acknowledge({"engine": ack} if ack else {})
            expected = dict(export(plan, receivers=[0]))
            if main:
                held = engine.state_dict()
                assert set(held) == set(expected)
                equal = all(
                    torch.equal(held[n].view(torch.int16), t.view(torch.int16)) for n, t in expected.items()
                )
                seen.append((event, equal, done, payload.nbytes, publisher.density))
        return seen


@pytest.mark.parametrize("groups, size", [(dict(tp=2), 4), (dict(pp=2), 2)], ids=["tp2-dp2", "pp2"])
def test_receiver_is_bit_identical_after_every_sync(world, groups, size):
    seen = world(size, stream, groups=groups)[0]
    assert len(seen) == 30
    for step, (event, equal, done, nbytes, density) in enumerate(seen):
        arrived = event in ("dense", "delta")
        assert (equal, done) == (arrived, arrived), (step, event)
        if event == "delta":
            assert nbytes < seen[0][3] / 2 and 0 < density < 0.5
    events = [entry[0] for entry in seen]
    assert events[:5] == ["dense"] * 5  # at a large learning rate nearly everything changes
    assert events[12] == "lost" and events[20] == "restarted" and events[21] == "dense"
    assert set(events[5:12] + events[13:20] + events[22:]) == {"delta"}
    # After the loss the delta carries the changes of two steps.
    assert seen[13][4] > 1.2 * seen[14][4]


def misplaced():
    from types import SimpleNamespace

    from megatron.core.param_export.publisher import Publisher
    from megatron.weight_sync import Sender

    told = []
    for plan_rank, sender in ((0, None), (1, Sender("m"))):
        with pytest.raises(ValueError) as error:
            Publisher(SimpleNamespace(rank=plan_rank), None, sender)
        told.append(str(error.value))
    return told


def test_the_sender_lives_on_one_rank(world):
    assert world(2, misplaced)[0] == [
        "the sender lives on rank 0 and nowhere else; rank 0 has none",
        "the sender lives on rank 0 and nowhere else; rank 1 has one",
    ]


def stale():
    """One rank's model gets another tensor: whatever reads through the plan is refused on every rank."""
    import torch

    from examples.quickstart import policy, rollout
    from megatron.core.param_export import StalePlanError, build_plan, export, export_changed
    from megatron.core.param_export.publisher import Publisher
    from megatron.weight_sync import Sender

    with parallel(tp=2):
        shape = policy.Shape(layers=1, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48)
        model = policy.gpt(shape, 32, 64, torch.bfloat16, "cpu")
        plan = build_plan(model, rollout.model(shape, 32, 64, "meta").config).prove()
        publisher = Publisher(plan, None, Sender("m") if plan.rank == 0 else None)
        publisher.publish()
        assert publisher.fingerprint()
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
    told = ["the model's tensors were replaced on rank 1: build a new plan"] * 4
    assert world(2, stale) == [told] * 2


def unbased():
    """A delta before anything was sent, on ranks that would otherwise wait for each other."""
    from examples.quickstart import policy, rollout
    from megatron.core.optimizer.sparse_diff import attach
    from megatron.core.param_export import build_plan
    from megatron.core.param_export.publisher import Publisher
    from megatron.weight_sync import Sender

    with parallel(tp=2):
        shape = policy.Shape(layers=1, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48)
        trainer = policy.Policy(shape, 32, 64, 1e-3, "cpu")
        plan = build_plan(trainer.ddp, rollout.model(shape, 32, 64, "meta").config).prove()
        sender = Sender("m") if plan.rank == 0 else None
        told = []
        for diff, error in ((None, ValueError), (attach(trainer.optimizer), RuntimeError)):
            publisher = Publisher(plan, diff, sender)
            with pytest.raises(error) as found:
                publisher.publish(dense=False)
            told.append(str(found.value))
        publisher.publish()
        return told, publisher.version


def test_a_delta_without_a_base_is_refused_on_every_rank(world):
    told = [
        "a delta needs a sparse diff: this publisher was made without one",
        "a delta needs a base: the first sync, and the next one after invalidate(), is dense",
    ]
    assert world(2, unbased) == [(told, 1)] * 2
