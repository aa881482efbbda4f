"""Mixtral (``MixtralForCausalLM``): w1 gate, w3 up, w2 down."""

from megatron.core.param_export.families.family import Family, Rule, register
from megatron.core.param_export.families.tables import (
    ATTENTION,
    MODEL,
    NORMS,
    L,
    always,
    attention_sizes,
    first_of,
)

EXPERT = L + "block_sparse_moe.experts.{expert}."

EXPERTS = (
    Rule("moe.router.weight", L + "block_sparse_moe.gate.weight", "experts hidden"),
    Rule("moe.experts.gate.weight", EXPERT + "w1.weight", "ffn hidden"),
    Rule("moe.experts.up.weight", EXPERT + "w3.weight", "ffn hidden"),
    Rule("moe.experts.down.weight", EXPERT + "w2.weight", "hidden ffn"),
)


def sizes(config):
    return attention_sizes(config) | {"experts": first_of(config, "num_local_experts", "num_experts")}


register(Family("mixtral", "MixtralForCausalLM", sizes, MODEL + NORMS + ATTENTION + EXPERTS, is_moe=always))
