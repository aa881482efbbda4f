"""Everything that weight sync raises about payloads, receivers and senders."""

from __future__ import annotations


class WeightSyncError(Exception):
    """Base class. Wherever a receiver raises one, its live weights are what they were before the call, with
    one exception that says so itself: :class:`ReceiverPoisoned`."""


class CorruptPayload(WeightSyncError):
    """A container is truncated, malformed, was altered, or does not belong to its manifest."""


class IncompletePayload(CorruptPayload):
    """The manifest or one of the containers it lists is missing."""


class WrongModel(WeightSyncError):
    """The payload was made for another model or another layout of it."""


class WrongBase(WeightSyncError):
    """A delta does not start from the version that the receiver holds."""


class MissingVersion(WrongBase):
    """The receiver is behind: at least one version between its own and the delta's base never arrived."""


class RepeatedVersion(WrongBase):
    """The receiver already holds this version, or a later one."""


class UnknownTensor(WeightSyncError):
    """The payload names a tensor that the receiver does not have."""


class MissingTensor(WeightSyncError):
    """A dense sync leaves out a tensor that the receiver has."""


class LayoutMismatch(WeightSyncError):
    """A tensor's shape or dtype differs between sender and receiver, or two names of tied weights
    disagree."""


class FingerprintMismatch(WeightSyncError):
    """After an update the live weights are not the sender's. ``names`` lists the tensors that differ."""

    def __init__(self, message: str, names: list[str]):
        super().__init__(message)
        self.names = names


class ReceiverPoisoned(WeightSyncError):
    """The live weights are no known version; only a dense sync is accepted."""


class UnsupportedLayout(WeightSyncError):
    """The receiver stores a tensor in a way that no delta can reach (repacked or quantised), or an encoding
    or dtype is not supported here."""


class PeerFailed(WeightSyncError):
    """Another rank of the same sharded receiver refused the payload, so this one did not apply it either."""


class SyncFailed(WeightSyncError):
    """Some receivers did not take a version. ``failures`` maps their ids to what they raised. Change bits
    stay set, so the next delta covers what they missed."""

    def __init__(self, message: str, failures: dict[str, BaseException]):
        super().__init__(message)
        self.failures = failures
