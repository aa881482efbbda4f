"""DeepSeek-V3 and R1 (``DeepseekV3ForCausalLM``): latent attention, shared experts, expert bias, MTP."""

from megatron.core.param_export.families.family import Family, Rule, register
from megatron.core.param_export.families.tables import (
    EXPERT_BIAS,
    EXPERTS,
    MLP,
    MODEL,
    MTP,
    NORMS,
    ROUTER,
    SHARED_EXPERTS,
    L,
    after_dense_layers,
    prediction_layers,
)

LATENT_ATTENTION = (
    Rule("attn.q.weight", L + "self_attn.q_proj.weight", "q hidden", when="whole_query"),
    Rule("attn.q_down.weight", L + "self_attn.q_a_proj.weight", "q_lora hidden", when="low_rank_query"),
    Rule("attn.q_down_norm.weight", L + "self_attn.q_a_layernorm.weight", "q_lora", when="low_rank_query"),
    Rule("attn.q_up.weight", L + "self_attn.q_b_proj.weight", "q q_lora", when="low_rank_query"),
    Rule("attn.kv_down.weight", L + "self_attn.kv_a_proj_with_mqa.weight", "kv_lora+rope hidden"),
    Rule("attn.kv_down_norm.weight", L + "self_attn.kv_a_layernorm.weight", "kv_lora"),
    Rule("attn.kv_up.weight", L + "self_attn.kv_b_proj.weight", "kv_up kv_lora"),
    Rule("attn.o.weight", L + "self_attn.o_proj.weight", "hidden o"),
)


def sizes(config):
    heads, nope, rope = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    return {
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "ffn": config.intermediate_size,
        "q": heads * (nope + rope),
        "q_lora": config.q_lora_rank or 0,
        "kv_lora": config.kv_lora_rank,
        "rope": rope,
        "kv_up": heads * (nope + config.v_head_dim),
        "o": heads * config.v_head_dim,
        "experts": config.n_routed_experts,
        "moe_ffn": config.moe_intermediate_size,
        "shared_ffn": config.moe_intermediate_size * config.n_shared_experts,
    }


register(
    Family(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        sizes,
        MODEL + NORMS + MTP + LATENT_ATTENTION + MLP + ROUTER + EXPERT_BIAS + EXPERTS + SHARED_EXPERTS,
        conditions={
            "whole_query": lambda config, layer: config.q_lora_rank is None,
            "low_rank_query": lambda config, layer: config.q_lora_rank is not None,
        },
        is_moe=after_dense_layers,
        mtp_depths=prediction_layers,
    )
)
