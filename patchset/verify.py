"""Judge a release tag: compute again what the checkout gives, and say what could not be."""

from dataclasses import dataclass
from pathlib import Path

from . import PatchsetError, changelog, checks, evidence, facts, release, runs, tags, upstream
from .checks import Check, Report, Unknown
from .evidence import EvidenceError
from .repository import Repository
from .tags import BRANCH, MEGATRON, Family, TagError

# Where one of these differs, the wheel may differ too.
BUILDERS = ("python", "platform", "setuptools", "pybind11", "packaging", "c++")


@dataclass
class Verification:
    root: Path
    name: str
    family: Family = MEGATRON
    remote: str = "origin"
    build: runs.Builder = runs.build_wheel

    def report(self) -> Report:
        self.repo = Repository(self.root)
        self.there = None
        return checks.run(
            [
                Check("remote", self._remote),
                Check("tag", self._tag),
                Check("signature", self._signature, ("tag",)),
                Check("branch", self._branch, ("tag",)),
                Check("evidence", self._evidence, ("tag",)),
                Check("changelog", self._changelog, ("evidence",)),
                Check("tests", self._tests, ("evidence",)),
                Check("gpu", self._gpu, ("evidence",)),
                Check("sdist", self._sdist, ("evidence",)),
                Check("wheel", self._wheel, ("evidence", "sdist")),
            ]
        )

    def _remote(self) -> str:
        self.mine = tags.here(self.repo, self.family)
        if self.remote not in self.repo.git("remote").split():
            raise Unknown(f"there is no remote {self.remote}: what is here counts")
        try:
            self.there = tags.fetched(self.repo, self.family, self.remote)
        except PatchsetError as why:
            raise Unknown(f"not read, so what is here counts: {why}") from None
        return f"{self.remote} was read"

    @property
    def known(self) -> tags.View:
        return self.there or self.mine

    def _tag(self) -> str:
        tag = self.known.tags.get(self.name)
        if not tag:
            where = f"at {self.remote}" if self.there else "here"
            raise TagError(f"there is no {self.name} {where}")
        faults = list(tag.faults(self.repo, self.family))
        if self.there:
            faults += [why for why in tags.moved(self.mine, self.there) if why.startswith(f"{self.name} ")]
        if len(same := self.known.of(tag.commit)) > 1:
            faults.append(f"{' and '.join(one.name for one in same)} name one commit")
        if faults:
            raise TagError("\n".join(faults))
        self.tag, self.commit = tag, tag.commit
        return f"annotated, names {self.commit}"

    def _signature(self) -> str:
        if "\n-----BEGIN" not in self.tag.message.partition(evidence.END)[2]:
            raise Unknown("the tag is not signed")
        done = self.repo.call("verify-tag", "--raw", self.tag.id)
        said = (done.stdout + done.stderr).decode(errors="replace").strip()
        if done.returncode == 0:
            return "good"
        if "BADSIG" in said or "incorrect signature" in said:
            raise TagError(f"bad: {said}")
        raise Unknown(f"not verified: {said}")

    def _branch(self) -> str:
        if not self.known.tip:
            raise Unknown(f"there is no branch {BRANCH} here")
        if self.commit not in self.repo.first_parents(self.known.tip):
            raise TagError(f"{self.commit[:12]} is not one of the commits of {BRANCH} itself")
        return f"on {BRANCH}"

    def _evidence(self) -> str:
        self.statement = self.tag.statement()
        evidence.require_commit(self.statement, self.commit)
        if wrong := facts.differences(self.statement, self.repo, self.commit):
            raise EvidenceError("\n".join(wrong))
        return "whole, of this commit, and the commit gives the same version, pin, series, source and results"

    def _changelog(self) -> str:
        version = self.statement["predicate"]["version"]
        if not changelog.notes(self.repo.file(self.commit, changelog.FILE).decode(), version):
            raise EvidenceError(f"{changelog.FILE} has no section [{version}]")
        return f"[{version}] is there"

    def _tests(self) -> str:
        raise Unknown(
            f"stated, not run again (make test in the commit does): {release.green(self.statement)}"
        )

    def _gpu(self) -> str:
        raise Unknown(f"stated, not run again: {release.gpu(self.statement)}")

    def _sdist(self) -> str:
        pin = upstream.Pin(**self.statement["predicate"]["upstream"])
        try:
            return f"{upstream.sdist(self.root, pin).name} has the pinned hash"
        except upstream.UpstreamError as why:
            raise Unknown(str(why)) from None

    def _wheel(self) -> str:
        said = evidence.subject(self.statement, "sha256")
        found = runs.wheel(self.repo, self.commit, builds=1, build=self.build)
        if found == said:
            return f"{said['name']} was built again to the same bytes"
        then, now = self.statement["predicate"]["tools"], runs.tools(self.root)
        other = [f"{k} {then.get(k)} there, {now.get(k)} here" for k in BUILDERS if then.get(k) != now.get(k)]
        if other:
            raise Unknown(f"other bytes here, with other tools: {'; '.join(other)}")
        got, stated = (f"{one['name']} sha256 {one['digest']['sha256']}" for one in (found, said))
        raise EvidenceError(f"the same tools give {got} here, the evidence says {stated}")
