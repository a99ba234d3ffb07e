"""Long sequences cut into segments (docs/split.md; the definition is `reference/split.py`): stages `plan`, `maps`, `compose`.

`plan` says how many segments each sequence has. `maps` finds, for every segment but a sequence's last, the map from the state
before it to the state after it, transposed: `S'^T = S^T M^T + b^T`. `compose` walks a sequence's maps and leaves the state
before each segment, from which `recurrence` runs all segments at once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from .device.mma import dot
from .device.segments import part_of_piece, place_segment, segment_of, sequence_chunks
from .device.sequences import locate, piece_count, piece_extent, place_of
from .device.states import load_state, sequence_slot, state_offsets


@triton.jit
def chunks_of(n, cu_seqlens, checkpoint_offsets, pieces, N, T, C: tl.constexpr):
    """Chunks of the sequences `n`, 0 past the last."""
    inside = tl.minimum(n, N - 1)
    _, begin, end = place_of(inside, cu_seqlens, T)
    length = (end - begin).to(tl.int64)
    return tl.where(n < N, sequence_chunks(checkpoint_offsets, inside, pieces, length, C), 0)


@triton.jit
def states_fit(total, cu_seqlens, pieces, N, T, C: tl.constexpr):
    """Whether sequences of `total` chunks in all are no more than `T` tokens hold. Offsets that fall give them more; the states
    between segments have room for `split.py: most_segments` of right ones, so such a batch stays whole."""
    if cu_seqlens is None:
        return True
    return total <= T // C + N * pieces


@triton.jit
def planned_parts(chunks, total, room, split, batch_invariant, step, map_, compose, fixed, shortest, margin):
    """`split.py: parts_of_sequences` for sequences of `chunks` chunks."""
    total = tl.where(batch_invariant != 0, chunks, total)
    planned = tl.minimum(1 + room * chunks // tl.maximum(total, 1), chunks // shortest)
    square = chunks * (step + map_)
    root = chunks * 0
    for i in tl.static_range(7):
        more = root + (64 >> i)
        root = tl.where(more * more * compose <= square, more, root)
    planned = tl.maximum(tl.minimum(planned, root), 1)
    longest = (chunks + planned - 1) // planned
    cut = longest * (step + map_) + planned * compose + fixed
    planned = tl.where(cut * 100 <= chunks * step * (100 - margin), planned, 1)
    forced = tl.minimum(tl.maximum(chunks, 1), split)
    return tl.where(split != 0, forced, planned)


@triton.jit(
    do_not_specialize=[
        *("T", "N", "checkpoints", "room", "split", "batch_invariant"),
        *("step", "map_", "compose", "fixed", "shortest", "margin"),
    ]
)
def plan_kernel(
    cu_seqlens,
    checkpoint_offsets,
    first_segment,
    T,
    N,
    checkpoints,
    room,
    split,
    batch_invariant,
    step,
    map_,
    compose,
    fixed,
    shortest,
    margin,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """`first_segment [N + 1]`: where each sequence's segments begin among all. One program."""
    pieces = piece_count(checkpoint_offsets, checkpoints)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([], tl.int64)
    for base in range(0, N, BLOCK):
        total += tl.sum(chunks_of(base + lane, cu_seqlens, checkpoint_offsets, pieces, N, T, C))
    fits = states_fit(total, cu_seqlens, pieces, N, T, C)
    before = tl.zeros([], tl.int64)
    for base in range(0, N, BLOCK):
        n = base + lane
        chunks = chunks_of(n, cu_seqlens, checkpoint_offsets, pieces, N, T, C)
        parts = planned_parts(chunks, total, room, split, batch_invariant, step, map_, compose, fixed, shortest, margin)
        parts = tl.where(n < N, tl.where(fits, parts, 1), 0)
        ends = before + tl.cumsum(parts, 0)
        tl.store(first_segment + n, (ends - parts).to(tl.int32), mask=n < N)
        before += tl.sum(parts)
    tl.store(first_segment + N, before.to(tl.int32))


@triton.jit(
    do_not_specialize=[
        *("T", "N", "HV", "slots", "checkpoints", "lowest", "pool_slots", "has_initial", "has_final"),
    ]
)
def maps_kernel(
    w,
    kg,
    inverse,
    decay,
    v,
    maps,
    offsets,
    first_segment,
    cu_seqlens,
    checkpoint_offsets,
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
    C: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    V_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """`maps [G, HV, K, K]`: row c is column c of M. `offsets [G, HV, V, K]`: b, V first. One program per (segment, value head,
    `BV` of the K + V columns of M and b), which walks the segment as `recurrence` does: M's columns are states that start as
    unit vectors and that no value writes to, b's start from zero. Of a sequence's first segment b starts from the initial
    state, so that it is the state after it, and M is not formed."""
    COLUMNS: tl.constexpr = K + V
    slice_ = tl.program_id(0) % (COLUMNS // BV)
    item = tl.program_id(0) // (COLUMNS // BV)
    head = (item % HV).to(tl.int64)
    segment = item // HV
    n, part, parts, exists = segment_of(segment, first_segment, N)
    in_M = slice_ * BV < K
    if (not exists) | (part + 1 == parts) | (in_M & (part == 0)):
        return
    batch, begin, end, slot, pieces, first, stop = place_segment(
        n, part, parts, cu_seqlens, checkpoint_offsets, checkpoints, slots, T, C
    )

    dtype = w.dtype.element_ty
    row = tl.arange(0, C)
    key = tl.arange(0, K)
    column = slice_ * BV + tl.arange(0, BV)
    # values of M's columns are zero; columns past K are value channels
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
    opening = slot
    for piece in range(0, pieces):
        end_, chunks = piece_extent(checkpoint_offsets, n, piece, pieces, start, begin, end, C)
        low, high = part_of_piece(first, stop, slot - opening, chunks)
        for i in tl.range(low, high, num_stages=STAGES):
            chunk = (slot + i) * HV + head
            token = start + i * C + row
            valid = (token < end_)[:, None] & (value >= 0)[None, :]
            tile_w = tl.load(w + chunk * C * K + tile)
            tile_kg = tl.load(kg + chunk * C * K + tile)
            total = tl.load(decay + chunk * K + key)
            tile_inverse = tl.load(inverse + chunk * C * C + square)
            tile_v = tl.load(v + token[:, None] * v_token + value[None, :], mask=valid, other=0.0)
            zero = tl.zeros([BV, C], tl.float32)
            pseudo = dot(tl.trans(tile_v), tl.trans(tile_inverse), zero, PRECISION)
            pseudo -= dot(state.to(dtype), tl.trans(tile_w), zero, PRECISION)
            state = dot(pseudo.to(dtype), tile_kg, state * total[None, :], PRECISION)
        slot += chunks
        start = end_
    at = segment.to(tl.int64) * HV + head
    if in_M:
        tl.store(maps + at * K * K + column[:, None] * K + key[None, :], state)
    else:
        tl.store(offsets + at * V * K + value[:, None] * K + key[None, :], state)


@triton.jit(do_not_specialize=["T", "N", "HV", "lowest", "pool_slots", "has_initial", "has_final"])
def compose_kernel(
    maps,
    offsets,
    starts,
    first_segment,
    cu_seqlens,
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
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    V_FIRST: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """`starts [G, HV, V, K]`: the state before each segment, V first, in float32. One program per (sequence, value head, `BV`
    value channels). Maps are fetched ahead and the state stays in registers if shared memory holds a map, `BK == K`.
    Otherwise the state goes from step to step through `starts` itself, `BK` key channels at a time."""
    if OVERLAP:
        gdc_wait()
    slice_, head, n, _, begin, end = locate(cu_seqlens, T, HV, V // BV)
    first = tl.load(first_segment + n)
    last = tl.load(first_segment + n + 1) - 1
    if first >= last:
        return
    own, read, _ = sequence_slot(
        state_indices, has_initial_state, n, end - begin, lowest, pool_slots, has_initial, has_final
    )
    value = slice_ * BV + tl.arange(0, BV)
    key = tl.arange(0, BK)
    if BK == K:
        at = own * state_pitch + state_offsets(head * K * V, value, key, K, V, V_FIRST)
        in_state = state_offsets(head * K * V, value, key, K, V, True)
        here = first.to(tl.int64) * HV * K
        tl.store(starts + here * V + in_state, load_state(initial_state, at, read))
        state = tl.load(offsets + here * V + in_state)
        here += HV * K
        in_map = head * K * K + key[:, None] * K + key[None, :]
        for _ in tl.range(first + 1, last, num_stages=STAGES):
            tl.store(starts + here * V + in_state, state)
            right = tl.load(maps + here * K + in_map)
            state = dot(state, right, tl.load(offsets + here * V + in_state), "tf32x3")
            here += HV * K
        tl.store(starts + here * V + in_state, state)
    else:
        here = first.to(tl.int64) * HV + head
        for block in range(0, K, BK):
            at = own * state_pitch + state_offsets(head * K * V, value, block + key, K, V, V_FIRST)
            place = state_offsets(here * K * V, value, block + key, K, V, True)
            tl.store(starts + place, load_state(initial_state, at, read))
            tl.store(starts + place + HV * K * V, tl.load(offsets + place))
        here += HV
        for _ in range(first + 1, last):
            tl.debug_barrier()
            for block in range(0, K, BK):
                state = tl.load(offsets + state_offsets(here * K * V, value, block + key, K, V, True))
                for along in range(0, K, BK):
                    left = tl.load(starts + state_offsets(here * K * V, value, along + key, K, V, True))
                    right = tl.load(maps + here * K * K + (along + key)[:, None] * K + (block + key)[None, :])
                    state = dot(left, right, state, "tf32x3")
                tl.store(starts + state_offsets((here + HV) * K * V, value, block + key, K, V, True), state)
            here += HV
