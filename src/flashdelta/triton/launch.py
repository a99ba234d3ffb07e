"""From a validated call to kernel launches: allocates outputs and one workspace, picks the launch parameters."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass

import torch
from triton.runtime import JITFunction

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


def _strides(*tensors: torch.Tensor) -> list[int]:
    return [s for x in tensors for s in x.stride()[:3]]


@dataclass(frozen=True)
class Launch:
    """One kernel launch, ready to run on the device or to be compiled without one (`compile.py`)."""

    kernel: JITFunction
    programs: int
    arguments: tuple
    constants: dict[str, object]
    num_warps: int

    def run(self) -> None:
        if self.programs > 0:
            self.kernel[(self.programs,)](*self.arguments, **self.constants, num_warps=self.num_warps)


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
    with _current(o.device):
        for launch in launches(spec, readable(t), capability(o.device), o, final_state, h):
            launch.run()
    return o, final_state, h


def _current(device: torch.device) -> contextlib.AbstractContextManager:
    """Triton launches on the current device, which need not be the tensors'."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def readable(t: KdaTensors) -> KdaTensors:
    """The kernels read any strides but the last dimension's, which must be 1, dense parameters, states and indices, and a
    pool in place."""

    def dense(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
        return [None if x is None else x.contiguous() for x in tensors]

    return KdaTensors(
        *(x if x.stride(-1) == 1 else x.contiguous() for x in (t.q, t.k, t.v, t.g)),
        t.beta,
        *dense(t.A_log, t.dt_bias, t.initial_state, t.cu_seqlens),
        t.state_pool,
        *dense(t.state_indices, t.has_initial_state, t.checkpoint_offsets, t.checkpoint_indices),
    )


def launches(
    spec: KdaSpec,
    t: KdaTensors,
    capability: int,
    o: torch.Tensor,
    final_state: torch.Tensor | None,
    h: torch.Tensor | None,
) -> list[Launch]:
    """The launches that run the call, in order."""
    if spec.algorithm == "recurrent":
        return [recurrent(spec, t, capability, o, final_state)]
    workspace = Workspace.allocate(spec, o.device)
    return [
        prepare(spec, t, capability, workspace),
        recurrence(spec, t, capability, workspace, (o, final_state, h)),
    ]


def _state_arguments(spec: KdaSpec, t: KdaTensors, final_state: torch.Tensor | None) -> tuple:
    """Where states are read and stored, as the kernels take it (`states.py`). For a state that the call does not have, an
    empty tensor, which the kernel leaves alone."""
    if spec.has_pool:
        initial = final = t.state_pool
        pitch = t.state_pool.stride(0)
    else:
        absent = t.v.new_empty(0, dtype=spec.state_dtype)
        initial = absent if t.initial_state is None else t.initial_state
        final = absent if final_state is None else final_state
        pitch = spec.HV * spec.K * spec.V
    return (
        *(initial, final, t.state_indices, t.has_initial_state, spec.lowest_index, spec.pool_slots),
        *(int(spec.has_initial_state), int(spec.output_final_state), pitch),
    )


def prepare(spec: KdaSpec, t: KdaTensors, capability: int, workspace: Workspace) -> Launch:
    c = config.prepare_config(spec, capability)
    return Launch(
        prepare_kernel,
        spec.B * spec.slots * spec.HV if spec.N > 0 else 0,
        (
            *(t.q, t.k, t.g, t.beta, t.A_log, t.dt_bias, t.cu_seqlens, t.checkpoint_offsets),
            *vars(workspace).values(),
            *(spec.scale, spec.lower_bound or 0.0),
            *(spec.T, spec.N, spec.H, spec.HV, spec.slots, spec.checkpoints),
            *_strides(t.q, t.k, t.g, t.beta),
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
    )


def recurrence(
    spec: KdaSpec,
    t: KdaTensors,
    capability: int,
    workspace: Workspace,
    results: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None],
) -> Launch:
    c = config.recurrence_config(spec, capability)
    o, final_state, h = results
    return Launch(
        recurrence_kernel,
        spec.N * spec.HV * (spec.V // c.BV),
        (
            *vars(workspace).values(),
            *(t.v, o, h, t.cu_seqlens, t.checkpoint_offsets, t.checkpoint_indices),
            *_state_arguments(spec, t, final_state),
            *(spec.T, spec.N, spec.HV, spec.slots, spec.checkpoints),
            *_strides(t.v, o),
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
    )


def recurrent(
    spec: KdaSpec, t: KdaTensors, capability: int, o: torch.Tensor, final_state: torch.Tensor | None
) -> Launch:
    c = config.recurrent_config(spec, capability)
    return Launch(
        recurrent_kernel,
        spec.N * spec.HV * (spec.V // c.BV),
        (
            *(t.q, t.k, t.v, t.g, t.beta, t.A_log, t.dt_bias, t.cu_seqlens),
            *(o, *_state_arguments(spec, t, final_state)),
            *(spec.scale, spec.lower_bound or 0.0),
            *(spec.T, spec.N, spec.H, spec.HV),
            *_strides(t.q, t.k, t.v, t.g, t.beta, o),
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
