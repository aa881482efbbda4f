"""Real checkouts, real pip, and a miniature upstream for what needs neither.

Everything that is built once is a session fixture. Commands run with an environment of their own: nothing
of the pytest process (PYTHONPATH, build/tree) reaches them unless a test asks for it.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from patchset import ROOT, backend, upstream
from tests.patches.fork import Fork, only
from tests.patches.miniature import GIT, Miniature

# One call of the build backend, in a checkout.
HOOK = "import sys; sys.path.insert(0, '.'); from patchset import backend; print(backend.{})"


def run(*command, cwd, check=True, drop=(), **env):
    """Run a command; what it printed, both streams, is ``.stdout``."""
    outer = {k: v for k, v in os.environ.items() if not k.startswith(("GIT_", "PYTHON")) and k not in drop}
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=outer | GIT | {k: str(v) for k, v in env.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert not check or done.returncode == 0, f"{command}\n{done.stdout}"
    return done


@pytest.fixture(scope="session")
def sdist():
    """The pinned sdist, fetched once into build/."""
    return upstream.sdist(ROOT, upstream.Pin.read(ROOT))


@pytest.fixture(scope="session")
def origin(tmp_path_factory):
    """A git repository with this checkout as its only commit."""
    place = tmp_path_factory.mktemp("origin") / "megatron-fork"
    for name in backend.repository():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, place / name)
    run("git", "init", "-q", "-b", "main", cwd=place)
    run("git", "add", "-A", cwd=place)
    run("git", "commit", "-qm", "all", cwd=place)
    return place


@pytest.fixture
def checkout(origin, tmp_path):
    """A fresh clone."""
    run("git", "clone", "-q", origin, tmp_path / "checkout", cwd=tmp_path)
    return tmp_path / "checkout"


@pytest.fixture(scope="session")
def packages(tmp_path_factory):
    """A folder with everything that is installed here (torch, setuptools, …) except Megatron-Core."""
    place = tmp_path_factory.mktemp("packages")
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not entry.name.startswith(("megatron", "__editable__", "pip", "__pycache__")):
            (place / entry.name).symlink_to(entry)
    return place


@pytest.fixture
def make_venv(packages, tmp_path):
    """A virtual environment in which the packages of this one can be imported."""

    def make(name="venv"):
        place = tmp_path / name
        run(sys.executable, "-m", "venv", place, cwd=tmp_path)
        site = next(place.glob("lib/python*/site-packages"))
        (site / "packages.pth").write_text(f"{packages}\n")
        return place / "bin/python"

    return make


@pytest.fixture(scope="session")
def wheel(origin, sdist, tmp_path_factory):
    """The wheel that pip builds from a clone, without isolation."""
    place = tmp_path_factory.mktemp("wheel")
    run("git", "clone", "-q", origin, place / "checkout", cwd=place)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    run(*pip, "-w", place, place / "checkout", cwd="/", MEGATRON_CORE_SDIST=sdist)
    (built,) = place.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def wheel_files(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture
def mini(tmp_path, monkeypatch):
    only({}, monkeypatch)
    return Miniature(tmp_path / "mini", monkeypatch)


@pytest.fixture(scope="session")
def first_fork(tmp_path_factory):
    place = tmp_path_factory.mktemp("fork")
    Fork.make(place)
    return place


@pytest.fixture
def fork(first_fork, tmp_path, monkeypatch):
    """A copy for one test; its remotes are relative paths."""
    only(GIT, monkeypatch)
    shutil.copytree(first_fork, tmp_path / "fork", symlinks=True)
    monkeypatch.setenv("MEGATRON_CORE_SDIST", str(tmp_path / "fork/work/dist/megatron_core-0.1.0.tar.gz"))
    return Fork(tmp_path / "fork")
