"""Arithmetic: fast exponentials, gates, norms, MMAs of operands in two parts, 64-bit products."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from ..gates import LOG2E
from ..mma import two_parts
from ..norms import L2_EPS

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
    """The offset of a token and head, in the unit of the strides. Times 8, with strides in units of 8 elements, it tells the
    compiler that 16-byte copies are aligned."""
    return wide(batch, of_batch) + wide(token, of_token) + wide(head, of_head)


@gluon.jit
def multiply(a, b):
    return a * b


@gluon.jit
def last(a, b):
    return b


@gluon.jit
def hidden_zero(count):
    """Returns a zero that the compiler cannot see, `min(count, 0)`, for `count >= 0`. Adding it to an offset makes the compiler
    compute the offset anew, instead of keeping it over loops or between uses in registers that are needed in between. The
    compiler sees a multiple of 16, like all offsets in a V-first state, so accesses still take 16 bytes."""
    return gl.minimum(count, 0).to(gl.int64) * 16


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
def gate_bias(dt_bias, rate, GATE):
    """`dt_bias` as `gate` takes it."""
    if GATE == "lower_bound":
        return dt_bias * (rate * -LOG2E)
    return dt_bias


@gluon.jit
def gate_unit(rate, lower_bound, GATE):
    """The factor that turns `gate`'s result into a log2 decay."""
    gl.static_assert(
        GATE == "none" or GATE == "softplus" or GATE == "lower_bound" or GATE == "logsigmoid", "an unknown gate"
    )
    if GATE == "lower_bound":
        return lower_bound * LOG2E
    elif GATE == "softplus":
        return -rate
    elif GATE == "logsigmoid":
        return -1.0
    return LOG2E


@gluon.jit
def gate(x, bias, rate, GATE):
    """Log2 decay of a step up to `gate_unit`, from `x = g`, `bias` from `gate_bias` and `rate = exp(A_log)`."""
    gl.static_assert(
        GATE == "none" or GATE == "softplus" or GATE == "lower_bound" or GATE == "logsigmoid", "an unknown gate"
    )
    if GATE == "lower_bound":
        return reciprocal(1.0 + exp2(x * (rate * -LOG2E) + bias))
    elif GATE == "softplus":
        return softplus_log2(x + bias)
    elif GATE == "logsigmoid":
        return softplus_log2(-x)
    return x


@gluon.jit
def exp2_negative_abs(x):
    """`exp2(-|x|)`; neither costs anything inside the instruction."""
    asm: gl.constexpr = "{ .reg .f32 t; abs.f32 t, $1; neg.f32 t, t; ex2.approx.ftz.f32 $0, t; }"
    return gl.inline_asm_elementwise(asm, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def unbounded_gate(x, bias, GATE, FINITE):
    """`gate` for gates without a bound, with `bias` in log2. Unless `FINITE`, which takes two instructions more, some that are
    about -88 or less come out as infinite."""
    gl.static_assert(
        GATE == "none" or GATE == "softplus" or GATE == "logsigmoid", "an unknown gate, or one with a bound"
    )
    if GATE == "none":
        return x
    x = x * (-LOG2E if GATE == "logsigmoid" else LOG2E) + bias
    if FINITE:
        return gl.maximum(x, 0.0) + log2(1.0 + exp2_negative_abs(x))
    return log2(1.0 + exp2(x))


@gluon.jit
def sigmoid(x):
    return reciprocal(1.0 + exp2(x * -LOG2E))


@gluon.jit
def gate_gradient(x, grad, rate, lower_bound, GATE):
    """Returns the gradients of the gate's input `x = g + dt_bias` and of `A_log`, from that of a log decay."""
    gl.static_assert(
        GATE == "none" or GATE == "softplus" or GATE == "lower_bound" or GATE == "logsigmoid", "an unknown gate"
    )
    if GATE == "softplus":
        of_x = sigmoid(x) * grad * -rate
        of_A = softplus_log2(x) * grad * (rate * (-1.0 / LOG2E))
    elif GATE == "lower_bound":
        s = sigmoid(x * rate)
        of_x = (s - s * s) * grad * (lower_bound * rate)
        of_A = of_x * x
    elif GATE == "logsigmoid":
        of_x = sigmoid(-x) * grad
        of_A = of_x * 0.0
    else:
        of_x = grad
        of_A = grad * 0.0
    return of_x, of_A


@gluon.jit
def beta_value(x, BETA):
    gl.static_assert(BETA == "value" or BETA == "logit" or BETA == "double_logit", "an unknown kind of beta")
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
def widen(x):
    """`x` in float32; bf16 two at a time: Triton takes two instructions for the high one of a word."""
    if x.dtype == gl.bfloat16:
        asm: gl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
        x = gl.inline_asm_elementwise(asm, "=f,=f,r", [x], dtype=gl.float32, is_pure=True, pack=2)
    return x.to(gl.float32)


@gluon.jit
def pick(x, i: gl.constexpr):
    """`x[:, i]`, where a thread has all of that dimension. Integers, because adding a float's zero is an instruction."""
    layout: gl.constexpr = x.type.layout
    if len(x.shape) == 3:
        at = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    else:
        at = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
    return gl.sum(gl.where(at == i, x.to(gl.int32, bitcast=True), 0), axis=1).to(gl.float32, bitcast=True)


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
def larger(x, y):
    """The larger one, or a NaN."""
    return gl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def round_pairs(x):
    """`x` in bf16, two at a time: alone, a conversion takes four times as long."""
    asm: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(asm, "=r,f,f", [x], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def dot3(a, b, acc):
    """`acc + a b` of operands in `two_parts`."""
    acc = mma_v2(a[1], b[0], acc, input_precision="tf32")
    acc = mma_v2(a[0], b[1], acc, input_precision="tf32")
    return mma_v2(a[0], b[0], acc, input_precision="tf32")


@gluon.jit
def store_parts(rows_s, rows):
    """Stores `rows`, in `two_parts`, to the first rows of `rows_s [2, ..., K]`."""
    high, low = two_parts(rows)
    rows_s.index(0).slice(0, rows.shape[0], dim=0).store(high)
    rows_s.index(1).slice(0, rows.shape[0], dim=0).store(low)


@gluon.jit
def column_halves(x, layout: gl.constexpr):
    """Columns [0, 32) and [32, 64) of `x [64, 64]`, in `layout`; no data moves between threads."""
    left, right = gl.split(x.reshape([64, 2, 32]).permute((0, 2, 1)))
    return gl.convert_layout(left, layout, assert_trivial=True), gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def norm_factors(x, L2NORM):
    """`[64, 1]`: `1 / sqrt(sum x^2 + eps)` of the rows, or 1."""
    layout: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    factor = gl.full((x.shape[0],), 1.0, gl.float32, layout=layout)
    if L2NORM:
        factor = gl.rsqrt(gl.sum(x * x, axis=1) + L2_EPS)
    return factor[:, None]


@gluon.jit
def decay_bias(dt_bias, head, rate, column, K, GATE, volatile: gl.constexpr = False):
    """The bias of a value head's key channels `column`, as `gate` takes it, in one row."""
    layout: gl.constexpr = column.type.layout
    bias = gl.zeros(column.shape, gl.float32, layout=layout)
    if dt_bias is not None:
        bias += gate_bias(gl.load(dt_bias + head * K + column, volatile=volatile).to(gl.float32), rate, GATE)
    return bias[None, :]
