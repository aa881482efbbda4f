"""Qwen3, dense (``Qwen3ForCausalLM``)."""

from megatron.core.param_export.families.family import Family, Rule, register


def sizes(config):
    return {
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "q": config.num_attention_heads * config.head_dim,
        "kv": config.num_key_value_heads * config.head_dim,
        "head": config.head_dim,
        "ffn": config.intermediate_size,
    }


L = "model.layers.{layer}."

MODEL = (
    Rule("embed.weight", "model.embed_tokens.weight", "vocab hidden"),
    Rule("final_norm.weight", "model.norm.weight", "hidden"),
    Rule("lm_head.weight", "lm_head.weight", "vocab hidden", when="untied"),
)
ATTENTION = (
    Rule("attn_norm.weight", L + "input_layernorm.weight", "hidden"),
    Rule("attn.q.weight", L + "self_attn.q_proj.weight", "q hidden"),
    Rule("attn.k.weight", L + "self_attn.k_proj.weight", "kv hidden"),
    Rule("attn.v.weight", L + "self_attn.v_proj.weight", "kv hidden"),
    Rule("attn.q_norm.weight", L + "self_attn.q_norm.weight", "head"),
    Rule("attn.k_norm.weight", L + "self_attn.k_norm.weight", "head"),
    Rule("attn.o.weight", L + "self_attn.o_proj.weight", "hidden q"),
    Rule("mlp_norm.weight", L + "post_attention_layernorm.weight", "hidden"),
)
MLP = (
    Rule("mlp.gate.weight", L + "mlp.gate_proj.weight", "ffn hidden"),
    Rule("mlp.up.weight", L + "mlp.up_proj.weight", "ffn hidden"),
    Rule("mlp.down.weight", L + "mlp.down_proj.weight", "hidden ffn"),
)

register(Family("qwen3", sizes, MODEL + ATTENTION + MLP))
