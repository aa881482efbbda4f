"""Payloads on disk, looked at without a model: describe, verify, rebuild the weights of a version."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import torch

from megatron.weight_sync import container
from megatron.weight_sync.errors import CorruptPayload, MissingVersion, WeightSyncError
from megatron.weight_sync.fingerprints import fingerprint, total
from megatron.weight_sync.payload import Payload, read_bucket, read_manifest
from megatron.weight_sync.receiver import Receiver, Target, whole_box
from megatron.weight_sync.transport.directory import Directory, Stored, way


class TensorReceiver(Receiver):
    """A receiver that owns its tensors; made from a dense payload, whose names and shapes it takes."""

    def __init__(self, payload: Payload):
        manifest = read_manifest(payload.manifest)
        if not manifest.dense:
            raise MissingVersion("a model can be built from a dense payload only")
        self.tensors: dict[str, torch.Tensor] = {}
        for data in payload.buckets:
            for record in read_bucket(data, manifest):
                self.tensors[record.name] = torch.zeros(record.shape, dtype=record.dtype)
        super().__init__(
            {
                name: Target(tuple(t.shape), t.dtype, ((t.view(-1), whole_box(name, tuple(t.shape))),))
                for name, t in self.tensors.items()
            }
        )
        self.apply(payload)


def materialise(where, version: int | None = None, lineage: int | None = None) -> tuple[dict, int]:
    """The full weights of a version: (name → tensor, version).

    Args:
        where: folder or URL of payloads.
        version: the newest by default.
        lineage: the newest by default.

    Raises:
        MissingVersion: no anchor and deltas lead there.
        WeightSyncError: a payload on the way is damaged.
    """
    directory = Directory(where)
    payloads = directory.payloads()
    if not payloads:
        raise MissingVersion(f"there are no payloads in {where}")
    lineage = payloads[-1].lineage if lineage is None else lineage
    current = [stored for stored in payloads if stored.lineage == lineage]
    path = way(current, None, version)
    if not path:
        raise MissingVersion(f"no anchor and deltas lead to version {version} of lineage {lineage}")
    receiver = TensorReceiver(directory.read(path[0]))
    for stored in path[1:]:
        receiver.apply(directory.read(stored))
    return receiver.tensors, receiver.version


def verify(where) -> Iterator[tuple[Stored, str | None]]:
    """Every payload with what is wrong with it (None: nothing).

    A payload is read, its digests and checksums checked, applied to the weights that an anchor and the deltas
    before it make, and the fingerprints compared. One for whose base nothing leads is wrong, too.
    """
    directory = Directory(where)
    receivers: dict[tuple[int, int], Receiver] = {}
    for stored in directory.payloads():
        try:
            payload = directory.read(stored)
            manifest = read_manifest(payload.manifest)
            if (manifest.lineage, manifest.version, manifest.base) != (
                stored.lineage,
                stored.version,
                stored.base,
            ):
                raise CorruptPayload("the folder's name and the manifest disagree")
            reached = receivers.get((stored.lineage, stored.version))
            if stored.base is None:
                receiver = TensorReceiver(payload)
                if reached is not None and fingerprint(reached.tensors) != fingerprint(receiver.tensors):
                    raise CorruptPayload("anchor and deltas do not make the same weights")
            elif reached is not None:
                # Another way to a version that is there already: its own base is gone, its result must agree.
                receiver = reached
                for data in payload.buckets:
                    read_bucket(data, manifest, receiver._check_tensor)
                if manifest.fingerprint != total(fingerprint(receiver.tensors)):
                    raise CorruptPayload("two payloads of one version do not lead to the same weights")
            else:
                held = [v for lineage, v in receivers if lineage == stored.lineage and stored.leads_on(v)]
                if not held:
                    raise MissingVersion(f"no version from {stored.base[0]} to {stored.base[1]} can be built")
                receiver = receivers[stored.lineage, max(held)]
                receiver.apply(payload)
            # Deltas go on from the newest weights only: a walk holds one model, and one more at an anchor.
            receivers = {(stored.lineage, stored.version): receiver}
            yield stored, None
        except (WeightSyncError, FileNotFoundError) as error:
            yield stored, f"{type(error).__name__}: {error}"


def describe(path: str | Path) -> list[str]:
    """What is in a container file, or in a folder of payloads, as lines for people."""
    if Path(path).is_file():
        return _describe_container(Path(path))
    lines = []
    for stored in Directory(path).payloads(complete=False):
        kind = "anchor" if stored.base is None else f"delta from {stored.base[0]}-{stored.base[1]}"
        whole = any(name.endswith("/manifest.safetensors") for name in stored.files)
        lines.append(
            f"lineage {stored.lineage} version {stored.version}: {kind}, {len(stored.files)} files, "
            f"{stored.nbytes} bytes" + ("" if whole else ", no manifest: unfinished")
        )
    return lines or [f"no payloads in {path}"]


def _describe_container(path: Path) -> list[str]:
    parsed = container.read(path.read_bytes())
    meta = parsed.metadata
    keys = ("format", "kind", "model_id", "lineage", "version", "base", "fingerprint", "digest")
    lines = [f"{key}: {meta[key]}" for key in keys if key in meta]
    groups = container.parse_json(meta.get("groups", "[]"))
    for k, group in enumerate(groups):
        lines.append(f"group {k}: {json.dumps(group)}")
    for item in container.parse_json(meta.get("tensors", "[]")):
        shape = container.check_shape(item["shape"])
        how = "dense" if item.get("group") is None else f"group {item['group']}"
        lines.append(f"{item['name']}: {item['dtype']} {list(shape)}, {math.prod(shape)} elements, {how}")
    for name, tensor in parsed.entries.items():
        lines.append(f"entry {name}: {tensor.numel() * tensor.element_size()} bytes")
    return lines
