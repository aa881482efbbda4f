"""bf16 trees are no further from fp64 than bf16 linear sequences are: log-probabilities, loss, every
gradient."""

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCABULARY = 2048


@pytest.fixture(scope="module", autouse=True)
def parallel_state():
    import torch.distributed as dist

    from tests.dist.world import parallel

    started = not dist.is_initialized()
    if started:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    with parallel():
        yield
    if started:
        dist.destroy_process_group()


def model_of(dtype):
    """A dense GPT with heads of 64, the same weights in every dtype."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import TransformerConfig

    config = TransformerConfig(
        num_layers=4,
        hidden_size=512,
        num_attention_heads=8,
        num_query_groups=4,
        kv_channels=64,
        ffn_hidden_size=1024,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # No kernel computes in fp64.
        tree_attention_backend="reference" if dtype == torch.float64 else "auto",
    )
    # A block, for its last norm: left to itself it is Transformer Engine's, which has no fp64.
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    model = GPTModel(config, spec, VOCABULARY, 4096, position_embedding_type="rope").cuda().to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            # Rounded to bf16 in every dtype: only the arithmetic differs.
            value = torch.randn(parameter.shape, generator=generator).bfloat16()
            parameter.copy_(1 + 0.1 * value if parameter.dim() == 1 else 0.04 * value)
    return model


def trajectories():
    from megatron.core.tree_training import Trajectory

    g = torch.Generator().manual_seed(5)

    def draw(n):
        return torch.randint(0, VOCABULARY, (n,), generator=g)

    made = []
    for _ in range(2):
        prompt = draw(131)
        for _ in range(4):
            turn = torch.cat([prompt, draw(37)])
            for n in (61, 90):
                tokens = torch.cat([turn, draw(n)])
                mask = torch.rand(tokens.numel(), generator=g) < 0.8
                mask[:131] = False
                advantage = torch.randn(tokens.numel(), generator=g)
                made.append(Trajectory(tokens, mask, {"advantage": advantage}))
    return made


def gradients(dtype, share):
    from megatron.core.tree_training import TreeBatch, log_probs

    model = model_of(dtype)
    batch = TreeBatch.from_trajectories(
        trajectories(), share_prefixes=share, pad_to_multiple_of=128, device="cuda"
    )
    logits = model(batch.tokens, batch.position_ids, None, packed_seq_params=batch.packed_seq_params)
    lp = batch.unpack_linear(log_probs(logits, batch))
    loss = -(lp * batch.values_L["advantage"] * batch.loss_mask_L).sum() / batch.num_loss_tokens
    loss.backward()
    found = {name: parameter.grad.double() for name, parameter in model.named_parameters()}
    return {**found, "log-probabilities": lp.detach().double()}, batch


def test_no_further_from_fp64_than_linear():
    exact, tree_batch = gradients(torch.float64, share=True)
    linear_exact, linear_batch = gradients(torch.float64, share=False)
    assert linear_batch.packed_tokens > 2 * tree_batch.packed_tokens
    for name, value in exact.items():
        torch.testing.assert_close(value, linear_exact[name], rtol=1e-8, atol=1e-10)
    tree, _ = gradients(torch.bfloat16, share=True)
    linear, _ = gradients(torch.bfloat16, share=False)
    worst = {}
    for name, value in exact.items():
        of_tree, of_linear = ((side[name] - value).norm().item() for side in (tree, linear))
        worst[name] = of_tree / of_linear
    # Both are rounding errors, of which a ratio of norms strays by a few percent.
    assert max(worst.values()) < 1.15, worst
    print("distance to fp64, tree / linear:", {name: round(ratio, 3) for name, ratio in worst.items()})
