"""What each public operation asks of its arguments: a table of tensors, checks of options, and rules."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Tensor

from ..parallel.border import BORDER
from ..parallel.context import context_in_call, has_context
from .arguments import (
    BOOL,
    FLOAT32,
    INDEX,
    INPUT,
    INT32,
    Argument,
    Operation,
    Rule,
    Sizes,
    flag_or_none,
    float32_or_first,
    integer,
    like_first,
    number_or_none,
    one_of,
    only_wide,
    shape_of,
    state,
    wide_or_first,
)
from .errors import mistyped, wrong
from .problem import (
    DECODE_TOKENS,
    SETTINGS,
    GateName,
    NormGate,
    NullIndex,
    Precision,
    PrefillGate,
    Problem,
    Tensors,
    has_records,
    problem_of,
    record_width,
)
from .split import AUTO, known_lengths

GATES: tuple[str, ...] = get_args(GateName)
NULL_INDICES: tuple[str, ...] = get_args(NullIndex)
PRECISIONS: tuple[str, ...] = get_args(Precision)
PREFILL_GATES: tuple[str, ...] = get_args(PrefillGate)
NORM_GATES: tuple[str, ...] = get_args(NormGate)
PARAMETRIC_GATES = ("softplus", "lower_bound")
"""Those that read `A_log` and `dt_bias`."""

HEAD_DIMS = (32, 64, 128, 256)
DECODE_HEAD_DIMS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CHUNK_SIZES = (32, 64)
PREFILL_SIZES = ((64, 64, 32), (64, 64, 64), (128, 128, 32), (128, 128, 64))
"""`(K, V, C)` of `kda_prefill`."""

MIN_TAPS, MAX_TAPS = 2, 4
"""Of `short_convolution`."""

FUSED_HEAD_DIMS = (32, 64, 128)
"""K and V of `fused_kda_decode`: a CTA holds a head's whole state in registers."""

MAX_NORM = 8192
"""Channels of a row that `gated_rms_norm` takes: a CTA holds whole rows."""

EPSILONS = torch.finfo(torch.float32)
"""Of norms: kernels add them in float32."""

LOWEST_BOUND = -5.0
"""Below -5 a 16-token block may decay by more than exp(80), which float32 cannot hold as a quotient."""

Made = tuple[Problem, Tensors]

MAX_SEGMENTS = 1024
"""Of a sequence."""

MAX_CHECKPOINTS = 8
"""Checkpoints a sequence may have in a pool: each adds a chunk slot to every sequence."""

EVERY = 64
"""Regular checkpoints lie a multiple of so many tokens apart: a boundary of chunks of either size."""

MOST_TOKENS_APART = 2**30
"""Tokens from one to the next at the most."""


# ---- options ------------------------------------------------------------------------------------------------------------


def bound(name: str, value: Any) -> None:
    number_or_none(name, value)
    if value is not None and not LOWEST_BOUND <= value < 0:
        raise wrong(name, value, "a float in [-5, 0)")


def segments(name: str, value: Any) -> None:
    wanted = "'auto', False or a number of segments, at least 1"
    if value is False or (isinstance(value, str) and value == "auto"):
        return
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise mistyped(name, value, wanted)
    if isinstance(value, str) or not 1 <= value <= MAX_SEGMENTS:
        raise wrong(name, repr(value), f"{wanted} and at most {MAX_SEGMENTS}")


def spec_tokens(name: str, value: Any) -> None:
    most = DECODE_TOKENS - 1
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise mistyped(name, value, "an int or None")
    if not 1 <= value <= most:
        raise wrong(name, value, f"1 to {most}, or None without speculative tokens")


def tokens_apart(name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise mistyped(name, value, "an int or None")
    if not EVERY <= value <= MOST_TOKENS_APART or value % EVERY != 0:
        raise wrong(name, value, f"a multiple of {EVERY} up to 2^30, or None")


def checked_in_call(name: str, value: Any) -> None:
    """`context_in_call` does."""


OPTIONS = {
    "scale": number_or_none,
    "lower_bound": bound,
    "gate": one_of(*GATES, None),
    "chunk_size": integer(*CHUNK_SIZES),
    "null_index": one_of(*NULL_INDICES),
    "split": segments,
    "num_spec_tokens": spec_tokens,
    "checkpoint_every": tokens_apart,
    "precision": one_of(*PRECISIONS),
}
"""All others are flags."""


# ---- rules --------------------------------------------------------------------------------------------------------------


def needs(role: str, other: str) -> Rule:
    return Rule(
        role,
        lambda c: getattr(c, role) is not None and getattr(c, other) is None,
        f"a tensor without {{{other}}}",
        f"{{{other}}} too",
    )


def excludes(role: str, other: str) -> Rule:
    return Rule(
        role,
        lambda c: getattr(c, role) is not None and getattr(c, other) is not None,
        f"a tensor with {{{other}}}",
        "one of the two",
    )


def together(role: str, other: str) -> Rule:
    """`role` where `other` is given."""
    return Rule(
        role,
        lambda c: getattr(c, role) is None and getattr(c, other) is not None,
        f"None with {{{other}}}",
        "both or neither",
    )


def without(role: str, others: tuple[str, ...], got: str, wanted: str) -> Rule:
    """`role` makes no sense without any of the others."""
    return Rule(
        role,
        lambda c: getattr(c, role) is not None and all(getattr(c, other) is None for other in others),
        got,
        wanted,
    )


def unnamed(option: str) -> Rule:
    return Rule(
        option,
        lambda c: c.state_pool is not None and getattr(c, option) is None,
        "nothing with state_pool",
        f"{option}=True or {option}=False: calls that share a pool must agree, and recurrent_kda's default is True",
    )


def gate_of(c: Any) -> str:
    if c.gate is not None:
        return c.gate
    if not vars(c).get("use_gate_in_kernel", True):  # `fused_kda_decode` always has one
        return "none"
    return "softplus" if c.lower_bound is None else "lower_bound"


def parameter(role: str, ways: str = "use_gate_in_kernel=True, gate='softplus' or gate='lower_bound'") -> Rule:
    """An option of some gates alone: with others it would be ignored."""
    gates = ("lower_bound",) if role == "lower_bound" else PARAMETRIC_GATES
    return Rule(
        role,
        lambda c: getattr(c, role) is not None and gate_of(c) not in gates,
        "a bound with a gate that does not read it"
        if role == "lower_bound"
        else "a tensor with a gate that does not read it",
        f"None, or a gate that does ({ways})",
    )


GATE_NEEDS_BOUND = Rule(
    "lower_bound",
    lambda c: c.gate == "lower_bound" and c.lower_bound is None,
    "None",
    "a float in [-5, 0) (the lower_bound gate needs it)",
)

GATE_RULES = (
    Rule(
        "allow_neg_eigval",
        lambda c: c.allow_neg_eigval and not c.use_beta_sigmoid_in_kernel,
        "True with {use_beta_sigmoid_in_kernel}=False",
        "beta logits ({use_beta_sigmoid_in_kernel}=True); pass beta in [0, 2) yourself otherwise",
    ),
    Rule(
        "gate",
        lambda c: c.gate in ("none", "logsigmoid") and c.use_gate_in_kernel,
        "a gate without parameters with use_gate_in_kernel=True",
        "one of the two",
    ),
    GATE_NEEDS_BOUND,
    parameter("A_log"),
    parameter("dt_bias"),
    parameter("lower_bound", "use_gate_in_kernel=True or gate='lower_bound'"),
)

SLOT_RULES = (
    *(needs(role, "state_pool") for role in ("state_indices", "has_initial_state")),
    excludes("state_pool", "initial_state"),
    Rule(
        "output_final_state",
        lambda c: c.state_pool is not None and c.output_final_state,
        "True with state_pool",
        "False (the pool receives the final states)",
    ),
)

FINAL_STATE_RULE = Rule(
    "final_state",
    lambda c: c.state_pool is not None and c.final_state is not None,
    "a tensor with state_pool",
    "None (the pool receives the final states)",
)

POOL_RULES = (
    *SLOT_RULES,
    FINAL_STATE_RULE,
    unnamed("state_v_first"),
    unnamed("use_qk_l2norm_in_kernel"),
)

BUFFER_RULES = (
    together("checkpoint_offsets", "checkpoint_indices"),
    together("checkpoint_indices", "checkpoint_offsets"),
    without(
        "checkpoint_states",
        ("checkpoint_offsets", "checkpoint_every"),
        "a tensor without checkpoint_offsets and checkpoint_every",
        "one of these",
    ),
    without("checkpoint_every", ("checkpoint_states",), "a number without checkpoint_states", "checkpoint_states too"),
    Rule(
        "checkpoint_every",
        lambda c: c.checkpoint_every is not None and c.checkpoint_offsets is not None,
        "a number with checkpoint_offsets",
        "one of the two",
    ),
)

CHECKPOINT_RULES = (
    *(
        without(
            role,
            ("state_pool", "checkpoint_states"),
            "a tensor without state_pool and checkpoint_states",
            "one of these, which receives the checkpoints",
        )
        for role in ("checkpoint_offsets", "checkpoint_indices")
    ),
    *BUFFER_RULES,
    needs("cu_seqlens_cpu", "cu_seqlens"),
)


def alone(option: str, given: Callable[[Any], bool], got: str) -> Rule:
    """`option` is for calls on one rank."""
    return Rule(
        option, lambda c: has_context(c) and given(getattr(c, option)), f"{got} with cp_context or group", "none"
    )


CONTEXT_RULES = (
    *(
        alone(role, lambda x: x is not None, "a tensor")
        for role in ("cu_seqlens_cpu", "checkpoint_offsets", "checkpoint_states")
    ),
)


# ---- whole sequences: chunk_kda, fused_recurrent_kda ---------------------------------------------------------------------


def needs_A_log(c: Any) -> str | None:
    return "the softplus gate needs it" if gate_of(c) == "softplus" else None


TOKENS = (
    Argument("q", "B T H K", INPUT, required=""),
    Argument("k", "B T H K", like_first, required=""),
    Argument("v", "B T HV V", like_first, required=""),
    Argument("g", "B T HV K", float32_or_first, required=""),
    Argument("beta", "B T HV", float32_or_first, required=""),
    Argument("cu_seqlens", "N1", INDEX),
)
"""Of the forward operations."""

PARAMETERS = (
    Argument("A_log", ("HV", "1 1 HV 1"), float32_or_first, required=needs_A_log),
    Argument("dt_bias", ("HV*K", "HV K"), float32_or_first),
)


def needs_indices(c: Any) -> str | None:
    return None if c.state_pool is None else "state_pool needs it"


SEQUENCES = (
    *TOKENS,
    *PARAMETERS,
    Argument("initial_state", "N HV STATE", state),
    Argument("state_pool", "slots HV STATE", state, dense=3, written=True),
    Argument("state_indices", "N", INDEX, required=needs_indices),
    Argument("has_initial_state", "N", BOOL),
)
OUT = Argument("out", "B T HV V", wide_or_first, dense=1, written=True)
FINAL = Argument("final_state", "N HV STATE", state, dense=4, written=True)
BORDERS = Argument("border", str(BORDER), INT32)
MARKS = (
    Argument("checkpoint_offsets", ("N", "N M"), INDEX),
    Argument("checkpoint_indices", lambda c: "N" if c.checkpoint_offsets.dim() == 1 else "N M", INDEX),
)
CHECKPOINTS = (
    *MARKS,
    Argument("checkpoint_states", "rows HV STATE", state, dense=3, written=True),
)


def check_head_dims(sizes: Sizes, head_dims: tuple[int, ...], **names: str) -> None:
    """`names`: the argument that has K, and the one that has V."""
    for symbol, name in names.items():
        if sizes.get(symbol, head_dims[0]) not in head_dims:
            raise wrong(name, f"{symbol} = {sizes[symbol]}", f"{symbol} in {head_dims}")


def check_heads(c: Any, sizes: Sizes, head_dims: tuple[int, ...] = HEAD_DIMS, pool: str | None = None) -> None:
    """`pool`: the argument that tells K and V, where q, k and v are views of rows."""
    H, HV = sizes.get("H", 1), sizes.get("HV", sizes.get("H", 1))
    if H == 0:
        raise wrong("q", shape_of(c.q), "at least one head")
    if HV == 0 or HV % H != 0:
        raise wrong("v", f"{HV} value heads", f"a positive multiple of the {H} query/key heads")
    check_head_dims(sizes, head_dims, K=pool or "q", V=pool or "v")
    if c.cu_seqlens is not None and sizes["B"] != 1:
        offsets = "cu_seqlens" if getattr(c, "cp_context", None) is None else "cp_context"
        raise wrong("q", f"batch size {sizes['B']}", f"batch size 1 with {offsets} (pack the sequences along T)")


def over_ranks(c: Any, sizes: Sizes) -> Any:
    """With the context of a call that names one or a group, and the rank's offsets."""
    if has_context(c) and c.q is not None:
        c.cp_context, c.cu_seqlens, c.border = context_in_call(c.cp_context, c.group, c.cu_seqlens, c.q)
    return c


def check_chunks(c: Any, sizes: Sizes) -> None:
    check_heads(c, sizes)
    if c.cp_context is not None:
        c.cp_context.check_tokens(c.q, "q")
    check_checkpoints(c, sizes)


def check_checkpoints(c: Any, sizes: Sizes) -> None:
    M, buffer = sizes.get("M", 1), c.checkpoint_states is not None
    if M == 0 or (M > MAX_CHECKPOINTS and not buffer):
        wanted = "at least 1" if buffer else f"1 to {MAX_CHECKPOINTS}"
        raise wrong("checkpoint_offsets", f"{M} checkpoints", f"{wanted} a sequence")
    # of packed sequences the rows are device data, and those past the end are not stored
    if c.checkpoint_every is not None and c.cu_seqlens is None and "rows" in sizes:
        least = sizes["B"] * -(-sizes["T"] // c.checkpoint_every)
        if sizes["rows"] < least:
            wanted = f"at least B * ceil(T / checkpoint_every) = {least}"
            raise wrong("checkpoint_states", f"{sizes['rows']} rows", wanted)


def kda_problem(c: Any, t: Tensors, **others: Any) -> Made:
    """Options that have the name of a setting are that setting; the others are worked out here."""
    options = vars(c)
    gate = gate_of(c)
    bounds = known_lengths(options.get("cu_seqlens_cpu"), options.get("chunk_size", 64), t.q)
    if bounds is None:
        wanted = f"offsets from 0 that never fall, at most T = {t.q.shape[1]}"
        raise wrong("cu_seqlens_cpu", f"{c.cu_seqlens_cpu.tolist()[:8]}", wanted)
    split = options.get("split", "auto")
    logits = "double_logit" if c.allow_neg_eigval else "logit"
    context = options.get("cp_context")
    ranks: dict[str, Any] = {}
    if context is not None and context.ranks > 1:
        ranks = dict(process_group=context.name, rank=context.rank, ranks=context.ranks)
        ranks |= dict(exchange=context.exchange, relay=context.relay)
    worked_out = dict(
        scale=t.q.shape[-1] ** -0.5 if c.scale is None else float(c.scale),
        gate=gate,
        lower_bound=float(c.lower_bound) if gate == "lower_bound" else None,
        # the softplus gate has no bound that a promise could mean
        safe_gate=gate == "lower_bound" or (options.get("safe_gate", False) and gate != "softplus"),
        beta_kind=logits if c.use_beta_sigmoid_in_kernel else "value",
        l2norm=bool(c.use_qk_l2norm_in_kernel),
        state_v_first=bool(c.state_v_first),
        output_final_state=options.get("output_final_state", False) or options.get("final_state") is not None,
        checkpoint_every=options.get("checkpoint_every") or 0,
        split=AUTO if split == "auto" else 1 if split is False else split,
        longest_chunks=bounds[0],
        all_chunks=bounds[1],
    )
    plain = {f.name: options[f.name] for f in SETTINGS if f.name in options}
    return problem_of(t, **plain | worked_out | ranks | others), t


CONTEXT = dict.fromkeys(("cp_context", "group"), checked_in_call)
UNNAMED = {"state_v_first": flag_or_none, "use_qk_l2norm_in_kernel": flag_or_none}

CHUNK = Operation(
    "chunk",
    (*SEQUENCES, *CHECKPOINTS, Argument("cu_seqlens_cpu", "N1", INDEX, on_host=True), BORDERS, OUT, FINAL),
    OPTIONS | UNNAMED | CONTEXT,
    (*GATE_RULES, *POOL_RULES, *CHECKPOINT_RULES, *CONTEXT_RULES),
    functools.partial(kda_problem, operation="chunk"),
    check_chunks,
    canonical=over_ranks,
)
RECURRENT = Operation(
    "recurrent",
    (*SEQUENCES, OUT, FINAL),
    OPTIONS | UNNAMED,
    (*GATE_RULES, *POOL_RULES),
    functools.partial(kda_problem, operation="recurrent"),
    check_heads,
)


# ---- recurrent_kda ------------------------------------------------------------------------------------------------------


def tokens_of(c: Any) -> int:
    """Tokens of every sequence in a call with speculative ones; 1 without."""
    return 1 + (c.num_spec_tokens or 0)


def no_state(c: Any) -> bool:
    return c.state_pool is None and c.source_pool is None


def without_state(role: str) -> Rule:
    return Rule(
        role,
        lambda c: getattr(c, role) is not None and no_state(c),
        "a tensor without {state_pool}",
        "{state_pool} too",
    )


DECODE_RULES = (
    *(excludes("mixed_qkv", name) for name in ("q", "k", "v")),
    Rule(
        "state_pool",
        lambda c: c.mixed_qkv is not None and no_state(c),
        "None with mixed_qkv",
        "a tensor (its shape tells the heads)",
    ),
    together("source_pool", "source_indices"),
    together("source_indices", "source_pool"),
    Rule(
        "state_pool",
        lambda c: c.source_pool is not None and c.update_state and c.state_pool is None,
        "None with {source_pool}",
        "the pool to write, or update_state=False",
    ),
    Rule(
        "state_pool",
        lambda c: c.source_pool is not None and not c.update_state and c.state_pool is not None,
        "a tensor with {source_pool} and update_state=False",
        "None (no pool is written)",
    ),
    excludes("num_accepted_tokens", "source_pool"),
    needs("state_indices", "state_pool"),
    *(without_state(role) for role in ("num_accepted_tokens", "intermediate_states")),
    Rule(
        "num_spec_tokens",
        lambda c: c.num_spec_tokens is not None and no_state(c),
        "a number without {state_pool}",
        "{state_pool} too",
    ),
    Rule(
        "update_state", lambda c: not c.update_state and no_state(c), "False without {state_pool}", "{state_pool} too"
    ),
    Rule(
        "output_final_state",
        lambda c: c.output_final_state and not c.update_state,
        "True with update_state=False",
        "one of the two",
    ),
    *(needs(role, "num_spec_tokens") for role in ("num_accepted_tokens", "intermediate_states")),
    Rule(
        "num_accepted_tokens",
        lambda c: c.num_accepted_tokens is not None and not c.update_state,
        "a tensor with update_state=False",
        "None (commit takes the counts)",
    ),
    Rule(
        "intermediate_states",
        lambda c: c.intermediate_states is not None and c.update_state,
        "a tensor with update_state=True",
        "update_state=False",
    ),
    needs("intermediate_indices", "intermediate_states"),
)


DECODE_NAMES = {
    "state_pool": "initial_state",
    "state_indices": "ssm_state_indices",
    "source_pool": "initial_state_source",
    "source_indices": "initial_state_indices",
    "intermediate_indices": "intermediate_state_indices",
    "use_beta_sigmoid_in_kernel": "beta_is_logit",
    "out": "output",
}
"""FlashInfer's names, where they differ from the roles."""


def unmixed(c: Any, sizes: Sizes) -> Any:
    """With q, k and v as views of the rows of `mixed_qkv`, and g and beta in the same layout."""
    sizes["S1"] = tokens_of(c)
    if c.mixed_qkv is None:
        return c
    role = pool_of(c)
    return split_rows(c, getattr(c, role), {"state_pool": DECODE_NAMES[role]})


def pool_of(c: Any) -> str:
    """The role of what a step reads its states from."""
    return "source_pool" if c.state_pool is None else "state_pool"


def split_rows(c: Any, pool: Tensor, called: Mapping[str, str]) -> Any:
    """The same, with heads as the `pool` has them. `called`: the caller's names of roles, where they differ."""
    mixed, tokens = c.mixed_qkv, tokens_of(c)
    name, row_name = called["state_pool"], called.get("mixed_qkv", "mixed_qkv")
    for x, role, rank in ((mixed, row_name, 2), (pool, name, 4)):
        if x.dim() != rank:
            raise wrong(role, shape_of(x), f"a tensor of rank {rank}")
    HV, V, K = pool.shape[1:] if c.state_v_first else (pool.shape[1], pool.shape[3], pool.shape[2])
    rows, width = mixed.shape
    heads = (width - HV * V) // (2 * K) if K > 0 else 0
    if heads <= 0 or 2 * heads * K + HV * V != width:
        wanted = f"[N, 2 * H * K + HV * V] with K = {K} and HV * V = {HV * V}, as {name} has them"
        raise wrong(row_name, shape_of(mixed), wanted)
    if HV == 0 or HV % heads != 0:
        raise wrong(row_name, f"{HV} value heads", f"a positive multiple of the {heads} query/key heads")
    if c.cu_seqlens is None and rows % tokens != 0:
        raise wrong(row_name, f"{rows} rows", f"a multiple of 1 + num_spec_tokens = {tokens}")
    leading = (rows // tokens, tokens) if c.cu_seqlens is None else (1, rows)
    q, k, v = mixed.split([heads * K, heads * K, HV * V], dim=1)
    flat = {"g": ("[N, HV * K]", (HV, K)), "beta": ("[N, HV]", (HV,)), "z": ("[N, HV * V]", (HV, V))}
    views: dict[str, Tensor] = {}
    for role, (symbols, inner) in flat.items():
        x, flattened = getattr(c, role), (rows, math.prod(inner))
        if x is None:
            continue
        # a comparison of tuples is one of symbols to torch.compile, also where their numbers are known
        known = (flattened, (1, *flattened), (rows, *inner), (1, rows, *inner))
        if any(len(shape) == x.dim() and all(map(operator.eq, shape, x.shape)) for shape in known):
            views[role] = x.view(*leading, *inner)
        elif x.dim() != len(leading) + len(inner):
            raise wrong(called.get(role, role), shape_of(x), f"{symbols} = {list(flattened)}")
    heads_of = {"q": (heads, K), "k": (heads, K), "v": (HV, V)}
    views |= {role: x.view(*leading, *heads_of[role]) for role, x in (("q", q), ("k", k), ("v", v))}
    for role, x in views.items():
        setattr(c, role, x)
    return c


def check_decode(c: Any, sizes: Sizes) -> None:
    if "T" not in sizes:  # of mixed_qkv, before its views
        return
    check_heads(c, sizes, DECODE_HEAD_DIMS, None if c.mixed_qkv is None else DECODE_NAMES[pool_of(c)])
    bind_record(sizes)
    T, tokens = sizes["T"], sizes["S1"]
    # of packed sequences the lengths are device data: nothing is stored of one with more tokens
    if c.cu_seqlens is None and tokens not in (1, T):
        raise wrong("q", f"{T} tokens a sequence", f"1 + num_spec_tokens = {tokens}")
    if c.cu_seqlens is None and T > DECODE_TOKENS:
        wanted = f"at most {DECODE_TOKENS} (fused_recurrent_kda and chunk_kda take longer sequences)"
        raise wrong("q", f"{T} tokens a sequence", wanted)
    by_index = (c.intermediate_indices, c.state_indices, c.source_indices)
    if c.intermediate_states is not None and all(x is None for x in by_index):
        rows, sequences = c.intermediate_states.shape[0], c.state_pool.shape[0]
        if rows < sequences:
            raise wrong("intermediate_states", f"{rows} rows", f"one for each of the {sequences} sequences")


def bind_record(sizes: Sizes) -> None:
    if "K" in sizes and "V" in sizes:
        sizes["RECORD"] = record_width(sizes["K"], sizes["V"])


def same_as_pool(first: torch.dtype, c: Any) -> tuple[tuple[torch.dtype, ...], str]:
    """`commit` copies them there, or replays records of float32 (float64 for float64 states)."""
    role = pool_of(c)
    dtype = getattr(c, role).dtype
    if has_records(c):
        return only_wide(dtype, c)
    return (dtype,), f"{{{role}}}'s dtype {dtype}"


def decode_problem(c: Any, t: Tensors) -> Made:
    final = c.output_final_state and t.state_pool is None
    return kda_problem(c, t, operation="decode", spec_tokens=tokens_of(c) - 1, output_final_state=final)


def target_shape(c: Any) -> str:
    """A slot for each state that is stored."""
    return "N S1" if c.num_spec_tokens is not None and c.update_state else "N"


def needs_targets(c: Any) -> str | None:
    return "num_spec_tokens needs it" if target_shape(c) == "N S1" and c.state_pool is not None else None


DECODE = Operation(
    "decode",
    (
        # first: q, k and v are views of it
        Argument("mixed_qkv", "rows_of_tokens width", INPUT),
        *TOKENS,
        *PARAMETERS,
        Argument(
            "state_pool",
            lambda c: "slots HV STATE" if c.state_indices is not None or needs_targets(c) else "N HV STATE",
            state,
            dense=3,
            written=lambda c: c.update_state,
            shares=("source_pool",),
        ),
        Argument("state_indices", target_shape, INDEX, required=needs_targets),
        Argument("num_accepted_tokens", "N", INDEX),
        Argument("source_pool", "sources HV STATE", state, dense=3),
        Argument("source_indices", "N", INDEX),
        Argument("intermediate_states", ("rows S1 HV STATE", "rows S1 HV RECORD"), same_as_pool, dense=3, written=True),
        Argument("intermediate_indices", "N", INDEX),
        OUT,
    ),
    OPTIONS,
    (*GATE_RULES, *DECODE_RULES),
    decode_problem,
    check_decode,
    canonical=unmixed,
    called=DECODE_NAMES,
    no_gradients="chunk_kda and fused_recurrent_kda have gradients",
)


# ---- commit -------------------------------------------------------------------------------------------------------------


def any_state(first: torch.dtype, c: Any) -> tuple[tuple[torch.dtype, ...], str]:
    return (torch.float32, torch.bfloat16, torch.float64), "float32 or bfloat16"


def check_commit(c: Any, sizes: Sizes) -> None:
    if math.prod(c.state_pool.shape[1:]) == 0:
        raise wrong("initial_state", shape_of(c.state_pool), "states with elements")
    bind_record(sizes)
    if has_records(c):  # copies of states may have any size
        check_head_dims(sizes, DECODE_HEAD_DIMS, K="initial_state", V="initial_state")
    if not 1 <= sizes.get("tokens", 1) <= DECODE_TOKENS:
        raise wrong(
            "intermediate_states", shape_of(c.intermediate_states), f"states of 1 to {DECODE_TOKENS} tokens a row"
        )


def commit_problem(c: Any, t: Tensors) -> Made:
    settings = dict(
        null_index=c.null_index, state_v_first=c.state_v_first, spec_tokens=c.intermediate_states.shape[1] - 1
    )
    return problem_of(t, operation="commit", scale=1.0, **settings), t


COMMIT = Operation(
    "commit",
    (
        Argument("state_pool", "slots HV STATE", any_state, required="", dense=3, written=True),
        Argument(
            "intermediate_states",
            ("rows tokens HV STATE", "rows tokens HV RECORD"),
            same_as_pool,
            required="",
            dense=3,
            written=has_records,  # which a commit empties
        ),
        Argument("state_indices", "N", INDEX, required=""),
        Argument("num_accepted_tokens", "N", INDEX, required=""),
        Argument("intermediate_indices", "N", INDEX),
    ),
    OPTIONS,
    (),
    commit_problem,
    check_commit,
    called=DECODE.called,
    no_gradients="the pool is updated in place",
)


# ---- kda_prefill ----------------------------------------------------------------------------------------------------------


def check_prefill(c: Any, sizes: Sizes) -> None:
    K, V, C = sizes["K"], sizes.get("V", sizes["K"]), c.chunk_size
    if sizes["H"] == 0:
        raise wrong("q", shape_of(c.q), "at least one head")
    if "V" in sizes and (K, V, C) not in PREFILL_SIZES:
        named = "q" if K not in (64, 128) else "v" if V != K else "chunk_size"
        raise wrong(named, f"(K, V, C) = {(K, V, C)}", f"one of {', '.join(map(str, PREFILL_SIZES))}")


def prefill_problem(c: Any, t: Tensors) -> Made:
    """Every head of every batch row is a batch row with one head: its chunks then lie one after another, as in
    `w [B, H, Nc, C, K]`."""
    scale = t.q.shape[3] ** -0.5 if c.scale is None else float(c.scale)
    settings = dict(scale=scale, gate=c.gate, chunk_size=c.chunk_size, precision=c.precision, heads=t.q.shape[1])
    t = by_head(t)
    return problem_of(t, operation="prefill", state_v_first=True, split=1, **settings), t


def by_head(t: Tensors) -> Tensors:
    """`[B, H, T, ...]` as `[B * H, T, 1, ...]`."""
    rows = (x.reshape(x.shape[0] * x.shape[1], x.shape[2], 1, *x.shape[3:]) for x in (t.q, t.k, t.v, t.g, t.beta))
    return Tensors(*rows)


PREFILL = Operation(
    "prefill",
    (
        Argument("q", "B H T K", FLOAT32, required="", dense=4),
        Argument("k", "B H T K", FLOAT32, required="", dense=4),
        Argument("v", "B H T V", FLOAT32, required="", dense=4),
        Argument("g", "B H T K", FLOAT32, required="", dense=4),
        Argument("beta", "B H T", FLOAT32, required="", dense=3),
    ),
    OPTIONS | {"chunk_size": integer(), "gate": one_of(*PREFILL_GATES)},
    (),
    prefill_problem,
    check_prefill,
    no_gradients="kda_prefill has no backward",
)


# ---- chunk_bwd_wy_dqkg ----------------------------------------------------------------------------------------------------


def wy_problem(c: Any, t: Tensors) -> Made:
    scale = t.q.shape[3] ** -0.5 if c.scale is None else float(c.scale)
    gate = "cumulative_log2" if c.use_exp2 else "cumulative"
    settings = dict(scale=scale, gate=gate, chunk_size=c.chunk_size, state_v_first=c.state_v_first)
    return problem_of(t, operation="wy", **settings), t


def with_chunk_size(c: Any, sizes: Sizes) -> Any:
    sizes["C"] = c.chunk_size
    return c


def check_wy(c: Any, sizes: Sizes) -> None:
    check_heads(c, sizes)
    if c.cu_seqlens is None and sizes.get("NT", -(-sizes["T"] // c.chunk_size)) != -(-sizes["T"] // c.chunk_size):
        raise wrong("h", shape_of(c.h), f"NT = ceil(T / chunk_size) = {-(-sizes['T'] // c.chunk_size)}")


WY = Operation(
    "wy",
    (
        Argument("q", "B T H K", INPUT, required=""),
        Argument("k", "B T H K", like_first, required=""),
        Argument("v", "B T HV V", like_first, required=""),
        Argument("v_new", "B T HV V", like_first, required=""),
        Argument("g", "B T HV K", only_wide, required=""),
        Argument("beta", "B T HV", wide_or_first, required=""),
        Argument("A", "B T HV C", wide_or_first, required=""),
        Argument("h", "B NT HV STATE", wide_or_first, required=""),
        Argument("dh", "B NT HV STATE", wide_or_first, required=""),
        Argument("do", "B T HV V", like_first, required=""),
        Argument("dv", "B T HV V", like_first, required=""),
        Argument("cu_seqlens", "N1", INDEX),
    ),
    OPTIONS,
    (),
    wy_problem,
    check_wy,
    canonical=with_chunk_size,
    no_gradients="this is a backward pass: it has none",
)


# ---- the layer around attention: gated_rms_norm, short_convolution ---------------------------------------------------------


def epsilon(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise mistyped(name, value, "a float")
    if not EPSILONS.tiny <= value <= EPSILONS.max:
        raise wrong(name, value, f"a float from {EPSILONS.tiny:.3g} to {EPSILONS.max:.3g}")


def rows_shape(c: Any) -> str:
    """Of any rank: rows of `V` channels."""
    return " ".join([*(f"D{i}" for i in range(c.x.dim() - 1)), "V"])


def check_norm(c: Any, sizes: Sizes) -> None:
    if not 1 <= sizes["V"] <= MAX_NORM:
        raise wrong("x", shape_of(c.x), f"a last dimension of 1 to {MAX_NORM}")


def like_or_below_float32(first: torch.dtype, call: Any) -> tuple[tuple[torch.dtype, ...], str]:
    if first != torch.float32:
        return like_first(first, call)
    return (first, torch.bfloat16, torch.float16), "float32, bfloat16 or float16"


def norm_problem(c: Any, t: Tensors) -> Made:
    return problem_of(t, operation="gated_rms_norm", activation=c.activation, eps=float(c.eps)), t


GATED_RMS_NORM = Operation(
    "gated_rms_norm",
    (
        Argument("x", rows_shape, INPUT, required=""),
        Argument("z", rows_shape, like_or_below_float32, required=""),
        Argument("weight", "V", wide_or_first, required=""),
    ),
    {"eps": epsilon, "activation": one_of(*NORM_GATES)},
    (),
    norm_problem,
    check_norm,
)


def check_convolution(c: Any, sizes: Sizes) -> None:
    if sizes["D"] == 0:
        raise wrong("x", shape_of(c.x), "at least one channel")
    if c.cu_seqlens is not None and sizes["B"] != 1:
        raise wrong("x", f"batch size {sizes['B']}", "batch size 1 with cu_seqlens (pack the sequences along T)")
    taps = sizes.get("W", MAX_TAPS)
    if not MIN_TAPS <= taps <= MAX_TAPS:
        raise wrong("weight", shape_of(c.weight), f"{MIN_TAPS} to {MAX_TAPS} taps")
    if "L" in sizes and sizes["L"] not in (taps - 1, taps):
        roles = ("initial_state", "state_pool", "checkpoint_states", "final_state")
        role = next(x for x in roles if getattr(c, x) is not None)
        raise wrong(role, shape_of(getattr(c, role)), f"the last W - 1 = {taps - 1} or W = {taps} inputs of a channel")
    check_checkpoints(c, sizes)


def convolution_problem(c: Any, t: Tensors) -> Made:
    return problem_of(
        t,
        operation="short_convolution",
        activation="none" if c.activation is None else c.activation,
        output_final_state=c.output_final_state or c.final_state is not None,
        checkpoint_every=c.checkpoint_every or 0,
        null_index=c.null_index,
    ), t


SHORT_CONVOLUTION = Operation(
    "short_convolution",
    (
        Argument("x", "B T D", INPUT, required=""),
        Argument("cu_seqlens", "N1", INDEX),
        Argument("weight", ("D W", "D 1 W"), wide_or_first, required=""),
        Argument("bias", "D", wide_or_first),
        Argument("initial_state", "N D L", wide_or_first),
        Argument("state_pool", "slots D L", wide_or_first, written=True),
        Argument("state_indices", "N", INDEX, required=needs_indices),
        Argument("has_initial_state", "N", BOOL),
        *MARKS,
        Argument("checkpoint_states", "rows D L", wide_or_first, written=True),
        Argument("out", "B T D", like_first, dense=1, written=True),
        Argument("final_state", "N D L", wide_or_first, written=True),
    ),
    {"activation": one_of("silu", None), "null_index": one_of(*NULL_INDICES), "checkpoint_every": tokens_apart},
    (
        *SLOT_RULES,
        FINAL_STATE_RULE,
        *(needs(role, "checkpoint_states") for role in ("checkpoint_offsets", "checkpoint_indices")),
        *BUFFER_RULES,
    ),
    convolution_problem,
    check_convolution,
)


# ---- the layer's step: fused_kda_decode --------------------------------------------------------------------------------------

FUSED_NAMES = {
    "mixed_qkv": "x",
    "state_pool": "state",
    "g": "raw_g",
    "beta": "raw_beta",
    "z": "output_gate",
    "eps": "norm_eps",
    "out": "output",
    "use_beta_sigmoid_in_kernel": "beta_is_logit",
    "intermediate_indices": "intermediate_state_indices",
}
"""FlashInfer's and vLLM's names, where they have one."""

FUSED_PARAMETERS = ("A_log", "dt_bias")


def fused_rows(c: Any, sizes: Sizes) -> Any:
    """With q, k and v as views of the rows, and what there is of each token in the same layout."""
    sizes["S1"] = tokens_of(c)
    for role in ("mixed_qkv", "state_pool"):
        if getattr(c, role) is None:
            raise TypeError(f"{FUSED_NAMES[role]}: got NoneType, wanted a torch.Tensor")
    c = split_rows(c, c.state_pool, FUSED_NAMES)
    sizes["D"] = sizes["width"] = c.mixed_qkv.shape[1]
    equal = c.q.shape[2:].numel() == c.v.shape[2:].numel()
    sizes["PART"] = sizes["D"] // 3 if equal else 0
    return c


def check_fused(c: Any, sizes: Sizes) -> None:
    if "T" not in sizes:  # of the rows, before their views
        return
    check_heads(c, sizes, FUSED_HEAD_DIMS, FUSED_NAMES["state_pool"])
    bind_record(sizes)
    taps, spec = sizes.get("W", MAX_TAPS), sizes["S1"] - 1
    if not MIN_TAPS <= taps <= MAX_TAPS:
        raise wrong("weight", shape_of(c.weight), f"{MIN_TAPS} to {MAX_TAPS} taps")
    if sizes.get("L", MAX_TAPS + spec) < taps - 1 + spec:
        wanted = f"at least W - 1 + num_spec_tokens = {taps - 1 + spec} inputs of a channel"
        raise wrong("conv_state", shape_of(c.conv_state), wanted)


def fused_problem(c: Any, t: Tensors) -> Made:
    """The weight becomes `[parts, channels, W]`: one part, or three side by side."""
    parts = t.weight.shape[0] == 3 and t.weight.shape[1] != 1
    weight = t.weight.mT if parts else t.weight.view(1, -1, t.weight.shape[-1])
    replayed = t.intermediate_states is not None
    settings = dict(operation="fused_decode", spec_tokens=tokens_of(c) - 1, update_state=not replayed)
    return kda_problem(c, replace(t, weight=weight), **settings, output_final_state=False, eps=float(c.eps))


def fused_targets(c: Any) -> str:
    """A slot for each state that is stored."""
    return "N S1" if c.num_spec_tokens is not None and c.intermediate_states is None else "N"


FUSED_DECODE = Operation(
    "fused_decode",
    (
        Argument("mixed_qkv", "rows_of_tokens width", INPUT, required=""),
        *TOKENS,
        *PARAMETERS,
        Argument("weight", ("D W", "D 1 W", "3 W PART"), float32_or_first, required=""),
        Argument("bias", "D", float32_or_first),
        Argument("conv_state", "slots D L", float32_or_first, required="", written=True, shares=("state_pool",)),
        Argument(
            "state_pool",
            "slots HV STATE",
            state,
            required="",
            dense=3,
            written=lambda c: c.intermediate_states is None,  # else a commit does
            shares=("conv_state",),
        ),
        Argument("state_indices", fused_targets, INDEX, required=""),
        Argument("num_accepted_tokens", "N", INDEX),
        Argument("z", "B T HV V", like_first, required=""),
        Argument("norm_weight", "V", float32_or_first, required=""),
        Argument("intermediate_states", "rows S1 HV RECORD", same_as_pool, dense=3, written=True),
        Argument("intermediate_indices", "N", INDEX),
        OUT,
    ),
    OPTIONS | {"eps": epsilon},
    (
        *(rule for rule in GATE_RULES if rule.argument not in ("gate", "lower_bound", *FUSED_PARAMETERS)),
        GATE_NEEDS_BOUND,
        *(parameter(role, "gate='softplus' or gate='lower_bound'") for role in FUSED_PARAMETERS),
        parameter("lower_bound", "gate='lower_bound'"),
        *(needs(role, "num_spec_tokens") for role in ("num_accepted_tokens", "intermediate_states")),
        needs("intermediate_indices", "intermediate_states"),
    ),
    fused_problem,
    check_fused,
    canonical=fused_rows,
    called=FUSED_NAMES,
    no_gradients="nn.KimiDeltaAttention has gradients",
)


BY_NAME = {
    operation.name: operation for operation in (CHUNK, RECURRENT, DECODE, COMMIT, SHORT_CONVOLUTION, FUSED_DECODE)
}
"""Those that write tensors of the caller's."""
