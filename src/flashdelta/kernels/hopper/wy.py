"""Stage `wy` of the backward pass for Hopper: from states and their gradients to those of values, of what `prepare` left, and
of its matrices. One CTA of 8 warps per (chunk, value head), or a persistent one per SM.

Contract: as `triton/wy.py`; matrices `M = (I + A)^-1`, `grad_A` and `grad_Aqk` lie by token, `[B, T, HV, 64]`, and states
chunk by chunk without gaps. With `T = M diag(beta)` nothing needs T itself: `T^T x = beta (M^T x)`. A training step's parts of
dq are bfloat16, those of dk float16, each half of a row divided by its largest element, `size_k [B, T, HV, 2]`.

All operands of a chunk are in shared memory at once; they arrive in the order in which they are needed, and results take
their places. A persistent CTA loads each operand of its next tile as soon as the place is no longer needed, and stores large
results through the places that are needed last: otherwise all CTAs would wait for memory at the same time.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import condition

from ...problem.problem import ChunkProblem, ChunkTensors, WyProblem, WyTensors
from ...program.launch import Launch, sm_count
from ...program.plan import Outputs
from ..shared.gates import LOG2E, decay_rate
from ..shared.gluon.compat import barrier, reinterpret
from ..shared.gluon.math import beta_value, decay_bias, exp2, norm_factors, reciprocal, token_offset, wide
from ..shared.scalars import SCALARS_AND_STRIDES
from ..stages.launch import AXES, StageCall, chunks, launch_div8, stride_div8
from ..stages.wy import wy_operands, wy_results
from .device.layouts import C, copy_rows, half_rows, row_column, row_partials, store_rows
from .device.pipeline import make_channel, next_phase
from .device.tile_scheduler import ChunkTile, chunk_tile, dense_chunk_tile, first_tile, next_tile, rows_before
from .device.tma import load_tiles, tma_store, wait_tiles
from .device.wgmma import opaque_indices, store_decays, weighted_sums
from .launch import TILE, describe


@gluon.jit
def by_rows(shared, V_FIRST):
    """A state as `[V, K]`."""
    if V_FIRST:
        return shared
    else:
        return shared.permute((1, 0))


@gluon.jit
def inner_product(h_s, grad_h_s, V_FIRST):
    """`sum_v S dS` of each key channel."""
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [gl.num_warps(), 1], [1, 0])
    product = h_s.load(layout).to(gl.float32) * grad_h_s.load(layout).to(gl.float32)
    return gl.sum(product, axis=0 if V_FIRST else 1)


@gluon.jit
def operand(dtype: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
    return gl.allocate_shared_memory(dtype, [rows, columns], layout)


@gluon.jit(do_not_specialize=SCALARS_AND_STRIDES)
def wy_kernel(
    q, k, g, v, beta, A_log, dt_bias, cu_seqlens, Akk_inv, h, v_new, grad_o, grad_v_new, grad_h, g_d, grad_q,
    grad_k, grad_G, grad_v, grad_beta, grad_A, grad_Aqk, size_k, scale: gl.float32, lower_bound: gl.float32,
    T: gl.int32, N: gl.int32, HV: gl.int32, group: gl.int32, slots: gl.int32,
    rows: gl.int32, tile_count: gl.int32, q_batch: gl.int32, q_token: gl.int32, q_head: gl.int32,
    k_batch: gl.int32, k_token: gl.int32, k_head: gl.int32, g_batch: gl.int32, g_token: gl.int32, g_head: gl.int32,
    v_batch: gl.int32, v_token: gl.int32, v_head: gl.int32, o_batch: gl.int32, o_token: gl.int32, o_head: gl.int32,
    beta_batch: gl.int32, beta_token: gl.int32, beta_head: gl.int32,
    K: gl.constexpr, V: gl.constexpr, GATE: gl.constexpr, SAFE: gl.constexpr, BETA: gl.constexpr,
    L2NORM: gl.constexpr, V_FIRST: gl.constexpr, PERSISTENT: gl.constexpr,
):  # fmt: skip
    """One chunk; operands of the MMAs in shared memory, accumulators `[64, ..]` over two warpgroups, each with half of the
    channels. dx is the gradient of x (docs/backward.md); * goes to memory:

        arrive   M, v, dv'     dv = M^T dv'   [64, V]        dM = dv' v^T              [64, 64]
                 g             exp G, from sums of log decays or from G itself; of a step also G_C - G, to shared memory
                                                             * dv = beta dv, dbeta = <dv, v>
                 k, q, S       dw = -dv' S^T  [64, K]
                               dkG = M^T dw   [64, K]        dM += dw (k exp G)^T
                               dA = -M^T (dM diag(beta)) M^T                           * dA, dbeta
                 do, v', dS'   dqg = do S^T,  dkg = v' dS'^T [64, K]                   * dAqk = do v'^T
                                                             * dq, dk, dG

    A persistent CTA loads the next tile's M, v, dv' and a bf16 g when dA is done, S after the last MMA, k, q and other g when
    dG is known, and do, v', dS' during the next tile's first MMAs, as dq, dk and dG leave through their places.

    `GATE` may be "cumulative" or "cumulative_log2": `g` holds the sums of log decays. `rows`: chunks that `h` and `grad_h`
    have; a packed sequence's chunk past them is left out. `PERSISTENT`: for fixed lengths; tensor descriptors stand for
    q, k, v, `Akk_inv`, `h`, `v_new`, `grad_o`, `grad_v_new`, `grad_h`, `grad_q`, `grad_k` and `grad_G`, and `g_d` is that of g.
    """
    SUMMED: gl.constexpr = GATE == "cumulative" or GATE == "cumulative_log2"
    key_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, K // 2, 16])  # version, warps, instruction
    value_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, V // 2, 16])
    square_l: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16])
    dot_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=key_l, k_width=2)
    # sums over the columns that a thread has
    partials_l: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [8, 0, 0]],
        lane_bases=[[0, 0, 2], [0, 0, 4], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0], [0, 1, 0]],
        block_bases=[],
        shape=[C, 2, 8],
    )
    key_s: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], gl.bfloat16)
    value_s: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, V], gl.bfloat16)
    half_s: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], gl.float16)
    tile_s: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    gl.static_assert(not PERSISTENT or (cu_seqlens is None and K == V))
    index = first_tile()
    if PERSISTENT:
        tile = dense_chunk_tile(index, slots, T, HV)
    else:
        tile, n, begin = chunk_tile(index, cu_seqlens, slots, N, T, HV)
        if tile.count <= 0:
            return
        if cu_seqlens is not None:
            chunk = rows_before(cu_seqlens, n, T, C) + (tile.start - begin) // C
            if chunk >= rows:
                return
            tile = ChunkTile(tile.head, chunk, tile.batch, tile.start, tile.count)  # type: ignore[call-arg]

    h_rows: gl.constexpr = V if V_FIRST else K
    h_columns: gl.constexpr = K if V_FIRST else V
    sums_s = operand(gl.float32, C, K)
    grad_w_s = operand(gl.bfloat16, C, K)
    # a place that is free again halfway
    HALFWAY: gl.constexpr = g.dtype.element_ty == gl.bfloat16
    g_s = grad_w_s if HALFWAY else sums_s
    q_s = operand(gl.bfloat16, C, K)
    k_s = operand(gl.bfloat16, C, K)
    v_s = operand(gl.bfloat16, C, V)
    late_s = gl.allocate_shared_memory(gl.bfloat16, [2, C, V], value_s)
    grad_o_s = late_s.index(0)
    v_new_s = late_s.index(1)
    grad_v_new_s = operand(gl.bfloat16, C, V)
    M_s = operand(gl.bfloat16, C, C)
    h_s = operand(gl.bfloat16, h_rows, h_columns)
    grad_h_s = operand(gl.bfloat16, h_rows, h_columns)
    k_exp_g_s = operand(gl.bfloat16, C, K) if V < K else reinterpret(v_s, gl.bfloat16, [C, K], key_s)
    # each thread's own, out of registers while these are scarce
    dbeta_s = gl.allocate_shared_memory(gl.float32, [C, 2, 8], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))

    row = gl.arange(0, C, layout=gl.SliceLayout(1, key_l))
    column = gl.arange(0, K, layout=gl.SliceLayout(0, key_l))
    key_zero = gl.zeros((C, K), gl.float32, layout=key_l)
    value_zero = gl.zeros((C, V), gl.float32, layout=value_l)
    square_zero = gl.zeros((C, C), gl.float32, layout=square_l)
    key_stride = HV * K
    value_stride = HV * V
    square_stride = HV * C
    qk_head = tile.head // group
    first_row = wide(tile.batch, T) * HV + wide(tile.start, HV) + tile.head
    # in units of 8 elements
    g_row = g + token_offset(tile.batch, tile.start, tile.head, g_batch, g_token, g_head) * 8
    if PERSISTENT:
        matrix = (make_channel(Akk_inv, M_s),)
        values = (make_channel(v, v_s), make_channel(grad_v_new, grad_v_new_s))
        sums = (make_channel(g_d, g_s),)
        keys = (make_channel(k, k_s), make_channel(q, q_s))
        states = (make_channel(h, h_s),)
        outputs = (make_channel(grad_o, grad_o_s), make_channel(v_new, v_new_s))
        later_states = (make_channel(grad_h, grad_h_s),)
        fence_async_shared()
        load_tiles(matrix, tile.batch, tile.start, tile.head, True)
        load_tiles(values, tile.batch, tile.start, tile.head, True)
        load_tiles(sums, tile.batch, tile.start, tile.head, True)
        load_tiles(keys, tile.batch, tile.start, qk_head, True)
        load_tiles(states, tile.chunk, tile.head, 0, True)

    phase = 0
    # loop-invariant values are not hoisted: they would spill, and with all shared memory in use the L1 cache is small
    while condition(index < tile_count, disable_licm=True):
        valid = (row < tile.count)[:, None]
        # 0, which the compiler can't see: offsets with it are worked out where they are needed, not kept over the loop
        nothing = gl.minimum(tile.count, 0)
        if not PERSISTENT:
            q += token_offset(tile.batch, tile.start, qk_head, q_batch, q_token, q_head) * 8
            k += token_offset(tile.batch, tile.start, qk_head, k_batch, k_token, k_head) * 8
            v += token_offset(tile.batch, tile.start, tile.head, v_batch, v_token, v_head) * 8
            grad_o += token_offset(tile.batch, tile.start, tile.head, o_batch, o_token, o_head) * 8
            state = (wide(tile.chunk, HV) + tile.head) * (K * V)
            copy_rows(M_s, Akk_inv + first_row * C, square_stride, tile.count)
            async_copy.commit_group()
            copy_rows(v_s, v, v_token * 8, tile.count)
            copy_rows(grad_v_new_s, grad_v_new + first_row * V, value_stride, tile.count)
            async_copy.commit_group()
        # volatile: else the compiler moves these loads to where they are needed, or behind all copies, where they queue
        in_betas = token_offset(tile.batch, tile.start, tile.head, beta_batch, beta_token, beta_head) + row * beta_token
        raw = gl.load(beta + in_betas, mask=row < tile.count, other=0.0, volatile=True)
        if not SUMMED:
            rate = decay_rate(A_log, tile.head, volatile=True)
            bias = decay_bias(dt_bias, tile.head, rate, column, K, GATE, volatile=True)
        if not PERSISTENT:
            barrier()
            copy_rows(g_s, g_row, g_token * 8, tile.count)
            async_copy.commit_group()
            copy_rows(k_s, k, k_token * 8, tile.count)
            copy_rows(h_s, h + state, h_columns, h_rows)
            async_copy.commit_group()
            copy_rows(grad_o_s, grad_o, o_token * 8, tile.count)
            copy_rows(v_new_s, v_new + first_row * V, value_stride, tile.count)
            copy_rows(grad_h_s, grad_h + state, h_columns, h_rows)
            copy_rows(q_s, q, q_token * 8, tile.count)
            async_copy.commit_group()
        if PERSISTENT:
            wait_tiles(matrix, phase)
        elif SUMMED:
            async_copy.wait_group(4)
        if SUMMED:
            # the operator promises nothing of what is right of the diagonal
            copy_l: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
            M_row, M_column = row_column(C, C, copy_l)
            M_s.store(gl.where(M_row >= M_column, M_s.load(copy_l), 0.0).to(gl.bfloat16))
        if PERSISTENT:
            wait_tiles(values, phase)
        else:
            async_copy.wait_group(3)
        fence_async_shared()
        M_T = M_s.permute((1, 0))
        dv = warpgroup_mma(M_T, grad_v_new_s, value_zero, use_acc=False, is_async=True)
        dM = warpgroup_mma(grad_v_new_s, v_s.permute((1, 0)), square_zero, use_acc=False, is_async=True)

        if PERSISTENT:
            wait_tiles(sums, phase)
        else:
            async_copy.wait_group(2)
        if SUMMED:
            unit: gl.constexpr = 1.0 if GATE == "cumulative_log2" else LOG2E
            exp_g = exp2(sums_s.load(key_l) * unit)
        else:
            both_s = reinterpret(sums_s, gl.float16, [2, C, K], half_s)
            high_s = both_s.index(0)
            low_s = both_s.index(1)
            store_decays(high_s, low_s, g_s.load(key_l).to(gl.float32), bias, rate, lower_bound, valid, GATE, SAFE)
            i, s = opaque_indices(T, N, dot_l)
            up_to = gl.where(s <= i, 1.0, 0.0).to(gl.float16)
            beyond = gl.where(s > i, 1.0, 0.0).to(gl.float16)
            before = weighted_sums(up_to, high_s, low_s, key_zero)
            after = weighted_sums(beyond, high_s, low_s, key_zero)
            before, after, _, _, _ = warpgroup_mma_wait(0, deps=[before, after, up_to, beyond, sums_s])
            # out of registers, which are scarce in between
            sums_s.store(after)
            exp_g = exp2(before)
        if PERSISTENT:
            # last, as results of the tile before must have left these places
            tma.store_wait(0)
            barrier()
            load_tiles(outputs, tile.batch, tile.start, tile.head, True)
            load_tiles(later_states, tile.chunk, tile.head, 0, True)

        square_row, square_column = row_column(C, C, square_l)
        dM, dv = warpgroup_mma_wait(0, deps=[dM, dv])
        dbeta_s.store(row_partials(dv * v_s.load(value_l).to(gl.float32), partials_l))
        betas = gl.where(row < tile.count, beta_value(raw.to(gl.float32), BETA), 0.0)
        dv *= gl.convert_layout(betas, gl.SliceLayout(1, value_l))[:, None]
        store_rows(grad_v + first_row * V, value_stride, dv, tile.count, v_s)

        if PERSISTENT:
            wait_tiles(keys, phase)
            wait_tiles(states, phase)
        else:
            async_copy.wait_group(1)
        fence_async_shared()
        S = by_rows(h_s, V_FIRST)
        dw = warpgroup_mma(grad_v_new_s, S, key_zero, use_acc=False, is_async=True)
        kn = k_s.load(key_l).to(gl.float32)
        norm_k = norm_factors(kn, L2NORM)
        k_exp_g_s.store((kn * norm_k * exp_g).to(gl.bfloat16))
        dw, _ = warpgroup_mma_wait(0, deps=[dw, grad_v_new_s])
        # w came from `v' = u - w S`
        grad_w_s.store((-dw).to(gl.bfloat16))
        fence_async_shared()
        dkG = warpgroup_mma(M_T, grad_w_s, key_zero, use_acc=False, is_async=True)
        dM = warpgroup_mma(grad_w_s, k_exp_g_s.permute((1, 0)), dM, is_async=True)
        # with their operands: else scratch memory might take their place while they are read
        dkG, dM, _, _ = warpgroup_mma_wait(0, deps=[dkG, dM, grad_w_s, k_exp_g_s])
        square_s = reinterpret(grad_v_new_s, gl.bfloat16, [V // 64, C, C], tile_s).index(0)
        square_s.store(dM.to(gl.bfloat16))
        fence_async_shared()
        X = warpgroup_mma(M_T, square_s, square_zero, use_acc=False, is_async=True)
        if SUMMED:
            # volatile: else ptxas moves the load to where it is needed
            end = gl.load(g_row + (tile.count - 1) * (g_token * 8) + column, volatile=True)[None, :]
        dkG *= exp_g
        kn = k_s.load(key_l).to(gl.float32) * norm_k
        dbeta = dbeta_s.load(partials_l) + row_partials(dkG * kn, partials_l)
        beta_row = gl.arange(0, C, layout=gl.SliceLayout(1, gl.SliceLayout(2, partials_l))) + nothing
        gl.store(
            grad_beta + first_row + beta_row * HV, gl.sum(gl.sum(dbeta, axis=2), axis=1), mask=beta_row < tile.count
        )
        X, _ = warpgroup_mma_wait(0, deps=[X, square_s])
        square_s.store((X * gl.convert_layout(betas, gl.SliceLayout(0, square_l))[None, :]).to(gl.bfloat16))
        fence_async_shared()
        A = warpgroup_mma(square_s, M_T, square_zero, use_acc=False)
        A = gl.where(square_row > square_column, -A, 0.0)
        store_rows(grad_A + first_row * C, square_stride, A, tile.count, square_s)

        if PERSISTENT:
            index = next_tile(index)
            more = index < tile_count
            following = dense_chunk_tile(index, slots, T, HV)
            fence_async_shared()
            barrier()
            load_tiles(matrix, following.batch, following.start, following.head, more)
            load_tiles(values, following.batch, following.start, following.head, more)
            if HALFWAY:
                load_tiles(sums, following.batch, following.start, following.head, more)
            wait_tiles(outputs, phase)
            wait_tiles(later_states, phase)
        else:
            async_copy.wait_group(0)
            index = tile_count
        fence_async_shared()
        dqg = warpgroup_mma(grad_o_s, S, key_zero, use_acc=False, is_async=True)
        dkg = warpgroup_mma(v_new_s, by_rows(grad_h_s, V_FIRST), key_zero, use_acc=False, is_async=True)
        if grad_Aqk is not None:
            Aqk = warpgroup_mma(grad_o_s, v_new_s.permute((1, 0)), square_zero, use_acc=False, is_async=True)
        whole = gl.convert_layout(inner_product(h_s, grad_h_s, V_FIRST), gl.SliceLayout(0, key_l))
        if grad_Aqk is not None:
            dqg, dkg, Aqk, _, _, _, _ = warpgroup_mma_wait(0, deps=[dqg, dkg, Aqk, grad_o_s, v_new_s, h_s, grad_h_s])
            Aqk = gl.where(square_row >= square_column, Aqk, 0.0)
            square_s = reinterpret(v_new_s, gl.bfloat16, [V // 64, C, C], tile_s).index(0)
            store_rows(grad_Aqk + first_row * C, square_stride, Aqk, tile.count, square_s)
        else:
            dqg, dkg, _, _, _, _ = warpgroup_mma_wait(0, deps=[dqg, dkg, grad_o_s, v_new_s, h_s, grad_h_s])
        if PERSISTENT:
            fence_async_shared()
            barrier()
            load_tiles(states, following.chunk, following.head, 0, more)
        norm_q = norm_factors(q_s.load(key_l).to(gl.float32), L2NORM)
        dqg *= exp_g * scale
        if PERSISTENT:
            tma_store(grad_q, tile.batch, tile.start, tile.head, dqg, grad_h_s)
        else:
            dq_s = reinterpret(h_s, gl.bfloat16, [C, K], key_s)
            store_rows(grad_q + first_row * K, key_stride, dqg, tile.count, dq_s)
        G = q_s.load(key_l).to(gl.float32) * norm_q * dqg
        kn = k_s.load(key_l).to(gl.float32) * norm_k
        dkG *= betas[:, None]
        G += kn * dkG
        after = sums_s.load(key_l)
        if SUMMED:
            after = gl.where(valid, end - after, 0.0) * unit
        dkg *= exp2(after)
        # `G_C` is the last row's own G: there what goes through kg = k exp(G_C - G) cancels, exactly only if left out
        last = (row == tile.count - 1)[:, None]
        left = gl.where(last, 0.0, kn * dkg)
        G -= left
        G += gl.where(last, gl.sum(left, axis=0)[None, :] + whole[None, :] * exp_g, 0.0)
        if PERSISTENT:
            tma.store_wait(0)
            fence_async_shared()
            barrier()
            if not HALFWAY:
                load_tiles(sums, following.batch, following.start, following.head, more)
            load_tiles(keys, following.batch, following.start, following.head // group, more)
            tma_store(grad_G, tile.batch, tile.start, tile.head, G, grad_h_s)
        else:
            store_rows(grad_G + first_row * K, key_stride, G, tile.count, None)
        dkg += dkG
        if size_k is not None:
            # float16 holds the quotients to 11 bits
            dk = half_rows(dkg)
            size = gl.maximum(gl.max(gl.abs(dk), axis=2), 1e-30)
            dk *= reciprocal(size)[:, :, None]
            dkg = gl.convert_layout(dk.reshape([C, K]), key_l, assert_trivial=True)
            size_l: gl.constexpr = size.type.layout
            size_row, half = row_column(C, 2, size_l)
            gl.store(size_k + (first_row + size_row * HV) * 2 + half, size, mask=size_row < tile.count)
        if PERSISTENT:
            tma_store(grad_k, tile.batch, tile.start, tile.head, dkg, late_s)
            tile = following
            first_row = wide(tile.batch, T) * HV + wide(tile.start, HV) + tile.head
            g_row = g + token_offset(tile.batch, tile.start, tile.head, g_batch, g_token, g_head) * 8
            phase = next_phase(phase)
        else:
            dk_s = reinterpret(grad_h_s, gl.float16, [C, K], half_s)
            store_rows(grad_k + first_row * K, key_stride, dkg, tile.count, dk_s)
    if PERSISTENT:
        tma.store_wait(0)


def wy_launch(problem: ChunkProblem, t: ChunkTensors | WyTensors, own: dict[str, Any]) -> Launch:
    tiles, sms = chunks(problem), sm_count(t.device)
    rows = dict(q=t.q, k=t.k, g=t.g, v=t.v, o=own["o"], beta=t.beta)
    # at fixed lengths the TMA unit can fetch all operands, but none that repeats; tensor descriptors take the host longer
    fits = not problem.packed and problem.K == problem.V == 128
    persistent = fits and tiles > sms and all(0 not in rows[name].stride() for name in "qkgvo")
    # strides are those of the tensors themselves, also where tensor descriptors take their places
    strides = {f"{name}_{axis}": stride_div8(name, x, i) for name, x in rows.items() for axis, i in AXES.items()}
    own = dict(own, **strides, g_d=None, tile_count=tiles, PERSISTENT=persistent)
    if persistent:
        # of what is copied in whole tiles; single rows of `g` are read, too
        own |= {name: by_token(rows[name]) for name in "qkv"} | {"g_d": by_token(t.g)}
        names = ("Akk_inv", "v_new", "grad_o", "grad_v_new", "grad_q", "grad_k", "grad_G")
        own |= {name: by_token(own[name]) for name in names} | {name: by_state(own[name]) for name in ("h", "grad_h")}
    return launch_div8(wy_kernel, sms if persistent else tiles, problem, t, own, num_warps=8)


def by_token(x: Tensor) -> TensorDescriptor:
    """A descriptor of `[B, T, heads, channels]`, in tiles of a chunk's rows of one head."""
    return describe(x, (1, TILE, 1, x.shape[-1]))


def by_state(x: Tensor) -> TensorDescriptor:
    """A descriptor of `[.., chunks, heads, rows, columns]`, in states; `[all chunks, heads, ..]` to the kernel."""
    return describe(x.flatten(0, -4), (1, 1, *x.shape[-2:]))


def wy(call: StageCall, own: dict[str, Any]) -> Launch:
    return wy_launch(call.problem, call.t, dict(own, rows=call.problem.slots, V_FIRST=True))


def wy_dqkg(problem: WyProblem, t: WyTensors, arch: int, outputs: Outputs) -> list[Launch]:
    """`chunk_bwd_wy_dqkg`: stage `wy` on its own."""
    own = wy_operands(t, t.A, t.h, t.v_new, t.dh, t.dv) | wy_results(outputs)
    return [wy_launch(problem, t, dict(own, SAFE=False, BETA="value", L2NORM=False))]
