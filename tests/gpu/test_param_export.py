"""Export on GPUs, with local layers and Transformer Engine's, bit for bit: two GPUs share the models over
NCCL, and where there is one it has them whole."""

import importlib.util
import json
import subprocess
import sys

import pytest
import torch

from tests.conftest import ROOT
from tests.dist.export_references import reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RANKS = min(torch.cuda.device_count(), 2)

LOCAL = [
    ("qwen3", dict(tp=2), None),
    ("qwen3-tied", dict(pp=2), None),
    ("qwen3_moe", dict(ep=2), None),
    ("qwen3_moe", dict(tp=2, etp=2), None),
    ("deepseek_v3", dict(tp=2), None),
    ("gpt_oss", dict(pp=2), None),
]
TE = [  # every family; what the layers do not have in common: fused norms, biases, grouped experts, MLA
    ("llama", dict(tp=2), {}),
    ("qwen2", dict(tp=2), {}),
    ("qwen3", dict(tp=2), {}),
    ("qwen3-tied", dict(pp=2), {}),
    ("qwen3_moe", dict(ep=2), {}),
    ("qwen3_moe", dict(tp=2, etp=2), {}),
    ("qwen3_moe", dict(ep=2), dict(moe_single_grouped_weight=True, use_transformer_engine_op_fuser=True)),
    ("mixtral", dict(ep=2), {}),
    ("deepseek_v3", dict(tp=2), {}),
    ("deepseek_v3", dict(ep=2), dict(mla_down_proj_fusion=True)),
    ("glm4_moe", dict(tp=2, ep=2, etp=1), {}),
    ("gpt_oss", dict(ep=2), {}),
]


def run(tmp_path, cases):
    jobs = {}
    for case, groups, te in cases:
        groups = groups if RANKS == 2 else {}
        fields, path, _, _ = reference(case)
        fields = {k: v for k, v in fields.items() if isinstance(v, int | float | str | list | None)}
        name = f"{case} {groups} {te}"
        jobs[name] = dict(case=name, fields=fields, path=path, groups=groups, te=te)
    (tmp_path / "cases.json").write_text(json.dumps(list(jobs.values())))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command += [str(ROOT / "tests/gpu/export_worker.py"), str(tmp_path / "cases.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-6000:]
    [line] = [line for line in done.stdout.splitlines() if line.startswith("FIGURES ")]
    results = json.loads(line.removeprefix("FIGURES "))
    assert list(results) == list(jobs)
    return results


def test_local_layers(tmp_path):
    run(tmp_path, LOCAL)


@pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine")
def test_transformer_engine_layers(tmp_path):
    results = run(tmp_path, TE)
    seen = {name for result in results.values() for name in result["classes"]}
    assert {"TELayerNormColumnParallelLinear", "TERowParallelLinear", "TEGroupedMLP"} <= seen
