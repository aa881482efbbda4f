"""A training step of a decoder stack on trees and on the same trajectories linearized, in patched Megatron.

    python benchmarks/bench_tree_stack.py                   # 4 layers of Qwen3-8B, one GPU, bfloat16
    python benchmarks/bench_tree_stack.py --backend flex    # where flash-attn-4 is not installed

Local layer spec, torch's RMSNorm, no Transformer Engine, no Apex; the embedding is small and there is no
output layer, so that the stack is what is measured. A step is forward and backward of all micro-batches,
block lists included; the linear ones are packs of whole trajectories (`share_prefixes=False`) of at most
--budget tokens, through the same model and backend. The limit of the speed-up is the ratio of FLOPs: matrix
products by token, attention by pair. Without a GPU a tiny stack runs on the CPU through the reference
backend, and nothing is recorded.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "build/tree"), str(ROOT)]

if not torch.cuda.is_available():
    import megatron.cpu_runtime

    megatron.cpu_runtime.install()

import torch.distributed as dist  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from benchmarks import recording, shapes  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.tree_training import Trajectory, plan_micro_batches  # noqa: E402
from megatron.core.tree_training.estimate import ModelCost  # noqa: E402

VOCABULARY = 1024


def start():
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def stack(options):
    """(config, model): Qwen3-8B's decoder layers behind a small embedding, hidden states out."""
    tiny = not torch.cuda.is_available()
    config = TransformerConfig(
        num_layers=2 if tiny else options.layers,
        hidden_size=64 if tiny else 4096,
        ffn_hidden_size=96 if tiny else 12288,
        num_attention_heads=4 if tiny else 32,
        num_query_groups=2 if tiny else 8,
        kv_channels=16 if tiny else 128,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        qk_layernorm=True,
        layernorm_epsilon=1e-6,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.bfloat16,
        bf16=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        tree_attention_backend="reference" if tiny else options.backend,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm"),
        VOCABULARY,
        max_sequence_length=65536,
        post_process=False,
        position_embedding_type="rope",
        rotary_base=1000000,
    )
    return config, model.to(torch.bfloat16).to(device())


def device():
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def micro_batches(paths, budget, share_prefixes):
    """Packs of a step, each at most ``budget`` tokens."""
    trajectories = [Trajectory(path, [0] + [1] * (len(path) - 1)) for path in paths]
    plan = plan_micro_batches(
        trajectories, budget, pad_to_multiple_of=128, share_prefixes=share_prefixes, vocab_size=VOCABULARY
    )
    return list(plan.micro_batches(0, device()))


def step(model, batches, upstream):
    """Forward and backward of every micro-batch; gradients add up and are dropped at the next step."""
    model.zero_grad(set_to_none=True)
    for batch in batches:
        batch.tree_metadata._cache.clear()  # a new micro-batch has derived nothing yet
        hidden = model(batch.tokens, batch.position_ids, None, packed_seq_params=batch.packed_seq_params)
        hidden.backward(upstream[: hidden.shape[0]].view_as(hidden))


def seconds(run, repeats):
    run()
    times = []
    for _ in range(repeats):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def flops(cost, batches):
    """Forward FLOPs of the stack, without padding."""
    return sum(b.packed_tokens * cost.per_token + b.attended_pairs * cost.per_pair for b in batches)


def one_shape(rows, case, nodes, options, config, model):
    paths = shapes.token_paths(nodes, VOCABULARY)
    longest = -(-max(len(path) for path in paths) // 128) * 128
    tree_budget = -(-shapes.stats(nodes)["packed tokens"] // 128) * 128
    cost = ModelCost.of(config, 0)
    upstream = torch.randn(
        max(tree_budget, options.budget, longest), config.hidden_size, device=device(), dtype=torch.bfloat16
    )
    took, work = {}, {}
    for layout, budget, shared in (("tree", tree_budget, True), ("linear", options.budget, False)):
        batches = micro_batches(paths, max(budget, longest), shared)
        work[layout] = flops(cost, batches)
        took[layout] = seconds(lambda batches=batches: step(model, batches, upstream), options.repeats)
        rows.add(case, f"{layout} step, {len(batches)} micro-batches", 1e3 * took[layout], "ms")
        rows.add(case, f"{layout} step", 3 * work[layout] / took[layout] / 1e12, "TF/s")
    speedup, bound = took["linear"] / took["tree"], work["linear"] / work["tree"]
    rows.add(case, "speed-up of a step", speedup, "x", "ratio of FLOPs", speedup / bound, bound)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--backend", default="flash", help="tree_attention_backend of both layouts")
    parser.add_argument("--budget", type=int, default=32768, help="tokens of a linear micro-batch")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="names of shapes")
    options = parser.parse_args()
    start()
    config, model = stack(options)
    rows = recording.Recording("tree_stack")
    if not torch.cuda.is_available():
        options.budget, options.repeats = 256, 1
        one_shape(rows, "tiny", shapes.grpo(48, 4, 16), options, config, model)
        return
    for case, nodes in shapes.SHAPES.items():
        if not options.only or case in options.only:
            one_shape(rows, case, nodes, options, config, model)
            torch.cuda.empty_cache()
    rows.write()


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
