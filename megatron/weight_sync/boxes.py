"""Boxes: how a piece of one tensor lies inside another.

A box is a small affine loop nest over *flat element indices*: for loop indices ``0 <= i_k < size[k]``,

    local element   local_offset + sum_k i_k * local_stride[k]
    full  element   full_offset  + sum_k i_k * full_stride[k]

Slices, axis permutations, transposes, the per-group interleaving of fused QKV weights and interleaved GLU
halves are all boxes. Strides and offsets count elements, and both tensors are contiguous.

Two uses: the parameter exporter maps shards of Megatron parameters to full Hugging Face tensors, and
receivers map Hugging Face tensors to an engine's fused and sharded live parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Box:
    """One affine piece. ``full_name`` names the full tensor; the local tensor is known from the context."""

    full_name: str
    size: tuple[int, ...]
    local_offset: int
    local_stride: tuple[int, ...]
    full_offset: int
    full_stride: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    def copy_to_full(self, local: torch.Tensor, full: torch.Tensor) -> None:
        """Write this box's elements of ``local`` into ``full``; both contiguous."""
        full.as_strided(self.size, self.full_stride, full.storage_offset() + self.full_offset).copy_(
            local.as_strided(self.size, self.local_stride, local.storage_offset() + self.local_offset)
        )

    def copy_to_local(self, full: torch.Tensor, local: torch.Tensor) -> None:
        """The inverse of :meth:`copy_to_full`."""
        local.as_strided(self.size, self.local_stride, local.storage_offset() + self.local_offset).copy_(
            full.as_strided(self.size, self.full_stride, full.storage_offset() + self.full_offset)
        )

    def map_to_full(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map flat local indices to flat full indices.

        Args:
            index: int64 [n], flat indices into the local tensor.

        Returns:
            ``(inside, mapped)``: bool [n], which of ``index`` lie in this box; int64 [inside.sum()], where.
        """
        inside, mapped = self.place_in_full(index)
        return inside, mapped[inside]

    def place_in_full(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As :meth:`map_to_full`, but all of ``index`` is mapped, so that the host need not wait to know how
        many lie inside; what is not inside goes to some wrong place."""
        local, full = (self.local_offset, self.local_stride), (self.full_offset, self.full_stride)
        return _map(index, self.size, *local, *full)

    def map_to_local(self, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The inverse of :meth:`map_to_full`."""
        local, full = (self.local_offset, self.local_stride), (self.full_offset, self.full_stride)
        inside, mapped = _map(index, self.size, *full, *local)
        return inside, mapped[inside]


def _map(index, size, offset, stride, to_offset, to_stride):
    """Peel the loops off in order of falling stride; what remains must be zero."""
    rest = index - offset
    inside = rest >= 0
    mapped = torch.full_like(index, to_offset)
    for k in sorted(range(len(size)), key=lambda k: -stride[k]):
        if size[k] == 1:
            continue
        i = rest.div(stride[k], rounding_mode="floor").clamp_(max=size[k] - 1)
        rest = rest - i * stride[k]
        mapped = mapped + i * to_stride[k]
    inside &= rest == 0
    return inside, mapped
