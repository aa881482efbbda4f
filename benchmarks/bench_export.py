"""Exporting full Hugging Face tensors from two GPUs, against a bare all-gather of the same bytes.

    python benchmarks/bench_export.py            # Qwen3-8B at TP2, Qwen3-30B-A3B (12 of 48 layers) at EP2

In one run of two ranks: `export` (gather, rearrange, hand out; the caller does nothing) with the plan cached,
`host` (of that, what the host takes to issue it), `host loop` (a fixed loop in Python: 3.6 ms in a run in
which the host of two H200 took 20 ms for the second case, 6.3 ms in one in which it took 31), `first export`
(it also works out the steps; memory is not yet reserved), `all_gather` (the same bytes with
all_gather_into_tensor, a bucket at a time into one buffer, nothing else), `per parameter` (a list all_gather
and a concatenation for each parameter, which is how trainers do it). Times are of the slower rank, medians;
what is compared takes turns. The limit of a gather is half of its bytes over 450 GB/s (NVLink of H100 and
H200, one direction). `writes` counts memory written per exported byte, from the schedule: packed, received
and rearranged. On CPU it runs small, for a check.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "build/tree"), str(ROOT)]

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
QWEN3_8B = dict(
    model_type="qwen3",
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=False,
)
QWEN3_30B_A3B = dict(
    model_type="qwen3_moe",
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    moe_intermediate_size=768,
    num_experts=128,
    num_experts_per_tok=8,
    num_hidden_layers=12,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    tie_word_embeddings=False,
    mlp_only_layers=[],
    decoder_sparse_step=1,
)
SMALL = dict(vocab_size=512, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=16)
SMALL |= dict(num_attention_heads=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2)
CASES = {
    "Qwen3-8B TP2": (QWEN3_8B, dict(tensor_model_parallel_size=2)),
    "Qwen3-30B-A3B 12 layers EP2": (QWEN3_30B_A3B, dict(expert_model_parallel_size=2)),
}


def build(hf):
    """The model on this rank; weights without meaning, but all different."""
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import TransformerConfig

    moe = {}
    if hf.model_type == "qwen3_moe":
        moe = dict(
            num_moe_experts=hf.num_experts,
            moe_router_topk=hf.num_experts_per_tok,
            moe_ffn_hidden_size=hf.moe_intermediate_size,
            moe_token_dispatcher_type="alltoall",
            moe_router_load_balancing_type="none",
        )
    config = TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=hf.head_dim,
        ffn_hidden_size=hf.intermediate_size,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        qk_layernorm=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        tensor_model_parallel_size=ps.get_tensor_model_parallel_world_size(),
        expert_model_parallel_size=ps.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=ps.get_expert_tensor_parallel_world_size(),
        **moe,
    )
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    model = GPTModel(
        config,
        spec,
        hf.vocab_size,
        max_sequence_length=4096,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    model = model.to(DEVICE, torch.bfloat16)  # the local norms are made on the CPU
    generator = torch.Generator(DEVICE).manual_seed(dist.get_rank())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(generator=generator)
    return model


def synchronize():
    if CUDA:
        torch.cuda.synchronize()


def seconds(*runs, repeats=5):
    """For each of ``runs``, which take turns: the slower rank's wall time until it returns, and until the
    device is done; medians without the first of ``repeats + 1``, or with 0 the only one.
    """
    times = [[] for _ in runs]
    for _ in range(repeats + 1):
        for run, taken in zip(runs, times, strict=True):
            synchronize()
            dist.barrier()
            synchronize()
            begin = time.perf_counter()
            run()
            returned = time.perf_counter() - begin
            synchronize()
            slower = torch.tensor([returned, time.perf_counter() - begin], device=DEVICE)
            dist.all_reduce(slower, op=dist.ReduceOp.MAX)
            taken.append(slower.tolist())
    return [[statistics.median(column) for column in zip(*(t[1:] or t), strict=True)] for t in times]


def host_loop():
    sum(range(300_000))


def warm_up(plan):
    """One collective per group, so that no figure holds the start of NCCL."""
    for group in (plan.process_groups.tp, plan.process_groups.tp_ep):
        dist.all_reduce(torch.zeros(1, device=plan.entries[0].tensor.device), group=group)


def per_parameter(plan):
    """For each parameter a list of shards and their concatenation."""
    for entry in plan.entries:
        group = plan.process_groups.tp_ep if entry.record.kind == "expert" else plan.process_groups.tp
        if group.size() == 1 or entry.record.replicated:
            continue
        local = entry.tensor.detach()
        parts = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(parts, local, group=group)
        torch.cat(parts)


def exhaust(plan, receivers="all"):
    from megatron.core.param_export import export

    for _ in export(plan, receivers):
        pass


def changed_elements(plan, share):
    out = []
    for entry in plan.entries:
        index = torch.arange(0, entry.tensor.numel(), round(1 / share), device=entry.tensor.device)
        out.append((entry.tensor, index, entry.tensor.detach().view(-1)[index]))
    return out


def measure(hf):
    from megatron.core.param_export import build_plan, export_changed
    from megatron.core.param_export.exporter import DEFAULT_BUCKET_BYTES

    model = build(hf)
    figures = {}
    begin = time.perf_counter()
    plan = build_plan(model, hf)
    figures["plan"] = time.perf_counter() - begin
    begin = time.perf_counter()
    plan.prove()
    figures["proof"] = time.perf_counter() - begin
    warm_up(plan)
    [[_, figures["first export"]]] = seconds(lambda: exhaust(plan), repeats=0)
    [steps] = [made.steps for made in plan.schedules.values()]
    total = sum(plan.nbytes(name) for name in plan.expected)
    figures |= dict(bytes=total, tensors=len(plan.expected), steps=len(steps))

    device = plan.entries[0].tensor.device
    written = gathered = 0
    rows_of = {kind: len(ranks) for kind, ranks in plan.position.gather.items()}
    for step in steps:
        for part in step.parts:
            rows = rows_of[part.kind]
            written += rows * part.row.nbytes + part.whole.nbytes
            if rows > 1:
                gathered += rows * part.row.nbytes
        written += step.built
    figures |= dict(writes=written / total, gathered=gathered, limit=gathered / 2 / 450e9)

    def bare():
        full = torch.empty(min(512 * 2**20, gathered), dtype=torch.uint8, device=device)
        for begin in range(0, gathered, len(full)):
            run = full[: min(len(full), gathered - begin)]
            row = run.view(2, -1)[dist.get_rank()]
            given = row if CUDA else row.clone()
            work = dist.all_gather_into_tensor(run, given, async_op=True)
        work.wait()

    if CUDA:
        exhaust(plan)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["active_bytes.all.current"]
        exhaust(plan)
        torch.cuda.synchronize()
        figures["peak"] = torch.cuda.memory_stats()["active_bytes.all.peak"] - before
        figures["bucket"] = max(DEFAULT_BUCKET_BYTES, *(step.nbytes for step in steps))
    (host, done), (_, bare_done), (loop, _) = seconds(lambda: exhaust(plan), bare, host_loop, repeats=10)
    figures |= {"export": done, "host": host, "all_gather": bare_done, "host loop": loop}
    (_, to_0), (_, singly) = seconds(lambda: exhaust(plan, 0), lambda: per_parameter(plan), repeats=3)
    figures |= {"export to rank 0": to_0, "per parameter": singly}
    for share in (0.01, 0.001):
        rows = changed_elements(plan, share)
        [[_, taken]] = seconds(lambda rows=rows: list(export_changed(plan, rows)), repeats=3)
        figures[f"changed {share:.1%}"] = taken
    return figures


def worker():
    if not CUDA:
        import megatron.cpu_runtime

        megatron.cpu_runtime.install()
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    dist.init_process_group("nccl" if CUDA else "gloo")
    found = {}
    for case, (fields, groups) in CASES.items():
        parallel_state.initialize_model_parallel(**groups)
        model_parallel_cuda_manual_seed(1, force_reset_rng=True)
        found[case] = measure(SimpleNamespace(**(fields | ({} if CUDA else SMALL))))
        parallel_state.destroy_model_parallel()
        if CUDA:
            torch.cuda.empty_cache()
    if dist.get_rank() == 0:
        print("FIGURES " + json.dumps(found), flush=True)
    dist.destroy_process_group()


def main():
    from benchmarks.recording import Recording, device_name

    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    if parser.parse_args().worker:
        worker()
        return
    if CUDA and torch.cuda.device_count() < 2:
        print(f"needs two GPUs, here is one {device_name()}: nothing measured")
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}/build/tree:{ROOT}", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [*command, __file__, "--worker"], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FIGURES ")]
    if done.returncode or not lines:
        raise RuntimeError(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    recording = Recording("export")
    for case, f in json.loads(lines[0].removeprefix("FIGURES ")).items():
        recording.add(case, "exported", f["bytes"] / 1e9, "GB")
        recording.add(case, "tensors", f["tensors"], "tensors")
        recording.add(case, "plan", f["plan"], "s")
        recording.add(case, "proof", f["proof"], "s")
        bare = f["all_gather"] * 1e3
        recording.add(case, "all_gather", bare, "ms", limit=f["limit"] * 1e3)
        recording.add(case, "export", f["export"] * 1e3, "ms", bare, limit=f["limit"] * 1e3)
        recording.add(case, "host", f["host"] * 1e3, "ms", f["export"] * 1e3)
        recording.add(case, "host loop", f["host loop"] * 1e3, "ms")
        recording.add(case, "first export", f["first export"] * 1e3, "ms", f["export"] * 1e3)
        recording.add(
            case, "share of all_gather's bandwidth", f["all_gather"] / f["export"], "of it", limit=1
        )
        recording.add(case, "export to rank 0", f["export to rank 0"] * 1e3, "ms", bare)
        recording.add(case, "per parameter", f["per parameter"] * 1e3, "ms", f["export"] * 1e3)
        recording.add(case, "writes", f["writes"], "bytes written per byte", limit=2)
        if "peak" in f:
            bucket = f["bucket"] / 2**20  # the default, or the largest tensors that travel alone
            recording.add(case, "peak extra memory", f["peak"] / 2**20, "MiB", bucket, limit=2 * bucket)
        for metric in ("changed 1.0%", "changed 0.1%"):
            recording.add(case, metric, f[metric] * 1e3, "ms", f["export"] * 1e3)
    if CUDA:
        recording.write()
    else:
        print("not recorded: these are figures of a CPU")


if __name__ == "__main__":
    main()
