"""Arguments of the stages over tokens of a pool's sequences: `decode`, `verify`, `commit` and `fused_decode`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...problem.problem import CommitProblem, CommitTensors, FusedProblem, FusedTensors, StepProblem, StepTensors
from ...program.plan import Outputs
from .launch import or_empty

DECODE_FEW = 256
"""Pairs of sequence and value head up to which `decode` of one token per sequence counts as few."""


def step_arguments(problem: StepProblem, t: StepTensors, outputs: Outputs) -> dict[str, Any]:
    """Arguments that every kernel over tokens of a pool's sequences takes under other names than the call's.

    A sequence starts from slot `starts[n]` of `initial_state`, and its state goes to slot `targets[n]` of `final_state`, or
    `targets[n, i]` after the `i`-th token. Without `starts` that is row `n`; without `targets` the slot that was read.
    `TWO_POOLS`: one is read and the other is written."""
    two_pools = t.source_pool is not None and problem.update_state
    initial, starts = t.state_pool, t.state_indices
    if t.source_pool is not None:
        initial, starts = t.source_pool, t.source_indices
    elif t.state_pool is None:
        initial = t.initial_state
    final, targets = outputs.get("final_state"), None
    if problem.has_intermediate:
        final, targets = t.intermediate_states, t.intermediate_indices
    elif t.state_pool is not None and problem.update_state:
        final = t.state_pool
        targets = t.state_indices if two_pools or problem.spec_tokens else None
    has_states = dict(has_initial=initial is not None, has_final=final is not None)
    initial, final = or_empty(problem, initial, final)
    content = problem.HV * problem.K * problem.V
    pitches = [x.stride(0) if x.dim() > 3 else content for x in (initial, final)]
    strides = *index_strides(starts), *index_strides(targets)
    return dict(
        **dict(o=outputs["o"], accepted=t.num_accepted_tokens, initial_state=initial, final_state=final),
        **dict(has_states, records=final, starts=starts, targets=targets),
        **dict(start_slots=initial.shape[0], target_slots=final.shape[0]),
        **dict(start_pitch=pitches[0], target_pitch=pitches[1]),
        **dict(zip(("start_row", "start_token", "target_row", "target_token"), strides)),
        **dict(target_step=final.stride(1) if problem.has_intermediate else 0),
        **dict(IN_PLACE=problem.has_pool, TWO_POOLS=two_pools),
        NULL_GIVES_ZERO=problem.operation == "decode" and starts is not None,
    )


def index_strides(indices: Tensor | None) -> tuple[int, int]:
    """Strides of `[N]` or `[N, 1 + S]`, and 0 for what is not there."""
    if indices is None:
        return 0, 0
    return indices.stride(0), indices.stride(1) if indices.dim() == 2 else 0


def commit_arguments(problem: CommitProblem, t: CommitTensors) -> dict[str, object]:
    """Arguments that the kernels of stage `commit` take under other names than the call's."""
    row_pitch, row_step = t.intermediate_states.stride()[:2]
    return dict(
        **dict(initial_state=t.state_pool, records=t.intermediate_states, accepted=t.num_accepted_tokens),
        **dict(slot_indices=t.state_indices, row_indices=t.intermediate_indices),
        **dict(slots=problem.pool_slots, tokens=problem.most_tokens),
        **dict(slot_pitch=t.state_pool.stride(0), row_pitch=row_pitch, row_step=row_step),
    )


def fused_arguments(problem: FusedProblem, t: FusedTensors, o: Tensor) -> dict[str, object]:
    """Arguments that the kernels of stage `fused_decode` take under other names than the call's."""
    stored, targets = t.state_pool, t.state_indices
    if t.intermediate_states is not None:
        stored, targets = t.intermediate_states, t.intermediate_indices  # type: ignore[assignment]
    names = ("start_row", "start_token", "target_row", "target_token")
    # elements from the first filter of q to those of k: three weights side by side, or one
    taps = t.weight.stride(0) if t.weight.shape[0] == 3 else problem.H * problem.K * t.weight.stride(1)
    filters = dict(zip(("weight_channel", "weight_tap"), t.weight.stride()[1:]))
    windows = dict(zip(("conv_slot", "conv_channel", "conv_place"), t.conv_state.stride()))
    return dict(
        **dict(initial_state=t.state_pool, final_state=stored, starts=t.state_indices, targets=targets),
        **dict(o=o, accepted=t.num_accepted_tokens, slots=t.state_pool.shape[0], target_slots=stored.shape[0]),
        **dict(start_pitch=t.state_pool.stride(0), target_pitch=stored.stride(0), target_step=stored.stride(1)),
        **dict(zip(names, (*index_strides(t.state_indices), *index_strides(targets)))),
        **dict(key_channels=problem.H * problem.K, value_channels=2 * problem.H * problem.K),
        **dict(filters | windows, key_taps=taps, value_taps=2 * taps, CHANNELS=t.conv_state.stride(1) == 1),
    )
