"""Long sequences cut into segments (docs/split.md has the definition): stages `plan`, `transitions` and
`compose`. The state after a segment is affine in the state before it:

    S' = M S + b                        M [K, K], b [K, V]                    (transposed: S'^T = S^T M^T + b^T)

`plan` says how many segments each sequence has. `transitions` finds `(M, b)` of every segment but a sequence's last. `compose`
scans a sequence's segments and leaves the state before each, from which `recurrence` runs all segments at once.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ...problem.problem import ChunkProblem
from ...problem.split import SplitCosts
from ...program.launch import Launch, sm_count
from ..shared.mma import dot
from ..shared.scalars import SCALARS
from ..shared.segments import (
    chunks_of,
    outgoing_sequence,
    part_of_span,
    place_segment,
    planned_parts,
    segment_of,
    states_fit,
)
from ..shared.sequences import span_count, span_extent
from ..shared.states import load_state, sequence_slot, state_offsets
from ..stages.launch import StageCall, launch, precision, state_arguments
from ..stages.segments import compose, transition_arguments
from .recurrence import recurrence_config


@triton.jit(do_not_specialize=SCALARS)
def plan_kernel(
    cu_seqlens, checkpoint_offsets, first_segment, T, N, checkpoints,
    room, split, batch_invariant, step, transition, compose, fixed, shortest, margin,
    C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`first_segment [N + 1]`: where each sequence's segments begin among all. One CTA."""
    spans = span_count(checkpoint_offsets, checkpoints)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([], tl.int64)
    for base in range(0, N, BLOCK):
        total += tl.sum(chunks_of(base + lane, cu_seqlens, checkpoint_offsets, spans, N, T, C))
    fits = states_fit(total, cu_seqlens, spans, N, T, C)
    before = tl.zeros([], tl.int64)
    for base in range(0, N, BLOCK):
        n = base + lane
        chunks = chunks_of(n, cu_seqlens, checkpoint_offsets, spans, N, T, C)
        parts = planned_parts(
            chunks, total, room, split, batch_invariant, step, transition, compose, fixed, shortest, margin
        )
        parts = tl.where(n < N, tl.where(fits, parts, 1), 0)
        ends = before + tl.cumsum(parts, 0)
        tl.store(first_segment + n, (ends - parts).to(tl.int32), mask=n < N)
        before += tl.sum(parts)
    tl.store(first_segment + N, before.to(tl.int32))


@triton.jit(do_not_specialize=SCALARS)
def transitions_kernel(
    w, kg, inverse, decay, v, transitions, offsets, first_segment, border, cu_seqlens,
    checkpoint_offsets, initial_state, final_state, state_indices, has_initial_state, lowest, pool_slots,
    has_initial, has_final, state_pitch: tl.int64, T, N, HV,
    chunk_slots, checkpoints, v_batch: tl.int64, v_token: tl.int64, v_head: tl.int64, transition_pitch, offset_pitch,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, V_FIRST: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`M` and `b` of `S' = M S + b`: `transitions [G, HV, K, K]`, whose row c is column c of M, and `offsets [G, HV, V, K]`, b
    with V first.

    One CTA per (segment, value head, `BV` of the K + V columns of M and b), which scans the segment as `recurrence` does. M's
    columns are states that start as unit vectors and that no value writes to; b's start from zero. In a sequence's first
    segment b starts from the initial state, so that it is the state after it, and M is not formed.

    With `border` instead of `first_segment`, segments are the whole sequences that go on to the next rank; those that come from
    the rank before are no first segments. `offsets` then lie behind `transitions`, head by head.
    """
    COLUMNS: tl.constexpr = K + V
    slice_ = tl.program_id(0) % (COLUMNS // BV)
    work_tile = tl.program_id(0) // (COLUMNS // BV)
    head = (work_tile % HV).to(tl.int64)
    segment = work_tile // HV
    if border is None:
        n, part, parts, exists = segment_of(segment, first_segment, N)
        in_M = slice_ * BV < K
        if (not exists) | (part + 1 == parts) | (in_M & (part == 0)):
            return
        batch, begin, end, chunk_slot, spans, first, stop = place_segment(
            n, part, parts, cu_seqlens, checkpoint_offsets, checkpoints, chunk_slots, T, C
        )
    else:
        n, part, exists = outgoing_sequence(border, segment)
        in_M = slice_ * BV < K
        if (not exists) | (in_M & (part == 0)):
            return
        batch, begin, end, chunk_slot, spans, first, stop = place_segment(
            n, 0, 1, cu_seqlens, checkpoint_offsets, checkpoints, chunk_slots, T, C
        )

    dtype = w.dtype.element_ty
    row = tl.arange(0, C)
    key = tl.arange(0, K)
    column = slice_ * BV + tl.arange(0, BV)
    # columns past K are b's, which value channels write to
    value = column - K
    own, read, _ = sequence_slot(
        state_indices, has_initial_state, n, end - begin, lowest, pool_slots, has_initial, has_final
    )
    at = own * state_pitch + state_offsets(head * K * V, value, key, K, V, V_FIRST)
    state = load_state(initial_state, at, tl.where(part == 0, read, 0))
    state += tl.where(column[:, None] == key[None, :], 1.0, 0.0)
    v += batch * v_batch + head * v_head
    tile = row[:, None] * K + key[None, :]
    square = row[:, None] * C + row[None, :]
    start = begin
    first_slot = chunk_slot
    for span in range(0, spans):
        end_, chunks = span_extent(checkpoint_offsets, n, span, spans, start, begin, end, C)
        low, high = part_of_span(first, stop, chunk_slot - first_slot, chunks)
        for i in tl.range(low, high, num_stages=STAGES):
            chunk = (chunk_slot + i) * HV + head
            token = start + i * C + row
            valid = (token < end_)[:, None] & (value >= 0)[None, :]
            tile_w = tl.load(w + chunk * C * K + tile)
            tile_kg = tl.load(kg + chunk * C * K + tile)
            exp_g_last = tl.load(decay + chunk * K + key)
            tile_inverse = tl.load(inverse + chunk * C * C + square)
            tile_v = tl.load(v + token[:, None] * v_token + value[None, :], mask=valid, other=0.0)
            zero = tl.zeros([BV, C], tl.float32)
            tile_v_new = dot(tl.trans(tile_v), tl.trans(tile_inverse), zero, PRECISION)
            tile_v_new -= dot(state.to(dtype), tl.trans(tile_w), zero, PRECISION)
            state = dot(tile_v_new.to(dtype), tile_kg, state * exp_g_last[None, :], PRECISION)
        chunk_slot += chunks
        start = end_
    at = segment.to(tl.int64) * HV + head
    if in_M:
        tl.store(transitions + at * transition_pitch + column[:, None] * K + key[None, :], state)
    else:
        tl.store(offsets + at * offset_pitch + value[:, None] * K + key[None, :], state)


SPLIT_COSTS = SplitCosts(step=165, transition=100, compose=230, fixed=1500)
"""Measured on an H200 at K = V = 128; other GPUs differ in all of them alike."""


def room(problem: ChunkProblem, capability: int, sms: int) -> int:
    """Segment transitions that are formed at the same time, one CTA per SM."""
    return sms // (problem.HV * ((problem.K + problem.V) // transitions_width(problem, capability)))


def transitions_width(problem: ChunkProblem, capability: int) -> int:
    """Columns of a transition that a CTA forms."""
    return min(recurrence_config(problem, capability).BV, problem.K)


def plan(call: StageCall, room: int) -> Launch:
    own = dict(call.left("first_segment"), room=room, **vars(SPLIT_COSTS), BLOCK=128)
    return launch(plan_kernel, 1, call.problem, call.t, own)


def outgoing(call: StageCall, packet: Tensor) -> Launch:
    """Transitions of the sequences that go on to the next rank (`stages/merge.py`)."""
    where = dict(transitions=packet, offsets=packet[:, :, -call.problem.V :], first_segment=None)
    return transitions(call, call.problem.packets, where)


def transitions(call: StageCall, segments: int, where: dict[str, Any]) -> Launch:
    problem, t = call.problem, call.t
    c, BV = recurrence_config(problem, call.arch), transitions_width(problem, call.arch)
    own = dict(
        **dict(call.left("w", "kg", "decay"), inverse=call.workspace["Akk_inv"]),
        **transition_arguments(t, where),
        **dict(state_arguments(problem, t, None), BV=BV, PRECISION=precision(problem)),
    )
    return launch(transitions_kernel, segments * problem.HV * ((problem.K + problem.V) // BV), problem, t, own, c)


def before_segments(call: StageCall) -> list[Launch]:
    """Finds the states before the segments."""
    if not call.forms_segments:
        return []
    most, at_once = call.workspace["starts"].shape[0], room(call.problem, call.arch, sm_count(call.t.device))
    where = call.left("transitions", "offsets", "first_segment")
    return [plan(call, at_once), transitions(call, most, where), compose(call)]
