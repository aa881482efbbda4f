"""Trees from trajectories, micro-batches under a budget, log-probabilities of packed logits.

    python benchmarks/bench_tree_batch.py                 # everything that the machine has
    python benchmarks/bench_tree_batch.py --part build    # no GPU needed
    python benchmarks/bench_tree_batch.py --sweep         # block sizes of the kernels; records nothing

The limit of log_probs is bytes: logits read once forward, read and gradient written once backward, at the
bandwidth of a copy of the same size in the same run.
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch

if __package__ in (None, ""):
    import sys

    sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import shapes
from benchmarks.recording import Recording, milliseconds
from megatron.core.tree_training import (
    Trajectory,
    TreeBatch,
    kernels,
    log_probs,
    log_probs_and_entropy,
    partition,
    plan_micro_batches,
    trie,
)

V = 151936


def seconds(run):
    begin = time.perf_counter()
    result = run()
    return time.perf_counter() - begin, result


def build(recording):
    """1,000 trajectories of 32k tokens on one core, and the plans of the six shapes."""
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    sequences = []
    for _ in range(125):
        prompt = rng.integers(0, V, 4096)
        sequences += [np.concatenate([prompt, rng.integers(0, V, 32768 - 4096)]) for _ in range(8)]
    case = "1000 x 32k, prompt 4k shared by 8"
    took, order = seconds(lambda: trie.PrefixOrder.of(sequences))
    recording.add(case, "sort and prefixes", took, "s", limit=5.0)
    trajectories = [Trajectory(s, np.r_[0, np.ones(s.size - 1, np.int8)]) for s in sequences]
    took, plan = seconds(lambda: plan_micro_batches(trajectories, 65536, data_parallel_size=8))
    recording.add(case, "checks and plan, budget 64k, 8 ranks", took, "s")
    packed, bound = plan.tokens.packed, plan.tokens.lower_bound
    recording.add(case, "packed tokens", packed, "tokens", "lower bound", packed / bound, bound)
    recording.add(case, "imbalance of ranks", plan.imbalance, "max / mean", limit=1.0)
    took, batches = seconds(lambda: sum(1 for rank in range(8) for _ in plan.micro_batches(rank)))
    recording.add(case, f"{batches} micro-batches built", took, "s")
    for name, nodes in shapes.SHAPES.items():
        paths = shapes.token_paths(nodes)
        order = trie.PrefixOrder.of(paths)
        for room in (1.0, 1.3, 2.0):
            budget = int(room * max(map(len, paths)))
            sets = partition.fewest_tokens(order, budget)
            packed = sum(order.subset(s).packed_tokens for s in sets)
            bound = partition.lower_bound(order, budget)
            recording.add(
                f"{name}, budget {budget}",
                "packed tokens",
                packed,
                "tokens",
                "lower bound",
                packed / bound,
                bound,
            )


def agentic_batch():
    """T = 32,768: the agentic shape, 119 nodes."""
    paths = shapes.token_paths(shapes.SHAPES["agentic 32k"], V)
    return TreeBatch.from_trajectories(
        [Trajectory(p, np.r_[0, np.ones(p.size - 1, int)]) for p in paths], device="cuda"
    )


def peak_of(run):
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - held) / 2**30


def measure(recording, case, forward, logits, limits, reference=None):
    """Forward and backward times of `forward(logits) → [T]`, and the peak beside the logits."""
    weight = torch.randn(logits.shape[0], device="cuda")
    weight = weight[: forward(logits).numel()]

    held = {}

    def prepare():  # a forward for each: a backward may work in place
        held.clear()
        held["out"] = forward(logits)

    ahead = milliseconds(lambda: forward(logits))
    back = milliseconds(lambda: torch.autograd.grad(held["out"], logits, weight), prepare=prepare)
    held.clear()
    peak = peak_of(lambda: torch.autograd.grad(forward(logits), logits, weight))
    ahead_limit, back_limit = limits
    for metric, value, limit in (("forward", ahead, ahead_limit), ("backward", back, back_limit)):
        recording.add(case, metric, value, "ms", "byte limit", limit / value, limit)
    gradient = logits.numel() * logits.element_size() / 2**30
    recording.add(case, "peak beside logits", peak, "GiB", "gradient", peak / gradient, gradient)


def copy_time(logits):
    twin = torch.empty_like(logits)
    return milliseconds(lambda: twin.copy_(logits))


def device(recording):
    """V = 151,936, T = 32,768, one rank."""
    batch = agentic_batch()
    T = batch.padded_size
    generator = torch.Generator("cuda").manual_seed(0)
    logits = torch.empty(T, V, device="cuda", dtype=torch.bfloat16)
    for rows in logits.split(1024):
        rows.copy_(2 * torch.randn(rows.shape, device="cuda", generator=generator))
    copy = copy_time(logits)
    recording.add("copy of bf16 logits", "bandwidth", 4 * logits.numel() / copy / 1e9, "TB/s")
    logits.requires_grad_()
    once, twice = copy / 2, copy
    measure(recording, "log_probs, bf16", lambda x: log_probs(x, batch), logits, (once, twice))
    both = lambda x: sum(log_probs_and_entropy(x, batch))  # noqa: E731
    measure(recording, "log_probs and entropy, bf16", both, logits, (once, twice))
    upcast = lambda x: log_probs(x.float(), batch)  # noqa: E731
    measure(recording, "log_probs after an upcast to fp32", upcast, logits, (once, twice))
    rows, token = batch.source_T[batch.target_M], batch.tokens[0][batch.target_M]

    def plain(x):
        return x.float().log_softmax(-1)[rows, token]

    measure(recording, "torch log_softmax and gather", plain, logits, (once, twice))
    import torch.distributed as dist

    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    next_token = torch.zeros(T, dtype=torch.int64, device="cuda")
    next_token[rows] = token  # it has one target for each row only

    def upstream(x):
        return vocab_parallel_cross_entropy(x[:, None], next_token[:, None])[:, 0]

    measure(recording, "Megatron-Core vocab_parallel_cross_entropy", upstream, logits, (once, twice))


def sweep():
    batch = agentic_batch()
    logits = torch.randn(batch.padded_size, V, device="cuda", dtype=torch.bfloat16).requires_grad_()
    for block in (2048, 4096, 8192, 16384, 32768):
        for warps in (4, 8, 16, 32):
            kernels.STATISTICS_BLOCK = kernels.GRADIENT_BLOCK = block
            kernels.STATISTICS_WARPS = kernels.GRADIENT_WARPS = warps
            line = f"block {block:6d} warps {warps:2d}"
            for name, function in (
                ("log_probs", log_probs),
                ("both", lambda x, b: sum(log_probs_and_entropy(x, b))),
            ):
                out = function(logits, batch)
                weight = torch.randn_like(out)
                ahead = milliseconds(lambda: function(logits, batch), 5)  # noqa: B023
                back = milliseconds(lambda: torch.autograd.grad(out, logits, weight, retain_graph=True), 5)  # noqa: B023
                line += f"  {name}: forward {ahead:.3f} backward {back:.3f} ms"
            print(line, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=["build", "device"], help="only this; default: all that can run")
    parser.add_argument("--sweep", action="store_true")
    options = parser.parse_args()
    if options.sweep:
        sweep()
    else:
        recording = Recording("tree_batch")
        if options.part in (None, "build"):
            build(recording)
        if options.part == "device" or (options.part is None and torch.cuda.is_available()):
            device(recording)
        recording.write()
