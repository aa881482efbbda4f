"""gpt-oss (``GptOssForCausalLM``) in bf16: sinks, biases, and experts stacked, transposed and interleaved.

``gate_up_proj`` is [experts, hidden, 2 * ffn] with gate and up columns in turn; ``down_proj`` is
[experts, ffn, hidden]. The released mxfp4 blocks and scales are another format, which is not exported.
"""

from megatron.core.param_export.families.family import Family, Rule, register
from megatron.core.param_export.families.tables import (
    ATTENTION,
    MODEL,
    NORMS,
    OUTPUT_BIAS,
    QKV_BIAS,
    L,
    always,
    attention_sizes,
    attribute,
    first_of,
)

SINKS = (Rule("attn.sinks", L + "self_attn.sinks", "heads"),)
EXPERTS = (
    Rule("moe.router.weight", L + "mlp.router.weight", "experts hidden"),
    Rule("moe.router.bias", L + "mlp.router.bias", "experts"),
    Rule("moe.experts.gate.weight", L + "mlp.experts.gate_up_proj", "experts hidden 2*ffn", "e c 2*r"),
    Rule("moe.experts.up.weight", L + "mlp.experts.gate_up_proj", "experts hidden 2*ffn", "e c 2*r+1"),
    Rule("moe.experts.gate.bias", L + "mlp.experts.gate_up_proj_bias", "experts 2*ffn", "e 2*r"),
    Rule("moe.experts.up.bias", L + "mlp.experts.gate_up_proj_bias", "experts 2*ffn", "e 2*r+1"),
    Rule("moe.experts.down.weight", L + "mlp.experts.down_proj", "experts ffn hidden", "e c r"),
    Rule("moe.experts.down.bias", L + "mlp.experts.down_proj_bias", "experts hidden", "e r"),
)


def sizes(config):
    return attention_sizes(config) | {"experts": first_of(config, "num_local_experts", "num_experts")}


register(
    Family(
        "gpt_oss",
        "GptOssForCausalLM",
        sizes,
        MODEL + NORMS + ATTENTION + QKV_BIAS + OUTPUT_BIAS + SINKS + EXPERTS,
        conditions={"qkv_bias": attribute("attention_bias"), "output_bias": attribute("attention_bias")},
        is_moe=always,
    )
)
