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
from megatron.weight_sync.auto import Chooser
from megatron.weight_sync.errors import WrongModel
from megatron.weight_sync.update import Update

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
        # Change bits cover everything since this version; None: nothing is known.
        self.since: int | None = None
        self.bucket_bytes = bucket_bytes
        self.encodings = encodings
        self.exact_base = exact_base
        self.max_behind = max_behind
        self.table: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        # version -> total fingerprint, of versions that a receiver may hold
        self._published: dict[int, int] = {}
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

    # What an update reports back.

    def require_open(self, update: Update) -> None:
        """Refuse an update that was finished or aborted."""
        if self._open is not update:
            raise RuntimeError("this update is closed already")

    def finished(self, update: Update, fingerprint: int) -> None:
        """The update's payload exists from now on, with that fingerprint of the whole model.

        Raises:
            RuntimeError: the version was published before, with other weights.
        """
        version = update.version
        if self._published.get(version, fingerprint) != fingerprint:
            raise RuntimeError(f"the weights have changed since version {version} was published")
        self._open = None
        self.version = version
        self._published[version] = fingerprint
        self.table = self.table or update.table
        if self.since is None:
            # Bits are complete from here on: every change after this version will be reported.
            self.since = version

    def aborted(self, update: Update) -> None:
        """The update is given up; nothing was published."""
        if self._open is update:
            self._open = None
