"""What kernels over chunks share: sums of log decays, pairs of rows, the inverse of a triangle.

Sums of log decays come from products with 0/1 matrices (`sums`), which need no exchange between threads and never subtract:
every exponent is a sum of terms of one sign.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import L2_EPS, dot, log2_decay

SUB = tl.constexpr(16)
"""Rows of the blocks that forward substitution inverts."""

LOWEST = tl.constexpr(-1000.0)
"""Least log2 decay of one step: exp2 of less is 0 all the same, and infinity times a 0 of a matrix would be NaN."""

FINE_STEP = tl.constexpr(2.0**-11)
"""What rounding to float16 may be off by, over the number's own size."""


@triton.jit
def sums(matrix, high, low, FINE: tl.constexpr = False):
    """Zeros and ones `[.., R, R]` times log decays `[.., R, channels]` in the two parts of `split_decay`."""
    ones = tl.where(matrix, 1.0, 0.0).to(tl.float16)
    if FINE:
        return tl.dot(ones, high, acc=tl.dot(ones, low) * FINE_STEP)
    return tl.dot(ones, low, acc=tl.dot(ones, high))


@triton.jit
def split_decay(x, rate, lower_bound, valid, GATE: tl.constexpr, FINE: tl.constexpr = False):
    """Log2 decays as `high + low`, both float16: 22 bits. Rows past the end, which are not `valid`, do not decay.

    Next to 0 the steps of float16 are 6e-8 apart: over a long sequence even such a decay counts, and rounding it the same way
    in every token shows in float32. There the low part has steps `FINE_STEP` times as far apart.
    """
    x = tl.maximum(log2_decay(x, rate, lower_bound, GATE), LOWEST, propagate_nan=tl.PropagateNan.ALL)
    x = tl.where(valid, x, 0.0)
    high = x.to(tl.float16)
    low = x - high.to(tl.float32)
    if FINE:
        low = low / FINE_STEP
    return high, low.to(tl.float16)


@triton.jit
def boundary_matrix(level, COUNT: tl.constexpr):
    """Of `COUNT` rows, row i selects the steps between row i and the boundary between the halves of its block of `2 << level`
    rows: from the boundary up to and with i in the second half, after i up to the boundary in the first."""
    i = tl.arange(0, COUNT)[:, None]
    s = tl.arange(0, COUNT)[None, :]
    second = (i >> level) % 2 == 1
    same = (i >> level) == (s >> level)
    return same & ((second & (s <= i)) | (((i >> level) % 2 == 0) & (s > i)))


@triton.jit
def pair_mask(level, COUNT: tl.constexpr):
    """Pairs (i, j) of one block of `2 << level` rows with i in its second half and j in its first."""
    i = tl.arange(0, COUNT)[:, None] >> level
    j = tl.arange(0, COUNT)[None, :] >> level
    return (i >> 1 == j >> 1) & (i % 2 == 1) & (j % 2 == 0)


@triton.jit
def forward_substitution(A):
    """`(I + A)^-1` of every strictly lower block of `A [NB, 16, 16]`.

    Row i of the inverse is `e_i - sum_{j<i} A_ij X_j`. In fp32, row by row: a Neumann series would explode and cancel on
    repeated keys.
    """
    row = tl.arange(0, SUB)[None, :, None]
    column = tl.arange(0, SUB)[None, None, :]
    # transposed, so that row i comes out indexed by the rows of X it multiplies
    A = tl.permute(A, (0, 2, 1))
    X = tl.where(row == column, 1.0, 0.0) + tl.zeros(A.shape, tl.float32)
    for r in range(1, SUB):
        a = tl.sum(tl.where(column == r, A, 0.0), axis=2)
        x = tl.sum(a[:, :, None] * X, axis=1)
        X -= tl.where(row == r, x[:, None, :], 0.0)
    return X


@triton.jit
def apply_weights(weights, tile, acc, PRECISION: tl.constexpr):
    """`acc + weights tile`. With a 16-bit tile, the fp32 weights enter as a high and a low part: rows of weights alternate in
    sign where keys repeat, and rounding them once would leave more error than result."""
    high = weights.to(tile.dtype)
    acc = dot(high, tile, acc, PRECISION)
    if tile.dtype != tl.float32:
        low = (weights - high.to(tl.float32)).to(tile.dtype)
        acc = dot(low, tile, acc, PRECISION)
    return acc


@triton.jit
def inverse_norm(x, rows, valid, K: tl.constexpr, BK: tl.constexpr, COUNT: tl.constexpr):
    """`1 / sqrt(sum x^2 + eps)` of each of `COUNT` rows."""
    total = tl.zeros([COUNT], tl.float32)
    for s in tl.range(0, K, BK):
        tile = tl.load(x + rows + s + tl.arange(0, BK)[None, :], mask=valid, other=0.0).to(tl.float32)
        total += tl.sum(tile * tile, axis=1)
    return 1.0 / tl.sqrt(total + L2_EPS)
