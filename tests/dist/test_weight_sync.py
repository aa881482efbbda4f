"""Weight sync between processes: payloads over a group, and a receiver whose ranks hold shards."""

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron import weight_sync as ws
from megatron.weight_sync.boxes import Box
from megatron.weight_sync.transport.collective import CollectiveReceiver, CollectiveTransport, connect
from tests.cpu.weight_sync.streams import fill


def weights(seed):
    gen = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(7, 4, generator=gen).bfloat16(), "b": torch.randn(13, generator=gen)}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        for name, tensor in weights(0).items():
            setattr(self, name, nn.Parameter(torch.full_like(tensor, 7.0)))


def change(tensors, old, step):
    for name, tensor in tensors.items():
        old[name] = tensor.clone()
        tensor.view(-1)[step % tensor.numel() :: 5] += 1


def group_sync():
    """Rank 1 sends, the others receive. In the third sync rank 0 starts anew, in the fourth its link
    breaks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    names = {f"rollout{r}": r for r in range(size) if r != 1}
    if rank == 1:
        transport = CollectiveTransport(names)
        sender = ws.Sender("m", lineage=1, bucket_bytes=40)
        for name in names:
            sender.register(name)
        tensors, old, log = weights(1), {}, []
        for step in range(5):
            if step:
                change(tensors, old, step)
            if step == 2:
                sender.register("rollout0")
            if step == 4:
                old = {name: torch.full_like(t, float("nan")) for name, t in tensors.items()}  # a union
            try:
                report = ws.synchronise(sender, transport, fill(tensors, old))
                log.append((report.dense_bytes > 0, report.delta_bytes > 0, report.clear_bits))
            except ws.SyncFailed as error:
                log.append({name: f"{type(e).__name__}: {e}" for name, e in error.failures.items()})
        log.append({name: ack.version for name, ack in transport.statuses(names).items()})
        transport.close()
        return log
    module, heard = Model(), []
    client = CollectiveReceiver(ws.ModuleReceiver(module), source=1)
    sound = client.receiver.apply
    while True:
        if rank == 0 and len(heard) == 2:
            client.receiver = ws.ModuleReceiver(module)
        if rank == 0 and len(heard) == 3:
            client.receiver.apply = broken
        more, answer = client._serve()
        if not more:
            break
        if answer is not None:
            heard.append(answer)
        if rank == 0 and len(heard) == 4:
            del client.receiver.apply
    assert sound is not None
    return {n: t.clone() for n, t in module.state_dict().items()}


def broken(payload):
    raise OSError("link down")


@pytest.mark.parametrize("size", [2, 4])
def test_payloads_over_a_group(world, size):
    results = world(size, group_sync, timeout=40)
    final, old = weights(1), {}
    for step in range(1, 5):
        change(final, old, step)
    for rank, result in enumerate(results):
        if rank != 1:
            assert all(torch.equal(final[n], t) for n, t in result.items()), rank
    assert results[1] == [
        (True, False, True),
        (False, True, True),
        (True, size > 2, True),
        {"rollout0": "RuntimeError: OSError: link down"},
        (False, True, True),
        {f"rollout{r}": 5 for r in range(size) if r != 1},
    ]


def misplaced():
    """What would hang in the first call is refused when the two sides are made."""
    rank, size = dist.get_rank(), dist.get_world_size()
    pair = dist.new_group([0, 2])
    receiver = ws.ModuleReceiver(Model())
    cases = [
        lambda: CollectiveTransport({"a": 3}),
        lambda: CollectiveTransport({"a": 2}, pair),
        lambda: CollectiveTransport({"a": rank}),
        lambda: CollectiveTransport(dict.fromkeys("ab", (rank + 1) % size)),
        lambda: CollectiveReceiver(receiver, group=pair),
        lambda: CollectiveReceiver(receiver, source=4),
    ]
    told = []
    for case in cases:
        try:
            case()
            told.append(None)
        except ValueError as error:
            told.append(str(error))
    if rank in (0, 2):
        dist.destroy_process_group(pair)
    if rank == 0:
        transport = CollectiveTransport({"a": 1, "b": 2, "c": 3})
        told.append(str(transport._known(["a", "d"])))
    return told


def test_groups_that_would_hang_are_refused(world):
    first, second, third, fourth = world(4, misplaced, timeout=30)
    outside = "receivers are other ranks of the group of {}, as the group counts them, got {}"
    idle = (
        "ranks {} of the group of 4 neither send nor receive, and every call would wait for them: the group "
        "is the sender and the receivers alone, see connect()"
    )
    strange = "rank {} is not a member of this group"
    assert first == [
        idle.format([1, 2]),
        outside.format(2, {"a": 2}),
        outside.format(4, {"a": 0}),
        "every receiver has a rank of its own, got " + str({"a": 1, "b": 1}),
        "rank 0 of the group is the sender: a receiver is on another rank",
        "source is a rank in the group of 4, got 4",
        "(['a'], {'d': ValueError(\"this transport has no receiver 'd', only ['a', 'b', 'c']\")})",
    ]
    assert second[0] == idle.format([0, 2])
    assert second[1] == second[4] == strange.format(1) and fourth[1] == fourth[4] == strange.format(3)
    assert third[4] is None and third[1] == outside.format(2, {"a": 2})
    assert fourth[0] == outside.format(4, {"a": 3})


@pytest.mark.parametrize("arguments, text", [
    (("HOST", 0, 2), "an address is tcp://HOST:PORT, got 'HOST'"),
    (("tcp://HOST:1", 2, 2), "rank is from 0 to 1 in a group of 2, got 2"),
    (("tcp://HOST:1", 1, 2, "tpu"), "device is 'cpu' or 'cuda', got 'tpu'"),
])  # fmt: skip
def test_connect_refuses(arguments, text):
    with pytest.raises(ValueError) as caught:
        connect(*arguments)
    assert str(caught.value) == text


def local_receiver(rank, size, shards):
    """A column-sharded ``w`` and a replicated ``b`` on every rank."""
    width = 4 // size
    w, b = torch.full((7, width), 9.0).bfloat16(), torch.full((13,), 9.0)
    shards |= {"w": w, "b": b}
    boxes = {
        "w": Box("w", (7, width), 0, (width, 1), rank * width, (4, 1)),
        "b": Box("b", (13,), 0, (1,), 0, (1,)),
    }
    full = weights(0)
    targets = {
        n: ws.Target(tuple(full[n].shape), full[n].dtype, ((shards[n].view(-1), boxes[n]),)) for n in full
    }
    return ws.Receiver(targets, peers=ws.Peers())


def sharded():
    """All ranks apply or none: the last rank's copy is damaged, then its write fails, then its weights
    drift."""
    from megatron.weight_sync import receiver as module

    rank, size = dist.get_rank(), dist.get_world_size()
    last, shards = rank == size - 1, {}
    receiver = local_receiver(rank, size, shards)
    tensors, old, sender = weights(1), {}, ws.Sender("m", lineage=1, encodings=("packed", "entropy"))
    sender.register("r")

    def payload(dense=None, again=False):
        update = sender.begin(dense, again=again)
        return update.finish(fill(tensors, old)(update)).to_bytes()

    def equal():
        part = tensors["w"].chunk(size, dim=1)[rank]
        return torch.equal(shards["w"], part) and torch.equal(shards["b"], tensors["b"])

    log = []
    sender.acknowledge("r", receiver.apply(payload()))
    log.append(equal())
    change(tensors, old, 1)
    data = payload()
    bad = [bytearray(piece) for piece in data]
    bad[0][-1] ^= 1 if last else 0
    before = {n: t.clone() for n, t in shards.items()}
    store = module._store

    def failing(write, values):
        store(write, values)
        if last and write.name == "b":
            module._store = store
            raise OSError("disk full")

    for broken, writer in ((bad, store), (data, failing)):
        module._store = writer
        try:
            receiver.apply(broken)
            log.append("applied")
        except Exception as error:
            log.append(type(error).__name__)
        module._store = store
        held = receiver.status().version  # every rank takes part
        log.append(held == 1 and all(torch.equal(before[n], t) for n, t in shards.items()))
    sender.acknowledge("r", receiver.apply(data))
    log.append(equal())
    if last:
        shards["b"][4] += 1  # one replica drifts: the sum over replicas must show it
    log.append(receiver.status().poisoned)
    receiver.apply(payload(dense=True, again=True))

    def lasting(write, values):
        if last and write.name == "b":
            raise OSError("device lost")
        store(write, values)

    change(tensors, old, 2)
    module._store, data = lasting, payload()
    try:
        receiver.apply(data)
    except ws.ReceiverPoisoned:
        log.append(receiver.status().poisoned)
    module._store = store
    receiver.apply(payload(dense=True, again=True))
    log.append(equal() and not receiver.status().poisoned)
    return log


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_of_a_sharded_receiver_agree(world, size):
    for rank, log in enumerate(world(size, sharded, timeout=40)):
        last = rank == size - 1
        errors = ("CorruptPayload", "OSError") if last else ("PeerFailed", "PeerFailed")
        assert log == [True, errors[0], True, errors[1], True, True, True, True, True], (rank, log)


def uncovered():
    rank, shards = dist.get_rank(), {}
    receiver = local_receiver(rank, 4, shards)
    del receiver
    try:
        box = Box("w", (7, 1), 0, (1, 1), 0, (4, 1))
        target = ws.Target((7, 4), torch.bfloat16, ((torch.zeros(7).bfloat16(), box),) if rank < 3 else ())
        ws.Receiver({"w": target}, peers=ws.Peers())
    except ws.UnsupportedLayout as error:
        return str(error)


def test_shards_that_do_not_cover_a_tensor(world):
    assert set(world(4, uncovered, timeout=40)) == {
        "w: the ranks hold 21 of its 28 elements unchanged (repacked, quantised?)"
    }


def shared_sums():
    rank = dist.get_rank()
    full = weights(3)
    half = full["w"].chunk(2, dim=0)[rank] if rank < 2 else full["w"][:0]
    rows = [4, 3, 0, 0][rank]
    box = Box("w", (rows, 4), 0, (4, 1), [0, 16, 0, 0][rank], (4, 1))
    share = ws.fingerprint_boxes([(half.contiguous(), [box])])
    if rank == 3:
        share |= ws.fingerprint({"b": full["b"]})
    return ws.all_reduce(share, ["w", "b"])


def test_fingerprint_shares_over_ranks(world):
    assert world(4, shared_sums, timeout=40) == [ws.fingerprint(weights(3))] * 4


def engine_models():
    path = Path(__file__).parent.parent / "cpu/weight_sync/engine_models.py"
    spec = importlib.util.spec_from_file_location("engine_models", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def sharded_engine(options):
    """Probe, dense, deltas, and a payload that one rank gets damaged; every rank checks against its own
    loader."""
    from megatron.weight_sync.engines.calls import live_tensors
    from megatron.weight_sync.engines.receiver import EngineReceiver

    models, rank, size = engine_models(), dist.get_rank(), dist.get_world_size()
    tensors, old = models.checkpoint(3, moe=options.get("moe", False), tied="head" in options), {}
    engine, loaded = models.Engine(rank, size, **options), models.Engine(rank, size, **options)
    receiver = EngineReceiver(
        lambda: live_tensors(engine),
        engine.load_weights,
        reload=engine.load_weights,
        peers=ws.Peers(),
        batch_elements=200,
    )
    sender = ws.Sender("m", lineage=1, encodings=("packed",))
    sender.register("r")
    log = []
    for k in range(4):
        if k:
            for name, tensor in tensors.items():
                old[name] = tensor.clone()
                tensor.view(-1)[k % tensor.numel() :: 4] += 1
        update = sender.begin()
        data = update.finish(fill(tensors, old)(update)).to_bytes()
        if k == 2:
            bad = [bytearray(piece) for piece in data]
            bad[0][-1] ^= int(rank == 0)
            try:
                receiver.apply(bad)
            except ws.WeightSyncError as error:
                log.append(type(error).__name__)
        sender.acknowledge("r", receiver.apply(data))
        loaded.load_weights(tensors.items())
        pairs = zip(engine.parameters(), loaded.parameters(), strict=True)
        log.append(all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs))
    return log


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("options", [{}, {"moe": True, "transposed": True}, {"head": "copy"}], ids=str)
def test_sharded_engine_follows_deltas(world, size, options):
    for rank, log in enumerate(world(size, sharded_engine, options, timeout=60)):
        error = "CorruptPayload" if rank == 0 else "PeerFailed"
        assert log == [True, True, error, True, True], (rank, log)
