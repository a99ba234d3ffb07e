"""Arithmetic that both stages need: fast exponentials, gates, products more exact than their bf16 operands, 64-bit ones."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from ...triton.device.gates import LOG2E

LOWEST = gl.constexpr(-20.0 * 1.4426950408889634)
"""Least log2 decay of one step where decays have no bound: exp(-20) is 2e-9, less than float32 resolves beside 1."""

LOWEST_HALF = gl.constexpr(-80.0 * 1.4426950408889634)
"""Least log2 decay of half a block of 32 rows where one reference may serve the block: exp(80) times a key is finite, as with
the lowest bound of a bounded gate."""


@gluon.jit
def wide(a, b):
    """The 64-bit product of two 32-bit integers."""
    return a.to(gl.int64) * b.to(gl.int64)


@gluon.jit
def token_offset(batch, token, head, of_batch, of_token, of_head):
    """Of a token and head, in the unit of the strides. Times 8, with strides in units of 8 elements, it tells the compiler that
    16-byte copies are aligned."""
    return wide(batch, of_batch) + wide(token, of_token) + wide(head, of_head)


@gluon.jit
def exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def exp2_negative(x):
    """`exp2(-x)`; the sign costs nothing inside the instruction."""
    asm: gl.constexpr = "{ .reg .f32 t; neg.f32 t, $1; ex2.approx.ftz.f32 $0, t; }"
    return gl.inline_asm_elementwise(asm, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def log2(x):
    return gl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def softplus_log2(x):
    """`log2(1 + exp(x))`, whose exponential never overflows."""
    return gl.maximum(x, 0.0) * LOG2E + log2(1.0 + exp2(gl.abs(x) * -LOG2E))


@gluon.jit
def gate_bias(dt_bias, rate, GATE: gl.constexpr):
    """`dt_bias` as `gate` takes it."""
    if GATE == "lower_bound":
        return dt_bias * (rate * -LOG2E)
    return dt_bias


@gluon.jit
def gate_unit(rate, lower_bound, GATE: gl.constexpr):
    """The factor that turns `gate`'s result into a log2 decay."""
    if GATE == "lower_bound":
        return lower_bound * LOG2E
    elif GATE == "softplus":
        return -rate
    elif GATE == "logsigmoid":
        return -1.0
    return LOG2E


@gluon.jit
def gate(x, bias, rate, GATE: gl.constexpr):
    """Log2 decay of a step up to `gate_unit`, from `x = g`, `bias` from `gate_bias` and `rate = exp(A_log)`."""
    if GATE == "lower_bound":
        return reciprocal(1.0 + exp2(x * (rate * -LOG2E) + bias))
    elif GATE == "softplus":
        return softplus_log2(x + bias)
    elif GATE == "logsigmoid":
        return softplus_log2(-x)
    return x


@gluon.jit
def sigmoid(x):
    return reciprocal(1.0 + exp2(x * -LOG2E))


@gluon.jit
def gate_gradient(x, grad, rate, lower_bound, GATE: gl.constexpr):
    """From the gradient of a log decay to that of the gate's input `x = g + dt_bias`, and of `A_log`."""
    if GATE == "softplus":
        found = sigmoid(x) * grad * -rate
        of_A = softplus_log2(x) * grad * (rate * (-1.0 / LOG2E))
    elif GATE == "lower_bound":
        s = sigmoid(x * rate)
        found = (s - s * s) * grad * (lower_bound * rate)
        of_A = found * x
    elif GATE == "logsigmoid":
        found = sigmoid(-x) * grad
        of_A = found * 0.0
    else:
        found = grad
        of_A = grad * 0.0
    return found, of_A


@gluon.jit
def write_strength(x, BETA: gl.constexpr):
    if BETA == "logit":
        x = sigmoid(x)
    elif BETA == "double_logit":
        x = 2.0 * sigmoid(x)
    return x


@gluon.jit
def split_high_low(x):
    """`x` as the sum of two bf16: 16 bits. The high part by truncation, which makes the difference exact."""
    high = (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
    return high.to(gl.bfloat16), (x - high).to(gl.bfloat16)


@gluon.jit
def high_pair(x, y):
    """The high parts of `x` and `y`, as `split_high_low` has them, in one int32."""
    asm: gl.constexpr = "prmt.b32 $0, $1, $2, 0x7632;"
    return gl.inline_asm_elementwise(asm, "=r,f,f", [x, y], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def low_pair(x, y):
    """The low parts of `x` and `y` in one int32."""
    asm: gl.constexpr = """
    {
        .reg .f32 a, b;
        and.b32 a, $1, 0xffff0000;
        and.b32 b, $2, 0xffff0000;
        sub.f32 a, $1, a;
        sub.f32 b, $2, b;
        cvt.rn.bf16x2.f32 $0, b, a;
    }
    """
    return gl.inline_asm_elementwise(asm, "=r,f,f", [x, y], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def round_pairs(x):
    """`x` in bf16, two at a time: alone, a conversion takes four times as long."""
    asm: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(asm, "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def product3(a_high, a_low, b_high, b_low, acc, use_acc: gl.constexpr):
    """`acc + (a_high + a_low) (b_high + b_low)` without the product of the two low parts."""
    acc = warpgroup_mma(a_high, b_high, acc, use_acc=use_acc, is_async=True)
    acc = warpgroup_mma(a_high, b_low, acc, is_async=True)
    return warpgroup_mma(a_low, b_high, acc, is_async=True)


@gluon.jit
def column_halves(x, layout: gl.constexpr):
    """Columns [0, 32) and [32, 64) of `x [64, 64]`, in `layout`; no data moves between threads."""
    left, right = gl.split(x.reshape([64, 2, 32]).permute((0, 2, 1)))
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)
