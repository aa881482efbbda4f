"""The gate, on real repositories: what passes, and which check refuses what."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from patchset import ROOT, evidence, tags
from patchset.gate import Gate
from tests.patches.conftest import run
from tests.patches.fork import DAY, FIRST, SECOND, SUBMODULE, outcomes

DAY_AFTER = "2026-11-30T10:00:00+00:00"
CHECKS = "gitlink checkout remote tag branch evidence tests gpu fast-forward worktree".split()


def passed(report):
    assert [(r.name, r.ok) for r in report.results] == [(name, True) for name in CHECKS], report
    return {r.name: r.text for r in report.results}


def refused(report, name, text):
    """The first check that failed, with what it says; and all failing ones are named in the report."""
    assert report.failed and report.failed.name == name, report
    assert text in report.failed.text, report
    return report


# ---------------------------------------------------------------- what passes


def test_happy_path(fork):
    texts = passed(fork.gate())
    assert texts == {
        "gitlink": f"{SUBMODULE} is pinned to {fork.at(SECOND)}",
        "checkout": f"{SUBMODULE} is a checkout",
        "remote": "2 release tags at origin",
        "tag": SECOND,
        "branch": "on sirl-stable",
        "evidence": "0.1.0+ours.2, of this commit",
        "tests": "patches 4 passed 0 skipped, cpu 5 passed 1 skipped, dist 6 passed 2 skipped",
        "gpu": "A Test GPU 7 passed 2 skipped",
        "fast-forward": f"descends from {fork.at(FIRST)}, the pin of the parent of HEAD",
        "worktree": "the files are those of the pin",
    }


@pytest.mark.parametrize("inside", [False, True])
def test_command_line_from_any_directory(fork, tmp_path, inside):
    """By its path in the submodule, on the bare standard library; also in a hook, which sets GIT_DIR."""
    command = [sys.executable, "-S", fork.submodule / "patchset", "gate", "--submodule", SUBMODULE]
    where, env = (fork.submodule / "patches", {"GIT_DIR": "/nowhere"}) if inside else (tmp_path, {})
    done = run(*command, "--downstream", fork.downstream, cwd=where, **env)
    lines = done.stdout.splitlines()
    assert [line.split()[1] for line in lines[:-1]] == [f"{name}:" for name in CHECKS]
    assert lines[3] == f"ok    tag: {SECOND}"
    assert lines[-1] == "the pin may be used"
    assert not (fork.submodule / "build").exists()


def test_command_line_of_the_readme(fork):
    """The same for hands and for CI."""
    found = re.findall(r"python (third_party/megatron/patchset gate .*)", (ROOT / "README.md").read_text())
    assert len(found) == 2 and found[0] == found[1]
    run(sys.executable, *found[0].split(), cwd=fork.downstream)


def test_command_line_refuses_with_the_name_of_the_check(fork):
    command = [
        sys.executable,
        fork.submodule / "patchset",
        "gate",
        "--downstream",
        ".",
        "--submodule",
        SUBMODULE,
    ]
    (fork.submodule / "megatron/new.py").write_text("")
    done = run(*command, cwd=fork.downstream, check=False)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-2:] == [
        f"FAIL  worktree: {SUBMODULE} has changes: ?? megatron/new.py",
        "patchset: refused by the check worktree",
    ]
    done = run(*command, "--json", cwd=fork.downstream, check=False)
    found = json.loads(done.stdout)
    assert done.returncode == 1
    assert (found["ok"], found["failed"], found["pin"], found["tag"]) == (
        False,
        "worktree",
        fork.at(SECOND),
        SECOND,
    )
    assert [(c["name"], c["ok"]) for c in found["checks"]] == [(name, name != "worktree") for name in CHECKS]
    assert found["checks"][-1]["text"] == f"{SUBMODULE} has changes: ?? megatron/new.py"
    (fork.submodule / "megatron/new.py").unlink()
    done = run(*command, "--json", cwd=fork.downstream)
    assert (json.loads(done.stdout)["ok"], json.loads(done.stdout)["failed"]) == (True, None)


def test_tag_that_only_the_remote_has(fork):
    """It is read there; the tags and branches of the checkout stay as they are."""
    fork.git("tag", "-d", SECOND, where=fork.submodule)
    before = fork.git("for-each-ref", where=fork.submodule)
    assert passed(fork.gate())["tag"] == SECOND
    assert fork.git("for-each-ref", where=fork.submodule) == before


def test_shallow_checkout_with_the_tag_turned_lightweight(fork, tmp_path):
    """What a CI checkout leaves: one commit of either repository, and the tag as a ref to the commit."""
    ci = tmp_path / "ci"
    fork.git("clone", "-q", "--depth=1", f"file://{fork.downstream}", ci, where=tmp_path)
    fork.git("init", "-q", ci / SUBMODULE, where=ci)
    inner = ci / SUBMODULE
    fork.git("remote", "add", "origin", f"file://{fork.remote}", where=inner)
    spec = f"+{fork.at(SECOND)}:refs/tags/{SECOND}"
    fork.git("fetch", "-q", "--depth=1", "--no-tags", "origin", spec, where=inner)
    fork.git("checkout", "-q", "--detach", SECOND, where=inner)
    assert fork.git("cat-file", "-t", SECOND, where=inner) == "commit"
    assert fork.git("rev-list", "--count", "HEAD", where=inner) == "1"
    assert fork.git("rev-list", "--count", "HEAD", where=ci) == "1"
    texts = passed(fork.gate(downstream=ci))
    assert texts["tag"] == (
        f"{SECOND} (lightweight in this checkout, as some CI checkouts leave it; "
        "the annotated one was read at origin)"
    )
    assert texts["fast-forward"] == f"descends from {fork.at(FIRST)}, the pin of the parent of HEAD"


def test_shallow_checkout_whose_remote_cannot_be_read(fork, tmp_path):
    ci = tmp_path / "ci"
    fork.git("clone", "-q", "--depth=1", f"file://{fork.downstream}", ci, where=tmp_path)
    fork.git("clone", "-q", fork.remote, ci / SUBMODULE, where=tmp_path)
    fork.git("checkout", "-q", "--detach", SECOND, where=ci / SUBMODULE)
    fork.git("remote", "set-url", "origin", "/nowhere", where=ci)
    refused(
        fork.gate(downstream=ci), "fast-forward", "this clone is too shallow to compare pins (fetch-depth: 2"
    )


def test_downstream_may_be_a_folder_of_the_repository(fork):
    passed(Gate(fork.downstream / "third_party", Path("megatron")).report())
    passed(Gate(fork.downstream, fork.submodule).report())


# ---------------------------------------------------------------- the pin is not a release


def test_gitlink_at_a_branch_head(fork):
    _, merge = fork.land(DAY_AFTER, {"megatron/ours.py": "thing = 3\n"})
    fork.pin(merge)
    text = f"no release tag names {merge}: it is the head of refs/heads/sirl-stable"
    report = refused(fork.gate(), "tag", text)
    assert {r.name: r.ok for r in report.results} == dict.fromkeys(CHECKS, True) | {
        "tag": False,
        "branch": None,
        "evidence": None,
        "tests": None,
        "gpu": None,
    }
    assert report.results[CHECKS.index("tests")].text == "not checked, since evidence did not pass"


def test_gitlink_at_the_reviewed_head_instead_of_the_merge(fork):
    head = fork.git("rev-parse", f"{SECOND}^2")
    fork.pin(head)
    text = f"it is the reviewed head that {SECOND} merged; pin the merge, {fork.at(SECOND)}"
    refused(fork.gate(), "tag", f"no release tag names {head}: {text}")


def test_reviewed_head_with_a_tag_of_its_own(fork):
    """In the history of the stable branch, and yet not one of its commits."""
    head = fork.git("rev-parse", f"{SECOND}^2")
    name = "megatron-sirl-stable-2026.11.29.2"
    statement = evidence.read(fork.message(SECOND))
    statement["subject"][0]["digest"] = {
        "gitCommit": head,
        "gitTree": fork.git("rev-parse", f"{head}^{{tree}}"),
    }
    statement["predicate"]["reviewed"] = []
    fork.retag(name, head, evidence.message(name, "", statement))
    fork.pin(head)
    refused(fork.gate(), "branch", f"{name} is not on sirl-stable: {head[:12]} is none of its own commits")


def test_tag_on_another_branch(fork):
    """The same merge, but landed beside the stable branch."""
    fork.git("checkout", "-q", "-b", "beside")
    fork.git("commit", "-q", "--allow-empty", "-m", "more", date=DAY_AFTER)
    fork.git("push", "-q", "origin", "beside")
    head = fork.at("HEAD")
    name = "megatron-sirl-stable-2026.11.30.1"
    fork.retag(name, head, fork.message(SECOND))
    fork.pin(head)
    refused(fork.gate(), "branch", f"{name} is not on sirl-stable")


def test_no_stable_branch_at_the_remote(fork):
    fork.git("push", "-q", "origin", f":{tags.BRANCH}")
    refused(fork.gate(), "branch", "origin has no branch sirl-stable")


def test_lightweight_tag(fork):
    fork.git("tag", "-f", SECOND, fork.at(SECOND))
    fork.git("push", "-q", "-f", "origin", f"refs/tags/{SECOND}")
    refused(fork.gate(), "tag", f"{SECOND} is a lightweight tag: it carries no evidence")


def test_tag_that_only_this_checkout_has(fork):
    fork.git("push", "-q", "origin", f":refs/tags/{SECOND}")
    refused(
        fork.gate(), "tag", f"no release tag names {fork.at(SECOND)}: {SECOND} is here, but not at origin"
    )


@pytest.mark.parametrize(
    "bad", ["2026.11.29", "2026.11.29.0", "2026.11.29.01", "2026.02.30.1", "2026.11.9.1"]
)
def test_tag_with_a_bad_name(fork, bad):
    name = f"megatron-sirl-stable-{bad}"
    fork.retag(name, fork.at(SECOND), fork.message(SECOND))
    fork.git("push", "-q", "origin", f":refs/tags/{SECOND}")
    refused(fork.gate(), "tag", f"{name} is not of the form megatron-sirl-stable-YYYY.MM.DD.N")


def test_tag_of_another_family(fork):
    assert fork.gate(family=tags.Family("other")).failed.text.startswith("no release tag names")
    name = SECOND.replace("megatron", "other")
    fork.retag(name, fork.at(SECOND), fork.message(SECOND))
    assert passed(fork.gate(family=tags.Family("other")))["tag"] == name


def test_renamed_tag(fork):
    name = "megatron-sirl-stable-2026.11.29.2"
    fork.git("push", "-q", "origin", f"refs/tags/{SECOND}:refs/tags/{name}", f":refs/tags/{SECOND}")
    refused(fork.gate(), "tag", f"{name} was made as {SECOND}")


def test_two_tags_on_one_commit(fork):
    name = "megatron-sirl-stable-2026.11.29.2"
    fork.retag(name, fork.at(SECOND), fork.message(SECOND))
    refused(fork.gate(), "tag", f"{SECOND} and {name} name one commit: which release is it?")


# ---------------------------------------------------------------- moved tags


def test_tag_moved_since_it_was_fetched(fork):
    """The same commit under other evidence is a move, too."""
    fork.git("fetch", "-q", "--tags", where=fork.submodule)
    fork.forge(SECOND, lambda statement: statement["predicate"].update(made="later"))
    here, there = fork.git("rev-parse", SECOND, where=fork.submodule), fork.git("rev-parse", SECOND)
    refused(fork.gate(), "tag", f"{SECOND} was moved: it is {here[:12]} here and {there[:12]} at the remote")


def test_tag_moved_to_a_later_commit(fork):
    _, merge = fork.land(DAY_AFTER, {"megatron/ours.py": "thing = 3\n"})
    fork.retag(SECOND, merge, fork.message(SECOND))
    fork.pin(merge)
    refused(fork.gate(), "tag", f"{SECOND} names a commit that landed on 2026.11.30: moved?")


def test_tag_moved_within_a_day_has_the_evidence_of_another_commit(fork):
    before = fork.at(SECOND)
    _, merge = fork.land(DAY[SECOND], {"megatron/ours.py": "thing = 3\n"})
    fork.retag(SECOND, merge, fork.message(SECOND))
    fork.pin(merge)
    text = f"the evidence is of commit {before[:12]}, not of {merge[:12]}"
    refused(fork.gate(), "evidence", text)


# ---------------------------------------------------------------- evidence


def test_evidence_without_a_hash_or_without_an_end(fork):
    for cut in ("Evidence-SHA256: ", evidence.END):
        fork.retag(SECOND, fork.at(SECOND), fork.message(SECOND).replace(cut, ""))
        fork.git("fetch", "-q", "--tags", "-f", where=fork.submodule)
        refused(fork.gate(), "evidence", "there is no evidence in the message")


def test_evidence_edited(fork):
    edited = fork.message(SECOND).replace('"failed": 0', '"failed": 1', 1)
    fork.retag(SECOND, fork.at(SECOND), edited)
    fork.git("fetch", "-q", "--tags", "-f", where=fork.submodule)
    refused(
        fork.gate(), "evidence", "the evidence was edited: it does not have the hash that the message states"
    )


@pytest.mark.parametrize(
    "field, value, text",
    [
        ("version", "0.1.0+ours.9", 'version is "0.1.0+ours.2", the evidence says "0.1.0+ours.9"'),
        ("source", "0" * 64, f'the evidence says "{"0" * 64}"'),
        ("series", {"patches": 1, "sha256": "0" * 64}, "series is {"),
        ("upstream", {"name": "megatron-core", "version": "0.1.0", "sha256": "0" * 64}, "upstream is {"),
        ("reviewed", [], "reviewed is ["),
        ("gpu", "none", "gpu is ["),
        ("benchmarks", [{"path": "x", "sha256": "0" * 64}], "benchmarks is []"),
        ("tiers", {}, "tests"),
        ("more", 1, "the evidence is malformed: .predicate.more is unknown"),
        ("made", None, "the evidence is malformed: .predicate.made is no str"),
    ],
)
def test_evidence_edited_under_a_right_hash(fork, field, value, text):
    """What the commit gives itself is compared with it."""
    fork.forge(SECOND, lambda statement: statement["predicate"].update({field: value}))
    fork.git("fetch", "-q", "--tags", "-f", where=fork.submodule)
    if field == "tiers":
        refused(
            fork.gate(), "tests", "tier cpu: nothing passed; tier dist: nothing passed; tier patches: nothing"
        )
    else:
        refused(fork.gate(), "evidence", text)


def test_evidence_of_another_tree(fork):
    fork.forge(SECOND, lambda statement: statement["subject"][0]["digest"].update(gitTree="0" * 40))
    fork.git("fetch", "-q", "--tags", "-f", where=fork.submodule)
    refused(fork.gate(), "evidence", f"the evidence says {'0' * 40}")


def red(statement, **change):
    statement["predicate"]["tiers"]["cpu"].update(change)


@pytest.mark.parametrize(
    "change, text",
    [
        (lambda s: red(s, failed=2), "tier cpu: 2 failed"),
        (lambda s: red(s, passed=0), "tier cpu: nothing passed"),
        (lambda s: s["predicate"]["tiers"].pop("dist"), "tier dist: nothing passed"),
        (
            lambda s: s["predicate"]["tiers"].update(other=outcomes(0)["tiers"]["cpu"] | {"failed": 1}),
            "tier other: 1 f",
        ),
        (lambda s: s["predicate"]["commands"][2].update(status=2), "make test exited with 2"),
        (lambda s: s["predicate"]["commands"].pop(1), "make check was not run"),
    ],
)
def test_red_tier(fork, change, text):
    fork.forge(SECOND, change)
    fork.git("fetch", "-q", "--tags", "-f", where=fork.submodule)
    refused(fork.gate(), "tests", text)


def test_no_gpu_record(fork):
    name = fork.release(DAY_AFTER, gpu=False)
    fork.pin(name)
    refused(fork.gate(), "gpu", "the release has no GPU test record; --allow-skipped-gpu accepts that")
    assert passed(fork.gate(allow_skipped_gpu=True))["gpu"] == "none"


def test_red_gpu_record_is_never_accepted(fork):
    """Such a release cannot be tagged; one that was, all the same, is refused."""
    for change, text in (({"failed": 3}, "7 passed, 3 failed"), ({"passed": 0}, "0 passed, 0 failed")):
        fork.land(DAY_AFTER, fork.next_version())
        _, merge = fork.land(DAY_AFTER, fork.gpu_record(**change))
        made = fork.making()
        made.collect()
        statement = json.loads((made.folder / "evidence.json").read_text())
        fork.retag(made.name, merge, evidence.message(made.name, "", statement))
        fork.pin(merge)
        path = f"benchmarks/results/a-gpu/{statement['predicate']['version']}/gpu_tests.json"
        refused(fork.gate(allow_skipped_gpu=True), "gpu", f"{path}: {text}")


# ---------------------------------------------------------------- old and new pin


def test_rollback(fork):
    fork.pin(FIRST)
    text = (
        f"{fork.at(FIRST)[:12]} does not descend from {fork.at(SECOND)[:12]}, the pin of the parent of HEAD"
    )
    refused(fork.gate(), "fast-forward", text)
    assert passed(fork.gate(rollback=True))["fast-forward"].startswith("not asked for (--rollback)")


def test_staged_pin_is_compared_with_head(fork):
    fork.pin(FIRST, commit=False)
    refused(fork.gate(), "fast-forward", f"{fork.at(SECOND)[:12]}, the pin of HEAD;")


def test_later_commits_of_downstream(fork):
    """The pin does not move with them; a base says where a branch began."""
    fork.pin(FIRST)
    fork.git("commit", "-q", "--allow-empty", "-m", "other work", where=fork.downstream)
    assert passed(fork.gate())["fast-forward"] == "the pin of the parent of HEAD"
    refused(fork.gate(base="HEAD~2"), "fast-forward", "the pin of HEAD~2; --rollback accepts that")
    refused(fork.gate(base="gone"), "fast-forward", "there is no commit gone in ")


def test_first_pin(fork):
    first = fork.git("rev-list", "--max-parents=0", "HEAD", where=fork.downstream)
    fork.git("reset", "-q", "--hard", first, where=fork.downstream)
    fork.git("checkout", "-q", FIRST, where=fork.submodule)
    assert passed(fork.gate())["fast-forward"] == "the first pin: the first commit has none"
    fork.git("rm", "-q", "--cached", SUBMODULE, where=fork.downstream)
    fork.git("commit", "-q", "--amend", "-m", "without", where=fork.downstream)
    fork.git("add", SUBMODULE, where=fork.downstream)
    assert passed(fork.gate())["fast-forward"] == "the first pin: HEAD has none"


def test_old_pin_that_the_remote_does_not_know(fork):
    fork.git("commit", "-q", "--allow-empty", "-m", "private", where=fork.submodule)
    fork.git("add", SUBMODULE, where=fork.downstream)
    fork.git("commit", "-qm", "private", where=fork.downstream)
    refused(fork.gate(), "tag", "a commit between releases, or a private one")
    fork.pin(SECOND)
    refused(fork.gate(), "fast-forward", "does not descend from")


# ---------------------------------------------------------------- the checkout


def test_worktree_at_another_commit(fork):
    fork.git("checkout", "-q", FIRST, where=fork.submodule)
    refused(
        fork.gate(), "worktree", f"{SUBMODULE} is at {fork.at(FIRST)}: git submodule update -- {SUBMODULE}"
    )


def test_worktree_with_changes(fork):
    (fork.submodule / "megatron/ours.py").write_text("thing = 0\n")
    refused(fork.gate(), "worktree", f"{SUBMODULE} has changes:  M megatron/ours.py")


def test_worktree_with_what_git_ignores(fork):
    """A build inside the submodule is no change."""
    (fork.submodule / "build").mkdir()
    (fork.submodule / "build/x.py").write_text("")
    passed(fork.gate())


def test_submodule_that_is_not_checked_out(fork):
    shutil.rmtree(fork.submodule)
    refused(fork.gate(), "checkout", f"not checked out: git submodule update --init -- {SUBMODULE}")
    fork.submodule.mkdir()
    report = refused(fork.gate(), "checkout", "not checked out")
    assert [r.name for r in report.results if r.ok] == ["gitlink"]


def test_not_a_submodule(fork):
    fork.git("rm", "-q", "-f", SUBMODULE, where=fork.downstream)
    refused(fork.gate(), "gitlink", f"{SUBMODULE} is not a submodule of {fork.downstream}")
    fork.submodule.write_text("a file\n")
    fork.git("add", SUBMODULE, where=fork.downstream)
    refused(fork.gate(), "gitlink", f"{SUBMODULE} is not a submodule of {fork.downstream}")
    refused(fork.gate(downstream=fork.remote.parent), "gitlink", "not a git repository")


def test_submodule_in_a_merge_conflict(fork):
    where = fork.downstream
    fork.git("checkout", "-q", "-b", "other", "HEAD~1", where=where)
    fork.pin(fork.git("rev-parse", f"{SECOND}^2"))
    with pytest.raises(AssertionError, match="CONFLICT"):
        fork.git("merge", "-q", "main", where=where)
    refused(fork.gate(), "gitlink", f"{SUBMODULE} is in a merge conflict")


def test_remote_that_cannot_be_read(fork):
    fork.git("remote", "set-url", "origin", "/nowhere", where=fork.submodule)
    refused(fork.gate(), "remote", "'/nowhere' does not appear to be a git repository")
