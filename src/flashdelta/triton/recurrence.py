"""Stages `recurrence` and `output`, fused: walks a sequence's chunks in order. One program per (sequence, value head, slice
of value channels).

Contract (docs/algorithm.md), from `prepare`'s tiles, `v`, and the state `S` before the chunk:

    v'  = inverse v - w S              [C, V]
    o   = qg S + Aqk v'                [C, V]
    S  <- diag(decay) S + kg^T v'      [K, V]

Everything is kept transposed, `S^T [BV, K]` and `v'^T [BV, C]`: results then have the register layout of the next product's
left operand, and the serial chain never goes through shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import chunks_before, first_slot, locate


@triton.jit
def state_offsets(row, value, K: tl.constexpr, V: tl.constexpr, V_FIRST: tl.constexpr):
    """Element offsets `[BV, K]` of a state, whose rows start at `row * K * V`."""
    key = tl.arange(0, K)
    inner = value[:, None] * K + key[None, :] if V_FIRST else key[None, :] * V + value[:, None]
    return row * K * V + inner


@triton.jit
def load_state(initial_state, state_at, has_initial):
    """The state in fp32, or zeros. The choice is made at run time: one compiled kernel, so one order of operations, serves
    calls with and without a state, and `None` gives the bits that zeros give."""
    return tl.load(initial_state + state_at, mask=everywhere(state_at, has_initial), other=0.0).to(tl.float32)


@triton.jit
def everywhere(offsets, flag):
    """The run-time flag as a mask of all `offsets`."""
    return (offsets * 0 + flag) != 0


@triton.jit(do_not_specialize=["T", "N", "HV", "slots", "has_initial", "has_final"])
def recurrence_kernel(
    w,
    qg,
    kg,
    inverse,
    Aqk,
    decay,
    v,
    o,
    initial_state,
    final_state,
    h,
    cu_seqlens,
    T,
    N,
    HV,
    slots,
    has_initial,
    has_final,
    v_batch: tl.int64,
    v_token: tl.int64,
    v_head: tl.int64,
    o_batch: tl.int64,
    o_token: tl.int64,
    o_head: tl.int64,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    V_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    slice_, head, n, batch, begin, end = locate(cu_seqlens, T, HV, V // BV)
    if cu_seqlens is None:
        slot = n * slots
        h_row = slot
    else:
        slot = first_slot(begin, n, C)
        h_row = slot
        if h is not None:
            h_row = chunks_before(cu_seqlens, n, T, C, 128)
    chunks = ((end - begin + C - 1) // C).to(tl.int32)
    dtype = w.dtype.element_ty

    row = tl.arange(0, C)
    key = tl.arange(0, K)
    value = slice_ * BV + tl.arange(0, BV)
    state_at = state_offsets(n * HV + head, value, K, V, V_FIRST)
    state = load_state(initial_state, state_at, has_initial)

    tile = row[:, None] * K + key[None, :]
    square = row[:, None] * C + row[None, :]
    v += batch * v_batch + head * v_head
    o += batch * o_batch + head * o_head
    for i in tl.range(0, chunks, num_stages=STAGES):
        chunk = (slot + i) * HV + head
        token = begin + i * C + row
        valid = (token < end)[:, None]
        if h is not None:
            h_at = state_offsets((h_row + i) * HV + head, value, K, V, V_FIRST)
            tl.store(h + h_at, state.to(h.dtype.element_ty))
        tile_w = tl.load(w + chunk * C * K + tile)
        tile_inverse = tl.load(inverse + chunk * C * C + square)
        tile_v = tl.load(v + token[:, None] * v_token + value[None, :], mask=valid, other=0.0)
        tile_qg = tl.load(qg + chunk * C * K + tile)
        tile_Aqk = tl.load(Aqk + chunk * C * C + square)
        tile_kg = tl.load(kg + chunk * C * K + tile)
        total = tl.load(decay + chunk * K + key)

        left = state.to(dtype)
        pseudo = tl.dot(tl.trans(tile_v), tl.trans(tile_inverse), input_precision=PRECISION)
        pseudo -= tl.dot(left, tl.trans(tile_w), input_precision=PRECISION)
        out = tl.dot(left, tl.trans(tile_qg), input_precision=PRECISION)
        pseudo_left = pseudo.to(dtype)
        state = tl.dot(pseudo_left, tile_kg, acc=state * total[None, :], input_precision=PRECISION)
        out = tl.dot(pseudo_left, tl.trans(tile_Aqk), acc=out, input_precision=PRECISION)
        o_at = token[:, None] * o_token + value[None, :]
        tl.store(o + o_at, tl.trans(out).to(o.dtype.element_ty), mask=valid)
    tl.store(final_state + state_at, state.to(final_state.dtype.element_ty), mask=everywhere(state_at, has_final))
