"""Stage `wy` of the backward pass, and as an operator of its own (`chunk_bwd_wy_dqkg`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..problem.problem import Problem, Tensors
from ..program.launch import Launch, strides
from ..program.program import Outputs
from . import config
from .backward import wy_kernel


@dataclass(frozen=True)
class WyOperands:
    """What `wy` reads, under the kernels' names."""

    q: torch.Tensor
    k: torch.Tensor
    g: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor
    Akk_inv: torch.Tensor
    h: torch.Tensor
    v_new: torch.Tensor
    do: torch.Tensor
    dv: torch.Tensor
    dh: torch.Tensor
    cu_seqlens: torch.Tensor | None
    A_log: torch.Tensor | None = None
    dt_bias: torch.Tensor | None = None

    def arguments(self) -> tuple[torch.Tensor | None, ...]:
        """As the kernels take them."""
        return (
            *(self.q, self.k, self.g, self.v, self.beta, self.A_log, self.dt_bias, self.cu_seqlens),
            *(self.Akk_inv, self.h, self.v_new, self.do, self.dv, self.dh),
        )

    def kept(self) -> tuple[torch.Tensor, ...]:
        """What stages before it left."""
        return self.Akk_inv, self.h, self.v_new, self.dv, self.dh


def wy_launch(
    problem: Problem, arch: int, x: WyOperands, found: tuple[torch.Tensor | None, ...], rows: int, **kinds: object
) -> Launch:
    """`found`: `grad_q, grad_k, grad_G, grad_v, grad_beta, grad_A, grad_Aqk`; `rows`: chunks that `h` has of a batch row."""
    c = config.wy_config(problem, arch)
    return Launch(
        wy_kernel,
        problem.B * problem.slots * problem.HV if problem.N > 0 else 0,
        (
            *x.arguments(),
            *found,
            *(problem.scale, problem.lower_bound or 0.0),
            *(problem.T, problem.N, problem.H, problem.HV, problem.slots, rows),
            *strides(x.q, x.k, x.g, x.v, x.do, x.beta),
        ),
        dict(
            C=problem.chunk_size,
            K=problem.K,
            V=problem.V,
            BK=c.BK,
            BV=c.BV,
            **kinds,
            PRECISION=config.backward_precision(problem, arch),
            STAGES=c.stages,
        ),
        c.num_warps,
    )


def wy_dqkg(problem: Problem, t: Tensors, arch: int, outputs: Outputs) -> Launch:
    x = WyOperands(t.q, t.k, t.g, t.v, t.beta, t.A, t.h, t.v_new, t.do, t.dv, t.dh, t.cu_seqlens)
    results = (*(outputs[name] for name in ("dq", "dk", "dg", "dv", "dbeta", "dA")), None)
    kinds = dict(GATE=problem.gate, BETA="value", L2NORM=False, BY_TOKEN=True, V_FIRST=problem.state_v_first)
    return wy_launch(problem, arch, x, results, problem.rows, **kinds)
