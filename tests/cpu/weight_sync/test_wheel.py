"""The small wheel: the same bytes twice, and enough on its own."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCE = ROOT / "megatron/weight_sync"


def build(folder: Path, umask: int) -> Path:
    """Build from a copy whose files have other modes and dates."""
    copy = folder / "megatron/weight_sync"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "LICENSE", folder)
    for k, path in enumerate(sorted(copy.rglob("*.py"))):
        path.chmod(0o666 & ~umask)
        os.utime(path, (1_700_000_000 + k + umask, 1_700_000_000 + k + umask))
    env = {
        name: value for name, value in os.environ.items() if name not in ("SOURCE_DATE_EPOCH", "PYTHONPATH")
    }
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--no-cache-dir",
    ]
    done = subprocess.run(
        [*command, "-w", folder / "out", copy], env=env, capture_output=True, text=True, umask=umask
    )
    assert done.returncode == 0, done.stderr
    assert not list(copy.glob("build")) and not list(copy.glob("*.egg-info"))
    (wheel,) = (folder / "out").glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    pytest.importorskip("setuptools")
    return [build(tmp_path_factory.mktemp(f"wheel{k}"), umask) for k, umask in enumerate((0o022, 0o077))]


def test_two_builds_give_the_same_bytes(wheels):
    assert wheels[0].name == wheels[1].name == "megatron_weight_sync-1.0.0-py3-none-any.whl"
    assert wheels[0].read_bytes() == wheels[1].read_bytes()


def test_content(wheels):
    names = set(zipfile.ZipFile(wheels[0]).namelist())
    modules = {p.relative_to(ROOT).as_posix() for p in SOURCE.rglob("*.py")} - {
        "megatron/weight_sync/_wheel.py"
    }
    modules = {name for name in modules if "/build/" not in name}
    assert {name for name in names if name.endswith(".py")} == modules
    assert {"megatron/weight_sync/FORMAT.md", "megatron/weight_sync/PROTOCOL.md"} <= names
    assert any(name.endswith("LICENSE") for name in names) and "megatron/__init__.py" not in names


CODE = """
import sys
sys.path.insert(0, {where!r})
import megatron.weight_sync as ws, torch, importlib.metadata as m
assert ws.__file__.startswith({where!r}), ws.__file__
module = torch.nn.Linear(5, 3)
source = torch.nn.Linear(5, 3)
sender, receiver = ws.Sender("m"), ws.ModuleReceiver(module)
update = sender.begin()
for name, tensor in source.state_dict().items():
    update.add_dense(name, tensor)
receiver.apply(update.finish(ws.fingerprint(source.state_dict())))
assert torch.equal(module.weight, source.weight)
assert not [n for n in sys.modules if n.startswith("megatron.core")]
meta = m.distribution("megatron-weight-sync")
assert [e.value for e in meta.entry_points if e.group == "vllm.general_plugins"]
from megatron.weight_sync.__main__ import main
assert main(["inspect", {where!r}]) == 0
"""


def test_works_alone(wheels, tmp_path):
    zipfile.ZipFile(wheels[0]).extractall(tmp_path / "site")
    done = subprocess.run(
        [sys.executable, "-I", "-c", CODE.format(where=str(tmp_path / "site"))],
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "no payloads" in done.stdout
