"""Which megatron.core is imported: editable, on PYTHONPATH, as a submodule, from everywhere, under pytest.

The repository root holds a bare ``megatron/``, and a finder that loses to it makes ``megatron.core`` an empty
namespace package that imports without an error. So every test asks for the file.
"""

import subprocess
import sys

import pytest

from patchset import ROOT
from tests.patches.conftest import HOOK, run

WHERE = "import importlib.util as u; print(u.find_spec('megatron.core').origin)"


@pytest.fixture(scope="module")
def editable(origin, sdist, packages, tmp_path_factory):
    """(python, checkout) of an editable install."""
    place = tmp_path_factory.mktemp("editable")
    run("git", "clone", "-q", origin, place / "checkout", cwd=place)
    run(sys.executable, "-m", "venv", place / "venv", cwd=place)
    next(place.glob("venv/lib/python*/site-packages")).joinpath("packages.pth").write_text(f"{packages}\n")
    python = place / "venv/bin/python"
    pip = [python, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    run(*pip, "-e", place / "checkout", cwd="/", MEGATRON_CORE_SDIST=sdist)
    return python, place / "checkout"


@pytest.mark.parametrize("cwd", ["/", ".", "megatron", "build/tree", "build/tree/megatron/core"])
def test_editable_from(editable, cwd):
    python, checkout = editable
    done = run(python, "-c", WHERE, cwd=checkout / cwd)
    assert done.stdout == f"{checkout}/build/tree/megatron/core/__init__.py\n"


@pytest.mark.parametrize("mode", ["prepend", "append", "importlib"])
def test_editable_under_pytest(editable, mode):
    python, checkout = editable
    test = checkout / "build/probe/test_where.py"
    test.parent.mkdir(exist_ok=True)
    expected = f"{checkout}/build/tree/megatron/core/__init__.py"
    test.write_text(
        "import importlib.util as u\n\n\ndef test_where():\n"
        f"    assert u.find_spec('megatron.core').origin == '{expected}'\n"
    )
    run(python, "-m", "pytest", "-q", "-c", "/dev/null", f"--import-mode={mode}", test, cwd=checkout)


def test_editable_imports_for_real(editable):
    """The package itself, a module of ours and the extension, from the root with the bare megatron/."""
    python, checkout = editable
    modules = "megatron.core, megatron.core.transformer.tree_metadata, megatron.core.datasets.helpers_cpp"
    script = f"import sys, {modules}; [print(sys.modules[m].__file__) for m in '{modules}'.split(', ')]"
    found = run(python, "-W", "ignore", "-c", script, cwd=checkout).stdout.splitlines()[-3:]
    tree = f"{checkout}/build/tree/megatron/core"
    assert found[:2] == [f"{tree}/__init__.py", f"{tree}/transformer/tree_metadata.py"]
    assert found[2].startswith(f"{tree}/datasets/helpers_cpp.")


def test_editable_modules_are_live(editable):
    python, checkout = editable
    (checkout / "megatron/weight_sync/added_later.py").write_text("value = 17\n")
    script = "import importlib.util as u; print(u.find_spec('megatron.weight_sync.added_later').origin)"
    found = run(python, "-W", "ignore", "-c", script, cwd="/").stdout.splitlines()[-1]
    assert found == f"{checkout}/build/tree/megatron/weight_sync/added_later.py"


def test_editable_metadata(editable):
    python, checkout = editable
    script = "import importlib.metadata as m; print(m.version('megatron-core'))"
    label = (checkout / "megatron/core/LOCAL_VERSION").read_text().strip()
    assert run(python, "-c", script, cwd="/").stdout == f"0.19.2+{label}\n"


def test_editable_keeps_a_trainers_patches(editable, sdist):
    """Installing again must not take them out silently."""
    python, checkout = editable
    (checkout / "build/theirs").mkdir(exist_ok=True)
    (checkout / "build/theirs/a.patch").write_text(THEIRS)
    command = [python, "-m", "patchset", "materialise"]
    run(*command, "--extra-series", "build/theirs", cwd=checkout, MEGATRON_CORE_SDIST=sdist)
    call = f"build_editable({str(checkout / 'build')!r})"
    run(python, "-c", HOOK.format(call), cwd=checkout, MEGATRON_CORE_SDIST=sdist)
    assert "# theirs\n" in (checkout / "build/tree/megatron/core/enums.py").read_text()
    run(*command, cwd=checkout, MEGATRON_CORE_SDIST=sdist)
    assert "# theirs\n" not in (checkout / "build/tree/megatron/core/enums.py").read_text()


THEIRS = """--- a/megatron/core/enums.py
+++ b/megatron/core/enums.py
@@ -1,2 +1,3 @@
+# theirs
 # Copyright (c) 2023, NVIDIA CORPORATION. All rights reserved.
 
"""


# ---------------------------------------------------------------- a submodule


@pytest.fixture
def trainer(origin, tmp_path):
    """A trainer's repository with the fork as a submodule."""
    place = tmp_path / "trainer"
    place.mkdir()
    run("git", "init", "-q", cwd=place)
    add = [
        "git",
        "-c",
        "protocol.file.allow=always",
        "submodule",
        "--quiet",
        "add",
        origin,
        "third_party/megatron",
    ]
    run(*add, cwd=place)
    run("git", "commit", "-qm", "vendor", cwd=place)
    return place


def test_submodule_on_pythonpath(trainer, sdist):
    """Inside another work tree, from another directory, with neither git nor patch nor a compiler on PATH."""
    fork = trainer / "third_party/megatron"
    env = {"MEGATRON_CORE_SDIST": sdist, "PATH": "/nonexistent"}
    run(sys.executable, "third_party/megatron/patchset", "materialise", cwd=trainer, **env)
    assert "subprocess" not in (fork / "build/tree/megatron/core/package_info.py").read_text()
    run(sys.executable, fork / "patchset", "materialise", "--check", cwd="/", **env)
    assert run("git", "status", "--porcelain", cwd=trainer).stdout == ""
    for cwd in (trainer, fork, fork / "megatron", "/"):
        done = run(sys.executable, "-c", WHERE, cwd=cwd, PYTHONPATH=fork / "build/tree")
        assert done.stdout == f"{fork}/build/tree/megatron/core/__init__.py\n"


def test_submodule_with_a_trainers_patches(trainer, sdist):
    (trainer / "ours").mkdir()
    (trainer / "ours/one.patch").write_text(THEIRS)
    command = [sys.executable, "third_party/megatron/patchset", "materialise"]
    run(*command, "--extra-series", "ours", cwd=trainer, MEGATRON_CORE_SDIST=sdist)
    tree = trainer / "third_party/megatron/build/tree"
    assert (tree / "megatron/core/enums.py").read_text().startswith("# theirs\n")
    (trainer / "ours/one.patch").write_text(THEIRS.replace("theirs", "other"))
    done = run(*command, "--check", cwd=trainer, check=False, MEGATRON_CORE_SDIST=sdist)
    assert done.returncode == 1
    assert done.stdout == (
        f"patchset: {tree} is stale: patches/ changed since it was made\n"
        f"run in {tree.parent.parent}: python -m patchset materialise --extra-series {trainer}/ours\n"
    )


# ---------------------------------------------------------------- a stale tree


def test_pytest_refuses_a_stale_tree(checkout, sdist):
    pytest_ = [sys.executable, "-m", "pytest", "-q", "--collect-only", "tests/patches/test_apply.py"]
    done = run(*pytest_, cwd=checkout, check=False)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert (
        f"{checkout}/build/tree is not there\nrun in {checkout}: python -m patchset materialise\n"
        in done.stdout
    )
    run(sys.executable, "-m", "patchset", "materialise", cwd=checkout, MEGATRON_CORE_SDIST=sdist)
    run(*pytest_, cwd=checkout)
    (checkout / "megatron/core/later.py").write_text("")
    done = run(*pytest_, cwd=checkout, check=False)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "megatron/ gained or lost files since it was made: megatron/core/later.py\n" in done.stdout


def test_processes_of_a_test_get_the_tree():
    """What tests/conftest.py sets: here, and in what a test starts."""
    done = subprocess.run([sys.executable, "-c", WHERE], cwd="/", capture_output=True, text=True, check=True)
    assert done.stdout == f"{ROOT}/build/tree/megatron/core/__init__.py\n"
    assert sys.path.index(f"{ROOT}/build/tree") < sys.path.index(str(ROOT))
