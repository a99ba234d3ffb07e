"""Gradients of an eager call: save the inputs, run the backend's backward pass. Traced calls go through the operators of
`library.py`, which do the same and cost more host time."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from . import backends
from .spec import INPUT_NAMES, KdaSpec, KdaTensors, Results


class _ChunkKda(torch.autograd.Function):
    @staticmethod
    def forward(spec: KdaSpec, backend: backends.Backend, *inputs: Tensor | None) -> tuple:
        o, final_state, _ = backend.run(spec, KdaTensors(*inputs), None)
        return o, final_state

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple, output: tuple) -> None:
        spec, backend, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.call = spec, backend.name

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_o: Tensor, grad_final: Tensor | None) -> tuple:
        (spec, name), t = ctx.call, KdaTensors(*ctx.saved_tensors)
        if grad_final is None:
            grad_final = grad_o.new_zeros(0)
        found = backends.choose(spec, t.q.device, name, backward=True).backward(spec, t, grad_o, grad_final)
        return None, None, *(found.get(name) for name in INPUT_NAMES)


def differentiable(spec: KdaSpec, t: KdaTensors, backend: backends.Backend) -> Results:
    """The call's results, with the gradients that its inputs require."""
    o, final_state = _ChunkKda.apply(spec, backend, *(getattr(t, name) for name in INPUT_NAMES))
    return o, final_state, None
