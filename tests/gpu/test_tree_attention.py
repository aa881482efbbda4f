"""The flex and flash backends on a GPU against the reference in float64: outputs, gradients, padding, reuse.

The measure is the error of plain causal attention by torch in the same precision on tensors of the same size:
a tree may err at most twice as much.
"""

import itertools

import pytest
import torch

torch._dynamo.config.recompile_limit = 64  # many models in one process
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
    missing = (flash._package() or "needs Hopper or newer") if not able or flash._package() else None
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


def check(tree, backend, heads, kv_heads, qk, v, dtype, padded_to=1, **options):
    from megatron.core.transformer.tree_metadata import TreeMetadata

    metadata = TreeMetadata.from_nodes(*tree, padded_to=padded_to, device="cuda")
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
    allowed = noise(tensors, upstream)
    floor = 1e-3 if dtype == torch.float16 else 4e-3 if dtype == torch.bfloat16 else 1e-5
    for name, error, bound in zip(("out", "dq", "dk", "dv"), errors(got[:4], want[:4]), allowed, strict=True):
        if real > 1 or name in ("out", "dv"):  # a single key has no gradient of q and k but noise
            assert error <= 2 * max(bound, floor / 2), (name, error, bound)
    for gradient in got[1:4]:
        assert not gradient[real:].any()  # padding rows that nothing depends on
    if len(got) > 4:  # the sink
        assert errors(got[4:], want[4:])[0] < 10 * floor


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("tree", TREES)
def test_trees(tree, backend):
    check(TREES[tree], backend, 8, 2, 128, 128, torch.bfloat16, padded_to=128 if tree == "forest" else 1)


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize(
    "qk, v, heads, kv_heads",
    [(64, 64, 6, 6), (96, 96, 4, 1), (128, 128, 4, 1), (256, 256, 4, 2), (192, 128, 4, 4)],
)
def test_head_sizes(qk, v, heads, kv_heads, backend):
    check(random_tree(3), backend, heads, kv_heads, qk, v, torch.bfloat16, padded_to=64)


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("seed", range(6))
def test_random_trees(seed, backend):
    parents, lengths = random_tree(seed, nodes=20 + 60 * seed, longest=60 if seed % 2 else 3)
    dtype = torch.float16 if seed % 2 else torch.bfloat16
    check((parents, lengths), backend, 4, 2, 128, 128, dtype, padded_to=(1, 8, 128)[seed % 3])


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("option", ["window", "sink", "both"])
def test_window_and_sink(option, backend):
    options = {}
    if option != "sink":
        options["window"] = 50
    if option != "window":
        options["sink"] = torch.linspace(-1, 2, 4, device="cuda").requires_grad_()
    check(random_tree(8), backend, 4, 2, 128, 128, torch.bfloat16, **options)


def test_flex_softcap_and_float32():
    check(random_tree(9), "flex", 4, 2, 64, 64, torch.float32, softcap=5.0)


@pytest.mark.parametrize("backend", backends())
def test_padding_and_siblings_touch_nothing(backend):
    from megatron.core.transformer.tree_metadata import TreeMetadata

    metadata = TreeMetadata.from_nodes([-1, 0, 0], [100, 77, 90], padded_to=128, device="cuda")
    tensors, upstream = inputs(metadata.padded_size, 4, 2, 128, 128, torch.bfloat16)
    upstream[100:177], upstream[267:] = 0, 0
    before = results(metadata, tensors, upstream, backend)
    with torch.no_grad():
        for t in tensors:  # the first branch and the padding
            t[100:177] = 3e4
            t[267:] = -3e4
    after = results(metadata, tensors, upstream, backend)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a[:100], b[:100]) and torch.equal(a[177:267], b[177:267])
    for gradient in after[1:]:
        assert not gradient[100:177].any() and not gradient[267:].any()


@pytest.mark.parametrize("backend", backends())
def test_deterministic(backend):
    from megatron.core.transformer.tree_metadata import TreeMetadata

    metadata = TreeMetadata.from_nodes(*random_tree(5, nodes=200), device="cuda")
    tensors, upstream = inputs(metadata.padded_size, 8, 2, 128, 128, torch.bfloat16)
    first = results(metadata, tensors, upstream, backend, deterministic=True)
    for _ in range(4):
        again = results(metadata, tensors, upstream, backend, deterministic=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    want = results(
        metadata, [t.detach().double().requires_grad_() for t in tensors], upstream.double(), "reference"
    )
    assert max(errors(first, want)) < 1e-2


def compiled(backend):
    """How many kernels the backend has compiled so far in this process."""
    if backend == "flex":
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]
    from flash_attn.cute import interface

    return len(interface._flash_attn_fwd.compile_cache) + len(interface._flash_attn_bwd.compile_cache)


@pytest.mark.parametrize("backend", backends())
def test_new_lengths_compile_nothing(backend):
    from megatron.core.transformer.tree_metadata import TreeMetadata

    counts = []
    for seed, padded_to in itertools.product(range(6), (128, 1)):
        metadata = TreeMetadata.from_nodes(
            *random_tree(seed, nodes=60 + seed), padded_to=padded_to, device="cuda"
        )
        tensors, upstream = inputs(metadata.padded_size, 4, 2, 128, 128, torch.bfloat16)
        results(metadata, tensors, upstream, backend)
        counts.append(compiled(backend))
    print(f"{backend}: compiled after each micro-batch {counts}")
    assert counts[-1] == counts[3]  # the first few lengths may, later ones never


@pytest.mark.parametrize("backend", backends())
def test_recompute_gives_the_same_bits(backend):
    from megatron.core.transformer.tree_attention import tree_attention
    from megatron.core.transformer.tree_metadata import TreeMetadata

    metadata = TreeMetadata.from_nodes(*random_tree(7), device="cuda")
    tensors, upstream = inputs(metadata.padded_size, 4, 2, 128, 128, torch.bfloat16)

    def run(*args):
        return tree_attention(*args, metadata, backend=backend, deterministic=True)

    plain = torch.autograd.grad(run(*tensors), tensors, upstream)
    again = torch.autograd.grad(
        torch.utils.checkpoint.checkpoint(run, *tensors, use_reentrant=False), tensors, upstream
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


def test_block_lists_wait_for_nothing():
    """From host lists to block lists and a launched forward pass without one synchronisation."""
    from megatron.core.transformer.tree_attention import tree_attention
    from megatron.core.transformer.tree_metadata import TreeMetadata

    tree = random_tree(1)
    warm = TreeMetadata.from_nodes(*tree, device="cuda")
    tensors, _ = inputs(warm.padded_size, 4, 2, 128, 128, torch.bfloat16)
    tree_attention(*tensors, warm, backend="flex")
    metadata = TreeMetadata.from_nodes(*tree, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tree_attention(*tensors, metadata, backend="flex")
    finally:
        torch.cuda.set_sync_debug_mode("default")
