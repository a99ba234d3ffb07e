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

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...problem.problem import ChunkProblem
from ...program.launch import Launch
from ..shared.mma import dot
from ..shared.scalars import SCALARS
from ..shared.segments import part_of_span, place_segment, segment_of, span_chunks_before
from ..shared.sequences import (
    OFFSETS_AT_A_TIME,
    crossing_packet,
    own_work_tile,
    rows_before,
    sequence_chunk_slots,
    span_extent,
)
from ..shared.states import checkpoint_slot, checkpoint_target, load_state, sequence_slot, state_offsets, store_state
from ..stages.launch import (
    SHARED_MEMORY,
    Config,
    StageCall,
    checkpoint_arguments,
    launch,
    packet_arguments,
    precision,
    state_arguments,
)


@triton.jit
def regular_spans(chunk, begin, end, every, C):
    """Counts the spans of the tokens `[begin, end)`, from chunk `chunk` of their sequence on, where one starts before every
    `every` chunks."""
    stop = chunk + ((end - begin + C - 1) // C).to(tl.int32)
    return (stop + every - 1) // every - chunk // every


@triton.jit
def regular_extent(chunk, start, end, every, C):
    """`span_extent` of the span that goes on at chunk `chunk` of the sequence, which is at token `start`."""
    stop = tl.minimum(start + (every - chunk % every) * C, end)
    return stop, ((stop - start + C - 1) // C).to(tl.int32)


@triton.jit
def regular_row(first_row, chunk, every, rows):
    """The row for the state before chunk `chunk` of a sequence with a checkpoint before every `every` chunks, from row
    `first_row` on, and whether to store it."""
    row = first_row + chunk // every
    return row, ((chunk % every == 0) & (row < rows)).to(tl.int32)


# One CTA, tiles [rows, columns], transposed as they are held; S^T stays in registers from chunk to chunk:
#
#     w, qg, kg [C, K]   inverse, Aqk [C, C]   v [C, BV]   decay [K]        `STAGES` pipeline stages of loads
#              |
#     for each chunk:                                                         (for each checkpoint span)
#         S^T [BV, K] -> h
#         v_new^T [BV, C]  = v^T inverse^T - S^T w^T      -> v_new            (u^T instead of v^T inverse^T)
#         o^T     [BV, C]  = S^T qg^T + v_new^T Aqk^T     -> o
#         S^T     [BV, K]  = S^T diag(decay) + v_new^T kg
#     S^T -> the slot of the checkpoint (of a regular one before the span's chunks)
#     S^T -> final state
@triton.jit(do_not_specialize=SCALARS)
def recurrence_kernel(
    w, qg, kg, inverse, Aqk, decay, v, o, h, v_new, u, cu_seqlens,
    checkpoint_offsets, checkpoint_indices, checkpoint_states, checkpoint_every,
    checkpoint_rows, checkpoint_pitch, first_segment, starts, border, packet,
    initial_state, final_state, state_indices, has_initial_state, lowest, pool_slots, has_initial, has_final,
    state_pitch: tl.int64, T, N, HV, chunk_slots, checkpoints,
    v_batch: tl.int64, v_token: tl.int64, v_head: tl.int64, o_batch: tl.int64, o_token: tl.int64, o_head: tl.int64,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, V_FIRST: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`S <- diag(decay) S + kg^T v_new`, and all else of the stage's contract.

    With `first_segment [N + 1]` a CTA scans a segment instead of a sequence, from the state in `starts [G, HV, V, K]`. States
    may be slots of a pool (`device/states.py`); those at checkpoints go to the slots that `checkpoint_indices` names, of the
    pool or of `checkpoint_states`; with `checkpoint_every` those before every so many chunks go to rows of the latter. `h`: the
    state before each chunk. With `v_new [B, T, HV, V]` (backward pass, fp32 prefill) that is kept as well. On the first of two
    ranks `packet` receives the states `[V, K]` after sequences that go on to the second.
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
        if checkpoint_offsets is None:
            h_row = rows_before(cu_seqlens, n, T, C, OFFSETS_AT_A_TIME)
            if first_segment is not None:
                h_row += first
        else:
            h_row = span_chunks_before(cu_seqlens, checkpoint_offsets, n, spans, T, C, OFFSETS_AT_A_TIME)
    if checkpoint_every is not None:
        checkpoint_row = rows_before(cu_seqlens, n, T, checkpoint_every * C, OFFSETS_AT_A_TIME)
        first_chunk = 0
        if first_segment is not None:
            first_chunk = first
        spans = regular_spans(first_chunk, begin, end, checkpoint_every, C)
    at_checkpoints, pitch, lowest_checkpoint, most_checkpoints = checkpoint_target(
        *(final_state, state_pitch, lowest, pool_slots, checkpoint_states, checkpoint_pitch, checkpoint_rows)
    )
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
        if checkpoint_every is None:
            stop, chunks = span_extent(checkpoint_offsets, n, span, spans, start, begin, end, C)
        else:
            # spans of chunks that there are anyway: in the loop below a store would take shared memory from the loads
            # a counter that starts at 0, Triton 3.6 takes for the constant 0
            own_chunk = first_chunk + (chunk_slot - first_slot).to(tl.int32)
            stop, chunks = regular_extent(own_chunk, start, end, checkpoint_every, C)
            there, due = regular_row(checkpoint_row, own_chunk, checkpoint_every, checkpoint_rows)
            store_state(checkpoint_states, there * pitch + in_slot, state, due)
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
                *(checkpoint_offsets, checkpoint_indices, n, span, spans, stop - begin),
                *(lowest_checkpoint, most_checkpoints),
            )
            chunk_slot += chunks
            if h is not None:
                h_row += chunks
            if first_segment is not None:
                # by the segment that the last chunk before the checkpoint is in
                reached *= ((first < chunk_slot - first_slot) & (chunk_slot - first_slot <= last)).to(tl.int32)
            store_state(at_checkpoints, there * pitch + in_slot, state, reached)
            start = stop
        if checkpoint_every is not None:
            chunk_slot += chunks
            h_row += chunks
            start = stop
    store_state(final_state, own * state_pitch + in_slot, state, stored)
    if border is not None:
        place, crosses = crossing_packet(border + 1, n, 1 if cu_seqlens is not None else N)
        if first_segment is not None:
            crosses &= part + 1 == parts
        in_packet = state_offsets((place * HV + head) * K * V, value, key, K, V, True)
        store_state(packet, in_packet, state, crosses.to(tl.int32))


def recurrence_config(problem: ChunkProblem, capability: int) -> Config:
    """Takes as many stages as shared memory holds: at T8192 H64 on an H200, 513, 348 and 218 us with one, two and three.

    Wider slices and fewer warps than these spill: 16-bit slices of 64 channels need the register operands of wgmma. In float32
    at T4096 H32, K = 128, chunks of 64: 570 us, 688 with slices of 16, 706 with one stage.
    """
    C, K = problem.chunk_size, problem.K
    warpgroup_mma = capability in (90, 100)
    if problem.dtype == torch.float32:
        BV, num_warps = 16, 8 if K <= 128 else 16
        if capability == 90 and C * K == 8192:
            return Config(BV=32, num_warps=8, STAGES=2)
    elif K == 256:
        BV, num_warps = 32, 8
    else:
        BV, num_warps = min(problem.V, 64 if warpgroup_mma else 32), 4
    # asynchronous mma reads a stage while the next ones load; synchronous mma has read it into registers before
    stage = (3 * C * K + 2 * C * C + C * BV) * problem.dtype.itemsize
    buffers = min(3, SHARED_MEMORY[capability] // stage)
    return Config(BV=BV, num_warps=num_warps, STAGES=max(1, buffers if warpgroup_mma else buffers + 1))


STATES_FEW = 16
"""Sequences times value heads up to which slices of the states' value channels are narrow: 128 CTAs, about as many as an
H200 has SMs. (`FEW` in export/c/prefill.c.)"""


BV32_BYTES = 181_248
"""Bytes of shared memory that slices of 32 value channels need, at the most."""


def states_config(problem: ChunkProblem, capability: int, precision: str) -> Config:
    """Chooses sizes of `recurrence` without the output, in float32. With K = 128 and chunks of 64 on an H200, slices of 32
    value channels take 314 us at T4096 H32, where slices of 16 take 364, but 1239 at T16384 H8, where those take 721: half as
    many CTAs. With K = 64 and chunks of 32, T4096 H32, 137 us (slices of 32: 213; 8 warps: 182). In true float32 wide ones
    spill."""
    BV, num_warps, buffers = 16, 4, 3
    if problem.K > 64:
        num_warps, buffers = 8, 2
        if problem.N * problem.HV > STATES_FEW and precision == "tf32x3" and SHARED_MEMORY[capability] >= BV32_BYTES:
            BV = 32
    stage = (2 * problem.chunk_size * problem.K + problem.chunk_size * BV) * problem.dtype.itemsize
    return Config(BV=BV, num_warps=num_warps, STAGES=1 + min(buffers, SHARED_MEMORY[capability] // stage))


def recurrence(
    call: StageCall,
    o: Tensor | None,
    final_state: Tensor | None,
    h: Tensor | None,
    v_new: Tensor | None = None,
    u: Tensor | None = None,
) -> Launch:
    """Scans the chunks. Without `o`, that is left to `output`. With `u`, neither `Akk_inv` nor v is read."""
    problem, t = call.problem, call.t
    c = recurrence_config(problem, call.arch)
    if u is not None:
        c = states_config(problem, call.arch, problem.precision)
    inverse, v = (call.workspace["Akk_inv"], t.v) if u is None else (None, None)
    starts = call.workspace.get("starts")
    own = dict(
        **call.left("w", "qg", "kg", "Aqk", "decay", "first_segment", "starts"),
        **dict(inverse=inverse, v=v, o=o, h=h, v_new=v_new, u=u),
        **dict(checkpoint_arguments(problem, t) | packet_arguments(call) | state_arguments(problem, t, final_state)),
        PRECISION=precision(problem),
    )
    ctas = (problem.N if starts is None else starts.shape[0]) * problem.HV * (problem.V // c.BV)
    return launch(recurrence_kernel, ctas, problem, t, own, c)
