"""Two-stage pipelines on two GPUs: every layout equals a single stage, and none calls on WORLD."""

import json
import subprocess
import sys

import pytest
import torch

from tests.conftest import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def test_two_stages_on_nccl_equal_one():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(ROOT / "benchmarks/pipeline_worker.py"), "check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("FIGURES ")]
    cases = json.loads(line.removeprefix("FIGURES "))["cases"]
    assert len(cases) == 18  # eight, and five with two and eight different lengths
    for name, (worst, calls_on_world) in cases.items():
        assert worst < 1e-4, f"{name}: {worst}"
        assert calls_on_world == 0, name
