"""A trainer's weights as a stream of versions: the export plan, the sparse diff and the sender together.

    publisher = Publisher(plan, diff, transport)     # on every rank; rank 0 sends
    publisher.register("engine")                     # a receiver that is new, or restarted
    report = publisher.sync()                        # collective: everyone at the next version, or an error

Where payloads travel by other means, or acknowledgements come later::

    payloads = publisher.publish()                   # collective; receiver -> Payload on the sending rank
    ack = receiver.apply(payloads["engine"])         # wherever the rollout model is
    publisher.acknowledge({"engine": ack})           # collective; the acks on the sending rank

What ranks say to each other beside the weights: one reduction when a version is opened (fingerprints, counts
of changes, whether the plan is current), one small broadcast per payload, and two at the end.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from megatron.core.param_export.changed import ChangedElements
from megatron.core.param_export.exporter import export
from megatron.core.param_export.plan import Plan, StalePlanError
from megatron.weight_sync import (
    Ack,
    Payload,
    PeerFailed,
    Sender,
    SyncFailed,
    SyncReport,
    Transport,
    Update,
    all_reduce,
    codec,
    fingerprint_boxes,
    synchronise,
)
from megatron.weight_sync.fingerprints import MODULUS, signed
from megatron.weight_sync.session import encode
from megatron.weight_sync.transport import answers

_DENSE, _DELTA, _END = range(3)


class Publisher:
    """Publishes a model's weights, and clears change bits once they are acknowledged.

    Every receiver gets what it needs: a delta if it can go on from one, whole tensors if it is fresh, too far
    behind or poisoned. In a delta each tensor is sent as its changes or whole, whichever is smaller.

    All methods are collective over the plan's ranks, but :meth:`register` and :meth:`drop`. They return, or
    raise, on all ranks: what fails on the sending rank is :class:`SyncFailed` on the others.

    Args:
        plan: a proven layout plan of the model.
        diff: what :func:`megatron.core.optimizer.sparse_diff.attach` returned for the model's optimizer; None
            sends whole weights always.
        transport: how payloads reach receivers; used by :meth:`sync` on the sending rank.
        rank: the sending rank in the plan's group.
        options: further arguments of :class:`megatron.weight_sync.Sender`, such as ``encodings``. With
            "entropy" new values are coded, not distances: old ones would take a copy of the model.
    """

    def __init__(
        self, plan: Plan, diff=None, transport: Transport | None = None, *, rank: int = 0, **options
    ):
        plan.require_proof()
        self.plan, self.diff, self.transport, self.rank = plan, diff, transport, rank
        self.sender = Sender(model_identity(plan), **options) if plan.rank == rank else None
        """Versions, and who holds which; None on all ranks but the sending one."""
        self.version = 0
        self.report: SyncReport | None = None
        """What the last :meth:`sync` or :meth:`publish` sent; on every rank."""
        self._read_for: int | None = None  # the version that carries what was last read from the diff

    def register(self, receiver_id: str) -> None:
        """A receiver that is new, or restarted. Counts on the sending rank, does nothing on others."""
        if self.sender:
            self.sender.register(receiver_id)

    def drop(self, receiver_id: str) -> None:
        """A receiver that is gone for good. Counts on the sending rank, does nothing on others."""
        if self.sender:
            self.sender.drop(receiver_id)

    def sync(self, *, on_failure: str = "raise") -> SyncReport:
        """Take every receiver to the model's weights, which get the next version.

        Args:
            on_failure: ``"raise"``, or ``"resync"``: ask a failed receiver what it holds and send it whole
                tensors; if that fails too, raise.

        Returns:
            The report, on every rank.

        Raises:
            SyncFailed: some receiver did not take the version; the others were served. Its changes are kept
                and travel with the next version.
            StalePlanError: the model's tensors were replaced since the plan was built.
            PeerFailed: another rank could not read its weights.
            ValueError: no transport, or no receiver is registered (on the sending rank). A transport that
                keeps payloads, such as a directory, needs no receivers.
        """

        def work(report):
            if self.transport is None:
                raise ValueError("sync() needs a transport: give one, or use publish() and acknowledge()")
            how = dict(on_failure=on_failure, dense=self._all_whole(), report=report)
            synchronise(self.sender, self.transport, self._fill, **how)

        self._lead(work)
        return self.report

    def publish(self) -> dict[str, Payload]:
        """Encode the model's weights as the next version, for :meth:`acknowledge` to follow at any time.

        Returns:
            On the sending rank each receiver's payload; two receivers that need the same have the same
            object. Empty on other ranks.

        Raises:
            ValueError: no receiver is registered (on the sending rank).
            SyncFailed, StalePlanError, PeerFailed: as :meth:`sync`.
        """
        payloads = {}

        def work(report):
            if not self.sender.receivers:
                raise ValueError("publish() has no receivers: register them first")
            for payload, names in encode(self.sender, self._fill, report, dense=self._all_whole()):
                payloads.update(dict.fromkeys(names, payload))

        self._lead(work)
        return payloads

    def acknowledge(self, acks: Mapping[str, Ack] | None = None) -> bool:
        """Record acknowledgements; when no receiver waits for the changes in the version, forget them.

        ``acks`` (receiver name → acknowledgement) count on the sending rank.

        Returns:
            Whether every receiver that can go on from a delta holds the published version.

        Raises:
            ValueError: a receiver is not registered (on the sending rank); nothing was recorded.
        """
        done = []

        def work(_):
            known = self.sender.receivers
            strange = sorted(set(acks or {}) - set(known))
            if strange:
                raise ValueError(f"acknowledge() got receivers {strange}, registered are {sorted(known)}")
            done.extend([self.sender.acknowledge(name, ack) for name, ack in (acks or {}).items()])
            return any(done)

        return bool(self._lead(work, reads=False))

    @torch.no_grad()
    def fingerprint(self) -> dict[str, int]:
        """Per-tensor sums of the full tensors, by Hugging Face name, from the owners' shards.

        Raises:
            StalePlanError: the model's tensors were replaced since the plan was built; on every rank.
        """
        plan = self.plan
        plan.require_current()
        share = self._share()
        if plan.ranks == 1:
            return {name: share[name] for name in plan.expected}
        return all_reduce(share, plan.expected, plan.group, plan.device)

    # ---- one collective call -------------------------------------------------------------------------------

    def _lead(self, work: Callable[[SyncReport], object], reads: bool = True):
        """Run ``work`` on the sending rank, while the others serve its exports, until it ends; its result is
        known on all ranks, and so is its failure."""
        if reads:
            self._read_for = None
            self._read()
        if self.sender is None:
            return self._follow(reads)
        before, report = self.sender.version, SyncReport(self.sender.version + 1)
        result, error = None, None
        try:
            result = work(report)
        except BaseException as caught:
            error = caught
        told = {
            "version": self.sender.version,
            "since": self.sender.since,
            "published": self.sender.version > before,
            "report": vars(report),
            "result": result,
            "error": None if error is None else _tell(error),
        }
        text = json.dumps(told).encode()
        self._broadcast([_END, len(text)])
        self._broadcast(list(text), torch.uint8)
        self._end(told, reads)
        if error is not None:
            raise error
        return result

    def _follow(self, reads: bool):
        while True:
            what, number = self._broadcast([0, 0])
            if what == _END:
                break
            encodings = [name for k, name in enumerate(codec.ENCODINGS) if number >> k & 1]
            self._fill_in(None, what == _DENSE, encodings)
        told = json.loads(bytes(self._broadcast([0] * number, torch.uint8)))
        self._end(told, reads)
        if told["error"] is not None:
            raise _heard(told["error"], self.rank)
        return told["result"]

    def _end(self, told: dict, reads: bool) -> None:
        self.version = told["version"]
        if reads:
            self.report = SyncReport(**told["report"])
        if told["published"]:
            self._read_for = self.version
        # Only what was read for this very version may be forgotten; and it is forgotten once.
        if self.diff is not None and told["since"] == self.version == self._read_for != self.diff.version:
            self.diff.clear(self.version)

    # ---- reading -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _read(self) -> None:
        """Every rank reads its changes and fingerprints; one reduction adds them up over the ranks, and tells
        all of them who could not, or has another model than the plan's."""
        plan, names = self.plan, list(self.plan.expected)
        stale, failed, error = [0] * plan.ranks, [0] * plan.ranks, None
        counts, sums = {}, {}
        try:
            if self.diff is not None:
                self.diff.gather_changed(dst=0)  # owners in the plan are the first ranks of the groups
                self.diff.complete_weights()  # fingerprints and whole tensors read the model itself
            stale[plan.rank] = int(not plan.is_current())
            if not stale[plan.rank]:
                self._elements = ChangedElements(plan, self._changes(), sharded=False)
                counts, sums = self._elements.counts, self._share()
        except Exception as caught:
            failed[plan.rank], error = 1, caught
        row = [*stale, *failed, *(counts.get(n, 0) for n in names), *(signed(sums.get(n, 0)) for n in names)]
        if plan.ranks > 1:
            reduced = torch.tensor(row, device=plan.device)
            dist.all_reduce(reduced, group=plan.group)
            row = reduced.tolist()
        stale, failed, row = row[: plan.ranks], row[plan.ranks : 2 * plan.ranks], row[2 * plan.ranks :]
        if any(stale):
            raise StalePlanError.on(stale)
        if error is not None:
            raise error
        if any(failed):
            ranks = ", ".join(str(rank) for rank, flag in enumerate(failed) if flag)
            raise PeerFailed(f"rank {ranks} could not read its weights, and says there why")
        self._counts = dict(zip(names, row[: len(names)], strict=True))
        self._sums = {n: value % MODULUS for n, value in zip(names, row[len(names) :], strict=True)}

    def _changes(self):
        for entry in self.plan.entries:
            if not entry.owner:
                continue
            if self.diff is None or self.diff.is_dense(entry.tensor):
                yield entry.tensor, None, None
            else:
                yield entry.tensor, *self.diff.changed(entry.tensor)

    def _share(self) -> dict[str, int]:
        owned = [entry for entry in self.plan.entries if entry.owner]
        return fingerprint_boxes((entry.contiguous(), entry.boxes) for entry in owned)

    # ---- sending -------------------------------------------------------------------------------------------

    def _fill(self, update: Update) -> Mapping[str, int]:
        """On the sending rank: announce a payload, and make it with the other ranks."""
        encodings = sum(1 << k for k, name in enumerate(codec.ENCODINGS) if name in self.sender.encodings)
        self._broadcast([_DENSE if update.dense else _DELTA, encodings])
        return self._fill_in(update, update.dense, self.sender.encodings)

    def _fill_in(self, update: Update | None, dense: bool, encodings) -> Mapping[str, int]:
        """Tensors into ``update`` (None on other ranks). An error while they are added is raised only when
        the collectives are over, so that no rank waits for this one."""
        failed = None
        whole = None if dense else self._whole(encodings)
        for name, tensor in export(self.plan, [self.rank], names=whole, current=True):
            try:
                if failed is None:
                    changed = None if self.sender.since is None else self._counts[name]
                    update.add_dense(name, tensor, changed=changed)
            except Exception as error:
                failed = error
        if not dense:
            for name, index, value in self._elements.collect(self.rank, skip=whole):
                try:
                    if failed is None:
                        update.add_delta(name, index, value, self.plan.expected[name])
                except Exception as error:
                    failed = error
        if failed is not None:
            raise failed
        return self._sums

    def _whole(self, encodings) -> set[str]:
        """The tensors that a delta carries whole, because that is smaller; the same on every rank."""
        plan, out = self.plan, set()
        for name, count in self._counts.items():
            nbytes, itemsize = plan.nbytes(name), plan.dtype(name).itemsize
            if count and codec.estimate(count, nbytes // itemsize, itemsize, encodings) >= nbytes:
                out.add(name)
        return out

    def _all_whole(self) -> bool:
        """Whether a delta would carry every tensor whole; then one dense payload serves all receivers."""
        return len(self._whole(self.sender.encodings)) == len(self.plan.expected)

    # ---- ranks ---------------------------------------------------------------------------------------------

    def _broadcast(self, numbers: list[int], dtype=torch.int64) -> list[int]:
        """The sending rank's numbers on every rank; others give as many of their own."""
        if self.plan.ranks == 1:
            return numbers
        row = torch.tensor(numbers, dtype=dtype, device=self.plan.device)
        dist.broadcast(row, group=self.plan.group, group_src=self.rank)
        return row.tolist()


def model_identity(plan: Plan) -> str:
    """What receivers know the model by: names, shapes and types of the full tensors. The trainer's layout is
    no part of it, so that a trainer may come back in another one."""
    tensors = [(name, tuple(shape), str(plan.dtype(name))) for name, shape in plan.expected.items()]
    return hashlib.sha256(repr(tensors).encode()).hexdigest()


def _tell(error: BaseException) -> dict:
    failures = error.failures.items() if isinstance(error, SyncFailed) else ()
    return {
        "kind": type(error).__name__,
        "message": str(error),
        "failures": {name: answers.encode(failure).decode() for name, failure in failures},
    }


def _heard(told: dict, rank: int) -> SyncFailed:
    failures = {name: answers.decode(text.encode()) for name, text in told["failures"].items()}
    if told["kind"] == SyncFailed.__name__:
        return SyncFailed(told["message"], failures)
    return SyncFailed(f"the sending rank {rank} failed: {told['kind']}: {told['message']}", failures)
