"""A receiver for an engine's model: the mapping is probed at the first dense sync, deltas scatter into live
parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from megatron.weight_sync.engines.probe import Load, discover
from megatron.weight_sync.errors import UnsupportedLayout, WrongBase
from megatron.weight_sync.fingerprints import fingerprint
from megatron.weight_sync.payload import Payload, Record, read_bucket, read_manifest
from megatron.weight_sync.receiver import Peers, Receiver, Target
from megatron.weight_sync.sender import Ack

Live = Mapping[str, torch.Tensor]


class EngineReceiver(Receiver):
    """Applies payloads to a model that stores checkpoint tensors fused and sharded.

    At the first dense payload the engine's own loader is run on index patterns (:func:`discover`), the
    mapping is compared with what the engine makes of the payload by itself, and then the payload is applied
    like any other; so the first sync takes some passes of ``load`` more than the following ones. The mapping
    is found anew at a dense payload after the engine has replaced parameters, or after its weights were
    changed by something else.

    Args:
        live: the engine's parameters and buffers on this rank, or a function that returns them as they are
            now: then replaced parameters are noticed.
        load: the engine's own ``load_weights``: called with (checkpoint name, full tensor) pairs, any subset
            of the names at a time.
        reload: takes all pairs of a checkpoint as the engine does for serving, with all that it does to
            weights after loading, and leaves the live weights in the layout in which the next update finds
            them. None where ``load`` is all there is.
        recover: takes all pairs after a first payload that did not hold, so that the engine can serve them;
            by default ``reload``, or else ``load``.
        peers: the engine's tensor-parallel ranks; None for one rank.
        after_write: called after values were written and before they are acknowledged, for what the engine
            derives from weights (absorbed projections, caches). If it raises, the update is taken back and it
            is called again.
    """

    def __init__(
        self,
        live: Live | Callable[[], Live],
        load: Load,
        *,
        reload: Load | None = None,
        recover: Load | None = None,
        peers: Peers | None = None,
        after_write: Callable[[], None] | None = None,
        keep_undo: bool = True,
        batch_elements: int = 1 << 27,
    ):
        super().__init__({}, peers=peers, keep_undo=keep_undo)
        self._live = live if callable(live) else lambda: live
        self._load, self._reload, self._recover = load, reload, recover or reload or load
        self._batch_elements, self._after_write = batch_elements, after_write

    @property
    def probed(self) -> bool:
        """Whether the mapping is known."""
        return bool(self.targets)

    @torch.no_grad()
    def apply(self, payload: Payload | Iterable) -> Ack:
        """As :meth:`Receiver.apply`.

        Raises:
            UnsupportedLayout: from the first dense payload, when a tensor's live form cannot be reached by
                deltas. Quantised parameters are refused before anything is written. After any other error of
                the first payload, once it was read, the engine holds the payload's weights, taken in its own
                way, and this receiver still has no version.
        """
        if not isinstance(payload, Payload):
            payload = self._together(lambda: Payload.from_bytes(payload))
        if self._holds_still():
            return super().apply(payload)
        records = self._together(lambda: self._read_all(payload))
        self.version = None  # from here on the live weights are no version
        try:
            found, places = self._together(lambda: self._probe(records))
            self._bind(found, _groups(found), places)
            self._compare(records)
            return super().apply(payload)
        except Exception as error:
            # The live weights are patterns now, or half-way.
            self._bind({}, None)
            self.poisoned = False
            self._take_unsynchronised(records, error)
            raise

    def _places(self) -> dict[str, tuple]:
        return _places(self._live())

    def _read_all(self, payload: Payload) -> list[Record]:
        manifest = read_manifest(payload.manifest)
        self._check_version(manifest)
        if not manifest.dense:
            first, last = manifest.base
            raise WrongBase(f"delta {first}-{last} → {manifest.version}: this receiver holds nothing yet")
        refuse_quantised(self._live())
        return [record for data in payload.buckets for record in read_bucket(data, manifest)]

    def _probe(self, records: list[Record]) -> tuple[dict[str, Target], dict[str, tuple]]:
        table = {record.name: (record.shape, record.dtype) for record in records}
        live = self._live()
        found = discover(table, live, self._load, self._batch_elements)
        return found, _places(live)

    def _take_unsynchronised(self, records: list[Record], error: Exception) -> None:
        try:
            self._recover(_pairs(records))
            self._after_writing()
        except Exception as second:
            raise UnsupportedLayout(
                f"{error}; and the engine, which could not load the payload by itself either, is left "
                f"without usable weights: {type(second).__name__}: {second}"
            ) from error

    def _compare(self, records: list[Record]) -> None:
        """Does the mapping still hold after all that the engine does to weights once they are loaded?"""
        if self._reload is None:
            return
        self._check_tied({record.name: record for record in records})
        self._together(lambda: self._reload(_pairs(records)))
        if not self._in_place():
            raise UnsupportedLayout("the engine replaces its parameters at every load: no delta reaches them")
        wrong = self._wrong(fingerprint(_pairs(records)))
        if wrong:
            raise UnsupportedLayout(
                f"the engine changes weights after loading them (repacked, reordered?): {wrong[:5]} "
                f"({len(wrong)} in all)"
            )

    def _after_writing(self) -> None:
        if self._after_write is not None:
            self._after_write()


def _pairs(records: list[Record]) -> Iterator[tuple[str, torch.Tensor]]:
    return ((record.name, record.bits.view(record.dtype).view(record.shape)) for record in records)


def _places(live: Live) -> dict[str, tuple]:
    return {
        name: (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        for name, tensor in live.items()
        if isinstance(tensor, torch.nn.Parameter)
    }


def _groups(found) -> list[tuple[str, ...]]:
    """Names whose boxes cover the same live elements share a group: tied weights."""
    by_place: dict = {}
    for name, target in found.items():
        key = tuple(
            (flat.data_ptr(), box.local_offset, box.size, box.local_stride) for flat, box in target.pieces
        )
        by_place.setdefault(key or name, []).append(name)
    return [tuple(names) for names in by_place.values()]


def refuse_quantised(live: Live) -> None:
    """Raise for parameters in a storage format that no checkpoint delta can reach. Buffers may hold anything:
    scales of a quantised KV cache, maps of experts."""
    odd = [
        f"{name} ({tensor.dtype})"
        for name, tensor in live.items()
        if isinstance(tensor, torch.nn.Parameter)
        and (
            not (tensor.is_floating_point() and tensor.element_size() > 1)
            or name.endswith(_SCALES)
            or is_traceable_wrapper_subclass(tensor.data)
        )
    ]
    if odd:
        raise UnsupportedLayout(f"quantised weights are not supported yet: {odd[:5]} ({len(odd)} in all)")


_SCALES = ("weight_scale", "weight_scale_inv", "weight_scale_2", "input_scale", ".scales")
