"""The trainer's side: versions, what each receiver holds, and the payload that takes it further.

One sync::

    update = sender.begin()                      # update.dense says whether whole tensors are needed
    if update.dense:
        for name, tensor in export(model):
            update.add_dense(name, tensor)
    else:
        for name, index, values, shape in changed(model):
            update.add_delta(name, index, values, shape)
    payload = update.finish(fingerprints)        # per-tensor sums of the live weights, all tensors
    ack = receiver.apply(payload)                # elsewhere
    if sender.acknowledge(receiver_id, ack):     # every receiver holds this version
        clear_change_bits()

Change bits are cleared only when ``acknowledge`` returns True. Until then they keep accumulating, so the next
delta is the union since ``sender.since`` and serves receivers at any version from there on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron.weight_sync import codec
from megatron.weight_sync.auto import Chooser
from megatron.weight_sync.container import DTYPE_NAMES
from megatron.weight_sync.errors import (
    LayoutMismatch,
    MissingTensor,
    UnknownTensor,
    UnsupportedLayout,
    WrongModel,
)
from megatron.weight_sync.fingerprints import bits_of, total
from megatron.weight_sync.payload import Manifest, Payload, write_bucket, write_manifest

FRESH, SYNCED, BEHIND, POISONED = "fresh", "synced", "behind", "poisoned"


@dataclass(frozen=True)
class Ack:
    """What a receiver says of itself. ``version`` is None when it holds no known weights, and ``fingerprint``
    is then 0; otherwise it is the total recomputed over its live weights."""

    model_id: str | None
    lineage: int | None
    version: int | None
    fingerprint: int = 0
    poisoned: bool = False


class Sender:
    """Versions and per-receiver acknowledgements; encodes payloads.

    Args:
        model_id: names the model and its layout, for instance the export plan's hash and the config's. A
            receiver refuses payloads of another one.
        lineage: a positive number that orders the runs of senders; a restarted sender must have a larger one.
            By default the clock, in nanoseconds.
        bucket_bytes: a container is closed once it holds this much.
        encodings: sparse encodings that may be used; per tensor the smallest wins, and dense if that is
            smaller. "auto" takes the one that is fastest from end to end on this machine over ``link``.
        link: for "auto", bytes per second; None learns it from what ``synchronise`` delivers.
        exact_base: deltas come from comparing with the weights at ``since`` and not from accumulated bits, so
            they fit that one version only.
        max_behind: a receiver that many versions behind is given up and needs a dense sync, so that change
            bits can be cleared. None: never.
    """

    def __init__(
        self,
        model_id: str,
        *,
        lineage: int | None = None,
        bucket_bytes: int = 512 << 20,
        encodings: tuple[str, ...] | str = ("raw", "packed"),
        link: float | None = None,
        exact_base: bool = False,
        max_behind: int | None = None,
    ):
        self.chooser = Chooser(link) if encodings == "auto" else None
        if self.chooser is not None:
            encodings = ("raw", "packed")  # until the first delta
        unknown = set(encodings) - set(codec.ENCODINGS)
        if unknown:
            raise ValueError(f"encodings are {sorted(codec.ENCODINGS)}, got {sorted(unknown)}")
        if "entropy" in encodings:
            codec.require_zstandard()
        self.model_id = model_id
        self.lineage = time.time_ns() if lineage is None else lineage
        self.version = 0
        self.since: int | None = (
            None  # change bits cover everything since this version; None: nothing is known
        )
        self.bucket_bytes = bucket_bytes
        self.encodings = encodings
        self.exact_base = exact_base
        self.max_behind = max_behind
        self.table: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._published: dict[
            int, int
        ] = {}  # version -> total fingerprint, of versions that a receiver may hold
        self._held: dict[str, int | None] = {}  # receiver -> version, None when it needs a dense sync
        self._poisoned: set[str] = set()
        self._open: Update | None = None

    # ---- checkpoints ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict:
        """What a checkpoint of the trainer keeps: JSON values only."""
        return {
            "model_id": self.model_id,
            "lineage": self.lineage,
            "version": self.version,
            "receivers": sorted(self._held),
        }

    def load_state_dict(self, state: Mapping) -> None:
        """Go on from a checkpoint: with the version it had, never from zero, in a later lineage.

        Versions after the checkpoint may have reached receivers, and other weights will now get their
        numbers; the new lineage keeps the two apart. Every receiver needs a dense sync.
        """
        if state["model_id"] != self.model_id:
            raise WrongModel(f"state is of model {state['model_id']!r}, this sender's is {self.model_id!r}")
        self.lineage = max(self.lineage, state["lineage"] + 1)
        self.version = state["version"]
        self.since, self._open, self.table, self._published = None, None, {}, {}
        self._held = dict.fromkeys([*self._held, *state["receivers"]])
        self._poisoned.clear()

    # ---- receivers -----------------------------------------------------------------------------------------

    def register(self, receiver_id: str) -> None:
        """A receiver that is new, or restarted: it needs a dense sync."""
        self._held[receiver_id] = None
        self._poisoned.discard(receiver_id)

    def drop(self, receiver_id: str) -> None:
        """A receiver that is gone for good; no change bits are kept for it."""
        self._held.pop(receiver_id, None)
        self._poisoned.discard(receiver_id)

    def state(self, receiver_id: str) -> str:
        """``fresh``, ``synced``, ``behind`` or ``poisoned``; KeyError for a receiver that was never
        registered."""
        held = self._held[receiver_id]
        if receiver_id in self._poisoned:
            return POISONED
        if held is None:
            return FRESH
        return SYNCED if held == self.version else BEHIND

    def invalidate(self) -> None:
        """The weights were replaced and not stepped (checkpoint load, another plan): the next sync is
        dense."""
        self.since = None

    def takes_delta(self, receiver_id: str) -> bool:
        """Whether a delta from ``since`` can take this receiver further."""
        held = self._held[receiver_id]
        exact = self.exact_base and held != self.since
        return self.since is not None and held is not None and held >= self.since and not exact

    @property
    def receivers(self) -> list[str]:
        return list(self._held)

    @property
    def needs_dense(self) -> bool:
        """Whether some receiver cannot go on from a delta."""
        return self.since is None or not all(self.takes_delta(name) for name in self._held)

    def acknowledge(self, receiver_id: str, ack: Ack) -> bool:
        """Record what a receiver holds, after an update or when it connects.

        Returns:
            True when every receiver holds the published version, which then is the new ``since``: the change
            bits *that this version's payload contained* must be cleared now, and no others.

        Raises:
            TypeError: ``ack`` is not an Ack.
        """
        if not isinstance(ack, Ack):
            raise TypeError(
                f"{receiver_id}: expected an Ack (what Receiver.apply or status() returned), got "
                f"{type(ack).__name__}"
            )
        known = (
            ack.model_id == self.model_id and ack.lineage == self.lineage and ack.version in self._published
        )
        self._poisoned.discard(receiver_id)
        if ack.poisoned or (known and self._published[ack.version] != ack.fingerprint):
            self._poisoned.add(receiver_id)
            self._held[receiver_id] = None
        else:
            self._held[receiver_id] = ack.version if known else None
        if self.max_behind is not None:
            for name, held in self._held.items():
                if held is not None and held < self.version - self.max_behind:
                    self._held[name] = None
        # A receiver that needs a dense sync anyway has no use for change bits.
        waiting = [held for held in self._held.values() if held is not None and held != self.version]
        if waiting or self.version == 0 or self._held.get(receiver_id) != self.version:
            return False
        self.since = self.version
        self._published = {self.version: self._published[self.version]}
        return True

    # ---- publishing ----------------------------------------------------------------------------------------

    def begin(self, dense: bool | None = None, *, again: bool = False) -> Update:
        """Open the next version, or (``again``) the published one in the other form.

        Args:
            dense: None takes what the receivers need; True forces whole tensors.
            again: the weights have not changed since the last ``finish``: encode the same version once more,
                for instance dense for one receiver after a delta for the others.

        Raises:
            RuntimeError: an update is open already, or a delta is asked for that no receiver could apply.
        """
        if self._open is not None:
            raise RuntimeError("an update is open: finish or abort it first")
        if again and self.version == 0:
            raise RuntimeError("nothing was published yet")
        if dense is None:
            dense = self.needs_dense
        if not dense and self.since is None:
            raise RuntimeError(
                "a delta needs a base: the first sync, and the next one after invalidate(), is dense"
            )
        version = self.version if again else self.version + 1
        base = None
        if not dense:
            base = (self.since, self.since if self.exact_base else version - 1)
            if base[1] >= version or base[0] >= version:
                raise RuntimeError(
                    f"change bits were cleared at version {self.since}: no delta leads to {version}"
                )
        self._open = Update(self, version, base)
        return self._open

    def _finish(self, version: int, fingerprint: int) -> None:
        if self._published.get(version, fingerprint) != fingerprint:
            raise RuntimeError(f"the weights have changed since version {version} was published")
        self._open = None
        self.version = version
        self._published[version] = fingerprint
        if self.since is None:
            # Bits are complete from here on: every change after this version will be reported.
            self.since = version


@dataclass
class _Change:
    """What :meth:`Update.add_delta` was given, until the bucket is closed."""

    name: str
    index: torch.Tensor
    values: torch.Tensor
    old: torch.Tensor | None
    every: bool  # all elements changed: the values are the tensor
    numel: int
    distance: torch.Tensor | None = None
    start: int = 8
    size: int | None = None  # estimated bytes, once planned


class Update:
    """One version under construction; made by :meth:`Sender.begin`."""

    def __init__(self, sender: Sender, version: int, base: tuple[int, int] | None):
        self._sender = sender
        self.version = version
        self.base = base
        self._tensors: list[dict] = []
        self._dense: dict[str, torch.Tensor] = {}
        self._changes: list[_Change] = []
        self._nbytes = 0
        self._buckets: list[tuple[torch.Tensor, str]] = []
        self._seen: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._sent: list[str] = []
        self._stats = {"changed": 0, "elements": 0, "encodings": {}}

    @property
    def dense(self) -> bool:
        return self.base is None

    def add_dense(self, name: str, tensor: torch.Tensor, *, changed: int | None = None) -> None:
        """A whole tensor, in a delta too where that is smaller; it may be overwritten as soon as this
        returns. ``changed``: how many of its elements differ from the base, for the statistics."""
        self._check(name, tuple(tensor.shape), tensor.dtype)
        self._add_dense(name, tensor.detach(), tensor.numel() if changed is None else changed)

    def add_delta(
        self,
        name: str,
        index: torch.Tensor,
        values: torch.Tensor,
        shape: tuple[int, ...],
        *,
        full: torch.Tensor | None = None,
        old: torch.Tensor | None = None,
    ) -> None:
        """The elements of one tensor that changed since ``base``.

        Args:
            name: as in the first dense sync.
            index: int64 [n], flat indices into the full contiguous tensor, any order, none twice.
            values: [n], the current values, in the tensor's dtype.
            shape: of the full tensor.
            full: the tensor itself, if at hand: it is sent whole where that is smaller. Like all other
                arguments, it may be overwritten as soon as this returns.
            old: [n], the values at the base version, if at hand: the entropy encoding then codes distances.
                Used only while ``base`` is a single version.
        """
        if self.dense:
            raise RuntimeError("this update is dense: it takes whole tensors")
        shape = tuple(shape)
        self._check(name, shape, values.dtype)
        numel = math.prod(shape)
        for what, tensor in (("values", values), ("old", old)):
            if tensor is not None and (tensor.shape != index.shape or tensor.dtype != values.dtype):
                raise ValueError(
                    f"{name}: {what} are {tensor.dtype} {tuple(tensor.shape)} for {len(index)} indices"
                )
        if index.dtype != torch.int64 or index.dim() != 1:
            raise ValueError(f"{name}: index is int64 [n], got {index.dtype} {tuple(index.shape)}")
        if full is not None and (tuple(full.shape) != shape or full.dtype != values.dtype):
            raise ValueError(
                f"{name}: full is {full.dtype} {tuple(full.shape)}, expected {values.dtype} {shape}"
            )
        if index.numel() == 0:
            return
        change = _Change(
            name=name,
            index=index.clone(),
            values=values.clone(),
            old=None if old is None else old.clone(),
            every=index.numel() == numel,
            numel=numel,
        )
        if index.device.type == "cpu":
            _check([change])
        itemsize = values.element_size()
        if full is not None and index.numel() * (8 + itemsize) >= numel * itemsize:
            # It may be smaller whole: decide now, so that no reference to ``full`` outlives this call.
            _check([change])
            self._choose([change])
            if change.size >= numel * itemsize:
                self._add_dense(name, full.detach(), index.numel())
                return
        self._changes.append(change)
        self._nbytes += index.numel() * (itemsize + 1)
        if self._nbytes >= self._sender.bucket_bytes:
            self._close_bucket()

    def finish(self, fingerprints: Mapping[str, int]) -> Payload:
        """Close the version.

        Args:
            fingerprints: of every tensor of the model, over the live weights that this version is.

        Raises:
            MissingTensor: a dense update lacks tensors of the model, or a fingerprint is missing.
        """
        sender = self._sender
        if sender._open is not self:
            raise RuntimeError("this update is closed already")
        table = sender.table or self._seen
        missing = sorted(set(table) - set(self._seen)) if self.dense else []
        if missing:
            raise MissingTensor(
                f"a dense sync needs every tensor; {len(missing)} are missing: {missing[:10]}"
            )
        wanted = set(table) | set(self._seen)
        if set(fingerprints) != wanted:
            odd = sorted(set(fingerprints) ^ wanted)
            raise MissingTensor(
                f"fingerprints must cover exactly the model's tensors; these differ: {odd[:10]}"
            )
        self._close_bucket()
        fingerprint = total(fingerprints)
        sender._finish(self.version, fingerprint)
        if not sender.table:
            sender.table = dict(self._seen)
        manifest = Manifest(
            model_id=sender.model_id,
            lineage=sender.lineage,
            version=self.version,
            base=self.base,
            buckets=tuple(digest for _, digest in self._buckets),
            sums={name: fingerprints[name] for name in self._sent},
            fingerprint=fingerprint,
        )
        self._stats["elements"] = sum(torch.Size(shape).numel() for shape, _ in sender.table.values())
        payload = Payload(
            write_manifest(manifest),
            [data for data, _ in self._buckets],
            self.version,
            self.base,
            self._stats,
        )
        return payload

    def abort(self) -> None:
        """Give the version up; nothing was published."""
        if self._sender._open is self:
            self._sender._open = None

    def _check(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        if self._sender._open is not self:
            raise RuntimeError("this update is closed already")
        if name in self._seen:
            raise ValueError(f"{name}: added twice")
        if not name or ":" in name or name == "__metadata__":
            raise ValueError(f"{name!r}: a tensor name is not empty and has no colon")
        if dtype not in DTYPE_NAMES:
            raise UnsupportedLayout(f"{name}: {dtype} cannot be sent")
        table = self._sender.table
        if table and name not in table:
            raise UnknownTensor(f"{name}: not in the model that the first sync sent")
        if table and table[name] != (shape, dtype):
            raise LayoutMismatch(f"{name}: was {table[name]}, now {(shape, dtype)}")
        self._seen[name] = (shape, dtype)

    def _list(self, name: str, encoding: str, changed: int, **extra) -> None:
        shape, dtype = self._seen[name]
        self._tensors.append({"name": name, "dtype": DTYPE_NAMES[dtype], "shape": list(shape), **extra})
        self._sent.append(name)
        self._stats["changed"] += changed
        count = self._stats["encodings"]
        count[encoding] = count.get(encoding, 0) + 1

    def _add_dense(self, name: str, tensor: torch.Tensor, changed: int, keep: bool = True) -> None:
        self._list(name, "dense", changed)
        self._nbytes += tensor.numel() * tensor.element_size()
        full = self._nbytes >= self._sender.bucket_bytes
        self._dense[name] = (
            tensor if full or not keep else tensor.clone(memory_format=torch.contiguous_format)
        )
        if full and keep:
            self._close_bucket()

    def _close_bucket(self) -> None:
        """Plan and encode the changes at hand, all of them in a few passes, and write the container."""
        groups = self._plan()
        if not self._tensors and not groups:
            return
        parts, heads = {}, []
        for k, (members, start, index, bits, distance) in enumerate(groups):
            numel = sum(change.numel for change in members)
            made, head = codec.encode_group(index, bits, distance, numel, start, self._sender.encodings)
            heads.append(head)
            parts |= {f":{k}:{part}": tensor for part, tensor in made.items()}
            for change in members:
                self._list(change.name, head["encoding"], change.index.numel(), group=k)
        parts |= self._dense
        data = write_bucket(self._tensors, heads, parts, self._sender.lineage, self.version)
        self._buckets.append(data)
        self._tensors, self._dense, self._changes, self._nbytes = [], {}, [], 0

    def _choose(self, changes: list[_Change]) -> None:
        """Plan the encoding of each of some tensors on one device."""
        if not changes:
            return
        if self._sender.chooser is not None:
            self._sender.encodings = self._sender.chooser.pick(changes[0].index.device.type)
        encodings, exact = self._sender.encodings, self.base[0] == self.base[1]
        for change, gaps in zip(changes, codec.gap_counts([c.index for c in changes]), strict=True):
            bits = bits_of(change.values)
            ulp = "entropy" in encodings and exact and codec.has_ulp(change.values.dtype)
            if ulp and change.old is not None:
                change.distance = codec.ulp_between(bits_of(change.old), bits)
            change.start, change.size = codec.plan_tensor(
                change.index, bits, change.distance, gaps, encodings, change.numel
            )

    def _plan(self) -> list[tuple]:
        """Choose dense or sparse for each tensor; returns the groups of the sparse ones: (members, first gap
        width, index, bits, distances or None)."""
        keyed: dict[tuple, list[_Change]] = {}
        for device in {change.index.device for change in self._changes}:
            changes = [change for change in self._changes if change.index.device == device]
            if device.type != "cpu":
                _check(changes)
            self._choose([change for change in changes if change.size is None])
            for change in changes:
                if change.every and change.size >= change.numel * change.values.element_size():
                    whole = change.values.view(self._seen[change.name][0])
                    self._add_dense(change.name, whole, change.index.numel(), keep=False)
                    continue
                key = (change.values.dtype, change.start, change.distance is not None, device)
                keyed.setdefault(key, []).append(change)
        groups = []
        for (_, start, relative, device), members in keyed.items():
            for part in _parts(members):
                offsets = [0]
                for change in part:
                    offsets.append(offsets[-1] + change.numel)
                sizes = [change.index.numel() for change in part]
                counts = torch.tensor(sizes, device=device)
                shift = torch.tensor(offsets[:-1], device=device).repeat_interleave(
                    counts, output_size=sum(sizes)
                )
                index = torch.cat([change.index for change in part]) + shift
                bits = torch.cat([bits_of(change.values) for change in part])
                distance = torch.cat([change.distance for change in part]) if relative else None
                groups.append((part, start, index, bits, distance))
        return groups


def _parts(changes: list[_Change]) -> list[list[_Change]]:
    """Cut so that a group has fewer than 2**31 elements where it can."""
    parts, size = [[]], 0
    for change in changes:
        if parts[-1] and size + change.numel >= codec.INT32_LIMIT:
            parts.append([])
            size = 0
        parts[-1].append(change)
        size += change.numel
    return parts


def _check(changes: list[_Change]) -> None:
    """Indices lie inside their tensors, and rise strictly or are sorted here; one device synchronisation."""
    device = changes[0].index.device
    sizes = [change.index.numel() for change in changes]
    counts, n = torch.tensor(sizes, device=device), sum(sizes)
    numel = torch.tensor([c.numel for c in changes], device=device).repeat_interleave(counts, output_size=n)
    owner = torch.arange(len(changes), device=device).repeat_interleave(counts, output_size=n)
    index = torch.cat([change.index for change in changes])
    outside = ((index < 0) | (index >= numel)).any()
    falls = ((index[1:] <= index[:-1]) & (owner[1:] == owner[:-1])).any()
    bad, unsorted = torch.stack([outside, falls]).tolist()
    if not bad and not unsorted:
        return
    for change in changes:
        if int(change.index.min()) < 0 or int(change.index.max()) >= change.numel:
            raise ValueError(f"{change.name}: an index lies outside a tensor of {change.numel} elements")
        change.index, order = change.index.sort()
        change.values = change.values[order]
        change.old = None if change.old is None else change.old[order]
        if bool((change.index[1:] == change.index[:-1]).any()):
            raise ValueError(f"{change.name}: an index is there twice")
