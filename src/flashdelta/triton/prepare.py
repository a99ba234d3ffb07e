"""Stage `prepare`: everything about a chunk that does not depend on the state. One program per (chunk, value head), a warp
for each block of 16 rows.

Contract (docs/algorithm.md; `reference.chunk.prepare` is the definition), for `C` tokens with `G = cumsum(g)`:

    A       = strict_lower(beta_i <k_i exp(G_i), k_j exp(-G_j)>)
    inverse = (I + A)^-1 diag(beta)                                   [C, C]
    Aqk     = lower(<q_i exp(G_i), k_j exp(-G_j)>) * scale            [C, C]
    w       = inverse (k exp(G))                                      [C, K]
    qg, kg  = scale q exp(G), k exp(G_C - G)                          [C, K]
    decay   = exp(G_C)                                                [K]

with the gate, the L2 norm of q and k, and beta's sigmoid applied on the way. Tokens past the end of a sequence count as
q = k = g = beta = 0. For the backward pass also `solved = (I + A)^-1 [C, C]`; if asked for, `u = inverse v [C, V]` instead of
`inverse`.

Exact for any decays: every pair of rows i > j lies in the two halves of exactly one of the blocks of 2, 4, 8, 16, 32 or 64
rows, and there the exponential splits at the boundary between the halves into `exp(G_i - E) exp(E - G_j)`, both factors at
most 1. A row is in one half only: one tile of factors serves both sides.

How: a chunk is `[C / 16, 16, channels]`, blocks of 16 rows in a batch. Pairs in one block (`near`) are products of the batch,
which a warp does by itself; pairs in blocks of 32 (`middle`) and 64 rows (`far`) are products of one half with the other.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .device.decays import split_decay, sums
from .device.gates import decay_rate, write_strength
from .device.mma import apply_weights, dot
from .device.norms import L2_EPS
from .device.sequences import own_chunk
from .device.sub_chunks import SUB, forward_substitution

WIDE = tl.constexpr(64)
"""Most channels of `w` and `u` that a program forms at a time: of fewer, two warps would do the same products."""


@triton.jit
def boundary_levels():
    """`[1, 16, 16]`: bit `l` says that row i takes step s to or from the boundary between the halves of its block of `2 << l`
    rows: from the boundary up to and with i in the second half, after i up to the boundary in the first."""
    i = tl.arange(0, SUB)[None, :, None]
    s = tl.arange(0, SUB)[None, None, :]
    apart = i ^ s
    apart |= apart >> 1
    apart |= apart >> 2
    return ~apart & tl.where(s <= i, i, ~i)


@triton.jit
def pair_level():
    """`[1, 16, 16]`: `1 << l` up to `(2 << l) - 1` for rows i > j in the two halves of a block of `2 << l` rows; 0 for
    i <= j."""
    i = tl.arange(0, SUB)[None, :, None]
    j = tl.arange(0, SUB)[None, None, :]
    return tl.where(i > j, i ^ j, 0)


@triton.jit
def operand(x):
    """`x [NB, 16, BK]` as left operand; transposed, as right one. Float32 channels change places, in groups of 8, the same for
    both: then what a thread has of a product's result is what it needs of an operand, and nothing moves."""
    if x.dtype == tl.float32:
        NB: tl.constexpr = x.shape[0]
        BK: tl.constexpr = x.shape[2]
        x = tl.reshape(tl.permute(tl.reshape(x, [NB, SUB, BK // 8, 4, 2]), (0, 1, 2, 4, 3)), [NB, SUB, BK])
    return x


@triton.jit
def transposed(x):
    return tl.permute(x, (0, 2, 1))


@triton.jit
def pairs_of_blocks(x):
    """`[2 P, 16, N]` as the first and the second of each pair, `[P, 16, N]`."""
    P: tl.constexpr = x.shape[0] // 2
    return tl.split(tl.permute(tl.reshape(x, [P, 2, SUB, x.shape[2]]), (0, 2, 3, 1)))


@triton.jit
def halves(x):
    """Of all rows of a chunk, `[2 P, R, N]`, those of the first and the second half, `[P R, N]`."""
    R: tl.constexpr = x.shape[0] * x.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(x, [2, R, x.shape[2]]), (1, 2, 0)))


@triton.jit
def merged(first, second, below):
    """`[[first, 0], [below, second]]`, of `[P, R, R]` each."""
    P: tl.constexpr = first.shape[0]
    R: tl.constexpr = first.shape[1]
    top = tl.reshape(tl.permute(tl.join(first, tl.zeros_like(first)), (0, 1, 3, 2)), [P, R, 2 * R])
    bottom = tl.reshape(tl.permute(tl.join(below, second), (0, 1, 3, 2)), [P, R, 2 * R])
    return tl.reshape(tl.permute(tl.join(top, bottom), (0, 3, 1, 2)), [P, 2 * R, 2 * R])


@triton.jit
def corner_of_inverse(below, first, second, PRECISION: tl.constexpr):
    """Of `[[a, 0], [below, b]]^-1`, with `first = a^-1` and `second = b^-1`: `-second below first`. In fp32: alternating terms
    cancel where keys repeat."""
    zero = tl.zeros_like(below)
    return -dot(dot(second, below, zero, PRECISION), first, zero, PRECISION)


@triton.jit
def store_square(to, first, second, below, C: tl.constexpr):
    """`[[first, 0], [below, second]]`; with chunks of 32 rows `first` alone."""
    R: tl.constexpr = first.shape[0]
    i = tl.arange(0, R)
    at = to + i[:, None] * C + i[None, :]
    dtype: tl.constexpr = to.dtype.element_ty
    tl.store(at, first.to(dtype))
    if C > R:
        tl.store(at + R, tl.zeros_like(first).to(dtype))
        tl.store(at + R * C, below.to(dtype))
        tl.store(at + R * C + R, second.to(dtype))


@triton.jit
def rows_of(x, token, step, first_row, count, channel, IS_WHOLE: tl.constexpr):
    """A tile of `x`, whose tokens are `step` apart, from row `first_row` on; rows past the end are 0 (`IS_WHOLE`: there are
    none)."""
    at = x + (token + first_row)[:, None] * step + channel[None, :]
    if IS_WHOLE:
        return tl.load(at)
    return tl.load(at, mask=(token + first_row < count)[:, None], other=0.0)


@triton.jit
def weighted(
    x,
    x_token,
    to,
    count,
    first,
    second,
    below,
    C: tl.constexpr,
    N: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`[[first, 0], [below, second]] x` for `N` channels, into `to [C, N]`, which may be `x`: what the next slice loads ahead
    of time are other channels."""
    R: tl.constexpr = first.shape[0]
    token = tl.arange(0, R)
    WIDTH: tl.constexpr = min(N, WIDE)
    zero = tl.zeros([R, WIDTH], tl.float32)
    dtype: tl.constexpr = to.dtype.element_ty
    for s in tl.range(0, N, WIDTH, num_stages=2):
        channel = s + tl.arange(0, WIDTH)
        at = to + token[:, None] * N + channel[None, :]
        upper = rows_of(x, token, x_token, 0, count, channel, IS_WHOLE)
        if C > R:
            lower = rows_of(x, token, x_token, R, count, channel, IS_WHOLE)
            found = apply_weights(second, lower, apply_weights(below, upper, zero, PRECISION), PRECISION)
            tl.store(at + R * N, found.to(dtype))
        tl.store(at, apply_weights(first, upper, zero, PRECISION).to(dtype))


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
    v,
    u,
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
    v_batch: tl.int64,
    v_token: tl.int64,
    v_head: tl.int64,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    GATE: tl.constexpr,
    BETA: tl.constexpr,
    L2NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    NB: tl.constexpr = C // SUB
    # whatever the operands of other products are, the inverse is float32
    SOLVE: tl.constexpr = "ieee" if PRECISION == "ieee" else "tf32x3"
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
    dtype: tl.constexpr = w.dtype.element_ty
    FINE: tl.constexpr = dtype == tl.float32
    rate = decay_rate(A_log, head)

    block = tl.arange(0, NB)[:, None, None]
    row = tl.arange(0, SUB)[None, :, None]
    column = tl.arange(0, SUB)[None, None, :]
    other = tl.arange(0, NB)[None, :, None]
    token = block * SUB + row
    valid = token < count
    norm_q = scale
    norm_k = 1.0
    if L2NORM:
        norm_q = tl.zeros([NB, SUB], tl.float32)
        norm_k = norm_q
        for s in tl.range(0, K, BK):
            channel = s + tl.arange(0, BK)[None, None, :]
            tile_q = tl.load(q + token * q_token + channel, mask=valid, other=0.0).to(tl.float32)
            tile_k = tl.load(k + token * k_token + channel, mask=valid, other=0.0).to(tl.float32)
            norm_q += tl.sum(tile_q * tile_q, axis=2)
            norm_k += tl.sum(tile_k * tile_k, axis=2)
        norm_q = (scale / tl.sqrt(norm_q + L2_EPS))[:, :, None]
        norm_k = (1.0 / tl.sqrt(norm_k + L2_EPS))[:, :, None]

    near_kk = tl.zeros([NB, SUB, SUB], tl.float32)
    near_qk = near_kk
    middle_kk = tl.zeros([NB // 2, SUB, SUB], tl.float32)
    middle_qk = middle_kk
    far_kk = tl.zeros([2 * SUB, 2 * SUB], tl.float32)
    far_qk = far_kk
    same = tl.zeros([NB, SUB], tl.float32)
    all_blocks = block * 0
    levels = boundary_levels() + all_blocks
    level_of_pair = pair_level() + all_blocks
    for s in tl.range(0, K, BK, num_stages=STAGES):
        channel = s + tl.arange(0, BK)[None, None, :]
        here = token * K + channel
        bias = 0.0
        if dt_bias is not None:
            bias = tl.load(dt_bias + head * K + channel).to(tl.float32)
        x = tl.load(g + token * g_token + channel, mask=valid, other=0.0).to(tl.float32)
        tile_k = tl.load(k + token * k_token + channel, mask=valid, other=0.0).to(tl.float32) * norm_k
        tile_q = tl.load(q + token * q_token + channel, mask=valid, other=0.0).to(tl.float32) * norm_q
        same += tl.sum(tile_q * tile_k, axis=2)
        high, low = split_decay(x + bias, rate, lower_bound, valid, GATE, FINE)
        # sums of log decays in a block: up to and with a row, after it, and of all rows; the last is the same in every row
        up_to = sums(column <= row + all_blocks, high, low, FINE)
        beyond = sums(column > row + all_blocks, high, low, FINE)
        whole = tl.max(sums(column >= 0 * row + all_blocks, high, low, FINE), axis=1)[None, :, :]
        # of the blocks before and after one, and of the other one of 32 rows
        before = tl.sum(tl.where(other < block, whole, 0.0), axis=1)[:, None, :]
        after = tl.sum(tl.where(other > block, whole, 0.0), axis=1)[:, None, :]
        beside = tl.sum(tl.where(other == block ^ 1, whole, 0.0), axis=1)[:, None, :]
        grown = tl.exp2(up_to + before)
        tl.store(qg + here, (tile_q * grown).to(dtype))
        tl.store(w + here, (tile_k * grown).to(dtype))
        tl.store(kg + here, (tile_k * tl.exp2(beyond + after)).to(dtype))
        tl.store(decay + channel, tl.exp2(tl.sum(whole, axis=1))[:, None, :])

        for level in tl.static_range(4):
            factor = tl.exp2(sums((levels >> level) & 1 == 1, high, low, FINE))
            left = operand((tile_k * factor).to(dtype))
            right = transposed(left)
            zero = tl.zeros([NB, SUB, SUB], tl.float32)
            at_level = level_of_pair >> level == 1
            near_kk += tl.where(at_level, dot(left, right, zero, PRECISION), 0.0)
            left = operand((tile_q * factor).to(dtype))
            near_qk += tl.where(at_level, dot(left, right, zero, PRECISION), 0.0)
        factor = tl.exp2(tl.where(block % 2 == 1, up_to, beyond))
        first, second = pairs_of_blocks(operand((tile_k * factor).to(dtype)))
        right = transposed(first)
        middle_kk = dot(second, right, middle_kk, PRECISION)
        _, second = pairs_of_blocks(operand((tile_q * factor).to(dtype)))
        middle_qk = dot(second, right, middle_qk, PRECISION)
        if NB == 4:
            factor = tl.exp2(tl.where(block >= 2, up_to, beyond) + tl.where((block == 0) | (block == 3), beside, 0.0))
            first, second = halves(operand((tile_k * factor).to(dtype)))
            right = tl.trans(first)
            far_kk = dot(second, right, far_kk, PRECISION)
            _, second = halves(operand((tile_q * factor).to(dtype)))
            far_qk = dot(second, right, far_qk, PRECISION)

    near_qk += tl.where(row == column, same[:, :, None], 0.0)
    rows = merged(*pairs_of_blocks(near_qk), middle_qk)
    strength = write_strength(tl.load(beta + token * beta_token, mask=valid, other=0.0).to(tl.float32), BETA)
    strength = tl.where(valid, strength, 0.0)
    _, strength_second = pairs_of_blocks(strength)
    first, second = pairs_of_blocks(forward_substitution(near_kk * strength))
    X = merged(first, second, corner_of_inverse(middle_kk * strength_second, first, second, SOLVE))
    if NB == 4:
        rows, rows_second = halves(rows)
        first, second = halves(X)
        strength_first, strength_second = halves(strength)
        below = corner_of_inverse(far_kk * strength_second, first, second, SOLVE)
    else:
        R: tl.constexpr = 2 * SUB
        rows = tl.reshape(rows, [R, R])
        rows_second = rows
        first = tl.reshape(X, [R, R])
        second = first
        below = first
        strength_first = tl.reshape(strength, [R, 1])
        strength_second = strength_first
    store_square(Aqk + chunk * C * C, rows, rows_second, far_qk, C)
    if solved is not None:
        store_square(solved + chunk * C * C, first, second, below, C)
    first *= tl.trans(strength_first)
    second *= tl.trans(strength_second)
    below *= tl.trans(strength_first)
    if inverse is not None:
        store_square(inverse + chunk * C * C, first, second, below, C)
    if u is not None:
        v += batch * v_batch + start * v_token + head * v_head
        weighted(v, v_token, u + chunk * C * V, count, first, second, below, C, V, False, PRECISION)
    # w holds k exp(G) until here; other threads of this program wrote part of what a thread now reads
    tl.debug_barrier()
    weighted(w, K, w, count, first, second, below, C, K, True, PRECISION)
