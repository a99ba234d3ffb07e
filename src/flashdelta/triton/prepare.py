"""Stage `prepare`: everything about a chunk that does not depend on the state. One program per (chunk, value head).

Contract (docs/algorithm.md; `reference.chunk.prepare` is the definition), for `C` tokens with `G = cumsum(g)`:

    A       = strict_lower(beta_i <k_i exp(G_i), k_j exp(-G_j)>)
    inverse = (I + A)^-1 diag(beta)                                   [C, C]
    Aqk     = lower(<q_i exp(G_i), k_j exp(-G_j)>) * scale            [C, C]
    w       = inverse (k exp(G))                                      [C, K]
    qg, kg  = scale q exp(G), k exp(G_C - G)                          [C, K]
    decay   = exp(G_C)                                                [K]

with the gate, the L2 norm of q and k, and beta's sigmoid applied on the way. No exponent is ever positive where the decay
may be strong: see `pair_products`. Tokens past the end of a sequence count as q = k = g = beta = 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import L2_EPS, LOG2E, find_chunk, log2_decay, write_strength

BLOCK = tl.constexpr(16)
"""Rows of the diagonal blocks that forward substitution inverts, and that a bounded gate allows one reference for."""


@triton.jit
def swap_halves(x, HALF: tl.constexpr):
    """Exchanges rows `[0, HALF)` and `[HALF, 2 HALF)` of every group of `2 HALF` rows, bit for bit (a xor b xor b = a)."""
    ROWS: tl.constexpr = x.shape[0]
    COLUMNS: tl.constexpr = x.shape[1]
    bits = x.to(tl.int32, bitcast=True)
    both = tl.xor_sum(tl.reshape(bits, [ROWS // (2 * HALF), 2, HALF * COLUMNS]), axis=1, keep_dims=True)
    both = tl.broadcast_to(both, [ROWS // (2 * HALF), 2, HALF * COLUMNS])
    return (bits ^ tl.reshape(both, [ROWS, COLUMNS])).to(tl.float32, bitcast=True)


@triton.jit
def double_blocks(prefix, suffix, upper, HALF: tl.constexpr):
    """From sums inside blocks of `HALF` rows to sums inside blocks of twice as many.

    `prefix`: sum of the log decays from the block's first row up to and with this one; `suffix`: from the next row to the
    block's last. All terms have one sign, so nothing cancels, however different their sizes. `upper`: rows of a lower half.
    """
    sibling = swap_halves(prefix + suffix, HALF)
    return prefix + tl.where(upper, 0.0, sibling), suffix + tl.where(upper, sibling, 0.0)


@triton.jit
def pair_mask(HALF: tl.constexpr, C: tl.constexpr):
    """Pairs (i, j) of one block of `2 HALF` rows with i in its second half and j in its first."""
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    return (i // (2 * HALF) == j // (2 * HALF)) & (i % (2 * HALF) >= HALF) & (j % (2 * HALF) < HALF)


@triton.jit
def forward_substitution(A, C: tl.constexpr):
    """`(I + A)^-1` of each `BLOCK x BLOCK` diagonal block of the strictly lower `A [C, C]`; zero outside the blocks.

    Row i of the inverse is `e_i - sum_{j<i} A_ij X_j`. In fp32, row by row: a Neumann series would explode and cancel on
    repeated keys.
    """
    NB: tl.constexpr = C // BLOCK
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    diagonal = i // BLOCK == j // BLOCK
    blocks = tl.sum(tl.reshape(tl.where(diagonal, A, 0.0), [NB, BLOCK, NB, BLOCK]), axis=2)
    # transposed, so that row i comes out indexed by the rows of X it multiplies
    blocks = tl.permute(blocks, (0, 2, 1))
    row = tl.arange(0, BLOCK)[None, :, None]
    column = tl.arange(0, BLOCK)[None, None, :]
    X = tl.where(row == column, 1.0, 0.0) + tl.zeros([NB, BLOCK, BLOCK], tl.float32)
    for r in range(1, BLOCK):
        a = tl.sum(tl.where(column == r, blocks, 0.0), axis=2)
        x = tl.sum(a[:, :, None] * X, axis=1)
        X -= tl.where(row == r, x[:, None, :], 0.0)
    X = tl.broadcast_to(X[:, :, None, :], [NB, BLOCK, NB, BLOCK])
    return tl.where(diagonal, tl.reshape(X, [C, C]), 0.0)


@triton.jit
def invert(A, C: tl.constexpr, PRECISION: tl.constexpr):
    """`(I + A)^-1` of a strictly lower `A [C, C]`: diagonal blocks, then twice the size by
    `[[X, 0], [-Y B X, Y]] = inverse of [[x, 0], [B, y]]` for all blocks at once."""
    X = forward_substitution(A, C)
    HALF: tl.constexpr = BLOCK
    B = tl.where(pair_mask(HALF, C), A, 0.0)
    X -= tl.dot(tl.dot(X, B, input_precision=PRECISION), X, input_precision=PRECISION)
    if C == 64:
        B = tl.where(pair_mask(2 * HALF, C), A, 0.0)
        X -= tl.dot(tl.dot(X, B, input_precision=PRECISION), X, input_precision=PRECISION)
    return X


@triton.jit
def inverse_norm(x, start, valid, stride, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr):
    """`1 / sqrt(sum x^2 + eps)` of each row of a chunk."""
    total = tl.zeros([C], tl.float32)
    rows = (start + tl.arange(0, C).to(tl.int64)) * stride
    for s in tl.static_range(K // BK):
        columns = s * BK + tl.arange(0, BK)
        tile = tl.load(x + rows[:, None] + columns[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
        total += tl.sum(tile * tile, axis=1)
    return 1.0 / tl.sqrt(total + L2_EPS)


@triton.jit(do_not_specialize=["T", "N", "H", "HV", "slots", "beta_batch", "beta_token", "beta_head", "scale", "lower_bound"])
def prepare_kernel(
    q,
    k,
    g,
    beta,
    A_log,
    dt_bias,
    cu_seqlens,
    w,
    qg,
    kg,
    inverse,
    Aqk,
    decay,
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
    pid = tl.program_id(0)
    head = (pid % HV).to(tl.int64)
    slot = (pid // HV).to(tl.int64)
    if cu_seqlens is None:
        batch = slot // slots
        start = (slot % slots) * C
        count = T - start
    else:
        batch = slot * 0
        _, start, count = find_chunk(cu_seqlens, slot, N, T, C)
        if count <= 0:
            return
    qk_head = head // (HV // H)
    q += batch * q_batch + qk_head * q_head
    k += batch * k_batch + qk_head * k_head
    g += batch * g_batch + head * g_head
    beta += batch * beta_batch + head * beta_head
    chunk = slot * HV + head
    w += chunk * C * K
    qg += chunk * C * K
    kg += chunk * C * K
    decay += chunk * K
    dtype = w.dtype.element_ty

    row = tl.arange(0, C)
    valid = row < count
    token = start + row.to(tl.int64)
    b = write_strength(tl.load(beta + token * beta_token, mask=valid, other=0.0).to(tl.float32), BETA)
    b = tl.where(valid, b, 0.0)
    if L2NORM:
        norm_q = inverse_norm(q, start, valid, q_token, K, BK, C) * scale
        norm_k = inverse_norm(k, start, valid, k_token, K, BK, C)
    else:
        norm_q = tl.full([C], 1.0, tl.float32) * scale
        norm_k = tl.full([C], 1.0, tl.float32)
    rate = 1.0
    if A_log is not None:
        rate = tl.exp2(tl.load(A_log + head).to(tl.float32) * LOG2E)

    akk = tl.zeros([C, C], tl.float32)
    aqk = tl.zeros([C, C], tl.float32)
    i = row[:, None]
    j = row[None, :]
    k_decayed = ()
    for s in tl.static_range(K // BK):
        column = s * BK + tl.arange(0, BK)
        x = tl.load(g + token[:, None] * g_token + column[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
        tile_k = tl.load(k + token[:, None] * k_token + column[None, :], mask=valid[:, None], other=0.0)
        tile_q = tl.load(q + token[:, None] * q_token + column[None, :], mask=valid[:, None], other=0.0)
        if dt_bias is not None:
            x += tl.load(dt_bias + head * K + column).to(tl.float32)[None, :]
        prefix = tl.where(valid[:, None], log2_decay(x, rate, lower_bound, GATE), 0.0)
        suffix = tl.zeros([C, BK], tl.float32)

        # exp(G_i - G_j) for a pair (i, j) in the two halves of a block splits at the boundary between the halves into
        # exp(prefix_i) exp(suffix_j), both at most 1: exact for any decay. A row is in one half only, so one tile of
        # factors serves both sides. Every pair is met at exactly one block size.
        for level in tl.static_range(C.bit_length() - 1):
            HALF: tl.constexpr = 1 << level
            if SAFE and HALF == BLOCK:
                # bounded decay: inside a block of 16 the block's end is a fit reference, exp(-suffix) <= exp(75)
                shrink = tl.exp2(suffix)
                grow = tl.exp2(-suffix)
                right = (tile_k * shrink).to(dtype)
                inside = (i // BLOCK == j // BLOCK) & (i >= j)
                akk += tl.where(inside, tl.dot((tile_k * grow).to(dtype), tl.trans(right), input_precision=PRECISION), 0.0)
                aqk += tl.where(inside, tl.dot((tile_q * grow).to(dtype), tl.trans(right), input_precision=PRECISION), 0.0)
            upper = ((row // HALF) % 2 == 0)[:, None]
            if HALF >= BLOCK or not SAFE:
                factor = tl.exp2(tl.where(upper, suffix, prefix))
                both = (tile_k * factor).to(dtype)
                pairs = pair_mask(HALF, C)
                akk += tl.where(pairs, tl.dot(both, tl.trans(both), input_precision=PRECISION), 0.0)
                aqk += tl.where(pairs, tl.dot((tile_q * factor).to(dtype), tl.trans(both), input_precision=PRECISION), 0.0)
            prefix, suffix = double_blocks(prefix, suffix, upper, HALF)
        if not SAFE:
            same = tl.sum(tile_q.to(tl.float32) * tile_k.to(tl.float32), axis=1)
            aqk += tl.where(i == j, same[:, None], 0.0)

        here = row[:, None] * K + column[None, :]
        grown = tl.exp2(prefix)
        tl.store(qg + here, (tile_q * grown * norm_q[:, None]).to(dtype))
        tl.store(kg + here, (tile_k * tl.exp2(suffix) * norm_k[:, None]).to(dtype))
        k_decayed = k_decayed + ((tile_k * grown * norm_k[:, None]).to(dtype),)
        total = tl.sum(tl.where(row[:, None] == C - 1, prefix, 0.0), axis=0)
        tl.store(decay + column, tl.exp2(total))

    square = chunk * C * C + i * C + j
    aqk = aqk * norm_q[:, None] * norm_k[None, :]
    tl.store(Aqk + square, tl.where(i >= j, aqk, 0.0).to(dtype))
    akk = tl.where(i > j, akk * (norm_k * b)[:, None] * norm_k[None, :], 0.0)
    weights = (invert(akk, C, PRECISION) * b[None, :]).to(dtype)
    tl.store(inverse + square, weights)
    for s in tl.static_range(K // BK):
        column = s * BK + tl.arange(0, BK)
        tile = tl.dot(weights, k_decayed[s], input_precision=PRECISION)
        tl.store(w + row[:, None] * K + column[None, :], tile.to(dtype))
