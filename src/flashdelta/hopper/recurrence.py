"""Stages `recurrence` and `output` for Hopper: walks a sequence's chunks in order. A work item is a (sequence, value head,
slice of 64 value channels); there is a program per multiprocessor, which does an equal share of all chunks (`shares.py`), so
that the chunks of the next item are on their way while it finishes one. With checkpoints it does every so many-th item.
Programs of one head's slices do the same at the same time: what they read alike comes from memory once.

Contract: as `triton/recurrence.py`, from the tiles that `prepare` leaves. For the backward pass without `o`, with the
pseudo-values `pseudo_out [B, T, HV, V]` and all `h`, V first.

Everything is transposed: the state `S^T [64, K]` and the pseudo-values `v'^T [64, 64]` are accumulators of one product and,
rounded to bf16, register operands of the next. One warp fetches: the chunks' tiles by TMA, v (zeros past the end) and decays
by asynchronous copies, as many chunks ahead as there are stages; four warps compute.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ..triton import recurrence as portable
from .device.compat import copy_async, copy_tile
from .device.layouts import LINES, position, to_lines
from .device.math import wide
from .device.pipeline import (
    announce_state,
    await_state,
    load_halves,
    sequence_slot,
    stage_barriers,
    state_offsets,
    store_halves,
)
from .device.stream_k import own_share
from .device.tile_scheduler import BV, C, chunks_before, locate_part, own_chunks, piece_extent, program_parts

checkpoint_slot = gluon.jit(portable.checkpoint_slot.fn)


@gluon.jit
def load(
    tiles_d,
    decay,
    v,
    stages,
    share,
    first_segment,
    cu_seqlens,
    checkpoint_offsets,
    sizes,
    strides,
    K: gl.constexpr,
    V: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The loader: one warp that keeps the stages full."""
    tiles_s, decay_s, v_s, ready, free = stages
    _, _, HV, _, _ = sizes
    SLICES: gl.constexpr = V // BV
    slice_ = gl.program_id(0) % SLICES
    v_batch, v_token, v_head = strides
    TILES: gl.constexpr = 3 * (K // 64) + 2
    copy_l: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    line_l: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    row = position(gl.arange(0, C, layout=gl.SliceLayout(1, copy_l)))
    column = gl.arange(0, BV, layout=gl.SliceLayout(0, copy_l))
    key = gl.arange(0, K, layout=line_l)
    in_v = row[:, None] * (v_token * 8) + column[None, :]
    turn = 0
    parts, segments = program_parts(share, first_segment, sizes, SLICES)
    for k in range(parts):
        head, n, batch, begin, end, slot, pieces, before, until, _run = locate_part(
            k, segments, share, first_segment, cu_seqlens, checkpoint_offsets, sizes, SLICES
        )
        in_head = (wide(batch, v_batch) + wide(head, v_head)) * 8 + slice_ * BV
        start = begin
        opening = slot
        for piece in range(0, pieces):
            stop, chunks = piece_extent(checkpoint_offsets, n, piece, pieces, start, begin, end, C)
            low, high = own_chunks(first_segment, checkpoint_offsets, before, until, slot - opening, chunks)
            for i in range(low, high):
                s = turn % STAGES
                mbarrier.wait(free.index(s), (turn // STAGES) & 1 ^ 1)
                bar = ready.index(s)
                chunk = (slot + i) * HV + head
                at = (chunk * (TILES * 64)).to(gl.int32)
                mbarrier.expect(bar, TILES * 8192)
                for t in gl.static_range(TILES):
                    copy_tile(tiles_d, [at + t * 64, 0], bar, tiles_s.index(s * TILES + t))
                token = start + i * C
                here = v + (in_head + wide(token, v_token) * 8)
                # zeros past the end: a NaN of the next sequence would spread through the products
                inside = (row < (stop - token).to(gl.int32))[:, None]
                copy_async(v_s.index(s), here + in_v, mask=inside)
                copy_async(decay_s.index(s), decay + chunk * K + key)
                async_copy.mbarrier_arrive(bar, increment_count=False)
                turn += 1
            slot += chunks
            start = stop


@gluon.jit
def store_output(o, o_s, out, token, count, row, in_o, o_token, out_l: gl.constexpr):
    """`out [BV, 64]`, bf16, as `count` rows of o from `token` on."""
    o_s.permute((1, 0)).store(out)
    gl.store(o + wide(token, o_token) * 8 + in_o, o_s.load(out_l), mask=(row < count)[:, None])


@gluon.jit
def compute(
    stages,
    o_s,
    o,
    h,
    pseudo_out,
    states,
    state_indices,
    has_initial_state,
    cu_seqlens,
    checkpoint_offsets,
    checkpoint_indices,
    handed,
    arrived,
    starts,
    share,
    first_segment,
    sizes,
    strides,
    K: gl.constexpr,
    V: gl.constexpr,
    V_FIRST: gl.constexpr,
    H_V_FIRST: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The consumer: four warps that carry an item's state from chunk to chunk.

    The tensor cores work off the products in order. While they do the last of a chunk, and `inverse v` of the next, the
    state is rounded for the next chunk; the output leaves during the next chunk's first products.
    """
    tiles_s, decay_s, v_s, ready, free = stages
    initial_state, final_state, lowest, pool_slots, state_pitch, has_initial, has_final = states
    T, N, HV, _, _ = sizes
    SLICES: gl.constexpr = V // BV
    slice_ = gl.program_id(0) % SLICES
    o_batch, o_token, o_head = strides
    KH: gl.constexpr = K // 64
    TILES: gl.constexpr = 3 * KH + 2
    acc_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    dot_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc_l, k_width=2)
    out_l: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    key = gl.arange(0, 64, layout=gl.SliceLayout(0, LINES))
    NEXT: gl.constexpr = 64 if V_FIRST else 64 * V
    H_NEXT: gl.constexpr = 64 if H_V_FIRST else 64 * V
    row = position(gl.arange(0, C, layout=gl.SliceLayout(1, out_l)))
    column = gl.arange(0, BV, layout=gl.SliceLayout(0, out_l))
    in_o = row[:, None] * (o_token * 8) + column[None, :]
    zero = gl.zeros((BV, C), gl.float32, layout=acc_l)
    turn = 0
    parts, segments = program_parts(share, first_segment, sizes, SLICES)
    for k in range(parts):
        head, n, batch, begin, end, slot, pieces, before, until, run = locate_part(
            k, segments, share, first_segment, cu_seqlens, checkpoint_offsets, sizes, SLICES
        )
        if first_segment is None:
            is_segment: gl.constexpr = False
        else:
            is_segment = (segments > N) & ((before > 0) | (until > 0))
        if share is None:
            taken_over: gl.constexpr = False
            handed_on: gl.constexpr = False
        else:
            taken_over = before > 0
            handed_on = until > 0
            if first_segment is not None:
                taken_over &= segments == N
                handed_on &= segments == N
        h_row = slot
        if h is not None and cu_seqlens is not None:
            h_row = chunks_before(cu_seqlens, n, T) + before
        own, read, stored = sequence_slot(
            state_indices, has_initial_state, n, end - begin, lowest, pool_slots, has_initial, has_final
        )
        if o is not None:
            o_item = o + (wide(batch, o_batch) + wide(head, o_head)) * 8 + slice_ * BV
        if pseudo_out is not None:
            pseudo_item = pseudo_out + (wide(batch, T) * HV + head) * V + slice_ * BV
        total = 0
        start = begin
        opening = slot
        for piece in range(0, pieces):
            start, chunks = piece_extent(checkpoint_offsets, n, piece, pieces, start, begin, end, C)
            low, high = own_chunks(first_segment, checkpoint_offsets, before, until, slot - opening, chunks)
            total += high - low
            slot += chunks
        in_slice = gl.arange(0, BV, layout=gl.SliceLayout(1, LINES))
        value = slice_ * BV + in_slice
        at = own * state_pitch + state_offsets(head * K * V, value, key, K, V, V_FIRST)
        if is_segment:
            # all segments: the last may store the final state before the first has read the initial one
            left = state_offsets(run.to(gl.int64) * (K * V), value, key, K, V, True)
            state0, state1 = load_halves(starts, left, 64, 1, K, acc_l)
        elif taken_over:
            await_state(arrived - SLICES)
            left = state_offsets(-SLICES * (BV * K), in_slice, key, K, V, True)
            state0, state1 = load_halves(handed, left, 64, 1, K, acc_l)
        else:
            state0, state1 = load_halves(initial_state, at, NEXT, read, K, acc_l)
        first = turn
        if total > 0:
            done = zero.to(gl.bfloat16)
            done_token = begin
            done_count = 0
            ahead = turn % STAGES
            mbarrier.wait(ready.index(ahead), (turn // STAGES) & 1)
            v_t = v_s.index(ahead).permute((1, 0)).load(dot_l)
            inverse = tiles_s.index(ahead * TILES + 3 * KH).permute((1, 0))
            pseudo = warpgroup_mma(v_t, inverse, zero, use_acc=False, is_async=True)
            start = begin
            slot = opening
            for piece in range(0, pieces):
                stop, chunks = piece_extent(checkpoint_offsets, n, piece, pieces, start, begin, end, C)
                low, high = own_chunks(first_segment, checkpoint_offsets, before, until, slot - opening, chunks)
                for i in range(low, high):
                    s = turn % STAGES
                    base = s * TILES
                    if h is not None:
                        h_at = state_offsets(
                            wide(h_row + turn - first, HV * (K * V)) + head * (K * V), value, key, K, V, H_V_FIRST
                        )
                        gl.store(h + h_at, to_lines(state0.to(h.dtype.element_ty)))
                        if KH == 2:
                            gl.store(h + h_at + H_NEXT, to_lines(state1.to(h.dtype.element_ty)))
                    left0 = gl.convert_layout(state0.to(gl.bfloat16), dot_l, assert_trivial=True)
                    if KH == 2:
                        left1 = gl.convert_layout(state1.to(gl.bfloat16), dot_l, assert_trivial=True)
                    # w is stored negated: v' comes out of one accumulator, which holds inverse v
                    pseudo = warpgroup_mma(left0, tiles_s.index(base).permute((1, 0)), pseudo, is_async=True)
                    if KH == 2:
                        pseudo = warpgroup_mma(left1, tiles_s.index(base + 1).permute((1, 0)), pseudo, is_async=True)
                    out = warpgroup_mma(
                        left0, tiles_s.index(base + KH).permute((1, 0)), zero, use_acc=False, is_async=True
                    )
                    if KH == 2:
                        out = warpgroup_mma(left1, tiles_s.index(base + KH + 1).permute((1, 0)), out, is_async=True)
                    if o is not None:
                        store_output(o_item, o_s, done, done_token, done_count, row, in_o, o_token, out_l)
                    state0 = state0 * decay_s.index(s).slice(0, 64).load(gl.SliceLayout(0, acc_l))[None, :]
                    if KH == 2:
                        state1 = state1 * decay_s.index(s).slice(64, 64).load(gl.SliceLayout(0, acc_l))[None, :]
                    pseudo, v_t = warpgroup_mma_wait(KH, deps=[pseudo, v_t])
                    p = gl.convert_layout(pseudo.to(gl.bfloat16), dot_l, assert_trivial=True)
                    out = warpgroup_mma(p, tiles_s.index(base + 3 * KH + 1).permute((1, 0)), out, is_async=True)
                    state0 = warpgroup_mma(p, tiles_s.index(base + 2 * KH), state0, is_async=True)
                    if KH == 2:
                        state1 = warpgroup_mma(p, tiles_s.index(base + 2 * KH + 1), state1, is_async=True)
                    if pseudo_out is not None:
                        token = start + i * C
                        store_output(
                            *(pseudo_item, o_s, pseudo.to(gl.bfloat16), token, (stop - token).to(gl.int32), row),
                            *(row[:, None] * (HV * V) + column[None, :], HV * (V // 8), out_l),
                        )
                    # the last chunk does its own `inverse v` again, which nobody uses
                    turn += 1
                    after = gl.minimum(turn, first + total - 1)
                    mbarrier.wait(ready.index(after % STAGES), (after // STAGES) & 1)
                    v_t = v_s.index(after % STAGES).permute((1, 0)).load(dot_l)
                    inverse = tiles_s.index((after % STAGES) * TILES + 3 * KH).permute((1, 0))
                    pseudo = warpgroup_mma(v_t, inverse, zero, use_acc=False, is_async=True)
                    if KH == 2:
                        state0, state1, out, p, left0, left1 = warpgroup_mma_wait(
                            1, deps=[state0, state1, out, p, left0, left1]
                        )
                    else:
                        state0, out, p, left0 = warpgroup_mma_wait(1, deps=[state0, out, p, left0])
                    mbarrier.arrive(free.index(s), count=1)
                    done = out.to(gl.bfloat16)
                    done_token = start + i * C
                    done_count = (stop - done_token).to(gl.int32)
                if checkpoint_offsets is not None:
                    there, reached = checkpoint_slot(
                        checkpoint_offsets, checkpoint_indices, n, piece, pieces, stop - begin, lowest, pool_slots
                    )
                    slot += chunks
                    if first_segment is not None:
                        # by the segment that the last chunk before the checkpoint is in
                        passed = slot - opening
                        reached *= ((before < passed) & ((until == 0) | (passed <= until))).to(gl.int32)
                    at = there * state_pitch + state_offsets(head * K * V, value, key, K, V, V_FIRST)
                    store_halves(final_state, at, NEXT, state0, state1, reached, K)
                    start = stop
            pseudo, v_t = warpgroup_mma_wait(0, deps=[pseudo, v_t])
            if o is not None:
                store_output(o_item, o_s, done, done_token, done_count, row, in_o, o_token, out_l)
        # turn is first + total now; offsets that the compiler can't see to be those of above need no registers in the loop
        nothing = turn - first - total
        at = own * state_pitch + state_offsets(head * K * V + nothing, value, key, K, V, V_FIRST)
        if first_segment is not None:
            stored = gl.where(is_segment & (until > 0), 0, stored)
        if handed_on:
            store_halves(handed, state_offsets(nothing, in_slice, key, K, V, True), 64, state0, state1, 1, K)
            announce_state(arrived)
        else:
            store_halves(final_state, at, NEXT, state0, state1, stored, K)


_STRIDES = [f"{x}_{dim}" for x in ("v", "o") for dim in ("batch", "token", "head")]
SCALARS = (
    "lowest",
    "pool_slots",
    "has_initial",
    "has_final",
    "state_pitch",
    "T",
    "N",
    "HV",
    "slots",
    "checkpoints",
    *_STRIDES,
)
"""Arguments whose values leave the machine code as it is."""


@gluon.jit(do_not_specialize=SCALARS)
def recurrence_kernel(
    tiles_d,
    decay,
    v,
    o,
    h,
    pseudo_out,
    cu_seqlens,
    checkpoint_offsets,
    checkpoint_indices,
    handed,
    arrived,
    first_segment,
    starts,
    initial_state,
    final_state,
    state_indices,
    has_initial_state,
    lowest: gl.int32,
    pool_slots: gl.int32,
    has_initial: gl.int32,
    has_final: gl.int32,
    state_pitch: gl.int64,
    T: gl.int32,
    N: gl.int32,
    HV: gl.int32,
    slots: gl.int32,
    checkpoints: gl.int32,
    v_batch: gl.int32,
    v_token: gl.int32,
    v_head: gl.int32,
    o_batch: gl.int32,
    o_token: gl.int32,
    o_head: gl.int32,
    K: gl.constexpr,
    V: gl.constexpr,
    V_FIRST: gl.constexpr,
    H_V_FIRST: gl.constexpr,
    STAGES: gl.constexpr,
    SHARED: gl.constexpr,
):
    TILES: gl.constexpr = 3 * (K // 64) + 2
    tiles_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES * TILES, 64, 64], tiles_d.layout)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, BV], tiles_d.layout)
    decay_s = gl.allocate_shared_memory(gl.float32, [STAGES, K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    o_s = gl.allocate_shared_memory(gl.bfloat16, [C, BV], tiles_d.layout)
    ready, free = stage_barriers(STAGES)
    stages = (tiles_s, decay_s, v_s, ready, free)
    sizes = (T, N, HV, slots, checkpoints)
    in_v = (v_batch, v_token, v_head)
    in_o = (o_batch, o_token, o_head)
    states = (initial_state, final_state, lowest, pool_slots, state_pitch, has_initial, has_final)
    if not SHARED:
        share: gl.constexpr = None
    else:
        pid = gl.program_id(0)
        SLICES: gl.constexpr = V // BV
        share = own_share(pid // SLICES, gl.num_programs(0) // SLICES, cu_seqlens, N, T, HV, C)
        handed += pid * (BV * K)
        arrived += pid
    gl.warp_specialize(
        [
            (
                compute,
                (
                    stages,
                    o_s,
                    o,
                    h,
                    pseudo_out,
                    states,
                    state_indices,
                    has_initial_state,
                    cu_seqlens,
                    checkpoint_offsets,
                    checkpoint_indices,
                    handed,
                    arrived,
                    starts,
                    share,
                    first_segment,
                    sizes,
                    in_o,
                    K,
                    V,
                    V_FIRST,
                    H_V_FIRST,
                    STAGES,
                ),
            ),
            (
                load,
                (
                    tiles_d,
                    decay,
                    v,
                    stages,
                    share,
                    first_segment,
                    cu_seqlens,
                    checkpoint_offsets,
                    sizes,
                    in_v,
                    K,
                    V,
                    STAGES,
                ),
            ),
        ],
        [1],
        [96],
    )
