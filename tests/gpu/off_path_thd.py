"""Print digests of what Transformer Engine layers compute on packed sequences; run on either tree, on a GPU.

    PYTHONPATH=TREE python tests/gpu/off_path_thd.py REPOSITORY

Each line: model, what, digest. Packs without tree metadata, rope from cu_seqlens: what a trainer runs today.
"""

import hashlib
import importlib.util
import os
import sys
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("NCCL_NVLS_ENABLE", "0")

import torch
import torch.distributed as dist


def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ROOT = Path(sys.argv[1])
torch.cuda.set_device(0)
torch.use_deterministic_algorithms(True, warn_only=True)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
parallel = load("world", ROOT / "tests/dist/world.py").parallel
small_gpt = load("small_gpt", ROOT / "tests/dist/small_gpt.py")

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402

SIZES = dict(num_layers=2, hidden_size=256, num_attention_heads=4, kv_channels=64, ffn_hidden_size=192,
             params_dtype=torch.bfloat16)  # fmt: skip
FULL = dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
MODELS = {
    "dense": dict(),
    "dense-fused-rope": dict(apply_rope_fusion=True),
    "dense-recompute": FULL,
    "moe": dict(moe=True, moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.1),
    "mla": dict(mla=True, qk_head_dim=64, qk_pos_emb_head_dim=32, v_head_dim=64),
}
PACKS = ([17, 40, 40], [97], [1, 64, 32])  # one odd length for all, so that max_seqlen and cu_seqlens differ


def digest(tensors):
    sha = hashlib.sha256()
    for tensor in tensors:
        assert torch.isfinite(tensor).all()
        sha.update(tensor.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return sha.hexdigest()[:16]


def packs():
    generator = torch.Generator().manual_seed(3)
    for lengths in PACKS:
        ends = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
        tokens = torch.randint(0, small_gpt.VOCAB, (1, sum(lengths)), generator=generator).cuda()
        positions = torch.cat([torch.arange(n) for n in lengths])[None].cuda()
        yield tokens, positions, PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends,
            max_seqlen_q=max(lengths), max_seqlen_kv=max(lengths),
        )  # fmt: skip


def packed_step(iterator, model):
    tokens, positions, params = next(iterator)
    out = model(tokens, positions, None, labels=tokens.roll(-1, 1), packed_seq_params=params)
    return out, lambda loss: (loss.float().mean(), {"loss": loss.detach().float().mean()})


for name, model in MODELS.items():
    with parallel():
        options = {k: v for k, v in model.items()}
        cfg = small_gpt.config(**{**SIZES, **options})
        chunk = GPTModel(
            cfg, get_gpt_decoder_block_spec(cfg, use_transformer_engine=True), small_gpt.VOCAB, 256,
            position_embedding_type="rope", share_embeddings_and_output_weights=False,
        )  # fmt: skip
        small_gpt.fill(chunk)
        trainer = small_gpt.Trainer(cfg, [chunk.to(cfg.params_dtype)])
        logits = []
        chunk.output_layer.register_forward_hook(lambda m, i, out: logits.append(out[0].clone()))  # noqa: B023
        gradients = []
        for step in range(3):
            loss = trainer.backward(list(packs()), packed_step)
            gradients += [p.main_grad.clone() for p in chunk.parameters()]
            trainer.optimizer.step()
            if step == 0:
                print(name, "first-logits", digest(logits))
        assert len(logits) == 9 and loss > 0
        print(name, "logits", digest(logits))
        print(name, "gradients", digest(gradients))
        print(name, "parameters", digest(chunk.parameters()))

import megatron.core  # noqa: E402

print("from", megatron.core.__file__)
dist.destroy_process_group()
