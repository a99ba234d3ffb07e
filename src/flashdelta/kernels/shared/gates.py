"""The gate, beta's sigmoid, and the derivatives of both (`reference/gate.py` is the definition)."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def softplus_log2(x):
    """`log2(1 + exp(x))`, whose exponential never overflows."""
    return tl.maximum(x, 0.0) * LOG2E + tl.log2(1.0 + tl.exp2(tl.abs(x) * -LOG2E))


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp2(x * -LOG2E))  # in this order: Triton 3.9 interprets constexpr * tensor as a constexpr


@triton.jit
def quick_sigmoid(x):
    """Returns the sigmoid to about 2^-22 of itself, without the scaling of a division."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -LOG2E))
    return root * root


@triton.jit
def decay_rate(A_log, head, volatile: tl.constexpr = False):
    """`exp(A_log)` of a value head; 1 without `A_log`."""
    rate = 1.0
    if A_log is not None:
        rate = tl.exp2(tl.load(A_log + head, volatile=volatile).to(tl.float32) * LOG2E)
    return rate


@triton.jit
def head_bias(dt_bias, head, key, K):
    """The bias that is added to the gate's input of a value head, at its key channels `key`."""
    bias = (key * 0).to(tl.float32)
    if dt_bias is not None:
        bias = tl.load(dt_bias + head * K + key).to(tl.float32)
    return bias


@triton.jit
def log2_decay(x, rate, lower_bound, GATE):
    """Log decay in base 2 from the gate's input `x = g + dt_bias`; `rate = exp(A_log)`."""
    tl.static_assert(
        GATE == "none" or GATE == "softplus" or GATE == "lower_bound" or GATE == "logsigmoid", "an unknown gate"
    )
    if GATE == "softplus":
        return -softplus_log2(x) * rate
    elif GATE == "lower_bound":
        return sigmoid(x * rate) * lower_bound * LOG2E
    elif GATE == "logsigmoid":
        return -softplus_log2(-x)
    return x * LOG2E


@triton.jit
def gate_gradient(x, grad, rate, lower_bound, GATE):
    """The gradients of the gate's input `x` and of `A_log`, from that of the (natural) log decay."""
    tl.static_assert(
        GATE == "none" or GATE == "softplus" or GATE == "lower_bound" or GATE == "logsigmoid", "an unknown gate"
    )
    if GATE == "softplus":
        dx = -rate * sigmoid(x) * grad
        dA_log = -rate * (softplus_log2(x) / LOG2E) * grad
    elif GATE == "lower_bound":
        s = sigmoid(x * rate)
        dx = lower_bound * s * (1.0 - s) * rate * grad
        dA_log = dx * x
    elif GATE == "logsigmoid":
        dx = sigmoid(-x) * grad
        dA_log = dx * 0.0
    else:
        dx = grad
        dA_log = grad * 0.0
    return dx, dA_log


@triton.jit
def beta_of(x, BETA):
    """Beta from the call's input, which is its value, its logit, or the logit of its half."""
    tl.static_assert(BETA == "value" or BETA == "logit" or BETA == "double_logit", "an unknown kind of beta")
    if BETA == "logit":
        x = sigmoid(x)
    elif BETA == "double_logit":
        x = 2.0 * sigmoid(x)
    return x


@triton.jit
def beta_gradient(x, grad, BETA):
    """The gradient of the input of `beta_of`, from beta's."""
    tl.static_assert(BETA == "value" or BETA == "logit" or BETA == "double_logit", "an unknown kind of beta")
    if BETA == "logit":
        s = sigmoid(x)
        grad *= s * (1.0 - s)
    elif BETA == "double_logit":
        s = sigmoid(x)
        grad *= 2.0 * s * (1.0 - s)
    return grad


AHEAD = tl.constexpr(2.0**60)
"""Factor of decayed rows, for them to be within float32 as their inverses are: 17 tokens of `exp(-5)` are 2^-123."""
