"""Sequences in segments (docs/split.md) for Hopper: the plan, and stage `maps`.

`maps` finds, for every segment but a sequence's last, the map from the state before it to the state after it. A work item is
a (segment, value head, slice of 64 of the K + V columns of M and b); there is a program per multiprocessor, which does every
so many-th. Contract: as `triton/segments.py`, from the tiles that `prepare` leaves. It is `recurrence` without
output. One warp fetches, four compute.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..triton import segments as portable
from ..triton.device import sequences
from .device.compat import copy_async, copy_tile
from .device.layouts import LINES, from_lines, position
from .device.math import wide
from .device.pipeline import load_halves, sequence_slot, stage_barriers, state_offsets, store_halves
from .device.stream_k import add
from .device.tile_scheduler import BV, C, even_parts, item_of, locate_segment, own_chunks, piece_extent

chunks_of = gluon.jit(portable.chunks_of.fn)
states_fit = gluon.jit(portable.states_fit.fn)
planned_parts = gluon.jit(portable.planned_parts.fn)
piece_count = gluon.jit(sequences.span_count.fn)


@gluon.jit
def plan_segments(
    cu_seqlens,
    checkpoint_offsets,
    first_segment,
    T,
    N,
    checkpoints,
    room,
    split,
    batch_invariant,
    COSTS: gl.constexpr,
):
    """`first_segment [N + 1]`: where each sequence's segments begin among all, for the whole program to write."""
    lane = gl.arange(0, 128, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    pieces = piece_count(checkpoint_offsets, checkpoints)
    total = gl.full([], 0, gl.int64)
    for base in range(0, N, 128):
        total += gl.sum(chunks_of(base + lane, cu_seqlens, checkpoint_offsets, pieces, N, T, C))
    fits = states_fit(total, cu_seqlens, pieces, N, T, C)
    before = total * 0
    for base in range(0, N, 128):
        n = base + lane
        chunks = chunks_of(n, cu_seqlens, checkpoint_offsets, pieces, N, T, C)
        parts = planned_parts(
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
        parts = gl.where(n < N, gl.where(fits, parts, 1), 0)
        ends = before + gl.associative_scan(parts, 0, add)
        gl.store(first_segment + n, (ends - parts).to(gl.int32), mask=n < N)
        before += gl.sum(parts)
    gl.store(first_segment + N, before.to(gl.int32))


@gluon.jit
def map_parts(first_segment, sizes, SLICES: gl.constexpr):
    """How many slices of maps the program does. Some programs may be left over."""
    _, N, HV, _, _ = sizes
    inside = gl.program_id(0) < gl.num_programs(0) // SLICES * SLICES
    return gl.where(inside, even_parts((gl.load(first_segment + N) - N) * HV, SLICES), 0)


@gluon.jit
def locate_map(k, first_segment, cu_seqlens, checkpoint_offsets, sizes, K: gl.constexpr, V: gl.constexpr):
    """The program's item number `k`, as `locate_segment`, and how many of its chunks count: M of a sequence's first segment is
    not needed, as the state before it is known."""
    SLICES: gl.constexpr = (K + V) // BV
    head, n, batch, begin, end, slot, pieces, before, until, run, part = locate_segment(
        item_of(k, SLICES), 1, first_segment, cu_seqlens, checkpoint_offsets, sizes
    )
    in_M = gl.program_id(0) % SLICES * BV < K
    chunks = gl.where((part == 0) & in_M, 0, until - before)
    return head.to(gl.int32), n, batch.to(gl.int32), begin, end, slot, pieces, before, until, run, part, chunks


@gluon.jit
def load_map(
    tiles_d,
    decay,
    v,
    stages,
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
    SLICES: gl.constexpr = (K + V) // BV
    slice_ = gl.program_id(0) % SLICES - K // BV
    v_batch, v_token, v_head = strides
    KH: gl.constexpr = K // 64
    TILES: gl.constexpr = 2 * KH + 1
    copy_l: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    line_l: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    row = position(gl.arange(0, C, layout=gl.SliceLayout(1, copy_l)))
    column = gl.arange(0, BV, layout=gl.SliceLayout(0, copy_l))
    key = gl.arange(0, K, layout=line_l)
    in_v = row[:, None] * (v_token * 8) + column[None, :]
    turn = 0
    for k in range(map_parts(first_segment, sizes, SLICES)):
        head, n, batch, begin, end, slot, pieces, before, until, _run, _part, wanted = locate_map(
            k, first_segment, cu_seqlens, checkpoint_offsets, sizes, K, V
        )
        in_head = (wide(batch, v_batch) + wide(head, v_head)) * 8 + slice_ * BV
        start = begin
        opening = slot
        for piece in range(0, gl.where(wanted > 0, pieces, 0)):
            stop, chunks = piece_extent(checkpoint_offsets, n, piece, pieces, start, begin, end, C)
            low, high = own_chunks(first_segment, checkpoint_offsets, before, until, slot - opening, chunks)
            for i in range(low, high):
                s = turn % STAGES
                mbarrier.wait(free.index(s), (turn // STAGES) & 1 ^ 1)
                bar = ready.index(s)
                mbarrier.expect(bar, TILES * 8192)
                chunk = (slot + i).to(gl.int32) * HV + head
                at = chunk * ((3 * KH + 2) * 64)
                for t in gl.static_range(KH):
                    copy_tile(tiles_d, [at + t * 64, 0], bar, tiles_s.index(s * TILES + t))
                    copy_tile(tiles_d, [at + (2 * KH + t) * 64, 0], bar, tiles_s.index(s * TILES + KH + t))
                copy_tile(tiles_d, [at + 3 * KH * 64, 0], bar, tiles_s.index(s * TILES + 2 * KH))
                token = (start + i * C).to(gl.int32)
                # no value writes to M's columns
                count = gl.where(slice_ >= 0, (stop - token).to(gl.int32), 0)
                copy_async(v_s.index(s), v + (in_head + wide(token, v_token) * 8) + in_v, mask=(row < count)[:, None])
                copy_async(decay_s.index(s), decay + chunk * K + key)
                async_copy.mbarrier_arrive(bar, increment_count=False)
                turn += 1
            slot += chunks
            start = stop


@gluon.jit
def compute_map(
    stages,
    maps,
    offsets,
    states,
    state_indices,
    has_initial_state,
    first_segment,
    cu_seqlens,
    checkpoint_offsets,
    sizes,
    K: gl.constexpr,
    V: gl.constexpr,
    V_FIRST: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The consumer: four warps that carry 64 columns from chunk to chunk."""
    tiles_s, decay_s, v_s, ready, free = stages
    initial_state, lowest, pool_slots, state_pitch, has_initial, has_final = states
    SLICES: gl.constexpr = (K + V) // BV
    slice_ = gl.program_id(0) % SLICES
    KH: gl.constexpr = K // 64
    TILES: gl.constexpr = 2 * KH + 1
    acc_l: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    dot_l: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc_l, k_width=2)
    key = gl.arange(0, 64, layout=gl.SliceLayout(0, LINES))
    column = slice_ * BV + gl.arange(0, BV, layout=gl.SliceLayout(1, LINES))
    NEXT: gl.constexpr = 64 if V_FIRST else 64 * V
    zero = gl.zeros((BV, C), gl.float32, layout=acc_l)
    turn = 0
    for k in range(map_parts(first_segment, sizes, SLICES)):
        head, n, _batch, begin, end, _slot, _pieces, _before, _until, run, part, chunks = locate_map(
            k, first_segment, cu_seqlens, checkpoint_offsets, sizes, K, V
        )
        # M's columns start as unit vectors, b's from zero, of a sequence's first segment from the initial state
        own, read, _stored = sequence_slot(
            state_indices, has_initial_state, n, end - begin, lowest, pool_slots, has_initial, has_final
        )
        read = gl.where((part == 0) & (slice_ * BV >= K), read, 0)
        at = own * state_pitch + state_offsets(head * (K * V), column - K, key, K, V, V_FIRST)
        state0, state1 = load_halves(initial_state, at, NEXT, read, K, acc_l)
        state0 += from_lines(gl.where(column[:, None] == key[None, :], 1.0, 0.0), acc_l)
        state1 += from_lines(gl.where(column[:, None] == key[None, :] + 64, 1.0, 0.0), acc_l)
        for _i in range(chunks):
            s = turn % STAGES
            base = s * TILES
            left0 = gl.convert_layout(state0.to(gl.bfloat16), dot_l, assert_trivial=True)
            if KH == 2:
                left1 = gl.convert_layout(state1.to(gl.bfloat16), dot_l, assert_trivial=True)
            mbarrier.wait(ready.index(s), (turn // STAGES) & 1)
            v_t = v_s.index(s).permute((1, 0)).load(dot_l)
            pseudo = warpgroup_mma(
                v_t, tiles_s.index(base + 2 * KH).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            # w is stored negated
            pseudo = warpgroup_mma(left0, tiles_s.index(base).permute((1, 0)), pseudo, is_async=True)
            if KH == 2:
                pseudo = warpgroup_mma(left1, tiles_s.index(base + 1).permute((1, 0)), pseudo, is_async=True)
            state0 = state0 * decay_s.index(s).slice(0, 64).load(gl.SliceLayout(0, acc_l))[None, :]
            if KH == 2:
                state1 = state1 * decay_s.index(s).slice(64, 64).load(gl.SliceLayout(0, acc_l))[None, :]
                pseudo, v_t, left0, left1 = warpgroup_mma_wait(0, deps=[pseudo, v_t, left0, left1])
            else:
                pseudo, v_t, left0 = warpgroup_mma_wait(0, deps=[pseudo, v_t, left0])
            p = gl.convert_layout(pseudo.to(gl.bfloat16), dot_l, assert_trivial=True)
            state0 = warpgroup_mma(p, tiles_s.index(base + KH), state0, is_async=True)
            if KH == 2:
                state1 = warpgroup_mma(p, tiles_s.index(base + KH + 1), state1, is_async=True)
                state0, state1, p = warpgroup_mma_wait(0, deps=[state0, state1, p])
            else:
                state0, p = warpgroup_mma_wait(0, deps=[state0, p])
            mbarrier.arrive(free.index(s), count=1)
            turn += 1
        wanted = (chunks > 0).to(gl.int32)
        if slice_ * BV < K:
            at = state_offsets(run * (K * K), column, key, K, K, True)
            store_halves(maps, at, 64, state0, state1, wanted, K)
        else:
            at = state_offsets(run * (K * V), column - K, key, K, V, True)
            store_halves(offsets, at, 64, state0, state1, wanted, K)


_STRIDES = [f"v_{dim}" for dim in ("batch", "token", "head")]
SCALARS = (
    *("lowest", "pool_slots", "has_initial", "has_final", "state_pitch", "T", "N", "HV", "slots", "checkpoints"),
    *_STRIDES,
)
"""Arguments whose values leave the machine code as it is."""


@gluon.jit(do_not_specialize=SCALARS)
def maps_kernel(
    tiles_d,
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
    K: gl.constexpr,
    V: gl.constexpr,
    V_FIRST: gl.constexpr,
    STAGES: gl.constexpr,
):
    gdc_wait()
    gdc_launch_dependents()
    TILES: gl.constexpr = 2 * (K // 64) + 1
    tiles_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES * TILES, 64, 64], tiles_d.layout)
    v_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, BV], tiles_d.layout)
    decay_s = gl.allocate_shared_memory(gl.float32, [STAGES, K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready, free = stage_barriers(STAGES)
    sizes = (T, N, HV, slots, checkpoints)
    in_v = (v_batch, v_token, v_head)
    stages = (tiles_s, decay_s, v_s, ready, free)
    states = (initial_state, lowest, pool_slots, state_pitch, has_initial, has_final)
    gl.warp_specialize(
        [
            (
                compute_map,
                (
                    stages,
                    maps,
                    offsets,
                    states,
                    state_indices,
                    has_initial_state,
                    first_segment,
                    cu_seqlens,
                    checkpoint_offsets,
                    sizes,
                    K,
                    V,
                    V_FIRST,
                    STAGES,
                ),
            ),
            (
                load_map,
                (tiles_d, decay, v, stages, first_segment, cu_seqlens, checkpoint_offsets, sizes, in_v, K, V, STAGES),
            ),
        ],
        [1],
        [96],
    )
