"""What a commit says about a release by itself: anyone who has the commit can compute it again."""

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path

from . import backend, queue, upstream
from .evidence import COUNTS, FACTS, RESULTS, EvidenceError, misfits, subject
from .repository import Repository

GPU_TESTS = "gpu_tests"  # the name of a GPU test record, before its number
SOURCE = ("megatron", "patches", "tests/gpu")  # what the outcome of a GPU run depends on

GPU_RECORD = COUNTS | {
    "gpu": str,
    "versions": {str: str},
    "command": str,
    "date": str,
    "commit": str,
    "source": str,
    "failures": [str],
}


def digest(blobs: dict[str, str]) -> str:
    """A hash over files, given by object names: of `git ls-tree -r --format='%(objectname) %(path)'`."""
    lines = (f"{blobs[path]} {path}\n" for path in sorted(blobs, key=str.encode))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def source(root: Path) -> str:
    """The `source` field of the files in a folder, with or without git."""
    names = (name for name in backend.repository(root) if _under(name, SOURCE))
    return digest({name: queue.blob((root / name).read_bytes()) for name in names})


def _under(name: str, folders: Iterable[str]) -> bool:
    return any(name.startswith(f"{folder}/") for folder in folders)


def version(repo: Repository, commit: str) -> str:
    pin = upstream.Pin.parse(repo.file(commit, upstream.PIN).decode())
    return f"{pin.version}+{repo.file(commit, backend.LABEL).decode().strip()}"


def of(repo: Repository, commit: str) -> dict:
    """The fields of evidence.FACTS."""
    pin = upstream.Pin.parse(repo.file(commit, upstream.PIN).decode())
    label = version(repo, commit)
    listed = queue.listed(repo.file(commit, "patches/series").decode())
    found = {
        "version": label,
        "upstream": {"name": pin.name, "version": pin.version, "sha256": pin.sha256},
        "reviewed": repo.parents(commit)[1:],
        "series": {"patches": len(listed), "sha256": digest(repo.blobs(commit, "patches"))},
        "source": digest(repo.blobs(commit, *SOURCE)),
    }
    records, benchmarks = [], []
    for path in repo.blobs(commit, RESULTS):
        if not re.fullmatch(rf"{RESULTS}/[^/]+/{re.escape(label)}/[^/]+\.json", path):
            continue
        data = repo.file(commit, path)
        row = {"path": path, "sha256": hashlib.sha256(data).hexdigest()}
        if not re.fullmatch(rf"{GPU_TESTS}(-\d+)?", Path(path).stem):
            benchmarks.append(row)
        elif (record := gpu_record(data, path))["source"] == found["source"]:
            records.append(row | {key: record[key] for key in ("gpu", "commit", *COUNTS)})
    return found | {"gpu": records or "none", "benchmarks": benchmarks}


def gpu_record(data: bytes, path: str) -> dict:
    try:
        record = json.loads(data)
    except ValueError as why:
        raise EvidenceError(f"{path}: {why}") from None
    if wrong := list(misfits(record, GPU_RECORD)):
        raise EvidenceError(f"{path}: not a GPU test record: {', '.join(wrong)}")
    return record


def differences(statement: dict, repo: Repository, commit: str) -> list[str]:
    """Fields that the commit itself gives, and gives otherwise."""
    known, said = of(repo, commit), statement["predicate"]
    wrong = [
        f"{name} is {json.dumps(known[name])}, the evidence says {json.dumps(said[name])}"
        for name in FACTS
        if known[name] != said[name]
    ]
    tree = subject(statement, "gitCommit")["digest"].get("gitTree")
    if tree != repo.tree(commit):
        wrong.append(f"gitTree is {repo.tree(commit)}, the evidence says {tree}")
    return wrong
