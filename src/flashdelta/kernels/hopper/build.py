"""From a validated call to the program that runs it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from ...parallel.merge import around_recurrence
from ...problem.problem import (
    AUTO,
    BACKWARD,
    ChunkProblem,
    ChunkTensors,
    Problem,
    StepProblem,
    StepTensors,
    Tensors,
    WyTensors,
)
from ...program.launch import Launch, capability
from ...program.program import Outputs, Program, Step
from ...program.workspace import Workspace, new
from ..stages import launch as portable
from ..stages.copy import strided_copy
from ..stages.launch import StageCall
from ..stages.segments import lasting_segments
from . import gradients
from .commit import commit
from .decode import decode
from .fused_decode import fused_kda_decode
from .launch import aligned, layout, prepare_inputs, prepare_wy_inputs, steps_layout
from .prepare import prepare
from .prepare_steps import prepare_steps
from .recurrence import recurrence
from .segments import before_segments, outgoing, room, split_layout
from .verify import verify
from .wy import wy_dqkg


def build(problem: Problem, t: Tensors, arch: int | None = None) -> Program:
    """The program, for GPUs of compute capability `arch` (the tensors' own by default)."""
    arch = capability(t.device) if arch is None else arch
    if isinstance(t, WyTensors):
        t, copies = prepare_wy_inputs(t)
    elif isinstance(problem, ChunkProblem) and isinstance(t, ChunkTensors):
        if problem.operation == "chunk" + BACKWARD:
            return gradients.backward(problem, t)
        if problem.keeps:
            return gradients.forward(problem, t)
        t, copies = prepare_inputs(t)
    else:
        t, copies = portable.prepare_inputs(problem, t)
    outputs = Outputs.of(problem, t)
    return Program(outputs, LAUNCHES[problem.operation](problem, t, arch, outputs), copies)


STEPS_FROM = {(64, False): 32, (64, True): 32, (128, False): 32, (128, True): 48}
"""Value heads from which chunks are taken in steps of 32 tokens, by key channels, and whether ranks form transitions.
`prepare` has less to do for a chunk then, but the chain of `recurrence` is longer, which few heads wait for. Of 8192 tokens
with K = 128 16, 32 and 64 heads take 228, 283 and 441 us instead of 198, 275 and 518, in 8 sequences 32 heads 228 instead of
272. Where ranks form transitions, their chain comes on top. With K = 64 and bounded gates 32, 64 and 96 heads take 176, 244
and 369 us instead of 199, 343 and 510 (benchmarks/results/tuning/half_steps-h200.json)."""


def in_steps(problem: ChunkProblem, transitions_at_once: int) -> bool:
    """Whether the call goes through its chunks in steps of 32 tokens (`prepare_steps`). `transitions_at_once`: `room` of a
    call that may be split.

    Neither lengths nor sequences count: the bits of a sequence are its own. So a call with K = 128 that would be split if
    only its sequences were longer keeps its chunks, as does what the backward pass will compute again."""
    whole = problem.split == 1 or (problem.split == AUTO and (transitions_at_once == 0 or problem.K == 64))
    plain = not problem.return_intermediate_states and not problem.requires_grad
    inputs = problem.g_dtype == torch.bfloat16 and problem.l2norm
    forms_transitions = problem.ranks > 1 and not problem.relays
    return STEPS_FROM[problem.K, forms_transitions] <= problem.HV and whole and plain and inputs


def chunk(problem: ChunkProblem, t: ChunkTensors, arch: int, outputs: Outputs) -> list[Step]:
    """The launches that run a call of whole sequences, in order."""
    steps = in_steps(problem, room(problem, t.device))
    wanted = steps_layout(problem) if steps else {**layout(problem), **split_layout(problem, t.device)}
    workspace = Workspace.allocate(wanted, t.device, lasting_segments(problem, wanted, outputs))
    call = StageCall(problem, t, arch, workspace)
    final_state = outputs.get("final_state")
    prepared = prepare_steps(call) if steps else prepare(call)
    carried, stored = list[Step](), list[Step]()
    if problem.ranks > 1:
        transition = functools.partial(outgoing, steps=steps)
        carried, call, final_state, stored = around_recurrence(call, transition, outputs)
    split = before_segments(call, final_state)
    o = outputs["o"]
    if not aligned(o):  # the caller's own
        o = new(o.shape, o.dtype, o.device)
        stored += strided_copy(o, outputs["o"], scratch=o)
    last = recurrence(replace(call, beside=(*call.beside, o)), o, final_state, outputs.get("h"), steps=steps)
    return [prepared, *carried, *split, last, *stored]


def tokens_of_pool(problem: StepProblem, t: StepTensors, arch: int, outputs: Outputs) -> list[Launch]:
    """Token by token, or into a replay buffer all at once."""
    return (verify if problem.has_records else decode)(problem, t, arch, outputs)


LAUNCHES: dict[str, Callable[..., Iterable[Step]]] = {
    "chunk": chunk,
    "recurrent": decode,
    "decode": tokens_of_pool,
    "fused_decode": fused_kda_decode,
    "commit": commit,
    "wy": wy_dqkg,
}
"""The launches of each operation, in order."""
