"""The quickstart as a measurement: its report as a result file, in every layout that the GPUs here allow.

python benchmarks/bench_quickstart.py --steps 100
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "build/tree"), str(ROOT)]

from benchmarks.recording import Recording  # noqa: E402

UNITS = {
    "reward_first": "",
    "reward_last": "",
    "solved_after": "of held-out problems",
    "tokens_linear": "tokens",
    "tokens_packed": "tokens",
    "tree_vs_linear_loss_abs_diff": "",
    "tree_vs_linear_grad_rel_diff": "relative",
    "max_logit_diff": "",
    "log_prob_drift": "",
    "syncs": "",
    "fingerprints_equal": "",
    "bytes_per_sync_training": "bytes",
    "bytes_per_sync_small_lr": "bytes",
    "density_training": "of elements",
    "density_small_lr": "of elements",
    "seconds": "s",
}


def run(ranks, tp, pp, steps):
    with tempfile.TemporaryDirectory() as out:
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            "-m",
        ]
        command += ["examples.quickstart", f"--tp={tp}", f"--pp={pp}", f"--steps={steps}", f"--out={out}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stderr[-6000:]}")
        return json.loads(Path(out, "report.json").read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=250)
    options = parser.parse_args()
    recording = Recording("quickstart")
    layouts = [(1, 1, 1)]
    if not torch.cuda.is_available() or torch.cuda.device_count() >= 2:
        layouts += [(2, 2, 1), (2, 1, 2)]
    for ranks, tp, pp in layouts:
        report = run(ranks, tp, pp, options.steps)
        case = f"{report['device']}, {ranks} ranks, TP{tp} PP{pp}"
        for metric, unit in UNITS.items():
            reference = report["dense_bytes"] / report["syncs"] if metric.startswith("bytes_") else None
            recording.add(case, metric, float(report[metric]), unit, reference)
    recording.write()


if __name__ == "__main__":
    main()
