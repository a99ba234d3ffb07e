"""The `torch.library` operators, for calls that are traced (`torch.compile`, fake tensors).

Each takes validated tensors by role, then all `Settings` of the problem, then the backend: the schemas are made of those. A
result that was not asked for is an empty tensor, since a schema has no optional results. Only `kda_prefill::forward`, which
other programs call by its name, takes a call as its caller made it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..problem.operations import BY_NAME
from ..problem.problem import BACKWARD, INPUTS, SETTINGS, Problem, Tensors, problem_of

GRADIENTS = INPUTS[:-1]
"""All inputs but `cu_seqlens`."""

POOL = (
    *("state_pool", "state_indices", "has_initial_state"),
    *("checkpoint_offsets", "checkpoint_indices", "checkpoint_states"),
    *("num_accepted_tokens", "source_pool", "source_indices", "intermediate_states", "intermediate_indices"),
)
COMMIT = ("state_pool", "state_indices", "num_accepted_tokens", "intermediate_states", "intermediate_indices")
WY = ("q", "k", "v", "v_new", "g", "beta", "A", "h", "dh", "do", "dv", "cu_seqlens")
REQUIRED = {"q", "k", "v", "g", "beta", *WY[:-1]}

TYPES = {"float": "float", "float | None": "float?", "bool": "bool", "int": "int", "str": "str"}
SCHEMA = ", ".join(f"{TYPES[str(f.type)]} {f.name}" for f in SETTINGS) + ", str backend"


class Operator:
    """`torch.ops.flashdelta.<name>`. `writes`: roles of the tensors that it changes."""

    def __init__(self, name: str, roles: tuple[str, ...], results: tuple[str, ...], writes: tuple[str, ...] = ()):
        self.roles, self.results, self.writes = roles, results, writes
        kinds = {role: f"Tensor({chr(97 + i)}!)" for i, role in enumerate(writes)}
        tensors = ", ".join(f"{kinds.get(role, 'Tensor')}{'' if role in REQUIRED else '?'} {role}" for role in roles)
        returns = ", ".join(f"Tensor {result}" for result in results)
        qualified = f"flashdelta::{name}"
        torch.library.define(qualified, f"({tensors}, {SCHEMA}) -> ({returns})")
        torch.library.impl(qualified, "default")(self.run)
        torch.library.register_fake(qualified)(self.pretend)
        self.call = getattr(torch.ops.flashdelta, name)

    def arguments(self, problem: Problem, t: Tensors, backend: str) -> tuple:
        return (*(getattr(t, role) for role in self.roles), *problem.settings().values(), backend)

    def unpacked(self, arguments: tuple) -> tuple[Problem, Tensors, str]:
        """The inverse."""
        n = len(self.roles)
        t = Tensors(**dict(zip(self.roles, arguments[:n])))
        *settings, backend = arguments[n:]
        return problem_of(t, **dict(zip((f.name for f in SETTINGS), settings))), t, backend

    def run(self, *arguments: Any) -> Any:
        problem, t, backend = self.unpacked(arguments)
        if self.writes:  # while a call is traced, no tensor has memory that could be shared
            BY_NAME[problem.operation].check_overlaps(vars(t))
        found = backends.choose(problem, t.device, backend).build(problem, t).run()
        given = t.given()
        return self.returned({name: x for name, x in found.items() if name not in given}, t)

    def pretend(self, *arguments: Any) -> Any:
        problem, t, _ = self.unpacked(arguments)
        like = t.state_pool if t.q is None else t.q
        assert like is not None
        results, given = problem.results(), t.given()
        found = {name: like.new_empty(x.shape, dtype=x.dtype) for name, x in results.items() if name not in given}
        return self.returned(found, t)

    def returned(self, found: Mapping[str, Tensor], t: Tensors) -> Any:
        if not self.results:
            return None
        results = tuple(found[name] if name in found else t.q.new_empty(0) for name in self.results)
        return results if len(results) > 1 else results[0]


RESULTS = ("o", "final_state", "h")
FORWARD = Operator("kda_forward", INPUTS, RESULTS)
WRITTEN = ("state_pool", "out", "final_state", "checkpoint_states", "intermediate_states")
FORWARD_OUT = Operator("kda_forward_out", (*INPUTS, *POOL, "out", "final_state"), RESULTS, writes=WRITTEN)
COMMIT_STATES = Operator("kda_commit", COMMIT, (), writes=("state_pool",))
COMMIT_RECORDS = Operator("kda_commit_records", COMMIT, (), writes=("state_pool", "intermediate_states"))
BACKWARD_WY = Operator("chunk_bwd_wy_dqkg", WY, ("dq", "dk", "dv", "dbeta", "dg", "dA"))


def operator_of(problem: Problem, t: Tensors) -> Operator:
    """The one that declares what the call writes."""
    if problem.operation == "wy":
        return BACKWARD_WY
    if problem.operation == "commit":
        return COMMIT_RECORDS if problem.has_records else COMMIT_STATES
    beside = (*WRITTEN, "source_pool")
    return FORWARD if all(getattr(t, role) is None for role in beside) else FORWARD_OUT


def call(problem: Problem, t: Tensors, backend: str) -> dict[str, Tensor]:
    """The results by name."""
    if problem.operation == "prefill":
        rows = [
            x.unflatten(0, (problem.B // problem.heads, problem.heads)).squeeze(3) for x in (t.q, t.k, t.v, t.g, t.beta)
        ]
        options = dict(scale=problem.scale, gate=problem.gate, precision=problem.precision, backend=backend)
        return dict(zip(problem.results(), torch.ops.kda_prefill.forward(*rows, problem.chunk_size, **options)))
    operator = operator_of(problem, t)
    transformed = operator is FORWARD and torch._C._are_functorch_transforms_active()
    found = (_Transformed.apply if transformed else operator.call)(*operator.arguments(problem, t, backend))
    results = dict(zip(operator.results, found if operator.results else ()))
    results |= t.given()
    return {name: results[name] for name in problem.results()}


# ---- gradients ----------------------------------------------------------------------------------------------------------

torch.library.define(
    "flashdelta::kda_backward",
    f"(Tensor grad_o, Tensor grad_final, {', '.join(f'Tensor{chr(63) * (r not in REQUIRED)} {r}' for r in INPUTS)}, {SCHEMA})"
    f" -> ({', '.join(f'Tensor d{role}' for role in GRADIENTS)})",
)


@torch.library.impl("flashdelta::kda_backward", "default")
def _backward(grad_o: Tensor, grad_final: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    problem, t, backend = FORWARD.unpacked(arguments)
    problem, t = replace(problem, operation=problem.operation + BACKWARD), replace(t, do=grad_o, dht=grad_final)
    grads = backends.choose(problem, t.device, backend).build(problem, t).run()
    return tuple(grads[role].contiguous() if role in grads else t.q.new_empty(0) for role in GRADIENTS)


@torch.library.register_fake("flashdelta::kda_backward")
def _backward_fake(grad_o: Tensor, grad_final: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    _, t, _ = FORWARD.unpacked(arguments)
    inputs = (getattr(t, role) for role in GRADIENTS)
    return tuple(t.q.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)


def _save_inputs(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
    ctx.arguments = tuple(None if isinstance(x, Tensor) else x for x in inputs)
    ctx.is_tensor = tuple(isinstance(x, Tensor) for x in inputs)


def _differentiate(ctx: Any, grad_o: Tensor, grad_final: Tensor, grad_h: Tensor | None) -> tuple:
    saved = iter(ctx.saved_tensors)
    arguments = [next(saved) if is_tensor else x for x, is_tensor in zip(ctx.arguments, ctx.is_tensor)]
    transformed = torch._C._are_functorch_transforms_active()
    backward = _TransformedBackward.apply if transformed else torch.ops.flashdelta.kda_backward
    grads = backward(grad_o, grad_final, *arguments)
    found = [x if is_tensor else None for x, is_tensor in zip(grads, ctx.is_tensor)]
    return (*found, *[None] * (len(arguments) - len(found)))


def _differentiate_again(ctx: Any, *grads: Tensor) -> None:
    raise NotImplementedError(
        "gradients of gradients: kernels have none; backend='reference' has them inside torch.func.grad"
    )


torch.library.register_autograd("flashdelta::kda_forward", _differentiate, setup_context=_save_inputs)
torch.library.register_autograd("flashdelta::kda_backward", _differentiate_again)

# The same inside transforms of `torch.func`, which know nothing of `register_autograd`.


class _Transformed(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return FORWARD.call(*arguments)

    setup_context = staticmethod(_save_inputs)
    backward = staticmethod(_differentiate)


class _TransformedBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Any:
        return torch.ops.flashdelta.kda_backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        pass

    backward = staticmethod(_differentiate_again)
