"""Tests of Triton kernels without a GPU. Triton reads TRITON_INTERPRET when it is imported, so the tests of a
file run in a process of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

inside = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreting process")
outside = pytest.mark.skipif(INTERPRETED, reason="this is the interpreting process")


def run(file, passed):
    """Run a test file in a process whose kernels are interpreted; that many of its tests must pass."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", file],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and f"{passed} passed" in done.stdout, (done.stdout + done.stderr)[-6000:]
