"""`recurrence` in steps, whose ring holds steps of 32 tokens instead of chunks (33 KB a stage), so that two CTAs of
`prepare_spike` fit on the same SM. From `kernels/hopper/recurrence.py`, whose helpers it uses; values are right."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait
from triton.language.core import base_value  # noqa: F401
from triton.language.extra.cuda import globaltimer, smid

from flashdelta.kernels.hopper.device.compat import aggregate, copy_async, copy_tile
from flashdelta.kernels.hopper.device.layouts import (
    ACC, ACC_HALF, BV, LEFT, ROWS, C, as_left, beside, load_halves, store_halves, store_transposed,
)
from flashdelta.kernels.hopper.device.math import hidden_zero, mma, mma_first, wide
from flashdelta.kernels.hopper.device.portable import state_offsets
from flashdelta.kernels.hopper.device.tile_scheduler import TileScheduler
from flashdelta.kernels.shared.scalars import SCALARS_AND_STRIDES

TILES = gl.constexpr(7)
"""Pieces `[32, 64]` of a stage: -w, qa, kb by halves, inverse beside Aqk."""
HALF = gl.constexpr(32)
PIECE_BYTES = gl.constexpr(4096)


@aggregate
class Ring:
    tiles: gl.shared_memory_descriptor
    decay: gl.shared_memory_descriptor
    rows: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.jit
    def acquire(self, iteration):
        stage = iteration % self.STAGES
        mbarrier.wait(self.empty.index(stage), (iteration // self.STAGES) & 1 ^ 1)
        return stage, self.full.index(stage)

    @gluon.jit
    def wait(self, iteration):
        stage = iteration % self.STAGES
        mbarrier.wait(self.full.index(stage), (iteration // self.STAGES) & 1)
        return stage

    @gluon.jit
    def release(self, stage):
        mbarrier.arrive(self.empty.index(stage), count=1)

    @gluon.jit
    def tile(self, stage, i):
        return self.tiles.index(stage * TILES + i)

    @gluon.jit
    def decays(self, stage, quarter: gl.constexpr, layout: gl.constexpr):
        return self.decay.index(stage).slice(64 * quarter, 64).load(gl.SliceLayout(0, layout))[None, :]

    @gluon.jit
    def values(self, stage):
        return self.rows.index(stage).permute((1, 0)).load(LEFT)


@gluon.jit
def make_ring(tiles_d, K, STAGES):
    tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES * TILES, HALF, 64], tiles_d.layout)
    rows = gl.allocate_shared_memory(gl.bfloat16, [STAGES, HALF, BV], tiles_d.layout)
    decay = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=33)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    return Ring(tiles, decay, rows, full, empty, STAGES)


@gluon.jit
def wait_for(flag):
    """Until the tile lies in memory, or some 15 ms have passed: a spike must end."""
    lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))
    asm: gl.constexpr = """{
        .reg .pred done;
        .reg .b32 left;
        mov.b32 left, 20000;
    again:
        ld.acquire.gpu.global.s32 $0, [$1];
        sub.s32 left, left, 1;
        setp.gt.s32 done, $0, 0;
        @!done setp.lt.s32 done, left, 0;
        @!done bra again;
        fence.proxy.async;
    }"""
    at = (flag + lane * 0).to(gl.int64, bitcast=True)
    gl.inline_asm_elementwise(asm, "=r,l", [at], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load(tiles_d, decay, v, flags, ring, scheduler, strides, K):
    slice_ = scheduler.slice()
    v_batch, v_token, v_head = strides
    copy_l: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    line_l: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    row = gl.arange(0, HALF, layout=gl.SliceLayout(1, copy_l))
    column = gl.arange(0, BV, layout=gl.SliceLayout(0, copy_l))
    in_v = row[:, None] * (v_token * 8) + column[None, :]
    key = gl.arange(0, 2 * K, layout=line_l)
    iteration = 0
    tiles, segments = scheduler.count()
    for k in range(tiles):
        tile = scheduler.tile(k, segments)
        in_head = (wide(tile.batch, v_batch) + wide(tile.head, v_head)) * 8 + slice_ * BV
        stop, chunks, low, high = scheduler.span(tile, 0, tile.begin, tile.slot)
        for i in range(2 * low, 2 * high):
            stage, full = ring.acquire(iteration)
            chunk = (tile.slot + i // 2) * scheduler.HV + tile.head
            if flags is not None:
                if i % 2 == 0:
                    wait_for(flags + chunk)
                    gl.atomic_add(flags + chunk, -1, sem="relaxed", scope="gpu")
            at = (chunk * (TILES * 64) + i % 2 * HALF).to(gl.int32)
            mbarrier.expect(full, TILES * PIECE_BYTES)
            for t in gl.static_range(TILES):
                copy_tile(tiles_d, [at + t * 64, 0], full, ring.tile(stage, t))
            token = tile.begin + i * HALF
            rows = v + (in_head + wide(token, v_token) * 8)
            inside = (row < (stop - token).to(gl.int32))[:, None]
            copy_async(ring.rows.index(stage), rows + in_v, mask=inside)
            copy_async(ring.decay.index(stage), decay + (chunk * (4 * K) + i % 2 * (2 * K)) + key)
            async_copy.mbarrier_arrive(full, increment_count=False)
            iteration += 1


@gluon.jit
def start_step(ring, s, state0, state1, v_t):
    half_zero = gl.zeros((BV, HALF), gl.float32, layout=ACC_HALF)
    inverse = ring.tile(s, 6).slice(0, 32, 1)
    v_new_t = mma_first(v_t, inverse.permute((1, 0)), half_zero)
    state0 = state0 * ring.decays(s, 0, ACC)
    left0 = as_left(state0)
    v_new_t = mma(left0, ring.tile(s, 0).permute((1, 0)), v_new_t)
    state1 = state1 * ring.decays(s, 1, ACC)
    left1 = as_left(state1)
    v_new_t = mma(left1, ring.tile(s, 1).permute((1, 0)), v_new_t)
    out = mma_first(left0, ring.tile(s, 2).permute((1, 0)), half_zero)
    out = mma(left1, ring.tile(s, 3).permute((1, 0)), out)
    return state0, state1, v_new_t, out, v_t, left0, left1


@gluon.jit
def middle_of_step(ring, s, state0, state1, v_new_t, out, v_t, left0, left1):
    Aqk = ring.tile(s, 6).slice(32, 32, 1)
    v_new_t, v_t = warpgroup_mma_wait(2, deps=[v_new_t, v_t])
    v_new_left = as_left(v_new_t)
    state0 = mma(v_new_left, ring.tile(s, 4), state0)
    state1 = mma(v_new_left, ring.tile(s, 5), state1)
    out = mma(v_new_left, Aqk.permute((1, 0)), out)
    return state0, state1, out, v_new_left, left0, left1


@gluon.jit
def end_step(ring, s, state0, state1, out, v_new_left, left0, left1):
    state0, left0 = warpgroup_mma_wait(2, deps=[state0, left0])
    state0 = state0 * ring.decays(s, 2, ACC)
    state1, left1 = warpgroup_mma_wait(1, deps=[state1, left1])
    state1 = state1 * ring.decays(s, 3, ACC)
    out, v_new_left = warpgroup_mma_wait(0, deps=[out, v_new_left])
    return state0, state1, out


@gluon.jit
def compute(ring, o_s, o, states, records, scheduler, strides, K, V, EARLY):
    initial_state, final_state, state_pitch, has_initial, has_final = states
    HV = scheduler.HV
    slice_ = scheduler.slice()
    o_batch, o_token, o_head = strides
    key = gl.arange(0, 64, layout=gl.SliceLayout(0, ACC))
    NEXT: gl.constexpr = 64 * V
    row = gl.arange(0, C, layout=gl.SliceLayout(1, ROWS))
    column = gl.arange(0, BV, layout=gl.SliceLayout(0, ROWS))
    in_o = row[:, None] * (o_token * 8) + column[None, :]
    zero = gl.zeros((BV, C), gl.float32, layout=ACC)
    iteration = 0
    tiles, segments = scheduler.count()
    for k in range(tiles):
        tile = scheduler.tile(k, segments)
        head, start = tile.head, tile.begin
        o_tile = o + (wide(tile.batch, o_batch) + wide(head, o_head)) * 8 + slice_ * BV
        stop, chunks, low, high = scheduler.span(tile, 0, start, tile.slot)
        total = high - low
        value = slice_ * BV + gl.arange(0, BV, layout=gl.SliceLayout(1, ACC))
        at = tile.n * state_pitch + state_offsets(head * K * V, value + hidden_zero(iteration), key, K, V, False)
        state0, state1 = load_halves(initial_state, at, NEXT, has_initial, K, True)
        first = iteration
        if total > 0:
            done = zero.to(gl.bfloat16)
            done_token = tile.begin
            done_count = 0
            v_t = ring.values(ring.wait(iteration))
            for i in range(low, high):
                s = iteration % ring.STAGES
                begun = start_step(ring, s, state0, state1, v_t)
                store_transposed(o_tile, o_s, done, done_token, done_count, row, in_o, o_token)
                begun = middle_of_step(ring, s, *begun)
                iteration += 1
                if EARLY:
                    later = ring.wait(iteration)
                    v_t = ring.values(later)
                state0, state1, out_first = end_step(ring, s, *begun)
                ring.release(s)
                if not EARLY:
                    later = ring.wait(iteration)
                    v_t = ring.values(later)
                s = iteration % ring.STAGES
                begun = start_step(ring, s, state0, state1, v_t)
                begun = middle_of_step(ring, s, *begun)
                iteration += 1
                ahead = gl.minimum(iteration, first + 2 * total - 1)
                if EARLY:
                    v_t = ring.values(ring.wait(ahead))
                state0, state1, out = end_step(ring, s, *begun)
                if not EARLY:
                    v_t = ring.values(ring.wait(ahead))
                ring.release(s)
                out = beside(out_first, out, ACC)
                done_token = start + i * C
                done_count = (stop - done_token).to(gl.int32)
                done = out.to(gl.bfloat16)
            store_transposed(o_tile, o_s, done, done_token, done_count, row, in_o, o_token)
        at = tile.n * state_pitch + state_offsets(head * K * V + hidden_zero(iteration), value, key, K, V, False)
        store_halves(final_state, at, NEXT, state0, state1, has_final, K, True)
    gl.store(records + 2, globaltimer())


@gluon.jit(do_not_specialize=(*SCALARS_AND_STRIDES,))
def recurrence_spike(
    tiles_d, decay, v, o, cu_seqlens, flags, records, initial_state, final_state,
    has_initial: gl.int32, has_final: gl.int32, state_pitch: gl.int64,
    T: gl.int32, N: gl.int32, HV: gl.int32, slots: gl.int32,
    v_batch: gl.int32, v_token: gl.int32, v_head: gl.int32, o_batch: gl.int32, o_token: gl.int32, o_head: gl.int32,
    K: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr, LOADER: gl.constexpr, EARLY: gl.constexpr,
):
    """`flags`: None, or as `prepare_spike` leaves them; each of a head's two CTAs takes 1 off. `LOADER`: its registers."""
    ring = make_ring(tiles_d, K, STAGES)
    o_s = gl.allocate_shared_memory(gl.bfloat16, [C, BV], tiles_d.layout)
    records += gl.program_id(0) * 4
    gl.store(records, smid().to(gl.int64))
    gl.store(records + 1, globaltimer())
    scheduler = TileScheduler(None, None, cu_seqlens, None, T, N, HV, slots, 0, V // BV)
    states = (initial_state, final_state, state_pitch, has_initial, has_final)
    in_v = (v_batch, v_token, v_head)
    in_o = (o_batch, o_token, o_head)
    gl.warp_specialize(
        [
            (compute, (ring, o_s, o, states, records, scheduler, in_o, K, V, EARLY)),
            (load, (tiles_d, decay, v, flags, ring, scheduler, in_v, K)),
        ],
        [1],
        [LOADER],
    )
