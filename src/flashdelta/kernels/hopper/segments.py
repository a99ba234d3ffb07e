"""Sequences in segments (docs/split.md) for Hopper: the plan, and the segment transitions.

A transition is the affine map `S' = M S + b` from the state before a segment to the state after it, found for every segment but
a sequence's last. A tile is a (segment, value head, slice of 64 of the K + V columns of M and b); a persistent CTA per SM does
every n-th. Contract: as `triton/segments.py`, from the tiles that `prepare` leaves, or with `STEPS` those of
`prepare_steps`. It is `recurrence` without output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ...problem.problem import ChunkProblem
from ...problem.split import SplitCosts, segments_of_call
from ...program.launch import Launch, sm_count
from ...program.workspace import Layout
from ..shared.gluon.compat import copy_async, copy_tile
from ..shared.gluon.math import column_halves, hidden_zero, wide
from ..shared.gluon.steps import add
from ..shared.scalars import SCALARS_AND_STRIDES
from ..shared.segments import chunks_of, planned_parts, states_fit
from ..shared.sequences import span_count
from ..shared.states import sequence_slot, state_offsets
from ..stages.launch import StageCall, launch_div8, segment_layout, state_arguments
from ..stages.segments import compose, transition_arguments
from .device.layouts import ACC, BV, LEFT, LINES, C, as_left, from_lines, load_halves, loader_offsets, store_halves
from .device.pipeline import make_ring
from .device.tile_scheduler import TileScheduler
from .device.wgmma import mma, mma_first
from .launch import MOST_CTAS, TILE, chunks_in_flight, ctas, may_restart, parts, tiles
from .recurrence import new_values, rows_of_step


@gluon.jit
def plan_segments(
    cu_seqlens, checkpoint_offsets, first_segment, T, N, checkpoints, room, split, batch_invariant, COSTS,
):  # fmt: skip
    """`first_segment [N + 1]`: where each sequence's segments begin among all, for the whole CTA to write."""
    lane = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    spans = span_count(checkpoint_offsets, checkpoints)
    total = gl.full([], 0, gl.int64)
    for base in range(0, N, 128):
        total += gl.sum(chunks_of(base + lane, cu_seqlens, checkpoint_offsets, spans, N, T, C))
    fits = states_fit(total, cu_seqlens, spans, N, T, C)
    before = total * 0
    for base in range(0, N, 128):
        n = base + lane
        chunks = chunks_of(n, cu_seqlens, checkpoint_offsets, spans, N, T, C)
        segments = planned_parts(
            *(chunks, total, room, split, batch_invariant),
            *(COSTS[0], COSTS[1], COSTS[2], COSTS[3], COSTS[4], COSTS[5]),
        )
        segments = gl.where(n < N, gl.where(fits, segments, 1), 0)
        ends = before + gl.associative_scan(segments, 0, add)
        gl.store(first_segment + n, (ends - segments).to(gl.int32), mask=n < N)
        before += gl.sum(segments)
    gl.store(first_segment + N, before.to(gl.int32))


@gluon.jit
def transition_count(scheduler, border, K):
    if border is None:
        return scheduler.transition_count()
    else:
        return scheduler.outgoing_count(border, K)


@gluon.jit
def transition_slice(scheduler, border, K):
    """The CTA's slice of the columns of M and b."""
    if border is None:
        return scheduler.slice()
    else:
        return scheduler.outgoing_slice(border, K)


@gluon.jit
def transition(scheduler, border, k, K):
    """The CTA's transition number `k`: of a segment, or of a sequence that goes on to the next rank."""
    if border is None:
        return scheduler.transition(k, K)
    else:
        return scheduler.outgoing(k, border, K)


@gluon.jit
def load(sources, ring, scheduler, border, strides, K, STEPS):
    """The loader: one warp that keeps the ring full of `-w`, `kg` (in steps `kb`), `inverse`, v and decays."""
    tiles_d, decay, v = sources
    v_batch, v_token, v_head = strides
    slice_ = transition_slice(scheduler, border, K) - K // BV
    KH: gl.constexpr = K // 64
    TILES: gl.constexpr = 3 * KH + (1 if STEPS else 2)
    DECAYS: gl.constexpr = 4 * K if STEPS else K
    row, in_v, key = loader_offsets(v_token, K, STEPS)
    iteration = 0
    for k in range(transition_count(scheduler, border, K)):
        tile, _place, wanted = transition(scheduler, border, k, K)
        in_head = (wide(tile.batch, v_batch) + wide(tile.head, v_head)) * 8 + slice_ * BV
        start = tile.begin
        slot = tile.slot
        for span in range(0, gl.where(wanted > 0, tile.num_spans, 0)):
            stop, chunks, low, high = scheduler.span(tile, span, start, slot)
            for i in range(low, high):
                stage, full = ring.acquire(iteration)
                ring.expect(full)
                chunk = (slot + i).to(gl.int32) * scheduler.HV + tile.head
                at = chunk * (TILES * 64)
                for t in gl.static_range(KH):
                    copy_tile(tiles_d, [at + t * 64, 0], full, ring.tile(stage, t))
                    copy_tile(tiles_d, [at + (2 * KH + t) * 64, 0], full, ring.tile(stage, KH + t))
                copy_tile(tiles_d, [at + 3 * KH * 64, 0], full, ring.tile(stage, 2 * KH))
                token = (start + i * C).to(gl.int32)
                # no value writes to M's columns
                count = gl.where(slice_ >= 0, (stop - token).to(gl.int32), 0)
                rows = v + (in_head + wide(token, v_token) * 8)
                copy_async(ring.rows.index(stage), rows + in_v, mask=(row < count)[:, None])
                copy_async(ring.decay.index(stage), decay + chunk * DECAYS + key)
                ring.commit(full)
                iteration += 1
            slot += chunks
            start = stop


@gluon.jit
def start_columns(ring, s, STEP, state0, state1, v_t, KH):
    """Starts step 0 or 1 of the chunk in stage `s`, of 32 tokens with `v^T [64, 32]`: what `recurrence` does to its state, to
    the bit. All that it takes of the stage but tiles, it has before it waits."""
    KB: gl.constexpr = KH
    inverse = rows_of_step(ring, s, 2 * KH, STEP).slice(0, 32, 1)
    state0, state1, v_new_t, left0, left1 = new_values(ring, s, STEP, inverse, state0, state1, v_t, KH)
    decay0 = ring.decays(s, 2 * KH * STEP + KH, ACC)
    decay1 = ring.decays(s, 2 * KH * STEP + 2 * KH - 1, ACC)
    if KH == 2:
        v_new_t, v_t, left0, left1 = warpgroup_mma_wait(0, deps=[v_new_t, v_t, left0, left1])
    else:
        v_new_t, v_t, left0 = warpgroup_mma_wait(0, deps=[v_new_t, v_t, left0])
    v_new_left = as_left(v_new_t)
    state0 = mma(v_new_left, rows_of_step(ring, s, KB, STEP), state0)
    if KH == 2:
        state1 = mma(v_new_left, rows_of_step(ring, s, KB + 1, STEP), state1)
    return state0, state1, v_new_left, decay0, decay1


@gluon.jit
def end_columns(state0, state1, v_new_left, decay0, decay1, KH):
    """The columns after the step that `start_columns` began."""
    if KH == 2:
        state0 = warpgroup_mma_wait(1, deps=[state0])
        state0 = state0 * decay0
        state1, v_new_left = warpgroup_mma_wait(0, deps=[state1, v_new_left])
        state1 = state1 * decay1
    else:
        state0, v_new_left = warpgroup_mma_wait(0, deps=[state0, v_new_left])
        state0 = state0 * decay0
    return state0, state1


@gluon.jit
def compute(ring, results, states, scheduler, border, K, V, V_FIRST, STEPS):
    """The consumer: four warps that carry 64 columns of M or b, transposed, from chunk to chunk."""
    initial_state, state_pitch, has_initial, has_final, pool = states
    state_indices, has_initial_state, lowest, pool_slots = pool
    KH: gl.constexpr = K // 64
    # the tiles of a stage
    W: gl.constexpr = 0
    KG: gl.constexpr = KH
    INVERSE: gl.constexpr = 2 * KH
    NEXT: gl.constexpr = 64 if V_FIRST else 64 * V
    zero = gl.zeros((BV, C), gl.float32, layout=ACC)
    slice_ = transition_slice(scheduler, border, K)
    STATE: gl.constexpr = ACC if STEPS else LINES
    key = gl.arange(0, 64, layout=gl.SliceLayout(0, STATE))
    column = slice_ * BV + gl.arange(0, BV, layout=gl.SliceLayout(1, STATE))
    iteration = 0
    for k in range(transition_count(scheduler, border, K)):
        tile, place, chunks = transition(scheduler, border, k, K)
        # M's columns start as unit vectors, b's from zero, of a sequence's first segment from the initial state
        own, read, _stored = sequence_slot(
            *(state_indices, has_initial_state, tile.n, tile.end - tile.begin),
            *(lowest, pool_slots, has_initial, has_final),
        )
        read = gl.where((place == 0) & (slice_ * BV >= K), read, 0)
        one, wanted = 1.0, (chunks > 0).to(gl.int32)
        if scheduler.forgets is not None:
            # zeros of what is not needed: `compose` goes through it if the sequence has a segment that does not restart
            one, read, wanted = gl.where(chunks > 0, 1.0, 0.0), gl.where(chunks > 0, read, 0), 1
        from_value = column + hidden_zero(iteration) - K
        in_states = own * state_pitch + state_offsets(tile.head * (K * V), from_value, key, K, V, V_FIRST)
        state0, state1 = load_halves(initial_state, in_states, NEXT, read, K, STEPS)
        unit0 = gl.where(column[:, None] == key[None, :], one, 0.0)
        state0 += unit0 if STEPS else from_lines(unit0, ACC)
        unit1 = gl.where(column[:, None] == key[None, :] + 64, one, 0.0)
        state1 += unit1 if STEPS else from_lines(unit1, ACC)
        if chunks > 0:
            last = iteration + chunks - 1
            v_t = ring.rows.index(ring.wait(iteration)).permute((1, 0)).load(LEFT)
            if STEPS:
                v_t, v_later = column_halves(v_t, LEFT)
            for _i in range(chunks):
                s = iteration % ring.STAGES
                iteration += 1
                if STEPS:
                    state0, state1 = end_columns(*start_columns(ring, s, 0, state0, state1, v_t, KH), KH)
                    begun = start_columns(ring, s, 1, state0, state1, v_later, KH)
                    # the last chunk loads its own v again, which nobody uses
                    v_t = ring.rows.index(ring.wait(gl.minimum(iteration, last))).permute((1, 0)).load(LEFT)
                    v_t, v_later = column_halves(v_t, LEFT)
                    state0, state1 = end_columns(*begun, KH)
                else:
                    left0 = as_left(state0)
                    if KH == 2:
                        left1 = as_left(state1)
                    v_new_t = mma_first(v_t, ring.tile(s, INVERSE).permute((1, 0)), zero)
                    # w is stored negated
                    v_new_t = mma(left0, ring.tile(s, W).permute((1, 0)), v_new_t)
                    if KH == 2:
                        v_new_t = mma(left1, ring.tile(s, W + 1).permute((1, 0)), v_new_t)
                    state0 = state0 * ring.decays(s, 0, ACC)
                    if KH == 2:
                        state1 = state1 * ring.decays(s, 1, ACC)
                        v_new_t, v_t, left0, left1 = warpgroup_mma_wait(0, deps=[v_new_t, v_t, left0, left1])
                    else:
                        v_new_t, v_t, left0 = warpgroup_mma_wait(0, deps=[v_new_t, v_t, left0])
                    # LLVM may round element by element, and pair them afterwards
                    v_new_left = as_left(v_new_t, ORDERED=False)
                    state0 = mma(v_new_left, ring.tile(s, KG), state0)
                    if KH == 2:
                        state1 = mma(v_new_left, ring.tile(s, KG + 1), state1)
                    v_t = ring.rows.index(ring.wait(gl.minimum(iteration, last))).permute((1, 0)).load(LEFT)
                    if KH == 2:
                        state0, state1, v_new_left = warpgroup_mma_wait(0, deps=[state0, state1, v_new_left])
                    else:
                        state0, v_new_left = warpgroup_mma_wait(0, deps=[state0, v_new_left])
                ring.release(s)
        transitions, offsets, transition_pitch, offset_pitch = results
        in_row = key + hidden_zero(iteration)
        if slice_ * BV < K:
            in_M = state_offsets(tile.segment * transition_pitch, column, in_row, K, K, True)
            store_halves(transitions, in_M, 64, state0, state1, wanted, K, STEPS)
        else:
            in_b = state_offsets(tile.segment * offset_pitch, column - K, in_row, K, V, True)
            store_halves(offsets, in_b, 64, state0, state1, wanted, K, STEPS)


@gluon.jit(do_not_specialize=SCALARS_AND_STRIDES)
def transitions_kernel(
    tiles_d, decay, v, transitions, offsets, forgets, first_segment,
    border, cu_seqlens, checkpoint_offsets, initial_state, final_state, state_indices, has_initial_state,
    lowest: gl.int32, pool_slots: gl.int32, has_initial: gl.int32, has_final: gl.int32, state_pitch: gl.int64,
    T: gl.int32, N: gl.int32, HV: gl.int32, slots: gl.int32, checkpoints: gl.int32,
    v_batch: gl.int32, v_token: gl.int32, v_head: gl.int32, transition_pitch: gl.int32, offset_pitch: gl.int32,
    K: gl.constexpr, V: gl.constexpr, V_FIRST: gl.constexpr, STAGES: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    gdc_wait()
    gdc_launch_dependents()
    ring = make_ring(tiles_d, 4 * K if STEPS else K, STAGES, 2 * (K // 64) + 1)
    scheduler = TileScheduler(  # type: ignore[call-arg]
        None, first_segment, cu_seqlens, checkpoint_offsets, T, N, HV, slots, checkpoints, (K + V) // BV, forgets, 1
    )
    in_v = (v_batch, v_token, v_head)
    pool = (state_indices, has_initial_state, lowest, pool_slots)
    states = (initial_state, state_pitch, has_initial, has_final, pool)
    results = (transitions, offsets, transition_pitch, offset_pitch)
    gl.warp_specialize([
        (compute, (ring, results, states, scheduler, border, K, V, V_FIRST, STEPS)),
        (load, ((tiles_d, decay, v), ring, scheduler, border, in_v, K, STEPS)),
    ], [1], [96])  # fmt: skip


SPLIT_COSTS = SplitCosts(step=98, transition=57, compose=230, fixed=850)
"""Measured on an H200 at K = V = 128 (docs/split.md)."""


MOST_MOVED = 48 * 96 * 1024
"""Bytes that `recurrence` moves for a chunk of all heads and segments at once, where its chain is as long as the memory of an
H200 takes."""


def room(problem: ChunkProblem, device: torch.device) -> int:
    """Segment transitions that are formed at the same time, no more than leave `recurrence` bound by its chain."""
    moved = problem.HV * ((3 * problem.K + 2 * TILE) * TILE + 2 * problem.chunk_size * problem.V) * 2
    fit = min(sm_count(device), MOST_CTAS) // (problem.HV * ((problem.K + problem.V) // TILE))
    return min(fit, max(MOST_MOVED // moved - 1, 0))


def split_layout(problem: ChunkProblem, device: torch.device, steps: bool = False) -> Layout:
    """Layout of what the stages of a split leave for each other, if sequences may be split. `forgets [chunks, HV]`: 1 for
    chunks that forget all before them, if work tiles may begin there."""
    found = {} if steps else segment_layout(problem, segments_of_call(problem, room(problem, device), SPLIT_COSTS))
    if may_restart(problem) and (found or parts(problem, device) > 1):
        return {**found, "forgets": ((problem.B * problem.slots * problem.HV,), torch.int32)}
    return found


def outgoing(call: StageCall, packet: Tensor, steps: bool = False) -> Launch:
    """Transitions of the sequences that go on to the next rank (`stages/merge.py`). `steps`: after `prepare_steps`."""
    where = dict(transitions=packet, offsets=packet[:, :, -call.problem.V :], forgets=None, first_segment=None)
    return transitions(call, where, steps)


def transitions(call: StageCall, where: dict[str, Any], steps: bool = False) -> Launch:
    problem, t = call.problem, call.t
    own = dict(
        **dict(tiles_d=tiles(call.workspace["tiles"]), decay=call.workspace["decay"], STEPS=steps),
        **dict(transition_arguments(t, where) | state_arguments(problem, t, None)),
        STAGES=chunks_in_flight(problem, 2 * problem.K // TILE + 2, beside=0, decays=4 if steps else 1),
    )
    used = ctas((problem.K + problem.V) // TILE, t.device)
    return launch_div8(transitions_kernel, used, problem, t, own, overlaps=True)


def before_segments(call: StageCall) -> list[Launch]:
    """Finds the states before the segments. `prepare` forms the plan."""
    where = call.left("transitions", "offsets", "forgets", "first_segment")
    return [transitions(call, where), compose(call)] if call.forms_segments else []
