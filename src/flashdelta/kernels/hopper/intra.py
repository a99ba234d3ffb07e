"""Stage `intra` of the backward pass for Hopper: from the gradients of the matrices `A` and `Aqk` to those of the call's
inputs. One CTA per (chunk, value head).

Contract: as `triton/intra.py`; `grad_A` and `grad_Aqk` lie by token, `[B, T, HV, 64]`, and parts of dq and dk come in 16 bits
(`wy.py`).

Pairs i > j of tokens are split at a place between them, with `E` the sum of log decays up to there (docs/backward.md):

    left_i = exp(G_i - E)      right_j = exp(E - G_j)

For bounded decays that is the middle of the row's block of 32; for pairs of the two blocks what decays from the one middle to
the other, a factor of the channel alone, is multiplied with the sums. Factors reach exp(80), which leaves gradients little room
in float32: log decays of two rows of a block get `jumps` that bring large factors nearer to 1, and pairs across them the
inverse. For other decays the place is the boundary between the halves of the blocks of 2, 4, .. 64 rows, where no factor is
more than 1.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ...program.launch import Launch
from ..shared.gates import beta_gradient, decay_rate
from ..shared.gluon.compat import barrier, reinterpret
from ..shared.gluon.math import (
    beta_value,
    decay_bias,
    exp2,
    exp2_negative,
    gate_gradient,
    norm_factors,
    reciprocal,
    token_offset,
    wide,
)
from ..shared.scalars import SCALARS_AND_STRIDES
from ..stages.launch import StageCall, chunks, launch_div8
from .device.layouts import C, copy_rows, half_rows, load_rows, row_column, store_rows
from .device.tile_scheduler import chunk_tile, first_tile
from .device.wgmma import opaque_indices, store_decays, weighted_sums


@gluon.jit
def store_no_partials(partial_A_log, partial_dt_bias, chunk, K):
    """Zeros for a slot without a chunk."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    column = gl.arange(0, K, layout=layout)
    zeros = gl.zeros([K], gl.float32, layout=layout)
    if partial_A_log is not None:
        gl.store(partial_A_log + chunk * K + column, zeros)
    if partial_dt_bias is not None:
        gl.store(partial_dt_bias + chunk * K + column, zeros)


@gluon.jit
def jumps(row):
    """Log2 of the product of all jumps up to a row: at rows 8 and 24 of a block of 32, as factors of the first 8 rows reach
    2^108, and of the last 8 2^115. Equal for 8 rows at a time."""
    eighth = row // 8
    return (eighth + 3) // 4 * 16 + (eighth + 1) // 4 * 28


@gluon.jit
def store_pairs_by_distance(near_s, far_s):
    """Splits the matrix in `near_s`, divided by the jumps between j and i, into two left operands: pairs i > j within a block
    of 32 rows, and pairs across the two blocks."""
    copy_l: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    i, j = row_column(C, C, copy_l)
    # a power of two by its exponent's bits
    x = near_s.load(copy_l) * ((jumps(j) - jumps(i) + 127) << 7).to(gl.int16).to(gl.bfloat16, bitcast=True)
    near_s.store(gl.where((i // 32 == j // 32) & (i > j), x, 0.0).to(gl.bfloat16))
    far_s.store(gl.where((i >= 32) & (j < 32), x, 0.0).to(gl.bfloat16))


@gluon.jit
def level_pairs(level_s, matrix_s, level):
    """Pairs (i, j) of a matrix in one block of `2 << level` rows with i in its second half and j in its first."""
    copy_l: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    row, column = row_column(C, C, copy_l)
    i = row >> level
    j = column >> level
    pairs = (i >> 1 == j >> 1) & (i % 2 == 1) & (j % 2 == 0)
    level_s.store(gl.where(pairs, matrix_s.load(copy_l), 0.0).to(gl.bfloat16))


@gluon.jit
def decay_gradient(operand, grad):
    """The part of dG that comes from an MMA's operand, `grad` being the operand's gradient. It takes the operand as rounded: a
    pair then takes from `dG_j` what it adds to `dG_i`, and the sum of dG over later rows is exact where it cancels."""
    return operand.load(grad.type.layout).to(gl.float32) * grad


@gluon.jit
def replace_decays(last_rows):
    """Starts the copy of the rows (`copy_rows`) that take the decays' place."""
    barrier()  # the MMAs of both warpgroups have read the decays
    copy_rows(*last_rows)
    async_copy.commit_group()


@gluon.jit
def bounded_pairs(k_s, q_s, rows, T, N, matrices, operands, last_rows, acc_l: gl.constexpr, dot_l: gl.constexpr, K):
    """Returns the gradients of `q_i` and `k_i` (for beta 1) as left operands, of `k_j` as a right one, and of G, from log
    decays in `high_s + low_s`. `rows`: factors of a key's row on the right, of a query's and of a key's on the left.
    `last_rows`: see `replace_decays`."""
    of_right, of_q, of_w = rows
    near_A, far_A, near_Aqk, far_Aqk = matrices
    right_k, left_q, left_w, high_s, low_s = operands
    i, s = opaque_indices(T, N, dot_l)
    zero = gl.zeros((C, K), gl.float32, layout=acc_l)
    after = (s % 32 >= 16) & (s <= i) & (i % 32 >= 16)
    before = (s % 32 < 16) & (s > i) & (i % 32 < 16)
    signed = gl.where(i // 32 == s // 32, gl.where(after, 1.0, gl.where(before, -1.0, 0.0)), 0.0)
    signed = signed.to(gl.float16)
    distance = weighted_sums(signed, high_s, low_s, zero)
    # from the middle of the first block to that of the second, by halves: the whole may be less than any float32
    halves = gl.where((s >= 16) & (s < 48) & (i >= 0), 0.5, 0.0).to(gl.float16)
    between = weighted_sums(halves, high_s, low_s, zero)
    distance, between, _, _ = warpgroup_mma_wait(0, deps=[distance, between, signed, halves])
    replace_decays(last_rows)
    between = exp2(between)
    left = exp2(distance)
    right_k.store((k_s.load(acc_l).to(gl.float32) * (exp2_negative(distance) * of_right)).to(gl.bfloat16))
    left_q.store((q_s.load(acc_l).to(gl.float32) * (left * of_q)).to(gl.bfloat16))
    left_w.store((k_s.load(acc_l).to(gl.float32) * (left * of_w)).to(gl.bfloat16))
    fence_async_shared()
    sum_q = warpgroup_mma(far_Aqk, right_k, zero, use_acc=False, is_async=True)
    sum_left = warpgroup_mma(far_A, right_k, zero, use_acc=False, is_async=True)
    sum_right = warpgroup_mma(far_Aqk.permute((1, 0)), left_q, zero, use_acc=False, is_async=True)
    sum_right = warpgroup_mma(far_A.permute((1, 0)), left_w, sum_right, is_async=True)
    sum_q, sum_left, sum_right = warpgroup_mma_wait(0, deps=[sum_q, sum_left, sum_right])
    sum_q = warpgroup_mma(near_Aqk, right_k, sum_q * between * between, is_async=True)
    sum_left = warpgroup_mma(near_A, right_k, sum_left * between * between, is_async=True)
    sum_right = warpgroup_mma(near_Aqk.permute((1, 0)), left_q, sum_right * between * between, is_async=True)
    sum_right = warpgroup_mma(near_A.permute((1, 0)), left_w, sum_right, is_async=True)
    sum_q, sum_left, sum_right = warpgroup_mma_wait(0, deps=[sum_q, sum_left, sum_right])
    G = decay_gradient(left_q, sum_q) + decay_gradient(left_w, sum_left) - decay_gradient(right_k, sum_right)
    # to a bit or two, which no bfloat16 shows; not as `exp2_negative(distance)` again, which the compiler would keep in 32
    # registers from the first time on
    return sum_q * left, sum_left * left, sum_right * reciprocal(left), G


@gluon.jit
def all_pairs(
    k_s, q_s, by_row_s, scale, T, N, matrices, operands, last_rows, acc_l: gl.constexpr, dot_l: gl.constexpr, K,
):  # fmt: skip
    """Forms the gradients of `bounded_pairs`, exact for any decay. `near_A` and `near_Aqk` hold the whole matrices, and
    `by_row_s` the rows' factors."""
    row_l: gl.constexpr = gl.SliceLayout(1, acc_l)
    A_s, level_A, Aqk_s, level_Aqk = matrices
    right_k, left_q, left_w, high_s, low_s = operands
    zero = gl.zeros((C, K), gl.float32, layout=acc_l)
    sum_q = zero
    sum_left = zero
    sum_right = zero
    G = zero
    for level in range(6):
        # anew at each level, as are the rows' factors below: registers are scarce
        i, s = opaque_indices(T + level, N, dot_l)
        # from a row to the boundary between the halves of its block
        second = (i >> level) % 2 == 1
        steps = ((i >> level) == (s >> level)) & gl.where(second, s <= i, s > i)
        to_boundary = gl.where(steps, 1.0, 0.0).to(gl.float16)
        factor = weighted_sums(to_boundary, high_s, low_s, zero)
        level_pairs(level_A, A_s, level)
        level_pairs(level_Aqk, Aqk_s, level)
        factor, to_boundary = warpgroup_mma_wait(0, deps=[factor, to_boundary])
        factor = exp2(factor)
        of_right = by_row_s.index(3).load(row_l)[:, None]
        of_q = by_row_s.index(4).load(row_l)[:, None] * scale
        of_w = of_right * by_row_s.index(5).load(row_l)[:, None]
        # a row is in one half only: one tile of factors serves both sides
        right_k.store((k_s.load(acc_l).to(gl.float32) * (factor * of_right)).to(gl.bfloat16))
        left_q.store((q_s.load(acc_l).to(gl.float32) * (factor * of_q)).to(gl.bfloat16))
        left_w.store((k_s.load(acc_l).to(gl.float32) * (factor * of_w)).to(gl.bfloat16))
        fence_async_shared()
        # one side after the other: both at once would spill
        right = warpgroup_mma(level_Aqk.permute((1, 0)), left_q, zero, use_acc=False, is_async=True)
        right = warpgroup_mma(level_A.permute((1, 0)), left_w, right)
        G -= decay_gradient(right_k, right)
        sum_right += right * factor
        left = warpgroup_mma(level_Aqk, right_k, zero, use_acc=False)
        G += decay_gradient(left_q, left)
        sum_q += left * factor
        left = warpgroup_mma(level_A, right_k, zero, use_acc=False)
        G += decay_gradient(left_w, left)
        sum_left += left * factor
    replace_decays(last_rows)
    return sum_q, sum_left, sum_right, G


@gluon.jit(do_not_specialize=SCALARS_AND_STRIDES)
def intra_kernel(
    q, k, g, beta, A_log, dt_bias, cu_seqlens, grad_A, grad_Aqk, grad_q, grad_k, grad_G, grad_beta, size_k, out_q,
    out_k, out_g, out_beta, partial_A_log, partial_dt_bias, scale: gl.float32, lower_bound: gl.float32, T: gl.int32,
    N: gl.int32, HV: gl.int32, group: gl.int32, slots: gl.int32,
    q_batch: gl.int32, q_token: gl.int32, q_head: gl.int32, k_batch: gl.int32, k_token: gl.int32, k_head: gl.int32,
    g_batch: gl.int32, g_token: gl.int32, g_head: gl.int32,
    beta_batch: gl.int32, beta_token: gl.int32, beta_head: gl.int32,
    K: gl.constexpr, GATE: gl.constexpr, SAFE: gl.constexpr, BETA: gl.constexpr, L2NORM: gl.constexpr,
):  # fmt: skip
    """One chunk, operands in shared memory, accumulators `[64, K]` with a warpgroup for 64 channels:

        arrive   g                     log decays as float16 high + low;  MMAs with matrices of 0, 1, -1: distances to the
                                       references, left = exp(distance), right = exp(-distance)
                 q, k, dA, dAqk        right_k = k right, left_q = q left, left_w = beta k left       3 x [64, K]
                                       dq = dAqk right_k                  L = dA right_k
                                       dk_right = dAqk^T left_q + dA^T left_w
                 dG of `wy`            dG += left_q dq + left_w L - right_k dk_right;  sums over later rows by an MMA: dg
                 dq, dk of `wy`        + diagonal pairs, norms: dq, dk;  beta, gate: dbeta, dg, partial sums for A_log, dt_bias

    With K = 64 dq and dk of `wy` are not copied: two CTAs share an SM."""
    # a warpgroup for 64 channels
    acc_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, K // 64], [16, 64, 16])  # version, warps, instruction
    dot_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc_l, k_width=2)
    rows_s: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], gl.bfloat16)
    half_s: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], gl.float16)
    wide_s: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], gl.float32)
    tile_s: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    g_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], g.dtype.element_ty)
    PREFETCH: gl.constexpr = K == 128
    tile, _n, _begin = chunk_tile(first_tile(), cu_seqlens, slots, N, T, HV)
    head, batch, start, count = tile.head, tile.batch, tile.start, tile.count
    if count <= 0:
        store_no_partials(partial_A_log, partial_dt_bias, wide(tile.chunk, HV) + head, K)
        return
    qk_head = head // group
    # in units of 8 elements
    q += token_offset(batch, start, qk_head, q_batch, q_token, q_head) * 8
    k += token_offset(batch, start, qk_head, k_batch, k_token, k_head) * 8
    g += token_offset(batch, start, head, g_batch, g_token, g_head) * 8
    beta += token_offset(batch, start, head, beta_batch, beta_token, beta_head)
    first_row = wide(batch, T) * HV + wide(start, HV) + head
    chunk = wide(tile.chunk, HV) + head
    key_stride = HV * K
    square_stride = HV * C

    g_s = gl.allocate_shared_memory(g.dtype.element_ty, [C, K], g_l)
    q_s = gl.allocate_shared_memory(gl.bfloat16, [C, K], rows_s)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [C, K], rows_s)
    right_k = gl.allocate_shared_memory(gl.bfloat16, [C, K], rows_s)
    left_q = gl.allocate_shared_memory(gl.bfloat16, [C, K], rows_s)
    left_w = gl.allocate_shared_memory(gl.bfloat16, [C, K], rows_s)
    decays_s = gl.allocate_shared_memory(gl.float16, [2, C, K], half_s)
    high_s = decays_s.index(0)
    low_s = decays_s.index(1)
    G_s = reinterpret(decays_s, gl.float32, [C, K], wide_s)
    near_A = gl.allocate_shared_memory(gl.bfloat16, [C, C], tile_s)
    far_A = gl.allocate_shared_memory(gl.bfloat16, [C, C], tile_s)
    near_Aqk = gl.allocate_shared_memory(gl.bfloat16, [C, C], tile_s)
    far_Aqk = gl.allocate_shared_memory(gl.bfloat16, [C, C], tile_s)
    by_row_s = gl.allocate_shared_memory(gl.float32, [6, C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    size_s = gl.allocate_shared_memory(gl.float32, [C, 2], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    matrices = (near_A, far_A, near_Aqk, far_Aqk)
    operands = (right_k, left_q, left_w, high_s, low_s)

    row = gl.arange(0, C, layout=gl.SliceLayout(1, acc_l))
    column = gl.arange(0, K, layout=gl.SliceLayout(0, acc_l))
    here = row < count
    valid = here[:, None]
    copy_rows(g_s, g, g_token * 8, count)
    async_copy.commit_group()
    # volatile, and a barrier: else the compiler moves these loads behind all copies, where they queue
    rate = decay_rate(A_log, head, volatile=True)
    bias = decay_bias(dt_bias, head, rate, column, K, GATE, volatile=True)
    raw = gl.load(beta + row * beta_token, mask=here, other=0.0, volatile=True).to(gl.float32)
    same = gl.load(grad_Aqk + first_row * C + row * (square_stride + 1), mask=here, other=0.0, volatile=True)
    from_w = gl.load(grad_beta + first_row + row * HV, mask=here, other=0.0, volatile=True)
    size_l: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [gl.num_warps(), 1], [1, 0])
    size_row, half = row_column(C, 2, size_l)
    in_sizes = (first_row + size_row * HV) * 2 + half
    size = gl.load(size_k + in_sizes, mask=size_row < count, other=0.0, volatile=True)
    barrier()
    copy_rows(q_s, q, q_token * 8, count)
    copy_rows(k_s, k, k_token * 8, count)
    copy_rows(near_A, grad_A + first_row * C, square_stride, count)
    copy_rows(near_Aqk, grad_Aqk + first_row * C, square_stride, count)
    async_copy.commit_group()
    if PREFETCH:
        grad_q_s = gl.allocate_shared_memory(gl.bfloat16, [C, K], rows_s)
        grad_k_s = gl.allocate_shared_memory(gl.float16, [C, K], half_s)
        copy_rows(grad_q_s, grad_q + first_row * K, key_stride, count)
        copy_rows(grad_k_s, grad_k + first_row * K, key_stride, count)
    async_copy.commit_group()
    betas = gl.where(here, beta_value(raw, BETA), 0.0)[:, None]
    # out of registers until they are needed
    by_row_s.index(0).store(raw)
    by_row_s.index(1).store(same.to(gl.float32) * scale)
    by_row_s.index(2).store(from_w.to(gl.float32))
    size_s.store(size)

    async_copy.wait_group(2)
    # as in `jumps`
    jump = gl.where(row % 32 == 8, 16.0, gl.where(row % 32 == 24, 28.0, 0.0))[:, None] if SAFE else None
    store_decays(high_s, low_s, g_s.load(acc_l).to(gl.float32), bias, rate, lower_bound, valid, GATE, SAFE, jump)
    async_copy.wait_group(1)
    norm_k = norm_factors(k_s.load(acc_l).to(gl.float32), L2NORM)
    norm_q = norm_factors(q_s.load(acc_l).to(gl.float32), L2NORM)
    by_row_s.index(3).store(gl.sum(norm_k, axis=1))
    by_row_s.index(4).store(gl.sum(norm_q, axis=1))
    by_row_s.index(5).store(gl.sum(betas, axis=1))
    last_rows = (G_s, grad_G + first_row * K, key_stride, count)
    if SAFE:
        store_pairs_by_distance(near_A, far_A)
        store_pairs_by_distance(near_Aqk, far_Aqk)
        # `scale` on the right side, and on the left below
        rows = (norm_k, norm_q * scale, norm_k * betas)
        sums = bounded_pairs(k_s, q_s, rows, T, N, matrices, operands, last_rows, acc_l, dot_l, K)
    else:
        sums = all_pairs(k_s, q_s, by_row_s, scale, T, N, matrices, operands, last_rows, acc_l, dot_l, K)
    sum_q, sum_left, sum_right, G = sums
    async_copy.wait_group(0)
    G += G_s.load(acc_l)
    # in two parts, as the log decays were
    high_G = reinterpret(high_s, gl.bfloat16, [C, K], rows_s)
    low_G = reinterpret(low_s, gl.bfloat16, [C, K], rows_s)
    high = G.to(gl.bfloat16)
    high_G.store(high)
    low_G.store((G - high.to(gl.float32)).to(gl.bfloat16))
    fence_async_shared()

    same = by_row_s.index(1).load(row.type.layout)[:, None]
    norm_k = by_row_s.index(3).load(row.type.layout)[:, None]
    norm_q = by_row_s.index(4).load(row.type.layout)[:, None]
    betas = by_row_s.index(5).load(row.type.layout)[:, None]
    kn = k_s.load(acc_l).to(gl.float32) * norm_k
    qn = q_s.load(acc_l).to(gl.float32) * norm_q
    sum_q *= scale
    dbeta = gl.sum(kn * sum_left, axis=1)
    sum_left *= betas
    sum_q += same * kn
    part = grad_q_s.load(acc_l) if PREFETCH else load_rows(grad_q + first_row * K, key_stride, count, acc_l, K)
    sum_q += part.to(gl.float32)
    if L2NORM:
        sum_q = (sum_q - qn * gl.sum(sum_q * qn, axis=1)[:, None]) * norm_q
    store_rows(out_q + first_row * K, key_stride, sum_q, count, right_k)
    sum_k = sum_left + sum_right + same * qn
    part = grad_k_s.load(acc_l) if PREFETCH else load_rows(grad_k + first_row * K, key_stride, count, acc_l, K)
    part = half_rows(part.to(gl.float32))
    part *= size_s.load(gl.SliceLayout(2, part.type.layout))[:, :, None]
    sum_k += gl.convert_layout(part.reshape([C, K]), acc_l, assert_trivial=True)
    if L2NORM:
        sum_k = (sum_k - kn * gl.sum(sum_k * kn, axis=1)[:, None]) * norm_k
    store_rows(out_k + first_row * K, key_stride, sum_k, count, left_q)
    raw = by_row_s.index(0).load(row.type.layout)
    from_w = by_row_s.index(2).load(row.type.layout)
    dbeta = beta_gradient(raw, dbeta + from_w, BETA)
    gl.store(out_beta + first_row + row * HV, dbeta.to(out_beta.dtype.element_ty), mask=here)

    # of a log decay: dG of all later rows, as their sums have it as a term
    i, s = opaque_indices(T, N, dot_l)
    later = gl.where(s >= i, 1.0, 0.0).to(gl.bfloat16)
    decay = weighted_sums(later, high_G, low_G, gl.zeros((C, K), gl.float32, layout=acc_l))
    decay, later = warpgroup_mma_wait(0, deps=[decay, later])
    x = g_s.load(acc_l).to(gl.float32)
    if dt_bias is not None:
        x += gl.load(dt_bias + head * K + column).to(gl.float32)[None, :]
    dg, of_A = gate_gradient(x, decay, rate, lower_bound, GATE)
    dg = gl.where(valid, dg, 0.0)
    store_rows(out_g + first_row * K, key_stride, dg, count, left_w)
    if partial_A_log is not None:
        gl.store(partial_A_log + chunk * K + column, gl.sum(gl.where(valid, of_A, 0.0), axis=0))
    if partial_dt_bias is not None:
        gl.store(partial_dt_bias + chunk * K + column, gl.sum(dg, axis=0))


def intra(call: StageCall, own: dict[str, Any]) -> Launch:
    problem = call.problem
    return launch_div8(intra_kernel, chunks(problem), problem, call.t, own, num_warps=4 * (problem.K // 64))
