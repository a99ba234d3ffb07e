"""The definition of KDA: the token-by-token recurrence.

    S  <- diag(exp(g_t)) S
    S  <- S + beta_t k_t (v_t - k_t^T S)
    o_t = scale * q_t^T S

(Kimi Linear, arXiv 2510.26692, eq. 1, with the decay per key channel.) In float64 this is the truth every kernel is
measured against. Runs on any device, never waits for one, and is differentiable.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..problem.problem import StepProblem, StepTensors
from .gate import elementwise_inputs
from .sequences import token_sequences
from .states import states_in, states_out, store_final


def recurrent_kda(problem: StepProblem, t: StepTensors) -> tuple[Tensor, Tensor | None, None]:
    """`(o [B, T, HV, V], final_state or None, None)`. With a pool, the final states go there."""
    q, k, v, g, beta = elementwise_inputs(problem, t)
    decay = g.exp()
    initial = states_in(problem, t)
    sequences = token_sequences(problem, t) if problem.packed else None
    S = initial.new_zeros(1, *initial.shape[1:]) if problem.packed else initial
    # packed: the state after a sequence's last token goes to its row, every other token's to a row past the end
    ends = torch.cat([initial, initial.new_zeros(1, *initial.shape[1:])]) if problem.packed else None
    outputs = []
    for i in range(problem.T):
        if sequences is not None and problem.N > 0:
            S = torch.where(sequences.first[i], initial[sequences.sequence[i]][None], S)
        k_i = k[:, i]
        S = decay[:, i, :, :, None] * S
        correction = beta[:, i, :, None] * (v[:, i] - torch.einsum("bhk,bhkv->bhv", k_i, S))
        S = S + k_i[..., None] * correction[:, :, None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, i], S))
        if sequences is not None and ends is not None and problem.stores_final_state:
            ends = ends.index_copy(0, sequences.ends[i : i + 1], S)
    o = torch.stack(outputs, dim=1) if outputs else torch.zeros_like(v)
    if sequences is not None:
        o = torch.where(sequences.valid[None, :, None, None], o, 0.0)
    last = S if ends is None else ends[:-1]
    if problem.has_pool:
        store_final(problem, t, last)
    final = states_out(problem, last, problem.final_dtype) if problem.output_final_state else None
    return o.to(problem.output_dtype), final, None
