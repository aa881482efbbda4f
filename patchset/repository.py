"""A git repository, asked without what the environment or a hook says about another one."""

import io
import os
import subprocess
import tarfile
from pathlib import Path

from . import PatchsetError

# Set inside hooks and by aliases: they point git at another repository than the one that is meant.
ELSEWHERE = {
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_COMMON_DIR",
    "GIT_DIR",
    "GIT_GRAFT_FILE",
    "GIT_INDEX_FILE",
    "GIT_NAMESPACE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_PREFIX",
    "GIT_SHALLOW_FILE",
    "GIT_WORK_TREE",
}


class GitError(PatchsetError):
    """git refused; the message has what it said."""


class Repository:
    """The user's configuration and credentials apply; replacement objects do not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.env = {k: v for k, v in os.environ.items() if k not in ELSEWHERE}
        self.env |= {"GIT_NO_REPLACE_OBJECTS": "1", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C.UTF-8"}

    def call(self, *args: str, stdin: bytes = b"") -> subprocess.CompletedProcess:
        command = ["git", "-C", self.path, *args]
        try:
            return subprocess.run(command, env=self.env, input=stdin, capture_output=True, check=False)
        except FileNotFoundError:
            raise GitError("git is not on PATH") from None

    def bytes(self, *args: str, stdin: bytes = b"") -> bytes:
        done = self.call(*args, stdin=stdin)
        if done.returncode:
            said = (done.stdout + done.stderr).decode(errors="replace").strip()
            raise GitError(f"git {args[0]} in {self.path}: {said or f'exit status {done.returncode}'}")
        return done.stdout

    def git(self, *args: str) -> str:
        """What git printed, without the last line end."""
        return self.bytes(*args).decode(errors="replace").rstrip("\n")

    def ok(self, *args: str) -> bool:
        return self.call(*args).returncode == 0

    # ---------------------------------------------------------------- commits

    def commit(self, revision: str) -> str | None:
        """The full name of a commit that is here."""
        done = self.call("rev-parse", "--quiet", "--verify", "--end-of-options", f"{revision}^{{commit}}")
        return done.stdout.decode().strip() if done.returncode == 0 else None

    def parents(self, commit: str) -> list[str]:
        """As the commit says, also where a shallow clone hides them."""
        head = self.git("cat-file", "commit", commit).partition("\n\n")[0]
        return [line.removeprefix("parent ") for line in head.splitlines() if line.startswith("parent ")]

    def tree(self, commit: str) -> str:
        return self.git("rev-parse", f"{commit}^{{tree}}")

    def contains(self, commit: str, ancestor: str) -> bool:
        """Whether ``ancestor`` is in the history of ``commit``."""
        return self.ok("merge-base", "--is-ancestor", ancestor, commit)

    def first_parents(self, tip: str) -> list[str]:
        """A branch's own commits: merges are followed to the branch, not to what was merged."""
        return self.git("rev-list", "--first-parent", tip).split()

    def shallow(self) -> bool:
        return self.git("rev-parse", "--is-shallow-repository") == "true"

    def dirty(self) -> list[str]:
        """Changed and untracked paths; ignored ones do not count."""
        return self.git("status", "--porcelain", "--untracked-files=all").splitlines()

    # ---------------------------------------------------------------- files of a commit

    def file(self, commit: str, path: str) -> bytes:
        return self.bytes("cat-file", "blob", f"{commit}:{path}")

    def blobs(self, commit: str, *paths: str) -> dict[str, str]:
        """The files under some paths, each with its object name."""
        listed = self.bytes("ls-tree", "-r", "-z", "--full-tree", commit, "--", *paths).decode()
        rows = (row.split("\t", 1) for row in listed.split("\0") if row)
        return {path: head.split()[2] for head, path in rows}

    def unpack(self, commit: str, place: Path) -> Path:
        """The files of a commit in a new folder, without its history."""
        with tarfile.open(fileobj=io.BytesIO(self.bytes("archive", "--format=tar", commit))) as tar:
            tar.extractall(place, filter="data")
        return place
