"""`prepare_steps` of bounded gates and K = 128 as a persistent kernel: CTA i does tiles i, i + CTAs, ..., chunk by chunk, all
heads of a chunk side by side. From `kernels/hopper/prepare_steps.py`, whose helpers it uses; values are right."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language import condition
from triton.language.extra.cuda import globaltimer, smid

from flashdelta.kernels.hopper.device.compat import barrier, reinterpret, store_tile
from flashdelta.kernels.hopper.device.layouts import ACC, ACC_HALF, beside
from flashdelta.kernels.hopper.device.math import beta_value, exp2, gate_bias, gate_unit, round_pairs, wide, widen
from flashdelta.kernels.hopper.device.portable import decay_rate
from flashdelta.kernels.hopper.device.tile_scheduler import chunk_in_slot
from flashdelta.kernels.hopper.prepare import (
    FLAT, PLAIN, TILE, copy_tokens, load_bias, pair_norm_factors, weighted,
)
from flashdelta.kernels.hopper.prepare_steps import (
    SQUARE, STEP, block_inverses, decay_sums, decayed, own_step, part_layout, step_inverses, step_operands,
)
from flashdelta.kernels.shared.scalars import SCALARS_AND_STRIDES


@gluon.jit
def one_chunk(q, k, g, beta, q_token, k_token, g_token, beta_token, count, rate, bias, scale, lower_bound, tiles_d, decay, first_row,
              keys, queries, right, blocks_s, norm_k_s, norm_q_s, unit_s, beta_s, bias_s, K, GATE, BETA):
    KH: gl.constexpr = K // 64
    LAYOUT: gl.constexpr = part_layout(KH)
    acc_row = gl.arange(0, 64, layout=gl.SliceLayout(1, ACC_HALF))
    betas = gl.load(beta + acc_row * beta_token, mask=acc_row < count, other=0.0, volatile=True).to(gl.float32)
    g_s = reinterpret(right, gl.bfloat16, [KH * 64, 64], PLAIN)
    copy_tokens(g_s, g, g_token, count, 64)
    copy_tokens(keys, k, k_token, count, 64)
    copy_tokens(queries, q, q_token, count, 64)
    async_copy.commit_group()
    unit_s.store(gl.where(acc_row < count, gate_unit(rate, lower_bound, GATE), 0.0))
    betas = gl.where(acc_row < count, beta_value(betas, BETA), 0.0)
    beta_s.store(betas)
    bias_s.store(gate_bias(bias, rate, GATE))
    columns_l: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, LAYOUT)))
    biases = bias_s.reshape([KH, 64]).load(columns_l)[:, None, None, None, :]
    async_copy.wait_group(0)
    norm_k_s.reshape([4, 16]).store(
        pair_norm_factors(reinterpret(keys, gl.bfloat16, [KH, 64, 64], TILE), 1.0, KEYS_FIRST=True, L2NORM=True)
    )
    norm_q_s.reshape([4, 16]).store(
        pair_norm_factors(reinterpret(queries, gl.bfloat16, [KH, 64, 64], TILE), 1.0, KEYS_FIRST=True, L2NORM=True)
        * scale
    )
    before, middle = decay_sums(g_s, biases, rate, unit_s, 0, GATE, True)
    after, rest = decay_sums(g_s, biases, rate, unit_s, 1, GATE, True)
    totals_l: gl.constexpr = gl.SliceLayout(3, LAYOUT)
    at_half = gl.arange(0, KH, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, totals_l))))
    at_step = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, totals_l))))
    at_column = gl.arange(0, 64, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, totals_l))))
    row = at_step[None, :, None, None] * (2 * K) + at_half[:, None, None, None] * 64
    at_decay = decay + (row + at_column[None, None, None, :])
    gl.store(at_decay, exp2(middle))
    gl.store(at_decay + K, exp2(rest))
    decayed(keys, queries, right, norm_k_s, norm_q_s, before - middle[:, :, :, None, :], 0)
    decayed(keys, queries, right, norm_k_s, norm_q_s, after, 1)
    fence_async_shared()
    barrier()
    for h in gl.static_range(KH):
        store_tile(tiles_d, [first_row + (KH + h) * 64, 0], queries.slice(64 * h, 64))
        store_tile(tiles_d, [first_row + (2 * KH + h) * 64, 0], right.slice(64 * h, 64))

    zero = gl.zeros((64, 64), gl.float32, layout=ACC)
    for h in gl.static_range(KH):
        right_h = right.slice(64 * h, 64).permute((1, 0))
        if h == 0:
            A = warpgroup_mma(keys.slice(0, 64), right_h, zero, use_acc=False, is_async=True)
            Aqk = warpgroup_mma(queries.slice(0, 64), right_h, zero, use_acc=False, is_async=True)
        else:
            A = warpgroup_mma(keys.slice(64 * h, 64), right_h, A, is_async=True)
            Aqk = warpgroup_mma(queries.slice(64 * h, 64), right_h, Aqk, is_async=True)
    A, Aqk = warpgroup_mma_wait(0, deps=[A, Aqk])
    row = acc_row[:, None]
    column = gl.arange(0, 32, layout=gl.SliceLayout(0, ACC_HALF))[None, :]
    minus_A = gl.where(row % 32 > column, own_step(A, row), 0.0) * -betas[:, None]
    Aqk = round_pairs(gl.where(row % 32 >= column, own_step(Aqk, row), 0.0))

    X = block_inverses(minus_A, blocks_s)
    tma.store_wait(0)
    barrier()
    X_s = reinterpret(queries, gl.float32, [64, 32], STEP)
    X_s.reshape([4, 16, 32]).store(X)
    X_left, X_right = step_inverses(X_s)
    columns: gl.constexpr = gl.SliceLayout(0, ACC_HALF)
    beta_first = beta_s.slice(0, 32).load(columns)[None, :]
    beta_second = beta_s.slice(32, 32).load(columns)[None, :]
    X = gl.convert_layout(gl.join(X_left, X_right).permute((0, 2, 1)).reshape([64, 32]), ACC_HALF, assert_trivial=True)
    weights = X * gl.where(row < 32, -beta_first, -beta_second)
    high = round_pairs(weights)
    low = round_pairs(weights - widen(high))
    place = right.slice(0, 64)
    place.store(beside(round_pairs(-weights), Aqk, ACC))

    high0, high1, high2, high3 = step_operands(high)
    low0, low1, low2, low3 = step_operands(low)
    for h in gl.static_range(KH):
        w = weighted(high0, low0, keys.slice(64 * h, 16), zero, False)
        w = weighted(high1, low1, keys.slice(64 * h + 16, 16), w, True)
        w = weighted(high2, low2, keys.slice(64 * h + 32, 16), w, True)
        w = weighted(high3, low3, keys.slice(64 * h + 48, 16), w, True)
        w, high0, high1, high2, high3, low0, low1, low2, low3 = warpgroup_mma_wait(
            0, deps=[w, high0, high1, high2, high3, low0, low1, low2, low3]
        )
        keys.slice(64 * h, 64).store(w.to(gl.bfloat16))
    fence_async_shared()
    barrier()
    for h in gl.static_range(KH):
        store_tile(tiles_d, [first_row + h * 64, 0], keys.slice(64 * h, 64))
    store_tile(tiles_d, [first_row + 3 * KH * 64, 0], place)


@gluon.jit
def prefetch_rows(x0, x1, token0, token1):
    """64 rows each of two tensors to the L2 cache."""
    lane = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [4], [0]))
    at = gl.where(lane < 64, x0 + lane % 64 * (token0 * 8), x1 + lane % 64 * (token1 * 8)).to(gl.int64, bitcast=True)
    asm: gl.constexpr = "cp.async.bulk.prefetch.L2.global [$1], 256; mov.b32 $0, 0;"
    gl.inline_asm_elementwise(asm, "=r,l", [at], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def stored_everywhere():
    """Until the thread's bulk copies have been written, not only read."""
    nothing = gl.full([128], 0, gl.int32, layout=gl.BlockedLayout([1], [32], [4], [0]))
    asm: gl.constexpr = "cp.async.bulk.wait_group 0; fence.proxy.async; mov.b32 $0, $1;"
    gl.inline_asm_elementwise(asm, "=r,r", [nothing], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit(do_not_specialize=(*SCALARS_AND_STRIDES,))
def prepare_spike(
    q, k, g, beta, A_log, dt_bias, cu_seqlens, tiles_d, decay, flags, records,
    scale: gl.float32, lower_bound: gl.float32, T: gl.int32, N: gl.int32, HV: gl.int32, slots: gl.int32, tile_count: gl.int32,
    q_batch: gl.int32, q_token: gl.int32, q_head: gl.int32, k_batch: gl.int32, k_token: gl.int32, k_head: gl.int32,
    g_batch: gl.int32, g_token: gl.int32, g_head: gl.int32,
    beta_batch: gl.int32, beta_token: gl.int32, beta_head: gl.int32,
    K: gl.constexpr, GATE: gl.constexpr, BETA: gl.constexpr, PREFETCH: gl.constexpr,
):
    """`flags`: None, or a word a tile, to which 2 is added when the tile lies in memory. `PREFETCH`: the next tile's inputs to the
    L2 cache; of one sequence of whole chunks."""
    KH: gl.constexpr = K // 64
    keys = gl.allocate_shared_memory(gl.bfloat16, [KH * 64, 64], TILE)
    queries = gl.allocate_shared_memory(gl.bfloat16, [KH * 64, 64], TILE)
    right = gl.allocate_shared_memory(gl.bfloat16, [KH * 64, 64], TILE)
    blocks_s = gl.allocate_shared_memory(gl.float32, [64, 16], SQUARE)
    norm_k_s = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    norm_q_s = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    unit_s = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    beta_s = gl.allocate_shared_memory(gl.float32, [64], FLAT)
    bias_s = gl.allocate_shared_memory(gl.float32, [K], FLAT)
    record = records + gl.program_id(0) * 4
    gl.store(record, smid().to(gl.int64))
    gl.store(record + 1, globaltimer())
    tile = gl.program_id(0)
    while condition(tile < tile_count, disable_licm=True):
        head = tile % HV
        slot = tile // HV
        rate = decay_rate(A_log, head, volatile=True)
        bias = load_bias(dt_bias, head, K)
        batch, start, count = chunk_in_slot(cu_seqlens, None, 0, slot, slots, N, T)
        batch = batch.to(gl.int32)
        start = start.to(gl.int32)
        count = gl.minimum(count, 64).to(gl.int32)
        q_ = q + (wide(batch, q_batch) + wide(start, q_token) + wide(head, q_head)) * 8
        k_ = k + (wide(batch, k_batch) + wide(start, k_token) + wide(head, k_head)) * 8
        g_ = g + (wide(batch, g_batch) + wide(start, g_token) + wide(head, g_head)) * 8
        beta_ = beta + wide(batch, beta_batch) + wide(start, beta_token) + wide(head, beta_head)
        decay_ = decay + tile.to(gl.int64) * (4 * K)
        first_row = tile * ((3 * KH + 1) * 64)
        if PREFETCH:
            following = gl.minimum(tile + gl.num_programs(0), tile_count - 1)
            f_head = following % HV
            f_start = following // HV * 64  # of one sequence, whose last chunk is whole
            prefetch_rows(k + (wide(f_start, k_token) + wide(f_head, k_head)) * 8, q + (wide(f_start, q_token) + wide(f_head, q_head)) * 8,
                          k_token, q_token)
            f_g = g + (wide(f_start, g_token) + wide(f_head, g_head)) * 8
            prefetch_rows(f_g, f_g, g_token, g_token)
        if cu_seqlens is None:
            one_chunk(q_, k_, g_, beta_, q_token, k_token, g_token, beta_token, count, rate, bias, scale, lower_bound, tiles_d,
                      decay_, first_row, keys, queries, right, blocks_s, norm_k_s, norm_q_s, unit_s, beta_s, bias_s, K, GATE, BETA)
        else:
            if count > 0:
                one_chunk(q_, k_, g_, beta_, q_token, k_token, g_token, beta_token, count, rate, bias, scale, lower_bound, tiles_d,
                          decay_, first_row, keys, queries, right, blocks_s, norm_k_s, norm_q_s, unit_s, beta_s, bias_s, K, GATE, BETA)
        tma.store_wait(0)
        if flags is not None:
            stored_everywhere()
        barrier()
        if flags is not None:
            gl.atomic_add(flags + tile, gl.where(count > 0, 2, 0), sem="release", scope="gpu")
        tile += gl.num_programs(0)
    gl.store(record + 2, globaltimer())
