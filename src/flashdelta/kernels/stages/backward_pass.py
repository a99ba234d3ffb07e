"""The stages of `chunk_kda` and of its backward pass in order, whatever kernels run them, and what they leave for each other.

A backend describes its kernels by a `StageSet` (`triton/build.py`, `hopper/build.py`); docs/backward.md has the formulas.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...parallel.exchange import Exchange
from ...parallel.merge import carried_gradients, carried_states, room_for_packets, send_gradients, with_rank_exchange
from ...problem.problem import ChunkProblem, ChunkTensors, replaced
from ...program.launch import Launch
from ...program.plan import Outputs, Plan, Step, new_outputs
from ...program.workspace import Layout, Workspace
from .finish import finish, new_gradients
from .launch import StageCall, or_empty
from .merge import clear
from .segments import compose, found_segments, lasting_segments
from .wy import new_parts, wy_operands


@dataclass(frozen=True)
class Kept:
    """Tensors that the backward pass needs of the forward, `S` being the chunk slots: the workspace, and in the operand
    dtype `Akk_inv` (`StageSet.squares`), states before chunks `h [S, HV, V, K]` and `v_new [B, T, HV, V]`. Over several ranks
    also what they sent each other, `packets` (`merge.py`)."""

    workspace: Workspace
    Akk_inv: Tensor
    h: Tensor
    v_new: Tensor
    packets: Tensor | None = None


def reverse_arguments(
    call: StageCall,
    dht: Tensor | None,
    dh0: Tensor | None = None,
    dh: Tensor | None = None,
    dv: Tensor | None = None,
    packet: Tensor | None = None,
) -> dict[str, Any]:
    """Arguments that the kernels of `reverse` take under other names than the call's: a scan from the gradients `dht` of final
    states to those of initial ones, `dh0`, which leaves those of the states after each chunk and of `v_new`, `dh` and `dv`, as
    `h` and `v_new`. Without these only the gradient before each sequence is wanted, or before each segment, which goes to
    `offsets`. On the second of two ranks the scan leaves the gradients for the first in `packet`."""
    t, (final, initial) = call.t, or_empty(call.problem, dht, dh0)
    offsets = call.workspace.get("offsets") if dh is None else None
    return dict(
        **dict(grad_o=t.do, o=t.do, grad_v_new=dv, grad_h=dh, grad_final=final, grad_initial=initial),
        **dict(call.left("first_segment"), offsets=offsets, ends=call.workspace.get("starts")),
        **dict(border=None if packet is None else t.border, packet=packet),
        **dict(has_initial=dh0 is not None, has_final=dht is not None),
    )


@dataclass(frozen=True)
class StageSet:
    """A backend's launchers for a call whose tensors `t` are as its kernels can read them, after `copies`.

    `layout`: of the workspace. `squares` is the shape in which they have a matrix of every chunk, and `parts_dtype` the dtype
    of such matrices' gradients and of parts of dq. Arguments: `prepare(call, Akk_inv)`, `before_segments(call)`,
    `outgoing(call, packet)`, `recurrence(call, o, final_state, h, v_new)`; `reverse(call, own)`, `wy(call, own)` and
    `intra(call, own)`, with the arguments that their kernels take beside the call's.
    """

    problem: ChunkProblem
    t: ChunkTensors
    copies: Sequence[Launch]
    layout: Layout
    arch: int
    prepare: Callable[..., Launch]
    before_segments: Callable[..., list[Launch]]
    outgoing: Callable[..., Launch]
    recurrence: Callable[..., Launch]
    reverse: Callable[..., Launch]
    wy: Callable[..., Launch]
    intra: Callable[..., Launch]
    squares: tuple[int, ...]
    parts_dtype: torch.dtype

    def forward(self, outputs: Outputs, own: Tensor | None = None) -> list[Step]:
        """The launches of a forward that keeps nothing, in order. `own`: scratch that is written instead of the output."""
        problem = self.problem
        lasting = lasting_segments(problem, self.layout, outputs, self.t.memory)
        workspace = Workspace.allocate(self.layout, self.t.memory, lasting)
        o = outputs["o"] if own is None else own
        call = StageCall(problem, self.t, self.arch, workspace)
        final_state, carried, stored = outputs.get("final_state"), list[Step](), list[Step]()
        prepared = self.prepare(call)
        if problem.ranks > 1:
            carried, call, final_state, stored = with_rank_exchange(call, self.outgoing, outputs)
        split = self.before_segments(call)
        return [prepared, *carried, *split, self.recurrence(call, o, final_state, outputs.get("h")), *stored]

    def scan(self, kept: Kept, o: Tensor | None, final_state: Tensor | None) -> list[Step]:
        """The forward's launches that leave what is kept, without `o` no more than that."""
        call = StageCall(self.problem, self.t, self.arch, kept.workspace)
        prepared, carried, stored = self.prepare(call, kept.Akk_inv), list[Step](), list[Step]()
        if self.problem.ranks > 1:
            carried, call, stored = carried_states(call, self.outgoing, kept.packets)
        split = self.before_segments(call)
        return [prepared, *carried, *split, self.recurrence(call, o, final_state, kept.h, kept.v_new), *stored]

    def kept(self, tensors: Mapping[str, Tensor] | None = None) -> Kept:
        """Takes what the forward kept, by name; without it, makes room for it."""
        problem, memory = self.problem, self.t.memory
        if tensors is not None:
            workspace = Workspace(self.layout, tensors["workspace"])
            return Kept(workspace, tensors["Akk_inv"], tensors["h"], tensors["v_new"], tensors.get("packets"))
        states = (problem.B * problem.slots, problem.HV, problem.V, problem.K)
        values = (problem.B, problem.T, problem.HV, problem.V)
        # gradients of the states after segments take the place of the states before them
        given = {name: x for name, x in self.segments.items() if name != "starts"}
        workspace = Workspace.allocate(self.layout, memory, given)
        packets = self.t.packets
        if packets is None and problem.ranks > 1:
            packets = room_for_packets(problem, memory)
        Akk_inv, h, v_new = (memory.new(shape, problem.dtype) for shape in (self.squares, states, values))
        return Kept(workspace, Akk_inv, h, v_new, packets)

    @functools.cached_property
    def segments(self) -> dict[str, Tensor]:
        """Tensors of a split that the forward left, by name."""
        return found_segments(self.t, self.layout)


def forward(stages: StageSet) -> Plan:
    """The forward that also leaves what its backward pass would compute again."""
    outputs, kept = new_outputs(stages.problem, stages.t), stages.kept()
    o, final_state = outputs["o"], outputs.get("final_state")
    outputs |= {"workspace": kept.workspace.buffer, "Akk_inv": kept.Akk_inv, "h": kept.h, "v_new": kept.v_new}
    if kept.packets is not None:
        outputs["packets"] = kept.packets
    return Plan(stages.t.memory, outputs, [*stages.copies, *stages.scan(kept, o, final_state)])


def backward(stages: StageSet) -> Plan:
    """Gradients by input; without what was kept the forward's stages run again."""
    outputs = Outputs()
    return Plan(stages.t.memory, outputs, [*stages.copies, *launches(stages, outputs)])


def launches(stages: StageSet, outputs: Outputs) -> Iterator[Step]:
    """Yields the steps in order; `outputs` has what they find once all have been asked for."""
    problem, t, memory = stages.problem, stages.t, stages.t.memory
    recomputed: Iterator[Step] = iter(())
    if t.workspace is not None:
        given = {"workspace": t.workspace, "Akk_inv": t.A, "h": t.h, "v_new": t.v_new}
        kept = stages.kept(given if t.packets is None else given | {"packets": t.packets})
    else:
        kept = stages.kept()
        steps = stages.scan(replaced(kept, workspace=kept.workspace | stages.segments), None, None)
        exchanges = [i for i, step in enumerate(steps) if isinstance(step, Exchange)]
        # what follows the exchange of states, or `prepare`, may wait
        first = max(exchanges, default=0) + 1
        yield from steps[:first]
        recomputed = iter(steps[first:])
    call, dh0 = StageCall(problem, t, stages.arch, kept.workspace), None
    if problem.has_initial_state:
        dh0 = outputs["initial_state"] = memory.new(problem.state_shape, problem.state_dtype)
    dht = t.dht if problem.output_final_state else None
    sent = None
    if problem.ranks == 2 and problem.rank == 1:
        # nothing comes from a rank after, and what goes to the one before is what `reverse` ends with
        sent = send_gradients(problem, memory)
    elif problem.ranks > 1:
        dht = yield from gradients_of_ranks(stages, call, kept.packets, dht, recomputed)
    if sent is None or (call.may_split and not stages.segments):
        yield from recomputed
    if call.may_split:
        yield from gradients_of_segments(stages, call, dht)
    dh, dv = [memory.new(x.shape, x.dtype) for x in (kept.h, kept.v_new)]
    packet = None if sent is None else sent.packet
    yield stages.reverse(call, reverse_arguments(call, dht, dh0, dh, dv, packet))
    if sent is not None:
        yield sent
        yield from recomputed
    if problem.ranks > 1 and dh0 is not None:
        yield clear(problem, t, dh0)
    parts = new_parts(problem, memory, stages.squares, stages.parts_dtype)
    grad_v = outputs["v"] = memory.new((problem.B, problem.T, problem.HV, problem.V), problem.dtype)
    yield stages.wy(call, wy_operands(t, kept.Akk_inv, kept.h, kept.v_new, dh, dv) | parts | {"grad_v": grad_v})
    heads = new_gradients(problem, memory)
    yield stages.intra(call, parts | heads)
    yield from finish(problem, t, heads, outputs)


def gradients_of_ranks(
    stages: StageSet, call: StageCall, packets: Tensor | None, dht: Tensor | None, meanwhile: Iterable[Step]
) -> Generator[Step, None, Tensor]:
    """The gradients of the final states, with those that come from later ranks; see `carried_gradients`."""
    assert packets is not None
    grads = call.t.memory.new(call.problem.state_shape, torch.float32)
    # without segments: this rank's tokens as one
    whole = {name: x for name, x in call.workspace.items() if name not in ("first_segment", "offsets", "starts")}

    def reverse(problem: ChunkProblem, t: ChunkTensors, dht: Tensor | None, dh0: Tensor | None) -> Launch:
        own = StageCall(problem, t, stages.arch, whole)
        return stages.reverse(own, reverse_arguments(own, dht, dh0))

    given = replaced(call, t=replaced(call.t, dht=dht))
    yield from carried_gradients(given, packets, reverse, grads, meanwhile)
    return grads


def gradients_of_segments(stages: StageSet, call: StageCall, dht: Tensor | None) -> Iterator[Launch]:
    """Finds the gradients of the states after segments, in the place of the forward's states before them, which nobody
    needs any more, or which lie elsewhere (`found_segments`). The transitions are the forward's."""
    yield stages.reverse(call, reverse_arguments(call, dht))
    given = replaced(call.problem, has_initial_state=dht is not None)
    yield compose(replaced(call, problem=given, t=replaced(call.t, initial_state=dht)), backward=True)
