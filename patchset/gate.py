"""What a downstream repository runs before its pin moves: is the new pin a release, and a later one?"""

import os
from dataclasses import dataclass
from pathlib import Path

from . import PatchsetError, checks, evidence, facts, release, tags
from .checks import Check, Report
from .evidence import EvidenceError
from .repository import Repository
from .tags import BRANCH, MEGATRON, Family


class GateError(PatchsetError):
    """The pin may not be used; the message says why and what to do."""


@dataclass
class Gate:
    """
    Attributes:
        downstream: the repository with the submodule, or a folder in it.
        submodule: its path from there.
        base: the commit whose pin is the old one; by default HEAD if the new one is staged, else its parent.
        rollback: the new pin need not descend from the old one.
        allow_skipped_gpu: a release without GPU test records will do.
    """

    downstream: Path
    submodule: Path
    family: Family = MEGATRON
    remote: str = "origin"
    base: str | None = None
    rollback: bool = False
    allow_skipped_gpu: bool = False

    def report(self) -> Report:
        self.downstream = self.downstream.resolve()
        self.submodule = Path(os.path.relpath(self.downstream / self.submodule, self.downstream))
        self.outer = Repository(self.downstream)
        self.inner = Repository(self.downstream / self.submodule)
        self.pin = self.tag = None
        return checks.run(
            [
                Check("gitlink", self._gitlink),
                Check("checkout", self._checkout, ("gitlink",)),
                Check("remote", self._remote, ("checkout",)),
                Check("tag", self._tag, ("remote",)),
                Check("branch", self._branch, ("tag",)),
                Check("evidence", self._evidence, ("tag",)),
                Check("tests", self._tests, ("evidence",)),
                Check("gpu", self._gpu, ("evidence",)),
                Check("fast-forward", self._fast_forward, ("remote",)),
                Check("worktree", self._worktree, ("checkout",)),
            ]
        )

    def json(self, report: Report) -> str:
        return report.json(pin=self.pin, tag=self.tag and self.tag.name)

    def _gitlink(self) -> str:
        listed = self.outer.git("ls-files", "--stage", "--", str(self.submodule)).splitlines()
        rows = [line.split()[:3] for line in listed]
        if not rows or any(mode != "160000" for mode, _, _ in rows):
            raise GateError(f"{self.submodule} is not a submodule of {self.downstream}")
        if len(rows) > 1:
            raise GateError(f"{self.submodule} is in a merge conflict")
        self.pin = rows[0][1]
        return f"{self.submodule} is pinned to {self.pin}"

    def _checkout(self) -> str:
        path = self.inner.path
        top = path.is_dir() and self.inner.git("rev-parse", "--show-toplevel")
        if not top or Path(top) != path.resolve():
            raise GateError(f"not checked out: git submodule update --init -- {self.submodule}")
        return f"{self.submodule} is a checkout"

    def _remote(self) -> str:
        self.mine = tags.here(self.inner, self.family)
        self.there = tags.fetched(self.inner, self.family, self.remote)
        return f"{len(self.there.tags)} release tags at {self.remote}"

    def _tag(self) -> str:
        found = self.there.of(self.pin)
        if not found:
            raise GateError(f"no release tag names {self.pin}: {self._what_it_is()}")
        if len(found) > 1:
            raise GateError(
                f"{' and '.join(tag.name for tag in found)} name one commit: which release is it?"
            )
        (tag,) = found
        faults = list(tag.faults(self.inner, self.family))
        faults += [why for why in tags.moved(self.mine, self.there) if why.startswith(f"{tag.name} ")]
        if faults:
            raise GateError("\n".join(faults))
        self.tag = tag
        copy = self.mine.tags.get(tag.name)
        if copy and copy.kind == "commit":
            return (
                f"{tag.name} (lightweight in this checkout, as some CI checkouts leave it; "
                f"the annotated one was read at {self.remote})"
            )
        return tag.name

    def _what_it_is(self) -> str:
        for tag in self.there.tags.values():
            if tag.commit and self.pin in self.inner.parents(tag.commit)[1:]:
                return f"it is the reviewed head that {tag.name} merged; pin the merge, {tag.commit}"
        for tag in self.mine.of(self.pin):
            return f"{tag.name} is here, but not at {self.remote}"
        refs = [line.split() for line in self.inner.git("ls-remote", self.remote).splitlines()]
        heads = [ref for id, ref in refs if id == self.pin and ref.startswith("refs/")]
        return (
            f"it is the head of {' and '.join(heads)}"
            if heads
            else "a commit between releases, or a private one"
        )

    def _branch(self) -> str:
        if not self.there.tip:
            raise GateError(f"{self.remote} has no branch {BRANCH}")
        if self.pin not in self.inner.first_parents(self.there.tip):
            raise GateError(f"{self.tag.name} is not on {BRANCH}: {self.pin[:12]} is none of its own commits")
        return f"on {BRANCH}"

    def _evidence(self) -> str:
        self.statement = self.tag.statement()
        evidence.require_commit(self.statement, self.pin)
        if wrong := facts.differences(self.statement, self.inner, self.pin):
            raise EvidenceError("\n".join(wrong))
        return f"{self.statement['predicate']['version']}, of this commit"

    def _tests(self) -> str:
        return release.green(self.statement)

    def _gpu(self) -> str:
        found = release.gpu(self.statement)
        if self.statement["predicate"]["gpu"] == "none" and not self.allow_skipped_gpu:
            raise EvidenceError("the release has no GPU test record; --allow-skipped-gpu accepts that")
        return found

    def _fast_forward(self) -> str:
        base, old = self._old_pin()
        if not old:
            return f"the first pin: {base} has none"
        if old == self.pin:
            return f"the pin of {base}"
        if self.rollback:
            return f"not asked for (--rollback); {base} has {old}"
        if not self.inner.contains(self.pin, old):
            raise GateError(
                f"{self.pin[:12]} does not descend from {old[:12]}, the pin of {base}; "
                "--rollback accepts that"
            )
        return f"descends from {old}, the pin of {base}"

    def _old_pin(self) -> tuple[str, str | None]:
        """The commit to compare with, in words, and its pin."""
        head = self.outer.commit("HEAD")
        if self.base:
            base, words = self.outer.commit(self.base), self.base
            if not base:
                raise GateError(f"there is no commit {self.base} in {self.downstream}: fetch it")
        elif not head:
            return "a repository without commits", None
        elif self._pinned(head) != self.pin:
            base, words = head, "HEAD"
        else:
            base, words = next(iter(self.outer.parents(head)), None), "the parent of HEAD"
            if not base:
                return "the first commit", None
            if not self.outer.commit(base):  # a shallow clone
                self._fetch(base)
        return words, self._pinned(base)

    def _pinned(self, commit: str) -> str | None:
        prefix = self.outer.git("rev-parse", "--show-prefix")
        listed = self.outer.git("ls-tree", "--full-tree", commit, "--", f"{prefix}{self.submodule}").split()
        return listed[2] if listed[:2] == ["160000", "commit"] else None

    def _fetch(self, commit: str) -> None:
        names = self.outer.git("remote").split()
        name = "origin" if "origin" in names or not names else names[0]
        options = ["--quiet", "--no-tags", "--no-recurse-submodules", "--no-write-fetch-head", "--depth=1"]
        try:
            self.outer.git("fetch", *options, name, commit)
        except PatchsetError as why:
            raise GateError(
                f"this clone is too shallow to compare pins (fetch-depth: 2 is enough): {why}"
            ) from None

    def _worktree(self) -> str:
        head = self.inner.commit("HEAD")
        if head != self.pin:
            raise GateError(f"{self.submodule} is at {head}: git submodule update -- {self.submodule}")
        if dirty := self.inner.dirty():
            raise GateError(f"{self.submodule} has changes: {', '.join(dirty)}")
        return "the files are those of the pin"
