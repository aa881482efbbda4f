"""The adapters against vLLM's and SGLang's own code, where those packages can be imported (no GPU is needed).

Each case builds a small model with the engine's own classes, and after a dense sync and after every delta all
parameters must have the bits that the engine's own loader gives them. See real_engines.py.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
WRITTEN_FOR = {"vllm": "0.33.", "sglang": "0.5.23"}


def need(engine):
    if importlib.util.find_spec(engine) is None:
        pytest.skip(f"{engine} is not installed")
    version = importlib.metadata.version(engine)
    if not version.startswith(WRITTEN_FOR[engine]):
        pytest.skip(f"written for {engine} {WRITTEN_FOR[engine]}, here is {version}")


def run(engine, case, size=1):
    """Every rank's report."""
    need(engine)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    tree = HERE.parents[2] / "build/tree"
    env = {**os.environ, "PYTHONPATH": str(tree), "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, str(HERE / "real_engines.py"), engine, case]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(size), address],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
        )
        for rank in range(size)
    ]
    said = [process.communicate(timeout=300)[0] for process in ranks]
    lines = [line for line in said[0].splitlines() if line.startswith("RESULT ")]
    assert lines, "\n".join(text[-3000:] for text in said)
    return json.loads(lines[0].removeprefix("RESULT "))


FOLLOWED = [
    ("vllm", "qwen3", 1),
    ("vllm", "qwen3_tied", 1),
    ("vllm", "llama", 1),
    ("vllm", "qwen3_moe", 1),
    ("vllm", "latent", 1),
    ("vllm", "qwen3", 2),
    ("vllm", "qwen3_tied", 2),
    ("vllm", "qwen3_moe", 2),
    ("sglang", "qwen3", 1),
    ("sglang", "qwen3_tied", 1),
    ("sglang", "llama", 1),
    ("sglang", "qwen3_moe", 1),
    ("sglang", "qwen3_moe_blocks", 1),
    ("sglang", "qwen3", 2),
    ("sglang", "qwen3_tied", 2),
    ("sglang", "qwen3_moe", 2),
]


@pytest.mark.parametrize(("engine", "case", "size"), FOLLOWED)
def test_real_engine_follows_deltas(engine, case, size):
    reports = run(engine, case, size)
    assert len(reports) == size
    for report in reports:
        assert report["differ"] == [] and report["error"] is None and report["boxes"] > 0
    first, *deltas = reports[0]["changed"]
    assert len(deltas) == 2 and all(0 < 15 * changed < first for changed in deltas)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_real_engine_that_reorders_experts_is_refused(engine):
    """vLLM for FlashInfer's CUTLASS kernels (up before gate), SGLang with interleaved gate and up: refused by
    name, and the engine then has the payload as it loads it itself."""
    (report,) = run(engine, "qwen3_moe_reordered")
    assert "changes weights after loading them" in report["error"]
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in report["error"]
    assert report["differ"] == []


@pytest.mark.parametrize(
    ("case", "first"),
    [
        ("gptq", r"qkv_proj\.qweight \(torch\.int32\)"),
        ("awq", r"qkv_proj\.qweight \(torch\.int32\)"),
        ("packed", r"qkv_proj\.weight_packed \(torch\.int32\)"),
        ("fp8_blocks", r"qkv_proj\.weight \(torch\.float8_e4m3fn\)"),
        ("fp8_online", r"qkv_proj\.weight \(torch\.float8_e4m3fn\)"),
    ],
)
def test_real_quantised_models_are_refused(case, first):
    (report,) = run("vllm", case)
    text = r"UnsupportedLayout: quantised weights are not supported yet: \['model\.layers\.0\.self_attn\."
    assert re.search(text + first, report["error"]), report["error"]
