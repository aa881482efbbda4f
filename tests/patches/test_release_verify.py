"""Verification of a release tag: what is computed again, what could not be, what is found wrong."""

import sys

import pytest

from patchset import evidence, runs, tags
from patchset.verify import Verification
from tests.patches import fork as forks
from tests.patches.conftest import run
from tests.patches.fork import DAY, FIRST, SECOND
from tests.patches.test_release import sign

CHECKS = "remote tag signature branch evidence changelog tests gpu sdist wheel".split()


def verify(fork, name=SECOND, **kwargs):
    return Verification(fork.work, name, **{"build": forks.build} | kwargs).report()


def refused(report, name, text):
    assert report.failed and report.failed.name == name, report
    assert text in report.failed.text, report


def test_what_holds_and_what_could_not_be_judged(fork):
    report = verify(fork)
    unmade = ("signature", "tests", "gpu")
    assert [(r.name, r.ok) for r in report.results] == [(n, None if n in unmade else True) for n in CHECKS]
    texts = {r.name: r.text for r in report.results}
    assert texts["tag"] == f"annotated, names {fork.at(SECOND)}"
    assert texts["signature"] == "the tag is not signed"
    assert texts["tests"].startswith("stated, not run again (make test in the commit does): patches 4 passed")
    assert texts["gpu"] == "stated, not run again: A Test GPU 7 passed 2 skipped"
    assert texts["sdist"] == "megatron_core-0.1.0.tar.gz has the pinned hash"
    assert texts["wheel"] == "megatron_core-0.1.0+ours.2-py3-none-any.whl was built again to the same bytes"


def test_any_tag_from_any_checkout(fork):
    """An older release, with later commits and edits in the work tree."""
    fork.land("2026-11-30T10:00:00+00:00", fork.next_version())
    fork.write({"megatron/ours.py": "edited\n"})
    assert verify(fork, FIRST).failed is None


def test_command_line(fork):
    command = [sys.executable, fork.work / "patchset", "verify"]
    done = run(*command, "megatron-sirl-stable-2026.11.28.7", cwd="/", check=False)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[1] == "FAIL  tag: there is no megatron-sirl-stable-2026.11.28.7 at origin"
    assert lines[-1] == "patchset: refused by the check tag"
    done = run(*command, "--prefix", "other", SECOND, cwd="/", check=False)
    assert f"FAIL  tag: there is no {SECOND} at origin\n" in done.stdout


def test_without_a_remote(fork):
    """Then what is here counts, and is said to."""
    fork.git("remote", "set-url", "origin", "/nowhere")
    report = verify(fork)
    assert report.failed is None and report.results[0].ok is None
    assert report.results[0].text.startswith("not read, so what is here counts: git fetch")
    fork.git("remote", "remove", "origin")
    report = verify(fork)
    assert report.failed is None
    assert report.results[0].text == "there is no remote origin: what is here counts"
    fork.git("branch", "-m", "sirl-stable", "renamed")
    assert [(r.ok, r.text) for r in verify(fork).results if r.name == "branch"] == [
        (None, "there is no branch sirl-stable here")
    ]


def test_bad_tags(fork):
    message = fork.message(SECOND)
    fork.git("tag", "-f", SECOND, fork.at(FIRST))
    refused(verify(fork), "tag", f"{SECOND} was moved: it is ")
    fork.git("push", "-q", "-f", "origin", f"refs/tags/{SECOND}")
    refused(verify(fork), "tag", f"{SECOND} is a lightweight tag: it carries no evidence")
    fork.retag(SECOND, fork.at(FIRST), message)
    refused(verify(fork), "tag", f"{SECOND} names a commit that landed on 2026.11.28: moved?")
    fork.git("push", "-q", "origin", f":refs/tags/{FIRST}")
    fork.retag(FIRST, fork.at(FIRST), message)
    fork.git("push", "-q", "origin", f":refs/tags/{SECOND}")
    refused(verify(fork, FIRST), "evidence", "the evidence is of commit ")
    fork.retag(f"{FIRST}1", fork.at(FIRST), message)
    refused(verify(fork, FIRST), "tag", f"{FIRST} and {FIRST}1 name one commit")


def test_tag_off_the_branch(fork):
    head = fork.git("rev-parse", f"{SECOND}^2")
    name = "megatron-sirl-stable-2026.11.29.2"
    fork.retag(name, head, fork.message(SECOND))
    refused(verify(fork, name), "branch", f"{head[:12]} is not one of the commits of sirl-stable itself")


def test_evidence_that_does_not_hold(fork):
    whole = fork.message(SECOND)
    fork.retag(SECOND, fork.at(SECOND), whole.replace("ours.2", "ours.7"))
    refused(verify(fork), "evidence", "the evidence was edited")
    fork.retag(SECOND, fork.at(SECOND), whole)
    fork.forge(SECOND, lambda s: s["predicate"]["series"].update(patches=7))
    refused(verify(fork), "evidence", "series is {")
    fork.retag(SECOND, fork.at(SECOND), whole)
    fork.forge(SECOND, lambda s: s["predicate"]["tiers"]["dist"].update(failed=1))
    refused(verify(fork), "tests", "tier dist: 1 failed")
    fork.retag(SECOND, fork.at(SECOND), whole)
    fork.forge(SECOND, lambda s: s["subject"].append({"name": "x", "digest": {"sha256": "0"}}))
    refused(verify(fork), "evidence", "the evidence has 2 subjects with a sha256, not one")


def test_changelog_without_the_section(fork):
    """Tagged by hand."""
    _, merge = fork.land(DAY[SECOND], {"CHANGELOG.md": "# Changelog\n\n## [Unreleased]\n"})
    name = "megatron-sirl-stable-2026.11.29.2"
    statement = evidence.read(fork.message(SECOND))
    git = {"gitCommit": merge, "gitTree": fork.git("rev-parse", f"{merge}^{{tree}}")}
    statement["subject"][0]["digest"] = git
    statement["predicate"]["reviewed"] = [fork.git("rev-parse", f"{merge}^2")]
    fork.retag(name, merge, evidence.message(name, "", statement))
    refused(verify(fork, name), "changelog", "CHANGELOG.md has no section [0.1.0+ours.2]")


def test_wheel_of_other_bytes(fork, monkeypatch):
    """With the tools of then it is a lie; with others it proves nothing."""

    def build(root, source, out):
        path = forks.build(root, source, out)
        path.write_text("other")
        return path

    refused(
        verify(fork, build=build),
        "wheel",
        "the same tools give megatron_core-0.1.0+ours.2-py3-none-any.whl sha256 d9298a10",
    )
    there = runs.tools(fork.work)
    monkeypatch.setattr(runs, "tools", lambda root: there | {"setuptools": "1.0", "git": "other"})
    report = verify(fork, build=build)
    assert report.failed is None
    assert report.results[-1].text == (
        f"other bytes here, with other tools: setuptools {there['setuptools']} there, 1.0 here"
    )


def test_sdist_that_cannot_be_had(fork, monkeypatch):
    monkeypatch.setenv("MEGATRON_CORE_SDIST", "/nowhere.tar.gz")
    report = verify(fork)
    assert report.failed is None
    assert [(r.name, r.ok) for r in report.results[-2:]] == [("sdist", None), ("wheel", None)]
    assert "MEGATRON_CORE_SDIST=/nowhere.tar.gz: expected the absolute path" in report.results[-2].text


@pytest.mark.parametrize("case", ["good", "bad", "unknown"])
def test_signature(fork, tmp_path, case):
    sign(fork, tmp_path)
    fork.retag(SECOND, fork.at(SECOND), fork.message(SECOND))
    if case == "bad":
        text = fork.git("cat-file", "tag", SECOND).replace("tools: ", "tools, ") + "\n"
        (tmp_path / "tag").write_text(text)
        made = fork.git("hash-object", "-t", "tag", "-w", tmp_path / "tag")
        fork.git("update-ref", f"refs/tags/{SECOND}", made)
        fork.git("push", "-q", "-f", "origin", f"refs/tags/{SECOND}")
        refused(verify(fork), "signature", "bad: ")
        return
    if case == "unknown":
        (tmp_path / "signers").write_text("")
    result = verify(fork).results[CHECKS.index("signature")]
    assert result.ok is {"good": True, "unknown": None}[case], result
    assert result.text.startswith({"good": "good", "unknown": "not verified: "}[case])


def test_family_of_the_tag(fork):
    refused(verify(fork, "v1.0", family=tags.Family("other")), "tag", "there is no v1.0 at origin")
