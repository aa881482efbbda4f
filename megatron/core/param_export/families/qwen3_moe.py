"""Qwen3 with routed experts (``Qwen3MoeForCausalLM``)."""

from megatron.core.param_export.families.family import Family, register
from megatron.core.param_export.families.tables import (
    ATTENTION,
    EXPERTS,
    MLP,
    MODEL,
    NORMS,
    OUTPUT_BIAS,
    QK_NORM,
    QKV_BIAS,
    ROUTER,
    always,
    attention_sizes,
    attribute,
    first_of,
)


def sizes(config):
    experts = first_of(config, "num_experts", "num_local_experts")
    return attention_sizes(config) | {"experts": experts, "moe_ffn": config.moe_intermediate_size}


def is_moe(config, layer):
    return layer not in (config.mlp_only_layers or ()) and (layer + 1) % config.decoder_sparse_step == 0


register(
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        sizes,
        MODEL + NORMS + ATTENTION + QK_NORM + QKV_BIAS + OUTPUT_BIAS + MLP + ROUTER + EXPERTS,
        conditions={
            "qk_norm": always,
            "qkv_bias": attribute("attention_bias"),
            "output_bias": attribute("attention_bias"),
        },
        is_moe=is_moe,
    )
)
