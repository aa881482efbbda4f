"""Edits in build/tree come back as patches: into the right one, byte for byte, or not at all."""

import re

import pytest

from patchset import replay, tree

NUMBERS, TWINS, DEEP = "megatron/core/numbers.py", "megatron/core/twins.py", "megatron/core/part/deep.py"


@pytest.fixture
def queued(mini):
    """Two patches, which share a file."""
    mini.patch("core-first: change line 7", NUMBERS, "line_7 = 7", "line_7 = 70")
    mini.patch("core-second: change line 30", NUMBERS, "line_30 = 30", "line_30 = 300")
    mini.edit(TWINS, "class A:", "class A1:")
    replay.export(mini.root, "core-second")
    return mini


def patches(mini):
    return {p.stem: p.read_text() for p in (mini.root / "patches").glob("*.patch")}


def refused(mini, message, **arguments):
    before, series = patches(mini), (mini.root / "patches/series").read_text()
    with pytest.raises(replay.ExportError) as error:
        replay.export(mini.root, **arguments)
    assert re.search(message, str(error.value)), str(error.value)
    assert (patches(mini), (mini.root / "patches/series").read_text()) == (before, series)


def test_nothing_edited_nothing_written(queued):
    assert replay.export(queued.root) == []
    assert replay.check(queued.root) == []


def test_edit_goes_into_the_patch_that_owns_the_file(queued):
    before = patches(queued)
    queued.edit(TWINS, "class A1:", "class A2:")
    assert [p.stem for p in replay.export(queued.root)] == ["core-second"]
    after = patches(queued)
    assert after["core-first"] == before["core-first"]
    assert "+class A2:\n" in after["core-second"] and "class A1" not in after["core-second"]
    assert "+line_30 = 300\n" in after["core-second"]
    assert tree.edits(queued.root) == [] and tree.stale(queued.root) is None
    assert replay.check(queued.root) == []


def test_edit_of_a_shared_file_names_the_patches(queued):
    queued.edit(NUMBERS, "line_20 = 20", "line_20 = 200")
    queued.edit(DEEP, "deep = 1", "deep = 2")
    refused(
        queued,
        "say which patch takes the edits, export PATCH or export --new SUBJECT:\n"
        f"{NUMBERS}: changed by core-first, core-second\n{DEEP}: changed by no patch$",
    )


def test_named_patch_takes_all_edits_and_later_ones_follow(queued):
    queued.edit(NUMBERS, "line_20 = 20", "line_20 = 200")
    queued.edit(DEEP, "deep = 1", "deep = 2")
    assert [p.stem for p in replay.export(queued.root, "core-first.patch")] == ["core-first", "core-second"]
    after = patches(queued)
    assert "+line_20 = 200\n" in after["core-first"] and "+deep = 2\n" in after["core-first"]
    assert replay.check(queued.root) == []


def test_new_patch_at_the_end(queued):
    queued.edit(DEEP, "deep = 1", "deep = 2")
    (path,) = replay.export(queued.root, subject="core-deep: go deeper")
    assert path == queued.root / "patches/core-deep.patch"
    assert (queued.root / "patches/series").read_text().splitlines()[-1] == "core-deep.patch"
    assert "+deep = 2\n" in path.read_text()
    assert replay.check(queued.root) == [
        "core-deep.patch: the header does not say why the change is needed",
        "core-deep.patch: Removal does not say when the patch can go",
    ]


def test_header_edited_by_hand_is_kept_and_wrapped_as_git_does(queued):
    path = queued.root / "patches/core-first.patch"
    path.write_text(
        path.read_text().replace("core-first: change", "core-first: " + 9 * "change and " + "change")
    )
    assert replay.check(queued.root) == [
        "core-first.patch: a re-export differs; `patchset export` writes it anew"
    ]
    assert replay.export(queued.root) == [path]
    assert re.search(r"^Subject: .+\n .+change line 7$", path.read_text(), re.MULTILINE)
    assert replay.check(queued.root) == []


def test_edit_that_a_later_patch_overwrites(queued):
    queued.edit(NUMBERS, "line_30 = 300", "line_30 = 301")
    refused(
        queued, "^a later patch changes the same lines; nothing was written\ngit rebase: ", into="core-first"
    )


def test_unknown_patch(queued):
    queued.edit(DEEP, "deep = 1", "deep = 2")
    refused(
        queued, "^there is no patch core-third; the series has core-first core-second$", into="core-third"
    )


@pytest.mark.parametrize("subject", ["core-first: taken", "nodash: x", "no colon", "Upper-Case: x"])
def test_new_patch_needs_a_new_name(queued, subject):
    queued.edit(DEEP, "deep = 1", "deep = 2")
    refused(
        queued,
        f"^'{subject}': a new patch needs edits in build/tree and a new 'area-topic: …'$",
        subject=subject,
    )


def test_new_file_belongs_under_megatron(queued):
    queued.write(f"build/tree/{DEEP.replace('deep', 'new')}", "new = 1\n")
    refused(
        queued, "^a patch adds no file; move these from build/tree to megatron/: megatron/core/part/new.py$"
    )


def test_removed_file(queued):
    (queued.tree / DEEP).unlink()
    refused(queued, f"^a patch removes no file; put back: {DEEP}$")


def test_edits_on_a_tree_of_other_patches(queued):
    """Someone pulled a newer queue: the edited file lacks what it changed there."""
    path = queued.root / "patches/core-second.patch"
    queued.edit(TWINS, "class B:", "class B1:")
    path.write_text(path.read_text().replace("class A1:", "class A7:"))
    refused(queued, "^patches/ changed since build/tree was made, so the edited files may lack what changed")


def test_edits_on_a_tree_with_patches_of_someone_else(queued):
    diff = f"--- a/{DEEP}\n+++ b/{DEEP}\n@@ -1,2 +1,2 @@\n-deep = 1\n+deep = 9\n end = 2\n"
    queued.write("theirs/a.patch", diff)
    tree.materialise(queued.root, extra=queued.root / "theirs")
    queued.edit(DEEP, "end = 2", "end = 3")
    refused(
        queued,
        r"^build/tree holds the patches of (.*/theirs) too; they would end up in ours\n"
        r"to export, .*`materialise --force`.*; edits that belong to \1 go into a patch there$",
    )


def test_without_git(queued, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    tree.materialise(queued.root)
    refused(queued, "^git is needed here: export and check write the patches with it once more$")


def test_users_git_configuration_does_not_matter(queued, monkeypatch, tmp_path):
    config = tmp_path / "config"
    config.write_text(
        "[diff]\n noprefix = true\n renames = copies\n context = 7\n algorithm = patience\n"
        "[format]\n signature = me\n subjectPrefix = RFC\n attach = x\n"
        "[core]\n autocrlf = true\n abbrev = 9\n[commit]\n gpgsign = true\n"
    )
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(config))
    monkeypatch.setenv("GIT_DIR", "/nonexistent")
    assert replay.check(queued.root) == []
