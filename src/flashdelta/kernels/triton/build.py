"""From a validated call to the program that runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ...parallel.merge import around_recurrence
from ...problem.problem import BACKWARD, ChunkProblem, ChunkTensors, Problem, StepProblem, StepTensors, Tensors
from ...problem.split import segments_of_call
from ...program.launch import Launch, capability, sm_count
from ...program.program import Outputs, Program, Step
from ...program.workspace import Layout, Workspace
from ..stages.launch import StageCall, layout, prepare_inputs
from ..stages.segments import lasting_segments
from . import convolution, gradients, norm
from .commit import commit
from .convolution import short_convolution
from .decode import decode
from .fused_decode import fused_kda_decode
from .norm import gated_rms_norm
from .output import output
from .prepare import prepare
from .recurrence import recurrence
from .segments import SPLIT_COSTS, before_segments, outgoing, room
from .verify import verify
from .wy import wy_dqkg


def build(problem: Problem, t: Tensors, arch: int | None = None) -> Program:
    """The program, for GPUs of compute capability `arch`, e.g. 90 (the tensors' own by default)."""
    arch = capability(t.device) if arch is None else arch
    if isinstance(problem, ChunkProblem) and isinstance(t, ChunkTensors):
        if problem.operation == "chunk" + BACKWARD:
            return gradients.backward(problem, t, arch)
        if problem.keeps:
            return gradients.forward(problem, t, arch)
    outputs = Outputs(t.device) if problem.operation.endswith(BACKWARD) else Outputs.of(problem, t)
    t, copies = prepare_inputs(problem, t)
    return Program(outputs, LAUNCHES[problem.operation](problem, t, arch, outputs), copies)


def chunk(problem: ChunkProblem, t: ChunkTensors, arch: int, outputs: Outputs) -> list[Step]:
    most = room(problem, arch, sm_count(t.device))
    wanted = layout(problem, segments_of_call(problem, most, SPLIT_COSTS))
    workspace = Workspace.allocate(wanted, t.device, lasting_segments(problem, wanted, outputs))
    call = StageCall(problem, t, arch, workspace)
    o, final_state, h = outputs["o"], outputs.get("final_state"), outputs.get("h")
    prepared, carried, stored = prepare(call), list[Step](), list[Step]()
    if problem.ranks > 1:
        carried, call, final_state, stored = around_recurrence(call, outgoing, outputs)
    split = before_segments(call, most, final_state)
    return [prepared, *carried, *split, recurrence(call, o, final_state, h), *stored]


def prefill(problem: ChunkProblem, t: ChunkTensors, arch: int, outputs: Outputs) -> list[Launch]:
    """Without `u` among the outputs those of `chunk_kda`, but that `w` lies in one; with it `output` is a stage of its own."""
    o, w, u, final_state = outputs["o"].view(t.v.shape), outputs["w"], outputs.get("u"), outputs.get("final_state")
    call = StageCall(problem, t, arch, Workspace.allocate(prefill_layout(problem, u is not None), t.device, {"w": w}))
    if u is None:
        return [prepare(call), recurrence(call, o, final_state, None)]
    states = recurrence(call, None, final_state, call.workspace["h"], v_new=o, u=u)
    return [prepare(call, u=u), states, output(call, o)]


def prefill_layout(problem: ChunkProblem, values: bool) -> Layout:
    """That of `chunk_kda`, whose `w` is a result. With `values`, `u` is one too: it takes the place of `Akk_inv`, and
    `output` reads the state before each chunk."""
    tiles = layout(problem)
    if values:
        del tiles["Akk_inv"]
        tiles["h"] = (problem.B * problem.slots, problem.HV, problem.V, problem.K), torch.float32
    return tiles


def tokens_of_pool(problem: StepProblem, t: StepTensors, arch: int, outputs: Outputs) -> list[Launch]:
    """Token by token, or into a replay buffer all at once."""
    return (verify if problem.has_records else decode)(problem, t, arch, outputs)


LAUNCHES: dict[str, Callable[..., Iterable[Step]]] = {
    "chunk": chunk,
    "recurrent": decode,
    "decode": tokens_of_pool,
    "fused_decode": fused_kda_decode,
    "commit": commit,
    "prefill": prefill,
    "wy": wy_dqkg,
    "gated_rms_norm": gated_rms_norm,
    "gated_rms_norm" + BACKWARD: norm.backward,
    "short_convolution": short_convolution,
    "short_convolution" + BACKWARD: convolution.backward,
}
"""The launches of each operation, in order."""
