"""Stage `intra` of the backward pass for Hopper: from the gradients of the matrices `A` and `Aqk` to those of the call's
inputs. One program of 8 warps per (chunk, value head), for bounded decays.

Contract: as `triton/backward.py`; `grad_A` and `grad_Aqk` lie by token, `[B, T, HV, 64]`. Pairs of tokens in one block of 32 rows are split at the block's middle, those of the two
blocks at the boundary between them (docs/backward.md): with `E` the sum of log decays up to the middle of a row's own block,

    left = exp(G - E)      right = exp(E - G)      between = exp(middle to boundary)

near pairs have the factor `left_i right_j`, far ones `left_i between_i between_j right_j`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ..triton import backward, common
from .arithmetic import exp2, exp2_negative, gate_gradient, wide, write_strength
from .compat import reinterpret
from .rows import (
    WARPS,
    C,
    decay_bias,
    fetch_rows,
    inverse_norms,
    load_rows,
    own_chunk,
    store_decays,
    store_rows,
    weighted_sums,
)

decay_rate = gluon.jit(common.decay_rate.fn)
strength_gradient = gluon.jit(backward.strength_gradient.fn)

_STRIDES = [f"{x}_{dim}" for x in ("q", "k", "g", "beta") for dim in ("batch", "token", "head")]
SCALARS = ("scale", "lower_bound", "T", "N", "HV", "group", "slots", *_STRIDES)
"""Arguments whose values leave the machine code as it is."""


@gluon.jit
def part_pairs(near_s, far_s):
    """From a matrix in `near_s` two left operands: pairs i > j of one block of 32 rows, and of the two blocks."""
    copy_l: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    i = gl.arange(0, C, layout=gl.SliceLayout(1, copy_l))[:, None]
    j = gl.arange(0, C, layout=gl.SliceLayout(0, copy_l))[None, :]
    x = near_s.load(copy_l)
    near = (i // 32 == j // 32) & (i > j)
    far = (i >= 32) & (j < 32)
    near_s.store(gl.where(near, x, 0.0).to(gl.bfloat16))
    far_s.store(gl.where(far, x, 0.0).to(gl.bfloat16))


@gluon.jit(do_not_specialize=SCALARS)
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
    scale: gl.float32,
    lower_bound: gl.float32,
    T: gl.int32,
    N: gl.int32,
    HV: gl.int32,
    group: gl.int32,
    slots: gl.int32,
    q_batch: gl.int32,
    q_token: gl.int32,
    q_head: gl.int32,
    k_batch: gl.int32,
    k_token: gl.int32,
    k_head: gl.int32,
    g_batch: gl.int32,
    g_token: gl.int32,
    g_head: gl.int32,
    beta_batch: gl.int32,
    beta_token: gl.int32,
    beta_head: gl.int32,
    K: gl.constexpr,
    GATE: gl.constexpr,
    BETA: gl.constexpr,
    L2NORM: gl.constexpr,
    PREFETCH: gl.constexpr,
):
    """`PREFETCH`: whether what `wy` left of queries and keys fits in shared memory, too."""
    acc_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, K // 2, 16])
    dot_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc_l, k_width=2)
    rows_s: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], gl.bfloat16)
    half_s: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], gl.float16)
    tile_s: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    wide_s: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], gl.float32)
    g_l: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], g.dtype.element_ty)
    head = gl.program_id(0) % HV
    slot = gl.program_id(0) // HV
    _, _, batch, start, count = own_chunk(cu_seqlens, slot, slots, N, T)
    if count <= 0:
        return
    qk_head = head // group
    # in units of 8 elements, which tells the compiler that 16-byte copies are aligned
    q += (wide(batch, q_batch) + wide(start, q_token) + wide(qk_head, q_head)) * 8
    k += (wide(batch, k_batch) + wide(start, k_token) + wide(qk_head, k_head)) * 8
    g += (wide(batch, g_batch) + wide(start, g_token) + wide(head, g_head)) * 8
    beta += wide(batch, beta_batch) + wide(start, beta_token) + wide(head, beta_head)
    own = wide(batch, T) * HV + wide(start, HV) + head
    chunk = wide(slot, HV) + head
    of_key = HV * K
    of_square = HV * C

    g_s = gl.allocate_shared_memory(g.dtype.element_ty, [C, K], g_l)
    q_s = gl.allocate_shared_memory(gl.bfloat16, [C, K], rows_s)
    k_s = gl.allocate_shared_memory(gl.bfloat16, [C, K], rows_s)
    # right operands of near and far pairs; sums of log decays before, results after
    right_k = gl.allocate_shared_memory(gl.bfloat16, [C, K], rows_s)
    left_q = gl.allocate_shared_memory(gl.bfloat16, [C, K], rows_s)
    left_w = gl.allocate_shared_memory(gl.bfloat16, [C, K], rows_s)
    # keys of the first block and queries of the second: the matrices are zero where they meet the others
    far_kq = gl.allocate_shared_memory(gl.bfloat16, [C, K], rows_s)
    far_w = gl.allocate_shared_memory(gl.bfloat16, [C, K], rows_s)
    near_A = gl.allocate_shared_memory(gl.bfloat16, [C, C], tile_s)
    far_A = gl.allocate_shared_memory(gl.bfloat16, [C, C], tile_s)
    near_Aqk = gl.allocate_shared_memory(gl.bfloat16, [C, C], tile_s)
    far_Aqk = gl.allocate_shared_memory(gl.bfloat16, [C, C], tile_s)

    fetch_rows(g_s, g, g_token * 8, count)
    async_copy.commit_group()
    fetch_rows(q_s, q, q_token * 8, count)
    fetch_rows(k_s, k, k_token * 8, count)
    fetch_rows(near_A, grad_A + own * C, of_square, count)
    fetch_rows(near_Aqk, grad_Aqk + own * C, of_square, count)
    async_copy.commit_group()
    if PREFETCH:
        grad_q_s = gl.allocate_shared_memory(gl.float32, [C, K], wide_s)
        grad_k_s = gl.allocate_shared_memory(gl.float32, [C, K], wide_s)
        fetch_rows(grad_q_s, grad_q + own * K, of_key, count)
        fetch_rows(grad_k_s, grad_k + own * K, of_key, count)
    async_copy.commit_group()

    row = gl.arange(0, C, layout=gl.SliceLayout(1, acc_l))
    column = gl.arange(0, K, layout=gl.SliceLayout(0, acc_l))
    valid = (row < count)[:, None]
    rate = decay_rate(A_log, head)
    bias = decay_bias(dt_bias, head, rate, column, K, GATE)
    raw = gl.load(beta + row * beta_token, mask=row < count, other=0.0).to(gl.float32)
    strength = gl.where(row < count, write_strength(raw, BETA), 0.0)[:, None]
    same = gl.load(grad_Aqk + own * C + row * (of_square + 1), mask=row < count, other=0.0).to(gl.float32)[:, None] * scale

    async_copy.wait_group(2)
    high_s = reinterpret(right_k, gl.float16, [C, K], half_s)
    low_s = reinterpret(left_q, gl.float16, [C, K], half_s)
    store_decays(high_s, low_s, g_s.load(acc_l).to(gl.float32), bias, rate, lower_bound, valid, GATE, True)
    i = gl.arange(0, C, layout=gl.SliceLayout(1, dot_l))[:, None]
    s = gl.arange(0, C, layout=gl.SliceLayout(0, dot_l))[None, :]
    zero = gl.zeros((C, K), gl.float32, layout=acc_l)
    after = (s % 32 >= 16) & (s <= i) & (i % 32 >= 16)
    before = (s % 32 < 16) & (s > i) & (i % 32 < 16)
    signed = gl.where(i // 32 == s // 32, gl.where(after, 1.0, gl.where(before, -1.0, 0.0)), 0.0).to(gl.float16)
    distance = weighted_sums(signed, high_s, low_s, zero)
    # from the middle of the first block to the boundary, from there to the middle of the second
    first = (i < 32) & (s >= 16) & (s < 32)
    second = (i >= 32) & (s >= 32) & (s < 48)
    ones = gl.where(first | second, 1.0, 0.0).to(gl.float16)
    between = weighted_sums(ones, high_s, low_s, zero)
    distance, between, _, _ = warpgroup_mma_wait(0, deps=[distance, between, signed, ones])
    between = exp2(between)

    async_copy.wait_group(1)
    part_pairs(near_A, far_A)
    part_pairs(near_Aqk, far_Aqk)
    kn = k_s.load(acc_l).to(gl.float32)
    norm_k = inverse_norms(kn, L2NORM)
    kn *= norm_k
    qn = q_s.load(acc_l).to(gl.float32)
    norm_q = inverse_norms(qn, L2NORM)
    qn *= norm_q
    left = exp2(distance)
    x = kn * exp2_negative(distance)
    right_k.store(x.to(gl.bfloat16))
    y = qn * (left * scale)
    left_q.store(y.to(gl.bfloat16))
    far_kq.store((gl.where((row < 32)[:, None], x, y) * between).to(gl.bfloat16))
    x = kn * strength * left
    left_w.store(x.to(gl.bfloat16))
    far_w.store((x * between).to(gl.bfloat16))
    fence_async_shared()

    sum_q = warpgroup_mma(far_Aqk, far_kq, zero, use_acc=False, is_async=True)
    sum_left = warpgroup_mma(far_A, far_kq, zero, use_acc=False, is_async=True)
    sum_right = warpgroup_mma(far_Aqk.permute((1, 0)), far_kq, zero, use_acc=False, is_async=True)
    sum_right = warpgroup_mma(far_A.permute((1, 0)), far_w, sum_right, is_async=True)
    sum_q, sum_left, sum_right = warpgroup_mma_wait(0, deps=[sum_q, sum_left, sum_right])
    sum_q = warpgroup_mma(near_Aqk, right_k, sum_q * between, is_async=True)
    sum_left = warpgroup_mma(near_A, right_k, sum_left * between, is_async=True)
    sum_right = warpgroup_mma(near_Aqk.permute((1, 0)), left_q, sum_right * between, is_async=True)
    sum_right = warpgroup_mma(near_A.permute((1, 0)), left_w, sum_right, is_async=True)
    G = load_rows(grad_G + own * K, of_key, count, acc_l, K)
    sum_q, sum_left, sum_right = warpgroup_mma_wait(0, deps=[sum_q, sum_left, sum_right])

    left = exp2(distance)
    kn = k_s.load(acc_l).to(gl.float32) * norm_k
    qn = q_s.load(acc_l).to(gl.float32) * norm_q
    sum_q *= left * scale
    sum_left *= left
    sum_right *= exp2_negative(distance)
    of_beta = gl.sum(kn * sum_left, axis=1)
    sum_left *= strength
    G += qn * sum_q + kn * (sum_left - sum_right)
    # of a log decay: all sums that it is a term of
    high = G.to(gl.bfloat16)
    far_kq.store(high)
    far_w.store((G - high.to(gl.float32)).to(gl.bfloat16))
    fence_async_shared()
    async_copy.wait_group(0)
    sum_q += same * kn
    if PREFETCH:
        sum_q += grad_q_s.load(acc_l)
    else:
        sum_q += load_rows(grad_q + own * K, of_key, count, acc_l, K)
    if L2NORM:
        sum_q = (sum_q - qn * gl.sum(sum_q * qn, axis=1)[:, None]) * norm_q
    store_rows(out_q + own * K, of_key, sum_q, count, right_k)
    later = gl.where(s >= i, 1.0, 0.0).to(gl.bfloat16)
    decay = weighted_sums(later, far_kq, far_w, zero)
    sum_k = sum_left + sum_right + same * qn
    if PREFETCH:
        sum_k += grad_k_s.load(acc_l)
    else:
        sum_k += load_rows(grad_k + own * K, of_key, count, acc_l, K)
    if L2NORM:
        sum_k = (sum_k - kn * gl.sum(sum_k * kn, axis=1)[:, None]) * norm_k
    store_rows(out_k + own * K, of_key, sum_k, count, left_q)
    of_beta += gl.load(grad_beta + own + row * HV, mask=row < count, other=0.0)
    of_beta = strength_gradient(raw, of_beta, BETA)
    gl.store(out_beta + own + row * HV, of_beta.to(out_beta.dtype.element_ty), mask=row < count)

    # with its operands: nothing else may take their place before
    decay, _, _, _ = warpgroup_mma_wait(0, deps=[decay, later, far_kq, far_w])
    x = g_s.load(acc_l).to(gl.float32)
    if dt_bias is not None:
        x += gl.load(dt_bias + head * K + column).to(gl.float32)[None, :]
    found, of_A = gate_gradient(x, decay, rate, lower_bound, GATE)
    found = gl.where(valid, found, 0.0)
    store_rows(out_g + own * K, of_key, found, count, left_w)
    if part_A_log is not None:
        gl.store(part_A_log + chunk * K + column, gl.sum(gl.where(valid, of_A, 0.0), axis=0))
    if part_dt_bias is not None:
        gl.store(part_dt_bias + chunk * K + column, gl.sum(found, axis=0))
