"""From a validated call and the gradients of its results to the launches of the backward pass."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ..launch import Launch, allocate, capability, launch_all, strides
from ..spec import KdaSpec, KdaTensors, Results
from . import config
from .backward import intra_kernel, reverse_kernel
from .launch import Workspace, prepare, readable, recurrence, walk_constants
from .wy import WyOperands, wy_launch


@dataclass(frozen=True)
class Kept:
    """What the backward pass needs of the forward, `S` being the chunk slots: the workspace of `recurrence`, and in the operand
    dtype `solved [S, HV, C, C]`, states before chunks `h [S, HV, V, K]` and `pseudo [B, T, HV, V]`."""

    workspace: Workspace
    solved: torch.Tensor
    h: torch.Tensor
    pseudo: torch.Tensor

    @classmethod
    def allocate(cls, spec: KdaSpec, device: torch.device) -> Kept:
        S, C = spec.B * spec.slots, spec.chunk_size
        shapes = ((S, spec.HV, C, C), (S, spec.HV, spec.V, spec.K), (spec.B, spec.T, spec.HV, spec.V))
        workspace = Workspace.allocate(spec, device)
        return cls(workspace, *(torch.empty(shape, dtype=spec.dtype, device=device) for shape in shapes))


@dataclass(frozen=True)
class Parts:
    """What the stages leave for each other: gradients of states after chunks `grad_h [S, HV, V, K]` and `grad_pseudo
    [B, T, HV, V]` in the operand dtype; in float32 `grad_q, grad_k, grad_G [B, T, HV, K]`, `grad_beta [B, T, HV]`, `grad_A,
    grad_Aqk [S, HV, C, C]`."""

    grad_h: torch.Tensor
    grad_pseudo: torch.Tensor
    grad_q: torch.Tensor
    grad_k: torch.Tensor
    grad_G: torch.Tensor
    grad_beta: torch.Tensor
    grad_A: torch.Tensor
    grad_Aqk: torch.Tensor

    @classmethod
    def allocate(cls, spec: KdaSpec, kept: Kept) -> Parts:
        tokens = (spec.B, spec.T, spec.HV)
        wide = [*[(*tokens, spec.K)] * 3, tokens, *[kept.solved.shape] * 2]
        return cls(
            *map(torch.empty_like, (kept.h, kept.pseudo)),
            *(torch.empty(shape, dtype=torch.float32, device=kept.h.device) for shape in wide),
        )


@dataclass(frozen=True)
class Gradients:
    """Of the call's inputs, dense and by value head; of the gate's parameters the parts of all chunks, `[S, HV, K]`."""

    q: torch.Tensor
    k: torch.Tensor
    g: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None
    initial_state: torch.Tensor | None

    @classmethod
    def allocate(cls, spec: KdaSpec, t: KdaTensors) -> Gradients:
        device = t.q.device
        # tokens of no sequence, and slots of no chunk, are not written
        make = torch.zeros if spec.packed else torch.empty
        tokens, parts = (spec.B, spec.T, spec.HV), (spec.B * spec.slots, spec.HV, spec.K)
        grouped = spec.dtype if spec.group == 1 else torch.float32
        gated = spec.gate in ("softplus", "lower_bound")
        return cls(
            *(make((*tokens, spec.K), dtype=dtype, device=device) for dtype in (grouped, grouped, spec.g_dtype)),
            make((*tokens, spec.V), dtype=spec.dtype, device=device),
            make(tokens, dtype=spec.beta_dtype, device=device),
            torch.zeros(parts, device=device) if spec.has_A_log and gated else None,
            torch.zeros(parts, device=device) if spec.has_dt_bias and gated else None,
            torch.empty(spec.state_shape, dtype=spec.state_dtype, device=device) if spec.has_initial_state else None,
        )

    def by_name(self, spec: KdaSpec, t: KdaTensors) -> dict[str, torch.Tensor]:
        """Of the tensors as they were given: summed over what shares them, in their dtypes and shapes."""

        def shared(x: torch.Tensor) -> torch.Tensor:
            return x if spec.group == 1 else x.unflatten(2, (spec.H, spec.group)).sum(3).to(spec.dtype)

        found = {"q": shared(self.q), "k": shared(self.k), "v": self.v, "g": self.g, "beta": self.beta}
        if self.A_log is not None:
            found["A_log"] = self.A_log.sum((0, 2)).view(t.A_log.shape).to(t.A_log.dtype)
        if self.dt_bias is not None:
            found["dt_bias"] = self.dt_bias.sum(0).view(t.dt_bias.shape).to(t.dt_bias.dtype)
        if self.initial_state is not None:
            found["initial_state"] = self.initial_state
        return found


def forward(spec: KdaSpec, t: KdaTensors) -> tuple[Results, Kept]:
    """The call's results, and what its backward pass would compute again. Sequences stay whole."""
    t = readable(spec, t)
    device = t.q.device
    results, kept = allocate(spec, t, None), Kept.allocate(spec, device)
    launch_all(walk(spec, t, capability(device), kept, *results[:2]), device)
    return results, kept


def walk(
    spec: KdaSpec, t: KdaTensors, at: int, kept: Kept, o: torch.Tensor, final_state: torch.Tensor | None
) -> list[Launch]:
    return [
        prepare(spec, t, at, kept.workspace, kept.solved),
        recurrence(spec, t, at, kept.workspace, (o, final_state, kept.h), 0, kept.pseudo),
    ]


def backward(
    spec: KdaSpec, t: KdaTensors, grad_o: torch.Tensor, grad_final: torch.Tensor, kept: Kept | None = None
) -> dict[str, torch.Tensor]:
    """Gradients by the names of `KdaTensors`; unless it was `kept`, the forward's stages run again."""
    t = readable(spec, t)
    device = t.q.device
    at = capability(device)
    gradients = Gradients.allocate(spec, t)
    grad_o = grad_o if grad_o.stride(-1) == 1 else grad_o.contiguous()
    launch_all(launches(spec, t, at, grad_o, grad_final.contiguous(), gradients, kept), device)
    return gradients.by_name(spec, t)


def launches(
    spec: KdaSpec,
    t: KdaTensors,
    at: int,
    grad_o: torch.Tensor,
    grad_final: torch.Tensor,
    gradients: Gradients,
    kept: Kept | None = None,
) -> list[Launch]:
    """In order."""
    again = []
    if kept is None:
        kept = Kept.allocate(spec, t.q.device)
        again = walk(replace(spec, output_final_state=False), t, at, kept, torch.empty_like(kept.pseudo), None)
    parts = Parts.allocate(spec, kept)
    return [
        *again,
        reverse(spec, t, at, kept.workspace, parts, grad_o, grad_final, gradients),
        wy(spec, t, at, kept, parts, grad_o, gradients),
        intra(spec, t, at, parts, gradients),
    ]


def reverse(
    spec: KdaSpec,
    t: KdaTensors,
    at: int,
    workspace: Workspace,
    parts: Parts,
    grad_o: torch.Tensor,
    grad_final: torch.Tensor,
    gradients: Gradients,
) -> Launch:
    c = config.recurrence_config(spec, at)
    absent = grad_o.new_empty(0, dtype=spec.state_dtype)
    w = workspace
    return Launch(
        reverse_kernel,
        spec.N * spec.HV * (spec.V // c.BV),
        (
            *(w.w, w.qg, w.kg, w.Aqk, w.decay, grad_o),
            grad_final if spec.output_final_state else absent,
            *(parts.grad_pseudo, parts.grad_h),
            absent if gradients.initial_state is None else gradients.initial_state,
            *(t.cu_seqlens, int(spec.has_initial_state), int(spec.output_final_state)),
            *(spec.T, spec.N, spec.HV, spec.slots),
            *strides(grad_o),
        ),
        walk_constants(spec, c, c.BV),
        c.num_warps,
    )


def wy(
    spec: KdaSpec, t: KdaTensors, at: int, kept: Kept, parts: Parts, grad_o: torch.Tensor, gradients: Gradients
) -> Launch:
    given = (t.q, t.k, t.g, t.v, t.beta, kept.solved, kept.h, kept.pseudo)
    x = WyOperands(*given, grad_o, parts.grad_pseudo, parts.grad_h, t.cu_seqlens, t.A_log, t.dt_bias)
    found = (parts.grad_q, parts.grad_k, parts.grad_G, gradients.v, parts.grad_beta, parts.grad_A, parts.grad_Aqk)
    kinds = dict(GATE=spec.gate, BETA=spec.beta_kind, L2NORM=spec.l2norm, BY_TOKEN=False, V_FIRST=True)
    return wy_launch(spec, at, x, found, spec.lower_bound or 0.0, spec.slots, **kinds)


def intra(spec: KdaSpec, t: KdaTensors, at: int, parts: Parts, gradients: Gradients) -> Launch:
    c = config.intra_config(spec, at)
    return Launch(
        intra_kernel,
        spec.B * spec.slots * spec.HV if spec.N > 0 else 0,
        (
            *(t.q, t.k, t.g, t.beta, t.A_log, t.dt_bias, t.cu_seqlens, parts.grad_A, parts.grad_Aqk),
            *(parts.grad_q, parts.grad_k, parts.grad_G, parts.grad_beta),
            *(gradients.q, gradients.k, gradients.g, gradients.beta, gradients.A_log, gradients.dt_bias),
            *(spec.scale, spec.lower_bound or 0.0),
            *(spec.T, spec.N, spec.H, spec.HV, spec.slots),
            *strides(t.q, t.k, t.g, t.beta),
        ),
        dict(
            C=spec.chunk_size,
            K=spec.K,
            BK=c.BK,
            GATE=spec.gate,
            SAFE=config.safe_blocks(spec),
            BETA=spec.beta_kind,
            L2NORM=spec.l2norm,
            PRECISION=config.backward_precision(spec, at),
        ),
        c.num_warps,
    )
