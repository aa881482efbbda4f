"""Log-probabilities and entropies of packed trees from vocabulary-parallel logits, which are never copied.

T packed tokens (rows of logits), V vocabulary columns of this rank, M tokens with a source, ordered by it.

With z = x / temperature for a row x of logits, p = softmax(z) and its targets t with tokens v(t):

    lse        = log Σ_v exp z_v
    lp_t       = z_v(t) - lse
    entropy    = -Σ_v p_v log p_v = lse - Σ_v p_v z_v
    d lp_t / d x_v     = ([v = v(t)] - p_v) / temperature
    d entropy / d x_v  = -p_v (log p_v + entropy) / temperature

so with a row's summed gradients G = Σ_t g_t and H = Σ_t h_t, the row's gradient is

    Σ_t g_t [v = v(t)] - p_v (G + H (log p_v + entropy)), all / temperature:

one log-sum-exp per row and one gather per target forward, one read and one write of each logit backward. On
CUDA both passes are Triton kernels; on a CPU, and in fp64, plain torch in chunks of rows.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

CHUNK_ELEMENTS = 1 << 25
"""Logits in flight in compute precision at a time in plain torch, when a caller names no chunk."""

LOG_ZERO = -1000.0
"""Stands in for smaller logarithms where p log p is formed: p is 0 there even in fp64, 0 · -inf is NaN."""


class _Targets(NamedTuple):
    """What every row has to predict. start_T [T + 1]: the targets of row s are start_T[s] … start_T[s + 1] -
    1."""

    start_T: torch.Tensor
    row_M: torch.Tensor
    token_M: torch.Tensor
    distinct: bool  # no row has the same token twice


class _Shard(NamedTuple):
    """This rank's columns of the vocabulary, and how to go through them."""

    start: int
    columns: int
    group: object
    temperature: float
    chunk_rows: int | None


def _chunks(rows, shard):
    step = shard.chunk_rows or max(CHUNK_ELEMENTS // shard.columns, 1)
    return [slice(low, min(low + step, rows)) for low in range(0, rows, step)]


def _torch_statistics(logits_TV, shard, with_entropy):
    """Per row of this rank's columns: maximum m of x, Σ exp(z - m') and, if asked, Σ exp(z - m') (z - m'),
    where m' = m / temperature."""
    T, dtype = logits_TV.shape[0], _compute_type(logits_TV)
    maximum = logits_TV.new_empty(T, dtype=dtype)
    sums = logits_TV.new_empty(2 if with_entropy else 1, T, dtype=dtype)
    for rows in _chunks(T, shard):
        x = logits_TV[rows, : shard.columns].to(dtype, copy=True)
        maximum[rows] = x.amax(1)
        # A rank may hold nothing but -inf: -inf - -inf would be NaN.
        x.sub_(maximum[rows, None].clamp(min=torch.finfo(dtype).min)).div_(shard.temperature)
        if with_entropy:
            e = x.exp()
            sums[0, rows] = e.sum(1)
            sums[1, rows] = e.mul_(x.clamp_(min=LOG_ZERO)).sum(1)
        else:
            sums[0, rows] = x.exp_().sum(1)
    return maximum, sums


def _torch_gradient(logits_TV, targets, lse_T, entropy_T, G_T, H_T, shard):
    """The logits' gradient without the targets' own share."""
    gradient_TV = torch.empty_like(logits_TV)
    gradient_TV[:, shard.columns :] = 0
    for rows in _chunks(logits_TV.shape[0], shard):
        log_p = logits_TV[rows, : shard.columns].to(lse_T.dtype, copy=True)
        log_p.div_(shard.temperature).sub_(lse_T[rows, None])
        p = log_p.exp()
        if H_T is None:
            p.mul_(G_T[rows, None])
        else:
            log_p.clamp_(min=LOG_ZERO).add_(entropy_T[rows, None])
            p.mul_(log_p.mul_(H_T[rows, None]).add_(G_T[rows, None]))
        gradient_TV[rows, : shard.columns] = p.div_(-shard.temperature)
    # Rows that predict nothing are multiplied by 0, which is not enough if they hold anything infinite.
    return gradient_TV.masked_fill_((targets.start_T[1:] == targets.start_T[:-1])[:, None], 0)


def _torch_place(gradient_TV, row_M, column_M, value_M):
    here = column_M >= 0
    gradient_TV[row_M[here], column_M[here]] = value_M[here].to(gradient_TV.dtype)


def _compute_type(logits):
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _fused(logits):
    return logits.is_cuda and logits.dtype != torch.float64


def _reduce(maximum, sums, picked_M, shard):
    """Statistics and picked logits of the whole vocabulary: one maximum and one sum over the ranks."""
    if shard.group is None or shard.group.size() == 1:
        return maximum, sums, picked_M
    local = maximum
    maximum = local.clone()
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=shard.group)
    shift = (local - maximum) / shard.temperature
    scale = shift.exp()
    rescaled = sums * scale
    if sums.shape[0] == 2:
        rescaled[1] += torch.where(scale > 0, shift, 0) * rescaled[0]
    together = torch.cat([rescaled.flatten(), picked_M])
    dist.all_reduce(together, group=shard.group)
    return maximum, together[: sums.numel()].view_as(sums), together[sums.numel() :]


class _PackedLogProbs(torch.autograd.Function):
    """(logits, targets) → (log-probability, entropy) of every target, [M] each."""

    @staticmethod
    def forward(ctx, logits_TV, targets, shard, with_entropy):
        T, dtype = logits_TV.shape[0], _compute_type(logits_TV)
        column_M = targets.token_M - shard.start
        column_M = torch.where((column_M >= 0) & (column_M < shard.columns), column_M, -1)
        if shard.columns == 0:
            maximum = logits_TV.new_full((T,), -torch.inf, dtype=dtype)
            sums = logits_TV.new_zeros(2 if with_entropy else 1, T, dtype=dtype)
        elif _fused(logits_TV):
            from megatron.core.tree_training import kernels

            maximum, sums = kernels.row_statistics(
                logits_TV, targets.start_T, shard.columns, shard.temperature, with_entropy
            )
        else:
            maximum, sums = _torch_statistics(logits_TV, shard, with_entropy)
        picked_M = logits_TV[targets.row_M, column_M.clamp(min=0)].to(dtype)
        picked_M = torch.where(column_M >= 0, picked_M, 0)
        maximum, sums, picked_M = _reduce(maximum, sums, picked_M, shard)
        log_sum = sums[0].log()
        lse_T = maximum / shard.temperature + log_sum
        entropy_T = log_sum - sums[1] / sums[0] if with_entropy else None
        lp_M = picked_M / shard.temperature - lse_T[targets.row_M]
        ctx.save_for_backward(logits_TV, column_M, lse_T, entropy_T, lp_M)
        ctx.targets, ctx.shard = targets, shard
        ctx.set_materialize_grads(False)
        return lp_M, entropy_T[targets.row_M] if with_entropy else None

    @staticmethod
    def backward(ctx, g_M, h_M):
        logits_TV, column_M, lse_T, entropy_T, lp_M = ctx.saved_tensors
        targets, shard = ctx.targets, ctx.shard
        if shard.columns == 0:
            return torch.zeros_like(logits_TV), None, None, None
        row_M = targets.row_M
        g_M = torch.zeros_like(lp_M) if g_M is None else g_M
        G_T = torch.zeros_like(lse_T).index_add_(0, row_M, g_M)
        H_T = None if h_M is None else torch.zeros_like(lse_T).index_add_(0, row_M, h_M)
        # A target's logit gets its whole gradient in compute precision and is rounded once.
        factor_M = G_T[row_M]
        if H_T is not None:
            factor_M = factor_M + H_T[row_M] * (lp_M.clamp(min=LOG_ZERO) + entropy_T[row_M])
        value_M = (_same_token_sum(g_M, targets) - lp_M.exp() * factor_M) / shard.temperature
        if _fused(logits_TV):
            from megatron.core.tree_training import kernels

            gradient_TV = kernels.row_gradient(
                logits_TV, targets.start_T, lse_T, entropy_T, G_T, H_T, shard.columns, shard.temperature
            )
            kernels.place(gradient_TV, row_M, column_M, value_M)
        else:
            gradient_TV = _torch_gradient(logits_TV, targets, lse_T, entropy_T, G_T, H_T, shard)
            _torch_place(gradient_TV, row_M, column_M, value_M)
        return gradient_TV, None, None, None


def _same_token_sum(g_M, targets):
    """Every target's sum of g over the targets of its row that are the same token."""
    if targets.distinct:
        return g_M
    pairs = torch.stack([targets.row_M, targets.token_M])
    _, group_M = pairs.unique(dim=1, return_inverse=True)
    return torch.zeros_like(g_M).index_add_(0, group_M, g_M)[group_M]


def _rows(logits, batch):
    T = batch.padded_size
    if not isinstance(logits, torch.Tensor):
        raise TypeError(f"logits must be a tensor, got {type(logits).__name__}")
    if logits.dim() == 3 and 1 in logits.shape[:2]:
        logits = logits.flatten(0, 1)
    if logits.dim() != 2 or logits.shape[0] != T:
        raise ValueError(f"logits must be [{T}, V], [1, {T}, V] or [{T}, 1, V], got {tuple(logits.shape)}")
    if not logits.is_floating_point():
        raise TypeError(f"logits must be floating point, got {logits.dtype}")
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _shard(columns, tp_group, vocab_size, max_token, temperature, chunk_rows):
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows must be at least 1, got {chunk_rows}")
    ranks, rank = (1, 0) if tp_group is None else (tp_group.size(), tp_group.rank())
    total = columns * ranks
    given, vocab_size = vocab_size, total if vocab_size is None else vocab_size
    if not 0 < vocab_size <= total:
        raise ValueError(f"vocab_size must lie in [1, {total}], the columns of all ranks, got {vocab_size}")
    if max_token >= vocab_size and given is not None:
        raise ValueError(f"the batch has token {max_token}, vocab_size is {vocab_size}")
    if max_token >= vocab_size:
        raise ValueError(
            f"the batch has token {max_token}, the logits have {vocab_size} columns over {ranks} "
            "tensor-parallel rank(s): is tp_group missing?"
        )
    here = min(max(vocab_size - rank * columns, 0), columns)
    return _Shard(rank * columns, here, tp_group, float(temperature), chunk_rows)


def log_probs_and_entropy(
    logits, batch, tp_group=None, temperature=1.0, *, vocab_size=None, chunk_rows=None, with_entropy=True
):
    """`log_probs` and `entropy` in the same passes over the logits: ([T], [T])."""
    logits_TV = _rows(logits, batch)
    shard = _shard(logits_TV.shape[1], tp_group, vocab_size, batch.max_token, temperature, chunk_rows)
    target_M = batch.target_M
    targets = _Targets(
        start_T=batch.target_start_T,
        row_M=batch.source_T[target_M],
        token_M=batch.tokens[0][target_M],
        distinct=batch.distinct_targets,
    )
    lp_M, entropy_M = _PackedLogProbs.apply(logits_TV, targets, shard, with_entropy)

    def per_token(values_M):
        return values_M.new_zeros(batch.padded_size).index_copy(0, target_M, values_M)

    return per_token(lp_M), per_token(entropy_M) if with_entropy else None


def log_probs(logits, batch, tp_group=None, temperature=1.0, *, vocab_size=None, chunk_rows=None):
    """log p(token | its path) of every packed token.

    Where paths part, one row of logits has several targets; no row is duplicated.

    Megatron's Float16Module upcasts the logits of the last stage to fp32 before they get here. That changes
    no value, as compute precision is fp32 in any case, but moves 12 bytes for each logit and its gradient
    where 4 would do, and holds 10 where 4 would do. `model(..., fp32_output=False)` leaves them in bf16.

    Args:
        logits: [T, V/tp], [1, T, V/tp] or [T, 1, V/tp], fp64, fp32, bf16 or fp16: this rank's columns, as a
            GPTModel without labels returns them. The gradient has the same type.
        batch: the TreeBatch that the model ran on.
        tp_group: the tensor-parallel group over which the columns are split; None when logits are whole.
        temperature: logits are divided by it.
        vocab_size: columns at or above it are padding and take no part; None: all take part, as in
            Megatron-Core's own cross-entropy.
        chunk_rows: rows in compute precision at a time in plain torch; None picks. The kernels need no
            memory.

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
