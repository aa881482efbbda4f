"""The package stands alone: torch, numpy and safetensors, nothing of megatron.core, no optional package."""

import subprocess
import sys

CODE = """
import sys
import megatron.weight_sync
heavy = [m for m in sys.modules if m.split(".")[0] in
         ("transformers", "zstandard", "fsspec", "triton_kernels", "xxhash", "transformer_engine", "vllm",
         "sglang")]
core = [m for m in sys.modules if m.startswith("megatron.") and not m.startswith("megatron.weight_sync")]
assert not core, core
assert not heavy, heavy
print("alone")
"""


def test_imports_nothing_of_megatron_core():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.stdout.strip() == "alone", done.stderr
