"""What one attention call asks of a backend, apart from the numbers in its tensors.

A backend is a module of this package with

- ``supports(case) -> str | None``: None, or the reason why it cannot serve, as the end of the sentence
  "backend X cannot serve because ...". It must not import anything heavy or optional.
- ``attend(q, k, v, metadata, *, softmax_scale, window, sink, softcap) -> out``, q [T, H, D],
  k [T, Hkv, D], v [T, Hkv, Dv], sink [H] or None, out [T, H, Dv] in the dtype of q: differentiable in q, k, v
  and sink. It works for any T and keeps its buffers with ``metadata.cached``. Optional packages are imported
  in here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


class TreeUnsupportedError(NotImplementedError, ValueError):
    """A tree pack reached something that cannot compute it exactly. Names the cause and the way out.

    Also a ValueError, like the refusals of packs that are wrong in themselves.
    """


@dataclass(frozen=True)
class TreeAttentionCase:
    """Hashable, and free of the pack's own sizes, so that selection runs once and not per micro-batch."""

    device_type: str
    """"cpu", "cuda", ..."""

    capability: tuple[int, int] | None
    """CUDA compute capability, None elsewhere."""

    dtype: torch.dtype
    """Common dtype of q, k and v."""

    heads: int
    """H, on this tensor-parallel rank."""

    kv_heads: int
    """Hkv, on this tensor-parallel rank; divides H."""

    qk_dim: int
    """D."""

    v_dim: int
    """Dv."""

    window: int | None = None
    """A query attends to keys at most this many positions back on its path; None is no window."""

    sink: bool = False
    """Whether one more logit per head stands in the softmax denominator."""

    softcap: bool = False
    """Whether logits are capped with softcap * tanh(logit / softcap)."""

    needs_grad: bool = True
    """Whether backward will be asked for."""

    deterministic: bool = False
    """Whether equal inputs must give equal bits, backward included."""

    te_core: bool = False
    """Whether the layer's own core attention is Transformer Engine's: a pack can be passed through."""

    def __str__(self) -> str:
        device = self.device_type + ("" if self.capability is None else " sm{}{}".format(*self.capability))
        extra = [f"window {self.window}"] if self.window is not None else []
        extra += [name for name in ("sink", "softcap", "deterministic") if getattr(self, name)]
        return ", ".join(
            [
                device,
                str(self.dtype).removeprefix("torch."),
                f"{self.heads} heads over {self.kv_heads}",
                f"head size {self.qk_dim}" + (f"/{self.v_dim}" if self.v_dim != self.qk_dim else ""),
                *extra,
            ]
        )
