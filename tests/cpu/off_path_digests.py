"""Print digests of what a small model computes; run once on the patched tree and once on upstream's sdist.

The arguments are the repository root. The cpu runtime and the small model are loaded from their
files, so that nothing else of ours is needed to run.
"""

import hashlib
import importlib.util
import sys
from pathlib import Path


def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ROOT = Path(sys.argv[1])
load("cpu_runtime", ROOT / "megatron/cpu_runtime.py").install()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel = load("world", ROOT / "tests/dist/world.py").parallel
small_gpt = load("small_gpt", ROOT / "tests/dist/small_gpt.py")

CORE = dict(recompute_granularity="selective", recompute_modules=["core_attn"])
MODELS = {
    "dense": dict(),
    "dense-bf16": dict(params_dtype=torch.bfloat16, hidden_dropout=0.1, attention_dropout=0.1),
    "dense-recompute": CORE,
    "moe": dict(moe=True, moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=0.1),
    "mla": dict(mla=True),
    "mla-recompute": dict(mla=True, **CORE),
}


def digest(tensors):
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


for name, model in MODELS.items():
    with parallel():
        cfg = small_gpt.config(**model)
        trainer = small_gpt.Trainer(cfg, small_gpt.build(cfg))
        [chunk] = trainer.chunks
        logits = []
        hook = chunk.output_layer.register_forward_hook(lambda m, i, out: logits.append(out[0].clone()))  # noqa: B023
        gradients = []
        batches = small_gpt.tokens()
        for _ in range(3):
            loss = trainer.backward(batches)
            gradients += [p.main_grad.clone() for p in chunk.parameters()]
            trainer.optimizer.step()
        assert len(logits) >= 12 and loss > 0
        print(name, digest(logits), digest(gradients), digest(chunk.parameters()), repr(loss))

import megatron.core  # noqa: E402

for name in sorted(sys.modules):
    if name.startswith(("megatron.core.tree_training", "megatron.core.transformer.tree_attention")):
        print("imports", name)
print("from", megatron.core.__file__, file=sys.stderr)
