"""A trainer's weights as a stream of versions: the export plan, the sparse diff and the sender together.

publisher = Publisher(plan, diff, sender)      # on every rank; the sender on one rank, None on the others
payload = publisher.publish()                  # collective; a Payload on the sending rank, else None
ack = receiver.apply(payload)                  # wherever the rollout model is
publisher.acknowledge({"engine": ack})         # collective; the acks on the sending rank
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from megatron.core.param_export.changed import export_changed
from megatron.core.param_export.exporter import export
from megatron.core.param_export.plan import Plan
from megatron.weight_sync import Ack, Payload, Sender, all_reduce, fingerprint_boxes

# What one changed element costs beside its value, in bytes: a gap, where changes are dense enough to matter
# for the choice between a delta and whole tensors, or a plain index.
_GAP_BYTES, _INDEX_BYTES = 1, 4


class Publisher:
    """Publishes a model's weights, whole or as deltas, and clears change bits once they are acknowledged.

    Args:
        plan: a proven layout plan of the model.
        diff: what :func:`megatron.core.optimizer.sparse_diff.attach` returned for the model's optimizer; None
            sends whole weights always.
        sender: the version book-keeping on the sending rank; None on all others.
        rank: the sending rank in the plan's group.

    Raises:
        ValueError: the sender is missing on the sending rank, or present on another one.
    """

    def __init__(self, plan: Plan, diff=None, sender: Sender | None = None, rank: int = 0):
        if (sender is not None) != (plan.rank == rank):
            has = "has none" if sender is None else "has one"
            raise ValueError(f"the sender lives on rank {rank} and nowhere else; rank {plan.rank} {has}")
        self.plan, self.diff, self.sender, self.rank = plan, diff, sender, rank
        self.version = 0
        self.density = 1.0
        """The share of the model's elements that had changed, at the last :meth:`publish`, since the last
        acknowledged version."""

    @torch.no_grad()
    def publish(self, dense: bool | None = None) -> Payload | None:
        """Encode the model's weights as the next version. Collective over the plan's group.

        Args:
            dense: True sends whole weights, False a delta; None what receivers need and what is smaller.

        Returns:
            The payload on the sending rank, None on the others.

        Raises:
            RuntimeError: a delta is asked for that no receiver could apply; on every rank.
            ValueError: a delta is asked for without a sparse diff.
            StalePlanError: the model's tensors were replaced since the plan was built; on every rank.
        """
        plan, sender = self.plan, self.sender
        plan.require_current()
        if self.diff is not None:
            self.diff.gather_changed()
            self.diff.complete_weights()  # fingerprints and whole tensors read the model itself
        dense = self._decide(dense)
        update = sender.begin(dense) if sender else None
        try:
            if dense:
                for name, tensor in export(plan, receivers=[self.rank]):
                    update.add_dense(name, tensor)
            else:
                for name, index, value in export_changed(plan, self._changes(), self.rank):
                    update.add_delta(name, index, value, plan.expected[name])
            sums = self.fingerprint()
            payload = update.finish(sums) if sender else None
        except BaseException:
            if update is not None:
                update.abort()
            raise
        self.version = self._agree(sender.version if sender else 0)
        return payload

    def acknowledge(self, acks: Mapping[str, Ack] | None = None) -> bool:
        """Record acknowledgements; when every receiver holds the version, forget the changes it carried.

        Collective over the plan's group. ``acks`` (receiver name → acknowledgement) count on the sender.

        Returns:
            Whether every receiver holds the published version.
        """
        done = False
        if self.sender:
            for name, ack in (acks or {}).items():
                done = self.sender.acknowledge(name, ack) or done
        done = bool(self._agree(int(done)))
        if done and self.diff is not None:
            self.diff.clear(self.version)
        return done

    @torch.no_grad()
    def fingerprint(self) -> dict[str, int]:
        """Per-tensor sums of the full tensors, by Hugging Face name, from the owners' shards. Collective.

        Raises:
            StalePlanError: the model's tensors were replaced since the plan was built; on every rank.
        """
        plan = self.plan
        plan.require_current()
        owned = [entry for entry in plan.entries if entry.owner]
        share = fingerprint_boxes((entry.tensor.detach(), entry.boxes) for entry in owned)
        if plan.ranks == 1:
            return {name: share[name] for name in plan.expected}
        return all_reduce(share, plan.expected, plan.group, self._device)

    def _changes(self):
        for entry in self.plan.entries:
            change = self.diff.changed(entry.tensor)
            yield entry.tensor, change.indices, change.values

    def _decide(self, dense: bool | None) -> bool:
        """What the sending rank needs, and otherwise the smaller of the two forms; the same on every rank."""
        if self.diff is None:
            if dense is False:
                raise ValueError("a delta needs a sparse diff: this publisher was made without one")
            return True
        sizes = torch.zeros(4, dtype=torch.int64)  # elements, changed ones; bytes of all, of changed ones
        for entry in self.plan.entries:
            if entry.owner:
                numel, item = entry.tensor.numel(), entry.tensor.element_size()
                changed = self.diff.changed(entry.tensor).indices.numel()
                sizes += torch.tensor([numel, changed, numel * item, changed * item])
        if self.plan.ranks > 1:
            sizes = sizes.to(self._device)
            dist.all_reduce(sizes, group=self.plan.group)
        elements, changed, whole_bytes, delta_bytes = sizes.tolist()
        self.density = changed / elements
        needed = False
        if self.sender:
            gaps = set(self.sender.encodings) - {"raw"}
            delta_bytes += changed * (_GAP_BYTES if gaps else _INDEX_BYTES)
            needed = self.sender.needs_dense or delta_bytes >= whole_bytes
        needed = bool(self._agree(int(needed)))
        based = self._agree(int(self.sender is not None and self.sender.since is not None))
        if dense is not None:
            if not (dense or based):  # on every rank alike: none may wait for another in the export
                raise RuntimeError(
                    "a delta needs a base: the first sync, and the next one after invalidate(), is dense"
                )
            return dense
        return needed

    @property
    def _device(self) -> torch.device:
        return self.plan.entries[0].tensor.device if self.plan.entries else torch.device("cpu")

    def _agree(self, value: int) -> int:
        """The sending rank's number on every rank."""
        if self.plan.ranks == 1:
            return value
        number = torch.tensor([value], dtype=torch.int64, device=self._device)
        dist.broadcast(number, group=self.plan.group, group_src=self.rank)
        return int(number)
