"""The stages of the backward pass by the portable Triton kernels."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from ..problem.problem import Problem, Tensors
from ..program.launch import Launch
from ..program.program import Program
from . import backward_pass
from .backward_pass import Kept, Stages
from .intra import intra
from .launch import StageCall, layout, prepare_inputs
from .prepare import prepare
from .recurrence import recurrence
from .reverse import reverse
from .wy import wy


def forward(problem: Problem, t: Tensors, arch: int) -> Program:
    return backward_pass.forward(stages_of(problem, t, arch))


def backward(problem: Problem, t: Tensors, arch: int) -> Program:
    do = t.do if t.do.stride(-1) == 1 else t.do.contiguous()
    return backward_pass.backward(stages_of(problem, replace(t, do=do), arch))


def stages_of(problem: Problem, t: Tensors, arch: int) -> Stages:
    t = prepare_inputs(problem, t)
    return Stages(
        problem,
        t,
        layout(problem),
        squares=(problem.B * problem.slots, problem.HV, problem.chunk_size, problem.chunk_size),
        squares_dtype=torch.float32,
        scan=functools.partial(scan, problem, t, arch),
        reverse=functools.partial(reverse, problem, t, arch),
        wy=functools.partial(wy, problem, arch),
        intra=functools.partial(intra, problem, t, arch),
    )


def scan(
    problem: Problem, t: Tensors, arch: int, kept: Kept, o: Tensor | None, final_state: Tensor | None
) -> list[Launch]:
    call = StageCall(problem, t, arch, kept.workspace)
    pair = (prepare(call, kept.Akk_inv), recurrence(call, o, final_state, kept.h, v_new=kept.v_new))
    return [replace(stage, scratch=kept.buffers) for stage in pair]
