"""`attach` and the object it returns: the changes of a model since the last acknowledged sync."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .audit import Domain, Entry, audit
from .context import SparseState, bind, sparse_state
from .gather import gather
from .observe import DensityLog
from .shards import Changes, digest

__all__ = ["SparseDiff", "attach"]

_BUCKET = 1 << 28  # elements of parameters whose changes travel together
_UPDATE = SparseState(update=True, validate=False, observe=False)


def attach(
    optimizer: Any,
    mode: str | None = None,
    model_chunks: Sequence[torch.nn.Module] | None = None,
    observe_dir: str | os.PathLike | None = None,
    unhooked: str = "shadow",
) -> "SparseDiff":
    """Record from now on which elements of the model change; the weights of this moment are the base.

    Args:
        optimizer: any Megatron optimizer, chained ones included; its numerics are not touched.
        mode: a state as of SPARSERL_STATE; None takes that variable, or `update` where it is off.
            `…validate…` keeps the acknowledged values too and checks every sync against a full comparison;
            `…observe…` writes the densities of every sync.
        model_chunks: the model, where the optimizer does not know it (Float16Optimizer, FP32Optimizer).
        observe_dir: where densities are written; None takes SPARSE_STATS_SAVED_DIR.
        unhooked: the route of parameters that the optimizer writes without a copy (fp32, precision-aware):
            `shadow` keeps a copy of this rank's shard to compare with, `dense` keeps nothing and sends them
            whole every time.

    Raises:
        NotImplementedError: for a path whose writes would not be seen exactly; names it and a way out.
        RuntimeError: where parameters already have a manager.
        ValueError: for an unknown mode, a model that cannot be found, or one that is not the optimizer's.
    """
    state = SparseState.parse(mode, "mode") if mode is not None else sparse_state() or _UPDATE
    if state is None:
        raise ValueError(
            f"mode={mode!r} disables sparse diff; do not attach, or give a mode such as 'update'"
        )
    domains, chunks = audit(optimizer, model_chunks, state.validate, unhooked)
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    log = DensityLog(observe_dir, rank) if state.observe else None
    return SparseDiff(domains, chunks, state, log)


class SparseDiff:
    """Changes of every parameter and persistent buffer of the model on this rank; made by `attach`."""

    def __init__(
        self,
        domains: list[Domain],
        model_chunks: Sequence[torch.nn.Module],
        state: SparseState,
        log: DensityLog | None,
    ) -> None:
        self.state = state
        self.version: int | None = None
        """The last acknowledged version."""
        self.role = "actor"
        """Whose weights are in the model; nothing is read while it is not the actor's."""
        self._domains = domains
        self._entries: dict[torch.Tensor, Entry] = {e.tensor: e for d in domains for e in d.entries}
        self._domain_of = {e.tensor: d for d in domains for e in d.entries}
        self._log = log
        self._gathered: dict[torch.Tensor, Changes | None] | None = None
        self._read = False
        self._hooks: list[Any] = []
        taken = [e.name for e in self if e.leads and hasattr(e.tensor, "_sparse_manager")]
        if taken:
            raise RuntimeError(
                f"sparse diff: {len(taken)} parameters already have a manager, first {taken[0]}; "
                "detach it, or unset SPARSERL_STATE"
            )
        for entry in self:
            if entry.shard.route == "hooked":
                bind(entry.shard, entry.tensor, *entry.leads)
        for chunk in model_chunks:
            for module in chunk.modules():
                if any(p in self._entries for p in module.parameters(recurse=False)):
                    self._hooks.append(module.register_load_state_dict_post_hook(self._on_load()))

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    @property
    def nbytes(self) -> int:
        """Memory kept beside the model on this rank."""
        return sum(entry.shard.nbytes for entry in self)

    # Reading

    def gather_changed(self, group: Any | None = None, dst: int | None = None) -> None:
        """Seal what has changed so far and join it over data-parallel ranks; `changed` then answers from it.

        Collective over each optimizer's data-parallel group. Steps that follow count for the next sync.

        Args:
            group: gather only what is sharded over this group; all groups of the optimizer where None.
            dst: the rank within the group that receives; all of them where None.

        Raises:
            RuntimeError: in a validating mode, on all ranks, where a change was missed; while other weights
                than the actor's are in the model; while weights are offloaded.
        """
        self._check_readable(self)
        gathered: dict[torch.Tensor, Changes | None] = {}
        for domain in self._domains:
            if group is not None and domain.group is not None and domain.group is not group:
                continue
            some_whole = False
            for entries in _buckets(domain.entries):
                tensors = [entry.tensor for entry in entries]
                shards = [entry.shard for entry in entries]
                names = [entry.name for entry in entries]
                changes, whole = gather(names, tensors, shards, domain.group, dst)
                if changes is not None:
                    gathered.update(zip(tensors, changes, strict=True))
                some_whole |= whole
            if some_whole and domain.complete is not None:
                domain.complete()
        self._gathered = gathered
        self._observe()

    def complete_weights(self) -> None:
        """Fetch what other data-parallel ranks own of the weights, where `overlap_param_gather` leaves it to
        the next forward; then every local tensor is current, as readers of whole tensors need. Collective.

        Between a step and the next forward only: the layer-wise optimizer receives into gradient buffers.
        """
        for domain in self._domains:
            if domain.complete is not None:
                domain.complete()

    def changed(self, param: torch.Tensor) -> Changes:
        """What changed in `param` since the last acknowledged sync.

        Returns:
            `(indices, values)`: int64 [count], ascending, into the flat local tensor; and its values there.
            After `gather_changed` that is the state at the gather, and otherwise the state now. Everything,
            where the base is not valid any more (see `is_dense`).

        Raises:
            RuntimeError: for a parameter that is sharded over data-parallel ranks and was not gathered; and
                as `gather_changed`.
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
            self._check_readable([entry])
            self._read = True
            [changes], _ = gather([entry.name], [param], [entry.shard], None)
        if changes is None:
            flat = param.detach().view(-1)
            changes = Changes(torch.arange(flat.numel(), device=flat.device), flat)
        return changes

    def is_dense(self, param: torch.Tensor) -> bool:
        """Whether the sync that was read carries `param` whole."""
        entry = self._entry(param)
        if self._gathered is not None and param in self._gathered:
            return self._gathered[param] is None
        return entry.shard.whole

    def clear(self, version: int) -> None:
        """Every receiver has acknowledged weights version `version`: forget the changes that it carried.

        What was read (`gather_changed`, or `changed` for each parameter) is forgotten and later changes are
        kept. If nothing was read since the last `clear`, whole weights were sent: everything is forgotten.

        Raises:
            RuntimeError: while other weights than the actor's are in the model.
            TypeError: where `version` is not an int.
            ValueError: where `version` is not later than the last.
        """
        if not isinstance(version, int):
            raise TypeError(f"clear(version): expected an int, got {version!r}")
        if self.version is not None and version <= self.version:
            raise ValueError(f"clear({version}): expected a version after {self.version}")
        self._check_readable(())
        read = self._read or self._gathered is not None
        for entry in self:
            if entry.shard.sealed or not read:
                entry.shard.clear()
        self.version, self._gathered, self._read = version, None, False

    # What the copy does not see

    def invalidate(self, reason: str) -> None:
        """Weights were replaced past the optimizer: the next sync carries hooked parameters whole."""
        for entry in self:
            entry.shard.invalidate(reason)

    def _on_load(self) -> Callable[[torch.nn.Module, Any], None]:
        def loaded(module: torch.nn.Module, _: Any) -> None:
            if self.role == "actor":
                for param in module.parameters(recurse=False):
                    if param in self._entries:
                        self._entries[param].shard.invalidate("load_state_dict")

        return loaded  # a function: a copy of the model shares it, and does not copy what it belongs to

    @contextlib.contextmanager
    def weights_role(self, role: str, verify: bool = True) -> Iterator[None]:
        """For as long as the model holds the weights of `role` (a reference, a teacher), read nothing.

        The actor's weights must be back at the end. `verify` compares digests: a parameter that is not back
        is sent whole by the next sync.
        """
        before = self._digests() if verify else None
        previous, self.role = self.role, role
        try:
            yield
        finally:
            self.role = previous
            if verify:
                for entry, old, new in zip(self, before, self._digests(), strict=True):
                    if old != new:
                        entry.shard.invalidate(f"it was not restored after the weights of {role!r}")

    def _digests(self) -> list[int]:
        values = [digest(entry.shard.values()) for entry in self]
        return torch.stack(values).tolist() if values else []

    # Looking at it

    def report(self) -> str:
        """A table of every tensor: its route, what writes it, elements on this rank, memory kept."""
        rows = [("tensor", "route", "written by", "elements here", "bytes kept")]
        for entry in self:
            shard = entry.shard
            path = entry.path if shard.invalid is None else f"{entry.path}; whole next: {shard.invalid}"
            rows.append((entry.name, shard.route, path, f"{shard.numel:,}", f"{shard.nbytes:,}"))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            "  ".join(
                cell.rjust(width) if column > 2 else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join(lines)

    def observe(self) -> None:
        """Write the densities since the last `clear`, from this rank's shards alone; no collective.

        In a mode without `update` they are then forgotten: call it once per step.

        Raises:
            ValueError: where the mode does not observe.
        """
        if self._log is None:
            raise ValueError(f"mode {self.state} does not observe; attach with mode='observe'")
        self._check_readable(self)
        self._seal_here()
        self._observe()
        if not self.state.update:
            for entry in self:
                entry.shard.clear()

    def detach(self) -> None:
        """Stop recording; the model and optimizer are as before `attach`."""
        for entry in self:
            if entry.shard.route == "hooked":
                del entry.tensor._sparse_manager
                for lead in entry.leads:
                    del lead._sparse_owner
        for hook in self._hooks:
            hook.remove()
        self._entries, self._domains, self._domain_of, self._gathered = {}, [], {}, None
        self._hooks = []

    # Inside

    def _seal_here(self) -> None:
        for domain in self._domains:
            for entries in _buckets(domain.entries):
                names, tensors = [e.name for e in entries], [e.tensor for e in entries]
                gather(names, tensors, [e.shard for e in entries], None)

    def _observe(self) -> None:
        if self._log is not None:
            owned = [entry for entry in self if entry.shard.numel]
            self._log.write((e.name, e.layer, e.shard.numel, e.shard.sealed_count) for e in owned)

    def _entry(self, param: torch.Tensor) -> Entry:
        try:
            return self._entries[param]
        except KeyError:
            raise ValueError(
                f"sparse diff: a tensor of shape {tuple(param.shape)} is no parameter or persistent buffer "
                "of the model that was attached"
            ) from None

    def _shared(self, param: torch.Tensor) -> bool:
        group = self._domain_of[param].group
        return group is not None and torch.distributed.get_world_size(group) > 1

    def _check_readable(self, entries: Any) -> None:
        if self.role != "actor":
            raise RuntimeError(
                f"sparse diff: the model holds the weights of {self.role!r}; leave weights_role first"
            )
        for entry in entries:
            entry.check()


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
