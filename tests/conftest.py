"""Put the patched tree first on the path, here and in every process that a test starts; time the tiers."""

import collections
import os
import sys

import pytest

from patchset import ROOT, tree

TREE = str(ROOT / "build/tree")
BUDGET = {"patches": 240, "cpu": 360, "dist": 900}  # seconds on two cores

sys.path.insert(0, TREE)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [TREE, os.environ.get("PYTHONPATH")]))

spent = collections.Counter()


def pytest_sessionstart(session):
    if why := tree.stale(ROOT):
        pytest.exit(why, returncode=pytest.ExitCode.USAGE_ERROR)


def pytest_runtest_logreport(report):
    tier = report.nodeid.split("/")[1]
    spent["cpu" if tier == "unit_tests" else tier] += report.duration


def pytest_terminal_summary(terminalreporter):
    for tier, seconds in spent.items():
        over = f"; the budget is {BUDGET[tier]} s" if seconds > BUDGET.get(tier, seconds) else ""
        terminalreporter.write_line(f"tier {tier}: {seconds:.0f} s{over}")
