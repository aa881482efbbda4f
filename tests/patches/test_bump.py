"""Another upstream release: what applies, what is at an offset, what is not; when the pin moves."""

import pytest

from patchset import bump, replay, tree, upstream
from tests.patches.miniature import UPSTREAM

NUMBERS, TWINS = "megatron/core/numbers.py", "megatron/core/twins.py"


@pytest.fixture
def queued(mini):
    mini.patch("core-first: change line 7", NUMBERS, "line_7 = 7", "line_7 = 70")
    mini.patch("core-twins: rename A", TWINS, "class A:", "class A1:")
    return mini


def state(mini):
    return {p.name: p.read_text() for p in (mini.root / "patches").iterdir()}


def release(mini, **changes):
    """Release 0.2.0 with these files changed: `old -> new` by file."""
    files = dict(UPSTREAM)
    for name, (old, new) in {{"numbers": NUMBERS, "twins": TWINS}[k]: v for k, v in changes.items()}.items():
        files[name] = files[name].replace(old, new)
    return mini.release("0.2.0", files)


def test_exact_release_moves_only_when_confirmed(queued):
    path, before = release(queued, numbers=("line_40 = 40", "line_40 = 41")), state(queued)
    text, applies = bump.bump(queued.root, "0.2.0", confirm=False)
    requirement = f"megatron-core==0.2.0 --hash=sha256:{upstream.digest(path)}\n"
    assert (text, applies) == (
        f"{requirement}core-first.patch: applies\ncore-twins.patch: applies\nmegatron: applies\n"
        "`python -m patchset bump 0.2.0 --confirm` moves the pin",
        True,
    )
    assert state(queued) == before
    assert bump.bump(queued.root, "0.2.0", confirm=True)[1]
    assert state(queued)["upstream.txt"] == requirement
    assert replay.check(queued.root) == []
    tree.materialise(queued.root)
    text = (queued.tree / NUMBERS).read_text()
    assert "line_7 = 70\n" in text and "line_40 = 41\n" in text


def test_offset_is_a_failure_until_confirmed(queued):
    release(queued, numbers=("line_2 = 2\n", "line_2 = 2\nnew = 1\n"))
    before = state(queued)
    text, applies = bump.bump(queued.root, "0.2.0", confirm=False)
    assert not applies and state(queued) == before
    assert "core-first.patch: 0 conflicts, 1 offsets\n" in text
    assert f"{NUMBERS}: the hunk for line 6 does not apply\n" in text
    assert "the expected lines are at line 7: offset +1\n" in text
    assert bump.bump(queued.root, "0.2.0", confirm=True)[1]
    assert "@@ -7,3 +7,3 @@" in state(queued)["core-first.patch"]
    assert (
        state(queued)["core-first.patch"].partition("\n---\n")[0]
        == before["core-first.patch"].partition("\n---\n")[0]
    )
    assert replay.check(queued.root) == []


def test_conflict_keeps_the_pin_whatever_is_confirmed(queued):
    release(queued, numbers=("line_7 = 7", "line_7 = 77"), twins=("class A:", "import os\n\n\nclass A:"))
    before = state(queued)
    text, applies = bump.bump(queued.root, "0.2.0", confirm=True)
    assert not applies and state(queued) == before
    assert "core-first.patch: 1 conflicts, 0 offsets\n" in text
    assert "    | line_7 = 7\n" in text and "    | line_7 = 77\n" in text
    assert "core-twins.patch: 0 conflicts, 1 offsets\n" in text
    assert text.endswith("the pin stays: mend the conflicts in patches/ and try again")


def test_mended_by_hand_it_moves(queued):
    release(queued, numbers=("line_7 = 7", "line_7 = 77"))
    path = queued.root / "patches/core-first.patch"
    path.write_text(path.read_text().replace("-line_7 = 7\n", "-line_7 = 77\n"))
    assert bump.bump(queued.root, "0.2.0", confirm=True)[1]
    assert replay.check(queued.root) == []


def test_release_that_has_our_file_now(queued):
    queued.write("megatron/core/ours.py", "x = 1\n")
    queued.release("0.2.0", UPSTREAM | {"megatron/core/ours.py": "theirs\n"})
    text, applies = bump.bump(queued.root, "0.2.0", confirm=True)
    assert not applies
    assert "megatron/core/ours.py: the release has this file now; move ours or make it a patch\n" in text
