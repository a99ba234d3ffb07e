"""Arguments of stage `fused_decode`, whichever kernel runs it."""

from __future__ import annotations

from torch import Tensor

from ...problem.problem import FusedProblem, FusedTensors
from .decode import index_strides


def fused_arguments(problem: FusedProblem, t: FusedTensors, o: Tensor) -> dict[str, object]:
    """Arguments that the kernels take under other names than the call's."""
    assert t.state_pool is not None and t.state_indices is not None
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
