"""What pip and build make of a checkout: wheel, sdist, git+file, offline; and what must not be built."""

import ast
import base64
import email
import hashlib
import subprocess
import sys
import tarfile

import pytest

from patchset import ROOT, backend, queue, tree, upstream
from tests.patches.conftest import HOOK, run

VERSION = backend.version()


def metadata(text):
    parsed = email.message_from_bytes(text)
    return {key: parsed.get_all(key, []) for key in parsed}


@pytest.fixture(scope="session")
def upstream_files(sdist):
    with tarfile.open(sdist) as tar:
        files = {m.name.partition("/")[2]: tar.extractfile(m).read() for m in tar if m.isfile()}
    return {name: data for name, data in files.items() if not name.startswith("megatron_core.egg-info")}


# ---------------------------------------------------------------- the wheel


def test_version_is_one(wheel, wheel_files):
    assert wheel.name.startswith(f"megatron_core-{VERSION}-cp3")
    info = f"megatron_core-{VERSION}.dist-info"
    assert metadata(wheel_files[f"{info}/METADATA"])["Version"] == [VERSION]
    label = (ROOT / "megatron/core/LOCAL_VERSION").read_text().strip()
    assert upstream.Pin.read(ROOT).version + "+" + label == VERSION


def test_package_info_needs_neither_torch_nor_git(wheel_files, tmp_path):
    """setuptools executes it alone for the version; a stand-in for git would say that it was called."""
    for name in ("package_info.py", "LOCAL_VERSION"):
        (tmp_path / name).write_bytes(wheel_files[f"megatron/core/{name}"])
    (tmp_path / "git").write_text(f"#!/bin/sh\ntouch {tmp_path}/called\necho abc1234\n")
    (tmp_path / "git").chmod(0o755)
    script = "import sys, package_info; print(package_info.__version__, 'torch' in sys.modules)"
    done = run(sys.executable, "-c", script, cwd="/", PATH=tmp_path, PYTHONPATH=tmp_path)
    assert done.stdout == f"{VERSION} False\n"
    assert not (tmp_path / "called").exists()


def test_wheel_holds_upstream_the_overlay_and_the_notices(origin, wheel_files, upstream_files):
    theirs = {
        name for name in upstream_files if name.startswith("megatron/") and name.endswith((".py", ".txt"))
    }
    assert theirs - wheel_files.keys() == set()
    # weight_sync/pyproject.toml builds another wheel and stays out of this one.
    names = [name for name in tree.overlay(origin) if not name.endswith("pyproject.toml")]
    ours = {name: (origin / name).read_bytes() for name in names}
    assert ours and ours.items() <= wheel_files.items()
    for name in ("LICENSE", "NOTICE"):
        found = wheel_files[f"megatron_core-{VERSION}.dist-info/licenses/{name}"]
        assert found == (ROOT / name).read_bytes()
    assert not [name for name in wheel_files if name.startswith(("tests", "patchset", "patches", "examples"))]


def test_patched_files_are_the_stated_ones(wheel_files, upstream_files):
    """Everything is upstream's byte for byte, except what the patches say."""
    changed = {
        c.path: c.ids[1] for p in queue.series(ROOT / "patches") for c in queue.parse(p.read_bytes(), p.name)
    }
    for name in upstream_files.keys() & wheel_files.keys():
        if name in changed:
            assert queue.blob(wheel_files[name]) == changed[name], name
        else:
            assert wheel_files[name] == upstream_files[name], name


def test_helpers_are_compiled_in(wheel_files):
    assert [
        n for n in wheel_files if n.startswith("megatron/core/datasets/helpers_cpp.") and n.endswith(".so")
    ]


def test_extras_are_upstreams_and_ours(wheel_files, upstream_files):
    ours = metadata(wheel_files[f"megatron_core-{VERSION}.dist-info/METADATA"])
    theirs = metadata(upstream_files["PKG-INFO"])
    assert ours["Name"] == theirs["Name"] == ["megatron-core"]
    assert set(ours["Provides-Extra"]) - set(theirs["Provides-Extra"]) == {"flash", "rollout", "test", "lint"}
    assert set(theirs["Provides-Extra"]) <= set(ours["Provides-Extra"])
    assert set(theirs["Requires-Dist"]) <= set(ours["Requires-Dist"])
    assert ours["Requires-Python"] == theirs["Requires-Python"] == [">=3.12"]
    assert 'flash-attn-4[cu13]>=4.0.0b26; extra == "flash"' in ours["Requires-Dist"]


def test_record_is_right(wheel_files):
    for line in wheel_files[f"megatron_core-{VERSION}.dist-info/RECORD"].decode().splitlines():
        name, digest, size = line.rsplit(",", 2)
        if digest:
            found = base64.urlsafe_b64encode(hashlib.sha256(wheel_files[name]).digest()).rstrip(b"=").decode()
            assert (digest, int(size)) == (f"sha256={found}", len(wheel_files[name])), name


# ---------------------------------------------------------------- other ways to the same wheel


@pytest.fixture(scope="session")
def built(origin, sdist, tmp_path_factory):
    """`python -m build` in a clone of another name, under another umask: sdist, and the wheel from it."""
    place = tmp_path_factory.mktemp("built")
    run("git", "clone", "-q", origin, place / "elsewhere", cwd=place)
    command = f"umask 077; exec {sys.executable} -m build -n -o {place}/dist ."
    run("sh", "-c", command, cwd=place / "elsewhere", MEGATRON_CORE_SDIST=sdist)
    return place / "dist"


def test_wheel_has_the_same_bytes_elsewhere_and_from_the_sdist(wheel, built):
    (again,) = built.glob("*.whl")
    assert again.name == wheel.name
    assert upstream.digest(again) == upstream.digest(wheel)


def test_sdist_is_this_repository(origin, built, upstream_files):
    base = f"megatron_core-{VERSION}"
    with tarfile.open(built / f"{base}.tar.gz") as tar:
        members = {m.name.removeprefix(f"{base}/"): m for m in tar}
        texts = {name: tar.extractfile(m).read() for name, m in members.items()}
    tracked = set(run("git", "ls-files", cwd=origin).stdout.split("\n")) - {""}
    assert members.keys() == tracked | {"PKG-INFO"}
    assert metadata(texts["PKG-INFO"])["Version"] == [VERSION]
    large = {hashlib.sha256(d).digest() for d in upstream_files.values() if len(d) > 200}
    assert not [name for name, data in texts.items() if hashlib.sha256(data).digest() in large]
    assert members[".ci/run"].mode == 0o755 and members["README.md"].mode == 0o644


def test_sdist_without_git_is_the_same(checkout, built, sdist, tmp_path):
    """A checkout that is no work tree: an unpacked archive, a copy in another repository."""
    subprocess.run(["rm", "-rf", checkout / ".git"], check=True)
    (checkout / "megatron/__pycache__").mkdir()
    (checkout / "megatron/__pycache__/x.pyc").write_text("")
    call = HOOK.format(f"build_sdist({str(tmp_path)!r})")
    run(sys.executable, "-B", "-c", call, cwd=checkout, MEGATRON_CORE_SDIST=sdist)
    name = f"megatron_core-{VERSION}.tar.gz"
    assert upstream.digest(tmp_path / name) == upstream.digest(built / name)


def test_pip_install_from_git_through_the_index(origin, make_venv, tmp_path):
    """No local sdist: pip's own configuration finds it; its constraint on the fork stays outside."""
    python = make_venv()
    (tmp_path / "constraints.txt").write_text(f"megatron-core=={VERSION}\n")
    run(
        *(python, "-m", "pip", "install", "-q", "--no-deps", f"git+file://{origin}"),
        cwd="/",
        drop=("MEGATRON_CORE_SDIST",),
        PIP_CONSTRAINT=tmp_path / "constraints.txt",
    )
    script = (
        "import importlib.metadata as m, megatron.core as c, megatron.core.datasets.helpers_cpp as h;"
        "print(c.__version__, m.version('megatron-core'), c.__file__, h.__file__, sep='\\n')"
    )
    found = run(python, "-W", "ignore", "-c", script, cwd="/").stdout.splitlines()[-4:]
    assert found[:2] == [VERSION, VERSION]
    assert all(f"{python.parent.parent}/lib/" in path for path in found[2:])


def test_offline_from_a_local_sdist(checkout, sdist):
    """Neither an index nor pip's download: the hook asks for no pip, and the build needs none."""
    script = HOOK.format("get_requires_for_build_wheel(), backend.get_requires_for_build_editable()")
    assert run(sys.executable, "-c", script, cwd=checkout, MEGATRON_CORE_SDIST=sdist).stdout == "[] []\n"
    without = run(sys.executable, "-c", script, cwd=checkout, drop=("MEGATRON_CORE_SDIST",)).stdout
    assert without == "['pip'] ['pip']\n"


def test_offline_without_a_local_sdist_says_what_to_do(checkout):
    done = run(
        *(sys.executable, "-m", "patchset", "materialise"),
        cwd=checkout,
        check=False,
        drop=("MEGATRON_CORE_SDIST", "PIP_FIND_LINKS"),
        PIP_CONFIG_FILE="/dev/null",
        PIP_NO_INDEX="1",
    )
    assert done.returncode == 1
    assert done.stdout.rstrip().endswith(
        "pip could not fetch megatron_core-0.19.2.tar.gz. Options on pip's command line do not reach a build "
        "backend: use PIP_INDEX_URL, PIP_FIND_LINKS or pip.conf, or work without an index: "
        "MEGATRON_CORE_SDIST=/absolute/path/to/megatron_core-0.19.2.tar.gz"
    )


# ---------------------------------------------------------------- what must not be built


def wheel_hook(checkout, sdist, tmp_path, **env):
    call = HOOK.format(f"build_wheel({str(tmp_path)!r})")
    return run(sys.executable, "-c", call, cwd=checkout, check=False, MEGATRON_CORE_SDIST=sdist, **env)


def test_failing_compiler_fails_the_build(checkout, sdist, tmp_path):
    done = wheel_hook(checkout, sdist, tmp_path, CC="false", CXX="false")
    assert done.returncode == 1
    expected = "megatron.core.datasets.helpers_cpp was not built, although there is a compiler: false"
    assert done.stdout.rstrip().endswith(expected)


def test_missing_compiler_leaves_the_extension_out_and_says_so(checkout, sdist, tmp_path):
    done = wheel_hook(checkout, sdist, tmp_path, CC="no-such-cc", CXX="no-such-c++")
    assert done.returncode == 0, done.stdout
    assert "no C++ compiler (no-such-c++): megatron.core.datasets.helpers_cpp is left out\n" in done.stdout


def test_patch_that_does_not_apply_fails_the_build(checkout, sdist, tmp_path):
    path = checkout / "patches/package-info-no-git.patch"
    path.write_text(path.read_text().replace("-import subprocess", "-import subprocesses"))
    done = wheel_hook(checkout, sdist, tmp_path)
    assert done.returncode == 1
    assert (
        "package-info-no-git.patch:" in done.stdout
        and "    | import subprocesses as _subprocess\n" in done.stdout
    )
    assert not list(tmp_path.glob("*.whl"))


def test_wrong_sdist_fails_the_build(checkout, tmp_path):
    (tmp_path / "other.tar.gz").write_bytes(b"something else")
    done = wheel_hook(checkout, tmp_path / "other.tar.gz", tmp_path)
    assert done.returncode == 1
    assert (
        f"other.tar.gz is not megatron-core 0.19.2\n  expected sha256 {upstream.Pin.read(ROOT).sha256}"
        in done.stdout
    )


def test_builds_at_once_in_one_checkout(checkout, sdist, tmp_path):
    """They share build/: without the lock they would unpack over each other."""
    script = HOOK.format("prepare_metadata_for_build_wheel(sys.argv[1])")
    command = [sys.executable, "-c", script]
    folders = [tmp_path / str(n) for n in range(4)]
    for folder in folders:
        folder.mkdir()
    env = {"MEGATRON_CORE_SDIST": str(sdist), "PATH": "/usr/bin:/bin"}
    started = [
        subprocess.Popen([*command, f], cwd=checkout, env=env, stderr=subprocess.DEVNULL) for f in folders
    ]
    assert [process.wait() for process in started] == [0] * 4
    found = {f.joinpath(f"megatron_core-{VERSION}.dist-info/METADATA").read_bytes() for f in folders}
    assert len(found) == 1


# ---------------------------------------------------------------- Python


def test_old_python_gets_a_clear_message():
    script = "import sys; sys.version_info = (3, 11, 4, 'final', 0); import patchset"
    done = run(sys.executable, "-c", script, cwd=ROOT, check=False)
    assert done.returncode == 1
    assert done.stdout.startswith("megatron-core needs Python 3.12 or newer; this is ")
    assert "Traceback" not in done.stdout
    for name in ("__init__", "__main__"):  # an old interpreter must be able to read as far as the message
        ast.parse((ROOT / f"patchset/{name}.py").read_text(), feature_version=(3, 8))


@pytest.mark.parametrize("name", ["python3.8", "python3.9", "python3.10", "python3.11"])
def test_with_a_real_old_python(name, checkout):
    try:
        subprocess.run([name, "-c", ""], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip(f"no {name} here")
    for command in (
        [name, "-m", "patchset", "check"],
        [name, checkout / "patchset", "check"],
        [name, "-c", "import patchset.backend"],
    ):
        done = run(*command, cwd=checkout, check=False)
        assert done.returncode == 1
        assert done.stdout.startswith(
            f"megatron-core needs Python 3.12 or newer; this is {name.removeprefix('python')}."
        )
