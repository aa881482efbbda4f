"""Weight sync on a GPU: the kernels against plain torch, payloads that never leave the device, CUDA IPC,
NCCL."""

import json
import os
import subprocess
import sys
import time

import pytest
import torch

from tests.conftest import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def boxes():
    from megatron.weight_sync import Box

    r, c = 301, 77
    return [
        Box("w", (r * c,), 0, (1,), 0, (1,)),
        Box("w", (30, c), 2 * c, (c, 1), c, (c, 1)),
        Box("w", (r, 40), 0, (c, 1), 5, (c, 1)),
        Box("w", (c, r), 0, (r, 1), 0, (1, c)),
        Box("w", (3, 2, 5), 1, (30, 10, 2), 0, (13, 6, 1)),
        Box("w", (2, 2, 2, 3), 0, (30, 12, 5, 1), 1, (40, 17, 7, 2)),
        Box("w", (1,), 5, (1,), 9, (1,)),
        Box("w", (r, 40), 0, (c, 1), 1 << 33, (1 << 32, 3)),
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.uint8], ids=str)
def test_fingerprints_equal_the_cpu(dtype):
    from megatron.weight_sync import fingerprint, fingerprint_boxes, kernels

    torch.manual_seed(1)
    live = (torch.randn(301 * 77) * 9).to(dtype)
    pieces = [(live, boxes())]
    assert fingerprint_boxes([(live.cuda(), boxes())]) == fingerprint_boxes(pieces)
    assert kernels.BoxSums([(live.cuda(), box) for box in boxes()])().shape == (8,)
    tensors = {"a": live, "b": live[:5].clone(), "c": live[:0].clone(), "d": live[7]}
    assert fingerprint({n: t.cuda() for n, t in tensors.items()}) == fingerprint(tensors)


def test_fingerprint_beyond_2_31_elements():
    """One nonzero byte far out: its place must count in full."""
    from megatron.weight_sync import fingerprint
    from megatron.weight_sync.fingerprints import MODULUS, C, G, name_id

    def mix(z):
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % MODULUS
        return z ^ (z >> 31)

    tensor = torch.zeros((1 << 31) + 5000, dtype=torch.uint8, device="cuda")
    empty = fingerprint({"w": tensor})["w"]
    place = (1 << 31) + 4321
    tensor[place] = 9
    key = (name_id("w") + place * G) % MODULUS
    expected = mix(key ^ (9 * C % MODULUS)) - mix(key)
    assert (fingerprint({"w": tensor})["w"] - empty) % MODULUS == expected % MODULUS


def test_checksum_equals_the_cpu():
    from megatron.weight_sync.fingerprints import word_sum

    data = torch.randint(0, 256, (1_000_003,), dtype=torch.uint8)
    for n in (0, 1, 8, 9, 4096, 1_000_003):
        assert int(word_sum(data[:n].cuda())) == int(word_sum(data[:n]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("relative", [False, True])
def test_changes_into_live_weights(dtype, relative):
    from megatron.weight_sync import codec, kernels
    from megatron.weight_sync.fingerprints import bits_of

    torch.manual_seed(2)
    changes, check = [], []
    for k, box in enumerate(boxes()):
        live = (torch.randn(301 * 77) * 9).to(dtype).cuda()
        top = 1 + box.full_offset + sum((n - 1) * s for n, s in zip(box.size, box.full_stride, strict=True))
        index = torch.unique(torch.randint(0, top, (5000,), device="cuda"))
        bits = torch.randint(-90, 90, index.shape, device="cuda").to(bits_of(live).dtype)
        changes.append(kernels.Change(live, box, index + 1000 * k, bits, 1000 * k))
        inside, position = box.map_to_local(index)
        expected = live.clone()
        flat = bits_of(expected)
        flat[position] = codec.ulp_apply(flat[position], bits[inside]) if relative else bits[inside]
        check.append((live, live.clone(), expected))
    swap = kernels.Swap(changes, relative)
    swap.store()
    assert all(torch.equal(bits_of(live), bits_of(new)) for live, _, new in check)
    swap.put_back()
    assert all(torch.equal(bits_of(live), bits_of(old)) for live, old, _ in check)


@pytest.mark.parametrize("n", [1, 1 << 17, (1 << 17) + 1, 40_000_003])
def test_frames_by_nvcomp(n):
    """nvCOMP's frames, read by zstandard: the same bytes, hardly more of them, and sooner made."""
    zstandard = pytest.importorskip("zstandard")
    pytest.importorskip("nvidia.nvcomp")
    from megatron.weight_sync import codec, gpu_zstd

    torch.manual_seed(n)
    gaps = torch.empty(n + 3, device="cuda").geometric_(0.01).clamp_(max=255).to(torch.uint8)[3:]
    for plane in (gaps, (gaps > 70).to(torch.uint8), torch.zeros_like(gaps)):
        codec._compress(plane)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        made = codec._compress(plane)
        torch.cuda.synchronize()
        here = 1e3 * (time.perf_counter() - begin)
        assert made.is_cuda and made.dtype == torch.uint8
        data = made.cpu().numpy().tobytes()
        assert zstandard.frame_content_size(data) == min(n, 1 << 17)
        read = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
        assert read == plane.cpu().numpy().tobytes()
        begin = time.perf_counter()
        reference = zstandard.ZstdCompressor(level=1).compress(plane.cpu().numpy().tobytes())
        there = 1e3 * (time.perf_counter() - begin)
        print(f"{n} bytes: nvCOMP {len(data)} in {here:.1f} ms, zstandard {len(reference)} in {there:.1f} ms")
        assert len(data) < 1.15 * len(reference) + 64 * (1 + n // (1 << 17))
    assert gpu_zstd.nvcomp() is not None


def model(seed, device="cuda"):
    torch.manual_seed(seed)
    inner = [torch.nn.Linear(65, 129), torch.nn.Linear(129, 65, bias=False), torch.nn.LayerNorm(65)]
    return torch.nn.Sequential(*inner).to(device, torch.bfloat16)


def step(tensors, density):
    old = {n: t.clone() for n, t in tensors.items()}
    for tensor in tensors.values():
        hit = torch.rand(tensor.shape, device=tensor.device) < density
        tensor[hit] = torch.randn(int(hit.sum()), device=tensor.device).to(tensor.dtype)
    return old


def fill(update, tensors, old):
    from megatron.weight_sync import fingerprint
    from megatron.weight_sync.fingerprints import bits_of

    for name, tensor in tensors.items():
        if update.dense:
            update.add_dense(name, tensor)
        else:
            index = (bits_of(tensor) != bits_of(old[name])).view(-1).nonzero().view(-1)
            values, before = tensor.view(-1)[index], old[name].view(-1)[index]
            update.add_delta(name, index, values, tensor.shape, old=before, full=tensor)
    return update.finish(fingerprint(tensors))


@pytest.mark.parametrize("encodings", [("raw",), ("packed",), ("entropy",)], ids="+".join)
@pytest.mark.parametrize("where", ["cuda", "cpu"])
def test_sync_on_the_device(encodings, where):
    """Encode on the GPU, apply on the GPU or on the CPU: bit for bit, and the same bytes as the CPU makes."""
    from megatron import weight_sync as ws
    from megatron.weight_sync import gpu_zstd

    torch.manual_seed(3)
    source, live = model(1), model(2, where)
    tensors = dict(source.state_dict())
    sender, receiver = ws.Sender("m", lineage=1, encodings=encodings), ws.ModuleReceiver(live)
    twin = ws.Sender("m", lineage=1, encodings=encodings)
    sender.register("r"), twin.register("r")
    old = {}
    for k in range(6):
        if k:
            old = step(tensors, [0.01, 0.3, 0.0, 0.9, 0.05][k - 1])
        payload = fill(sender.begin(), tensors, old)
        on_cpu = [{n: t.cpu() for n, t in group.items()} for group in (tensors, old)]
        expected = fill(twin.begin(), *on_cpu)
        if encodings != ("entropy",) or gpu_zstd.nvcomp() is None:  # its frames are others
            assert payload.to_bytes() == expected.to_bytes()
        ack = receiver.apply(payload)
        assert sender.acknowledge("r", ack) and twin.acknowledge("r", ack)
        state = live.state_dict()
        assert all(torch.equal(t.cpu(), state[n].cpu()) for n, t in tensors.items())


@pytest.mark.parametrize("free", ["much", "little"])
def test_an_engines_layout_is_found_on_the_device(monkeypatch, free):
    """Fused, interleaved, transposed and cut, more elements than are computed with at a time, in batches;
    what is read back is kept on the device where that has room."""
    from megatron.weight_sync.engines.probe import discover

    if free == "little":
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 1 << 40))
    rows, cols = 5000, 4003
    shapes = {"gate": (rows, cols), "up": (rows, cols), "down": (cols, rows), "head": (2 * rows, cols)}
    shapes["n"] = (7,)
    live = {
        "gate_up": torch.zeros(rows, 2, cols, dtype=torch.bfloat16, device="cuda"),
        "down": torch.zeros(rows, cols, dtype=torch.bfloat16, device="cuda"),
        "head": torch.zeros(2 * rows, 1000, dtype=torch.bfloat16, device="cuda"),
        "n": torch.zeros(7, dtype=torch.bfloat16, device="cuda"),
        "table": torch.arange(9.0, device="cuda"),
    }

    def load(pairs):
        for name, tensor in pairs:
            if name in ("gate", "up"):
                live["gate_up"][:, ("gate", "up").index(name)] = tensor
            else:
                live[name].copy_({"down": tensor.t(), "head": tensor[..., 3000:4000]}.get(name, tensor))

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    targets = discover({name: (shape, torch.bfloat16) for name, shape in shapes.items()}, live, load, 1 << 25)
    largest = 2 * 2 * rows * cols
    read_back = 24 * 2 * rows * cols if free == "much" else 0
    assert torch.cuda.max_memory_allocated() - before < largest + read_back + 800 * 2**20
    assert torch.equal(live["table"], torch.arange(9.0, device="cuda"))
    assert {name: len(target.pieces) for name, target in targets.items()} == dict.fromkeys(shapes, 1)
    tensors = {name: torch.randn(shape, device="cuda").bfloat16() for name, shape in shapes.items()}
    load(tensors.items())
    expected = {name: tensor.clone() for name, tensor in live.items()}
    for name in shapes:
        live[name if name in live else "gate_up"].fill_(float("nan"))
    for name, target in targets.items():
        for flat, box in target.pieces:
            box.copy_to_local(tensors[name], flat)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in live.items())


def test_refused_update_is_taken_back_on_the_device():
    from megatron import weight_sync as ws

    source, live = model(1), model(2)
    tensors = dict(source.state_dict())
    sender, receiver = ws.Sender("m", lineage=1), ws.ModuleReceiver(live)
    receiver.apply(fill(sender.begin(), tensors, {}))
    before = {n: t.clone() for n, t in live.state_dict().items()}
    old = step(tensors, 0.2)
    update = sender.begin()
    for name, tensor in tensors.items():
        index = (tensor != old[name]).view(-1).nonzero().view(-1)
        update.add_delta(name, index, tensor.view(-1)[index] + 1, tensor.shape)
    with pytest.raises(ws.FingerprintMismatch):
        receiver.apply(update.finish(ws.fingerprint(tensors)))
    assert all(torch.equal(before[n], t) for n, t in live.state_dict().items())
    assert receiver.status().version == 1


RECEIVER = """
import json, sys, torch
import megatron.weight_sync as ws
from megatron.weight_sync.engines.vllm import decode
from megatron.weight_sync.transport.cuda_ipc import import_containers
torch.manual_seed(2)
live = torch.nn.Linear(65, 129).cuda().to(torch.bfloat16)
receiver = ws.ModuleReceiver(live)
for line in sys.stdin:
    said = json.loads(line)
    # bare handles, or as the vLLM adapter packs them
    containers = [get() for _, get in decode(said)] if isinstance(said, dict) else import_containers(said)
    ack = receiver.apply(containers)
    del containers
    sums = ws.fingerprint(dict(live.state_dict()))
    print(json.dumps([ack.version, ack.fingerprint, ws.total(sums)]), flush=True)
"""


def test_cuda_ipc_between_two_processes_on_one_gpu():
    from megatron import weight_sync as ws
    from megatron.weight_sync.engines.vllm import encode
    from megatron.weight_sync.transport.cuda_ipc import export_payload

    tensors = {n: t.bfloat16() for n, t in torch.nn.Linear(65, 129).cuda().state_dict().items()}
    process = subprocess.Popen(
        [sys.executable, "-c", RECEIVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT / "build/tree")},
    )
    sender = ws.Sender("m", lineage=1, encodings=("packed",))
    sender.register("r")
    old = {}
    for k in range(4):
        if k:
            old = step(tensors, 0.1)
        payload = fill(sender.begin(), tensors, old)
        handles = export_payload(payload)
        if k % 2:
            handles = encode([(f"container/{i}", piece) for i, piece in enumerate(payload.containers())])
        process.stdin.write(json.dumps(handles) + "\n")
        process.stdin.flush()
        version, fingerprint, live = json.loads(process.stdout.readline())
        assert version == k + 1 and fingerprint == live == ws.total(ws.fingerprint(tensors))
        sender.acknowledge("r", ws.Ack("m", 1, version, fingerprint))
    process.stdin.close()
    assert process.wait(60) == 0


NCCL = """
import os, sys, torch, torch.distributed as dist
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import megatron.weight_sync as ws
from megatron.weight_sync.transport.collective import CollectiveReceiver, CollectiveTransport, connect
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
if sys.argv[2] == "world":
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    group = None
else:
    group = connect(sys.argv[2], rank, 2, device="cuda")
torch.manual_seed(rank)
module = torch.nn.Linear(65, 129).cuda().to(torch.bfloat16)
if rank == 0:
    transport = CollectiveTransport({"r": 1}, group)
    sender = ws.Sender("m", encodings=("packed",))
    sender.register("r")
    tensors, old = dict(module.state_dict()), {}
    def fill(update):
        for name, tensor in tensors.items():
            if update.dense:
                update.add_dense(name, tensor)
            else:
                index = (tensor != old[name]).view(-1).nonzero().view(-1)
                update.add_delta(name, index, tensor.view(-1)[index], tensor.shape)
        return ws.fingerprint(tensors)
    for k in range(3):
        if k:
            for name, tensor in tensors.items():
                old[name] = tensor.clone()
                tensor.view(-1)[k::7] += 1
        assert ws.synchronise(sender, transport, fill).clear_bits
    transport.close()
    Path(sys.argv[3], "synced").write_text(str(ws.total(ws.fingerprint(tensors))))
else:
    receiver = ws.ModuleReceiver(module)
    CollectiveReceiver(receiver, group=group).serve_forever()
    assert receiver.version == 3
    Path(sys.argv[3], "held").write_text(str(ws.total(ws.fingerprint(dict(module.state_dict())))))
if group is None:
    dist.destroy_process_group()
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("group", ["world", "tcp://127.0.0.1:29671"], ids=["world", "connect"])
def test_payloads_over_nccl(tmp_path, group):
    script = tmp_path / "nccl.py"
    script.write_text(NCCL)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(script),
    ]
    command += [str(ROOT / "build/tree"), group, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "synced").read_text() == (tmp_path / "held").read_text()
