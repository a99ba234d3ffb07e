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
def in_first_half(HALF: tl.constexpr, C: tl.constexpr):
    """Rows `[C, 1]` that lie in the first half of their block of `2 HALF`."""
    return ((tl.arange(0, C) // HALF) % 2 == 0)[:, None]


@triton.jit
def double_blocks(prefix, suffix, HALF: tl.constexpr):
    """From sums inside blocks of `HALF` rows to sums inside blocks of twice as many.

    `prefix`: sum of the log decays from the block's first row up to and with this one; `suffix`: from the next row to the
    block's last. All terms have one sign, so nothing cancels, however different their sizes.
    """
    sibling = swap_halves(prefix + suffix, HALF)
    first = in_first_half(HALF, prefix.shape[0])
    return prefix + tl.where(first, 0.0, sibling), suffix + tl.where(first, sibling, 0.0)


@triton.jit
def pair_mask(HALF: tl.constexpr, C: tl.constexpr):
    """Pairs (i, j) of one block of `2 HALF` rows with i in its second half and j in its first."""
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    return (i // (2 * HALF) == j // (2 * HALF)) & (i % (2 * HALF) >= HALF) & (j % (2 * HALF) < HALF)


@triton.jit
def blocks_dot(a, b, PRECISION: tl.constexpr):
    """`a b^T` inside every block of 16 rows: `[C, BK], [C, BK] -> [C / 16, 16, 16]`."""
    NB: tl.constexpr = a.shape[0] // BLOCK
    a = tl.reshape(a, [NB, BLOCK, a.shape[1]])
    b = tl.reshape(b, [NB, BLOCK, b.shape[1]])
    return tl.dot(a, tl.permute(b, (0, 2, 1)), input_precision=PRECISION)


@triton.jit
def far_pairs(akk, aqk, k, q, prefix, suffix, HALF: tl.constexpr, PRECISION: tl.constexpr):
    """Adds `<k_i, k_j exp(G_i - G_j)>` and `<q_i, k_j exp(G_i - G_j)>` of the pairs `pair_mask(HALF)` to `[C, C]` sums.

    `prefix` and `suffix` are sums inside blocks of `HALF` rows. Of such a pair, i and j lie in the two halves of a block, and
    the exponential splits at the boundary between the halves: `exp(prefix_i) exp(suffix_j)`, both at most 1, so it is exact
    for any decay. A row is in one half only: one tile of factors serves both sides. Every pair i > j has exactly one HALF.
    """
    C: tl.constexpr = k.shape[0]
    dtype = k.dtype
    factor = tl.exp2(tl.where(in_first_half(HALF, C), suffix, prefix))
    right = (k * factor).to(dtype)
    pairs = pair_mask(HALF, C)
    akk += tl.where(pairs, tl.dot(right, tl.trans(right), input_precision=PRECISION), 0.0)
    aqk += tl.where(pairs, tl.dot((q * factor).to(dtype), tl.trans(right), input_precision=PRECISION), 0.0)
    return akk, aqk


@triton.jit
def near_pairs(akk, aqk, k, q, prefix, suffix, HALF: tl.constexpr, PRECISION: tl.constexpr):
    """`far_pairs` for pairs inside the blocks of 16 rows, added to `[C / 16, 16, 16]` sums."""
    C: tl.constexpr = k.shape[0]
    dtype = k.dtype
    factor = tl.exp2(tl.where(in_first_half(HALF, C), suffix, prefix))
    right = (k * factor).to(dtype)
    pairs = pair_mask(HALF, BLOCK)[None, :, :]
    akk += tl.where(pairs, blocks_dot(right, right, PRECISION), 0.0)
    aqk += tl.where(pairs, blocks_dot((q * factor).to(dtype), right, PRECISION), 0.0)
    return akk, aqk


@triton.jit
def bounded_pairs(akk, aqk, k, q, suffix, PRECISION: tl.constexpr):
    """All pairs inside blocks of 16 rows at once, for decays bounded by -5 a step: the block's end is the reference,
    `exp(-suffix_i) exp(suffix_j)`, whose first factor is at most exp(75). Pairs i < j come out wrong and are masked later."""
    dtype = k.dtype
    grow = tl.exp2(-suffix)
    right = (k * tl.exp2(suffix)).to(dtype)
    akk += blocks_dot((k * grow).to(dtype), right, PRECISION)
    aqk += blocks_dot((q * grow).to(dtype), right, PRECISION)
    return akk, aqk


@triton.jit
def spread_blocks(x, C: tl.constexpr):
    """`[C / 16, 16, 16]` onto the diagonal of a `[C, C]` of zeros."""
    NB: tl.constexpr = C // BLOCK
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    x = tl.reshape(tl.broadcast_to(x[:, :, None, :], [NB, BLOCK, NB, BLOCK]), [C, C])
    return tl.where(i // BLOCK == j // BLOCK, x, 0.0)


@triton.jit
def forward_substitution(A):
    """`(I + A)^-1` of every strictly lower block of `A [NB, 16, 16]`.

    Row i of the inverse is `e_i - sum_{j<i} A_ij X_j`. In fp32, row by row: a Neumann series would explode and cancel on
    repeated keys.
    """
    row = tl.arange(0, BLOCK)[None, :, None]
    column = tl.arange(0, BLOCK)[None, None, :]
    # transposed, so that row i comes out indexed by the rows of X it multiplies
    A = tl.permute(A, (0, 2, 1))
    X = tl.where(row == column, 1.0, 0.0) + tl.zeros(A.shape, tl.float32)
    for r in range(1, BLOCK):
        a = tl.sum(tl.where(column == r, A, 0.0), axis=2)
        x = tl.sum(a[:, :, None] * X, axis=1)
        X -= tl.where(row == r, x[:, None, :], 0.0)
    return X


@triton.jit
def merge_blocks(X, A, HALF: tl.constexpr, PRECISION: tl.constexpr):
    """Inverses of the diagonal blocks of twice the size, `[[X, 0], [-Y B X, Y]] = [[x, 0], [B, y]]^-1`, all blocks at once."""
    B = tl.where(pair_mask(HALF, A.shape[0]), A, 0.0)
    return X - tl.dot(tl.dot(X, B, input_precision=PRECISION), X, input_precision=PRECISION)


@triton.jit
def inverse_norm(x, start, valid, stride, K: tl.constexpr, C: tl.constexpr):
    """`1 / sqrt(sum x^2 + eps)` of each row of a chunk."""
    rows = (start + tl.arange(0, C).to(tl.int64)) * stride
    tile = tl.load(x + rows[:, None] + tl.arange(0, K)[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
    return 1.0 / tl.sqrt(tl.sum(tile * tile, axis=1) + L2_EPS)


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
    STAGES: tl.constexpr,
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
        norm_q = inverse_norm(q, start, valid, q_token, K, C) * scale
        norm_k = inverse_norm(k, start, valid, k_token, K, C)
    else:
        norm_q = tl.full([C], 1.0, tl.float32) * scale
        norm_k = tl.full([C], 1.0, tl.float32)
    rate = 1.0
    if A_log is not None:
        rate = tl.exp2(tl.load(A_log + head).to(tl.float32) * LOG2E)

    far_kk = tl.zeros([C, C], tl.float32)
    far_qk = tl.zeros([C, C], tl.float32)
    near_kk = tl.zeros([C // BLOCK, BLOCK, BLOCK], tl.float32)
    near_qk = tl.zeros([C // BLOCK, BLOCK, BLOCK], tl.float32)
    same = tl.zeros([C], tl.float32)
    i = row[:, None]
    j = row[None, :]
    for s in tl.range(0, K, BK, num_stages=STAGES):
        column = s + tl.arange(0, BK)
        x = tl.load(g + token[:, None] * g_token + column[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
        tile_k = tl.load(k + token[:, None] * k_token + column[None, :], mask=valid[:, None], other=0.0)
        tile_q = tl.load(q + token[:, None] * q_token + column[None, :], mask=valid[:, None], other=0.0)
        if dt_bias is not None:
            x += tl.load(dt_bias + head * K + column).to(tl.float32)[None, :]
        prefix = tl.where(valid[:, None], log2_decay(x, rate, lower_bound, GATE), 0.0)
        suffix = tl.zeros([C, BK], tl.float32)

        for level in tl.static_range(4):
            if not SAFE:
                near_kk, near_qk = near_pairs(near_kk, near_qk, tile_k, tile_q, prefix, suffix, 1 << level, PRECISION)
            prefix, suffix = double_blocks(prefix, suffix, 1 << level)
        if SAFE:
            near_kk, near_qk = bounded_pairs(near_kk, near_qk, tile_k, tile_q, suffix, PRECISION)
        else:
            same += tl.sum(tile_q.to(tl.float32) * tile_k.to(tl.float32), axis=1)
        for level in tl.static_range(4, C.bit_length() - 1):
            far_kk, far_qk = far_pairs(far_kk, far_qk, tile_k, tile_q, prefix, suffix, 1 << level, PRECISION)
            prefix, suffix = double_blocks(prefix, suffix, 1 << level)

        here = row[:, None] * K + column[None, :]
        grown = tl.exp2(prefix)
        tl.store(qg + here, (tile_q * grown * norm_q[:, None]).to(dtype))
        tl.store(kg + here, (tile_k * tl.exp2(suffix) * norm_k[:, None]).to(dtype))
        tl.store(w + here, (tile_k * grown * norm_k[:, None]).to(dtype))
        total = tl.sum(tl.where(row[:, None] == C - 1, prefix, 0.0), axis=0)
        tl.store(decay + column, tl.exp2(total))

    near = i // BLOCK == j // BLOCK
    square = chunk * C * C + i * C + j
    aqk = tl.where(near, spread_blocks(near_qk, C), far_qk)
    if not SAFE:
        aqk += tl.where(i == j, same[:, None], 0.0)
    aqk = tl.where(i >= j, aqk * norm_q[:, None] * norm_k[None, :], 0.0)
    tl.store(Aqk + square, aqk.to(dtype))

    far_kk *= (norm_k * b)[:, None] * norm_k[None, :]
    block_norm = tl.reshape(norm_k, [C // BLOCK, BLOCK])
    block_row = tl.reshape(norm_k * b, [C // BLOCK, BLOCK])
    near_kk *= block_row[:, :, None] * block_norm[:, None, :]
    below = tl.arange(0, BLOCK)[:, None] > tl.arange(0, BLOCK)[None, :]
    X = spread_blocks(forward_substitution(tl.where(below[None, :, :], near_kk, 0.0)), C)
    for level in tl.static_range(4, C.bit_length() - 1):
        X = merge_blocks(X, far_kk, 1 << level, PRECISION)
    weights = (X * b[None, :]).to(dtype)
    tl.store(inverse + square, weights)
    # w holds k exp(G) until here; other threads of this program wrote part of what a thread now reads
    tl.debug_barrier()
    for s in tl.range(0, K, BK, num_stages=STAGES):
        here = row[:, None] * K + s + tl.arange(0, BK)[None, :]
        tile = tl.dot(weights, tl.load(w + here), input_precision=PRECISION)
        tl.store(w + here, tile.to(dtype))
