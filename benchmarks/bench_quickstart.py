"""The quickstart as a measurement: its report as a result file, in every layout that the GPUs here allow.

python benchmarks/bench_quickstart.py --steps 100
python benchmarks/bench_quickstart.py --ranks 1 --seeds 1 2 3
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "build/tree"), str(ROOT)]

from benchmarks.recording import Recording  # noqa: E402

UNITS = {
    "steps": "",
    "reward_first": "",
    "reward_last": "",
    "solved_before": "of held-out problems",
    "solved_after": "of held-out problems",
    "tokens_linear": "tokens",
    "tokens_packed": "tokens",
    "tree_vs_linear_loss_abs_diff": "",
    "tree_vs_linear_grad_rel_diff": "relative",
    "max_logit_diff": "",
    "log_prob_drift": "",
    "syncs": "",
    "fingerprints_equal": "",
    "dense_bytes": "bytes",
    "delta_bytes": "bytes",
    "bytes_per_sync_training": "bytes",
    "bytes_per_sync_small_lr": "bytes",
    "density_training": "of elements",
    "density_small_lr": "of elements",
    "seconds": "s",
}


def run(ranks, tp, pp, options):
    """The report of what ``make quickstart`` runs; its table is printed."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "examples.quickstart", *options]
        command += [f"--ranks={ranks}", f"--tp={tp}", f"--pp={pp}", f"--out={out}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-6000:]}")
        print(done.stdout, flush=True)
        return json.loads(Path(out, "report.json").read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, help="training steps, unless the quickstart's own number")
    parser.add_argument("--ranks", type=int, default=2, help="layouts of more ranks are left out")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    options = parser.parse_args()
    recording = Recording("quickstart")
    layouts = [(1, 1, 1)]
    if not torch.cuda.is_available() or torch.cuda.device_count() >= 2:
        layouts += [(2, 2, 1), (2, 1, 2)]
    given = [] if options.steps is None else [f"--steps={options.steps}"]
    for (ranks, tp, pp), seed in itertools.product(layouts, options.seeds):
        if ranks > options.ranks:
            continue
        report = run(ranks, tp, pp, [*given, f"--seed={seed}"])
        device = report["device"] if torch.cuda.is_available() else f"cpu, {os.cpu_count()} cores"
        case = f"{device}, {ranks} ranks, TP{tp} PP{pp}, seed {seed}"
        for metric, unit in UNITS.items():
            reference = report["dense_bytes"] / report["syncs"] if metric.startswith("bytes_") else None
            recording.add(case, metric, float(report[metric]), unit, reference)
    recording.write()


if __name__ == "__main__":
    main()
