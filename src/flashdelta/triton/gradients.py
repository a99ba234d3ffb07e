"""The stages of the backward pass by the portable Triton kernels, for `flashdelta.triton.backward_pass`."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from ..problem.problem import Incoming, Problem, Results, Tensors
from ..program.cache import Recorder
from ..program.launch import Launch, capability, strides
from . import backward_pass as gradients
from . import config
from .backward_pass import ByHead, Kept, Parts, Stages, Walked
from .intra import intra_kernel
from .launch import Workspace, prepare, readable, recurrence, walk_constants
from .reverse import reverse_kernel
from .wy import WyOperands, wy_launch


def stages_of(problem: Problem, t: Tensors, at: int) -> Stages:
    t = readable(problem, t)
    return Stages(
        problem,
        t,
        Workspace,
        solved=(problem.B * problem.slots, problem.HV, problem.chunk_size, problem.chunk_size),
        squares=torch.float32,
        walk=lambda problem, *rest: walk(problem, t, at, *rest),
        reverse=functools.partial(reverse, problem, t, at),
        wy=functools.partial(wy, problem, at),
        intra=functools.partial(intra, problem, t, at),
    )


def forward(problem: Problem, t: Tensors, recorder: Recorder | None = None) -> tuple[Results, dict[str, torch.Tensor]]:
    return gradients.forward(stages_of(problem, t, capability(t.q.device)), recorder)


def backward(
    problem: Problem, t: Tensors, incoming: Incoming, recorder: Recorder | None = None
) -> dict[str, torch.Tensor]:
    if incoming.grad_o.stride(-1) != 1:
        incoming = replace(incoming, grad_o=incoming.grad_o.contiguous())
    return gradients.backward(stages_of(problem, t, capability(t.q.device)), incoming, recorder)


def walk(
    problem: Problem, t: Tensors, at: int, kept: Kept, o: torch.Tensor | None, final_state: torch.Tensor | None
) -> list[Launch]:
    scratch = (*kept.tensors().values(), *(() if o is None else (o,)))
    pair = (
        prepare(problem, t, at, kept.workspace, kept.solved),
        recurrence(problem, t, at, kept.workspace, (o, final_state, kept.h), 0, kept.pseudo),
    )
    return [replace(stage, scratch=scratch) for stage in pair]


def reverse(
    problem: Problem,
    t: Tensors,
    at: int,
    workspace: Workspace,
    walked: Walked,
    grad_o: torch.Tensor,
    grad_final: torch.Tensor,
    initial: torch.Tensor | None,
) -> Launch:
    c = config.recurrence_config(problem, at)
    absent = grad_o.new_empty(0, dtype=problem.state_dtype)
    w = workspace
    return Launch(
        reverse_kernel,
        problem.N * problem.HV * (problem.V // c.BV),
        (
            *(w.w, w.qg, w.kg, w.Aqk, w.decay, grad_o),
            grad_final if problem.output_final_state else absent,
            *(walked.grad_pseudo, walked.grad_h),
            absent if initial is None else initial,
            *(t.cu_seqlens, int(problem.has_initial_state), int(problem.output_final_state)),
            *(problem.T, problem.N, problem.HV, problem.slots),
            *strides(grad_o),
        ),
        walk_constants(problem, c, c.BV),
        c.num_warps,
        scratch=(w.buffer, walked.grad_pseudo, walked.grad_h),
    )


def wy(problem: Problem, at: int, x: WyOperands, parts: Parts, grad_v: torch.Tensor) -> Launch:
    found = (parts.grad_q, parts.grad_k, parts.grad_G, grad_v, parts.grad_beta, parts.grad_A, parts.grad_Aqk)
    kinds = dict(GATE=problem.gate, BETA=problem.beta_kind, L2NORM=problem.l2norm, BY_TOKEN=False, V_FIRST=True)
    launch = wy_launch(problem, at, x, found, problem.lower_bound or 0.0, problem.slots, **kinds)
    return replace(launch, scratch=(*x.kept(), *parts.scratch()))


def intra(problem: Problem, t: Tensors, at: int, parts: Parts, heads: ByHead) -> Launch:
    c = config.intra_config(problem, at)
    return Launch(
        intra_kernel,
        problem.B * problem.slots * problem.HV if problem.N > 0 else 0,
        (
            *(t.q, t.k, t.g, t.beta, t.A_log, t.dt_bias, t.cu_seqlens, parts.grad_A, parts.grad_Aqk),
            *(parts.grad_q, parts.grad_k, parts.grad_G, parts.grad_beta),
            *(heads.q, heads.k, heads.g, heads.beta, heads.A_log, heads.dt_bias),
            *(problem.scale, problem.lower_bound or 0.0),
            *(problem.T, problem.N, problem.H, problem.HV, problem.slots),
            *strides(t.q, t.k, t.g, t.beta),
        ),
        dict(
            C=problem.chunk_size,
            K=problem.K,
            BK=c.BK,
            GATE=problem.gate,
            SAFE=config.safe_blocks(problem),
            BETA=problem.beta_kind,
            L2NORM=problem.l2norm,
            PRECISION=config.backward_precision(problem, at),
        ),
        c.num_warps,
        scratch=(*parts.scratch(), *heads.scratch(problem)),
    )
