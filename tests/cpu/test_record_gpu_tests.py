"""The record of a GPU test run: what it says, and when it is refused."""

import json
import sys

import pytest
import torch

from benchmarks import record_gpu_tests, recording
from patchset import ROOT, backend, evidence, facts

CASES = (
    '<testcase classname="tests.gpu.test_a" name="test_one[7]" time="1.5"/>'
    '<testcase classname="tests.gpu.test_a" name="test_two"><failure message="no"/></testcase>'
    '<testcase classname="tests.gpu.test_b" name="test_three"><skipped message="no TE"/></testcase>'
)


def junit(tmp_path, cases):
    path = tmp_path / "junit.xml"
    path.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    return path


@pytest.fixture
def checkout(tmp_path):
    """Just what a record looks at, and no git."""
    files = {"patches/upstream.txt": (ROOT / "patches/upstream.txt").read_text(), backend.LABEL: "sirl.7\n"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_record(checkout, monkeypatch):
    monkeypatch.setattr(recording, "device_name", lambda: "NVIDIA H200")
    path = record_gpu_tests.record(junit(checkout, CASES), "2" * 40, root=checkout)
    folder = checkout / "benchmarks/results/nvidia-h200" / backend.version(checkout)
    assert backend.version(checkout).endswith("+sirl.7")
    assert path == folder / "gpu_tests.json"
    found = json.loads(path.read_text())
    assert found == facts.gpu_record(path.read_bytes(), path.name)
    assert found["versions"]["torch"] and found.pop("versions") and found.pop("date")
    assert found == {
        "gpu": "NVIDIA H200",
        "command": "make test-gpu",
        "commit": "2" * 40,
        "source": facts.source(checkout),
        "passed": 1,
        "failed": 1,
        "skipped": 1,
        "failures": ["tests.gpu.test_a.test_two"],
    }
    again = record_gpu_tests.record(junit(checkout, CASES), "2" * 40, root=checkout)
    assert again == folder / "gpu_tests-2.json"


@pytest.mark.parametrize(
    "cases, got",
    [("", "none"), (CASES + '<testcase classname="tests.cpu.test_a" name="test_one"/>', "gpu, cpu")],
)
def test_other_tests_are_no_gpu_record(checkout, cases, got):
    with pytest.raises(evidence.EvidenceError, match=f"expected tests of tests/gpu alone, got {got}$"):
        record_gpu_tests.record(junit(checkout, cases), "2" * 40, root=checkout)
    assert not (checkout / "benchmarks").exists()


def test_refused_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["record_gpu_tests", str(junit(tmp_path, CASES))])
    with pytest.raises(SystemExit, match="no CUDA device here: a record names the GPU that the tests ran on"):
        record_gpu_tests.main()
