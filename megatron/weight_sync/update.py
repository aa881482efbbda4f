"""One version under construction: tensors in, whole or as changes; containers out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megatron.weight_sync import codec
from megatron.weight_sync.container import DTYPE_NAMES
from megatron.weight_sync.errors import LayoutMismatch, MissingTensor, UnknownTensor, UnsupportedLayout
from megatron.weight_sync.fingerprints import bits_of, total
from megatron.weight_sync.payload import Manifest, Payload, write_bucket, write_manifest

if TYPE_CHECKING:
    from megatron.weight_sync.sender import Sender


@dataclass
class _Change:
    """What :meth:`Update.add_delta` was given, until the bucket is closed."""

    name: str
    index: torch.Tensor
    values: torch.Tensor
    old: torch.Tensor | None
    every: bool  # all elements changed: the values are the tensor
    numel: int
    distance: torch.Tensor | None = None
    start: int = 8
    size: int | None = None  # estimated bytes, once planned


class Update:
    """One version under construction; made by :meth:`Sender.begin`."""

    def __init__(self, sender: Sender, version: int, base: tuple[int, int] | None):
        self._sender = sender
        self.version = version
        self.base = base
        self._tensors: list[dict] = []
        self._dense: dict[str, torch.Tensor] = {}
        self._changes: list[_Change] = []
        self._nbytes = 0
        self._buckets: list[tuple[torch.Tensor, str]] = []
        self.table: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}  # what was added
        self._sent: list[str] = []
        self._stats = {"changed": 0, "elements": 0, "encodings": {}}

    @property
    def dense(self) -> bool:
        return self.base is None

    def add_dense(self, name: str, tensor: torch.Tensor, *, changed: int | None = None) -> None:
        """A whole tensor, in a delta too where that is smaller; it may be overwritten as soon as this
        returns. ``changed``: how many of its elements differ from the base, for the statistics."""
        self._check(name, tuple(tensor.shape), tensor.dtype)
        self._add_dense(name, tensor.detach(), tensor.numel() if changed is None else changed)

    def add_delta(
        self,
        name: str,
        index: torch.Tensor,
        values: torch.Tensor,
        shape: tuple[int, ...],
        *,
        full: torch.Tensor | None = None,
        old: torch.Tensor | None = None,
    ) -> None:
        """The elements of one tensor that changed since ``base``.

        Args:
            name: as in the first dense sync.
            index: int64 [n], flat indices into the full contiguous tensor, any order, none twice.
            values: [n], the current values, in the tensor's dtype.
            shape: of the full tensor.
            full: the tensor itself, if at hand: it is sent whole where that is smaller. Like all other
                arguments, it may be overwritten as soon as this returns.
            old: [n], the values at the base version, if at hand: the entropy encoding then codes distances.
                Used only while ``base`` is a single version.
        """
        if self.dense:
            raise RuntimeError("this update is dense: it takes whole tensors")
        shape = tuple(shape)
        self._check(name, shape, values.dtype)
        numel = math.prod(shape)
        for what, tensor in (("values", values), ("old", old)):
            if tensor is not None and (tensor.shape != index.shape or tensor.dtype != values.dtype):
                raise ValueError(
                    f"{name}: {what} are {tensor.dtype} {tuple(tensor.shape)} for {len(index)} indices"
                )
        if index.dtype != torch.int64 or index.dim() != 1:
            raise ValueError(f"{name}: index is int64 [n], got {index.dtype} {tuple(index.shape)}")
        if full is not None and (tuple(full.shape) != shape or full.dtype != values.dtype):
            raise ValueError(
                f"{name}: full is {full.dtype} {tuple(full.shape)}, expected {values.dtype} {shape}"
            )
        if index.numel() == 0:
            return
        change = _Change(
            name=name,
            index=index.clone(),
            values=values.clone(),
            old=None if old is None else old.clone(),
            every=index.numel() == numel,
            numel=numel,
        )
        if index.device.type == "cpu":
            _check([change])
        itemsize = values.element_size()
        if full is not None and index.numel() * (8 + itemsize) >= numel * itemsize:
            # It may be smaller whole: decide now, so that no reference to ``full`` outlives this call.
            _check([change])
            self._choose([change])
            if change.size >= numel * itemsize:
                self._add_dense(name, full.detach(), index.numel())
                return
        self._changes.append(change)
        self._nbytes += index.numel() * (itemsize + 1)
        if self._nbytes >= self._sender.bucket_bytes:
            self._close_bucket()

    def finish(self, fingerprints: Mapping[str, int]) -> Payload:
        """Close the version.

        Args:
            fingerprints: of every tensor of the model, over the live weights that this version is.

        Raises:
            MissingTensor: a dense update lacks tensors of the model, or a fingerprint is missing.
        """
        sender = self._sender
        sender.require_open(self)
        table = sender.table or self.table
        missing = sorted(set(table) - set(self.table)) if self.dense else []
        if missing:
            raise MissingTensor(
                f"a dense sync needs every tensor; {len(missing)} are missing: {missing[:10]}"
            )
        wanted = set(table) | set(self.table)
        if set(fingerprints) != wanted:
            odd = sorted(set(fingerprints) ^ wanted)
            raise MissingTensor(
                f"fingerprints must cover exactly the model's tensors; these differ: {odd[:10]}"
            )
        self._close_bucket()
        fingerprint = total(fingerprints)
        sender.finished(self, fingerprint)
        manifest = Manifest(
            model_id=sender.model_id,
            lineage=sender.lineage,
            version=self.version,
            base=self.base,
            buckets=tuple(digest for _, digest in self._buckets),
            sums={name: fingerprints[name] for name in self._sent},
            fingerprint=fingerprint,
        )
        self._stats["elements"] = sum(torch.Size(shape).numel() for shape, _ in sender.table.values())
        payload = Payload(
            write_manifest(manifest),
            [data for data, _ in self._buckets],
            self.version,
            self.base,
            self._stats,
        )
        return payload

    def abort(self) -> None:
        """Give the version up; nothing was published."""
        self._sender.aborted(self)

    def _check(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._sender.require_open(self)
        if name in self.table:
            raise ValueError(f"{name}: added twice")
        if not name or ":" in name or name == "__metadata__":
            raise ValueError(f"{name!r}: a tensor name is not empty and has no colon")
        if dtype not in DTYPE_NAMES:
            raise UnsupportedLayout(f"{name}: {dtype} cannot be sent")
        table = self._sender.table
        if table and name not in table:
            raise UnknownTensor(f"{name}: not in the model that the first sync sent")
        if table and table[name] != (shape, dtype):
            raise LayoutMismatch(f"{name}: was {table[name]}, now {(shape, dtype)}")
        self.table[name] = (shape, dtype)

    def _list(self, name: str, encoding: str, changed: int, **extra) -> None:
        shape, dtype = self.table[name]
        self._tensors.append({"name": name, "dtype": DTYPE_NAMES[dtype], "shape": list(shape), **extra})
        self._sent.append(name)
        self._stats["changed"] += changed
        count = self._stats["encodings"]
        count[encoding] = count.get(encoding, 0) + 1

    def _add_dense(self, name: str, tensor: torch.Tensor, changed: int, keep: bool = True) -> None:
        self._list(name, "dense", changed)
        self._nbytes += tensor.numel() * tensor.element_size()
        full = self._nbytes >= self._sender.bucket_bytes
        self._dense[name] = (
            tensor if full or not keep else tensor.clone(memory_format=torch.contiguous_format)
        )
        if full and keep:
            self._close_bucket()

    def _close_bucket(self) -> None:
        """Plan and encode the changes at hand, all of them in a few passes, and write the container."""
        groups = self._plan()
        if not self._tensors and not groups:
            return
        parts, heads = {}, []
        for k, (members, start, index, bits, distance) in enumerate(groups):
            numel = sum(change.numel for change in members)
            made, head = codec.encode_group(index, bits, distance, numel, start, self._sender.encodings)
            heads.append(head)
            parts |= {f":{k}:{part}": tensor for part, tensor in made.items()}
            for change in members:
                self._list(change.name, head["encoding"], change.index.numel(), group=k)
        parts |= self._dense
        data = write_bucket(self._tensors, heads, parts, self._sender.lineage, self.version)
        self._buckets.append(data)
        self._tensors, self._dense, self._changes, self._nbytes = [], {}, [], 0

    def _choose(self, changes: list[_Change]) -> None:
        """Plan the encoding of each of some tensors on one device."""
        if not changes:
            return
        if self._sender.chooser is not None:
            self._sender.encodings = self._sender.chooser.pick(changes[0].index.device.type)
        encodings, exact = self._sender.encodings, self.base[0] == self.base[1]
        for change, gaps in zip(changes, codec.gap_counts([c.index for c in changes]), strict=True):
            bits = bits_of(change.values)
            ulp = "entropy" in encodings and exact and codec.has_ulp(change.values.dtype)
            if ulp and change.old is not None:
                change.distance = codec.ulp_between(bits_of(change.old), bits)
            change.start, change.size = codec.plan_tensor(
                change.index, bits, change.distance, gaps, encodings, change.numel
            )

    def _plan(self) -> list[tuple]:
        """Choose dense or sparse for each tensor; returns the groups of the sparse ones: (members, first gap
        width, index, bits, distances or None)."""
        keyed: dict[tuple, list[_Change]] = {}
        for device in {change.index.device for change in self._changes}:
            changes = [change for change in self._changes if change.index.device == device]
            if device.type != "cpu":
                _check(changes)
            self._choose([change for change in changes if change.size is None])
            for change in changes:
                if change.every and change.size >= change.numel * change.values.element_size():
                    whole = change.values.view(self.table[change.name][0])
                    self._add_dense(change.name, whole, change.index.numel(), keep=False)
                    continue
                key = (change.values.dtype, change.start, change.distance is not None, device)
                keyed.setdefault(key, []).append(change)
        groups = []
        for (_, start, relative, device), members in keyed.items():
            for part in _parts(members):
                offsets = [0]
                for change in part:
                    offsets.append(offsets[-1] + change.numel)
                sizes = [change.index.numel() for change in part]
                counts = torch.tensor(sizes, device=device)
                shift = torch.tensor(offsets[:-1], device=device).repeat_interleave(
                    counts, output_size=sum(sizes)
                )
                index = torch.cat([change.index for change in part]) + shift
                bits = torch.cat([bits_of(change.values) for change in part])
                distance = torch.cat([change.distance for change in part]) if relative else None
                groups.append((part, start, index, bits, distance))
        return groups


def _parts(changes: list[_Change]) -> list[list[_Change]]:
    """Cut so that a group has fewer than 2**31 elements where it can."""
    parts, size = [[]], 0
    for change in changes:
        if parts[-1] and size + change.numel >= codec.INT32_LIMIT:
            parts.append([])
            size = 0
        parts[-1].append(change)
        size += change.numel
    return parts


def _check(changes: list[_Change]) -> None:
    """Indices lie inside their tensors, and rise strictly or are sorted here; one device synchronisation."""
    device = changes[0].index.device
    sizes = [change.index.numel() for change in changes]
    counts, n = torch.tensor(sizes, device=device), sum(sizes)
    numel = torch.tensor([c.numel for c in changes], device=device).repeat_interleave(counts, output_size=n)
    owner = torch.arange(len(changes), device=device).repeat_interleave(counts, output_size=n)
    index = torch.cat([change.index for change in changes])
    outside = ((index < 0) | (index >= numel)).any()
    falls = ((index[1:] <= index[:-1]) & (owner[1:] == owner[:-1])).any()
    bad, unsorted = torch.stack([outside, falls]).tolist()
    if not bad and not unsorted:
        return
    for change in changes:
        if int(change.index.min()) < 0 or int(change.index.max()) >= change.numel:
            raise ValueError(f"{change.name}: an index lies outside a tensor of {change.numel} elements")
        change.index, order = change.index.sort()
        change.values = change.values[order]
        change.old = None if change.old is None else change.old[order]
        if bool((change.index[1:] == change.index[:-1]).any()):
            raise ValueError(f"{change.name}: an index is there twice")
