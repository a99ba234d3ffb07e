"""The stages of the backward pass on Hopper, for `flashdelta.triton.backward_pass`, and stage `wy` as an operator."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..problem.problem import Incoming, Problem, Results, Tensors
from ..problem.wy_spec import WyGradients, WySpec, WyTensors
from ..program.cache import Recorder
from ..program.launch import Launch, dense, launch_all, multiprocessors, strides
from ..triton import backward_pass as gradients
from ..triton.backward_pass import ByHead, Kept, Parts, Stages, Walked
from ..triton.wy import WyOperands
from .intra import intra_kernel
from .launch import (
    TILE,
    Workspace,
    describe,
    eighths,
    in_eighths,
    items,
    prepare,
    programs,
    readable,
    recurrence,
    stages,
    tiles,
)
from .reverse import reverse_kernel
from .wy import wy_kernel


def stages_of(problem: Problem, t: Tensors) -> Stages:
    t = readable(t)
    return Stages(
        problem,
        t,
        Workspace,
        solved=(problem.B, problem.T, problem.HV, TILE),
        squares=torch.bfloat16,
        walk=lambda problem, *rest: walk(problem, t, *rest),
        reverse=functools.partial(reverse, problem, t),
        wy=functools.partial(wy, problem),
        intra=functools.partial(intra, problem, t),
    )


def forward(problem: Problem, t: Tensors, recorder: Recorder | None = None) -> tuple[Results, dict[str, torch.Tensor]]:
    return gradients.forward(stages_of(problem, t), recorder)


def backward(
    problem: Problem, t: Tensors, incoming: Incoming, recorder: Recorder | None = None
) -> dict[str, torch.Tensor]:
    return gradients.backward(stages_of(problem, t), replace(incoming, grad_o=in_eighths(incoming.grad_o)), recorder)


def walk(
    problem: Problem, t: Tensors, kept: Kept, o: torch.Tensor | None, final_state: torch.Tensor | None
) -> list[Launch]:
    pair = (
        prepare(problem, t, kept.workspace, kept.solved),
        recurrence(problem, t, kept.workspace, (o, final_state, kept.h), kept.pseudo),
    )
    return [replace(stage, scratch=tuple(kept.tensors().values())) for stage in pair]


def reverse(
    problem: Problem,
    t: Tensors,
    workspace: Workspace,
    walked: Walked,
    grad_o: torch.Tensor,
    grad_final: torch.Tensor,
    initial: torch.Tensor | None,
) -> Launch:
    absent = grad_o.new_empty(0, dtype=problem.state_dtype)
    return Launch(
        reverse_kernel,
        min(items(problem), programs(problem, t.q.device)),
        (
            *(tiles(workspace.tiles), workspace.decay, grad_o),
            grad_final if problem.output_final_state else absent,
            *(walked.grad_pseudo, walked.grad_h),
            absent if initial is None else initial,
            *(t.cu_seqlens, int(problem.has_initial_state), int(problem.output_final_state)),
            *(problem.T, problem.N, problem.HV, problem.slots),
            *eighths(grad_o),
        ),
        dict(
            K=problem.K,
            V=problem.V,
            V_FIRST=problem.state_v_first,
            STAGES=stages(problem, 3 * problem.K // TILE + 2, beside=1),
        ),
        num_warps=4,
        scratch=(workspace.buffer, walked.grad_pseudo, walked.grad_h),
    )


def _wy(
    problem: Problem | WySpec,
    x: WyOperands,
    found: tuple[torch.Tensor | None, ...],
    lower_bound: float,
    rows: int,
    walk: bool = False,
    **kinds,
) -> Launch:
    """`found`: `grad_q, grad_k, grad_G, grad_v, grad_beta, grad_A, grad_Aqk`. `walk`: as the kernel's."""
    items = problem.B * problem.slots * problem.HV if problem.N > 0 else 0
    of_rows = eighths(x.q, x.k, x.g, x.v, x.grad_o)
    g_d = None
    if walk:
        g_d = by_token(x.g)
        x, found = described(x), (*map(by_token, found[:3]), *found[3:])
    return Launch(
        wy_kernel,
        min(items, multiprocessors(x.beta.device)) if walk else items,
        (
            *x.arguments(),
            g_d,
            *found,
            *(problem.scale, lower_bound),
            *(problem.T, problem.N, problem.HV, problem.group, problem.slots, rows, items),
            *of_rows,
            *strides(x.beta),
        ),
        dict(K=problem.K, V=problem.V, **kinds, PERSISTENT=walk),
        num_warps=8,
    )


def described(x: WyOperands) -> WyOperands:
    """With tensor descriptors for what `wy` copies whole tiles of; of `g` it also reads single rows."""
    rows = {name: by_token(getattr(x, name)) for name in ("q", "k", "v", "solved", "pseudo", "grad_o", "grad_pseudo")}
    return replace(x, **rows, h=by_state(x.h), grad_h=by_state(x.grad_h))


def by_token(x: torch.Tensor) -> TensorDescriptor:
    """Of `[B, T, heads, channels]`, in tiles of a chunk's rows of one head."""
    return describe(x, (1, TILE, 1, x.shape[-1]))


def by_state(x: torch.Tensor) -> TensorDescriptor:
    """Of `[B, chunks, heads, rows, columns]`, in states; `[B * chunks, heads, ..]` to the kernel."""
    return describe(x.flatten(0, 1), (1, 1, *x.shape[-2:]))


def wy(problem: Problem, x: WyOperands, parts: Parts, grad_v: torch.Tensor) -> Launch:
    found = (parts.grad_q, parts.grad_k, parts.grad_G, grad_v, parts.grad_beta, parts.grad_A, parts.grad_Aqk)
    gate = dict(GATE=problem.gate, SAFE=problem.safe_gate)
    rest = dict(BETA=problem.beta_kind, L2NORM=problem.l2norm, V_FIRST=True)
    launch = _wy(problem, x, found, problem.lower_bound or 0.0, problem.slots, **gate, **rest)
    return replace(launch, scratch=(*x.kept(), *parts.scratch()))


def wy_dqkg(problem: WySpec, t: WyTensors, recorder: Recorder | None = None) -> WyGradients:
    """`kernels.chunk_bwd_wy_dqkg`: stage `wy` on its own."""
    found = WyGradients.allocate(problem, t)
    launch_all([wy_dqkg_launch(problem, t, found)], t.q.device, recorder, found.by_name())
    return found


def wy_dqkg_launch(problem: WySpec, t: WyTensors, found: WyGradients) -> Launch:
    A, h, v_new, dv, dh = map(in_eighths, dense(t.A, t.h, t.v_new, t.dv, t.dh))
    (cu_seqlens,) = dense(t.cu_seqlens)
    q, k, g, v, do = map(in_eighths, (t.q, t.k, t.g, t.v, t.do))
    x = WyOperands(q, k, g, v, t.beta, A, h, v_new, do, dv, dh, cu_seqlens)
    results = (found.q, found.k, found.g, found.v, found.beta, found.A, None)
    gate = dict(GATE="cumulative_log2" if problem.log2 else "cumulative", SAFE=False)
    rest = dict(BETA="value", L2NORM=False, V_FIRST=problem.state_v_first)
    # at fixed lengths the TMA unit can fetch all operands; to work out a step's decays as well, registers would not suffice
    # (no tensor descriptor has an empty tensor)
    walk = not problem.packed and problem.K == problem.V == 128 and problem.B * problem.T > 0
    return _wy(problem, x, results, 0.0, problem.rows, walk, **gate, **rest)


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
            *eighths(t.q, t.k, t.g),
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
        scratch=(*parts.scratch(), *heads.scratch(problem)),
    )
