"""One rank of a two-stage pipeline. bench_p2p.py starts two on each tree, tests/gpu/test_p2p_nccl.py two.

    python -m torch.distributed.run --standalone --nproc-per-node=2 benchmarks/pipeline_worker.py time|check

Runs on NCCL, or small on CPU with gloo. megatron is whatever PYTHONPATH names, patched or not; only the cases
with one communicator need the patched tree. Rank 0 prints the figures as one line of JSON.
"""

import importlib.util
import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

CUDA = torch.cuda.is_available()
if not CUDA:  # from its file: upstream's tree has no such module
    path = Path(__file__).parents[1] / "megatron/cpu_runtime.py"
    spec = importlib.util.spec_from_file_location("cpu_runtime", path)
    runtime = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(runtime)
    runtime.install()
    torch.set_num_threads(1)

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

try:
    from megatron.core import pipeline_groups
except ImportError:
    pipeline_groups = None

VOCAB = 8192 if CUDA else 64
# One message is [sequence, micro-batch, hidden]: 2048 x 2 x 8192 in bf16 are 64 MiB.
BIG = dict(sequence=2048, batch=2, hidden=8192, heads=32, ffn=2048, dtype=torch.bfloat16)
SMALL = dict(sequence=48, batch=2, hidden=32, heads=4, ffn=48, dtype=torch.float32)
LAYERS = 4

LAYOUTS = {
    "PP2": dict(),
    "PP2, batched": dict(batch_p2p_comm=True),
    "PP2 x VPP2": dict(vpp=2),
    "PP2 x VPP2, overlap": dict(vpp=2, overlap_p2p_comm=True),
    "PP2 x VPP2, overlap in warm-up too": dict(
        vpp=2, overlap_p2p_comm=True, overlap_p2p_comm_warmup_flush=True
    ),
}
ONE_COMMUNICATOR = ("PP2", "PP2 x VPP2", "PP2 x VPP2, overlap")
DIFFERENT_LENGTHS = ("PP2", "PP2 x VPP2, overlap")  # timed; upstream stops for ever in some of the others


def device():
    return torch.device("cuda", torch.cuda.current_device()) if CUDA else torch.device("cpu")


def config(size, stages, vpp=None, **options):
    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=size["hidden"],
        num_attention_heads=size["heads"],
        num_query_groups=size["heads"] // 4,
        ffn_hidden_size=size["ffn"],
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
        persist_layer_norm=False,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=vpp,
        params_dtype=size["dtype"],
        pipeline_dtype=size["dtype"],
        bf16=size["dtype"] == torch.bfloat16,
        batch_p2p_comm=options.pop("batch_p2p_comm", False),
        **options,
    )


def build(size, stages, vpp=None, **options):
    """The chunks of this rank; weights depend on the layer's number alone, so that layouts compare."""
    cfg = config(size, stages, vpp, **options)
    chunks = []
    for stage in range(vpp) if vpp else [None]:
        chunk = GPTModel(
            cfg,
            get_gpt_layer_local_spec(normalization="RMSNorm"),
            VOCAB,
            size["sequence"],
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            vp_stage=stage,
        ).to(size["dtype"])
        chunk.to(device())
        for number, module in [(0, chunk), *((layer.layer_number, layer) for layer in chunk.decoder.layers)]:
            generator = torch.Generator(device()).manual_seed(number)
            for name, parameter in module.named_parameters():
                if parameter.dim() > 1 and (number or "decoder" not in name):
                    if name == "output_layer.weight":  # with or without the embedding on this rank
                        generator.manual_seed(1000)
                    parameter.data.normal_(0, 0.02, generator=generator)
        chunks.append(chunk)
    return cfg, chunks


def stepper(size, chunks, vpp, micro_batches=8, varied=False):
    """A function that runs forward and backward of one step; the mean loss on the last stage, else None.

    varied: every micro-batch is shorter than the one before.
    """
    generator = torch.Generator().manual_seed(7)
    shape = (size["batch"], size["sequence"])
    batches = [torch.randint(0, VOCAB, shape, generator=generator).to(device()) for _ in range(micro_batches)]
    if varied:
        batches = [batch[:, : size["sequence"] - 5 * i] for i, batch in enumerate(batches)]
    positions = torch.arange(size["sequence"], device=device())[None].expand(shape)
    square = torch.ones(size["sequence"], size["sequence"], dtype=torch.bool, device=device())
    mask = square.triu(1)[None, None]

    def forward_step(iterator, model):
        batch = next(iterator)
        n = batch.shape[1]
        out = model(batch, positions[:, :n], mask[..., :n, :n], labels=batch.roll(-1, 1))
        return out, lambda loss: (loss.float().mean(), {"loss": loss.detach().float().mean()})

    def step():
        for chunk in chunks:
            chunk.zero_grad(set_to_none=True)
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(batches) for _ in chunks] if vpp else iter(batches),
            model=chunks if vpp else chunks[0],
            num_microbatches=micro_batches,
            seq_length=size["sequence"],
            micro_batch_size=size["batch"],
            forward_only=False,
        )
        return sum(float(entry["loss"]) for entry in losses) / micro_batches if losses else None

    return step


class Groups:
    """Megatron's groups for a number of stages; the second communicator withheld if asked for."""

    def __init__(self, stages, vpp=None, one_communicator=False):
        self.options = (stages, vpp, one_communicator)

    def __enter__(self):
        stages, vpp, one_communicator = self.options
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=stages, virtual_pipeline_model_parallel_size=vpp
        )
        model_parallel_cuda_manual_seed(1)
        if one_communicator:
            pipeline_groups._OVERLAP_GROUPS.pop(parallel_state.get_pipeline_model_parallel_group())

    def __exit__(self, *exc):
        parallel_state.destroy_model_parallel()


class CallsOnWorld:
    """Counts the point-to-point calls that name no group, or the group of all ranks."""

    def __enter__(self):
        self.count, c10d = 0, dist.distributed_c10d
        self.real = {name: getattr(c10d, name) for name in ("isend", "irecv")}
        for name, function in self.real.items():

            def counted(*args, function=function, **kwargs):
                group = kwargs.get("group", args[2] if len(args) > 2 else None)
                self.count += group is None or group is dist.group.WORLD
                return function(*args, **kwargs)

            setattr(dist, name, counted)
            setattr(c10d, name, counted)
        return self

    def __exit__(self, *exc):
        for name, function in self.real.items():
            setattr(dist, name, function)
            setattr(dist.distributed_c10d, name, function)


def synchronize():
    if CUDA:
        torch.cuda.synchronize()


def step_ms(step, repeats):
    """Milliseconds of each repetition, that of the slower rank."""
    times = []
    for i in range(repeats + 2):
        dist.barrier()
        synchronize()
        begin = time.perf_counter()
        step()
        synchronize()
        taken = torch.tensor([1e3 * (time.perf_counter() - begin)], device=device())
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        if i >= 2:
            times.append(float(taken))
    return statistics.median(times)


def exchange(mib):
    """Both directions at once: what a steady step of the pipeline sends and receives."""
    cfg = config(BIG, 2)
    communicator = P2PCommunicator(parallel_state.get_pipeline_model_parallel_group(), cfg)
    first = parallel_state.is_pipeline_first_stage()
    shape = (mib, 512, 1024)
    tensor = torch.full(shape, float(dist.get_rank() + 1), dtype=torch.bfloat16, device=device())

    def run(count=10):
        for _ in range(count):
            if first:
                got = communicator.send_forward_recv_backward(tensor, shape, is_last_stage=False)
            else:
                got = communicator.send_backward_recv_forward(tensor, shape, is_first_stage=False)
        return got

    assert bool((run(1) == 2 - dist.get_rank()).all())
    return run


def one_communicator_cases():
    return ONE_COMMUNICATOR if pipeline_groups else ()


def measure(only=()):
    """{case: {metric: value}}; of the layouts in ``only``, or of everything."""
    size, result = (BIG, {}) if CUDA else (SMALL, {})
    repeats = 6 if CUDA else 2
    cases = {name: (name, False, False) for name in LAYOUTS}
    cases |= {f"{name}, one communicator": (name, True, False) for name in one_communicator_cases()}
    cases |= {f"{name}, different lengths": (name, False, True) for name in DIFFERENT_LENGTHS}
    for case, (name, alone, varied) in cases.items():
        if only and case not in only:
            continue
        layout = layout_of(name, varied)
        vpp = layout.get("vpp")
        with Groups(2, vpp, alone):
            _, chunks = build(size, 2, **layout)
            step = stepper(size, chunks, vpp, varied=varied)
            with CallsOnWorld() as calls:
                loss = step()
            count = torch.tensor([calls.count], device=device())
            dist.all_reduce(count)
            losses = [None, None]
            dist.all_gather_object(losses, loss)
            result[case] = {
                "step": step_ms(step, repeats), "calls on WORLD": int(count), "loss": losses[1]
            }  # fmt: skip
            del chunks, step
        if CUDA:
            torch.cuda.empty_cache()
    if CUDA and not only:
        for mib in (64, 256):
            with Groups(2):
                result[f"exchange {mib} MiB"] = {"exchange": step_ms(exchange(mib), repeats) / 10}
    return result


def check():
    """Every layout gives the loss and the gradients of a single stage, and calls nothing on WORLD."""
    result = {}
    cases = [(n, False) for n in LAYOUTS] + [(n, True) for n in one_communicator_cases()]
    for name, alone in cases:
        result[name + (", one communicator" if alone else "")] = compare(name, alone)
    for name in LAYOUTS if pipeline_groups else ():
        for count in (2, 8):  # two: the first stage runs all forward passes before any backward pass
            result[f"{name}, {count} different lengths"] = compare(name, False, count, True)
    return result


def layout_of(name, varied):
    """The configuration of a layout; upstream's default dispatcher refuses lengths, also in a dense model."""
    more = dict(variable_seq_lengths=True, moe_token_dispatcher_type="alltoall") if varied else {}
    return {**LAYOUTS[name], **more}


def compare(name, alone, micro_batches=8, varied=False):
    """(largest relative difference from a single stage, calls on WORLD) of one layout."""
    with Groups(1):
        _, [whole] = build(SMALL, 1)
        expected_loss = stepper(SMALL, [whole], None, micro_batches, varied)()
        expected = {name: p.grad for name, p in whole.named_parameters()}
    layout = layout_of(name, varied)
    vpp = layout.get("vpp")
    with Groups(2, vpp, alone):
        _, chunks = build(SMALL, 2, **layout)
        with CallsOnWorld() as calls:
            loss = stepper(SMALL, chunks, vpp, micro_batches, varied)()
        worst = 0.0 if loss is None else abs(loss / expected_loss - 1)
        for chunk in chunks:
            assert len(chunk.decoder.layers) == LAYERS // 2 // len(chunks)
            for layer in chunk.decoder.layers:
                for parameter, p in layer.named_parameters():
                    full = expected[f"decoder.layers.{layer.layer_number - 1}.{parameter}"]
                    worst = max(worst, float((p.grad - full).abs().max() / full.abs().max()))
    figures = torch.tensor([worst, calls.count], dtype=torch.float64, device=device())
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    return figures.tolist()


if __name__ == "__main__":
    if CUDA:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if CUDA else "gloo")
    figures = measure(sys.argv[2:]) if sys.argv[1] == "time" else check()
    if dist.get_rank() == 0:
        import megatron.core

        print("FIGURES " + json.dumps({"from": megatron.core.__file__, "cases": figures}), flush=True)
    dist.destroy_process_group()
