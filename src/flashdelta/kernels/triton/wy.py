"""Stage `wy` of the backward pass, and the operator `kernels.chunk_bwd_wy_dqkg` (FLA: `chunk_kda_bwd_wy_dqkg_fused`). One CTA
per (chunk, value head).

Contract (docs/backward.md; `reference/wy.py` is the definition), with `Akk_inv = (I + Akk)^-1`, the state `S` before the chunk
and the gradient `dS'` of the state after it:

    dAqk  = lower(do v_new^T)                                                                  [C, C]
    dw    = -dv_new S^T                                                                        [C, K]
    R, Z  = Akk_inv^T dv_new, Akk_inv^T dw                                                     [C, V], [C, K]
    dv    = beta R                                                                             [C, V]
    dbeta = <R, v> + <Z, k exp(G)>                                                             [C]
    dAkk  = strict_lower(-Akk_inv^T (dv_new v^T + dw (k exp(G))^T) diag(beta) Akk_inv^T)       [C, C]
    dq    = scale (do S^T) exp(G)                                                              [C, K]
    dk    = beta Z exp(G) + (v_new dS'^T) exp(G_C - G)                                         [C, K]
    dG    = q dq + k (beta Z exp(G)) - k (v_new dS'^T) exp(G_C - G)                            [C, K]
    dG_C += sum_i k_i (v_new dS'^T)_i exp(G_C - G_i) + exp(G_C) sum_v S dS'                    [K]
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ...problem.problem import ChunkProblem, ChunkTensors, WyProblem, WyTensors
from ...program.launch import Launch
from ...program.plan import Outputs
from ..shared.gates import LOG2E, beta_of, decay_rate
from ..shared.norms import norm_factors_at
from ..shared.products import summand
from ..shared.scalars import SCALARS
from ..shared.sequences import OFFSETS_AT_A_TIME, own_chunk, rows_before
from ..shared.states import state_offsets
from ..stages.launch import Config, StageCall, backward_precision, chunks, launch
from ..stages.wy import wy_operands, wy_results
from .decays import chunk_decays, sums

NORM_BK = tl.constexpr(32)
"""Key channels that an L2 norm adds at a time."""

KEYS_A_THREAD = tl.constexpr(8)
"""Key channels of a slice of the state, where a thread has one value channel."""

ROWS_A_THREAD = tl.constexpr(2)
"""Rows of a chunk's slice, where a thread has one channel: with 32 tokens in float32."""


@triton.jit
def load_decays(g, dt_bias, g_token, column, row, valid, count, head, rate, lower_bound, K, GATE):
    """Loads what `exp_g_of` and `exp_g_last_minus_g_of` start from: `high, low`, the rows' log2 decays in two parts. With a
    gate `cumulative` (`cumulative_log2`: base 2) g holds the sums `G` already: then `G` and `G_C`, that of the last row."""
    if GATE == "cumulative" or GATE == "cumulative_log2":
        first = tl.load(g + row[:, None] * g_token + column[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
        second = tl.load(g + (tl.minimum(count, row.shape[0]) - 1) * g_token + column).to(tl.float32)
    else:
        in_g = row[:, None] * g_token
        _, first, second = chunk_decays(g, dt_bias, in_g, column, valid, head, rate, lower_bound, K, GATE)
    return first, second


@triton.jit
def exp_of_sum(G, GATE):
    """`exp(G)` of a sum that a gate `cumulative` or `cumulative_log2` gives."""
    return tl.exp2(G * LOG2E if GATE == "cumulative" else G)


@triton.jit
def exp_g_of(first, second, row, GATE):
    """`exp(G) [C, BK]` and `exp(G_C) [BK]`, from `load_decays`."""
    if GATE == "cumulative" or GATE == "cumulative_log2":
        exp_g = exp_of_sum(first, GATE)
        exp_g_last = exp_of_sum(second, GATE)
    else:
        exp_g = tl.exp2(sums(row[None, :] <= row[:, None], first, second))
        # rows past the end do not decay
        exp_g_last = tl.sum(tl.where(row[:, None] == row.shape[0] - 1, exp_g, 0.0), axis=0)
    return exp_g, exp_g_last


@triton.jit
def exp_g_last_minus_g_of(first, second, row, GATE):
    """`exp(G_C - G) [C, BK]`, from `load_decays`."""
    if GATE == "cumulative" or GATE == "cumulative_log2":
        # of sums close to each other the difference is exact, but not once each is multiplied by log2(e)
        exp_g_last_minus_g = exp_of_sum(second[None, :] - first, GATE)
    else:
        exp_g_last_minus_g = tl.exp2(sums(row[None, :] > row[:, None], first, second))
    return exp_g_last_minus_g


@triton.jit
def load_rows(x, rows, column, valid):
    return tl.load(x + rows + column[None, :], mask=valid[:, None], other=0.0)


@triton.jit
def times_states(x, rows, valid, states, column, K, V, BV, V_FIRST, PRECISION):
    """`x S^T [C, BK]`, for x `[C, V]` and a state S `[K, V]`, by slices of `BV` value channels."""
    result = tl.zeros([valid.shape[0], column.shape[0]], tl.float32)
    for t in tl.range(0, V, BV, num_stages=1):
        value = t + tl.arange(0, BV)
        tile = load_rows(x, rows, value, valid)
        state = tl.load(states + state_offsets(0, value, column, K, V, V_FIRST)).to(tile.dtype)
        result = tl.dot(tile, state, acc=result, input_precision=PRECISION)
    return result


@triton.jit
def state_overlap(h, grad_h, column, K, V, BV, V_FIRST):
    """`sum_v S dS' [BK]`, by slices of `BV` value channels."""
    overlap = tl.zeros([column.shape[0]], tl.float32)
    for t in tl.range(0, V, BV, num_stages=1):
        in_state = state_offsets(0, t + tl.arange(0, BV), column, K, V, V_FIRST)
        before, after = tl.load(h + in_state).to(tl.float32), tl.load(grad_h + in_state).to(tl.float32)
        overlap += tl.sum(summand(before, after, KEYS_A_THREAD), axis=0)
    return overlap


@triton.jit
def load_value_tiles(v, v_token, grad_o, o_token, v_new, grad_v_new, in_own, row, value, valid, V):
    """The chosen channels of `v, do, v_new, dv_new`, `[C, BV]` each."""
    tile_v = load_rows(v, row[:, None] * v_token, value, valid)
    tile_o = load_rows(grad_o, row[:, None] * o_token, value, valid)
    return (tile_v, tile_o, load_rows(v_new, in_own * V, value, valid), load_rows(grad_v_new, in_own * V, value, valid))


@triton.jit
def add_value_tiles(
    acc_inv, acc_Aqk, acc_beta, tiles, tile_Akk_inv, tile_beta, grad_v, grad_Aqk, in_values, valid, PRECISION,
):  # fmt: skip
    """Adds the channels of `load_value_tiles` to `dAkk_inv` (without beta), `dAqk` and `dbeta`; stores `dv`."""
    tile_v, tile_grad_o, tile_v_new, tile_grad_v_new = tiles
    acc_inv = tl.dot(tile_grad_v_new, tl.trans(tile_v), acc=acc_inv, input_precision=PRECISION)
    if grad_Aqk is not None:
        acc_Aqk = tl.dot(tile_grad_o, tl.trans(tile_v_new), acc=acc_Aqk, input_precision=PRECISION)
    R = tl.dot(tl.trans(tile_Akk_inv), tile_grad_v_new, input_precision=PRECISION)
    acc_beta += tl.sum(summand(R, tile_v.to(tl.float32), ROWS_A_THREAD), axis=1)
    R *= tile_beta[:, None]
    tl.store(grad_v + in_values, R.to(grad_v.dtype.element_ty), mask=valid[:, None])
    return acc_inv, acc_Aqk, acc_beta


# One CTA, tiles [rows, columns]:
#
#     load  Akk_inv [C, C], beta [C]
#     for BV value channels:    v, do, v_new, dv_new [C, BV]     (HELD: all of V at once, kept for the loop below)
#         R = Akk_inv^T dv_new                          -> dv [C, BV], dbeta [C]
#         acc_inv += dv_new v^T                            [C, C]
#         acc_Aqk += do v_new^T                            [C, C] -> dAqk
#     for BK key channels:      q, k, g [C, BK], S^T and dS'^T [V, BK]
#         dw  = -dv_new S^T                                [C, BK]
#         acc_inv += dw (k exp(G))^T                       [C, C]
#         Z   = Akk_inv^T dw                            -> dbeta [C], its part of dk and dG
#         dq  = (do S^T) scale exp(G)                   -> dq [C, BK], its part of dG
#         dk  = (v_new dS'^T) exp(G_C - G)              -> dk [C, BK], its part of dG, G_C
#     dAkk = -Akk_inv^T (acc_inv diag(beta)) Akk_inv^T  -> dAkk [C, C]
@triton.jit(do_not_specialize=SCALARS)
def wy_kernel(
    q, k, g, v, beta, A_log, dt_bias, cu_seqlens, Akk_inv, h, v_new, grad_o, grad_v_new, grad_h, grad_q, grad_k,
    grad_G, grad_v, grad_beta, grad_Akk, grad_Aqk, scale, lower_bound, T, N, H, HV,
    chunk_slots, rows, q_batch: tl.int64, q_token: tl.int64, q_head: tl.int64,
    k_batch: tl.int64, k_token: tl.int64, k_head: tl.int64, g_batch: tl.int64, g_token: tl.int64, g_head: tl.int64,
    v_batch: tl.int64, v_token: tl.int64, v_head: tl.int64, o_batch: tl.int64, o_token: tl.int64, o_head: tl.int64,
    beta_batch: tl.int64, beta_token: tl.int64, beta_head: tl.int64,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, GATE: tl.constexpr,
    BETA: tl.constexpr, L2NORM: tl.constexpr, BY_TOKEN: tl.constexpr, V_FIRST: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`dAkk = -Akk_inv^T dAkk_inv Akk_inv^T`, and all else of the stage's contract.

    Per token and value head, in float32: `grad_q, grad_k` (of normalised rows) and `grad_G [B, T, HV, K]`, and `grad_beta
    [B, T, HV]`; what comes through `Akk` and `Aqk` is missing in all four, and `intra` adds it. `grad_v [B, T, HV, V]` is
    final. `grad_Akk` and `grad_Aqk` are lower triangles.

    Matrices `Akk_inv, grad_Akk` lie by chunk slot, `[S, HV, C, C]`, and so do states, `[S, HV, V, K]`. `BY_TOKEN` (the
    operator): matrices lie by token, `[B, T, HV, C]`, and states by chunk, `rows` a batch row, packed sequences without gaps
    between them.
    """
    head, chunk_slot, batch, start, count = own_chunk(tl.program_id(0), cu_seqlens, None, 0, chunk_slots, N, T, HV, C)
    state = chunk_slot
    if BY_TOKEN and cu_seqlens is not None:
        # a chunk's first token tells how many chunks begin before it
        state = rows_before(cu_seqlens, chunk_slot * 0 + N, start, C, OFFSETS_AT_A_TIME)
        count = tl.where(state < rows, count, 0)
    if count <= 0:
        return
    HELD: tl.constexpr = BV == V
    qk_head = head // (HV // H)
    q += batch * q_batch + start * q_token + qk_head * q_head
    k += batch * k_batch + start * k_token + qk_head * k_head
    g += batch * g_batch + start * g_token + head * g_head
    v += batch * v_batch + start * v_token + head * v_head
    beta += batch * beta_batch + start * beta_token + head * beta_head
    grad_o += batch * o_batch + start * o_token + head * o_head
    own = (batch * T + start) * HV + head
    v_new += own * V
    grad_v_new += own * V
    grad_v += own * V
    grad_q += own * K
    grad_k += own * K
    grad_G += own * K
    grad_beta += own
    h += (state * HV + head) * K * V
    grad_h += (state * HV + head) * K * V
    matrix = own * C if BY_TOKEN else (chunk_slot * HV + head) * C * C
    Akk_inv += matrix
    grad_Akk += matrix
    dtype: tl.constexpr = v_new.dtype.element_ty
    row = tl.arange(0, C)
    valid = row < count
    lower = row[:, None] >= row[None, :]
    in_own = row[:, None] * HV
    in_matrix = (in_own if BY_TOKEN else row[:, None]) * C + row[None, :]
    tile_Akk_inv = tl.load(Akk_inv + in_matrix, mask=lower & valid[:, None], other=0.0).to(dtype)
    tile_beta = beta_of(tl.load(beta + row * beta_token, mask=valid, other=0.0).to(tl.float32), BETA)

    acc_inv = tl.zeros([C, C], tl.float32)
    acc_Aqk = tl.zeros([C, C], tl.float32)
    acc_beta = tl.zeros([C], tl.float32)
    if HELD:
        value = tl.arange(0, V)
        held = load_value_tiles(v, v_token, grad_o, o_token, v_new, grad_v_new, in_own, row, value, valid, V)
        acc_inv, acc_Aqk, acc_beta = add_value_tiles(
            *(acc_inv, acc_Aqk, acc_beta, held, tile_Akk_inv, tile_beta, grad_v, grad_Aqk),
            *(in_own * V + value[None, :], valid, PRECISION),
        )
    else:
        for t in tl.range(0, V, BV, num_stages=1):
            value = t + tl.arange(0, BV)
            tiles = load_value_tiles(v, v_token, grad_o, o_token, v_new, grad_v_new, in_own, row, value, valid, V)
            acc_inv, acc_Aqk, acc_beta = add_value_tiles(
                *(acc_inv, acc_Aqk, acc_beta, tiles, tile_Akk_inv, tile_beta, grad_v, grad_Aqk),
                *(in_own * V + value[None, :], valid, PRECISION),
            )
    if grad_Aqk is not None:
        tl.store(grad_Aqk + matrix + in_matrix, tl.where(lower, acc_Aqk, 0.0))

    rate = decay_rate(A_log, head)
    norm_q = norm_factors_at(q, row[:, None] * q_token, valid, C, K, NORM_BK, L2NORM)
    norm_k = norm_factors_at(k, row[:, None] * k_token, valid, C, K, NORM_BK, L2NORM)
    last = row[:, None] == tl.minimum(count, C) - 1
    for s in tl.range(0, K, BK, num_stages=STAGES):
        # each tile is used up before the next one is formed: more of them alive do not fit in registers
        column = s + tl.arange(0, BK)
        tile_q = load_rows(q, row[:, None] * q_token, column, valid)
        tile_k = load_rows(k, row[:, None] * k_token, column, valid)
        first, second = load_decays(g, dt_bias, g_token, column, row, valid, count, head, rate, lower_bound, K, GATE)
        if HELD:
            in_state = state_offsets(0, value, column, K, V, V_FIRST)
            before = tl.load(h + in_state).to(dtype)
            after = tl.load(grad_h + in_state).to(dtype)
            overlap = tl.sum(summand(before.to(tl.float32), after.to(tl.float32), KEYS_A_THREAD), axis=0)
            w = tl.dot(held[3], before, input_precision=PRECISION)
        else:
            overlap = state_overlap(h, grad_h, column, K, V, BV, V_FIRST)
            w = times_states(grad_v_new, in_own * V, valid, h, column, K, V, BV, V_FIRST, PRECISION)
        # dw, as `v_new = u - w S`
        w = (-w).to(dtype)
        exp_g, exp_g_last = exp_g_of(first, second, row, GATE)
        tile_k = tile_k.to(tl.float32) * norm_k[:, None]
        k_exp_g = tile_k * exp_g
        acc_inv = tl.dot(w, tl.trans(k_exp_g.to(dtype)), acc=acc_inv, input_precision=PRECISION)
        Z = tl.dot(tl.trans(tile_Akk_inv), w, input_precision=PRECISION)
        acc_beta += tl.sum(summand(Z, k_exp_g, ROWS_A_THREAD), axis=1)
        Z *= exp_g * tile_beta[:, None]
        if HELD:
            dq = tl.dot(held[1], before, input_precision=PRECISION)
        else:
            dq = times_states(grad_o, row[:, None] * o_token, valid, h, column, K, V, BV, V_FIRST, PRECISION)
        dq *= exp_g * scale
        in_keys = in_own * K + column[None, :]
        tl.store(grad_q + in_keys, dq, mask=valid[:, None])
        dG = tile_q.to(tl.float32) * norm_q[:, None] * dq + tile_k * Z
        if HELD:
            dk = tl.dot(held[2], after, input_precision=PRECISION)
        else:
            dk = times_states(v_new, in_own * V, valid, grad_h, column, K, V, BV, V_FIRST, PRECISION)
        dk *= exp_g_last_minus_g_of(first, second, row, GATE)
        tl.store(grad_k + in_keys, Z + dk, mask=valid[:, None])
        # `G_C` is the last row's own G: there what goes through kg = k exp(G_C - G) cancels, exactly only if left out
        through_kg = tl.where(last, 0.0, tile_k * dk)
        dG -= through_kg
        dG += tl.where(last, (tl.sum(through_kg, axis=0) + overlap * exp_g_last)[None, :], 0.0)
        tl.store(grad_G + in_keys, dG, mask=valid[:, None])

    tl.store(grad_beta + row * HV, acc_beta, mask=valid)
    X = tl.dot(tl.trans(tile_Akk_inv), (acc_inv * tile_beta[None, :]).to(dtype), input_precision=PRECISION)
    dAkk = -tl.dot(X.to(dtype), tl.trans(tile_Akk_inv), input_precision=PRECISION)
    below = row[:, None] > row[None, :]
    tl.store(grad_Akk + in_matrix, tl.where(below, dAkk, 0.0), mask=valid[:, None] | (not BY_TOKEN))


def wy_config(problem: ChunkProblem, capability: int) -> Config:
    """Products have 64 rows, which are four warps' of wgmma: eight would have it work on rows that are not there.

    On Hopper, with value channels held, 16 key channels and two buffers of them leave room for two CTAs per SM
    (94 KB); 32 do not, and spill. `stages=3` is two buffers: with 2 the compiler copies a slice only once the one before it is
    used up. Elsewhere held operands would fill the registers.
    """
    if problem.dtype == torch.float32:
        return Config(BK=16, BV=16, num_warps=8, STAGES=1)
    if capability == 90 and problem.V <= 128:
        return Config(BK=16, BV=problem.V, num_warps=4, STAGES=3)
    if capability == 90:
        # slices of 16 key and 64 value channels come out wrong with Triton 3.6 (dk by 0.8; tests/gpu/test_wy.py), these right
        return Config(BK=32, BV=32, num_warps=4, STAGES=1)
    return Config(BK=16, BV=min(problem.V, 64) if capability in (90, 100) else 32, num_warps=4, STAGES=1)


def wy_launch(problem: ChunkProblem, t: ChunkTensors | WyTensors, arch: int, own: dict[str, Any]) -> Launch:
    own = dict(own, grad_Akk=own["grad_A"], PRECISION=backward_precision(problem, arch))
    return launch(wy_kernel, chunks(problem), problem, t, own, wy_config(problem, arch))


def wy(call: StageCall, own: dict[str, Any]) -> Launch:
    own = dict(own, rows=call.problem.slots, BY_TOKEN=False, V_FIRST=True)
    return wy_launch(call.problem, call.t, call.arch, own)


def wy_dqkg(problem: WyProblem, t: WyTensors, arch: int, outputs: Outputs) -> list[Launch]:
    """`chunk_bwd_wy_dqkg`."""
    own = wy_operands(t, t.A, t.h, t.v_new, t.dh, t.dv) | wy_results(outputs)
    return [wy_launch(problem, t, arch, dict(own, BETA="value", L2NORM=False, BY_TOKEN=True))]
