"""A receiver for an engine's model: the mapping is probed at the first dense sync, deltas scatter into live
parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch

from megatron.weight_sync.engines.probe import Load, discover
from megatron.weight_sync.errors import UnsupportedLayout, WeightSyncError, WrongBase
from megatron.weight_sync.payload import Payload, Record, read_bucket, read_manifest
from megatron.weight_sync.receiver import Peers, Receiver
from megatron.weight_sync.sender import Ack


class EngineReceiver(Receiver):
    """Applies payloads to a model that stores checkpoint tensors fused and sharded.

    At the first dense payload the engine's own loader is run on index patterns (:func:`discover`), then the
    payload is applied like any other; so the first sync takes some passes of ``load`` more than the following
    ones.

    Args:
        live: the engine's parameters and persistent buffers on this rank.
        load: the engine's own ``load_weights``: called with (checkpoint name, full tensor) pairs.
        peers: the engine's tensor-parallel ranks; None for one rank.
        after_write: called after values were written and before they are acknowledged, for what the engine
            derives from weights (absorbed projections, caches). If it raises, the update is taken back and it
            is called again.
    """

    def __init__(
        self,
        live: Mapping[str, torch.Tensor],
        load: Load,
        *,
        peers: Peers | None = None,
        after_write: Callable[[], None] | None = None,
        keep_undo: bool = True,
        batch_elements: int = 1 << 26,
    ):
        super().__init__({}, peers=peers, keep_undo=keep_undo)
        self._live, self._load, self._batch_elements = dict(live), load, batch_elements
        self._after_write = after_write

    @property
    def probed(self) -> bool:
        """Whether the mapping is known."""
        return bool(self.targets)

    @torch.no_grad()
    def apply(self, payload: Payload | Iterable) -> Ack:
        """As :meth:`Receiver.apply`.

        Raises:
            UnsupportedLayout: from the first dense payload, when a tensor's live form cannot be reached by
                deltas. After this or any other error of the first payload, once it was read, the engine holds
                the payload's weights, loaded by its own loader, and this receiver still has no version.
        """
        if not isinstance(payload, Payload):
            payload = self._together(lambda: Payload.from_bytes(payload))
        if self.probed:
            return super().apply(payload)
        records = self._together(lambda: self._read_all(payload))
        table = {record.name: (record.shape, record.dtype) for record in records}
        try:
            found = self._together(lambda: discover(table, self._live, self._load, self._batch_elements))
            self._bind(found, _groups(found))
            return super().apply(payload)
        except WeightSyncError:
            # The live weights are patterns now; let the engine load the payload in its own way.
            self._bind({}, None)
            self._load((record.name, record.bits.view(record.dtype).view(record.shape)) for record in records)
            self._after_writing()
            raise

    def _read_all(self, payload: Payload) -> list[Record]:
        manifest = read_manifest(payload.manifest)
        if not manifest.dense:
            first, last = manifest.base
            raise WrongBase(f"delta {first}-{last} → {manifest.version}: this receiver holds nothing yet")
        return [record for data in payload.buckets for record in read_bucket(data, manifest)]

    def _after_writing(self) -> None:
        if self._after_write is not None:
            self._after_write()


def _groups(found) -> list[tuple[str, ...]]:
    """Names whose boxes cover the same live elements share a group: tied weights."""
    by_place: dict = {}
    for name, target in found.items():
        key = tuple(
            (flat.data_ptr(), box.local_offset, box.size, box.local_stride) for flat, box in target.pieces
        )
        by_place.setdefault(key or name, []).append(name)
    return [tuple(names) for names in by_place.values()]


def refuse_quantised(live: Mapping[str, torch.Tensor]) -> None:
    """Raise for parameters in a storage format that no checkpoint delta can reach."""
    odd = [
        f"{name} ({tensor.dtype})"
        for name, tensor in live.items()
        if tensor.dtype in _QUANTISED or name.endswith(("_scale", "_scale_inv", ".qweight", ".qzeros"))
    ]
    if odd:
        raise UnsupportedLayout(f"quantised weights are not supported yet: {odd[:5]} ({len(odd)} in all)")


_QUANTISED = {torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2}
