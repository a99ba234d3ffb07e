"""From a validated call of `kernels.chunk_bwd_wy_dqkg` to its launch: stage `wy` of the backward pass on its own."""

from __future__ import annotations

from ..launch import Launch, capability, dense, launch_all, strides
from ..wy_spec import WyGradients, WySpec, WyTensors
from . import config
from .backward import wy_kernel


def wy_dqkg(spec: WySpec, t: WyTensors) -> WyGradients:
    t = readable(t)
    found = WyGradients.allocate(spec, t)
    device = t.q.device
    launch_all([launch(spec, t, capability(device), found)], device)
    return found


def readable(t: WyTensors) -> WyTensors:
    """The kernel reads q, k, v, g and do at any strides but the last dimension's, beta at any, and the others dense."""
    q, k, v, g, do = (x if x.stride(-1) == 1 else x.contiguous() for x in (t.q, t.k, t.v, t.g, t.do))
    v_new, A, h, dh, dv, cu_seqlens = dense(t.v_new, t.A, t.h, t.dh, t.dv, t.cu_seqlens)
    return WyTensors(q, k, v, v_new, g, t.beta, A, h, dh, do, dv, cu_seqlens)


def launch(spec: WySpec, t: WyTensors, at: int, found: WyGradients) -> Launch:
    c = config.wy_config(spec, at)
    return Launch(
        wy_kernel,
        spec.B * spec.slots * spec.HV if spec.N > 0 else 0,
        (
            *(t.q, t.k, t.g, t.v, t.beta, None, None, t.cu_seqlens),
            *(t.A, t.h, t.v_new, t.do, t.dv, t.dh),
            *(found.q, found.k, found.g, found.v, found.beta, found.A, None),
            *(spec.scale, 0.0),
            *(spec.T, spec.N, spec.H, spec.HV, spec.slots, spec.rows),
            *strides(t.q, t.k, t.g, t.v, t.do, t.beta),
        ),
        dict(
            C=spec.chunk_size,
            K=spec.K,
            V=spec.V,
            BK=c.BK,
            BV=c.BV,
            GATE="cumulative_log2" if spec.log2 else "cumulative",
            BETA="value",
            L2NORM=False,
            BY_TOKEN=True,
            V_FIRST=spec.state_v_first,
            PRECISION=config.backward_precision(spec, at),
            STAGES=c.stages,
        ),
        c.num_warps,
    )
