"""Attention over a packed trie: one interface, several backends, chosen once per case.

Shapes: T packed tokens, H query heads, Hkv key/value heads, D query/key head size, Dv value head size.
"""

from megatron.core.transformer.tree_attention.case import TreeAttentionCase, TreeUnsupportedError
from megatron.core.transformer.tree_attention.dispatch import (
    BACKENDS,
    check_backend_name,
    select_backend,
    tree_attention,
    tree_core_attention,
)
from megatron.core.transformer.tree_attention.refusals import refuse_labels, refuse_unsupported_model

__all__ = [
    "BACKENDS",
    "TreeAttentionCase",
    "TreeUnsupportedError",
    "check_backend_name",
    "refuse_labels",
    "refuse_unsupported_model",
    "select_backend",
    "tree_attention",
    "tree_core_attention",
]
