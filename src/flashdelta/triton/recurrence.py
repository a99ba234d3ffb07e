"""Stages `recurrence` and `output`, fused: walks a sequence's chunks in order. One program per (sequence, value head, slice
of value channels).

Contract (docs/algorithm.md), from `prepare`'s tiles, `v`, and the state `S` before the chunk:

    v'  = inverse v - w S              [C, V]
    o   = qg S + Aqk v'                [C, V]
    S  <- diag(decay) S + kg^T v'      [K, V]

With `u`, `inverse v [C, V]` by chunk, that is where it comes from; without `o` that is left to `output`.

Everything is kept transposed, `S^T [BV, K]` and `v'^T [BV, C]`: results then have the register layout of the next product's
left operand, and the serial chain never goes through shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .device.mma import dot
from .device.segments import part_of_piece, place_segment, segment_of
from .device.sequences import chunk_place, chunks_before, locate, piece_extent
from .device.states import load_state, named_slot, sequence_slot, state_offsets, store_state


@triton.jit
def checkpoint_slot(offsets, indices, n, piece, pieces, end, lowest, pool_slots):
    """The pool slot for the state at the end of a piece, and whether it is to be stored: the offset must be there."""
    i = n * (pieces - 1) + tl.minimum(piece, pieces - 2)
    offset = tl.load(offsets + i)
    slot, named = named_slot(indices, i, lowest, pool_slots)
    stored = named & (piece < pieces - 1) & (offset > 0) & (offset == end)
    return slot, stored.to(tl.int32)


@triton.jit(
    do_not_specialize=["T", "N", "HV", "slots", "checkpoints", "lowest", "pool_slots", "has_initial", "has_final"],
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
    pseudo,
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
    slots,
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
    if first_segment is None:
        slice_, head, n, batch, begin, end = locate(cu_seqlens, T, HV, V // BV)
        slot, pieces = chunk_place(cu_seqlens, checkpoint_offsets, checkpoints, n, begin, slots, C)
    else:
        slice_ = tl.program_id(0) % (V // BV)
        head = (tl.program_id(0) // (V // BV) % HV).to(tl.int64)
        segment = tl.program_id(0) // (V // BV) // HV
        n, part, parts, exists = segment_of(segment, first_segment, N)
        if not exists:
            return
        batch, begin, end, slot, pieces, first, last = place_segment(
            n, part, parts, cu_seqlens, checkpoint_offsets, checkpoints, slots, T, C
        )
        if checkpoint_offsets is None:
            # pieces have chunk grids of their own; without them the program's tokens are enough to know
            end = tl.where(part + 1 == parts, end, begin + last * C)
            begin += first * C
            slot += first
    # for the backward pass by chunk slot and V first, else as the caller wants it
    H_V_FIRST: tl.constexpr = V_FIRST if pseudo is None else True
    h_row = slot
    if h is not None and cu_seqlens is not None and pseudo is None:
        h_row = chunks_before(cu_seqlens, n, T, C, 128)
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
        # the last segment may have stored the final state where the first one's was
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
    opening = slot
    for piece in range(0, pieces):
        stop, chunks = piece_extent(checkpoint_offsets, n, piece, pieces, start, begin, end, C)
        low = 0
        high = chunks
        if first_segment is not None and checkpoint_offsets is not None:
            low, high = part_of_piece(first, last, slot - opening, chunks)
        for i in tl.range(low, high, num_stages=STAGES):
            chunk = (slot + i) * HV + head
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
            total = tl.load(decay + chunk * K + key)

            left = state.to(dtype)
            zero = tl.zeros([BV, C], tl.float32)
            if u is None:  # noqa: SIM108 a compile-time choice
                found = dot(tl.trans(tile_v), tl.trans(tile_inverse), zero, PRECISION, True)
            else:
                found = tl.trans(tile_u)
            found -= dot(left, tl.trans(tile_w), zero, PRECISION, True)
            if o is not None:
                out = dot(left, tl.trans(tile_qg), zero, PRECISION, True)
            pseudo_left = found.to(dtype)
            if pseudo is not None:
                here = ((batch * T + token) * HV + head)[:, None] * V + value[None, :]
                tl.store(pseudo + here, tl.trans(pseudo_left), mask=valid)
            state = dot(pseudo_left, tile_kg, state * total[None, :], PRECISION, True)
            if o is not None:
                out = dot(pseudo_left, tl.trans(tile_Aqk), out, PRECISION, True)
                o_at = token[:, None] * o_token + value[None, :]
                tl.store(o + o_at, tl.trans(out).to(o.dtype.element_ty), mask=valid)
        if checkpoint_offsets is not None:
            there, reached = checkpoint_slot(
                checkpoint_offsets, checkpoint_indices, n, piece, pieces, stop - begin, lowest, pool_slots
            )
            slot += chunks
            if first_segment is not None:
                # by the segment that the last chunk before the checkpoint is in
                reached *= ((first < slot - opening) & (slot - opening <= last)).to(tl.int32)
            store_state(final_state, there * state_pitch + in_slot, state, reached)
            start = stop
    store_state(final_state, own * state_pitch + in_slot, state, stored)
