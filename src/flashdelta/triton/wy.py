"""Stage `wy` of the backward pass: its launch, and from a validated call of `kernels.chunk_bwd_wy_dqkg` to it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..problem.problem import Problem
from ..problem.wy_spec import WyGradients, WySpec, WyTensors
from ..program.cache import Recorder
from ..program.launch import Launch, capability, dense, launch_all, strides
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
    solved: torch.Tensor
    h: torch.Tensor
    pseudo: torch.Tensor
    grad_o: torch.Tensor
    grad_pseudo: torch.Tensor
    grad_h: torch.Tensor
    cu_seqlens: torch.Tensor | None
    A_log: torch.Tensor | None = None
    dt_bias: torch.Tensor | None = None

    def arguments(self) -> tuple[torch.Tensor | None, ...]:
        """As the kernels take them."""
        return (
            *(self.q, self.k, self.g, self.v, self.beta, self.A_log, self.dt_bias, self.cu_seqlens),
            *(self.solved, self.h, self.pseudo, self.grad_o, self.grad_pseudo, self.grad_h),
        )

    def kept(self) -> tuple[torch.Tensor, ...]:
        """What stages before it left."""
        return self.solved, self.h, self.pseudo, self.grad_pseudo, self.grad_h


def wy_launch(
    problem: Problem | WySpec,
    at: int,
    x: WyOperands,
    found: tuple[torch.Tensor | None, ...],
    lower_bound: float,
    rows: int,
    **kinds: object,
) -> Launch:
    """`found`: `grad_q, grad_k, grad_G, grad_v, grad_beta, grad_A, grad_Aqk`; `rows`: chunks that `h` has of a batch row."""
    c = config.wy_config(problem, at)
    return Launch(
        wy_kernel,
        problem.B * problem.slots * problem.HV if problem.N > 0 else 0,
        (
            *x.arguments(),
            *found,
            *(problem.scale, lower_bound),
            *(problem.T, problem.N, problem.H, problem.HV, problem.slots, rows),
            *strides(x.q, x.k, x.g, x.v, x.grad_o, x.beta),
        ),
        dict(
            C=problem.chunk_size,
            K=problem.K,
            V=problem.V,
            BK=c.BK,
            BV=c.BV,
            **kinds,
            PRECISION=config.backward_precision(problem, at),
            STAGES=c.stages,
        ),
        c.num_warps,
    )


def wy_dqkg(problem: WySpec, t: WyTensors, recorder: Recorder | None = None) -> WyGradients:
    t = readable(t)
    found = WyGradients.allocate(problem, t)
    device = t.q.device
    launch_all([launch(problem, t, capability(device), found)], device, recorder, found.by_name())
    return found


def readable(t: WyTensors) -> WyTensors:
    """The kernel reads q, k, v, g and do at any strides but the last dimension's, beta at any, and the others dense."""
    q, k, v, g, do = (x if x.stride(-1) == 1 else x.contiguous() for x in (t.q, t.k, t.v, t.g, t.do))
    v_new, A, h, dh, dv, cu_seqlens = dense(t.v_new, t.A, t.h, t.dh, t.dv, t.cu_seqlens)
    return WyTensors(q, k, v, v_new, g, t.beta, A, h, dh, do, dv, cu_seqlens)


def launch(problem: WySpec, t: WyTensors, at: int, found: WyGradients) -> Launch:
    x = WyOperands(t.q, t.k, t.g, t.v, t.beta, t.A, t.h, t.v_new, t.do, t.dv, t.dh, t.cu_seqlens)
    results = (found.q, found.k, found.g, found.v, found.beta, found.A, None)
    gate = "cumulative_log2" if problem.log2 else "cumulative"
    kinds = dict(GATE=gate, BETA="value", L2NORM=False, BY_TOKEN=True, V_FIRST=problem.state_v_first)
    return wy_launch(problem, at, x, results, 0.0, problem.rows, **kinds)
