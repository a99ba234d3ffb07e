"""MMAs whose operands keep more bits than one tensor core instruction takes: 3xTF32, and weights in two parts."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tf32_parts(x, ROUND: tl.constexpr):
    """`x` in float32 as a TF32 number and the rest. The products cut off the last 13 bits of their operands. `ROUND` both parts
    beforehand where errors of one sign would pile up."""
    bits = x.to(tl.int32, bitcast=True)
    if ROUND:
        bits += 4096
    high = (bits & -8192).to(tl.float32, bitcast=True)
    low = x - high
    if ROUND:
        # a GPU's NaN is all ones but for the sign: without a limit it would run over and be gone
        bits = tl.minimum(low.to(tl.int32, bitcast=True), 0x7FFFE000) + 4096
        low = (bits & -8192).to(tl.float32, bitcast=True)
    return high, low


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr, IN_CHAIN: tl.constexpr = False):
    """`acc + a b`. "tf32x3" is three TF32 products of the operands' two parts; `tl.dot` has it too, but looks for NaN between
    the products, which takes longer than they do. `IN_CHAIN`: the next product waits for this one, so the three do not wait
    for one another, and the operands are not rounded."""
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
    """`acc + weights tile`. With a 16-bit tile, the fp32 weights enter as a high and a low part: rows of weights alternate in
    sign where keys repeat, and rounding them once would leave more error than result."""
    high = weights.to(tile.dtype)
    acc = dot(high, tile, acc, PRECISION)
    if tile.dtype != tl.float32:
        low = (weights - high.to(tl.float32)).to(tile.dtype)
        acc = dot(low, tile, acc, PRECISION)
    return acc
