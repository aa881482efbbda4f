"""Small Megatron models of the shape of a Hugging Face configuration, for the export tests."""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F

from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from tests.dist.small_gpt import PlainAttention

PADDED_VOCABULARY = 72


def common(hf: SimpleNamespace) -> dict:
    """TransformerConfig fields that every family shares, for the parallel state in force."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    return dict(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        ffn_hidden_size=hf.intermediate_size,
        layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        batch_p2p_comm=False,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        virtual_pipeline_model_parallel_size=parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=parallel_state.get_expert_tensor_parallel_world_size(),
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
    )


def _experts(hf, count, ffn, **more):
    tp = parallel_state.get_tensor_model_parallel_world_size()
    return dict(
        num_moe_experts=count,
        moe_router_topk=hf.num_experts_per_tok,
        moe_ffn_hidden_size=ffn,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=False,
        sequence_parallel=tp > 1,
        **more,
    )


def _sigmoid_router(hf):
    return dict(
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_num_groups=hf.n_group,
        moe_router_group_topk=hf.topk_group,
        moe_router_topk_scaling_factor=hf.routed_scaling_factor,
        moe_shared_expert_intermediate_size=hf.moe_intermediate_size * hf.n_shared_experts,
        moe_layer_freq=[int(i >= hf.first_k_dense_replace) for i in range(hf.num_hidden_layers)],
    )


FAMILY_FIELDS = {
    "llama": lambda hf: dict(kv_channels=hf.head_dim),
    "qwen2": lambda hf: dict(add_qkv_bias=True),
    "qwen3": lambda hf: dict(kv_channels=hf.head_dim, qk_layernorm=True),
    "qwen3_moe": lambda hf: dict(
        kv_channels=hf.head_dim,
        qk_layernorm=True,
        moe_layer_freq=[int(i not in hf.mlp_only_layers) for i in range(hf.num_hidden_layers)],
        **_experts(hf, hf.num_local_experts, hf.moe_intermediate_size),
    ),
    "mixtral": lambda hf: dict(
        kv_channels=hf.head_dim, **_experts(hf, hf.num_local_experts, hf.intermediate_size)
    ),
    "deepseek_v3": lambda hf: dict(
        multi_latent_attention=True,
        q_lora_rank=hf.q_lora_rank,
        kv_lora_rank=hf.kv_lora_rank,
        qk_head_dim=hf.qk_nope_head_dim,
        qk_pos_emb_head_dim=hf.qk_rope_head_dim,
        v_head_dim=hf.v_head_dim,
        qk_layernorm=True,
        rope_type="rope",
        rotary_base=hf.rope_theta,
        rotary_scaling_factor=1.0,
        **_experts(hf, hf.n_routed_experts, hf.moe_intermediate_size),
        **_sigmoid_router(hf),
    ),
    "glm4_moe": lambda hf: dict(
        kv_channels=hf.head_dim,
        qk_layernorm=hf.use_qk_norm,
        add_qkv_bias=True,
        **_experts(hf, hf.n_routed_experts, hf.moe_intermediate_size),
        **_sigmoid_router(hf),
    ),
    "gpt_oss": lambda hf: dict(
        kv_channels=hf.head_dim,
        add_bias_linear=True,
        add_qkv_bias=True,
        softmax_type="learnable",
        activation_func=quick_gelu,
        activation_func_clamp_value=getattr(hf, "swiglu_limit", 7.0),  # fixed in older transformers
        glu_linear_offset=1.0,
        **_experts(hf, hf.num_local_experts, hf.intermediate_size),
    ),
}


def build(hf: SimpleNamespace, *, mtp: int = 0, te: bool = False, **overrides) -> list[GPTModel]:
    """The chunks of this rank; parameters and expert biases are poisoned with NaN.

    ``te``: the layer specs of Transformer Engine, experts in grouped layers. Without a GPU the model can be
    built, but not run.
    """
    fields = common(hf) | FAMILY_FIELDS[hf.model_type](hf)
    if te:
        fields["transformer_impl"] = "transformer_engine"
        fields["moe_grouped_gemm"] = "num_moe_experts" in fields
    fields |= overrides
    with _permitted() if te else contextlib.nullcontext():
        chunks = _build(hf, fields, mtp, te)
    poison(chunks)
    return chunks


# Without these, single grouped parameters are refused by Megatron and ignored by Transformer Engine.
SWITCHES = {"NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1", "NVTE_GROUPED_LINEAR_SINGLE_PARAM": "1"}


@contextlib.contextmanager
def _permitted():
    """Transformer Engine's modules may be made without a GPU too: they hold nothing but parameters yet."""
    with mock.patch.object(torch.cuda, "is_available", lambda: True), mock.patch.dict(os.environ, SWITCHES):
        yield


def _build(hf, fields, mtp, te):
    if mtp:
        fields["mtp_num_layers"] = mtp
    if fields["pipeline_model_parallel_size"] > 1 and "pipeline_model_parallel_layout" not in fields:
        fields["num_layers_in_first_pipeline_stage"] = 2
    cfg = (MLATransformerConfig if fields.get("multi_latent_attention") else TransformerConfig)(**fields)
    vpp = cfg.virtual_pipeline_model_parallel_size
    chunks = []
    for stage in range(vpp) if vpp else [None]:
        block = get_gpt_decoder_block_spec(
            cfg, use_transformer_engine=te, normalization="RMSNorm", vp_stage=stage
        )
        for layer in block.layer_specs if not te else ():
            _plain_latent_attention(cfg, layer)
        more = {}
        if mtp:
            # the MTP stage may have no decoder layer of its own, so the spec comes from the whole model
            whole = _last_layer(cfg, te)
            more["mtp_block_spec"] = get_gpt_mtp_block_spec(
                cfg, whole, use_transformer_engine=te, vp_stage=stage
            )
        chunks.append(
            GPTModel(
                cfg,
                block,
                PADDED_VOCABULARY,
                max_sequence_length=64,
                parallel_output=True,
                vp_stage=stage,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
                share_embeddings_and_output_weights=hf.tie_word_embeddings,
                position_embedding_type="rope",
                rotary_base=int(hf.rope_theta),
                rotary_percent=getattr(hf, "partial_rotary_factor", None) or 1.0,
                **more,
            )
        )
    return chunks


def _last_layer(cfg, te):
    """A layer spec for MTP: that of the model's last layer."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs

    spec = get_gpt_decoder_layer_specs(cfg, use_transformer_engine=te, normalization="RMSNorm")[-1]
    if not te:
        _plain_latent_attention(cfg, spec)
    return spec


def _plain_latent_attention(cfg, spec):
    if cfg.multi_latent_attention:
        spec.submodules.self_attention.submodules.core_attention = PlainAttention


@torch.no_grad()
def poison(chunks) -> None:
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.fill_(float("nan"))
        for name, buffer in chunk.named_buffers():
            if name.endswith("expert_bias"):
                buffer.fill_(float("nan"))


def logits(chunks, tokens: torch.Tensor) -> torch.Tensor | None:
    """Full logits [batch, sequence, padded vocabulary] on the last stage's ranks, None elsewhere."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    out = []
    length = tokens.shape[1]
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]

    def step(rows, model):
        result = model(next(rows), torch.arange(length)[None], mask)

        def collect(result, non_loss_data=False):
            out.append(gather_from_tensor_model_parallel_region(result).detach())
            return result

        return result, collect

    for chunk in chunks:
        chunk.eval()
    rows = tokens.split(1)
    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter(rows) for _ in chunks] if len(chunks) > 1 else iter(rows),
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(rows),
            seq_length=length,
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )
    return torch.cat(out) if out else None
