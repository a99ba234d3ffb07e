"""Asynchronous MMAs, and sums of log decays by them."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from ...shared.gluon.math import LOWEST, gate, gate_unit
from .layouts import C, row_column


@gluon.jit
def mma(a, b, acc):
    """Starts `acc + a b`; not waited for."""
    return warpgroup_mma(a, b, acc, is_async=True)


@gluon.jit
def mma_first(a, b, zero):
    """Starts `a b`, of the type of `zero`; not waited for."""
    return warpgroup_mma(a, b, zero, use_acc=False, is_async=True)


@gluon.jit
def mma3(a_high, a_low, b_high, b_low, acc, use_acc: gl.constexpr):
    """Starts `acc + (a_high + a_low) (b_high + b_low)` without low times low: 16 bits of each operand count."""
    acc = warpgroup_mma(a_high, b_high, acc, use_acc=use_acc, is_async=True)
    acc = warpgroup_mma(a_high, b_low, acc, is_async=True)
    return warpgroup_mma(a_low, b_high, acc, is_async=True)


@gluon.jit
def store_decays(high_s, low_s, x, bias, rate, lower_bound, valid, GATE, SAFE, jump=None):
    """Log2 decays of rows with the gate's input `x`, none past the end, plus `jump`, as float16 `high_s + low_s`: exact to 22
    bits."""
    step = gate(x, bias, rate, GATE) * gl.where(valid, gate_unit(rate, lower_bound, GATE), 0.0)
    if not SAFE:
        step = gl.where(step < LOWEST, LOWEST, step)  # a NaN stays one
    if jump is not None:
        step += jump
    high = step.to(gl.float16)
    high_s.store(high)
    low_s.store((step - high.to(gl.float32)).to(gl.float16))
    fence_async_shared()


@gluon.jit
def opaque_indices(T, N, layout: gl.constexpr):
    """Rows `[64, 1]` and columns `[1, 64]` of weights that are a left operand in registers. The compiler must not know them:
    ptxas writes the registers of constants when the MMA is already under way (`compile.late_operands`). T and N are not
    negative, but the compiler does not know that."""
    i, s = row_column(C, C, layout)
    return i + (gl.minimum(T, 0) - gl.minimum(N, 0)), s


@gluon.jit
def weighted_sums(weights, high_s, low_s, zero):
    """`weights [64, 64]`, small integers as a left operand, times `high_s + low_s [64, K]`; not waited for."""
    acc = warpgroup_mma(weights, high_s, zero, use_acc=False, is_async=True)
    return warpgroup_mma(weights, low_s, acc, is_async=True)
