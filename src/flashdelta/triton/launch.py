"""From a validated call to kernel launches: allocates outputs and one workspace, picks the launch parameters."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ..spec import KdaSpec, KdaTensors
from . import config
from .prepare import prepare_kernel
from .recurrence import recurrence_kernel
from .recurrent import recurrent_kernel


@functools.cache
def capability(device: torch.device) -> int:
    """As one number, e.g. 90. The interpreter on the CPU takes the oldest supported GPU's tables."""
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@dataclass(frozen=True)
class Workspace:
    """What `prepare` leaves for `recurrence`, chunk by chunk: `w, qg, kg [S, HV, C, K]`, `inverse, Aqk [S, HV, C, C]` in the
    operand dtype and `decay [S, HV, K]` fp32, for `S = B * slots` chunk slots. One allocation of `nbytes(spec)`."""

    w: torch.Tensor
    qg: torch.Tensor
    kg: torch.Tensor
    inverse: torch.Tensor
    Aqk: torch.Tensor
    decay: torch.Tensor

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
        return cls(*parts, decay)


def _dense(x: torch.Tensor) -> torch.Tensor:
    """The kernels read any strides but the last dimension's, which must be 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _strides(*tensors: torch.Tensor) -> list[int]:
    return [s for x in tensors for s in x.stride()[:3]]


def forward(
    spec: KdaSpec, t: KdaTensors, out: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """`(o, final_state or None, h or None)`; see `ops.chunk_kda`."""
    o = torch.empty(t.v.shape, dtype=spec.dtype, device=t.v.device) if out is None else out
    final_state = None
    if spec.output_final_state:
        final_state = torch.empty(spec.state_shape, dtype=spec.state_dtype, device=o.device)
    h = None
    if spec.return_intermediate_states:
        # packed: rows past the last chunk stay zero
        make = torch.zeros if spec.packed else torch.empty
        h = make(spec.intermediate_shape, dtype=spec.dtype, device=o.device)
    if spec.N == 0:
        return o, final_state, h
    t = KdaTensors(
        *map(_dense, (t.q, t.k, t.v, t.g)),
        t.beta,
        *(None if x is None else x.contiguous() for x in (t.A_log, t.dt_bias, t.initial_state, t.cu_seqlens)),
    )
    if spec.algorithm == "recurrent":
        _recurrent(spec, t, o, final_state)
    else:
        workspace = Workspace.allocate(spec, o.device)
        _prepare(spec, t, workspace)
        _recurrence(spec, t, workspace, o, final_state, h)
    return o, final_state, h


def _prepare(spec: KdaSpec, t: KdaTensors, workspace: Workspace) -> None:
    programs = spec.B * spec.slots * spec.HV
    if programs == 0:
        return
    c = config.prepare_config(spec, capability(t.q.device))
    prepare_kernel[(programs,)](
        t.q,
        t.k,
        t.g,
        t.beta,
        t.A_log,
        t.dt_bias,
        t.cu_seqlens,
        *vars(workspace).values(),
        spec.scale,
        spec.lower_bound or 0.0,
        spec.T,
        spec.N,
        spec.H,
        spec.HV,
        spec.slots,
        *_strides(t.q, t.k, t.g, t.beta),
        C=spec.chunk_size,
        K=spec.K,
        BK=c.BK,
        GATE=spec.gate,
        SAFE=config.safe_blocks(spec),
        BETA=spec.beta_kind,
        L2NORM=spec.l2norm,
        PRECISION=config.dot_precision(spec.dtype),
        num_warps=c.num_warps,
    )


def _recurrence(
    spec: KdaSpec,
    t: KdaTensors,
    workspace: Workspace,
    o: torch.Tensor,
    final_state: torch.Tensor | None,
    h: torch.Tensor | None,
) -> None:
    c = config.recurrence_config(spec, capability(t.q.device))
    recurrence_kernel[(spec.N * spec.HV * (spec.V // c.BV),)](
        *vars(workspace).values(),
        t.v,
        o,
        t.initial_state,
        final_state,
        h,
        t.cu_seqlens,
        spec.T,
        spec.N,
        spec.HV,
        spec.slots,
        *_strides(t.v, o),
        C=spec.chunk_size,
        K=spec.K,
        V=spec.V,
        BV=c.BV,
        V_FIRST=spec.state_v_first,
        PRECISION=config.dot_precision(spec.dtype),
        STAGES=c.stages,
        num_warps=c.num_warps,
    )


def _recurrent(spec: KdaSpec, t: KdaTensors, o: torch.Tensor, final_state: torch.Tensor | None) -> None:
    c = config.recurrent_config(spec, capability(t.q.device))
    recurrent_kernel[(spec.N * spec.HV * (spec.V // c.BV),)](
        t.q,
        t.k,
        t.v,
        t.g,
        t.beta,
        t.A_log,
        t.dt_bias,
        t.cu_seqlens,
        o,
        t.initial_state,
        final_state,
        spec.scale,
        spec.lower_bound or 0.0,
        spec.T,
        spec.N,
        spec.H,
        spec.HV,
        *_strides(t.q, t.k, t.v, t.g, t.beta, o),
        K=spec.K,
        V=spec.V,
        BV=c.BV,
        GATE=spec.gate,
        BETA=spec.beta_kind,
        L2NORM=spec.l2norm,
        V_FIRST=spec.state_v_first,
        num_warps=c.num_warps,
    )
