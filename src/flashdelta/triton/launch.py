"""From a validated call to kernel launches: allocates one workspace, picks the launch parameters."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..launch import Launch, Results, dense, state_arguments, strides
from ..launch import forward as run_forward
from ..spec import KdaSpec, KdaTensors
from . import config
from .prepare import prepare_kernel
from .recurrence import recurrence_kernel
from .recurrent import recurrent_kernel


@dataclass(frozen=True)
class Workspace:
    """What `prepare` leaves for `recurrence`, chunk by chunk: `w, qg, kg [S, HV, C, K]`, `inverse, Aqk [S, HV, C, C]` in the
    operand dtype and `decay [S, HV, K]` fp32, for `S = B * slots` chunk slots. One allocation of `nbytes(spec)`: `buffer`."""

    w: torch.Tensor
    qg: torch.Tensor
    kg: torch.Tensor
    inverse: torch.Tensor
    Aqk: torch.Tensor
    decay: torch.Tensor
    buffer: torch.Tensor

    def parts(self) -> tuple[torch.Tensor, ...]:
        return (self.w, self.qg, self.kg, self.inverse, self.Aqk, self.decay)

    @staticmethod
    def shapes(spec: KdaSpec) -> list[tuple[int, ...]]:
        S, HV, C, K = spec.B * spec.slots, spec.HV, spec.chunk_size, spec.K
        return [(S, HV, C, K)] * 3 + [(S, HV, C, C)] * 2

    @staticmethod
    def nbytes(spec: KdaSpec) -> int:
        S, HV, C, K = spec.B * spec.slots, spec.HV, spec.chunk_size, spec.K
        return S * HV * ((3 * C * K + 2 * C * C) * spec.dtype.itemsize + 4 * K)

    @classmethod
    def allocate(cls, spec: KdaSpec, device: torch.device) -> Workspace:
        buffer = torch.empty(cls.nbytes(spec), dtype=torch.uint8, device=device)
        parts, offset = [], 0
        for shape in cls.shapes(spec):
            size = torch.Size(shape).numel() * spec.dtype.itemsize
            parts.append(buffer[offset : offset + size].view(spec.dtype).view(shape))
            offset += size
        decay = buffer[offset:].view(torch.float32).view(spec.B * spec.slots, spec.HV, spec.K)
        return cls(*parts, decay, buffer)


def forward(spec: KdaSpec, t: KdaTensors, out: torch.Tensor | None) -> Results:
    """`(o, final_state or None, h or None)`; see `ops.chunk_kda`."""
    return run_forward(spec, t, out, launches)


def readable(t: KdaTensors) -> KdaTensors:
    """The kernels read any strides but the last dimension's, which must be 1, dense parameters, states and indices, and a
    pool in place."""
    return KdaTensors(
        *(x if x.stride(-1) == 1 else x.contiguous() for x in (t.q, t.k, t.v, t.g)),
        t.beta,
        *dense(t.A_log, t.dt_bias, t.initial_state, t.cu_seqlens),
        t.state_pool,
        *dense(t.state_indices, t.has_initial_state, t.checkpoint_offsets, t.checkpoint_indices),
    )


def launches(spec: KdaSpec, t: KdaTensors, capability: int, results: Results) -> list[Launch]:
    """The launches that run the call, in order."""
    t = readable(t)
    if spec.algorithm == "recurrent":
        return [recurrent(spec, t, capability, results)]
    workspace = Workspace.allocate(spec, t.q.device)
    return [
        prepare(spec, t, capability, workspace),
        recurrence(spec, t, capability, workspace, results),
    ]


def prepare(spec: KdaSpec, t: KdaTensors, capability: int, workspace: Workspace) -> Launch:
    c = config.prepare_config(spec, capability)
    return Launch(
        prepare_kernel,
        spec.B * spec.slots * spec.HV if spec.N > 0 else 0,
        (
            *(t.q, t.k, t.g, t.beta, t.A_log, t.dt_bias, t.cu_seqlens, t.checkpoint_offsets),
            *workspace.parts(),
            *(spec.scale, spec.lower_bound or 0.0),
            *(spec.T, spec.N, spec.H, spec.HV, spec.slots, spec.checkpoints),
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
            PRECISION=config.dot_precision(spec.dtype),
            STAGES=c.stages,
        ),
        c.num_warps,
        workspace=workspace.buffer,
    )


def recurrence(spec: KdaSpec, t: KdaTensors, capability: int, workspace: Workspace, results: Results) -> Launch:
    c = config.recurrence_config(spec, capability)
    o, final_state, h = results
    return Launch(
        recurrence_kernel,
        spec.N * spec.HV * (spec.V // c.BV),
        (
            *workspace.parts(),
            *(t.v, o, h, t.cu_seqlens, t.checkpoint_offsets, t.checkpoint_indices),
            *state_arguments(spec, t, final_state),
            *(spec.T, spec.N, spec.HV, spec.slots, spec.checkpoints),
            *strides(t.v, o),
        ),
        dict(
            C=spec.chunk_size,
            K=spec.K,
            V=spec.V,
            BV=c.BV,
            V_FIRST=spec.state_v_first,
            PRECISION=config.dot_precision(spec.dtype),
            STAGES=c.stages,
        ),
        c.num_warps,
        workspace=workspace.buffer,
    )


def recurrent(spec: KdaSpec, t: KdaTensors, capability: int, results: Results) -> Launch:
    o, final_state, _ = results
    c = config.recurrent_config(spec, capability)
    return Launch(
        recurrent_kernel,
        spec.N * spec.HV * (spec.V // c.BV),
        (
            *(t.q, t.k, t.v, t.g, t.beta, t.A_log, t.dt_bias, t.cu_seqlens),
            *(o, *state_arguments(spec, t, final_state)),
            *(spec.scale, spec.lower_bound or 0.0),
            *(spec.T, spec.N, spec.H, spec.HV),
            *strides(t.q, t.k, t.v, t.g, t.beta, o),
        ),
        dict(
            K=spec.K,
            V=spec.V,
            BV=c.BV,
            GATE=spec.gate,
            BETA=spec.beta_kind,
            L2NORM=spec.l2norm,
            V_FIRST=spec.state_v_first,
        ),
        c.num_warps,
    )
