"""With nothing of ours switched on, the patched tree computes bit for bit what upstream's sdist computes."""

import os
import subprocess
import sys

import pytest

from patchset import upstream
from tests.conftest import ROOT, TREE

MODELS = ["dense", "dense-bf16", "dense-recompute", "moe", "mla", "mla-recompute"]


def digests(tree):
    """{model: "logits gradients parameters loss"} of three optimizer steps on that tree, and {"imports": what
    they import of tree training and tree attention}."""
    env = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(ROOT / "tests/cpu/off_path_digests.py"), str(ROOT)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"from {tree}/megatron/core/__init__.py" in done.stderr
    names = (*MODELS, "imports")
    lines = [line.split(" ", 1) for line in done.stdout.splitlines() if line.startswith(names)]
    return {**dict(lines), "imports": [module for name, module in lines if name == "imports"]}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    plain = tmp_path_factory.mktemp("upstream")
    upstream.unpack(upstream.sdist(ROOT, upstream.Pin.read(ROOT)), plain)
    assert not (plain / "megatron/core/transformer/tree_metadata.py").exists()
    return digests(TREE), digests(plain)


@pytest.mark.parametrize("model", MODELS)
def test_logits_gradients_and_parameters_are_upstreams(both, model):
    ours, upstreams = both
    assert ours[model] == upstreams[model]


def test_only_the_hooks_are_imported(both):
    """Neither megatron.core.tree_training nor an attention backend."""
    ours, upstreams = both
    package = "megatron.core.transformer.tree_attention"
    assert ours["imports"] == [package, *(f"{package}.{name}" for name in ("case", "dispatch", "refusals"))]
    assert upstreams["imports"] == []
