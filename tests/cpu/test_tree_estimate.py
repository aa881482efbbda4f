"""The estimate gives back the measurements that it was fitted to, and says no where nothing is shared."""

import numpy as np
import pytest

from benchmarks import shapes
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.tree_training import Trajectory, TreeBatch, estimate, share_or_not

MEASURED = {"chain16k": (700, 586), "grpo 4k+16x1k": (651, 538), "agentic 32k": (599, 462)}


def batch_of(paths):
    return TreeBatch.from_trajectories([Trajectory(p, np.r_[0, np.ones(len(p) - 1, int)]) for p in paths])


def config(**overrides):
    fields = dict(
        num_layers=32, hidden_size=4096, num_attention_heads=32, num_query_groups=8, ffn_hidden_size=14336
    )
    return TransformerConfig(**{**fields, "gated_linear_unit": True, "kv_channels": 128, **overrides})


@pytest.mark.parametrize("name", MEASURED)
def test_fits_the_measured_rates(name):
    nodes = shapes.SHAPES[name]
    mean = sum(length for _, length in nodes) / len(nodes)
    forward = estimate.FORWARD_TFLOPS / (estimate.FORWARD_SLOWDOWN[0] + estimate.FORWARD_SLOWDOWN[1] / mean)
    backward = estimate.BACKWARD_TFLOPS / (
        estimate.BACKWARD_SLOWDOWN[0] + estimate.BACKWARD_SLOWDOWN[1] / mean
    )
    assert (forward, backward) == pytest.approx(MEASURED[name], rel=0.03)


def test_parameters_of_a_known_model():
    # Llama-3 8B: 8.03 billion parameters, 0.53 of them the input embedding, which multiplies nothing.
    cost = estimate.ModelCost.of(config(), 128256)
    assert cost.per_token / 2 == pytest.approx(7.50e9, rel=0.01)
    assert cost.per_pair == 4 * 32 * 128 * 32 and cost.pair_cost == pytest.approx(3.5e-5, rel=0.01)
    # Mixtral 8x7B: 12.9 billion of 46.7 are active.
    moe = config(num_moe_experts=8, moe_router_topk=2, add_bias_linear=False)
    assert estimate.ModelCost.of(moe, 32000).per_token / 2 == pytest.approx(12.75e9, rel=0.01)


def test_latent_attention():
    mla = MLATransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, ffn_hidden_size=96, q_lora_rank=24,
        kv_lora_rank=16, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=6, multi_latent_attention=True,
    )  # fmt: skip
    attention = 24 * (64 + 4 * 12) + 64 * (16 + 4) + 16 * 4 * (8 + 6) + 4 * 6 * 64
    cost = estimate.ModelCost.of(mla, 100)
    assert cost.per_token == 2 * (2 * (attention + 2 * 64 * 96) + 64 * 100)
    assert cost.per_pair == 2 * 4 * (12 + 6) * 2


def test_shares_where_prefixes_are_long_only():
    shared = share_or_not(batch_of(shapes.token_paths(shapes.SHAPES["grpo 4k+16x1k"])), config(), 128256)
    assert shared.share and 3.5 < shared.speedup < 4.1
    rng = np.random.default_rng(0)
    apart = [np.r_[i, rng.integers(1, 9999, 299)] for i in range(20)]
    alone = share_or_not(batch_of(apart), config(), 128256)
    assert not alone.share and alone.speedup == pytest.approx(1)  # roots only: no mask, nothing lost
    barely = [np.r_[7, rng.integers(1, 9999, 8191)] for _ in range(8)]
    lost = share_or_not(batch_of(barely), config(), 128256)
    assert not lost.share and 0.97 < lost.speedup < 0.995
    empty = share_or_not(TreeBatch.from_trajectories([]), config(), 128256)
    assert empty.tree_seconds == empty.linear_seconds == 0 and not empty.share
