"""Writing a Hugging Face checkpoint folder from sharded parameters, and reading one into them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megatron.core.param_export.agreement import agree
from megatron.core.param_export.exporter import DEFAULT_BUCKET_BYTES, export
from megatron.core.param_export.loader import load
from megatron.core.param_export.plan import Plan

INDEX = "model.safetensors.index.json"


def save_checkpoint(
    plan: Plan, folder: str | Path, *, file_bytes: int = 5 * 10**9, bucket_bytes: int = DEFAULT_BUCKET_BYTES
) -> None:
    """Write safetensors files, their index and config.json, as ``save_pretrained`` lays them out. Collective.

    Rank 0 of the plan receives and writes. ``from_pretrained`` reads it; tokenizer files are the caller's.
    Files are written under temporary names. An earlier checkpoint in the folder is replaced when the new one
    is whole, so there must be room for both, and stays as it was if this fails.

    config.json is the plan's configuration, with ``architectures`` if it has none, with the ``dtype`` of the
    parameters (of the embedding, if they differ), and with as many prediction layers
    (``num_nextn_predict_layers``) as were exported.

    Args:
        plan: a proven plan whose configuration has ``to_dict`` (as ``transformers`` configurations have).
        folder: made if it is missing.
        file_bytes: ceiling of one file.

    Raises:
        ValueError: the plan is not proven.
        OSError: rank 0 cannot write; on every rank.
    """
    plan.require_proof()
    writer = _Writer(plan, Path(folder), file_bytes) if plan.rank == 0 else None
    agree(_failure(writer and writer.begin), plan.group)
    failed = None
    for name, tensor in export(plan, receivers=0, bucket_bytes=bucket_bytes):
        failed = failed or _failure(writer.add, name, tensor)  # the others wait for this rank until the end
    failed = failed or _failure(writer and writer.finish)
    if writer and failed:
        writer.clear()
    agree(failed, plan.group)


def _failure(work: Callable | None, *args) -> Exception | None:
    try:
        if work is not None:
            work(*args)
    except Exception as error:
        return error
    return None


class _Writer:
    """The files of one checkpoint, under temporary names until all are there."""

    def __init__(self, plan: Plan, folder: Path, file_bytes: int):
        self.plan, self.folder, self.file_bytes = plan, folder, file_bytes
        self.files: list[list[str]] = []
        self.held: dict[str, torch.Tensor] = {}
        self.filled = 0

    def begin(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.clear()  # what a save that was killed left

    def clear(self) -> None:
        for part in self.folder.glob("part-*.tmp"):
            part.unlink(missing_ok=True)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        size = self.plan.nbytes(name)
        if self.held and self.filled + size > self.file_bytes:
            self.write()
        self.held[name] = tensor.cpu().clone()  # a tensor may share the memory of its whole bucket
        self.filled += size

    def write(self) -> None:
        save_file(self.held, self.part(len(self.files)), metadata={"format": "pt"})
        self.files.append(list(self.held))
        self.held, self.filled = {}, 0

    def part(self, k: int | str) -> Path:
        return self.folder / f"part-{k}.tmp"

    def finish(self) -> None:
        """All bytes are written, then names change; the index last, so that a folder with one is whole."""
        if self.held:
            self.write()
        count = len(self.files)
        names = [f"model-{k:05d}-of-{count:05d}.safetensors" for k in range(1, count + 1)]
        if count == 1:
            names = ["model.safetensors"]
        moves = [(self.part(k), name) for k, name in enumerate(names)]
        moves.append((self.part("config"), "config.json"))
        self.part("config").write_text(json.dumps(config_fields(self.plan), **_JSON) + "\n")
        if count > 1:
            where = {tensor: name for name, held in zip(names, self.files, strict=True) for tensor in held}
            total = sum(self.plan.nbytes(name) for name in where)
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
            self.part("index").write_text(json.dumps(index, indent=2) + "\n")
            moves.append((self.part("index"), INDEX))
        (self.folder / INDEX).unlink(missing_ok=True)
        for old in self.folder.glob("model*.safetensors"):
            if old.name not in names:
                old.unlink()
        for part, name in moves:
            part.replace(self.folder / name)


_JSON = dict(indent=2, sort_keys=True, default=str)


def config_fields(plan: Plan) -> dict:
    """The plan's configuration as config.json has it."""
    config, family = plan.family.config, plan.family.family
    fields = config.to_dict() if hasattr(config, "to_dict") else dict(vars(config))
    fields["architectures"] = fields.get("architectures") or [family.architecture]
    dtype = "torch_dtype" if "torch_dtype" in fields else "dtype"  # renamed in transformers 4.56
    fields[dtype] = str(plan.dtype(next(iter(plan.expected)))).removeprefix("torch.")
    if "num_nextn_predict_layers" in fields:
        fields["num_nextn_predict_layers"] = plan.family.mtp
    return fields


def load_checkpoint(plan: Plan, folder: str | Path) -> None:
    """Read a Hugging Face checkpoint folder into the local parameters. Not collective: every rank reads its
    share.

    Args:
        plan: a proven plan.
        folder: holds ``model.safetensors``, or several files and their index.

    Raises:
        FileNotFoundError: neither is there.
        KeyError: a tensor of the configuration is not in the checkpoint.
        ValueError: the plan is not proven, or a tensor has another shape than the configuration says.
    """
    folder = Path(folder)
    if (folder / INDEX).exists():
        where = json.loads((folder / INDEX).read_text())["weight_map"]
    elif (folder / "model.safetensors").exists():
        with safe_open(folder / "model.safetensors", "pt") as file:
            where = dict.fromkeys(file.keys(), "model.safetensors")
    else:
        raise FileNotFoundError(f"{folder} has neither model.safetensors nor {INDEX}")
    missing = [name for entry in plan.entries for box in entry.boxes if (name := box.full_name) not in where]
    if missing:
        raise KeyError(f"{folder} lacks {len(set(missing))} tensors, first {sorted(set(missing))[0]}")
    opened: dict[str, object] = {}

    def read(name: str) -> torch.Tensor:
        file = where[name]
        if file not in opened:
            opened[file] = safe_open(folder / file, "pt")
        return opened[file].get_tensor(name)

    load(plan, read)
