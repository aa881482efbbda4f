"""The policy: a Qwen3-shaped GPT in Megatron-Core, trained on trees of trajectories."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.tree_attention import TreeAttentionCase, select_backend
from megatron.core.tree_training import TreeBatch, log_probs


@dataclass(frozen=True)
class Shape:
    """Sizes that the policy and the rollout model share. About 0.3 million parameters."""

    layers: int = 2
    hidden: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    ffn: int = 256
    norm_epsilon: float = 1e-6
    rope_base: int = 10000


def transformer_config(shape: Shape, dtype: torch.dtype) -> TransformerConfig:
    pp = parallel_state.get_pipeline_model_parallel_world_size()
    return TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_epsilon,
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=pp,
        pipeline_dtype=dtype if pp > 1 else None,
        batch_p2p_comm=False,  # gloo has no batched sends
        variable_seq_lengths=pp > 1,  # every tree has its own packed length
        moe_token_dispatcher_type="alltoall",  # upstream checks that even for dense models
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # Kernels that Transformer Engine or Apex would bring; this example needs neither.
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )


def gpt(shape: Shape, vocabulary: int, positions: int, dtype: torch.dtype, device) -> GPTModel:
    """This rank's pipeline stage."""
    config = transformer_config(shape, dtype)
    model = GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False),
        vocabulary,
        positions,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type="rope",
        rotary_base=shape.rope_base,
        share_embeddings_and_output_weights=False,
    )
    return model.to(device=device, dtype=dtype)


def attention_case(shape: Shape, device) -> TreeAttentionCase:
    """What the policy's layers ask of tree attention while it trains in bf16."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    return TreeAttentionCase(
        device_type=device.type,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
        dtype=torch.bfloat16,
        heads=shape.heads // tp,
        kv_heads=shape.kv_heads // tp,
        qk_dim=shape.head_dim,
        v_dim=shape.head_dim,
    )


def attention_backend(shape: Shape, device) -> str:
    """The tree-attention backend that ``auto`` takes for the policy."""
    return select_backend("auto", attention_case(shape, device))


def policy_loss(values_T, batch: TreeBatch) -> torch.Tensor:
    """Sum over the trained tokens of −advantage · log-probability, in the linear layout.

    ``values_T`` are log-probabilities per packed token. Unpacking repeats a shared token once for each
    trajectory through it, so every trajectory keeps its own advantages and autograd adds up the gradients.
    """
    terms = batch.unpack_linear(values_T) * batch.values_L["advantage"]
    return -(terms * batch.loss_mask_L).sum()


def forward_backward(model, batches: list[TreeBatch]):
    """Run micro-batches through the pipeline; gradients accumulate in ``model``.

    Args:
        model: a GPTModel stage, wrapped or not.
        batches: this data-parallel rank's micro-batches, the same number on every rank.

    Returns:
        On the last stage ``(loss, worst)``: the loss summed over micro-batches, and the largest difference
        between the policy's and the rollout's log-probability of a trained token. None on other stages.
    """
    group = parallel_state.get_tensor_model_parallel_group()

    def forward_step(iterator, stage):
        batch = next(iterator)
        logits = stage(batch.tokens, batch.position_ids, None, packed_seq_params=batch.packed_seq_params)

        def loss_function(logits):
            values_T = log_probs(logits, batch, group)
            loss = policy_loss(values_T, batch)
            drift = (batch.unpack_linear(values_T.detach()) - batch.values_L["rollout_log_probs"]).abs()
            worst = torch.cat([drift * batch.loss_mask_L, drift.new_zeros(1)]).max()  # a dummy has none
            # The mean over the trained tokens of the whole step, however it was cut into micro-batches.
            report = {"loss": loss.detach() / batch.totals.loss_tokens, "worst": worst}
            return batch.averaged_loss(loss), report

        return logits, loss_function

    results = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=model,
        num_microbatches=len(batches),
        seq_length=max(batch.padded_size for batch in batches),
        micro_batch_size=1,
        forward_only=False,
    )
    if not results:
        return None
    return sum(float(r["loss"]) for r in results), max(float(r["worst"]) for r in results)


class Policy:
    """The bf16 policy with fp32 main weights in Megatron's distributed optimizer, or, not ``distributed``, in
    one that every rank has whole."""

    def __init__(
        self, shape: Shape, vocabulary: int, positions: int, lr: float, device, distributed: bool = True
    ):
        self.core = gpt(shape, vocabulary, positions, torch.bfloat16, device)
        config = self.core.config
        self.ddp = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed),
            Float16Module(config, self.core),
        )
        self.ddp.broadcast_params()
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=lr,
                weight_decay=0.0,
                adam_beta2=0.95,
                bf16=True,
                params_dtype=torch.bfloat16,
                use_distributed_optimizer=distributed,
                clip_grad=1.0,
            ),
            [self.ddp],
        )
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss

    def set_lr(self, lr: float) -> None:
        for optimizer in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            for group in optimizer.param_groups:
                group["lr"] = lr

    def step(self, batches: list[TreeBatch]):
        """One optimizer step. Returns what :func:`forward_backward` does."""
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        result = forward_backward(self.ddp, batches)
        self.optimizer.step()
        return result
