"""What knowing the changed elements costs, on one GPU, against the plain copy in the same run.

    python benchmarks/bench_sparse_diff.py            # 2^30 elements, 1 % and 0.1 % changed, and all of them
    python benchmarks/bench_sparse_diff.py --check    # every part at tiny sizes, without a GPU too

Kernel times are medians of device events, those of whole optimizer steps of the wall clock. Bits are zeroed
between repetitions, outside the timed region, and the source alternates between two tensors that differ in
the given share of elements, so that every repetition does the work of a first one. Results are checked
against a comparison of whole copies before anything is timed.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "build/tree"), str(ROOT)]

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
if not CUDA:  # --check
    os.environ["TRITON_INTERPRET"] = "1"
    import megatron.cpu_runtime

    megatron.cpu_runtime.install()

from benchmarks.recording import Recording  # noqa: E402
from megatron.core.optimizer.sparse_diff import attach, kernels  # noqa: E402
from megatron.core.optimizer.sparse_diff.shards import HookedShard  # noqa: E402


def synchronize():
    if CUDA:
        torch.cuda.synchronize()


def median_ms(work, prepare=lambda i: None, repeats=15):
    """Median device milliseconds of `work(i)`; `prepare(i)` runs before it, untimed. Each is queued behind a
    pause, so that the device does not wait for the host's launches."""
    if not CUDA:
        return statistics.median(wall_ms(work, prepare, i) for i in range(repeats))
    times = []
    for i in range(repeats + 3):
        prepare(i)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(20_000_000)
        begin.record()
        work(i)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[3:])


def wall_ms(work, prepare=lambda i: None, i=0):
    """Milliseconds until the device has done `work(i)`, after an untimed `prepare(i)`."""
    prepare(i)
    synchronize()
    begin = time.perf_counter()
    work(i)
    synchronize()
    return 1e3 * (time.perf_counter() - begin)


def launch_ms(work, repeats=9):
    """Median milliseconds that the host needs to launch `work(i)` while the device is busy."""
    times = []
    for i in range(repeats + 1):
        if CUDA:
            torch.cuda._sleep(100_000_000)
        begin = time.perf_counter()
        work(i)
        times.append(1e3 * (time.perf_counter() - begin))
        synchronize()
    return statistics.median(times[1:])


def least_bytes(density):
    """Bytes to and from memory per element: fp32 source, bf16 target and mask, in sectors of 32 bytes."""
    written = 1 - (1 - density) ** 16
    return 4 + 2 + 2 * written + (1 + 1 - (1 - density) ** 256) / 8


def one_tensor(rows, numel, share):
    case = f"2^{numel.bit_length() - 1} elements, {share:.1%} changed"
    gen = torch.Generator(device=DEVICE).manual_seed(1)
    mains = [torch.randn(numel, generator=gen, device=DEVICE)]
    mains.append(mains[0].clone())
    for begin in range(0, numel, 1 << 28):
        part = mains[1][begin : begin + (1 << 28)]
        part[torch.rand(part.shape, generator=gen, device=DEVICE) < share] += 1.0
    if not CUDA:  # Triton's interpreter truncates where the hardware rounds
        mains = [main.bfloat16().float() for main in mains]
    model = mains[0].bfloat16()
    words = torch.zeros(-(-numel // 32), dtype=torch.int32, device=DEVICE)
    probe = torch.zeros(1, dtype=torch.int64, device=DEVICE)

    before = model.clone()
    kernels.capture([model], [mains[1]], [words])
    [(indices, values)], _ = kernels.expand([words], [model], [0], probe)
    expected = (before.view(torch.int16) != mains[1].bfloat16().view(torch.int16)).nonzero().view(-1)
    if not (torch.equal(indices, expected) and torch.equal(values, model[indices])):
        raise AssertionError(f"{case}: the bitmask is not the comparison")
    if not torch.equal(model.view(torch.int16), mains[1].bfloat16().view(torch.int16)):
        raise AssertionError(f"{case}: the captured copy is not the copy")
    changed = indices.numel()
    del before, expected, indices, values

    plain = median_ms(lambda i: model.copy_(mains[i % 2]))
    rows.add(case, "plain copy_", plain, "ms")

    def snapshot(i):
        old = model.clone()
        model.copy_(mains[i % 2])
        (old.view(torch.int16) != model.view(torch.int16)).nonzero()

    rows.add(case, "snapshot + compare + nonzero", median_ms(snapshot, repeats=7), "ms", plain)

    def capture(i):
        kernels.capture([model], [mains[i % 2]], [words])

    taken = median_ms(capture, lambda i: words.zero_())
    rows.add(case, "capture", taken, "ms", plain, limit=least_bytes(changed / numel) / 6)

    def expand(i):
        return kernels.expand([words], [model], [0], probe)

    def refill(i):
        words.zero_()
        capture(i)

    refill(0), refill(1)
    # words twice, indices and values written, a 32-byte sector read per value at most
    least = (2 * words.nbytes + changed * (8 + 2 + 2)) / 1e9
    rows.add(case, "expand (with values)", median_ms(expand), "ms", plain)

    def capture_and_expand(i):
        capture(i)
        expand(i)

    both = median_ms(capture_and_expand, lambda i: words.zero_())
    rows.add(case, "capture + expand", both, "ms", plain)
    rows.add(case, "bytes that expand must move", least, "GB")
    rows.add(case, "bitmask memory", words.nbytes / model.nbytes, "of the bf16 shard", limit=1 / 16)


def qwen3_8b_pieces(parts=8):
    """Element counts of Qwen3-8B's tensors as Megatron fuses them, each cut over `parts` ranks."""
    hidden, ffn, vocabulary, layers = 4096, 12288, 151936, 36
    layer = [
        hidden * (32 + 2 * 8) * 128,
        hidden * hidden,
        2 * hidden * ffn,
        hidden * ffn,
        hidden,
        hidden,
        128,
        128,
    ]
    return [-(-n // parts) for n in [hidden * vocabulary, *layer * layers, hidden, hidden * vocabulary]]


def build_optimizer(sizes):
    """`(optimizer, its DistributedOptimizer, DDP chunk, name of Adam)` over bf16 parameters of `sizes`."""
    import megatron.core.optimizer as optimizers
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import MegatronModule

    class Weights(MegatronModule):
        def __init__(self, config):
            super().__init__(config)
            self.pieces = torch.nn.ParameterList(
                torch.empty(n, dtype=torch.bfloat16, device=DEVICE) for n in sizes
            )

    transformer = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    chunk = DistributedDataParallel(transformer, ddp, Weights(transformer))
    config = optimizers.OptimizerConfig(
        optimizer="adam", lr=1e-6, weight_decay=0.0, bf16=True, use_distributed_optimizer=True
    )
    optimizer = optimizers.get_megatron_optimizer(config, [chunk])
    [leaf] = optimizer.chained_optimizers
    if isinstance(leaf.optimizer, torch.optim.AdamW):
        for group in leaf.optimizer.param_groups:
            group.update(fused=True, foreach=False)  # the fastest there is: overhead shows most
    inner = type(leaf.optimizer)
    return optimizer, leaf, chunk, f"{inner.__module__.split('.')[0]} {inner.__name__}, fused"


class Training:
    """`optimizer.step()` of DistributedOptimizer: clipping, Adam, the copies, the parameter sync.

    One data-parallel rank, so that no communication hides anything. Gradients are new noise for every step,
    as sampled rewards give: Adam then moves a weight by about a fifth of the learning rate.
    """

    def __init__(self, sizes, lr):
        self.optimizer, self.leaf, self.chunk, self.adam = build_optimizer(sizes)
        self.gen = torch.Generator(device=DEVICE).manual_seed(2)
        self.diff, self.version, self.in_flight = None, 0, False
        for group in self.leaf.shard_fp32_from_float16_groups:
            for main in group:  # anywhere in a bf16 value's interval; a bf16 checkpoint begins in its middle
                main.data.normal_(0, 0.02, generator=self.gen)
        self.copy()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for _ in range(10):  # until the first moment is an average of many gradients
            self.prepare()
            self.step()

    def step(self, _=None):
        self.optimizer.step()

    def copy(self, _=None):
        self.leaf._copy_main_params_to_model_params()

    def prepare(self, _=None):
        """New gradients; bits zero, as after a sync, or a sync that is not acknowledged yet."""
        for buffer in self.chunk.buffers:
            buffer.grad_data.normal_(generator=self.gen)
        if self.diff is not None:
            self.acknowledge()
            if self.in_flight:
                self.diff.gather_changed()

    def prepare_copy(self, _=None):
        """As `prepare`, and a step of Adam: the copy is all that is left."""
        self.prepare()
        self.leaf.prepare_grads()
        self.leaf.optimizer.step()

    def acknowledge(self):
        self.version += 1
        self.diff.clear(self.version)

    def attach(self, how):
        if self.diff is not None:
            self.diff.detach()
        self.diff = None if how == "plain" else attach(self.optimizer)
        self.in_flight = how == "bitmask, a sync in flight"

    def share_changed(self):
        """Of the elements, by one step; by the diff, which must agree with a comparison of whole copies."""
        self.attach("bitmask")
        before = [p.detach().clone() for p in self.chunk.parameters()]
        self.prepare()
        self.step()
        self.diff.gather_changed()
        changed = total = 0
        for old, param in zip(before, self.chunk.parameters(), strict=True):
            expected = (old.view(torch.int16) != param.detach().view(torch.int16)).nonzero().view(-1)
            if not torch.equal(self.diff.changed(param).indices, expected):
                raise AssertionError("the diff is not the comparison")
            changed, total = changed + expected.numel(), total + old.numel()
        self.acknowledge()
        return changed / total


def whole_step(rows, sizes, lr, note="", rounds=4, repeats=8):
    training = Training(sizes, lr)
    case = f"step of Qwen3-8B over 8, {training.adam}, lr {lr:g}{note}"
    rows.add(case, "changed by one step", training.share_changed(), "of the elements")
    metrics = ("optimizer.step()", "its copies, device", "its copies, host")
    times = {(m, how): [] for m in metrics for how in ("plain", "bitmask", "bitmask, a sync in flight")}
    for _ in range(rounds):  # in turns, so that a drift of the clocks meets all of them
        for how in ("plain", "bitmask", "bitmask, a sync in flight"):
            training.attach(how)
            step, device, host = (times[m, how] for m in metrics)
            step += [wall_ms(training.step, training.prepare) for _ in range(repeats)]
            device.append(median_ms(training.copy, training.prepare_copy, repeats=3))
            host.append(launch_ms(training.copy, repeats=3))
    for (metric, how), values in times.items():
        value, plain = statistics.median(values), statistics.median(times[metric, "plain"])
        limit = 1.02 * plain if (metric, how) == ("optimizer.step()", "bitmask") else None
        rows.add(case, f"{metric}, {how}", value, "ms", None if how == "plain" else plain, limit=limit)
    training.attach("bitmask")
    training.prepare()
    training.step()
    sync = statistics.median(wall_ms(lambda i: training.diff.gather_changed()) for _ in range(5))
    rows.add(case, "gather_changed of one step (at a sync, not in a step)", sync, "ms")
    training.attach("plain")


def host_to_device(rows, numel):
    case = f"2^{numel.bit_length() - 1} elements from the host"
    model = torch.zeros(numel, dtype=torch.bfloat16, device=DEVICE)
    mains = [torch.randn(numel, pin_memory=CUDA) for _ in range(2)]
    shard = HookedShard(torch.nn.Parameter(model), 0, numel)
    plain = median_ms(lambda i: model.copy_(mains[i % 2], non_blocking=True), repeats=5)
    rows.add(case, "plain copy_, pinned fp32", plain, "ms")
    ours = median_ms(lambda i: shard.copy_captured(model, mains[i % 2], True), repeats=5)
    rows.add(case, "transfer, then capture", ours, "ms", plain)


def sweep(numel):
    """Times of other tiles, printed and not recorded: the constants in `kernels` come from them."""
    gen = torch.Generator(device=DEVICE).manual_seed(1)
    mains = [torch.randn(numel, generator=gen, device=DEVICE)] * 2
    mains[1] = torch.where(torch.rand(numel, generator=gen, device=DEVICE) < 0.01, mains[0] + 1, mains[0])
    model = mains[0].bfloat16()
    words = torch.zeros(-(-numel // 32), dtype=torch.int32, device=DEVICE)
    plain = median_ms(lambda i: model.copy_(mains[i % 2]))
    for tile in (128, 256, 512, 1024):
        for warps in (2, 4, 8):

            def work(i, how=(tile, warps)):
                kernels.capture([model], [mains[i % 2]], [words], *how)

            taken = median_ms(work, lambda i: words.zero_(), repeats=5)
            print(f"capture {tile=} {warps=}: {taken:.3f} ms, {taken / plain:.3f}x")
    probe = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    for kernels.EXPAND_WORDS in (128, 256, 512, 1024, 2048):
        taken = median_ms(lambda i: kernels.expand([words], [model], [0], probe), repeats=5)
        print(f"expand words={kernels.EXPAND_WORDS}: {taken:.3f} ms, {taken / plain:.3f}x of a copy")
    kernels.EXPAND_WORDS = 512
    for share in (0.01, 0.03, 0.06, 0.12, 0.25, 1.0):
        set_ = torch.rand(words.numel(), 32, generator=gen, device=DEVICE) < share
        words.copy_(set_.to(torch.int64).mul_(1 << torch.arange(32, device=DEVICE)).sum(1).to(torch.int32))
        del set_
        for name, kernels.DENSE_BITS in (("by set bits", 33), ("by elements", 0)):
            for tile in (1024,) if kernels.DENSE_BITS else (512, 1024, 2048):
                kernels.DENSE_TILE = tile
                taken = median_ms(lambda i: kernels.expand([words], [model], [0], probe), repeats=5)
                print(f"expand {share:.0%} set, {name}, {tile=}: {taken:.3f} ms")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--log2-elements", type=int, default=30)
    parser.add_argument("--sweep", action="store_true", help="print times of other block shapes instead")
    parser.add_argument(
        "--check", action="store_true", help="run every part at tiny sizes, on a CPU too, and record nothing"
    )
    options = parser.parse_args()
    if not (CUDA or options.check):
        sys.exit("bench_sparse_diff measures a GPU, and there is none here; --check runs it without one")
    if options.sweep:
        return sweep(1 << options.log2_elements)
    log2, sizes = options.log2_elements, qwen3_8b_pieces()
    if options.check:
        log2, sizes = 13, [-(-n // (1 << 16)) for n in sizes]
    rows = Recording("sparse_diff")
    for share in (0.01, 0.001, 1.0):
        one_tensor(rows, 1 << log2, share)
        if CUDA:
            torch.cuda.empty_cache()
    host_to_device(rows, 1 << (log2 - 2))
    dist.init_process_group("nccl" if CUDA else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    often = {"rounds": 1, "repeats": 1} if options.check else {}
    whole_step(rows, sizes, 1e-6, **often)
    whole_step(rows, sizes, 1e-2, ": the worst case", **often)
    dist.destroy_process_group()
    if not options.check:
        rows.write()


if __name__ == "__main__":
    main()
