"""Stages `recurrence` and `output`, fused (FLA: `chunk_gated_delta_rule_fwd_h`, `chunk_gla_fwd_o_gk`): scans a sequence's
chunks. One CTA per (sequence, value head, slice of `BV` value channels).

Contract (docs/algorithm.md; `reference.chunk.recur` is the definition), from `prepare`'s tiles, `v`, and the state `S` before
the chunk:

    v_new = inverse v - w S                 [C, V]
    o     = qg S + Aqk v_new                [C, V]
    S    <- diag(decay) S + kg^T v_new      [K, V]

With `u = inverse v [C, V]` by chunk slot, `inverse` and v are not read. Without `o`, that is left to `output`.

Everything is kept transposed, `S^T [BV, K]` and `v_new^T [BV, C]`: a result then has the register layout of the next MMA's left
operand, and the serial chain never goes through shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .device.mma import dot
from .device.segments import part_of_span, place_segment, segment_of
from .device.sequences import OFFSETS_AT_A_TIME, chunks_before, own_work_tile, sequence_chunk_slots, span_extent
from .device.states import load_state, named_slot, sequence_slot, state_offsets, store_state


@triton.jit
def checkpoint_slot(offsets, indices, n, span, spans, end, lowest, pool_slots):
    """The pool slot for the state at the end of a checkpoint span, and whether to store it: only if the offset is the end."""
    i = n * (spans - 1) + tl.minimum(span, spans - 2)
    offset = tl.load(offsets + i)
    slot, named = named_slot(indices, i, lowest, pool_slots)
    stored = named & (span < spans - 1) & (offset > 0) & (offset == end)
    return slot, stored.to(tl.int32)


# One CTA, tiles [rows, columns], transposed as they are held; S^T stays in registers from chunk to chunk:
#
#     w, qg, kg [C, K]   inverse, Aqk [C, C]   v [C, BV]   decay [K]        `STAGES` pipeline stages of loads
#              |
#     for each chunk:                                                         (for each checkpoint span)
#         S^T [BV, K] -> h
#         v_new^T [BV, C]  = v^T inverse^T - S^T w^T      -> v_new            (u^T instead of v^T inverse^T)
#         o^T     [BV, C]  = S^T qg^T + v_new^T Aqk^T     -> o
#         S^T     [BV, K]  = S^T diag(decay) + v_new^T kg
#     S^T -> the pool slot of the checkpoint
#     S^T -> final state
@triton.jit(
    do_not_specialize=[
        *("T", "N", "HV", "chunk_slots", "checkpoints", "lowest", "pool_slots", "has_initial", "has_final"),
    ]
)
def recurrence_kernel(
    w,
    qg,
    kg,
    inverse,
    Aqk,
    decay,
    v,
    o,
    h,
    v_new,
    u,
    cu_seqlens,
    checkpoint_offsets,
    checkpoint_indices,
    first_segment,
    starts,
    initial_state,
    final_state,
    state_indices,
    has_initial_state,
    lowest,
    pool_slots,
    has_initial,
    has_final,
    state_pitch: tl.int64,
    T,
    N,
    HV,
    chunk_slots,
    checkpoints,
    v_batch: tl.int64,
    v_token: tl.int64,
    v_head: tl.int64,
    o_batch: tl.int64,
    o_token: tl.int64,
    o_head: tl.int64,
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    V_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`S <- diag(decay) S + kg^T v_new`, and all else of the stage's contract.

    With `first_segment [N + 1]` a CTA scans a segment instead of a sequence, from the state in `starts [G, HV, V, K]`. States
    may be slots of a pool (`device/states.py`); those at checkpoints go to the slots that `checkpoint_indices` names. `h`: the
    state before each chunk. With `v_new [B, T, HV, V]` (backward pass, fp32 prefill) that is kept as well.
    """
    if first_segment is None:
        slice_, head, n, batch, begin, end = own_work_tile(cu_seqlens, T, HV, V // BV)
        chunk_slot, spans = sequence_chunk_slots(cu_seqlens, checkpoint_offsets, checkpoints, n, begin, chunk_slots, C)
    else:
        slice_ = tl.program_id(0) % (V // BV)
        head = (tl.program_id(0) // (V // BV) % HV).to(tl.int64)
        segment = tl.program_id(0) // (V // BV) // HV
        n, part, parts, exists = segment_of(segment, first_segment, N)
        if not exists:
            return
        batch, begin, end, chunk_slot, spans, first, last = place_segment(
            n, part, parts, cu_seqlens, checkpoint_offsets, checkpoints, chunk_slots, T, C
        )
        if checkpoint_offsets is None:
            # without checkpoints the segment's tokens say it all; else each span has a chunk grid of its own
            end = tl.where(part + 1 == parts, end, begin + last * C)
            begin += first * C
            chunk_slot += first
    # h lies by chunk slot and V first for the backward pass, else without gaps and as the caller wants it
    H_V_FIRST: tl.constexpr = V_FIRST if v_new is None else True
    h_row = chunk_slot
    if h is not None and cu_seqlens is not None and v_new is None:
        h_row = chunks_before(cu_seqlens, n, T, C, OFFSETS_AT_A_TIME)
        if first_segment is not None:
            h_row += first
    dtype = w.dtype.element_ty

    row = tl.arange(0, C)
    key = tl.arange(0, K)
    value = slice_ * BV + tl.arange(0, BV)
    own, read, stored = sequence_slot(
        state_indices, has_initial_state, n, end - begin, lowest, pool_slots, has_initial, has_final
    )
    in_slot = state_offsets(head * K * V, value, key, K, V, V_FIRST)
    if first_segment is None:
        state = load_state(initial_state, own * state_pitch + in_slot, read)
    else:
        # of a split sequence, `starts` has the first segment's state too: its slot of the pool may hold the final state by now
        if parts > 1:
            at = (segment.to(tl.int64) * HV + head) * K * V
            state = tl.load(starts + state_offsets(at, value, key, K, V, True))
        else:
            state = load_state(initial_state, own * state_pitch + in_slot, read)
        stored *= (part + 1 == parts).to(tl.int32)

    tile = row[:, None] * K + key[None, :]
    square = row[:, None] * C + row[None, :]
    if u is None:
        v += batch * v_batch + head * v_head
    if o is not None:
        o += batch * o_batch + head * o_head
    start = begin
    first_slot = chunk_slot
    for span in range(0, spans):
        stop, chunks = span_extent(checkpoint_offsets, n, span, spans, start, begin, end, C)
        low = 0
        high = chunks
        if first_segment is not None and checkpoint_offsets is not None:
            low, high = part_of_span(first, last, chunk_slot - first_slot, chunks)
        for i in tl.range(low, high, num_stages=STAGES):
            chunk = (chunk_slot + i) * HV + head
            token = start + i * C + row
            valid = (token < stop)[:, None]
            if h is not None:
                h_at = state_offsets(((h_row + i) * HV + head) * K * V, value, key, K, V, H_V_FIRST)
                tl.store(h + h_at, state.to(h.dtype.element_ty))
            tile_w = tl.load(w + chunk * C * K + tile)
            if u is None:
                tile_inverse = tl.load(inverse + chunk * C * C + square)
                tile_v = tl.load(v + token[:, None] * v_token + value[None, :], mask=valid, other=0.0)
            else:
                tile_u = tl.load(u + chunk * C * V + row[:, None] * V + value[None, :])
            if o is not None:
                tile_qg = tl.load(qg + chunk * C * K + tile)
                tile_Aqk = tl.load(Aqk + chunk * C * C + square)
            tile_kg = tl.load(kg + chunk * C * K + tile)
            exp_g_last = tl.load(decay + chunk * K + key)

            left = state.to(dtype)
            zero = tl.zeros([BV, C], tl.float32)
            if u is None:  # noqa: SIM108 a compile-time choice
                tile_v_new = dot(tl.trans(tile_v), tl.trans(tile_inverse), zero, PRECISION, True)
            else:
                tile_v_new = tl.trans(tile_u)
            tile_v_new -= dot(left, tl.trans(tile_w), zero, PRECISION, True)
            if o is not None:
                out = dot(left, tl.trans(tile_qg), zero, PRECISION, True)
            v_new_left = tile_v_new.to(dtype)
            if v_new is not None:
                here = ((batch * T + token) * HV + head)[:, None] * V + value[None, :]
                tl.store(v_new + here, tl.trans(v_new_left), mask=valid)
            state = dot(v_new_left, tile_kg, state * exp_g_last[None, :], PRECISION, True)
            if o is not None:
                out = dot(v_new_left, tl.trans(tile_Aqk), out, PRECISION, True)
                o_at = token[:, None] * o_token + value[None, :]
                tl.store(o + o_at, tl.trans(out).to(o.dtype.element_ty), mask=valid)
        if checkpoint_offsets is not None:
            there, reached = checkpoint_slot(
                checkpoint_offsets, checkpoint_indices, n, span, spans, stop - begin, lowest, pool_slots
            )
            chunk_slot += chunks
            if first_segment is not None:
                # by the segment that the last chunk before the checkpoint is in
                reached *= ((first < chunk_slot - first_slot) & (chunk_slot - first_slot <= last)).to(tl.int32)
            store_state(final_state, there * state_pitch + in_slot, state, reached)
            start = stop
    store_state(final_state, own * state_pitch + in_slot, state, stored)
