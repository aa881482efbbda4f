"""GLM-4.5 and 4.6 (``Glm4MoeForCausalLM``): grouped queries, shared experts, expert bias, MTP layers."""

from megatron.core.param_export.families.family import Family, register
from megatron.core.param_export.families.tables import (
    ATTENTION,
    EXPERT_BIAS,
    EXPERTS,
    MLP,
    MODEL,
    MTP,
    NORMS,
    QK_NORM,
    QKV_BIAS,
    ROUTER,
    SHARED_EXPERTS,
    after_dense_layers,
    attention_sizes,
    attribute,
    prediction_layers,
)


def sizes(config):
    return attention_sizes(config) | {
        "experts": config.n_routed_experts,
        "moe_ffn": config.moe_intermediate_size,
        "shared_ffn": config.moe_intermediate_size * config.n_shared_experts,
    }


register(
    Family(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        sizes,
        MODEL
        + NORMS
        + MTP
        + ATTENTION
        + QK_NORM
        + QKV_BIAS
        + MLP
        + ROUTER
        + EXPERT_BIAS
        + EXPERTS
        + SHARED_EXPERTS,
        conditions={"qk_norm": attribute("use_qk_norm"), "qkv_bias": attribute("attention_bias")},
        is_moe=after_dense_layers,
        mtp_depths=prediction_layers,
    )
)
