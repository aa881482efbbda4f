"""The queue as git commits in a scratch repository: re-export, export of edits, move to another release."""

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from . import PatchsetError, queue, tree, upstream

FORMAT = "--zero-commit --full-index --no-signature -U1 --diff-algorithm=myers --stdout -1".split()
TODO = "TODO: why the change is needed, and what depends on it.\n\nUpstream-Status: Pending\nRemoval: TODO\n"


class ExportError(PatchsetError):
    """Edits cannot be folded into the patches; nothing was written."""


class Scratch:
    """A git repository that is independent of the user's configuration and of any repository around it."""

    def __init__(self, path: Path, archive: Path) -> None:
        if not shutil.which("git"):
            raise ExportError("git is needed here: export and check write the patches with it once more")
        self.path = path
        author = {f"GIT_{who}_{k}": v for who in ("AUTHOR", "COMMITTER") for k, v in _author().items()}
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | {
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
            "GIT_SEQUENCE_EDITOR": "true",
            "GIT_EDITOR": "true",
            "LC_ALL": "C.UTF-8",
            **author,
        }
        upstream.unpack(archive, path)
        self.git("init", "-q")
        self.git("add", "-A", "-f")
        self.git("commit", "-qm", "upstream")
        self.git("tag", "upstream")

    def git(self, *args: str, stdin: bytes = b"", **env: str) -> bytes:
        done = subprocess.run(
            ["git", "-C", self.path, *args], env=self.env | env, input=stdin, capture_output=True, check=False
        )
        if done.returncode:
            said = (done.stdout + done.stderr).decode(errors="replace").strip()
            raise ExportError(f"git {args[0]}: {said}")
        return done.stdout

    def commits(self) -> list[str]:
        return self.git("rev-list", "--reverse", "upstream..HEAD").decode().split()

    def subject(self, commit: str) -> str:
        return self.git("show", "-s", "--format=%s", commit).decode().strip()

    def touched(self, commit: str) -> list[str]:
        return self.git("show", "--format=", "--name-only", commit).decode().split()

    def commit(self, patch: Path) -> None:
        """Commit what lies in the work tree under the author, date and message of the patch."""
        with tempfile.TemporaryDirectory() as tmp:
            message, rest = Path(tmp, "message"), Path(tmp, "patch")
            head = self.git(
                "mailinfo", "-b", "--encoding=UTF-8", str(message), str(rest), stdin=patch.read_bytes()
            ).decode()
            info = dict(re.findall(r"^(\w+): (.*)$", head, re.MULTILINE))
            message.write_text(f"{info['Subject']}\n\n{message.read_text()}")
            self.git("add", "-A", "-f")
            self.git(
                *("commit", "-q", "--cleanup=whitespace", "-F", str(message)),
                GIT_AUTHOR_NAME=info["Author"],
                GIT_AUTHOR_EMAIL=info["Email"],
                GIT_AUTHOR_DATE=info["Date"],
            )

    def formatted(self, commit: str) -> bytes:
        return self.git("format-patch", *FORMAT, commit)


def _author() -> dict[str, str]:
    """Who writes a new patch: the user's git identity where there is one."""

    def ask(key: str) -> str:
        done = subprocess.run(["git", "config", key], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    return {"NAME": ask("user.name") or "patchset", "EMAIL": ask("user.email") or "patchset@invalid"}


@contextlib.contextmanager
def replayed(root: Path) -> Iterator[Scratch]:
    """Upstream with one commit for each patch of the series."""
    with tempfile.TemporaryDirectory() as tmp:
        scratch = Scratch(Path(tmp, "tree"), upstream.sdist(root, upstream.Pin.read(root)))
        for patch in queue.series(root / "patches"):
            queue.apply_all([patch], scratch.path, exact=True)
            scratch.commit(patch)
        yield scratch


def check(root: Path) -> list[str]:
    """Everything that is wrong with the queue; nothing is left to say when it is in order."""
    problems = list(queue.faults(root / "patches"))
    try:
        with tempfile.TemporaryDirectory() as tmp:
            tree.build(root, Path(tmp, "tree"), link=False)
        with replayed(root) as scratch:
            for patch, commit in zip(queue.series(root / "patches"), scratch.commits(), strict=True):
                if scratch.formatted(commit) != patch.read_bytes():
                    problems.append(f"{patch.name}: a re-export differs; `patchset export` writes it anew")
    except PatchsetError as error:
        problems.append(str(error))
    return problems


def export(root: Path, into: str | None = None, subject: str | None = None) -> list[Path]:
    """Fold the edits in build/tree into the patches that own the files, and write all of it anew.

    Args:
        into: the patch that takes all edits; needed where several patches, or none, change an edited file.
        subject: begin a new patch at the end of the series with all edits.

    Returns:
        The patches that changed.

    Raises:
        ExportError: with the reason; nothing was written.
    """
    patches, edited = queue.series(root / "patches"), tree.edits(root)
    _refuse_unsafe(root, edited)
    with replayed(root) as scratch:
        commits = scratch.commits()
        if subject:
            stem = subject.partition(":")[0]
            patches.append(root / f"patches/{stem}.patch")
            if not edited or not queue.NAME.fullmatch(stem) or patches[-1].exists():
                raise ExportError(
                    f"{subject!r}: a new patch needs edits in build/tree and a new 'area-topic: …'"
                )
        owner = _owners(scratch, commits, patches, edited, into) if not subject else {}
        for name in edited:
            shutil.copyfile(root / "build/tree" / name, scratch.path / name)
        if subject:
            scratch.git("commit", "-qam", f"{subject}\n\n{TODO}")
        for commit in dict.fromkeys(owner.values()):
            scratch.git("commit", "-q", f"--fixup={commit}", *(n for n in edited if owner[n] == commit))
        if owner:
            try:
                scratch.git("rebase", "-q", "--autosquash", "-i", "upstream")
            except ExportError as error:
                raise ExportError(
                    f"a later patch changes the same lines; nothing was written\n{error}"
                ) from None
        texts = {p: scratch.formatted(c) for p, c in zip(patches, scratch.commits(), strict=True)}
    changed = [p for p, text in texts.items() if not p.exists() or p.read_bytes() != text]
    for path in changed:
        path.write_bytes(texts[path])
    if subject:
        with open(root / "patches/series", "a") as listing:
            listing.write(patches[-1].name + "\n")
    extra = tree.record(root)["extra"]
    tree.materialise(root, extra=extra and Path(extra))
    return changed


def _refuse_unsafe(root: Path, edited: list[str]) -> None:
    made, where = tree.record(root), root / "build/tree"
    if edited and made["extra"]:
        raise ExportError(
            f"build/tree holds the patches of {made['extra']} too; they would end up in ours\n"
            "to export, edit a tree without them: copy the edited files elsewhere, `materialise --force`, "
            f"and put the edits back; edits that belong to {made['extra']} go into a patch there"
        )
    if edited and made["inputs"] != tree.inputs(root, None):
        raise ExportError(
            "patches/ changed since build/tree was made, so the edited files may lack what changed. "
            "Keep your edits elsewhere, run `python -m patchset materialise --force`, and make them again"
        )
    if gone := [name for name in edited if not (where / name).is_file()]:
        raise ExportError(f"a patch removes no file; put back: {' '.join(gone)}")
    if new := [n for n in tree.inventory(where).keys() - made["files"].keys() if n.endswith(".py")]:
        raise ExportError(f"a patch adds no file; move these from build/tree to megatron/: {' '.join(new)}")


def _owners(
    scratch: Scratch, commits: list[str], patches: list[Path], edited: list[str], into: str | None
) -> dict[str, str]:
    """The commit that takes each edited file."""
    by_name = {patch.stem: commit for patch, commit in zip(patches, commits, strict=True)}
    if into:
        stem = Path(into).name.removesuffix(".patch")
        if stem not in by_name:
            raise ExportError(f"there is no patch {stem}; the series has {' '.join(by_name)}")
        return dict.fromkeys(edited, by_name[stem])
    owner, unclear = {}, []
    for name in edited:
        owners = [stem for stem, commit in by_name.items() if name in scratch.touched(commit)]
        if len(owners) == 1:
            owner[name] = by_name[owners[0]]
        else:
            unclear.append(f"{name}: changed by {', '.join(owners) or 'no patch'}")
    if unclear:
        listed = "\n".join(unclear)
        raise ExportError(f"say which patch takes the edits, export PATCH or export --new SUBJECT:\n{listed}")
    return owner
