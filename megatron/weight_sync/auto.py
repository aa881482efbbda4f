"""Which encoding is fastest from end to end, given how fast the link is and what encoding and decoding cost
here."""

from __future__ import annotations

import functools
import logging
import time

import torch

from megatron.weight_sync import codec

logger = logging.getLogger(__name__)

_CHANGES = 1 << 18
_DENSITY = 0.01


@functools.cache
def costs(device: str) -> dict[str, tuple[float, float]]:
    """Encoding → (seconds per change to encode and decode on ``device``, bytes per change), measured once on
    uniform changes of 1 % of a bf16 tensor."""
    gen = torch.Generator().manual_seed(1)
    numel = round(_CHANGES / _DENSITY)
    index = torch.randint(0, numel, (_CHANGES,), generator=gen).unique().to(device)
    bits = torch.randint(-(1 << 15), 1 << 15, index.shape, generator=gen).to(torch.int16).to(device)
    distance = torch.randint(0, 2, index.shape, generator=gen).mul_(2).sub_(1).to(torch.int16).to(device)
    out = {}
    for encoding in codec.ENCODINGS:
        if encoding == "entropy" and not codec.has_zstandard():
            continue
        times = []
        for _ in range(3):
            begin = _clock(device)
            parts, head = codec.encode_group(index, bits, distance, numel, 8, (encoding,))
            size = sum(part.numel() * part.element_size() for part in parts.values())
            codec.decode_group(head, parts, numel, 2, numel)
            times.append(_clock(device) - begin)
        out[encoding] = min(times) / len(index), size / len(index)
    return out


def _clock(device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


def fastest(link: float, device: str = "cpu") -> str:
    """The encoding with the least time to encode, send and decode.

    Args:
        link: bytes per second between sender and receivers.
        device: where changes are encoded and decoded.
    """
    if not link > 0:
        raise ValueError(f"a link has a speed in bytes per second, got {link}")
    took = {name: seconds + size / link for name, (seconds, size) in costs(device).items()}
    return min(took, key=took.get)


class Chooser:
    """Keeps an estimate of the link's speed and picks encodings by it; logs every choice once.

    Args:
        link: bytes per second; None learns it from deliveries (:meth:`observe`).
    """

    def __init__(self, link: float | None):
        self._given = link is not None
        self.link = link
        self._last: tuple[str, ...] | None = None

    def observe(self, nbytes: int, seconds: float) -> None:
        """A delivery took that long; its applying is part of it, so the estimate is on the slow side."""
        if self._given or seconds <= 0 or nbytes < 1 << 16:
            return
        speed = nbytes / seconds
        self.link = speed if self.link is None else 0.5 * (self.link + speed)

    def pick(self, device: str) -> tuple[str, ...]:
        if self.link is None:
            picked = ("raw", "packed")
        else:
            picked = (fastest(self.link, device),)
        if picked != self._last:
            self._last = picked
            logger.info("weight sync encodes %s (link: %s bytes/s)", "+".join(picked), self.link or "unknown")
        return picked
