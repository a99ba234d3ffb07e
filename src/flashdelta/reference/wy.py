"""The fused backward of the WY step in PyTorch: what `kernels.chunk_bwd_wy_dqkg` must compute (docs/backward.md)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..problem.problem import Problem, Tensors
from .chunk import from_chunks, to_chunks
from .sequences import chunk_slots


def chunk_bwd_wy_dqkg(problem: Problem, t: Tensors) -> dict[str, Tensor]:
    """In float32, or in float64 for inputs in float64; zeros for tokens of no sequence."""
    if problem.B * problem.T == 0 or problem.N == 0:
        return {name: t.q.new_zeros(x.shape, dtype=x.dtype) for name, x in problem.results().items()}
    wide = torch.float64 if problem.dtype == torch.float64 else torch.float32
    slots = chunk_slots(problem, t)
    used = slots.valid.any(-1)
    # chunks that are not there have no row: any other does for them
    row = (used.long().cumsum(0) - 1).clamp(0, problem.B * problem.rows - 1)
    chunk_ends = slots.valid.sum(-1).sub(1).clamp(min=0)

    def chunks(x: Tensor) -> Tensor:
        x = x.to(wide)
        return to_chunks(
            x if x.shape[2] == problem.HV else x.repeat_interleave(problem.group, 2), problem.chunk_size, slots
        )

    def states(x: Tensor) -> Tensor:
        x = x.to(wide).flatten(0, 1)[row, None]
        return x.mT if problem.state_v_first else x

    q, k, v, pseudo, G, M = (chunks(x) for x in (t.q, t.k, t.v, t.v_new, t.g, t.A))
    grad_o, grad_pseudo, beta = chunks(t.do), chunks(t.dv), chunks(t.beta)[..., None]
    S, grad_S = states(t.h), states(t.dh)
    M = M.tril()
    if problem.gate == "cumulative_log2":
        G = G * math.log(2.0)
    at_end = torch.zeros(G.shape[0], problem.chunk_size, dtype=torch.bool, device=G.device)
    at_end = at_end.scatter(1, chunk_ends[:, None], True)[:, None, None, :, None]
    last = torch.where(at_end, G, 0.0).sum(-2, keepdim=True)
    grown, shrunk = G.exp(), (last - G).exp()

    grad_w = -grad_pseudo @ S.mT
    values, keys = M.mT @ grad_pseudo, M.mT @ grad_w  # of beta v and of beta k exp(G)
    grad_M = (grad_pseudo @ v.mT + grad_w @ (k * grown).mT) * beta.mT
    grad_q = problem.scale * (grad_o @ S.mT) * grown
    through_state = (pseudo @ grad_S.mT) * shrunk
    through_w = beta * keys * grown
    left = k * through_state
    grad_G = q * grad_q + k * through_w - left
    grad_G = grad_G + at_end * (left.sum(-2, keepdim=True) + (last.exp() * (S * grad_S).sum(-1)[..., None, :]))

    def tokens_of(x: Tensor) -> Tensor:
        return from_chunks(x, problem, slots)

    return {
        "dq": tokens_of(grad_q),
        "dk": tokens_of(through_state + through_w),
        "dv": tokens_of(beta * values).to(problem.dtype),
        "dbeta": tokens_of((values * v).sum(-1, keepdim=True) + (keys * k * grown).sum(-1, keepdim=True))[..., 0],
        "dg": tokens_of(grad_G),
        "dA": tokens_of(-(M.mT @ grad_M @ M.mT).tril(-1)),
    }
