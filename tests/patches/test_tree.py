"""build/tree: live links, edits that are not lost, staleness that is noticed, patches of someone else."""

import select
import subprocess
import sys
import textwrap

import pytest

from patchset import ROOT, PatchsetError, queue, tree, upstream
from tests.patches.miniature import UPSTREAM


def links(mini):
    return {str(p.relative_to(mini.tree)) for p in mini.tree.rglob("*") if p.is_symlink()}


def test_our_modules_are_links_and_patched_files_are_real(mini):
    mini.write("megatron/core/part/ours.py", "x = 1\n")
    mini.write("megatron/core/new/deeper/a.py", "a = 1\n")
    mini.write("megatron/sync/b.py", "b = 1\n")
    mini.patch("core-numbers: change a line", "megatron/core/numbers.py", "line_7 = 7", "line_7 = 70")
    # The topmost folder that upstream lacks, else the file.
    assert links(mini) == {
        "megatron/core/LOCAL_VERSION",
        "megatron/core/part/ours.py",
        "megatron/core/new",
        "megatron/sync",
    }
    assert "line_7 = 70\n" in (mini.tree / "megatron/core/numbers.py").read_text()
    mini.write("megatron/core/new/deeper/later.py", "later = 1\n")
    assert (mini.tree / "megatron/core/new/deeper/later.py").read_text() == "later = 1\n"
    assert tree.stale(mini.root) is None


def test_materialise_twice_changes_nothing(mini):
    mini.write("megatron/core/new/a.py", "a = 1\n")
    mini.patch("core-numbers: change a line", "megatron/core/numbers.py", "line_7 = 7", "line_7 = 70")
    before = {p: p.lstat().st_mtime_ns for p in mini.tree.rglob("*")}
    tree.materialise(mini.root)
    assert {p: p.lstat().st_mtime_ns for p in mini.tree.rglob("*")} == before


def test_overlay_that_exists_upstream_is_refused(mini):
    mini.write("megatron/core/numbers.py", "ours\n")
    mini.write("megatron/core/part/deep.py", "ours\n")
    with pytest.raises(tree.TreeError) as error:
        tree.materialise(mini.root)
    assert str(error.value) == (
        "megatron/ holds what the tree has already; make these a patch: "
        "megatron/core/numbers.py megatron/core/part/deep.py"
    )


def test_wrong_hash_names_both(mini):
    expected = upstream.digest(mini.sdist)
    mini.sdist.write_bytes(mini.sdist.read_bytes() + b"x")
    with pytest.raises(upstream.UpstreamError) as error:
        tree.materialise(mini.root)
    assert str(error.value) == (
        f"{mini.sdist} is not megatron-core 0.1.0\n"
        f"  expected sha256 {expected}\n  found    sha256 {upstream.digest(mini.sdist)}"
    )


def test_another_version_is_not_the_pinned_one(mini):
    other = mini.release("0.2.0", {"pyproject.toml": ""})
    with pytest.raises(
        upstream.UpstreamError, match=r"megatron_core-0\.2\.0\.tar\.gz is not megatron-core 0\.1\.0"
    ):
        tree.materialise(mini.root)
    assert other.is_file()


@pytest.mark.parametrize("named", ["no/such.tar.gz", "/no/such/file.tar.gz"])
def test_named_sdist_must_be_there(mini, monkeypatch, named):
    monkeypatch.setenv("MEGATRON_CORE_SDIST", named)
    with pytest.raises(upstream.UpstreamError) as error:
        tree.materialise(mini.root)
    assert (
        str(error.value)
        == f"MEGATRON_CORE_SDIST={named}: expected the absolute path of megatron_core-0.1.0.tar.gz"
    )


def test_malformed_pin(mini):
    mini.write("patches/upstream.txt", "megatron-core>=0.1\n")
    with pytest.raises(upstream.UpstreamError, match="not 'megatron-core==VERSION --hash=sha256:DIGEST' but"):
        tree.materialise(mini.root)


# ---------------------------------------------------------------- staleness


def test_stale_when_patches_change(mini):
    assert "is not there\n" in tree.stale(mini.root)
    path = mini.patch("core-numbers: change a line", "megatron/core/numbers.py", "line_7 = 7", "line_7 = 70")
    assert tree.stale(mini.root) is None
    path.write_text(path.read_text().replace("70", "71"))
    assert tree.stale(mini.root) == (
        f"{mini.tree} is stale: patches/ changed since it was made\n"
        f"run in {mini.root}: python -m patchset materialise"
    )


def test_stale_when_a_module_comes_or_goes(mini):
    ours = mini.write("megatron/core/ours.py", "x = 1\n")
    tree.materialise(mini.root)
    later = mini.write("megatron/core/part/later.py", "x = 1\n")
    assert (
        "is stale: megatron/ gained or lost files since it was made: megatron/core/part/later.py\n"
        in tree.stale(mini.root)
    )
    later.unlink()
    assert tree.stale(mini.root) is None
    ours.unlink()
    assert "gained or lost files since it was made: megatron/core/ours.py\n" in tree.stale(mini.root)
    tree.materialise(mini.root)
    assert not (mini.tree / "megatron/core/ours.py").is_symlink()


def test_editing_a_module_of_ours_is_not_staleness(mini):
    mini.write("megatron/core/ours.py", "x = 1\n")
    tree.materialise(mini.root)
    mini.write("megatron/core/ours.py", "x = 2\n")
    assert tree.stale(mini.root) is None
    assert (mini.tree / "megatron/core/ours.py").read_text() == "x = 2\n"


# ---------------------------------------------------------------- in place


def test_edits_are_not_overwritten(mini):
    tree.materialise(mini.root)
    mini.edit("megatron/core/numbers.py", "line_9 = 9", "line_9 = 90")
    with pytest.raises(tree.TreeError) as error:
        tree.materialise(mini.root)
    assert str(error.value) == (
        f"edited in {mini.tree} and not exported: megatron/core/numbers.py\n"
        "keep the edits with `python -m patchset export`, or drop them with `materialise --force`"
    )
    assert "line_9 = 90\n" in (mini.tree / "megatron/core/numbers.py").read_text()
    tree.materialise(mini.root, force=True)
    assert "line_9 = 9\n" in (mini.tree / "megatron/core/numbers.py").read_text()


def test_edits_do_not_get_into_a_wheel(mini):
    tree.materialise(mini.root)
    mini.edit("megatron/core/numbers.py", "line_9 = 9", "line_9 = 90")
    date = tree.build(mini.root, mini.root / "build/wheel", link=False)
    assert date == 1_700_000_000
    files = {str(p.relative_to(mini.root / "build/wheel")) for p in (mini.root / "build/wheel").rglob("*.py")}
    assert files == {name for name in UPSTREAM if name.endswith(".py")}
    assert "line_9 = 9\n" in (mini.root / "build/wheel/megatron/core/numbers.py").read_text()


def test_removed_file_comes_back(mini):
    tree.materialise(mini.root)
    (mini.tree / "megatron/core/numbers.py").unlink()
    tree.materialise(mini.root)
    assert (mini.tree / "megatron/core/numbers.py").is_file()


def test_compiled_extension_stays(mini):
    tree.materialise(mini.root)
    built = mini.write("build/tree/megatron/core/helpers_cpp.so", "compiled")
    mini.patch("core-numbers: change a line", "megatron/core/numbers.py", "line_7 = 7", "line_7 = 70")
    tree.materialise(mini.root, force=True)
    assert built.read_text() == "compiled"


def test_nothing_is_removed_through_a_linked_folder(mini):
    """A folder that a series of someone else makes becomes a link without it, and the other way round."""
    ours = mini.write("megatron/core/new/a.py", "a = 1\n")
    mini.write("theirs/one.patch", "--- /dev/null\n+++ b/megatron/core/new/b.py\n@@ -0,0 +1 @@\n+b = 1\n")
    for extra in (None, mini.root / "theirs", None):
        tree.materialise(mini.root, extra=extra)
        assert (mini.tree / "megatron/core/new").is_symlink() == (extra is None)
        assert (mini.tree / "megatron/core/new/b.py").is_file() == (extra is not None)
        assert (mini.tree / "megatron/core/new/a.py").read_text() == ours.read_text() == "a = 1\n"
    assert sorted(p.name for p in ours.parent.iterdir()) == ["a.py"]


# ---------------------------------------------------------------- patches of someone else


THEIRS = "--- a/megatron/core/numbers.py\n+++ b/megatron/core/numbers.py\n"


def test_their_series_comes_after_ours_and_is_remembered(mini):
    mini.patch(
        "core-numbers: add a line", "megatron/core/numbers.py", "line_7 = 7\n", "line_7 = 7\nours = 1\n"
    )
    one = mini.write("theirs/b.patch", THEIRS + "@@ -8,2 +8,3 @@\n ours = 1\n+theirs = 1\n line_8 = 8\n")
    mini.write("theirs/a.patch", THEIRS + "@@ -30 +30 @@\n-line_29 = 29\n+line_29 = 290\n")
    mini.write("theirs/series", "# in this order\na.patch\nb.patch\n")
    theirs = one.parent
    tree.materialise(mini.root, extra=theirs)
    assert "ours = 1\ntheirs = 1\nline_8 = 8\n" in (mini.tree / "megatron/core/numbers.py").read_text()
    assert tree.stale(mini.root) is None
    one.write_text(one.read_text() + "\n")
    assert tree.stale(mini.root).endswith(f"python -m patchset materialise --extra-series {theirs}")
    tree.materialise(mini.root)
    assert "theirs" not in (mini.tree / "megatron/core/numbers.py").read_text()


def test_all_conflicts_of_their_series_in_one_run_and_the_tree_stays(mini):
    mini.patch("core-numbers: change a line", "megatron/core/numbers.py", "line_7 = 7", "line_7 = 70")
    mini.write("theirs/a.patch", THEIRS + "@@ -6,2 +6,2 @@\n line_6 = 6\n-line_7 = 7\n+line_7 = 71\n")
    mini.write(
        "theirs/b.patch", THEIRS + "@@ -9,3 +9,3 @@\n line_10 = 10\n-line_11 = 11\n+eleven\n line_12 = 12\n"
    )
    mini.write("theirs/c.patch", THEIRS.replace("numbers", "absent") + "@@ -1 +1 @@\n-a\n+b\n")
    with pytest.raises(queue.PatchError) as error:
        tree.materialise(mini.root, extra=mini.root / "theirs")
    assert str(error.value) == textwrap.dedent("""\
        3 conflicts:
        a.patch:3: megatron/core/numbers.py: the hunk for line 6 does not apply
          expected:
            | line_6 = 6
            | line_7 = 7
          found:
            | line_6 = 6
            | line_7 = 70
        b.patch:3: megatron/core/numbers.py: the hunk for line 9 does not apply
          expected:
            | line_10 = 10
            | line_11 = 11
            | line_12 = 12
          found:
            | line_9 = 9
            | line_10 = 10
            | line_11 = 11
          the expected lines are at line 10: offset +1
        c.patch:1: megatron/core/absent.py: there is no such file in the tree""")
    assert "line_7 = 70\n" in (mini.tree / "megatron/core/numbers.py").read_text()
    assert tree.stale(mini.root) is None


def test_their_folder_must_be_there(mini):
    with pytest.raises(queue.PatchError, match="nowhere is not a folder with patches"):
        tree.materialise(mini.root, extra=mini.root / "nowhere")
    mini.write("theirs/readme.txt", "")
    with pytest.raises(queue.PatchError, match=r"theirs has neither a series nor any \*\.patch or \*\.diff"):
        tree.materialise(mini.root, extra=mini.root / "theirs")
    mini.write("theirs/series", "# none yet\n")
    with pytest.raises(queue.PatchError, match=r"theirs/series names no patch$"):
        tree.materialise(mini.root, extra=mini.root / "theirs")


def test_a_patch_that_cannot_be_read_is_listed_with_the_conflicts(mini):
    mini.write("theirs/a.patch", THEIRS + "@@ -6,2 +6,2 @@\n line_6 = 6\n-line_7 = 7\n")
    crlf = (THEIRS + "@@ -30 +30 @@\n-line_30 = 30\n+line_30 = 300\n").replace("\n", "\r\n")
    mini.write("theirs/b.patch", "").write_bytes(crlf.encode())
    git = "diff --git a/megatron/core/numbers.py b/megatron/core/numbers.py\n"
    mini.write("theirs/c.patch", "").write_bytes(git.replace("\n", "\r\n").encode() + crlf.encode())
    mini.write("theirs/d.patch", THEIRS.replace("numbers", "absent") + "@@ -1 +1 @@\n-a\n+b\n")
    with pytest.raises(queue.PatchError) as error:
        tree.materialise(mini.root, extra=mini.root / "theirs")
    assert str(error.value) == textwrap.dedent("""\
        4 conflicts:
        a.patch:3: the hunk ends before its counts are met
        b.patch:1: the lines of this patch end with CR LF; convert them to LF
        c.patch:1: the lines of this patch end with CR LF; convert them to LF
        d.patch:1: megatron/core/absent.py: there is no such file in the tree""")


# ---------------------------------------------------------------- two builds at once


def test_a_second_build_waits(mini):
    script = f"""
import sys; sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from patchset import tree
with tree.lock(Path({str(mini.root)!r})):
    print("in", flush=True)
    sys.stdin.read(1)
"""

    def start():
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [sys.executable, "-c", script], stdin=pipe, stdout=pipe, stderr=pipe, text=True
        )

    with start() as first:
        assert first.stdout.readline() == "in\n"
        with start() as second:
            assert second.stderr.readline() == f"waiting for another build in {mini.root}\n"
            assert select.select([second.stdout], [], [], 0.5)[0] == []
            first.communicate("x")
            assert second.stdout.readline() == "in\n"
            second.communicate("x")
    assert (first.returncode, second.returncode) == (0, 0)


def test_errors_are_of_one_family():
    assert issubclass(tree.TreeError, PatchsetError) and issubclass(queue.PatchError, PatchsetError)
    assert issubclass(upstream.UpstreamError, PatchsetError) and issubclass(PatchsetError, RuntimeError)
