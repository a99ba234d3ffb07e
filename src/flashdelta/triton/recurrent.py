"""Stage `recurrent`: KDA token by token, for few tokens a sequence. One program per (sequence, value head, value slice).

Contract (docs/algorithm.md; `reference.recurrent` is the definition), in fp32 throughout:

    S <- diag(exp(g_t)) S;   S <- S + beta_t k_t (v_t - k_t^T S);   o_t = scale * q_t^T S

The state `S^T [BV, K]` stays in registers from the first token to the last.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import L2_EPS, decay_rate, locate, log2_decay, write_strength
from .states import load_state, sequence_slot, state_offsets, store_state


@triton.jit
def load_row(x, K: tl.constexpr, L2NORM: tl.constexpr):
    row = tl.load(x + tl.arange(0, K)).to(tl.float32)
    if L2NORM:
        row = row / tl.sqrt(tl.sum(row * row) + L2_EPS)
    return row


@triton.jit(
    do_not_specialize=[
        "T",
        "N",
        "H",
        "HV",
        "beta_batch",
        "beta_token",
        "beta_head",
        "scale",
        "lower_bound",
        "lowest",
        "pool_slots",
        "has_initial",
        "has_final",
    ],
)
def recurrent_kernel(
    q,
    k,
    v,
    g,
    beta,
    A_log,
    dt_bias,
    cu_seqlens,
    o,
    initial_state,
    final_state,
    state_indices,
    has_initial_state,
    lowest,
    pool_slots,
    has_initial,
    has_final,
    state_pitch: tl.int64,
    scale,
    lower_bound,
    T,
    N,
    H,
    HV,
    q_batch: tl.int64,
    q_token: tl.int64,
    q_head: tl.int64,
    k_batch: tl.int64,
    k_token: tl.int64,
    k_head: tl.int64,
    v_batch: tl.int64,
    v_token: tl.int64,
    v_head: tl.int64,
    g_batch: tl.int64,
    g_token: tl.int64,
    g_head: tl.int64,
    beta_batch: tl.int64,
    beta_token: tl.int64,
    beta_head: tl.int64,
    o_batch: tl.int64,
    o_token: tl.int64,
    o_head: tl.int64,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    GATE: tl.constexpr,
    BETA: tl.constexpr,
    L2NORM: tl.constexpr,
    V_FIRST: tl.constexpr,
):
    slice_, head, n, batch, begin, end = locate(cu_seqlens, T, HV, V // BV)
    qk_head = head // (HV // H)
    q += batch * q_batch + qk_head * q_head
    k += batch * k_batch + qk_head * k_head
    v += batch * v_batch + head * v_head
    g += batch * g_batch + head * g_head
    beta += batch * beta_batch + head * beta_head
    o += batch * o_batch + head * o_head

    key = tl.arange(0, K)
    value = slice_ * BV + tl.arange(0, BV)
    own, read, stored = sequence_slot(
        state_indices, has_initial_state, n, end - begin, lowest, pool_slots, has_initial, has_final
    )
    state_at = state_offsets(own * state_pitch + head * K * V, value, key, K, V, V_FIRST)
    state = load_state(initial_state, state_at, read)
    rate = decay_rate(A_log, head)
    bias = tl.zeros([K], tl.float32)
    if dt_bias is not None:
        bias = tl.load(dt_bias + head * K + key).to(tl.float32)

    for t in range(begin, end):
        row_q = load_row(q + t * q_token, K, L2NORM) * scale
        row_k = load_row(k + t * k_token, K, L2NORM)
        row_v = tl.load(v + t * v_token + value).to(tl.float32)
        x = tl.load(g + t * g_token + key).to(tl.float32) + bias
        strength = write_strength(tl.load(beta + t * beta_token).to(tl.float32), BETA)
        state *= tl.exp2(log2_decay(x, rate, lower_bound, GATE))[None, :]
        correction = strength * (row_v - tl.sum(state * row_k[None, :], axis=1))
        state += correction[:, None] * row_k[None, :]
        out = tl.sum(state * row_q[None, :], axis=1)
        tl.store(o + t * o_token + value, out.to(o.dtype.element_ty))
    store_state(final_state, state_at, state, stored)
