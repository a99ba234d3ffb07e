"""Stage `wy` of the backward pass for Hopper: from states and their gradients to those of values, of what `prepare` left, and
of its matrices. One program of 8 warps per (chunk, value head), or one per multiprocessor that takes one after another.

Contract: as `triton/wy.py`; matrices `M = (I + A)^-1`, `grad_A` and `grad_Aqk` lie by token, `[B, T, HV, 64]`, and states
chunk by chunk without gaps. With `T = M diag(beta)` nothing needs T itself: `T^T x = beta (M^T x)`.

All of a chunk's operands are in shared memory at once; they arrive in the order in which they are needed, and results take
their places. A program that takes one item after another fetches each operand of the next as soon as its place is free, and
sends large results to memory by way of the places that are needed last: else all programs wait for memory at the same time.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language import condition

from ..triton.device import gates
from ..triton.device.gates import LOG2E
from .device.compat import barrier, reinterpret
from .device.math import exp2, token_offset, wide, write_strength
from .device.rows import (
    C,
    decay_bias,
    fetch_rows,
    inverse_norms,
    own_chunk,
    places,
    row_parts,
    store_decays,
    store_rows,
    weight_places,
    weighted_sums,
)
from .device.tile_scheduler import chunks_before
from .device.tma import await_copies, fetch, incoming, send

decay_rate = gluon.jit(gates.decay_rate.fn)

_STRIDES = [f"{x}_{dim}" for x in ("q", "k", "g", "v", "o", "beta") for dim in ("batch", "token", "head")]
SCALARS = ("scale", "lower_bound", "T", "N", "HV", "group", "slots", "rows", "items", *_STRIDES)
"""Arguments whose values leave the machine code as it is."""


@gluon.jit
def by_rows(shared, V_FIRST: gl.constexpr):
    """A state as `[V, K]`."""
    if V_FIRST:
        return shared
    else:
        return shared.permute((1, 0))


@gluon.jit
def inner_product(h_s, grad_h_s, V_FIRST: gl.constexpr):
    """`sum_v S dS` of each key channel."""
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [gl.num_warps(), 1], [1, 0])
    product = h_s.load(layout).to(gl.float32) * grad_h_s.load(layout).to(gl.float32)
    return gl.sum(product, axis=0 if V_FIRST else 1)


@gluon.jit
def operand(dtype: gl.constexpr, rows: gl.constexpr, columns: gl.constexpr):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows, columns], dtype)
    return gl.allocate_shared_memory(dtype, [rows, columns], layout)


@gluon.jit
def item_place(item, slots, T, HV):
    """Of an item of fixed-length sequences: value head, chunk among all, batch row, first token, token count."""
    slot = item // HV
    start = slot % slots * C
    return item % HV, slot, slot // slots, start, gl.minimum(T - start, C)


@gluon.jit(do_not_specialize=SCALARS)
def wy_kernel(
    q,
    k,
    g,
    v,
    beta,
    A_log,
    dt_bias,
    cu_seqlens,
    solved,
    h,
    pseudo,
    grad_o,
    grad_pseudo,
    grad_h,
    g_d,
    grad_q,
    grad_k,
    grad_G,
    grad_v,
    grad_beta,
    grad_A,
    grad_Aqk,
    scale: gl.float32,
    lower_bound: gl.float32,
    T: gl.int32,
    N: gl.int32,
    HV: gl.int32,
    group: gl.int32,
    slots: gl.int32,
    rows: gl.int32,
    items: gl.int32,
    q_batch: gl.int32,
    q_token: gl.int32,
    q_head: gl.int32,
    k_batch: gl.int32,
    k_token: gl.int32,
    k_head: gl.int32,
    g_batch: gl.int32,
    g_token: gl.int32,
    g_head: gl.int32,
    v_batch: gl.int32,
    v_token: gl.int32,
    v_head: gl.int32,
    o_batch: gl.int32,
    o_token: gl.int32,
    o_head: gl.int32,
    beta_batch: gl.int32,
    beta_token: gl.int32,
    beta_head: gl.int32,
    K: gl.constexpr,
    V: gl.constexpr,
    GATE: gl.constexpr,
    SAFE: gl.constexpr,
    BETA: gl.constexpr,
    L2NORM: gl.constexpr,
    V_FIRST: gl.constexpr,
    WALK: gl.constexpr,
):
    """`GATE` may be "cumulative" or "cumulative_log2": `g` holds the sums of log decays. `rows`: chunks that `h` and `grad_h`
    have; a packed sequence's chunk past them is left out.

    `WALK`: a program takes every so many-th of the `items`. For sums of log decays and fixed lengths; tensor descriptors stand
    for q, k, v, `solved`, `h`, `pseudo`, `grad_o`, `grad_pseudo`, `grad_h`, `grad_q`, `grad_k` and `grad_G`, and `g_d` is that
    of g."""
    SUMMED: gl.constexpr = GATE == "cumulative" or GATE == "cumulative_log2"
    key_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, K // 2, 16])
    value_l: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, V // 2, 16]
    )
    square_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 2], instr_shape=[16, 32, 16])
    dot_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=key_l, k_width=2)
    # of what a row's columns are summed to inside each thread
    parts_l: gl.constexpr = gl.DistributedLinearLayout(
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
    gl.static_assert(not WALK or (SUMMED and cu_seqlens is None and K == V))
    item = gl.program_id(0)
    if WALK:
        head, chunk, batch, start, count = item_place(item, slots, T, HV)
    else:
        head = item % HV
        chunk = item // HV
        n, begin, batch, start, count = own_chunk(cu_seqlens, chunk, slots, N, T)
        if count <= 0:
            return
        if cu_seqlens is not None:
            chunk = chunks_before(cu_seqlens, n, T) + (start - begin) // C
            if chunk >= rows:
                return

    h_rows: gl.constexpr = V if V_FIRST else K
    h_columns: gl.constexpr = K if V_FIRST else V
    g_s = operand(g.dtype.element_ty, C, K)
    q_s = operand(gl.bfloat16, C, K)
    k_s = operand(gl.bfloat16, C, K)
    v_s = operand(gl.bfloat16, C, V)
    late_s = gl.allocate_shared_memory(gl.bfloat16, [2, C, V], value_s)
    grad_o_s = late_s.index(0)
    pseudo_s = late_s.index(1)
    grad_pseudo_s = operand(gl.bfloat16, C, V)
    M_s = operand(gl.bfloat16, C, C)
    h_s = operand(gl.bfloat16, h_rows, h_columns)
    grad_h_s = operand(gl.bfloat16, h_rows, h_columns)
    grad_w_s = operand(gl.bfloat16, C, K)
    grown_s = operand(gl.bfloat16, C, K) if V < K else reinterpret(v_s, gl.bfloat16, [C, K], key_s)

    row = gl.arange(0, C, layout=gl.SliceLayout(1, key_l))
    column = gl.arange(0, K, layout=gl.SliceLayout(0, key_l))
    key_zero = gl.zeros((C, K), gl.float32, layout=key_l)
    value_zero = gl.zeros((C, V), gl.float32, layout=value_l)
    square_zero = gl.zeros((C, C), gl.float32, layout=square_l)
    of_key = HV * K
    of_value = HV * V
    of_square = HV * C
    qk_head = head // group
    own = wide(batch, T) * HV + wide(start, HV) + head
    # in units of 8 elements
    own_g = g + token_offset(batch, start, head, g_batch, g_token, g_head) * 8
    own_beta = beta + token_offset(batch, start, head, beta_batch, beta_token, beta_head)
    if WALK:
        # volatile: else the compiler asks for it where it is needed
        raw = gl.load(own_beta + row * beta_token, mask=row < count, other=0.0, volatile=True)
        matrix = (incoming(solved, M_s),)
        values = (incoming(v, v_s), incoming(grad_pseudo, grad_pseudo_s))
        sums = (incoming(g_d, g_s),)
        keys = (incoming(k, k_s), incoming(q, q_s))
        states = (incoming(h, h_s),)
        outputs = (incoming(grad_o, grad_o_s), incoming(pseudo, pseudo_s))
        next_states = (incoming(grad_h, grad_h_s),)
        fence_async_shared()
        fetch(matrix, batch, start, head, True)
        fetch(values, batch, start, head, True)
        fetch(sums, batch, start, head, True)
        fetch(keys, batch, start, qk_head, True)
        fetch(states, chunk, head, 0, True)
    else:
        q += token_offset(batch, start, qk_head, q_batch, q_token, q_head) * 8
        k += token_offset(batch, start, qk_head, k_batch, k_token, k_head) * 8
        v += token_offset(batch, start, head, v_batch, v_token, v_head) * 8
        grad_o += token_offset(batch, start, head, o_batch, o_token, o_head) * 8
        state = (wide(chunk, HV) + head) * (K * V)
        fetch_rows(M_s, solved + own * C, of_square, count)
        async_copy.commit_group()
        fetch_rows(v_s, v, v_token * 8, count)
        fetch_rows(grad_pseudo_s, grad_pseudo + own * V, of_value, count)
        async_copy.commit_group()
        # volatile, and a barrier: else the compiler asks for these after all copies, and they queue
        raw = gl.load(own_beta + row * beta_token, mask=row < count, other=0.0, volatile=True)
        if not SUMMED:
            rate = decay_rate(A_log, head, volatile=True)
            bias = decay_bias(dt_bias, head, rate, column, K, GATE, volatile=True)
        barrier()
        fetch_rows(g_s, own_g, g_token * 8, count)
        async_copy.commit_group()
        fetch_rows(k_s, k, k_token * 8, count)
        fetch_rows(h_s, h + state, h_columns, h_rows)
        async_copy.commit_group()
        fetch_rows(grad_o_s, grad_o, o_token * 8, count)
        fetch_rows(pseudo_s, pseudo + own * V, of_value, count)
        fetch_rows(grad_h_s, grad_h + state, h_columns, h_rows)
        fetch_rows(q_s, q, q_token * 8, count)
        async_copy.commit_group()

    phase = 0
    # what is the same for all items is worked out anew each time: kept, it would spill, and of the L1 cache little is left
    while condition(item < items, disable_licm=True):
        valid = (row < count)[:, None]
        if SUMMED:
            # the operator promises nothing of what is right of the diagonal
            if WALK:
                await_copies(matrix, phase)
            else:
                async_copy.wait_group(4)
            copy_l: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
            M_row, M_column = places(C, C, copy_l)
            M_s.store(gl.where(M_row >= M_column, M_s.load(copy_l), 0.0).to(gl.bfloat16))
        if WALK:
            await_copies(values, phase)
        else:
            async_copy.wait_group(3)
        fence_async_shared()
        from_M = M_s.permute((1, 0))
        of_v = warpgroup_mma(from_M, grad_pseudo_s, value_zero, use_acc=False, is_async=True)
        grad_T = warpgroup_mma(grad_pseudo_s, v_s.permute((1, 0)), square_zero, use_acc=False, is_async=True)

        if WALK:
            # needed last, as the results of the item before have to leave their places
            tma.store_wait(0)
            barrier()
            fetch(outputs, batch, start, head, True)
            fetch(next_states, chunk, head, 0, True)
            await_copies(sums, phase)
        else:
            async_copy.wait_group(2)
        if SUMMED:
            unit: gl.constexpr = 1.0 if GATE == "cumulative_log2" else LOG2E
            grown = exp2(g_s.load(key_l) * unit)
        else:
            # in the place of what they come from
            if g.dtype.element_ty == gl.bfloat16:
                high_s = reinterpret(g_s, gl.float16, [C, K], half_s)
                low_s = reinterpret(grad_w_s, gl.float16, [C, K], half_s)
            else:
                both_s = reinterpret(g_s, gl.float16, [2, C, K], half_s)
                high_s = both_s.index(0)
                low_s = both_s.index(1)
            store_decays(high_s, low_s, g_s.load(key_l).to(gl.float32), bias, rate, lower_bound, valid, GATE, SAFE)
            i, s = weight_places(T, N, dot_l)
            up_to = gl.where(s <= i, 1.0, 0.0).to(gl.float16)
            beyond = gl.where(s > i, 1.0, 0.0).to(gl.float16)
            before = weighted_sums(up_to, high_s, low_s, key_zero)
            after = weighted_sums(beyond, high_s, low_s, key_zero)
            before, after, _, _ = warpgroup_mma_wait(0, deps=[before, after, up_to, beyond])
            grown = exp2(before)

        square_row, square_column = places(C, C, square_l)
        grad_T, of_v = warpgroup_mma_wait(0, deps=[grad_T, of_v])
        of_beta = row_parts(of_v * v_s.load(value_l).to(gl.float32), parts_l)
        strength = gl.where(row < count, write_strength(raw.to(gl.float32), BETA), 0.0)
        of_v *= gl.convert_layout(strength, gl.SliceLayout(1, value_l))[:, None]
        store_rows(grad_v + own * V, of_value, of_v, count, v_s)

        if WALK:
            await_copies(keys, phase)
            await_copies(states, phase)
        else:
            async_copy.wait_group(1)
        fence_async_shared()
        by_h = by_rows(h_s, V_FIRST)
        of_w = warpgroup_mma(grad_pseudo_s, by_h, key_zero, use_acc=False, is_async=True)
        kn = k_s.load(key_l).to(gl.float32)
        norm_k = inverse_norms(kn, L2NORM)
        grown_s.store((kn * norm_k * grown).to(gl.bfloat16))
        of_w, _ = warpgroup_mma_wait(0, deps=[of_w, grad_pseudo_s])
        # w came from `v' = u - w S`
        grad_w_s.store((-of_w).to(gl.bfloat16))
        fence_async_shared()
        of_kG = warpgroup_mma(from_M, grad_w_s, key_zero, use_acc=False, is_async=True)
        grad_T = warpgroup_mma(grad_w_s, grown_s.permute((1, 0)), grad_T, is_async=True)
        # with their operands: nothing else may take their place before
        of_kG, grad_T, _, _ = warpgroup_mma_wait(0, deps=[of_kG, grad_T, grad_w_s, grown_s])
        square_s = reinterpret(grad_pseudo_s, gl.bfloat16, [V // 64, C, C], tile_s).index(0)
        square_s.store(grad_T.to(gl.bfloat16))
        fence_async_shared()
        X = warpgroup_mma(from_M, square_s, square_zero, use_acc=False, is_async=True)
        if SUMMED:
            # volatile: else ptxas asks for it where it is needed
            end = gl.load(own_g + (count - 1) * (g_token * 8) + column, volatile=True)[None, :]
        of_kG *= grown
        kn = k_s.load(key_l).to(gl.float32) * norm_k
        of_beta += row_parts(of_kG * kn, parts_l)
        of_kG *= strength[:, None]
        beta_row = gl.arange(0, C, layout=gl.SliceLayout(1, gl.SliceLayout(2, parts_l)))
        gl.store(grad_beta + own + beta_row * HV, gl.sum(gl.sum(of_beta, axis=2), axis=1), mask=beta_row < count)
        X, _ = warpgroup_mma_wait(0, deps=[X, square_s])
        square_s.store((X * gl.convert_layout(strength, gl.SliceLayout(0, square_l))[None, :]).to(gl.bfloat16))
        fence_async_shared()
        A = warpgroup_mma(square_s, from_M, square_zero, use_acc=False)
        A = gl.where(square_row > square_column, -A, 0.0)
        store_rows(grad_A + own * C, of_square, A, count, None)

        if WALK:
            item += gl.num_programs(0)
            more = item < items
            next_head, next_chunk, next_batch, next_start, next_count = item_place(item, slots, T, HV)
            fence_async_shared()
            barrier()
            fetch(matrix, next_batch, next_start, next_head, more)
            fetch(values, next_batch, next_start, next_head, more)
            await_copies(outputs, phase)
            await_copies(next_states, phase)
        else:
            async_copy.wait_group(0)
            item = items
        fence_async_shared()
        of_qg = warpgroup_mma(grad_o_s, by_h, key_zero, use_acc=False, is_async=True)
        of_kg = warpgroup_mma(pseudo_s, by_rows(grad_h_s, V_FIRST), key_zero, use_acc=False, is_async=True)
        if grad_Aqk is not None:
            Aqk = warpgroup_mma(grad_o_s, pseudo_s.permute((1, 0)), square_zero, use_acc=False, is_async=True)
        whole = gl.convert_layout(inner_product(h_s, grad_h_s, V_FIRST), gl.SliceLayout(0, key_l))
        if grad_Aqk is not None:
            of_qg, of_kg, Aqk, _, _, _, _ = warpgroup_mma_wait(
                0, deps=[of_qg, of_kg, Aqk, grad_o_s, pseudo_s, h_s, grad_h_s]
            )
            Aqk = gl.where(square_row >= square_column, Aqk, 0.0)
            store_rows(grad_Aqk + own * C, of_square, Aqk, count, None)
        else:
            of_qg, of_kg, _, _, _, _ = warpgroup_mma_wait(0, deps=[of_qg, of_kg, grad_o_s, pseudo_s, h_s, grad_h_s])
        if WALK:
            fence_async_shared()
            barrier()
            fetch(states, next_chunk, next_head, 0, more)
            own_beta = beta + token_offset(next_batch, next_start, next_head, beta_batch, beta_token, beta_head)
            raw = gl.load(own_beta + row * beta_token, mask=more & (row < next_count), other=0.0, volatile=True)
        norm_q = inverse_norms(q_s.load(key_l).to(gl.float32), L2NORM)
        of_qg *= grown * scale
        if WALK:
            send(grad_q, batch, start, head, of_qg, grad_h_s)
        else:
            store_rows(grad_q + own * K, of_key, of_qg, count, None)
        G = q_s.load(key_l).to(gl.float32) * norm_q * of_qg
        kn = k_s.load(key_l).to(gl.float32) * norm_k
        G += kn * of_kG
        if SUMMED:
            # from memory once more: registers are scarce in between
            after = gl.where(valid, end - g_s.load(key_l), 0.0) * unit
        of_kg *= exp2(after)
        # `G_C` is the last row's own G: there what goes through kg = k exp(G_C - G) cancels, exactly only if left out
        last = (row == count - 1)[:, None]
        left = gl.where(last, 0.0, kn * of_kg)
        G -= left
        G += gl.where(last, gl.sum(left, axis=0)[None, :] + whole[None, :] * grown, 0.0)
        if WALK:
            tma.store_wait(0)
            fence_async_shared()
            barrier()
            fetch(sums, next_batch, next_start, next_head, more)
            fetch(keys, next_batch, next_start, next_head // group, more)
            send(grad_k, batch, start, head, of_kG + of_kg, late_s)
            send(grad_G, batch, start, head, G, grad_h_s)
            head, chunk, batch, start, count = next_head, next_chunk, next_batch, next_start, next_count
            own = wide(batch, T) * HV + wide(start, HV) + head
            own_g = g + token_offset(batch, start, head, g_batch, g_token, g_head) * 8
            phase ^= 1
        else:
            store_rows(grad_k + own * K, of_key, of_kG + of_kg, count, None)
            store_rows(grad_G + own * K, of_key, G, count, None)
    if WALK:
        tma.store_wait(0)
