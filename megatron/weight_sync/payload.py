"""A payload: what takes receivers from one version of the weights to the next.

It is a list of *bucket* containers, which carry tensors, and one *manifest* container, which names the model,
the versions, the buckets by digest, and the expected fingerprint of every tensor the payload touches. A
payload is applied whole or not at all.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from megatron.weight_sync import codec, container
from megatron.weight_sync.container import DTYPE_NAMES, DTYPES, Container, check_shape, parse_json
from megatron.weight_sync.errors import CorruptPayload, IncompletePayload
from megatron.weight_sync.fingerprints import MODULUS, _signed, bits_of

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
    """One tensor in a bucket: either ``dense`` bits of the full shape, or ``index`` and ``bits`` of the
    changes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    encoding: str
    index: torch.Tensor | None
    bits: torch.Tensor

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass
class Payload:
    """Containers as uint8 tensors. ``stats`` holds changed elements, total elements and encodings, for
    humans."""

    manifest: torch.Tensor
    buckets: list[torch.Tensor]
    version: int
    base: tuple[int, int] | None
    stats: dict = field(default_factory=dict)

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


def write_bucket(tensors: list[dict], parts: dict[str, torch.Tensor], lineage: int, version: int):
    """(container, digest). ``tensors``: records for the header (name, dtype, shape, encoding); ``parts``:
    entry name → tensor."""
    metadata = {
        "format": FORMAT,
        "kind": "bucket",
        "lineage": str(lineage),
        "version": str(version),
        "tensors": json.dumps(tensors, separators=(",", ":")),
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
    sums = torch.tensor([_signed(manifest.sums[name]) for name in names], dtype=torch.int64)
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


def read_bucket(data, manifest: Manifest) -> list[Record]:
    """Verify and decode one bucket; anything wrong is :class:`CorruptPayload`."""
    parsed = container.read(data)
    _check_format(parsed, "bucket")
    if parsed.digest not in manifest.buckets:
        raise CorruptPayload("a bucket belongs to another payload")
    if (parsed.metadata.get("lineage"), parsed.metadata.get("version")) != (
        str(manifest.lineage),
        str(manifest.version),
    ):
        raise CorruptPayload("a bucket belongs to another version")
    listed = parse_json(parsed.metadata.get("tensors", ""))
    if not isinstance(listed, list):
        raise CorruptPayload("bucket lists no tensors")
    left: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in parsed.entries.items():
        name, _, part = key.partition(":")
        left.setdefault(name, {})[part] = value
    records = [_record(item, left, manifest) for item in listed]
    if left:
        raise CorruptPayload(f"bucket has entries of no tensor: {sorted(left)[:5]}")
    return records


def _record(item, left: dict[str, dict[str, torch.Tensor]], manifest: Manifest) -> Record:
    if not isinstance(item, dict) or not all(
        isinstance(item.get(k), str) for k in ("name", "dtype", "encoding")
    ):
        raise CorruptPayload("bucket lists a malformed tensor")
    name, encoding = item["name"], item["encoding"]
    if item["dtype"] not in DTYPES:
        raise CorruptPayload(f"{name[:80]!r} has an unknown dtype")
    if name not in manifest.sums:
        raise CorruptPayload(f"{name[:80]!r} has no fingerprint in the manifest")
    dtype, shape = DTYPES[item["dtype"]], check_shape(item.get("shape"))
    numel = math.prod(shape)
    parts = left.pop(name, {})
    if encoding == "dense":
        value = parts.get("")
        if len(parts) != 1 or value is None or value.dtype != dtype or tuple(value.shape) != shape:
            raise CorruptPayload(f"{name[:80]!r} is not there as {dtype} {shape}")
        return Record(name, dtype, shape, encoding, None, bits_of(value.reshape(-1)))
    if manifest.dense:
        raise CorruptPayload(f"{name[:80]!r} is encoded as {encoding[:40]!r} in a dense payload")
    index, bits = codec.decode(encoding, parts, numel, dtype.itemsize, item)
    return Record(name, dtype, shape, encoding, index, bits)


def dense_parts(name: str, tensor: torch.Tensor) -> tuple[dict, dict[str, torch.Tensor]]:
    header = {
        "name": name,
        "dtype": DTYPE_NAMES[tensor.dtype],
        "shape": list(tensor.shape),
        "encoding": "dense",
    }
    return header, {name: tensor}
