"""Log-probabilities and entropies of packed trees from vocabulary-parallel logits, which are never copied.

T packed tokens (rows of logits), V vocabulary columns of this rank, M tokens that have a source, ordered by
it.

With z = x / temperature for a row x of logits, p = softmax(z) and its targets t with tokens v(t):

    lse        = log Σ_v exp z_v
    lp_t       = z_v(t) - lse
    entropy    = -Σ_v p_v log p_v = lse - Σ_v p_v z_v
    d lp_t / d x_v     = ([v = v(t)] - p_v) / temperature
    d entropy / d x_v  = -p_v (log p_v + entropy) / temperature

so with a row's summed gradients G = Σ_t g_t and H = Σ_t h_t, the row's gradient is

    Σ_t g_t [v = v(t)] - p_v (G + H (log p_v + entropy)), all / temperature:

one log-sum-exp per row and one gather per target forward, one read and one write of each logit backward.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

CHUNK_ELEMENTS = 1 << 25
"""Logits in flight in compute precision at a time, when a caller names no chunk."""


LOG_ZERO = -1000.0
"""Stands in for smaller logarithms where p log p is formed: p is 0 there even in fp64, and 0 · -inf would be
NaN."""


class _Shard(NamedTuple):
    """This rank's columns of the vocabulary."""

    start: int
    columns: int
    group: object


def _chunks(rows, columns, chunk_rows):
    step = chunk_rows or max(CHUNK_ELEMENTS // max(columns, 1), 1)
    return [(low, min(low + step, rows)) for low in range(0, rows, step)]


def _row_statistics(logits_TV, shard, temperature, chunk_rows, with_entropy, dtype):
    """Per row of this rank's columns: maximum m of x, Σ exp(z - m') and, if asked, Σ exp(z - m') (z - m'),
    with m' = m / temperature."""
    T = logits_TV.shape[0]
    maximum = logits_TV.new_full((T,), -torch.inf, dtype=dtype)
    sums = logits_TV.new_zeros((2 if with_entropy else 1, T), dtype=dtype)
    if shard.columns == 0:
        return maximum, sums
    for low, high in _chunks(T, shard.columns, chunk_rows):
        x = logits_TV[low:high, : shard.columns].to(dtype, copy=True)
        maximum[low:high] = x.amax(1)
        # A rank may hold nothing but -inf: -inf - -inf would be NaN.
        x.sub_(maximum[low:high, None].clamp(min=torch.finfo(dtype).min)).div_(temperature)
        if with_entropy:
            e = x.exp()
            sums[0, low:high] = e.sum(1)
            sums[1, low:high] = e.mul_(x.clamp_(min=LOG_ZERO)).sum(1)
        else:
            sums[0, low:high] = x.exp_().sum(1)
    return maximum, sums


def _reduce(maximum, sums, picked_M, shard, temperature):
    """Statistics and picked logits of the whole vocabulary: one maximum and one sum over the ranks."""
    if shard.group is None or shard.group.size() == 1:
        return maximum, sums, picked_M
    local = maximum
    maximum = local.clone()
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=shard.group)
    shift = (local - maximum) / temperature
    scale = shift.exp()
    rescaled = sums * scale
    if sums.shape[0] == 2:
        rescaled[1] += torch.where(scale > 0, shift, 0) * rescaled[0]
    together = torch.cat([rescaled.flatten(), picked_M])
    dist.all_reduce(together, group=shard.group)
    return maximum, together[: sums.numel()].view_as(sums), together[sums.numel() :]


def _gradient(logits_TV, lse_T, entropy_T, row_M, column_M, g_M, G_T, H_T, shard, temperature, chunk_rows):
    """The logits' gradient, written once; row_M is sorted, column_M is negative where another rank has the
    column."""
    grad_TV = torch.empty_like(logits_TV)
    T, dtype = logits_TV.shape[0], lse_T.dtype
    grad_TV[:, shard.columns :] = 0
    if shard.columns == 0:
        return grad_TV
    here = column_M >= 0
    row_M, column_M, g_M = row_M[here], column_M[here], g_M[here]
    chunks = _chunks(T, shard.columns, chunk_rows)
    bounds = torch.searchsorted(row_M, row_M.new_tensor([low for low, _ in chunks] + [T])).tolist()
    for (low, high), first, last in zip(chunks, bounds[:-1], bounds[1:], strict=True):
        log_p = logits_TV[low:high, : shard.columns].to(dtype, copy=True)
        log_p.div_(temperature).sub_(lse_T[low:high, None])
        p = log_p.exp()
        if H_T is None:
            p.mul_(-G_T[low:high, None])
        else:
            log_p.clamp_(min=LOG_ZERO)
            p.mul_(
                log_p.add_(entropy_T[low:high, None])
                .mul_(H_T[low:high, None])
                .add_(G_T[low:high, None])
                .neg_()
            )
        # Two branches with the same token are possible: they differ by their identity keys.
        p.index_put_((row_M[first:last] - low, column_M[first:last]), g_M[first:last], accumulate=True)
        grad_TV[low:high, : shard.columns] = p.div_(temperature)
    return grad_TV


class _PackedLogProbs(torch.autograd.Function):
    """(logits, targets) → (log-probability, entropy) of every target's row, [M] each."""

    @staticmethod
    def forward(ctx, logits_TV, row_M, token_M, shard, temperature, chunk_rows, with_entropy):
        dtype = torch.float64 if logits_TV.dtype == torch.float64 else torch.float32
        column_M = token_M - shard.start
        column_M = torch.where((column_M >= 0) & (column_M < shard.columns), column_M, -1)
        maximum, sums = _row_statistics(logits_TV, shard, temperature, chunk_rows, with_entropy, dtype)
        picked_M = torch.where(column_M >= 0, logits_TV[row_M, column_M.clamp(min=0)].to(dtype), 0)
        maximum, sums, picked_M = _reduce(maximum, sums, picked_M, shard, temperature)
        log_sum = sums[0].log()
        lse_T = maximum / temperature + log_sum
        entropy_T = log_sum - sums[1] / sums[0] if with_entropy else None
        ctx.save_for_backward(logits_TV, row_M, column_M, lse_T, entropy_T)
        ctx.how = (shard, temperature, chunk_rows)
        ctx.set_materialize_grads(False)
        lp_M = picked_M / temperature - lse_T[row_M]
        return lp_M, entropy_T[row_M] if with_entropy else None

    @staticmethod
    def backward(ctx, g_M, h_M):
        logits_TV, row_M, column_M, lse_T, entropy_T = ctx.saved_tensors
        if g_M is None:
            g_M = torch.zeros_like(row_M, dtype=lse_T.dtype)
        G_T = torch.zeros_like(lse_T).index_add_(0, row_M, g_M)
        H_T = None if h_M is None else torch.zeros_like(lse_T).index_add_(0, row_M, h_M)
        grad = _gradient(logits_TV, lse_T, entropy_T, row_M, column_M, g_M, G_T, H_T, *ctx.how)
        return grad, None, None, None, None, None, None


def _rows(logits, batch):
    T = batch.padded_size
    if logits.dim() == 3 and 1 in logits.shape[:2]:
        logits = logits.flatten(0, 1)
    if logits.dim() != 2 or logits.shape[0] != T:
        raise ValueError(f"logits must be [{T}, V], [1, {T}, V] or [{T}, 1, V], got {tuple(logits.shape)}")
    if not logits.is_floating_point():
        raise TypeError(f"logits must be floating point, got {logits.dtype}")
    return logits


def _shard(columns, tp_group, vocab_size, max_token):
    ranks, rank = (1, 0) if tp_group is None else (tp_group.size(), tp_group.rank())
    total = columns * ranks
    if vocab_size is None:
        vocab_size = total
    if not 0 < vocab_size <= total:
        raise ValueError(f"vocab_size must lie in [1, {total}], the columns of all ranks, got {vocab_size}")
    if max_token >= vocab_size:
        raise ValueError(
            f"the batch has token {max_token}, the logits have {vocab_size} columns over {ranks} "
            "tensor-parallel rank(s): is tp_group missing?"
        )
    return _Shard(rank * columns, min(max(vocab_size - rank * columns, 0), columns), tp_group)


def log_probs_and_entropy(
    logits, batch, tp_group=None, temperature=1.0, *, vocab_size=None, chunk_rows=None, with_entropy=True
):
    """`log_probs` and `entropy` in the same passes over the logits: ([T], [T])."""
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    logits_TV = _rows(logits, batch)
    shard = _shard(logits_TV.shape[1], tp_group, vocab_size, batch.max_token)
    target_M = batch.target_M
    row_M, token_M = batch.source_T[target_M], batch.tokens[0][target_M]
    per_target = _PackedLogProbs.apply(
        logits_TV, row_M, token_M, shard, float(temperature), chunk_rows, with_entropy
    )

    def per_token(values_M):
        return values_M.new_zeros(batch.padded_size).index_copy(0, target_M, values_M)

    lp_M, entropy_M = per_target
    return per_token(lp_M), per_token(entropy_M) if with_entropy else None


def log_probs(logits, batch, tp_group=None, temperature=1.0, *, vocab_size=None, chunk_rows=None):
    """log p(token | its path) of every packed token.

    Where paths part, one row of logits has several targets; no row is duplicated.

    Args:
        logits: [T, V/tp], [1, T, V/tp] or [T, 1, V/tp], fp64, fp32, bf16 or fp16: this rank's columns, as a
            GPTModel without labels returns them. The gradient has the same type.
        batch: the TreeBatch that the model ran on.
        tp_group: the tensor-parallel group over which the columns are split; None when logits are whole.
        temperature: logits are divided by it.
        vocab_size: columns at or above it are padding and take no part; None: all take part, as in
            Megatron-Core's own cross-entropy.
        chunk_rows: rows in compute precision at a time; None picks.

    Returns:
        [T] in fp32 (fp64 for fp64 logits), the same on every rank of `tp_group`. Zero, without a gradient,
        for first tokens of roots and for padding. `batch.unpack` gives the linear layout.

    Raises:
        ValueError: the shape does not fit the batch, a token lies outside of the vocabulary, temperature <=
            0.
    """
    options = {"vocab_size": vocab_size, "chunk_rows": chunk_rows, "with_entropy": False}
    return log_probs_and_entropy(logits, batch, tp_group, temperature, **options)[0]


def entropy(logits, batch, tp_group=None, temperature=1.0, *, vocab_size=None, chunk_rows=None):
    """Entropy in nats of the distribution that each packed token was drawn from: [T], zero where `log_probs`
    is.

    Differentiable. For both, `log_probs_and_entropy` reads the logits once.
    """
    options = {"vocab_size": vocab_size, "chunk_rows": chunk_rows}
    return log_probs_and_entropy(logits, batch, tp_group, temperature, **options)[1]
