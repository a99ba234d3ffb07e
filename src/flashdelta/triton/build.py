"""From a validated call to the program that runs it."""

from __future__ import annotations

from collections.abc import Callable

from ..problem.problem import BACKWARD, Problem, Tensors
from ..program.launch import Launch, capability
from ..program.program import Outputs, Program
from . import gradients
from .launch import chunk, commit, prefill, prepare_inputs, step
from .wy import wy_dqkg


def build(problem: Problem, t: Tensors, arch: int | None = None) -> Program:
    """The program, for GPUs of compute capability `arch`, e.g. 90 (the tensors' own by default)."""
    arch = capability(t.device) if arch is None else arch
    if problem.operation == "chunk" + BACKWARD:
        return gradients.backward(problem, t, arch)
    if problem.keeps:
        return gradients.forward(problem, t, arch)
    outputs = Outputs.of(problem, t)
    return Program(outputs, LAUNCHES[problem.operation](problem, prepare_inputs(problem, t), arch, outputs))


LAUNCHES: dict[str, Callable[[Problem, Tensors, int, Outputs], list[Launch]]] = {
    "chunk": chunk,
    "recurrent": step,
    "decode": step,
    "commit": commit,
    "prefill": prefill,
    "wy": wy_dqkg,
}
"""The launches of each operation, in order."""
