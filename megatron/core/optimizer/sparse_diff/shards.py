"""What is kept of one parameter on this rank, so that its changes since the last acknowledged sync are known.

Every kind answers for a contiguous range of the flat local tensor, empty on ranks that own none of it:

* `HookedShard`: a bitmask filled by the copy itself.
* `ShadowShard`: a second copy of the values, compared at sync; for values that no hook sees being written.
* `DigestShard`: a 64-bit digest, compared at sync; for values that nothing should write. Changed: sent whole.
* `DenseShard`: nothing; sent whole every time.

A sync *seals* a shard: what has changed so far belongs to it. Steps that follow are recorded apart, so that
`clear`, on acknowledgement, forgets what was sealed and nothing else. A seal that is never acknowledged is
merged into the next.
"""

from typing import ClassVar

import torch

from .bitmask import CANARY, Bitmask, as_bits

__all__ = ["DenseShard", "DigestShard", "HookedShard", "ShadowShard", "Shard"]


class Shard:
    """This rank's range `start`:`end` of the flat `tensor`."""

    route: ClassVar[str]

    def __init__(self, tensor: torch.Tensor, start: int, end: int) -> None:
        self.tensor, self.start, self.end = tensor, start, end
        self.sealed = False
        self.invalid: str | None = None
        self._invalid_sealed = False

    @property
    def numel(self) -> int:
        return self.end - self.start

    @property
    def nbytes(self) -> int:
        """Memory kept beside the parameter."""
        return 0

    def values(self) -> torch.Tensor:
        """The current values of the range, flat; a view."""
        return self.tensor.detach().view(-1)[self.start : self.end]

    def invalidate(self, reason: str) -> None:
        """Values were replaced unseen: until the next acknowledged sync, everything counts as changed."""
        self.invalid, self._invalid_sealed = reason, False

    @property
    def whole(self) -> bool:
        """Whether the shard must be sent whole; known after `seal`."""
        return self.invalid is not None

    def seal(self) -> None:
        self.sealed = self._invalid_sealed = True

    def changed(self) -> torch.Tensor:
        """Indices into the range of what the seal holds, ascending, int64."""
        raise NotImplementedError

    def clear(self) -> None:
        """What was sealed has arrived; without a seal, everything has."""
        if self._invalid_sealed or not self.sealed:
            self.invalid = None
        self.sealed = False

    def everything(self) -> torch.Tensor:
        return torch.arange(self.numel, dtype=torch.int64, device=self.tensor.device)


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

    def seal(self) -> None:
        if not self.bits.intact() or (self._pending is not None and not self._pending.intact()):
            self.invalidate("the memory of its bitmask was lost")
            self.bits, self._pending = Bitmask(self.numel, self.tensor.device), None
        if self._pending is not None:
            self.bits.or_(self._pending)
            self._pending = None
        super().seal()

    def changed(self) -> torch.Tensor:
        bits = self._pending if self._pending is not None else self.bits
        return self.everything() if self.whole else bits.indices()

    def clear(self) -> None:
        if self._pending is not None:
            self._pending = None
        else:
            self.bits.zero_()
        super().clear()


class ShadowShard(Shard):
    route = "shadow"

    def __init__(self, tensor: torch.Tensor, start: int, end: int) -> None:
        super().__init__(tensor, start, end)
        self._found: tuple[torch.Tensor, torch.Tensor] | None = None
        self._take()

    def _take(self) -> None:
        bits = as_bits(self.values())
        self._store = bits.new_empty(self.numel + 8)
        self._store[: self.numel] = bits
        self._store[self.numel :] = CANARY & 0x7F

    @property
    def nbytes(self) -> int:
        return self._store.nbytes

    def invalidate(self, reason: str) -> None:
        """Nothing to do: the comparison sees replaced values like any other."""

    def seal(self) -> None:
        super().seal()
        if not bool((self._store[self.numel :] == CANARY & 0x7F).all()):
            Shard.invalidate(self, "the memory of its shadow copy was lost")
            self._take()
            super().seal()
        current = as_bits(self.values())
        changed = (self._store[: self.numel] != current).nonzero().view(-1)
        self._found = changed, current[changed]

    def changed(self) -> torch.Tensor:
        return self.everything() if self.whole else self._found[0]

    def clear(self) -> None:
        if not self.sealed:
            self._take()
        else:
            changed, values = self._found
            self._store[: self.numel][changed] = values
        self._found = None
        super().clear()


class DenseShard(Shard):
    route = "dense"

    @property
    def whole(self) -> bool:
        return True

    def changed(self) -> torch.Tensor:
        return self.everything()


def digest(values: torch.Tensor) -> int:
    """A 64-bit sum over the positions and bits of flat `values`, independent of the order of work."""
    total = 0
    for start in range(0, values.numel(), 1 << 22):
        bits = as_bits(values[start : start + (1 << 22)]).to(torch.int64)
        mixed = bits + torch.arange(start, start + bits.numel(), device=bits.device) * -0x61C8864680B583EB
        for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
            mixed = (mixed ^ (mixed >> shift)) * factor
        total += int((mixed ^ (mixed >> 31)).sum())
    return total & 0xFFFFFFFFFFFFFFFF


class DigestShard(Shard):
    route = "shadow"

    def __init__(self, tensor: torch.Tensor, start: int, end: int) -> None:
        super().__init__(tensor, start, end)
        self._known = self._found = digest(self.values())

    @property
    def nbytes(self) -> int:
        return 8

    def invalidate(self, reason: str) -> None:
        """Nothing to do: the digest sees replaced values like any other."""

    @property
    def whole(self) -> bool:
        return self._found != self._known

    def seal(self) -> None:
        self._found = digest(self.values())
        super().seal()

    def changed(self) -> torch.Tensor:
        return self.everything() if self.whole else self.everything()[:0]

    def clear(self) -> None:
        if not self.sealed:
            self._found = digest(self.values())
        self._known = self._found
        super().clear()
