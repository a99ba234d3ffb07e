"""From a validated call and the gradients of its results to the launches of the backward pass on Hopper."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ..launch import Launch, allocate, dense, launch_all, strides
from ..spec import KdaSpec, KdaTensors, Results
from ..triton.gradients import Gradients
from ..triton.wy import WyOperands
from ..wy_spec import WyGradients, WySpec, WyTensors
from .intra import intra_kernel
from .launch import (
    TILE,
    Workspace,
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


@dataclass(frozen=True)
class Kept:
    """What the backward pass needs of the forward: the workspace of `recurrence`, and in bf16 `solved [B, T, HV, 64]`, states
    before each of the `R` chunks `h [R, HV, V, K]`, and `pseudo [B, T, HV, V]`."""

    workspace: Workspace
    solved: torch.Tensor
    h: torch.Tensor
    pseudo: torch.Tensor

    @classmethod
    def allocate(cls, spec: KdaSpec, device: torch.device) -> Kept:
        tokens = (spec.B, spec.T, spec.HV)
        shapes = ((*tokens, TILE), (spec.B * spec.slots, spec.HV, spec.V, spec.K), (*tokens, spec.V))
        workspace = Workspace.allocate(spec, device)
        return cls(workspace, *(torch.empty(shape, dtype=torch.bfloat16, device=device) for shape in shapes))


@dataclass(frozen=True)
class Walked:
    """What `reverse` leaves: gradients of the states after each chunk and of the pseudo-values, `grad_h` and `grad_pseudo`, as
    `h` and `pseudo`."""

    grad_h: torch.Tensor
    grad_pseudo: torch.Tensor


@dataclass(frozen=True)
class Parts:
    """What `wy` leaves for `intra`: in fp32 `grad_q, grad_k, grad_G [B, T, HV, K]` and `grad_beta [B, T, HV]`, in bf16 `grad_A,
    grad_Aqk [B, T, HV, 64]`."""

    grad_q: torch.Tensor
    grad_k: torch.Tensor
    grad_G: torch.Tensor
    grad_beta: torch.Tensor
    grad_A: torch.Tensor
    grad_Aqk: torch.Tensor

    @classmethod
    def allocate(cls, spec: KdaSpec, device: torch.device) -> Parts:
        tokens = (spec.B, spec.T, spec.HV)
        wide = [*[(*tokens, spec.K)] * 3, tokens]
        return cls(
            *(torch.empty(shape, dtype=torch.float32, device=device) for shape in wide),
            *(torch.empty((*tokens, TILE), dtype=torch.bfloat16, device=device) for _ in range(2)),
        )


def forward(spec: KdaSpec, t: KdaTensors) -> tuple[Results, Kept]:
    """The call's results, and what its backward pass would compute again. Sequences stay whole."""
    t = readable(t)
    device = t.q.device
    results, kept = allocate(spec, t, None), Kept.allocate(spec, device)
    launch_all(walk(spec, t, kept, *results[:2]), device)
    return results, kept


def walk(
    spec: KdaSpec, t: KdaTensors, kept: Kept, o: torch.Tensor | None, final_state: torch.Tensor | None
) -> list[Launch]:
    return [
        prepare(spec, t, kept.workspace, kept.solved),
        recurrence(spec, t, kept.workspace, (o, final_state, kept.h), kept.pseudo),
    ]


def backward(
    spec: KdaSpec, t: KdaTensors, grad_o: torch.Tensor, grad_final: torch.Tensor, kept: Kept | None = None
) -> dict[str, torch.Tensor]:
    """Gradients by the names of `KdaTensors`; unless it was `kept`, the forward's stages run again."""
    t = readable(t)
    device = t.q.device
    grad_o = in_eighths(grad_o)
    gradients = Gradients.allocate(spec, t)
    launch_all(launches(spec, t, grad_o, grad_final.contiguous(), gradients, kept), device)
    return gradients.by_name(spec, t)


def launches(
    spec: KdaSpec,
    t: KdaTensors,
    grad_o: torch.Tensor,
    grad_final: torch.Tensor,
    gradients: Gradients,
    kept: Kept | None = None,
) -> Iterator[Launch]:
    """In order. Each is to run before the next is asked for: what only the ones before it needed is given back then."""
    device = t.q.device
    if kept is None:
        kept = Kept.allocate(spec, device)
        yield from walk(replace(spec, output_final_state=False), t, kept, None, None)
    walked = Walked(torch.empty_like(kept.h), torch.empty_like(kept.pseudo))
    yield reverse(spec, t, kept.workspace, walked, grad_o, grad_final, gradients)
    solved, h, pseudo = kept.solved, kept.h, kept.pseudo
    del kept
    parts = Parts.allocate(spec, device)
    given = (t.q, t.k, t.g, t.v, t.beta, solved, h, pseudo, grad_o, walked.grad_pseudo, walked.grad_h)
    yield wy(spec, WyOperands(*given, t.cu_seqlens, t.A_log, t.dt_bias), parts, gradients)
    del solved, h, pseudo, walked, given
    yield intra(spec, t, parts, gradients)


def reverse(
    spec: KdaSpec,
    t: KdaTensors,
    workspace: Workspace,
    walked: Walked,
    grad_o: torch.Tensor,
    grad_final: torch.Tensor,
    gradients: Gradients,
) -> Launch:
    absent = grad_o.new_empty(0, dtype=spec.state_dtype)
    return Launch(
        reverse_kernel,
        min(items(spec), programs(spec, t.q.device)),
        (
            *(tiles(workspace.tiles), workspace.decay, grad_o),
            grad_final if spec.output_final_state else absent,
            *(walked.grad_pseudo, walked.grad_h),
            absent if gradients.initial_state is None else gradients.initial_state,
            *(t.cu_seqlens, int(spec.has_initial_state), int(spec.output_final_state)),
            *(spec.T, spec.N, spec.HV, spec.slots),
            *eighths(grad_o),
        ),
        dict(
            K=spec.K,
            V=spec.V,
            V_FIRST=spec.state_v_first,
            STAGES=stages(spec, 3 * spec.K // TILE + 2, beside=1),
        ),
        num_warps=4,
    )


def _wy(
    spec: KdaSpec | WySpec,
    x: WyOperands,
    found: tuple[torch.Tensor | None, ...],
    lower_bound: float,
    rows: int,
    **kinds,
) -> Launch:
    """`found`: `grad_q, grad_k, grad_G, grad_v, grad_beta, grad_A, grad_Aqk`."""
    return Launch(
        wy_kernel,
        spec.B * spec.slots * spec.HV if spec.N > 0 else 0,
        (
            *x.arguments(),
            *found,
            *(spec.scale, lower_bound),
            *(spec.T, spec.N, spec.HV, spec.group, spec.slots, rows),
            *eighths(x.q, x.k, x.g, x.v, x.grad_o),
            *strides(x.beta),
        ),
        dict(K=spec.K, V=spec.V, **kinds),
        num_warps=8,
    )


def wy(spec: KdaSpec, x: WyOperands, parts: Parts, gradients: Gradients) -> Launch:
    found = (parts.grad_q, parts.grad_k, parts.grad_G, gradients.v, parts.grad_beta, parts.grad_A, parts.grad_Aqk)
    gate = dict(GATE=spec.gate, SAFE=spec.safe_gate)
    rest = dict(BETA=spec.beta_kind, L2NORM=spec.l2norm, V_FIRST=True)
    return _wy(spec, x, found, spec.lower_bound or 0.0, spec.slots, **gate, **rest)


def wy_dqkg(spec: WySpec, t: WyTensors) -> WyGradients:
    """`kernels.chunk_bwd_wy_dqkg`: stage `wy` on its own."""
    found = WyGradients.allocate(spec, t)
    launch_all([wy_dqkg_launch(spec, t, found)], t.q.device)
    return found


def wy_dqkg_launch(spec: WySpec, t: WyTensors, found: WyGradients) -> Launch:
    A, h, v_new, dv, dh = map(in_eighths, dense(t.A, t.h, t.v_new, t.dv, t.dh))
    (cu_seqlens,) = dense(t.cu_seqlens)
    q, k, g, v, do = map(in_eighths, (t.q, t.k, t.g, t.v, t.do))
    x = WyOperands(q, k, g, v, t.beta, A, h, v_new, do, dv, dh, cu_seqlens)
    results = (found.q, found.k, found.g, found.v, found.beta, found.A, None)
    gate = dict(GATE="cumulative_log2" if spec.log2 else "cumulative", SAFE=False)
    rest = dict(BETA="value", L2NORM=False, V_FIRST=spec.state_v_first)
    return _wy(spec, x, results, 0.0, spec.rows, **gate, **rest)


def intra(spec: KdaSpec, t: KdaTensors, parts: Parts, gradients: Gradients) -> Launch:
    return Launch(
        intra_kernel,
        spec.B * spec.slots * spec.HV if spec.N > 0 else 0,
        (
            *(t.q, t.k, t.g, t.beta, t.A_log, t.dt_bias, t.cu_seqlens, parts.grad_A, parts.grad_Aqk),
            *(parts.grad_q, parts.grad_k, parts.grad_G, parts.grad_beta),
            *(gradients.q, gradients.k, gradients.g, gradients.beta, gradients.A_log, gradients.dt_bias),
            *(spec.scale, spec.lower_bound or 0.0),
            *(spec.T, spec.N, spec.HV, spec.group, spec.slots),
            *eighths(t.q, t.k, t.g),
            *strides(t.beta),
        ),
        dict(
            K=spec.K,
            GATE=spec.gate,
            SAFE=spec.safe_gate,
            BETA=spec.beta_kind,
            L2NORM=spec.l2norm,
            PREFETCH=spec.K == 128 and spec.g_dtype == torch.bfloat16,
        ),
        num_warps=4 * (spec.K // 64),
    )
