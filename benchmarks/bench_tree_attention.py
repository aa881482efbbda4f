"""Tree attention on one GPU: every shape of shapes.py, forward and backward, beside plain causal attention.

    python benchmarks/bench_tree_attention.py                    # 32/8 heads of 128, bfloat16
    python benchmarks/bench_tree_attention.py --head-dim 192 --v-dim 128 --heads 16 --kv-heads 16
    python benchmarks/bench_tree_attention.py --tune             # ways to run flash, against each other

TF/s count the exact pairs of the tree: 2·H·pairs·(D + Dv) operations forward, 2.5 times that backward. Beside
every tree, in the same run: plain causal attention of as many pairs in one sequence (flash-attn-4 and cuDNN),
and in sequences as long as the tree's paths, where a row of blocks is as short as the tree's (flash-attn-4);
FlexAttention; and the linear layout, in which every path is a sequence of its own. All of them take turns.
The limit of the speed-up over linear is its ratio of pairs.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch._functorch.config

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "build/tree"), str(ROOT)]

from benchmarks import recording, shapes  # noqa: E402
from megatron.core.transformer.tree_attention import flash, tree_attention  # noqa: E402
from megatron.core.transformer.tree_attention.intervals import visible_blocks  # noqa: E402
from megatron.core.transformer.tree_metadata import TreeMetadata  # noqa: E402


def inputs(tokens, options):
    gen = torch.Generator("cuda").manual_seed(tokens)
    sizes = (
        (options.heads, options.head_dim),
        (options.kv_heads, options.head_dim),
        (options.kv_heads, options.v_dim),
    )
    made = [
        torch.randn(tokens, *size, generator=gen, device="cuda").bfloat16().requires_grad_() for size in sizes
    ]
    upstream = torch.randn(tokens, options.heads, options.v_dim, generator=gen, device="cuda").bfloat16()
    return made, upstream


@dataclasses.dataclass
class Contestant:
    """Something to time: one call, what it is differentiated by, and how many times the tree's pairs it
    computes."""

    run: Callable[[], torch.Tensor]
    tensors: list[torch.Tensor]
    upstream: torch.Tensor
    share: float


def fa4_causal(tokens, options, pairs, sequences=1):
    """Plain causal attention over sequences of ``tokens``."""
    from flash_attn.cute import flash_attn_func

    (q, k, v), upstream = inputs(tokens * sequences, options)

    def run():
        batch = [t.unflatten(0, (sequences, tokens)) for t in (q, k, v)]
        return flash_attn_func(*batch, causal=True)[0].flatten(0, 1)

    return Contestant(run, [q, k, v], upstream, sequences * tokens * (tokens + 1) / 2 / pairs)


def cudnn_causal(tokens, options, pairs):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    (q, k, v), upstream = inputs(tokens, options)

    def run():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                *(t.transpose(0, 1)[None] for t in (q, k, v)), is_causal=True, enable_gqa=True
            )[0].transpose(0, 1)

    return Contestant(run, [q, k, v], upstream, tokens * (tokens + 1) / 2 / pairs)


def linear(nodes, options, pairs):
    """Every path from a root to a leaf as a sequence of its own, packed THD, by flash-attn-4."""
    from flash_attn.cute import flash_attn_varlen_func

    lengths = [len(path) for path in shapes.token_paths(nodes)]
    total, longest = sum(lengths), max(lengths)
    (q, k, v), upstream = inputs(total, options)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device="cuda")

    def run():
        return flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest, causal=True
        )[0]

    return Contestant(run, [q, k, v], upstream, sum(n * (n + 1) / 2 for n in lengths) / pairs)


def fresh(nodes):
    parents, lengths = zip(*nodes, strict=True)
    return TreeMetadata.from_nodes(parents, lengths, padded_to=128, device="cuda")


def metadata_ms(nodes, head):
    """Milliseconds, on the device and of the host, of what a micro-batch derives once for all its layers."""
    device, host = [], []
    for _ in range(8):
        metadata = fresh(nodes)
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(20_000_000)  # as in recording.milliseconds
        start = time.perf_counter()
        begin.record()
        flash._lists(metadata, flash.block_sizes(head), None)
        flash.mask_tensors(metadata, None)
        end.record()
        host.append(1e3 * (time.perf_counter() - start))
        torch.cuda.synchronize()
        device.append(begin.elapsed_time(end))
    return statistics.median(device[2:]), statistics.median(host[2:])


class Tree:
    """What is measured of one tree."""

    def __init__(self, case, nodes, options):
        self.case, self.nodes, self.options = case, nodes, options
        self.stats = shapes.stats(nodes)
        self.pairs = self.stats["pairs"]
        self.metadata = fresh(nodes)
        self.tensors, self.upstream = inputs(self.metadata.padded_size, options)

    def tflops(self, ms, backward):
        """On the tree's exact pairs."""
        flops = 2 * self.options.heads * self.pairs * (self.options.head_dim + self.options.v_dim)
        return flops * (2.5 if backward else 1.0) / ms / 1e9

    def blocks(self, rows):
        some, every = visible_blocks(self.metadata, 128, 128)
        visited = float(some.sum()) * 128 * 128
        rows.add(self.case, "visited pairs / exact pairs, 128 x 128", visited / self.pairs, "x")
        partial = float((some & ~every).sum() / some.sum())
        rows.add(self.case, "partial share of visited blocks", partial, "")

    def backend(self, name, **changes):
        q, k, v = self.tensors
        metadata = dataclasses.replace(self.metadata, **changes)
        return Contestant(
            lambda: tree_attention(q, k, v, metadata, backend=name), self.tensors, self.upstream, 1.0
        )

    def contestants(self, have_flash):
        """{name: Contestant}, plain causal attention first."""
        side = math.isqrt(2 * self.pairs) // 128 * 128
        path = max(round(2 * self.pairs / self.metadata.padded_size / 128), 1) * 128
        sequences = round(2 * self.pairs / path**2)
        found = {}
        if have_flash:
            found[FA4] = fa4_causal(side, self.options, self.pairs)
            if sequences > 1:
                name = f"FA4 causal, {sequences} x {path}"
                found[name] = fa4_causal(path, self.options, self.pairs, sequences)
        found["cuDNN causal"] = cudnn_causal(side, self.options, self.pairs)
        if have_flash:
            found[LINEAR] = linear(self.nodes, self.options, self.pairs)
            found["flash"] = self.backend("flash")
            if self.metadata.roots_only:
                found["flash as a tree"] = self.backend("flash", roots_only=False)
        if not self.options.no_flex:
            found["flex"] = self.backend("flex")
        return found

    def measure(self, rows, have_flash):
        self.blocks(rows)
        contestants = self.contestants(have_flash)
        total = dict.fromkeys(contestants, 0.0)
        for backward, direction in enumerate(("forward", "backward")):
            times = in_turns(contestants, backward, self.case)
            speed = {name: self.tflops(ms / contestants[name].share, backward) for name, ms in times.items()}
            for name, ms in times.items():
                total[name] += ms
                if name in OURS or name == LINEAR:
                    rows.add(self.case, f"{name} {direction}", ms, "ms")
                if name in OURS:
                    plain = speed.get(FA4, speed.get("cuDNN causal"))
                    rows.add(self.case, f"{name} {direction} on exact pairs", speed[name], "TF/s", plain)
                else:
                    rows.add(self.case, f"{name} {direction}", speed[name], "TF/s")
        if have_flash:
            device, host = metadata_ms(self.nodes, max(self.options.head_dim, self.options.v_dim))
            lists = "block lists of a micro-batch"
            rows.add(self.case, f"{lists}, device", device, "ms", total["flash"], None, 0.01)
            rows.add(self.case, f"{lists}, host", host, "ms")
            speedup = total[LINEAR] / total["flash"]
            rows.add(self.case, "speed-up over linear", speedup, "x", None, None, self.stats["pair ratio"])


FA4, LINEAR = "FA4 causal", "linear layout, FA4 varlen"
OURS = ("flash", "flash as a tree", "flex")


def in_turns(contestants, backward, case):
    """{name: milliseconds}; one that cannot run is dropped from the contest, with a message."""
    runs = {}
    for name, this in list(contestants.items()):

        def run(this=this):
            with torch.no_grad():
                this.run()

        try:
            if backward:
                out = this.run()

                def run(this=this, out=out):
                    torch.autograd.grad(out, this.tensors, this.upstream, retain_graph=True)

            run()
        except RuntimeError as error:
            if name in OURS:
                raise
            print(f"{case}: {name} cannot: {str(error).splitlines()[0]}")
            del contestants[name]
            continue
        runs[name] = run
    return recording.in_turns(runs)


def tune(rows, trees):
    from benchmarks import tree_attention_candidates as candidates

    found = {}
    for tree in trees:
        found[tree.case] = candidates.compare(
            rows, tree.case, tree.metadata, tree.tensors, tree.upstream, tree.tflops
        )
        torch.cuda.empty_cache()
    print(candidates.table(found))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--v-dim", type=int, default=None)
    parser.add_argument("--no-flex", action="store_true", help="leave FlexAttention out; it compiles long")
    parser.add_argument("--only", nargs="*", help="names of shapes")
    parser.add_argument("--tune", action="store_true", help="time candidates of tree_attention_candidates.py")
    options = parser.parse_args()
    options.v_dim = options.v_dim or options.head_dim
    if not torch.cuda.is_available():
        sys.exit("bench_tree_attention measures a GPU, and there is none here")
    torch._functorch.config.donated_buffer = False  # a backward is timed several times on one forward
    why = flash.package_problem()
    if why:
        print(f"without flash: {why}")
    if options.tune and (why or (options.head_dim, options.v_dim) != (128, 128)):
        sys.exit(f"--tune needs flash-attn-4 and head size 128: {why or options.head_dim}")
    suffix = "" if (options.head_dim, options.v_dim) == (128, 128) else f"_{options.head_dim}_{options.v_dim}"
    rows = recording.Recording(f"tree_attention{suffix}{'_tune' if options.tune else ''}")
    cases = {**shapes.SHAPES, "agentic 32k, largest child first": shapes.largest_first(shapes.agentic())}
    trees = (
        Tree(case, nodes, options)
        for case, nodes in cases.items()
        if not options.only or case in options.only
    )
    if options.tune:
        tune(rows, trees)
    else:
        for tree in trees:
            tree.measure(rows, why is None)
            torch.cuda.empty_cache()
    rows.write()


if __name__ == "__main__":
    main()
