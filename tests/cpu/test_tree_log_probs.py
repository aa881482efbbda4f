"""log_probs and entropy against log_softmax on every trajectory's own rows."""

import pytest
import torch

from megatron.core.tree_training import Trajectory, TreeBatch, entropy, log_probs, log_probs_and_entropy

VOCABULARY = 23


def random_batch(seed, share=True, n=7, **options):
    g = torch.Generator().manual_seed(seed)
    prompt = torch.randint(VOCABULARY, (5,), generator=g).tolist()
    trajectories = []
    for i in range(n):
        tail = torch.randint(0, 3, (3 + i,), generator=g).tolist()
        tokens = prompt + tail if i % 3 else tail
        trajectories.append(Trajectory(tokens, [0] + [1] * (len(tokens) - 1)))
    return TreeBatch.from_trajectories(trajectories, share_prefixes=share, pad_to_multiple_of=8, **options)


def naive(logits_TV, batch, temperature=1.0):
    """Per trajectory: gather its rows, log_softmax, pick; entropies likewise. Nothing shared with the
    product."""
    out = []
    for tokens, index in zip(batch.unpack(batch.tokens), batch.split(batch.index_L), strict=True):
        log_p = (logits_TV[index[:-1]] / temperature).log_softmax(-1)
        zero = logits_TV.new_zeros(1)
        lp = torch.cat([zero, log_p.gather(1, tokens[1:, None])[:, 0]])
        out.append((lp, torch.cat([zero, -(log_p.exp() * log_p).sum(-1)])))
    return [o[0] for o in out], [o[1] for o in out]


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_rows", [None, 3])
def test_equals_naive_in_fp64(share, temperature, chunk_rows):
    batch = random_batch(1, share)
    g = torch.Generator().manual_seed(2)
    logits = (
        4 * torch.randn(batch.padded_size, VOCABULARY, generator=g, dtype=torch.float64)
    ).requires_grad_()
    weights = [torch.randn(2, n, generator=g, dtype=torch.float64) for n in batch.lengths]

    def loss(lps, entropies):
        return sum(
            (w[0] * lp.exp() + w[1] * h * lp).sum() for w, lp, h in zip(weights, lps, entropies, strict=True)
        )

    lp, h = log_probs_and_entropy(logits, batch, temperature=temperature, chunk_rows=chunk_rows)
    want_lp, want_h = naive(logits, batch, temperature)
    for got, want in zip(batch.unpack(lp) + batch.unpack(h), want_lp + want_h, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    (got,) = torch.autograd.grad(loss(batch.unpack(lp), batch.unpack(h)), logits)
    (want,) = torch.autograd.grad(loss(want_lp, want_h), logits)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)
    assert torch.equal(log_probs(logits, batch, temperature=temperature), lp)
    torch.testing.assert_close(entropy(logits, batch, temperature=temperature), h, rtol=0, atol=0)


def test_targets_at_a_branch_are_not_the_packed_neighbour():
    batch = TreeBatch.from_trajectories([Trajectory([3, 4, 5], [0, 1, 1]), Trajectory([3, 6], [0, 1])])
    assert batch.tokens.tolist() == [[3, 4, 5, 6]]
    logits = torch.arange(4 * 8, dtype=torch.float64).view(4, 8).sin().requires_grad_()
    lp = log_probs(logits, batch)
    rows = logits.log_softmax(-1)
    want = torch.stack([rows[0, 0] * 0, rows[0, 4], rows[1, 5], rows[0, 6]])
    torch.testing.assert_close(lp, want, rtol=1e-14, atol=1e-14)
    assert lp[0].item() == 0
    # Token 6 was predicted by row 0 alone.
    (grad,) = torch.autograd.grad(lp[3], logits)
    assert grad[1:].abs().max() == 0 and grad[0, 6] > 0


def test_nothing_leaks_from_first_tokens_and_padding():
    batch = random_batch(5)
    logits = torch.randn(batch.padded_size, VOCABULARY, dtype=torch.float64, requires_grad=True)
    lp, h = log_probs_and_entropy(logits, batch)
    without = batch.source_T < 0
    assert without.sum() > batch.padded_size - batch.packed_tokens > 0
    assert (lp[without] == 0).all() and (h[without] == 0).all() and (lp[~without] < 0).all()
    (grad,) = torch.autograd.grad(lp.sum() + h.sum(), logits)
    childless = torch.diff(batch.target_start_T) == 0
    assert childless[batch.packed_tokens :].all()
    assert (grad[childless] == 0).all() and (grad[~childless] != 0).any(1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_logits_compute_in_fp32(dtype):
    batch = random_batch(3)
    logits = (3 * torch.randn(batch.padded_size, VOCABULARY)).to(dtype).requires_grad_()
    lp = log_probs(logits[None], batch)
    assert lp.dtype == torch.float32
    wide = logits.detach().double().requires_grad_()
    want = log_probs(wide[:, None], batch)
    torch.testing.assert_close(lp.double(), want, rtol=1e-6, atol=1e-6)
    weight = torch.randn(batch.padded_size)
    (lp * weight).sum().backward()
    (want * weight).sum().backward()
    assert logits.grad.dtype == dtype
    # One rounding to the gradient's type, nothing else.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(logits.grad.double(), wide.grad, rtol=eps, atol=2e-6)


def test_equal_tokens_with_different_identity_add_their_gradients():
    keys = [[0, 0], [0, 1], [0, 2]]
    batch = TreeBatch.from_trajectories([Trajectory([2, 4], [0, 1], identity=k) for k in keys])
    assert batch.tokens.tolist() == [[2, 4, 4, 4]]
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)
    log_probs(logits, batch).sum().backward()
    want = -3 * logits[0].softmax(-1)
    want[4] += 3
    torch.testing.assert_close(logits.grad[0], want.detach(), rtol=1e-13, atol=1e-13)


def test_padding_columns_and_minus_infinity():
    batch = random_batch(4)
    logits = torch.randn(batch.padded_size, VOCABULARY + 9, dtype=torch.float64)
    cut = logits[:, :VOCABULARY].clone().requires_grad_()
    logits.requires_grad_()
    got = log_probs_and_entropy(logits, batch, vocab_size=VOCABULARY)
    want = log_probs_and_entropy(cut, batch)
    (got[0].sum() + got[1].sum()).backward()
    (want[0].sum() + want[1].sum()).backward()
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert torch.equal(logits.grad[:, :VOCABULARY], cut.grad) and (logits.grad[:, VOCABULARY:] == 0).all()
    masked = torch.cat([cut.detach(), torch.full((batch.padded_size, 2), -torch.inf, dtype=torch.float64)], 1)
    masked.requires_grad_()
    lp, h = log_probs_and_entropy(masked, batch)
    (lp.sum() + h.sum()).backward()
    torch.testing.assert_close(h, want[1], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(masked.grad[:, :VOCABULARY], cut.grad, rtol=1e-12, atol=1e-13)
    assert (masked.grad[:, VOCABULARY:] == 0).all()


def test_batch_of_padding_only_is_connected_and_zero():
    batch = TreeBatch.from_trajectories([], pad_to_multiple_of=4)
    logits = torch.randn(4, VOCABULARY, requires_grad=True)
    lp = log_probs(logits, batch)
    assert batch.unpack(lp) == [] and lp.tolist() == [0.0] * 4
    lp.sum().backward()
    assert (logits.grad == 0).all()


def test_gradcheck():
    batch = random_batch(6, n=4)
    logits = torch.randn(batch.padded_size, VOCABULARY, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x: log_probs_and_entropy(x, batch, temperature=1.3, chunk_rows=5), (logits,)
    )


def test_refusals():
    batch = random_batch(7)
    T = batch.padded_size
    logits = torch.randn(T, VOCABULARY)
    with pytest.raises(ValueError, match=rf"logits must be \[{T}, V\].*got \({T - 1}, {VOCABULARY}\)"):
        log_probs(logits[1:], batch)
    with pytest.raises(ValueError, match=r"logits must be .* got \(2, 4, 23\)"):
        log_probs(logits[:8].view(2, 4, VOCABULARY), batch)
    with pytest.raises(TypeError, match=r"logits must be floating point, got torch.int64"):
        log_probs(logits.long(), batch)
    with pytest.raises(TypeError, match="logits must be a tensor, got tuple"):
        log_probs((logits,), batch)
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        log_probs(logits, batch, temperature=0)
    with pytest.raises(
        ValueError, match=rf"token {batch.max_token}, the logits have 2 columns .* is tp_group missing"
    ):
        log_probs(logits[:, :2], batch)
    with pytest.raises(ValueError, match=r"vocab_size must lie in \[1, 23\].*got 24"):
        log_probs(logits, batch, vocab_size=24)
    with pytest.raises(ValueError, match=rf"^the batch has token {batch.max_token}, vocab_size is 2$"):
        log_probs(logits, batch, vocab_size=2)


def test_float16_module_can_leave_logits_in_bf16(single):
    from megatron.core.transformer.module import Float16Module
    from tests.dist import small_gpt

    cfg = small_gpt.config(num_layers=1, params_dtype=torch.bfloat16)
    model = Float16Module(cfg, small_gpt.build(cfg)[0])
    batch = random_batch(8)
    results = []
    for upcast in (True, False):
        logits = model(
            batch.tokens,
            batch.position_ids,
            None,
            packed_seq_params=batch.packed_seq_params,
            fp32_output=upcast,
        )
        assert logits.dtype == (torch.float32 if upcast else torch.bfloat16)
        model.zero_grad()
        lp = log_probs(logits, batch)
        lp.sum().backward()
        results.append((lp.detach(), model.module.output_layer.weight.grad))
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-2, atol=1e-4)
