"""Engines that fuse and shard: the probed boxes are where the engine's own loader puts things, and deltas
through them equal what it would load."""

import importlib.util
import json
import math
import tempfile
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron import weight_sync as ws
from megatron.weight_sync.engines import calls, probe
from megatron.weight_sync.engines.probe import Pairs, discover, fit
from megatron.weight_sync.engines.receiver import EngineReceiver
from megatron.weight_sync.fingerprints import bits_of
from tests.cpu.weight_sync.streams import delta, dense, step

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
@pytest.mark.parametrize(("batch", "chunk"), [(50, 1 << 24), (1 << 20, 1 << 24), (1 << 20, 7)])
def test_boxes_are_where_the_loader_puts_things(monkeypatch, kind, size, rank, batch, chunk):
    monkeypatch.setattr(probe, "_CHUNK", chunk)  # what is computed with at a time
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


def test_tensors_of_other_ranks_cost_one_more_look():
    """As with expert parallelism, where a rank holds few of the names; not a look for each."""
    tensors = {f"experts.{e}": torch.randn(3, 2).bfloat16() for e in range(40)}
    live, passes = torch.zeros(2, 3, 2).bfloat16(), []

    def load(pairs):
        pairs = dict(pairs)
        passes.append(len(pairs))
        for e in range(2):
            if f"experts.{5 + e}" in pairs:
                live[e].copy_(pairs[f"experts.{5 + e}"])

    targets = discover(table_of(tensors), {"w": live}, load)
    assert [n for n, target in targets.items() if target.pieces] == ["experts.5", "experts.6"]
    assert len(passes) == 8 and passes[-1] == 38


def test_more_names_than_one_digit_counts():
    """A batch takes fewer; and a batch that this rank holds nothing of is not loaded."""
    tensors = {f"experts.{e}": torch.randn(1, 3).bfloat16() for e in range(17_000)}
    live = {100: torch.zeros(300, 3).bfloat16(), 16_900: torch.zeros(100, 3).bfloat16()}
    loaded = 0

    def load(pairs):
        nonlocal loaded
        for name, tensor in pairs:
            loaded += 1
            for first, experts in live.items():
                if 0 <= (e := int(name.split(".")[1]) - first) < len(experts):
                    experts[e].copy_(tensor[0])

    targets = discover(table_of(tensors), {str(first): w for first, w in live.items()}, load, 900)
    held = [name for name, target in targets.items() if target.pieces]
    assert held == [f"experts.{e}" for e in [*range(100, 400), *range(16_900, 17_000)]]
    # who may be here takes two digits, and is asked again as one name may hide another; then only those are
    # loaded, four times
    assert loaded == 2 * 17_000 + 4 * 400 + 2 * 16_600
    for name in held:
        ((flat, box),) = targets[name].pieces
        box.copy_to_local(tensors[name], flat)
    assert torch.equal(torch.cat([*live.values()]), torch.cat([tensors[name] for name in held]))


def test_three_names_of_one_parameter_are_all_found():
    live = torch.zeros(5, 3).bfloat16()
    tensors = {n: torch.randn(5, 3).bfloat16() for n in "abc"}
    targets = discover(table_of(tensors), {"w": live}, lambda ws: [live.copy_(t) for _, t in ws])
    assert [len(target.pieces) for target in targets.values()] == [1, 1, 1]


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


def test_views_of_a_parameter_count_once():
    """Latent attention in vLLM keeps the two halves of kv_b_proj, turned, as parameters of their own."""
    tensors = {
        "kv_b_proj.weight": torch.randn(10, 3).bfloat16(),
        "o_proj.weight": torch.randn(3, 5).bfloat16(),
    }
    both, own = torch.zeros(10, 3).bfloat16(), torch.zeros(3, 5).bfloat16()
    live = {"W_UK_T": both[:5].t(), "kv_b_proj": both, "W_UV": both[5:], "o_proj": own, "turned": own.t()}
    targets = discover(
        table_of(tensors), live, lambda ws: [(both if t.shape == (10, 3) else own).copy_(t) for _, t in ws]
    )
    assert [len(target.pieces) for target in targets.values()] == [1, 1]
    for name, target in targets.items():
        for flat, box in target.pieces:
            box.copy_to_local(tensors[name], flat)
    assert torch.equal(both, tensors["kv_b_proj.weight"]) and torch.equal(own, tensors["o_proj.weight"])


# ---- what cannot be reached is refused by name -------------------------------------------------------------


@pytest.mark.parametrize(
    ("broken", "match"),
    [
        ("scaled", r"input_layernorm.weight: the ranks hold 0 of its 12 elements unchanged"),
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


class Packed(torch.nn.Module):
    """Parameters as quantising engines have them."""

    def __init__(self, **parameters):
        super().__init__()
        for name, tensor in parameters.items():
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
        self.register_buffer("_k_scale", torch.ones(()))


@pytest.mark.parametrize(
    ("parameters", "match"),
    [
        ({"weight": torch.zeros(3).to(torch.float8_e4m3fn)}, r"weight \(torch.float8_e4m3fn\)"),
        ({"qweight": torch.zeros(3, dtype=torch.int32)}, r"qweight \(torch.int32\)"),
        ({"weight": torch.zeros(3, dtype=torch.uint8)}, r"weight \(torch.uint8\)"),
        ({"w13_weight_scale_inv": torch.ones(1)}, r"w13_weight_scale_inv \(torch.float32\)"),
    ],
    ids=["fp8", "gptq", "fp4", "block scale"],
)
def test_quantised_parameters_are_refused_before_anything_is_written(parameters, match):
    model = Packed(**parameters)
    loaded = []
    receiver = EngineReceiver(lambda: calls.live_tensors(model), loaded.append)
    with pytest.raises(ws.UnsupportedLayout, match=rf"not supported yet: \['{match}"):
        receiver.apply(dense(ws.Sender("m", lineage=1), {"weight": torch.ones(3)}))
    assert not loaded and receiver.version is None


# ---- what an engine does to weights after loading them -----------------------------------------------------


def probed_receiver(engine, **options):
    return EngineReceiver(lambda: calls.live_tensors(engine), engine.load_weights, **options)


@pytest.mark.parametrize("processed", ["swapped", "interleaved"])
def test_weights_reordered_after_loading_are_refused_by_name(processed):
    tensors = models.checkpoint(10)
    engine, loaded = models.Engine(processed=processed), models.Engine(processed=processed)
    receiver = probed_receiver(engine, reload=models.reload_of(engine))
    text = r"changes weights after loading them .*\['model.layers.0.mlp.gate_proj.weight', .* \(4 in all\)"
    with pytest.raises(ws.UnsupportedLayout, match=text):
        receiver.apply(dense(ws.Sender("m", lineage=1), tensors))
    models.reload_of(loaded)(tensors.items())
    assert all(torch.equal(a, b) for a, b in zip(engine.parameters(), loaded.parameters(), strict=True))
    assert receiver.version is None and not receiver.probed


def test_an_order_that_is_restored_before_every_update_is_followed():
    """As in SGLang's update sessions: restored at their begin, and made again at their end."""
    tensors, gen = models.checkpoint(10), torch.Generator().manual_seed(4)
    engine, loaded = models.Engine(processed="interleaved"), models.Engine(processed="interleaved")
    receiver = probed_receiver(
        engine, reload=models.reload_of(engine, restore=True), recover=engine.load_weights
    )
    sender = ws.Sender("m", lineage=1)
    sender.register("r")
    for k in range(3):
        payload = delta(sender, tensors, step(tensors, gen)) if k else dense(sender, tensors)
        engine.restore()
        assert sender.acknowledge("r", receiver.apply(payload))
        engine.process()
        models.reload_of(loaded)(tensors.items())
        assert all(torch.equal(a, b) for a, b in zip(engine.parameters(), loaded.parameters(), strict=True))


def test_parameters_replaced_at_every_load_are_refused():
    engine = models.Engine(processed="replaced")
    with pytest.raises(ws.UnsupportedLayout, match="replaces its parameters at every load"):
        probed_receiver(engine, reload=models.reload_of(engine)).apply(
            dense(ws.Sender("m", lineage=1), models.checkpoint(10))
        )


def test_replaced_parameters_are_noticed_and_found_anew():
    tensors, gen = models.checkpoint(11), torch.Generator().manual_seed(5)
    engine, loaded = models.Engine(processed="replaced"), models.Engine()
    receiver, sender = probed_receiver(engine), ws.Sender("m", lineage=1)
    sender.register("r")
    assert sender.acknowledge("r", receiver.apply(dense(sender, tensors)))
    before = engine.get("0.gate_up")
    engine.process()
    with pytest.raises(ws.ReceiverPoisoned, match="no known version"):
        receiver.apply(delta(sender, tensors, step(tensors, gen)))
    assert receiver.status().poisoned
    held = before.clone()
    assert sender.acknowledge("r", receiver.apply(dense(sender, tensors)))
    for _ in range(2):
        loaded.load_weights(tensors.items())
        assert all(torch.equal(a, b) for a, b in zip(engine.parameters(), loaded.parameters(), strict=True))
        assert sender.acknowledge("r", receiver.apply(delta(sender, tensors, step(tensors, gen))))
    assert torch.equal(before, held)  # what is no parameter any more is left alone


def test_an_engine_that_cannot_be_left_with_the_payload_says_so():
    engine = models.Engine(processed="swapped")

    def reload(weights):
        if engine.reloads:
            raise KeyError("gone")
        models.reload_of(engine)(weights)

    receiver = probed_receiver(engine, reload=reload)
    with pytest.raises(
        ws.UnsupportedLayout, match=r"after loading them .*; and the engine, .*KeyError: 'gone'"
    ):
        receiver.apply(dense(ws.Sender("m", lineage=1), models.checkpoint(10)))
    assert receiver.version is None and not receiver.probed


def test_status_notices_replaced_parameters():
    engine, sender = models.Engine(processed="replaced"), ws.Sender("m", lineage=1)
    receiver = probed_receiver(engine)
    receiver.apply(dense(sender, models.checkpoint(11)))
    assert receiver.status().version == 1
    engine.process()
    with pytest.raises(ws.ReceiverPoisoned, match=r"\d+ tensors were replaced .*: dense sync needed"):
        receiver.live_fingerprint()
    assert receiver.status().poisoned


def test_parameters_replaced_after_writing_are_not_acknowledged():
    engine, sender = models.Engine(processed="replaced"), ws.Sender("m", lineage=1)
    tensors = models.checkpoint(11)
    receiver = probed_receiver(engine)
    receiver.apply(dense(sender, tensors))
    receiver._after_write = engine.process
    sender.register("r")
    with pytest.raises(ws.ReceiverPoisoned, match=r"replaced .* while version 2 was applied"):
        receiver.apply(dense(sender, tensors))
    assert receiver.status().poisoned


class Pair:
    """Peers of two ranks that are threads of this process."""

    def __init__(self):
        self.values, self.barrier = [None, None], threading.Barrier(2, timeout=10)

    def of(self, rank):
        def share(value):
            self.values[rank] = value
            self.barrier.wait()
            both = list(self.values)
            self.barrier.wait()
            return both

        return types.SimpleNamespace(
            agree=lambda good: all(share(good)),
            add=lambda values, names: {
                n: sum(part[n] for part in both) % (1 << 64) for both in [share(values)] for n in names
            },
        )


def test_a_rank_that_cannot_open_the_payload_does_not_leave_the_other_waiting():
    tensors, pair = models.checkpoint(12), Pair()
    engines = [models.Engine(rank, 2) for rank in range(2)]
    receivers = [probed_receiver(e, peers=pair.of(rank)) for rank, e in enumerate(engines)]
    pieces = list(dense(ws.Sender("m", lineage=1), tensors).containers())

    def no_such_gpu():
        raise ws.CorruptPayload("no such GPU")

    def serve(rank, broken, box):
        text = json.dumps({"do": "apply", "key": f"{broken}", "mailbox": box}).encode()
        named = [(calls.CALL, torch.frombuffer(bytearray(text), dtype=torch.uint8))]
        opened = [lambda piece=piece: piece for piece in pieces]
        named += [(calls.CONTAINER, no_such_gpu if broken and rank == 1 else get) for get in opened]
        return calls.serve(named, rank, lambda: receivers[rank])

    with tempfile.TemporaryDirectory() as box, ThreadPoolExecutor(2) as pool:
        answers = [list(pool.map(serve, range(2), [broken] * 2, [box] * 2)) for broken in (True, False)]
    assert isinstance(answers[0][0], ws.PeerFailed) and str(answers[0][1]) == "no such GPU"
    assert answers[1][0] == answers[1][1] and answers[1][0].version == 1


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
    position, index = (torch.from_numpy(np.concatenate(x)) for x in zip(*parts, strict=True))
    boxes = fit("w", Pairs(position, [index]))
    assert pairs(boxes) == dict(zip(position.tolist(), index.tolist(), strict=True))
    if len(parts) == 1:
        assert len(boxes) == 1


def test_fit_gives_up_on_disorder():
    order = torch.randperm(3000, generator=torch.Generator().manual_seed(1))
    assert fit("w", Pairs(range(3000), [order])) is None and fit("w", Pairs(range(0), [order[:0]])) == []


def test_fitting_computes_with_a_chunk_at_a_time(monkeypatch):
    """Also where other elements lie in between, and loops are nested three deep."""

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func not in (torch.ops.aten.slice.Tensor, torch.ops.aten.alias.default):
                self.numel = max(self.numel, *(t.numel() for t in tree_leaves(out) if torch.is_tensor(t)), 0)
            return out

    monkeypatch.setattr(probe, "_CHUNK", 64)
    grid = np.indices((16, 50, 20)).reshape(3, -1)
    position, index = torch.from_numpy(np.array([1100, 21, 1]) @ grid), torch.arange(16000)
    with Largest() as largest:
        made = Pairs(position, [index])
        assert not made.any_outside(16000) and made.any_outside(15999)
        (box,) = fit("w", made)
    assert box.size == (16, 50, 20) and largest.numel <= 64


@pytest.mark.parametrize(
    ("rows", "arrange", "pieces"),
    [
        (5, lambda t: t.expand(3, 5, 4), 3),
        (5, lambda t: t.flip(0), 5),
        (5, lambda t: t.flip(1), 16),
        (80, lambda t: t.flip(0), None),
    ],
)
def test_reversed_and_repeated_rows(rows, arrange, pieces):
    """A box goes forward in both; what does not is several boxes, or refused if it takes too many."""
    tensors = {"w": torch.randn(rows, 4).bfloat16()}
    expected = arrange(tensors["w"])
    live = torch.zeros(expected.shape).bfloat16()

    def find():
        return discover(table_of(tensors), {"w": live}, lambda ws: [live.copy_(arrange(t)) for _, t in ws])

    if pieces is None:
        with pytest.raises(ws.UnsupportedLayout, match=r"w: its place in w is not made of boxes"):
            find()
        return
    target = find()["w"]
    assert len(target.pieces) == pieces
    live.fill_(math.nan)
    for flat, box in target.pieces:
        box.copy_to_local(tensors["w"], flat)
    assert torch.equal(live, expected)


def test_batches_hold_neighbours():
    """Whatever the order of the names: what a batch reaches in a storage is read back from end to end."""
    tensors = {f"experts.{e}.w": torch.randn(3, 2).bfloat16() for e in range(40)}
    live, seen = torch.zeros(40, 3, 2).bfloat16(), []

    def load(pairs):
        batch = []
        for name, tensor in pairs:
            batch.append(int(name.split(".")[1]))
            live[batch[-1]] = tensor
        seen.append(batch)

    discover(table_of(dict(sorted(tensors.items()))), {"w": live}, load, 36)
    assert all(batch == list(range(batch[0], batch[-1] + 1)) for batch in seen)
    assert {len(batch) for batch in seen} == {40, 6, 4}


# ---- payloads into an engine -------------------------------------------------------------------------------


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
