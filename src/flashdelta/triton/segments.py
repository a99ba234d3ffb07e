"""Long sequences cut into segments (docs/split.md; `reference/split.py` is the definition): stages `plan`, `transitions` and
`compose`. The state after a segment is affine in the state before it:

    S' = M S + b                        M [K, K], b [K, V]                    (transposed: S'^T = S^T M^T + b^T)

`plan` says how many segments each sequence has. `transitions` finds `(M, b)` of every segment but a sequence's last. `compose`
scans a sequence's segments and leaves the state before each, from which `recurrence` runs all segments at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from ..problem.problem import ChunkProblem, ChunkTensors
from ..problem.split import SplitCosts
from ..program.launch import Launch, strides
from ..program.program import Outputs
from ..program.workspace import Layout, Workspace, sizes
from .device.mma import dot
from .device.segments import part_of_span, place_segment, segment_of, sequence_chunks
from .device.sequences import locate_sequence, own_work_tile, span_count, span_extent
from .device.states import load_state, sequence_slot, state_offsets
from .launch import SHARED_MEMORY, StageCall, state_arguments
from .recurrence import recurrence_config, scan_constants

ROOT_BITS = tl.constexpr(7)
"""Bits of an integer square root, and so of the number of segments that is worth planning: 127 at most."""

HIGH_BIT = tl.constexpr(1 << 6)
"""The highest of them."""

MOST_SEGMENTS = tl.constexpr(128)
"""Of a planned sequence, or more."""


@triton.jit
def chunks_of(n, cu_seqlens, checkpoint_offsets, spans, N, T, C: tl.constexpr):
    """Chunks of sequences `n`, 0 past the last sequence."""
    inside = tl.minimum(n, N - 1)
    _, begin, end = locate_sequence(inside, cu_seqlens, T)
    length = (end - begin).to(tl.int64)
    return tl.where(n < N, sequence_chunks(checkpoint_offsets, inside, spans, length, C), 0)


@triton.jit
def states_fit(total, cu_seqlens, spans, N, T, C: tl.constexpr):
    """Whether `T` tokens can hold `total` chunks. Falling offsets claim more of them than that. As the states between segments
    have room for `split.py: most_segments` alone, a batch with such offsets stays whole."""
    if cu_seqlens is None:
        return True
    return total <= T // C + N * spans


@triton.jit
def planned_parts(chunks, total, room, split, batch_invariant, step, transition, compose, fixed, shortest, margin):
    """`split.py: parts_of_sequences` for sequences of `chunks` chunks."""
    total = tl.where(batch_invariant != 0, chunks, total)
    planned = tl.minimum(1 + room * chunks // tl.maximum(total, 1), chunks // shortest)
    square = chunks * (step + transition)
    root = chunks * 0
    for i in tl.static_range(ROOT_BITS):
        more = root + (HIGH_BIT >> i)
        root = tl.where(more * more * compose <= square, more, root)
    planned = tl.maximum(tl.minimum(planned, root), 1)
    longest = (chunks + planned - 1) // planned
    cut = longest * (step + transition) + planned * compose + fixed
    planned = tl.where(cut * 100 <= chunks * step * (100 - margin), planned, 1)
    forced = tl.minimum(tl.maximum(chunks, 1), split)
    return tl.where(split != 0, forced, planned)


@triton.jit(
    do_not_specialize=[
        *("T", "N", "checkpoints", "room", "split", "batch_invariant"),
        *("step", "transition", "compose", "fixed", "shortest", "margin"),
    ]
)
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


@triton.jit
def outgoing_sequence(border, packet):
    """The sequence of a packet for the next rank, whether there is one, and 1 if it comes from the rank before, else 0."""
    opened = tl.load(border)
    n = tl.load(border + 1) + packet
    goes_on = n >= packet
    return n.to(tl.int64), ((opened >= 0) & (opened + packet == n)).to(tl.int32), goes_on


@triton.jit(
    do_not_specialize=[
        *("T", "N", "HV", "chunk_slots", "checkpoints", "lowest", "pool_slots", "has_initial", "has_final"),
    ]
)
def transitions_kernel(
    w, kg, inverse, decay, v, transitions, offsets, first_segment, border, cu_seqlens,
    checkpoint_offsets, initial_state, final_state, state_indices, has_initial_state, lowest, pool_slots,
    has_initial, has_final, state_pitch: tl.int64, T, N, HV,
    chunk_slots, checkpoints, v_batch: tl.int64, v_token: tl.int64, v_head: tl.int64,
    transition_pitch, offset_pitch,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, V_FIRST: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`M` and `b` of `S' = M S + b`: `transitions [G, HV, K, K]`, whose row c is column c of M, and `offsets [G, HV, V, K]`, b
    with V first.

    One CTA per (segment, value head, `BV` of the K + V columns of M and b), which scans the segment as `recurrence` does. M's
    columns are states that start as unit vectors and that no value writes to; b's start from zero. Of a sequence's first
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


@triton.jit(do_not_specialize=["T", "N", "HV", "lowest", "pool_slots", "has_initial", "has_final"])
def compose_kernel(
    transitions, offsets, starts, forgets, first_segment, cu_seqlens,
    initial_state, final_state, state_indices, has_initial_state, lowest, pool_slots, has_initial, has_final,
    state_pitch: tl.int64, T, N, HV,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, V_FIRST: tl.constexpr,
    BACKWARD: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """`S_{j+1} = M_j S_j + b_j`, in float32: `starts [G, HV, V, K]`, the state before each segment, V first. Of
    gradients, from the last segment to the first: `dS_{j-1} = M_j^T dS_j + c_j`, that of the state after each.

    One CTA per (sequence, value head, `BV` value channels). If shared memory holds an M, `BK == K`: these are fetched ahead and
    the state stays in registers. Otherwise the state goes from segment to segment through `starts` itself, `BK` key channels at
    a time.
    """
    if OVERLAP:
        gdc_wait()
    slice_, head, n, _, begin, end = own_work_tile(cu_seqlens, T, HV, V // BV)
    first = tl.load(first_segment + n)
    last = tl.load(first_segment + n + 1) - 1
    if first >= last:
        return
    if forgets is not None:
        # asked for first: it comes while the initial state is on its way
        segment = first + 1 + tl.arange(0, MOST_SEGMENTS)
        forgotten = tl.load(forgets + segment * HV + head, mask=segment < last, other=1)
    own, read, _ = sequence_slot(
        state_indices, has_initial_state, n, end - begin, lowest, pool_slots, has_initial, has_final
    )
    value = slice_ * BV + tl.arange(0, BV)
    key = tl.arange(0, BK)
    # from the segment whose state is known
    known = last if BACKWARD else first
    STEP: tl.constexpr = -1 if BACKWARD else 1
    ROW: tl.constexpr = 1 if BACKWARD else K
    COLUMN: tl.constexpr = K if BACKWARD else 1
    if BK == K:
        at = own * state_pitch + state_offsets(head * K * V, value, key, K, V, V_FIRST)
        in_state = state_offsets(head * K * V, value, key, K, V, True)
        here = known.to(tl.int64) * HV * K
        tl.store(starts + here * V + in_state, load_state(initial_state, at, read))
        state = tl.load(offsets + here * V + in_state)
        here += STEP * HV * K
        in_transition = head * K * K + key[:, None] * ROW + key[None, :] * COLUMN
        chained = last
        if forgets is not None:  # noqa: SIM102 (a constant, and what is known when it runs)
            if tl.min(forgotten) != 0:
                # no state depends on another
                for _ in tl.range(first + 1, last, num_stages=1, loop_unroll_factor=4):
                    tl.store(starts + here * V + in_state, state)
                    state = tl.load(offsets + here * V + in_state)
                    here += STEP * HV * K
                chained = first
        for _ in tl.range(first + 1, chained, num_stages=STAGES):
            tl.store(starts + here * V + in_state, state)
            right = tl.load(transitions + here * K + in_transition)
            state = dot(state, right, tl.load(offsets + here * V + in_state), "tf32x3")
            here += STEP * HV * K
        tl.store(starts + here * V + in_state, state)
    else:
        tl.static_assert(forgets is None)
        here = known.to(tl.int64) * HV + head
        onward = STEP * HV
        for block in range(0, K, BK):
            at = own * state_pitch + state_offsets(head * K * V, value, block + key, K, V, V_FIRST)
            place = state_offsets(here * K * V, value, block + key, K, V, True)
            tl.store(starts + place, load_state(initial_state, at, read))
            tl.store(starts + place + onward * K * V, tl.load(offsets + place))
        here += onward
        for _ in range(first + 1, last):
            tl.debug_barrier()
            for block in range(0, K, BK):
                state = tl.load(offsets + state_offsets(here * K * V, value, block + key, K, V, True))
                for along in range(0, K, BK):
                    left = tl.load(starts + state_offsets(here * K * V, value, along + key, K, V, True))
                    in_transition = (along + key)[:, None] * ROW + (block + key)[None, :] * COLUMN
                    right = tl.load(transitions + here * K * K + in_transition)
                    state = dot(left, right, state, "tf32x3")
                tl.store(starts + state_offsets((here + onward) * K * V, value, block + key, K, V, True), state)
            here += onward


SPLIT_COSTS = SplitCosts(step=165, transition=100, compose=230, fixed=1500)
"""Measured on an H200 at K = V = 128; other GPUs differ in all of them alike."""


@dataclass(frozen=True)
class ComposeConfig:
    """`BV`: value channels a CTA; `BK`: key channels of the state that it holds at a time; `stages`: transitions in flight."""

    BV: int
    BK: int
    num_warps: int
    stages: int


def compose_config(problem: ChunkProblem, capability: int) -> ComposeConfig:
    """At K = V = 128 a step takes 2.3 us on an H200; 2.6 with 2 stages, 4.0 with slices of 32 channels, 5.8 by `BK` = 64."""
    if problem.K > 128:
        return ComposeConfig(BV=min(32, problem.V), BK=64, num_warps=4, stages=1)
    stages = 3 if SHARED_MEMORY[capability] > 170_000 else 2
    return ComposeConfig(BV=min(16, problem.V), BK=problem.K, num_warps=8, stages=stages)


def room(problem: ChunkProblem, capability: int, sms: int) -> int:
    """Segment transitions that are formed at the same time, one CTA an SM."""
    return sms // (problem.HV * ((problem.K + problem.V) // transitions_width(problem, capability)))


def transitions_width(problem: ChunkProblem, capability: int) -> int:
    """Columns of a transition that a CTA forms."""
    return min(recurrence_config(problem, capability).BV, problem.K)


def plan(call: StageCall, room: int) -> Launch:
    problem, costs = call.problem, SPLIT_COSTS
    return Launch(
        plan_kernel,
        1,
        (
            *(call.t.cu_seqlens, call.t.checkpoint_offsets, call.workspace["first_segment"]),
            *(problem.T, problem.N, problem.checkpoints, room, problem.split, int(problem.batch_invariant)),
            *(costs.step, costs.transition, costs.compose, costs.fixed, costs.shortest, costs.margin),
        ),
        dict(C=problem.chunk_size, BLOCK=128),
        num_warps=4,
        scratch=call.buffers,
    )


def transitions(call: StageCall, segments: int, final_state: Tensor | None) -> Launch:
    return _transitions(call, segments, call.workspace.select("transitions", "offsets", "first_segment"), final_state)


def outgoing(call: StageCall, packet: Tensor) -> Launch:
    """Of the sequences that go on to the next rank (`merge.py`)."""
    launch = _transitions(call, call.problem.packets, [packet, packet[:, :, -call.problem.V :], None], None)
    return replace(launch, scratch=(*call.buffers, packet))


def _transitions(call: StageCall, segments: int, where: list[Tensor | None], final_state: Tensor | None) -> Launch:
    problem, t, workspace = call.problem, call.t, call.workspace
    c = recurrence_config(problem, call.arch)
    BV = transitions_width(problem, call.arch)
    to, offsets, first_segment = where
    assert to is not None and offsets is not None
    border = t.border if first_segment is None else None
    return Launch(
        transitions_kernel,
        segments * problem.HV * ((problem.K + problem.V) // BV),
        (
            *(*workspace.select("w", "kg", "Akk_inv", "decay"), t.v),
            *(*where, border, t.cu_seqlens, t.checkpoint_offsets),
            *state_arguments(problem, t, final_state),
            *(problem.T, problem.N, problem.HV, problem.slots, problem.checkpoints),
            *strides(t.v),
            *(to.stride(1), offsets.stride(1)),
        ),
        scan_constants(problem, c, BV),
        c.num_warps,
        scratch=call.buffers,
    )


def compose(call: StageCall, final_state: Tensor | None, backward: bool = False) -> Launch:
    """The states before all segments; with `backward` the gradients of those after them, in their place, from
    `call.t.initial_state`."""
    problem, t = call.problem, call.t
    c = compose_config(problem, call.arch)
    overlaps = call.arch >= 90
    return Launch(
        compose_kernel,
        problem.N * problem.HV * (problem.V // c.BV),
        (
            *(*call.workspace.select("transitions", "offsets", "starts", "forgets", "first_segment"), t.cu_seqlens),
            *state_arguments(problem, t, final_state),
            *(problem.T, problem.N, problem.HV),
        ),
        dict(
            K=problem.K,
            V=problem.V,
            BV=c.BV,
            BK=c.BK,
            V_FIRST=problem.state_v_first,
            BACKWARD=int(backward),
            STAGES=c.stages,
            OVERLAP=overlaps,
        ),
        c.num_warps,
        overlaps=overlaps,
        scratch=call.buffers,
    )


LASTING = ("transitions", "starts", "first_segment")
"""What the backward pass needs of a split."""


def lasting_segments(problem: ChunkProblem, layout: Layout, outputs: Outputs) -> dict[str, Tensor]:
    """Room for these, which a forward with gradients leaves for its backward pass if they take no more memory than `v`."""
    kept = {name: layout[name] for name in LASTING if name in layout}
    values = problem.B * problem.T * problem.HV * problem.V * problem.dtype.itemsize
    if not kept or not problem.requires_grad or sum(sizes(kept)) > values:
        return {}
    segments = Workspace.allocate(kept, outputs.device)
    outputs["segments"] = segments.buffer
    return segments.tensors()


def found_segments(t: ChunkTensors, layout: Layout) -> dict[str, Tensor]:
    """What the forward has left so, by name."""
    if t.segments is None:
        return {}
    return Workspace({name: layout[name] for name in LASTING}, t.segments).tensors()


def before_segments(call: StageCall, room: int, final_state: Tensor | None) -> list[Launch]:
    """What finds the states before the segments."""
    if not call.forms_segments:
        return []
    most = call.workspace["starts"].shape[0]
    return [plan(call, room), transitions(call, most, final_state), compose(call, final_state)]
