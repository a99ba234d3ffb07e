"""Stage `intra` of the backward pass for Hopper: from the gradients of the matrices `A` and `Aqk` to those of the call's
inputs. One CTA per (chunk, value head).

Contract: as `triton/intra.py`; `grad_A` and `grad_Aqk` lie by token, `[B, T, HV, 64]`, and parts of dq and dk come in 16 bits
(`wy.py`).

Pairs i > j of tokens are split at a place between them, with `E` the sum of log decays up to there (docs/backward.md):

    left_i = exp(G_i - E)      right_j = exp(E - G_j)

For bounded decays that is the middle of the row's block of 32; for pairs of the two blocks what decays from the one middle to
the other, a factor of the channel alone, is multiplied with the sums. For other decays it is the boundary between the halves of
the blocks of 2, 4, .. 64 rows, where no factor is more than 1.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language import condition

from ...problem.problem import ChunkProblem, ChunkTensors
from ...program.launch import Launch, sm_count
from ..shared.gates import beta_gradient, decay_rate
from ..shared.gluon.compat import barrier, reinterpret
from ..shared.gluon.math import (
    beta_value,
    exp2,
    exp2_negative,
    gate_bias,
    gate_gradient,
    reciprocal,
    token_offset,
    wide,
)
from ..shared.norms import L2_EPS
from ..shared.scalars import SCALARS_AND_STRIDES
from ..stages.finish import ByHead
from ..stages.launch import bind_div8, chunks
from ..stages.wy import Parts
from .device.layouts import C, copy_rows, half_rows, load_rows, row_column, store_rows
from .device.tile_scheduler import ChunkTile, chunk_tile, dense_chunk_tile, first_tile, next_tile
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
def store_pairs_by_distance(near_s, far_s):
    """From a matrix in `near_s` two left operands: pairs i > j of one block of 32 rows, and of the two blocks."""
    copy_l: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    i, j = row_column(C, C, copy_l)
    x = near_s.load(copy_l)
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
    """From log decays in `high_s + low_s`: the gradients of `q_i` and `k_i` (for beta 1) as left operands, of `k_j` as a right
    one, and of G. `rows`: factors of a key's row on the right, of a query's and of a key's on the left. `last_rows`: see
    `replace_decays`."""
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
    k_s, q_s, factors_s, scale, T, N, matrices, operands, last_rows, acc_l: gl.constexpr, dot_l: gl.constexpr, K,
):  # fmt: skip
    """Forms the gradients of `bounded_pairs`, exact for any decay. `near_A` and `near_Aqk` hold the whole matrices, and
    `factors_s` the rows' factors."""
    row_l: gl.constexpr = gl.SliceLayout(1, acc_l)
    A_s, level_A, Aqk_s, level_Aqk = matrices
    right_k, left_q, left_w, high_s, low_s = operands
    norm_k_s, norm_q_s, betas_s = factors_s
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
        of_right = norm_k_s.load(row_l)[:, None]
        of_q = norm_q_s.load(row_l)[:, None] * scale
        of_w = of_right * betas_s.load(row_l)[:, None]
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


@gluon.jit
def add_both(a, b, c, d):
    return a + c, b + d


@gluon.jit
def sum_both(x, y, axis: gl.constexpr):
    """Sums of both along an axis; warps exchange theirs at once."""
    return gl.reduce((x, y), axis, add_both)


@gluon.jit
def floats(count: gl.constexpr):
    return gl.allocate_shared_memory(gl.float32, [count], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def offset(tile, head, of, nothing):
    return token_offset(tile.batch, tile.start, head, of[0] + nothing, of[1] + nothing, of[2] + nothing)


@gluon.jit
def start_copies(tile, inputs, strides, parts, places, T, HV, group, K):
    """Starts the copies of a tile's operands, in the order of need. Returns its first row, and what is loaded to registers."""
    q, k, g, beta, A_log, dt_bias = inputs
    of_q, of_k, of_g, of_beta = strides
    grad_A, grad_Aqk, grad_q, grad_k, grad_beta, size_k = parts
    g_s, q_s, k_s, near_A, near_Aqk, grad_q_s, grad_k_s = places
    # 0, which the compiler can't see: offsets with it are not kept over the loop
    nothing = gl.minimum(tile.count, 0)
    HV += nothing
    first_row = wide(tile.batch, T + nothing) * HV + wide(tile.start, HV) + tile.head
    # in units of 8 elements
    g += offset(tile, tile.head, of_g, nothing) * 8
    q += offset(tile, tile.head // group, of_q, nothing) * 8
    k += offset(tile, tile.head // group, of_k, nothing) * 8
    beta += offset(tile, tile.head, of_beta, nothing)
    copy_rows(g_s, g, (of_g[1] + nothing) * 8, tile.count)
    async_copy.commit_group()
    # volatile, and a barrier: else the compiler moves these loads behind all copies, where they queue
    line_l: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    row = gl.arange(0, C, layout=line_l) + nothing
    here = row < tile.count
    raw = gl.load(beta + row * (of_beta[1] + nothing), mask=here, other=0.0, volatile=True)
    same = gl.load(grad_Aqk + first_row * C + row * (HV * C + 1), mask=here, other=0.0, volatile=True)
    from_w = gl.load(grad_beta + first_row + row * HV, mask=here, other=0.0, volatile=True)
    size_l: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [gl.num_warps(), 1], [1, 0])
    size_row, half = row_column(C, 2, size_l)
    size_row += nothing
    in_sizes = (first_row + size_row * HV) * 2 + half
    size = gl.load(size_k + in_sizes, mask=size_row < tile.count, other=0.0, volatile=True)
    bias = gl.zeros([K], gl.float32, layout=line_l)
    if dt_bias is not None:
        bias += gl.load(dt_bias + tile.head * K + gl.arange(0, K, layout=line_l), volatile=True).to(gl.float32)
    rate = decay_rate(A_log, tile.head, volatile=True)
    barrier()
    copy_rows(q_s, q, (of_q[1] + nothing) * 8, tile.count)
    copy_rows(k_s, k, (of_k[1] + nothing) * 8, tile.count)
    copy_rows(near_A, grad_A + first_row * C, HV * C, tile.count)
    copy_rows(near_Aqk, grad_Aqk + first_row * C, HV * C, tile.count)
    async_copy.commit_group()
    if grad_q_s is not None:
        copy_rows(grad_q_s, grad_q + first_row * K, HV * K, tile.count)
        copy_rows(grad_k_s, grad_k + first_row * K, HV * K, tile.count)
    async_copy.commit_group()
    return first_row, (raw, same, from_w, size, bias, rate)


@gluon.jit(do_not_specialize=SCALARS_AND_STRIDES)
def intra_kernel(
    q, k, g, beta, A_log, dt_bias, cu_seqlens, grad_A, grad_Aqk, grad_q, grad_k, grad_G, grad_beta, size_k, out_q, out_k,
    out_g, out_beta, partial_A_log, partial_dt_bias, scale: gl.float32, lower_bound: gl.float32, T: gl.int32,
    N: gl.int32, HV: gl.int32, group: gl.int32, slots: gl.int32, tile_count: gl.int32,
    q_batch: gl.int32, q_token: gl.int32, q_head: gl.int32, k_batch: gl.int32, k_token: gl.int32, k_head: gl.int32,
    g_batch: gl.int32, g_token: gl.int32, g_head: gl.int32,
    beta_batch: gl.int32, beta_token: gl.int32, beta_head: gl.int32,
    K: gl.constexpr, GATE: gl.constexpr, SAFE: gl.constexpr, BETA: gl.constexpr, L2NORM: gl.constexpr,
    PERSISTENT: gl.constexpr,
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
    index = first_tile()
    tile, _n, _begin = chunk_tile(index, cu_seqlens, slots, N, T, HV)
    if tile.count <= 0:
        store_no_partials(partial_A_log, partial_dt_bias, wide(tile.chunk, HV) + tile.head, K)
        return
    key_stride = HV * K

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
    # each a place of its own: else the compiler has all threads meet between stores
    raw_s = floats(C)
    same_s = floats(C)
    from_w_s = floats(C)
    norm_k_s = floats(C)
    norm_q_s = floats(C)
    betas_s = floats(C)
    bias_s = floats(K)
    size_s = gl.allocate_shared_memory(gl.float32, [C, 2], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    grad_q_s = gl.allocate_shared_memory(gl.bfloat16, [C, K], rows_s) if PREFETCH else None
    grad_k_s = gl.allocate_shared_memory(gl.float16, [C, K], half_s) if PREFETCH else None
    matrices = (near_A, far_A, near_Aqk, far_Aqk)
    operands = (right_k, left_q, left_w, high_s, low_s)
    factors_s = (norm_k_s, norm_q_s, betas_s)

    row = gl.arange(0, C, layout=gl.SliceLayout(1, acc_l))
    column = gl.arange(0, K, layout=gl.SliceLayout(0, acc_l))
    inputs = (q, k, g, beta, A_log, dt_bias)
    of_q = (q_batch, q_token, q_head)
    of_k = (k_batch, k_token, k_head)
    strides = (of_q, of_k, (g_batch, g_token, g_head), (beta_batch, beta_token, beta_head))
    parts = (grad_A, grad_Aqk, grad_q, grad_k, grad_beta, size_k)
    places = (g_s, q_s, k_s, near_A, near_Aqk, grad_q_s, grad_k_s)
    first_row, loaded = start_copies(tile, inputs, strides, parts, places, T, HV, group, K)

    # loop-invariant values are not hoisted: they would spill
    while condition(index < tile_count, disable_licm=True):
        # out of registers until they are needed
        raw, same, from_w, size, bias, rate = loaded
        raw_s.store(raw.to(gl.float32))
        same_s.store(same.to(gl.float32) * scale)
        from_w_s.store(from_w.to(gl.float32))
        size_s.store(size)
        bias_s.store(bias)
        here = row < tile.count
        valid = here[:, None]
        async_copy.wait_group(2)
        bias = gate_bias(bias_s.load(column.type.layout), rate, GATE)[None, :]
        store_decays(high_s, low_s, g_s.load(acc_l).to(gl.float32), bias, rate, lower_bound, valid, GATE, SAFE)
        async_copy.wait_group(1)
        betas = gl.where(here, beta_value(raw_s.load(row.type.layout), BETA), 0.0)[:, None]
        norm_k = gl.full((C, 1), 1.0, gl.float32, layout=acc_l)
        norm_q = norm_k
        if L2NORM:
            kn = k_s.load(acc_l).to(gl.float32)
            qn = q_s.load(acc_l).to(gl.float32)
            norm_k, norm_q = sum_both(kn * kn, qn * qn, 1)
            norm_k = gl.rsqrt(norm_k + L2_EPS)[:, None]
            norm_q = gl.rsqrt(norm_q + L2_EPS)[:, None]
        norm_k_s.store(gl.sum(norm_k, axis=1))
        norm_q_s.store(gl.sum(norm_q, axis=1))
        betas_s.store(gl.sum(betas, axis=1))
        last_rows = (G_s, grad_G + first_row * K, key_stride, tile.count)
        if SAFE:
            store_pairs_by_distance(near_A, far_A)
            store_pairs_by_distance(near_Aqk, far_Aqk)
            # `scale` on the right side, and on the left below
            rows = (norm_k, norm_q * scale, norm_k * betas)
            found = bounded_pairs(k_s, q_s, rows, tile.count, index, matrices, operands, last_rows, acc_l, dot_l, K)
        else:
            found = all_pairs(
                k_s, q_s, factors_s, scale, tile.count, index, matrices, operands, last_rows, acc_l, dot_l, K
            )
        sum_q, sum_left, sum_right, G = found
        async_copy.wait_group(0)
        G += G_s.load(acc_l)
        # in two parts, as the log decays were
        high_G = reinterpret(high_s, gl.bfloat16, [C, K], rows_s)
        low_G = reinterpret(low_s, gl.bfloat16, [C, K], rows_s)
        high = G.to(gl.bfloat16)
        high_G.store(high)
        low_G.store((G - high.to(gl.float32)).to(gl.bfloat16))
        fence_async_shared()

        same = same_s.load(row.type.layout)[:, None]
        norm_k = norm_k_s.load(row.type.layout)[:, None]
        norm_q = norm_q_s.load(row.type.layout)[:, None]
        betas = betas_s.load(row.type.layout)[:, None]
        kn = k_s.load(acc_l).to(gl.float32) * norm_k
        qn = q_s.load(acc_l).to(gl.float32) * norm_q
        sum_q *= scale
        products = kn * sum_left
        sum_left *= betas
        sum_q += same * kn
        part = grad_q_s.load(acc_l) if PREFETCH else load_rows(grad_q + first_row * K, key_stride, tile.count, acc_l, K)
        sum_q += part.to(gl.float32)
        if L2NORM:
            dbeta, along = sum_both(products, sum_q * qn, 1)
            sum_q = (sum_q - qn * along[:, None]) * norm_q
        else:
            dbeta = gl.sum(products, axis=1)
        store_rows(out_q + first_row * K, key_stride, sum_q, tile.count, right_k)
        sum_k = sum_left + sum_right + same * qn
        part = grad_k_s.load(acc_l) if PREFETCH else load_rows(grad_k + first_row * K, key_stride, tile.count, acc_l, K)
        part = half_rows(part.to(gl.float32))
        part *= size_s.load(gl.SliceLayout(2, part.type.layout))[:, :, None]
        sum_k += gl.convert_layout(part.reshape([C, K]), acc_l, assert_trivial=True)
        if L2NORM:
            sum_k = (sum_k - kn * gl.sum(sum_k * kn, axis=1)[:, None]) * norm_k
        store_rows(out_k + first_row * K, key_stride, sum_k, tile.count, left_q)
        raw = raw_s.load(row.type.layout)
        from_w = from_w_s.load(row.type.layout)
        dbeta = beta_gradient(raw, dbeta + from_w, BETA)
        gl.store(out_beta + first_row + row * HV, dbeta.to(out_beta.dtype.element_ty), mask=here)

        x = g_s.load(acc_l)
        done, count, done_row = index, tile.count, first_row
        index = next_tile(index)
        if PERSISTENT:
            tile = dense_chunk_tile(index, slots, T, HV)
            # no rows past the last tile
            tile = ChunkTile(tile.head, tile.chunk, tile.batch, tile.start, gl.where(index < tile_count, tile.count, 0))
            barrier()
            first_row, loaded = start_copies(tile, inputs, strides, parts, places, T, HV, group, K)

        # of a log decay: dG of all later rows, as their sums have it as a term
        i, s = opaque_indices(count, index, dot_l)
        later = gl.where(s >= i, 1.0, 0.0).to(gl.bfloat16)
        decay = weighted_sums(later, high_G, low_G, gl.zeros((C, K), gl.float32, layout=acc_l))
        decay, later = warpgroup_mma_wait(0, deps=[decay, later])
        x = x.to(gl.float32) + bias_s.load(column.type.layout)[None, :]
        dg, of_A = gate_gradient(x, decay, rate, lower_bound, GATE)
        dg = gl.where(valid, dg, 0.0)
        store_rows(out_g + done_row * K, key_stride, dg, count, left_w)
        if partial_A_log is not None or partial_dt_bias is not None:
            of_A, of_bias = sum_both(gl.where(valid, of_A, 0.0), dg, 0)
        if partial_A_log is not None:
            gl.store(partial_A_log + done.to(gl.int64) * K + column, of_A)
        if partial_dt_bias is not None:
            gl.store(partial_dt_bias + done.to(gl.int64) * K + column, of_bias)


def intra(problem: ChunkProblem, t: ChunkTensors, arch: int, parts: Parts, heads: ByHead) -> Launch:
    tiles = chunks(problem)
    persistent = not problem.packed and problem.K == 128
    own = dict(**parts.arguments(), **heads.arguments(), tile_count=tiles, PERSISTENT=persistent)
    ctas = min(tiles, sm_count(t.device)) if persistent else tiles
    return Launch(intra_kernel, ctas, *bind_div8(intra_kernel, problem, t, own), 4 * (problem.K // 64))
