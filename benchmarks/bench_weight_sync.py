"""Weight sync: bytes per changed element, and what encoding, decoding, applying and fingerprinting cost.

    python benchmarks/bench_weight_sync.py                 # the GPU if there is one, else a small case on the
    CPU

Sizes are those of half of Qwen3-8B's layers with its vocabulary, 3.75e9 bf16 elements (7.5 GB). Changes are
uniform draws, stepped by one unit in the last place in nine of ten cases as bf16 training at small learning
rates does; and, with `transformers` at hand, what 50 steps of the quickstart at learning rate 1e-6 really
change. Every payload is applied, and the receiver compared with the sender bit for bit, before
anything is timed.
"""

import argparse
import math
import random
import re
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "build/tree"))
sys.path.insert(0, str(ROOT))

from benchmarks.recording import Recording  # noqa: E402
from megatron import weight_sync as ws  # noqa: E402
from megatron.weight_sync import codec, container, payload  # noqa: E402
from megatron.weight_sync.engines.probe import discover  # noqa: E402
from megatron.weight_sync.fingerprints import bits_of  # noqa: E402

DENSITIES = (0.1, 0.01, 0.001)


def shapes(layers, hidden, inner, heads, kv, head, vocabulary, experts=0):
    out = {"model.embed_tokens.weight": (vocabulary, hidden), "lm_head.weight": (vocabulary, hidden)}
    for i in range(layers):
        p = f"model.layers.{i}."
        out |= {
            p + "self_attn.q_proj.weight": (heads * head, hidden),
            p + "self_attn.k_proj.weight": (kv * head, hidden),
            p + "self_attn.v_proj.weight": (kv * head, hidden),
            p + "self_attn.o_proj.weight": (hidden, heads * head),
            p + "input_layernorm.weight": (hidden,),
            p + "post_attention_layernorm.weight": (hidden,),
        }
        for mlp in [f"mlp.experts.{e}." for e in range(experts)] or ["mlp."]:
            out |= {
                p + mlp + "gate_proj.weight": (inner, hidden),
                p + mlp + "up_proj.weight": (inner, hidden),
                p + mlp + "down_proj.weight": (hidden, inner),
            }
    return out


class Weights(torch.nn.Module):
    """A bag of tensors under checkpoint names."""

    def __init__(self, table, device, seed):
        super().__init__()
        gen = torch.Generator(device=device).manual_seed(seed)
        self.tensors = {
            n: torch.randn(s, generator=gen, device=device, dtype=torch.bfloat16) for n, s in table.items()
        }

    def state_dict(self, *args, **kwargs):
        return dict(self.tensors)


def steps(n, gen, device):
    """Distances in units in the last place: nine of ten are one unit, either way."""
    far = torch.rand(n, generator=gen, device=device) < 0.1
    size = torch.ones(n, dtype=torch.int64, device=device)
    size[far] += torch.empty(int(far.sum()), device=device).geometric_(0.4, generator=gen).to(torch.int64)
    sign = torch.randint(0, 2, (n,), generator=gen, device=device) * 2 - 1
    return (size * sign).to(torch.int16)


def change(tensors, density, seed, device):
    """Step a uniform draw of elements in place; name -> (index, new values, old values)."""
    gen, out = torch.Generator(device=device).manual_seed(seed), {}
    for name, tensor in tensors.items():
        flat, found = bits_of(tensor).view(-1), []
        for a in range(0, flat.numel(), 1 << 28):
            part = flat[a : a + (1 << 28)]
            found.append(
                (torch.rand(part.shape, generator=gen, device=device) < density).nonzero().view(-1) + a
            )
        index = torch.cat(found)
        old = flat[index]
        flat[index] = codec.ulp_apply(old, steps(len(index), gen, device))
        out[name] = (index, tensor.view(-1)[index], old.view(torch.bfloat16))
    return out


def entropy(changes):
    """Bits per change of the gaps and of the distances, as independent symbols (order 0)."""
    gaps = torch.cat([torch.diff(index, prepend=index.new_tensor([-1])) for index, _, _ in changes.values()])
    ulps = torch.cat([codec.ulp_between(bits_of(o), bits_of(v)) for _, v, o in changes.values()])
    out = 0.0
    for symbols in (gaps, ulps):
        _, count = symbols.unique(return_counts=True)
        share = count.double() / len(symbols)
        out += float(-(share * share.log2()).sum())
    return out


def encode(sender, changes, table, fingerprint, with_old=True):
    update = sender.begin(dense=False)
    for name, (index, value, old) in changes.items():
        update.add_delta(name, index, value, table[name], old=old if with_old else None)
    return update.finish(fingerprint)


def fill_dense(sender, tensors):
    """A first sync, acknowledged."""
    sender.register("r")
    update = sender.begin()
    for name, tensor in tensors.items():
        update.add_dense(name, tensor)
    made = update.finish(ws.fingerprint(tensors))
    acknowledge(sender, made)
    return made


def acknowledge(sender, made):
    manifest = payload.read_manifest(made.manifest)
    sender.acknowledge("r", ws.Ack(sender.model_id, sender.lineage, made.version, manifest.fingerprint))


def xor_bytes(changes, tensors, limit=64 << 20):
    """Bytes per change of the XOR of old and new weights, compressed by zstandard level 3, on one large
    tensor."""
    import zstandard

    name = max(tensors, key=lambda n: tensors[n].numel())
    index, value, old = changes[name]
    size = min(tensors[name].numel(), limit)
    keep = index < size
    xor = torch.zeros(size, dtype=torch.int16)
    xor[index[keep].cpu()] = (bits_of(value) ^ bits_of(old))[keep].cpu()
    return len(zstandard.ZstdCompressor(level=3).compress(xor.numpy().tobytes())) / max(1, int(keep.sum()))


def clock(device):
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def milliseconds(work, device, prepare=lambda: None, repeats=5):
    """Median wall time with the device idle before and after: encoders and decoders synchronise in
    between."""
    times = []
    for _ in range(repeats + 1):
        prepare()
        begin = clock(device)
        work()
        times.append(1e3 * (clock(device) - begin))
    return statistics.median(times[1:])


def uniform(record, table, device):
    source, live = Weights(table, device, 1), Weights(table, device, 2)
    total = sum(t.numel() for t in source.tensors.values())
    record.add(
        f"{total} elements", "fingerprint", fingerprint_ms(source, device), "ms", limit=bytes_ms(total * 2)
    )
    receiver, sender = ws.ModuleReceiver(live), ws.Sender("bench", lineage=1, exact_base=True)
    receiver.apply(fill_dense(sender, source.tensors))
    dense_ms = copy_ms(total, device)
    record.add(f"{total} elements", "dense copy on the device", dense_ms, "ms", limit=bytes_ms(total * 4))
    for density in DENSITIES:
        changes = change(source.tensors, density, round(1e6 * density), device)
        one_density(
            record, f"{density:.1%} uniform", changes, source, receiver, sender, table, device, dense_ms
        )


def one_density(record, case, changes, source, receiver, sender, table, device, dense_ms):
    count = sum(len(index) for index, _, _ in changes.values())
    bound = entropy(changes) / 8
    fingerprint = ws.fingerprint(source.tensors)
    for encoding in codec.ENCODINGS:
        sender.encodings = (encoding,)
        made = encode(sender, changes, table, fingerprint)
        size = made.nbytes / count
        limit = bound if encoding == "entropy" else None
        record.add(case, f"{encoding} bytes per change", size, "B", reference=6.0, limit=limit)
        if encoding == "entropy":
            record.add(case, "entropy over empirical entropy", size / bound, "x", reference=1.10)
        times(record, case, encoding, made, changes, receiver, sender, table, device, dense_ms, fingerprint)
    withdraw(sender)
    values = encode(sender, changes, table, fingerprint, with_old=False).nbytes / count
    record.add(case, "entropy bytes per change without old values", values, "B", reference=6.0)
    record.add(case, "zstd of XOR, bytes per change", xor_bytes(changes, source.tensors), "B", reference=6.0)
    # the last payload is applied: the receiver follows
    sender.acknowledge("r", receiver.apply(made))
    for name, tensor in source.tensors.items():
        if not torch.equal(bits_of(tensor), bits_of(receiver.targets[name].pieces[0][0]).view(tensor.shape)):
            raise AssertionError(f"{case}: {name} is not the sender's")


def withdraw(sender):
    """Let the sender publish its last version once more."""
    sender._published.pop(sender.version)
    sender.version -= 1


def times(record, case, encoding, made, changes, receiver, sender, table, device, dense_ms, fingerprint):
    ms = milliseconds(lambda: encode(sender, changes, table, fingerprint), device, lambda: withdraw(sender))
    record.add(case, f"{encoding} encode", ms, "ms", reference=dense_ms, limit=50.0)
    manifest = payload.read_manifest(made.manifest)
    ms = milliseconds(lambda: receiver._verify(made, manifest), device)
    record.add(case, f"{encoding} decode and verify", ms, "ms", reference=dense_ms, limit=50.0)
    records, done = receiver._verify(made, manifest), []

    def undo():
        for write in reversed(done):
            write.put_back()
        done.clear()

    # Finding the live elements, keeping the old values and writing the new ones.
    ms = milliseconds(lambda: receiver._write(receiver._stage_all(records), done, manifest), device, undo)
    undo()
    record.add(case, f"{encoding} apply", ms, "ms", reference=dense_ms, limit=50.0)
    count = sum(len(index) for index, _, _ in changes.values())
    record.add(case, f"{encoding} apply rate", count / ms / 1e3, "M changes/s", reference=50.0)


def copy_ms(total, device):
    """Milliseconds of copying the whole model once on the device: less than any dense transfer takes."""
    part = min(total, 1 << 30)
    old, new = (torch.zeros(part, dtype=torch.bfloat16, device=device) for _ in range(2))
    return milliseconds(lambda: new.copy_(old), device) * total / part


def fingerprint_ms(source, device):
    return milliseconds(lambda: ws.fingerprint(source.tensors), device)


def bytes_ms(nbytes):
    """Milliseconds at 4.8 TB/s, the memory bandwidth of an H200; None on a CPU."""
    return 1e3 * nbytes / 4.8e12 if torch.cuda.is_available() else None


def layout(record, table, device):
    """Find where an engine that fuses QKV, gate and up, and experts, keeps all tensors, as at its first dense
    sync: once, from a cold start; beside it, what loading all tensors once takes."""
    fused = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
    rows, place = {}, {}
    for name, (first, *rest) in table.items():
        parts = re.sub(r"experts\.\d+\.", "experts.", name).split(".")
        where = ".".join(fused.get(part, part) for part in parts)
        begin, _ = rows.get(where, (0, rest))
        place[name] = where, begin, begin + first
        rows[where] = begin + first, rest
    live = {
        n: torch.zeros(first, *rest, dtype=torch.bfloat16, device=device) for n, (first, rest) in rows.items()
    }

    def load(pairs):
        for name, tensor in pairs:
            where, begin, end = place[name]
            live[where][begin:end].copy_(tensor)

    def ones():
        return (
            (name, torch.ones(shape, dtype=torch.bfloat16, device=device)) for name, shape in table.items()
        )

    begin = clock(device)
    load(ones())
    loading = clock(device) - begin
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    dtypes = {name: (shape, torch.bfloat16) for name, shape in table.items()}
    begin = clock(device)
    found = discover(dtypes, live, load)
    finding = clock(device) - begin
    assert all(len(target.pieces) == 1 for target in found.values())
    elements = sum(map(math.prod, table.values()))
    case = f"an engine's layout, {elements / 1e9:.3g}e9 elements in {len(table)} tensors"
    record.add(case, "find it", finding, "s", reference=loading)
    if device == "cuda":
        largest = 2 * max(map(math.prod, table.values())) / 2**30
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30
        record.add(case, "device memory for it", peak, "GiB", reference=largest)


def training(record, device, count=50):
    """What a policy of a million parameters changes per step of the quickstart at learning rate 1e-6: patched
    Megatron, the distributed optimizer with its sparse diff, and the transformers model that samples its
    answers as the receiver."""
    try:
        import transformers  # noqa: F401
    except ImportError:
        print("transformers is not installed: no figures from training")
        return
    policy, engine, publisher, experience = loop(device)
    publisher.sync()
    table = {n: tuple(t.shape) for n, t in engine.state_dict().items()}
    case = f"{count} steps of the quickstart at 1e-6, {sum(map(math.prod, table.values()))} parameters"
    ways = {name: ((name,), True) for name in codec.ENCODINGS}
    ways["entropy without old values"] = ("entropy",), False
    senders = {}
    for name, (encodings, _) in ways.items():
        senders[name] = ws.Sender("training", lineage=1, exact_base=True, encodings=encodings)
        fill_dense(senders[name], engine.state_dict())
    densities, sent, ratio, sizes = [], [], [], {name: [] for name in ways}
    for _ in range(count):
        old = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
        policy.step(experience())
        report = publisher.sync()
        densities.append(report.density)
        sent.append((report.delta_bytes + report.dense_bytes) / max(1, report.changed))
        changes = {}
        for name, tensor in engine.state_dict().items():
            index = (bits_of(tensor) != bits_of(old[name])).view(-1).nonzero().view(-1)
            if len(index):
                changes[name] = (index, tensor.view(-1)[index], old[name].view(-1)[index])
        changed = sum(len(index) for index, _, _ in changes.values())
        if changed != report.changed:
            raise AssertionError(f"{changed} elements differ, the sparse diff says {report.changed}")
        for name, (_, with_old) in ways.items():
            made = encode(senders[name], changes, table, ws.fingerprint(engine.state_dict()), with_old)
            acknowledge(senders[name], made)
            parts = [container.read(bucket).entries.values() for bucket in made.buckets]
            sizes[name].append(sum(part.numel() * part.element_size() for p in parts for part in p) / changed)
            if name == "entropy":
                ratio.append(sizes[name][-1] / (entropy(changes) / 8))
    record.add(case, "changed per step", float(np.mean(densities)), "of all elements")
    mean = float(np.mean(sent))
    record.add(case, "raw and packed, whole payload, bytes per change", mean, "B", reference=6.0)
    for name, found in sizes.items():
        mean = float(np.mean(found))
        record.add(case, f"{name}, headers excluded, bytes per change", mean, "B", reference=6.0)
    record.add(case, "entropy over empirical entropy", float(np.mean(ratio)), "x", reference=1.10)


def loop(device):
    """The quickstart's parts in this process: (policy, rollout model, publisher, a step's micro-batches)."""
    if device == "cpu":
        import megatron.cpu_runtime

        megatron.cpu_runtime.install()
    import torch.distributed as dist

    from examples.quickstart import policy, rollout, task
    from megatron.core import parallel_state
    from megatron.core.optimizer.sparse_diff import attach
    from megatron.core.param_export import build_plan
    from megatron.core.param_export.publisher import Publisher
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.tree_training import plan_micro_batches

    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    rng = random.Random(1)
    shape = policy.Shape(layers=4, hidden=160, heads=6, kv_heads=2, head_dim=32, ffn=384)  # a million
    sizes = task.VOCABULARY, task.PROMPT + task.RESPONSE
    trainer = policy.Policy(shape, *sizes, 1e-6, torch.device(device))
    engine = rollout.model(shape, *sizes, device)
    plan = build_plan(trainer.ddp, engine.config).prove()
    transport = ws.LocalTransport({"rollout": ws.ModuleReceiver(engine)})
    publisher = Publisher(plan, attach(trainer.optimizer), transport)
    publisher.register("rollout")

    def experience():
        problems = [task.problem(rng) for _ in range(16)]
        trajectories, _, _ = rollout.collect(engine, problems, 8, 0.01)
        return list(plan_micro_batches(trajectories, 1024, pad_to_multiple_of=8).micro_batches(0, device))

    return trainer, engine, publisher, experience


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, help="default: 13 on a GPU, 1 on a CPU")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (1: figures per core)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        table = shapes(args.layers or 13, 4096, 12288, 32, 8, 128, 151936)
        mixture = shapes(48, 2048, 768, 32, 4, 128, 151936, experts=128)  # Qwen3-30B-A3B
    else:
        table = shapes(args.layers or 1, 1024, 3072, 16, 8, 128, 20000)
        mixture = shapes(2, 64, 32, 4, 2, 16, 2000, experts=128)
    record = Recording("weight_sync")
    with torch.no_grad():
        uniform(record, table, device)
        layout(record, table, device)
        layout(record, mixture, device)
    training(record, device)
    record.write()


if __name__ == "__main__":
    main()
