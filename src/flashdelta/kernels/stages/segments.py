"""Stage `compose` of long sequences cut into segments (docs/split.md): the states before all segments from what
leads from one to the next, for every backend; and what a forward leaves of a split for its backward pass."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from ...problem.problem import ChunkProblem, ChunkTensors
from ...program.launch import Launch
from ...program.plan import Outputs
from ...program.workspace import Layout, Slots, Workspace, sizes
from ..shared.mma import dot
from ..shared.scalars import SCALARS
from ..shared.segments import segment_chunks
from ..shared.sequences import own_work_tile, sequence_chunk_slots
from ..shared.states import load_state, sequence_slot, state_offsets
from .launch import SHARED_MEMORY, Config, StageCall, launch, state_arguments

MOST_SEGMENTS = tl.constexpr(128)
"""Segments of a planned sequence, or more."""


@triton.jit(do_not_specialize=SCALARS)
def compose_kernel(
    transitions, offsets, starts, forgets, first_segment, cu_seqlens,
    initial_state, final_state, state_indices, has_initial_state, lowest, pool_slots, has_initial, has_final,
    state_pitch: tl.int64, T, N, HV, chunk_slots,
    C: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, BK: tl.constexpr, V_FIRST: tl.constexpr,
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
        chunk_slot, _ = sequence_chunk_slots(cu_seqlens, None, 0, n, begin, chunk_slots, C)
        part = tl.arange(0, MOST_SEGMENTS) + 1
        border, _ = segment_chunks(part, last - first + 1, tl.cdiv(end - begin, C))
        restarts = tl.load(forgets + (chunk_slot + border - 1) * HV + head, mask=part <= last - first, other=1)
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
        if forgets is not None:
            # here: the flags come while states do. If all segments after the first restart, no more is needed
            last = tl.where(tl.min(restarts) != 0, first + 1, last)
        in_transition = head * K * K + key[:, None] * ROW + key[None, :] * COLUMN
        for _ in tl.range(first + 1, last, num_stages=STAGES):
            tl.store(starts + here * V + in_state, state)
            right = tl.load(transitions + here * K + in_transition)
            state = dot(state, right, tl.load(offsets + here * V + in_state), "tf32x3")
            here += STEP * HV * K
        tl.store(starts + here * V + in_state, state)
    else:
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


def compose_config(problem: ChunkProblem, capability: int) -> Config:
    """Chosen on an H200, K = V = 128: 2.3 us per step; 2.6 with 2 stages, 4.0 with slices of 32 channels, 5.8 by `BK` = 64."""
    if problem.K > 128:
        return Config(BV=min(32, problem.V), BK=64, num_warps=4, STAGES=1)
    stages = 3 if SHARED_MEMORY[capability] > 170_000 else 2
    return Config(BV=min(16, problem.V), BK=problem.K, num_warps=8, STAGES=stages)


def compose(call: StageCall, backward: bool = False) -> Launch:
    """Finds the states before all segments; with `backward` the gradients of those after them, in their place, from
    `call.t.initial_state`."""
    problem, t = call.problem, call.t
    c = compose_config(problem, call.arch)
    segments = call.left("transitions", "offsets", "starts", "forgets", "first_segment")
    own = dict(**segments, **state_arguments(problem, t, None), BACKWARD=int(backward))
    ctas = problem.N * problem.HV * (problem.V // c.BV)
    return launch(compose_kernel, ctas, problem, t, own, c, overlaps=call.arch >= 90)


def transition_arguments(t: ChunkTensors, where: dict[str, Any]) -> dict[str, Any]:
    """The tensors that stage `transitions` writes, and their pitches, under its kernels' names."""
    pitches = dict(transition_pitch=where["transitions"].stride(1), offset_pitch=where["offsets"].stride(1))
    return dict(**where, **pitches, border=t.border if where["first_segment"] is None else None)


LASTING = ("transitions", "starts", "first_segment")
"""Tensors of a split that the backward pass needs."""


def lasting_segments(problem: ChunkProblem, layout: Layout, outputs: Outputs, memory: Slots) -> dict[str, Tensor]:
    """Room for these, which a forward with gradients leaves for its backward pass if they take no more memory than `v`."""
    kept = {name: layout[name] for name in LASTING if name in layout}
    values = problem.B * problem.T * problem.HV * problem.V * problem.dtype.itemsize
    if not kept or not problem.requires_grad or sum(sizes(kept)) > values:
        return {}
    segments = Workspace.allocate(kept, memory)
    outputs["segments"] = segments.buffer
    return segments


def found_segments(t: ChunkTensors, layout: Layout) -> dict[str, Tensor]:
    """Takes what the forward has left so, by name."""
    if t.segments is None:
        return {}
    return Workspace({name: layout[name] for name in LASTING}, t.segments)
