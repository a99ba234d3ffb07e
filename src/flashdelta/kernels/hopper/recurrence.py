"""Stages `recurrence` and `output` for Hopper: the scan over a sequence's chunks. A tile is a (sequence, value head, slice of
64 value channels). There is a persistent CTA per SM, which does every n-th tile or, by stream-K, an equal range of all chunks:
the chunks of its next tile are on their way while it finishes one. CTAs of one head's slices do the same at the same time: what
they both read comes from memory once.

Contract: as `triton/recurrence.py`, from the tiles that `prepare` leaves. For the backward pass without `o`, with
`v_new [B, T, HV, V]` and all `h`, V first.

Everything is transposed: the state `S^T [64, K]` and `v_new^T [64, 64]` are accumulators of one MMA and, rounded to bf16,
register operands of the next.
"""

from __future__ import annotations

import math

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait
from triton.language.extra.cuda import gdc_wait

from ...problem.problem import ChunkProblem
from ...program.launch import Launch
from ..shared.gluon.compat import copy_async, copy_tile
from ..shared.gluon.math import column_halves, hidden_zero, wide
from ..shared.gluon.steps import ACC_HALF, ROWS
from ..shared.scalars import SCALARS_AND_STRIDES
from ..shared.sequences import crossing_packet
from ..shared.states import checkpoint_slot, checkpoint_target, sequence_slot, state_offsets
from ..stages.launch import StageCall, checkpoint_arguments, launch_div8, packet_arguments, state_arguments
from .device.layouts import (
    ACC,
    BV,
    LEFT,
    LINES,
    C,
    as_left,
    beside,
    load_halves,
    loader_offsets,
    position,
    store_halves,
    store_transposed,
    to_lines,
)
from .device.pipeline import make_ring, signal, wait
from .device.stream_k import stream_k_range
from .device.tile_scheduler import TileScheduler, rows_before, span_chunks_before
from .device.wgmma import mma, mma_first
from .launch import TILE, chunk_tiles, chunks_in_flight, ctas, overlaps_prepare, parts, tiles, work_tiles

TOKEN, COUNT, SLOT, SPAN, CHUNKS = (gl.constexpr(i) for i in range(5))
"""A chunk as the loader describes it where checkpoints cut sequences: its first token, its tokens, the slot for the
state after it, the next span if that ends there, too (both -1 for none), and the work tile's chunks."""
FIELDS = gl.constexpr(8)


@gluon.jit
def describe(info, stage, token, count, chunks, slot, span):
    """The loader's, before `ring.expect`, which publishes it."""
    field = gl.arange(0, FIELDS, layout=gl.BlockedLayout([FIELDS], [32], [1], [0]))
    values = gl.where(field == TOKEN, token, gl.where(field == COUNT, count, chunks))
    info.index(stage).store(gl.where(field == SLOT, slot, gl.where(field == SPAN, span, values)))


@gluon.jit
def described(info, stage, field: gl.constexpr):
    """The computing warps', of a full stage."""
    return gl.sum(info.index(stage).slice(field, 1).load(gl.BlockedLayout([1], [32], [4], [0])))


@gluon.jit
def chunk_of(info, stage):
    """The chunk as `describe` found it: its first token, its tokens, and where the state after it goes."""
    token, count = described(info, stage, TOKEN), described(info, stage, COUNT)
    return token, count, described(info, stage, SLOT), described(info, stage, SPAN)


tiles_of_chunk = gluon.constexpr_function(chunk_tiles)


@gluon.jit
def load(tiles_d, decay, v, ring, info, scheduler, target, strides, K, STEPS, OUTPUT):
    """The loader: one warp that keeps the ring full, without the tiles `qg` and `Aqk` where there is no `OUTPUT`. It is ahead
    of the warps that compute, so these read offsets and indices of checkpoints only where several lie after one token."""
    slice_ = scheduler.slice()
    v_batch, v_token, v_head = strides
    TILES: gl.constexpr = tiles_of_chunk(K, STEPS)
    QG: gl.constexpr = K // 64
    row, in_v, key = loader_offsets(v_token, K, STEPS)
    iteration = 0
    tiles, segments = scheduler.count()
    for k in range(tiles):
        tile = scheduler.tile(k, segments)
        in_head = (wide(tile.batch, v_batch) + wide(tile.head, v_head)) * 8 + slice_ * BV
        start = tile.begin
        slot = tile.slot
        if info is not None:
            total = scheduler.chunks(tile)
        for span in range(0, tile.num_spans):
            stop, chunks, low, high = scheduler.span(tile, span, start, slot)
            if info is not None:
                wanted, further = span_checkpoint(scheduler, tile, span, stop, target)
            for i in range(low, high):
                stage, full = ring.acquire(iteration)
                if info is not None:
                    ends = i + 1 == chunks
                    of_end = (gl.where(ends, wanted, -1), gl.where(ends, further, -1))
                    describe(info, stage, start + i * C, gl.minimum(stop - start - i * C, C), total, *of_end)
                chunk = (slot + i) * scheduler.HV + tile.head
                at = (chunk * (TILES * 64)).to(gl.int32)
                ring.expect(full)
                for t in gl.static_range(ring.TILES):
                    stored = t if OUTPUT or t < QG else t + QG
                    copy_tile(tiles_d, [at + stored * 64, 0], full, ring.tile(stage, t))
                token = start + i * C
                rows = v + (in_head + wide(token, v_token) * 8)
                # zeros past the end: a NaN of the next sequence would spread through the products
                inside = (row < (stop - token).to(gl.int32))[:, None]
                copy_async(ring.rows.index(stage), rows + in_v, mask=inside)
                DECAYS: gl.constexpr = 4 * K if STEPS else K
                copy_async(ring.decay.index(stage), decay + chunk * DECAYS + key)
                ring.commit(full)
                iteration += 1
            slot += chunks
            start = stop


@gluon.jit
def rows_of_step(ring, stage, tile: gl.constexpr, STEP):
    """`[32, 64]`: of a tile of a stage."""
    return ring.tile(stage, tile).slice(32 * STEP, 32)


@gluon.jit
def new_values(ring, s, STEP, inverse, state0, state1, v_t, KH):
    """Starts step 0 or 1 of the chunk in stage `s`, of 32 tokens with `v^T` and `v_new^T` `[64, 32]`:

        S' = exp(G_m) S        v_new = inverse v - w S'

    Each half of the channels is multiplied while MMAs of the other run. Returns S', `v_new^T`, on which they still work, and
    their left operands.
    """
    W: gl.constexpr = 0
    half_zero = gl.zeros((BV, C // 2), gl.float32, layout=ACC_HALF)
    v_new_t = mma_first(v_t, inverse.permute((1, 0)), half_zero)
    state0 = state0 * ring.decays(s, 2 * KH * STEP, ACC)
    left0 = as_left(state0)
    v_new_t = mma(left0, rows_of_step(ring, s, W, STEP).permute((1, 0)), v_new_t)
    if KH == 2:
        state1 = state1 * ring.decays(s, 2 * KH * STEP + 1, ACC)
        left1 = as_left(state1)
        v_new_t = mma(left1, rows_of_step(ring, s, W + 1, STEP).permute((1, 0)), v_new_t)
    else:
        left1 = left0
    return state0, state1, v_new_t, left0, left1


@gluon.jit
def start_step(ring, s, STEP, state0, state1, v_t, KH):
    """`new_values`, and the first summand of the output:

        o = qa S' + Aqk v_new        S = exp(G_C - G_m) (S' + kb^T v_new)

    `end_step` adds what takes `v_new`.
    """
    QA: gl.constexpr = KH
    half_zero = gl.zeros((BV, C // 2), gl.float32, layout=ACC_HALF)
    inverse = rows_of_step(ring, s, 3 * KH, STEP).slice(0, 32, 1)
    state0, state1, v_new_t, left0, left1 = new_values(ring, s, STEP, inverse, state0, state1, v_t, KH)
    out = mma_first(left0, rows_of_step(ring, s, QA, STEP).permute((1, 0)), half_zero)
    if KH == 2:
        out = mma(left1, rows_of_step(ring, s, QA + 1, STEP).permute((1, 0)), out)
    return state0, state1, v_new_t, out, v_t, left0, left1


@gluon.jit
def end_step(ring, s, STEP, state0, state1, v_new_t, out, v_t, left0, left1, KH):
    """The states after the step that `start_step` began, and `o^T [64, 32]`."""
    KB: gl.constexpr = 2 * KH
    Aqk = rows_of_step(ring, s, 3 * KH, STEP).slice(32, 32, 1)
    v_new_t, v_t = warpgroup_mma_wait(KH, deps=[v_new_t, v_t])
    v_new_left = as_left(v_new_t)
    state0 = mma(v_new_left, rows_of_step(ring, s, KB, STEP), state0)
    if KH == 2:
        state1 = mma(v_new_left, rows_of_step(ring, s, KB + 1, STEP), state1)
    out = mma(v_new_left, Aqk.permute((1, 0)), out)
    state0, left0 = warpgroup_mma_wait(KH, deps=[state0, left0])
    state0 = state0 * ring.decays(s, 2 * KH * STEP + KH, ACC)
    if KH == 2:
        state1, left1 = warpgroup_mma_wait(1, deps=[state1, left1])
        state1 = state1 * ring.decays(s, 2 * KH * STEP + KH + 1, ACC)
    out, v_new_left = warpgroup_mma_wait(0, deps=[out, v_new_left])
    return state0, state1, out


@gluon.jit
def store_inside(row, value, key, iteration, state0, state1, K, V, V_FIRST, STEPS):
    """Stores a state inside the loop over chunks. Its offsets are worked out where they are needed: before the loop, where the
    compiler would have them, they take registers from all of it."""
    # K, V and V_FIRST are parameters of their own, here and below: as constants in a tuple Triton 3.6 fails on them for K = 64
    # the 0 belongs to the channels that lie side by side: added to the others it costs up to 136 B of spills
    if V_FIRST:
        key += hidden_zero(iteration)
    else:
        value += hidden_zero(iteration)
    at = state_offsets(0, value, key, K, V, V_FIRST)
    store_halves(row, at, 64 if V_FIRST else 64 * V, state0, state1, 1, K, STEPS)


@gluon.jit
def span_checkpoint(scheduler, tile, span, stop, target):
    """The slot for the state where a span ends, at token `stop`, and the next span if that ends there, too; -1 for
    none. A sequence's last span ends with the final state."""
    indices, _, _, lowest, most = target
    slot, stored = checkpoint_slot(
        *(scheduler.checkpoint_offsets, indices, scheduler.row(tile), span, tile.num_spans),
        *(stop - tile.begin, lowest, most),
    )
    further = (span + 2 < tile.num_spans) & (scheduler.span_stop(tile, span + 1, stop) == stop)
    return gl.where(stored != 0, slot, -1).to(gl.int32), gl.where(further, span + 1, -1).to(gl.int32)


@gluon.jit
def store_checkpoints(
    scheduler, tile, stop, slot, span, target, value, key, iteration, state0, state1, K, V, V_FIRST, STEPS,
):  # fmt: skip
    """The states after token `stop`: in `slot`, and in those of spans from `span` on that end there, too; -1 for none."""
    _, states, pitch, _, _ = target
    while (slot >= 0) | (span >= 0):
        if slot >= 0:
            own = states + (slot.to(gl.int64) * pitch + tile.head * (K * V))
            store_inside(own, value, key, iteration, state0, state1, K, V, V_FIRST, STEPS)
        slot = slot * 0 - 1
        if span >= 0:
            slot, span = span_checkpoint(scheduler, tile, span, stop, target)


@gluon.jit
def compute(ring, info, o_s, outputs, states, starting, scheduler, strides, K, V, V_FIRST, H_V_FIRST, STEPS):
    """The consumer: four warps that carry a tile's state from chunk to chunk. Chunks below have 64 tokens; with
    `STEPS` a chunk is two steps of 32, each a `start_step` and an `end_step`, and its stage has one tile less.

    A stage holds the chunk's tiles `-w, qg, kg` (K / 64 each), `inverse = (I + A)^-1 diag(beta)` and `Aqk`, its decays and v:

         loader warp            Ring of STAGES chunks                four warps, S^T [64, K] in registers
        +-----------+  full   +------------------------+
        | TMA       | ------> | -w qg kg inverse Aqk   |  v_new^T [64, 64] = v^T inverse^T + S^T (-w)^T      o_s
        | cp.async  | <------ | decay [K]   v [64, 64] |  o^T     [64, 64] = S^T qg^T + v_new^T Aqk^T  --> [64, 64] --> o
        +-----------+  empty  +------------------------+  S^T     [64, K]  = S^T decay + v_new^T kg

    MMAs run in the order in which they are issued, and the warps work beside them. One chunk:

        MMAs              v^T inverse^T   S^T (-w)^T    S^T qg^T      v_new^T Aqk^T, v_new^T kg
        warps    round S  decay S         store the     round v_new   load the next chunk's v   release the stage,
                                          last o                                                round o

    No MMA is in flight from chunk to chunk: ptxas would wait for it before the first use of the state.
    """
    o, h, v_new = outputs
    initial_state, final_state, state_pitch, has_initial, has_final, pool, checkpoints, for_next = states
    border, packet = for_next
    state_indices, has_initial_state, lowest, pool_slots = pool
    target, checkpoint_every, checkpoint_rows = checkpoints
    _, checkpoint_states, pitch, _, _ = target
    carry, semaphore, starts = starting
    HV = scheduler.HV
    SLICES: gl.constexpr = V // BV
    slice_ = scheduler.slice()
    o_batch, o_token, o_head = strides
    KH: gl.constexpr = K // 64
    # the tiles of a stage
    OUTPUT: gl.constexpr = o is not None
    W: gl.constexpr = 0
    QG: gl.constexpr = KH
    KG: gl.constexpr = 2 * KH if OUTPUT else KH
    INVERSE: gl.constexpr = KG + KH
    AQK: gl.constexpr = INVERSE + 1
    STATE: gl.constexpr = ACC if STEPS else LINES
    key = gl.arange(0, 64, layout=gl.SliceLayout(0, STATE))
    NEXT: gl.constexpr = 64 if V_FIRST else 64 * V
    H_NEXT: gl.constexpr = 64 if H_V_FIRST else 64 * V
    row = gl.arange(0, C, layout=gl.SliceLayout(1, ROWS))
    if not STEPS:
        row = position(row)
    column = gl.arange(0, BV, layout=gl.SliceLayout(0, ROWS))
    in_o = row[:, None] * (o_token * 8) + column[None, :]
    zero = gl.zeros((BV, C), gl.float32, layout=ACC)
    # which 0 keeps the last state's offsets apart from the first's. In two cases one of the compilers would spill with
    # `hidden_zero`; in the backward pass of a split 3.9 with two counts instead of their sum, in stream-K 3.6 with the sum
    SUM: gl.constexpr = v_new is not None and scheduler.first_segment is not None
    ADDRESS_BARRIER: gl.constexpr = "counts" if scheduler.tile_range is not None else "count_sum" if SUM else "hidden"
    iteration = 0
    tiles, segments = scheduler.count()
    for k in range(tiles):
        tile = scheduler.tile(k, segments)
        head, start, slot = tile.head, tile.begin, tile.slot
        h_row = slot
        if h is not None:
            if scheduler.cu_seqlens is not None:
                if info is None:
                    h_row = rows_before(scheduler.cu_seqlens, tile.n, scheduler.T, C) + tile.first
                else:
                    h_row = span_chunks_before(scheduler, tile) + tile.first
            elif info is not None:
                # the slot is the sequence's first one, whatever its segment
                h_row = slot + tile.first
        if checkpoint_every is not None:
            every, nothing = checkpoint_every * C, gl.minimum(start, 0)
            next_row = rows_before(scheduler.cu_seqlens, tile.n, scheduler.T, every, nothing).to(gl.int32)
            passed = tile.first + nothing + checkpoint_every - 1
            next_row += passed // checkpoint_every
            to_checkpoint = checkpoint_every - 1 - passed % checkpoint_every
        own, read, stored = sequence_slot(
            *(state_indices, has_initial_state, tile.n, tile.end - tile.begin),
            *(lowest, pool_slots, has_initial, has_final),
        )
        if OUTPUT:
            o_tile = o + (wide(tile.batch, o_batch) + wide(head, o_head)) * 8 + slice_ * BV
        if v_new is not None:
            v_new_tile = v_new + (wide(tile.batch, scheduler.T) * HV + head) * V + slice_ * BV
        if info is None:
            total = scheduler.chunks(tile)
        in_slice = gl.arange(0, BV, layout=gl.SliceLayout(1, STATE))
        value = slice_ * BV + in_slice
        hidden = hidden_zero(iteration) if ADDRESS_BARRIER == "hidden" else 0
        at = own * state_pitch + state_offsets(head * K * V, value + hidden, key, K, V, V_FIRST)
        if tile.is_segment:
            # all segments: the last may store the final state before the first has read the initial one
            given = 1 - tile.restarts
            in_start = key
            if checkpoint_every is not None or info is not None:
                # plus a 0 as in `store_inside`, lest its addresses be kept over the loop over work tiles
                in_start = key + gl.minimum(start, 0) * 16
            at_start = state_offsets(tile.segment.to(gl.int64) * (K * V), value, in_start, K, V, True)
            state0, state1 = load_halves(starts, at_start, 64, given, K, STEPS)
        elif tile.carry_in:
            wait(semaphore - SLICES)
            at_start = state_offsets(-SLICES * (BV * K), in_slice, key, K, V, True)
            state0, state1 = load_halves(carry, at_start, 64, 1, K, STEPS)
        else:
            if scheduler.forgets is not None:
                read = gl.where(tile.first > 0, 0, read)
            state0, state1 = load_halves(initial_state, at, NEXT, read, K, STEPS)
        if info is not None:
            total = tile.end - tile.begin
            if total > 0:
                total = described(info, ring.wait(iteration), CHUNKS)
        first = iteration
        if ADDRESS_BARRIER == "count_sum":
            past = iteration + total
        if total > 0:
            done = zero.to(gl.bfloat16)
            done_token = tile.begin
            done_count = 0
            ahead = ring.wait(iteration)
            v_t = ring.rows.index(ahead).permute((1, 0)).load(LEFT)
            if STEPS:
                v_t, v_later = column_halves(v_t, LEFT)
            # one loop over the chunks of all spans: ptxas of Triton 3.6 serialises the MMAs of nested ones
            low = 0
            high = total
            if info is None:
                stop, _chunks, low, high = scheduler.span(tile, 0, start, slot)
            for i in range(low, high):
                s = iteration % ring.STAGES
                if h is not None:
                    # in the backward pass, and with checkpoints, a row carried by the loop makes one of the ptxas spill
                    CARRIED: gl.constexpr = v_new is None and info is None
                    row_of_h = h_row if CARRIED else h_row + iteration - first
                    # with checkpoints addresses kept over the loop would spill
                    h_value = value if info is None else value + hidden_zero(iteration)
                    h_at = state_offsets(wide(row_of_h, HV * (K * V)) + head * (K * V), h_value, key, K, V, H_V_FIRST)
                    if CARRIED:
                        h_row += 1
                    gl.store(h + h_at, to_lines(state0.to(h.dtype.element_ty)))
                    if KH == 2:
                        gl.store(h + h_at + H_NEXT, to_lines(state1.to(h.dtype.element_ty)))
                if checkpoint_every is not None:
                    if to_checkpoint == 0:
                        if next_row < checkpoint_rows:
                            row_states = checkpoint_states + (next_row * pitch + head * (K * V))
                            store_inside(row_states, value, key, iteration, state0, state1, K, V, V_FIRST, STEPS)
                        next_row += 1
                        to_checkpoint = checkpoint_every
                    to_checkpoint -= 1
                if STEPS:
                    begun = start_step(ring, s, 0, state0, state1, v_t, KH)
                    if OUTPUT:
                        store_transposed(o_tile, o_s, done, done_token, done_count, row, in_o, o_token)
                    state0, state1, out_first = end_step(ring, s, 0, *begun, KH)
                    begun = start_step(ring, s, 1, state0, state1, v_later, KH)
                    if info is not None:
                        # while MMAs run: after them all warps would wait for it
                        done_token, done_count, wanted, further = chunk_of(info, s)
                    state0, state1, out = end_step(ring, s, 1, *begun, KH)
                    iteration += 1
                    ahead = ring.wait(gl.minimum(iteration, first + total - 1))
                    v_t, v_later = column_halves(ring.rows.index(ahead).permute((1, 0)).load(LEFT), LEFT)
                    out = beside(out_first, out, ACC)
                else:
                    left0 = as_left(state0)
                    if KH == 2:
                        left1 = as_left(state1)
                    v_new_t = mma_first(v_t, ring.tile(s, INVERSE).permute((1, 0)), zero)
                    state0 = state0 * ring.decays(s, 0, ACC)
                    if KH == 2:
                        state1 = state1 * ring.decays(s, 1, ACC)
                    # w is stored negated: v_new comes out of one accumulator, which holds inverse v
                    v_new_t = mma(left0, ring.tile(s, W).permute((1, 0)), v_new_t)
                    if KH == 2:
                        v_new_t = mma(left1, ring.tile(s, W + 1).permute((1, 0)), v_new_t)
                    if OUTPUT:
                        out = mma_first(left0, ring.tile(s, QG).permute((1, 0)), zero)
                        if KH == 2:
                            out = mma(left1, ring.tile(s, QG + 1).permute((1, 0)), out)
                        store_transposed(o_tile, o_s, done, done_token, done_count, row, in_o, o_token)
                    v_new_t, v_t = warpgroup_mma_wait(KH if OUTPUT else 0, deps=[v_new_t, v_t])
                    v_new_left = as_left(v_new_t)
                    if OUTPUT:
                        out = mma(v_new_left, ring.tile(s, AQK).permute((1, 0)), out)
                    state0 = mma(v_new_left, ring.tile(s, KG), state0)
                    if KH == 2:
                        state1 = mma(v_new_left, ring.tile(s, KG + 1), state1)
                    if v_new is not None:
                        token = start + i * C
                        store_transposed(
                            *(v_new_tile, o_s, v_new_t.to(gl.bfloat16), token, (stop - token).to(gl.int32), row),
                            *(row[:, None] * (HV * V) + column[None, :], HV * (V // 8)),
                        )
                    if info is not None:
                        # while MMAs run: after them all warps would wait for it
                        done_token, done_count, wanted, further = chunk_of(info, s)
                    # the last chunk loads its own v again, which nobody uses
                    iteration += 1
                    last = past - 1 if ADDRESS_BARRIER == "count_sum" else first + total - 1
                    ahead = ring.wait(gl.minimum(iteration, last))
                    v_t = ring.rows.index(ahead).permute((1, 0)).load(LEFT)
                    if not OUTPUT:
                        state0, state1, v_new_left = warpgroup_mma_wait(0, deps=[state0, state1, v_new_left])
                    elif KH == 2:
                        state0, state1, out, v_new_left, left0, left1 = warpgroup_mma_wait(
                            0, deps=[state0, state1, out, v_new_left, left0, left1]
                        )
                    else:
                        state0, out, v_new_left, left0 = warpgroup_mma_wait(0, deps=[state0, out, v_new_left, left0])
                ring.release(s)
                if info is None:
                    done_token = start + i * C
                    done_count = (stop - done_token).to(gl.int32)
                    if scheduler.forgets is not None:
                        # the chunk that a work tile restarts with is another's
                        done_count = gl.where(i < tile.restarts, 0, done_count)
                else:
                    end = done_token + done_count
                    store_checkpoints(
                        *(scheduler, tile, end, wanted, further, target, value, key, iteration),
                        *(state0, state1, K, V, V_FIRST, STEPS),
                    )
                if OUTPUT:
                    done = out.to(gl.bfloat16)
            if OUTPUT:
                store_transposed(o_tile, o_s, done, done_token, done_count, row, in_o, o_token)
        # 0, as iteration is first + total now
        if ADDRESS_BARRIER == "hidden":
            nothing = hidden_zero(iteration)
        else:
            nothing = (iteration - past if ADDRESS_BARRIER == "count_sum" else iteration - first - total) * 16
        at = own * state_pitch + state_offsets(head * K * V + nothing, value, key, K, V, V_FIRST)
        if scheduler.first_segment is not None:
            stored = gl.where(tile.is_segment & (tile.stop > 0), 0, stored)
        elif scheduler.forgets is not None:
            stored = gl.where(tile.stop > 0, 0, stored)
        if tile.carry_out:
            store_halves(carry, state_offsets(nothing, in_slice, key, K, V, True), 64, state0, state1, 1, K, STEPS)
            signal(semaphore)
        else:
            store_halves(final_state, at, NEXT, state0, state1, stored, K, STEPS)
            if border is not None:
                place, crosses = crossing_packet(
                    border + 1, tile.n, 1 if scheduler.cu_seqlens is not None else scheduler.N
                )
                if scheduler.first_segment is not None:
                    crosses &= tile.stop == 0
                in_state = (place.to(gl.int64) * HV + head) * (K * V)
                in_packet = state_offsets(in_state, value + nothing, key, K, V, True)
                store_halves(packet, in_packet, 64, state0, state1, crosses.to(gl.int32), K, STEPS)


@gluon.jit(do_not_specialize=SCALARS_AND_STRIDES)
def recurrence_kernel(
    tiles_d, decay, v, o, h, v_new, cu_seqlens,
    checkpoint_offsets, checkpoint_indices, checkpoint_states, checkpoint_every,
    checkpoint_rows, checkpoint_pitch, carry, semaphores,
    first_segment, starts, forgets, border, packet, initial_state, final_state, state_indices, has_initial_state,
    lowest: gl.int32, pool_slots: gl.int32, has_initial: gl.int32, has_final: gl.int32, state_pitch: gl.int64,
    T: gl.int32, N: gl.int32, HV: gl.int32, slots: gl.int32, checkpoints: gl.int32,
    v_batch: gl.int32, v_token: gl.int32, v_head: gl.int32, o_batch: gl.int32, o_token: gl.int32, o_head: gl.int32,
    parts, K: gl.constexpr, V: gl.constexpr, V_FIRST: gl.constexpr, H_V_FIRST: gl.constexpr, STAGES: gl.constexpr,
    STREAM_K: gl.constexpr, STEPS: gl.constexpr, OVERLAPS: gl.constexpr,
):  # fmt: skip
    DECAYS: gl.constexpr = 4 * K if STEPS else K
    OUTPUT: gl.constexpr = o is not None
    gl.static_assert(OUTPUT or not STEPS, "steps always have an output")
    TILES: gl.constexpr = tiles_of_chunk(K, STEPS) if OUTPUT else 2 * (K // 64) + 1
    ring = make_ring(tiles_d, DECAYS, STAGES, TILES)
    o_s = gl.allocate_shared_memory(gl.bfloat16, [C, BV], tiles_d.layout)
    if checkpoint_offsets is None:
        info: gl.constexpr = None
    else:
        info = gl.allocate_shared_memory(gl.int32, [STAGES, FIELDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    SLICES: gl.constexpr = V // BV
    if OVERLAPS:
        gdc_wait()
    if not STREAM_K:
        tile_range: gl.constexpr = None
    else:
        tile_range = stream_k_range(cu_seqlens, checkpoint_offsets, checkpoints, N, T, HV, SLICES)
        carry += gl.program_id(0) * (BV * K)
        semaphores += gl.program_id(0)
    PARTS = 1 if forgets is None or first_segment is not None else parts
    scheduler = TileScheduler(  # type: ignore[call-arg]
        tile_range, first_segment, cu_seqlens, checkpoint_offsets, T, N, HV, slots, checkpoints, SLICES, forgets, PARTS
    )
    in_v = (v_batch, v_token, v_head)
    in_o = (o_batch, o_token, o_head)
    outputs = (o, h, v_new)
    pool = (state_indices, has_initial_state, lowest, pool_slots)
    to, pitch, least, most = checkpoint_target(
        *(final_state, state_pitch, lowest, pool_slots, checkpoint_states, checkpoint_pitch, checkpoint_rows)
    )
    target = (checkpoint_indices, to, pitch, least, most)
    at_checkpoints = (target, checkpoint_every, checkpoint_rows)
    for_next = (border, packet)
    states = (initial_state, final_state, state_pitch, has_initial, has_final, pool, at_checkpoints, for_next)
    starting = (carry, semaphores, starts)
    gl.warp_specialize([
        (compute, (ring, info, o_s, outputs, states, starting, scheduler, in_o, K, V, V_FIRST, H_V_FIRST, STEPS)),
        (load, (tiles_d, decay, v, ring, info, scheduler, target, in_v, K, STEPS, OUTPUT)),
    ], [1], [96])  # fmt: skip


FULL_WAVE = 0.9
"""Share of the SMs that a last wave must fill for whole work tiles to do."""


MOST_WAVES = 10
"""From so many on the last wave matters little."""


def stream_k_pays(problem: ChunkProblem, ctas: int) -> bool:
    """Says whether `recurrence` deals out chunks evenly (stream-K): where whole work tiles would leave many SMs idle in the
    last wave, of all tiles or of the last sequence's. Otherwise CTAs take whole tiles, which is kinder to memory and leaves
    less to work out at each change of tile."""
    waves, last = work_tiles(problem) / ctas, problem.HV * (problem.V // TILE) / ctas
    return 1 < waves < MOST_WAVES and any(n > 1 and n < FULL_WAVE * math.ceil(n) for n in (waves, last))


def recurrence(
    call: StageCall,
    o: Tensor | None,
    final_state: Tensor | None,
    h: Tensor | None,
    v_new: Tensor | None = None,
    steps: bool = False,
) -> Launch:
    """The launch of the recurrence. With `v_new`, for the backward pass, `h` is V first and `o` may be None. `steps`: after
    `prepare_steps`."""
    problem, t = call.problem, call.t
    most, at_once = ctas(problem.V // TILE, t.device), parts(problem, t.device)
    overlaps = not steps and overlaps_prepare(call)
    fetched = 1 + (2 * problem.K // TILE + 1 if o is None else chunk_tiles(problem.K, steps))
    own = dict(
        **call.left("decay", "carry", "semaphores", "first_segment", "starts", "forgets"),
        **dict(tiles_d=tiles(call.workspace["tiles"]), o=o, h=h, v_new=v_new),
        **dict(checkpoint_arguments(problem, t) | packet_arguments(call) | state_arguments(problem, t, final_state)),
        H_V_FIRST=problem.state_v_first or v_new is not None,
        # in steps a stage has one tile less, and four decays of a channel; without an output neither qg nor Aqk
        STAGES=chunks_in_flight(problem, fetched, beside=1, decays=4 if steps else 1),
        STREAM_K=not call.may_split and stream_k_pays(problem, most),
        **dict(parts=at_once if "forgets" in call.workspace else None, STEPS=steps, OVERLAPS=overlaps),
    )
    used = most if call.may_split and problem.N > 0 else min(work_tiles(problem) * at_once, most)
    return launch_div8(recurrence_kernel, used, problem, t, own, overlaps=overlaps)
