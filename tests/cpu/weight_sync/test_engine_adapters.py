"""The adapters to SGLang and vLLM against stand-ins of both: calls into the engine, and answers from it."""

import contextlib
import importlib.util
import json
import logging
import pickle
import pickletools
import sys
import types
from base64 import b64decode
from pathlib import Path

import pytest
import torch

from megatron import weight_sync as ws
from megatron.weight_sync.engines import calls, sglang, vllm
from megatron.weight_sync.engines.mailbox import Mailbox
from tests.cpu.weight_sync.streams import delta, dense, fill, step

spec = importlib.util.spec_from_file_location("engine_models", Path(__file__).with_name("engine_models.py"))
models = importlib.util.module_from_spec(spec)
spec.loader.exec_module(models)


@pytest.fixture(params=["tcp", "folder"])
def mailbox(request, tmp_path):
    return "tcp://127.0.0.1:0" if request.param == "tcp" else str(tmp_path / "answers")


def put_modules(monkeypatch, **modules):
    """Stand-ins in sys.modules; ``__`` in a name is a dot."""
    for name, content in modules.items():
        name = name.replace("__", ".")
        for k in range(1, len(name.split(".")) + 1):
            part = ".".join(name.split(".")[:k])
            if part == name or part not in sys.modules:
                monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
        vars(sys.modules[name]).update(content)


ONE_RANK = types.SimpleNamespace(world_size=1, rank_in_group=0, cpu_group=None)


def fake_sglang(monkeypatch, eplb=False):
    """SGLang, as far as the adapter reads it."""
    moe = types.SimpleNamespace(enable_eplb=eplb)
    loader = types.SimpleNamespace(
        postprocess_weights=lambda model, device: model.process(),
        restore_weights_before_loading=lambda model, device: model.restore(),
    )
    put_modules(
        monkeypatch,
        sglang__srt__distributed__parallel_state={"get_world_group": lambda: ONE_RANK},
        sglang__srt__runtime_context={"get_exec": lambda: types.SimpleNamespace(moe=moe)},
        sglang__srt__model_loader__loader={"DefaultModelLoader": loader},
    )


def vllm_config(eplb=False, replica=0, size=1):
    return types.SimpleNamespace(
        parallel_config=types.SimpleNamespace(enable_eplb=eplb, data_parallel_index=replica, world_size=size),
        model_config=types.SimpleNamespace(dtype=torch.bfloat16),
    )


def sync_through(transport, engine, tensors):
    """Dense, two deltas, a status, a damaged payload; returns what the damaged one answered."""
    sender, gen = ws.Sender("m", lineage=1), torch.Generator().manual_seed(3)
    sender.register("engine")
    old = {}
    for k in range(3):
        if k:
            old.update(step(tensors, gen))
        assert ws.synchronise(sender, transport, fill(tensors, old)).clear_bits
    loaded = type(engine)(head=engine.head_kind, processed=engine.processed)
    loaded.load_weights(tensors.items())
    loaded.process()
    assert all(torch.equal(a, b) for a, b in zip(engine.parameters(), loaded.parameters(), strict=True))
    (status,) = transport.statuses(["engine"]).values()
    assert status.version == 3
    assert str(transport.statuses(["engin"])["engin"]) == (
        "this transport has no receiver 'engin', only ['engine']"
    )
    old.update(step(tensors, gen))
    payload = delta(sender, tensors, old)
    payload.buckets[0][-1] ^= 1
    return transport.deliver(payload, ["engine"])["engine"]


PLAIN = {"_codecs", "collections", "torch", "torch._utils", "torch.storage"}  # what SGLang's unpickler allows


def globals_of(data):
    """Modules of the globals in a pickle."""
    return {argument.split(" ")[0] for code, argument, _ in pickletools.genops(data) if code.name == "GLOBAL"}


def test_sglang_custom_loader(monkeypatch, mailbox, caplog):
    """As SGLang does it: between begin and end of an update the weights are in the order in which the loader
    writes them; the function is looked up by its path, called with the model and named tensors, and called
    again for a draft model."""
    fake_sglang(monkeypatch)
    monkeypatch.setattr(sglang, "_last", (None, None))
    engine, draft = models.Engine(head="shared", processed="interleaved"), models.Engine()
    engine.process()
    before = [p.clone() for p in draft.parameters()]
    path = "megatron.weight_sync.engines.sglang.load"

    def send(receiver_id, named):
        first, second = (b64decode(text) for text in sglang.encode(named, 2))
        assert first == second
        assert globals_of(first) <= PLAIN
        module, _, name = path.rpartition(".")
        loader = getattr(importlib.import_module(module), name)
        engine.restore()
        for model in (engine, draft):
            assert loader(model, pickle.loads(second)) is None
        engine.process()

    transport = calls.EngineTransport(send, {"engine": 1}, mailbox, timeout=5.0)
    with caplog.at_level(logging.WARNING):
        answer = sync_through(transport, engine, models.checkpoint(9, tied=True))
    assert isinstance(answer, ws.CorruptPayload) and "data checksum" in str(answer)
    assert engine.derived is not None
    assert "Engine, a draft model, keeps its weights" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(before, draft.parameters(), strict=True))


def test_sglang_tensors_are_pickled_plainly_with_megatron_core_there():
    """Megatron-Core puts a function of its own in place of torch's for storages."""
    import megatron.core  # noqa: F401

    assert torch.storage._load_from_bytes.__module__ != "torch.storage"
    named = [("a", torch.arange(7, dtype=torch.uint8)[2:]), ("b", torch.zeros(0, dtype=torch.uint8))]
    (data,) = sglang.encode(named, 1)
    assert "torch.storage" in globals_of(b64decode(data)) <= PLAIN
    (a, b) = pickle.loads(b64decode(data))
    assert a[0] == "a" and a[1].tolist() == [2, 3, 4, 5, 6] and b[1].numel() == 0


@pytest.mark.parametrize("put_back", [True, False])
def test_sglang_weights_that_no_session_puts_back_are_refused(monkeypatch, put_back):
    """Interleaved gate and up are not restored at the begin of an update; blocks of FlashInfer are."""
    fake_sglang(monkeypatch)
    if not put_back:
        monkeypatch.setattr(models.Engine, "restore", lambda self: None)
    engine, loaded = models.Engine(processed="interleaved"), models.Engine(processed="interleaved")
    tensors = models.checkpoint(13)
    receiver, payload = sglang.make_receiver(engine), dense(ws.Sender("m", lineage=1), tensors)
    if put_back:
        assert receiver.apply(payload).version == 1
    else:
        with pytest.raises(ws.UnsupportedLayout, match=r"0\.mlp\.gate_proj\.weight.*\(4 in all\)"):
            receiver.apply(payload)
    engine.process()  # the session's end
    models.reload_of(loaded)(tensors.items())
    assert all(torch.equal(a, b) for a, b in zip(engine.parameters(), loaded.parameters(), strict=True))


def test_engines_that_move_experts_are_refused(monkeypatch):
    fake_sglang(monkeypatch, eplb=True)
    with pytest.raises(ws.UnsupportedLayout, match="--enable-eplb"):
        sglang.make_receiver(models.Engine())
    with pytest.raises(ws.UnsupportedLayout, match="enable_eplb"):
        vllm.make_receiver(models.Engine(), vllm_config(eplb=True))


def test_vllm_worker_extension(monkeypatch, mailbox):
    fake_vllm(monkeypatch)
    engine = models.Engine(head="copy")

    class Worker(vllm.WorkerExtension):
        device = torch.device("cpu")
        vllm_config = vllm_config()
        model_runner = types.SimpleNamespace(get_model=lambda: engine)

    worker = Worker()

    def send(receiver_id, named):
        json.dumps(vllm.encode(named))
        return worker.weight_sync_call(vllm.encode(named))

    transport = calls.EngineTransport(send, {"engine": 1}, mailbox, timeout=5.0)
    answer = sync_through(transport, engine, models.checkpoint(9, tied=True))
    assert isinstance(answer, ws.CorruptPayload)
    assert engine.reloads == 1


def test_vllm_replicas_answer_for_themselves(monkeypatch, tmp_path):
    """Replicas of a dense model have a world group each; with experts, one world group spans them."""
    fake_vllm(monkeypatch)
    model, box = models.Engine(), calls.Mailbox(str(tmp_path))
    for replica, size, rank in ((0, 1, 0), (2, 1, 2), (2, 2, 0)):
        text = json.dumps({"do": "status", "key": f"{replica}{size}", "mailbox": box.where}).encode()
        call = [(calls.CALL, torch.frombuffer(bytearray(text), dtype=torch.uint8))]
        vllm.serve(model, vllm.encode(call), vllm_config(replica=replica, size=size))
        assert box.read(f"{replica}{size}/{rank}", 0.0) is not None


def test_vllm_weights_reordered_after_loading_are_refused(monkeypatch):
    """As for the FlashInfer kernels for experts, which want up before gate; also where vLLM has no reload."""
    tensors = models.checkpoint(9)
    fake_vllm(monkeypatch)
    for old in (False, True):
        if old:
            monkeypatch.setitem(sys.modules, "vllm.model_executor.model_loader.reload", None)
        engine, loaded = models.Engine(processed="swapped"), models.Engine(processed="swapped")
        models.reload_of(loaded)(tensors.items())
        with pytest.raises(ws.UnsupportedLayout, match=r"0\.mlp\.gate_proj\.weight.*\(4 in all\)"):
            vllm.make_receiver(engine, vllm_config()).apply(dense(ws.Sender("m", lineage=1), tensors))
        assert all(torch.equal(a, b) for a, b in zip(engine.parameters(), loaded.parameters(), strict=True))


def test_vllm_latent_attention_is_derived_again():
    class Latent(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.kv_b_proj = torch.nn.Linear(3, 4, bias=False, dtype=torch.bfloat16)
            self.absorbed = None

        def process_weights_after_loading(self, dtype):
            self.absorbed = self.kv_b_proj.weight.data.t().to(dtype).clone()

    model = Latent()
    live = model.kv_b_proj.weight.data
    model.load_weights = lambda pairs: [live.copy_(tensor) for _, tensor in pairs]
    receiver = vllm.make_receiver(model, vllm_config())
    receiver._reload = None
    sender, tensors = ws.Sender("m", lineage=1), {"kv_b_proj.weight": torch.randn(4, 3).bfloat16()}
    sender.register("r")
    assert sender.acknowledge("r", receiver.apply(dense(sender, tensors)))
    old = {n: t.clone() for n, t in tensors.items()}
    tensors["kv_b_proj.weight"][2, 1] += 1
    receiver.apply(delta(sender, tensors, old))
    assert torch.equal(model.absorbed, tensors["kv_b_proj.weight"].t())


def fake_vllm(monkeypatch):
    """A stand-in for vLLM's factory and base class, with its four phases and its way of calling them."""
    reload = {
        "initialize_layerwise_reload": lambda model: None,
        "finalize_layerwise_reload": lambda model, config: model.process(),
    }
    put_modules(
        monkeypatch,
        vllm__distributed__parallel_state={"get_world_group": lambda: ONE_RANK},
        vllm__config={"set_current_vllm_config": contextlib.nullcontext},
        vllm__model_executor__model_loader__reload=reload,
        vllm__model_executor__model_loader__utils={
            "process_weights_after_loading": lambda model, config, device: model.process()
        },
    )
    base = types.ModuleType("vllm.distributed.weight_transfer.base")

    class Engine:
        def __init__(self, config, vllm_config, device, model):
            self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model

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
    backend = factory.create_engine(config, vllm_config(), torch.device("cpu"), model)
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
            [get() for _, get in vllm.decode(wrong)]
    with pytest.raises(ws.CorruptPayload, match="not a CUDA IPC handle"):
        [get() for _, get in vllm.decode({"named": [["x", {"gpu": "GPU-0"}]]})]
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
