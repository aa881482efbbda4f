"""Random Hugging Face models: the oracle of the export tests. Made once per session, in the test process."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import torch

THETA = 10000.0
BASE = dict(
    vocab_size=53,
    hidden_size=36,
    intermediate_size=44,
    num_hidden_layers=5,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-6,
    use_cache=False,
)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=20)
GROUPED = dict(
    n_routed_experts=4,
    n_shared_experts=1,
    first_k_dense_replace=1,
    n_group=1,
    topk_group=1,
    routed_scaling_factor=1.3,
    norm_topk_prob=True,
    num_nextn_predict_layers=1,
)
CASES = {
    "qwen3": ("qwen3", dict(head_dim=10)),
    "qwen3-tied": ("qwen3", dict(head_dim=10, tie_word_embeddings=True)),
    "qwen3-8-heads": ("qwen3", dict(head_dim=6, num_attention_heads=8, hidden_size=32)),
    "llama": ("llama", dict(head_dim=10)),
    "qwen2": ("qwen2", {}),
    "qwen3_moe": (
        "qwen3_moe",
        dict(head_dim=10, num_local_experts=4, mlp_only_layers=[1], norm_topk_prob=True, **EXPERTS),
    ),
    "mixtral": ("mixtral", dict(head_dim=10, num_local_experts=4, num_experts_per_tok=2)),
    "deepseek_v3": (
        "deepseek_v3",
        dict(
            num_key_value_heads=6,
            q_lora_rank=12,
            kv_lora_rank=16,
            qk_nope_head_dim=8,
            qk_rope_head_dim=4,
            v_head_dim=6,
            **EXPERTS,
            **(GROUPED | dict(n_shared_experts=2)),
        ),
    ),
    "glm4_moe": ("glm4_moe", dict(head_dim=12, use_qk_norm=True, attention_bias=True, **EXPERTS, **GROUPED)),
    "gpt_oss": (
        "gpt_oss",
        dict(
            head_dim=10,
            num_local_experts=4,
            num_experts_per_tok=2,
            intermediate_size=20,
            layer_types=["full_attention"] * 5,
        ),
    ),
}


@functools.cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="export-reference-"))


@functools.cache
def reference(case: str):
    """``(configuration as plain fields, checkpoint file, tokens, logits)``; weights as
    ``save_pretrained`` writes them, under the names of published checkpoints."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, fields = CASES[case.removesuffix("-6-layers")]
    if case.endswith("-6-layers"):
        fields = fields | dict(num_hidden_layers=6)
        if "layer_types" in fields:
            fields["layer_types"] = fields["layer_types"] + fields["layer_types"][:1]
    rope = {"rope_type": "default", "rope_theta": THETA}
    if model_type == "glm4_moe":
        rope["partial_rotary_factor"] = 0.5
    config = AutoConfig.for_model(model_type, **(BASE | fields), rope_parameters=rope)
    torch.manual_seed(11 + sum(case.encode()))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("inv_freq"):
                continue
            noise = torch.randn_like(tensor)
            tensor.copy_(1 + 0.3 * noise if "norm" in name else 0.2 * noise)
        tokens = torch.randint(0, config.vocab_size, (2, 12))
        logits = model(tokens).logits
    path = _folder() / case
    model.save_pretrained(path)
    plain = config.to_dict() | {
        "rope_theta": THETA,
        "partial_rotary_factor": rope.get("partial_rotary_factor"),
    }
    return plain, str(path / "model.safetensors"), tokens, logits
