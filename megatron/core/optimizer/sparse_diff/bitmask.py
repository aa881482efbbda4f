"""One bit per element, set where a copy changed the element's bits.

Comparison is of bit patterns: -0.0 differs from 0.0, a NaN from a NaN with another payload, and a NaN equals
itself. Plain torch here, on any device; `kernels` holds the fused CUDA forms.
"""

from collections.abc import Sequence

import torch

__all__ = ["CANARY", "Bitmask", "as_bits", "expand"]

CANARY = 0x5EED1E55
_CHUNK = 1 << 22  # elements compared at a time: bounds the temporaries of one copy
_SPREAD = 0x0102040810204080  # gathers the low bits of eight bytes in the top byte of the product
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bits(values: torch.Tensor) -> torch.Tensor:
    """`values` seen as integers of the same size.

    Raises:
        TypeError: where no such integer type exists.
    """
    if values.element_size() not in _BITS or values.is_complex():
        raise TypeError(f"sparse diff compares values of 1, 2, 4 or 8 bytes, got {values.dtype}")
    return values.view(_BITS[values.element_size()])


def pack(changed: torch.Tensor) -> torch.Tensor:
    """Bytes whose bit i is element 8·byte + i of the boolean `changed`, whose length is a multiple of 8."""
    return (changed.view(torch.int64) * _SPREAD).bitwise_right_shift(56).to(torch.uint8)


def expand(
    masks: Sequence["Bitmask"],
    models: Sequence[torch.Tensor],
    firsts: Sequence[int],
    probes: Sequence[torch.Tensor],
) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[int]]:
    """Expand many masks at once; on CUDA the host waits for the device once in all.

    Returns:
        Per mask the indices of its set bits plus its `first`, ascending int64, and the values of `models`
        there; and the 0-dim integer `probes` as numbers.
    """
    read = torch.stack([probe.to(torch.int64) for probe in probes]) if probes else torch.empty(0)
    devices = {mask.words.device.type for mask in masks}
    if devices == {"cuda"}:
        from .kernels import expand

        return expand([mask.words for mask in masks], models, firsts, read.to(torch.int64))
    found = [mask.indices() for mask in masks]
    pairs = [(i + first, model[i]) for i, first, model in zip(found, firsts, models, strict=True)]
    return pairs, [int(value) for value in read.tolist()]


class Bitmask:
    """Which elements of a tensor changed: `words`, int32, one bit for each.

    The canary, 0-dim int32, is CANARY while the memory holds what was written, as it may not after an
    allocator that releases pages (torch_memory_saver) put the process to sleep. Masks that were made together
    are parts of one tensor, and share it.
    """

    def __init__(self, words: torch.Tensor, canary: torch.Tensor) -> None:
        self.words, self.canary = words, canary

    @classmethod
    def zeros(cls, numels: Sequence[int], device: torch.device | str) -> list["Bitmask"]:
        """One mask, with no bit set, for each of `numels`."""
        sizes = [-(-numel // 32) for numel in numels]
        store = torch.zeros(sum(sizes) + 1, dtype=torch.int32, device=device)
        store[-1:].fill_(CANARY)
        *parts, canary = store.split([*sizes, 1])
        canary = canary[0]
        return [cls(words, canary) for words in parts]

    @property
    def bytes(self) -> torch.Tensor:
        return self.words.view(torch.uint8)

    def or_(self, other: "Bitmask") -> None:
        self.words |= other.words

    def indices(self) -> torch.Tensor:
        """Set positions, ascending, int64 [count]."""
        occupied = self.bytes.nonzero().view(-1)
        lanes = torch.arange(8, dtype=torch.uint8, device=occupied.device)
        bits = (self.bytes[occupied].unsqueeze(1).bitwise_right_shift(lanes) & 1).nonzero()
        return occupied[bits[:, 0]] * 8 + bits[:, 1]

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """`target.copy_(source)`, setting the bits of the elements of `target` whose bits change.

        Both are flat, of one size; the conversion of types is that of ``copy_``. On CUDA one kernel.
        """
        if target.device.type == "cuda" and target.element_size() == 2:
            from .kernels import capture  # Triton, which a CPU installation need not have

            capture([target], [source.to(target.device, non_blocking=True)], [self.words])
            return
        for start in range(0, target.numel(), _CHUNK):
            old, new = target[start : start + _CHUNK], source[start : start + _CHUNK]
            new = new.to(device=old.device, dtype=old.dtype)
            self._mark(start, as_bits(old) != as_bits(new))
            old.copy_(new)

    def compare(self, known: torch.Tensor, current: torch.Tensor) -> None:
        """Set the bits of elements that differ between two flat tensors of integers."""
        for start in range(0, known.numel(), _CHUNK):
            self._mark(start, known[start : start + _CHUNK] != current[start : start + _CHUNK])

    def set_(self, places: torch.Tensor) -> None:
        """Set the bits of the elements at `places`, int64."""
        numel = 32 * self.words.numel()
        for start in range(0, numel, _CHUNK):
            chunk = torch.zeros(min(_CHUNK, numel - start), dtype=torch.bool, device=places.device)
            chunk[places[(places >= start) & (places < start + _CHUNK)] - start] = True
            self._mark(start, chunk)

    def _mark(self, start: int, changed: torch.Tensor) -> None:
        spare = -changed.numel() % 8
        if spare:
            changed = torch.nn.functional.pad(changed, (0, spare))
        packed = pack(changed)
        self.bytes[start // 8 : start // 8 + packed.numel()] |= packed
