"""Rules that several families share, and readers of their configurations."""

from __future__ import annotations

from megatron.core.param_export.families.family import Rule

L = "model.layers.{layer}."

MODEL = (
    Rule("embed.weight", "model.embed_tokens.weight", "vocab hidden"),
    Rule("final_norm.weight", "model.norm.weight", "hidden"),
    Rule("lm_head.weight", "lm_head.weight", "vocab hidden", when="untied"),
)
NORMS = (
    Rule("attn_norm.weight", L + "input_layernorm.weight", "hidden"),
    Rule("mlp_norm.weight", L + "post_attention_layernorm.weight", "hidden"),
)
ATTENTION = (
    Rule("attn.q.weight", L + "self_attn.q_proj.weight", "q hidden"),
    Rule("attn.k.weight", L + "self_attn.k_proj.weight", "kv hidden"),
    Rule("attn.v.weight", L + "self_attn.v_proj.weight", "kv hidden"),
    Rule("attn.o.weight", L + "self_attn.o_proj.weight", "hidden q"),
)
QKV_BIAS = (
    Rule("attn.q.bias", L + "self_attn.q_proj.bias", "q", when="qkv_bias"),
    Rule("attn.k.bias", L + "self_attn.k_proj.bias", "kv", when="qkv_bias"),
    Rule("attn.v.bias", L + "self_attn.v_proj.bias", "kv", when="qkv_bias"),
)
OUTPUT_BIAS = (Rule("attn.o.bias", L + "self_attn.o_proj.bias", "hidden", when="output_bias"),)
QK_NORM = (
    Rule("attn.q_norm.weight", L + "self_attn.q_norm.weight", "head", when="qk_norm"),
    Rule("attn.k_norm.weight", L + "self_attn.k_norm.weight", "head", when="qk_norm"),
)
MLP = (
    Rule("mlp.gate.weight", L + "mlp.gate_proj.weight", "ffn hidden", when="dense"),
    Rule("mlp.up.weight", L + "mlp.up_proj.weight", "ffn hidden", when="dense"),
    Rule("mlp.down.weight", L + "mlp.down_proj.weight", "hidden ffn", when="dense"),
)
MLP_BIAS = (
    Rule("mlp.gate.bias", L + "mlp.gate_proj.bias", "ffn", when="mlp_bias"),
    Rule("mlp.up.bias", L + "mlp.up_proj.bias", "ffn", when="mlp_bias"),
    Rule("mlp.down.bias", L + "mlp.down_proj.bias", "hidden", when="mlp_bias"),
)
ROUTER = (Rule("moe.router.weight", L + "mlp.gate.weight", "experts hidden", when="moe"),)
EXPERT_BIAS = (Rule("moe.expert_bias", L + "mlp.gate.e_score_correction_bias", "experts", when="moe"),)
EXPERTS = (
    Rule(
        "moe.experts.gate.weight", L + "mlp.experts.{expert}.gate_proj.weight", "moe_ffn hidden", when="moe"
    ),
    Rule("moe.experts.up.weight", L + "mlp.experts.{expert}.up_proj.weight", "moe_ffn hidden", when="moe"),
    Rule(
        "moe.experts.down.weight", L + "mlp.experts.{expert}.down_proj.weight", "hidden moe_ffn", when="moe"
    ),
)
SHARED_EXPERTS = (
    Rule(
        "moe.shared.gate.weight", L + "mlp.shared_experts.gate_proj.weight", "shared_ffn hidden", when="moe"
    ),
    Rule("moe.shared.up.weight", L + "mlp.shared_experts.up_proj.weight", "shared_ffn hidden", when="moe"),
    Rule(
        "moe.shared.down.weight", L + "mlp.shared_experts.down_proj.weight", "hidden shared_ffn", when="moe"
    ),
)
# Checkpoints also repeat the embedding and the head in every prediction layer; those copies are not exported.
MTP = (
    Rule("mtp.enorm.weight", L + "enorm.weight", "hidden", layers="mtp"),
    Rule("mtp.hnorm.weight", L + "hnorm.weight", "hidden", layers="mtp"),
    Rule("mtp.eh_proj.weight", L + "eh_proj.weight", "hidden 2*hidden", layers="mtp"),
    Rule("mtp.final_norm.weight", L + "shared_head.norm.weight", "hidden", layers="mtp"),
)


def attention_sizes(config) -> dict[str, int]:
    """Sizes of grouped-query attention and a dense MLP."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "head": head,
        "heads": config.num_attention_heads,
        "groups": config.num_key_value_heads,
        "q": config.num_attention_heads * head,
        "kv": config.num_key_value_heads * head,
        "ffn": config.intermediate_size,
    }


def first_of(config, *names: str):
    """The first of these attributes that the configuration has (they were renamed over the years)."""
    for name in names:
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    raise ValueError(f"{type(config).__name__} has none of {', '.join(names)}")


def always(config, layer) -> bool:
    return True


def attribute(name: str):
    """A condition: the configuration's attribute of this name is true."""
    return lambda config, layer: bool(getattr(config, name, False))


def after_dense_layers(config, layer) -> bool:
    """Routed experts from layer ``first_k_dense_replace`` on."""
    return layer >= config.first_k_dense_replace


def prediction_layers(config) -> int:
    """Multi-token prediction layers of the checkpoint."""
    return getattr(config, "num_nextn_predict_layers", 0) or 0
