"""The `torch.library` operators, for calls that are traced (`torch.compile`, fake tensors).

Each takes validated tensors by role, then the `Settings` of the problem, then the backend: the schemas are made of those. A
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
from ..problem.problem import BACKWARD, INPUTS, LAYER_INPUTS, SETTINGS, Problem, Tensors, problem_of
from .autograd import refuse_second

POOL = (
    *("state_pool", "state_indices", "has_initial_state"),
    *("checkpoint_offsets", "checkpoint_indices", "checkpoint_states"),
    *("num_accepted_tokens", "source_pool", "source_indices", "intermediate_states", "intermediate_indices"),
)
COMMIT = ("state_pool", "state_indices", "num_accepted_tokens", "intermediate_states", "intermediate_indices")
WY = ("q", "k", "v", "v_new", "g", "beta", "A", "h", "dh", "do", "dv", "cu_seqlens")
FUSED = (
    *("q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens", "weight", "bias", "z", "norm_weight"),
    *(
        "conv_state",
        "state_pool",
        "state_indices",
        "num_accepted_tokens",
        "intermediate_states",
        "intermediate_indices",
    ),
    "out",
)
REQUIRED = {"q", "k", "v", "g", "beta", "conv_state", "norm_weight", *WY[:-1], *LAYER_INPUTS["gated_rms_norm"]}

TYPES = {f.name: {"float | None": "float?"}.get(str(f.type), str(f.type)) for f in SETTINGS}
LAYER = ("activation", "eps")
KDA = tuple(name for name in TYPES if name not in LAYER)


class Operator:
    """`torch.ops.flashdelta.<name>`. `writes`: roles of the tensors that it changes. `settings`: the fields that it takes."""

    def __init__(
        self,
        name: str,
        roles: tuple[str, ...],
        results: tuple[str, ...],
        writes: tuple[str, ...] = (),
        settings: tuple[str, ...] = KDA,
    ):
        self.name, self.roles, self.results, self.writes, self.settings = name, roles, results, writes, settings
        kinds = {role: f"Tensor({chr(97 + i)}!)" for i, role in enumerate(writes)}
        tensors = ", ".join(f"{kinds.get(role, 'Tensor')}{'' if role in REQUIRED else '?'} {role}" for role in roles)
        self.schema = ", ".join([tensors, *(f"{TYPES[x]} {x}" for x in settings), "str backend"])
        returns = ", ".join(f"Tensor {result}" for result in results)
        qualified = f"flashdelta::{name}"
        torch.library.define(qualified, f"({self.schema}) -> ({returns})")
        torch.library.impl(qualified, "default")(self.run)
        torch.library.register_fake(qualified)(self.pretend)
        self.call = getattr(torch.ops.flashdelta, name)

    def arguments(self, problem: Problem, t: Tensors, backend: str) -> tuple:
        tensors = (getattr(t, role) for role in self.roles)
        return (*tensors, *(getattr(problem, name) for name in self.settings), backend)

    def unpacked(self, arguments: tuple) -> tuple[Problem, Tensors, str]:
        """The inverse."""
        n = len(self.roles)
        t = Tensors(**dict(zip(self.roles, arguments[:n])))
        *settings, backend = arguments[n:]
        return problem_of(t, **dict(zip(self.settings, settings))), t, backend

    def run(self, *arguments: Any) -> Any:
        problem, t, backend = self.unpacked(arguments)
        if self.writes:  # while a call is traced, no tensor has memory that could be shared
            operation = BY_NAME[problem.operation]
            operation.check_overlaps({operation.name_of(role): x for role, x in t.present().items()})
        found = backends.choose(problem, t.device, backend).build(problem, t).run()
        given = t.given()
        return self.returned({name: x for name, x in found.items() if name not in given}, t)

    def pretend(self, *arguments: Any) -> Any:
        problem, t, _ = self.unpacked(arguments)
        results, given = problem.results(), t.given()
        found = {name: t.first.new_empty(x.shape, dtype=x.dtype) for name, x in results.items() if name not in given}
        return self.returned(found, t)

    def returned(self, found: Mapping[str, Tensor], t: Tensors) -> Any:
        if not self.results:
            return None
        results = tuple(found[name] if name in found else t.first.new_empty(0) for name in self.results)
        return results if len(results) > 1 else results[0]


RESULTS = ("o", "final_state", "h")
FORWARD = Operator("kda_forward", INPUTS, RESULTS)
WRITTEN = ("state_pool", "out", "final_state", "checkpoint_states", "intermediate_states")
FORWARD_OUT = Operator("kda_forward_out", (*INPUTS, *POOL, "out", "final_state"), RESULTS, writes=WRITTEN)
FORWARD_VERIFY = Operator(
    "kda_verify", FORWARD_OUT.roles, RESULTS, writes=tuple(x for x in WRITTEN if x != "state_pool")
)
COMMIT_STATES = Operator("kda_commit", COMMIT, (), writes=("state_pool",))
COMMIT_RECORDS = Operator("kda_commit_records", COMMIT, (), writes=("state_pool", "intermediate_states"))
BACKWARD_WY = Operator("chunk_bwd_wy_dqkg", WY, ("dq", "dk", "dv", "dbeta", "dg", "dA"))
NORM = Operator("gated_rms_norm", LAYER_INPUTS["gated_rms_norm"], ("o",), settings=("operation", "activation", "eps"))
CONVOLUTION_SETTINGS = ("operation", "activation", "output_final_state", "checkpoint_every", "null_index")
CONVOLUTION = Operator(
    "short_convolution",
    LAYER_INPUTS["short_convolution"],
    ("o", "final_state"),
    settings=CONVOLUTION_SETTINGS,
)
CONVOLUTION_OUT = Operator(
    "short_convolution_out",
    (
        *LAYER_INPUTS["short_convolution"],
        *("state_pool", "state_indices", "has_initial_state"),
        *("checkpoint_offsets", "checkpoint_indices", "checkpoint_states", "out", "final_state"),
    ),
    ("o", "final_state"),
    writes=("state_pool", "out", "final_state", "checkpoint_states"),
    settings=CONVOLUTION_SETTINGS,
)

FUSED_DECODE, FUSED_VERIFY = (
    Operator(name, FUSED, ("o",), writes=("conv_state", *pool, "intermediate_states", "out"), settings=(*KDA, "eps"))
    for name, pool in (("fused_kda_decode", ("state_pool",)), ("fused_kda_verify", ()))
)


def operator_of(problem: Problem, t: Tensors) -> Operator:
    """The one that declares what the call writes."""
    if problem.operation == "wy":
        return BACKWARD_WY
    if problem.operation == "commit":
        return COMMIT_RECORDS if problem.has_records else COMMIT_STATES
    if problem.operation == "fused_decode":
        return FUSED_DECODE if t.intermediate_states is None else FUSED_VERIFY
    if problem.operation == "gated_rms_norm":
        return NORM
    if problem.operation == "short_convolution":
        written = (t.state_pool, t.out, t.final_state, t.checkpoint_states)
        return CONVOLUTION if all(x is None for x in written) else CONVOLUTION_OUT
    if all(getattr(t, role) is None for role in (*WRITTEN, "source_pool")):
        return FORWARD
    return FORWARD_OUT if problem.update_state else FORWARD_VERIFY


def call(problem: Problem, t: Tensors, backend: str) -> dict[str, Tensor]:
    """The results by name."""
    if problem.operation == "prefill":
        rows = [
            x.unflatten(0, (problem.B // problem.heads, problem.heads)).squeeze(3) for x in (t.q, t.k, t.v, t.g, t.beta)
        ]
        options = dict(scale=problem.scale, gate=problem.gate, precision=problem.precision, backend=backend)
        return dict(zip(problem.results(), torch.ops.kda_prefill.forward(*rows, problem.chunk_size, **options)))
    operator = operator_of(problem, t)
    arguments = operator.arguments(problem, t, backend)
    found = operator.call(*arguments)
    results = dict(zip(operator.results, found if isinstance(found, (tuple, list)) else (found,)))
    results |= t.given()
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
        qualified = f"flashdelta::{name}"
        torch.library.define(qualified, f"({incoming}, {forward.schema}) -> ({returns})")
        torch.library.impl(qualified, "default")(self.run)
        torch.library.register_fake(qualified)(self.pretend)
        self.call = getattr(torch.ops.flashdelta, name)
        torch.library.register_autograd(f"flashdelta::{forward.name}", self.differentiate, setup_context=_save_inputs)
        torch.library.register_autograd(qualified, refuse_second)

    def run(self, *arguments: Any) -> tuple[Tensor, ...]:
        problem, t, backend = self.forward.unpacked(arguments[self.incoming :])
        problem = replace(problem, operation=problem.operation + BACKWARD)
        t = replace(t, **dict(zip(("do", "dht"), arguments[: self.incoming])))
        grads = backends.choose(problem, t.device, backend).build(problem, t).run()
        return tuple(grads[role].contiguous() if role in grads else t.first.new_empty(0) for role in self.roles)

    def pretend(self, *arguments: Any) -> tuple[Tensor, ...]:
        _, t, _ = self.forward.unpacked(arguments[self.incoming :])
        inputs = (getattr(t, role) for role in self.roles)
        return tuple(t.first.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs)

    def differentiate(self, ctx: Any, *grads: Tensor | None) -> tuple:
        saved = iter(ctx.saved_tensors)
        arguments = [next(saved) if is_tensor else x for x, is_tensor in zip(ctx.arguments, ctx.is_tensor)]
        by_role = dict(zip(self.roles, self.call(*grads[: self.incoming], *arguments)))
        places = zip((*self.forward.roles, *[None] * len(arguments)), ctx.is_tensor)
        return tuple(by_role.get(role) if is_tensor else None for role, is_tensor in places)


def _save_inputs(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
    ctx.arguments = tuple(None if isinstance(x, Tensor) else x for x in inputs)
    ctx.is_tensor = tuple(isinstance(x, Tensor) for x in inputs)


GRADIENTS = {
    forward.name: Gradients(name, forward)
    for name, forward in (
        ("kda_backward", FORWARD),
        ("gated_rms_norm_backward", NORM),
        ("short_convolution_backward", CONVOLUTION),
    )
}
"""By the name of the operator."""
