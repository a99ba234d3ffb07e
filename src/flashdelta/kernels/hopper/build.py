"""Makes the plan of a validated call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

from ...problem.problem import AUTO, BACKWARD, ChunkProblem, ChunkTensors, Problem, Tensors, WyTensors
from ...program.launch import Launch, capability
from ...program.plan import Outputs, Plan, Step, new_outputs
from ...program.workspace import in_slots
from ..stages import backward_pass
from ..stages import launch as portable
from ..stages.backward_pass import StageSet
from ..stages.copy import strided_copy
from ..stages.launch import aligned
from .commit import commit
from .decode import decode
from .fused_decode import fused_kda_decode
from .intra import intra
from .launch import TILE, layout, prepare_inputs, prepare_wy_inputs
from .prepare import prepare
from .prepare_steps import prepare_steps
from .recurrence import recurrence
from .reverse import reverse
from .segments import before_segments, outgoing, room, split_layout
from .short import short
from .verify import verify
from .wy import wy, wy_dqkg


def build(problem: Problem, t: Tensors, arch: int | None = None) -> Plan | None:
    """Makes the plan, for GPUs of compute capability `arch` (the tensors' own by default). None for a step that is left to
    the portable kernels."""
    arch = capability(t.device) if arch is None else arch
    t = in_slots(t)
    if isinstance(t, WyTensors):
        t, copies = prepare_wy_inputs(t)
    elif isinstance(problem, ChunkProblem) and isinstance(t, ChunkTensors):
        steps = problem.operation == "chunk" and not problem.keeps and in_steps(problem, room(problem, t.device))
        stages = stages_of(problem, t, arch, steps)
        if problem.operation == "chunk" + BACKWARD:
            return backward_pass.backward(stages)
        if problem.keeps:
            return backward_pass.forward(stages)
        outputs = new_outputs(problem, t)
        return Plan(t.memory, outputs, [*stages.copies, *chunk(stages, outputs)])
    else:
        t, copies = portable.prepare_inputs(problem, t)
    outputs = new_outputs(problem, t)
    launches = LAUNCHES[problem.operation](problem, t, arch, outputs)
    return None if launches is None else Plan(t.memory, outputs, [*copies, *launches])


STEPS_FROM = {(64, False): 32, (64, True): 32, (128, False): 32, (128, True): 48}
"""Value heads from which chunks are taken in steps of 32 tokens, by key channels, and whether ranks form transitions.
`prepare` has less to do for a chunk then, but the chain of `recurrence` is longer, which few heads wait for. With 8192 tokens
and K = 128 16, 32 and 64 heads take 228, 283 and 441 us instead of 198, 275 and 518, in 8 sequences 32 heads 228 instead of
272. Where ranks form transitions, their chain comes on top. With K = 64 and bounded gates 32, 64 and 96 heads take 176, 244
and 369 us instead of 199, 343 and 510 (benchmarks/results/tuning/half_steps-h200.json)."""


def in_steps(problem: ChunkProblem, transitions_at_once: int) -> bool:
    """Says whether the call goes through its chunks in steps of 32 tokens (`prepare_steps`). `transitions_at_once`: `room` of a
    call that may be split.

    Neither lengths nor sequences count: the bits of a sequence are its own. So a call with K = 128 that would be split if
    only its sequences were longer keeps its chunks, as does what the backward pass will compute again."""
    whole = problem.split == 1 or (problem.split == AUTO and (transitions_at_once == 0 or problem.K == 64))
    forms_transitions = problem.ranks > 1 and not problem.relays
    return STEPS_FROM[problem.K, forms_transitions] <= problem.HV and whole and may_go_in_steps(problem)


def may_go_in_steps(problem: ChunkProblem) -> bool:
    plain = not problem.return_intermediate_states and not problem.requires_grad
    return plain and problem.g_dtype == torch.bfloat16 and problem.l2norm


SHORT_TILES = 256
"""Sequences times value heads from which `short` was faster than two launches, with sequences of one or two chunks. 200
sequences of 40 tokens with 16 heads take 169 us instead of 335, 64 of 100 83 instead of 100 with 8, 227 instead of 244.6 with
32 (benchmarks/results/tuning/short-h200.json)."""


def in_one_launch(problem: ChunkProblem, device: torch.device) -> bool:
    """Says whether `short` does the call: where the host knows that no sequence is long, though it is right for any lengths.
    Its steps have other bits than the chunks of calls with few heads, which do without it where bits are a sequence's own."""
    longest = problem.longest_chunks if problem.packed else -(-problem.T // TILE)
    fits = problem.K == problem.V == 128 and 0 < longest <= 2 and SHORT_TILES <= problem.N * problem.HV
    plain = problem.ranks == 1 and problem.checkpoints == 0 and problem.checkpoint_every == 0 and problem.safe_gate
    free = problem.split == AUTO and not problem.batch_invariant
    same = free or in_steps(problem, room(problem, device))
    return fits and plain and may_go_in_steps(problem) and same


def stages_of(problem: ChunkProblem, t: ChunkTensors, arch: int, steps: bool = False) -> StageSet:
    """`steps`: for a forward that goes through its chunks in steps of 32 tokens."""
    t, copies = prepare_inputs(t)
    wanted = layout(problem, split_layout(problem, t.device, steps), steps)
    return StageSet(
        problem=problem,
        t=t,
        copies=copies,
        layout=wanted,
        arch=arch,
        prepare=prepare_steps if steps else prepare,
        before_segments=before_segments,
        outgoing=functools.partial(outgoing, steps=steps),
        recurrence=functools.partial(recurrence, steps=steps),
        reverse=reverse,
        wy=wy,
        intra=intra,
        squares=(problem.B, problem.T, problem.HV, TILE),
        parts_dtype=torch.bfloat16,
    )


def chunk(stages: StageSet, outputs: Outputs) -> list[Step]:
    """The launches of a forward that keeps nothing. An output of the caller's that no kernel can write is copied to."""
    forward = functools.partial(short, stages) if in_one_launch(stages.problem, stages.t.device) else stages.forward
    o = outputs["o"]
    if aligned(o):
        return forward(outputs)
    own = stages.t.memory.new(o.shape, o.dtype)
    return [*forward(outputs, own), *strided_copy(own, o)]


LAUNCHES: dict[str, Callable[..., Iterable[Launch] | None]] = {
    "recurrent": decode,
    # token by token, or into a replay buffer all at once
    "decode": lambda problem, *call: (verify if problem.has_records else decode)(problem, *call),
    "fused_decode": fused_kda_decode,
    "commit": commit,
    "wy": wy_dqkg,
}
"""The launches of each operation, in order."""
