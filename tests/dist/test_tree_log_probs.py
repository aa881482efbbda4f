"""Vocabulary-parallel log-probabilities and entropies equal those of whole logits."""

import pytest
import torch

from tests.dist.world import parallel


def compute(tp, columns, vocab_size, dtype):
    """On every rank: its share of the same logits; values, and the gradient of its columns."""
    from megatron.core import parallel_state
    from megatron.core.tree_training import Trajectory, TreeBatch, log_probs_and_entropy

    with parallel(tp=tp):
        g = torch.Generator().manual_seed(3)
        sequences = [torch.randint(0, vocab_size or columns, (n,), generator=g).tolist() for n in (3, 5, 2)]
        tails = torch.randint(0, vocab_size or columns, (7, 4), generator=g).tolist()
        sequences = [sequences[i % 3] + tail for i, tail in enumerate(tails)]
        batch = TreeBatch.from_trajectories(
            [Trajectory(s, [0] + [1] * (len(s) - 1)) for s in sequences], pad_to_multiple_of=5
        )
        whole = 3 * torch.randn(batch.padded_size, columns, generator=g, dtype=torch.float64)
        whole[:, : columns // 2] -= 40  # one rank holds nearly all of the mass
        g_lp, g_h = torch.randn(2, batch.padded_size, generator=g, dtype=torch.float64)
        rank = parallel_state.get_tensor_model_parallel_rank()
        group = parallel_state.get_tensor_model_parallel_group() if tp > 1 else None
        share = whole.chunk(tp, 1)[rank].to(dtype).clone().requires_grad_()
        lp, h = log_probs_and_entropy(share, batch, group, temperature=0.8, vocab_size=vocab_size)
        ((lp * g_lp).sum() + (h * g_h).sum()).backward()
        return lp.detach(), h.detach(), share.grad


@pytest.mark.parametrize("vocab_size", [None, 19, 11], ids=["all", "last rank cut", "last rank empty"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_equals_one_rank(world, vocab_size, dtype):
    lp, h, grad = world(1, compute, 1, 22, vocab_size, dtype)[0]
    ranks = world(2, compute, 2, 22, vocab_size, dtype)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-6
    for other_lp, other_h, _ in ranks:
        torch.testing.assert_close(other_lp, lp, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(other_h, h, rtol=tolerance, atol=tolerance)
    assert torch.equal(ranks[0][0], ranks[1][0])
    got = torch.cat([r[2] for r in ranks], 1)
    assert got.dtype == dtype and lp.abs().max() > 1
    torch.testing.assert_close(
        got, grad, rtol=max(tolerance, 2 * torch.finfo(dtype).eps), atol=10 * tolerance
    )
