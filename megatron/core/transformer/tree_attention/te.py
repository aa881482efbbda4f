"""Pass-through to a Transformer Engine whose own attention understands ``tree_metadata``."""

from __future__ import annotations

from megatron.core.transformer.tree_attention.case import TreeAttentionCase


def supports(case: TreeAttentionCase) -> str | None:
    """Needs a layer built on TE's attention, and a TE whose forward takes the metadata."""
    if not case.te_core:
        return "the layer's core attention is not Transformer Engine's (use a Transformer Engine layer spec)"
    from megatron.core.extensions import transformer_engine

    if not transformer_engine._TE_SUPPORTS_TREE_METADATA:
        return "tree_metadata requires TransformerEngine whose DotProductAttention.forward takes it"
    return None
