"""Sequences that go on from rank to rank (docs/parallel.md; `reference/parallel.py` is the definition): stage `merge`.
`parallel/merge.py` says where it runs.

Forward, from the packets `(M, b)` of all ranks: the state before this rank's tokens,

    S = b_first;  S <- M_j S + b_j                  for the ranks j from the next one to the one before this

Backward, with the offsets `c` of the ranks' gradients: the gradient of the state after this rank's tokens,

    dS = c_last;  dS <- M_j^T dS + c_j              for the ranks j from the one before the last to the one after this
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...problem.problem import ChunkProblem, ChunkTensors
from ...program.launch import Launch
from ..shared.mma import dot
from ..shared.scalars import SCALARS
from ..shared.sequences import crossing_packet, locate_sequence, own_work_tile
from ..shared.states import load_state, named_slot, sequence_slot, state_offsets, store_state
from .launch import StageCall, launch, state_arguments
from .segments import compose_config


@triton.jit(do_not_specialize=SCALARS)
def merge_kernel(
    transitions, offsets, merged, border, cu_seqlens,
    initial_state, final_state, state_indices, has_initial_state, lowest, pool_slots, has_initial, has_final,
    state_pitch: tl.int64, rank, packets, transition_pitch, offset_pitch, T, N, HV,
    K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, V_FIRST: tl.constexpr, OFFSETS_V_FIRST: tl.constexpr,
    BACKWARD: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`merged [N, HV, K, V]`, in the caller's layout: the initial states, those of sequences that go on here from other ranks
    merged; or gradients of final states, those of sequences that go on elsewhere with what other ranks add.

    One CTA per (sequence, value head, `BV` value channels). `transitions`: of rank j, packet p and head h, M^T [K, K] at
    `((j P + p) HV + h) transition_pitch`; `offsets` [V, K] at `((j P + p) HV + h) offset_pitch`.
    """
    slice_, head, n, _, begin, end = own_work_tile(cu_seqlens, T, HV, V // BV)
    own, read, _ = sequence_slot(
        state_indices, has_initial_state, n, end - begin, lowest, pool_slots, has_initial, has_final
    )
    value = slice_ * BV + tl.arange(0, BV)
    key = tl.arange(0, K)
    packet, is_open = crossing_packet(border + BACKWARD, n, packets)
    far = tl.load(border + 2 + BACKWARD)
    in_head = state_offsets(head * K * V, value, key, K, V, V_FIRST)
    wanted = read if BACKWARD else read * (1 - is_open.to(tl.int32))
    state = load_state(initial_state, own * state_pitch + in_head, wanted)
    if is_open:
        # from the far rank towards this one
        step = -1 if BACKWARD else 1
        between = (rank - far) * step
        in_transition = key[:, None] * K + key[None, :]
        if BACKWARD:
            in_transition = key[None, :] * K + key[:, None]
        in_offset = state_offsets(n * 0, value, key, K, V, OFFSETS_V_FIRST)
        at = (far * packets + packet) * HV + head
        carried = tl.load(offsets + at * offset_pitch + in_offset)
        for _ in tl.range(1, between, num_stages=STAGES):
            at += step * packets * HV
            right = tl.load(transitions + at * transition_pitch + in_transition)
            carried = dot(carried, right, tl.load(offsets + at * offset_pitch + in_offset), "tf32x3")
        state += carried
    store_state(merged, n * HV * K * V + in_head, state, 1)


@triton.jit(do_not_specialize=SCALARS)
def clear_kernel(grad_initial, border, packets, HV, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Zeros for the rows of `grad_initial [N, HV, SIZE]` whose sequences start on another rank. One CTA per (row, head)."""
    opened = tl.load(border)
    if opened < 0:
        return
    at = opened.to(tl.int64) * HV + tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    for start in range(0, SIZE, BLOCK):
        tl.store(grad_initial + at * SIZE + start + lane, tl.zeros([BLOCK], grad_initial.dtype.element_ty))


@triton.jit(do_not_specialize=SCALARS)
def store_ends_kernel(
    states, pool, border, cu_seqlens, state_indices, lowest, pool_slots, pitch: tl.int64, packets, T, HV,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The states `[N, HV, SIZE]` to the pool's slots, of sequences that end on this rank. One CTA per (sequence, head)."""
    n = tl.program_id(0).to(tl.int64) // HV
    head = tl.program_id(0).to(tl.int64) % HV
    _, goes_on = crossing_packet(border + 1, n, packets)
    _, begin, end = locate_sequence(n, cu_seqlens, T)
    slot, named = named_slot(state_indices, n, lowest, pool_slots)
    if goes_on | (begin == end) | (not named):
        return
    lane = tl.arange(0, BLOCK)
    for start in range(0, SIZE, BLOCK):
        x = tl.load(states + (n * HV + head) * SIZE + start + lane)
        tl.store(pool + slot * pitch + head * SIZE + start + lane, x.to(pool.dtype.element_ty))


def sizes(problem: ChunkProblem) -> dict[str, int]:
    """Arguments of both kernels that go through states as rows."""
    return dict(packets=problem.packets, SIZE=problem.K * problem.V, BLOCK=1024)


def store_ends(call: StageCall, final_state: Tensor) -> Launch:
    problem, t = call.problem, call.t
    assert t.state_pool is not None
    own = dict(states=final_state, pool=t.state_pool, pitch=t.state_pool.stride(0), **sizes(problem))
    return launch(store_ends_kernel, problem.N * problem.HV, problem, t, own)


def merge(call: StageCall, packets: Tensor, gradients: Tensor | None, merged: Tensor) -> Launch:
    """`call.t.initial_state` are the states, or the gradients, that the caller has. `gradients`: the offsets of the backward
    pass, which lie as these do; the forward's lie in `packets`."""
    problem, t, backward = call.problem, call.t, gradients is not None
    offsets = packets[:, :, :, -problem.V :] if gradients is None else gradients
    c = compose_config(problem, call.arch)
    own = dict(
        state_arguments(problem, t, None),
        **dict(transitions=packets, offsets=offsets, merged=merged, packets=problem.packets),
        **dict(transition_pitch=packets.stride(2), offset_pitch=offsets.stride(2)),
        **dict(OFFSETS_V_FIRST=problem.state_v_first or not backward, BACKWARD=int(backward)),
    )
    return launch(merge_kernel, problem.N * problem.HV * (problem.V // c.BV), problem, t, own, c)


def clear(problem: ChunkProblem, t: ChunkTensors, grad_initial: Tensor) -> Launch:
    own = dict(grad_initial=grad_initial, **sizes(problem))
    ctas = problem.packets * problem.HV if problem.N > 0 else 0
    return launch(clear_kernel, ctas, problem, t, own)
