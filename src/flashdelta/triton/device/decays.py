"""Sums of log decays, for exponents `G_i - G_j`.

A sum is an MMA with a 0/1 matrix: it needs no exchange between threads and never subtracts, so every exponent is a sum of terms
of one sign (docs/numerics.md).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .gates import log2_decay

LOWEST = tl.constexpr(-1000.0)
"""Least log2 decay of one step: exp2 of less is 0 all the same, and infinity times a 0 of a matrix would be NaN."""

FINE_STEP = tl.constexpr(2.0**-11)
"""What rounding to float16 may be off by, over the number's own size."""


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
def sums(matrix, high, low, FINE: tl.constexpr = False):
    """Zeros and ones `[.., R, R]` times log decays `[.., R, channels]` in the two parts of `split_decay`."""
    ones = tl.where(matrix, 1.0, 0.0).to(tl.float16)
    if FINE:
        return tl.dot(ones, high, acc=tl.dot(ones, low) * FINE_STEP)
    return tl.dot(ones, low, acc=tl.dot(ones, high))


@triton.jit
def chunk_decays(g, dt_bias, tokens, column, valid, head, rate, lower_bound, K: tl.constexpr, GATE: tl.constexpr):
    """The gate's input (with its bias) of a chunk's rows, and their log2 decays as `high + low`."""
    x = tl.load(g + tokens + column[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
    if dt_bias is not None:
        x += tl.load(dt_bias + head * K + column).to(tl.float32)[None, :]
    high, low = split_decay(x, rate, lower_bound, valid[:, None], GATE)
    return x, high, low
