"""Writing a Hugging Face checkpoint folder from sharded parameters, and reading one into them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from megatron.core.param_export.exporter import DEFAULT_BUCKET_BYTES, export
from megatron.core.param_export.loader import load
from megatron.core.param_export.plan import Plan

INDEX = "model.safetensors.index.json"


def save_checkpoint(
    plan: Plan, folder: str | Path, *, file_bytes: int = 5 * 10**9, bucket_bytes: int = DEFAULT_BUCKET_BYTES
) -> None:
    """Write safetensors files, their index and config.json, as ``save_pretrained`` lays them out. Collective.

    Rank 0 of the plan receives and writes. Files are written under temporary names and renamed at the end, so
    a folder with an index is complete. ``from_pretrained`` reads it; tokenizer files are the caller's.

    Args:
        plan: a proven plan whose configuration has ``to_dict`` (as ``transformers`` configurations have).
        folder: made if it is missing.
        file_bytes: ceiling of one file.

    Raises:
        ValueError: the plan is not proven.
    """
    plan.require_proof()
    folder = Path(folder)
    files: list[list[str]] = []
    writes = plan.rank == 0
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in (*folder.glob("model*.safetensors"), folder / INDEX):
            stale.unlink(missing_ok=True)
    held: dict[str, torch.Tensor] = {}
    filled = 0
    for name, tensor in export(plan, receivers=0, bucket_bytes=bucket_bytes):
        size = plan.nbytes(name)
        if held and filled + size > file_bytes:
            _write(folder, files, held)
            held, filled = {}, 0
        held[name] = tensor.cpu().clone()  # a tensor may share the memory of its whole bucket
        filled += size
    if writes:
        if held:
            _write(folder, files, held)
        _finish(plan, folder, files)
    if plan.ranks > 1:
        dist.barrier(plan.group)


def _write(folder: Path, files: list[list[str]], tensors: dict[str, torch.Tensor]) -> None:
    files.append(list(tensors))
    save_file(tensors, folder / f"part-{len(files)}.tmp", metadata={"format": "pt"})


def _finish(plan: Plan, folder: Path, files: list[list[str]]) -> None:
    where = {}
    for k, names in enumerate(files, 1):
        file = "model.safetensors" if len(files) == 1 else f"model-{k:05d}-of-{len(files):05d}.safetensors"
        (folder / f"part-{k}.tmp").rename(folder / file)
        where.update(dict.fromkeys(names, file))
    config = plan.family.config
    fields = config.to_dict() if hasattr(config, "to_dict") else dict(vars(config))
    (folder / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True, default=str) + "\n")
    if len(files) > 1:
        total = sum(plan.nbytes(name) for name in where)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


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
