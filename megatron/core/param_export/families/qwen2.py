"""Qwen2 and Qwen2.5, dense (``Qwen2ForCausalLM``): biases on query, key and value, none on the output."""

from megatron.core.param_export.families.family import Family, register
from megatron.core.param_export.families.tables import (
    ATTENTION,
    MLP,
    MODEL,
    NORMS,
    QKV_BIAS,
    always,
    attention_sizes,
)

register(
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        attention_sizes,
        MODEL + NORMS + ATTENTION + QKV_BIAS + MLP,
        conditions={"qkv_bias": always},
    )
)
