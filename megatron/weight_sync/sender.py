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

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron.weight_sync import codec
from megatron.weight_sync.container import DTYPE_NAMES
from megatron.weight_sync.errors import LayoutMismatch, MissingTensor, UnknownTensor, UnsupportedLayout
from megatron.weight_sync.fingerprints import bits_of, total
from megatron.weight_sync.payload import Manifest, Payload, dense_parts, write_bucket, write_manifest

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
        smaller. exact_base: deltas come from comparing with the weights at ``since`` and not from accumulated
        bits, so they
            fit that one version only.
        max_behind: a receiver that many versions behind is given up and needs a dense sync, so that change
            bits can be cleared. None: never.
    """

    def __init__(
        self,
        model_id: str,
        *,
        lineage: int | None = None,
        bucket_bytes: int = 512 << 20,
        encodings: tuple[str, ...] = ("raw",),
        exact_base: bool = False,
        max_behind: int | None = None,
    ):
        unknown = set(encodings) - set(codec.ENCODINGS)
        if unknown:
            raise ValueError(f"encodings are {sorted(codec.ENCODINGS)}, got {sorted(unknown)}")
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

    @property
    def needs_dense(self) -> bool:
        """Whether some receiver cannot go on from a delta."""
        return self.since is None or any(held is None or held < self.since for held in self._held.values())

    def acknowledge(self, receiver_id: str, ack: Ack) -> bool:
        """Record what a receiver holds, after an update or when it connects.

        Returns:
            True when every receiver holds the published version, which then is the new ``since``: the change
            bits *that this version's payload contained* must be cleared now, and no others.
        """
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


class Update:
    """One version under construction; made by :meth:`Sender.begin`."""

    def __init__(self, sender: Sender, version: int, base: tuple[int, int] | None):
        self._sender = sender
        self.version = version
        self.base = base
        self._tensors: list[dict] = []
        self._parts: dict[str, torch.Tensor] = {}
        self._nbytes = 0
        self._buckets: list[torch.Tensor] = []
        self._seen: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self._sent: list[str] = []
        self._stats = {"changed": 0, "elements": 0, "encodings": {}}

    @property
    def dense(self) -> bool:
        return self.base is None

    def add_dense(self, name: str, tensor: torch.Tensor) -> None:
        """A whole tensor; it may be overwritten as soon as this returns."""
        self._check(name, tuple(tensor.shape), tensor.dtype)
        header, parts = dense_parts(name, tensor.detach())
        self._add(header, parts, tensor.numel(), tensor.numel())

    def add_delta(
        self,
        name: str,
        index: torch.Tensor,
        values: torch.Tensor,
        shape: tuple[int, ...],
        full: torch.Tensor | None = None,
    ) -> None:
        """The elements of one tensor that changed since ``base``.

        Args:
            name: as in the first dense sync.
            index: int64 [n], flat indices into the full contiguous tensor, any order, none twice.
            values: [n], the current values, in the tensor's dtype.
            shape: of the full tensor.
            full: the tensor itself, if at hand: it is sent whole where that is smaller.
        """
        if self.dense:
            raise RuntimeError("this update is dense: it takes whole tensors")
        shape = tuple(shape)
        self._check(name, shape, values.dtype)
        numel = 1
        for size in shape:
            numel *= size
        if index.dtype != torch.int64 or index.dim() != 1 or values.shape != index.shape:
            raise ValueError(
                f"{name}: index is int64 [n] with n values, got {index.dtype} {tuple(index.shape)} and "
                f"{tuple(values.shape)}"
            )
        if index.numel() == 0:
            return
        if index.numel() > 1 and not bool((index[1:] > index[:-1]).all()):
            index, order = index.sort()
            values = values[order]
            if bool((index[1:] == index[:-1]).any()):
                raise ValueError(f"{name}: an index is there twice")
        if int(index[0]) < 0 or int(index[-1]) >= numel:
            raise ValueError(f"{name}: an index lies outside a tensor of {numel} elements")
        whole = numel * values.element_size()
        encoding, parts, extra = codec.encode_smallest(index, bits_of(values), numel, self._sender.encodings)
        size = sum(part.numel() * part.element_size() for part in parts.values())
        if size >= whole and (full is not None or index.numel() == numel):
            whole_tensor = full if full is not None else values.reshape(shape)
            if tuple(whole_tensor.shape) != shape or whole_tensor.dtype != values.dtype:
                raise ValueError(
                    f"{name}: full is {whole_tensor.dtype} {tuple(whole_tensor.shape)}, expected {shape}"
                )
            header, entries = dense_parts(name, whole_tensor.detach())
        else:
            header = {
                "name": name,
                "dtype": DTYPE_NAMES[values.dtype],
                "shape": list(shape),
                "encoding": encoding,
                **extra,
            }
            entries = {f"{name}:{part}": tensor for part, tensor in parts.items()}
        self._add(header, entries, index.numel(), numel)

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

    def _add(self, header: dict, parts: dict[str, torch.Tensor], changed: int, elements: int) -> None:
        self._sent.append(header["name"])
        self._stats["changed"] += changed
        count = self._stats["encodings"]
        count[header["encoding"]] = count.get(header["encoding"], 0) + 1
        self._tensors.append(header)
        self._nbytes += sum(part.numel() * part.element_size() for part in parts.values())
        full = self._nbytes >= self._sender.bucket_bytes
        self._parts.update(parts if full else {name: part.clone() for name, part in parts.items()})
        if full:
            self._close_bucket()

    def _close_bucket(self) -> None:
        if not self._tensors:
            return
        self._buckets.append(write_bucket(self._tensors, self._parts, self._sender.lineage, self.version))
        self._tensors, self._parts, self._nbytes = [], {}, 0
