"""Make a release: plan it, collect its evidence, tag it. README.md, RELEASING, has the order of the steps."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from . import PatchsetError, backend, changelog, checks, evidence, facts, replay, runs, tags, tree
from .checks import Check, Report
from .repository import Repository
from .tags import BRANCH, MEGATRON, Family


class ReleaseError(PatchsetError):
    """A release cannot be made of this commit; the message names the check."""


@dataclass
class Release:
    """HEAD of a checkout, on its way to a tag.

    Attributes:
        build: makes a wheel of an unpacked commit (runs.build_wheel).
        test: runs the tests, for the `commands` and `tiers` of the evidence (runs.run_tests).
    """

    root: Path
    family: Family = MEGATRON
    remote: str = "origin"
    build: runs.Builder = runs.build_wheel
    test: Callable[[Path], dict] = runs.run_tests
    name: str = field(default="", init=False)  # of the next tag

    def __post_init__(self) -> None:
        self.repo = Repository(self.root)
        self.head = self.repo.commit("HEAD")
        self.folder = self.root / "build/release"
        if not self.head:
            raise ReleaseError(f"{self.root} is not a git checkout with a commit")

    # ---------------------------------------------------------------- plan

    def plan(self) -> Report:
        """Everything that must hold before the tests are worth their time."""
        return checks.run([*self._cheap(), Check("wheel", self._wheel, ("clean", "queue"))])

    def _cheap(self) -> list[Check]:
        return [
            Check("clean", self._clean),
            Check("remote", self._remote),
            Check("branch", self._branch, ("remote",)),
            Check("merge", self._merge),
            Check("tags", self._tags, ("remote",)),
            Check("name", self._name, ("remote",)),
            Check("version", self._version, ("remote", "tags")),
            Check("changelog", self._changelog),
            Check("queue", self._queue),
        ]

    def _clean(self) -> str:
        if dirty := self.repo.dirty():
            raise ReleaseError(f"the work tree differs from HEAD: {', '.join(dirty)}")
        return f"the work tree is {self.head}"

    def _remote(self) -> str:
        self.mine = self.there = tags.here(self.repo, self.family)
        place = "no remote: what is here counts"
        if self.remote in self.repo.git("remote").split():
            self.there = tags.fetched(self.repo, self.family, self.remote)
            place = f"{self.remote} was read"
        elif self.repo.git("remote"):
            raise ReleaseError(f"there is no remote {self.remote}")
        # A tag of the remote goes before its copy here, which may have become a lightweight one.
        self.known = tags.View(self.mine.tags | self.there.tags, self.there.tip)
        return f"{place}; {len(self.known.tags)} release tags"

    def _branch(self) -> str:
        if not self.known.tip:
            raise ReleaseError(f"there is no branch {BRANCH}")
        if self.head not in self.repo.first_parents(self.known.tip):
            raise ReleaseError(
                f"HEAD is not one of the commits of {BRANCH} itself: land it there and push first"
            )
        return f"HEAD is on {BRANCH}"

    def _merge(self) -> str:
        reviewed = self.repo.parents(self.head)[1:]
        if not reviewed:
            raise ReleaseError(
                f"HEAD is no merge commit: land with git merge --no-ff, so that {BRANCH} has one"
            )
        return f"HEAD merges the reviewed {' '.join(reviewed)}"

    def _tags(self) -> str:
        faults = [*tags.moved(self.mine, self.there), *self.known.faults(self.repo, self.family)]
        if faults:
            raise ReleaseError("\n".join(faults))
        return "each is annotated and carries the evidence of its commit"

    def _name(self) -> str:
        if there := self.known.of(self.head):
            raise ReleaseError(f"this commit is {there[0].name} already")
        date = tags.landed(self.repo, self.head)
        dated = [found for found in map(self.family.parse, self.known.tags) if found and found[0] == date]
        self.name = self.family.name(date, 1 + max((number for _, number in dated), default=0))
        return self.name

    def _version(self) -> str:
        version = facts.version(self.repo, self.head)
        for tag in self.known.tags.values():
            earlier = tag.statement()["predicate"]["version"]
            if changelog.counter(earlier) >= changelog.counter(version):
                raise ReleaseError(f"{version} is not new: {tag.name} is {earlier}; raise {backend.LABEL}")
        return f"{version} is new"

    def _changelog(self) -> str:
        version = facts.version(self.repo, self.head)
        if not changelog.notes(self.repo.file(self.head, changelog.FILE).decode(), version):
            raise ReleaseError(f"{changelog.FILE} has no section [{version}]")
        return f"[{version}] is there"

    def _queue(self) -> str:
        with tree.lock(self.root):
            if problems := replay.check(self.root) + changelog.check(self.root):
                raise ReleaseError("\n".join(problems))
        return "patchset check is clean"

    def _wheel(self) -> str:
        self.wheel = runs.wheel(self.repo, self.head, build=self.build)
        return f"{self.wheel['name']} sha256 {self.wheel['digest']['sha256']}, from {evidence.BUILDS} builds"

    # ---------------------------------------------------------------- evidence

    def collect(self) -> tuple[Report, Path | None]:
        """Plan, build and test; what was found goes to build/release, also when tests fail.

        Returns:
            The report; the folder with evidence.json and message.txt, unless a check failed before the tests.
        """
        shutil.rmtree(self.folder, ignore_errors=True)
        report = self.plan()
        if report.failed:
            return report, None
        tests = self.test(self.root)
        git = {"gitCommit": self.head, "gitTree": self.repo.tree(self.head)}
        statement = evidence.statement(
            git, self.wheel, facts.of(self.repo, self.head), tests, runs.tools(self.root)
        )
        evidence.require(statement)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "evidence.json").write_text(evidence.dumped(statement))
        (self.folder / "message.txt").write_text(self._message(statement))
        after = [Check("tests", lambda: green(statement)), Check("gpu", lambda: gpu(statement))]
        later = checks.run([Check("clean after the tests", self._unchanged), *after])
        return Report(report.results + later.results), self.folder

    def _message(self, statement: dict) -> str:
        text = self.repo.file(self.head, changelog.FILE).decode()
        return evidence.message(
            self.name, changelog.notes(text, statement["predicate"]["version"]) or "", statement
        )

    def _unchanged(self) -> str:
        if self.repo.commit("HEAD") != self.head:
            raise ReleaseError("HEAD moved while the tests ran")
        return self._clean()

    # ---------------------------------------------------------------- tag

    def tag(self) -> Report:
        """Create the annotated tag from the evidence in build/release, if every check passes."""
        report = checks.run(
            [
                *self._cheap(),
                Check("evidence", self._evidence),
                Check("tests", lambda: green(self.statement), ("evidence",)),
                Check("gpu", lambda: gpu(self.statement), ("evidence",)),
            ]
        )
        if not report.failed:
            path = self.folder / "message.txt"
            path.write_text(self._message(self.statement))
            # Signed where git is configured to sign tags.
            self.repo.git("tag", "--annotate", "--cleanup=verbatim", f"--file={path}", self.name, self.head)
        return report

    def _evidence(self) -> str:
        try:
            message = (self.folder / "message.txt").read_text()
            text = (self.folder / "evidence.json").read_text()
        except FileNotFoundError:
            raise ReleaseError("there is none: run `python -m patchset release evidence`") from None
        self.statement = evidence.read(message)
        if evidence.dumped(self.statement) != text:
            raise ReleaseError("evidence.json was edited: message.txt states another hash")
        evidence.require_commit(self.statement, self.head)
        if wrong := facts.differences(self.statement, self.repo, self.head):
            raise ReleaseError("\n".join(wrong))
        return f"of this commit, sha256 {evidence.sha256(text)}"


def green(statement: dict) -> str:
    """The tests that need no GPU, in one line.

    Raises:
        EvidenceError: some failed, or were not run.
    """
    if faults := list(evidence.test_faults(statement)):
        raise evidence.EvidenceError("\n".join(faults))
    rows = statement["predicate"]["tiers"]
    return ", ".join(f"{t} {rows[t]['passed']} passed {rows[t]['skipped']} skipped" for t in evidence.TIERS)


def gpu(statement: dict) -> str:
    """The GPU runs, in one line.

    Raises:
        EvidenceError: there are some, and one is red.
    """
    if faults := list(evidence.gpu_faults(statement)):
        raise evidence.EvidenceError("\n".join(faults))
    rows = evidence.gpu_rows(statement)
    listed = (f"{row['gpu']} {row['passed']} passed {row['skipped']} skipped" for row in rows)
    return ", ".join(listed) or "none"
