"""Record a run of tests/gpu for a release: results/<gpu>/<version>/gpu_tests.json.

    PYTEST_ADDOPTS=--junit-xml=$PWD/build/gpu_tests.xml make test-gpu
    .venv/bin/python -m benchmarks.record_gpu_tests build/gpu_tests.xml

The record holds for every commit with the same megatron/, patches/ and tests/gpu/. Its fields are
in patchset/EVIDENCE.md. On a copy without git, name the commit with --commit.
"""

import argparse
import datetime
import json
from pathlib import Path
from xml.etree import ElementTree

import torch

from benchmarks import recording
from patchset import ROOT, backend, evidence, facts, runs
from patchset.repository import Repository


def record(junit, commit, command="make test-gpu", root=ROOT):
    """Write the record and return its path.

    Raises:
        EvidenceError: the file holds no GPU tests, or others too.
    """
    tiers = runs.counts(junit)
    if set(tiers) != {"gpu"}:
        raise evidence.EvidenceError(
            f"{junit}: expected tests of tests/gpu alone, got {', '.join(tiers) or 'none'}"
        )
    cases = list(ElementTree.parse(junit).iter("testcase"))
    failures = [f"{c.get('classname')}.{c.get('name')}" for c in cases if runs.outcome(c) == "failed"]
    found = {
        "gpu": recording.device_name(),
        "versions": recording.installed_versions(),
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": commit,
        "source": facts.source(root),
        **{name: tiers["gpu"][name] for name in evidence.COUNTS},
        "failures": failures,
    }
    results = root / evidence.RESULTS
    path = recording.free_path(results, found["gpu"], backend.version(root), facts.GPU_TESTS)
    text = json.dumps(found, indent=1) + "\n"
    facts.gpu_record(text.encode(), path.name)
    path.write_text(text)
    return path


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("junit", type=Path, help="what pytest --junit-xml wrote")
    parser.add_argument("--commit", help="the commit that was tested; by default HEAD")
    parser.add_argument("--command", default="make test-gpu", help="what was run, if it was something else")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device here: a record names the GPU that the tests ran on")
    path = record(args.junit, args.commit or Repository(ROOT).git("rev-parse", "HEAD"), args.command)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
