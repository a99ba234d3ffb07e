"""Makes the plan of a validated call."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ...problem.problem import BACKWARD, ChunkProblem, ChunkTensors, Problem, Tensors
from ...problem.split import segments_of_call
from ...program.launch import Launch, capability, sm_count
from ...program.plan import Outputs, Plan, new_outputs
from ...program.workspace import Layout, Workspace, in_slots
from ..stages import backward_pass
from ..stages.backward_pass import StageSet
from ..stages.launch import StageCall, layout, prepare_inputs
from . import convolution, norm
from .commit import commit
from .convolution import short_convolution
from .decode import decode
from .fused_decode import fused_kda_decode
from .intra import intra
from .norm import gated_rms_norm
from .output import output
from .prepare import prepare
from .recurrence import recurrence
from .reverse import reverse
from .segments import SPLIT_COSTS, before_segments, outgoing, room
from .verify import verify
from .wy import wy, wy_dqkg


def build(problem: Problem, t: Tensors, arch: int | None = None) -> Plan:
    """Makes the plan, for GPUs of compute capability `arch`, e.g. 90 (the tensors' own by default)."""
    arch = capability(t.device) if arch is None else arch
    t = in_slots(t)
    outputs = Outputs() if problem.operation.endswith(BACKWARD) else new_outputs(problem, t)
    if isinstance(problem, ChunkProblem) and isinstance(t, ChunkTensors) and problem.operation != "prefill":
        stages = stages_of(problem, t, arch)
        if problem.operation == "chunk" + BACKWARD:
            return backward_pass.backward(stages)
        if problem.keeps:
            return backward_pass.forward(stages)
        return Plan(t.memory, outputs, [*stages.copies, *stages.forward(outputs)])
    t, copies = prepare_inputs(problem, t)
    return Plan(t.memory, outputs, [*copies, *LAUNCHES[problem.operation](problem, t, arch, outputs)])


def stages_of(problem: ChunkProblem, t: ChunkTensors, arch: int) -> StageSet:
    t, copies = prepare_inputs(problem, t)
    segments = segments_of_call(problem, room(problem, arch, sm_count(t.device)), SPLIT_COSTS)
    return StageSet(
        problem=problem,
        t=t,
        copies=copies,
        layout=layout(problem, segments),
        arch=arch,
        prepare=prepare,
        before_segments=before_segments,
        outgoing=outgoing,
        recurrence=recurrence,
        reverse=reverse,
        wy=wy,
        intra=intra,
        squares=(problem.B * problem.slots, problem.HV, problem.chunk_size, problem.chunk_size),
        parts_dtype=torch.float32,
    )


def prefill(problem: ChunkProblem, t: ChunkTensors, arch: int, outputs: Outputs) -> list[Launch]:
    """Returns launches of `chunk_kda` that leave `w` in an output; if `u` is an output too, `output` is a launch of its own."""
    o, w, u, final_state = outputs["o"].view(t.v.shape), outputs["w"], outputs.get("u"), outputs.get("final_state")
    call = StageCall(problem, t, arch, Workspace.allocate(prefill_layout(problem, u is not None), t.memory, {"w": w}))
    if u is None:
        return [prepare(call), recurrence(call, o, final_state, None)]
    states = recurrence(call, None, final_state, call.workspace["h"], v_new=o, u=u)
    return [prepare(call, u=u), states, output(call, o)]


def prefill_layout(problem: ChunkProblem, values: bool) -> Layout:
    """The layout of `chunk_kda`, whose `w` is a result. With `values`, `u` is one too: it takes the place of `Akk_inv`, and
    `output` reads the state before each chunk."""
    tiles = layout(problem)
    if values:
        del tiles["Akk_inv"]
        tiles["h"] = (problem.B * problem.slots, problem.HV, problem.V, problem.K), torch.float32
    return tiles


LAUNCHES: dict[str, Callable[..., Iterable[Launch]]] = {
    # token by token, or into a replay buffer all at once
    "decode": lambda problem, *call: (verify if problem.has_records else decode)(problem, *call),
    **dict(recurrent=decode, fused_decode=fused_kda_decode, commit=commit, prefill=prefill, wy=wy_dqkg),
    **dict(gated_rms_norm=gated_rms_norm, short_convolution=short_convolution),
    **{"gated_rms_norm" + BACKWARD: norm.backward, "short_convolution" + BACKWARD: convolution.backward},
}
"""The launches of each operation, in order."""
