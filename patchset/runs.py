"""What was done with a commit for its release: the tests, the wheel, and with which tools."""

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

from . import upstream
from .evidence import BUILDS, COMMANDS, COUNTS, EvidenceError
from .repository import Repository


def counts(junit: Path) -> dict[str, dict]:
    """Passed, failed and skipped tests and their seconds, by the folder under tests/ (unit_tests are cpu)."""
    if not junit.is_file():
        raise EvidenceError(f"the tests left no {junit}")
    tiers: dict[str, dict] = {}
    for case in ElementTree.parse(junit).iter("testcase"):
        # A module that cannot be collected is a case with a name only.
        parts = f"{case.get('classname')}.{case.get('name')}".lstrip(".").split(".")
        tier = parts[1] if parts[0] == "tests" and len(parts) > 1 else "other"
        tier = {"unit_tests": "cpu"}.get(tier, tier)
        row = tiers.setdefault(tier, dict.fromkeys(COUNTS, 0) | {"seconds": 0.0})
        row[outcome(case)] += 1
        row["seconds"] = round(row["seconds"] + float(case.get("time", 0)), 3)
    return tiers


def outcome(case: ElementTree.Element) -> str:
    found = {child.tag for child in case}
    if found & {"failure", "error"}:
        return "failed"
    return "skipped" if "skipped" in found else "passed"


def run_tests(root: Path) -> dict:
    """Run what CI runs; the `commands` and `tiers` fields."""
    junit = root / "build/release/junit.xml"
    junit.parent.mkdir(parents=True, exist_ok=True)
    junit.unlink(missing_ok=True)
    options = f"{os.environ.get('PYTEST_ADDOPTS', '')} --junit-xml={shlex.quote(str(junit))}".strip()
    if not shutil.which("make"):
        raise EvidenceError("make is not on PATH: it runs the tests")
    done = []
    for command in COMMANDS:
        begin = time.monotonic()
        status = subprocess.run(
            command.split(), cwd=root, env=os.environ | {"PYTEST_ADDOPTS": options}, check=False
        ).returncode
        seconds = round(time.monotonic() - begin, 3)
        done.append({"command": command, "status": status, "seconds": seconds})
    return {"commands": done, "tiers": counts(junit)}


def interpreter(root: Path) -> Path:
    """The Python that `make` uses, else this one."""
    made = root / ".venv/bin/python"
    return made if made.exists() else Path(sys.executable)


_VERSIONS = """
import importlib.metadata as m, json, platform, sys, sysconfig
found = {"python": platform.python_version()}
found["platform"] = " ".join((sysconfig.get_platform(), *platform.libc_ver()))
for name in sys.argv[1:]:
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
print(json.dumps(found))
"""
_PACKAGES = (
    "pip setuptools pybind11 packaging pytest ruff torch triton numpy transformers safetensors".split()
)


def tools(root: Path) -> dict[str, str]:
    """Versions of what built and tested the release."""
    asked = [interpreter(root), "-I", "-c", _VERSIONS, *_PACKAGES]
    found = json.loads(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)
    for name, command in (
        ("git", ["git", "--version"]),
        ("c++", [os.environ.get("CXX", "c++"), "--version"]),
    ):
        if shutil.which(command[0]):
            said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
            found[name] = said.partition("\n")[0]
    return found


def build_wheel(root: Path, source: Path, out: Path) -> Path:
    """The wheel of an unpacked commit, built by the Python that `make` uses."""
    out.mkdir()
    env = {k: v for k, v in os.environ.items() if k not in ("SOURCE_DATE_EPOCH", "PYTHONPATH")}
    env["MEGATRON_CORE_SDIST"] = str(upstream.sdist(root, upstream.Pin.read(source)).resolve())
    script = (
        "import sys; sys.path.insert(0, '.'); from patchset import backend; backend.build_wheel(sys.argv[1])"
    )
    done = subprocess.run(
        [interpreter(root), "-P", "-c", script, out],
        cwd=source,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise EvidenceError(f"the wheel does not build:\n{done.stdout.strip()}")
    (wheel,) = out.glob("*.whl")
    return wheel


Builder = Callable[[Path, Path, Path], Path]


def wheel(repo: Repository, commit: str, builds: int = BUILDS, build: Builder = build_wheel) -> dict:
    """The wheel of a commit, as a subject of in-toto; every build begins with a fresh export elsewhere.

    Raises:
        EvidenceError: it does not build, or not always to the same bytes.
    """
    found = []
    with tempfile.TemporaryDirectory() as tmp:
        for number in range(builds):
            place = repo.unpack(commit, Path(tmp, f"source-{number}"))
            path = build(repo.path, place, Path(tmp, f"wheel-{number}"))
            found.append({"name": path.name, "digest": {"sha256": upstream.digest(path)}})
    if any(one != found[0] for one in found):
        listed = ", ".join(f"{one['name']} {one['digest']['sha256']}" for one in found)
        raise EvidenceError(f"the wheel is not reproducible: {listed}")
    return found[0]
