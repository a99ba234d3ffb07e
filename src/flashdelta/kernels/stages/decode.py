"""Arguments of the stages over tokens of a pool's sequences: `decode` and `verify`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...problem.problem import CommitProblem, CommitTensors, StepProblem, StepTensors
from .launch import or_empty

DECODE_FEW = 256
"""Pairs of sequence and value head up to which `decode` of one token per sequence counts as few."""


def step_arguments(problem: StepProblem, t: StepTensors, states: DecodeStates, o: Tensor) -> dict[str, object]:
    """Arguments that every kernel over tokens of a pool's sequences takes under other names than the call's."""
    gives_zero = problem.operation == "decode" and states.starts is not None
    return dict(o=o, accepted=t.num_accepted_tokens, NULL_GIVES_ZERO=gives_zero, **states.arguments(problem))


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

    def arguments(self, problem: StepProblem) -> dict[str, object]:
        """Under the kernels' names."""
        content = problem.HV * problem.K * problem.V
        pitches = [x.stride(0) if x.dim() > 3 else content for x in (self.initial, self.final)]
        rows, targets = index_strides(self.starts), index_strides(self.targets)
        return dict(
            **dict(initial_state=self.initial, final_state=self.final, starts=self.starts, targets=self.targets),
            **dict(start_slots=self.initial.shape[0], target_slots=self.final.shape[0]),
            **dict(start_pitch=pitches[0], target_pitch=pitches[1]),
            target_step=self.final.stride(1) if problem.has_intermediate else 0,
            **dict(start_row=rows[0], start_token=rows[1], target_row=targets[0], target_token=targets[1]),
            **dict(has_initial=self.has_initial, has_final=self.has_final),
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
    states = or_empty(problem, initial, final)
    return DecodeStates(states[0], states[1], starts, targets, initial is not None, final is not None, two_pools)


def index_strides(indices: Tensor | None) -> tuple[int, int]:
    """Strides of `[N]` or `[N, 1 + S]`, and 0 for what is not there."""
    if indices is None:
        return 0, 0
    return indices.stride(0), indices.stride(1) if indices.dim() == 2 else 0


def commit_arguments(problem: CommitProblem, t: CommitTensors) -> dict[str, object]:
    """Arguments that the kernels of stage `commit` take under other names than the call's."""
    assert t.state_pool is not None and t.intermediate_states is not None
    row_pitch, row_step = t.intermediate_states.stride()[:2]
    return dict(
        **dict(initial_state=t.state_pool, records=t.intermediate_states, accepted=t.num_accepted_tokens),
        **dict(slot_indices=t.state_indices, row_indices=t.intermediate_indices),
        **dict(slots=problem.pool_slots, tokens=problem.most_tokens),
        **dict(slot_pitch=t.state_pool.stride(0), row_pitch=row_pitch, row_step=row_step),
    )
