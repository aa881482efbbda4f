"""The kernels of log_probs on a GPU: values, gradients, memory, more than 2^31 logits."""

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def batch_of(branches, prompt, response, vocabulary, multiple=1):
    from megatron.core.tree_training import Trajectory, TreeBatch

    g = torch.Generator().manual_seed(branches)
    head = torch.randint(0, vocabulary, (prompt,), generator=g)
    tails = [torch.randint(0, vocabulary, (response,), generator=g) for _ in range(branches)]
    mask = torch.ones(prompt + response, dtype=torch.int64)
    mask[0] = 0
    return TreeBatch.from_trajectories(
        [Trajectory(torch.cat([head, tail]), mask) for tail in tails],
        pad_to_multiple_of=multiple,
        device="cuda",
    )


@pytest.mark.xdist_group("memory")
@pytest.mark.parametrize("vocabulary", [1009, 151936])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_kernels_against_fp64(dtype, vocabulary):
    from megatron.core.tree_training import log_probs_and_entropy

    batch = batch_of(7, 33, 21, vocabulary, multiple=16)
    g = torch.Generator("cuda").manual_seed(1)
    logits = (4 * torch.randn(batch.padded_size, vocabulary, device="cuda", generator=g)).to(dtype)
    weights = torch.randn(2, batch.padded_size, device="cuda", generator=g, dtype=torch.float64)
    results = []
    for x in (logits.clone(), logits.double()):  # fp64 takes the plain path
        x.requires_grad_()
        lp, h = log_probs_and_entropy(x, batch, temperature=0.7)
        ((lp.double() * weights[0]).sum() + (h.double() * weights[1]).sum()).backward()
        results.append((lp.detach().double(), h.detach().double(), x.grad.double()))
    (lp, h, gradient), (want_lp, want_h, want_gradient) = results
    torch.testing.assert_close(lp, want_lp, rtol=2e-6, atol=2e-5)
    torch.testing.assert_close(h, want_h, rtol=2e-5, atol=2e-5)
    # fp32 rounds exponents of about 30, and terms as large as the weights whose difference a gradient is.
    rtol = max(torch.finfo(dtype).eps, 2e-5)
    torch.testing.assert_close(gradient, want_gradient, rtol=rtol, atol=4e-6)
    assert (gradient - want_gradient).norm() <= rtol * want_gradient.norm()


@pytest.mark.xdist_group("memory")
def test_memory_and_large_indices():
    """Logits and gradient, each more than 2^31 elements, and next to nothing else."""
    from megatron.core.tree_training import log_probs

    vocabulary = 151936
    batch = batch_of(13, 1024, 1024, vocabulary)
    assert batch.padded_size * vocabulary > 2**31
    logits = torch.zeros(batch.padded_size, vocabulary, device="cuda", dtype=torch.bfloat16)
    logits[:, 17] = 3
    logits.requires_grad_()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    lp = log_probs(logits, batch)
    lp.sum().backward()
    peak = torch.cuda.max_memory_allocated() - held
    assert peak < logits.numel() * 2 * 1.01
    normaliser = torch.tensor(vocabulary - 1 + torch.e**3, dtype=torch.float64).log()
    last = batch.padded_size - 1
    want = (3 if batch.tokens[0, last] == 17 else 0) - normaliser
    assert abs(lp[last].double().cpu() - want) < 1e-4
    assert logits.grad[last].abs().max() == 0  # it predicts nothing
    row = int(batch.source_T[last])
    torch.testing.assert_close(
        logits.grad[row, batch.tokens[0, last]].double().cpu(), 1 - (-normaliser).exp(), rtol=1e-2, atol=0
    )
