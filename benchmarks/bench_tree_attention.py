"""Tree attention on one GPU: every shape of shapes.py, forward and backward, beside plain causal attention.

    python benchmarks/bench_tree_attention.py                    # 32/8 heads of 128, bfloat16
    python benchmarks/bench_tree_attention.py --head-dim 192 --v-dim 128 --heads 16 --kv-heads 16

TF/s count the exact pairs of the tree: 2·H·pairs·(D + Dv) operations forward, 2.5 times that backward. Beside
every tree, in the same run: plain causal attention of as many pairs (flash-attn-4 and cuDNN), FlexAttention,
and the linear layout, in which every path is a sequence of its own. The limit of the speed-up over linear is
its ratio of pairs.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
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


def time_both(function, tensors, upstream):
    """Milliseconds of ``function()`` and of its backward."""
    with torch.no_grad():
        forward = recording.milliseconds(function, 15)
    out = function()
    backward = recording.milliseconds(
        lambda: torch.autograd.grad(out, tensors, upstream, retain_graph=True), 15
    )
    return forward, backward


def causal_by(name, tokens, options):
    """Plain causal attention over one sequence of ``tokens``."""
    (q, k, v), upstream = inputs(tokens, options)
    if name == "FA4 causal":
        from flash_attn.cute import flash_attn_func

        return time_both(
            lambda: flash_attn_func(q[None], k[None], v[None], causal=True)[0][0], (q, k, v), upstream
        )
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def cudnn():
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return torch.nn.functional.scaled_dot_product_attention(
                *(t.transpose(0, 1)[None] for t in (q, k, v)), is_causal=True, enable_gqa=True
            )[0].transpose(0, 1)

    return time_both(cudnn, (q, k, v), upstream)


def linear(nodes, options):
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

    return time_both(run, (q, k, v), upstream)


def fresh(nodes):
    parents, lengths = zip(*nodes, strict=True)
    return TreeMetadata.from_nodes(parents, lengths, padded_to=128, device="cuda")


def metadata_ms(nodes, head):
    """Device milliseconds of what a micro-batch derives once for all its layers."""
    times = []
    for _ in range(8):
        metadata = fresh(nodes)
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(20_000_000)  # as in recording.milliseconds
        begin.record()
        flash._lists(metadata, head, None, False)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[2:])


def one_shape(rows, case, nodes, options, have_flash):
    stats = shapes.stats(nodes)
    pairs = stats["pairs"]
    flops = 2 * options.heads * pairs * (options.head_dim + options.v_dim)
    metadata = fresh(nodes)
    (q, k, v), upstream = inputs(metadata.padded_size, options)

    def tflops(ms, backward):
        return flops * (2.5 if backward else 1.0) / ms / 1e9

    some, every = visible_blocks(metadata, 128, 128)
    visited = float(some.sum()) * 128 * 128
    rows.add(case, "visited pairs / exact pairs, 128 x 128", visited / pairs, "x")
    rows.add(case, "partial share of visited blocks", float((some & ~every).sum() / some.sum()), "")

    side = math.isqrt(2 * pairs) // 128 * 128
    plain = {}
    for name in (["FA4 causal"] if have_flash else []) + ["cuDNN causal"]:
        try:
            times = causal_by(name, side, options)
        except RuntimeError as error:
            print(f"{case}: {name} cannot: {str(error).splitlines()[0]}")
            continue
        share = side * (side + 1) / 2 / pairs
        for i, direction in enumerate(("forward", "backward")):
            plain[name, i] = tflops(times[i] / share, i)
            rows.add(case, f"{name} at as many pairs, {direction}", plain[name, i], "TF/s")
    for backend in (["flash"] if have_flash else []) + ([] if options.no_flex else ["flex"]):

        def run(backend=backend):
            return tree_attention(q, k, v, metadata, backend=backend)

        times = time_both(run, (q, k, v), upstream)
        for i, direction in enumerate(("forward", "backward")):
            reference = plain.get(("FA4 causal", i), plain.get(("cuDNN causal", i)))
            rows.add(case, f"{backend} {direction}", times[i], "ms")
            rows.add(case, f"{backend} {direction} on exact pairs", tflops(times[i], i), "TF/s", reference)
        if backend == "flash":
            spent = metadata_ms(nodes, max(options.head_dim, options.v_dim))
            rows.add(case, "block lists of a micro-batch", spent, "ms", sum(times), 0.01)
            both = linear(nodes, options)
            for i, direction in enumerate(("forward", "backward")):
                rows.add(case, f"linear layout, FA4 varlen, {direction}", both[i], "ms")
            rows.add(case, "speed-up over linear", sum(both) / sum(times), "x", None, stats["pair ratio"])


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
    options = parser.parse_args()
    options.v_dim = options.v_dim or options.head_dim
    if not torch.cuda.is_available():
        sys.exit("bench_tree_attention measures a GPU, and there is none here")
    torch._dynamo.config.recompile_limit = 64
    torch._functorch.config.donated_buffer = False  # a backward is timed several times on one forward
    why = flash._package()
    if why:
        print(f"without flash: {why}")
    suffix = "" if (options.head_dim, options.v_dim) == (128, 128) else f"_{options.head_dim}_{options.v_dim}"
    rows = recording.Recording(f"tree_attention{suffix}")
    for case, nodes in shapes.SHAPES.items():
        if not options.only or case in options.only:
            one_shape(rows, case, nodes, options, why is None)
            torch.cuda.empty_cache()
    rows.write()


if __name__ == "__main__":
    main()
