"""Stage `intra` of the backward pass (FLA: `chunk_kda_bwd_intra`): from the gradients of `Akk` and `Aqk` to those of the call's
inputs. One CTA per (chunk, value head).

Contract (docs/backward.md), with `E_ij = exp(G_i - G_j)` by key channel, and pairs i > j of a chunk:

    dq_i    += sum_j dAqk_ij k_j E_ij               L_i = sum_j dAkk_ij k_j E_ij                     [C, K]
    dk_i    += beta_i L_i                           dk_j += sum_i (dAqk_ij q_i + dAkk_ij beta_i k_i) E_ij
    dbeta_i += <k_i, L_i>                                                                            [C]
    dG_i    += q_i dq_i + k_i beta_i L_i            dG_j -= k_j dk_j                                 [C, K]
    dg_t     = sum_{i >= t} dG_i                                                                     [C, K]

where in `dG` only what these lines add to `dq` and `dk` counts. Pairs i = j have `E = 1`: they add to `dq` and `dk` alone. Then
back through the gate, the L2 norm and beta's sigmoid.

Pairs are split as in `prepare`, at a boundary between i and j, so that `E_ij = left_i right_j` and both sums are MMAs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ...problem.problem import ChunkProblem
from ...program.launch import Launch
from ..shared.gates import beta_gradient, beta_of, decay_rate, gate_gradient
from ..shared.norms import norm_factors_at
from ..shared.scalars import SCALARS
from ..shared.sequences import own_chunk
from ..stages.launch import Config, StageCall, backward_precision, chunks, launch, safe_blocks
from .decays import chunk_decays, sums
from .sub_chunks import SUB, boundary_matrix, pair_mask

SAFE_ROWS = tl.constexpr(32)
"""With bounded decays, rows whose pairs share one reference: from their middle no decay is less than exp(-80)."""

SAFE_LEVEL = tl.constexpr(5)
"""log2(SAFE_ROWS): pairs of larger blocks are split by level."""


@triton.jit
def add_pairs(dq, dk_left, dk_right, dG, pairs, dAqk, dAkk, q, k, beta_k, left, right, dtype: tl.constexpr, PRECISION):
    """Adds, for the chosen pairs (i, j), what reaches `q_i` and `k_i` (without beta) on the left, `k_j` on the right, and `G`,
    where `exp(G_i - G_j) = left_i right_j`. Tiles of rows are `[C, BK]`, those of pairs `[C, C]`."""
    dAqk = tl.where(pairs, dAqk, 0.0).to(dtype)
    dAkk = tl.where(pairs, dAkk, 0.0).to(dtype)
    k_right = (k * right).to(dtype)
    q_left = (q * left).to(dtype)
    beta_k_left = (beta_k * left).to(dtype)
    # with operands as they were rounded: then a pair takes from `dG_j` what it adds to `dG_i`, and the sum of `dG` over later
    # rows is exact where it cancels
    result = tl.dot(dAqk, k_right, input_precision=PRECISION)
    dq += result * left
    dG += result * q_left.to(tl.float32)
    result = tl.dot(dAkk, k_right, input_precision=PRECISION)
    dk_left += result * left
    dG += result * beta_k_left.to(tl.float32)
    result = tl.dot(tl.trans(dAqk), q_left, input_precision=PRECISION)
    result = tl.dot(tl.trans(dAkk), beta_k_left, acc=result, input_precision=PRECISION)
    dk_right += result * right
    dG -= result * k_right.to(tl.float32)
    return dq, dk_left, dk_right, dG


@triton.jit
def zero_partials(partial_A_log, partial_dt_bias, chunk, K):
    """Zeroes the partial sums of a chunk slot without a chunk: `finish` sums over all of them."""
    zeros = tl.zeros([K], tl.float32)
    if partial_A_log is not None:
        tl.store(partial_A_log + chunk * K + tl.arange(0, K), zeros)
    if partial_dt_bias is not None:
        tl.store(partial_dt_bias + chunk * K + tl.arange(0, K), zeros)


# One CTA, tiles [rows, columns]:
#
#     load  dAkk, dAqk [C, C] (anew for every slice), beta, dbeta [C]
#     for BK key channels:      q, k, g [C, BK], and what `wy` left of dq, dk, dG
#         for groups of pairs whose boundary lies between i and j:
#             dAqk (k right)                  [C, C] [C, BK] -> dq_i
#             dAkk (k right)                                 -> L_i
#             dAqk^T (q left) + dAkk^T (beta k left)         -> dk_j
#         dG -> dg: sum over later rows, then the gate       -> dg [C, BK], partial sums for dA_log, ddt_bias [BK]
#         dq, dk [C, BK]                                     -> out, or with L2NORM in place, with <dq, q> and <dk, k> [C]
#     with L2NORM, for BK key channels: dq, dk through the norm
@triton.jit(do_not_specialize=SCALARS)
def intra_kernel(
    q, k, g, beta, A_log, dt_bias, cu_seqlens, grad_Akk, grad_Aqk, grad_q, grad_k, grad_G, grad_beta, out_q, out_k,
    out_g, out_beta, partial_A_log, partial_dt_bias, scale, lower_bound, T, N, H, HV,
    chunk_slots, q_batch: tl.int64, q_token: tl.int64, q_head: tl.int64,
    k_batch: tl.int64, k_token: tl.int64, k_head: tl.int64, g_batch: tl.int64, g_token: tl.int64, g_head: tl.int64,
    beta_batch: tl.int64, beta_token: tl.int64, beta_head: tl.int64,
    C: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, GATE: tl.constexpr, SAFE: tl.constexpr, BETA: tl.constexpr,
    L2NORM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`dq_i += sum_j dAqk_ij k_j E_ij` and all else of the stage's contract.

    Adds to the gradients that `wy` left, in place, and leaves those of the call's inputs, dense by value head: `out_q, out_k,
    out_g [B, T, HV, K]`, `out_beta [B, T, HV]`. For the gate's parameters it leaves the chunk's partial sums, `partial_A_log`
    and `partial_dt_bias [S, HV, K]`.
    """
    head, chunk_slot, batch, start, count = own_chunk(tl.program_id(0), cu_seqlens, None, 0, chunk_slots, N, T, HV, C)
    if count <= 0:
        zero_partials(partial_A_log, partial_dt_bias, chunk_slot * HV + head, K)
        return
    LEVELS: tl.constexpr = 6 if C == 64 else 5  # log2(C)
    FIRST: tl.constexpr = SAFE_LEVEL if SAFE else 0
    qk_head = head // (HV // H)
    q += batch * q_batch + start * q_token + qk_head * q_head
    k += batch * k_batch + start * k_token + qk_head * k_head
    g += batch * g_batch + start * g_token + head * g_head
    beta += batch * beta_batch + start * beta_token + head * beta_head
    chunk = chunk_slot * HV + head
    dtype: tl.constexpr = q.dtype.element_ty
    row = tl.arange(0, C)
    i = row[:, None]
    j = row[None, :]
    valid = row < count
    own = ((batch * T + start + row) * HV + head)[:, None]
    square = chunk * C * C + i * C + j
    dAqk_diagonal = tl.load(grad_Aqk + chunk * C * C + row * (C + 1))[:, None] * scale
    beta_input = tl.load(beta + row * beta_token, mask=valid, other=0.0).to(tl.float32)
    tile_beta = tl.where(valid, beta_of(beta_input, BETA), 0.0)
    rate = decay_rate(A_log, head)
    norm_q = norm_factors_at(q, i * q_token, valid, C, K, BK, L2NORM)
    norm_k = norm_factors_at(k, i * k_token, valid, C, K, BK, L2NORM)
    # <dq, q> and <dk, k>
    dots_q = tl.zeros([C], tl.float32)
    dots_k = tl.zeros([C], tl.float32)
    dbeta = tl.load(grad_beta + (batch * T + start + row) * HV + head, mask=valid, other=0.0)
    for s in tl.range(0, K, BK, num_stages=1):
        column = s + tl.arange(0, BK)
        x, high, low = chunk_decays(g, dt_bias, i * g_token, column, valid, head, rate, lower_bound, K, GATE)
        tile_q = tl.load(q + i * q_token + column[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
        tile_k = tl.load(k + i * k_token + column[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
        tile_q *= norm_q[:, None]
        tile_k *= norm_k[:, None]
        beta_k = tile_k * tile_beta[:, None]
        # anew for every slice: else the compiler keeps what the pairs of each level select of them in shared memory
        dAkk = tl.load(grad_Akk + square)
        dAqk = tl.load(grad_Aqk + square) * scale
        dq = tl.zeros([C, BK], tl.float32)
        dk_left = tl.zeros([C, BK], tl.float32)
        dk_right = tl.zeros([C, BK], tl.float32)
        in_own = own * K + column[None, :]
        dG = tl.load(grad_G + in_own, mask=valid[:, None], other=0.0)
        if SAFE:
            # with the middle of `SAFE_ROWS` rows as the one reference of all pairs in them: both factors are at most exp(80)
            distance = sums(boundary_matrix(SAFE_LEVEL - 1, C), high, low)
            signed = tl.where(i % SAFE_ROWS < SUB, -distance, distance)
            near = (i // SAFE_ROWS == j // SAFE_ROWS) & (i > j)
            left = tl.exp2(signed)
            right = tl.exp2(-signed)
            dq, dk_left, dk_right, dG = add_pairs(
                dq, dk_left, dk_right, dG, near, dAqk, dAkk, tile_q, tile_k, beta_k, left, right, dtype, PRECISION
            )
        for level in tl.range(FIRST, LEVELS, num_stages=1):
            # every pair i > j lies in the two halves of exactly one block, as in `prepare`
            factor = tl.exp2(sums(boundary_matrix(level, C), high, low))
            pairs = pair_mask(level, C)
            dq, dk_left, dk_right, dG = add_pairs(
                dq, dk_left, dk_right, dG, pairs, dAqk, dAkk, tile_q, tile_k, beta_k, factor, factor, dtype, PRECISION
            )
        dbeta += tl.sum(tile_k * dk_left, axis=1)
        dk_left *= tile_beta[:, None]
        # g_t is a term of G_t and of all later ones
        dg = tl.cumsum(dG, axis=0, reverse=True)
        dx, dA_log = gate_gradient(x, dg, rate, lower_bound, GATE)
        dx = tl.where(valid[:, None], dx, 0.0)
        tl.store(out_g + in_own, dx.to(out_g.dtype.element_ty), mask=valid[:, None])
        if partial_A_log is not None:
            tl.store(partial_A_log + chunk * K + column, tl.sum(tl.where(valid[:, None], dA_log, 0.0), axis=0))
        if partial_dt_bias is not None:
            tl.store(partial_dt_bias + chunk * K + column, tl.sum(dx, axis=0))
        dq += tl.load(grad_q + in_own, mask=valid[:, None], other=0.0) + dAqk_diagonal * tile_k
        dk = dk_left + dk_right + dAqk_diagonal * tile_q
        dk += tl.load(grad_k + in_own, mask=valid[:, None], other=0.0)
        if L2NORM:
            dots_q += tl.sum(dq * tile_q, axis=1)
            dots_k += tl.sum(dk * tile_k, axis=1)
            tl.store(grad_q + in_own, dq, mask=valid[:, None])
            tl.store(grad_k + in_own, dk, mask=valid[:, None])
        else:
            tl.store(out_q + in_own, dq.to(out_q.dtype.element_ty), mask=valid[:, None])
            tl.store(out_k + in_own, dk.to(out_k.dtype.element_ty), mask=valid[:, None])
    dbeta = beta_gradient(beta_input, dbeta, BETA)
    tl.store(out_beta + (batch * T + start + row) * HV + head, dbeta.to(out_beta.dtype.element_ty), mask=valid)
    if L2NORM:
        # other threads of this CTA wrote part of what a thread now reads
        tl.debug_barrier()
        for s in tl.range(0, K, BK, num_stages=1):
            column = s + tl.arange(0, BK)[None, :]
            in_own = own * K + column
            tile_q = tl.load(q + i * q_token + column, mask=valid[:, None], other=0.0).to(tl.float32)
            tile_k = tl.load(k + i * k_token + column, mask=valid[:, None], other=0.0).to(tl.float32)
            dq = tl.load(grad_q + in_own, mask=valid[:, None], other=0.0)
            dk = tl.load(grad_k + in_own, mask=valid[:, None], other=0.0)
            dq = (dq - tile_q * (norm_q * dots_q)[:, None]) * norm_q[:, None]
            dk = (dk - tile_k * (norm_k * dots_k)[:, None]) * norm_k[:, None]
            tl.store(out_q + in_own, dq.to(out_q.dtype.element_ty), mask=valid[:, None])
            tl.store(out_k + in_own, dk.to(out_k.dtype.element_ty), mask=valid[:, None])


def intra_config(problem: ChunkProblem, capability: int) -> Config:
    """Chooses as `wy_config` does."""
    return Config(BK=16, num_warps=8 if problem.dtype == torch.float32 else 4)


def intra(call: StageCall, own: dict[str, Any]) -> Launch:
    problem, precision = call.problem, backward_precision(call.problem, call.arch)
    own = dict(own, grad_Akk=own["grad_A"], SAFE=safe_blocks(problem), PRECISION=precision)
    return launch(intra_kernel, chunks(problem), problem, call.t, own, intra_config(problem, call.arch))
