"""Answers of receivers as JSON, for transports that carry bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable

from megatron.weight_sync import errors
from megatron.weight_sync.sender import Ack


def encode(answer: Ack | Exception, limit: int | None = None) -> bytes:
    """An acknowledgement or an error as JSON of at most ``limit`` bytes (a long message is cut)."""
    if isinstance(answer, Ack):
        return json.dumps({"ack": vars(answer)}).encode()
    message = str(answer)
    while True:
        data = json.dumps({"error": type(answer).__name__, "message": message}).encode()
        if limit is None or len(data) <= limit or not message:
            return data
        message = message[: len(message) // 2]


def unknown(receiver_id: str, known: Iterable[str]) -> ValueError:
    """The answer of a transport for a receiver that it cannot reach."""
    return ValueError(f"this transport has no receiver {receiver_id!r}, only {sorted(known)}")


def decode(data: bytes) -> Ack | Exception:
    """The inverse of :func:`encode`. Errors of this package come back as their own class, others as
    RuntimeError; anything that is not an answer is an error, too."""
    try:
        item = json.loads(data)
        if "ack" in item:
            ack = Ack(**item["ack"])
            numbers = (ack.lineage, ack.version)
            if all(n is None or type(n) is int for n in numbers) and type(ack.fingerprint) is int:
                return ack
        name, message = str(item["error"]), str(item["message"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        return errors.CorruptPayload(f"not an answer of a receiver: {type(error).__name__}")
    kind = getattr(errors, name, None)
    if kind is errors.FingerprintMismatch:
        return kind(message, [])
    if isinstance(kind, type) and issubclass(kind, errors.WeightSyncError) and kind is not errors.SyncFailed:
        return kind(message)
    return RuntimeError(f"{name}: {message}")
