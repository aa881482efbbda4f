"""Payloads in a directory or object store, with dense anchors and garbage collection.

    l00000000001764500000000000000/            a lineage
        v000000000001-dense/bucket-00000.safetensors, manifest.safetensors
        v000000000002-delta-1-1/…
    answers/RECEIVER.json                      what each receiver said last

A payload exists once its manifest does, which is written last and deleted first. Readers choose the cheapest
way from what they hold to the newest version; a payload that is damaged or gone is left aside, and another
way is taken.
"""

from __future__ import annotations

import heapq
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass

from megatron.weight_sync.errors import CorruptPayload, WeightSyncError
from megatron.weight_sync.payload import Payload, read_manifest
from megatron.weight_sync.receiver import Receiver
from megatron.weight_sync.sender import Ack
from megatron.weight_sync.transport import answers
from megatron.weight_sync.transport.store import open_store

_FOLDER = re.compile(r"l(\d{20})/v(\d{12})-(?:(dense)|delta-(\d+)-(\d+))")


@dataclass(frozen=True)
class Stored:
    """A complete payload in a store: ``base`` is None for an anchor."""

    folder: str
    lineage: int
    version: int
    base: tuple[int, int] | None
    nbytes: int
    files: tuple[str, ...]

    def leads_on(self, held: int) -> bool:
        """Whether a receiver at version ``held`` (negative: at none) can apply it and is then further."""
        fits = self.base is None or self.base[0] <= held <= self.base[1]
        return fits and held < self.version


class Directory:
    """The store's content as payloads."""

    def __init__(self, where):
        self.store = where if hasattr(where, "put") else open_store(where)

    def payloads(self, *, complete: bool = True) -> list[Stored]:
        """Payloads, oldest first, the anchor of a version after the deltas to it. With ``complete=False``
        also those whose manifest is not there."""
        folders: dict[str, list[tuple[str, int]]] = {}
        for path, size in self.store.list().items():
            folders.setdefault(path.rpartition("/")[0], []).append((path, size))
        out = []
        for folder, files in folders.items():
            found = _FOLDER.fullmatch(folder)
            if not found:
                continue
            whole = any(path.endswith("/manifest.safetensors") for path, _ in files)
            if complete and not whole:
                continue
            base = None if found[3] else (int(found[4]), int(found[5]))
            names = tuple(sorted(path for path, _ in files))
            out.append(Stored(folder, int(found[1]), int(found[2]), base, sum(n for _, n in files), names))
        return sorted(out, key=lambda e: (e.lineage, e.version, e.base is None, e.folder))

    def read(self, stored: Stored) -> Payload:
        """Raises CorruptPayload or IncompletePayload for damaged files, FileNotFoundError for collected
        ones."""
        return Payload.from_bytes(self.store.get(path) for path in stored.files)

    def answer(self, receiver_id: str) -> Ack | Exception | None:
        """What a receiver said last; None if it never did."""
        try:
            return answers.decode(self.store.get(_answer_path(receiver_id)).tobytes())
        except FileNotFoundError:
            return None

    def receivers(self) -> list[str]:
        names = [
            path[len("answers/") : -len(".json")] for path in self.store.list() if path.startswith("answers/")
        ]
        return sorted(names)


def way(payloads: Iterable[Stored], held: int | None, goal: int | None = None) -> list[Stored] | None:
    """The payloads of one lineage that lead from ``held`` (None: nothing) to ``goal`` (None: the newest
    version), fewest bytes in all; None if there is no way. Deltas and anchors are edges of a graph of
    versions."""
    payloads = list(payloads)
    if goal is None:
        goal = max((stored.version for stored in payloads), default=None)
    if goal is None:
        return None
    start = -1 if held is None else held
    if start == goal:
        return []
    best: dict[int, int] = {start: 0}
    queue: list[tuple[int, int, tuple[Stored, ...]]] = [(0, start, ())]
    while queue:
        cost, at, path = heapq.heappop(queue)
        if at == goal:
            return list(path)
        if cost > best[at]:
            continue
        for stored in payloads:
            if not stored.leads_on(at):
                continue
            total = cost + stored.nbytes
            if total < best.get(stored.version, total + 1):
                best[stored.version] = total
                heapq.heappush(queue, (total, stored.version, (*path, stored)))
    return None


class DirectoryTransport(Directory):
    """The sender's side.

    Args:
        where: folder, URL or store.
        anchor_every: a dense payload is due when the newest anchor is that many versions old.
        timeout: seconds to wait for receivers' answers in ``deliver``.
    """

    keeps_payloads = True

    def __init__(self, where, *, anchor_every: int = 50, timeout: float = 60.0, poll: float = 0.05):
        super().__init__(where)
        self.anchor_every, self.timeout, self.poll = anchor_every, timeout, poll

    def publish(self, payload: Payload, lineage: int) -> str:
        """Write a payload, the manifest last; returns its folder. A failed write leaves nothing that a reader
        sees."""
        kind = "dense" if payload.dense else f"delta-{payload.base[0]}-{payload.base[1]}"
        folder = f"l{lineage:020d}/v{payload.version:012d}-{kind}"
        for k, data in enumerate(payload.buckets):
            self.store.put(f"{folder}/bucket-{k:05d}.safetensors", memoryview(data.cpu().numpy()))
        self.store.put(f"{folder}/manifest.safetensors", memoryview(payload.manifest.cpu().numpy()))
        return folder

    def anchor_due(self, lineage: int, version: int) -> bool:
        """Whether ``version`` should be published as an anchor too; :func:`synchronise` asks and does."""
        anchors = [e.version for e in self.payloads() if e.lineage == lineage and e.base is None]
        return not anchors or version - max(anchors) >= self.anchor_every

    def deliver(self, payload: Payload, receiver_ids: Iterable[str]) -> dict[str, Ack | Exception]:
        manifest = read_manifest(payload.manifest)
        names = list(receiver_ids)
        try:
            self.publish(payload, manifest.lineage)
        except Exception as error:
            if not names:
                raise
            return dict.fromkeys(names, error)
        return self._wait(names, (manifest.lineage, manifest.version))

    def statuses(self, receiver_ids: Iterable[str]) -> dict[str, Ack | Exception]:
        return {name: self.answer(name) or TimeoutError("never answered") for name in receiver_ids}

    def _wait(self, names: list[str], wanted: tuple[int, int]) -> dict[str, Ack | Exception]:
        out: dict[str, Ack | Exception] = {}
        deadline = time.monotonic() + self.timeout
        while len(out) < len(names):
            for name in names:
                answer = self.answer(name)
                if isinstance(answer, Ack) and (answer.lineage, answer.version) == wanted:
                    out[name] = answer
            if time.monotonic() > deadline:
                for name in names:
                    out.setdefault(name, self._late(name, wanted))
            elif len(out) < len(names):
                time.sleep(self.poll)
        return out

    def _late(self, name: str, wanted: tuple[int, int]) -> Exception:
        answer = self.answer(name)
        if isinstance(answer, Exception):
            return answer
        return TimeoutError(f"no answer for version {wanted[1]} within {self.timeout:g} s, last: {answer}")

    def collect_garbage(self, receivers: Iterable[str] | None = None) -> list[str]:
        """Delete payloads that no receiver needs any more; returns their folders.

        Kept are, in the newest lineage that has an anchor: the newest anchor and everything after it, and
        every payload on the way from what a receiver last acknowledged to the newest version. Receivers that
        hold something else, or never answered, start from the anchor.

        Args:
            receivers: whose answers count; by default everyone who ever answered. Leave out those that are
                gone.
        """
        payloads = self.payloads()
        anchored = [e.lineage for e in payloads if e.base is None]
        if not anchored:
            return []
        lineage = max(anchored)
        current = [e for e in payloads if e.lineage == lineage]
        anchor = max(e.version for e in current if e.base is None)
        keep = {e.folder for e in current if e.version > anchor or (e.version == anchor and e.base is None)}
        keep |= {e.folder for e in payloads if e.lineage > lineage}
        for name in self.receivers() if receivers is None else receivers:
            answer = self.answer(name)
            if isinstance(answer, Ack) and answer.lineage == lineage and answer.version is not None:
                keep |= {e.folder for e in way(current, answer.version) or ()}
        # What a crashed writer left has no manifest; a payload that is being written now is newer than the
        # rest.
        newest = (lineage, max(e.version for e in current))
        gone = []
        for stored in self.payloads(complete=False):
            if stored.folder in keep or (stored.lineage, stored.version) > newest:
                continue
            for path in sorted(stored.files, key=lambda p: not p.endswith("/manifest.safetensors")):
                self.store.delete(path)
            gone.append(stored.folder)
        return gone


class DirectoryReceiver(Directory):
    """A receiver's side: ``poll`` brings it to the newest version, and leaves its answer in the store.

    Args:
        receiver_id: a file name.
    """

    def __init__(self, receiver: Receiver, receiver_id: str, where):
        super().__init__(where)
        if not re.fullmatch(r"[\w.-]+", receiver_id):
            raise ValueError(f"a receiver id here is letters, digits, '_', '-' and '.', got {receiver_id!r}")
        self.receiver, self.receiver_id = receiver, receiver_id

    def poll(self) -> int:
        """Apply everything new; returns how many payloads. The way there may start at any version.

        Raises:
            WeightSyncError: what stands between this receiver and the newest version, if no other way leads
                there. It is left in the store as the answer, too.
        """
        applied, bad = 0, {}
        try:
            while True:
                path = self._path(bad)
                if not path:
                    break
                stored = path[0]
                try:
                    payload = self.read(stored)
                except FileNotFoundError:
                    bad[stored.folder] = CorruptPayload(f"{stored.folder} was collected while being read")
                    continue
                try:
                    self.receiver.apply(payload)
                    applied += 1
                except WeightSyncError as error:
                    bad[stored.folder] = error
        except WeightSyncError as error:
            self.store.put(_answer_path(self.receiver_id), answers.encode(error))
            raise
        if applied:
            self.store.put(_answer_path(self.receiver_id), answers.encode(self.receiver.status()))
        return applied

    def _path(self, bad: dict[str, WeightSyncError]) -> list[Stored] | None:
        """What to apply next; raises the last error when it leaves no way to a version newer than the held
        one."""
        payloads = self.payloads()
        receiver = self.receiver
        held, behind = None if receiver.poisoned else receiver.version, False
        for lineage in sorted({e.lineage for e in payloads}, reverse=True):
            if receiver.lineage is not None and lineage < receiver.lineage:
                break
            current = [e for e in payloads if e.lineage == lineage]
            start = held if lineage == receiver.lineage else None
            goals = sorted({e.version for e in current}, reverse=True)
            usable = [e for e in current if e.folder not in bad]
            if receiver.poisoned and lineage == receiver.lineage:  # it takes no anchor older than itself
                usable = [e for e in usable if e.base or e.version >= (receiver.version or 0)]
            for goal in goals:
                if start is not None and goal <= start:
                    break
                behind = True
                path = way(usable, start, goal)
                if path:
                    return path
        if bad and behind:
            raise list(bad.values())[-1]
        return None


def _answer_path(receiver_id: str) -> str:
    return f"answers/{receiver_id}.json"
