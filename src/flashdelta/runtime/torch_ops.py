"""The `torch.library` operators behind the public functions.

`flashdelta::kda_forward` (functional, differentiable), `flashdelta::kda_forward_out` (writes what the caller owns: `out`, the
state pool, intermediate states), `flashdelta::kda_backward` and `flashdelta::kda_commit`. The first three take validated
tensors, then the fields of `Settings`; a result that was not asked for is an empty tensor, since an operator's schema has no
optional results. `ops.py` calls `forward` where a graph is traced (`torch.compile`, fake tensors) or a gradient is wanted, and
the backend itself otherwise. `kda_prefill::forward` takes a call as the caller made it; `prefill` is what it does, and what an
eager call does without it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import backends
from ..problem.decode_spec import CommitTensors, check_commit
from ..problem.prefill import DEFAULT_PRECISION, INPUTS, RESULTS, check_prefill
from ..problem.prefill import run as run_prefill
from ..problem.problem import (
    INPUT_NAMES,
    SETTING_NAMES,
    TENSOR_NAMES,
    Incoming,
    Problem,
    Results,
    Settings,
    Tensors,
    spec_of,
)
from ..program import cache as plans

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, "
    "Tensor? A_log, Tensor? dt_bias, Tensor? initial_state, Tensor? cu_seqlens"
)
_POOL = (
    "Tensor(a!)? state_pool, Tensor? state_indices, Tensor? has_initial_state, "
    "Tensor? checkpoint_offsets, Tensor? checkpoint_indices, Tensor? num_accepted_tokens, "
    "Tensor? source_pool, Tensor? source_indices, Tensor(c!)? intermediate_states, Tensor? intermediate_indices"
)
_SETTINGS = (
    "str algorithm, float scale, str gate, float? lower_bound, bool safe_gate, str beta_kind, bool l2norm, int chunk_size, "
    "bool output_final_state, bool return_intermediate_states, bool state_v_first, str null_index, "
    "int spec_tokens, bool update_state, int split, bool batch_invariant, int longest_chunks, int all_chunks"
)
_GRADIENTS = INPUT_NAMES[:-1]  # all but cu_seqlens

torch.library.define(
    "flashdelta::kda_forward", f"({_INPUTS}, {_SETTINGS}, str backend) -> (Tensor o, Tensor final_state, Tensor h)"
)
torch.library.define(
    "flashdelta::kda_forward_out",
    f"({_INPUTS}, {_POOL}, {_SETTINGS}, str backend, Tensor(b!)? out) -> (Tensor o, Tensor final_state, Tensor h)",
)
torch.library.define(
    "flashdelta::kda_backward",
    f"(Tensor grad_o, Tensor grad_final, {_INPUTS}, {_SETTINGS}, str backend) -> Tensor[]",
)


def _call(arguments: tuple, names: tuple[str, ...] = INPUT_NAMES) -> tuple[Problem, Tensors, str]:
    """The problem, tensors and backend from the positional arguments of an operator that takes the tensors `names`."""
    n, m = len(names), len(SETTING_NAMES)
    t = Tensors(**dict(zip(names, arguments[:n])))
    settings = Settings(**dict(zip(SETTING_NAMES, arguments[n : n + m])))
    return spec_of(t, settings), t, arguments[n + m]


def operator_arguments(problem: Problem, t: Tensors, backend: str, names: tuple[str, ...] = INPUT_NAMES) -> tuple:
    """The inverse: what to pass an operator for this call. `kda_forward_out` takes all `TENSOR_NAMES`."""
    return (*(getattr(t, name) for name in names), *problem.settings().values(), backend)


def forward(problem: Problem, t: Tensors, backend: str, out: Tensor | None) -> Results:
    """The call through the operator that declares what it writes."""
    if out is None and not problem.has_pool and t.source_pool is None:
        o, final_state, h = torch.ops.flashdelta.kda_forward(*operator_arguments(problem, t, backend))
    else:
        arguments = operator_arguments(problem, t, backend, TENSOR_NAMES)
        o, final_state, h = torch.ops.flashdelta.kda_forward_out(*arguments, out)
    return (
        o if out is None else out,
        final_state if problem.output_final_state else None,
        h if problem.return_intermediate_states else None,
    )


def _or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if x is None else x


def _empty_results(problem: Problem, t: Tensors) -> tuple[Tensor, Tensor, Tensor]:
    final = (
        t.q.new_empty(problem.state_shape, dtype=problem.state_dtype)
        if problem.output_final_state
        else t.q.new_empty(0)
    )
    h = t.q.new_empty(problem.intermediate_shape if problem.return_intermediate_states else 0)
    return t.v.new_empty(t.v.shape), final, h


@torch.library.impl("flashdelta::kda_forward", "default")
def _forward(*arguments) -> tuple[Tensor, Tensor, Tensor]:
    problem, t, backend = _call(arguments)
    o, final, h = backends.choose(problem, t.q.device, backend).run(problem, t, None)
    return o, _or_empty(final, t.q), _or_empty(h, t.q)


@torch.library.register_fake("flashdelta::kda_forward")
def _forward_fake(*arguments) -> tuple[Tensor, Tensor, Tensor]:
    problem, t, _ = _call(arguments)
    return _empty_results(problem, t)


@torch.library.impl("flashdelta::kda_forward_out", "default")
def _forward_out(*arguments) -> tuple[Tensor, Tensor, Tensor]:
    (problem, t, backend), out = _call(arguments[:-1], TENSOR_NAMES), arguments[-1]
    o, final, h = backends.choose(problem, t.q.device, backend).run(problem, t, out)
    return _or_empty(o if out is None else None, t.q), _or_empty(final, t.q), _or_empty(h, t.q)


@torch.library.register_fake("flashdelta::kda_forward_out")
def _forward_out_fake(*arguments) -> tuple[Tensor, Tensor, Tensor]:
    problem, t, _ = _call(arguments[:-1], TENSOR_NAMES)
    o, final, h = _empty_results(problem, t)
    return o if arguments[-1] is None else t.q.new_empty(0), final, h


@torch.library.impl("flashdelta::kda_backward", "default")
def _backward(grad_o: Tensor, grad_final: Tensor, *arguments) -> list[Tensor]:
    problem, t, backend = _call(arguments)
    grads = backends.choose(problem, t.q.device, backend).backward(problem, t, Incoming(grad_o, grad_final))
    return [_or_empty(grads.get(name), t.q).contiguous() for name in _GRADIENTS]


@torch.library.register_fake("flashdelta::kda_backward")
def _backward_fake(grad_o: Tensor, grad_final: Tensor, *arguments) -> list[Tensor]:
    _, t, _ = _call(arguments)
    inputs = (getattr(t, name) for name in _GRADIENTS)
    return [t.q.new_empty(0) if x is None else x.new_empty(x.shape) for x in inputs]


def _save_inputs(ctx, inputs, output) -> None:
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
    ctx.arguments = tuple(None if isinstance(x, Tensor) else x for x in inputs)
    ctx.is_tensor = tuple(isinstance(x, Tensor) for x in inputs)


def _differentiate(ctx, grad_o: Tensor, grad_final: Tensor, grad_h: Tensor | None) -> tuple:
    saved = iter(ctx.saved_tensors)
    arguments = [next(saved) if is_tensor else x for x, is_tensor in zip(ctx.arguments, ctx.is_tensor)]
    grads = torch.ops.flashdelta.kda_backward(grad_o, grad_final, *arguments)
    found = [x if is_tensor else None for x, is_tensor in zip(grads, ctx.is_tensor)]
    return (*found, *[None] * (len(arguments) - len(found)))


torch.library.register_autograd("flashdelta::kda_forward", _differentiate, setup_context=_save_inputs)


# ---- commit -------------------------------------------------------------------------------------------------------------

torch.library.define(
    "flashdelta::kda_commit",
    "(Tensor(a!) initial_state, Tensor intermediate_states, Tensor ssm_state_indices, Tensor num_accepted_tokens, "
    "Tensor? intermediate_state_indices, str null_index, str backend) -> ()",
)


@torch.library.impl("flashdelta::kda_commit", "default")
def _commit(*arguments) -> None:
    problem, t = check_commit(CommitTensors(*arguments[:-2]), arguments[-2])
    backends.choose(problem, t.initial_state.device, arguments[-1]).commit(problem, t)


@torch.library.register_fake("flashdelta::kda_commit")
def _commit_fake(*arguments) -> None:
    return None


# ---- prefill ------------------------------------------------------------------------------------------------------------

torch.library.define(
    "kda_prefill::forward",
    "(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, int chunk_size, *, float? scale=None, str gate='none', "
    f"str precision='{DEFAULT_PRECISION}', str backend='auto') -> (Tensor o, Tensor w, Tensor u)",
)


def prefill(
    given: dict[str, object], chunk_size: object, scale: object, gate: object, precision: object, backend: object
) -> tuple[Tensor, Tensor, Tensor]:
    """`(o, w, u)` of a call of `ops.kda_prefill` that is not traced: validated, or a repetition of one that was.

    Raises:
        TypeError, ValueError: as `check_prefill`; `backend` is none, or can't run this call.
    """
    # types, too: 64.0 equals 64 and True equals 1, but both are refused
    options = (chunk_size, type(chunk_size), scale, type(scale), gate, precision, backend)
    known = tuple(given.values())
    key, addresses = plans.key(known, ("prefill", *options))
    plan = plans.find(key)
    if plan is not None:
        found = plan.run(addresses)
        return tuple(found[name] for name in RESULTS)
    problem, t = check_prefill(given, chunk_size, scale, gate, precision)
    chosen = backends.choose(problem.call, t.q.device, backend)
    return plans.recorded(key, known, lambda recorder: run_prefill(problem, t, chosen.name, recorder))


def _prefill_arguments(
    *given: Tensor | int,
    scale: float | None = None,
    gate: str = "none",
    precision: str = DEFAULT_PRECISION,
    backend: str = "auto",
) -> tuple:
    """As `prefill` takes them. An operator's implementation is not told of defaults."""
    *tensors, chunk_size = given
    return dict(zip(INPUTS, tensors)), chunk_size, scale, gate, precision, backend


@torch.library.impl("kda_prefill::forward", "default")
def _prefill(*given: Tensor | int, **options) -> tuple[Tensor, Tensor, Tensor]:
    return prefill(*_prefill_arguments(*given, **options))


@torch.library.register_fake("kda_prefill::forward")
def _prefill_fake(*given: Tensor | int, **options) -> tuple[Tensor, Tensor, Tensor]:
    *arguments, _ = _prefill_arguments(*given, **options)
    problem, t = check_prefill(*arguments)
    return problem.allocate(t.q.device)
