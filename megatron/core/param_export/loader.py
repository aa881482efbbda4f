"""Loading full Hugging Face tensors into the shards: the inverse of an export."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from megatron.core.param_export.layout import is_ordinary
from megatron.core.param_export.plan import Plan, PlanEntry, StalePlanError
from megatron.weight_sync.boxes import Box

Source = Mapping[str, torch.Tensor] | Callable[[str], torch.Tensor]


@torch.no_grad()
def load(plan: Plan, source: Source) -> None:
    """Write Hugging Face tensors into the local parameters: the inverse of :func:`export`. Not collective.

    Replicas, tied copies and padding are written too; padded vocabulary rows become zero. An optimizer that
    exists already keeps its own copies: call its ``reload_model_params()`` afterwards.

    Args:
        plan: a plan of the model, proven.
        source: a mapping, or a function, from a Hugging Face name to the full tensor. Names are those of
            checkpoint files. ``hf_model.state_dict()`` has them too, but not for routed experts, which
            transformers 5 fuses in memory. A mapping is checked whole, by name and shape, before anything is
            written; a function is asked once for each tensor, so that tensors before a bad one are written
            when it is found.

    Raises:
        TypeError: the source is neither, or what it gives is no tensor.
        KeyError: a mapping lacks tensors.
        ValueError: the plan is not proven, or a tensor has another shape than the configuration says.
        StalePlanError: this rank's model holds other tensors than its plan; what was loaded would be lost.
    """
    plan.require_proof()
    if not plan.is_current():
        raise StalePlanError.on([rank == plan.rank for rank in range(plan.ranks)])
    writers: dict[str, list[tuple[PlanEntry, Box]]] = {}
    for entry in plan.entries:
        for box in entry.boxes:
            writers.setdefault(box.full_name, []).append((entry, box))
    read = _reader(plan, source, writers)
    for entry in plan.entries:
        for offset, size, stride in entry.cut:
            with _flat(entry) as flat:
                flat.as_strided(size, stride, flat.storage_offset() + offset).zero_()
    for name, targets in writers.items():
        full = read(name).to(targets[0][0].tensor.device).contiguous().view(-1)
        for entry, box in targets:
            with _flat(entry) as flat:
                box.copy_to_local(full, flat)


@contextmanager
def _flat(entry: PlanEntry) -> Iterator[torch.Tensor]:
    """The tensor's elements to be written; those of one in another memory order are copied back."""
    flat = entry.contiguous().view(-1)
    yield flat
    if is_ordinary(entry.tensor.data) and not entry.tensor.is_contiguous():
        entry.tensor.copy_(flat.view(entry.tensor.shape))


def _reader(plan: Plan, source: Source, names) -> Callable[[str], torch.Tensor]:
    """``name → full tensor``, checked; of a mapping all are checked at once."""
    is_mapping = isinstance(source, Mapping)
    if isinstance(source, torch.nn.Module) or not (is_mapping or callable(source)):
        raise TypeError(
            f"source: expected a mapping or a function from names to tensors, got {type(source).__name__}"
        )

    def read(name: str) -> torch.Tensor:
        full = source[name] if is_mapping else source(name)
        if not isinstance(full, torch.Tensor):
            raise TypeError(f"{name}: expected a tensor, got {type(full).__name__}")
        if tuple(full.shape) != plan.expected[name]:
            raise ValueError(f"{name}: shape {tuple(full.shape)}, expected {plan.expected[name]}")
        return full

    if is_mapping:
        missing = [name for name in plan.expected if name in names and name not in source]
        if missing:
            raise KeyError(
                f"source: {len(missing)} tensors of the {plan.family.family.model_type} family are missing, "
                f"first {missing[0]}. Names are those of checkpoint files: of a transformers model with "
                "experts, which its state_dict() has fused, load the files that save_pretrained writes"
            )
        for name in names:
            read(name)
    return read
