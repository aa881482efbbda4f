"""Release tags: their names, what one says, and which there are, here and at the remote."""

import datetime
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from . import PatchsetError, evidence
from .repository import Repository

BRANCH = "sirl-stable"


class TagError(PatchsetError):
    """A tag is not what a release tag has to be."""


@dataclass(frozen=True)
class Family:
    """Names `<prefix>-sirl-stable-YYYY.MM.DD.N`: the UTC date when the commit landed, N from 1 within it."""

    prefix: str = "megatron"

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9]+([._-][A-Za-z0-9]+)*", self.prefix):
            raise TagError(f"{self.prefix!r} cannot begin a tag name")

    @property
    def stem(self) -> str:
        return f"{self.prefix}-{BRANCH}-"

    def name(self, date: datetime.date, number: int) -> str:
        return f"{self.stem}{date:%Y.%m.%d}.{number}"

    def parse(self, name: str) -> tuple[datetime.date, int] | None:
        found = re.fullmatch(rf"{re.escape(self.stem)}(\d{{4}})\.(\d\d)\.(\d\d)\.([1-9]\d*)", name)
        try:
            return found and (datetime.date(*map(int, found.groups()[:3])), int(found[4]))
        except ValueError:
            return None


MEGATRON = Family()


@dataclass(frozen=True)
class Tag:
    """A ref under refs/tags, with the object that it names."""

    name: str
    id: str
    kind: str  # of the object: tag, or commit where the tag is lightweight
    commit: str | None  # what the tag object names, if that is a commit
    inner: str = ""  # the name inside the tag object
    message: str = ""

    @classmethod
    def read(cls, name: str, id: str, kind: str, data: bytes) -> "Tag":
        if kind != "tag":
            return cls(name, id, kind, id if kind == "commit" else None)
        head, _, message = data.decode(errors="replace").partition("\n\n")
        fields = dict(line.split(" ", 1) for line in head.splitlines() if " " in line)
        commit = fields["object"] if fields["type"] == "commit" else None
        return cls(name, id, kind, commit, fields["tag"], message)

    def statement(self) -> dict:
        """The evidence in the message."""
        return evidence.read(self.message)

    def faults(self, repo: Repository, family: Family) -> Iterator[str]:
        """Why this is no release of the commit that it names; the tests' results are judged elsewhere."""
        dated = family.parse(self.name)
        if not dated:
            yield f"{self.name} is not of the form {family.stem}YYYY.MM.DD.N"
        if self.kind != "tag":
            yield f"{self.name} is a lightweight tag: it carries no evidence"
            return
        if not self.commit:
            yield f"{self.name} does not name a commit"
            return
        if self.inner != self.name:
            yield f"{self.name} was made as {self.inner}"
        if dated and repo.commit(self.commit) and dated[0] != landed(repo, self.commit):
            yield f"{self.name} names a commit that landed on {landed(repo, self.commit):%Y.%m.%d}: moved?"


def landed(repo: Repository, commit: str) -> datetime.date:
    """The UTC date of a commit's committer: for a merge, when it landed."""
    seconds = int(repo.git("show", "-s", "--format=%ct", commit))
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).date()


@dataclass(frozen=True)
class View:
    """The release tags and the tip of the stable branch, in one place."""

    tags: dict[str, Tag]
    tip: str | None

    def of(self, commit: str) -> list[Tag]:
        return [tag for tag in self.tags.values() if tag.commit == commit]

    def faults(self, repo: Repository, family: Family) -> Iterator[str]:
        """What is wrong with the tags, each and together, except their tests' results."""
        for tag in self.tags.values():
            found = list(tag.faults(repo, family))
            yield from found
            if not found:
                try:
                    evidence.require_commit(tag.statement(), tag.commit)
                except evidence.EvidenceError as why:
                    yield f"{tag.name}: {why}"
        for commit, count in Counter(tag.commit for tag in self.tags.values() if tag.commit).items():
            if count > 1:
                names = " and ".join(tag.name for tag in self.of(commit))
                yield f"{names} name one commit, {commit[:12]}"


def here(repo: Repository, family: Family) -> View:
    return _view(repo, family, "refs")


def fetched(repo: Repository, family: Family, remote: str) -> View:
    """What the remote has, with its whole history; the tags and branches that are here stay as they are.

    A continuous-integration checkout may have turned an annotated tag into a lightweight one, or may lack it,
    so the remote's own are read, through refs that exist for a moment only.
    """
    space = f"refs/patchset/{os.getpid()}"
    specs = [f"+refs/{kind}*:{space}/{kind}*" for kind in (f"tags/{family.stem}", f"heads/{BRANCH}")]
    command = ["fetch", "--quiet", "--no-tags", "--no-recurse-submodules", "--no-write-fetch-head"]
    try:
        repo.git(*command, *["--unshallow"] * repo.shallow(), remote, *specs)
        return _view(repo, family, space)
    finally:
        refs = repo.git("for-each-ref", "--format=delete %(refname)", space)
        repo.bytes("update-ref", "--stdin", stdin=f"{refs}\n".encode() if refs else b"")


def _view(repo: Repository, family: Family, space: str) -> View:
    listed = repo.git(
        "for-each-ref", "--format=%(refname) %(objectname) %(objecttype)", f"{space}/tags/{family.stem}*"
    )
    rows = [line.split() for line in listed.splitlines()]
    tags = {}
    for ref, id, kind in rows:
        name = ref.removeprefix(f"{space}/tags/")
        tags[name] = Tag.read(name, id, kind, repo.bytes("cat-file", "tag", id) if kind == "tag" else b"")
    return View(tags, repo.commit(f"{space}/heads/{BRANCH}"))


def moved(mine: View, theirs: View) -> Iterator[str]:
    """Tags that are other objects here than at the remote. A lightweight copy of the same commit is none."""
    for name in mine.tags.keys() & theirs.tags.keys():
        ours, there = mine.tags[name], theirs.tags[name]
        copied = ours.kind == "commit" and ours.id == there.commit
        if ours.id != there.id and not copied:
            yield f"{name} was moved: it is {ours.id[:12]} here and {there.id[:12]} at the remote"
