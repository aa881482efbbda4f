"""Plan, evidence, tag: what goes through, and which check refuses what."""

import json
import shutil
import subprocess
import sys

import pytest

from patchset import ROOT, evidence, facts, release, runs, tags, upstream
from patchset.repository import Repository
from tests.patches import fork as forks
from tests.patches.conftest import run
from tests.patches.fork import FIRST, SECOND

DAY_AFTER = "2026-11-30T10:00:00+00:00"
NEXT = "megatron-sirl-stable-2026.11.30.1"
CHECKS = "clean remote branch merge tags name version changelog queue wheel".split()


@pytest.fixture
def landed(fork):
    """Ready to be released."""
    fork.head, fork.merge = fork.land(DAY_AFTER, fork.next_version())
    return fork


def refused(report, name, text):
    assert report.failed and report.failed.name == name, report
    assert text in report.failed.text, report


# ---------------------------------------------------------------- plan


def test_plan(landed):
    made = landed.making()
    report = made.plan()
    digest = upstream.digest(landed.work / "megatron/ours.py")  # the stand-in's wheel
    assert {r.name: (r.ok, r.text) for r in report.results} == {
        "clean": (True, f"the work tree is {landed.merge}"),
        "remote": (True, "origin was read; 2 release tags"),
        "branch": (True, "HEAD is on sirl-stable"),
        "merge": (True, f"HEAD merges the reviewed {landed.head}"),
        "tags": (True, "each is annotated and carries the evidence of its commit"),
        "name": (True, NEXT),
        "version": (True, "0.1.0+ours.3 is new"),
        "changelog": (True, "[0.1.0+ours.3] is there"),
        "queue": (True, "patchset check is clean"),
        "wheel": (True, f"megatron_core-0.1.0+ours.3-py3-none-any.whl sha256 {digest}, from 2 builds"),
    }
    assert made.name == NEXT
    assert landed.git("tag", "-l") == f"{FIRST}\n{SECOND}"


def test_plan_on_the_command_line(landed):
    (landed.work / "untracked").write_text("")
    done = run(sys.executable, landed.work / "patchset", "release", "plan", cwd="/", check=False)
    assert done.returncode == 1
    assert done.stdout.splitlines()[0] == "FAIL  clean: the work tree differs from HEAD: ?? untracked"
    assert done.stdout.splitlines()[-2:] == [
        "?     wheel: not checked, since clean did not pass",
        "patchset: refused by the check clean",
    ]


def test_numbers_count_within_a_day(landed):
    """As numbers, over what is here and at the remote; other days and other families do not count."""
    numbers = []
    for _ in range(4):
        made = landed.making()
        made.collect()
        assert not landed.making().tag().failed
        numbers.append(made.name.rpartition(".")[2])
        if numbers == ["1"]:
            landed.retag("other-sirl-stable-2026.11.30.70", landed.at("HEAD"), landed.message(made.name))
            landed.git("push", "-q", "origin", made.name)
            landed.git("tag", "-d", made.name)
        if numbers == ["1", "2"]:  # and then seven more
            message = landed.message(made.name)
            landed.git("tag", "-d", made.name)
            landed.retag(NEXT.removesuffix("1") + "9", landed.at("HEAD"), message)
        landed.land(DAY_AFTER, landed.next_version())
    assert numbers == ["1", "2", "10", "11"]


def test_date_is_that_of_the_landing_in_utc(fork):
    fork.land("2026-12-01T01:30:00+02:00", fork.next_version())
    made = fork.making()
    assert made.plan().failed is None
    assert made.name == "megatron-sirl-stable-2026.11.30.1"


def test_prefix(landed):
    made = landed.making(family=tags.Family("rl-core"))
    assert made.plan().failed is None
    assert made.name == "rl-core-sirl-stable-2026.11.30.1"
    for bad in ("", "a/b", "-a", "a b", "a..b"):
        with pytest.raises(tags.TagError, match="cannot begin a tag name"):
            tags.Family(bad)


def test_no_remote(landed):
    """A clone that publishes nothing is judged by its own tags and branch."""
    landed.git("remote", "remove", "origin")
    report = landed.making().plan()
    assert report.failed is None
    assert report.results[1].text == "no remote: what is here counts; 2 release tags"


def test_unknown_or_unreadable_remote(landed):
    refused(landed.making(remote="upstream").plan(), "remote", "there is no remote upstream")
    landed.git("remote", "set-url", "origin", "/nowhere")
    refused(landed.making().plan(), "remote", "'/nowhere' does not appear to be a git repository")


def test_not_landed(fork):
    """A head that no merge brought to the stable branch, and a merge that was not pushed."""
    fork.git("checkout", "-q", "-B", "topic")
    fork.commit("topic", fork.next_version(), DAY_AFTER)
    text = "HEAD is not one of the commits of sirl-stable itself: land it there and push first"
    refused(fork.making().plan(), "branch", text)
    fork.git("checkout", "-q", "sirl-stable")
    fork.git("merge", "-q", "--no-ff", "-m", "land", "topic")
    refused(fork.making().plan(), "branch", text)
    fork.git("push", "-q", "origin", "sirl-stable")
    assert fork.making().plan().failed is None
    fork.git("checkout", "-q", "topic")
    refused(fork.making().plan(), "branch", text)
    fork.git("push", "-q", "origin", ":sirl-stable")
    refused(fork.making().plan(), "branch", "there is no branch sirl-stable")


def test_not_a_merge(fork):
    fork.commit("straight", fork.next_version(), DAY_AFTER)
    fork.git("push", "-q", "origin", "sirl-stable")
    refused(fork.making().plan(), "merge", "HEAD is no merge commit: land with git merge --no-ff")


def test_released_already(fork):
    refused(fork.making().plan(), "name", f"this commit is {SECOND} already")


@pytest.mark.parametrize(
    "spoil, text",
    [
        (lambda f: f.git("tag", "-f", SECOND, f.at(SECOND)), f"{SECOND} is a lightweight tag"),
        (lambda f: f.git("tag", "-f", SECOND, f.at(FIRST)), f"{SECOND} was moved: it is "),
        (lambda f: f.retag(SECOND, f.at(FIRST), f.message(SECOND), False), f"{SECOND} was moved: it is "),
        (
            lambda f: f.retag(SECOND, f.at(FIRST), f.message(SECOND)),
            f"{SECOND} names a commit that landed on 2026.11.28",
        ),
        (lambda f: f.retag(SECOND, f.at(SECOND), "text\n"), f"{SECOND}: there is no evidence in the message"),
        (lambda f: f.retag(SECOND, f.at(SECOND), f.message(FIRST)), f"{SECOND}: the evidence is of commit "),
        (
            lambda f: f.retag(f"{FIRST}7", f.at(FIRST), f.message(FIRST)),
            f"{FIRST} and {FIRST}7 name one commit",
        ),
        (lambda f: f.retag(f"{FIRST}x", f.at("HEAD~3"), f.message(FIRST)), f"{FIRST}x is not of the form "),
        (lambda f: f.retag(f"{FIRST}7", f"{FIRST}^{{tree}}", "a tree\n"), f"{FIRST}7 does not name a commit"),
    ],
)
def test_bad_tags_stop_releases(landed, spoil, text):
    """Lightweight here only is a copy; at the remote, or of another commit, it is not."""
    spoil(landed)
    report = landed.making().plan()
    if "lightweight" in text:
        assert report.failed is None
        landed.git("push", "-q", "-f", "origin", f"refs/tags/{SECOND}")
        report = landed.making().plan()
    refused(report, "tags", text)


def test_version_that_is_not_new(fork):
    fork.land(DAY_AFTER, {"megatron/ours.py": "thing = 3\n"})
    text = f"0.1.0+ours.2 is not new: {SECOND} is 0.1.0+ours.2; raise megatron/core/LOCAL_VERSION"
    refused(fork.making().plan(), "version", text)


def test_changelog_without_the_section(fork):
    files = fork.next_version()
    files["CHANGELOG.md"] = files["CHANGELOG.md"].replace("[0.1.0+ours.3]", "[Unreleased]")
    fork.land(DAY_AFTER, files)
    refused(fork.making().plan(), "changelog", "CHANGELOG.md has no section [0.1.0+ours.3]")


def test_queue_or_changelog_out_of_order(fork):
    files = fork.next_version()
    files["CHANGELOG.md"] = files["CHANGELOG.md"].replace("- Thing 3.", "Thing 3.")
    fork.land(DAY_AFTER, files | {"patches/series": ""})
    report = fork.making().plan()
    refused(report, "queue", "core-first.patch: not in the series; CHANGELOG.md:5: 'Added' has no entry")
    assert report.results[-1].text == "not checked, since queue did not pass"


def test_wheel_that_is_not_reproducible(landed):
    built = []

    def build(root, source, out):
        assert root == landed.work and (source / "megatron/ours.py").read_text() == "thing = 3\n"
        assert not (source / ".git").exists() and source not in built
        built.append(source)
        path = forks.build(root, source, out)
        path.write_text(f"{len(built)}")
        return path

    report = landed.making(build=build).plan()
    refused(
        report, "wheel", "the wheel is not reproducible: megatron_core-0.1.0+ours.3-py3-none-any.whl 6b86b273"
    )
    assert len(built) == 2


def test_wheel_that_does_not_build(landed):
    """The real builder: the miniature upstream is no package."""
    refused(landed.making(build=runs.build_wheel).plan(), "wheel", "the wheel does not build:; ")


def test_wheel_builder_gives_the_bytes_that_pip_gives(wheel, origin, sdist, monkeypatch, tmp_path):
    """This repository itself, from an export of a commit."""
    monkeypatch.setenv("MEGATRON_CORE_SDIST", str(sdist))
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    subject = runs.wheel(Repository(origin), "HEAD", builds=1)
    assert subject == {"name": wheel.name, "digest": {"sha256": upstream.digest(wheel)}}


# ---------------------------------------------------------------- evidence


def test_evidence(landed):
    landed.head, landed.merge = landed.land(DAY_AFTER, landed.gpu_record())
    report, folder = landed.making().collect()
    assert not report.failed and folder == landed.work / "build/release"
    assert [r.name for r in report.results] == [*CHECKS, "clean after the tests", "tests", "gpu"]
    text, message = (folder / "evidence.json").read_text(), (folder / "message.txt").read_text()
    statement = json.loads(text)
    assert evidence.read(message) == statement
    record = next((landed.work / "benchmarks").rglob("*+ours.3/gpu_tests.json"))
    said = statement["predicate"]
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["subject"] == [
        {
            "name": "megatron-core",
            "digest": {"gitCommit": landed.merge, "gitTree": landed.git("rev-parse", "HEAD^{tree}")},
        },
        {
            "name": "megatron_core-0.1.0+ours.3-py3-none-any.whl",
            "digest": {"sha256": upstream.digest(landed.work / "megatron/ours.py")},
        },
    ]
    assert said["upstream"] == {
        "name": "megatron-core",
        "version": "0.1.0",
        "sha256": upstream.Pin.read(landed.work).sha256,
    }
    assert (said["version"], said["reviewed"]) == ("0.1.0+ours.3", [landed.head])
    assert (said["series"]["patches"], said["wheel_builds"], said["benchmarks"]) == (1, 2, [])
    assert said["tiers"] == forks.outcomes(0)["tiers"]
    row = {
        "path": str(record.relative_to(landed.work)),
        "sha256": upstream.digest(record),
        "gpu": "A Test GPU",
        "commit": "1" * 40,
    }
    assert said["gpu"] == [row | {"passed": 7, "failed": 0, "skipped": 2}]
    assert said["tools"]["python"] == sys.version.split()[0]
    assert {"platform", "pytest", "setuptools", "git"} <= said["tools"].keys()
    lines = message.splitlines()
    assert lines[0] == NEXT
    assert f"commit: {landed.merge}" in lines
    assert "tests, cpu: 5 passed, 0 failed, 1 skipped" in lines
    assert f"tests, A Test GPU ({row['path']}): 7 passed, 0 failed, 2 skipped" in lines
    assert "- Thing 3." in lines
    assert f"Evidence-SHA256: {upstream.digest(folder / 'evidence.json')}" in lines


def test_evidence_runs_what_ci_runs(landed):
    """make lint, make check, make test; counts by tier from pytest's own file, failures included."""
    files = {
        "tests/patches/test_a.py": "def test_one(): pass\n\ndef test_two(): pass\n",
        "tests/cpu/test_b.py": "import pytest\n\ndef test_one(): pytest.skip('no')\n\ndef test_two(): pass\n",
        "tests/unit_tests/x/test_c.py": "def test_one(): pass\n",
        "tests/dist/test_d.py": "def test_one(): pass\n",
    }
    landed.land(DAY_AFTER, files | {"Makefile": forks.MAKEFILE.replace("python3", sys.executable)})
    report, folder = landed.making(test=runs.run_tests).collect()
    assert not report.failed, report
    said = json.loads((folder / "evidence.json").read_text())["predicate"]
    assert [(row["command"], row["status"]) for row in said["commands"]] == [
        ("make lint", 0),
        ("make check", 0),
        ("make test", 0),
    ]
    counted = {tier: (row["passed"], row["failed"], row["skipped"]) for tier, row in said["tiers"].items()}
    assert counted == {"patches": (2, 0, 0), "cpu": (2, 0, 1), "dist": (1, 0, 0)}
    broken = {
        "tests/cpu/test_b.py": "import pytest\n\n@pytest.mark.xfail\ndef test_one(): assert 0\n\n"
        "@pytest.fixture\ndef bad(): assert 0\n\ndef test_two(bad): pass\n\ndef test_three(): assert 0\n",
    }
    landed.land(DAY_AFTER, broken)
    report, folder = landed.making(test=runs.run_tests).collect()
    refused(report, "tests", "make test exited with 2; tier cpu: 2 failed")
    row = json.loads((folder / "evidence.json").read_text())["predicate"]["tiers"]["cpu"]
    assert (row["passed"], row["failed"], row["skipped"]) == (1, 2, 1)
    refused(landed.making().tag(), "tests", "make test exited with 2; tier cpu: 2 failed")
    landed.land(DAY_AFTER, {"tests/dist/test_d.py": "import nothing_of_this_name\n"})
    report, folder = landed.making(test=runs.run_tests).collect()
    refused(report, "tests", "tier cpu: nothing passed; tier dist: 1 failed; tier patches: nothing passed")


def test_tests_that_leave_no_counts(landed):
    landed.land(DAY_AFTER, {"Makefile": "lint check test:\n\t@true\n"})
    with pytest.raises(evidence.EvidenceError, match=r"the tests left no .*junit\.xml"):
        landed.making(test=runs.run_tests).collect()


def test_nothing_is_tested_when_the_plan_fails(fork):
    report, folder = fork.making(test=None).collect()
    refused(report, "name", "already")
    assert folder is None and not (fork.work / "build/release/evidence.json").exists()


def test_tests_that_change_the_work_tree(landed):
    def test(root):
        (root / "megatron/ours.py").write_text("other\n")
        return forks.outcomes(root)

    report, _ = landed.making(test=test).collect()
    refused(report, "clean after the tests", "the work tree differs from HEAD:  M megatron/ours.py")


def test_gpu_records_count_for_their_source_and_version_only(landed):
    landed.land(DAY_AFTER, landed.gpu_record() | {"CHANGELOG.md": landed.text("CHANGELOG.md") + "\n"})
    repo, version = Repository(landed.work), "0.1.0+ours.3"
    (row,) = facts.of(repo, "HEAD")["gpu"]
    assert row["path"] == f"benchmarks/results/a-gpu/{version}/gpu_tests.json"
    landed.land(DAY_AFTER, {"tests/gpu/test_gpu.py": "changed = True\n"})
    assert facts.of(repo, "HEAD")["gpu"] == "none"
    landed.land(DAY_AFTER, landed.gpu_record("-2", gpu="Another GPU"))
    assert [row["gpu"] for row in facts.of(repo, "HEAD")["gpu"]] == ["Another GPU"]
    folder = f"benchmarks/results/a-gpu/{version}"
    landed.land(DAY_AFTER, {f"{folder}/op.json": "{}", f"{folder}/op.md": "", f"{folder}0/op.json": "{}"})
    assert [row["path"] for row in facts.of(repo, "HEAD")["benchmarks"]] == [f"{folder}/op.json"]
    landed.land(DAY_AFTER, {f"{folder}/gpu_tests-3.json": '{"gpu": 1}'})
    with pytest.raises(
        evidence.EvidenceError, match=r"gpu_tests-3\.json: not a GPU test record: \.command is mis"
    ):
        facts.of(repo, "HEAD")
    landed.land(DAY_AFTER, {f"{folder}/gpu_tests-3.json": "{"})
    with pytest.raises(evidence.EvidenceError, match=r"gpu_tests-3\.json: Expecting property name"):
        facts.of(repo, "HEAD")


def test_hashes_are_those_that_git_gives(origin):
    """As EVIDENCE.md says; and a folder without git has the same source."""
    repo = Repository(origin)
    for paths in (["patches"], facts.SOURCE):
        listed = repo.bytes("ls-tree", "-r", "--format=%(objectname) %(path)", "HEAD", "--", *paths)
        assert facts.digest(repo.blobs("HEAD", *paths)) == evidence.sha256(listed.decode())


def test_every_field_is_documented():
    text = (ROOT / "patchset/EVIDENCE.md").read_text()
    for field in (*evidence.SHAPE, *evidence.FACTS, *evidence.DONE, *facts.GPU_RECORD):
        assert f"`{field}`" in text, field
    assert f"`{evidence.STATEMENT}`" in text and f"`{evidence.PREDICATE}`" in text
    assert all(f"`{command}`" in text for command in evidence.COMMANDS)


def test_source_of_files_and_of_their_commit(fork, tmp_path):
    repo = Repository(fork.work)
    found = facts.of(repo, "HEAD")["source"]
    (fork.work / "megatron/__pycache__").mkdir()
    (fork.work / "megatron/__pycache__/x.pyc").write_text("")
    assert facts.source(fork.work) == found
    assert facts.source(repo.unpack("HEAD", tmp_path / "copy")) == found
    (fork.work / "megatron/new.py").write_text("")
    assert facts.source(fork.work) != found


# ---------------------------------------------------------------- tag


def test_tag(landed):
    made = landed.making()
    made.collect()
    report = landed.making().tag()
    assert not report.failed, report
    assert [r.name for r in report.results] == [*CHECKS[:-1], "evidence", "tests", "gpu"]
    assert landed.git("cat-file", "-t", NEXT) == "tag" and landed.at(NEXT) == landed.merge
    assert landed.message(NEXT) == (made.folder / "message.txt").read_text()
    assert landed.git("ls-remote", "--tags", "origin", NEXT) == ""
    refused(landed.making().tag(), "name", f"this commit is {NEXT} already")


def test_tag_without_evidence(landed):
    refused(landed.making().tag(), "evidence", "there is none: run `python -m patchset release evidence`")


def test_tag_with_evidence_of_another_commit(landed):
    landed.making().collect()
    _, merge = landed.land(DAY_AFTER, {"megatron/ours.py": "thing = 4\n"})
    text = f"the evidence is of commit {landed.merge[:12]}, not of {merge[:12]}"
    refused(landed.making().tag(), "evidence", text)


def test_tag_with_edited_evidence(landed):
    _, folder = landed.making().collect()
    text, message = (folder / "evidence.json").read_text(), (folder / "message.txt").read_text()
    (folder / "evidence.json").write_text(text.replace('"failed": 0', '"failed": 1', 1))
    refused(landed.making().tag(), "evidence", "evidence.json was edited: message.txt states another hash")
    (folder / "evidence.json").write_text(text)
    (folder / "message.txt").write_text(message.replace('"failed": 0', '"failed": 1', 1))
    refused(landed.making().tag(), "evidence", "the evidence was edited: it does not have the hash")
    statement = json.loads(text)
    statement["predicate"]["version"] = "0.1.0+ours.8"
    (folder / "evidence.json").write_text(evidence.dumped(statement))
    (folder / "message.txt").write_text(evidence.message(NEXT, "", statement))
    refused(landed.making().tag(), "evidence", 'version is "0.1.0+ours.3", the evidence says "0.1.0+ours.8"')
    assert landed.git("tag", "-l", NEXT) == ""


def test_tag_in_a_dirty_tree(landed):
    landed.making().collect()
    (landed.work / "megatron/new.py").write_text("")
    refused(landed.making().tag(), "clean", "the work tree differs from HEAD: ?? megatron/new.py")


def test_tag_with_a_red_tier(landed):
    def test(root):
        found = forks.outcomes(root)
        found["tiers"]["dist"]["failed"] = 1
        return found

    report, folder = landed.making(test=test).collect()
    refused(report, "tests", "tier dist: 1 failed")
    assert (folder / "evidence.json").is_file()  # to be read, not to be tagged
    refused(landed.making().tag(), "tests", "tier dist: 1 failed")


def test_tag_with_a_red_gpu_record(landed):
    landed.land(DAY_AFTER, landed.gpu_record(failed=1, failures=["tests.gpu.test_x.test_y"]))
    report, _ = landed.making().collect()
    refused(report, "gpu", "gpu_tests.json: 7 passed, 1 failed")
    refused(landed.making().tag(), "gpu", "gpu_tests.json: 7 passed, 1 failed")


def test_tag_where_a_lightweight_one_stands(landed):
    """Of the name that would be next, on this commit or another."""
    landed.making().collect()
    landed.git("tag", NEXT, landed.at(FIRST))
    report = landed.making().tag()
    refused(report, "tags", f"{NEXT} is a lightweight tag: it carries no evidence")
    landed.git("tag", "-f", NEXT)
    refused(landed.making().tag(), "tags", f"{NEXT} is a lightweight tag: it carries no evidence")


def test_tag_is_named_when_it_is_made(landed):
    """Another release of that day came first, elsewhere: the next number."""
    _, folder = landed.making().collect()
    assert (folder / "message.txt").read_text().startswith(f"{NEXT}\n")
    other = f"{landed.at(SECOND)}"
    statement = evidence.read(landed.message(SECOND))
    landed.git("commit", "-q", "--allow-empty", "-m", "x", date=DAY_AFTER)
    commit = landed.at("HEAD")
    landed.git("reset", "-q", "--hard", landed.merge)
    statement["subject"][0]["digest"]["gitCommit"] = commit
    landed.retag(NEXT, commit, evidence.message(NEXT, "", statement))
    assert other != commit and not landed.making().tag().failed
    name = NEXT.removesuffix("1") + "2"
    assert landed.at(name) == landed.merge and landed.message(name).startswith(f"{name}\n")


def test_tag_is_signed_where_git_is_configured_to(landed, tmp_path):
    sign(landed, tmp_path)
    landed.making().collect()
    assert not landed.making().tag().failed
    assert "-----BEGIN SSH SIGNATURE-----" in landed.message(NEXT)
    landed.git("verify-tag", NEXT)
    assert evidence.read(landed.message(NEXT))["predicate"]["version"] == "0.1.0+ours.3"


def sign(fork, tmp_path):
    """Let git sign tags with a new key, which it trusts."""
    if not shutil.which("ssh-keygen"):
        pytest.skip("no ssh-keygen here")
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    (tmp_path / "signers").write_text(f"a@b.invalid {(tmp_path / 'key.pub').read_text()}")
    settings = {
        "gpg.format": "ssh",
        "user.signingKey": key,
        "gpg.ssh.allowedSignersFile": tmp_path / "signers",
        "tag.gpgSign": "true",
    }
    for name, value in settings.items():
        fork.git("config", name, value)


def test_not_a_checkout(tmp_path):
    with pytest.raises(release.ReleaseError, match="is not a git checkout with a commit"):
        release.Release(tmp_path)


# ---------------------------------------------------------------- the shape of evidence


SAMPLE = {"n": 1, "s": "x", "list": [{"a": 1.5}], "free": {"k": "v"}, "or": "none"}
SHAPE = {"n": int, "s": str, "list": [{"a": float}], "free": {str: str}, "or": ("none", [str])}


@pytest.mark.parametrize(
    "change, faults",
    [
        ({}, []),
        ({"or": ["x"]}, []),
        ({"list": [{"a": 2}]}, []),
        ({"n": "1"}, [".n is no int"]),
        ({"n": True}, [".n is no int"]),
        ({"n": -1}, [".n is negative"]),
        ({"list": [{"a": 1}, {"b": 1}]}, [".list[1].a is missing", ".list[1].b is unknown"]),
        ({"list": {}}, [".list is no list"]),
        ({"free": {"k": 1}}, [".free.k is no str"]),
        ({"free": []}, [".free is no object"]),
        ({"or": "some"}, [".or fits none of its forms"]),
        ({"or": [1]}, [".or fits none of its forms"]),
        ({"more": 1}, [".more is unknown"]),
    ],
)
def test_shape(change, faults):
    assert list(evidence.misfits(SAMPLE | change, SHAPE)) == faults


def test_shape_of_something_else():
    assert list(evidence.misfits([], SHAPE)) == ["the value is no object"]
    assert list(evidence.misfits("a", "b")) == ["the value is not 'b'"]
