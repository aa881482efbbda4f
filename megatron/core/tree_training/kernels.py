"""The two passes over logits of `log_probs`, in Triton: every logit is read once forward, read and written
once backward.

For a row x of logits and z = x / temperature, forward gives the maximum m of x and, with m' = m /
temperature,

    Σ_v exp(z_v - m')        and, for the entropy,        Σ_v exp(z_v - m') (z_v - m')

online: a block whose maximum is larger rescales what was summed before. Backward gives every logit

    -p_v (G + H (log p_v + entropy)) / temperature,        log p_v = z_v - lse,

to which `log_probs` then adds the few logits that are targets. Rows without targets are not read. All
exponentials are powers of two, the logits' scale carries log2 e. Compute precision is fp32.

`TRITON_INTERPRET=1` runs them on the CPU.
"""

import math

import torch
import triton
import triton.language as tl

STATISTICS_BLOCK, STATISTICS_WARPS = 4096, 4
GRADIENT_BLOCK, GRADIENT_WARPS = 2048, 4

FLOOR: tl.constexpr = tl.constexpr(-1000.0)
"""Below it a power of two is 0 in fp32, so what it multiplies may be cut there: 0 · -inf would be NaN."""
LOWEST: tl.constexpr = tl.constexpr(-3.0e38)
LN2: tl.constexpr = tl.constexpr(math.log(2))


@triton.jit
def _statistics_kernel(
    logits,
    row_stride,
    target_start,
    maximum,
    sums,
    weighted,
    scale,
    ENTROPY: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if tl.load(target_start + row) == tl.load(target_start + row + 1):
        return
    logits += row * row_stride
    # Finite from the start: -inf - -inf would be NaN.
    m = LOWEST
    s = 0.0
    w = 0.0
    for first in range(0, COLUMNS, BLOCK):
        column = first + tl.arange(0, BLOCK)
        x = tl.load(logits + column, mask=column < COLUMNS, other=-float("inf")).to(tl.float32)
        larger = tl.maximum(m, tl.max(x, 0))
        shift = tl.maximum((m - larger) * scale, FLOOR)
        shrink = tl.exp2(shift)
        d = (x - larger) * scale
        e = tl.exp2(d)
        if ENTROPY:
            w = (w + s * shift) * shrink + tl.sum(e * tl.maximum(d, FLOOR), 0)
        s = s * shrink + tl.sum(e, 0)
        m = larger
    tl.store(maximum + row, m)
    tl.store(sums + row, s)
    if ENTROPY:
        tl.store(weighted + row, w * LN2)


@triton.jit
def _gradient_kernel(
    logits,
    row_stride,
    target_start,
    gradient,
    gradient_stride,
    lse,
    entropy,
    G,
    H,
    columns,
    all_columns,
    scale,
    inverse_temperature,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gradient += row * gradient_stride + column
    if tl.load(target_start + row) == tl.load(target_start + row + 1):
        tl.store(gradient, tl.zeros([BLOCK], gradient.dtype.element_ty), mask=column < all_columns)
        return
    x = tl.load(logits + row * row_stride + column, mask=column < columns, other=-float("inf")).to(tl.float32)
    d = x * scale - tl.load(lse + row) / LN2
    factor = tl.load(G + row)
    if ENTROPY:
        factor += tl.load(H + row) * (tl.maximum(d, FLOOR) * LN2 + tl.load(entropy + row))
    value = -tl.exp2(d) * factor * inverse_temperature
    tl.store(gradient, value.to(gradient.dtype.element_ty), mask=column < all_columns)


@triton.jit
def _place_kernel(gradient, gradient_stride, row, column, value, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at_row = tl.load(row + i, mask=i < count, other=0).to(tl.int64)
    at_column = tl.load(column + i, mask=i < count, other=-1)
    v = tl.load(value + i, mask=i < count, other=0.0)
    where = gradient + at_row * gradient_stride + at_column
    tl.store(where, v.to(gradient.dtype.element_ty), mask=at_column >= 0)


def row_statistics(logits_TV, target_start_T, columns, temperature, with_entropy):
    """Per row of the first `columns` columns: maximum and one or two sums, fp32; 0 and 1 where a row has no
    target."""
    T = logits_TV.shape[0]
    maximum = logits_TV.new_zeros(T, dtype=torch.float32)
    sums = logits_TV.new_ones(2 if with_entropy else 1, T, dtype=torch.float32)
    _statistics_kernel[(T,)](
        logits_TV,
        logits_TV.stride(0),
        target_start_T,
        maximum,
        sums[0],
        sums[-1],
        math.log2(math.e) / temperature,
        ENTROPY=with_entropy,
        COLUMNS=columns,
        BLOCK=min(STATISTICS_BLOCK, triton.next_power_of_2(columns)),
        num_warps=STATISTICS_WARPS,
    )
    return maximum, sums


def row_gradient(logits_TV, target_start_T, lse_T, entropy_T, G_T, H_T, columns, temperature):
    """The logits' gradient without the targets' own share, in the logits' type; 0 beyond the first
    `columns`."""
    T, V = logits_TV.shape
    gradient_TV = torch.empty_like(logits_TV)
    block = min(GRADIENT_BLOCK, triton.next_power_of_2(V))
    _gradient_kernel[(T, triton.cdiv(V, block))](
        logits_TV,
        logits_TV.stride(0),
        target_start_T,
        gradient_TV,
        gradient_TV.stride(0),
        lse_T,
        entropy_T if H_T is not None else lse_T,
        G_T,
        H_T if H_T is not None else G_T,
        columns,
        V,
        math.log2(math.e) / temperature,
        1 / temperature,
        ENTROPY=H_T is not None,
        BLOCK=block,
        num_warps=GRADIENT_WARPS,
    )
    return gradient_TV


def place(gradient_TV, row_M, column_M, value_M):
    """gradient[row, column] = value where the column is not negative; equal places must have equal values."""
    count = row_M.numel()
    if count:
        _place_kernel[(triton.cdiv(count, 256),)](
            gradient_TV, gradient_TV.stride(0), row_M, column_M, value_M, count, BLOCK=256
        )
