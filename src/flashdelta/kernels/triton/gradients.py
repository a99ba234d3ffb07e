"""The stages of the backward pass by the portable Triton kernels."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...parallel.merge import carried_states
from ...problem.problem import ChunkProblem, ChunkTensors
from ...problem.split import segments_of_call
from ...program.launch import sm_count
from ...program.program import Program, Step
from ..stages import backward_pass
from ..stages.backward_pass import Kept, Stages
from ..stages.launch import StageCall, layout, prepare_inputs
from .intra import intra
from .prepare import prepare
from .recurrence import recurrence
from .reverse import reverse
from .segments import SPLIT_COSTS, before_segments, outgoing, room
from .wy import wy


def forward(problem: ChunkProblem, t: ChunkTensors, arch: int) -> Program:
    return backward_pass.forward(stages_of(problem, t, arch))


def backward(problem: ChunkProblem, t: ChunkTensors, arch: int) -> Program:
    return backward_pass.backward(stages_of(problem, t, arch))


def stages_of(problem: ChunkProblem, t: ChunkTensors, arch: int) -> Stages:
    t, copies = prepare_inputs(problem, t)
    most = room(problem, arch, sm_count(t.device))
    return Stages(
        problem,
        t,
        copies,
        layout(problem, segments_of_call(problem, most, SPLIT_COSTS)),
        squares=(problem.B * problem.slots, problem.HV, problem.chunk_size, problem.chunk_size),
        squares_dtype=torch.float32,
        scan=functools.partial(scan, problem, t, arch, most),
        arch=arch,
        reverse=functools.partial(reverse, arch=arch),
        wy=functools.partial(wy, problem, arch),
        intra=functools.partial(intra, problem, t, arch),
    )


def scan(
    problem: ChunkProblem,
    t: ChunkTensors,
    arch: int,
    room: int,
    kept: Kept,
    o: Tensor | None,
    final_state: Tensor | None,
) -> list[Step]:
    call = StageCall(problem, t, arch, kept.workspace, kept.beside)
    prepared, carried, told = prepare(call, kept.Akk_inv), list[Step](), list[Step]()
    if problem.ranks > 1:
        carried, call, told = carried_states(call, outgoing, kept.packets)
    split = before_segments(call, room, final_state)
    return [prepared, *carried, *split, recurrence(call, o, final_state, kept.h, v_new=kept.v_new), *told]
