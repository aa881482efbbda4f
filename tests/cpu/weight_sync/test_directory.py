"""Payloads in folders and object stores: atomic publication, any prefix, garbage collection, the command
line."""

import os
import random

import pytest
import torch
from safetensors.torch import load_file

from megatron import weight_sync as ws
from megatron.weight_sync import __main__ as cli
from megatron.weight_sync.transport.directory import DirectoryReceiver, DirectoryTransport, Stored, way
from megatron.weight_sync.transport.store import LocalStore, open_store

NAMES = ("w", "v")


class Trainer:
    def __init__(self, where, lineage=5, seed=1, **kwargs):
        self.gen = torch.Generator().manual_seed(seed)
        self.weights = {
            "w": torch.randn(9, 5, generator=self.gen).bfloat16(),
            "v": torch.randn(33, generator=self.gen),
        }
        self.old = {}
        self.sender = ws.Sender("m", lineage=lineage, bucket_bytes=80, encodings=("packed",))
        self.transport = DirectoryTransport(where, timeout=0.0, **kwargs)
        self.history = {}

    def publish(self, dense=False, again=False):
        """One step and one payload; a delta covers the changes since the version before."""
        if not again:
            self.old = {n: t.clone() for n, t in self.weights.items()}
            for tensor in self.weights.values():
                hit = torch.rand(tensor.shape, generator=self.gen) < 0.2
                tensor[hit] += 1
        update = self.sender.begin(dense or self.sender.since is None, again=again)
        for name, tensor in self.weights.items():
            if update.dense:
                update.add_dense(name, tensor)
            else:
                index = (tensor != self.old[name]).view(-1).nonzero().view(-1)
                update.add_delta(name, index, tensor.view(-1)[index], tensor.shape)
        payload = update.finish(ws.fingerprint(self.weights))
        self.history[payload.version] = {n: t.clone() for n, t in self.weights.items()}
        self.sender.since = self.sender.version
        self.transport.publish(payload, self.sender.lineage)
        return payload


class Weights(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(9, 5, dtype=torch.bfloat16))
        self.v = torch.nn.Parameter(torch.zeros(33))


@pytest.fixture(params=["folder", "memory"])
def where(request, tmp_path):
    if request.param == "folder":
        return str(tmp_path / "payloads")
    pytest.importorskip("fsspec")
    return f"memory://{tmp_path.name}/payloads"


def reader(where, name="r"):
    module = Weights()
    return module, DirectoryReceiver(ws.ModuleReceiver(module), name, where)


def holds(module, weights):
    return all(torch.equal(t, weights[n]) for n, t in module.state_dict().items())


def test_replaced_tensors_wait_for_whole_ones(where):
    trainer, (module, follower) = Trainer(where), reader(where)
    for _ in range(3):
        trainer.publish()
    assert follower.poll() == 3
    module.w.data = module.w.data.clone()
    trainer.publish()
    with pytest.raises(ws.ReceiverPoisoned, match=r"1 tensors were replaced .*'w'"):
        follower.poll()
    assert isinstance(follower.answer("r"), ws.ReceiverPoisoned)
    trainer.publish(dense=True, again=True)
    assert follower.poll() == 1
    assert holds(module, trainer.history[4]) and follower.answer("r").version == 4


def test_follow_from_any_version(where):
    trainer = Trainer(where)
    modules = []
    for step in range(9):
        trainer.publish()
        if step in (4,):
            trainer.publish(dense=True, again=True)
        modules.append(reader(where, f"r{step}"))
        for k, (module, follower) in enumerate(modules):
            if (step + k) % 3 == 0:
                assert follower.poll() > 0 or follower.receiver.version == step + 1
                assert holds(module, trainer.history[step + 1])
                assert trainer.transport.answer(f"r{k}") == follower.receiver.status()
    for module, follower in modules:
        follower.poll()
        assert holds(module, trainer.weights) and follower.poll() == 0
    assert trainer.transport.receivers() == [f"r{k}" for k in range(9)]


def test_cheapest_way():
    def stored(version, base, nbytes):
        return Stored(f"v{version}-{base}", 1, version, base, nbytes, ())

    chain = [stored(1, None, 100), *(stored(v, (v - 1, v - 1), 10) for v in range(2, 20))]
    anchor = stored(15, None, 100)
    union = stored(19, (4, 18), 30)
    assert [e.version for e in way(chain, 16)] == [17, 18, 19]
    assert way([*chain, anchor], None)[0] is anchor
    assert [e.version for e in way([*chain, anchor, union], None)] == [15, 19]
    assert way([*chain, union], 7) == [union] and [e.version for e in way([*chain, union], 17)] == [18, 19]
    assert way(chain[1:], None) is None and way(chain, 19) == [] and way([], 3) is None
    assert [e.version for e in way(chain, None, goal=3)] == [1, 2, 3]


def test_unfinished_payload_is_not_seen(where):
    trainer = Trainer(where)
    trainer.publish(), trainer.publish()
    store = trainer.transport.store
    for path in store.list():
        if "v000000000002" in path and path.endswith("manifest.safetensors"):
            store.delete(path)
    module, follower = reader(where)
    assert follower.poll() == 1 and holds(module, trainer.history[1])


def test_disk_full_at_every_write(tmp_path, monkeypatch):
    """Each write may fail: nothing half-written is ever read, and the version can be published again."""
    for fail_at in range(4):  # a bucket and a manifest, each with its folder
        trainer = Trainer(str(tmp_path / str(fail_at)))
        trainer.publish()
        module, follower = reader(str(tmp_path / str(fail_at)))
        follower.poll()
        fsync, calls = os.fsync, []

        def full(fd, fsync=fsync, calls=calls, fail_at=fail_at):
            calls.append(fd)
            if len(calls) == fail_at + 1:
                raise OSError(28, "No space left on device")
            fsync(fd)

        monkeypatch.setattr(os, "fsync", full)
        failed = False
        try:
            trainer.publish()
        except OSError:
            failed = True
        monkeypatch.setattr(os, "fsync", fsync)
        assert failed
        assert not [p for p in (tmp_path / str(fail_at)).rglob("*.part")]
        follower.poll()
        assert holds(module, trainer.history[follower.receiver.version])
        trainer.transport.publish(trainer_payload(trainer), trainer.sender.lineage)
        follower.poll()
        assert follower.receiver.version == 2 and holds(module, trainer.weights)


def trainer_payload(trainer):
    update = trainer.sender.begin(dense=True, again=True)
    for name, tensor in trainer.weights.items():
        update.add_dense(name, tensor)
    return update.finish(ws.fingerprint(trainer.weights))


def test_a_damaged_payload_is_left_aside(tmp_path):
    trainer = Trainer(tmp_path)
    for _ in range(4):
        trainer.publish()
    module, follower = reader(tmp_path)
    follower.poll()
    trainer.publish()
    bad = next(tmp_path.glob("l*/v000000000005*/bucket-00000*"))
    data = bytearray(bad.read_bytes())
    data[-3] ^= 4
    bad.write_bytes(data)
    with pytest.raises(ws.CorruptPayload, match="data checksum"):
        follower.poll()
    assert isinstance(trainer.transport.answer("r"), ws.CorruptPayload) and holds(module, trainer.history[4])
    trainer.publish(dense=True, again=True)  # another way
    assert follower.poll() == 1 and holds(module, trainer.weights)
    assert trainer.transport.answer("r").version == 5
    trainer.publish()
    assert follower.poll() == 1 and holds(module, trainer.weights)


def test_later_lineage_takes_over(where):
    trainer = Trainer(where)
    trainer.publish(), trainer.publish()
    module, follower = reader(where)
    follower.poll()
    other = Trainer(where, lineage=6, seed=9)
    other.publish()
    assert follower.poll() == 1 and holds(module, other.weights) and follower.receiver.lineage == 6
    trainer.publish()  # a sender that should be dead
    assert follower.poll() == 0 and holds(module, other.weights)


def cheapest_ways(trainer, followers):
    payloads = trainer.transport.payloads()
    held = [follower.receiver.version for _, follower in followers]
    return [[e.folder for e in way(payloads, version)] for version in held if version is not None]


@pytest.mark.parametrize("seed", range(3))
def test_garbage_collection_breaks_no_chain(where, seed):
    """Random walks of readers and collections: everyone who answered, and anyone new, always reaches the
    newest version; and what is kept stays bounded."""
    rng = random.Random(seed)
    trainer = Trainer(where, seed=seed)
    trainer.publish()
    followers = [reader(where, f"r{k}") for k in range(3)]
    for _ in range(40):
        if rng.random() < 0.5:
            trainer.publish()
            if trainer.sender.version % 6 == 0:
                trainer.publish(dense=True, again=True)
        module, follower = rng.choice(followers)
        if rng.random() < 0.4:
            follower.poll()
            assert holds(module, trainer.weights)
        if rng.random() < 0.3:
            ways = cheapest_ways(trainer, followers)
            trainer.transport.collect_garbage()
            assert cheapest_ways(trainer, followers) == ways  # nobody is sent the long way round
            new_module, new = reader(where, "new")
            while new._path({}):
                new.receiver.apply(new.read(new._path({})[0]))
            assert holds(new_module, trainer.weights)
    for module, follower in followers:
        follower.poll()
        assert holds(module, trainer.weights)
    trainer.publish(), trainer.publish(dense=True, again=True)
    for _, follower in followers:
        follower.poll()
    trainer.transport.collect_garbage()
    kept = trainer.transport.payloads()
    assert [(e.version, e.base) for e in kept] == [(trainer.sender.version, None)]


def test_collection_keeps_the_way_of_a_slow_receiver(tmp_path):
    trainer = Trainer(tmp_path)
    trainer.publish()
    _, slow = reader(tmp_path, "slow")
    slow.poll()
    for _ in range(3):
        trainer.publish()
    trainer.publish(dense=True)
    trainer.publish()
    versions = lambda: [(e.version, e.base is None) for e in trainer.transport.payloads()]  # noqa: E731
    trainer.transport.collect_garbage()
    assert (6, False) in versions() and (5, True) in versions()
    assert slow.poll() > 0
    trainer.transport.collect_garbage()
    assert versions() == [(5, True), (6, False)]
    assert trainer.transport.anchor_due(5, 54) is False and trainer.transport.anchor_due(5, 55) is True


def test_unfinished_leftovers_are_collected(tmp_path):
    trainer = Trainer(tmp_path)
    trainer.publish(), trainer.publish(), trainer.publish(dense=True, again=True)
    LocalStore(tmp_path).put("l00000000000000000005/v000000000001-delta-0-0/bucket-00000.safetensors", b"x")
    gone = trainer.transport.collect_garbage()
    assert "l00000000000000000005/v000000000001-delta-0-0" in gone
    assert not list(tmp_path.glob("l*/v000000000001*"))


def test_through_synchronise(tmp_path):
    trainer = Trainer(tmp_path)
    module, follower = reader(tmp_path)
    trainer.sender.register("r")
    trainer.transport.timeout = 10.0

    def fill(update):
        for name, tensor in trainer.weights.items():
            update.add_dense(name, tensor)
        return ws.fingerprint(trainer.weights)

    publish = trainer.transport.publish
    trainer.transport.publish = lambda *a: (publish(*a), follower.poll())
    report = ws.synchronise(trainer.sender, trainer.transport, fill)
    assert report.clear_bits and holds(module, trainer.weights)
    trainer.transport.publish, trainer.transport.timeout = publish, 0.0
    trainer.sender.invalidate()
    with pytest.raises(ws.SyncFailed, match="no answer for version 2"):
        ws.synchronise(trainer.sender, trainer.transport, fill)


def test_anchors_through_synchronise(tmp_path):
    """Deltas, and every third version an anchor; a payload that cannot be written is not passed over in
    silence."""
    trainer = Trainer(tmp_path)
    trainer.transport.anchor_every = 3
    module, follower = reader(tmp_path)
    trainer.sender.register("r")
    publish = trainer.transport.publish
    trainer.transport.publish = lambda *a: (publish(*a), follower.poll())
    old = {}

    def fill(update):
        for name, tensor in trainer.weights.items():
            if update.dense:
                update.add_dense(name, tensor)
            else:
                index = (tensor != old[name]).view(-1).nonzero().view(-1)
                update.add_delta(name, index, tensor.view(-1)[index], tensor.shape)
        return ws.fingerprint(trainer.weights)

    for step in range(7):
        old = {n: t.clone() for n, t in trainer.weights.items()}
        trainer.weights["v"][step] += 1
        report = ws.synchronise(trainer.sender, trainer.transport, fill)
        assert report.changed == (1 if step else 78) and holds(module, trainer.weights)
    kinds = [(stored.version, stored.base is None) for stored in trainer.transport.payloads()]
    anchored = {1, 4, 7}
    assert kinds == sorted([(v, False) for v in range(2, 8)] + [(v, True) for v in anchored])

    def full(*_):
        raise OSError("disk full")

    trainer.transport.store.put = full
    trainer.sender.drop("r")
    with pytest.raises(OSError, match="disk full"):
        ws.synchronise(trainer.sender, trainer.transport, fill)


def test_answers_survive_any_bytes(tmp_path):
    transport = DirectoryTransport(tmp_path)
    for data in (
        b"",
        b"[]",
        b"{",
        b'{"ack": {}}',
        b'{"ack": {"model_id": 1}}',
        b"\xff",
        b'{"error": 1}',
        b"9",
    ):
        transport.store.put("answers/x.json", data)
        assert isinstance(transport.answer("x"), Exception), data
    with pytest.raises(ValueError, match="a receiver id here"):
        DirectoryReceiver(None, "../x", tmp_path)


def test_store_without_fsspec_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(RuntimeError, match="pip install fsspec"):
        open_store("s3://bucket/x")


# ---- command line ------------------------------------------------------------------------------------------


def test_command_line(tmp_path, capsys):
    trainer = Trainer(tmp_path / "p")
    for _ in range(3):
        trainer.publish()
    trainer.publish(dense=True, again=True)
    trainer.publish()
    assert cli.main(["inspect", str(tmp_path / "p")]) == 0
    out = capsys.readouterr().out
    assert "version 3: delta from 2-2" in out and "version 3: anchor" in out
    bucket = next((tmp_path / "p").glob("l*/v000000000002-*/bucket-00000*"))
    assert cli.main(["inspect", str(bucket)]) == 0
    out = capsys.readouterr().out
    assert "w: BF16 [9, 5], 45 elements, group 0" in out and "entry :0:gap8" in out
    assert cli.main(["verify", str(tmp_path / "p")]) == 0
    assert "5 payloads, 0 bad" in capsys.readouterr().out
    for version in (2, 3, 4):
        out = tmp_path / "out.safetensors"
        assert (
            cli.main(["materialise", str(tmp_path / "p"), "--version", str(version), "--out", str(out)]) == 0
        )
        loaded = load_file(out)
        assert all(torch.equal(loaded[n], t) for n, t in trainer.history[version].items())
    data = bytearray(bucket.read_bytes())
    data[-1] ^= 1
    bucket.write_bytes(data)
    capsys.readouterr()
    assert cli.main(["verify", str(tmp_path / "p")]) == 1
    out = capsys.readouterr().out
    assert "CorruptPayload" in out and "MissingVersion" in out and "5 payloads, 2 bad" in out
    assert cli.main(["materialise", str(tmp_path / "p"), "--version", "2", "--out", str(tmp_path / "x")]) == 1
    assert "CorruptPayload: data checksum" in capsys.readouterr().err
    assert cli.main(["materialise", str(tmp_path / "p"), "--version", "9", "--out", str(tmp_path / "x")]) == 1
    assert "MissingVersion" in capsys.readouterr().err
    assert cli.main(["verify", str(tmp_path / "none")]) == 1
    assert cli.main(["inspect", str(tmp_path / "none")]) == 0
    assert not (tmp_path / "none").exists()  # looking makes nothing


def test_verify_finds_a_wrong_anchor(tmp_path, capsys):
    trainer = Trainer(tmp_path)
    trainer.publish(), trainer.publish()
    trainer.sender._published.clear()
    trainer.weights["w"][0, 0] += 1
    trainer.publish(dense=True, again=True)
    assert cli.main(["verify", str(tmp_path)]) == 1
    assert "anchor and deltas do not make the same weights" in capsys.readouterr().out
