"""From a validated call to the program that runs it."""

from __future__ import annotations

from dataclasses import replace

from ..problem.problem import BACKWARD, Problem, Tensors
from ..program.launch import capability
from ..program.program import Outputs, Program
from ..triton import launch as portable
from . import gradients
from .launch import aligned, chunk, prepare_inputs, step


def build(problem: Problem, t: Tensors, arch: int | None = None) -> Program:
    """The program, for GPUs of compute capability `arch` (the tensors' own by default)."""
    arch = capability(t.device) if arch is None else arch
    if problem.operation == "chunk" + BACKWARD:
        return gradients.backward(problem, t)
    if problem.keeps:
        return gradients.forward(problem, t)
    copy_out = None
    if problem.operation == "chunk" and t.out is not None and not aligned(t.out):
        t, copy_out = replace(t, out=None), t.out
    outputs = Outputs.of(problem, t)
    if problem.operation == "wy":
        return Program(outputs, [gradients.wy_dqkg(problem, t, outputs)])
    if problem.operation != "chunk":
        return Program(outputs, [step(problem, portable.prepare_inputs(problem, t), arch, outputs)])
    return Program(outputs, chunk(problem, prepare_inputs(t), arch, outputs), copy_out)
