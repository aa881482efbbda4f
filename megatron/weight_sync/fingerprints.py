"""Order-independent 64-bit fingerprints of named tensors.

The fingerprint of a tensor is, modulo 2**64,

    sum over its elements of  mix((name_id + flat_index * G) xor (bits * C))

``name_id``     the first 8 bytes, little-endian, of BLAKE2b-64 of the UTF-8 name;
``flat_index``  the element's index in the full, contiguous tensor;
``bits``        the element's bit pattern, zero-extended (-0.0 and 0.0 differ, NaN payloads count);
``mix``         the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014; variant 13 of Stafford).

A sum does not depend on order, so every rank of either side computes its share from its own shards (through
:class:`~megatron.weight_sync.boxes.Box`) and the shares are added. All arithmetic is int64 with wraparound,
on the tensor's own device, in chunks: nothing of the tensor's size is allocated.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping

import torch

from megatron.weight_sync.boxes import Box

MODULUS = 1 << 64
_CHUNK_CPU = 1 << 15  # int64 elements: two buffers of this size stay in a core's L2 cache
_CHUNK_CUDA = 1 << 24


def signed(value: int) -> int:
    """A residue modulo 2**64 as the int64 that has the same bits."""
    value %= MODULUS
    return value - MODULUS if value >= MODULUS >> 1 else value


G = signed(0x9E3779B97F4A7C15)
C = signed(0xD1342543DE82EF95)
M1 = signed(0xBF58476D1CE4E5B9)
M2 = signed(0x94D049BB133111EB)

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def name_id(name: str) -> int:
    """The 64-bit id of a tensor name, as a signed int64."""
    return signed(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little"))


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bit patterns of ``tensor`` as integers of the same size; a view."""
    return tensor.detach().view(_BITS[tensor.element_size()])


def _mix_sum(z: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finaliser over ``z``, in place, summed; ``t`` is scratch. Shifts are logical: int64 shifts
    are arithmetic, so the copies of the sign bit are masked off."""
    for shift, factor in ((30, M1), (27, M2), (31, None)):
        torch.bitwise_right_shift(z, shift, out=t)
        z.bitwise_xor_(t.bitwise_and_((1 << (64 - shift)) - 1))
        if factor is not None:
            z.mul_(factor)
    return z.sum()


def _widen(bits: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    out.copy_(bits)
    if bits.element_size() in (2, 4):
        out.bitwise_and_((1 << (8 * bits.element_size())) - 1)
    return out


def _sum_affine(bits: torch.Tensor, start: int, stride: tuple[int, ...], chunk: int) -> torch.Tensor:
    """Fingerprint share of the n-dimensional view ``bits`` whose element at i has key
    ``start + sum_k i_k * stride[k]`` (keys already multiplied by G)."""
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    if bits.numel() == 0:
        return total
    if bits.dim() == 0:
        bits, stride = bits.reshape(1), (0,)
    inner = bits.numel() // bits.shape[0]
    if inner > chunk:
        for i in range(bits.shape[0]):
            total += _sum_affine(bits[i], start + i * stride[0], stride[1:], chunk)
        return total
    rows = min(max(1, chunk // inner), bits.shape[0])
    key = torch.zeros((), dtype=torch.int64, device=bits.device)
    for size, step in zip((rows, *bits.shape[1:]), stride, strict=True):
        axis = torch.arange(size, dtype=torch.int64, device=bits.device).mul_(signed(step))
        key = key.unsqueeze(-1) + axis
    z, t = torch.empty_like(key), torch.empty_like(key)
    for row in range(0, bits.shape[0], rows):
        piece = bits[row : row + rows]
        zc, tc = z[: len(piece)], t[: len(piece)]
        _widen(piece, tc).mul_(C)
        torch.add(key[: len(piece)], signed(start + row * stride[0]), out=zc)
        total += _mix_sum(zc.bitwise_xor_(tc), tc)
    return total


def _chunk(tensor: torch.Tensor) -> int:
    return _CHUNK_CPU if tensor.device.type == "cpu" else _CHUNK_CUDA


def kernels_for(tensor: torch.Tensor):
    """The Triton kernels where they can read ``tensor``, else None: then plain torch does it, anywhere."""
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not (tensor.device.type == "cuda" or interpreted) or tensor.element_size() not in (1, 2, 4, 8):
        return None
    try:
        from megatron.weight_sync import kernels
    except ImportError:
        return None
    return kernels


def tensor_sum(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Fingerprint of a whole tensor under ``name``: int64 [], on the tensor's device, not synchronised."""
    stride = torch.empty(tensor.shape, device="meta").stride()
    if tensor.is_contiguous():
        tensor, stride = tensor.view(-1), (1,)
        kernels = kernels_for(tensor)
        if kernels is not None and tensor.numel():
            return kernels.BoxSums([(tensor.detach(), Box(name, (tensor.numel(),), 0, (1,), 0, (1,)))])()[0]
    return _sum_affine(bits_of(tensor), name_id(name), tuple(s * G for s in stride), _chunk(tensor))


def box_sum(local: torch.Tensor, box: Box) -> torch.Tensor:
    """Share of one box: its elements of ``local`` (contiguous), keyed by where they lie in the full
    tensor."""
    view = local.detach().as_strided(box.size, box.local_stride, local.storage_offset() + box.local_offset)
    start = name_id(box.full_name) + box.full_offset * G
    return _sum_affine(bits_of(view), start, tuple(s * G for s in box.full_stride), _chunk(local))


def fingerprint(
    named_tensors: Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor],
) -> dict[str, int]:
    """Per-tensor fingerprints of full tensors.

    Args:
        named_tensors: (name, tensor) pairs or a mapping; any dtype of 1, 2, 4 or 8 bytes, any device.

    Returns:
        name → residue modulo 2**64. One device synchronisation in all.
    """
    if isinstance(named_tensors, Mapping):
        named_tensors = named_tensors.items()
    names, sums = [], []
    fast: list[tuple[str, torch.Tensor]] = []
    for name, tensor in named_tensors:
        if tensor.is_contiguous() and kernels_for(tensor) is not None:
            fast.append((name, tensor.detach().view(-1)))
            continue
        names.append(name)
        sums.append(tensor_sum(name, tensor))
    whole = [(flat, Box(name, (flat.numel(),), 0, (1,), 0, (1,))) for name, flat in fast]
    return add(_collect(names, sums), _fast_boxes(whole))


def _fast_boxes(pieces: list[tuple[torch.Tensor, Box]]) -> dict[str, int]:
    """By kernels, one launch per device."""
    by_device: dict[torch.device, list[tuple[torch.Tensor, Box]]] = {}
    for live, box in pieces:
        by_device.setdefault(live.device, []).append((live, box))
    shares = []
    for found in by_device.values():
        sums = kernels_for(found[0][0]).BoxSums(found)().tolist()
        shares += [{box.full_name: value % MODULUS} for (_, box), value in zip(found, sums, strict=True)]
    return add(*shares)


def fingerprint_boxes(pieces: Iterable[tuple[torch.Tensor, Iterable[Box]]]) -> dict[str, int]:
    """This rank's share of the fingerprints of full tensors.

    Args:
        pieces: (local contiguous tensor, its boxes) pairs. Each element of a full tensor must lie in one box
            of one rank; the shares of all ranks then add up (:func:`add`, :func:`all_reduce`) to
            :func:`fingerprint` of the full tensors.
    """
    names, sums, fast = [], [], []
    for local, boxes in pieces:
        kernels = kernels_for(local)
        for box in boxes:
            if kernels is not None and kernels.few_loops(box):
                fast.append((local.detach(), box))
                continue
            names.append(box.full_name)
            sums.append(box_sum(local, box))
    return add(_collect(names, sums), _fast_boxes(fast))


def _collect(names: list[str], sums: list[torch.Tensor]) -> dict[str, int]:
    out: dict[str, int] = {}
    by_device: dict[torch.device, list[int]] = {}
    for i, value in enumerate(sums):
        by_device.setdefault(value.device, []).append(i)
    host: dict[int, int] = {}
    for rows in by_device.values():
        host.update(zip(rows, torch.stack([sums[i] for i in rows]).tolist(), strict=True))
    for i, name in enumerate(names):
        out[name] = (out.get(name, 0) + host[i]) % MODULUS
    return out


def add(*shares: Mapping[str, int]) -> dict[str, int]:
    """Shares of several ranks, added per tensor."""
    out: dict[str, int] = {}
    for share in shares:
        for name, value in share.items():
            out[name] = (out.get(name, 0) + value) % MODULUS
    return out


def total(sums: Mapping[str, int]) -> int:
    """One number for the whole model."""
    return sum(sums.values()) % MODULUS


def all_reduce(sums: Mapping[str, int], names: Iterable[str], group=None, device="cpu") -> dict[str, int]:
    """Add the shares of all ranks of ``group``: one collective of 8 bytes per name.

    Args:
        sums: this rank's share; names without a share count as zero.
        names: every tensor of the model, in the same order on every rank.
        device: where the backend wants its tensor ("cuda" for NCCL).
    """
    names = list(names)
    unknown = sorted(set(sums) - set(names))
    if unknown:
        raise ValueError(f"shares of tensors that are not in names: {unknown[:10]}")
    values = torch.tensor([signed(sums.get(name, 0)) for name in names], dtype=torch.int64, device=device)
    torch.distributed.all_reduce(values, group=group)
    return {name: value % MODULUS for name, value in zip(names, values.tolist(), strict=True)}


def word_sum(data: torch.Tensor) -> torch.Tensor:
    """64-bit checksum of bytes: uint8 [n] → int64 [].

    The sum of ``mix((n + i * G) xor (w_i * C))`` over the little-endian 64-bit words of the bytes, the last
    one padded with zeros. It finds damage; it is no defence against an adversary.
    """
    n = data.numel()
    whole = n // 8 * 8
    body = data[:whole]
    if body.data_ptr() % 8:
        body = body.clone()
    kernels = kernels_for(body)
    if kernels is not None and whole:
        total = kernels.words_sum(body, n)
    else:
        total = _sum_affine(body.view(torch.int64), n, (G,), _chunk(data))
    if whole < n:
        tail = torch.zeros(8, dtype=torch.uint8, device=data.device)
        tail[: n - whole] = data[whole:]
        total = total + _sum_affine(tail.view(torch.int64), n + whole // 8 * G, (G,), _chunk(data))
    return total
