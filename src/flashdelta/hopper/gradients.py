"""The stages of the backward pass on Hopper, and stage `wy` as an operator."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..problem.problem import Problem, Tensors
from ..program.launch import Launch, dense, sm_count, strides
from ..program.program import Outputs, Program
from ..triton import backward_pass
from ..triton.backward_pass import ByHead, Kept, Parts, Scanned, Stages
from ..triton.launch import Call, or_empty
from ..triton.wy import WyOperands
from .intra import intra_kernel
from .launch import (
    TILE,
    copyable,
    ctas,
    describe,
    layout,
    prepare,
    prepare_inputs,
    recurrence,
    stages,
    stride_div8,
    tiles,
    work_tiles,
)
from .reverse import reverse_kernel
from .wy import wy_kernel


def forward(problem: Problem, t: Tensors) -> Program:
    return backward_pass.forward(stages_of(problem, t))


def backward(problem: Problem, t: Tensors) -> Program:
    return backward_pass.backward(stages_of(problem, replace(t, do=copyable(t.do))))


def stages_of(problem: Problem, t: Tensors) -> Stages:
    t = prepare_inputs(t)
    return Stages(
        problem,
        t,
        layout(problem),
        squares=(problem.B, problem.T, problem.HV, TILE),
        squares_dtype=torch.bfloat16,
        scan=functools.partial(scan, problem, t),
        reverse=functools.partial(reverse, problem, t),
        wy=functools.partial(wy, problem),
        intra=functools.partial(intra, problem, t),
    )


def scan(problem: Problem, t: Tensors, kept: Kept, o: Tensor | None, final_state: Tensor | None) -> list[Launch]:
    call = Call(problem, t, 90, kept.workspace)
    pair = (prepare(call, kept.Akk_inv), recurrence(call, o, final_state, kept.h, kept.v_new))
    return [replace(stage, scratch=kept.buffers) for stage in pair]


def reverse(
    problem: Problem, t: Tensors, kept: Kept, scanned: Scanned, dht: Tensor | None, dh0: Tensor | None
) -> Launch:
    final, initial = or_empty(problem, t, dht, dh0)
    return Launch(
        reverse_kernel,
        min(work_tiles(problem), ctas(problem, t.q.device)),
        (
            *(tiles(kept.workspace["tiles"]), kept.workspace["decay"], t.do),
            *(final, scanned.dv, scanned.dh, initial),
            *(t.cu_seqlens, int(problem.has_initial_state), int(problem.output_final_state)),
            *(problem.T, problem.N, problem.HV, problem.slots),
            *stride_div8(t.do),
        ),
        dict(
            K=problem.K,
            V=problem.V,
            V_FIRST=problem.state_v_first,
            STAGES=stages(problem, 3 * problem.K // TILE + 2, beside=1),
        ),
        num_warps=4,
        scratch=(kept.workspace.buffer, scanned.dv, scanned.dh),
    )


def _wy(
    problem: Problem,
    x: WyOperands,
    found: tuple[torch.Tensor | None, ...],
    rows: int,
    persistent: bool = False,
    **kinds,
) -> Launch:
    """`found`: `grad_q, grad_k, grad_G, grad_v, grad_beta, grad_A, grad_Aqk`. `persistent`: as the kernel's."""
    items = problem.B * problem.slots * problem.HV if problem.N > 0 else 0
    of_rows = stride_div8(x.q, x.k, x.g, x.v, x.do)
    g_d = None
    if persistent:
        g_d = by_token(x.g)
        x, found = described(x), (*map(by_token, found[:3]), *found[3:])
    return Launch(
        wy_kernel,
        min(items, sm_count(x.beta.device)) if persistent else items,
        (
            *x.arguments(),
            g_d,
            *found,
            *(problem.scale, problem.lower_bound or 0.0),
            *(problem.T, problem.N, problem.HV, problem.group, problem.slots, rows, items),
            *of_rows,
            *strides(x.beta),
        ),
        dict(K=problem.K, V=problem.V, **kinds, PERSISTENT=persistent),
        num_warps=8,
    )


def described(x: WyOperands) -> WyOperands:
    """With tensor descriptors for what `wy` copies whole tiles of; of `g` it also reads single rows."""
    rows = {name: by_token(getattr(x, name)) for name in ("q", "k", "v", "Akk_inv", "v_new", "do", "dv")}
    return replace(x, **rows, h=by_state(x.h), dh=by_state(x.dh))


def by_token(x: torch.Tensor) -> TensorDescriptor:
    """Of `[B, T, heads, channels]`, in tiles of a chunk's rows of one head."""
    return describe(x, (1, TILE, 1, x.shape[-1]))


def by_state(x: torch.Tensor) -> TensorDescriptor:
    """Of `[B, chunks, heads, rows, columns]`, in states; `[B * chunks, heads, ..]` to the kernel."""
    return describe(x.flatten(0, 1), (1, 1, *x.shape[-2:]))


def wy(problem: Problem, x: WyOperands, parts: Parts, grad_v: Tensor) -> Launch:
    found = (parts.grad_q, parts.grad_k, parts.grad_G, grad_v, parts.grad_beta, parts.grad_A, parts.grad_Aqk)
    gate = dict(GATE=problem.gate, SAFE=problem.safe_gate)
    rest = dict(BETA=problem.beta_kind, L2NORM=problem.l2norm, V_FIRST=True)
    launch = _wy(problem, x, found, problem.slots, **gate, **rest)
    return replace(launch, scratch=(*x.kept(), *parts.buffers))


def wy_dqkg(problem: Problem, t: Tensors, outputs: Outputs) -> Launch:
    """`chunk_bwd_wy_dqkg`: stage `wy` on its own."""
    A, h, v_new, dv, dh = (copyable(x.contiguous()) for x in (t.A, t.h, t.v_new, t.dv, t.dh))
    (cu_seqlens,) = dense(t.cu_seqlens)
    q, k, g, v, do = map(copyable, (t.q, t.k, t.g, t.v, t.do))
    x = WyOperands(q, k, g, v, t.beta, A, h, v_new, do, dv, dh, cu_seqlens)
    results = (*(outputs[name] for name in ("dq", "dk", "dg", "dv", "dbeta", "dA")), None)
    kinds = dict(GATE=problem.gate, SAFE=False, BETA="value", L2NORM=False, V_FIRST=problem.state_v_first)
    # at fixed lengths the TMA unit can fetch all operands; to work out a step's decays as well, registers would not suffice
    # (no tensor descriptor has an empty tensor)
    persistent = not problem.packed and problem.K == problem.V == 128 and problem.B * problem.T > 0
    return _wy(problem, x, results, problem.rows, persistent, **kinds)


def intra(problem: Problem, t: Tensors, parts: Parts, heads: ByHead) -> Launch:
    return Launch(
        intra_kernel,
        problem.B * problem.slots * problem.HV if problem.N > 0 else 0,
        (
            *(t.q, t.k, t.g, t.beta, t.A_log, t.dt_bias, t.cu_seqlens, parts.grad_A, parts.grad_Aqk),
            *(parts.grad_q, parts.grad_k, parts.grad_G, parts.grad_beta),
            *(heads.q, heads.k, heads.g, heads.beta, heads.A_log, heads.dt_bias),
            *(problem.scale, problem.lower_bound or 0.0),
            *(problem.T, problem.N, problem.HV, problem.group, problem.slots),
            *stride_div8(t.q, t.k, t.g),
            *strides(t.beta),
        ),
        dict(
            K=problem.K,
            GATE=problem.gate,
            SAFE=problem.safe_gate,
            BETA=problem.beta_kind,
            L2NORM=problem.l2norm,
            PREFETCH=problem.K == 128 and problem.g_dtype == torch.bfloat16,
        ),
        num_warps=4 * (problem.K // 64),
        scratch=(*parts.buffers, *heads.buffers(problem)),
    )
