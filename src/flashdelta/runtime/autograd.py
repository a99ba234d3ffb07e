"""Gradients of an eager call: save the inputs, run the backend's backward pass. Traced calls go through the operators of
`library.py`, which do the same, cost more host time and keep nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from ..backends.base import Backend
from ..problem.problem import INPUT_NAMES, Incoming, Problem, Tensors
from ..program import cache as plans


@dataclass
class Call:
    """A validated call with gradients. `keep`: what the backward pass would compute again.

    Also its own `plans.Plan`: once the call has been seen to repeat, what either direction finds out is kept for the next time.
    """

    problem: Problem
    backend: Backend
    keep: bool
    _repeats: bool = field(init=False, default=False)
    _recorded: bool = field(init=False, default=False)
    _forward: plans.Plan | plans.Steps | None = field(init=False, default=None)
    _backward: dict[tuple, plans.Steps | None] = field(init=False, default_factory=dict)
    _canonical: tuple[tuple[int, torch.Size], ...] = field(init=False)
    """Places and shapes of the inputs that a caller may pass in another one."""

    def __post_init__(self):
        shapes = {"A_log": (self.problem.HV,), "dt_bias": (self.problem.HV, self.problem.K)}
        self._canonical = tuple((INPUT_NAMES.index(name), torch.Size(shape)) for name, shape in shapes.items())

    def repeating(self) -> Call:
        self._repeats = True
        return self

    def usable(self) -> bool:
        return self._forward is None or self._forward.usable()

    def run(
        self,
        given: Sequence[Tensor | None],
        out: None = None,
        addresses: Sequence[int] = (),
        refuse: Callable | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """`(o, final_state)`, with the gradients that the inputs require. With `addresses`, those of `given`, as a plan."""
        inputs, addresses = [*given[: len(INPUT_NAMES)]], [*addresses[: len(INPUT_NAMES)]]
        for i, shape in self._canonical:
            if inputs[i] is not None and inputs[i].shape != shape:
                x = inputs[i] = inputs[i].reshape(shape)
                if addresses:
                    addresses[i] = x.data_ptr()
        return _ChunkKda.apply(self, addresses, *inputs)

    def forward(
        self, inputs: tuple[Tensor | None, ...], addresses: Sequence[int]
    ) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        """`(o, final_state)`, and what is kept."""
        if addresses and self._forward is not None:
            if self.keep:
                found = self._forward.run(addresses)
                return found.pop("o"), found.pop("final_state", None), found
            return *self._forward.run(inputs, None, [*addresses, 0], None), {}
        t = Tensors(*inputs)
        if self.keep:
            recorder = plans.recorder(inputs) if self._records() else None
            (o, final_state, _), kept = self.backend.run_kept(self.problem, t, recorder)
            if recorder is not None:
                self._forward = recorder.steps()
            return o, final_state, kept
        o, final_state, _ = self.backend.run(self.problem, t, None)
        if self._records():
            self._forward = self.backend.plan(self.problem, t, inputs, None)
        return o, final_state, {}

    def _records(self) -> bool:
        """Whether to find out now how the forward repeats. Once: there may be no way."""
        first = self._repeats and not self._recorded
        self._recorded = self._repeats
        return first

    def backward(
        self, saved: tuple[Tensor | None, ...], grad_o: Tensor, grad_final: Tensor | None, kept: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        # the saved tensors, too: a hook may have put others in their place
        known = (*saved, grad_o, grad_final, *kept.values())
        key, addresses = plans.key(known, ()) if self._repeats else (None, [])
        steps = self._backward.get(key)
        if steps is not None and steps.usable():
            return steps.run(addresses)
        recorder = plans.recorder(known) if key is not None and key not in self._backward else None
        if grad_final is None:
            grad_final = grad_o.new_zeros(0)
        found = self.backend.backward(self.problem, Tensors(*saved), Incoming(grad_o, grad_final, kept), recorder)
        if recorder is not None:
            self._backward[key] = recorder.steps()
        return found


class _ChunkKda(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, call: Call, addresses: list[int], *inputs: Tensor | None) -> tuple:
        o, final_state, kept = call.forward(inputs, addresses)
        ctx.save_for_backward(*inputs)
        ctx.call = call, kept
        return o, final_state

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_o: Tensor, grad_final: Tensor | None) -> tuple:
        call, kept = ctx.call
        # given back with the first backward pass: a second one computes it again
        again = dict(kept)
        kept.clear()
        found = call.backward(ctx.saved_tensors, grad_o, grad_final, again)
        return None, None, *(found.get(name) for name in INPUT_NAMES)
