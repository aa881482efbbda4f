"""The applier: every hunk at exactly its line, every file from and to exactly the stated state."""

import subprocess

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from patchset import queue

TWINS = "class A:\n    x: int\n\n\nclass B:\n    x: int\n\n\nclass C:\n    x: int\n"
INTO_B = "--- a/twins.py\n+++ b/twins.py\n@@ -6 +6,2 @@ class B:\n     x: int\n+    y: int\n"


def apply(tmp_path, patch, exact=False, **files):
    """Apply a patch to a tree with these files (`_` for the dot); the conflicts."""
    place = tmp_path / "tree"
    place.mkdir(exist_ok=True)
    for name, text in files.items():
        (place / name.replace("_", ".")).write_bytes(text.encode())
    (tmp_path / "a-b.patch").write_bytes(patch.encode())
    return queue.apply(tmp_path / "a-b.patch", place, exact)


def read(tmp_path, name):
    return (tmp_path / "tree" / name).read_bytes().decode()


def test_one_context_line_lands_in_its_own_class(tmp_path):
    patch = INTO_B.replace("@@ -6 +6,2 @@", "@@ -6,2 +6,3 @@") + " \n"
    assert apply(tmp_path, patch, twins_py=TWINS) == []
    assert read(tmp_path, "twins.py") == TWINS.replace(
        "class B:\n    x: int\n", "class B:\n    x: int\n    y: int\n"
    )


def test_offset_is_refused_where_git_and_patch_accept_it(tmp_path):
    """Two lines were added above; `git apply` puts the field into some class and exits 0."""
    patch = INTO_B.replace("@@ -6 +6,2 @@", "@@ -6,2 +6,3 @@") + " \n"
    (conflict,) = apply(tmp_path, patch, twins_py="import os\n\n" + TWINS)
    assert str(conflict) == (
        "a-b.patch:3: twins.py: the hunk for line 6 does not apply\n"
        "  expected:\n    |     x: int\n    | \n"
        "  found:\n    | \n    | class B:\n"
        "  the expected lines are at lines 4, 8: ambiguous"
    )
    assert not conflict.offset
    assert read(tmp_path, "twins.py") == "import os\n\n" + TWINS
    done = subprocess.run(["git", "apply", tmp_path / "a-b.patch"], cwd=tmp_path / "tree", check=False)
    assert done.returncode == 0 and read(tmp_path, "twins.py") != "import os\n\n" + TWINS


def test_offset_to_one_other_place_says_where(tmp_path):
    patch = "--- a/f.py\n+++ b/f.py\n@@ -2,2 +2,3 @@\n two\n+new\n three\n"
    (conflict,) = apply(tmp_path, patch, f_py="zero\none\ntwo\nthree\n")
    assert conflict.offset
    assert "the hunk for line 2 does not apply" in conflict.why
    assert conflict.why.endswith("the expected lines are at line 3: offset +1")


def test_every_conflict_of_a_series_is_in_one_error(tmp_path):
    text = "".join(f"{n}\n" for n in range(1, 31))
    hunk = "@@ -{0},2 +{0},3 @@\n {1}\n+new\n {2}\n"
    first = (
        "--- a/f.py\n+++ b/f.py\n" + hunk.format(2, 2, 3) + hunk.format(9, 99, 10) + hunk.format(20, 20, 21)
    )
    second = (
        "--- a/f.py\n+++ b/f.py\n"
        + hunk.format(16, 77, 15)
        + "--- a/gone.py\n+++ b/gone.py\n"
        + hunk.format(1, 1, 2)
    )
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/f.py").write_text(text)
    for name, patch in (("one.patch", first), ("two.diff", second)):
        (tmp_path / name).write_text(patch)
    with pytest.raises(queue.PatchError) as error:
        queue.apply_all(queue.series(tmp_path), tmp_path / "tree", exact=False)
    assert [line for line in str(error.value).splitlines() if not line.startswith(" ")] == [
        "3 conflicts:",
        "one.patch:7: f.py: the hunk for line 9 does not apply",
        "two.diff:3: f.py: the hunk for line 16 does not apply",
        "two.diff:7: gone.py: there is no such file in the tree",
    ]
    # The hunks that fit were taken, so that the second patch was judged on what it would have met.
    assert read(tmp_path, "f.py") == text.replace("2\n3\n", "2\nnew\n3\n", 1).replace(
        "20\n21\n", "20\nnew\n21\n"
    )


def test_hunk_at_the_end_of_its_file_does_not_land_inside_a_longer_one(tmp_path):
    (conflict,) = apply(tmp_path, INTO_B.replace("-6 +6,2", "-6 +6,2"), twins_py=TWINS)
    assert conflict.why.startswith(
        "the hunk for line 6 belongs at the end of the file, and the file goes on:\n"
    )


def test_insertion_without_context_is_refused(tmp_path):
    (conflict,) = apply(tmp_path, "--- a/f.py\n+++ b/f.py\n@@ -1,0 +2 @@\n+new\n", f_py="one\ntwo\n")
    assert conflict.why == "the hunk for line 2 has no context, so nothing says that it belongs there"


IDS = """diff --git a/f.py b/f.py
index {0}..{1} 100644
--- a/f.py
+++ b/f.py
@@ -1,2 +1,3 @@
 one
+new
 two
"""


def test_our_patch_states_the_file_before_and_after(tmp_path):
    before, after = queue.blob(b"one\ntwo\nthree\n"), queue.blob(b"one\nnew\ntwo\nthree\n")
    (one,) = apply(tmp_path, IDS.format(before, after), exact=True, f_py="one\ntwo\nTHREE\n")
    assert str(one).endswith(
        f"made for another state of this file: {before[:12]}, not {queue.blob(b'one\ntwo\nTHREE\n')[:12]}"
    )
    (two,) = apply(tmp_path, IDS.format(before, before), exact=True, f_py="one\ntwo\nthree\n")
    assert two.why == f"the result is {after[:12]}, the patch states {before[:12]}"
    (three,) = apply(tmp_path, IDS.format(before[:9], after[:9]), exact=True, f_py="one\ntwo\nthree\n")
    assert three.why.startswith("not a change to an existing file with a full index line")
    assert apply(tmp_path, IDS.format(before, after), exact=True, f_py="one\ntwo\nthree\n") == []


def test_someone_elses_patch_needs_no_object_names(tmp_path):
    other = queue.blob(b"whatever it was made for\n")
    assert apply(tmp_path, IDS.format(other, other), f_py="one\ntwo\nthree\n") == []
    assert read(tmp_path, "f.py") == "one\nnew\ntwo\nthree\n"


def test_inside_another_work_tree_the_files_change(tmp_path):
    """`git apply` does nothing there and exits 0."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    patch = IDS.format(queue.blob(b"one\ntwo\n"), queue.blob(b"one\nnew\ntwo\n"))
    assert apply(tmp_path, patch, exact=True, f_py="one\ntwo\n") == []
    assert read(tmp_path, "f.py") == "one\nnew\ntwo\n"
    (tmp_path / "tree/f.py").write_text("one\ntwo\n")
    done = subprocess.run(["git", "apply", tmp_path / "a-b.patch"], cwd=tmp_path / "tree", check=False)
    assert done.returncode == 0


ONE = "--- a/f.py\n+++ b/f.py\n"
COUNTS = "a-b.patch:3: the hunk does not have the lines that its header counts"


@pytest.mark.parametrize(
    "patch, message",
    [
        ("nothing of a patch\n", "a-b.patch: changes nothing"),
        (
            "--- a/../f.py\n+++ b/../f.py\n@@ -1 +1 @@\n-one\n+1\n",
            "a-b.patch:1: ../f.py is not a path inside the tree",
        ),
        (
            "--- a/f.py\n+++ b/f.py\n@@ -1,2 +1,2 @@\n-one\n+1\n",
            "a-b.patch:3: the hunk ends before its counts are met",
        ),
        ("--- a/f.py\n+++ b/f.py\n@@ -1 +1 @@\n-one\n*1\n", "a-b.patch:5: malformed hunk"),
        (ONE + "@@ -1 +1 @@\n-one\n+1\n+2\n", COUNTS),
        (ONE + "@@ -1 +1 @@\n one\n-two\n", COUNTS),
        (ONE + "@@ -1,2 +1 @@\n-one\n+1\n+2\n-two\n", COUNTS),
        (
            "diff --cc f.py\n@@@ -1,1 -1,1 +1,1 @@@\n",
            "a-b.patch:1: the diff of a merge; diff against one parent",
        ),
    ],
)
def test_malformed_patch(tmp_path, patch, message):
    with pytest.raises(queue.PatchError) as error:
        apply(tmp_path, patch, f_py="one\n")
    assert str(error.value) == message


def test_binary_change_is_a_conflict(tmp_path):
    patch = "diff --git a/f.py b/f.py\nindex 1..2 100644\nBinary files a/f.py and b/f.py differ\n"
    assert [c.why for c in apply(tmp_path, patch, f_py="one\n")] == ["a binary change"]


line = st.sampled_from(["a", "b", "", "c\r", "\t", "+x", "-y", "-- ", "@@ -1 +1 @@", "diff --git a/f b/f"])
text = st.tuples(st.lists(line, max_size=12), st.sampled_from(["", "\n"])).map(
    lambda t: "\n".join(t[0]) + t[1]
)
folder = st.dictionaries(st.sampled_from(["f.py", "g.py", "sub/h with space.py"]), text, max_size=3)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=folder, after=folder, context=st.integers(1, 3), full=st.booleans())
def test_what_git_diffs_is_what_is_applied(tmp_path_factory, before, after, context, full):
    """New files, removed files, renames, missing newlines at the end: all comes out as git had it."""
    place = tmp_path_factory.mktemp("property")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.invalid", "-C", place / "new"]

    def write(where, files):
        for name, content in files.items():
            (where / name).parent.mkdir(parents=True, exist_ok=True)
            (where / name).write_bytes(content.encode())

    write(place / "old", before)
    write(place / "new", before)
    (place / "old").mkdir(exist_ok=True)
    subprocess.run(["git", "init", "-q", place / "new"], check=True)
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "old"], check=True)
    for name in before:
        (place / "new" / name).unlink()
    write(place / "new", after)
    subprocess.run([*git, "add", "-A"], check=True)
    options = [f"-U{context}", "-M"] + ["--full-index"] * full
    patch = subprocess.run(
        [*git, "diff", "--cached", *options, "HEAD"], check=True, stdout=subprocess.PIPE
    ).stdout
    (place / "a-b.patch").write_bytes(patch)
    if patch:
        assert queue.apply(place / "a-b.patch", place / "old", exact=False) == []
    found = {
        str(p.relative_to(place / "old")): p.read_bytes() for p in (place / "old").rglob("*") if p.is_file()
    }
    assert found == {name: content.encode() for name, content in after.items()}
