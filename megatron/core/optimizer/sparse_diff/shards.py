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

import functools
import threading
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import torch

from megatron.weight_sync.fingerprints import tensor_sum

from .bitmask import CANARY, Bitmask, as_bits, expand

__all__ = [
    "Changes",
    "DenseShard",
    "DigestShard",
    "HookedShard",
    "ShadowShard",
    "Shard",
    "ValidatedShard",
    "copies_together",
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

    def probes(self) -> tuple[torch.Tensor, ...]:
        """0-dim integers on the device that the seal has to read."""
        return ()

    def mask(self) -> Bitmask | None:
        """The changes to be sealed; None where there are none, or the answer is all or nothing."""
        return None

    def accept(self, read: Sequence[int], found: Changes) -> None:
        """What was read: the probes, and the indices into the tensor and values of the mask."""
        self.sealed = self._invalid_sealed = True


def seal(shards: Sequence[Shard]) -> list[Changes | None]:
    """Seal `shards`; the changes of each, None for one to be sent whole. The host waits once in all."""
    try:
        probes = [shard.probes() for shard in shards]
        distinct = {id(probe): probe for of_shard in probes for probe in of_shard}
        masks = [shard.mask() for shard in shards]
        values = [shard.values() for shard in shards]
        masked = [i for i, mask in enumerate(masks) if mask is not None]
        found, read = expand(
            [masks[i] for i in masked],
            [values[i] for i in masked],
            [shards[i].start for i in masked],
            list(distinct.values()),
        )
    except BaseException:
        for shard in shards:  # some have joined their masks, and what they would have read is not known
            shard.invalidate("a seal failed")
        raise
    number = dict(zip(distinct, read, strict=True))
    of_mask = dict(zip(masked, found, strict=True))
    result: list[Changes | None] = []
    for i, shard in enumerate(shards):
        indices, there = of_mask.get(i) or (
            torch.empty(0, dtype=torch.int64, device=values[i].device),
            values[i][:0],
        )
        changes = Changes(indices, there)
        shard.accept([number[id(probe)] for probe in probes[i]], changes)
        result.append(None if shard.whole else changes)
        shard.sealed_count = shard.numel if shard.whole else indices.numel()
    return result


class HookedShard(Shard):
    """Also the manager that `sparse_diff_context` finds on the parameter."""

    route = "hooked"

    def __init__(self, tensor: torch.Tensor, start: int, end: int) -> None:
        super().__init__(tensor, start, end)
        self.bits: Bitmask | None = None
        """Changes since the last seal, from the first copy on."""
        self.sealed_bits: Bitmask | None = None

    @property
    def nbytes(self) -> int:
        masks = (self.bits is not None) + (self.sealed_bits is not None)
        return max(1, masks) * 4 * (-(-self.numel // 32) + 1)

    def copy_captured(self, shard_model: torch.Tensor, shard_main: torch.Tensor, non_blocking: bool) -> None:
        """The copy that `sparse_diff_context` yields; inside `copies_together`, it may happen at its end."""
        if shard_model.numel() != self.numel:
            raise RuntimeError(
                f"sparse diff: a copy of {shard_model.numel()} elements into a shard of {self.numel}; "
                "the optimizer was rebuilt after attach, attach again"
            )
        if not _together.ask(self, shard_model, shard_main):
            if self.bits is None:
                [self.bits] = Bitmask.zeros([self.numel], shard_model.device)
            self.bits.copy(shard_model.view(-1), shard_main.view(-1))

    def probes(self) -> tuple[torch.Tensor, ...]:
        masks = [mask for mask in (self.bits, self.sealed_bits) if mask is not None]
        if len(masks) == 2:
            self.bits.or_(self.sealed_bits)
        if masks:
            self.sealed_bits, self.bits = masks[0], None
        return tuple(mask.canary for mask in masks)

    def mask(self) -> Bitmask | None:
        return None if self.whole else self.sealed_bits

    def accept(self, read: Sequence[int], found: Changes) -> None:
        if any(canary != CANARY for canary in read):
            self.invalidate("the memory of its bitmask was lost")
            self.sealed_bits = None
        super().accept(read, found)

    def clear(self) -> None:
        if not self.sealed:
            self.bits = None
        self.sealed_bits = None
        super().clear()


class _Together(threading.local):
    """Copies that were asked for inside `copies_together` and have not happened yet."""

    def __init__(self) -> None:
        self.depth = 0
        self.asked: dict[HookedShard, tuple[torch.Tensor, torch.Tensor]] = {}
        self.elements = 0

    def ask(self, shard: HookedShard, model: torch.Tensor, main: torch.Tensor) -> bool:
        """Whether the copy will happen later; False where it has to happen now."""
        if not self.depth:
            return False
        if shard in self.asked:
            self.copy()  # in the order in which they were asked for
        fits = self.fits(model) and self.fits(main) and model.element_size() == 2
        if fits:
            self.asked[shard] = model, main
            self.elements += shard.numel
            if self.elements >= _LAUNCH:
                self.copy()
        return fits

    @staticmethod
    def fits(values: torch.Tensor) -> bool:
        return values.device.type == "cuda" and values.is_contiguous() and values.dtype in _TOGETHER

    def copy(self) -> None:
        if not self.asked:
            return
        asked, self.asked, self.elements = self.asked, {}, 0
        from .kernels import capture  # Triton, which a CPU installation need not have

        models, mains = zip(*asked.values(), strict=True)
        fresh = [shard for shard in asked if shard.bits is None]
        if fresh:
            masks = Bitmask.zeros([shard.numel for shard in fresh], models[0].device)
            for shard, mask in zip(fresh, masks, strict=True):
                shard.bits = mask
        capture(models, mains, [shard.bits.words for shard in asked])


_LAUNCH = 1 << 27
"""Elements to a launch: the device works on one while the host collects the next."""
_TOGETHER = (torch.float32, torch.bfloat16, torch.float16)
_together = _Together()


def copies_together(method: Callable) -> Callable:
    """Decorate a method that makes many copies through `sparse_diff_context`: those into hooked shards on a
    GPU happen together, in few launches, which have been queued on the current stream when the method returns
    or raises. It must not read between its copies what they write. Other copies happen where they are called.
    """

    @functools.wraps(method)
    def copying(*args, **kwargs):
        _together.depth += 1
        try:
            return method(*args, **kwargs)
        finally:
            _together.depth -= 1
            _together.copy()

    return copying


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

    def accept(self, read: Sequence[int], found: Changes) -> None:
        super().accept(read, found)
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

    def probes(self) -> tuple[torch.Tensor, ...]:
        if self.tensor.dtype != self._dtype:  # routers keep expert_bias in fp32 from their first forward on
            super().invalidate(f"its type changed from {self._dtype} to {self.tensor.dtype}")
            self._take()
        return (self._store[-8:].view(torch.int64)[0],)

    def mask(self) -> Bitmask:
        [mask] = Bitmask.zeros([self.numel], self.tensor.device)
        mask.compare(self._known, as_bits(self.values()))
        if self._found is not None:  # never acknowledged: a receiver may hold values that are gone again
            mask.set_(self._found.indices - self.start)
        return mask

    def accept(self, read: Sequence[int], found: Changes) -> None:
        if read[0] != CANARY:
            super().invalidate("the memory of its shadow copy was lost")
            self._take()
        self._found = found
        super().accept(read, found)

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
    return tensor_sum("", values)


class DigestShard(Shard):
    route = "digest"

    def __init__(self, tensor: torch.Tensor, start: int, end: int) -> None:
        super().__init__(tensor, start, end)
        self._known = self._found = int(digest(self.values()))
        self._sent = False  # whole, by a seal that was not acknowledged

    @property
    def nbytes(self) -> int:
        return 8

    def invalidate(self, reason: str) -> None:
        """Nothing to do: the digest sees replaced values like any other."""

    @property
    def whole(self) -> bool:
        return self._sent or self._found != self._known

    def probes(self) -> tuple[torch.Tensor, ...]:
        return (digest(self.values()),)

    def accept(self, read: Sequence[int], found: Changes) -> None:
        [self._found] = read
        self._sent = self.whole
        super().accept(read, found)

    def clear(self) -> None:
        if not self.sealed:
            self._found = int(digest(self.values()))
        self._known, self._sent = self._found, False
        super().clear()
