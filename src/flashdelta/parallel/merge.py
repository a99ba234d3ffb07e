"""The steps around `recurrence` and `reverse` where sequences go on from rank to rank (docs/parallel.md): exchanges, and the
stage `merge` of `kernels/stages/merge.py`, for every backend's kernels."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from ..kernels.stages.launch import StageCall
from ..kernels.stages.merge import merge, store_ends
from ..problem.problem import BACKWARD, ChunkProblem, ChunkTensors, replaced
from ..program.launch import Launch
from ..program.plan import Outputs, Step
from ..program.workspace import Slots
from .border import OPENED
from .exchange import ALL, EARLIER, LATER, Exchange, exchange, receive, send

Transition = Callable[[StageCall, Tensor], Launch]
"""A backend's launch that leaves `(M, b)` of the sequences that go on to the next rank in a packet, `Problem.packet_shape`."""

Steps = list[Step]

Reverse = Callable[[ChunkProblem, ChunkTensors, Tensor | None, Tensor | None], Launch]
"""A backend's scan from the gradients of final states to those of initial ones."""


def carried_states(call: StageCall, transition: Transition, packets: Tensor) -> tuple[Steps, StageCall, Steps]:
    """Returns the steps that find the states before this rank's tokens, the call from these on, and the steps after its
    `recurrence`. The first rank's packet in a relay is what that ends with. The last rank tells nobody of its own.
    `packets`: room for those of all ranks, or those that the forward has left for its backward pass."""
    problem, t = call.problem, call.t
    before, after = list[Step](), list[Step]()
    if t.packets is None:
        packet = t.memory.new(packets.shape[1:], torch.float32)
        # a backward pass reads the M of the ranks after this one
        goes_back = problem.requires_grad or problem.operation.endswith(BACKWARD)
        to = ALL if goes_back and problem.ranks > 2 else LATER
        sent = Exchange(exchange, problem.process_group, problem.exchange, to, packet, packets)
        if problem.relays and problem.rank == 0:
            call = replaced(call, packet=packet)
            after.append(sent)
        else:
            if problem.rank < problem.ranks - 1:
                before.append(transition(call, packet))
            before.append(sent)
    if problem.rank == 0 and not problem.has_pool:
        return before, call, after  # nothing comes from a rank before
    states = t.memory.new(problem.state_shape, torch.float32)
    before.append(merge(call, packets, None, states))
    from_here = replaced(problem, has_initial_state=True, state_dtype=torch.float32, has_pool=False, pool_slots=0)
    t = replaced(t, initial_state=states, state_pool=None, state_indices=None, has_initial_state=None)
    return before, replaced(call, problem=from_here, t=t), after


def with_rank_exchange(
    call: StageCall, transition: Transition, outputs: Outputs
) -> tuple[Steps, StageCall, Tensor | None, Steps]:
    """Returns a forward's steps before `recurrence`, the call that this runs, where it leaves the final states, and the steps
    after it."""
    packets = room_for_packets(call.problem, call.t.memory)
    if call.problem.requires_grad:  # its backward pass needs them
        outputs["packets"] = packets
    before, from_here, after = carried_states(call, transition, packets)
    if not call.problem.has_pool:
        return before, from_here, outputs.get("final_state"), after
    final_state = call.t.memory.new(call.problem.state_shape, torch.float32)
    return before, from_here, final_state, [*after, store_ends(call, final_state)]


def room_for_packets(problem: ChunkProblem, memory: Slots) -> Tensor:
    return memory.new(problem.packet_shape, torch.float32)


def send_gradients(problem: ChunkProblem, memory: Slots) -> Exchange:
    """The exchange that sends the gradients of the states before this rank's tokens to earlier ranks."""
    offsets = memory.new((problem.ranks, problem.packets, problem.HV, *problem.inner_state), torch.float32)
    own = memory.new(offsets.shape[1:], torch.float32)
    return Exchange(exchange, problem.process_group, problem.exchange, EARLIER, own, offsets)


def carried_gradients(
    call: StageCall, packets: Tensor, reverse: Reverse, grads: Tensor, meanwhile: Iterable[Step]
) -> Iterator[Step]:
    """Yields the steps that find the gradients `grads` of the final states, those of later ranks included. `call.t.dht`: the
    caller's own. `meanwhile`: steps that take none of them, and run before they are waited for."""
    problem, t = call.problem, call.t
    sent = send_gradients(problem, t.memory)
    if problem.rank == 0:
        # nothing comes from a rank before, and a captured graph waits for the others where it sends
        yield from meanwhile
        yield sent
    else:
        ends = t.cu_seqlens
        if ends is not None:
            assert t.border is not None
            ends = t.border[OPENED:]
        alone = replaced(problem, N=problem.packets, has_initial_state=True)
        yield reverse(alone, replaced(t, cu_seqlens=ends), t.dht, sent.packet)
        yield replaced(sent, act=send)
        yield from meanwhile
        yield replaced(sent, act=receive)
    given = replaced(problem, has_initial_state=t.dht is not None)
    call = replaced(call, problem=given, t=replaced(t, initial_state=t.dht))
    yield merge(call, packets, sent.packets, grads)
