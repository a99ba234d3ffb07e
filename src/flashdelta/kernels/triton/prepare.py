"""Stage `prepare`: all of a chunk that does not depend on the state. One CTA per (chunk, value head), one warp per sub-chunk of
16 rows.

Contract (docs/algorithm.md; `reference.chunk.prepare` is the definition), for `C` tokens with `G = cumsum(g)`:

    Akk     = strict_lower(beta_i <k_i, k_j exp(G_i - G_j)>)          [C, C]
    Akk_inv = (I + Akk)^-1                                            [C, C]   for the backward pass
    inverse = Akk_inv diag(beta)                                      [C, C]
    Aqk     = lower(scale <q_i, k_j exp(G_i - G_j)>)                  [C, C]
    w       = inverse (k exp(G))                                      [C, K]
    u       = inverse v                                               [C, V]   if asked for, instead of `inverse`
    qg, kg  = scale q exp(G), k exp(G_C - G)                          [C, K]
    decay   = exp(G_C)                                                [K]

The gate, the L2 norm of q and k, and beta's sigmoid are applied on the way. Tokens past the end of a sequence count as
q = k = g = beta = 0.

Exact for any decays: every pair of rows i > j lies in the two halves of exactly one aligned block of 2, 4, 8, 16, 32 or 64
rows. There the exponential splits at the boundary between the halves, `exp(G_i - E) exp(E - G_j)`, both factors at most 1.
A row is in one half only, so one tile of factors serves both operands.

A chunk is `[NB, 16, channels]`: `NB = C / 16` sub-chunks in a batch. `near` pairs lie in one sub-chunk: batched MMAs, one
sub-chunk per warp. `middle` pairs lie in the two sub-chunks of 32 rows, `far` pairs in the two halves of 64: MMAs of one half
with the other.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...problem.problem import ChunkProblem
from ...program.launch import Launch
from ..shared.gates import beta_of, decay_rate
from ..shared.mma import apply_weights, dot
from ..shared.norms import L2_EPS
from ..shared.scalars import SCALARS
from ..shared.sequences import own_chunk
from ..stages.launch import Config, StageCall, chunks, launch, precision
from .decays import split_decay, sums
from .prepare_mma import by_mma, prepare_mma
from .sub_chunks import SUB, SUB_LEVELS, forward_substitution

MAX_WIDTH = tl.constexpr(64)
"""Most channels of `w` and `u` that a CTA forms at a time. With fewer, two warps would do the same MMAs."""


@triton.jit
def boundary_levels():
    """`[1, 16, 16]`: bit `l` is `boundary_matrix(l, 16)`, which says whether token s lies between row i and the middle of its
    block of `2 << l` rows."""
    i = tl.arange(0, SUB)[None, :, None]
    s = tl.arange(0, SUB)[None, None, :]
    apart = i ^ s
    apart |= apart >> 1
    apart |= apart >> 2
    return ~apart & tl.where(s <= i, i, ~i)


@triton.jit
def pair_level():
    """`[1, 16, 16]`, of which `>> l == 1` is `pair_mask(l, 16)`: pairs i > j in the two halves of a block of `2 << l` rows."""
    i = tl.arange(0, SUB)[None, :, None]
    j = tl.arange(0, SUB)[None, None, :]
    return tl.where(i > j, i ^ j, 0)


@triton.jit
def as_operand(x):
    """`x [NB, 16, BK]` as left operand of an MMA; transposed, as right operand. Float32 channels change places, in groups of 8,
    alike in both: then what a thread has of an MMA's result is what it needs of an operand, and nothing moves."""
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
    """Sub-chunks `[2 P, 16, N]` as the first and the second of each pair, `[P, 16, N]`."""
    P: tl.constexpr = x.shape[0] // 2
    return tl.split(tl.permute(tl.reshape(x, [P, 2, SUB, x.shape[2]]), (0, 2, 3, 1)))


@triton.jit
def halves(x):
    """All rows of a chunk, `[2 P, R, N]`, as those of the first and of the second half, `[P R, N]`."""
    R: tl.constexpr = x.shape[0] * x.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(x, [2, R, x.shape[2]]), (1, 2, 0)))


@triton.jit
def joined(a_00, a_11, a_10):
    """`[[a_00, 0], [a_10, a_11]]` `[P, 2 R, 2 R]`, of `[P, R, R]` each."""
    P: tl.constexpr = a_00.shape[0]
    R: tl.constexpr = a_00.shape[1]
    top = tl.reshape(tl.permute(tl.join(a_00, tl.zeros_like(a_00)), (0, 1, 3, 2)), [P, R, 2 * R])
    bottom = tl.reshape(tl.permute(tl.join(a_10, a_11), (0, 1, 3, 2)), [P, R, 2 * R])
    return tl.reshape(tl.permute(tl.join(top, bottom), (0, 3, 1, 2)), [P, 2 * R, 2 * R])


@triton.jit
def corner_of_inverse(a_10, inv_00, inv_11, PRECISION):
    """The corner of `[[a_00, 0], [a_10, a_11]]^-1`, with `inv_00 = a_00^-1` and `inv_11 = a_11^-1`: the corner `-inv_11 a_10
    inv_00`. In fp32: where keys repeat, terms alternate in sign and cancel."""
    zero = tl.zeros_like(a_10)
    return -dot(dot(inv_11, a_10, zero, PRECISION), inv_00, zero, PRECISION)


@triton.jit
def store_square(out, a_00, a_11, a_10, C):
    """`[[a_00, 0], [a_10, a_11]] [C, C]`, of halves of a chunk; with chunks of 32 rows `a_00` alone."""
    R: tl.constexpr = a_00.shape[0]
    i = tl.arange(0, R)
    at = out + i[:, None] * C + i[None, :]
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(at, a_00.to(dtype))
    if C > R:
        tl.store(at + R, tl.zeros_like(a_00).to(dtype))
        tl.store(at + R * C, a_10.to(dtype))
        tl.store(at + R * C + R, a_11.to(dtype))


@triton.jit
def rows_of(x, token, step, first_row, count, channel, IS_WHOLE):
    """A tile `[R, WIDTH]` of `x`, whose tokens are `step` apart, from row `first_row` on. Rows past the end are 0 (`IS_WHOLE`:
    there are none)."""
    at = x + (token + first_row)[:, None] * step + channel[None, :]
    if IS_WHOLE:
        return tl.load(at)
    return tl.load(at, mask=(token + first_row < count)[:, None], other=0.0)


@triton.jit
def store_weighted(x, x_token, out, count, inv_00, inv_11, inv_10, C, N, IS_WHOLE, PRECISION):
    """`[[inv_00, 0], [inv_10, inv_11]] x` for `N` channels, into `out [C, N]`, which may be `x`: loads of the next slice, in
    flight by then, are of other channels."""
    R: tl.constexpr = inv_00.shape[0]
    token = tl.arange(0, R)
    WIDTH: tl.constexpr = min(N, MAX_WIDTH)
    zero = tl.zeros([R, WIDTH], tl.float32)
    dtype: tl.constexpr = out.dtype.element_ty
    for s in tl.range(0, N, WIDTH, num_stages=2):
        channel = s + tl.arange(0, WIDTH)
        at = out + token[:, None] * N + channel[None, :]
        upper = rows_of(x, token, x_token, 0, count, channel, IS_WHOLE)
        if C > R:
            lower = rows_of(x, token, x_token, R, count, channel, IS_WHOLE)
            result = apply_weights(inv_11, lower, apply_weights(inv_10, upper, zero, PRECISION), PRECISION)
            tl.store(at + R * N, result.to(dtype))
        tl.store(at, apply_weights(inv_00, upper, zero, PRECISION).to(dtype))


# One CTA, tiles [rows, columns], NB = C / 16 sub-chunks:
#
#     for BK key channels:     q, k, g [NB, 16, BK], `STAGES` pipeline stages
#         gate: g -> log2 decays as high + low -> sums by row, sub-chunk and boundary
#         qg, kg, k exp(G) -> memory (the last one in the place of w), decay [BK] -> memory
#         pairs of rows i > j, for Akk (k, k) and for Aqk (q, k):
#
#             rows        0-15   16-31   32-47   48-63         (C = 64; with C = 32 the upper left quarter)
#              0-15     [ near                        ]
#             16-31     [ middle  near                ]        near    4 MMAs [16, BK] [BK, 16], one per level, masked
#             32-47     [ far     far     near        ]        middle  1 MMA  [16, BK] [BK, 16]
#             48-63     [ far     far     middle  near]        far     1 MMA  [32, BK] [BK, 32]
#
#     Akk * beta -> forward substitution of the near blocks -> corners from middle, then from far -> Akk_inv [C, C]
#     Aqk, Akk_inv or inverse = Akk_inv diag(beta) -> memory
#     u = inverse v, w = inverse (k exp(G)), by MAX_WIDTH channels -> memory
@triton.jit(do_not_specialize=SCALARS)
def prepare_kernel(
    q, k, g, beta, A_log, dt_bias, cu_seqlens, checkpoint_offsets,
    w, qg, kg, inverse, Aqk, decay, Akk_inv, v, u, scale, lower_bound, T, N, H, HV,
    chunk_slots, checkpoints, q_batch: tl.int64, q_token: tl.int64, q_head: tl.int64,
    k_batch: tl.int64, k_token: tl.int64, k_head: tl.int64, g_batch: tl.int64, g_token: tl.int64, g_head: tl.int64,
    beta_batch: tl.int64, beta_token: tl.int64, beta_head: tl.int64,
    v_batch: tl.int64, v_token: tl.int64, v_head: tl.int64,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, GATE: tl.constexpr, BETA: tl.constexpr,
    L2NORM: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`w = (I + Akk)^-1 diag(beta) (k exp(G))`, and all else of the stage's contract, by chunk slot: `w, qg, kg [S, HV, C, K]`,
    `inverse, Aqk, Akk_inv [S, HV, C, C]`, `u [S, HV, C, V]`, `decay [S, HV, K]`."""
    NB: tl.constexpr = C // SUB
    # the inverse is float32, whatever the operands of other MMAs are
    SOLVE: tl.constexpr = "ieee" if PRECISION == "ieee" else "tf32x3"
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
    qk_diagonal = tl.zeros([NB, SUB], tl.float32)
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
        qk_diagonal += tl.sum(tile_q * tile_k, axis=2)
        high, low = split_decay(x + bias, rate, lower_bound, valid, GATE, FINE)
        # sums of log decays in a sub-chunk: up to and with a row, after it, and of all rows (alike in every row)
        sum_to_row = sums(column <= row + all_blocks, high, low, FINE)
        sum_after_row = sums(column > row + all_blocks, high, low, FINE)
        block_sum = tl.max(sums(column >= 0 * row + all_blocks, high, low, FINE), axis=1)[None, :, :]
        # of the sub-chunks before and after this one, and of the other one of its 32 rows
        sum_before_block = tl.sum(tl.where(other < block, block_sum, 0.0), axis=1)[:, None, :]
        sum_after_block = tl.sum(tl.where(other > block, block_sum, 0.0), axis=1)[:, None, :]
        sum_of_neighbour = tl.sum(tl.where(other == block ^ 1, block_sum, 0.0), axis=1)[:, None, :]
        exp_g = tl.exp2(sum_to_row + sum_before_block)
        tl.store(qg + here, (tile_q * exp_g).to(dtype))
        tl.store(w + here, (tile_k * exp_g).to(dtype))
        tl.store(kg + here, (tile_k * tl.exp2(sum_after_row + sum_after_block)).to(dtype))
        tl.store(decay + channel, tl.exp2(tl.sum(block_sum, axis=1))[:, None, :])

        for level in tl.static_range(SUB_LEVELS):
            factor = tl.exp2(sums((levels >> level) & 1 == 1, high, low, FINE))
            left = as_operand((tile_k * factor).to(dtype))
            right = transposed(left)
            zero = tl.zeros([NB, SUB, SUB], tl.float32)
            at_level = level_of_pair >> level == 1
            near_kk += tl.where(at_level, dot(left, right, zero, PRECISION), 0.0)
            left = as_operand((tile_q * factor).to(dtype))
            near_qk += tl.where(at_level, dot(left, right, zero, PRECISION), 0.0)
        factor = tl.exp2(tl.where(block % 2 == 1, sum_to_row, sum_after_row))
        first, second = pairs_of_blocks(as_operand((tile_k * factor).to(dtype)))
        right = transposed(first)
        middle_kk = dot(second, right, middle_kk, PRECISION)
        _, second = pairs_of_blocks(as_operand((tile_q * factor).to(dtype)))
        middle_qk = dot(second, right, middle_qk, PRECISION)
        if NB == 4:
            factor = tl.exp2(
                tl.where(block >= 2, sum_to_row, sum_after_row)
                + tl.where((block == 0) | (block == 3), sum_of_neighbour, 0.0)
            )
            first, second = halves(as_operand((tile_k * factor).to(dtype)))
            right = tl.trans(first)
            far_kk = dot(second, right, far_kk, PRECISION)
            _, second = halves(as_operand((tile_q * factor).to(dtype)))
            far_qk = dot(second, right, far_qk, PRECISION)

    near_qk += tl.where(row == column, qk_diagonal[:, :, None], 0.0)
    tile_Aqk = joined(*pairs_of_blocks(near_qk), middle_qk)
    tile_beta = beta_of(tl.load(beta + token * beta_token, mask=valid, other=0.0).to(tl.float32), BETA)
    tile_beta = tl.where(valid, tile_beta, 0.0)
    _, beta_1 = pairs_of_blocks(tile_beta)
    inv_00, inv_11 = pairs_of_blocks(forward_substitution(near_kk * tile_beta))
    inverses = joined(inv_00, inv_11, corner_of_inverse(middle_kk * beta_1, inv_00, inv_11, SOLVE))
    if NB == 4:
        tile_Aqk, tile_Aqk_1 = halves(tile_Aqk)
        inv_00, inv_11 = halves(inverses)
        beta_0, beta_1 = halves(tile_beta)
        inv_10 = corner_of_inverse(far_kk * beta_1, inv_00, inv_11, SOLVE)
    else:
        R: tl.constexpr = 2 * SUB
        tile_Aqk = tl.reshape(tile_Aqk, [R, R])
        tile_Aqk_1 = tile_Aqk
        inv_00 = tl.reshape(inverses, [R, R])
        inv_11 = inv_00
        inv_10 = inv_00
        beta_0 = tl.reshape(tile_beta, [R, 1])
        beta_1 = beta_0
    store_square(Aqk + chunk * C * C, tile_Aqk, tile_Aqk_1, far_qk, C)
    if Akk_inv is not None:
        store_square(Akk_inv + chunk * C * C, inv_00, inv_11, inv_10, C)
    inv_00 *= tl.trans(beta_0)
    inv_11 *= tl.trans(beta_1)
    inv_10 *= tl.trans(beta_0)
    if inverse is not None:
        store_square(inverse + chunk * C * C, inv_00, inv_11, inv_10, C)
    if u is not None:
        v += batch * v_batch + start * v_token + head * v_head
        store_weighted(v, v_token, u + chunk * C * V, count, inv_00, inv_11, inv_10, C, V, False, PRECISION)
    # w holds k exp(G) until here; other threads of this CTA wrote part of what a thread now reads
    tl.debug_barrier()
    store_weighted(w, K, w, count, inv_00, inv_11, inv_10, C, K, True, PRECISION)


def prepare_config(problem: ChunkProblem, capability: int) -> Config:
    """Chooses sizes: 432 us in float32 at T4096 H32 on an H200, with slices of 32 channels 468."""
    return Config(BK=16, num_warps=problem.chunk_size // 16, STAGES=3)


def prepare(call: StageCall, Akk_inv: Tensor | None = None, u: Tensor | None = None) -> Launch:
    """`Akk_inv`: receives the inverses in float32, or by token, for the backward pass. With `u`, that is left instead of the
    workspace's `Akk_inv`, which then has none."""
    problem = call.problem
    if by_mma(problem, call.t):
        return prepare_mma(call, Akk_inv)
    own = dict(
        **call.left("w", "qg", "kg", "Aqk", "decay"),
        **dict(inverse=call.workspace.get("Akk_inv"), Akk_inv=Akk_inv, u=u),
        PRECISION=precision(problem),
        **({"v": None} if u is None else {}),
    )
    return launch(prepare_kernel, chunks(problem), problem, call.t, own, prepare_config(problem, call.arch))
