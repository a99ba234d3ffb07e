"""Stage `intra` of the backward pass: from the gradients of `Akk` and `Aqk` to those of the call's inputs. One CTA per (chunk,
value head).

Contract (docs/backward.md), with `E_ij = exp(G_i - G_j)` by key channel and all sums over pairs i > j of a chunk:

    dq_i     += sum_j dAqk_ij k_j E_ij                                  L_i = sum_j dAkk_ij k_j E_ij
    dk_i     += beta_i L_i                                              [C, K]
    dk_j     += sum_i (dAqk_ij q_i + dAkk_ij beta_i k_i) E_ij           [C, K]
    dbeta_i  += <k_i, L_i>                                              [C]
    dG        = q dq + k dk on the left, -k dk on the right             [C, K]
    dg_t      = sum_{i >= t} dG_i                                       [C, K]

then back through the gate, the L2 norm and beta's sigmoid. Pairs are split as in `prepare`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .device.decays import chunk_decays, sums
from .device.gates import decay_rate, gate_gradient, strength_gradient, write_strength
from .device.norms import row_norms
from .device.sequences import own_chunk
from .device.sub_chunks import SUB, boundary_matrix, pair_mask


@triton.jit
def pair_gradients(
    sum_q,
    sum_left,
    sum_right,
    G,
    pairs,
    Aqk,
    A,
    q,
    k,
    written,
    left,
    right,
    dtype: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds, for the chosen pairs (i, j), what reaches `q_i` and `k_i` (for beta 1) on the left, `k_j` on the right, and `G`,
    where `exp(G_i - G_j) = left_i right_j`. `written`: `beta_i k_i`."""
    Aqk = tl.where(pairs, Aqk, 0.0).to(dtype)
    A = tl.where(pairs, A, 0.0).to(dtype)
    k_right = (k * right).to(dtype)
    q_left = (q * left).to(dtype)
    w_left = (written * left).to(dtype)
    # with operands as they were rounded: then a pair takes from `G_j` what it adds to `G_i`, and the sum of `G` over later
    # rows is exact where it cancels
    found = tl.dot(Aqk, k_right, input_precision=PRECISION)
    sum_q += found * left
    G += found * q_left.to(tl.float32)
    found = tl.dot(A, k_right, input_precision=PRECISION)
    sum_left += found * left
    G += found * w_left.to(tl.float32)
    found = tl.dot(tl.trans(Aqk), q_left, input_precision=PRECISION)
    found = tl.dot(tl.trans(A), w_left, acc=found, input_precision=PRECISION)
    sum_right += found * right
    G -= found * k_right.to(tl.float32)
    return sum_q, sum_left, sum_right, G


@triton.jit
def no_parts(part_A_log, part_dt_bias, chunk, K: tl.constexpr):
    """Of a slot without a chunk."""
    zeros = tl.zeros([K], tl.float32)
    if part_A_log is not None:
        tl.store(part_A_log + chunk * K + tl.arange(0, K), zeros)
    if part_dt_bias is not None:
        tl.store(part_dt_bias + chunk * K + tl.arange(0, K), zeros)


@triton.jit(
    do_not_specialize=[
        *("T", "N", "H", "HV", "slots", "beta_batch", "beta_token", "beta_head", "scale", "lower_bound"),
    ]
)
def intra_kernel(
    q,
    k,
    g,
    beta,
    A_log,
    dt_bias,
    cu_seqlens,
    grad_A,
    grad_Aqk,
    grad_q,
    grad_k,
    grad_G,
    grad_beta,
    out_q,
    out_k,
    out_g,
    out_beta,
    part_A_log,
    part_dt_bias,
    scale,
    lower_bound,
    T,
    N,
    H,
    HV,
    slots,
    q_batch: tl.int64,
    q_token: tl.int64,
    q_head: tl.int64,
    k_batch: tl.int64,
    k_token: tl.int64,
    k_head: tl.int64,
    g_batch: tl.int64,
    g_token: tl.int64,
    g_head: tl.int64,
    beta_batch: tl.int64,
    beta_token: tl.int64,
    beta_head: tl.int64,
    C: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    GATE: tl.constexpr,
    SAFE: tl.constexpr,
    BETA: tl.constexpr,
    L2NORM: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program per (chunk, value head). Adds what comes through `A` and `Aqk` to the gradients that `wy` left (in place),
    then leaves those of the call's inputs, dense by value head: `out_q, out_k, out_g [B, T, HV, K]`, `out_beta [B, T, HV]`; of
    the gate's parameters the chunk's part, `part_A_log [S, HV, K]` and `part_dt_bias [S, HV, K]`."""
    head, slot, batch, start, count = own_chunk(tl.program_id(0), cu_seqlens, None, 0, slots, N, T, HV, C)
    if count <= 0:
        no_parts(part_A_log, part_dt_bias, slot * HV + head, K)
        return
    LEVELS: tl.constexpr = 6 if C == 64 else 5
    FIRST: tl.constexpr = 5 if SAFE else 0
    qk_head = head // (HV // H)
    q += batch * q_batch + start * q_token + qk_head * q_head
    k += batch * k_batch + start * k_token + qk_head * k_head
    g += batch * g_batch + start * g_token + head * g_head
    beta += batch * beta_batch + start * beta_token + head * beta_head
    chunk = slot * HV + head
    dtype: tl.constexpr = q.dtype.element_ty
    row = tl.arange(0, C)
    i = row[:, None]
    j = row[None, :]
    valid = row < count
    own = ((batch * T + start + row) * HV + head)[:, None]
    square = chunk * C * C + i * C + j
    same = tl.load(grad_Aqk + chunk * C * C + row * (C + 1))[:, None] * scale
    raw = tl.load(beta + row * beta_token, mask=valid, other=0.0).to(tl.float32)
    strength = tl.where(valid, write_strength(raw, BETA), 0.0)
    rate = decay_rate(A_log, head)
    norm_q = row_norms(q, i * q_token, valid, C, K, BK, L2NORM)
    norm_k = row_norms(k, i * k_token, valid, C, K, BK, L2NORM)
    dots_q = tl.zeros([C], tl.float32)
    dots_k = tl.zeros([C], tl.float32)
    of_beta = tl.load(grad_beta + (batch * T + start + row) * HV + head, mask=valid, other=0.0)
    for s in tl.range(0, K, BK, num_stages=1):
        column = s + tl.arange(0, BK)
        x, high, low = chunk_decays(g, dt_bias, i * g_token, column, valid, head, rate, lower_bound, K, GATE)
        tile_q = tl.load(q + i * q_token + column[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
        tile_k = tl.load(k + i * k_token + column[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
        tile_q *= norm_q[:, None]
        tile_k *= norm_k[:, None]
        written = tile_k * strength[:, None]
        # anew for every slice: else the compiler keeps what the pairs of each level select of them in shared memory
        A = tl.load(grad_A + square)
        Aqk = tl.load(grad_Aqk + square) * scale
        sum_q = tl.zeros([C, BK], tl.float32)
        sum_left = tl.zeros([C, BK], tl.float32)
        sum_right = tl.zeros([C, BK], tl.float32)
        in_own = own * K + column[None, :]
        G = tl.load(grad_G + in_own, mask=valid[:, None], other=0.0)
        if SAFE:
            # the middle of 32 rows as the reference of all their pairs, as in `prepare_bounded.near`
            distance = sums(boundary_matrix(4, C), high, low)
            signed = tl.where(i % 32 < SUB, -distance, distance)
            near = (i // 32 == j // 32) & (i > j)
            left = tl.exp2(signed)
            right = tl.exp2(-signed)
            sum_q, sum_left, sum_right, G = pair_gradients(
                sum_q, sum_left, sum_right, G, near, Aqk, A, tile_q, tile_k, written, left, right, dtype, PRECISION
            )
        for level in tl.range(FIRST, LEVELS, num_stages=1):
            # every pair i > j lies in the two halves of exactly one block, as in `prepare`
            factor = tl.exp2(sums(boundary_matrix(level, C), high, low))
            pairs = pair_mask(level, C)
            sum_q, sum_left, sum_right, G = pair_gradients(
                sum_q, sum_left, sum_right, G, pairs, Aqk, A, tile_q, tile_k, written, factor, factor, dtype, PRECISION
            )
        of_beta += tl.sum(tile_k * sum_left, axis=1)
        sum_left *= strength[:, None]
        # of a log decay: all sums that it is a term of
        decay = tl.cumsum(G, axis=0, reverse=True)
        found, of_A = gate_gradient(x, decay, rate, lower_bound, GATE)
        found = tl.where(valid[:, None], found, 0.0)
        tl.store(out_g + in_own, found.to(out_g.dtype.element_ty), mask=valid[:, None])
        if part_A_log is not None:
            tl.store(part_A_log + chunk * K + column, tl.sum(tl.where(valid[:, None], of_A, 0.0), axis=0))
        if part_dt_bias is not None:
            tl.store(part_dt_bias + chunk * K + column, tl.sum(found, axis=0))
        sum_q += tl.load(grad_q + in_own, mask=valid[:, None], other=0.0) + same * tile_k
        sum_k = sum_left + sum_right + same * tile_q
        sum_k += tl.load(grad_k + in_own, mask=valid[:, None], other=0.0)
        if L2NORM:
            dots_q += tl.sum(sum_q * tile_q, axis=1)
            dots_k += tl.sum(sum_k * tile_k, axis=1)
            tl.store(grad_q + in_own, sum_q, mask=valid[:, None])
            tl.store(grad_k + in_own, sum_k, mask=valid[:, None])
        else:
            tl.store(out_q + in_own, sum_q.to(out_q.dtype.element_ty), mask=valid[:, None])
            tl.store(out_k + in_own, sum_k.to(out_k.dtype.element_ty), mask=valid[:, None])
    of_beta = strength_gradient(raw, of_beta, BETA)
    tl.store(out_beta + (batch * T + start + row) * HV + head, of_beta.to(out_beta.dtype.element_ty), mask=valid)
    if L2NORM:
        # other threads of this program wrote part of what a thread now reads
        tl.debug_barrier()
        for s in tl.range(0, K, BK, num_stages=1):
            column = s + tl.arange(0, BK)[None, :]
            in_own = own * K + column
            tile_q = tl.load(q + i * q_token + column, mask=valid[:, None], other=0.0).to(tl.float32)
            tile_k = tl.load(k + i * k_token + column, mask=valid[:, None], other=0.0).to(tl.float32)
            sum_q = tl.load(grad_q + in_own, mask=valid[:, None], other=0.0)
            sum_k = tl.load(grad_k + in_own, mask=valid[:, None], other=0.0)
            sum_q = (sum_q - tile_q * (norm_q * dots_q)[:, None]) * norm_q[:, None]
            sum_k = (sum_k - tile_k * (norm_k * dots_k)[:, None]) * norm_k[:, None]
            tl.store(out_q + in_own, sum_q.to(out_q.dtype.element_ty), mask=valid[:, None])
            tl.store(out_k + in_own, sum_k.to(out_k.dtype.element_ty), mask=valid[:, None])
