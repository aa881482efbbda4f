"""What is known about a release: an in-toto statement, kept in the message of its tag. See EVIDENCE.md."""

import datetime
import hashlib
import json
import re
from collections.abc import Iterator

from . import PatchsetError

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "urn:sirl:release-evidence:v1"
BEGIN, END = "-----BEGIN EVIDENCE-----", "-----END EVIDENCE-----"

COMMANDS = ("make lint", "make check", "make test")
TIERS = ("patches", "cpu", "dist")  # of make test; each must have passed tests
BUILDS = 2
RESULTS = "benchmarks/results"

COUNTS = {"passed": int, "failed": int, "skipped": int}
_FILE = {"path": str, "sha256": str}
# Predicate fields that a checkout gives, and those that say what was done with it.
FACTS = {
    "version": str,
    "upstream": {"name": str, "version": str, "sha256": str},
    "reviewed": [str],
    "series": {"patches": int, "sha256": str},
    "source": str,
    "gpu": ("none", [_FILE | COUNTS | {"gpu": str, "commit": str}]),
    "benchmarks": [_FILE],
}
DONE = {
    "commands": [{"command": str, "status": int, "seconds": float}],
    "tiers": {str: COUNTS | {"seconds": float}},
    "wheel_builds": int,
    "tools": {str: str},
    "made": str,
}
SHAPE = {
    "_type": STATEMENT,
    "subject": [{"name": str, "digest": {str: str}}],
    "predicateType": PREDICATE,
    "predicate": FACTS | DONE,
}


class EvidenceError(PatchsetError):
    """The evidence is missing, malformed, edited, or speaks of something else."""


def misfits(value: object, shape: object, where: str = "") -> Iterator[str]:
    """Where a JSON value is not of a shape.

    A shape is a type, a value, [shape], {str: shape} for any names, {name: shape} for these and no others, or
    a tuple of alternatives.
    """
    name = where or "the value"
    if isinstance(shape, tuple):
        if all(list(misfits(value, one, where)) for one in shape):
            yield f"{name} fits none of its forms"
    elif isinstance(shape, type):
        wanted = (int, float) if shape is float else (shape,)
        if not isinstance(value, wanted) or isinstance(value, bool):
            yield f"{name} is no {shape.__name__}"
        elif shape is int and value < 0:
            yield f"{name} is negative"
    elif isinstance(shape, list):
        if not isinstance(value, list):
            yield f"{name} is no list"
        else:
            for index, one in enumerate(value):
                yield from misfits(one, shape[0], f"{where}[{index}]")
    elif isinstance(shape, dict):
        if not isinstance(value, dict):
            yield f"{name} is no object"
        elif str in shape:
            for key, one in value.items():
                yield from misfits(one, shape[str], f"{where}.{key}")
        else:
            for key in sorted(shape.keys() ^ value.keys()):
                yield f"{where}.{key} is {'missing' if key in shape else 'unknown'}"
            for key in shape.keys() & value.keys():
                yield from misfits(value[key], shape[key], f"{where}.{key}")
    elif value != shape:
        yield f"{name} is not {shape!r}"


# ---------------------------------------------------------------- the statement


def statement(git: dict, wheel: dict, facts: dict, tests: dict, tools: dict) -> dict:
    """All that is known.

    Args:
        git: gitCommit and gitTree. wheel: a subject of in-toto. tests: `commands` and `tiers`.
    """
    made = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {
        "_type": STATEMENT,
        "subject": [{"name": facts["upstream"]["name"], "digest": git}, wheel],
        "predicateType": PREDICATE,
        "predicate": facts | tests | {"wheel_builds": BUILDS, "tools": tools, "made": made},
    }


def subject(statement: dict, kind: str) -> dict:
    """The subject with a digest of a kind: gitCommit for the source, sha256 for the wheel."""
    found = [one for one in statement["subject"] if kind in one["digest"]]
    if len(found) != 1:
        raise EvidenceError(f"the evidence has {len(found)} subjects with a {kind}, not one")
    return found[0]


def dumped(statement: dict) -> str:
    return json.dumps(statement, indent=1, sort_keys=True, ensure_ascii=False)


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def require(statement: dict) -> dict:
    """The statement, if it is one of ours."""
    if wrong := list(misfits(statement, SHAPE)):
        raise EvidenceError(f"the evidence is malformed: {', '.join(wrong)}")
    subject(statement, "gitCommit"), subject(statement, "sha256")
    return statement


def require_commit(statement: dict, commit: str) -> None:
    found = subject(statement, "gitCommit")["digest"]["gitCommit"]
    if found != commit:
        raise EvidenceError(f"the evidence is of commit {found[:12]}, not of {commit[:12]}")


def test_faults(statement: dict) -> Iterator[str]:
    """Why the tests that need no GPU are not green."""
    said = statement["predicate"]
    ran = {row["command"]: row["status"] for row in said["commands"]}
    for command in COMMANDS:
        if command not in ran:
            yield f"{command} was not run"
    yield from (f"{command} exited with {status}" for command, status in ran.items() if status)
    for tier in sorted({*TIERS, *said["tiers"]}):
        row = said["tiers"].get(tier, dict.fromkeys(COUNTS, 0))
        if row["failed"]:
            yield f"tier {tier}: {row['failed']} failed"
        elif tier in TIERS and not row["passed"]:
            yield f"tier {tier}: nothing passed"


def gpu_faults(statement: dict) -> Iterator[str]:
    """Why the GPU runs are not green; nothing where there are none."""
    for row in gpu_rows(statement):
        if row["failed"] or not row["passed"]:
            yield f"{row['path']}: {row['passed']} passed, {row['failed']} failed"


def gpu_rows(statement: dict) -> list[dict]:
    rows = statement["predicate"]["gpu"]
    return [] if rows == "none" else rows


# ---------------------------------------------------------------- the message


def summary(statement: dict) -> str:
    said = statement["predicate"]
    pin, wheel = said["upstream"], subject(statement, "sha256")
    tiers = dict.fromkeys((*TIERS, *said["tiers"]))
    rows = {f"tests, {tier}": said["tiers"][tier] for tier in tiers if tier in said["tiers"]}
    rows |= {f"tests, {row['gpu']} ({row['path']})": row for row in gpu_rows(statement)}
    results = [row["path"].removeprefix(f"{RESULTS}/") for row in said["benchmarks"]]
    lines = [
        f"version: {said['version']}",
        f"commit: {subject(statement, 'gitCommit')['digest']['gitCommit']}",
        f"reviewed: {' '.join(said['reviewed'])}",
        f"upstream: {pin['name']} {pin['version']}, sdist sha256 {pin['sha256']}",
        f"series: {said['series']['patches']} patches, sha256 {said['series']['sha256']}",
        f"wheel: {wheel['name']}, sha256 {wheel['digest']['sha256']}, built {said['wheel_builds']} times",
        *(f"{row['command']}: exit status {row['status']}" for row in said["commands"]),
        *(
            f"{name}: {row['passed']} passed, {row['failed']} failed, {row['skipped']} skipped"
            for name, row in rows.items()
        ),
        *["tests, GPU: none"] * (said["gpu"] == "none"),
        f"benchmarks: {', '.join(results) or 'none'}",
        f"tools: {', '.join(f'{name} {version}' for name, version in said['tools'].items())}",
    ]
    return "\n".join(lines)


def message(title: str, notes: str, statement: dict) -> str:
    """The message of a release tag: for people, the hash, the statement."""
    text = dumped(statement)
    parts = [
        title,
        summary(statement),
        notes,
        f"Evidence-SHA256: {sha256(text)}",
        f"{BEGIN}\n{text}\n{END}\n",
    ]
    return "\n\n".join(parts)


def read(message: str) -> dict:
    """The statement in a tag's message, if it is whole."""
    found = re.search(rf"^Evidence-SHA256: ([0-9a-f]{{64}})\n\n{BEGIN}\n(.*?)\n{END}$", message, re.M | re.S)
    if not found:
        raise EvidenceError("there is no evidence in the message")
    if sha256(found[2]) != found[1]:
        raise EvidenceError("the evidence was edited: it does not have the hash that the message states")
    try:
        return require(json.loads(found[2]))
    except ValueError as why:
        raise EvidenceError(f"the evidence is not JSON: {why}") from None
