"""Gradients of an eager call: save the inputs, run the backend's backward pass. Traced calls go through the operators of
`torch_ops.py`, which do the same, cost more host time and keep nothing else."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import FunctionCtx

from ..backends import Backend
from ..problem.arguments import note_offsets, refuse_changed, resolved
from ..problem.problem import BACKWARD, FAMILIES, AttentionProblem, Problem, Tensors, inputs_of, replaced
from ..program.cache import Entry, LaunchCache

KEPT = {"A": "Akk_inv", **{name: name for name in ("workspace", "h", "v_new", "packets", "segments")}}
"""Roles in the backward pass of what a forward leaves for it, and the names under which it does."""

PARAMETERS = ("A_log", "dt_bias")
"""Inputs that a caller may pass in another shape than the canonical one."""

OFFSETS = {"cu_seqlens": "cu_seqlens", "border": "cp_context"}
"""Inputs that say where sequences lie, and must stay as they are until the backward pass, with the caller's names for them."""

Inputs = tuple[Tensor | None, ...]

_serials = itertools.count()


class Differentiable(Entry):
    """Calls that are alike, with gradients: an entry of the launch cache if it `repeats`. Either direction has
    a plan; that of the backward pass is an entry of its own, since it depends on the gradients that come in."""

    def __init__(self, problem: Problem, backend: Backend, cache: LaunchCache, names: Sequence[str], repeats: bool):
        self.problem, self.backend, self.cache, self.repeats = problem, backend, cache, repeats
        self.kind = "backward", next(_serials)
        self.inputs = tuple(role for role in inputs_of(problem.operation) if role in names)
        self.places = [names.index(role) for role in self.inputs]
        self.plan: Any = None

    def execute(self, tensors: Sequence[Tensor | None], addresses: list[int]) -> Mapping[str, Any]:
        """Runs on tensors as the caller passed them. `addresses`: for a plan, whose place in the launch cache this has."""
        return self.apply(*[tensors[i] for i in self.places])

    def apply(self, *inputs: Tensor | None) -> Mapping[str, Any]:
        """`o` and `final_state`, with the gradients that the inputs require."""
        o, final_state = _Differentiated.apply(self, *inputs)
        return {"o": o} if final_state is None else {"o": o, "final_state": final_state}

    def by_role(self, inputs: Inputs) -> Tensors:
        """Inputs in canonical shapes."""
        named = dict(zip(self.inputs, inputs))
        if isinstance(self.problem, AttentionProblem):
            shapes = (self.problem.HV,), (self.problem.HV, self.problem.K)
            for role, shape in zip(PARAMETERS, shapes):
                x = named.get(role)
                named[role] = x if x is None else x.reshape(shape)
        return FAMILIES[type(self.problem)](**named)

    def forward(self, inputs: Inputs) -> dict[str, Tensor]:
        plan = self.plan
        if plan is None:
            t = self.by_role(inputs)
            plan = self.backend.build(self.problem, t)
            plan.locate(t, inputs, dict(zip(self.inputs, itertools.count())))
        results = plan.execute(inputs)
        if self.repeats and plan.lasting:
            self.plan = plan
        return results

    def backward(self, saved: Inputs, grads: Inputs, kept: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        # the saved tensors, too: a hook may have put others in their place
        tensors = (*saved, *grads, *kept.values())
        plan, key, addresses = self.cache.find(self.kind, tensors) if self.repeats else (None, None, [])
        if plan is not None:
            return plan.execute(tensors, addresses)
        role_of = {name: role for role, name in KEPT.items()}
        roles = (*self.inputs, "do", "dht", *(role_of[name] for name in kept))
        t = replaced(self.by_role(saved), **dict(zip(roles[len(saved) :], tensors[len(saved) :])))
        plan = self.backend.build(replaced(self.problem, operation=self.problem.operation + BACKWARD), t)
        plan.locate(t, tensors, dict(zip(roles, itertools.count())))
        found = plan.execute(tensors)
        if plan.lasting:
            self.cache.keep(key, plan)
        return found


def refuse_second(ctx: Any, *grads: Tensor | None) -> None:
    others = "backend='reference' has others, in torch.func.grad and on one rank"
    raise NotImplementedError(f"gradients must be of first order ({others}); got gradients of gradients")


class _Differentiated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, call: Differentiable, *inputs: Tensor | None) -> tuple[Tensor, Tensor | None]:
        kept = call.forward(inputs)
        o, final_state = kept.pop("o"), kept.pop("final_state", None)
        # saved like inputs, so that what drops or moves saved tensors, such as checkpointing, does so with these
        ctx.save_for_backward(*inputs, *kept.values())
        ctx.call = call, tuple(kept)  # type: ignore[attr-defined]
        given = zip(call.inputs, inputs)
        note_offsets(ctx, {OFFSETS[role]: x for role, x in given if role in OFFSETS and x is not None})
        return o, final_state

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        call, names = ctx.call
        refuse_changed(ctx)
        tangents = forward_ad._current_level >= 0 and not call.backend.plain
        gradients = _Gradients.apply if torch.is_grad_enabled() or tangents else _Gradients.forward
        return None, *gradients(call, names, *grads, *ctx.saved_tensors)


class _Gradients(torch.autograd.Function):
    """The backward pass where a graph is made of it: a node of all that its gradients depend on, which refuses to be
    differentiated."""

    @staticmethod
    def forward(call: Differentiable, names: tuple[str, ...], do: Tensor, dht: Tensor | None, *saved: Any) -> Inputs:
        """`names`: of the saved tensors that follow the inputs."""
        grads = resolved(do), None if dht is None else resolved(dht)
        inputs = saved[: len(call.inputs)]
        # hooks may give them back with other strides, as they may inputs
        kept = {name: x.contiguous() for name, x in zip(names, saved[len(call.inputs) :]) if x is not None}
        found = dict(call.backward(inputs, grads, kept))
        for role, x in zip(call.inputs, inputs):
            if role in PARAMETERS and role in found:
                assert x is not None
                found[role] = found[role].view(x.shape)
        return tuple(found.get(role) for role in call.inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None: ...

    backward = jvp = staticmethod(refuse_second)  # type: ignore[assignment]
