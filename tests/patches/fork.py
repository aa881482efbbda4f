"""A fork in small with a remote, releases, and a downstream repository that pins it as a submodule."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from patchset import ROOT, evidence, facts, release, tags
from patchset.gate import Gate
from tests.patches.miniature import GIT, Miniature

SUBMODULE = "third_party/megatron"
FIRST, SECOND = "megatron-sirl-stable-2026.11.28.1", "megatron-sirl-stable-2026.11.29.1"
DAY = {FIRST: "2026-11-28T10:00:00+00:00", SECOND: "2026-11-29T10:00:00+00:00"}

MAKEFILE = """
PY ?= python3
lint check:
\t@true
test:
\t@$(PY) -m pytest -q -p no:cacheprovider tests/patches tests/cpu tests/unit_tests tests/dist
"""
IGNORED = "/build/\n/dist/\n__pycache__/\n"
RECORD = {
    "gpu": "A Test GPU",
    "versions": {"torch": "2.11.0"},
    "command": "pytest tests/gpu",
    "date": "2026-11-28",
    "commit": "1" * 40,
    "passed": 7,
    "failed": 0,
    "skipped": 2,
    "failures": [],
}


def build(root, source, out):
    """Stands in for the build of the wheel: the same bytes for the same files."""
    version = (source / "megatron/core/LOCAL_VERSION").read_text().strip()
    out.mkdir()
    path = out / f"megatron_core-0.1.0+{version}-py3-none-any.whl"
    path.write_bytes((source / "megatron/ours.py").read_bytes())
    return path


def outcomes(root):
    """Stands in for the tests."""
    rows = [(4, 0), (5, 1), (6, 2)]
    return {
        "commands": [{"command": c, "status": 0, "seconds": 1.5} for c in evidence.COMMANDS],
        "tiers": {
            tier: {"passed": passed, "failed": 0, "skipped": skipped, "seconds": 2.5}
            for tier, (passed, skipped) in zip(evidence.TIERS, rows, strict=True)
        },
    }


def only(variables, monkeypatch):
    """Of git's variables, these in the environment."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


class Fork:
    """`remote` (bare), `work` (a maintainer's clone of it) and `downstream` in one folder."""

    def __init__(self, place: Path) -> None:
        self.remote, self.work = place / "remote.git", place / "work"
        self.downstream = place / "downstream"
        self.submodule = self.downstream / SUBMODULE

    @classmethod
    def make(cls, place: Path) -> "Fork":
        """Two releases, and a downstream that pins the first, then the second."""
        fork = cls(place)
        with pytest.MonkeyPatch.context() as patch:
            only(GIT | {"GIT_TEMPLATE_DIR": ""}, patch)
            mini = Miniature(fork.work, patch)
            mini.patch("core-first: change line 7", "megatron/core/numbers.py", "line_7 = 7", "line_7 = 70")
            shutil.rmtree(fork.work / "build")
            os.unlink(fork.work / "megatron/core/LOCAL_VERSION")
            shutil.copytree(ROOT / "patchset", fork.work / "patchset", ignore=lambda *_: ["__pycache__"])
            fork.write({"Makefile": MAKEFILE, ".gitignore": IGNORED, "tests/gpu/test_gpu.py": "\n"})
            fork.git("init", "-q", "-b", tags.BRANCH, where=fork.work)
            fork.commit("begin", {"megatron/core/LOCAL_VERSION": "ours.0\n"})
            fork.git("init", "-q", "--bare", "-b", "main", fork.remote, where=place)
            fork.git("remote", "add", "origin", "../remote.git")
            fork.git("push", "-q", "origin", tags.BRANCH, f"{tags.BRANCH}:main")
            for name in (FIRST, SECOND):
                fork.release(DAY[name])
            fork.git("init", "-q", "-b", "main", fork.downstream, where=place)
            add = ["-c", "protocol.file.allow=always", "submodule", "add", "-q", fork.remote, SUBMODULE]
            fork.git(*add, where=fork.downstream)
            fork.git("remote", "set-url", "origin", "../../../remote.git", where=fork.submodule)
            for name in (FIRST, SECOND):
                fork.pin(name)
            shutil.rmtree(fork.work / "build")
            for repository in (fork.work, fork.remote, fork.downstream, fork.submodule):
                fork.git("gc", "-q", where=repository)  # few files to copy
        return fork

    def git(self, *args, where=None, date=None) -> str:
        env = (
            {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | GIT | {"GIT_TEMPLATE_DIR": ""}
        )
        env |= {"GIT_AUTHOR_DATE": date, "GIT_COMMITTER_DATE": date} if date else {}
        command = ["git", "-C", where or self.work, *map(str, args)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout.strip()

    def write(self, files) -> None:
        for name, text in files.items():
            path = self.work / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def commit(self, subject, files, date=None) -> str:
        self.write(files)
        self.git("add", "-A")
        self.git("commit", "-qm", subject, date=date)
        return self.git("rev-parse", "HEAD")

    def text(self, name) -> str:
        return (self.work / name).read_text()

    def land(self, date, files) -> tuple[str, str]:
        """A branch of one commit, merged into the stable branch and pushed: its head, and the merge."""
        self.git("checkout", "-q", "-B", "topic")
        head = self.commit("topic", files, date)
        self.git("checkout", "-q", tags.BRANCH)
        self.git("merge", "-q", "--no-ff", "-m", "land", "topic", date=date)
        self.git("push", "-q", "origin", tags.BRANCH)
        return head, self.git("rev-parse", "HEAD")

    def next_version(self) -> dict[str, str]:
        """The files of a change that raises the version."""
        k = int(self.text("megatron/core/LOCAL_VERSION").strip().rpartition(".")[2]) + 1
        sections = self.text("CHANGELOG.md").partition("\n\n")[2] if k > 1 else ""
        entry = f"## [0.1.0+ours.{k}]\n\n### Added\n\n- Thing {k}.\n"
        return {
            "megatron/core/LOCAL_VERSION": f"ours.{k}\n",
            "megatron/ours.py": f"thing = {k}\n",
            "CHANGELOG.md": f"# Changelog\n\n{entry}\n{sections}",
        }

    def making(self, **kwargs) -> release.Release:
        return release.Release(self.work, **{"build": build, "test": outcomes} | kwargs)

    def release(self, date, files=(), gpu=True) -> str:
        """Land a change, collect evidence, tag and publish: the name of the tag."""
        self.land(date, self.next_version() | dict(files))
        if gpu:
            self.land(date, self.gpu_record())
        made = self.making()
        report, _ = made.collect()
        assert not report.failed, report
        report = self.making().tag()
        assert not report.failed, report
        self.git("push", "-q", "origin", made.name)
        return made.name

    def gpu_record(self, number="", **changes) -> dict[str, str]:
        """A record of a GPU run on the files as they are."""
        version = "0.1.0+" + self.text("megatron/core/LOCAL_VERSION").strip()
        record = RECORD | {"source": facts.source(self.work)} | changes
        return {f"benchmarks/results/a-gpu/{version}/gpu_tests{number}.json": json.dumps(record)}

    def at(self, revision, where=None) -> str:
        return self.git("rev-parse", f"{revision}^{{commit}}", where=where)

    def message(self, name) -> str:
        return self.git("cat-file", "tag", name).partition("\n\n")[2] + "\n"

    def retag(self, name, commit, message, publish=True) -> None:
        """Put an annotated tag in place, whatever was there."""
        path = self.work.parent / "message"
        path.write_text(message)
        self.git("tag", "-f", "-a", "--cleanup=verbatim", "-F", path, name, commit)
        if publish:
            self.git("push", "-q", "-f", "origin", f"refs/tags/{name}")

    def forge(self, name, change) -> None:
        """The tag again, published, with other evidence under a right hash."""
        statement = evidence.read(self.message(name))
        change(statement)
        text = evidence.dumped(statement)
        head = f"{name}\n\nEvidence-SHA256: {evidence.sha256(text)}"
        self.retag(name, self.at(name), f"{head}\n\n{evidence.BEGIN}\n{text}\n{evidence.END}\n")

    def pin(self, revision, commit=True) -> None:
        """Move the submodule, and the pin."""
        self.git(
            "fetch", "-q", "origin", "--tags", "--force", "+refs/heads/*:refs/fetched/*", where=self.submodule
        )
        self.git("checkout", "-q", "--detach", revision, where=self.submodule)
        self.git("add", "-A", where=self.downstream)
        if commit:
            self.git("commit", "-qm", f"pin {revision}", where=self.downstream)

    def gate(self, **kwargs):
        return Gate(kwargs.pop("downstream", self.downstream), Path(SUBMODULE), **kwargs).report()
