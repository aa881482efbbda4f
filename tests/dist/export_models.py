"""Small Megatron models of the shape of a Hugging Face configuration, for the export tests."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F

from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer import TransformerConfig

PADDED_VOCABULARY = 72


def common(hf: SimpleNamespace) -> dict:
    """TransformerConfig fields that every family shares, for the parallel state in force."""
    return dict(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=hf.head_dim,
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
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        virtual_pipeline_model_parallel_size=parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=parallel_state.get_expert_tensor_parallel_world_size(),
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
    )


FAMILY_FIELDS = {"qwen3": lambda hf: dict(qk_layernorm=True)}


def build(hf: SimpleNamespace, **overrides) -> list[GPTModel]:
    """The chunks of this rank; parameters are poisoned with NaN."""
    fields = common(hf) | FAMILY_FIELDS[hf.model_type](hf) | overrides
    if fields["pipeline_model_parallel_size"] > 1 and hf.num_hidden_layers % 2:
        fields.setdefault("num_layers_in_first_pipeline_stage", hf.num_hidden_layers // 2)
    cfg = TransformerConfig(**fields)
    vpp = cfg.virtual_pipeline_model_parallel_size
    chunks = []
    for stage in range(vpp) if vpp else [None]:
        block = get_gpt_decoder_block_spec(
            cfg, use_transformer_engine=False, normalization="RMSNorm", vp_stage=stage
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
            )
        )
    poison(chunks)
    return chunks


@torch.no_grad()
def poison(chunks) -> None:
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.fill_(float("nan"))


def logits(chunks, tokens: torch.Tensor) -> torch.Tensor | None:
    """Full logits [batch, sequence, padded vocabulary] on the last stage's ranks, None elsewhere."""
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

    out = []
    length = tokens.shape[1]
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]

    def step(_, model):
        result = model(tokens, torch.arange(length)[None].expand(len(tokens), -1), mask)

        def collect(result, non_loss_data=False):
            out.append(gather_from_tensor_model_parallel_region(result).detach())
            return result

        return result, collect

    with torch.no_grad():
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[iter([None])] * len(chunks) if len(chunks) > 1 else iter([None]),
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=1,
            seq_length=length,
            micro_batch_size=len(tokens),
            forward_only=True,
            collect_non_loss_data=True,
        )
    return out[0] if out else None
