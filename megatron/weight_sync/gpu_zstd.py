"""zstandard frames made on a GPU by nvCOMP (``pip install nvidia-nvcomp-cu13`` or ``-cu12``), if installed.

Only compression: every receiver reads the frames with zstandard. nvCOMP would allocate what a frame states
before anything can be checked, and receivers must answer any bytes whatever.
"""

from __future__ import annotations

import functools

import torch

_FRAME = 1 << 17  # bytes of content of one frame: zstandard's largest block; frames are made in parallel
_ALIGN = 16  # of the addresses that nvCOMP reads


@functools.cache
def nvcomp():
    """The module, or None."""
    try:
        from nvidia import nvcomp
    except ImportError:
        return None
    return nvcomp


def compress(plane: torch.Tensor, library, stream: int) -> torch.Tensor:
    """uint8 [n], n > 0 → frames end to end, uint8, on the same device.

    Args:
        library: :func:`nvcomp`.
        stream: the CUDA stream on which the plane is made, as a number.

    Raises:
        RuntimeError: this nvCOMP does not state the content's size in its frames, which the format asks for.
    """
    import zstandard

    if plane.data_ptr() % _ALIGN:
        plane = plane.clone()
    offsets = list(range(0, plane.numel(), _FRAME))
    sizes = [min(_FRAME, plane.numel() - offset) for offset in offsets]
    raw = library.BitstreamKind.RAW  # nothing around the frames
    device = {} if plane.device.index is None else {"device_id": plane.device.index}
    codec = library.Codec(algorithm="zstd", bitstream_kind=raw, cuda_stream=stream, **device)
    made = codec.encode(library.as_arrays(plane, offsets, sizes, stream))
    frames = [torch.as_tensor(made[k], device=plane.device).view(torch.uint8) for k in range(len(made))]
    head = frames[0][:18].cpu().numpy().tobytes()
    if zstandard.frame_content_size(head) != sizes[0]:
        name = f"nvCOMP {getattr(library, '__version__', '')}"
        raise RuntimeError(
            f"{name} does not state in a zstandard frame how much it holds: uninstall it, or leave 'entropy' "
            "out of the encodings"
        )
    return torch.cat(frames)
