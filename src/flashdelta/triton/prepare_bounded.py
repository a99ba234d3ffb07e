"""Stage `prepare` where decays are bounded (no less than exp(-5) a step) and operands bfloat16: the contract is that of
`prepare.py`. One program per (chunk, value head).

How: a chunk is one or two blocks of 32 rows. `near` pairs lie in one block and have its middle as reference, `far` pairs lie
in the two. 32 rows also keep every product on `mma` instructions, which all supported GPUs have.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .device.decays import split_decay, sums
from .device.gates import decay_rate, write_strength
from .device.mma import apply_weights, dot
from .device.norms import inverse_norm
from .device.sequences import own_chunk
from .device.sub_chunks import SUB, boundary_matrix, forward_substitution

ROWS = tl.constexpr(32)
"""Rows of a block."""


@triton.jit
def products(kk, qk, k, q, left, right_k, right, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """Adds `<k_i left_i, r_j right_j>` and `<q_i left_i, r_j right_j>` for all rows i, j, `r` being `right_k`."""
    r = tl.trans((right_k * right).to(dtype))
    kk = dot((k * left).to(dtype), r, kk, PRECISION)
    qk = dot((q * left).to(dtype), r, qk, PRECISION)
    return kk, qk


@triton.jit
def near(kk, qk, k, q, high, low, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """Pairs in one block for decays of no less than exp(-5) a step, with the block's middle as the reference of all of them:
    `exp(G_i - G_j) = exp(G_i - E) exp(E - G_j)`, whose factors are at most exp(80), in range of bfloat16.
    Pairs i < j come out wrong; see `lower`.
    """
    i = tl.arange(0, ROWS)[:, None]
    distance = sums(boundary_matrix(4, ROWS), high, low)
    signed = tl.where(i < SUB, -distance, distance)
    kk, qk = products(kk, qk, k, q, tl.exp2(signed), k, tl.exp2(-signed), dtype, PRECISION)
    return kk, qk


@triton.jit
def invert_block(A):
    """`(I + A)^-1` of a strictly lower `A [32, 32]`: its 16x16 diagonal blocks, then
    `[[x, 0], [b, y]]^-1 = [[X, 0], [-Y b X, Y]]`. In fp32: alternating terms cancel where keys repeat."""
    NB: tl.constexpr = ROWS // SUB
    i = tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, ROWS)[None, :]
    diagonal = i // SUB == j // SUB
    blocks = tl.sum(tl.reshape(tl.where(diagonal, A, 0.0), [NB, SUB, NB, SUB]), axis=2)
    X = forward_substitution(blocks)
    X = tl.reshape(tl.broadcast_to(X[:, :, None, :], [NB, SUB, NB, SUB]), [ROWS, ROWS])
    X = tl.where(diagonal, X, 0.0)
    B = tl.where(diagonal, 0.0, A)
    zero = tl.zeros([ROWS, ROWS], tl.float32)
    return X - dot(dot(X, B, zero, "tf32x3"), X, zero, "tf32x3")


@triton.jit
def lower(x, diagonal: tl.constexpr):
    i = tl.arange(0, ROWS)[:, None]
    j = tl.arange(0, ROWS)[None, :]
    return tl.where((i >= j) if diagonal else (i > j), x, 0.0)


@triton.jit(
    do_not_specialize=[
        *("T", "N", "H", "HV", "slots", "checkpoints"),
        *("beta_batch", "beta_token", "beta_head", "scale", "lower_bound"),
    ]
)
def prepare_bounded_kernel(
    q,
    k,
    g,
    beta,
    A_log,
    dt_bias,
    cu_seqlens,
    checkpoint_offsets,
    w,
    qg,
    kg,
    inverse,
    Aqk,
    decay,
    solved,
    scale,
    lower_bound,
    T,
    N,
    H,
    HV,
    slots,
    checkpoints,
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
    BETA: tl.constexpr,
    L2NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    BLOCKS: tl.constexpr = C // ROWS
    head, slot, batch, start, count = own_chunk(
        tl.program_id(0), cu_seqlens, checkpoint_offsets, checkpoints, slots, N, T, HV, C
    )
    if count <= 0:
        return
    qk_head = head // (HV // H)
    q += batch * q_batch + start * q_token + qk_head * q_head
    k += batch * k_batch + start * k_token + qk_head * k_head
    g += batch * g_batch + start * g_token + head * g_head
    beta += batch * beta_batch + start * beta_token + head * beta_head
    chunk = slot * HV + head
    w += chunk * C * K
    qg += chunk * C * K
    kg += chunk * C * K
    decay += chunk * K
    Aqk += chunk * C * C
    inverse += chunk * C * C
    if solved is not None:
        solved += chunk * C * C
    dtype: tl.constexpr = w.dtype.element_ty
    rate = decay_rate(A_log, head)

    zero = tl.zeros([ROWS, ROWS], tl.float32)
    row = tl.arange(0, ROWS)
    strength = ()
    norm_q = ()
    norm_k = ()
    near_kk = ()
    near_qk = ()
    far_kk = zero
    far_qk = zero
    for block in tl.static_range(BLOCKS):
        token = row + block * ROWS
        valid = token < count
        b = write_strength(tl.load(beta + token * beta_token, mask=valid, other=0.0).to(tl.float32), BETA)
        strength = strength + (tl.where(valid, b, 0.0),)
        if L2NORM:
            norm_q = norm_q + (inverse_norm(q, token[:, None] * q_token, valid[:, None], K, BK, ROWS) * scale,)
            norm_k = norm_k + (inverse_norm(k, token[:, None] * k_token, valid[:, None], K, BK, ROWS),)
        else:
            norm_q = norm_q + (tl.full([ROWS], 1.0, tl.float32) * scale,)
            norm_k = norm_k + (tl.full([ROWS], 1.0, tl.float32),)

        # one pass over the channels for each block: sums of both blocks at once would not fit in registers
        kk = zero
        qk = zero
        for s in tl.range(0, K, BK, num_stages=STAGES):
            column = s + tl.arange(0, BK)[None, :]
            here = token[:, None] * K + column
            bias = 0.0
            if dt_bias is not None:
                bias = tl.load(dt_bias + head * K + column).to(tl.float32)
            x = tl.load(g + token[:, None] * g_token + column, mask=valid[:, None], other=0.0).to(tl.float32)
            tile_k = tl.load(k + token[:, None] * k_token + column, mask=valid[:, None], other=0.0)
            tile_q = tl.load(q + token[:, None] * q_token + column, mask=valid[:, None], other=0.0)
            high, low = split_decay(x + bias, rate, lower_bound, valid[:, None], GATE)
            kk, qk = near(kk, qk, tile_k, tile_q, high, low, dtype, PRECISION)
            grown = tl.exp2(sums(row[None, :] <= row[:, None], high, low))
            shrunk = tl.exp2(sums(row[None, :] > row[:, None], high, low))
            # of any row, exp(G_i) exp(G_end - G_i) is the decay of the whole block
            total = grown * shrunk
            if block == 1:
                first = row < count
                x = tl.load(g + row[:, None] * g_token + column, mask=first[:, None], other=0.0).to(tl.float32)
                first_k = tl.load(k + row[:, None] * k_token + column, mask=first[:, None], other=0.0)
                high, low = split_decay(x + bias, rate, lower_bound, first[:, None], GATE)
                first_shrunk = tl.exp2(sums(row[None, :] > row[:, None], high, low))
                first_total = tl.exp2(sums(row[None, :] >= 0 * row[:, None], high, low))
                far_kk, far_qk = products(
                    far_kk, far_qk, tile_k, tile_q, grown, first_k, first_shrunk, dtype, PRECISION
                )
                first_shrunk *= total * norm_k[0][:, None]
                tl.store(kg + row[:, None] * K + column, (first_k * first_shrunk).to(dtype))
                grown *= first_total
                total *= first_total
            tl.store(qg + here, (tile_q * (grown * norm_q[block][:, None])).to(dtype))
            tl.store(w + here, (tile_k * (grown * norm_k[block][:, None])).to(dtype))
            if block == BLOCKS - 1:
                tl.store(kg + here, (tile_k * (shrunk * norm_k[block][:, None])).to(dtype))
                tl.store(decay + column + row[:, None] * 0, total, mask=row[:, None] == 0)
        near_kk = near_kk + (kk,)
        near_qk = near_qk + (qk,)

    inverses = ()
    for block in tl.static_range(BLOCKS):
        square = (row + block * ROWS)[:, None] * C + row[None, :] + block * ROWS
        aqk = near_qk[block] * norm_q[block][:, None] * norm_k[block][None, :]
        tl.store(Aqk + square, lower(aqk, True).to(dtype))
        akk = near_kk[block] * (norm_k[block] * strength[block])[:, None] * norm_k[block][None, :]
        inverses = inverses + (invert_block(lower(akk, False)),)
    if BLOCKS == 2:
        below = (row + ROWS)[:, None] * C + row[None, :]
        above = row[:, None] * C + row[None, :] + ROWS
        tl.store(Aqk + below, (far_qk * norm_q[1][:, None] * norm_k[0][None, :]).to(dtype))
        tl.store(Aqk + above, zero.to(dtype))
        tl.store(inverse + above, zero.to(dtype))
        akk = far_kk * (norm_k[1] * strength[1])[:, None] * norm_k[0][None, :]
        corner = -dot(dot(inverses[1], akk, zero, "tf32x3"), inverses[0], zero, "tf32x3")
        far = corner * strength[0][None, :]
        tl.store(inverse + below, far.to(dtype))
        if solved is not None:
            tl.store(solved + above, zero.to(dtype))
            tl.store(solved + below, corner.to(dtype))
    near_weights = ()
    for block in tl.static_range(BLOCKS):
        square = (row + block * ROWS)[:, None] * C + row[None, :] + block * ROWS
        near_weights = near_weights + (inverses[block] * strength[block][None, :],)
        tl.store(inverse + square, near_weights[block].to(dtype))
        if solved is not None:
            tl.store(solved + square, inverses[block].to(dtype))

    # w holds k exp(G) until here; other threads of this program wrote part of what a thread now reads
    tl.debug_barrier()
    WIDE: tl.constexpr = 128 if K > 128 else K
    for s in tl.range(0, K, WIDE, num_stages=1):
        top = row[:, None] * K + s + tl.arange(0, WIDE)[None, :]
        k0 = tl.load(w + top)
        tile = tl.zeros([ROWS, WIDE], tl.float32)
        if BLOCKS == 2:
            k1 = tl.load(w + ROWS * K + top)
            lower_tile = apply_weights(near_weights[1], k1, apply_weights(far, k0, tile, PRECISION), PRECISION)
            tl.store(w + ROWS * K + top, lower_tile.to(dtype))
        tl.store(w + top, apply_weights(near_weights[0], k0, tile, PRECISION).to(dtype))
