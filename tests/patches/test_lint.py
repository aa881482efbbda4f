"""Ruff looks at every Python file that git tracks, whatever its folder is called."""

import subprocess
import sys
from pathlib import Path

import pytest

from patchset import ROOT


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a git checkout")
def test_every_tracked_file_is_checked():
    pytest.importorskip("ruff", reason="needs the lint extra")
    run = dict(cwd=ROOT, capture_output=True, text=True, check=True)
    tracked = subprocess.run(["git", "ls-files", "*.py"], **run).stdout.split()
    ruff = [sys.executable, "-m", "ruff", "check", "--show-files"]
    checked = subprocess.run(ruff, **run).stdout.split()
    assert set(tracked) <= {Path(path).relative_to(ROOT).as_posix() for path in checked}
