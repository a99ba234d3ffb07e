"""Stage `prepare` where operands are bfloat16 and decays bounded, no less than exp(-5) a token: the contract is that of
`prepare.py`. One CTA per (chunk, value head).

A chunk is one or two blocks of 32 rows. `near` pairs lie in one block and have its middle as their one reference. `far` pairs
lie in the two blocks and have the boundary between them. 32 rows also keep every MMA on `mma.sync`, which all supported GPUs
have: MMAs of 64 rows and four warps become `wgmma` (docs/triton-kernels.md says what went wrong there).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..shared.gates import beta_of, decay_rate
from ..shared.mma import apply_weights, dot
from ..shared.norms import norms_at
from ..shared.scalars import SCALARS
from ..shared.sequences import own_chunk
from .decays import split_decay, sums
from .sub_chunks import SUB, boundary_matrix, forward_substitution

BLOCK_ROWS = tl.constexpr(32)
"""Rows that share a reference: from their middle no decay is less than exp(-80), within bfloat16's range."""

MIDDLE = tl.constexpr(4)
"""The level of `boundary_matrix` whose boundary is the middle of `BLOCK_ROWS` rows."""

MAX_WIDTH = tl.constexpr(128)
"""Most channels of `w` that a CTA forms at a time: more would not fit in registers."""


@triton.jit
def add_products(kk, qk, k, q, left, right_k, right, dtype: tl.constexpr, PRECISION):
    """Adds `<k_i left_i, r_j right_j>` to `kk [32, 32]` and `<q_i left_i, r_j right_j>` to `qk`, for rows r of `right_k`."""
    r = tl.trans((right_k * right).to(dtype))
    kk = dot((k * left).to(dtype), r, kk, PRECISION)
    qk = dot((q * left).to(dtype), r, qk, PRECISION)
    return kk, qk


@triton.jit
def near_pairs(kk, qk, k, q, high, low, dtype: tl.constexpr, PRECISION):
    """Adds the pairs in one block, with the sum `E` at the block's middle as the reference of all of them:
    `exp(G_i - G_j) = exp(G_i - E) exp(E - G_j)`, both factors at most exp(80). Pairs i < j may overflow; `lower` drops them.
    """
    i = tl.arange(0, BLOCK_ROWS)[:, None]
    distance = sums(boundary_matrix(MIDDLE, BLOCK_ROWS), high, low)
    signed = tl.where(i < SUB, -distance, distance)
    kk, qk = add_products(kk, qk, k, q, tl.exp2(signed), k, tl.exp2(-signed), dtype, PRECISION)
    return kk, qk


@triton.jit
def invert_block(A):
    """`(I + A)^-1` of a strictly lower `A [32, 32]`: of its 16x16 diagonal blocks, then
    `[[x, 0], [b, y]]^-1 = [[X, 0], [-Y b X, Y]]`. In fp32: where keys repeat, terms alternate in sign and cancel."""
    NB: tl.constexpr = BLOCK_ROWS // SUB
    i = tl.arange(0, BLOCK_ROWS)[:, None]
    j = tl.arange(0, BLOCK_ROWS)[None, :]
    diagonal = i // SUB == j // SUB
    blocks = tl.sum(tl.reshape(tl.where(diagonal, A, 0.0), [NB, SUB, NB, SUB]), axis=2)
    X = forward_substitution(blocks)
    X = tl.reshape(tl.broadcast_to(X[:, :, None, :], [NB, SUB, NB, SUB]), [BLOCK_ROWS, BLOCK_ROWS])
    X = tl.where(diagonal, X, 0.0)
    B = tl.where(diagonal, 0.0, A)
    zero = tl.zeros([BLOCK_ROWS, BLOCK_ROWS], tl.float32)
    return X - dot(dot(X, B, zero, "tf32x3"), X, zero, "tf32x3")


@triton.jit
def lower(x, diagonal: tl.constexpr):
    """Pairs i > j alone, or i >= j with the `diagonal`."""
    i = tl.arange(0, BLOCK_ROWS)[:, None]
    j = tl.arange(0, BLOCK_ROWS)[None, :]
    return tl.where((i >= j) if diagonal else (i > j), x, 0.0)


# One CTA, tiles [rows, columns], one or two blocks of 32 rows:
#
#     for each block, for BK key channels:   q, k, g [32, BK], `STAGES` pipeline stages
#         gate: g -> log2 decays as high + low -> sums by row and from the block's middle
#         near_kk, near_qk [32, 32] += (k or q exp(G - E)) (k exp(E - G))^T
#         second block: far_kk, far_qk [32, 32] += (k or q exp(G)) (k_0 exp(G_last - G_0))^T
#         qg, kg, k exp(G) -> memory (the last one in the place of w), decay [BK] -> memory
#
#             Akk, Aqk = [ near_0         ]        Akk_inv = [ inv_0                    ]
#                        [ far     near_1 ]                  [ -inv_1 far inv_0   inv_1 ]
#
#     Aqk, inverse = Akk_inv diag(beta), Akk_inv [C, C] -> memory
#     w = inverse (k exp(G)), by MAX_WIDTH channels -> memory
@triton.jit(do_not_specialize=SCALARS)
def prepare_bounded_kernel(
    q, k, g, beta, A_log, dt_bias, cu_seqlens, checkpoint_offsets,
    w, qg, kg, inverse, Aqk, decay, Akk_inv, scale, lower_bound, T, N, H, HV,
    chunk_slots, checkpoints, q_batch: tl.int64, q_token: tl.int64, q_head: tl.int64,
    k_batch: tl.int64, k_token: tl.int64, k_head: tl.int64, g_batch: tl.int64, g_token: tl.int64, g_head: tl.int64,
    beta_batch: tl.int64, beta_token: tl.int64, beta_head: tl.int64,
    C: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, GATE: tl.constexpr, BETA: tl.constexpr,
    L2NORM: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, SCALAR: tl.constexpr,
):  # fmt: skip
    """`w = (I + Akk)^-1 diag(beta) (k exp(G))`, and all else of the contract in `prepare.py` but `u`."""
    BLOCKS: tl.constexpr = C // BLOCK_ROWS
    head, chunk_slot, batch, start, count = own_chunk(
        tl.program_id(0), cu_seqlens, checkpoint_offsets, checkpoints, chunk_slots, N, T, HV, C
    )
    if count <= 0:
        return
    qk_head = head // (HV // H)
    q += batch * q_batch + start * q_token + qk_head * q_head
    k += batch * k_batch + start * k_token + qk_head * k_head
    g += batch * g_batch + start * g_token + head * g_head
    beta += batch * beta_batch + start * beta_token + head * beta_head
    chunk = chunk_slot * HV + head
    w += chunk * C * K
    qg += chunk * C * K
    kg += chunk * C * K
    decay += chunk * K
    Aqk += chunk * C * C
    inverse += chunk * C * C
    if Akk_inv is not None:
        Akk_inv += chunk * C * C
    dtype: tl.constexpr = w.dtype.element_ty
    rate = decay_rate(A_log, head)

    zero = tl.zeros([BLOCK_ROWS, BLOCK_ROWS], tl.float32)
    row = tl.arange(0, BLOCK_ROWS)
    tile_beta = ()
    norm_q = ()
    norm_k = ()
    near_kk = ()
    near_qk = ()
    far_kk = zero
    far_qk = zero
    for block in tl.static_range(BLOCKS):
        token = row + block * BLOCK_ROWS
        valid = token < count
        b = beta_of(tl.load(beta + token * beta_token, mask=valid, other=0.0).to(tl.float32), BETA)
        tile_beta = tile_beta + (tl.where(valid, b, 0.0),)
        if L2NORM:
            norm_q = norm_q + (norms_at(q, token[:, None] * q_token, valid[:, None], K, BK, BLOCK_ROWS) * scale,)
            norm_k = norm_k + (norms_at(k, token[:, None] * k_token, valid[:, None], K, BK, BLOCK_ROWS),)
        else:
            norm_q = norm_q + (tl.full([BLOCK_ROWS], 1.0, tl.float32) * scale,)
            norm_k = norm_k + (tl.full([BLOCK_ROWS], 1.0, tl.float32),)

        # one pass over the channels for each block: the sums of both at once would not fit in registers
        kk = zero
        qk = zero
        for s in tl.range(0, K, BK, num_stages=STAGES):
            column = s + tl.arange(0, BK)[None, :]
            here = token[:, None] * K + column
            of_g = column * 0 if SCALAR else column
            bias = 0.0
            if dt_bias is not None:
                bias = tl.load(dt_bias + head * (1 if SCALAR else K) + of_g).to(tl.float32)
            x = tl.load(g + token[:, None] * g_token + of_g, mask=valid[:, None], other=0.0).to(tl.float32)
            tile_k = tl.load(k + token[:, None] * k_token + column, mask=valid[:, None], other=0.0)
            tile_q = tl.load(q + token[:, None] * q_token + column, mask=valid[:, None], other=0.0)
            high, low = split_decay(x + bias, rate, lower_bound, valid[:, None], GATE)
            kk, qk = near_pairs(kk, qk, tile_k, tile_q, high, low, dtype, PRECISION)
            exp_g = tl.exp2(sums(row[None, :] <= row[:, None], high, low))
            exp_g_last_minus_g = tl.exp2(sums(row[None, :] > row[:, None], high, low))
            # [32, BK]: in any row i, exp(G_i) exp(G_last - G_i) is the decay of the whole block
            block_decay = exp_g * exp_g_last_minus_g
            if block == 1:
                valid_0 = row < count
                x = tl.load(g + row[:, None] * g_token + of_g, mask=valid_0[:, None], other=0.0).to(tl.float32)
                k_0 = tl.load(k + row[:, None] * k_token + column, mask=valid_0[:, None], other=0.0)
                high, low = split_decay(x + bias, rate, lower_bound, valid_0[:, None], GATE)
                exp_g_last_minus_g_0 = tl.exp2(sums(row[None, :] > row[:, None], high, low))
                block_decay_0 = tl.exp2(sums(row[None, :] >= 0 * row[:, None], high, low))
                far_kk, far_qk = add_products(
                    far_kk, far_qk, tile_k, tile_q, exp_g, k_0, exp_g_last_minus_g_0, dtype, PRECISION
                )
                exp_g_last_minus_g_0 *= block_decay * norm_k[0][:, None]
                tl.store(kg + row[:, None] * K + column, (k_0 * exp_g_last_minus_g_0).to(dtype))
                exp_g *= block_decay_0
                block_decay *= block_decay_0
            tl.store(qg + here, (tile_q * (exp_g * norm_q[block][:, None])).to(dtype))
            tl.store(w + here, (tile_k * (exp_g * norm_k[block][:, None])).to(dtype))
            if block == BLOCKS - 1:
                tl.store(kg + here, (tile_k * (exp_g_last_minus_g * norm_k[block][:, None])).to(dtype))
                tl.store(decay + column + row[:, None] * 0, block_decay, mask=row[:, None] == 0)
        near_kk = near_kk + (kk,)
        near_qk = near_qk + (qk,)

    inv = ()
    for block in tl.static_range(BLOCKS):
        square = (row + block * BLOCK_ROWS)[:, None] * C + row[None, :] + block * BLOCK_ROWS
        aqk = near_qk[block] * norm_q[block][:, None] * norm_k[block][None, :]
        tl.store(Aqk + square, lower(aqk, True).to(dtype))
        akk = near_kk[block] * (norm_k[block] * tile_beta[block])[:, None] * norm_k[block][None, :]
        inv = inv + (invert_block(lower(akk, False)),)
    if BLOCKS == 2:
        below = (row + BLOCK_ROWS)[:, None] * C + row[None, :]
        above = row[:, None] * C + row[None, :] + BLOCK_ROWS
        tl.store(Aqk + below, (far_qk * norm_q[1][:, None] * norm_k[0][None, :]).to(dtype))
        tl.store(Aqk + above, zero.to(dtype))
        tl.store(inverse + above, zero.to(dtype))
        akk = far_kk * (norm_k[1] * tile_beta[1])[:, None] * norm_k[0][None, :]
        inv_corner = -dot(dot(inv[1], akk, zero, "tf32x3"), inv[0], zero, "tf32x3")
        far_weights = inv_corner * tile_beta[0][None, :]
        tl.store(inverse + below, far_weights.to(dtype))
        if Akk_inv is not None:
            tl.store(Akk_inv + above, zero.to(dtype))
            tl.store(Akk_inv + below, inv_corner.to(dtype))
    near_weights = ()
    for block in tl.static_range(BLOCKS):
        square = (row + block * BLOCK_ROWS)[:, None] * C + row[None, :] + block * BLOCK_ROWS
        near_weights = near_weights + (inv[block] * tile_beta[block][None, :],)
        tl.store(inverse + square, near_weights[block].to(dtype))
        if Akk_inv is not None:
            tl.store(Akk_inv + square, inv[block].to(dtype))

    # w holds k exp(G) until here; other threads of this CTA wrote part of what a thread now reads
    tl.debug_barrier()
    WIDTH: tl.constexpr = min(K, MAX_WIDTH)
    for s in tl.range(0, K, WIDTH, num_stages=1):
        top = row[:, None] * K + s + tl.arange(0, WIDTH)[None, :]
        k_exp_g_0 = tl.load(w + top)
        tile = tl.zeros([BLOCK_ROWS, WIDTH], tl.float32)
        if BLOCKS == 2:
            k_exp_g_1 = tl.load(w + BLOCK_ROWS * K + top)
            lower_tile = apply_weights(
                near_weights[1], k_exp_g_1, apply_weights(far_weights, k_exp_g_0, tile, PRECISION), PRECISION
            )
            tl.store(w + BLOCK_ROWS * K + top, lower_tile.to(dtype))
        tl.store(w + top, apply_weights(near_weights[0], k_exp_g_0, tile, PRECISION).to(dtype))
