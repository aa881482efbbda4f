"""Lossless weight synchronisation from a trainer to rollout engines; imports nothing of megatron.core.

The trainer's side is :class:`Sender`, the rollout side :class:`ModuleReceiver`; both sides compare
:func:`fingerprint`. FORMAT.md describes the bytes.
"""

from megatron.weight_sync.boxes import Box
from megatron.weight_sync.errors import (
    CorruptPayload,
    FingerprintMismatch,
    IncompletePayload,
    LayoutMismatch,
    MissingTensor,
    MissingVersion,
    PeerFailed,
    ReceiverPoisoned,
    RepeatedVersion,
    SyncFailed,
    UnknownTensor,
    UnsupportedLayout,
    WeightSyncError,
    WrongBase,
    WrongModel,
)
from megatron.weight_sync.fingerprints import add, all_reduce, fingerprint, fingerprint_boxes, total
from megatron.weight_sync.payload import Payload
from megatron.weight_sync.receiver import ModuleReceiver, Peers, Receiver, Target
from megatron.weight_sync.sender import Ack, Sender
from megatron.weight_sync.session import LocalTransport, SyncReport, Transport, synchronise
from megatron.weight_sync.update import Update

__all__ = [
    "Ack",
    "Box",
    "CorruptPayload",
    "FingerprintMismatch",
    "IncompletePayload",
    "LayoutMismatch",
    "LocalTransport",
    "MissingTensor",
    "MissingVersion",
    "ModuleReceiver",
    "Payload",
    "PeerFailed",
    "Peers",
    "Receiver",
    "ReceiverPoisoned",
    "RepeatedVersion",
    "Sender",
    "SyncFailed",
    "SyncReport",
    "Target",
    "Transport",
    "UnknownTensor",
    "UnsupportedLayout",
    "Update",
    "WeightSyncError",
    "WrongBase",
    "WrongModel",
    "add",
    "all_reduce",
    "fingerprint",
    "fingerprint_boxes",
    "synchronise",
    "total",
]
