"""Does the queue apply to another upstream release, and where not? Move the pin only when all of it does."""

import tempfile
from dataclasses import replace
from pathlib import Path

from . import queue, replay, tree, upstream


def trial(root: Path, archive: Path, dest: Path) -> dict[Path, list[queue.Conflict]]:
    """Apply the series to another release; each patch with its conflicts, offsets among them."""
    upstream.unpack(archive, dest)
    outcome = {}
    for patch in queue.series(root / "patches"):
        outcome[patch] = queue.apply(patch, dest, exact=False)
    why = "the release has this file now; move ours or make it a patch"
    taken = [name for name in tree.overlay(root) if (dest / name).exists()]
    return outcome | {root / "megatron": [queue.Conflict("megatron", 0, name, why) for name in taken]}


def report(outcome: dict[Path, list[queue.Conflict]]) -> str:
    lines = []
    for patch, conflicts in outcome.items():
        offsets = sum(c.offset for c in conflicts)
        verdict = "applies" if not conflicts else f"{len(conflicts) - offsets} conflicts, {offsets} offsets"
        lines.append(f"{patch.name}: {verdict}")
        lines += [f"  {line}" for c in conflicts for line in str(c).splitlines()]
    return "\n".join(lines)


def bump(root: Path, version: str, confirm: bool) -> tuple[str, bool]:
    """Try a release, and with ``confirm`` move to it when nothing but offsets stands in the way.

    Returns:
        The report, and whether the series applies (with ``confirm``: whether the pin was moved).
    """
    pin = upstream.Pin(version, None)
    archive = upstream.sdist(root, pin)
    pin = replace(pin, sha256=upstream.digest(archive))
    with tempfile.TemporaryDirectory() as tmp:
        outcome = trial(root, archive, Path(tmp, "trial"))
        conflicts = [c for found in outcome.values() for c in found]
        text = f"{pin.requirement}{report(outcome)}"
        if any(not c.offset for c in conflicts):
            return f"{text}\nthe pin stays: mend the conflicts in patches/ and try again", False
        if not confirm:
            text += "\nread the offsets" * bool(conflicts)
            return f"{text}\n`python -m patchset bump {version} --confirm` moves the pin", not conflicts
        scratch = replay.Scratch(Path(tmp, "scratch"), archive)
        texts = {}
        for patch in queue.series(root / "patches"):
            queue.apply(patch, scratch.path, exact=False)
            scratch.commit(patch)
            texts[patch] = scratch.formatted("HEAD")
    for patch, data in texts.items():
        patch.write_bytes(data)
    (root / "patches/upstream.txt").write_text(pin.requirement)
    return f"{text}\nthe pin is at {version} now: run `python -m patchset check` and the tests", True
