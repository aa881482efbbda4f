"""A payload: what takes receivers from one version of the weights to the next.

It is a list of *bucket* containers, which carry tensors, and one *manifest* container, which names the model,
the versions, the buckets by digest, and the expected fingerprint of every tensor the payload touches. A
payload is applied whole or not at all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from megatron.weight_sync import codec, container
from megatron.weight_sync.container import DTYPES, Container, check_shape, parse_json
from megatron.weight_sync.errors import CorruptPayload, IncompletePayload
from megatron.weight_sync.fingerprints import MODULUS, bits_of, signed

FORMAT = "megatron.weight_sync/1"


@dataclass(frozen=True)
class Manifest:
    """What the manifest says. ``base`` is None for a dense payload; otherwise the payload may be applied to
    any version from ``base[0]`` to ``base[1]``, both included."""

    model_id: str
    lineage: int
    version: int
    base: tuple[int, int] | None
    buckets: tuple[str, ...]
    sums: dict[str, int]
    fingerprint: int

    @property
    def dense(self) -> bool:
        return self.base is None


@dataclass(frozen=True)
class Record:
    """One tensor in a bucket.

    Either ``bits`` of the whole tensor and no ``index``, or ``index`` int64 [n] and ``bits`` [n] of the
    changes. With ``relative``, ``bits`` are distances in units in the last place from the receiver's values.
    ``group_index`` counts from the start of the group, in which the tensor begins at ``start``.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    encoding: str
    group_index: torch.Tensor | None
    bits: torch.Tensor
    relative: bool = False
    start: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def count(self) -> int:
        """How many elements are here."""
        return self.bits.numel()

    @property
    def index(self) -> torch.Tensor | None:
        """Flat indices into the tensor."""
        return None if self.group_index is None else self.group_index - self.start

    def index_list(self, device) -> tuple[torch.Tensor, int]:
        """The indices as they are in the group, and what to take off them: a view, nothing is computed."""
        return self.group_index.to(device), self.start


@dataclass(repr=False)
class Payload:
    """Containers as uint8 tensors. ``stats`` holds changed elements, total elements and encodings, for
    humans."""

    manifest: torch.Tensor
    buckets: list[torch.Tensor]
    version: int
    base: tuple[int, int] | None
    stats: dict = field(default_factory=dict)

    def __repr__(self) -> str:
        kind = "dense" if self.dense else f"delta on versions {self.base[0]} to {self.base[1]}"
        return f"Payload(version {self.version}, {kind}, {len(self.buckets)} buckets, {self.nbytes:,} bytes)"

    @property
    def dense(self) -> bool:
        return self.base is None

    @property
    def nbytes(self) -> int:
        return sum(piece.numel() for piece in self.containers())

    def containers(self) -> Iterator[torch.Tensor]:
        """Every container, the manifest last: the order in which to send or write them."""
        yield from self.buckets
        yield self.manifest

    def to_bytes(self) -> list[bytes]:
        """One ``bytes`` for each container, for a channel that carries bytes: ``Receiver.apply`` and
        :meth:`from_bytes` take the list, in any order."""
        return [piece.cpu().numpy().tobytes() for piece in self.containers()]

    @classmethod
    def from_bytes(cls, containers: Iterable) -> Payload:
        """Sort received containers into a payload. Their order does not matter; duplicates are dropped.

        Args:
            containers: bytes-like objects or uint8 tensors.

        Raises:
            IncompletePayload: no manifest, or a bucket that the manifest lists is not there.
            CorruptPayload: a container is damaged, or belongs to another payload.
        """
        manifests, buckets = {}, {}
        for data in containers:
            raw = container.as_bytes_tensor(data)
            parsed = container.read(raw, verify=False)
            kind = parsed.metadata.get("kind")
            if kind not in ("manifest", "bucket"):
                raise CorruptPayload(f"container of kind {str(kind)[:40]!r}")
            (manifests if kind == "manifest" else buckets)[parsed.digest] = raw
        if len(manifests) != 1:
            raise IncompletePayload(f"a payload has one manifest, got {len(manifests)}")
        raw = next(iter(manifests.values()))
        manifest = read_manifest(raw)
        missing = [digest for digest in manifest.buckets if digest not in buckets]
        if missing:
            raise IncompletePayload(f"{len(missing)} of {len(manifest.buckets)} buckets are missing")
        if len(buckets) != len(manifest.buckets):
            raise CorruptPayload("a bucket belongs to another payload")
        ordered = [buckets[digest] for digest in manifest.buckets]
        return cls(raw, ordered, manifest.version, manifest.base)


def write_bucket(
    tensors: list[dict], groups: list[dict], parts: dict[str, torch.Tensor], lineage: int, version: int
) -> tuple[torch.Tensor, str]:
    """Build a bucket: (container, digest).

    Args:
        tensors: name, dtype, shape of each tensor, and ``group`` for those that are not dense.
        groups: header fields of each group.
        parts: entry name → tensor: dense tensors under their names, parts of group k under ``:k:PART``.
    """
    metadata = {
        "format": FORMAT,
        "kind": "bucket",
        "lineage": str(lineage),
        "version": str(version),
        "tensors": json.dumps(tensors, separators=(",", ":")),
        "groups": json.dumps(groups, separators=(",", ":")),
    }
    return container.write(parts, metadata)


def write_manifest(manifest: Manifest, device="cpu") -> torch.Tensor:
    names = list(manifest.sums)
    metadata = {
        "format": FORMAT,
        "kind": "manifest",
        "model_id": manifest.model_id,
        "lineage": str(manifest.lineage),
        "version": str(manifest.version),
        "base": "" if manifest.base is None else f"{manifest.base[0]}-{manifest.base[1]}",
        "buckets": json.dumps(list(manifest.buckets), separators=(",", ":")),
        "names": json.dumps(names, separators=(",", ":")),
        "fingerprint": f"{manifest.fingerprint:016x}",
    }
    sums = torch.tensor([signed(manifest.sums[name]) for name in names], dtype=torch.int64)
    return container.write({"sums": sums}, metadata, device=device)[0]


def _check_format(parsed: Container, kind: str) -> None:
    if parsed.metadata.get("format") != FORMAT:
        raise CorruptPayload(f"format is {str(parsed.metadata.get('format'))[:60]!r}, expected {FORMAT!r}")
    if parsed.metadata.get("kind") != kind:
        raise CorruptPayload(f"expected a {kind}, got {str(parsed.metadata.get('kind'))[:40]!r}")


def _integer(text) -> int:
    if not isinstance(text, str) or not text.isascii() or not text.isdigit() or len(text) > 19:
        raise CorruptPayload(f"not a number: {str(text)[:40]!r}")
    return int(text)


def read_manifest(data) -> Manifest:
    """Parse and verify a manifest container; anything wrong is :class:`CorruptPayload`."""
    parsed = container.read(data)
    _check_format(parsed, "manifest")
    meta = parsed.metadata
    base = None
    if meta.get("base"):
        first, dash, last = meta["base"].partition("-")
        base = (_integer(first), _integer(last))
        if not dash or not base[0] <= base[1]:
            raise CorruptPayload(f"not a range of versions: {meta['base'][:40]!r}")
    buckets, names = parse_json(meta.get("buckets", "")), parse_json(meta.get("names", ""))
    for value in (buckets, names):
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise CorruptPayload("manifest lists something that is not a string")
        if len(set(value)) != len(value):
            raise CorruptPayload("manifest lists something twice")
    sums = parsed.entries.get("sums")
    if set(parsed.entries) != {"sums"} or sums.dtype != torch.int64 or sums.shape != (len(names),):
        raise CorruptPayload("manifest has no fingerprint per name")
    try:
        fingerprint = int(meta.get("fingerprint", ""), 16)
    except ValueError:
        raise CorruptPayload("manifest has no fingerprint") from None
    version = _integer(meta.get("version"))
    if base is not None and base[1] >= version:
        raise CorruptPayload(f"a delta to version {version} cannot start from {base[1]}")
    return Manifest(
        model_id=meta.get("model_id", ""),
        lineage=_integer(meta.get("lineage")),
        version=version,
        base=base,
        buckets=tuple(buckets),
        sums={name: value % MODULUS for name, value in zip(names, sums.tolist(), strict=True)},
        fingerprint=fingerprint,
    )


def read_bucket(data, manifest: Manifest, check: Callable | None = None) -> list[Record]:
    """Verify and decode one bucket; anything wrong is :class:`CorruptPayload`.

    Args:
        check: called with (name, dtype, shape) of every tensor before anything is decoded. It may raise, and
            so bounds what decoding allocates; without it the container's own size is the bound.
    """
    parsed = container.read(data)
    _check_format(parsed, "bucket")
    if parsed.digest not in manifest.buckets:
        raise CorruptPayload("a bucket belongs to another payload")
    meta = parsed.metadata
    if (meta.get("lineage"), meta.get("version")) != (str(manifest.lineage), str(manifest.version)):
        raise CorruptPayload("a bucket belongs to another version")
    tensors, groups = parse_json(meta.get("tensors", "")), parse_json(meta.get("groups", ""))
    if not isinstance(tensors, list) or not isinstance(groups, list):
        raise CorruptPayload("bucket lists no tensors")
    listed = [_listed(item, manifest) for item in tensors]
    if check is not None:
        for name, dtype, shape, _ in listed:
            check(name, dtype, shape)
    dense, parts = {}, [{} for _ in groups]
    for key, value in parsed.entries.items():
        head, _, part = key.rpartition(":")
        if not head:
            dense[key] = value
        elif head[1:].isascii() and head[1:].isdigit() and len(head) < 8 and int(head[1:]) < len(groups):
            parts[int(head[1:])][part] = value
        else:
            raise CorruptPayload(f"bucket has an entry of no tensor: {key[:80]!r}")
    records = []
    for name, dtype, shape, group in listed:
        if group is not None:
            continue
        value = dense.pop(name, None)
        if value is None or value.dtype != dtype or tuple(value.shape) != shape:
            raise CorruptPayload(f"{name[:80]!r} is not there as {dtype} {shape}")
        records.append(Record(name, dtype, shape, "dense", None, bits_of(value.reshape(-1))))
    if dense:
        raise CorruptPayload(f"bucket has entries of no tensor: {sorted(dense)[:5]}")
    size = sum(value.numel() * value.element_size() for value in parsed.entries.values())
    for k, head in enumerate(groups):
        members = [item[:3] for item in listed if item[3] == k]
        records += _split_group(
            head, parts[k], members, manifest, _UNCHECKED * size if check is None else None
        )
    if len(records) != len(listed):
        raise CorruptPayload("a tensor belongs to no group")
    return records


_UNCHECKED = 1024  # changes per byte that are believed when nothing is known of the model


def _listed(item, manifest: Manifest) -> tuple[str, torch.dtype, tuple[int, ...], int | None]:
    if not isinstance(item, dict) or not all(isinstance(item.get(k), str) for k in ("name", "dtype")):
        raise CorruptPayload("bucket lists a malformed tensor")
    name, group = item["name"], item.get("group")
    if item["dtype"] not in DTYPES:
        raise CorruptPayload(f"{name[:80]!r} has an unknown dtype")
    if not name or ":" in name:
        raise CorruptPayload(f"not a tensor name: {name[:80]!r}")
    if name not in manifest.sums:
        raise CorruptPayload(f"{name[:80]!r} has no fingerprint in the manifest")
    if group is not None and (type(group) is not int or group < 0):
        raise CorruptPayload(f"{name[:80]!r} has a malformed group")
    if group is not None and manifest.dense:
        raise CorruptPayload(f"{name[:80]!r} is not whole in a dense payload")
    return name, DTYPES[item["dtype"]], check_shape(item.get("shape")), group


def _split_group(head, parts, members, manifest: Manifest, limit: int | None) -> list[Record]:
    """Decode a group, and cut its changes at the borders of its tensors."""
    if not isinstance(head, dict) or not members or len({dtype for _, dtype, _ in members}) != 1:
        raise CorruptPayload("a group has no tensors, or tensors of several dtypes")
    border = [0]
    for _, _, shape in members:
        border.append(border[-1] + math.prod(shape))
    if border[-1] >= 1 << 60:
        raise CorruptPayload("a group has too many elements")
    dtype = members[0][1]
    limit = border[-1] if limit is None else limit
    index, bits, relative = codec.decode_group(head, parts, border[-1], dtype.itemsize, limit)
    if relative and (manifest.base[0] != manifest.base[1] or not codec.has_ulp(dtype)):
        raise CorruptPayload("distances need floating-point values and one base version")
    cut = torch.searchsorted(index, torch.tensor(border, device=index.device)).tolist()
    return [
        Record(name, dtype, shape, head["encoding"], index[a:b], bits[a:b], relative, start)
        for (name, dtype, shape), start, a, b in zip(members, border, cut, cut[1:], strict=False)
    ]
