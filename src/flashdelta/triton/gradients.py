"""The stages of the backward pass by the portable Triton kernels."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from ..problem.problem import Problem, Tensors
from ..program.launch import Launch, strides
from ..program.program import Program
from . import backward_pass, config
from .backward_pass import ByHead, Kept, Parts, Scanned, Stages
from .intra import intra_kernel
from .launch import Call, chunks, layout, or_empty, prepare, prepare_inputs, recurrence, scan_constants
from .reverse import reverse_kernel
from .wy import WyOperands, wy_launch


def forward(problem: Problem, t: Tensors, arch: int) -> Program:
    return backward_pass.forward(stages_of(problem, t, arch))


def backward(problem: Problem, t: Tensors, arch: int) -> Program:
    do = t.do if t.do.stride(-1) == 1 else t.do.contiguous()
    return backward_pass.backward(stages_of(problem, replace(t, do=do), arch))


def stages_of(problem: Problem, t: Tensors, arch: int) -> Stages:
    t = prepare_inputs(problem, t)
    return Stages(
        problem,
        t,
        layout(problem),
        squares=(problem.B * problem.slots, problem.HV, problem.chunk_size, problem.chunk_size),
        squares_dtype=torch.float32,
        scan=functools.partial(scan, problem, t, arch),
        reverse=functools.partial(reverse, problem, t, arch),
        wy=functools.partial(wy, problem, arch),
        intra=functools.partial(intra, problem, t, arch),
    )


def scan(
    problem: Problem, t: Tensors, arch: int, kept: Kept, o: Tensor | None, final_state: Tensor | None
) -> list[Launch]:
    call = Call(problem, t, arch, kept.workspace)
    pair = (prepare(call, kept.Akk_inv), recurrence(call, o, final_state, kept.h, v_new=kept.v_new))
    return [replace(stage, scratch=kept.buffers) for stage in pair]


def reverse(
    problem: Problem, t: Tensors, arch: int, kept: Kept, scanned: Scanned, dht: Tensor | None, dh0: Tensor | None
) -> Launch:
    c = config.recurrence_config(problem, arch)
    final, initial = or_empty(problem, t, dht, dh0)
    return Launch(
        reverse_kernel,
        problem.N * problem.HV * (problem.V // c.BV),
        (
            *(*kept.workspace.select("w", "qg", "kg", "Aqk", "decay"), t.do),
            *(final, scanned.dv, scanned.dh, initial),
            *(t.cu_seqlens, int(problem.has_initial_state), int(problem.output_final_state)),
            *(problem.T, problem.N, problem.HV, problem.slots),
            *strides(t.do),
        ),
        scan_constants(problem, c, c.BV),
        c.num_warps,
        scratch=(kept.workspace.buffer, scanned.dv, scanned.dh),
    )


def wy(problem: Problem, arch: int, x: WyOperands, parts: Parts, grad_v: Tensor) -> Launch:
    found = (parts.grad_q, parts.grad_k, parts.grad_G, grad_v, parts.grad_beta, parts.grad_A, parts.grad_Aqk)
    kinds = dict(GATE=problem.gate, BETA=problem.beta_kind, L2NORM=problem.l2norm, BY_TOKEN=False, V_FIRST=True)
    launch = wy_launch(problem, arch, x, found, problem.slots, **kinds)
    return replace(launch, scratch=(*x.kept(), *parts.buffers))


def intra(problem: Problem, t: Tensors, arch: int, parts: Parts, heads: ByHead) -> Launch:
    c = config.intra_config(problem, arch)
    return Launch(
        intra_kernel,
        chunks(problem),
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
            PRECISION=config.backward_precision(problem, arch),
        ),
        c.num_warps,
        scratch=(*parts.buffers, *heads.buffers(problem)),
    )
