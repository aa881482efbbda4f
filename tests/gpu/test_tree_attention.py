"""The flex and flash backends on a GPU against the reference in float64: outputs, gradients, padding, reuse.

The measure is the error of plain causal attention by torch in the same precision on tensors of the same size:
a tree may err at most twice as much. Every case prints its errors and bounds (pytest -s). Compiling takes
nearly all of the time, about 15 s per head configuration for flex and 8 s for flash, so configurations are
few and shared; `-k flex` and `-k "not flex"` can run side by side.
"""

import dataclasses
import itertools

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TREES = {
    "chain": ([-1], [1000]),
    "one token": ([-1], [1]),
    "partial last block": ([-1, 0, 0], [130, 70, 61]),
    "single-token nodes": ([-1, *range(300)], [1] * 301),
    "fan-out 64": ([-1, *[0] * 64], [200] + [37] * 64),
    "forest": ([-1, 0, -1, -1, 3], [128, 128, 1, 127, 3]),
    "many roots": ([-1] * 97, [1 + 13 * i % 29 for i in range(97)]),
}


def backends():
    from megatron.core.transformer.tree_attention import flash

    able = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] in (9, 10)
    missing = flash.package_problem() or (None if able else "needs Hopper or newer")
    skip = pytest.mark.skipif(missing is not None, reason=str(missing))
    return ["flex", pytest.param("flash", marks=skip)]


def random_tree(seed, nodes=70, longest=90):
    generator = torch.Generator().manual_seed(seed)

    def draw(limit):
        return int(torch.randint(limit, (), generator=generator))

    parents, path = [-1], [0]
    for node in range(1, nodes):
        del path[draw(len(path) + 1) :]
        parents.append(path[-1] if path else -1)
        path.append(node)
    return parents, [1 + draw(longest) for _ in range(nodes)]


def inputs(tokens, heads, kv_heads, qk, v, dtype, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    sizes = ((heads, qk), (kv_heads, qk), (kv_heads, v), (heads, v))
    made = [torch.randn(tokens, *size, generator=generator, device="cuda").to(dtype) for size in sizes]
    return [t.requires_grad_() for t in made[:3]], made[3]


def results(metadata, tensors, upstream, backend, **options):
    from megatron.core.transformer.tree_attention import tree_attention

    out = tree_attention(*tensors, metadata, backend=backend, **options)
    sink = [options["sink"]] if options.get("sink") is not None else []
    return [out, *torch.autograd.grad(out, [*tensors, *sink], upstream)]


def errors(got, want):
    return [
        float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))
        for a, b in zip(got, want, strict=True)
    ]


def noise(tensors, upstream):
    """Relative errors of torch's plain causal attention in this precision: output, dq, dk, dv."""
    from torch.nn.functional import scaled_dot_product_attention

    found = []
    for wide in (False, True):
        q, k, v = ((t.double() if wide else t).detach().requires_grad_() for t in tensors)
        out = scaled_dot_product_attention(
            *(t.transpose(0, 1)[None] for t in (q, k, v)), is_causal=True, enable_gqa=True
        )[0].transpose(0, 1)
        found.append([out, *torch.autograd.grad(out, [q, k, v], upstream.to(out.dtype))])
    return errors(found[0], found[1])


BASE = dict(heads=8, kv_heads=2, qk=128, v=128, dtype=torch.bfloat16)


def check(tree, backend, *, heads, kv_heads, qk, v, dtype, padded_to=1, lists=False, **options):
    """``lists``: as a tree also where there are only roots, which flash takes as plain sequences."""
    from megatron.core.transformer.tree_metadata import TreeMetadata

    metadata = TreeMetadata.from_nodes(*tree, padded_to=padded_to, device="cuda")
    if lists:
        metadata = dataclasses.replace(metadata, roots_only=False)
    tensors, upstream = inputs(metadata.padded_size, heads, kv_heads, qk, v, dtype)
    real = sum(tree[1])
    upstream[real:] = 0
    got = results(metadata, tensors, upstream, backend, **options)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    wide_options = {
        n: o.detach().double().requires_grad_() if torch.is_tensor(o) else o for n, o in options.items()
    }
    want = results(metadata, wide, upstream.double(), "reference", **wide_options)
    got[0], want[0] = got[0][:real], want[0][:real]
    floor = {torch.float16: 1e-3, torch.bfloat16: 4e-3, torch.float32: 1e-5}[dtype]
    bounds = [max(2 * bound, floor) for bound in noise(tensors, upstream)] + [10 * floor]
    found = dict(zip(("out", "dq", "dk", "dv", "dsink"), errors(got, want), strict=False))
    if real == 1:  # a single key has no gradient of q and k but noise
        del found["dq"], found["dk"]
    allowed = dict(zip(("out", "dq", "dk", "dv", "dsink"), bounds, strict=True))
    report = ", ".join(f"{name} {error:.1e} of {allowed[name]:.1e}" for name, error in found.items())
    print(f"{backend} {heads}/{kv_heads} x {qk}/{v} T {metadata.padded_size}: {report}", flush=True)
    assert all(error <= allowed[name] for name, error in found.items()), report
    for gradient in got[1:4]:
        assert not gradient[real:].any()  # padding rows that nothing depends on


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("padded_to", [1, 128])
def test_lists_and_ends_of_the_device(tree, padded_to):
    """The Triton kernels against plain torch on the CPU: exact."""
    from megatron.core.transformer.tree_attention.intervals import block_lists
    from megatron.core.transformer.tree_metadata import TreeMetadata

    host = TreeMetadata.from_nodes(*TREES[tree], padded_to=padded_to)
    device = host.to("cuda")
    assert torch.equal(device.subtree_end.cpu(), host.subtree_end)
    for blocks, transposed, window in itertools.product(
        ((128, 128), (64, 96), (128, 80)), (False, True), (None, 90)
    ):
        options = dict(transposed=transposed, window=window)
        got, want = (block_lists(m, *blocks, **options) for m in (device, host))
        for kind in ("partial", "full"):
            count, index = getattr(want, f"{kind}_count"), getattr(want, f"{kind}_index")
            assert torch.equal(getattr(got, f"{kind}_count").cpu(), count)
            used = torch.arange(index.shape[1]) < count[:, None]
            assert torch.equal(getattr(got, f"{kind}_index").cpu()[used], index[used])


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("tree", TREES)
def test_trees(tree, backend):
    check(TREES[tree], backend, padded_to=128 if tree == "forest" else 1, **BASE)


@pytest.mark.parametrize("backend", backends()[1:])
@pytest.mark.parametrize("tree", ["chain", "one token", "many roots"])
def test_roots_as_trees(tree, backend):
    check(TREES[tree], backend, padded_to=128, lists=True, **BASE)


HEADS = [
    (64, 64, 6, 6, torch.float16),
    (96, 96, 4, 1, torch.bfloat16),
    (256, 256, 4, 2, torch.bfloat16),
    (192, 128, 4, 4, torch.bfloat16),
]


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("qk, v, heads, kv_heads, dtype", HEADS)
def test_head_sizes(qk, v, heads, kv_heads, dtype, backend):
    if backend == "flex" and qk in (96, 256):
        pytest.skip("another 15 s of compiling each; 64 and 192/128 stand for them")
    check(random_tree(3), backend, heads=heads, kv_heads=kv_heads, qk=qk, v=v, dtype=dtype, padded_to=64)


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("seed", range(6))
def test_random_trees(seed, backend):
    tree = random_tree(seed, nodes=20 + 60 * seed, longest=60 if seed % 2 else 3)
    check(tree, backend, padded_to=(1, 8, 128)[seed % 3], **BASE)


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("option", ["window", "sink", "both"])
def test_window_and_sink(option, backend):
    if backend == "flex" and option != "both":
        pytest.skip("another 15 s of compiling each; both at once stand for them")
    options = {}
    if option != "sink":
        options["window"] = 50
    if option != "window":
        options["sink"] = torch.linspace(-1, 2, BASE["heads"], device="cuda").requires_grad_()
    check(random_tree(8), backend, **BASE, **options)
    if backend == "flash":
        check(([-1] * 3, [300, 1, 170]), backend, padded_to=128, **BASE, **options)


def test_flex_softcap_and_float32():
    check(random_tree(9), "flex", heads=4, kv_heads=2, qk=64, v=64, dtype=torch.float32, softcap=5.0)


def base_case(tree, padded_to=1, sizes=BASE):
    from megatron.core.transformer.tree_metadata import TreeMetadata

    metadata = TreeMetadata.from_nodes(*tree, device="cuda", padded_to=padded_to)
    sizes = [{**BASE, **sizes}[n] for n in ("heads", "kv_heads", "qk", "v", "dtype")]
    return metadata, *inputs(metadata.padded_size, *sizes)


@pytest.mark.parametrize("backend", backends())
def test_padding_and_siblings_touch_nothing(backend):
    metadata, tensors, upstream = base_case(([-1, 0, 0], [100, 77, 90]), padded_to=128)
    upstream[100:177], upstream[267:] = 0, 0
    before = results(metadata, tensors, upstream, backend)
    with torch.no_grad():
        for t in tensors:  # the first branch and the padding
            # not larger: a poisoned row's own scores must stay finite, for it is a prefix's gradient times 0
            t[100:177] = 200
            t[267:] = -200
    after = results(metadata, tensors, upstream, backend)
    same(backend, *([torch.cat([t[:100], t[177:267]]) for t in found] for found in (before, after)))
    for gradient in after[1:]:
        assert not gradient[100:177].any() and not gradient[267:].any()


def same(backend, before, after):
    """Equal bits of out, dq, dk and dv; but flash adds gradients up in any order."""
    for name, a, b in zip(("out", "dq", "dk", "dv"), before, after, strict=True):
        if backend == "flash" and name != "out":
            assert (a - b).norm() <= 5e-3 * b.norm(), name
        else:
            assert torch.equal(a, b), name


@pytest.mark.parametrize("qk, v, heads, kv_heads", [(128, 128, 8, 2), (192, 128, 4, 4)])
def test_deterministic(qk, v, heads, kv_heads):
    from megatron.core.transformer.tree_attention import TreeUnsupportedError

    sizes = dict(qk=qk, v=v, heads=heads, kv_heads=kv_heads)
    metadata, tensors, upstream = base_case(random_tree(5, nodes=200), sizes=sizes)
    with pytest.raises(TreeUnsupportedError, match=r"flash.*(in any order|not installed|compute capab)"):
        results(metadata, tensors, upstream, "flash", deterministic=True)
    first = results(metadata, tensors, upstream, "auto", deterministic=True)  # flex
    for _ in range(4):
        again = results(metadata, tensors, upstream, "flex", deterministic=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    want = results(
        metadata, [t.detach().double().requires_grad_() for t in tensors], upstream.double(), "reference"
    )
    assert max(errors(first, want)) < 1e-2


def compiled(backend):
    """How many kernels have been compiled so far in this process, those of the block lists included."""
    from megatron.core.transformer.tree_attention import interval_kernels as own

    kernels = (own._node_ends_kernel, own._token_ends_kernel, own._lists_kernel)
    count = sum(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels)
    if backend == "flex":
        return count + torch._dynamo.utils.counters["stats"]["unique_graphs"]
    from flash_attn.cute import interface

    caches = (interface._flash_attn_fwd.compile_cache, interface._flash_attn_bwd.compile_cache)
    return count + sum(len(cache.cache) for cache in caches)


@pytest.mark.parametrize("backend", backends())
def test_new_lengths_compile_nothing(backend):
    counts = []
    for seed, padded_to in itertools.product(range(6), (128, 1)):
        results(*base_case(random_tree(seed, nodes=60 + seed), padded_to=padded_to), backend)
        counts.append(compiled(backend))
    print(f"{backend}: compiled after each micro-batch {counts}")
    assert counts[-1] == counts[1]


@pytest.mark.parametrize("backend", backends())
def test_recompute_gives_the_same_bits(backend):
    from megatron.core.transformer.tree_attention import tree_attention

    metadata, tensors, upstream = base_case(random_tree(7))

    def run(*args):
        return tree_attention(*args, metadata, backend=backend)

    outs = run(*tensors), torch.utils.checkpoint.checkpoint(run, *tensors, use_reentrant=False)
    same(backend, *([out, *torch.autograd.grad(out, tensors, upstream)] for out in outs))


@pytest.mark.parametrize("backend", backends())
def test_scored_in_inference_mode_and_trained_on_afterwards(backend):
    """With the same metadata, as trainers do with the log-probabilities of the old policy."""
    from megatron.core.transformer.tree_attention import tree_attention
    from megatron.core.transformer.tree_metadata import TreeMetadata

    scored, fresh = (TreeMetadata.from_nodes(*random_tree(8), device="cuda") for _ in range(2))
    tensors, upstream = inputs(scored.padded_size, **BASE)
    with torch.inference_mode():
        tree_attention(*(t.detach() for t in tensors), scored, backend=backend)
    after = results(scored, tensors, upstream, backend)
    expected = results(fresh, tensors, upstream, backend)
    same(backend, after, expected)
    assert max(errors(after[1:], expected[1:])) < 1e-3


@pytest.fixture
def no_waiting():
    """A function that makes every synchronisation that torch knows of an error, from its call on."""
    yield lambda: (torch.cuda.synchronize(), torch.cuda.set_sync_debug_mode("error"))
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("window", [None, 40])
def test_block_lists_wait_for_nothing(no_waiting, window):
    from megatron.core.transformer.tree_attention.intervals import block_lists, padded
    from megatron.core.transformer.tree_metadata import TreeMetadata

    metadata = TreeMetadata.from_nodes(*random_tree(1), device="cuda")
    no_waiting()
    longer = padded(metadata, metadata.padded_size + 100)
    for m in (metadata, longer):
        for transposed in (False, True):
            block_lists(m, 64, 128, transposed=transposed, window=window)


@pytest.mark.parametrize("backend", backends())
def test_a_step_waits_for_nothing(no_waiting, backend):
    """From metadata that nothing was derived from to gradients, once the kernels are compiled."""
    tree = random_tree(1)
    results(*base_case(tree), backend)
    fresh = base_case(tree)
    no_waiting()
    results(*fresh, backend)
