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

from ...problem.problem import AUTO, ChunkProblem
from ...problem.split import SplitCosts, segments_of_call
from ...program.launch import Launch, sm_count
from ...program.workspace import Layout
from ..shared.gluon.compat import copy_async, copy_tile
from ..shared.gluon.math import column_halves, hidden_zero, wide
from ..shared.gluon.portable import chunks_of, planned_segments, sequence_slot, span_count, state_offsets, states_fit
from ..shared.gluon.steps import add
from ..shared.scalars import SCALARS_AND_STRIDES
from ..stages.launch import StageCall, bind_div8, segment_layout, state_arguments
from ..stages.segments import compose, transition_arguments
from .device.layouts import ACC, BV, LEFT, LINES, C, as_left, from_lines, load_halves, loader_offsets, store_halves
from .device.pipeline import make_decision, make_ring
from .device.tile_scheduler import TileScheduler
from .device.trial import may_forget, trial
from .device.wgmma import mma, mma_first
from .launch import MOST_CTAS, TILE, ctas, stages, tiles
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
        segments = planned_segments(
            chunks,
            total,
            room,
            split,
            batch_invariant,
            COSTS[0],
            COSTS[1],
            COSTS[2],
            COSTS[3],
            COSTS[4],
            COSTS[5],
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
def is_tried(decay, scheduler, tile, chunks, K):
    """Says whether the last chunk of the transition is tried first. Loader and consumer each ask, and get the same answer:
    neither waits for the other where nothing is tried."""
    last = (tile.slot + chunks - 1).to(gl.int32) * scheduler.HV + tile.head
    return may_forget(decay + last * K, chunks > 0, K)


@gluon.jit
def fetch(sources, ring, slot, start, i, stop, iteration, scheduler, tile, offsets, K, STEPS):
    """Asks for `-w`, `kg` (in steps `kb`), `inverse`, v and decays of chunk `i` of a span."""
    tiles_d, decay, v = sources
    row, in_v, key, in_head, v_token, slice_ = offsets
    KH: gl.constexpr = K // 64
    stage, full = ring.acquire(iteration)
    ring.expect(full)
    chunk = (slot + i).to(gl.int32) * scheduler.HV + tile.head
    TILES: gl.constexpr = 3 * KH + (1 if STEPS else 2)
    DECAYS: gl.constexpr = 4 * K if STEPS else K
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


@gluon.jit
def load(sources, ring, decision, scheduler, border, strides, K, STEPS):
    """The loader: one warp that keeps the ring full. If a segment is tried, its last chunk comes first, and then all of them
    unless that forgets."""
    _tiles_d, decay, _v = sources
    slice_ = transition_slice(scheduler, border, K) - K // BV
    row, in_v, key = loader_offsets(strides[1], K, STEPS)
    at = (row, in_v, key, slice_)
    count = transition_count(scheduler, border, K)
    if decision is None:
        iteration = 0
        for k in range(count):
            tile, _place, wanted = transition(scheduler, border, k, K)
            iteration = load_chunks(sources, ring, scheduler, tile, wanted, iteration, at, strides, K, STEPS)
    else:
        if count > 0:
            tile, _place, wanted = transition(scheduler, border, 0, K)
            tried = is_tried(decay, scheduler, tile, wanted, K)
            if tried:
                offsets = tile_offsets(tile, at, strides)
                last = wanted - 1
                fetch(sources, ring, tile.slot, tile.begin, last, tile.end, 0, scheduler, tile, offsets, K, STEPS)
                wanted = gl.where(decision.wait(), 0, wanted)
            load_chunks(sources, ring, scheduler, tile, wanted, tried.to(gl.int32), at, strides, K, STEPS)


@gluon.jit
def tile_offsets(tile, at, strides):
    """Where a transition's rows of v and decays lie."""
    row, in_v, key, slice_ = at
    v_batch, v_token, v_head = strides
    in_head = (wide(tile.batch, v_batch) + wide(tile.head, v_head)) * 8 + slice_ * BV
    return row, in_v, key, in_head, v_token, slice_


@gluon.jit
def load_chunks(sources, ring, scheduler, tile, wanted, iteration, at, strides, K, STEPS):
    """All chunks of the transition, if any is wanted."""
    offsets = tile_offsets(tile, at, strides)
    start = tile.begin
    slot = tile.slot
    for span in range(0, gl.where(wanted > 0, tile.num_spans, 0)):
        stop, chunks, low, high = scheduler.span(tile, span, start, slot)
        for i in range(low, high):
            fetch(sources, ring, slot, start, i, stop, iteration, scheduler, tile, offsets, K, STEPS)
            iteration += 1
        slot += chunks
        start = stop
    return iteration


@gluon.jit
def compute(decay, ring, decision, forgets, results, states, scheduler, border, K, V, V_FIRST, STEPS):
    """The consumer: four warps that carry 64 columns of M or b, transposed, from chunk to chunk."""
    slice_ = transition_slice(scheduler, border, K)
    STATE: gl.constexpr = ACC if STEPS else LINES
    key = gl.arange(0, 64, layout=gl.SliceLayout(0, STATE))
    column = slice_ * BV + gl.arange(0, BV, layout=gl.SliceLayout(1, STATE))
    at = (slice_, column, key)
    count = transition_count(scheduler, border, K)
    if decision is None:
        iteration = 0
        for k in range(count):
            tile, place, chunks = transition(scheduler, border, k, K)
            iteration = scan(
                *(ring, results, states, at, tile, place, chunks, iteration),
                *(K, V, V_FIRST, False, STEPS),
            )
    else:
        # at most one: the plan has no more transitions than fit at once. A loop over more would keep in registers, beside its
        # state, what each of them needs again
        if count > 0:
            tile, place, chunks = transition(scheduler, border, 0, K)
            tried = is_tried(decay, scheduler, tile, chunks, K)
            forgotten = chunks < 0
            if tried:
                s = ring.wait(0)
                # no value writes to M's columns: if the chunk forgets they are 0
                state0, state1, forgotten = trial(ring, s, K, K // 64, 2 * (K // 64))
                ring.release(s)
                decision.make(forgotten)
                store_columns(results, at, tile, state0, state1, forgotten.to(gl.int32), K, V, STEPS)
            if chunks > 0:
                gl.store(forgets + tile.segment, forgotten.to(gl.int32))
            if not forgotten:
                scan(
                    *(ring, results, states, at, tile, place, chunks, tried.to(gl.int32)),
                    *(K, V, V_FIRST, True, STEPS),
                )


@gluon.jit
def start_columns(ring, s, STEP, state0, state1, v_t, KH):
    """Starts step 0 or 1 of the chunk in stage `s`, of 32 tokens with `v^T [64, 32]`: what `recurrence` does to its state, to
    the bit. What it has of the stage but tiles, it has before it waits."""
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
def scan(ring, results, states, at, tile, place, chunks, iteration, K, V, V_FIRST, TRIED, STEPS):
    """The transition's columns, chunk by chunk, from `iteration` on. `TRIED`: after a trial, which may have run."""
    initial_state, state_pitch, has_initial, has_final, pool = states
    state_indices, has_initial_state, lowest, pool_slots = pool
    slice_, column, key = at
    KH: gl.constexpr = K // 64
    # the tiles of a stage
    W: gl.constexpr = 0
    KG: gl.constexpr = KH
    INVERSE: gl.constexpr = 2 * KH
    NEXT: gl.constexpr = 64 if V_FIRST else 64 * V
    zero = gl.zeros((BV, C), gl.float32, layout=ACC)
    # M's columns start as unit vectors, b's from zero, of a sequence's first segment from the initial state
    own, read, _stored = sequence_slot(
        *(state_indices, has_initial_state, tile.n, tile.end - tile.begin),
        *(lowest, pool_slots, has_initial, has_final),
    )
    read = gl.where((place == 0) & (slice_ * BV >= K), read, 0)
    from_value = column + hidden_zero(iteration) - K
    in_states = own * state_pitch + state_offsets(tile.head * (K * V), from_value, key, K, V, V_FIRST)
    state0, state1 = load_halves(initial_state, in_states, NEXT, read, K, STEPS)
    unit0 = gl.where(column[:, None] == key[None, :], 1.0, 0.0)
    state0 += unit0 if STEPS else from_lines(unit0, ACC)
    unit1 = gl.where(column[:, None] == key[None, :] + 64, 1.0, 0.0)
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
                v_new_left = as_left(v_new_t, TRIED)
                state0 = mma(v_new_left, ring.tile(s, KG), state0)
                if KH == 2:
                    state1 = mma(v_new_left, ring.tile(s, KG + 1), state1)
                v_t = ring.rows.index(ring.wait(gl.minimum(iteration, last))).permute((1, 0)).load(LEFT)
                if KH == 2:
                    state0, state1, v_new_left = warpgroup_mma_wait(0, deps=[state0, state1, v_new_left])
                else:
                    state0, v_new_left = warpgroup_mma_wait(0, deps=[state0, v_new_left])
            ring.release(s)
    at = (slice_, column, key + hidden_zero(iteration))
    store_columns(results, at, tile, state0, state1, (chunks > 0).to(gl.int32), K, V, STEPS)
    return iteration


@gluon.jit
def store_columns(results, at, tile, state0, state1, wanted, K, V, STEPS):
    """The CTA's 64 columns of M or b."""
    transitions, offsets, transition_pitch, offset_pitch = results
    slice_, column, key = at
    if slice_ * BV < K:
        in_M = state_offsets(tile.segment * transition_pitch, column, key, K, K, True)
        store_halves(transitions, in_M, 64, state0, state1, wanted, K, STEPS)
    else:
        in_b = state_offsets(tile.segment * offset_pitch, column - K, key, K, V, True)
        store_halves(offsets, in_b, 64, state0, state1, wanted, K, STEPS)


@gluon.jit(do_not_specialize=SCALARS_AND_STRIDES)
def transitions_kernel(
    tiles_d, decay, v, transitions, offsets, forgets, first_segment,
    border, cu_seqlens, checkpoint_offsets, initial_state, final_state, state_indices, has_initial_state,
    lowest: gl.int32, pool_slots: gl.int32, has_initial: gl.int32, has_final: gl.int32, state_pitch: gl.int64,
    T: gl.int32, N: gl.int32, HV: gl.int32, slots: gl.int32, checkpoints: gl.int32,
    v_batch: gl.int32, v_token: gl.int32, v_head: gl.int32,
    transition_pitch: gl.int32, offset_pitch: gl.int32,
    K: gl.constexpr, V: gl.constexpr, V_FIRST: gl.constexpr, STAGES: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    gdc_wait()
    gdc_launch_dependents()
    if forgets is None:
        decision: gl.constexpr = None
    else:
        decision = make_decision()
    ring = make_ring(tiles_d, 4 * K if STEPS else K, STAGES, 2 * (K // 64) + 1)
    scheduler = TileScheduler(
        None, first_segment, cu_seqlens, checkpoint_offsets, T, N, HV, slots, checkpoints, (K + V) // BV
    )
    in_v = (v_batch, v_token, v_head)
    pool = (state_indices, has_initial_state, lowest, pool_slots)
    states = (initial_state, state_pitch, has_initial, has_final, pool)
    results = (transitions, offsets, transition_pitch, offset_pitch)
    gl.warp_specialize(
        [
            (compute, (decay, ring, decision, forgets, results, states, scheduler, border, K, V, V_FIRST, STEPS)),
            (load, ((tiles_d, decay, v), ring, decision, scheduler, border, in_v, K, STEPS)),
        ],
        [1],
        [96],
    )


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


def split_layout(problem: ChunkProblem, device: torch.device) -> Layout:
    """Layout of what the stages of a split leave for each other, if sequences may be split. `forgets`: which segments, by their
    last chunk, forget all before them."""
    found = segment_layout(problem, segments_of_call(problem, room(problem, device), SPLIT_COSTS))
    if found and may_try(problem):
        return {**found, "forgets": (found["starts"][0][:2], torch.int32)}
    return found


def may_try(problem: ChunkProblem) -> bool:
    """Not what the backward pass will compute again, nor what must not depend on the batch."""
    own = problem.batch_invariant or problem.requires_grad or problem.ranks > 1
    return problem.split == AUTO and not own and problem.checkpoints == 0


def transitions(call: StageCall, final_state: Tensor | None) -> Launch:
    where = call.left("transitions", "offsets", "forgets", "first_segment")
    return _transitions(call, where, final_state, steps=False)


def outgoing(call: StageCall, packet: Tensor, steps: bool = False) -> Launch:
    """Transitions of the sequences that go on to the next rank (`stages/merge.py`). `steps`: after `prepare_steps`."""
    where = dict(transitions=packet, offsets=packet[:, :, -call.problem.V :], forgets=None, first_segment=None)
    return _transitions(call, where, None, steps)


def _transitions(call: StageCall, where: dict[str, Any], final_state: Tensor | None, steps: bool) -> Launch:
    problem, t = call.problem, call.t
    own = dict(
        **dict(tiles_d=tiles(call.workspace["tiles"]), decay=call.workspace["decay"], STEPS=steps),
        **transition_arguments(t, where),
        **state_arguments(problem, t, final_state),
        STAGES=stages(problem, 2 * problem.K // TILE + 2, beside=0, decays=4 if steps else 1),
    )
    return Launch(
        transitions_kernel,
        ctas((problem.K + problem.V) // TILE, t.device),
        *bind_div8(transitions_kernel, problem, t, own),
        num_warps=4,
        overlaps=True,
    )


def before_segments(call: StageCall, final_state: Tensor | None) -> list[Launch]:
    """Finds the states before the segments. `prepare` forms the plan."""
    return [transitions(call, final_state), compose(call, final_state)] if call.forms_segments else []
