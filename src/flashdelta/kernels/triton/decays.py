"""Sums of log decays, for exponents `G_i - G_j`.

A sum is an MMA with a 0/1 matrix: it needs no exchange between threads and never subtracts, so every exponent is a sum of terms
of one sign (docs/numerics.md).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..shared.gates import log2_decay

MIN_LOG2_DECAY = tl.constexpr(-1000.0)
"""Least log2 decay of one token: exp2 of less is 0 as well, and -infinity times a 0 of the matrix would be NaN."""

LOW_PART_STEP = tl.constexpr(2.0**-11)
"""The relative step of float16."""


@triton.jit
def split_decay(x, rate, lower_bound, valid, GATE: tl.constexpr, FINE: tl.constexpr = False):
    """Log2 decays as `high + low`, both float16: 22 bits. Rows that are not `valid`, past the sequence's end, do not decay.

    Next to 0 the steps of float16 are 6e-8 apart. Over a long sequence even such a decay counts, and rounding it the same way
    in every token shows in float32. So float32 calls (`FINE`) hold `low / LOW_PART_STEP`.
    """
    x = tl.maximum(log2_decay(x, rate, lower_bound, GATE), MIN_LOG2_DECAY, propagate_nan=tl.PropagateNan.ALL)
    x = tl.where(valid, x, 0.0)
    high = x.to(tl.float16)
    low = x - high.to(tl.float32)
    if FINE:
        low = low / LOW_PART_STEP
    return high, low.to(tl.float16)


@triton.jit
def sums(matrix, high, low, FINE: tl.constexpr = False):
    """A 0/1 matrix `[.., R, R]` times log2 decays `[.., R, channels]` in the two parts of `split_decay`."""
    ones = tl.where(matrix, 1.0, 0.0).to(tl.float16)
    if FINE:
        return tl.dot(ones, high, acc=tl.dot(ones, low) * LOW_PART_STEP)
    return tl.dot(ones, low, acc=tl.dot(ones, high))


@triton.jit
def chunk_decays(g, dt_bias, tokens, column, valid, head, rate, lower_bound, K: tl.constexpr, GATE: tl.constexpr):
    """Of a chunk's rows, `[C, BK]` each: the gate's input with its bias, and the log2 decays as `high + low`."""
    x = tl.load(g + tokens + column[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
    if dt_bias is not None:
        x += tl.load(dt_bias + head * K + column).to(tl.float32)[None, :]
    high, low = split_decay(x, rate, lower_bound, valid[:, None], GATE)
    return x, high, low
