"""install() and uninstall(), each in a process of its own."""

import os
import subprocess
import sys

import pytest


def run(code):
    env = dict(os.environ)
    env.pop("TORCHDYNAMO_DISABLE", None)  # our own conftest set it
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)


def test_install_after_megatron_core_is_refused():
    done = run("import megatron.core, megatron.cpu_runtime as r; r.install()")
    assert "RuntimeError: cpu_runtime.install() must run before megatron.core is imported" in done.stderr


def test_uninstall_restores_everything():
    done = run("""
import torch, torch.distributed as dist, os
from torch.overrides import _get_current_function_mode_stack as stack
import megatron.cpu_runtime as r
def state():
    cuda = torch.cuda
    return [dict(vars(o)) for o in (cuda, cuda.random, cuda.nvtx, dist, dist.distributed_c10d)]
before, modes = state(), len(stack())
assert not r.installed()
r.install(); r.install()
assert r.installed() and torch.zeros(2, device="cuda").device.type == "cpu" and len(stack()) == modes + 1
r.uninstall(); r.uninstall()
assert not r.installed() and len(stack()) == modes and "TORCHDYNAMO_DISABLE" not in os.environ
after = state()
for old, new in zip(before, after):
    changed = {k for k in old if old[k] is not new.get(k)}
    assert not changed, changed
print("restored")
""")
    assert done.stdout == "restored\n", done.stderr


@pytest.mark.parametrize("device", ["'cuda'", "'cuda:1'", "torch.device('cuda', 0)", "0"])
def test_cuda_devices_become_cpu(device):
    import torch

    assert eval(f"torch.ones(3, device={device})").device.type == "cpu"
    assert torch.ones(3).cuda().to("cuda").device.type == "cpu"
    assert torch.ones(3).type() == "torch.cuda.FloatTensor"
