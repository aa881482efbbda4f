"""What knowing the changed elements costs, on one GPU, against the plain copy in the same run.

    python benchmarks/bench_sparse_diff.py            # 2^30 elements, 1 % and 0.1 % changed, and all of them

Times are medians of device events. Bits are zeroed between repetitions, outside the timed region, and the
source alternates between two tensors that differ in the given share of elements, so that every repetition
does the work of a first one. Results are checked against a comparison of whole copies before anything is
timed.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "build/tree"), str(ROOT)]

from benchmarks.recording import Recording  # noqa: E402
from megatron.core.optimizer.sparse_diff import kernels, sparse_diff_context  # noqa: E402
from megatron.core.optimizer.sparse_diff.context import bind  # noqa: E402
from megatron.core.optimizer.sparse_diff.shards import HookedShard, seal  # noqa: E402

STORES = {"every element": False, "eights that changed": True}


def median_ms(work, prepare=lambda i: None, repeats=15):
    """Median device milliseconds of `work(i)`; `prepare(i)` runs before it, untimed. Each is queued behind a
    pause, so that the device does not wait for the host's launches."""
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


def launch_ms(work, repeats=9):
    """Median milliseconds that the host needs to launch `work(i)` while the device is busy."""
    times = []
    for i in range(repeats + 1):
        torch.cuda._sleep(100_000_000)
        begin = time.perf_counter()
        work(i)
        times.append(1e3 * (time.perf_counter() - begin))
        torch.cuda.synchronize()
    return statistics.median(times[1:])


def least_bytes(density, skip):
    """Bytes to and from memory per element: fp32 source, bf16 target and mask, in sectors of 32 bytes."""
    written = 1 - (1 - density) ** 16 if skip else 1
    return 4 + 2 + 2 * written + (1 + 1 - (1 - density) ** 256) / 8


def one_tensor(rows, numel, share):
    case = f"2^{numel.bit_length() - 1} elements, {share:.1%} changed"
    gen = torch.Generator(device="cuda").manual_seed(1)
    mains = [torch.randn(numel, generator=gen, device="cuda")]
    mains.append(mains[0].clone())
    for begin in range(0, numel, 1 << 28):
        part = mains[1][begin : begin + (1 << 28)]
        part[torch.rand(part.shape, generator=gen, device="cuda") < share] += 1.0
    model = mains[0].bfloat16()
    words = torch.zeros(-(-numel // 32), dtype=torch.int32, device="cuda")
    probe = torch.zeros(1, dtype=torch.int64, device="cuda")

    before = model.clone()
    kernels.capture(model, mains[1], words)
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
    for name, skip in STORES.items():

        def work(i, skip=skip):
            kernels.capture(model, mains[i % 2], words, skip)

        taken = median_ms(work, lambda i: words.zero_())
        limit = least_bytes(changed / numel, skip) / 6
        rows.add(case, f"capture, stores {name}", taken, "ms", plain, limit=limit)

    def expand(i):
        return kernels.expand([words], [model], [0], probe)

    def refill(i):
        words.zero_()
        kernels.capture(model, mains[i % 2], words)

    refill(0), refill(1)
    # words twice, indices and values written, a 32-byte sector read per value at most
    least = (2 * words.nbytes + changed * (8 + 2 + 2)) / 1e9
    rows.add(case, "expand (with values)", median_ms(expand), "ms", plain)

    def capture_and_expand(i):
        kernels.capture(model, mains[i % 2], words)
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


def whole_step(rows):
    case = "AdamW step, Qwen3-8B over 8"
    sizes = qwen3_8b_pieces()
    gen = torch.Generator(device="cuda").manual_seed(2)
    params = [
        torch.nn.Parameter(0.02 * torch.randn(n, generator=gen, device="cuda").bfloat16()) for n in sizes
    ]
    mains = [p.detach().float().requires_grad_() for p in params]
    for main in mains:
        main.grad = torch.randn(main.shape, generator=gen, device="cuda")
    optimizer = torch.optim.AdamW(mains, lr=1e-6, fused=True)
    shards = [p.detach().view(-1) for p in params]

    @torch.no_grad()
    def step(i):
        optimizer.step()
        for shard, main in zip(shards, mains, strict=True):
            with sparse_diff_context(shard, main) as copy:
                copy()

    plain, plain_launch = median_ms(step), launch_ms(step)
    rows.add(case, "without", plain, "ms")
    rows.add(case, "without, host", plain_launch, "ms")
    held = [HookedShard(p, 0, p.numel()) for p in params]
    for shard, param, main in zip(held, params, mains, strict=True):
        bind(shard, param, main)
    rows.add(case, "with the bitmask", median_ms(step), "ms", plain, limit=1.02)
    rows.add(case, "with the bitmask, host", launch_ms(step), "ms", plain_launch)
    changed = sum(c.indices.numel() for c in seal(held))
    rows.add(case, "changed over these steps", changed / sum(sizes), "of the elements")
    rows.add(case, "seal: indices and values of all", median_ms(lambda i: seal(held), repeats=5), "ms", plain)


def host_to_device(rows, numel=1 << 28):
    case = "2^28 elements from the host"
    model = torch.zeros(numel, dtype=torch.bfloat16, device="cuda")
    mains = [torch.randn(numel).pin_memory() for _ in range(2)]
    shard = HookedShard(torch.nn.Parameter(model), 0, numel)
    plain = median_ms(lambda i: model.copy_(mains[i % 2], non_blocking=True), repeats=5)
    rows.add(case, "plain copy_, pinned fp32", plain, "ms")
    ours = median_ms(lambda i: shard.copy_captured(model, mains[i % 2], True), repeats=5)
    rows.add(case, "transfer, then capture", ours, "ms", plain)


def sweep(numel):
    """Times of other tiles, printed and not recorded: the constants in `kernels` come from them."""
    gen = torch.Generator(device="cuda").manual_seed(1)
    mains = [torch.randn(numel, generator=gen, device="cuda")] * 2
    mains[1] = torch.where(torch.rand(numel, generator=gen, device="cuda") < 0.01, mains[0] + 1, mains[0])
    model = mains[0].bfloat16()
    words = torch.zeros(-(-numel // 32), dtype=torch.int32, device="cuda")
    plain = median_ms(lambda i: model.copy_(mains[i % 2]))
    for tile in (128, 256, 512, 1024):
        for warps in (2, 4, 8):
            for name, skip in STORES.items():

                def work(i, how=(skip, tile, warps)):
                    kernels.capture(model, mains[i % 2], words, *how)

                taken = median_ms(work, lambda i: words.zero_(), repeats=5)
                print(f"capture {tile=} {warps=} stores {name}: {taken:.3f} ms, {taken / plain:.3f}x")
    probe = torch.zeros(1, dtype=torch.int64, device="cuda")
    for kernels.EXPAND_WORDS in (128, 256, 512, 1024, 2048):
        taken = median_ms(lambda i: kernels.expand([words], [model], [0], probe), repeats=5)
        print(f"expand words={kernels.EXPAND_WORDS}: {taken:.3f} ms, {taken / plain:.3f}x of a copy")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--log2-elements", type=int, default=30)
    parser.add_argument("--sweep", action="store_true", help="print times of other block shapes instead")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_sparse_diff measures a GPU, and there is none here")
    if options.sweep:
        return sweep(1 << options.log2_elements)
    rows = Recording("sparse_diff")
    for share in (0.01, 0.001, 1.0):
        one_tensor(rows, 1 << options.log2_elements, share)
        torch.cuda.empty_cache()
    host_to_device(rows)
    whole_step(rows)
    rows.write()


if __name__ == "__main__":
    main()
