"""One sync from end to end: encode once per kind, deliver, collect acknowledgements, heal or raise."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from megatron.weight_sync.errors import SyncFailed
from megatron.weight_sync.payload import Payload
from megatron.weight_sync.receiver import Receiver
from megatron.weight_sync.sender import Ack, Sender, Update

logger = logging.getLogger(__name__)


class Transport(Protocol):
    """How payloads reach receivers. Errors are returned, not raised: one dead receiver must not hide the
    others."""

    def deliver(self, payload: Payload, receiver_ids: Iterable[str]) -> dict[str, Ack | Exception]:
        """Hand the payload to these receivers and collect what they say."""

    def statuses(self, receiver_ids: Iterable[str]) -> dict[str, Ack | Exception]:
        """Ask these receivers what they hold."""


class LocalTransport:
    """Receivers in this process."""

    def __init__(self, receivers: Mapping[str, Receiver]):
        self.receivers = dict(receivers)

    def deliver(self, payload, receiver_ids):
        return {name: _answer(lambda r: r.apply(payload), self.receivers[name]) for name in receiver_ids}

    def statuses(self, receiver_ids):
        return {name: _answer(lambda r: r.status(), self.receivers[name]) for name in receiver_ids}


def _answer(call, receiver) -> Ack | Exception:
    try:
        return call(receiver)
    except Exception as error:
        return error


@dataclass
class SyncReport:
    """What a sync did. ``clear_bits``: every receiver holds the version, so the change bits that went into it
    must be cleared now."""

    version: int
    clear_bits: bool
    dense_bytes: int = 0
    delta_bytes: int = 0
    changed: int = 0
    elements: int = 0
    encode_ms: float = 0.0
    deliver_ms: float = 0.0
    healed: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        sent = self.dense_bytes + self.delta_bytes
        return (
            f"weight sync {self.version}: {self.changed} of {self.elements} changed, {sent} bytes "
            f"(delta {self.delta_bytes}, dense {self.dense_bytes}), encode {self.encode_ms:.1f} ms, "
            f"deliver and apply {self.deliver_ms:.1f} ms" + (f", healed {self.healed}" if self.healed else "")
        )


def synchronise(
    sender: Sender,
    transport: Transport,
    fill: Callable[[Update], Mapping[str, int]],
    *,
    on_failure: str = "raise",
) -> SyncReport:
    """Take every registered receiver to the next version.

    Receivers that can go on from a delta get one; the others (fresh, too far behind, poisoned) get a dense
    payload of the same version.

    Args:
        fill: adds tensors to the update it is given (dense or delta: ``update.dense``) and returns the
            fingerprints of the live weights. Called once per kind of payload.
        on_failure: ``"raise"``, or ``"resync"``: ask a failed receiver what it holds and send it a dense
            payload; if that fails too, raise.

    Raises:
        SyncFailed: after the other receivers were served.
    """
    if on_failure not in ("raise", "resync"):
        raise ValueError(f"on_failure is 'raise' or 'resync', got {on_failure!r}")
    names = sender.receivers
    delta = [name for name in names if sender.takes_delta(name)]
    report = SyncReport(sender.version + 1, False)
    failures: dict[str, Exception] = {}
    dense = [name for name in names if name not in delta]
    if delta:
        failures |= _round(sender, transport, fill, delta, report, dense=False, again=False)
    if dense or not delta:
        failures |= _round(sender, transport, fill, dense, report, dense=True, again=bool(delta))
    if failures and on_failure == "resync":
        for name, answer in transport.statuses(failures).items():
            # A receiver that took the version although its answer was lost is healed by this alone.
            if isinstance(answer, Ack):
                report.clear_bits |= sender.acknowledge(name, answer)
                if sender.state(name) == "synced":
                    failures.pop(name)
                    report.healed.append(name)
        again = list(failures)
        if again:
            failures = _round(sender, transport, fill, again, report, dense=True, again=True)
            report.healed += [name for name in again if name not in failures]
    if failures:
        text = "; ".join(f"{name}: {type(error).__name__}: {error}" for name, error in failures.items())
        raise SyncFailed(
            f"version {report.version} did not reach {len(failures)} receivers: {text}", failures
        )
    logger.info("%s", report)
    return report


def _round(sender, transport, fill, names, report, *, dense: bool, again: bool) -> dict[str, Exception]:
    start = time.perf_counter()
    update = sender.begin(dense, again=again)
    try:
        with _range("weight_sync.encode"):
            payload = update.finish(fill(update))
    except BaseException:
        update.abort()
        raise
    encoded = time.perf_counter()
    with _range("weight_sync.deliver"):
        answers = transport.deliver(payload, names)
    report.encode_ms += 1e3 * (encoded - start)
    seconds = time.perf_counter() - encoded
    report.deliver_ms += 1e3 * seconds
    if sender.chooser is not None:
        sender.chooser.observe(payload.nbytes, seconds)
    report.elements = payload.stats["elements"]
    report.changed = max(report.changed, payload.stats["changed"])
    if dense:
        report.dense_bytes += payload.nbytes
    else:
        report.delta_bytes += payload.nbytes
    failures = {}
    for name in names:
        answer = answers.get(name, TimeoutError("no answer"))
        if isinstance(answer, Ack):
            report.clear_bits |= sender.acknowledge(name, answer)
            if sender.state(name) != "synced":
                failures[name] = RuntimeError(
                    f"acknowledged version {answer.version}, now {sender.state(name)}"
                )
        else:
            failures[name] = answer
    return failures


@contextlib.contextmanager
def _range(name: str):
    """A named range in a profiler's timeline (NVTX where there is CUDA)."""
    with torch.profiler.record_function(name):
        if torch.cuda.is_available():
            with torch.cuda.nvtx.range(name):
                yield
        else:
            yield
