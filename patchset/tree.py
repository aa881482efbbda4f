"""The materialised tree: upstream, patched, with the add-only modules laid over it."""

import contextlib
import fcntl
import hashlib
import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from . import PatchsetError, queue, upstream

NOTICES = ("LICENSE", "NOTICE")  # travel in the tree and in the wheel; the sdist of upstream has neither


class TreeError(PatchsetError):
    """build/tree, or the overlay, is not in the state that the command needs."""


@contextlib.contextmanager
def lock(root: Path) -> Iterator[None]:
    """One build at a time in one checkout: they share build/. Not reentrant."""
    (root / "build").mkdir(exist_ok=True)
    with open(root / "build/.lock", "w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another build in {root}", file=sys.stderr, flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def overlay(root: Path) -> list[str]:
    """The files under megatron/, each at the place where it lands in upstream's tree."""
    return sorted(
        str(p.relative_to(root))
        for p in (root / "megatron").rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    )


def build(root: Path, tree: Path, link: bool, extra: Path | None = None) -> int:
    """Make a fresh tree.

    Args:
        link: link our modules in, so that they are live, instead of copying them.
        extra: a folder with patches of someone else, applied after ours.

    Returns:
        The date of the upstream release, in seconds since the epoch.
    """
    pin = upstream.Pin.read(root)
    date = upstream.unpack(upstream.sdist(root, pin), tree)
    queue.apply_all(queue.series(root / "patches"), tree, exact=True)
    if extra:
        theirs = queue.series(extra)
        if not theirs:
            raise queue.PatchError(f"{extra}/series names no patch")
        queue.apply_all(theirs, tree, exact=False)
    _lay(root, tree, link)
    return date


def _lay(root: Path, tree: Path, link: bool) -> None:
    files = overlay(root)
    if taken := [name for name in files if (tree / name).exists()]:
        raise TreeError(f"megatron/ holds what the tree has already; make these a patch: {' '.join(taken)}")
    for name in files:
        place = tree / name
        if place.exists():
            continue  # inside a folder that is linked already
        if link:  # the topmost folder that upstream lacks, so that files added there later are live too
            above = (p for p in reversed(place.parents) if p.is_relative_to(tree) and not p.exists())
            place = next(above, place)
            place.symlink_to(os.path.relpath(root / place.relative_to(tree), place.parent))
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            _copy(root / name, place)
    for name in NOTICES:
        _copy(root / name, tree / name)


def _copy(source: Path, place: Path) -> None:
    shutil.copyfile(source, place)
    place.chmod(0o644)


# ---------------------------------------------------------------- build/tree


def record(root: Path) -> dict:
    """How build/tree was made: ``inputs`` (a hash), ``extra`` (a folder or None), ``files``."""
    path = root / "build/tree.json"
    made = json.loads(path.read_text()) if path.is_file() else {}
    return made if "inputs" in made else {"inputs": None, "extra": None, "files": {}}


def inputs(root: Path, extra: Path | None) -> str:
    """A hash over what build/tree is made of, without the headers of patches and linked modules."""
    found = hashlib.sha256((root / "patches/upstream.txt").read_bytes())
    for path in queue.series(root / "patches") + (queue.series(extra) if extra else []):
        head, _, diff = path.read_bytes().partition(b"\ndiff --git ")
        found.update(b"\0" + path.name.encode() + b"\0" + (diff or head))
    for name in NOTICES:
        found.update(b"\0" + (root / name).read_bytes())
    return found.hexdigest()


def stale(root: Path) -> str | None:
    """Why build/tree is not what the checkout says, with the command that mends it; None when it is."""
    made = record(root)
    extra = Path(made["extra"]) if made["extra"] else None
    command = "python -m patchset materialise" + f" --extra-series {shlex.quote(str(extra))}" * bool(extra)
    if made["inputs"] is None or not (root / "build/tree").is_dir():
        why = "is not there"
    elif extra and not extra.is_dir():
        why = f"was made with patches from {extra}, which is gone"
    elif made["inputs"] != inputs(root, extra):
        why = "is stale: patches/ changed since it was made"
    else:
        links = {name for name, what in made["files"].items() if what.startswith("-> ")}
        lost = links.copy()
        loose = []
        for name in overlay(root):
            above = {name, *map(str, Path(name).parents)} & links
            lost -= above
            loose += [] if above else [name]
        if not loose and not lost:
            return None
        why = f"is stale: megatron/ gained or lost files since it was made: {' '.join(loose + sorted(lost))}"
    return f"{root / 'build/tree'} {why}\nrun in {root}: {command}"


def inventory(tree: Path) -> dict[str, str]:
    return {
        str(p.relative_to(tree)): "-> " + os.readlink(p) if p.is_symlink() else queue.blob(p.read_bytes())
        for p in sorted(tree.rglob("*"))
        if p.is_symlink() or p.is_file()
    }


def edits(root: Path) -> list[str]:
    """Files of build/tree that were changed by hand since it was made."""
    tree = root / "build/tree"
    made = {name: what for name, what in record(root)["files"].items() if not what.startswith("-> ")}
    now = {name: queue.blob((tree / name).read_bytes()) for name in made if (tree / name).is_file()}
    return [name for name, what in made.items() if now.get(name) != what]


def materialise(root: Path, force: bool = False, extra: Path | None = None) -> Path:
    """Bring build/tree up to date in place: an editable install points into it, its compiled extension stays.

    Raises:
        TreeError: files were edited in build/tree and not exported; ``force`` overwrites them.
    """
    tree, fresh, made = root / "build/tree", root / "build/fresh", record(root)["files"]
    build(root, fresh, link=True, extra=extra)
    want = inventory(fresh)
    there = {name: queue.blob((tree / name).read_bytes()) for name in edits(root) if (tree / name).is_file()}
    edited = [name for name, now in there.items() if now != want.get(name)]
    if edited and not force:
        raise TreeError(
            f"edited in {tree} and not exported: {' '.join(edited)}\n"
            "keep the edits with `python -m patchset export`, or drop them with `materialise --force`"
        )
    for name in made.keys() - want.keys():
        (tree / name).unlink(missing_ok=True)
    for name, what in want.items():
        place = tree / name
        if made.get(name) != what or name in edited or not os.path.lexists(place):
            place.parent.mkdir(parents=True, exist_ok=True)
            if place.is_dir() and not place.is_symlink():
                shutil.rmtree(place)
            place.unlink(missing_ok=True)
            os.rename(fresh / name, place)  # a relative link stays right: both trees lie in build/
    shutil.rmtree(fresh)
    made = {"inputs": inputs(root, extra), "extra": extra and str(extra), "files": want}
    (root / "build/tree.json.new").write_text(json.dumps(made, indent=0))
    os.replace(root / "build/tree.json.new", root / "build/tree.json")
    return tree
