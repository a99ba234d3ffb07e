"""Stage `reverse` of the backward pass for Hopper: scans a sequence's chunks from the last to the first and leaves the gradient
of the state after each. A tile is a (sequence, value head, slice of 64 value channels), or a segment of a split sequence.

Contract: as `triton/reverse.py`, from the tiles that `prepare` leaves; `grad_h [R, HV, V, K]` has the chunks of all sequences
one after the other.

As in `recurrence`, everything is transposed: the gradients of the state `[64, K]` and of v_new `[64, 64]` are accumulators of
one MMA and, rounded to bf16, register operands of the next.
"""

from __future__ import annotations

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from ...program.launch import Launch
from ..shared.gluon.compat import copy_async, copy_tile
from ..shared.gluon.math import hidden_zero, wide
from ..shared.gluon.steps import ROWS
from ..shared.scalars import SCALARS_AND_STRIDES
from ..shared.sequences import crossing_packet
from ..shared.states import state_offsets
from ..stages.launch import StageCall, launch_div8
from .device.layouts import (
    ACC,
    BV,
    LEFT,
    LINES,
    C,
    as_left,
    load_halves,
    loader_offsets,
    position,
    store_halves,
    store_transposed,
    to_lines,
)
from .device.pipeline import make_ring
from .device.tile_scheduler import TileScheduler, rows_before
from .device.wgmma import mma, mma_first
from .launch import TILE, chunks_in_flight, ctas, tiles, work_tiles


@gluon.jit
def wanted_chunks(tile, offsets):
    """Counts the chunks to scan in a work tile. A sequence's first segment has no offset: nobody needs it."""
    chunks = (tile.end - tile.begin + C - 1) // C
    if offsets is not None:
        chunks = gl.where(tile.is_segment & (tile.first > 0), chunks, 0)
    return chunks


@gluon.jit
def own_offsets(n, head, HV, value, key, iteration, K, V, V_FIRST):
    """Offsets of the elements of state `n` of a head, worked out anew."""
    first = (n.to(gl.int64) * HV + head) * (K * V)
    return state_offsets(first, value + hidden_zero(iteration), key, K, V, V_FIRST)


@gluon.jit
def load(tiles_d, decay, grad_o, offsets, ring, scheduler, strides, K):
    """The loader: one warp that keeps the ring full, of each chunk with all tiles but `inverse`."""
    HV = scheduler.HV
    slice_ = scheduler.slice()
    o_batch, o_token, o_head = strides
    KH: gl.constexpr = K // 64
    row, in_o, key = loader_offsets(o_token, K)
    iteration = 0
    tiles, segments = scheduler.count()
    for k in range(tiles):
        tile = scheduler.tile(k, segments)
        tokens = tile.end - tile.begin
        chunks = wanted_chunks(tile, offsets)
        in_head = (wide(tile.batch, o_batch) + wide(tile.head, o_head)) * 8 + slice_ * BV
        for step in range(chunks):
            i = chunks - 1 - step
            stage, full = ring.acquire(iteration)
            chunk = (tile.slot + i) * HV + tile.head
            at = (chunk * ((3 * KH + 2) * 64)).to(gl.int32)
            ring.expect(full)
            for t in gl.static_range(3 * KH):
                copy_tile(tiles_d, [at + t * 64, 0], full, ring.tile(stage, t))
            copy_tile(tiles_d, [at + (3 * KH + 1) * 64, 0], full, ring.tile(stage, 3 * KH))
            rows = grad_o + (in_head + wide(tile.begin + i * C, o_token) * 8)
            inside = (row < (tokens - i * C).to(gl.int32))[:, None]
            copy_async(ring.rows.index(stage), rows + in_o, mask=inside)
            copy_async(ring.decay.index(stage), decay + chunk * K + key)
            ring.commit(full)
            iteration += 1


@gluon.jit
def compute(ring, staging_s, outputs, grad_final, has_initial, has_final, between, scheduler, K, V, V_FIRST):
    """The consumer: four warps that carry a tile's gradient from chunk to chunk. A chunk's results go to memory during the
    next one's first MMAs. No MMA is in flight from chunk to chunk, as in `recurrence`."""
    grad_v_new, grad_h, grad_initial, border, packet = outputs
    offsets, ends = between
    T = scheduler.T
    HV = scheduler.HV
    slice_ = scheduler.slice()
    KH: gl.constexpr = K // 64
    # the tiles of a stage
    W: gl.constexpr = 0
    QG: gl.constexpr = KH
    KG: gl.constexpr = 2 * KH
    AQK: gl.constexpr = 3 * KH
    key = gl.arange(0, 64, layout=gl.SliceLayout(0, LINES))
    value = slice_ * BV + gl.arange(0, BV, layout=gl.SliceLayout(1, LINES))
    NEXT: gl.constexpr = 64 if V_FIRST else 64 * V
    row = position(gl.arange(0, C, layout=gl.SliceLayout(1, ROWS)))
    column = gl.arange(0, BV, layout=gl.SliceLayout(0, ROWS))
    in_state = value[:, None] * K + key[None, :]
    token_stride = HV * (V // 8)
    in_v_new = row[:, None] * (HV * V) + column[None, :]
    zero = gl.zeros((BV, C), gl.float32, layout=ACC)
    iteration = 0
    tiles, segments = scheduler.count()
    for k in range(tiles):
        tile = scheduler.tile(k, segments)
        tokens = tile.end - tile.begin
        chunks = wanted_chunks(tile, offsets)
        first = tile.n * ((T + C - 1) // C)
        if scheduler.cu_seqlens is not None:
            first = rows_before(scheduler.cu_seqlens, tile.n, T, C, gl.minimum(tile.begin, 0))
        if scheduler.first_segment is not None:
            first += tile.first
        at = own_offsets(tile.n, tile.head, HV, value, key, iteration, K, V, V_FIRST)
        if scheduler.first_segment is None:
            state0, state1 = load_halves(grad_final, at, NEXT, has_final, K)
        else:
            in_segment = state_offsets(tile.segment.to(gl.int64) * (K * V), value, key, K, V, True)
            if offsets is not None:
                state0, state1 = load_halves(grad_final, at, NEXT, gl.where(tile.stop > 0, 0, has_final), K)
            elif tile.is_segment:
                state0, state1 = load_halves(ends, in_segment, 64, 1, K)
            else:
                state0, state1 = load_halves(grad_final, at, NEXT, has_final, K)
        if grad_v_new is not None:
            v_new_tile = grad_v_new + (wide(tile.batch, T) * HV + tile.head) * V + slice_ * BV
        if chunks > 0:
            done = zero.to(gl.bfloat16)
            done_token = tile.begin
            done_count = 0
            ahead = ring.wait(iteration)
            o_t = ring.rows.index(ahead).permute((1, 0)).load(LEFT)
            for step in range(chunks):
                i = chunks - 1 - step
                s = iteration % ring.STAGES
                left0 = as_left(state0)
                if KH == 2:
                    left1 = as_left(state1)
                v_new_t = mma_first(o_t, ring.tile(s, AQK), zero)
                state0 = state0 * ring.decays(s, 0, ACC)
                if KH == 2:
                    state1 = state1 * ring.decays(s, 1, ACC)
                v_new_t = mma(left0, ring.tile(s, KG).permute((1, 0)), v_new_t)
                if KH == 2:
                    v_new_t = mma(left1, ring.tile(s, KG + 1).permute((1, 0)), v_new_t)
                state0 = mma(o_t, ring.tile(s, QG), state0)
                if KH == 2:
                    state1 = mma(o_t, ring.tile(s, QG + 1), state1)
                if grad_h is not None:
                    here = grad_h + (wide(first + i, HV) + tile.head) * (K * V)
                    gl.store(here + in_state, to_lines(gl.convert_layout(left0, ACC, assert_trivial=True)))
                    if KH == 2:
                        gl.store(here + 64 + in_state, to_lines(gl.convert_layout(left1, ACC, assert_trivial=True)))
                if grad_v_new is not None:
                    store_transposed(v_new_tile, staging_s, done, done_token, done_count, row, in_v_new, token_stride)
                if KH == 2:
                    v_new_t, left0, left1 = warpgroup_mma_wait(KH, deps=[v_new_t, left0, left1])
                else:
                    v_new_t, left0 = warpgroup_mma_wait(KH, deps=[v_new_t, left0])
                v_new_left = as_left(v_new_t)
                done = gl.convert_layout(v_new_left, ACC, assert_trivial=True)
                # w is stored negated
                state0 = mma(v_new_left, ring.tile(s, W), state0)
                if KH == 2:
                    state1 = mma(v_new_left, ring.tile(s, W + 1), state1)
                done_token = tile.begin + i * C
                done_count = (tokens - i * C).to(gl.int32)
                # the last chunk loads its own rows again, which nobody uses
                iteration += 1
                ahead = ring.wait(gl.where(step + 1 < chunks, iteration, iteration - 1))
                later_o = ring.rows.index(ahead).permute((1, 0)).load(LEFT)
                if KH == 2:
                    state0, state1, v_new_left, o_t = warpgroup_mma_wait(0, deps=[state0, state1, v_new_left, o_t])
                else:
                    state0, v_new_left, o_t = warpgroup_mma_wait(0, deps=[state0, v_new_left, o_t])
                o_t = later_o
                ring.release(s)
            if grad_v_new is not None:
                store_transposed(v_new_tile, staging_s, done, done_token, done_count, row, in_v_new, token_stride)
        at = own_offsets(tile.n, tile.head, HV, value, key, iteration, K, V, V_FIRST)
        if offsets is not None:
            store_halves(offsets, in_segment, 64, state0, state1, (chunks > 0).to(gl.int32), K)
        elif scheduler.first_segment is not None:
            store_halves(grad_initial, at, NEXT, state0, state1, gl.where(tile.first > 0, 0, has_initial), K)
        else:
            store_halves(grad_initial, at, NEXT, state0, state1, has_initial, K)
        if border is not None:
            place, crosses = crossing_packet(border, tile.n, 1 if scheduler.cu_seqlens is not None else scheduler.N)
            if scheduler.first_segment is not None:
                crosses &= tile.first == 0
            in_packet = own_offsets(place, tile.head, HV, value, key, iteration, K, V, V_FIRST)
            store_halves(packet, in_packet, NEXT, state0, state1, crosses.to(gl.int32), K)


@gluon.jit(do_not_specialize=SCALARS_AND_STRIDES)
def reverse_kernel(
    tiles_d, decay, grad_o, grad_final, grad_v_new, grad_h,
    grad_initial, first_segment, offsets, ends, border, packet, cu_seqlens,
    has_initial: gl.int32, has_final: gl.int32, T: gl.int32, N: gl.int32, HV: gl.int32,
    slots: gl.int32, o_batch: gl.int32, o_token: gl.int32, o_head: gl.int32,
    K: gl.constexpr, V: gl.constexpr, V_FIRST: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    ring = make_ring(tiles_d, K, STAGES, 3 * (K // 64) + 1)
    staging_s = gl.allocate_shared_memory(gl.bfloat16, [C, BV], tiles_d.layout)
    scheduler = TileScheduler(  # type: ignore[call-arg]
        None, first_segment, cu_seqlens, None, T, N, HV, slots, 0, V // BV, None, 1
    )
    strides = (o_batch, o_token, o_head)
    outputs = (grad_v_new, grad_h, grad_initial, border, packet)
    between = (offsets, ends)
    gl.warp_specialize([
        (compute, (ring, staging_s, outputs, grad_final, has_initial, has_final, between, scheduler, K, V, V_FIRST)),
        (load, (tiles_d, decay, grad_o, offsets, ring, scheduler, strides, K)),
    ], [1], [96])  # fmt: skip


def reverse(call: StageCall, own: dict[str, Any]) -> Launch:
    problem, most = call.problem, ctas(call.problem.V // TILE, call.t.device)
    used = most if own["ends"] is not None and problem.N > 0 else min(work_tiles(problem), most)
    own = dict(own, tiles_d=tiles(call.workspace["tiles"]), decay=call.workspace["decay"])
    own["STAGES"] = chunks_in_flight(problem, 3 * problem.K // TILE + 2, beside=1)
    return launch_div8(reverse_kernel, used, problem, call.t, own)
