"""The stages of the backward pass by the portable Triton kernels, for `flashdelta.gradients`."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from .. import gradients
from ..gradients import ByHead, Kept, Parts, Stages, Walked
from ..launch import Launch, capability, strides
from ..plans import Recorder
from ..spec import Incoming, KdaSpec, KdaTensors, Results
from . import config
from .backward import intra_kernel, reverse_kernel
from .launch import Workspace, prepare, readable, recurrence, walk_constants
from .wy import WyOperands, wy_launch


def stages_of(spec: KdaSpec, t: KdaTensors, at: int) -> Stages:
    t = readable(spec, t)
    return Stages(
        spec,
        t,
        Workspace,
        solved=(spec.B * spec.slots, spec.HV, spec.chunk_size, spec.chunk_size),
        squares=torch.float32,
        walk=lambda spec, *rest: walk(spec, t, at, *rest),
        reverse=functools.partial(reverse, spec, t, at),
        wy=functools.partial(wy, spec, at),
        intra=functools.partial(intra, spec, t, at),
    )


def forward(spec: KdaSpec, t: KdaTensors, recorder: Recorder | None = None) -> tuple[Results, dict[str, torch.Tensor]]:
    return gradients.forward(stages_of(spec, t, capability(t.q.device)), recorder)


def backward(
    spec: KdaSpec, t: KdaTensors, incoming: Incoming, recorder: Recorder | None = None
) -> dict[str, torch.Tensor]:
    if incoming.grad_o.stride(-1) != 1:
        incoming = replace(incoming, grad_o=incoming.grad_o.contiguous())
    return gradients.backward(stages_of(spec, t, capability(t.q.device)), incoming, recorder)


def walk(
    spec: KdaSpec, t: KdaTensors, at: int, kept: Kept, o: torch.Tensor | None, final_state: torch.Tensor | None
) -> list[Launch]:
    scratch = (*kept.tensors().values(), *(() if o is None else (o,)))
    pair = (
        prepare(spec, t, at, kept.workspace, kept.solved),
        recurrence(spec, t, at, kept.workspace, (o, final_state, kept.h), 0, kept.pseudo),
    )
    return [replace(stage, scratch=scratch) for stage in pair]


def reverse(
    spec: KdaSpec,
    t: KdaTensors,
    at: int,
    workspace: Workspace,
    walked: Walked,
    grad_o: torch.Tensor,
    grad_final: torch.Tensor,
    initial: torch.Tensor | None,
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
            *(walked.grad_pseudo, walked.grad_h),
            absent if initial is None else initial,
            *(t.cu_seqlens, int(spec.has_initial_state), int(spec.output_final_state)),
            *(spec.T, spec.N, spec.HV, spec.slots),
            *strides(grad_o),
        ),
        walk_constants(spec, c, c.BV),
        c.num_warps,
        scratch=(w.buffer, walked.grad_pseudo, walked.grad_h),
    )


def wy(spec: KdaSpec, at: int, x: WyOperands, parts: Parts, grad_v: torch.Tensor) -> Launch:
    found = (parts.grad_q, parts.grad_k, parts.grad_G, grad_v, parts.grad_beta, parts.grad_A, parts.grad_Aqk)
    kinds = dict(GATE=spec.gate, BETA=spec.beta_kind, L2NORM=spec.l2norm, BY_TOKEN=False, V_FIRST=True)
    launch = wy_launch(spec, at, x, found, spec.lower_bound or 0.0, spec.slots, **kinds)
    return replace(launch, scratch=(*x.kept(), *parts.scratch()))


def intra(spec: KdaSpec, t: KdaTensors, at: int, parts: Parts, heads: ByHead) -> Launch:
    c = config.intra_config(spec, at)
    return Launch(
        intra_kernel,
        spec.B * spec.slots * spec.HV if spec.N > 0 else 0,
        (
            *(t.q, t.k, t.g, t.beta, t.A_log, t.dt_bias, t.cu_seqlens, parts.grad_A, parts.grad_Aqk),
            *(parts.grad_q, parts.grad_k, parts.grad_G, parts.grad_beta),
            *(heads.q, heads.k, heads.g, heads.beta, heads.A_log, heads.dt_bias),
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
        scratch=(*parts.scratch(), *heads.scratch(spec)),
    )
