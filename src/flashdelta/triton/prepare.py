"""Stage `prepare`: everything about a chunk that does not depend on the state. One program per (chunk, value head).

Contract (docs/algorithm.md; `reference.chunk.prepare` is the definition), for `C` tokens with `G = cumsum(g)`:

    A       = strict_lower(beta_i <k_i exp(G_i), k_j exp(-G_j)>)
    inverse = (I + A)^-1 diag(beta)                                   [C, C]
    Aqk     = lower(<q_i exp(G_i), k_j exp(-G_j)>) * scale            [C, C]
    w       = inverse (k exp(G))                                      [C, K]
    qg, kg  = scale q exp(G), k exp(G_C - G)                          [C, K]
    decay   = exp(G_C)                                                [K]

For the backward pass also `solved = (I + A)^-1 [C, C]`.

with the gate, the L2 norm of q and k, and beta's sigmoid applied on the way. Tokens past the end of a sequence count as
q = k = g = beta = 0.

How: a chunk is one or two blocks of 32 rows. A block's sums of log decays come from products with 0/1 matrices (`sums`), which
need no exchange between threads and never subtract: every exponent is a sum of terms of one sign. `near` pairs lie in one
block, `far` pairs in the two. 32 rows also keep every product on `mma` instructions, which all supported GPUs have.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .common import L2_EPS, decay_rate, log2_decay, own_chunk, write_strength

ROWS = tl.constexpr(32)
"""Rows of a block."""

SUB = tl.constexpr(16)
"""Rows of the diagonal blocks that forward substitution inverts."""

LOWEST = tl.constexpr(-1000.0)
"""Least log2 decay of one step: exp2 of less is 0 all the same, and infinity times a 0 of a matrix would be NaN."""


FINE_STEP = tl.constexpr(2.0**-11)
"""What rounding to float16 may be off by, over the number's own size."""


@triton.jit
def sums(matrix, high, low, FINE: tl.constexpr = False):
    """`[32, 32]` zeros and ones times log decays in the two parts of `split_decay`."""
    ones = tl.where(matrix, 1.0, 0.0).to(tl.float16)
    if FINE:
        return tl.dot(ones, high, acc=tl.dot(ones, low) * FINE_STEP)
    return tl.dot(ones, low, acc=tl.dot(ones, high))


@triton.jit
def split_decay(x, rate, lower_bound, valid, GATE: tl.constexpr, FINE: tl.constexpr = False):
    """Log2 decays of a block's rows as `high + low`, both float16: 22 bits. Rows past the end do not decay.

    Next to 0 the steps of float16 are 6e-8 apart: over a long sequence even such a decay counts, and rounding it the same way
    in every token shows in float32. There the low part has steps `FINE_STEP` times as far apart.
    """
    x = tl.maximum(log2_decay(x, rate, lower_bound, GATE), LOWEST, propagate_nan=tl.PropagateNan.ALL)
    x = tl.where(valid[:, None], x, 0.0)
    high = x.to(tl.float16)
    low = x - high.to(tl.float32)
    if FINE:
        low = low / FINE_STEP
    return high, low.to(tl.float16)


@triton.jit
def boundary_matrix(level, COUNT: tl.constexpr = ROWS):
    """Of `COUNT` rows, row i selects the steps between row i and the boundary between the halves of its block of `2 << level`
    rows: from the boundary up to and with i in the second half, after i up to the boundary in the first."""
    i = tl.arange(0, COUNT)[:, None]
    s = tl.arange(0, COUNT)[None, :]
    second = (i >> level) % 2 == 1
    same = (i >> level) == (s >> level)
    return same & ((second & (s <= i)) | (((i >> level) % 2 == 0) & (s > i)))


@triton.jit
def pair_mask(level, COUNT: tl.constexpr = ROWS):
    """Pairs (i, j) of one block of `2 << level` rows with i in its second half and j in its first."""
    i = tl.arange(0, COUNT)[:, None] >> level
    j = tl.arange(0, COUNT)[None, :] >> level
    return (i >> 1 == j >> 1) & (i % 2 == 1) & (j % 2 == 0)


@triton.jit
def products(kk, qk, k, q, left, right_k, right, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """Adds `<k_i left_i, r_j right_j>` and `<q_i left_i, r_j right_j>` for all rows i, j, `r` being `right_k`."""
    r = tl.trans((right_k * right).to(dtype))
    kk += tl.dot((k * left).to(dtype), r, input_precision=PRECISION)
    qk += tl.dot((q * left).to(dtype), r, input_precision=PRECISION)
    return kk, qk


@triton.jit
def near_bounded(kk, qk, k, q, high, low, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """Pairs in one block for decays of at most exp(-5) a step, with the block's middle as the reference of all of them:
    `exp(G_i - G_j) = exp(G_i - E) exp(E - G_j)`, whose factors are at most exp(80), in range of bf16 and fp32.
    Pairs i < j come out wrong; see `lower`.
    """
    i = tl.arange(0, ROWS)[:, None]
    distance = sums(boundary_matrix(4), high, low, dtype == tl.float32)
    signed = tl.where(i < SUB, -distance, distance)
    kk, qk = products(kk, qk, k, q, tl.exp2(signed), k, tl.exp2(-signed), dtype, PRECISION)
    return kk, qk


@triton.jit
def near_exact(kk, qk, k, q, high, low, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """Pairs i > j in one block, exact for any decay; pairs i = j of `kk` and `qk` are left out.

    Every such pair lies in the two halves of exactly one of the blocks of 2, 4, 8, 16 or 32 rows. There the exponential
    splits at the boundary between the halves into `exp(G_i - E) exp(E - G_j)`, both factors at most 1. A row is in one half
    only: one tile of factors serves both sides.
    """
    for level in tl.static_range(5):
        factor = tl.exp2(sums(boundary_matrix(level), high, low, dtype == tl.float32))
        pairs = pair_mask(level)
        zero = tl.zeros([ROWS, ROWS], tl.float32)
        level_kk, level_qk = products(zero, zero, k, q, factor, k, factor, dtype, PRECISION)
        kk += tl.where(pairs, level_kk, 0.0)
        qk += tl.where(pairs, level_qk, 0.0)
    return kk, qk


@triton.jit
def forward_substitution(A):
    """`(I + A)^-1` of every strictly lower block of `A [NB, 16, 16]`.

    Row i of the inverse is `e_i - sum_{j<i} A_ij X_j`. In fp32, row by row: a Neumann series would explode and cancel on
    repeated keys.
    """
    row = tl.arange(0, SUB)[None, :, None]
    column = tl.arange(0, SUB)[None, None, :]
    # transposed, so that row i comes out indexed by the rows of X it multiplies
    A = tl.permute(A, (0, 2, 1))
    X = tl.where(row == column, 1.0, 0.0) + tl.zeros(A.shape, tl.float32)
    for r in range(1, SUB):
        a = tl.sum(tl.where(column == r, A, 0.0), axis=2)
        x = tl.sum(a[:, :, None] * X, axis=1)
        X -= tl.where(row == r, x[:, None, :], 0.0)
    return X


@triton.jit
def invert_block(A, PRECISION: tl.constexpr):
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
    return X - tl.dot(tl.dot(X, B, input_precision=PRECISION), X, input_precision=PRECISION)


@triton.jit
def apply_weights(weights, tile, acc, PRECISION: tl.constexpr):
    """`acc + weights tile`. With a 16-bit tile, the fp32 weights enter as a high and a low part: rows of weights alternate in
    sign where keys repeat, and rounding them once would leave more error than result."""
    high = weights.to(tile.dtype)
    acc = tl.dot(high, tile, acc=acc, input_precision=PRECISION)
    if tile.dtype != tl.float32:
        low = (weights - high.to(tl.float32)).to(tile.dtype)
        acc = tl.dot(low, tile, acc=acc, input_precision=PRECISION)
    return acc


@triton.jit
def inverse_norm(x, rows, valid, K: tl.constexpr, BK: tl.constexpr, COUNT: tl.constexpr = ROWS):
    """`1 / sqrt(sum x^2 + eps)` of each of `COUNT` rows."""
    total = tl.zeros([COUNT], tl.float32)
    for s in tl.range(0, K, BK):
        tile = tl.load(x + rows + s + tl.arange(0, BK)[None, :], mask=valid, other=0.0).to(tl.float32)
        total += tl.sum(tile * tile, axis=1)
    return 1.0 / tl.sqrt(total + L2_EPS)


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
def prepare_kernel(
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
    SAFE: tl.constexpr,
    BETA: tl.constexpr,
    L2NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    BLOCKS: tl.constexpr = C // ROWS
    # whatever the operands of other products are, the inverse is float32
    SOLVE: tl.constexpr = "ieee" if PRECISION == "ieee" else "tf32x3"
    head, slot, batch, start, count = own_chunk(cu_seqlens, checkpoint_offsets, checkpoints, slots, N, T, HV, C)
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
    FINE: tl.constexpr = dtype == tl.float32
    rate = decay_rate(A_log, head)

    zero = tl.zeros([ROWS, ROWS], tl.float32)
    row = tl.arange(0, ROWS)
    strength = ()
    norm_q = ()
    norm_k = ()
    near_kk = ()
    near_qk = ()
    same = ()
    far_kk = zero
    far_qk = zero
    for block in tl.static_range(BLOCKS):
        token = row + block * ROWS
        valid = token < count
        b = write_strength(tl.load(beta + token * beta_token, mask=valid, other=0.0).to(tl.float32), BETA)
        strength = strength + (tl.where(valid, b, 0.0),)
        if L2NORM:
            norm_q = norm_q + (inverse_norm(q, token[:, None] * q_token, valid[:, None], K, BK) * scale,)
            norm_k = norm_k + (inverse_norm(k, token[:, None] * k_token, valid[:, None], K, BK),)
        else:
            norm_q = norm_q + (tl.full([ROWS], 1.0, tl.float32) * scale,)
            norm_k = norm_k + (tl.full([ROWS], 1.0, tl.float32),)

        # one pass over the channels for each block: sums of both blocks at once would not fit in registers
        kk = zero
        qk = zero
        dots = tl.zeros([ROWS], tl.float32)
        for s in tl.range(0, K, BK, num_stages=STAGES):
            column = s + tl.arange(0, BK)[None, :]
            here = token[:, None] * K + column
            bias = 0.0
            if dt_bias is not None:
                bias = tl.load(dt_bias + head * K + column).to(tl.float32)
            x = tl.load(g + token[:, None] * g_token + column, mask=valid[:, None], other=0.0).to(tl.float32)
            tile_k = tl.load(k + token[:, None] * k_token + column, mask=valid[:, None], other=0.0)
            tile_q = tl.load(q + token[:, None] * q_token + column, mask=valid[:, None], other=0.0)
            high, low = split_decay(x + bias, rate, lower_bound, valid, GATE, FINE)
            if SAFE:
                kk, qk = near_bounded(kk, qk, tile_k, tile_q, high, low, dtype, PRECISION)
            else:
                kk, qk = near_exact(kk, qk, tile_k, tile_q, high, low, dtype, PRECISION)
                dots += tl.sum(tile_q.to(tl.float32) * tile_k.to(tl.float32), axis=1)
            grown = tl.exp2(sums(row[None, :] <= row[:, None], high, low, FINE))
            shrunk = tl.exp2(sums(row[None, :] > row[:, None], high, low, FINE))
            # of any row, exp(G_i) exp(G_end - G_i) is the decay of the whole block
            total = grown * shrunk
            if block == 1:
                first = row < count
                x = tl.load(g + row[:, None] * g_token + column, mask=first[:, None], other=0.0).to(tl.float32)
                first_k = tl.load(k + row[:, None] * k_token + column, mask=first[:, None], other=0.0)
                high, low = split_decay(x + bias, rate, lower_bound, first, GATE, FINE)
                first_shrunk = tl.exp2(sums(row[None, :] > row[:, None], high, low, FINE))
                first_total = tl.exp2(sums(row[None, :] >= 0 * row[:, None], high, low, FINE))
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
        same = same + (dots,)

    inverses = ()
    for block in tl.static_range(BLOCKS):
        square = (row + block * ROWS)[:, None] * C + row[None, :] + block * ROWS
        aqk = near_qk[block]
        if not SAFE:
            aqk += tl.where(row[:, None] == row[None, :], same[block][:, None], 0.0)
        aqk *= norm_q[block][:, None] * norm_k[block][None, :]
        tl.store(Aqk + square, lower(aqk, True).to(dtype))
        akk = near_kk[block] * (norm_k[block] * strength[block])[:, None] * norm_k[block][None, :]
        inverses = inverses + (invert_block(lower(akk, False), SOLVE),)
    if BLOCKS == 2:
        below = (row + ROWS)[:, None] * C + row[None, :]
        above = row[:, None] * C + row[None, :] + ROWS
        tl.store(Aqk + below, (far_qk * norm_q[1][:, None] * norm_k[0][None, :]).to(dtype))
        tl.store(Aqk + above, zero.to(dtype))
        tl.store(inverse + above, zero.to(dtype))
        akk = far_kk * (norm_k[1] * strength[1])[:, None] * norm_k[0][None, :]
        corner = tl.dot(inverses[1], akk, input_precision=SOLVE)
        corner = -tl.dot(corner, inverses[0], input_precision=SOLVE)
        far = corner * strength[0][None, :]
        tl.store(inverse + below, far.to(dtype))
        if solved is not None:
            tl.store(solved + above, zero.to(dtype))
            tl.store(solved + below, corner.to(dtype))
    near = ()
    for block in tl.static_range(BLOCKS):
        square = (row + block * ROWS)[:, None] * C + row[None, :] + block * ROWS
        near = near + (inverses[block] * strength[block][None, :],)
        tl.store(inverse + square, near[block].to(dtype))
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
            lower_tile = apply_weights(near[1], k1, apply_weights(far, k0, tile, PRECISION), PRECISION)
            tl.store(w + ROWS * K + top, lower_tile.to(dtype))
        tl.store(w + top, apply_weights(near[0], k0, tile, PRECISION).to(dtype))
