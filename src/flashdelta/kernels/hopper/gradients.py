"""The stages of the backward pass on Hopper."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from ...parallel.merge import carried_states
from ...problem.problem import ChunkProblem, ChunkTensors
from ...program.program import Program, Step
from ..stages import backward_pass
from ..stages.backward_pass import Kept, Stages
from ..stages.launch import StageCall
from .intra import intra
from .launch import TILE, layout, prepare_inputs
from .prepare import prepare
from .recurrence import recurrence
from .reverse import reverse
from .segments import before_segments, outgoing, split_layout
from .wy import wy

ARCH = 90


def forward(problem: ChunkProblem, t: ChunkTensors) -> Program:
    return backward_pass.forward(stages_of(problem, t))


def backward(problem: ChunkProblem, t: ChunkTensors) -> Program:
    return backward_pass.backward(stages_of(problem, t))


def stages_of(problem: ChunkProblem, t: ChunkTensors) -> Stages:
    t, copies = prepare_inputs(t)
    return Stages(
        problem,
        t,
        copies,
        {**layout(problem), **split_layout(problem, t.device)},
        squares=(problem.B, problem.T, problem.HV, TILE),
        squares_dtype=torch.bfloat16,
        scan=functools.partial(scan, problem, t),
        arch=ARCH,
        reverse=reverse,
        wy=functools.partial(wy, problem),
        intra=functools.partial(intra, problem, t),
    )


def scan(
    problem: ChunkProblem, t: ChunkTensors, kept: Kept, o: Tensor | None, final_state: Tensor | None
) -> list[Step]:
    call = StageCall(problem, t, ARCH, kept.workspace, kept.beside)
    prepared, carried, told = prepare(call, kept.Akk_inv), list[Step](), list[Step]()
    if problem.ranks > 1:
        carried, call, told = carried_states(call, outgoing, kept.packets)
    split = before_segments(call, final_state)
    return [prepared, *carried, *split, recurrence(call, o, final_state, kept.h, kept.v_new), *told]
