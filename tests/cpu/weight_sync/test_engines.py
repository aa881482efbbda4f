"""Engines that fuse and shard: the probed boxes are where the engine's own loader puts things, and deltas
through them equal what it would load."""

import importlib.util
import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron import weight_sync as ws
from megatron.weight_sync.engines import calls, sglang, vllm
from megatron.weight_sync.engines.mailbox import Mailbox
from megatron.weight_sync.engines.probe import discover, fit
from megatron.weight_sync.engines.receiver import EngineReceiver
from megatron.weight_sync.fingerprints import bits_of

spec = importlib.util.spec_from_file_location("engine_models", Path(__file__).with_name("engine_models.py"))
models = importlib.util.module_from_spec(spec)
spec.loader.exec_module(models)


def table_of(tensors):
    return {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}


SHAPES = {
    "dense": {},
    "tied, shared": {"head": "shared"},
    "tied, copied": {"head": "copy"},
    "experts": {"moe": True},
    "experts transposed": {"moe": True, "transposed": True},
}


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize(("size", "rank"), [(1, 0), (2, 0), (2, 1), (4, 3)])
@pytest.mark.parametrize("batch", [50, 1 << 20])
def test_boxes_are_where_the_loader_puts_things(kind, size, rank, batch):
    options = SHAPES[kind]
    tensors = models.checkpoint(3, moe=options.get("moe", False), tied="head" in options)
    probed, loaded = (models.Engine(rank, size, **options) for _ in range(2))
    loaded.load_weights(tensors.items())
    targets = discover(table_of(tensors), calls.live_tensors(probed), probed.load_weights, batch)
    assert torch.equal(probed.cos_cache, torch.arange(6.0))
    for name, target in targets.items():
        for flat, box in target.pieces:
            box.copy_to_local(tensors[name], flat)
        assert sum(len(box.size) for _, box in target.pieces) <= 4, (name, target.pieces)
    for (name, a), b in zip(probed.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(bits_of(a), bits_of(b)), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes(dtype):
    tensors = models.checkpoint(4, dtype=dtype)
    probed, loaded = (models.Engine(1, 2, dtype=dtype) for _ in range(2))
    loaded.load_weights(tensors.items())
    for name, target in discover(table_of(tensors), calls.live_tensors(probed), probed.load_weights).items():
        for flat, box in target.pieces:
            box.copy_to_local(tensors[name], flat)
    assert all(torch.equal(a, b) for a, b in zip(probed.parameters(), loaded.parameters(), strict=True))


def test_index_needs_several_digits():
    """More elements than one 14-bit digit counts, in a shape that is cut by columns."""
    tensors = {"w": torch.randn(300, 200).bfloat16()}
    live = torch.zeros(300, 50).bfloat16()
    targets = discover(table_of(tensors), {"w": live}, lambda ws: [live.copy_(t[:, 50:100]) for _, t in ws])
    ((_, box),) = targets["w"].pieces
    assert (box.size, box.full_offset, box.full_stride, box.local_stride) == (
        (300, 50),
        50,
        (200, 1),
        (50, 1),
    )


# ---- what cannot be reached is refused by name -------------------------------------------------------------


@pytest.mark.parametrize(
    ("broken", "match"),
    [
        ("scaled", r"input_layernorm.weight: the ranks hold 0 of its 12 elements unchanged"),
        ("quantised", r"mlp.(gate|up)_proj.weight: the ranks hold 0 of its 96 elements unchanged"),
        ("shuffled", r"o_proj.weight: its place in ./o is not made of boxes"),
    ],
)
def test_unreachable_layouts_are_refused_by_name(broken, match):
    tensors = models.checkpoint(5)
    engine = models.Engine(broken=broken)
    receiver = EngineReceiver(calls.live_tensors(engine), engine.load_weights)
    payload = dense(ws.Sender("m", lineage=1), tensors)
    with pytest.raises(ws.UnsupportedLayout, match=match):
        receiver.apply(payload)
    # the engine is not left with probe patterns: it holds what its own loader makes of the payload
    loaded = models.Engine(broken=broken)
    loaded.load_weights(tensors.items())
    assert all(torch.equal(a, b) for a, b in zip(engine.parameters(), loaded.parameters(), strict=True))
    assert receiver.version is None


def test_another_dtype_in_the_engine_is_refused():
    tensors = {"w": torch.randn(5, 3)}
    live = torch.zeros(5, 3).bfloat16()
    with pytest.raises(
        ws.UnsupportedLayout, match=r"w: the checkpoint has torch.float32, the engine .*bfloat16"
    ):
        discover(table_of(tensors), {"w": live}, lambda ws: [live.copy_(t) for _, t in ws])


def test_a_loader_that_fails_is_named():
    def load(weights):
        raise KeyError("w")

    with pytest.raises(ws.UnsupportedLayout, match=r"loader refused probe tensors \(w, …\): KeyError"):
        discover({"w": ((3,), torch.float32)}, {"w": torch.zeros(3)}, load)


def test_quantised_parameters_are_refused_before_anything_is_written():
    live = {"a.weight": torch.zeros(3).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.ones(1)}
    model = types.SimpleNamespace(
        named_parameters=lambda: live.items(), named_buffers=lambda: [], load_weights=None, __dict__={}
    )
    with pytest.raises(ws.UnsupportedLayout, match="quantised weights are not supported yet"):
        sglang.make_receiver(model)


# ---- fitting -----------------------------------------------------------------------------------------------


def pairs(boxes):
    out = {}
    for box in boxes:
        grid = np.indices(box.size).reshape(len(box.size), -1)
        p = box.local_offset + (grid.T * box.local_stride).sum(1)
        f = box.full_offset + (grid.T * box.full_stride).sum(1)
        out.update(zip(p.tolist(), f.tolist(), strict=True))
    return out


@pytest.mark.parametrize("seed", range(40))
def test_fit_finds_nests_and_few_boxes(seed):
    rng = np.random.default_rng(seed)
    parts, p0, f0 = [], 0, 0
    for _ in range(rng.integers(1, 5)):
        n = rng.integers(1, 5, size=rng.integers(1, 4))
        grid = np.indices(n).reshape(len(n), -1)
        local = np.cumprod([1, *n[:0:-1]])[::-1] * rng.integers(1, 3)
        full = rng.permutation(np.cumprod([1, *(n[:0:-1] + 1)])[::-1])
        parts.append((p0 + (grid.T * local).sum(1), f0 + (grid.T * full).sum(1)))
        p0, f0 = parts[-1][0].max() + 1 + rng.integers(0, 3), parts[-1][1].max() + 1 + rng.integers(0, 9)
    position, index = (np.concatenate(x) for x in zip(*parts, strict=True))
    boxes = fit("w", position, index)
    assert pairs(boxes) == dict(zip(position.tolist(), index.tolist(), strict=True))
    if len(parts) == 1:
        assert len(boxes) == 1


def test_fit_gives_up_on_disorder():
    order = np.random.default_rng(1).permutation(3000)
    assert fit("w", np.arange(3000), order) is None and fit("w", np.arange(0), np.arange(0)) == []


# ---- payloads into an engine -------------------------------------------------------------------------------


def dense(sender, tensors, again=False):
    update = sender.begin(dense=True, again=again)
    for name, tensor in tensors.items():
        update.add_dense(name, tensor)
    return update.finish(ws.fingerprint(tensors))


def step(tensors, gen):
    old = {n: t.clone() for n, t in tensors.items()}
    for tensor in tensors.values():
        flat = tensor.view(-1)
        hit = torch.rand(len(flat), generator=gen) < 0.1
        flat[hit] = torch.randn(int(hit.sum()), generator=gen).to(flat.dtype)
    return old


def delta(sender, tensors, old):
    update = sender.begin(dense=False)
    for name, tensor in tensors.items():
        index = (bits_of(tensor) != bits_of(old[name])).view(-1).nonzero().view(-1)
        update.add_delta(name, index, tensor.view(-1)[index], tensor.shape, old=old[name].view(-1)[index])
    return update.finish(ws.fingerprint(tensors))


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("encodings", [("packed",), ("entropy",)], ids="+".join)
def test_engine_follows_deltas(kind, encodings):
    options = SHAPES[kind]
    tensors = models.checkpoint(6, moe=options.get("moe", False), tied="head" in options)
    engine, loaded = models.Engine(**options), models.Engine(**options)
    receiver = EngineReceiver(
        calls.live_tensors(engine),
        engine.load_weights,
        after_write=engine.post_load_weights,
        batch_elements=999,
    )
    sender, gen = ws.Sender("m", lineage=1, encodings=encodings), torch.Generator().manual_seed(1)
    sender.register("r")
    with pytest.raises(ws.WrongBase, match="holds nothing yet"):
        probe = ws.Sender("m", lineage=1)
        probe.version = probe.since = 1
        receiver.apply(delta(probe, tensors, tensors))
    assert sender.acknowledge("r", receiver.apply(dense(sender, tensors)))
    calls_of_loader = []
    receiver._load = calls_of_loader.append
    for _ in range(5):
        old = step(tensors, gen)
        assert sender.acknowledge("r", receiver.apply(delta(sender, tensors, old)))
        loaded.load_weights(tensors.items())
        for (name, a), b in zip(engine.named_parameters(), loaded.parameters(), strict=True):
            assert torch.equal(bits_of(a), bits_of(b)), name
        loaded.post_load_weights()
        assert torch.equal(engine.derived, loaded.derived)
    assert not calls_of_loader


def test_two_names_of_one_parameter():
    """The checkpoint has the output head, the engine shares it with the embedding: equal values go, others do
    not."""
    tensors = models.checkpoint(7)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    engine = models.Engine(head="shared")
    receiver = EngineReceiver(calls.live_tensors(engine), engine.load_weights)
    sender = ws.Sender("m", lineage=1)
    receiver.apply(dense(sender, tensors))
    assert ("lm_head.weight" in g and "model.embed_tokens.weight" in g for g in receiver.groups)
    tensors["lm_head.weight"][2, 2] += 1
    with pytest.raises(ws.LayoutMismatch, match="share storage"):
        receiver.apply(dense(sender, tensors))


def test_a_first_payload_that_does_not_hold_leaves_no_patterns():
    tensors = models.checkpoint(8)
    engine, loaded = models.Engine(), models.Engine()
    receiver = EngineReceiver(calls.live_tensors(engine), engine.load_weights)
    sender = ws.Sender("m", lineage=1)
    update = sender.begin()
    for name, tensor in tensors.items():
        update.add_dense(name, tensor)
    wrong = {**ws.fingerprint(tensors), "model.norm.weight": 5}
    with pytest.raises(ws.FingerprintMismatch, match=r"model\.norm\.weight"):
        receiver.apply(update.finish(wrong))
    loaded.load_weights(tensors.items())
    assert all(torch.equal(a, b) for a, b in zip(engine.parameters(), loaded.parameters(), strict=True))
    assert receiver.version is None and not receiver.probed
    assert receiver.apply(dense(sender, tensors)).version == 2


def test_failed_update_is_taken_back_with_what_is_derived():
    tensors = models.checkpoint(8)
    engine = models.Engine()
    receiver = EngineReceiver(
        calls.live_tensors(engine), engine.load_weights, after_write=engine.post_load_weights
    )
    sender = ws.Sender("m", lineage=1)
    receiver.apply(dense(sender, tensors))
    sender.register("r"), sender.acknowledge("r", receiver.status())
    before, derived = [p.clone() for p in engine.parameters()], engine.derived.clone()
    old = step(tensors, torch.Generator().manual_seed(2))
    payload = delta(sender, {n: t for n, t in tensors.items()}, old)
    tensors["model.norm.weight"][0] += 1
    sender._published.clear()
    wrong = sender.begin(dense=False, again=False)
    for name, tensor in tensors.items():
        index = torch.arange(tensor.numel())
        values = tensor.view(-1) * 2 if name.endswith("o_proj.weight") else tensor.view(-1)
        wrong.add_delta(name, index, values, tensor.shape)
    with pytest.raises(ws.FingerprintMismatch, match="o_proj"):
        receiver.apply(wrong.finish(ws.fingerprint(tensors)))
    assert all(torch.equal(a, b) for a, b in zip(before, engine.parameters(), strict=True))
    assert torch.equal(derived, engine.derived)
    receiver.apply(payload)


# ---- calls and answers -------------------------------------------------------------------------------------


@pytest.fixture(params=["tcp", "folder"])
def mailbox(request, tmp_path):
    return "tcp://127.0.0.1:0" if request.param == "tcp" else str(tmp_path / "answers")


def fake_group(monkeypatch, package):
    """The engine's parallel_state, as far as the adapters read it."""
    group = types.SimpleNamespace(world_size=1, rank_in_group=0, cpu_group=None)
    name = f"{package}.parallel_state"
    module = types.ModuleType(name)
    module.get_world_group = lambda: group
    for k in range(1, len(name.split(".")) + 1):
        part = ".".join(name.split(".")[:k])
        monkeypatch.setitem(sys.modules, part, module if part == name else types.ModuleType(part))


def sync_through(transport, engine, tensors):
    """Dense, two deltas, a status, a damaged payload; returns what the damaged one answered."""
    sender, gen = ws.Sender("m", lineage=1), torch.Generator().manual_seed(3)
    sender.register("engine")
    old = {}

    def fill(update):
        for name, tensor in tensors.items():
            if update.dense:
                update.add_dense(name, tensor)
            else:
                index = (bits_of(tensor) != bits_of(old[name])).view(-1).nonzero().view(-1)
                update.add_delta(name, index, tensor.view(-1)[index], tensor.shape)
        return ws.fingerprint(tensors)

    for k in range(3):
        if k:
            old.update(step(tensors, gen))
        assert ws.synchronise(sender, transport, fill).clear_bits
    loaded = type(engine)(head=engine.head_kind)
    loaded.load_weights(tensors.items())
    assert all(torch.equal(a, b) for a, b in zip(engine.parameters(), loaded.parameters(), strict=True))
    (status,) = transport.statuses(["engine"]).values()
    assert status.version == 3
    old.update(step(tensors, gen))
    payload = delta(sender, tensors, old)
    payload.buckets[0][-1] ^= 1
    return transport.deliver(payload, ["engine"])["engine"]


def test_sglang_custom_loader(monkeypatch, mailbox):
    """As SGLang does it: the function is looked up by its path and called with the model and named
    tensors."""
    fake_group(monkeypatch, "sglang.srt.distributed")
    engine = models.Engine(head="shared")
    path = "megatron.weight_sync.engines.sglang.load"

    def send(receiver_id, named):
        module, _, name = path.rpartition(".")
        loader = getattr(importlib.import_module(module), name)
        assert loader(engine, [(n, t.clone()) for n, t in named]) is None

    transport = calls.EngineTransport(send, {"engine": 1}, mailbox, timeout=5.0)
    answer = sync_through(transport, engine, models.checkpoint(9, tied=True))
    assert isinstance(answer, ws.CorruptPayload) and "data checksum" in str(answer)
    assert engine.derived is not None


def test_vllm_worker_extension(monkeypatch, mailbox):
    fake_group(monkeypatch, "vllm.distributed")
    engine = models.Engine(head="copy")

    class Worker(vllm.WorkerExtension):
        device = torch.device("cpu")
        model_runner = types.SimpleNamespace(get_model=lambda: engine)

    worker = Worker()

    def send(receiver_id, named):
        json.dumps(vllm.encode(named))
        return worker.weight_sync_call(vllm.encode(named))

    transport = calls.EngineTransport(send, {"engine": 1}, mailbox, timeout=5.0)
    answer = sync_through(transport, engine, models.checkpoint(9, tied=True))
    assert isinstance(answer, ws.CorruptPayload)


def fake_vllm(monkeypatch):
    """A stand-in for vLLM's factory and base class, with its four phases and its way of calling them."""
    fake_group(monkeypatch, "vllm.distributed")
    base = types.ModuleType("vllm.distributed.weight_transfer.base")

    class Engine:
        def __init__(self, config, vllm_config, device, model):
            self.config, self.device, self.model = config, device, model

        def update_weights(self, update_info):
            self.receive_weights(self.update_info_cls(**update_info))

    base.WeightTransferEngine = Engine
    base.WeightTransferInitInfo = base.WeightTransferUpdateInfo = object
    factory = types.ModuleType("vllm.distributed.weight_transfer.factory")

    class Factory:
        registry: dict = {}  # noqa: RUF012

        @classmethod
        def register_engine(cls, name, module, class_name):
            if name in cls.registry:
                raise ValueError("already registered")
            cls.registry[name] = (module, class_name)

        @classmethod
        def create_engine(cls, config, vllm_config, device, model):
            module, name = cls.registry[config.backend]
            return getattr(importlib.import_module(module), name)(config, vllm_config, device, model)

    factory.WeightTransferEngineFactory = Factory
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer", types.ModuleType("weight_transfer"))
    monkeypatch.setitem(sys.modules, base.__name__, base)
    monkeypatch.setitem(sys.modules, factory.__name__, factory)
    monkeypatch.delitem(sys.modules, "megatron.weight_sync.engines.vllm_backend", raising=False)
    return Factory


def test_vllm_backend(monkeypatch, mailbox):
    factory = fake_vllm(monkeypatch)
    vllm.register(), vllm.register()
    model = models.Engine()
    config = types.SimpleNamespace(backend="megatron_weight_sync")
    backend = factory.create_engine(config, None, torch.device("cpu"), model)
    backend.init_transfer_engine(backend.init_info_cls())

    def send(receiver_id, named):
        backend.start_weight_update()
        backend.update_weights(vllm.encode(named))
        backend.finish_weight_update()

    transport = calls.EngineTransport(send, {"engine": 1}, mailbox, timeout=5.0)
    answer = sync_through(transport, model, models.checkpoint(9))
    assert isinstance(answer, ws.CorruptPayload)  # posted before the backend raised
    backend.shutdown()
    sys.modules.pop("megatron.weight_sync.engines.vllm_backend")


def test_answers_of_several_ranks():
    ack = ws.Ack("m", 1, 2, 3)
    assert calls.joint([ack, ack]) == ack
    cause = ws.CorruptPayload("x")
    assert calls.joint([ws.PeerFailed("other"), cause, TimeoutError()]) is cause
    assert isinstance(calls.joint([ack, TimeoutError()]), TimeoutError)
    assert "different versions" in str(calls.joint([ack, ws.Ack("m", 1, 1, 3)]))


def test_silent_and_failing_engines(mailbox):
    transport = calls.EngineTransport(lambda *a: None, {"engine": 2}, mailbox, timeout=0.05)
    assert "rank 0 did not answer" in str(transport.statuses(["engine"])["engine"])

    def send(*a):
        raise ConnectionError("engine is down")

    transport.send = send
    assert str(transport.statuses(["engine"])["engine"]) == "engine is down"


def test_not_a_call():
    with pytest.raises(ws.CorruptPayload, match="no weight-sync call"):
        calls.serve([("w", torch.zeros(3))], 0, None)
    for text in (b"{", b"[]", b'{"do": "apply"}', b'{"do": [], "key": "a", "mailbox": "b"}', b"\xff"):
        with pytest.raises(ws.CorruptPayload):
            calls.serve([(calls.CALL, torch.frombuffer(bytearray(text), dtype=torch.uint8))], 0, None)
    for wrong in ({"named": [["x", "%"]]}, {"named": [["x", 5]]}, {}, {"named": 3}):
        with pytest.raises(ws.CorruptPayload, match="not a weight-sync update"):
            vllm.decode(wrong)
    with pytest.raises(ws.CorruptPayload, match="not a CUDA IPC handle"):
        vllm.decode({"named": [["x", {"gpu": "GPU-0"}]]})
    with pytest.raises(ValueError, match="a mailbox is"):
        Mailbox("tcp://nowhere")


def test_cuda_ipc_handles_are_checked_before_use():
    from megatron.weight_sync.transport import cuda_ipc

    names = ("handle", "counter_handle", "event_handle")
    good = {**dict.fromkeys(names, "AAAA"), "gpu": "GPU-0", "event": True, "storage_bytes": 10}
    good |= {"storage_offset": 0, "counter_offset": 0, "begin": 2, "bytes": 8}
    for wrong in ({"begin": 3}, {"bytes": -1}, {"bytes": True}, {"handle": "%"}, {"gpu": None, "bytes": "8"}):
        with pytest.raises(ws.CorruptPayload, match="CUDA IPC handle"):
            cuda_ipc.open_shared({**good, **wrong})
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="needs a CUDA device"):
            cuda_ipc.open_shared(good)
        with pytest.raises(RuntimeError, match="needs a CUDA device"):
            cuda_ipc.export_payload(dense(ws.Sender("m"), {"w": torch.ones(3)}))
