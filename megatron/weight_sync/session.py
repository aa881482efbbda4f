"""One sync from end to end: encode once per kind, deliver, collect acknowledgements, heal or raise."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from megatron.weight_sync.errors import ReceiverPoisoned, SyncFailed
from megatron.weight_sync.payload import Payload
from megatron.weight_sync.receiver import Receiver
from megatron.weight_sync.sender import Ack, Sender
from megatron.weight_sync.transport import answers
from megatron.weight_sync.update import Update

logger = logging.getLogger(__name__)


class Transport(Protocol):
    """How payloads reach receivers. Errors are returned, not raised: one dead receiver must not hide the
    others. One that keeps payloads for receivers to come says so, ``keeps_payloads = True``, and may have
    ``anchor_due(lineage, version)``: whether it wants this version whole."""

    def deliver(self, payload: Payload, receiver_ids: Iterable[str]) -> dict[str, Ack | Exception]:
        """Hand the payload to these receivers and collect what they say."""

    def statuses(self, receiver_ids: Iterable[str]) -> dict[str, Ack | Exception]:
        """Ask these receivers what they hold."""


class LocalTransport:
    """Receivers in this process."""

    def __init__(self, receivers: Mapping[str, Receiver]):
        self.receivers = dict(receivers)

    def deliver(self, payload, receiver_ids):
        return {name: self._ask(name, lambda r: r.apply(payload)) for name in receiver_ids}

    def statuses(self, receiver_ids):
        return {name: self._ask(name, lambda r: r.status()) for name in receiver_ids}

    def _ask(self, name, call) -> Ack | Exception:
        if name not in self.receivers:
            return answers.unknown(name, self.receivers)
        try:
            return call(self.receivers[name])
        except Exception as error:
            return error


@dataclass
class SyncReport:
    """What a sync did. ``clear_bits``: every receiver holds the version, so the change bits that went into it
    must be cleared now."""

    version: int
    clear_bits: bool = False
    dense_bytes: int = 0
    delta_bytes: int = 0
    changed: int = 0
    elements: int = 0
    encode_ms: float = 0.0
    deliver_ms: float = 0.0
    healed: list[str] = field(default_factory=list)

    @property
    def density(self) -> float:
        """The share of the model's elements that changed since the last version that every receiver held."""
        return self.changed / self.elements if self.elements else 0.0

    def __str__(self) -> str:
        sent = self.dense_bytes + self.delta_bytes
        return (
            f"weight sync {self.version}: {self.changed} of {self.elements} changed, {sent} bytes "
            f"(delta {self.delta_bytes}, dense {self.dense_bytes}), encode {self.encode_ms:.1f} ms, "
            f"deliver and apply {self.deliver_ms:.1f} ms" + (f", healed {self.healed}" if self.healed else "")
        )


Fill = Callable[[Update], Mapping[str, int]]
"""Adds tensors to the update it is given (whole, or changes: ``update.dense``) and returns the fingerprints
of the live weights."""


def encode(
    sender: Sender, fill: Fill, report: SyncReport, *, dense: bool = False
) -> Iterator[tuple[Payload, list[str]]]:
    """The next version, as one payload for the receivers that can go on from a delta, and a dense one of the
    same version for the others (fresh, too far behind, poisoned) or where there are no receivers.

    Args:
        fill: called once per payload.
        report: of this version; what is encoded is added to it.
        dense: no delta, for nobody.

    Yields:
        ``(payload, receivers)``. The caller may deliver one before it asks for the next.
    """
    names = sender.receivers
    delta = [] if dense else [name for name in names if sender.takes_delta(name)]
    rest = [name for name in names if name not in delta]
    if delta:
        yield _encode(sender, fill, report, dense=False, again=False), delta
    if rest or not delta:
        yield _encode(sender, fill, report, dense=True, again=bool(delta)), rest


def synchronise(
    sender: Sender,
    transport: Transport,
    fill: Fill,
    *,
    on_failure: str = "raise",
    dense: bool = False,
    report: SyncReport | None = None,
) -> SyncReport:
    """Take every registered receiver to the next version, with the payloads of :func:`encode`.

    Args:
        fill: see :data:`Fill`; called once per kind of payload.
        on_failure: ``"raise"``, or ``"resync"``: ask a failed receiver what it holds and send it a dense
            payload; if that fails too, raise.
        dense: no delta, for nobody.
        report: an empty one, to be filled in; it says what was done even where this raises.

    Raises:
        SyncFailed: after the other receivers were served.
        ValueError: no receiver is registered, and the transport does not keep payloads.
    """
    if on_failure not in ("raise", "resync"):
        raise ValueError(f"on_failure is 'raise' or 'resync', got {on_failure!r}")
    if not sender.receivers and not getattr(transport, "keeps_payloads", False):
        raise ValueError("there are no receivers to synchronise: register them first")
    report = report if report is not None else SyncReport(sender.version + 1)
    failures: dict[str, Exception] = {}
    for payload, names in encode(sender, fill, report, dense=dense):
        failures |= _deliver(sender, transport, payload, names, report)
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
            payload = _encode(sender, fill, report, dense=True, again=True)
            failures = _deliver(sender, transport, payload, again, report)
            report.healed += [name for name in again if name not in failures]
    anchor_due = getattr(transport, "anchor_due", None)
    if anchor_due is not None and not report.dense_bytes and anchor_due(sender.lineage, sender.version):
        _deliver(sender, transport, _encode(sender, fill, report, dense=True, again=True), [], report)
    if failures:
        text = "; ".join(f"{name}: {type(error).__name__}: {error}" for name, error in failures.items())
        raise SyncFailed(
            f"version {report.version} did not reach {len(failures)} receivers: {text}", failures
        )
    logger.info("%s", report)
    return report


def _encode(sender: Sender, fill: Fill, report: SyncReport, *, dense: bool, again: bool) -> Payload:
    start = time.perf_counter()
    update = sender.begin(dense, again=again)
    try:
        with _range("weight_sync.encode"):
            payload = update.finish(fill(update))
    except BaseException:
        update.abort()
        raise
    report.encode_ms += 1e3 * (time.perf_counter() - start)
    report.elements = payload.stats["elements"]
    if dense:
        report.dense_bytes += payload.nbytes
        report.changed = report.changed or payload.stats["changed"]
    else:
        report.delta_bytes += payload.nbytes
        report.changed = payload.stats["changed"]
    return payload


def _deliver(
    sender: Sender, transport: Transport, payload: Payload, names: list[str], report: SyncReport
) -> dict[str, Exception]:
    start = time.perf_counter()
    with _range("weight_sync.deliver"):
        said = transport.deliver(payload, names)
    seconds = time.perf_counter() - start
    report.deliver_ms += 1e3 * seconds
    if sender.chooser is not None:
        sender.chooser.observe(payload.nbytes, seconds)
    failures = {}
    for name in names:
        answer = said.get(name, TimeoutError("no answer"))
        if isinstance(answer, Ack):
            report.clear_bits |= sender.acknowledge(name, answer)
            if sender.state(name) != "synced":
                failures[name] = RuntimeError(
                    f"acknowledged version {answer.version}, now {sender.state(name)}"
                )
        else:
            failures[name] = answer
            if isinstance(answer, ReceiverPoisoned):  # it takes whole tensors only, so those come next
                sender.acknowledge(name, Ack(sender.model_id, sender.lineage, None, poisoned=True))
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
