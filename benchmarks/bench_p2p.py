"""Step time of a two-stage pipeline on two GPUs, the patched tree against upstream's, in turn.

    python benchmarks/bench_p2p.py                              # build/tree against the pinned sdist
    python benchmarks/bench_p2p.py --patched TREE --upstream TREE --rounds 3

Messages are 64 MiB. Every round starts two ranks on each tree, in alternating order; a figure is the median
over rounds of the median over steps of the slower rank. `spread` is (largest − smallest) / median of upstream
alone: what a difference must exceed to mean anything. The losses of both trees must be equal to the last bit.
The limit of an exchange is 450 GB/s in each direction (NVLink of H100 and H200). Needs torch and triton.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "build/tree"), str(ROOT)]

from benchmarks.recording import Recording, device_name  # noqa: E402
from patchset import upstream  # noqa: E402


def run(tree, only):
    """The figures of one start of two ranks on a tree."""
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(ROOT / "benchmarks/pipeline_worker.py"), "time", *only]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("FIGURES ")]
    if done.returncode or not lines:
        raise RuntimeError(f"{tree}: {' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    figures = json.loads(lines[0].removeprefix("FIGURES "))
    if not figures["from"].startswith(f"{tree}/"):
        raise RuntimeError(f"measured {figures['from']}, not {tree}")
    return figures["cases"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--patched", type=Path, default=ROOT / "build/tree")
    parser.add_argument("--upstream", type=Path, help="an unpacked sdist; else the pinned one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[], help="names of layouts, for instance 'PP2 x VPP2'")
    options = parser.parse_args()
    if torch.cuda.is_available() and torch.cuda.device_count() < 2:
        print(f"needs two GPUs, here is one {device_name()}: nothing measured")
        return
    with tempfile.TemporaryDirectory() as folder:
        if not options.upstream:
            options.upstream = Path(folder)
            upstream.unpack(upstream.sdist(ROOT, upstream.Pin.read(ROOT)), options.upstream)
        trees = {"patched": options.patched.resolve(), "upstream": options.upstream.resolve()}
        rounds = {name: [] for name in trees}
        for i in range(options.rounds):
            for name in sorted(trees, reverse=bool(i % 2)):
                rounds[name].append(run(trees[name], options.only))
                print(f"round {i + 1}, {name}: {json.dumps(rounds[name][-1])}", flush=True)

    recording = Recording("p2p")
    for case, figures in rounds["patched"][0].items():
        metric = "exchange" if "exchange" in figures else "step"
        ours = statistics.median(r[case][metric] for r in rounds["patched"])
        # The same schedule there; upstream has no way to withhold the second communicator.
        theirs = [r[case.removesuffix(", one communicator")][metric] for r in rounds["upstream"]]
        reference = statistics.median(theirs)
        limit = int(case.split()[1]) * 2**20 / 450e9 * 1e3 if metric == "exchange" else None
        recording.add(case, metric, ours, "ms", reference, ours / reference, limit)
        recording.add(case, "spread", (max(theirs) - min(theirs)) / reference, "of upstream's median")
        if metric == "step":
            counts = {name: {r[case]["calls on WORLD"] for r in rounds[name] if case in r} for name in trees}
            [count] = counts["patched"]
            if count:
                raise AssertionError(f"{case}: {count} point-to-point calls on WORLD")
            reference = max(counts["upstream"], default=None)
            recording.add(case, "calls on WORLD per step", count, "calls", reference)
            losses = {r[case]["loss"] for name in trees for r in rounds[name] if case in r}
            if len(losses) != 1:
                raise AssertionError(f"{case}: the trees disagree about the loss: {losses}")
    if torch.cuda.is_available():
        recording.write()
    else:
        print("not recorded: these are figures of a CPU")


if __name__ == "__main__":
    main()
