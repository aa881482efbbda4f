"""Llama 2 and 3 (``LlamaForCausalLM``)."""

from megatron.core.param_export.families.family import Family, register
from megatron.core.param_export.families.tables import (
    ATTENTION,
    MLP,
    MLP_BIAS,
    MODEL,
    NORMS,
    OUTPUT_BIAS,
    QKV_BIAS,
    attention_sizes,
    attribute,
)

register(
    Family(
        "llama",
        "LlamaForCausalLM",
        attention_sizes,
        MODEL + NORMS + ATTENTION + QKV_BIAS + OUTPUT_BIAS + MLP + MLP_BIAS,
        conditions={
            "qkv_bias": attribute("attention_bias"),
            "output_bias": attribute("attention_bias"),
            "mlp_bias": attribute("mlp_bias"),
        },
    )
)
