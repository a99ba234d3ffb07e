"""MMAs whose operands keep more bits than one tensor core instruction takes: 3xTF32, and weights in two parts."""

from __future__ import annotations

import triton
import triton.language as tl

TF32_MASK = tl.constexpr(-(1 << 13))
"""The bits of a float32 that TF32 has: tensor cores ignore the last 13 of the mantissa."""

TF32_HALF = tl.constexpr(1 << 12)
"""Half a step of TF32: added before the mask is applied, it rounds."""

LARGEST_TO_ROUND = tl.constexpr(0x7FFFE000)
"""The largest bits, as an integer, to which half a step may be added. A GPU's NaN is all ones but for the sign: with half a
step more it would turn negative, a zero once masked."""


@triton.jit
def tf32_parts(x, ROUND: tl.constexpr):
    """Float32 `x` as `high + low`, two TF32 numbers. MMAs truncate their operands to TF32. `ROUND` rounds both parts
    instead, for where errors of one sign would add up (docs/numerics.md)."""
    bits = x.to(tl.int32, bitcast=True)
    if ROUND:
        bits += TF32_HALF
    high = (bits & TF32_MASK).to(tl.float32, bitcast=True)
    low = x - high
    if ROUND:
        bits = tl.minimum(low.to(tl.int32, bitcast=True), LARGEST_TO_ROUND) + TF32_HALF
        low = (bits & TF32_MASK).to(tl.float32, bitcast=True)
    return high, low


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr, IN_CHAIN: tl.constexpr = False):
    """`acc + a b`. "tf32x3" is three TF32 MMAs of the operands' two parts. `tl.dot` has it too, but looks for NaN between the
    MMAs, which takes longer than they do.

    `IN_CHAIN`: for a serial chain of MMAs, where latency counts. The three MMAs do not wait for one another, and operands are
    truncated instead of rounded.
    """
    if PRECISION == "tf32x3":
        a_high, a_low = tf32_parts(a, not IN_CHAIN)
        b_high, b_low = tf32_parts(b, not IN_CHAIN)
        if IN_CHAIN:
            rest = tl.dot(a_low, b_high, input_precision="tf32")
            rest += tl.dot(a_high, b_low, input_precision="tf32")
            acc = tl.dot(a_high, b_high, acc=acc, input_precision="tf32") + rest
        else:
            acc = tl.dot(a_low, b_high, acc=acc, input_precision="tf32")
            acc = tl.dot(a_high, b_low, acc=acc, input_precision="tf32")
            acc = tl.dot(a_high, b_high, acc=acc, input_precision="tf32")
    else:
        acc = tl.dot(a, b, acc=acc, input_precision=PRECISION)
    return acc


@triton.jit
def apply_weights(weights, tile, acc, PRECISION: tl.constexpr):
    """`acc + weights tile`. With a 16-bit tile, the fp32 weights enter as a high and a low part: where keys repeat, a row of
    weights alternates in sign, and weights rounded once would leave more error than result."""
    high = weights.to(tile.dtype)
    acc = dot(high, tile, acc, PRECISION)
    if tile.dtype != tl.float32:
        low = (weights - high.to(tl.float32)).to(tile.dtype)
        acc = dot(low, tile, acc, PRECISION)
    return acc


@triton.jit
def stacked(a, b):
    """The rows of `a`, then those of `b`."""
    both = tl.join(a, b)
    if len(a.shape) == 1:
        result = tl.reshape(tl.permute(both, (1, 0)), [2 * a.shape[0]])
    else:
        result = tl.reshape(tl.permute(both, (2, 0, 1)), [2 * a.shape[0], a.shape[1]])
    return result


@triton.jit
def two_parts(x):
    """Float32 `x` as two numbers whose TF32 parts have 22 bits of it: the first is rounded, MMAs truncate the second."""
    bits = x.to(tl.int32, bitcast=True) + TF32_HALF
    high = (bits & TF32_MASK).to(tl.float32, bitcast=True)
    return high, x - high
