"""The definition of KDA: the token-by-token recurrence.

    S  <- diag(exp(g_t)) S
    S  <- S + beta_t k_t (v_t - k_t^T S)
    o_t = scale * q_t^T S

(Kimi Linear, arXiv 2510.26692, eq. 1, with the decay per key channel.) In float64 this is the truth every kernel is
measured against. Runs on any device, never waits for one, and is differentiable.
"""

from __future__ import annotations

import torch

from ..spec import KdaSpec, KdaTensors
from .gate import compute_dtype, elementwise_inputs
from .sequences import token_sequences


def states_in(spec: KdaSpec, initial_state: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """The initial states as `[N, HV, K, V]` in the compute dtype; zeros where there are none."""
    if initial_state is None:
        return like.new_zeros((spec.N, spec.HV, spec.K, spec.V), dtype=compute_dtype(spec))
    state = initial_state.to(compute_dtype(spec))
    state = state.transpose(-1, -2) if spec.state_v_first else state
    return state.contiguous()  # BLAS may round differently for another layout, and no state must give the bits of zeros


def states_out(spec: KdaSpec, state: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A state `[..., K, V]` in the caller's layout and `dtype`, in memory of its own."""
    state = state.transpose(-1, -2) if spec.state_v_first else state
    return state.to(dtype, copy=True).contiguous()


def recurrent_kda(spec: KdaSpec, t: KdaTensors) -> tuple[torch.Tensor, torch.Tensor | None, None]:
    """`(o [B, T, HV, V], final_state or None, None)`."""
    q, k, v, g, beta = elementwise_inputs(spec, t)
    decay = g.exp()
    initial = states_in(spec, t.initial_state, v)
    sequences = token_sequences(spec, t.cu_seqlens) if spec.packed else None
    S = initial.new_zeros(1, *initial.shape[1:]) if spec.packed else initial
    # packed: the state after a sequence's last token goes to its row, every other token's to a row past the end
    ends = torch.cat([initial, initial.new_zeros(1, *initial.shape[1:])]) if spec.packed else None
    outputs = []
    for i in range(spec.T):
        if sequences is not None and spec.N > 0:
            S = torch.where(sequences.first[i], initial[sequences.sequence[i]][None], S)
        k_i = k[:, i]
        S = decay[:, i, :, :, None] * S
        correction = beta[:, i, :, None] * (v[:, i] - torch.einsum("bhk,bhkv->bhv", k_i, S))
        S = S + k_i[..., None] * correction[:, :, None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, i], S))
        if sequences is not None and spec.output_final_state:
            ends.index_copy_(0, sequences.ends[i : i + 1], S)
    o = torch.stack(outputs, dim=1) if outputs else torch.zeros_like(v)
    if sequences is not None:
        o = torch.where(sequences.valid[None, :, None, None], o, 0.0)
    final = None
    if spec.output_final_state:
        final = states_out(spec, S if ends is None else ends[:-1], spec.state_dtype)
    return o.to(t.v.dtype), final, None
