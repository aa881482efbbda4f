"""Sender to receiver: bit equality after every sync, and typed errors that leave the receiver as it was."""

import itertools

import pytest
import torch
from safetensors.torch import load

from megatron import weight_sync as ws
from megatron.weight_sync import container
from tests.cpu.weight_sync.trainer import same


def test_a_payload_prints_short(pair):
    trainer, _, receiver = pair()
    whole = trainer.publish(dense=True)
    assert repr(whole).startswith(f"Payload(version {whole.version}, dense, {len(whole.buckets)} buckets, ")
    assert repr(whole).endswith(f", {whole.nbytes:,} bytes)") and receiver.apply(whole)
    changes = trainer.publish(dense=False)
    assert f"(version {changes.version}, delta on versions {changes.base[0]} to " in repr(changes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("encoding", ["raw", "packed", "entropy"])
def test_thirty_steps_bit_for_bit(pair, dtype, encoding):
    trainer, module, receiver = pair(dtype, bucket_bytes=200, encodings=(encoding,))
    gen = torch.Generator().manual_seed(4)
    live = [t.data_ptr() for t in module.state_dict().values()]
    kinds = set()
    for step in range(30):
        trainer.step([0.0, 0.02, 0.3, 0.9][step % 4], gen)
        payload = trainer.publish()
        kinds |= set(payload.stats["encodings"])
        assert not payload.dense and payload.version == step + 2
        # through bytes, in any order
        ack = receiver.apply(payload.to_bytes()[::-1])
        assert same(trainer, module)
        assert ack == receiver.status() and ack.fingerprint == ws.total(ws.fingerprint(trainer.tensors))
        assert trainer.acknowledge("r", ack)
    assert kinds == {encoding, "dense"}
    assert live == [t.data_ptr() for t in module.state_dict().values()]
    assert module.head.weight is module.embed.weight


def test_dense_payload_is_a_safetensors_checkpoint(pair):
    trainer, _, _ = pair()
    payload = trainer.publish(dense=True)
    loaded = {}
    for data in payload.to_bytes()[:-1]:
        loaded |= load(data)
    assert set(loaded) == set(trainer.tensors)
    assert all(
        torch.equal(loaded[n].view(torch.uint8), t.view(torch.uint8))
        for n, t in trainer.tensors.items()
        if t.dim()
    )


def test_payload_bytes_do_not_depend_on_the_run(pair):
    first, second = (pair()[0] for _ in range(2))
    assert first.publish(dense=True).to_bytes() == second.publish(dense=True).to_bytes()


def test_union_of_missed_versions(pair):
    trainer, module, receiver = pair()
    gen = torch.Generator().manual_seed(5)
    for _ in range(3):
        trainer.step(0.1, gen)
        payload = trainer.publish()  # never delivered
    assert (payload.base, payload.version, trainer.sender.state("r")) == ((1, 3), 4, "behind")
    assert trainer.acknowledge("r", receiver.apply(payload)) and same(trainer, module)
    assert trainer.sender.state("r") == "synced" and trainer.sender.since == 4


def test_two_receivers_at_different_versions(pair, tiny):
    trainer, module, receiver = pair()
    other_module = tiny(3)
    other = ws.ModuleReceiver(other_module)
    trainer.sender.register("other")
    assert trainer.sender.needs_dense and trainer.sender.state("other") == "fresh"
    dense = trainer.publish(dense=True, again=True)
    assert trainer.acknowledge("other", other.apply(dense))
    gen = torch.Generator().manual_seed(6)
    trainer.step(0.1, gen)
    assert not trainer.acknowledge("r", receiver.apply(trainer.publish()))  # other has not answered
    trainer.step(0.1, gen)
    payload = trainer.publish()
    assert not trainer.acknowledge("r", receiver.apply(payload))
    assert trainer.acknowledge("other", other.apply(payload))
    assert same(trainer, module) and same(trainer, other_module)


def test_a_receiver_too_far_behind_is_given_up(pair):
    trainer, _, receiver = pair(max_behind=2)
    trainer.sender._held["slow"] = 1
    gen = torch.Generator().manual_seed(6)
    done = []
    for _ in range(4):
        trainer.step(0.1, gen)
        done.append(trainer.acknowledge("r", receiver.apply(trainer.publish(dense=False))))
    assert done == [False, False, True, True] and trainer.sender.state("slow") == "fresh"


def test_lost_acknowledgement(pair):
    """The receiver applied a version that the sender never heard of: the next delta fits all the same."""
    trainer, module, receiver = pair()
    gen = torch.Generator().manual_seed(8)
    trainer.step(0.1, gen)
    receiver.apply(trainer.publish())
    trainer.step(0.1, gen)
    assert trainer.acknowledge("r", receiver.apply(trainer.publish())) and same(trainer, module)


def test_invalidate_forces_dense(pair):
    trainer, module, receiver = pair()
    trainer.sender.invalidate()
    with pytest.raises(RuntimeError, match="a delta needs a base"):
        trainer.sender.begin(dense=False)
    trainer.step(1.0, torch.Generator().manual_seed(1))
    payload = trainer.publish()
    assert payload.dense and trainer.acknowledge("r", receiver.apply(payload)) and same(trainer, module)


# ---- errors: typed, and nothing changes --------------------------------------------------------------------


def test_every_flipped_byte_is_refused(pair):
    trainer, module, receiver = pair()
    trainer.step(0.2, torch.Generator().manual_seed(2))
    good = trainer.publish().to_bytes()
    status = receiver.status()
    for which, data in enumerate(good):
        for at in range(len(data)):
            bad = bytearray(data)
            bad[at] ^= 1 << (at % 8)
            with pytest.raises(ws.CorruptPayload):
                receiver.apply([bad if k == which else d for k, d in enumerate(good)])
    assert receiver.status() == status
    receiver.apply(good)
    assert same(trainer, module)


def test_every_truncation_is_refused(pair):
    trainer, _, receiver = pair()
    trainer.step(0.2, torch.Generator().manual_seed(2))
    good = trainer.publish().to_bytes()
    for which, data in enumerate(good):
        for length in range(0, len(data), 7):
            with pytest.raises(ws.CorruptPayload):
                receiver.apply([data[:length] if k == which else d for k, d in enumerate(good)])


DENSE = "ask the sender for a dense payload$"
KNOWN = r"acknowledge with status\(\), or ask the sender for a dense payload of a later version$"


def test_wrong_versions(pair, tiny, refused):
    trainer, module, receiver = pair()
    gen = torch.Generator().manual_seed(3)
    trainer.step(0.1, gen)
    second = trainer.publish()
    fresh = tiny(9)
    refused(ws.ModuleReceiver(fresh), fresh, second, ws.WrongBase, f"holds nothing yet; {DENSE}")
    assert trainer.acknowledge("r", receiver.apply(second))
    match = f"delta to version 2, this receiver holds 2; {KNOWN}"
    refused(receiver, module, second, ws.RepeatedVersion, match)
    trainer.step(0.1, gen)
    third = trainer.publish()
    late, late_module = ws.ModuleReceiver(tiny(4)), None
    late_module = tiny(4)
    late = ws.ModuleReceiver(late_module)
    late.apply(trainer.publish(dense=True, again=True))
    refused(late, late_module, third, ws.RepeatedVersion, "holds 3")
    assert trainer.acknowledge("r", receiver.apply(third))
    behind = ws.ModuleReceiver(fresh)
    behind.version, behind.lineage, behind.model_id = 1, 7, "tiny/1"
    trainer.step(0.1, gen)
    with pytest.raises(ws.MissingVersion, match=f"from version 3, this receiver still holds 1; {DENSE}"):
        behind.apply(trainer.publish())


def test_wrong_base_from_another_lineage(pair, refused):
    _, module, receiver = pair()
    other, _, _ = pair(lineage=8)
    other.step(0.1, torch.Generator().manual_seed(3))
    refused(receiver, module, other.publish(), ws.WrongBase, f"lineage 8, .*; {DENSE}")


def test_stale_dense_payload(pair, refused):
    old, _, _ = pair()
    stale = old.publish(dense=True)
    trainer, module, receiver = pair(lineage=8)
    refused(receiver, module, stale, ws.RepeatedVersion, f"lineage 7, .*; {KNOWN}")
    refused(receiver, module, trainer.publish(dense=True, again=True), ws.RepeatedVersion, "holds 1 of 8")


def test_wrong_model(pair, refused):
    trainer, module, receiver = pair()
    trainer.sender.model_id = "other"
    refused(receiver, module, trainer.publish(dense=True), ws.WrongModel, "'other'")


def craft(trainer, change, dense=False):
    """A payload with a valid digest whose tensors are not the model's."""
    tensors = change(dict(trainer.tensors))
    sender = ws.Sender("tiny/1", lineage=7)
    sender.version, sender.since = (1, 1)
    sender.table = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    update = sender.begin(dense)
    for name, tensor in tensors.items():
        if dense:
            update.add_dense(name, tensor)
        elif tensor.numel():
            flat = tensor.reshape(-1)
            update.add_delta(name, torch.tensor([0]), flat[:1].clone(), tuple(tensor.shape))
    return update.finish(ws.fingerprint(tensors))


def test_tensors_that_do_not_fit(pair, refused):
    trainer, module, receiver = pair()

    def drop(t):
        t.pop("proj.bias")
        return t

    def reshape(t):
        return {**t, "proj.weight": t["proj.weight"].t().contiguous()}

    def retype(t):
        return {**t, "proj.bias": t["proj.bias"].half()}

    def extra(t):
        return {**t, "proj.ghost": torch.ones(3)}

    refused(receiver, module, craft(trainer, drop, dense=True), ws.MissingTensor, "proj.bias")
    for dense in (True, False):
        refused(
            receiver,
            module,
            craft(trainer, reshape, dense),
            ws.LayoutMismatch,
            r"proj.weight.*\[6, 9\].*\[9, 6\]",
        )
        refused(receiver, module, craft(trainer, retype, dense), ws.LayoutMismatch, "float16.*bfloat16")
        refused(receiver, module, craft(trainer, extra, dense), ws.UnknownTensor, "proj.ghost")


def test_missing_bucket_and_foreign_bucket(pair, refused):
    trainer, module, receiver = pair(bucket_bytes=30)
    trainer.step(0.5, torch.Generator().manual_seed(2))
    first = trainer.publish().to_bytes()
    trainer.step(0.5, torch.Generator().manual_seed(2))
    second = trainer.publish().to_bytes()
    assert len(second) > 3
    refused(receiver, module, second[:-1], ws.IncompletePayload, "one manifest, got 0")
    refused(receiver, module, second[1:], ws.IncompletePayload, "1 of . buckets are missing")
    refused(receiver, module, [*second, first[0]], ws.CorruptPayload, "belongs to another payload")
    receiver.apply([*second, second[0], second[-1]])  # duplicates do no harm
    assert same(trainer, module)


def test_wrong_value_is_found_after_writing_and_taken_back(pair, refused):
    """The payload is well-formed but carries a value that the sender does not have."""
    trainer, module, receiver = pair()
    trainer.step(0.2, torch.Generator().manual_seed(2))
    right = ws.fingerprint(trainer.tensors)
    for dense in (False, True):
        update = trainer.sender.begin(dense, again=dense)
        for name, tensor in trainer.tensors.items():
            if dense:
                update.add_dense(name, tensor + 1 if name == "proj.weight" else tensor)
                continue
            index = trainer.bits[name].nonzero().view(-1)
            values = tensor.view(-1)[index]
            update.add_delta(
                name, index, values + 1 if name == "proj.weight" else values, tuple(tensor.shape)
            )
        refused(receiver, module, update.finish(right), ws.FingerprintMismatch, "1 tensors.*proj.weight")
    receiver.apply(trainer.publish(again=True))
    assert same(trainer, module)


def test_drifted_receiver_is_poisoned_until_a_dense_sync(pair):
    trainer, module, receiver = pair()
    with torch.no_grad():
        module.frozen[2] = 5.0
    trainer.step(0.0, torch.Generator().manual_seed(2))
    trainer.tensors["proj.bias"][0] += 1
    trainer.bits["proj.bias"][0] = True
    payload = trainer.publish()
    with pytest.raises(ws.ReceiverPoisoned, match=r"drifted from version 1.*frozen"):
        receiver.apply(payload)
    with pytest.raises(ws.ReceiverPoisoned, match="no known version"):
        receiver.apply(payload)
    assert not trainer.acknowledge("r", receiver.status())
    assert trainer.sender.state("r") == "poisoned" and trainer.sender.needs_dense
    assert trainer.acknowledge("r", receiver.apply(trainer.publish(again=True)))
    assert same(trainer, module) and trainer.sender.state("r") == "synced"


def test_weights_written_past_the_change_bits_are_hinted_at(pair, refused):
    trainer, module, receiver = pair()
    trainer.tensors["frozen"][0] += 1
    text = r"does not carry have changed on the sender's side too.*call invalidate\(\) of its sparse diff$"
    refused(receiver, module, trainer_without(trainer, "frozen"), ws.FingerprintMismatch, text)
    trainer.tensors["proj.weight"][1] += 1
    trainer.bits["proj.weight"][0] = True  # one of them is known
    text = r"1 tensors differ.*\['proj.weight'\].*call invalidate\(\) of its sparse diff$"
    refused(receiver, module, trainer_without(trainer, "frozen"), ws.FingerprintMismatch, text)


def trainer_without(trainer, left_out):
    """A delta as change bits give it, which lacks a tensor that changed."""
    update = trainer.sender.begin()
    for name, tensor in trainer.tensors.items():
        if name != left_out:
            index = trainer.bits[name].nonzero().view(-1)
            update.add_delta(name, index, tensor.view(-1)[index], tuple(tensor.shape))
    return update.finish(ws.fingerprint(trainer.tensors))


def test_drift_seen_by_status(pair):
    trainer, module, receiver = pair()
    with torch.no_grad():
        module.proj.bias[1] += 1
    assert not trainer.acknowledge("r", receiver.status())
    assert trainer.sender.state("r") == "poisoned"


@pytest.mark.parametrize("dense", [True, False])
def test_fault_at_every_write_point(pair, monkeypatch, bits, dense):
    trainer, module, receiver = pair()
    trainer.step(0.3, torch.Generator().manual_seed(2))
    payload = trainer.publish(dense)
    from megatron.weight_sync import receiver as module_under_test

    store, before = module_under_test._store, bits(module)
    for fail_at, after_write in itertools.product(range(6 if dense else 4), (False, True)):
        calls = itertools.count()

        def broken(write, values, calls=calls, fail_at=fail_at, after_write=after_write):
            hit = next(calls) == fail_at
            if hit and not after_write:
                raise OSError("device lost")
            store(write, values)
            if hit:
                raise OSError("device lost")

        monkeypatch.setattr(module_under_test, "_store", broken)
        with pytest.raises(OSError, match="device lost"):
            receiver.apply(payload)
        monkeypatch.setattr(module_under_test, "_store", store)
        assert all(torch.equal(before[name], b) for name, b in bits(module).items())
        assert receiver.status().version == 1 and not receiver.poisoned
    receiver.apply(payload)
    assert same(trainer, module)


def test_undo_that_fails_poisons(pair, monkeypatch):
    trainer, module, _ = pair()
    fresh = ws.ModuleReceiver(module, keep_undo=False)
    from megatron.weight_sync import receiver as module_under_test

    store, calls = module_under_test._store, itertools.count()

    def broken(write, values):
        if next(calls) == 2:
            raise OSError("device lost")
        store(write, values)

    monkeypatch.setattr(module_under_test, "_store", broken)
    with pytest.raises(ws.ReceiverPoisoned, match="could not be taken back"):
        fresh.apply(trainer.publish(dense=True))
    assert fresh.status().poisoned and fresh.status().version is None
    fresh.apply(trainer.publish(dense=True, again=True))
    assert same(trainer, module) and not fresh.poisoned


def test_tied_names_must_agree(pair, refused):
    trainer, module, receiver = pair()

    def both(t):
        return {**t, "head.weight": t["embed.weight"].clone()}

    def differ(t):
        return {**t, "head.weight": t["embed.weight"] + 1}

    refused(receiver, module, craft(trainer, differ, dense=True), ws.LayoutMismatch, "share storage")
    receiver.apply(craft(trainer, both, dense=True))
    assert same(trainer, module)


# ---- misuse on the sender's side ---------------------------------------------------------------------------


def test_arguments_of_another_type(pair, refused):
    trainer, module, receiver = pair()
    for payload in (None, 3, b"container", torch.zeros(3, dtype=torch.uint8)):
        match = (
            r"payload: expected a Payload or the list of its containers that to_bytes\(\) returns, got "
            f"{type(payload).__name__}$"
        )
        refused(receiver, module, payload, TypeError, match)
    with pytest.raises(TypeError, match=r"^module: expected a torch.nn.Module, got NoneType$"):
        ws.ModuleReceiver(None)
    states = trainer.sender.state("r")
    with pytest.raises(TypeError, match=r"^r: expected an Ack \(what Receiver.apply or .*, got NoneType$"):
        trainer.sender.acknowledge("r", None)
    assert trainer.sender.state("r") == states


def test_sender_refuses_misuse(pair, tiny, tensors_of):
    trainer, _, _ = pair()
    name, shape = "proj.bias", (9,)
    one = torch.ones(1).bfloat16()
    update = trainer.sender.begin()
    with pytest.raises(RuntimeError, match="an update is open"):
        trainer.sender.begin()
    with pytest.raises(ValueError, match="outside a tensor of 9 elements"):
        update.add_delta(name, torch.tensor([9]), one, shape)
    update.abort()
    for call, error, match in [
        (lambda u: u.add_delta(name, torch.tensor([3, 3]), one.repeat(2), shape), ValueError, "twice"),
        (lambda u: u.add_delta(name, torch.tensor([3], dtype=torch.int32), one, shape), ValueError, "int64"),
        (lambda u: u.add_delta("ghost", torch.tensor([3]), one, shape), ws.UnknownTensor, "ghost"),
        (lambda u: u.add_delta(name, torch.tensor([3]), one.float(), shape), ws.LayoutMismatch, "float32"),
        (lambda u: u.add_delta("a:b", torch.tensor([3]), one, shape), ValueError, "no colon"),
        (lambda u: u.finish({}), ws.MissingTensor, "must cover exactly"),
    ]:
        update = trainer.sender.begin()
        with pytest.raises(error, match=match):
            call(update)
        update.abort()
    update = trainer.sender.begin(dense=True)
    with pytest.raises(ws.MissingTensor, match="a dense sync needs every tensor"):
        update.finish(ws.fingerprint(trainer.tensors))
    update.abort()
    with pytest.raises(RuntimeError, match="closed already"):
        update.add_dense(name, torch.ones(9))
    trainer.publish()
    trainer.tensors[name][0] += 1
    with pytest.raises(RuntimeError, match="have changed since version 2"):
        trainer.publish(again=True)
    with pytest.raises(ValueError, match="encodings are"):
        ws.Sender("m", encodings=("zip",))


def test_unsorted_indices_are_sorted(pair):
    trainer, module, receiver = pair()
    flat = trainer.tensors["proj.weight"].view(-1)
    index = torch.tensor([40, 3, 17])
    flat[index] = torch.tensor([1.0, 2.0, 3.0]).bfloat16()
    update = trainer.sender.begin()
    update.add_delta("proj.weight", index, flat[index], (9, 6))
    receiver.apply(update.finish(ws.fingerprint(trainer.tensors)))
    assert same(trainer, module)


def test_container_round_trip_is_exact():
    entries = {"a": torch.arange(5, dtype=torch.int64), "b": torch.tensor([1, 2, 3], dtype=torch.uint8)}
    data, digest = container.write(entries, {"kind": "test"})
    parsed = container.read(data)
    assert parsed.digest == digest and parsed.metadata["kind"] == "test"
    assert all(torch.equal(parsed.entries[k], v) for k, v in entries.items())
    assert set(load(bytes(data.tolist()))) == set(entries)


@pytest.mark.parametrize("density", [0.05, 0.5, 1.0])
def test_arguments_may_be_overwritten_at_once(pair, density):
    """Exporters reuse their buffers: nothing that was added may look at them later."""
    trainer, module, receiver = pair(bucket_bytes=1 << 20)
    trainer.step(density, torch.Generator().manual_seed(9))
    update = trainer.sender.begin()
    for name, tensor in trainer.tensors.items():
        index = trainer.bits[name].nonzero().view(-1)
        buffers = [index.clone(), tensor.view(-1)[index].clone(), tensor.clone()]
        update.add_delta(name, buffers[0], buffers[1], tensor.shape, full=buffers[2])
        for buffer in buffers:
            buffer.view(torch.uint8).fill_(77) if buffer.dim() else buffer.fill_(77)
    receiver.apply(update.finish(ws.fingerprint(trainer.tensors)))
    assert same(trainer, module)
    update = trainer.sender.begin(dense=True, again=True)
    for name, tensor in trainer.tensors.items():
        buffer = tensor.clone()
        update.add_dense(name, buffer)
        buffer.fill_(77)
    fresh = type(module)()
    ws.ModuleReceiver(fresh).apply(update.finish(ws.fingerprint(trainer.tensors)))
    assert same(trainer, fresh)
