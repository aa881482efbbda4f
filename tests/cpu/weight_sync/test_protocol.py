"""The protocol under faults: whatever happens, no receiver acknowledges weights that the trainer did not have
at that version, every fault is healed or raised, and in the end everyone holds the trainer's weights."""

import itertools
import os
import random

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from torch import nn

from megatron import weight_sync as ws
from megatron.weight_sync import receiver as receiver_module
from megatron.weight_sync.fingerprints import bits_of

STORE = receiver_module._store
FULL = os.environ.get("TEST_FULL") == "1"  # long walks


class Model(nn.Module):
    def __init__(self, seed):
        super().__init__()
        gen = torch.Generator().manual_seed(seed)
        self.a = nn.Parameter(torch.randn(5, 3, generator=gen).bfloat16())
        self.b = nn.Parameter(torch.randn(17, generator=gen).bfloat16())
        self.one = nn.Parameter(torch.randn((), generator=gen))


class Killed(BaseException):
    """The process of the receiver is gone; nothing in it gets to clean up."""


class World:
    """A trainer, some receivers, and a network that does what it likes."""

    def __init__(self, seed, encodings):
        self.rng = random.Random(seed)
        self.gen = torch.Generator().manual_seed(seed)
        self.weights = {n: t.detach().clone() for n, t in Model(seed).named_parameters()}
        self.bits = {n: torch.zeros(t.numel(), dtype=torch.bool) for n, t in self.weights.items()}
        self.lineages = itertools.count(1)
        self.encodings = encodings
        self.sender = self.new_sender()
        self.receivers, self.modules = {}, {}
        self.history = {}  # (lineage, version) -> weights
        self.sent = []  # containers of every payload, for late and repeated delivery
        self.checkpoint = None
        self.drifted = set()
        for name in ("a", "b"):
            self.restart(name)

    def new_sender(self):
        return ws.Sender("model", lineage=next(self.lineages), encodings=self.encodings, bucket_bytes=60)

    # ---- what can happen -----------------------------------------------------------------------------------

    def restart(self, name):
        self.modules[name] = Model(self.rng.randrange(1 << 30))
        self.receivers[name] = ws.ModuleReceiver(self.modules[name])
        self.drifted.discard(name)
        self.sender.register(name)

    def step(self, density):
        for name, tensor in self.weights.items():
            old, flat = tensor.clone(), tensor.view(-1)
            hit = torch.rand(len(flat), generator=self.gen) < density
            flat[hit] = torch.randn(int(hit.sum()), generator=self.gen).to(flat.dtype)
            if density > 0.8:
                flat[0] = float("nan")
            self.bits[name] |= (bits_of(tensor) != bits_of(old)).view(-1)

    def save(self):
        self.checkpoint = ({n: t.clone() for n, t in self.weights.items()}, self.sender.state_dict())

    def crash_trainer(self):
        """The trainer comes back from its checkpoint, or from its first weights when it has none."""
        self.sender = self.new_sender()
        if self.checkpoint is None:
            for name in self.receivers:
                self.sender.register(name)
            return
        weights, state = self.checkpoint
        self.weights = {n: t.clone() for n, t in weights.items()}
        self.sender.load_state_dict(state)
        assert self.sender.version == state["version"]

    def fill(self, update):
        self.history[self.sender.lineage, update.version] = {n: t.clone() for n, t in self.weights.items()}
        for name, tensor in self.weights.items():
            if update.dense:
                update.add_dense(name, tensor)
            else:
                index = self.bits[name].nonzero().view(-1)
                update.add_delta(name, index, tensor.view(-1)[index], tensor.shape, full=tensor)
        return ws.fingerprint(self.weights)

    def drift(self, name):
        with torch.no_grad():
            self.modules[name].b[3] += 1
        self.drifted.add(name)

    def sync(self, fault, policy):
        """One sync through a network with a fault; returns what was raised."""
        transport = Network(self, fault)
        try:
            report = ws.synchronise(self.sender, transport, self.fill, on_failure=policy)
        except ws.SyncFailed as error:
            return error
        if report.clear_bits:
            for bits in self.bits.values():
                bits.zero_()
        assert report.version == self.sender.version
        for name in self.receivers:
            self.check_equal(name)
        return None

    # ---- what must hold ------------------------------------------------------------------------------------

    def check_equal(self, name):
        live = dict(self.modules[name].named_parameters())
        assert all(torch.equal(bits_of(live[n]), bits_of(t)) for n, t in self.weights.items()), name
        assert self.sender.state(name) == "synced"

    def check(self):
        for name, receiver in self.receivers.items():
            if receiver.version is None or receiver.poisoned or name in self.drifted:
                continue
            then = self.history[receiver.lineage, receiver.version]
            live = dict(self.modules[name].named_parameters())
            assert all(torch.equal(bits_of(live[n]), bits_of(t)) for n, t in then.items()), (
                name,
                receiver.version,
            )

    def heal(self):
        """A sound network and the resync policy bring everyone to the trainer's weights."""
        assert self.sync(None, "resync") is None


class Network:
    """Delivers to every receiver, the chosen fault befalling one of them once."""

    def __init__(self, world, fault):
        self.world, self.fault = world, fault
        self.victim = world.rng.choice(sorted(world.receivers))

    def statuses(self, names):
        return ws.LocalTransport(self.world.receivers).statuses(names)

    def deliver(self, payload, names):
        data = payload.to_bytes()
        self.world.sent.append(data)
        return {name: self.one(name, data) for name in names}

    def one(self, name, data):
        rng, world = self.world.rng, self.world
        fault = self.fault if name == self.victim else None
        if fault is not None:
            self.fault = None
        if fault == "lost":
            return TimeoutError("nothing arrived")
        if fault == "late":  # something old arrives first
            answer = self.apply(name, rng.choice(world.sent))
            assert name in world.drifted or not isinstance(answer, ws.Ack) or answer.version is not None
        if fault == "flipped":
            k = rng.randrange(len(data))
            bad = bytearray(data[k])
            bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
            data = [*data[:k], bytes(bad), *data[k + 1 :]]
        if fault == "cut":
            k = rng.randrange(len(data))
            data = [*data[:k], data[k][: rng.randrange(len(data[k]))], *data[k + 1 :]]
        if fault == "bucket lost":
            data = data[1:]
        if fault in ("write fails", "killed"):
            return self.break_write(name, data, fault)
        answer = self.apply(name, data)
        if fault == "twice":
            again = self.apply(name, data)
            assert isinstance(again, ws.WeightSyncError)
        if fault == "answer lost":
            return TimeoutError("no answer")
        if fault in ("flipped", "cut", "bucket lost"):
            assert isinstance(answer, ws.WeightSyncError), fault
        return answer

    def apply(self, name, data):
        try:
            return self.world.receivers[name].apply(data)
        except Exception as error:
            return error

    def break_write(self, name, data, fault):
        """Fail in the k-th write, before or after the bytes are there; when killed, nothing is undone."""
        calls, at, late = itertools.count(), self.world.rng.randrange(4), self.world.rng.random() < 0.5
        kill, dead = fault == "killed", []

        def store(write, values):
            hit = next(calls) == at
            if dead:
                raise Killed
            if not hit or late:
                STORE(write, values)
            if hit:
                if kill:
                    dead.append(True)
                    raise Killed
                raise OSError("disk full")

        receiver_module._store = store
        try:
            return self.world.receivers[name].apply(data)
        except Exception as error:
            if not dead:
                return error
        except Killed:
            pass
        finally:
            receiver_module._store = STORE
        self.world.restart(name)  # a new process with weights that are anything
        return ConnectionError("receiver died")


FAULTS = [
    "lost",
    "late",
    "flipped",
    "cut",
    "bucket lost",
    "write fails",
    "killed",
    "twice",
    "answer lost",
]


@pytest.mark.parametrize("encodings", [("raw",), ("packed",), ("raw", "packed", "entropy")], ids="+".join)
@pytest.mark.parametrize("seed", range(40 if FULL else 2))
def test_two_hundred_random_steps(seed, encodings):
    world = World(seed, encodings)
    raised = healed = 0
    for _ in range(200):
        what = world.rng.random()
        world.step(world.rng.choice([0.0, 0.05, 0.3, 0.9]))
        if what < 0.05:
            world.restart(world.rng.choice("ab"))
        elif what < 0.08:
            world.drift(world.rng.choice("ab"))
        elif what < 0.12:
            world.save()
        elif what < 0.15:
            world.crash_trainer()
        elif what < 0.17:
            world.sender.invalidate()
        fault = world.rng.choice(FAULTS) if world.rng.random() < 0.6 else None
        policy = world.rng.choice(["raise", "resync"])
        error = world.sync(fault, policy)
        raised += error is not None
        healed += fault is not None and error is None
        if error is None:
            world.drifted.clear()
        world.check()
    assert raised > 20 and healed > 40
    world.heal()
    world.check()


class Protocol(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 1000), encodings=st.sampled_from([("raw",), ("packed",), ("entropy",)]))
    def start(self, seed, encodings):
        self.world = World(seed, encodings)

    @rule(density=st.sampled_from([0.0, 0.1, 0.9]))
    def step(self, density):
        self.world.step(density)

    @rule(fault=st.sampled_from([None, *FAULTS]), policy=st.sampled_from(["raise", "resync"]))
    def sync(self, fault, policy):
        if self.world.sync(fault, policy) is None:
            self.world.drifted.clear()

    @rule(name=st.sampled_from("ab"))
    def restart(self, name):
        self.world.restart(name)

    @rule(name=st.sampled_from("ab"))
    def drift(self, name):
        self.world.drift(name)

    @rule()
    def save(self):
        self.world.save()

    @rule()
    def crash_trainer(self):
        self.world.crash_trainer()

    @rule()
    def invalidate(self):
        self.world.sender.invalidate()

    @invariant()
    def nobody_holds_what_never_was(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.heal()
            self.world.check()


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(
    max_examples=1500 if FULL else 40,
    stateful_step_count=50 if FULL else 25,
    deadline=None,
    derandomize=not FULL,
)


# ---- single properties -------------------------------------------------------------------------------------


def test_resumed_sender_never_repeats_a_version():
    world = World(1, ("packed",))
    for _ in range(3):
        world.step(0.3)
        world.sync(None, "raise")
    world.save()
    for _ in range(2):
        world.step(0.3)
        world.sync(None, "raise")
    held = world.receivers["a"].lineage, world.receivers["a"].version
    world.crash_trainer()
    assert world.sender.version == 3 and world.sender.lineage > held[0]
    assert [world.sender.state(name) for name in "ab"] == ["fresh", "fresh"]
    world.step(0.3)
    assert world.sync(None, "raise") is None
    assert world.receivers["a"].version == 4 and world.receivers["a"].lineage == world.sender.lineage


def test_state_of_another_model_is_refused():
    with pytest.raises(ws.WrongModel, match="'model'"):
        ws.Sender("other").load_state_dict(World(1, ("raw",)).sender.state_dict())


def test_failure_is_raised_with_the_receiver_and_bits_stay():
    world = World(2, ("packed",))
    world.sync(None, "raise")
    world.step(0.5)
    world.receivers["b"].apply = lambda payload: (_ for _ in ()).throw(OSError("link down"))
    with pytest.raises(
        ws.SyncFailed, match="version 2 did not reach 1 receivers: b: OSError: link down"
    ) as caught:
        ws.synchronise(world.sender, ws.LocalTransport(world.receivers), world.fill)
    assert set(caught.value.failures) == {"b"} and world.sender.since == 1
    world.check_equal("a")
    del world.receivers["b"].apply
    world.step(0.1)
    assert world.sync(None, "raise") is None and world.sender.since == 3


def test_resync_sends_dense_to_the_failed_receiver_only():
    world = World(3, ("packed",))
    world.sync(None, "raise")
    world.step(0.2)
    with torch.no_grad():
        world.modules["b"].b[3] += 1
    report = ws.synchronise(world.sender, ws.LocalTransport(world.receivers), world.fill, on_failure="resync")
    assert report.healed == ["b"] and report.delta_bytes > 0 and report.dense_bytes > 0 and report.clear_bits
    assert str(report).startswith("weight sync 2: ") and "healed ['b']" in str(report)
    world.check_equal("a"), world.check_equal("b")


def test_one_fresh_receiver_does_not_make_the_others_dense():
    world = World(4, ("packed",))
    world.sync(None, "raise")
    world.restart("b")
    kinds = {}
    transport = ws.LocalTransport(world.receivers)
    deliver = transport.deliver
    transport.deliver = lambda payload, names: (
        kinds.update({n: payload.dense for n in names}) or deliver(payload, names)
    )
    world.step(0.1)
    ws.synchronise(world.sender, transport, world.fill)
    assert kinds == {"a": False, "b": True}
    world.check_equal("a"), world.check_equal("b")


def test_missed_change_bits_are_an_error_not_drift():
    """A change that the trainer's bits do not know of: the receiver refuses, and names the tensor."""
    world = World(5, ("packed",))
    world.sync(None, "raise")
    world.step(0.2)
    world.weights["a"][2, 1] += 1
    with pytest.raises(ws.SyncFailed, match=r"FingerprintMismatch: version 2: 1 tensors .*'a'"):
        ws.synchronise(world.sender, ws.LocalTransport(world.receivers), world.fill)
    assert world.receivers["a"].status().version == 1


def test_no_receivers_and_unknown_ones_are_refused():
    world = World(6, ("raw",))
    for name in world.sender.receivers:
        world.sender.drop(name)
    transport = ws.LocalTransport(world.receivers)
    with pytest.raises(ValueError, match=r"^there are no receivers to synchronise: register them first$"):
        ws.synchronise(world.sender, transport, world.fill)
    assert world.sender.version == 0
    world.sender.register("a")
    world.sender.register("aa")
    unknown = r"1 receivers: aa: ValueError: this transport has no receiver 'aa', only \['a', 'b'\]$"
    for how in ("raise", "resync"):
        with pytest.raises(ws.SyncFailed, match=unknown):
            ws.synchronise(world.sender, transport, world.fill, on_failure=how)
    assert world.receivers["a"].status().version == 2


def test_bad_policy():
    world = World(6, ("raw",))
    with pytest.raises(ValueError, match="'raise' or 'resync'"):
        ws.synchronise(world.sender, ws.LocalTransport(world.receivers), world.fill, on_failure="ignore")
