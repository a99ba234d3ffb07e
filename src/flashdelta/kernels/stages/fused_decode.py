"""Arguments of stage `fused_decode`, whichever kernel runs it."""

from __future__ import annotations

from torch import Tensor

from ...problem.problem import FusedProblem, FusedTensors
from ...program.launch import strides
from .decode import index_strides

SCALARS = (
    *("T", "H", "beta_batch", "beta_token", "beta_head", "scale", "lower_bound", "eps", "lowest"),
    *("slots", "target_slots", "most_tokens", "start_row", "start_token", "target_row", "target_token"),
    *("key_channels", "value_channels", "key_taps", "value_taps"),
)
"""Arguments that the kernel is not specialised for."""


def arguments(problem: FusedProblem, t: FusedTensors, o: Tensor) -> tuple:
    """As the kernel takes them."""
    assert t.state_pool is not None and t.state_indices is not None
    stored, targets = t.state_pool, t.state_indices
    if t.intermediate_states is not None:
        stored, targets = t.intermediate_states, t.intermediate_indices  # type: ignore[assignment]
    return (
        *(t.q, t.k, t.v, t.weight, t.bias, t.conv_state, t.g, t.beta, t.A_log, t.dt_bias, t.z, t.norm_weight),
        *(t.cu_seqlens, o, t.state_pool, stored, t.state_indices, targets, t.num_accepted_tokens),
        *(problem.lowest_index, t.state_pool.shape[0], stored.shape[0], t.state_pool.stride(0), *stored.stride()[:2]),
        *(*index_strides(t.state_indices), *index_strides(targets)),
        *(problem.most_tokens, problem.scale, problem.lower_bound or 0.0, problem.eps, problem.T, problem.H),
        *(problem.H * problem.K, 2 * problem.H * problem.K, *filter_offsets(problem, t.weight), *t.weight.stride()[1:]),
        *(*t.conv_state.stride(), *strides(t.q, t.k, t.v, t.g, t.beta, t.z, o)),
    )


def filter_offsets(problem: FusedProblem, weight: Tensor) -> tuple[int, int]:
    """Elements from the first filter of q to those of k and v."""
    if weight.shape[0] == 3:
        return weight.stride(0), 2 * weight.stride(0)
    keys = problem.H * problem.K * weight.stride(1)
    return keys, 2 * keys
