"""Rotary position ids of packed tries on a GPU: fused against unfused kernels, no device sync, range check.

The unfused path is proven against branches run one by one in tests/cpu; here it is the reference. What is
fused: Transformer Engine's rope for ordinary attention (skipped without it), and Megatron-Core's Triton
kernels for MLA.
"""

import subprocess
import sys

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import torch.distributed as dist

from megatron.core import parallel_state
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings import rotary_position_ids as rpi
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.tree_metadata import TreeMetadata

pytestmark = pytest.mark.gpu
PADDED = 301


@pytest.fixture(autouse=True)
def one_rank():
    if not dist.is_initialized():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    torch.manual_seed(0)
    model_parallel_cuda_manual_seed(0, force_reset_rng=True)
    yield
    parallel_state.destroy_model_parallel()


def tree():
    """Repeated positions, two roots, tail padding."""
    return TreeMetadata.from_nodes(
        [-1, 0, 1, 1, 0, -1], [93, 41, 27, 55, 38, 29], padded_size=PADDED, device="cuda"
    )


class Core(DotProductAttention):
    """Constructible with MLA's arguments; never run."""

    def __init__(self, *args, k_channels=None, v_channels=None, **kwargs):
        super().__init__(*args, **kwargs)


def attention(cfg, mla=False):
    spec = get_gpt_layer_local_spec(multi_latent_attention=mla, normalization="RMSNorm")
    spec = spec.submodules.self_attention
    spec.submodules.core_attention = Core
    layer = build_module(spec, config=cfg, layer_number=1).to(device="cuda", dtype=cfg.params_dtype)

    def side_by_side(query, key, value, *args, **kwargs):  # so that one backward reaches all three
        return torch.cat([x.flatten(1) for x in (query, key, value)], -1)

    layer._run_core_attention = side_by_side
    layer.linear_proj.forward = lambda x: (x, None)
    return layer


def config(mla=False, **overrides):
    fields = dict(
        num_layers=1,
        hidden_size=192,
        num_attention_heads=6,
        add_bias_linear=False,
        normalization="RMSNorm",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
    )
    if mla:
        fields |= dict(q_lora_rank=48, kv_lora_rank=40, qk_head_dim=32, qk_pos_emb_head_dim=16, v_head_dim=32)
        # upstream's fused kernels write over the next token where heads are no power of two
        fields |= dict(num_attention_heads=8)
        fields |= dict(rope_type="yarn", original_max_position_embeddings=64, rotary_scaling_factor=4)
        return MLATransformerConfig(**(fields | dict(multi_latent_attention=True) | overrides))
    return TransformerConfig(**(fields | dict(kv_channels=64, num_query_groups=2) | overrides))


def outputs_and_gradient(layer, hidden, weight, params, rows=None):
    hidden = hidden.detach().clone().requires_grad_()
    out, _ = layer(hidden, None, rotary_pos_emb=rows, packed_seq_params=params)
    (out * weight).sum().backward()
    return out.detach(), hidden.grad


def no_further_from_fp64(fused, plain, exact):
    """The fused kernel's error is at most that of the plain one, with room for another order of rounding."""
    for actual, reference, truth in zip(fused, plain, exact, strict=True):
        assert actual.isfinite().all()
        error, floor = (actual - truth).abs().max().item(), (reference - truth).abs().max().item()
        print(f"max error: fused {error:.3e}, unfused {floor:.3e}")
        assert error <= 2 * floor + 1e-6, (error, floor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_fused_mla_rope(dtype):
    meta = tree()
    params = meta.packed_seq_params()
    # cu_seqlens of another layout must not reach the kernels
    params.cu_seqlens_q_padded = params.cu_seqlens_kv_padded = torch.tensor([0, 150, PADDED]).int().cuda()
    layer = attention(config(mla=True, params_dtype=dtype, bf16=dtype == torch.bfloat16), mla=True)
    hidden = torch.randn(PADDED, 1, 192, dtype=dtype, device="cuda")
    weight = torch.randn(PADDED, 1, 8 * (48 + 48 + 32), dtype=dtype, device="cuda")
    plain = outputs_and_gradient(layer, hidden, weight, params)
    layer.config.apply_rope_fusion = True
    fused = outputs_and_gradient(layer, hidden, weight, params)
    layer.config.apply_rope_fusion = False
    exact = outputs_and_gradient(layer.double(), hidden.double(), weight.double(), params)
    no_further_from_fp64(fused, plain, exact)


@pytest.mark.skipif(rope_utils.fused_apply_rotary_pos_emb is None, reason="needs Transformer Engine")
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("percent", [1.0, 0.5], ids=["whole", "partial"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_fused_rope_of_transformer_engine(dtype, percent, interleaved):
    meta = tree()
    params = meta.packed_seq_params()
    cfg = config(params_dtype=dtype, bf16=dtype == torch.bfloat16, rotary_interleaved=interleaved)
    layer = attention(cfg)
    rope = RotaryEmbedding(64, percent, rotary_interleaved=interleaved)
    rows = rope(meta.max_position + 1, packed_seq=True, position_ids=meta.tree_position_ids)
    hidden = torch.randn(PADDED, 1, 192, dtype=dtype, device="cuda")
    weight = torch.randn(PADDED, 1, 10 * 64, dtype=dtype, device="cuda")
    plain = outputs_and_gradient(layer, hidden, weight, params, rows)
    cfg.apply_rope_fusion = True
    fused = outputs_and_gradient(layer, hidden, weight, params, rows)
    cfg.apply_rope_fusion = False
    exact = outputs_and_gradient(layer.double(), hidden.double(), weight.double(), params, rows)
    no_further_from_fp64(fused, plain, exact)


def test_no_device_sync():
    """From metadata to rotated queries and keys; MLA, and a plain pack under rotary_use_position_ids, too."""
    cfg, flagged = config(), config(rotary_use_position_ids=True)
    layer, latent = attention(cfg), attention(config(mla=True), mla=True)
    fused = attention(config(mla=True, apply_rope_fusion=True), mla=True)
    rope = RotaryEmbedding(64, 1.0)
    bounds = torch.tensor([0, 120, 290], dtype=torch.int32, device="cuda")
    plain = PackedSeqParams("thd", bounds, bounds, max_seqlen_q=170, max_seqlen_kv=170)
    params, hidden = tree().packed_seq_params(), torch.randn(PADDED, 1, 192, device="cuda")
    ids = torch.randint(0, 170, (1, PADDED), device="cuda")

    class Model:
        position_embedding_type, pre_process, decoder = "rope", True, None

    def run():
        for used, pack, given in ((cfg, params, None), (flagged, plain, None), (flagged, plain, ids)):
            Model.config = layer.config = used
            chosen = rpi.model_position_ids(Model, given, pack, hidden)
            rows = rope(max(pack.max_seqlen_q, pack.max_seqlen_kv), packed_seq=True, position_ids=chosen)
            layer(hidden, None, rotary_pos_emb=rows, packed_seq_params=pack)
        for mla in (latent, fused):
            mla(hidden, None, packed_seq_params=params)

    run()  # tables, autotuning
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("position", [9, -1])
def test_position_outside_the_table_stops_the_device(position):
    """A device-side assertion ruins its process, so it runs in another."""
    program = f"""
import torch
from megatron.core.models.common.embeddings.rotary_position_ids import gather_rows
rows = gather_rows(torch.randn(9, 1, 1, 64, device="cuda"), torch.tensor([0, {position}, 3], device="cuda"))
torch.cuda.synchronize()
print("went on")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode != 0 and "went on" not in done.stdout
    assert "device-side assert" in done.stderr
