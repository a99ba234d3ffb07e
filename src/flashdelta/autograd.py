"""Gradients of an eager call: save the inputs, run the backend's backward pass. Traced calls go through the operators of
`library.py`, which do the same, cost more host time and keep nothing else."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from .backends.base import Backend
from .spec import INPUT_NAMES, KdaSpec, KdaTensors, Results


class _ChunkKda(torch.autograd.Function):
    @staticmethod
    def forward(spec: KdaSpec, backend: Backend, kept: list | None, *inputs: Tensor | None) -> tuple:
        if kept is None:
            o, final_state, _ = backend.run(spec, KdaTensors(*inputs), None)
        else:
            (o, final_state, _), found = backend.run_kept(spec, KdaTensors(*inputs))
            kept.append(found)
        return o, final_state

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple, output: tuple) -> None:
        spec, backend, kept, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.call = spec, backend, kept

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_o: Tensor, grad_final: Tensor | None) -> tuple:
        spec, backend, kept = ctx.call
        if grad_final is None:
            grad_final = grad_o.new_zeros(0)
        # given back with the first backward pass: a second one computes it again
        again = kept.pop() if kept else None
        found = backend.backward(spec, KdaTensors(*ctx.saved_tensors), grad_o, grad_final, again)
        return None, None, None, *(found.get(name) for name in INPUT_NAMES)


def differentiable(spec: KdaSpec, t: KdaTensors, backend: Backend, keep: bool) -> Results:
    """The call's results, with the gradients that its inputs require. `keep`: what the backward pass would compute again."""
    kept = [] if keep else None
    o, final_state = _ChunkKda.apply(spec, backend, kept, *(getattr(t, name) for name in INPUT_NAMES))
    return o, final_state, None
