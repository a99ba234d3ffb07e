"""The `torch.library` operators, for calls that are traced (`torch.compile`, fake tensors).

Each takes validated tensors by role, then the settings of the problem, then the backend: the schemas are made of those. A
result that was not asked for is an empty tensor, since a schema has no optional results. Only `kda_prefill::forward`, which
other programs call by its name, takes the caller's own arguments.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..problem.operations import BY_NAME
from ..problem.problem import (
    BACKWARD,
    FAMILIES,
    INPUTS,
    ChunkProblem,
    ChunkTensors,
    CommitProblem,
    ConvolutionProblem,
    FusedProblem,
    NormProblem,
    Problem,
    StepProblem,
    Tensors,
    WyProblem,
    inputs_of,
    problem_of,
    replaced,
    required_roles,
    settings_of,
)
from .autograd import refuse_second

Roles = tuple[str, ...]


def registered(name: str, schema: str, implement: Callable[..., Any], pretend: Callable[..., Any]) -> Any:
    """`torch.ops.flashdelta.<name>`, as it is made. `pretend`: makes results without data."""
    torch.library.define(f"flashdelta::{name}", schema)
    torch.library.impl(f"flashdelta::{name}", "default")(implement)
    torch.library.register_fake(f"flashdelta::{name}")(pretend)
    return getattr(torch.ops.flashdelta, name)


class Operator:
    """`torch.ops.flashdelta.<name>`. `writes`: roles of the tensors that it changes. `roles`: those that it takes; all of the
    family by default."""

    def __init__(self, name: str, family: type[Problem], results: Roles, writes: Roles = (), roles: Roles = ()):
        self.name, self.family, self.results, self.writes = name, family, results, writes
        settings, required = settings_of(family), required_roles(FAMILIES[family])
        self.roles = roles = roles or tuple(f.name for f in fields(FAMILIES[family]) if f.name != "memory")
        self.settings = tuple(settings)
        for field, type_ in settings.items():
            if type_.removesuffix(" | None") not in ("bool", "int", "float", "str"):
                raise TypeError(f"{family.__name__}.{field} must be of a type that schemas have; got {type_}")
        types = [f"{type_.replace(' | None', '?')} {name}" for name, type_ in settings.items()]
        kinds = {role: f"Tensor({chr(97 + i)}!)" for i, role in enumerate(writes)}
        tensors = ", ".join(f"{kinds.get(role, 'Tensor')}{'' if role in required else '?'} {role}" for role in roles)
        self.schema = ", ".join([tensors, *types, "str backend"])
        returns = ", ".join(f"Tensor {result}" for result in results)
        self.call = registered(name, f"({self.schema}) -> ({returns})", self.implement, self.pretend)

    def arguments(self, problem: Problem, t: Tensors, backend: str) -> tuple:
        tensors = (getattr(t, role) for role in self.roles)
        return (*tensors, *(getattr(problem, name) for name in self.settings), backend)

    def unpacked(self, arguments: tuple) -> tuple[Problem, Tensors, str]:
        """The inverse."""
        n = len(self.roles)
        t = FAMILIES[self.family](**dict(zip(self.roles, arguments[:n])))
        *settings, backend = arguments[n:]
        return problem_of(self.family, t, **dict(zip(self.settings, settings))), t, backend

    def implement(self, *arguments: Any) -> Any:
        problem, t, backend = self.unpacked(arguments)
        if self.writes:  # while a call is traced, no tensor has memory that could be shared
            operation = BY_NAME[problem.operation]
            operation.check_overlaps({operation.name_of(role): x for role, x in t.present().items()})
        found = backends.choose(problem, t.device, backend).build(problem, t).execute([*t.present().values()])
        given = t.caller_outputs()
        return self.returned({name: x for name, x in found.items() if name not in given}, t)

    def pretend(self, *arguments: Any) -> Any:
        problem, t, _ = self.unpacked(arguments)
        results, given = problem.results(), t.caller_outputs()
        found = {name: t.primary.new_empty(x.shape, dtype=x.dtype) for name, x in results.items() if name not in given}
        return self.returned(found, t)

    def returned(self, found: Mapping[str, Tensor], t: Tensors) -> Any:
        if not self.results:
            return None
        results = tuple(found[name] if name in found else t.primary.new_empty(0) for name in self.results)
        return results if len(results) > 1 else results[0]


RESULTS = ("o", "final_state", "h")
WRITTEN = ("state_pool", "out", "final_state", "checkpoint_states")
FORWARD = Operator("kda_forward", ChunkProblem, RESULTS, roles=INPUTS)
FORWARD_OUT = Operator("kda_forward_out", ChunkProblem, RESULTS, WRITTEN)
STEP_FORWARD = Operator("kda_step", StepProblem, RESULTS[:-1], roles=INPUTS[:-1])
STEP_OUT = Operator("kda_step_out", StepProblem, RESULTS[:-1], WRITTEN[:-1])
VERIFY = Operator("kda_verify", StepProblem, RESULTS[:-1], ("out", "intermediate_states"))
COMMIT_STATES = Operator("kda_commit", CommitProblem, (), ("state_pool",))
COMMIT_RECORDS = Operator("kda_commit_records", CommitProblem, (), ("state_pool", "intermediate_states"))
BACKWARD_WY = Operator("chunk_bwd_wy_dqkg", WyProblem, ("dq", "dk", "dv", "dbeta", "dg", "dA"))
NORM = Operator("gated_rms_norm", NormProblem, ("o",), roles=inputs_of("gated_rms_norm"))
CONVOLUTION = Operator("short_convolution", ConvolutionProblem, RESULTS[:-1], roles=inputs_of("short_convolution"))
CONVOLUTION_OUT = Operator("short_convolution_out", ConvolutionProblem, RESULTS[:-1], WRITTEN)
FUSED_DECODE = Operator("fused_kda_decode", FusedProblem, ("o",), ("conv_state", "state_pool", "out"))
FUSED_VERIFY = Operator("fused_kda_verify", FusedProblem, ("o",), ("conv_state", "intermediate_states", "out"))


def operator_of(problem: Problem, t: Tensors) -> Operator:
    """The one that declares what the call writes."""
    given = t.present()
    writes = any(role in given for role in (*WRITTEN, "source_pool"))
    if isinstance(problem, CommitProblem):
        return COMMIT_RECORDS if problem.has_records else COMMIT_STATES
    if isinstance(problem, FusedProblem):
        return FUSED_DECODE if "intermediate_states" not in given else FUSED_VERIFY
    if isinstance(problem, StepProblem):
        return VERIFY if not problem.update_state else STEP_OUT if writes else STEP_FORWARD
    if isinstance(problem, ChunkProblem):
        return BACKWARD_WY if problem.operation == "wy" else FORWARD_OUT if writes else FORWARD
    if isinstance(problem, NormProblem):
        return NORM
    return CONVOLUTION_OUT if writes else CONVOLUTION


def call(problem: Problem, t: Tensors, backend: str) -> dict[str, Tensor]:
    """The results by name."""
    if problem.operation == "prefill":
        assert isinstance(problem, ChunkProblem) and isinstance(t, ChunkTensors)
        shape = (problem.B // problem.heads, problem.heads)
        rows = [x.unflatten(0, shape).squeeze(3) for x in (t.q, t.k, t.v, t.g, t.beta)]
        options = dict(scale=problem.scale, gate=problem.gate, precision=problem.precision, backend=backend)
        return dict(zip(problem.results(), torch.ops.kda_prefill.forward(*rows, problem.chunk_size, **options)))
    operator = operator_of(problem, t)
    found = operator.call(*operator.arguments(problem, t, backend))
    results = dict(zip(operator.results, found if isinstance(found, (tuple, list)) else (found,)))
    results |= t.caller_outputs()
    return {name: results[name] for name in problem.results()}


# ---- gradients ----------------------------------------------------------------------------------------------------------


class Gradients:
    """`torch.ops.flashdelta.<name>`: the backward pass of the operator `forward`. Takes the gradients of its first two results,
    then what it takes."""

    def __init__(self, name: str, forward: Operator):
        self.forward, self.incoming = forward, len(forward.results[:2])
        self.roles = tuple(role for role in forward.roles if role not in ("cu_seqlens", "border"))
        incoming = ", ".join(("Tensor grad_o", "Tensor grad_final")[: self.incoming])
        returns = ", ".join(f"Tensor d{role}" for role in self.roles)
        self.call = registered(name, f"({incoming}, {forward.schema}) -> ({returns})", self.implement, self.pretend)
        torch.library.register_autograd(f"flashdelta::{forward.name}", self.differentiate, setup_context=_save_inputs)
        torch.library.register_autograd(f"flashdelta::{name}", refuse_second)

    def implement(self, *arguments: Any) -> tuple[Tensor, ...]:
        problem, t, backend = self.forward.unpacked(arguments[self.incoming :])
        problem = replaced(problem, operation=problem.operation + BACKWARD)
        t = replaced(t, **dict(zip(("do", "dht"), arguments[: self.incoming])))
        grads = backends.choose(problem, t.device, backend).build(problem, t).execute([*t.present().values()])
        return tuple(grads[role].contiguous() if role in grads else t.primary.new_empty(0) for role in self.roles)

    def pretend(self, *arguments: Any) -> tuple[Tensor, ...]:
        _, t, _ = self.forward.unpacked(arguments[self.incoming :])
        inputs = (getattr(t, role) for role in self.roles)
        return tuple(t.primary.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)

    def differentiate(self, ctx: Any, *grads: Tensor | None) -> tuple:
        saved = iter(ctx.saved_tensors)
        arguments = [next(saved) if is_tensor else x for x, is_tensor in zip(ctx.arguments, ctx.is_tensor)]
        by_role = dict(zip(self.roles, self.call(*grads[: self.incoming], *arguments)))
        places = zip((*self.forward.roles, *[None] * len(arguments)), ctx.is_tensor)
        return tuple(by_role.get(role) if is_tensor and role else None for role, is_tensor in places)


def _save_inputs(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
    ctx.arguments = tuple(None if isinstance(x, Tensor) else x for x in inputs)
    ctx.is_tensor = tuple(isinstance(x, Tensor) for x in inputs)


GRADIENTS = {x.name: Gradients(f"{x.name.removesuffix('_forward')}_backward", x) for x in (FORWARD, NORM, CONVOLUTION)}
"""Gradients by the name of the operator."""
