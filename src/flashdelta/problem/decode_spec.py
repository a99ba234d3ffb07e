"""What a validated call of `recurrent_kda` or `commit` is: the one door through which both are made, as in `problem.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from . import device_checks as checked
from .errors import wrong
from .problem import (
    DECODE_HEAD_DIMS,
    DECODE_TOKENS,
    NULL_INDICES,
    NullIndex,
    Options,
    Problem,
    Tensors,
    check_bool,
    check_index_dtype,
    check_inputs,
    check_overlap,
    check_pitch,
    check_sequences,
    check_slots,
    check_states,
    check_tensor,
    number_of_sequences,
    settings_of,
    shape_of,
    spec_of,
)

CALLED: Mapping[str, str] = {
    "state_pool": "initial_state",
    "state_indices": "ssm_state_indices",
    "source_pool": "initial_state_source",
    "source_indices": "initial_state_indices",
    "intermediate_indices": "intermediate_state_indices",
    "use_beta_sigmoid_in_kernel": "beta_is_logit",
    "out": "output",
}
"""What `recurrent_kda` calls a field of `Tensors` or `Options`, where the names differ."""

GIVEN = (
    *("mixed_qkv", "q", "k", "v", "g", "beta", "A_log", "dt_bias", "cu_seqlens"),
    *("initial_state", "ssm_state_indices", "num_accepted_tokens", "initial_state_source", "initial_state_indices"),
    *("intermediate_states", "intermediate_state_indices"),
)
"""The tensors that a caller of `recurrent_kda` may give. `mixed_qkv` comes first: q, k and v are then views of it."""


def check_decode(
    given: Mapping[str, Tensor | None], options: Options, num_spec_tokens: int | None, update_state: bool
) -> tuple[Problem, Tensors]:
    """Validates a call of `recurrent_kda`, whose tensors are `given` by the caller's names.

    Raises:
        TypeError, ValueError: as `problem.check_call`.
    """
    check_bool("update_state", update_state)
    tokens = _spec_tokens(num_spec_tokens)
    field = {called: name for name, called in CALLED.items()}
    t = Tensors(**{field.get(name, name): x for name, x in given.items() if name != "mixed_qkv"})
    if given["mixed_qkv"] is not None:
        t = _split(given["mixed_qkv"], t, tokens, options.state_v_first)
    t, gate = check_inputs(t, options, DECODE_HEAD_DIMS, CALLED)
    check_sequences(t, options.state_v_first)
    _check_tokens(t, tokens)
    _check_states(t, options, tokens, update_state)
    settings = settings_of(t, options, gate, spec_tokens=tokens - 1, update_state=update_state)
    problem = spec_of(t, replace(settings, output_final_state=options.output_final_state and t.state_pool is None))
    if problem.requires_grad:
        name = next(name for name, x in t.present().items() if x.requires_grad)
        wanted = "torch.no_grad() (chunk_kda and fused_recurrent_kda have gradients)"
        raise wrong(CALLED.get(name, name), "a tensor that requires grad", wanted)
    if checked.enabled():
        checked.check_decode(problem, t)
    return problem, t


def check_decode_arguments(arguments: Mapping[str, object]) -> tuple[Problem, Tensors]:
    """`check_decode` for the arguments of `recurrent_kda` by name."""
    field = {called: name for name, called in CALLED.items()}
    known = {f.name for f in fields(Options)}
    options = {field.get(name, name): x for name, x in arguments.items() if field.get(name, name) in known}
    given = {name: arguments[name] for name in GIVEN}
    return check_decode(
        given,
        Options(algorithm="decode", **options),
        arguments["num_spec_tokens"],
        arguments["update_state"],
    )


def _spec_tokens(num_spec_tokens: int | None) -> int:
    """Tokens of every sequence in a call with speculative ones; 1 without."""
    most = DECODE_TOKENS - 1
    if num_spec_tokens is None:
        return 1
    if isinstance(num_spec_tokens, bool) or not isinstance(num_spec_tokens, int):
        kind = type(num_spec_tokens).__name__
        raise TypeError(f"num_spec_tokens: got {num_spec_tokens!r} ({kind}), wanted an int or None")
    if not 1 <= num_spec_tokens <= most:
        raise wrong("num_spec_tokens", num_spec_tokens, f"1 to {most}, or None without speculative tokens")
    return 1 + num_spec_tokens


def _split(mixed: Tensor, t: Tensors, tokens: int, state_v_first: bool) -> Tensors:
    """q, k, v as views of the rows of `mixed`, with g and beta in the same layout."""
    for name in ("q", "k", "v"):
        if getattr(t, name) is not None:
            raise wrong("mixed_qkv", f"a tensor with {name}", "one of the two")
    check_tensor("mixed_qkv", mixed, rank=2)
    pool = t.source_pool if t.state_pool is None else t.state_pool
    if pool is None:
        raise wrong("initial_state", "None with mixed_qkv", "a tensor (its shape tells the heads)")
    check_tensor("initial_state" if t.state_pool is not None else "initial_state_source", pool, rank=4)
    HV, V, K = pool.shape[1:] if state_v_first else (pool.shape[1], pool.shape[3], pool.shape[2])
    rows, width = mixed.shape
    heads = (width - HV * V) // (2 * K) if K > 0 else 0
    if heads <= 0 or 2 * heads * K + HV * V != width:
        wanted = f"[N, 2 * H * K + HV * V] with K = {K} and HV * V = {HV * V}, as initial_state has them"
        raise wrong("mixed_qkv", f"shape {shape_of(mixed)}", wanted)
    if t.cu_seqlens is None and rows % tokens != 0:
        raise wrong("mixed_qkv", f"{rows} rows", f"a multiple of 1 + num_spec_tokens = {tokens}")
    leading = (rows // tokens, tokens) if t.cu_seqlens is None else (1, rows)
    q, k, v = mixed.split([heads * K, heads * K, HV * V], dim=1)
    g, beta = t.g, t.beta
    if isinstance(g, Tensor) and g.dim() == 2:
        if tuple(g.shape) != (rows, HV * K):
            raise wrong("g", f"shape {shape_of(g)}", f"[N, HV * K] = {[rows, HV * K]}")
        g = g.view(*leading, HV, K)
    if isinstance(beta, Tensor) and beta.dim() == 2:
        if tuple(beta.shape) != (rows, HV):
            raise wrong("beta", f"shape {shape_of(beta)}", f"[N, HV] = {[rows, HV]}")
        beta = beta.view(*leading, HV)
    q, k = (x.view(*leading, heads, K) for x in (q, k))
    return replace(t, q=q, k=k, v=v.view(*leading, HV, V), g=g, beta=beta)


def _check_tokens(t: Tensors, tokens: int) -> None:
    """Of packed sequences the lengths are device data: more tokens than there may be are not looked at."""
    T = t.q.shape[1]
    if t.cu_seqlens is not None:
        return
    if tokens > 1 and tokens != T:
        raise wrong("q", f"{T} tokens a sequence", f"1 + num_spec_tokens = {tokens}")
    if T > DECODE_TOKENS:
        wanted = f"at most {DECODE_TOKENS} (fused_recurrent_kda and chunk_kda take longer sequences)"
        raise wrong("q", f"{T} tokens a sequence", wanted)


def _check_states(t: Tensors, options: Options, tokens: int, update_state: bool) -> None:
    """Checks all about states but what index tensors hold."""
    N, v_first = number_of_sequences(t), options.state_v_first
    _both_or_neither(t)
    if t.source_pool is not None:
        check_slots("initial_state_source", t.source_pool, t, v_first)
        _check_shape("initial_state_indices", t.source_indices, (N,), "[N]")
        if update_state and t.state_pool is None:
            raise wrong("initial_state", "None with initial_state_source", "the pool to write, or update_state=False")
        if not update_state and t.state_pool is not None:
            came = "a tensor with initial_state_source and update_state=False"
            raise wrong("initial_state", came, "None (no pool is written)")
        if t.num_accepted_tokens is not None:
            raise wrong("num_accepted_tokens", "a tensor with initial_state_source", "one of the two")
    if t.state_pool is None and t.source_pool is None:
        for name in ("state_indices", "num_accepted_tokens", "intermediate_states"):
            if getattr(t, name) is not None:
                raise wrong(CALLED.get(name, name), "a tensor without initial_state", "initial_state too")
        if tokens > 1:
            raise wrong("num_spec_tokens", f"{tokens - 1} without initial_state", "initial_state too")
        if not update_state:
            raise wrong("update_state", "False without initial_state", "initial_state too")
    if t.state_pool is not None:
        check_slots("initial_state", t.state_pool, t, v_first)
        _check_indices(t, N, tokens, update_state, v_first)
    elif t.state_indices is not None:
        raise wrong("ssm_state_indices", "a tensor without initial_state", "initial_state too")
    if options.output_final_state and not update_state:
        raise wrong("output_final_state", "True with update_state=False", "one of the two")
    if t.num_accepted_tokens is not None:
        if tokens == 1:
            raise wrong("num_accepted_tokens", "a tensor without num_spec_tokens", "num_spec_tokens too")
        if not update_state:
            raise wrong("num_accepted_tokens", "a tensor with update_state=False", "None (commit takes the counts)")
        _check_shape("num_accepted_tokens", t.num_accepted_tokens, (N,), "[N]")
    _check_intermediate(t, N, tokens, update_state, v_first)


def _both_or_neither(t: Tensors) -> None:
    for name, other in (("source_pool", "source_indices"), ("source_indices", "source_pool")):
        if getattr(t, name) is None and getattr(t, other) is not None:
            raise wrong(CALLED[name], f"None with {CALLED[other]}", "both or neither")


def _check_shape(name: str, x: Tensor, want: tuple[int, ...], symbols: str) -> None:
    if tuple(x.shape) != want:
        raise wrong(name, f"shape {shape_of(x)}", f"{symbols} = {list(want)}")


def _check_indices(t: Tensors, N: int, tokens: int, update_state: bool, v_first: bool) -> None:
    """`ssm_state_indices` has a slot for each state that is stored; without it sequence `n` has slot `n`."""
    indices = t.state_indices
    if tokens > 1 and update_state:
        symbols = "[N, 1 + num_spec_tokens]"
        if indices is None:
            raise wrong("ssm_state_indices", "None with num_spec_tokens", f"{symbols} = {[N, tokens]}")
        _check_shape("ssm_state_indices", indices, (N, tokens), symbols)
    elif indices is not None:
        _check_shape("ssm_state_indices", indices, (N,), "[N]")
    else:
        check_states("initial_state", t.state_pool, "N", N, t, v_first)


def _check_intermediate(t: Tensors, N: int, tokens: int, update_state: bool, v_first: bool) -> None:
    states = t.intermediate_states
    if states is None:
        if t.intermediate_indices is not None:
            raise wrong("intermediate_state_indices", "a tensor without intermediate_states", "intermediate_states too")
        return
    if tokens == 1:
        raise wrong("intermediate_states", "a tensor without num_spec_tokens", "num_spec_tokens too")
    if update_state:
        raise wrong("intermediate_states", "a tensor with update_state=True", "update_state=False")
    check_tensor("intermediate_states", states, rank=5)
    check_states("intermediate_states", states[:, 0], "slots", states.shape[0], t, v_first)
    if states.shape[1] != tokens:
        raise wrong("intermediate_states", f"{states.shape[1]} states a slot", f"1 + num_spec_tokens = {tokens}")
    check_pitch("intermediate_states", states, dense=3)
    if t.intermediate_indices is not None:
        _check_shape("intermediate_state_indices", t.intermediate_indices, (N,), "[N]")
    others = {name: x for name, x in t.present().items() if x is not states}
    check_overlap("intermediate_states", states, others, CALLED)


# ---- commit -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CommitTensors:
    """The tensors of one call of `commit`."""

    initial_state: Tensor
    intermediate_states: Tensor
    ssm_state_indices: Tensor
    num_accepted_tokens: Tensor
    intermediate_state_indices: Tensor | None = None

    def present(self) -> dict[str, Tensor]:
        return {name: x for name, x in vars(self).items() if x is not None}


@dataclass(frozen=True, kw_only=True)
class CommitSpec:
    """A validated call of `commit`: `N` sequences, of whose `tokens` states one each goes to the pool; a state has `size`
    elements. `algorithm`, `dtype` (the pool's) and `requires_grad` are what backends ask of a call."""

    N: int
    tokens: int
    size: int
    slots: int
    rows: int
    dtype: torch.dtype
    lowest_index: int
    requires_grad: bool = False
    algorithm: str = "commit"


def check_commit(t: CommitTensors, null_index: NullIndex) -> tuple[CommitSpec, CommitTensors]:
    """Validates a call of `commit`.

    Raises:
        TypeError, ValueError: as `problem.check_call`.
    """
    ranks = {"initial_state": 4, "intermediate_states": 5}
    for name, x in vars(t).items():
        if x is not None or name != "intermediate_state_indices":
            check_tensor(name, x, rank=ranks.get(name, 1))
    if null_index not in NULL_INDICES:
        raise wrong("null_index", repr(null_index), f"one of {NULL_INDICES}")
    pool, states = t.initial_state, t.intermediate_states
    N = t.ssm_state_indices.shape[0]
    for name in ("num_accepted_tokens", "intermediate_state_indices"):
        if getattr(t, name) is not None:
            _check_shape(name, getattr(t, name), (N,), "[N], as ssm_state_indices,")
    for name in ("ssm_state_indices", "num_accepted_tokens", "intermediate_state_indices"):
        check_index_dtype(name, getattr(t, name))
    if not pool.dtype.is_floating_point:
        raise TypeError(f"initial_state: got dtype {pool.dtype}, wanted float32 or bfloat16")
    if states.dtype != pool.dtype:
        raise TypeError(f"intermediate_states: got dtype {states.dtype}, wanted initial_state's {pool.dtype}")
    if states.shape[2:] != pool.shape[1:]:
        wanted = f"[slots, tokens, *S] with states {list(pool.shape[1:])} as in initial_state"
        raise wrong("intermediate_states", f"shape {shape_of(states)}", wanted)
    for name, x in t.present().items():
        if x.device != pool.device:
            raise wrong(name, f"device {x.device}", f"initial_state's device {pool.device}")
        if x.requires_grad and torch.is_grad_enabled():
            raise wrong(name, "a tensor that requires grad", "torch.no_grad() (the pool is updated in place)")
    check_pitch("initial_state", pool, dense=3)
    check_pitch("intermediate_states", states, dense=3)
    check_overlap("initial_state", pool, {name: x for name, x in t.present().items() if x is not pool})
    problem = CommitSpec(
        N=N,
        tokens=states.shape[1],
        size=pool.shape[1:].numel(),
        slots=pool.shape[0],
        rows=states.shape[0],
        dtype=pool.dtype,
        lowest_index=1 if null_index == "non_positive" else 0,
    )
    return problem, t
