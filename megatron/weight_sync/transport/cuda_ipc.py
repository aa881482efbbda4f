"""Payloads for an engine in another process on the same GPU, by CUDA IPC: no bytes are copied.

NCCL cannot join two ranks that share a GPU. Here the sender passes handles to its containers, which are small
enough for any channel (a pipe, ZeroMQ, HTTP), and keeps the payload until the receiver has answered.

Restrictions, from CUDA: both processes see the same physical GPU; the memory must not come from expandable
segments (``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``) on drivers without fabric handles.
"""

from __future__ import annotations

import base64

import torch

from megatron.weight_sync.errors import CorruptPayload
from megatron.weight_sync.payload import Payload

_HANDLE = ("handle", "counter_handle", "event_handle")


def export_payload(payload: Payload) -> list[dict]:
    """Handles of a payload's containers, JSON values only, in the order of ``payload.containers()``.

    The payload's containers move to the current GPU if they are not on one. Keep ``payload`` alive until the
    receiver has answered; after that its memory may be used again.

    Raises:
        RuntimeError: no CUDA device.
    """
    _require_cuda()
    payload.buckets = [piece if piece.is_cuda else piece.cuda() for piece in payload.buckets]
    payload.manifest = payload.manifest if payload.manifest.is_cuda else payload.manifest.cuda()
    return [share(piece) for piece in payload.containers()]


def import_containers(handles: list[dict]) -> list[torch.Tensor]:
    """Containers behind handles: uint8 tensors in the sender's memory, to be passed to ``Receiver.apply``.

    Drop them before answering.

    Raises:
        CorruptPayload: not what :func:`export_payload` made.
        RuntimeError: the sender's GPU is not visible here.
    """
    return [open_shared(item) for item in handles]


def share(tensor: torch.Tensor) -> dict:
    """The handle of a uint8 tensor on a GPU, JSON values only. What was written to it before is there for the
    other side."""
    _require_cuda()
    torch.cuda.synchronize(tensor.device)
    shared = tensor.untyped_storage()._share_cuda_()
    _, handle, size, offset, counter, counter_offset, event, needs_event = shared
    raw = {"handle": handle, "counter_handle": counter, "event_handle": event}
    return {
        **{name: base64.b64encode(value).decode() for name, value in raw.items()},
        "gpu": str(torch.cuda.get_device_properties(tensor.device).uuid),
        "storage_bytes": size,
        "storage_offset": offset,
        "counter_offset": counter_offset,
        "event": bool(needs_event),
        "begin": tensor.storage_offset(),
        "bytes": tensor.numel(),
    }


def open_shared(item: dict) -> torch.Tensor:
    """The tensor behind a handle, in the sender's memory."""
    try:
        raw = {name: base64.b64decode(item[name], validate=True) for name in _HANDLE}
        numbers = [item[k] for k in ("storage_bytes", "storage_offset", "counter_offset", "begin", "bytes")]
        if any(type(n) is not int or n < 0 for n in numbers):
            raise ValueError("a size is not a number")
        gpu, needs_event = item["gpu"], bool(item["event"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptPayload(f"not a CUDA IPC handle: {error}") from None
    storage_bytes, storage_offset, counter_offset, begin, nbytes = numbers
    if begin + nbytes > storage_bytes:
        raise CorruptPayload("a CUDA IPC handle describes more bytes than its storage has")
    _require_cuda()
    count = torch.cuda.device_count()
    devices = {str(torch.cuda.get_device_properties(i).uuid): i for i in range(count)}
    if gpu not in devices:
        raise RuntimeError(f"the sender's GPU {gpu} is not visible here ({sorted(devices)})")
    storage = torch.UntypedStorage._new_shared_cuda(
        devices[gpu],
        raw["handle"],
        storage_bytes,
        storage_offset,
        raw["counter_handle"],
        counter_offset,
        raw["event_handle"],
        needs_event,
    )
    flat = torch.empty(0, dtype=torch.uint8, device=f"cuda:{devices[gpu]}").set_(storage)
    return flat[begin : begin + nbytes]


def _require_cuda() -> None:
    if not torch.cuda.is_available():
        raise RuntimeError("CUDA IPC needs a CUDA device")
