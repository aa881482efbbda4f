"""Qwen3, dense (``Qwen3ForCausalLM``)."""

from megatron.core.param_export.families.family import Family, register
from megatron.core.param_export.families.tables import (
    ATTENTION,
    MLP,
    MODEL,
    NORMS,
    OUTPUT_BIAS,
    QK_NORM,
    QKV_BIAS,
    always,
    attention_sizes,
    attribute,
)

register(
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        attention_sizes,
        MODEL + NORMS + ATTENTION + QK_NORM + QKV_BIAS + OUTPUT_BIAS + MLP,
        conditions={
            "qk_norm": always,
            "qkv_bias": attribute("attention_bias"),
            "output_bias": attribute("attention_bias"),
        },
    )
)
