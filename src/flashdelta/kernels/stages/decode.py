"""Arguments of the stages over tokens of a pool's sequences: `decode` and `verify`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...problem.problem import StepProblem, StepTensors
from ...program.launch import strides
from .launch import or_empty

SCALARS = (
    *("T", "group", "HV", "beta_batch", "beta_token", "beta_head", "scale", "lower_bound", "lowest"),
    *("start_slots", "target_slots", "has_initial", "has_final", "most_tokens"),
    *("start_row", "start_token", "target_row", "target_token"),
)
"""Arguments that the kernel is not specialised for."""


DECODE_FEW = 256
"""Pairs of sequence and value head up to which `decode` of one token a sequence counts as few."""


def step_arguments(problem: StepProblem, t: StepTensors, states: DecodeStates, o: Tensor) -> tuple:
    """What every kernel over tokens of a pool's sequences takes."""
    return (
        *(t.q, t.k, t.v, t.g, t.beta, t.A_log, t.dt_bias, t.cu_seqlens, o),
        *states.arguments(problem, t),
        *(problem.most_tokens, problem.scale, problem.lower_bound or 0.0),
        *(problem.T, problem.HV // problem.H, problem.HV),
        *strides(t.q, t.k, t.v, t.g, t.beta, o),
    )


@dataclass(frozen=True)
class DecodeStates:
    """Where a call of `decode` reads states (slot `starts[n]` of `initial`) and stores them (slot `targets[n]` of `final`, or
    `targets[n, i]` after the `i`-th token). Without `starts` that is row `n`; without `targets` the slot that was read.
    `two_pools`: one is read and the other is written."""

    initial: Tensor
    final: Tensor
    starts: Tensor | None
    targets: Tensor | None
    has_initial: bool
    has_final: bool
    two_pools: bool

    def arguments(self, problem: StepProblem, t: StepTensors) -> tuple:
        """As the kernel takes them."""
        content = problem.HV * problem.K * problem.V
        pitches = [x.stride(0) if x.dim() > 3 else content for x in (self.initial, self.final)]
        step = self.final.stride(1) if problem.has_intermediate else 0
        return (
            *(self.initial, self.final, self.starts, self.targets, t.num_accepted_tokens, t.has_initial_state),
            *(problem.lowest_index, *(x.shape[0] for x in (self.initial, self.final))),
            *(int(self.has_initial), int(self.has_final), *pitches, step),
            *index_strides(self.starts),
            *index_strides(self.targets),
        )


def decode_states(problem: StepProblem, t: StepTensors, final_state: Tensor | None) -> DecodeStates:
    two_pools = t.source_pool is not None and problem.update_state
    initial, starts = t.state_pool, t.state_indices
    if t.source_pool is not None:
        initial, starts = t.source_pool, t.source_indices
    elif t.state_pool is None:
        initial = t.initial_state
    final, targets = final_state, None
    if problem.has_intermediate:
        final, targets = t.intermediate_states, t.intermediate_indices
    elif t.state_pool is not None and problem.update_state:
        final = t.state_pool
        targets = t.state_indices if two_pools or problem.spec_tokens else None
    states = or_empty(problem, t, initial, final)
    return DecodeStates(states[0], states[1], starts, targets, initial is not None, final is not None, two_pools)


def index_strides(indices: Tensor | None) -> tuple[int, int]:
    """Of `[N]` or `[N, 1 + S]`."""
    if indices is None:
        return 0, 0
    return indices.stride(0), indices.stride(1) if indices.dim() == 2 else 0
