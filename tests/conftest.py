"""Put the patched tree first on the path, here and in every process that a test starts."""

import os
import sys

import pytest

from patchset import ROOT, tree

TREE = str(ROOT / "build/tree")

sys.path.insert(0, TREE)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [TREE, os.environ.get("PYTHONPATH")]))


def pytest_sessionstart(session):
    if why := tree.stale(ROOT):
        pytest.exit(why, returncode=pytest.ExitCode.USAGE_ERROR)
