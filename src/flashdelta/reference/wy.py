"""Stage `wy` of the backward pass in PyTorch: the definition of `kernels.chunk_bwd_wy_dqkg` (docs/backward.md derives it).

With `Akk_inv = (I + Akk)^-1`, the state `S` before the chunk and the gradient `dS'` of the state after it:

    dw    = -dv_new S^T                                                                        [C, K]
    R, Z  = Akk_inv^T dv_new, Akk_inv^T dw                                                     [C, V], [C, K]
    dv    = beta R                                                                             [C, V]
    dbeta = <R, v> + <Z, k exp(G)>                                                             [C]
    dAkk  = strict_lower(-Akk_inv^T (dv_new v^T + dw (k exp(G))^T) diag(beta) Akk_inv^T)       [C, C]
    dq    = scale (do S^T) exp(G)                                                              [C, K]
    dk    = beta Z exp(G) + (v_new dS'^T) exp(G_C - G)                                         [C, K]
    dG    = q dq + k (beta Z exp(G)) - k (v_new dS'^T) exp(G_C - G)                            [C, K]
    dG_C += sum_i k_i (v_new dS'^T)_i exp(G_C - G_i) + exp(G_C) sum_v S dS'                    [K]
"""

import math

import torch
from torch import Tensor

from ..problem.problem import WyProblem, WyTensors
from .chunk import from_chunks, to_chunks
from .sequences import chunk_slots


def chunk_bwd_wy_dqkg(problem: WyProblem, t: WyTensors) -> dict[str, Tensor]:
    """Gradients in float32, or in float64 for inputs in float64; zeros for tokens of no sequence."""
    if problem.B * problem.T == 0 or problem.N == 0:
        return {name: t.q.new_zeros(x.shape, dtype=x.dtype) for name, x in problem.results().items()}
    wide = torch.float64 if problem.dtype == torch.float64 else torch.float32
    slots = chunk_slots(problem, t)
    # chunks that are not there have no row: any other does for them
    row = (slots.valid.any(-1).long().cumsum(0) - 1).clamp(0, problem.B * problem.rows - 1)
    chunk_ends = slots.valid.sum(-1).sub(1).clamp(min=0)

    def chunks(x: Tensor) -> Tensor:
        x = x if x.shape[2] == problem.HV else x.repeat_interleave(problem.group, 2)
        return to_chunks(x.to(wide), problem.chunk_size, slots)

    def states(x: Tensor) -> Tensor:
        x = x.to(wide).flatten(0, 1)[row, None]
        return x.mT if problem.state_v_first else x

    q, k, v, v_new, G, Akk_inv = (chunks(x) for x in (t.q, t.k, t.v, t.v_new, t.g, t.A))
    grad_o, grad_v_new, beta = chunks(t.do), chunks(t.dv), chunks(t.beta)[..., None]
    S, grad_S = states(t.h), states(t.dh)
    Akk_inv = Akk_inv.tril()
    if problem.gate == "cumulative_log2":
        G = G * math.log(2.0)
    at_end = torch.zeros(G.shape[0], problem.chunk_size, dtype=torch.bool, device=G.device)
    at_end = at_end.scatter(1, chunk_ends[:, None], True)[:, None, None, :, None]
    last = torch.where(at_end, G, 0.0).sum(-2, keepdim=True)
    exp_g, exp_g_last_minus_g = G.exp(), (last - G).exp()

    grad_w = -grad_v_new @ S.mT
    R, Z = Akk_inv.mT @ grad_v_new, Akk_inv.mT @ grad_w  # gradients of beta v and of beta k exp(G)
    grad_Akk_inv = (grad_v_new @ v.mT + grad_w @ (k * exp_g).mT) * beta.mT
    grad_q = problem.scale * (grad_o @ S.mT) * exp_g
    dk_state = (v_new @ grad_S.mT) * exp_g_last_minus_g
    dk_w = beta * Z * exp_g
    through_kg = k * dk_state
    grad_G = q * grad_q + k * dk_w - through_kg
    grad_G = grad_G + at_end * (through_kg.sum(-2, keepdim=True) + (last.exp() * (S * grad_S).sum(-1)[..., None, :]))

    def tokens_of(x: Tensor) -> Tensor:
        return from_chunks(x, problem, slots)

    return {
        "dq": tokens_of(grad_q),
        "dk": tokens_of(dk_state + dk_w),
        "dv": tokens_of(beta * R).to(problem.dtype),
        "dbeta": tokens_of((R * v).sum(-1, keepdim=True) + (Z * k * exp_g).sum(-1, keepdim=True))[..., 0],
        "dg": tokens_of(grad_G),
        "dA": tokens_of(-(Akk_inv.mT @ grad_Akk_inv @ Akk_inv.mT).tril(-1)),
    }
