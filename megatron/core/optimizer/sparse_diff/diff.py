"""`attach` and the object it returns: the changes of a model since the last acknowledged sync."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .audit import Domain, Entry, audit
from .context import SparseState, bind, sparse_state
from .gather import gather
from .shards import Changes, seal

__all__ = ["SparseDiff", "attach"]

_BUCKET = 1 << 28  # elements of parameters whose changes travel together


def attach(
    optimizer: Any,
    mode: str | None = None,
    model_chunks: Sequence[torch.nn.Module] | None = None,
) -> "SparseDiff":
    """Record from now on which elements of the model change; the state at this moment is version's base.

    Args:
        optimizer: any Megatron optimizer, chained ones included; its numerics are not touched.
        mode: a state as of SPARSERL_STATE; None takes that variable, or `update` where it is off.
        model_chunks: the model, where the optimizer does not know it (Float16Optimizer, FP32Optimizer).

    Raises:
        NotImplementedError: for a path whose writes would not be seen exactly; names it and a way out.
        RuntimeError: where parameters already have a manager.
        ValueError: for an unknown mode, or a model that cannot be found.
    """
    state = (
        SparseState.parse(mode, "mode")
        if mode is not None
        else sparse_state() or SparseState(True, False, False)
    )
    if state is None:
        raise ValueError(
            f"mode={mode!r} disables sparse diff; do not attach, or give a mode such as 'update'"
        )
    return SparseDiff(audit(optimizer, model_chunks), state)


class SparseDiff:
    """Changes of every parameter and persistent buffer of the model on this rank."""

    def __init__(self, domains: list[Domain], state: SparseState) -> None:
        self.state = state
        self.version: int | None = None
        self._domains = domains
        self._entries: dict[torch.Tensor, Entry] = {e.tensor: e for d in domains for e in d.entries}
        self._domain_of = {e.tensor: d for d in domains for e in d.entries}
        self._gathered: dict[torch.Tensor, Changes | None] | None = None
        self._read = False
        taken = [e.name for e in self if e.leads and hasattr(e.tensor, "_sparse_manager")]
        if taken:
            raise RuntimeError(
                f"sparse diff: {len(taken)} parameters already have a manager, first {taken[0]}; "
                "detach it, or unset SPARSERL_STATE"
            )
        for entry in self:
            if entry.shard.route == "hooked":
                bind(entry.shard, entry.tensor, *entry.leads)

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    @property
    def nbytes(self) -> int:
        """Memory kept beside the model on this rank."""
        return sum(entry.shard.nbytes for entry in self)

    def _entry(self, param: torch.Tensor) -> Entry:
        try:
            return self._entries[param]
        except KeyError:
            raise ValueError(
                f"sparse diff: a tensor of shape {tuple(param.shape)} is no parameter or persistent buffer "
                "of the model that was attached"
            ) from None

    def gather_changed(self, group: Any | None = None, dst: int | None = None) -> None:
        """Seal what has changed so far and join it over data-parallel ranks; `changed` then answers from it.

        Collective over each optimizer's data-parallel group. Steps that follow count for the next sync.

        Args:
            group: gather only what is sharded over this group; all groups of the optimizer where None.
            dst: the rank within the group that receives; all of them where None.
        """
        gathered: dict[torch.Tensor, Changes | None] = {}
        for domain in self._domains:
            if group is not None and domain.group is not None and domain.group is not group:
                continue
            for entries in _buckets(domain.entries):
                tensors = [entry.tensor for entry in entries]
                changes = gather(tensors, [entry.shard for entry in entries], domain.group, dst)
                gathered.update(zip(tensors, changes, strict=bool(changes)))
        self._gathered = gathered

    def changed(self, param: torch.Tensor) -> Changes:
        """What changed in `param` since the last acknowledged sync.

        Returns:
            `(indices, values)`: int64 [count], ascending, into the flat local tensor; and its values there.
            After `gather_changed` that is the state at the gather, and otherwise the state now. Everything,
            where the base is not valid any more (see `is_dense`).

        Raises:
            RuntimeError: for a parameter that is sharded over data-parallel ranks and was not gathered.
            ValueError: for a tensor that is not of the attached model.
        """
        entry = self._entry(param)
        if self._gathered is not None:
            if param not in self._gathered:
                raise RuntimeError(f"sparse diff: {entry.name} was gathered to another rank or not at all")
            changes = self._gathered[param]
        else:
            if self._shared(param):
                raise RuntimeError(
                    f"sparse diff: {entry.name} is sharded over data-parallel ranks; call gather_changed() "
                    "on all of them first"
                )
            self._read = True
            [changes] = seal([entry.shard])
        if changes is None:
            flat = param.detach().view(-1)
            changes = Changes(torch.arange(flat.numel(), device=flat.device), flat)
        return changes

    def is_dense(self, param: torch.Tensor) -> bool:
        """Whether the next sync must carry `param` whole; known on every rank after `gather_changed`."""
        entry = self._entry(param)
        if self._gathered is not None and param in self._gathered:
            return self._gathered[param] is None
        return entry.shard.whole

    def _shared(self, param: torch.Tensor) -> bool:
        group = self._domain_of[param].group
        return group is not None and torch.distributed.get_world_size(group) > 1

    def clear(self, version: int) -> None:
        """Every receiver has acknowledged weights version `version`: forget the changes that it carried.

        What was read (`gather_changed`, or `changed` for each parameter) is forgotten and later changes are
        kept. If nothing was read since the last `clear`, whole weights were sent: everything is forgotten.

        Raises:
            ValueError: where `version` is not later than the last.
        """
        if self.version is not None and version <= self.version:
            raise ValueError(f"clear({version}): expected a version after {self.version}")
        read = self._read or self._gathered is not None
        for entry in self:
            if entry.shard.sealed or not read:
                entry.shard.clear()
        self.version, self._gathered, self._read = version, None, False

    def invalidate(self, reason: str) -> None:
        """Weights were replaced past the optimizer: the next sync carries hooked parameters whole."""
        for entry in self:
            entry.shard.invalidate(reason)

    def detach(self) -> None:
        """Stop recording; the model and optimizer are as before `attach`."""
        for entry in self:
            if entry.shard.route == "hooked":
                del entry.tensor._sparse_manager
                for lead in entry.leads:
                    del lead._sparse_owner
        self._entries, self._domains, self._domain_of, self._gathered = {}, [], {}, None

    def report(self) -> str:
        """A table of every tensor: its route, what writes it, elements on this rank, memory kept."""
        rows = [("tensor", "route", "written by", "elements here", "bytes kept")]
        for entry in self:
            shard = entry.shard
            rows.append((entry.name, shard.route, entry.path, f"{shard.numel:,}", f"{shard.nbytes:,}"))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(
                cell.rjust(width) if column > 2 else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join(lines)


def _buckets(entries: list[Entry]) -> Iterator[list[Entry]]:
    """Consecutive entries of at most `_BUCKET` elements together, at least one each."""
    bucket: list[Entry] = []
    size = 0
    for entry in entries:
        if bucket and size + entry.tensor.numel() > _BUCKET:
            yield bucket
            bucket, size = [], 0
        bucket.append(entry)
        size += entry.tensor.numel()
    if bucket:
        yield bucket
