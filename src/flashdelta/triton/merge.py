"""Sequences that go on from rank to rank (docs/parallel.md; `reference/parallel.py` is the definition): stage `merge`, and what
runs around `recurrence` and `reverse`.

Forward, from the packets `(M, b)` of all ranks: the state before this rank's tokens,

    S = b_first;  S <- M_j S + b_j                  for the ranks j from the next one to the one before this

Backward, with the offsets `c` of the ranks' gradients: the gradient of the state after this rank's tokens,

    dS = c_last;  dS <- M_j^T dS + c_j              for the ranks j from the one before the last to the one after this
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..problem.border import OPENED
from ..problem.exchanges import ALL, EARLIER, LATER, exchange, receive, send
from ..problem.problem import BACKWARD, Problem, Tensors
from ..program.exchange import Exchange
from ..program.launch import Launch
from ..program.program import Outputs, Step
from ..program.workspace import new
from .device.mma import dot
from .device.sequences import crossing_packet, locate_sequence, own_work_tile
from .device.states import load_state, named_slot, sequence_slot, state_offsets, store_state
from .launch import StageCall, state_arguments
from .segments import compose_config

Transition = Callable[[StageCall, Tensor], Launch]
"""A backend's launch that leaves `(M, b)` of the sequences that go on to the next rank in a packet, `Problem.packet_shape`."""

Reverse = Callable[[Problem, Tensors, Tensor | None, Tensor | None], Launch]
"""A backend's scan from the gradients of final states to those of initial ones."""


@triton.jit(
    do_not_specialize=[
        *("rank", "packets", "T", "N", "HV", "lowest", "pool_slots", "has_initial", "has_final"),
    ]
)
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


@triton.jit(do_not_specialize=["packets", "HV"])
def clear_kernel(grad_initial, border, packets, HV, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Zeros for the rows of `grad_initial [N, HV, SIZE]` whose sequences start on another rank. One CTA per (row, head)."""
    opened = tl.load(border)
    if opened < 0:
        return
    at = opened.to(tl.int64) * HV + tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    for start in range(0, SIZE, BLOCK):
        tl.store(grad_initial + at * SIZE + start + lane, tl.zeros([BLOCK], grad_initial.dtype.element_ty))


@triton.jit(do_not_specialize=["lowest", "pool_slots", "packets", "T", "HV"])
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


def store_ends(call: StageCall, final_state: Tensor) -> Launch:
    problem, t = call.problem, call.t
    assert t.state_pool is not None
    return Launch(
        store_ends_kernel,
        problem.N * problem.HV,
        (
            *(final_state, t.state_pool, t.border, t.cu_seqlens, t.state_indices),
            *(problem.lowest_index, problem.pool_slots, t.state_pool.stride(0)),
            *(problem.packets, problem.T, problem.HV),
        ),
        dict(SIZE=problem.K * problem.V, BLOCK=1024),
        num_warps=4,
        scratch=(final_state,),
    )


def merge(call: StageCall, packets: Tensor, gradients: Tensor | None, merged: Tensor) -> Launch:
    """`call.t.initial_state` are the states, or the gradients, that the caller has. `gradients`: the offsets of the backward
    pass, which lie as these do; the forward's lie in `packets`."""
    problem, t, backward = call.problem, call.t, gradients is not None
    offsets = packets[:, :, :, -problem.V :] if gradients is None else gradients
    c = compose_config(problem, call.arch)
    return Launch(
        merge_kernel,
        problem.N * problem.HV * (problem.V // c.BV),
        (
            *(packets, offsets, merged, t.border, t.cu_seqlens, *state_arguments(problem, t, None)),
            *(problem.rank, problem.packets, packets.stride(2), offsets.stride(2), problem.T, problem.N, problem.HV),
        ),
        dict(
            K=problem.K,
            V=problem.V,
            BV=c.BV,
            V_FIRST=problem.state_v_first,
            OFFSETS_V_FIRST=problem.state_v_first or not backward,
            BACKWARD=int(backward),
            STAGES=c.stages,
        ),
        c.num_warps,
        scratch=(packets, merged) if gradients is None else (packets, merged, gradients),
    )


def clear(problem: Problem, t: Tensors, grad_initial: Tensor) -> Launch:
    return Launch(
        clear_kernel,
        problem.packets * problem.HV if problem.N > 0 else 0,
        (grad_initial, t.border, problem.packets, problem.HV),
        dict(SIZE=problem.K * problem.V, BLOCK=1024),
        num_warps=4,
    )


def carried_states(
    call: StageCall, transition: Transition, packets: Tensor
) -> tuple[list[Step], StageCall, list[Step]]:
    """What finds the states before this rank's tokens, the call from these on, and what follows its `recurrence`. By relay the
    first one's packet is what that ends with. The last rank tells nobody of its own. `packets`: room for those of all ranks,
    or those that the forward has left for its backward pass."""
    problem, t = call.problem, call.t
    before, after = list[Step](), list[Step]()
    if t.packets is None:
        packet = new(packets.shape[1:], torch.float32, t.device)
        # a backward pass reads the M of the ranks after this one
        goes_back = problem.requires_grad or problem.operation.endswith(BACKWARD)
        to = ALL if goes_back and problem.ranks > 2 else LATER
        told = Exchange(exchange, problem.process_group, problem.exchange, to, packet, packets)
        if problem.relays and problem.rank == 0:
            call = replace(call, packet=packet, beside=(*call.beside, packet))
            after.append(told)
        else:
            if problem.rank < problem.ranks - 1:
                before.append(transition(call, packet))
            before.append(told)
    if problem.rank == 0 and not problem.has_pool:
        return before, call, after  # nothing comes from a rank before
    states = new(problem.state_shape, torch.float32, t.device)
    before.append(merge(call, packets, None, states))
    from_here = replace(problem, has_initial_state=True, state_dtype=torch.float32, has_pool=False, pool_slots=0)
    t = replace(t, initial_state=states, state_pool=None, state_indices=None, has_initial_state=None)
    # what reads the states keeps them alive, as scratch
    return before, replace(call, problem=from_here, t=t, beside=(*call.beside, states)), after


def around_recurrence(
    call: StageCall, transition: Transition, outputs: Outputs
) -> tuple[list[Step], StageCall, Tensor | None, list[Step]]:
    """Of a forward: what runs before `recurrence`, the call that this runs, where it leaves the final states, and what runs
    after it."""
    before, from_here, after = carried_states(call, transition, kept_packets(call.problem, outputs))
    if not call.problem.has_pool:
        return before, from_here, outputs.get("final_state"), after
    final_state = new(call.problem.state_shape, torch.float32, outputs.device)
    from_here = replace(from_here, beside=(*from_here.beside, final_state))
    return before, from_here, final_state, [*after, store_ends(call, final_state)]


def kept_packets(problem: Problem, outputs: Outputs) -> Tensor:
    """Room for the packets of all ranks, which a forward with gradients leaves for its backward pass."""
    packets = room_for_packets(problem, outputs.device)
    if problem.requires_grad:
        outputs["packets"] = packets
    return packets


def room_for_packets(problem: Problem, device: torch.device) -> Tensor:
    return new(problem.packet_shape, torch.float32, device)


def told_gradients(problem: Problem, device: torch.device) -> Exchange:
    """Of the gradients of the states before this rank's tokens, to earlier ranks."""
    offsets = new((problem.ranks, problem.packets, problem.HV, *problem.inner_state), torch.float32, device)
    own = new(offsets.shape[1:], torch.float32, device)
    return Exchange(exchange, problem.process_group, problem.exchange, EARLIER, own, offsets)


def carried_gradients(
    call: StageCall, packets: Tensor, reverse: Reverse, grads: Tensor, meanwhile: Iterable[Step]
) -> Iterator[Step]:
    """What finds the gradients `grads` of the final states, those of later ranks included. `call.t.dht`: the caller's own.
    `meanwhile`: what takes none of them, and runs before they are waited for."""
    problem, t = call.problem, call.t
    told = told_gradients(problem, t.device)
    if problem.rank == 0:
        # nothing comes from a rank before, and a captured graph waits for the others where it sends
        yield from meanwhile
        yield told
    else:
        ends = t.cu_seqlens
        if ends is not None:
            assert t.border is not None
            ends = t.border[OPENED:]
        alone = replace(problem, N=problem.packets, has_initial_state=True)
        yield reverse(alone, replace(t, cu_seqlens=ends), t.dht, told.packet)
        yield replace(told, act=send)
        yield from meanwhile
        yield replace(told, act=receive)
    given = replace(problem, has_initial_state=t.dht is not None)
    call = replace(call, problem=given, t=replace(t, initial_state=t.dht))
    yield merge(call, packets, told.packets, grads)
