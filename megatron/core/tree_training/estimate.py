"""Whether a tree is worth it: an estimate of a micro-batch's time packed as a tree and as linear
sequences."""

from dataclasses import dataclass

import numpy as np

FORWARD_TFLOPS, BACKWARD_TFLOPS = 743.0, 638.0
"""flash-attn-4, plain causal, bf16, 32/8 heads of 128, one H200 under load, on exact pairs."""
FORWARD_SLOWDOWN, BACKWARD_SLOWDOWN = (1.075, 46.0), (1.10, 78.0)
"""(a, b): with a tree mask, attention takes a + b / (mean tokens of a node) times as long. Fitted to the same
run of benchmarks/bench_tree_attention.py on the chain (as a tree), GRPO and agentic (largest child first)
shapes, 16384, 1205 and 275 tokens a node: 700/586, 651/538 and 599/462 TF/s, which it gives back within 3 %.
A pack of roots only runs without a mask."""
MATRIX_TFLOPS = 545.0
"""Of everything else: layers of Qwen3-8B in benchmarks/bench_tree_stack.py reach 527 to 559 without their
attention. Pass what your model reaches."""


@dataclass(frozen=True)
class ModelCost:
    """Forward FLOPs of a model."""

    per_token: float
    """Of all matrix products that every token goes through."""
    per_pair: float
    """Of attention, for each (query, key) pair that it visits, over all layers."""

    @property
    def pair_cost(self):
        """An attended pair in tokens, for `plan_micro_batches`."""
        return self.per_pair / self.per_token

    @classmethod
    def of(cls, config, vocab_size):
        """From a TransformerConfig or MLATransformerConfig; experts count as often as a token is routed."""
        hidden, heads, layers = config.hidden_size, config.num_attention_heads, config.num_layers
        if config.multi_latent_attention:
            query_key = config.qk_head_dim + config.qk_pos_emb_head_dim
            value, rank = config.v_head_dim, config.kv_lora_rank
            if config.q_lora_rank:
                attention = config.q_lora_rank * (hidden + heads * query_key)
            else:
                attention = hidden * heads * query_key
            attention += hidden * (rank + config.qk_pos_emb_head_dim)
            attention += rank * heads * (config.qk_head_dim + value) + heads * value * hidden
        else:
            query_key = value = config.kv_channels
            attention = hidden * query_key * 2 * (heads + (config.num_query_groups or heads))
        matrices = 3 if config.gated_linear_unit else 2
        dense = matrices * hidden * config.ffn_hidden_size
        sparse, num_sparse = 0, 0
        if config.num_moe_experts:
            width = config.moe_router_topk * (config.moe_ffn_hidden_size or config.ffn_hidden_size)
            width += config.moe_shared_expert_intermediate_size or 0
            sparse = matrices * hidden * width + hidden * config.num_moe_experts
            frequency = config.moe_layer_freq
            if isinstance(frequency, int):
                num_sparse = sum(i % frequency == 0 for i in range(layers))
            else:
                num_sparse = sum(frequency)
        weights = (
            layers * attention + num_sparse * sparse + (layers - num_sparse) * dense + hidden * vocab_size
        )
        return cls(per_token=2.0 * weights, per_pair=2.0 * heads * (query_key + value) * layers)


@dataclass(frozen=True)
class SharingEstimate:
    """Seconds of a forward and a backward pass on one device, everything before the loss."""

    tree_seconds: float
    linear_seconds: float

    @property
    def speedup(self):
        return self.linear_seconds / self.tree_seconds if self.tree_seconds else 1.0

    @property
    def share(self):
        """Whether the tree is expected to be faster."""
        return self.speedup > 1


def share_or_not(batch, config, vocab_size, *, matrix_tflops=MATRIX_TFLOPS):
    """Estimate what sharing prefixes saves, or costs, with the coefficients at the top of this module.

    Args:
        batch: a TreeBatch made with sharing.
        config: the model's TransformerConfig.
        vocab_size: of the output layer.
        matrix_tflops: what matrix products reach, in TFLOP/s.

    A tree loses where little is shared and nodes are short: attention then pays for the mask and saves
    nothing.
    """
    cost = ModelCost.of(config, vocab_size)
    node = batch.packed_tokens / max(batch.tree_metadata.num_nodes, 1)

    def seconds(tokens, pairs, forward, backward):
        matrices = 3 * tokens * cost.per_token / matrix_tflops
        return 1e-12 * (
            matrices + pairs * cost.per_pair * (forward / FORWARD_TFLOPS + 2.5 * backward / BACKWARD_TFLOPS)
        )

    masked = not batch.tree_metadata.roots_only
    slow = [a + b / node if masked else 1.0 for a, b in (FORWARD_SLOWDOWN, BACKWARD_SLOWDOWN)]
    lengths = np.asarray(batch.lengths, np.int64)
    linear_pairs = int((lengths * (lengths + 1) // 2).sum())
    return SharingEstimate(
        tree_seconds=seconds(batch.packed_tokens, batch.attended_pairs, *slow),
        linear_seconds=seconds(batch.linear_tokens, linear_pairs, 1.0, 1.0),
    )
