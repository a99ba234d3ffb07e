"""From a validated call and the gradients of its results to the launches of the backward pass on Hopper."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from ..launch import Launch, Recorder, allocate, dense, launch_all, strides
from ..spec import Incoming, KdaSpec, KdaTensors, Results
from ..triton.gradients import ByHead, Parts, Walked, finish, kept_outputs, state_gradient, values_gradient
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

    @classmethod
    def of(cls, spec: KdaSpec, tensors: Mapping[str, torch.Tensor]) -> Kept:
        """From its `tensors`."""
        return cls(Workspace.over(spec, tensors["workspace"]), *(tensors[name] for name in ("solved", "h", "pseudo")))

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that it holds, by names that no result has."""
        return {"workspace": self.workspace.buffer, "solved": self.solved, "h": self.h, "pseudo": self.pseudo}


def forward(spec: KdaSpec, t: KdaTensors, recorder: Recorder | None = None) -> tuple[Results, dict[str, torch.Tensor]]:
    """The call's results, and what its backward pass would compute again (`Kept.tensors`). Sequences stay whole."""
    t = readable(t)
    device = t.q.device
    results, kept = allocate(spec, t, None), Kept.allocate(spec, device)
    found = kept_outputs(results, kept.tensors())
    launch_all(walk(spec, t, kept, *results[:2]), device, recorder, found)
    return results, kept.tensors()


def walk(
    spec: KdaSpec, t: KdaTensors, kept: Kept, o: torch.Tensor | None, final_state: torch.Tensor | None
) -> list[Launch]:
    stages = (
        prepare(spec, t, kept.workspace, kept.solved),
        recurrence(spec, t, kept.workspace, (o, final_state, kept.h), kept.pseudo),
    )
    return [replace(stage, scratch=tuple(kept.tensors().values())) for stage in stages]


def backward(
    spec: KdaSpec, t: KdaTensors, incoming: Incoming, recorder: Recorder | None = None
) -> dict[str, torch.Tensor]:
    """Gradients by the names of `KdaTensors`; without what was `kept` the forward's stages run again."""
    t = readable(t)
    found: dict[str, torch.Tensor] = {}
    again = Kept.of(spec, incoming.kept) if incoming.kept else None
    stages = launches(spec, t, in_eighths(incoming.grad_o), incoming.grad_final.contiguous(), found, again)
    del again
    launch_all(stages, t.q.device, recorder, found)
    return found


def launches(
    spec: KdaSpec,
    t: KdaTensors,
    grad_o: torch.Tensor,
    grad_final: torch.Tensor,
    found: dict[str, torch.Tensor],
    kept: Kept | None = None,
) -> Iterator[Launch]:
    """In order; what they find is in `found` from when it is allocated. Each is to run before the next is asked for: what
    only the ones before it needed is given back then."""
    device = t.q.device
    if kept is None:
        kept = Kept.allocate(spec, device)
        yield from walk(replace(spec, output_final_state=False), t, kept, None, None)
    walked = Walked.allocate(kept.h, kept.pseudo)
    if (initial := state_gradient(spec, device)) is not None:
        found["initial_state"] = initial
    yield reverse(spec, t, kept.workspace, walked, grad_o, grad_final, initial)
    given = (t.q, t.k, t.g, t.v, t.beta, kept.solved, kept.h, kept.pseudo, grad_o, walked.grad_pseudo, walked.grad_h)
    x = WyOperands(*given, t.cu_seqlens, t.A_log, t.dt_bias)
    del kept, walked, given
    parts = Parts.allocate(spec, device, x.solved.shape, torch.bfloat16)
    found["v"] = values_gradient(spec, device)
    yield wy(spec, x, parts, found["v"])
    del x
    heads = ByHead.allocate(spec, device)
    found.update(heads.outputs(spec))
    yield intra(spec, t, parts, heads)
    del parts
    yield from finish(spec, t, heads, found)


def reverse(
    spec: KdaSpec,
    t: KdaTensors,
    workspace: Workspace,
    walked: Walked,
    grad_o: torch.Tensor,
    grad_final: torch.Tensor,
    initial: torch.Tensor | None,
) -> Launch:
    absent = grad_o.new_empty(0, dtype=spec.state_dtype)
    return Launch(
        reverse_kernel,
        min(items(spec), programs(spec, t.q.device)),
        (
            *(tiles(workspace.tiles), workspace.decay, grad_o),
            grad_final if spec.output_final_state else absent,
            *(walked.grad_pseudo, walked.grad_h),
            absent if initial is None else initial,
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
        scratch=(workspace.buffer, walked.grad_pseudo, walked.grad_h),
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


def wy(spec: KdaSpec, x: WyOperands, parts: Parts, grad_v: torch.Tensor) -> Launch:
    found = (parts.grad_q, parts.grad_k, parts.grad_G, grad_v, parts.grad_beta, parts.grad_A, parts.grad_Aqk)
    gate = dict(GATE=spec.gate, SAFE=spec.safe_gate)
    rest = dict(BETA=spec.beta_kind, L2NORM=spec.l2norm, V_FIRST=True)
    launch = _wy(spec, x, found, spec.lower_bound or 0.0, spec.slots, **gate, **rest)
    return replace(launch, scratch=(*x.kept(), *parts.scratch()))


def wy_dqkg(spec: WySpec, t: WyTensors, recorder: Recorder | None = None) -> WyGradients:
    """`kernels.chunk_bwd_wy_dqkg`: stage `wy` on its own."""
    found = WyGradients.allocate(spec, t)
    launch_all([wy_dqkg_launch(spec, t, found)], t.q.device, recorder, found.by_name())
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


def intra(spec: KdaSpec, t: KdaTensors, parts: Parts, heads: ByHead) -> Launch:
    return Launch(
        intra_kernel,
        spec.B * spec.slots * spec.HV if spec.N > 0 else 0,
        (
            *(t.q, t.k, t.g, t.beta, t.A_log, t.dt_bias, t.cu_seqlens, parts.grad_A, parts.grad_Aqk),
            *(parts.grad_q, parts.grad_k, parts.grad_G, parts.grad_beta),
            *(heads.q, heads.k, heads.g, heads.beta, heads.A_log, heads.dt_bias),
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
        scratch=(*parts.scratch(), *heads.scratch(spec)),
    )
