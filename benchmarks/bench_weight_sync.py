"""Weight sync: bytes per changed element, and what encoding, decoding, applying and fingerprinting cost.

    python benchmarks/bench_weight_sync.py                 # the GPU if there is one, else a small case on the
    CPU

Sizes are those of half of Qwen3-8B's layers with its vocabulary, 3.75e9 bf16 elements (7.5 GB). Changes are
uniform draws, stepped by one unit in the last place in nine of ten cases as bf16 training at small learning
rates does; and, with `transformers` at hand, what 50 AdamW steps of a small Qwen3 at learning rate 1e-6
really change. Every payload is applied, and the receiver compared with the sender bit for bit, before
anything is timed.
"""

import argparse
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
from megatron.weight_sync.fingerprints import bits_of  # noqa: E402

DENSITIES = (0.1, 0.01, 0.001)


def shapes(layers, hidden, inner, heads, kv, head, vocabulary):
    out = {"model.embed_tokens.weight": (vocabulary, hidden), "lm_head.weight": (vocabulary, hidden)}
    for i in range(layers):
        p = f"model.layers.{i}."
        out |= {
            p + "self_attn.q_proj.weight": (heads * head, hidden),
            p + "self_attn.k_proj.weight": (kv * head, hidden),
            p + "self_attn.v_proj.weight": (kv * head, hidden),
            p + "self_attn.o_proj.weight": (hidden, heads * head),
            p + "mlp.gate_proj.weight": (inner, hidden),
            p + "mlp.up_proj.weight": (inner, hidden),
            p + "mlp.down_proj.weight": (hidden, inner),
            p + "input_layernorm.weight": (hidden,),
            p + "post_attention_layernorm.weight": (hidden,),
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


def encode(sender, changes, table, fingerprint):
    update = sender.begin(dense=False)
    for name, (index, value, old) in changes.items():
        update.add_delta(name, index, value, table[name], old=old)
    return update.finish(fingerprint)


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
    sender.register("r")
    update = sender.begin()
    for name, tensor in source.tensors.items():
        update.add_dense(name, tensor)
    dense = update.finish(ws.fingerprint(source.tensors))
    sender.acknowledge("r", receiver.apply(dense))
    del dense
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
    record.add(case, "zstd of XOR, bytes per change", xor_bytes(changes, source.tensors), "B", reference=6.0)
    # the last payload is applied: the receiver follows
    sender.acknowledge("r", receiver.apply(made))
    for name, tensor in source.tensors.items():
        if not torch.equal(bits_of(tensor), bits_of(receiver.targets[name].pieces[0][0]).view(tensor.shape)):
            raise AssertionError(f"{case}: {name} is not the sender's")


def times(record, case, encoding, made, changes, receiver, sender, table, device, dense_ms, fingerprint):
    def again():
        sender.version -= 1
        del sender._published[sender.version + 1]

    ms = milliseconds(lambda: encode(sender, changes, table, fingerprint), device, again)
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


def training(record, device, count=50):
    """What AdamW at learning rate 1e-6 changes in the bf16 weights of a small Qwen3, per step."""
    try:
        from transformers import Qwen3Config, Qwen3ForCausalLM
    except ImportError:
        print("transformers is not installed: no figures from training")
        return
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=512, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, tie_word_embeddings=True,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(device)
    weights = {n: p.detach().bfloat16() for n, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, betas=(0.9, 0.95))
    sender, receiver = ws.Sender("training", lineage=1, exact_base=True), Weights({}, device, 1)
    receiver.tensors = {n: torch.zeros_like(t) for n, t in weights.items()}
    receiver = ws.ModuleReceiver(receiver)
    sender.register("r")
    update = sender.begin()
    for name, tensor in weights.items():
        update.add_dense(name, tensor)
    sender.acknowledge("r", receiver.apply(update.finish(ws.fingerprint(weights))))
    table = {n: tuple(t.shape) for n, t in weights.items()}
    densities, sizes = [], {encoding: [] for encoding in codec.ENCODINGS}
    ratio = []
    for _ in range(count):
        tokens = torch.randint(0, 512, (8, 64), device=device)
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        new = {n: p.detach().bfloat16() for n, p in model.named_parameters()}
        changes = {}
        for name, tensor in new.items():
            index = (bits_of(tensor) != bits_of(weights[name])).view(-1).nonzero().view(-1)
            if len(index):
                changes[name] = (index, tensor.view(-1)[index], weights[name].view(-1)[index])
        weights, changed = new, sum(len(index) for index, _, _ in changes.values())
        densities.append(changed / sum(t.numel() for t in weights.values()))
        for encoding in codec.ENCODINGS:
            sender.encodings = (encoding,)
            made = encode(sender, changes, table, ws.fingerprint(weights))
            sizes[encoding].append(sum(b.numel() for b in made.buckets) / max(1, changed))
            if encoding != codec.ENCODINGS[-1]:
                sender.version -= 1
                del sender._published[sender.version + 1]
        data = sum(part.numel() for b in made.buckets for part in container.read(b).entries.values())
        ratio.append(data / changed / (entropy(changes) / 8))
        sender.acknowledge("r", receiver.apply(made))
    case = f"{count} AdamW steps at 1e-6, {sum(t.numel() for t in weights.values())} parameters"
    record.add(case, "changed per step", float(np.mean(densities)), "of all elements")
    for encoding in codec.ENCODINGS:
        record.add(case, f"{encoding} bytes per change", float(np.mean(sizes[encoding])), "B", reference=6.0)
    record.add(
        case, "entropy over empirical entropy, header excluded", float(np.mean(ratio)), "x", reference=1.10
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, help="default: 13 on a GPU, 1 on a CPU")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (1: figures per core)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        table = shapes(args.layers or 13, 4096, 12288, 32, 8, 128, 151936)
    else:
        table = shapes(args.layers or 1, 1024, 3072, 16, 8, 128, 20000)
    record = Recording("weight_sync")
    with torch.no_grad():
        uniform(record, table, device)
    training(record, device)
    record.write()


if __name__ == "__main__":
    main()
