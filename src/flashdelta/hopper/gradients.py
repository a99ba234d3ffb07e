"""The stages of the backward pass on Hopper."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from ..problem.problem import Problem, Tensors
from ..program.launch import Launch
from ..program.program import Program
from ..triton import backward_pass
from ..triton.backward_pass import Kept, Stages
from ..triton.launch import StageCall
from .intra import intra
from .launch import TILE, copyable, layout, prepare_inputs
from .prepare import prepare
from .recurrence import recurrence
from .reverse import reverse
from .wy import wy


def forward(problem: Problem, t: Tensors) -> Program:
    return backward_pass.forward(stages_of(problem, t))


def backward(problem: Problem, t: Tensors) -> Program:
    return backward_pass.backward(stages_of(problem, replace(t, do=copyable(t.do))))


def stages_of(problem: Problem, t: Tensors) -> Stages:
    t = prepare_inputs(t)
    return Stages(
        problem,
        t,
        layout(problem),
        squares=(problem.B, problem.T, problem.HV, TILE),
        squares_dtype=torch.bfloat16,
        scan=functools.partial(scan, problem, t),
        reverse=functools.partial(reverse, problem, t),
        wy=functools.partial(wy, problem),
        intra=functools.partial(intra, problem, t),
    )


def scan(problem: Problem, t: Tensors, kept: Kept, o: Tensor | None, final_state: Tensor | None) -> list[Launch]:
    call = StageCall(problem, t, 90, kept.workspace)
    pair = (prepare(call, kept.Akk_inv), recurrence(call, o, final_state, kept.h, kept.v_new))
    return [replace(stage, scratch=kept.buffers) for stage in pair]
