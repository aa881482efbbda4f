"""The Triton kernels of log_probs, interpreted on the CPU, against plain torch in fp64."""

import importlib

import pytest
import torch

from tests.cpu import interpreted


@interpreted.outside
def test_interpreted():
    interpreted.run(__file__, 10)


def batch_of(seed, vocabulary, identity):
    from megatron.core.tree_training import Trajectory, TreeBatch

    g = torch.Generator().manual_seed(seed)
    heads = torch.randint(0, vocabulary, (2, 3), generator=g).tolist()
    tails = torch.randint(0, 3, (6, 4), generator=g).tolist()
    keys = [[0] * 3 + [i] * 4 if identity else None for i in range(6)]
    return TreeBatch.from_trajectories(
        [
            Trajectory(heads[i % 2] + tail, [0] + [1] * 6, identity=key)
            for i, (tail, key) in enumerate(zip(tails, keys, strict=True))
        ],
        pad_to_multiple_of=16,
    )


def compute(fused, batch, logits, monkeypatch, with_entropy, **options):
    """Values and the logits' gradient, by the kernels or in plain fp64."""
    module = importlib.import_module(
        "megatron.core.tree_training.log_probs"
    )  # the function has the module's name
    monkeypatch.setattr(module, "_fused", lambda x: fused)
    weights = torch.randn(
        2, batch.padded_size, generator=torch.Generator().manual_seed(9), dtype=torch.float64
    )
    x = (logits if fused else logits.double()).clone().requires_grad_()
    lp, h = module.log_probs_and_entropy(x, batch, with_entropy=with_entropy, **options)
    assert lp.dtype == (torch.float32 if fused else torch.float64)
    loss = (lp.double() * weights[0]).sum()
    if with_entropy:
        loss = loss + (h.double() * weights[1]).sum()
    loss.backward()
    return lp.detach().double(), h.detach().double() if with_entropy else lp.detach().double() * 0, x.grad


@interpreted.inside
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels_equal_plain_torch(dtype, with_entropy, monkeypatch):
    from megatron.core.tree_training import kernels

    # Three blocks forward and five backward, the last of them partly filled; padding columns beyond 137.
    monkeypatch.setattr(kernels, "STATISTICS_BLOCK", 64)
    monkeypatch.setattr(kernels, "GRADIENT_BLOCK", 32)
    batch = batch_of(1, 137, identity=False)
    logits = 3 * torch.randn(batch.padded_size, 149, generator=torch.Generator().manual_seed(2))
    logits[:, 100] = torch.linspace(-20, 30, batch.padded_size)  # the maximum comes late in some rows
    logits[:, 60:70] = -torch.inf
    logits[:, 137:] = torch.inf  # never to be read
    without = (torch.diff(batch.target_start_T) == 0).nonzero()[:, 0]
    logits[without] = torch.nan  # nor these rows
    logits = logits.to(dtype)
    options = dict(with_entropy=with_entropy, vocab_size=137, temperature=0.9)
    got = compute(True, batch, logits, monkeypatch, **options)
    want = compute(False, batch, logits, monkeypatch, **options)
    finite = torch.isfinite(want[0])  # a target may be one of the -inf columns
    assert finite.sum() > 20 and torch.equal(finite, torch.isfinite(got[0]))
    torch.testing.assert_close(got[0], want[0], rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-5)
    assert got[2].dtype == dtype and (got[2][:, 137:] == 0).all() and (got[2][without] == 0).all()
    torch.testing.assert_close(got[2].double(), want[2], rtol=torch.finfo(dtype).eps, atol=1e-5)


@interpreted.inside
def test_equal_tokens_with_different_identity(monkeypatch):
    batch = batch_of(3, 50, identity=True)
    assert not batch.distinct_targets and batch_of(3, 50, identity=False).distinct_targets
    logits = torch.randn(batch.padded_size, 50, generator=torch.Generator().manual_seed(4))
    got = compute(True, batch, logits, monkeypatch, True)
    want = compute(False, batch, logits, monkeypatch, True)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


@interpreted.inside
def test_rows_of_a_wider_tensor(monkeypatch):
    batch = batch_of(5, 40, identity=False)
    wide = torch.randn(batch.padded_size, 64, generator=torch.Generator().manual_seed(6))
    got = compute(True, batch, wide[:, :40], monkeypatch, True)
    want = compute(False, batch, wide[:, :40], monkeypatch, True)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


@interpreted.inside
def test_targets_of_other_ranks_are_left_alone():
    from megatron.core.tree_training import kernels

    gradient = torch.full((4, 9), 7.0, dtype=torch.bfloat16)
    row, column = torch.tensor([0, 1, 1, 3]), torch.tensor([8, -1, 2, -1])
    kernels.place(gradient[:, :9], row, column, torch.tensor([1.0, 2.0, 3.0, 4.0]))
    want = torch.full((4, 9), 7.0, dtype=torch.bfloat16)
    want[0, 8], want[1, 2] = 1, 3
    assert torch.equal(gradient, want)


@interpreted.inside
def test_padding_only(monkeypatch):
    from megatron.core.tree_training import TreeBatch

    batch = TreeBatch.from_trajectories([], pad_to_multiple_of=4)
    lp, h, gradient = compute(True, batch, torch.randn(4, 40), monkeypatch, True)
    assert (lp == 0).all() and (h == 0).all() and (gradient == 0).all()


@interpreted.outside
@pytest.mark.parametrize("capability", [90, 100])
def test_compile_to_wide_loads_without_a_gpu(capability):
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from megatron.core.tree_training import kernels

    def ptx(kernel, constants, warps):
        types = {"logits": "*bf16", "gradient": "*bf16", "target_start": "*i32", "row_stride": "i32"}
        types |= {"gradient_stride": "i32", "columns": "i32", "all_columns": "i32"}
        types |= {"scale": "fp32", "inverse_temperature": "fp32"}
        signature = {n: "constexpr" if n in constants else types.get(n, "*fp32") for n in kernel.arg_names}
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(kernel.arg_names)
            if signature[name].startswith(("*", "i32"))
        }
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
        target = GPUTarget("cuda", capability, 32)
        return triton.compile(source, target=target, options={"num_warps": warps}).asm["ptx"]

    forward = ptx(
        kernels._statistics_kernel,
        dict(ENTROPY=True, COLUMNS=151936, BLOCK=kernels.STATISTICS_BLOCK),
        kernels.STATISTICS_WARPS,
    )
    backward = ptx(
        kernels._gradient_kernel, dict(ENTROPY=True, BLOCK=kernels.GRADIENT_BLOCK), kernels.GRADIENT_WARPS
    )
    # Eight bf16 at a time, and one exponential for each logit of a thread (and one to rescale its row's
    # sums).
    assert "ld.global.v4.b32" in forward and "ld.global.v4.b32" in backward and "st.global.v4.b32" in backward
    assert forward.count("ex2.") == kernels.STATISTICS_BLOCK // kernels.STATISTICS_WARPS // 32 + 1
    assert backward.count("ex2.") == kernels.GRADIENT_BLOCK // kernels.GRADIENT_WARPS // 32
