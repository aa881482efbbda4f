"""What is kept of one parameter on this rank, so that its changes since the last acknowledged sync are known.

Every kind answers for a contiguous range of the flat local tensor, empty on ranks that own none of it:

* `HookedShard`: a bitmask filled by the copy itself.
* `ShadowShard`: a second copy of the values, compared at sync; for values that no hook sees being written.
* `DigestShard`: a 64-bit digest, compared at sync; for values that nothing should write. Changed: sent whole.
* `DenseShard`: nothing; sent whole every time.

A sync *seals* its shards: what has changed so far belongs to it. Steps that follow are recorded apart, so
that `clear`, on acknowledgement, forgets what was sealed and nothing else. A seal that is never acknowledged
is merged into the next.
"""

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch

from .bitmask import CANARY, Bitmask, as_bits, expand

__all__ = [
    "Changes",
    "DenseShard",
    "DigestShard",
    "HookedShard",
    "ShadowShard",
    "Shard",
    "ValidatedShard",
    "digest",
    "seal",
]


class Changes(NamedTuple):
    """Changed elements of one local tensor: `indices` int64 [count], ascending, and `values` [count]."""

    indices: torch.Tensor
    values: torch.Tensor


class Shard:
    """This rank's range `start`:`end` of the flat `tensor`."""

    route: ClassVar[str]

    def __init__(self, tensor: torch.Tensor, start: int, end: int) -> None:
        self.tensor, self.start, self.end = tensor, start, end
        self.sealed = False
        self.sealed_count = 0
        """Elements of the range that the last seal counts as changed."""
        self.invalid: str | None = None
        self._invalid_sealed = False

    @property
    def numel(self) -> int:
        return self.end - self.start

    @property
    def nbytes(self) -> int:
        """Memory kept beside the parameter."""
        return 0

    @property
    def whole(self) -> bool:
        """Whether the sealed shard must be sent whole."""
        return self.invalid is not None

    def values(self) -> torch.Tensor:
        """The current values of the range, flat; a view."""
        return self.tensor.detach().view(-1)[self.start : self.end]

    def invalidate(self, reason: str) -> None:
        """Values were replaced unseen: until the next acknowledged sync, everything counts as changed."""
        self.invalid, self._invalid_sealed = reason, False

    def clear(self) -> None:
        """What was sealed has arrived; without a seal, everything has."""
        if self._invalid_sealed or not self.sealed:
            self.invalid = None
        self.sealed = False

    # The steps of a seal, for many shards at once: see `seal`.

    def probe(self) -> torch.Tensor | None:
        """A 0-dim integer on the device that the seal has to read."""
        return None

    def mask(self) -> Bitmask | None:
        """The changes to be sealed; None where the answer is all or nothing."""
        return None

    def accept(self, probe: int | None, found: Changes | None) -> None:
        """What was read: the probe, and the indices into the tensor and values of the mask."""
        self.sealed = self._invalid_sealed = True


def seal(shards: Sequence[Shard]) -> list[Changes | None]:
    """Seal `shards`; the changes of each, None for one to be sent whole. The host waits once in all."""
    probes = [shard.probe() for shard in shards]
    masks = [shard.mask() for shard in shards]
    masked = [(m, s) for m, s in zip(masks, shards, strict=True) if m is not None]
    found, read = expand(
        [mask for mask, _ in masked],
        [shard.values() for _, shard in masked],
        [shard.start for _, shard in masked],
        [probe for probe in probes if probe is not None],
    )
    next_found, next_read = iter(found), iter(read)
    result: list[Changes | None] = []
    for shard, probe, mask in zip(shards, probes, masks, strict=True):
        changes = None if mask is None else Changes(*next(next_found))
        shard.accept(None if probe is None else next(next_read), changes)
        if shard.whole:
            changes = None
        elif changes is None:
            values = shard.values()[:0]
            changes = Changes(torch.empty(0, dtype=torch.int64, device=values.device), values)
        shard.sealed_count = shard.numel if changes is None else changes.indices.numel()
        result.append(changes)
    return result


class HookedShard(Shard):
    """Also the manager that `sparse_diff_context` finds on the parameter."""

    route = "hooked"

    def __init__(self, tensor: torch.Tensor, start: int, end: int) -> None:
        super().__init__(tensor, start, end)
        self.bits = Bitmask(self.numel, tensor.device)
        self._pending: Bitmask | None = None

    @property
    def nbytes(self) -> int:
        return self.bits.nbytes + (self._pending.nbytes if self._pending is not None else 0)

    def copy_captured(self, shard_model: torch.Tensor, shard_main: torch.Tensor, non_blocking: bool) -> None:
        """The copy that `sparse_diff_context` yields."""
        if shard_model.numel() != self.numel:
            raise RuntimeError(
                f"sparse diff: a copy of {shard_model.numel()} elements into a shard of {self.numel}; "
                "the optimizer was rebuilt after attach, attach again"
            )
        if self.sealed and self._pending is None:
            self._pending, self.bits = self.bits, Bitmask(self.numel, self.tensor.device)
        self.bits.copy(shard_model.view(-1), shard_main.view(-1))

    def probe(self) -> torch.Tensor:
        if self._pending is not None:
            self.bits.or_(self._pending)
            # the canary of either tells of both: one allocator holds them
            self.bits.store[-1:] &= self._pending.store[-1:]
            self._pending = None
        return self.bits.canary

    def mask(self) -> Bitmask | None:
        return None if self.whole else self.bits

    def accept(self, probe: int | None, found: Changes | None) -> None:
        if probe != CANARY:
            self.invalidate("the memory of its bitmask was lost")
            self.bits = Bitmask(self.numel, self.tensor.device)
        super().accept(probe, found)

    def clear(self) -> None:
        if self._pending is not None:
            self._pending = None
        else:
            self.bits.zero_()
        super().clear()


class ValidatedShard(HookedShard):
    """A hooked shard that is checked at every seal against a full comparison with the acknowledged values.

    `missed` is (count, first index into the tensor) of elements that differ and have no bit.
    """

    def __init__(self, tensor: torch.Tensor, start: int, end: int) -> None:
        super().__init__(tensor, start, end)
        self.missed: tuple[int, int] | None = None
        self._known = as_bits(self.values()).clone()
        self._found: Changes | None = None

    @property
    def nbytes(self) -> int:
        return super().nbytes + self._known.nbytes

    def accept(self, probe: int | None, found: Changes | None) -> None:
        super().accept(probe, found)
        self._found = Changes(self._places(), self.values().clone()) if self.whole else found
        missed = self._known != as_bits(self.values())
        missed[self._found.indices - self.start] = False
        places = missed.nonzero().view(-1)
        self.missed = (places.numel(), int(places[0]) + self.start) if places.numel() else None

    def _places(self) -> torch.Tensor:
        return torch.arange(self.start, self.end, dtype=torch.int64, device=self.tensor.device)

    def clear(self) -> None:
        if self.sealed:
            self._known[self._found.indices - self.start] = as_bits(self._found.values)
        else:
            self._known.copy_(as_bits(self.values()))
        super().clear()


class ShadowShard(Shard):
    route = "shadow"

    def __init__(self, tensor: torch.Tensor, start: int, end: int) -> None:
        super().__init__(tensor, start, end)
        self._found: Changes | None = None
        self._take()

    def _take(self) -> None:
        self._dtype = self.tensor.dtype
        current = as_bits(self.values())
        size = -(-current.nbytes // 8) * 8
        self._store = torch.empty(size + 8, dtype=torch.uint8, device=current.device)
        self._store[size:].view(torch.int64).fill_(CANARY)
        self._known = self._store[: current.nbytes].view(current.dtype)
        self._known.copy_(current)

    @property
    def nbytes(self) -> int:
        return self._store.nbytes

    def invalidate(self, reason: str) -> None:
        """Nothing to do: the comparison sees replaced values like any other."""

    def probe(self) -> torch.Tensor:
        if self.tensor.dtype != self._dtype:  # routers keep expert_bias in fp32 from their first forward on
            super().invalidate(f"its type changed from {self._dtype} to {self.tensor.dtype}")
            self._take()
        return self._store[-8:].view(torch.int64)[0]

    def mask(self) -> Bitmask:
        mask = Bitmask(self.numel, self.tensor.device)
        mask.compare(self._known, as_bits(self.values()))
        return mask

    def accept(self, probe: int | None, found: Changes | None) -> None:
        if probe != CANARY:
            super().invalidate("the memory of its shadow copy was lost")
            self._take()
        self._found = found
        super().accept(probe, found)

    def clear(self) -> None:
        if not self.sealed:
            self._take()
        elif not self.whole:  # where the memory was lost, the seal has taken the values
            self._known[self._found.indices - self.start] = as_bits(self._found.values)
        self._found = None
        super().clear()


class DenseShard(Shard):
    route = "dense"

    @property
    def whole(self) -> bool:
        return True


def digest(values: torch.Tensor) -> torch.Tensor:
    """A 64-bit sum over positions and bits of flat `values`, in any order of work; 0-dim int64."""
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for start in range(0, values.numel(), 1 << 22):
        bits = as_bits(values[start : start + (1 << 22)]).to(torch.int64)
        mixed = bits + torch.arange(start, start + bits.numel(), device=bits.device) * -0x61C8864680B583EB
        for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
            mixed = (mixed ^ (mixed >> shift)) * factor
        total += (mixed ^ (mixed >> 31)).sum()
    return total


class DigestShard(Shard):
    route = "digest"

    def __init__(self, tensor: torch.Tensor, start: int, end: int) -> None:
        super().__init__(tensor, start, end)
        self._known = self._found = int(digest(self.values()))

    @property
    def nbytes(self) -> int:
        return 8

    def invalidate(self, reason: str) -> None:
        """Nothing to do: the digest sees replaced values like any other."""

    @property
    def whole(self) -> bool:
        return self._found != self._known

    def probe(self) -> torch.Tensor:
        return digest(self.values())

    def accept(self, probe: int | None, found: Changes | None) -> None:
        self._found = probe
        super().accept(probe, found)

    def clear(self) -> None:
        if not self.sealed:
            self._found = int(digest(self.values()))
        self._known = self._found
        super().clear()
