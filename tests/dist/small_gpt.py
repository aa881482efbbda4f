"""A small GPT, its optimizer and a training loop, with weights that do not depend on how it is laid out.

``build`` fills every parameter from a full tensor that depends on the parameter's global name alone, so that
runs with different TP, PP, VPP, EP and ETP start from the same model and can be compared number by number.
"""

from __future__ import annotations

import re
import zlib

import torch
import torch.nn.functional as F

from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_layer import TransformerLayer

VOCAB = 64
SEQUENCE = 24


class PlainAttention(torch.nn.Module):
    """Causal attention in plain torch: upstream's local one knows no value head size, which MLA needs."""

    plain_softmax_attention = True

    def __init__(self, config, layer_number, attn_mask_type, attention_type, *, softmax_scale=None,
                 k_channels=None, v_channels=None, **ignored):
        super().__init__()
        self.config, self.layer_number, self.attn_mask_type = config, layer_number, attn_mask_type
        self.softmax_scale = softmax_scale or (k_channels or config.kv_channels) ** -0.5

    def forward(self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None,
                packed_seq_params=None):
        """[s, b, h, d] → [s, b, h·dv]; True in ``attention_mask`` hides."""
        assert packed_seq_params is None
        scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * self.softmax_scale
        weights = scores.masked_fill(attention_mask, float("-inf")).softmax(-1)
        return torch.einsum("bhqk,kbhd->qbhd", weights, value).flatten(2)


def config(moe=False, mla=False, **overrides):
    """A TransformerConfig for the parallel state in force, everything fused switched off."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    etp = parallel_state.get_expert_tensor_parallel_world_size()
    dtype = overrides.get("params_dtype", torch.float32)
    fields = dict(
        num_layers=4, hidden_size=32, num_attention_heads=4, ffn_hidden_size=48, gated_linear_unit=True,
        activation_func=F.silu, add_bias_linear=False, normalization="RMSNorm", hidden_dropout=0.0,
        attention_dropout=0.0, bias_activation_fusion=False, masked_softmax_fusion=False,
        bias_dropout_fusion=False, gradient_accumulation_fusion=False, apply_rope_fusion=False,
        batch_p2p_comm=False,
        tensor_model_parallel_size=tp, sequence_parallel=moe and tp > 1,
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
        virtual_pipeline_model_parallel_size=parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=etp, params_dtype=dtype, bf16=dtype == torch.bfloat16,
        pipeline_dtype=dtype,
    )
    if mla:
        fields.update(q_lora_rank=16, kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=6,
                      rope_type="rope", multi_latent_attention=True)
    else:
        fields.update(num_query_groups=2)
    if moe:
        fields.update(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=24, moe_grouped_gemm=False,
                      moe_token_dispatcher_type="alltoall", moe_router_load_balancing_type="none",
                      moe_shared_expert_intermediate_size=16)
    fields.update(overrides)
    return (MLATransformerConfig if mla else TransformerConfig)(**fields)


def build(cfg, *, tied=False, position_embedding_type="rope", **gpt_options):
    """The model chunks of this rank, filled."""
    vpp = cfg.virtual_pipeline_model_parallel_size
    chunks = []
    for stage in range(vpp) if vpp else [None]:
        block = get_gpt_decoder_block_spec(cfg, use_transformer_engine=False, vp_stage=stage)
        if cfg.multi_latent_attention:
            for layer in block.layer_specs:
                layer.submodules.self_attention.submodules.core_attention = PlainAttention
        mtp = {}
        if cfg.mtp_num_layers:
            mtp["mtp_block_spec"] = get_gpt_mtp_block_spec(
                cfg, block, use_transformer_engine=False, vp_stage=stage)
        model = GPTModel(
            cfg, block, VOCAB, max_sequence_length=256, parallel_output=True, vp_stage=stage,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=tied, position_embedding_type=position_embedding_type,
            **mtp, **gpt_options)
        fill(model)
        chunks.append(model.to(cfg.params_dtype))
    return chunks


def global_names(model) -> dict[str, torch.nn.Parameter]:
    """Parameters under names with global layer and expert numbers."""
    numbered = {}
    for path, module in model.named_modules():
        if isinstance(module, TransformerLayer) and ".layers." in path:
            numbered[path] = re.sub(r"\d+$", str(module.layer_number - 1), path)
        if isinstance(module, MoELayer):
            for i, expert in enumerate(module.local_expert_indices):
                numbered[f"{path}.experts.local_experts.{i}"] = f"{path}.experts.local_experts.{expert}"
    result = {}
    for name, parameter in model.named_parameters():
        for path in sorted(numbered, key=len, reverse=True):  # the expert before the layer around it
            if name.startswith(path + "."):
                name = numbered[path] + name[len(path):]
        result[name] = parameter
    return result


@torch.no_grad()
def fill(model) -> None:
    """Every parameter's shard of a full tensor drawn from its global name."""
    for name, parameter in global_names(model).items():
        name = name.replace("output_layer", "embedding.word_embeddings")  # the same values tied and untied
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        expert = not getattr(parameter, "allreduce", True)
        if expert:
            size = parallel_state.get_expert_tensor_parallel_world_size()
            rank = parallel_state.get_expert_tensor_parallel_rank()
        else:
            size = parallel_state.get_tensor_model_parallel_world_size()
            rank = parallel_state.get_tensor_model_parallel_rank()
        dim, stride = getattr(parameter, "partition_dim", -1), getattr(parameter, "partition_stride", 1)
        sharded = getattr(parameter, "tensor_model_parallel", False) and size > 1
        shape = list(parameter.shape)
        if sharded:
            shape[dim] *= size
        full = torch.randn(shape, generator=generator, dtype=torch.float64)
        full = 1 + 0.1 * full if parameter.dim() == 1 and "norm" in name else 0.1 * full
        if sharded:
            # stride 2 (gate and up in one matrix): each half is cut on its own
            full = torch.cat([part.chunk(size, dim)[rank] for part in full.chunk(stride, dim)], dim)
        parameter.copy_(full)


def tokens(count=4, batch=2, seed=7):
    """``count`` micro-batches of [batch, SEQUENCE] tokens for this data-parallel rank."""
    generator = torch.Generator().manual_seed(seed + parallel_state.get_data_parallel_rank())
    return [torch.randint(0, VOCAB, (batch, SEQUENCE), generator=generator) for _ in range(count)]


def causal_step(iterator, model):
    """An ordinary forward step: next-token loss on a batch of plain sequences."""
    batch = next(iterator)
    positions = torch.arange(SEQUENCE)[None].expand(len(batch), -1)
    mask = torch.triu(torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool), 1)[None, None]
    out = model(batch, positions, mask, labels=torch.roll(batch, -1, 1))
    return out, lambda loss: (loss.float().mean(), {"loss": loss.detach().float().mean()})


class Trainer:
    """Model chunks under Megatron's DDP with a Megatron optimizer."""

    def __init__(self, cfg, chunks, *, distributed_optimizer=True, overlap=False, lr=1e-2, **optimizer):
        self.cfg, self.chunks = cfg, chunks
        if cfg.bf16:
            chunks = [Float16Module(cfg, chunk) for chunk in chunks]
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer,
            overlap_grad_reduce=overlap, overlap_param_gather=overlap and distributed_optimizer)
        self.ddp = [DistributedDataParallel(cfg, ddp, chunk) for chunk in chunks]
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam", lr=lr, weight_decay=0.01, clip_grad=1.0, bf16=cfg.bf16,
                params_dtype=cfg.params_dtype, use_distributed_optimizer=distributed_optimizer,
                overlap_param_gather=overlap and distributed_optimizer, **optimizer),
            self.ddp)
        cfg.finalize_model_grads_func = finalize_model_grads
        cfg.grad_scale_func = self.optimizer.scale_loss

    def backward(self, batches, forward_step=causal_step) -> float | None:
        """Gradients of the mean loss over micro-batches; the loss on the last pipeline stage, else None."""
        for chunk in self.ddp:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        virtual = len(self.ddp) > 1
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(batches) for _ in self.ddp] if virtual else iter(batches),
            model=self.ddp if virtual else self.ddp[0], num_microbatches=len(batches), seq_length=SEQUENCE,
            micro_batch_size=2, forward_only=False)
        return sum(float(entry["loss"]) for entry in losses) / len(losses) if losses else None

    def train(self, steps=3, forward_step=causal_step) -> list[float] | None:
        """The losses of ``steps`` optimizer steps (None where the loss does not live)."""
        batches, losses = tokens(), []
        for _ in range(steps):
            losses.append(self.backward(batches, forward_step))
            ok, grad_norm, _ = self.optimizer.step()
            assert ok and grad_norm > 0
        return None if losses[0] is None else losses
