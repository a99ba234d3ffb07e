"""The contracts of the public operations: a validator for each, which reads a call's arguments from top to bottom.

Past a validator no code validates again. It sees the caller's names, and returns the record of the call and its tensors by
role.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import torch
from torch import Tensor

from ..parallel.context import context_in_call
from . import device_checks
from .arguments import Arguments, Made, check_float, check_int, check_int_in, check_name, check_tensor, memory, shape_of
from .errors import mistyped, rule, wrong
from .problem import (
    DECODE_TOKENS,
    GATES,
    PARAMETRIC_GATES,
    ChunkProblem,
    ChunkTensors,
    CommitProblem,
    ConvolutionProblem,
    FusedProblem,
    NormGate,
    NormProblem,
    NullIndex,
    Precision,
    PrefillGate,
    StepProblem,
    WyProblem,
    is_record,
    problem_of,
    record_width,
    wider,
)
from .split import AUTO, known_lengths

NULL_INDICES: tuple[str, ...] = get_args(NullIndex)
PRECISIONS: tuple[str, ...] = get_args(Precision)
PREFILL_GATES: tuple[str, ...] = get_args(PrefillGate)
NORM_GATES: tuple[str, ...] = get_args(NormGate)

HEAD_DIMS = (32, 64, 128, 256)
DECODE_HEAD_DIMS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CHUNK_SIZES = (32, 64)
PREFILL_SIZES = ((64, 64, 32), (64, 64, 64), (128, 128, 32), (128, 128, 64))
"""`(K, V, chunk_size)` of `kda_prefill`."""

MIN_TAPS, MAX_TAPS = 2, 4
"""Limits of `short_convolution`."""

FUSED_HEAD_DIMS = (32, 64, 128)
"""K and V of `fused_kda_decode`: a CTA holds a head's whole state in registers."""

MAX_NORM = 8192
"""Channels of a row that `gated_rms_norm` takes: a CTA holds whole rows."""

EPSILONS = torch.finfo(torch.float32)
"""The range of a norm's epsilon: kernels add them in float32."""

MAX_SEGMENTS = 1024
"""The most of a sequence."""

MAX_CHECKPOINTS = 8
"""Checkpoints a sequence may have in a pool: each adds a chunk slot to every sequence."""

INTERVAL_UNIT = 64
"""Tokens between regular checkpoints are a multiple of this: a boundary of chunks of either size."""

CHECKPOINT_INDEX_ARGS = ("checkpoint_offsets", "checkpoint_indices")

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTS = (torch.int32, torch.int64)
FLOAT32 = torch.float32


def state_dtypes(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Dtypes of states, where q is in `dtype`."""
    return (FLOAT32, torch.bfloat16, torch.float64) if dtype == torch.float64 else (FLOAT32, torch.bfloat16)


# ---- options ------------------------------------------------------------------------------------------------------------


def bound(name: str, value: Any) -> None:
    check_float(name, value)
    rule(name, value is None or device_checks.LOWEST_DECAY <= value < 0, "a float in [-5, 0)", value)


def epsilon(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise mistyped(name, value, "a float")
    rule(name, EPSILONS.tiny <= value <= EPSILONS.max, f"a float from {EPSILONS.tiny:.3g} to {EPSILONS.max:.3g}", value)


def check_split(value: Any) -> None:
    wanted = f"'auto', False or a number of segments from 1 to {MAX_SEGMENTS}"
    if value is not False and not (isinstance(value, str) and value == "auto"):
        check_int("split", value, wanted)
        rule("split", 1 <= value <= MAX_SEGMENTS, wanted, value)


def check_spec_tokens(value: Any) -> None:
    if value is not None:
        check_int("num_spec_tokens", value, "an int or None")
        rule("num_spec_tokens", 1 <= value < DECODE_TOKENS, f"from 1 to {DECODE_TOKENS - 1}, or None", value)


def check_interval(value: Any) -> None:
    if value is not None:
        check_int("checkpoint_every", value, "an int or None")
        fits = INTERVAL_UNIT <= value <= 2**30 and value % INTERVAL_UNIT == 0
        rule("checkpoint_every", fits, f"a multiple of {INTERVAL_UNIT} up to 2^30, or None", value)


def check_gate(c: Arguments, logits: str) -> str:
    """Checks what g and beta are to be taken for, and returns the gate. `logits`: the flag that says that beta is one."""
    c.flags(logits, "allow_neg_eigval", "use_gate_in_kernel")
    check_float("scale", c.scale)
    check_name("gate", c.gate, *GATES, None)
    bound("lower_bound", c.lower_bound)
    if c.allow_neg_eigval:
        rule("allow_neg_eigval", getattr(c, logits), f"False with {logits}=False (pass beta in [0, 2) yourself)", True)
    if c.use_gate_in_kernel:
        parametric = (None, *PARAMETRIC_GATES)
        rule("gate", c.gate in parametric, f"one of {parametric} with use_gate_in_kernel=True", c.gate)
    gate = c.gate
    if gate is None:
        gate = "none" if not c.use_gate_in_kernel else "softplus" if c.lower_bound is None else "lower_bound"
    unread = f"None (the gate {gate!r} does not read it; see gate)"
    for name in ("A_log", "dt_bias"):
        rule(name, gate in PARAMETRIC_GATES or getattr(c, name) is None, unread, "a tensor")
    rule("lower_bound", gate == "lower_bound" or c.lower_bound is None, unread, c.lower_bound)
    rule("lower_bound", gate != "lower_bound" or c.lower_bound is not None, "a float (the gate reads it)", None)
    rule("A_log", gate != "softplus" or c.A_log is not None, "a tensor (the softplus gate reads it)", None)
    return gate


def check_pool_options(c: Arguments) -> None:
    """Checks which arguments a call over a pool of states takes, and one without a pool."""
    c.flags("output_final_state")
    c.needs("state_indices", "state_pool")
    c.needs("has_initial_state", "state_pool")
    check_null_index(c, "state_indices")
    if c.state_pool is not None:
        c.exclusive("state_pool", "initial_state")
        c.exclusive("final_state", "state_pool")
        rule("state_indices", c.state_indices is not None, "a tensor with state_pool", None)
        receives = "False with state_pool, which receives the final states"
        rule("output_final_state", not c.output_final_state, receives, True)


def check_null_index(c: Arguments, *indices: str) -> None:
    check_name("null_index", c.null_index, *NULL_INDICES)
    read = c.null_index == "negative" or any([getattr(c, name) is not None for name in indices])
    rule("null_index", read, f"'negative' without {' and '.join(indices)}, which read it", repr(c.null_index))


def require_explicit(c: Arguments, name: str) -> None:
    why = "calls that share a pool must agree, and recurrent_kda's default is True"
    if getattr(c, name) is not None:
        c.flags(name)
    else:
        rule(name, c.state_pool is None, f"True or False with state_pool ({why})", None)


def check_checkpoint_options(c: Arguments, *receivers: str) -> None:
    """Checks which arguments about checkpoints go together. `receivers`: what may receive those at offsets."""
    check_interval(c.checkpoint_every)
    for name in CHECKPOINT_INDEX_ARGS:
        c.needs(name, *receivers)
    c.together(*CHECKPOINT_INDEX_ARGS)
    c.needs("checkpoint_states", "checkpoint_offsets", "checkpoint_every")
    c.needs("checkpoint_every", "checkpoint_states")
    c.exclusive("checkpoint_every", "checkpoint_offsets")


# ---- tensors ------------------------------------------------------------------------------------------------------------


def check_tokens(
    c: Arguments, head_dims: tuple[int, ...] = HEAD_DIMS, g: str = "g", beta: str = "beta", pool: str | None = None
) -> None:
    """Checks the tensors of the tokens, the offsets of sequences and the parameters of the gate. `g`, `beta`: their names;
    `pool`: the argument that tells K and V, where q, k and v are views of rows."""
    c.require("q", "B T H K", *FLOATS)
    dtype = c.q.dtype
    c.require("k", "B T H K", dtype)
    c.require("v", "B T HV V", dtype)
    check_heads(c, head_dims, pool)
    if isinstance(x := getattr(c, g), Tensor) and x.dim() == 3:
        advice = f"(expand one decay per head: {g}[..., None].expand(-1, -1, -1, K))"
        raise wrong(g, shape_of(x), f"of shape {c.described('B T HV K')} {advice}")
    c.require(g, "B T HV K", FLOAT32, dtype)
    c.require(beta, "B T HV", FLOAT32, dtype)
    check_offsets(c, "q")
    c.check("A_log", ("HV", "1 1 HV 1"), FLOAT32, dtype)
    c.check("dt_bias", ("HV*K", "HV K"), FLOAT32, dtype)


def check_heads(c: Arguments, head_dims: tuple[int, ...] = HEAD_DIMS, pool: str | None = None) -> None:
    H, K, HV, V = [c.sizes[symbol] for symbol in ("H", "K", "HV", "V")]
    rule("q", H > 0, "of at least one head", shape_of(c.q))
    rule("v", HV > 0 and HV % H == 0, f"of a positive multiple of the {H} query/key heads", f"{HV} value heads")
    rule(pool or "q", K in head_dims, f"of K in {head_dims}", f"K = {K}")
    rule(pool or "v", V in head_dims, f"of V in {head_dims}", f"V = {V}")


def check_offsets(c: Arguments, batched: str) -> None:
    """Checks `cu_seqlens`, and binds N. `batched`: the tensor that has the batch dimension."""
    c.check("cu_seqlens", "N+1", *INTS)
    B = c.sizes["B"]
    c.sizes["N"] = B if c.cu_seqlens is None else c.cu_seqlens.numel() - 1
    if c.cu_seqlens is not None:
        rule("cu_seqlens", c.sizes["N"] >= 0, "of N + 1 offsets", "an empty tensor")
        packed = "cu_seqlens" if getattr(c, "cp_context", None) is None else "cp_context"
        rule(batched, B == 1, f"of batch size 1 with {packed} (pack the sequences along T)", f"batch size {B}")


def check_offsets_on_host(c: Arguments) -> None:
    x = c.cu_seqlens_cpu
    check_tensor("cu_seqlens_cpu", x)
    rule("cu_seqlens_cpu", x.shape == c.cu_seqlens.shape, "of cu_seqlens' shape", shape_of(x))
    if x.dtype not in INTS:
        raise TypeError(f"cu_seqlens_cpu must be of dtype int32 or int64; got {x.dtype}")
    rule("cu_seqlens_cpu", x.device.type == "cpu", "on the CPU", f"device {x.device}")
    if known_lengths(x, c.chunk_size, c.q) is None:
        raise wrong("cu_seqlens_cpu", x.tolist()[:8], f"non-decreasing from 0 to at most T = {c.q.shape[1]}")


def check_states(c: Arguments, state: str, *dtypes: torch.dtype, dense: int = 0) -> None:
    """Checks initial and final states, or the pool of both. `state`: the dimensions of one, of which `dense` must be."""
    c.check("initial_state", f"N {state}", *dtypes)
    c.check("state_pool", f"slots {state}", *dtypes, dense=dense, written=True)
    c.check("state_indices", "N", *INTS)
    c.check("has_initial_state", "N", torch.bool)
    c.check("final_state", f"N {state}", *dtypes, dense=dense + 1 if dense else 0, written=True)


def check_checkpoints(c: Arguments, state: str, *dtypes: torch.dtype, dense: int = 0) -> None:
    """Checks offsets and indices, which it brings into the shape `[N, M]`, and the buffer."""
    c.check("checkpoint_offsets", ("N", "N M"), *INTS)
    c.check("checkpoint_indices", "N M" if "M" in c.sizes else "N", *INTS)
    c.check("checkpoint_states", f"rows {state}", *dtypes, dense=dense, written=True)
    M, most = c.sizes.get("M", 1), MAX_CHECKPOINTS if c.checkpoint_states is None else 2**31
    rule("checkpoint_offsets", 0 < M <= most, f"of 1 to {most} checkpoints per sequence", f"{M} checkpoints")
    # of packed sequences the rows are device data, and those past the end are not stored
    if c.checkpoint_every is not None and c.cu_seqlens is None:
        rows, least = c.sizes["rows"], c.sizes["B"] * -(-c.sizes["T"] // c.checkpoint_every)
        rule("checkpoint_states", rows >= least, f"of at least B * ceil(T / n) = {least} rows", f"{rows} rows")
    if c.checkpoint_offsets is not None and "M" not in c.sizes:
        c.checkpoint_offsets, c.checkpoint_indices = c.checkpoint_offsets[:, None], c.checkpoint_indices[:, None]


def check_intermediates(c: Arguments, pool: str, *shapes: str, written: bool = True) -> None:
    """Checks what a read-only verification stores, and a commit reads: states like the pool's, or records of float32, which
    have rank 4."""
    c.check("intermediate_state_indices", "N", *INTS)
    if c.intermediate_states is not None:
        check_tensor("intermediate_states", c.intermediate_states)
        dtype = getattr(c, pool).dtype
        dtype = wider(dtype) if is_record(c.intermediate_states) else dtype
        c.sizes["width"] = record_width(c.sizes["K"], c.sizes["V"])
        c.check("intermediate_states", shapes, dtype, dense=3, written=written)


def stored_states(c: Arguments, every: int = 0) -> dict[str, Any]:
    """Settings that say which states are returned, and `every` how many tokens one is stored."""
    return dict(output_final_state=c.output_final_state or c.final_state is not None, checkpoint_every=every)


def check_taps(c: Arguments) -> None:
    rule("weight", MIN_TAPS <= c.sizes["W"] <= MAX_TAPS, f"of {MIN_TAPS} to {MAX_TAPS} taps", shape_of(c.weight))


def check_gradients(c: Arguments, no_gradients: str | None) -> None:
    """Refuses gradients of an operation that has none, for the reason given, or of a call that writes tensors of the
    caller's."""
    required = c.with_gradients()
    if not required:
        return
    without = f"a tensor that does not require grad ({no_gradients}; torch.no_grad() allows it)"
    rule(required[0], no_gradients is None, without, "one that does")
    for name in ("state_pool", "final_state", "checkpoint_states", "out"):
        unwritten = "None where an input requires grad (it is written in place; torch.no_grad() allows it)"
        rule(name, getattr(c, name, None) is None, unwritten, "a tensor")
    returns = getattr(c, "return_intermediate_states", False)
    rule("return_intermediate_states", not returns, "False where an input requires grad", True)


def attention_settings(c: Arguments, gate: str, logits: bool, g: str = "g") -> dict[str, Any]:
    """The settings of attention. Brings parameters of the gate into the shape by head (and channel)."""
    if c.A_log is not None and c.A_log.dim() == 4:
        c.A_log = c.A_log.view(c.sizes["HV"])
    if c.dt_bias is not None and c.dt_bias.dim() == 1:
        c.dt_bias = c.dt_bias.view(getattr(c, g).shape[2:])
    bound = float(c.lower_bound) if gate == "lower_bound" else 0.0
    beta = "value" if not logits else "double_logit" if c.allow_neg_eigval else "logit"
    settings = dict(scale=scale_of(c, c.q), gate=gate, lower_bound=bound, safe_gate=bound < 0, beta_kind=beta)
    return dict(settings, l2norm=bool(c.use_qk_l2norm_in_kernel), state_v_first=bool(c.state_v_first))


def scale_of(c: Any, q: Tensor) -> float:
    return q.shape[-1] ** -0.5 if c.scale is None else float(c.scale)


# ---- whole sequences: chunk_kda, fused_recurrent_kda ---------------------------------------------------------------------


def validate_chunk(c: Arguments) -> Made:
    c.flags("safe_gate", "disable_recompute", "return_intermediate_states", "batch_invariant")
    check_int_in("chunk_size", c.chunk_size, CHUNK_SIZES)
    check_split(c.split)
    gate = check_sequence_options(c)
    rule("safe_gate", gate != "softplus" or not c.safe_gate, "False with the gate 'softplus', which has no bound", True)
    check_checkpoint_options(c, "state_pool", "checkpoint_states")
    c.needs("cu_seqlens_cpu", "cu_seqlens")
    over_ranks = c.cp_context is not None or c.group is not None
    for name in ("cu_seqlens_cpu", "checkpoint_offsets", "checkpoint_states"):
        rule(name, not over_ranks or getattr(c, name) is None, "None with cp_context or group", "a tensor")
    check_tensor("q", c.q)
    c.border = None
    if over_ranks:
        c.cp_context, c.cu_seqlens, c.border = context_in_call(c.cp_context, c.group, c.cu_seqlens, c.q)
    state = check_sequence_tensors(c)
    check_checkpoints(c, state, *state_dtypes(c.q.dtype), dense=3)
    if c.cp_context is not None:
        c.cp_context.check_tokens(c.q, "q")
    if c.cu_seqlens_cpu is not None:
        check_offsets_on_host(c)
    settings = attention_settings(c, gate, c.use_beta_sigmoid_in_kernel)
    settings["safe_gate"] |= c.safe_gate
    if c.cp_context is not None and c.cp_context.ranks > 1:
        of_rank = ("rank", "ranks", "exchange", "relay")
        settings |= {name: getattr(c.cp_context, name) for name in of_rank} | {"process_group": c.cp_context.name}
    settings |= zip(("longest_chunks", "all_chunks"), known_lengths(c.cu_seqlens_cpu, c.chunk_size, c.q) or (0, 0))
    settings |= stored_states(c, every=c.checkpoint_every or 0)
    settings["split"] = AUTO if c.split == "auto" else 1 if c.split is False else c.split
    return c.made(ChunkProblem, operation="chunk", **settings)


def validate_recurrent(c: Arguments) -> Made:
    gate = check_sequence_options(c)
    check_sequence_tensors(c)
    settings = attention_settings(c, gate, c.use_beta_sigmoid_in_kernel) | stored_states(c)
    if c.with_gradients():  # only the chunked kernels have gradients
        return c.made(ChunkProblem, operation="chunk", **settings)
    return c.made(StepProblem, operation="recurrent", **settings)


def check_sequence_options(c: Arguments) -> str:
    """Checks the options of both, and returns the gate."""
    gate = check_gate(c, "use_beta_sigmoid_in_kernel")
    check_pool_options(c)
    require_explicit(c, "state_v_first")
    require_explicit(c, "use_qk_l2norm_in_kernel")
    return gate


def check_sequence_tensors(c: Arguments) -> str:
    """Checks the tensors of both, and returns the dimensions of a state."""
    check_tokens(c)
    state, dtype = "HV V K" if c.state_v_first else "HV K V", c.q.dtype
    check_states(c, state, *state_dtypes(dtype), dense=3)
    c.check("out", "B T HV V", wider(dtype), dtype, dense=1, written=True)
    return state


# ---- steps of decoding: recurrent_kda, commit ----------------------------------------------------------------------------

DECODE_NAMES = {
    **dict(state_pool="initial_state", state_indices="ssm_state_indices", out="output"),
    **dict(source_pool="initial_state_source", source_indices="initial_state_indices"),
    **dict(intermediate_indices="intermediate_state_indices", initial_state=""),  # all states lie in pools
}
"""FlashInfer's names of roles, where they differ."""


def validate_decode(c: Arguments) -> Made:
    c.flags("output_final_state", "use_qk_l2norm_in_kernel", "state_v_first", "update_state")
    check_null_index(c, "ssm_state_indices", "initial_state_indices")
    check_spec_tokens(c.num_spec_tokens)
    gate = check_gate(c, "beta_is_logit")
    check_decode_options(c)

    pool = "initial_state_source" if c.initial_state is None else "initial_state"
    tokens = c.sizes["1+num_spec_tokens"] = 1 + (c.num_spec_tokens or 0)
    if c.mixed_qkv is not None:
        c.require("mixed_qkv", "tokens D", *FLOATS)
        split_rows(c, "mixed_qkv", pool, tokens, {"g": "HV*K", "beta": "HV"})
    check_tokens(c, DECODE_HEAD_DIMS, pool=None if c.mixed_qkv is None else pool)
    T, dtype = c.q.shape[1], c.q.dtype
    if c.cu_seqlens is None:  # of packed sequences nothing is stored where there are more
        fits, most = tokens in (1, T), f"of at most {DECODE_TOKENS} tokens (chunk_kda takes longer sequences)"
        rule("q", fits, f"of 1 + num_spec_tokens = {tokens} tokens per sequence", f"{T} tokens")
        rule("q", T <= DECODE_TOKENS, most, f"{T} tokens")

    state = "HV V K" if c.state_v_first else "HV K V"
    # with tokens to verify each state is stored in a slot of its own
    targets = "N 1+num_spec_tokens" if c.num_spec_tokens is not None and c.update_state else "N"
    if c.initial_state is not None and targets != "N":
        rule("ssm_state_indices", c.ssm_state_indices is not None, "a tensor with num_spec_tokens", None)
    slots = "N" if c.ssm_state_indices is None else "slots"
    c.check("initial_state", f"{slots} {state}", *state_dtypes(dtype), dense=3, written=c.update_state)
    c.check("ssm_state_indices", targets, *INTS)
    c.check("num_accepted_tokens", "N", *INTS)
    c.check("initial_state_source", f"sources {state}", *state_dtypes(dtype), dense=3)
    c.check("initial_state_indices", "N", *INTS)
    check_intermediates(c, pool, f"rows 1+num_spec_tokens {state}", "rows 1+num_spec_tokens HV width")
    if c.intermediate_state_indices is None and c.ssm_state_indices is None and c.initial_state_indices is None:
        rows, N = c.sizes.get("rows", 2**31), c.sizes["N"]
        rule("intermediate_states", rows >= N, f"of a row for each of the {N} sequences", f"{rows} rows")
    c.check("output", "B T HV V", wider(dtype), dtype, dense=1, written=True)
    settings = attention_settings(c, gate, c.beta_is_logit) | dict(spec_tokens=tokens - 1)
    settings["output_final_state"] = c.output_final_state and c.initial_state is None
    return c.made(StepProblem, operation="decode", **settings)


def check_decode_options(c: Arguments) -> None:
    """Checks which arguments of a step go together."""
    for name in ("q", "k", "v"):
        c.exclusive("mixed_qkv", name)
    c.together("initial_state_source", "initial_state_indices")
    pools = ("initial_state", "initial_state_source")
    has_pool, has_source = c.initial_state is not None, c.initial_state_source is not None
    if c.mixed_qkv is not None:
        rule("initial_state", has_pool or has_source, "a tensor with mixed_qkv (its shape tells the heads)", None)
    if has_source:
        wanted = "the pool to write with initial_state_source, or None with update_state=False"
        rule("initial_state", c.update_state == has_pool, wanted, "a tensor" if has_pool else None)
    c.exclusive("num_accepted_tokens", "initial_state_source")
    c.needs("ssm_state_indices", "initial_state")
    for name in ("num_accepted_tokens", "intermediate_states", "num_spec_tokens"):
        c.needs(name, *pools)
    c.needs("num_accepted_tokens", "num_spec_tokens")
    c.needs("intermediate_states", "num_spec_tokens")
    c.needs("intermediate_state_indices", "intermediate_states")
    if c.update_state:
        rule("intermediate_states", c.intermediate_states is None, "None with update_state=True", "a tensor")
    else:
        rule("update_state", has_pool or has_source, "True without initial_state", False)
        rule("output_final_state", not c.output_final_state, "False with update_state=False", True)
        counts = "None with update_state=False (commit takes the counts)"
        rule("num_accepted_tokens", c.num_accepted_tokens is None, counts, "a tensor")


def split_rows(c: Arguments, name: str, pool: str, tokens: int, flat: Mapping[str, str]) -> None:
    """Takes rows apart: c.q, c.k and c.v become views, with heads as the `pool` has them. Tensors that are `flat`, or by row,
    become views in the same layout; `flat` has the elements of a token by name."""
    mixed, states = getattr(c, name), getattr(c, pool)
    check_tensor(pool, states)
    rule(pool, states.dim() == 4, "of rank 4", shape_of(states))
    (_, HV, V, K), (rows, width) = states.shape if c.state_v_first else states.mT.shape, mixed.shape
    heads = (width - HV * V) // (2 * K) if K > 0 else 0
    wanted = f"of shape [N, 2 * H * K + HV * V] with K = {K} and HV * V = {HV * V}, as {pool} has them"
    rule(name, heads > 0 and 2 * heads * K + HV * V == width, wanted, shape_of(mixed))
    multiple = f"of a positive multiple of the {heads} query/key heads"
    rule(name, HV > 0 and HV % heads == 0, multiple, f"{HV} value heads")
    by_sequence = c.cu_seqlens is None
    if by_sequence:
        rule(name, rows % tokens == 0, f"of a multiple of 1 + num_spec_tokens = {tokens} rows", f"{rows} rows")
    leading = (rows // tokens, tokens) if by_sequence else (1, rows)
    q, k, v = mixed.split([heads * K, heads * K, HV * V], dim=1)
    c.q, c.k, c.v = q.view(*leading, heads, K), k.view(*leading, heads, K), v.view(*leading, HV, V)
    c.sizes |= {"HV": HV, "K": K, "V": V}
    for other, symbols in flat.items():
        x, inner = getattr(c, other), symbols.replace("*", " ")
        if x is not None:
            check_tensor(other, x)
            known = [f"{before}tokens {after}".split() for before in ("", "1 ") for after in (symbols, inner)]
            if any([c.fits(shape, x.shape) for shape in known]):
                setattr(c, other, x.view(*leading, *[c.sizes[symbol] for symbol in inner.split()]))


def validate_commit(c: Arguments) -> Made:
    c.flags("state_v_first")
    check_name("null_index", c.null_index, *NULL_INDICES)
    state = "HV V K" if c.state_v_first else "HV K V"
    c.require("initial_state", f"slots {state}", FLOAT32, torch.bfloat16, torch.float64, dense=3, written=True)
    K, V = c.sizes["K"], c.sizes["V"]
    rule("initial_state", K * V * c.sizes["HV"] > 0, "of states with elements", shape_of(c.initial_state))
    check_tensor("intermediate_states", c.intermediate_states)
    replays = is_record(c.intermediate_states)
    if replays:  # copies of states may have any size
        fits = K in DECODE_HEAD_DIMS and V in DECODE_HEAD_DIMS
        rule("initial_state", fits, f"of K and V in {DECODE_HEAD_DIMS}", f"K = {K}, V = {V}")
    c.require("ssm_state_indices", "N", *INTS)
    c.require("num_accepted_tokens", "N", *INTS)
    shapes = f"rows tokens {state}", "rows tokens HV width"
    check_intermediates(c, "initial_state", *shapes, written=replays)  # a commit empties records
    tokens = c.sizes["tokens"]
    rule("intermediate_states", 0 < tokens <= DECODE_TOKENS, f"of 1 to {DECODE_TOKENS} tokens per row", tokens)
    return c.made(CommitProblem, operation="commit", spec_tokens=tokens - 1, K=K, V=V)


# ---- kda_prefill ----------------------------------------------------------------------------------------------------------


def validate_prefill(c: Arguments) -> Made:
    check_int("chunk_size", c.chunk_size)
    check_float("scale", c.scale)
    check_name("gate", c.gate, *PREFILL_GATES)
    check_name("precision", c.precision, *PRECISIONS)
    for name, shape in (("q", "B H T K"), ("k", "B H T K"), ("v", "B H T V"), ("g", "B H T K"), ("beta", "B H T")):
        c.require(name, shape, FLOAT32, dense=len(shape.split()))
    size = K, V, _ = c.sizes["K"], c.sizes["V"], c.chunk_size
    rule("q", c.sizes["H"] > 0, "of at least one head", shape_of(c.q))
    name = "q" if K not in (64, 128) else "v" if V != K else "chunk_size"
    wanted = f"such that (K, V, chunk_size) is one of {', '.join(map(str, PREFILL_SIZES))}"
    rule(name, size in PREFILL_SIZES, wanted, size)
    return prefill_problem(c, {name: c.read(x) for name, x in c.tensors.items()})


def prefill_problem(c: Any, tensors: Mapping[str, Tensor]) -> tuple[ChunkProblem, ChunkTensors]:
    """Makes every head of every batch row a batch row with one head: its chunks then lie one after another, as in
    `w [B, H, Nc, C, K]`."""
    q = tensors["q"]
    settings = dict(scale=scale_of(c, q), gate=c.gate, chunk_size=c.chunk_size, precision=c.precision, heads=q.shape[1])
    by_row = {name: x.reshape(x.shape[0] * x.shape[1], x.shape[2], 1, *x.shape[3:]) for name, x in tensors.items()}
    t = ChunkTensors(**by_row)
    return problem_of(ChunkProblem, t, operation="prefill", state_v_first=True, split=1, **settings), t


# ---- chunk_bwd_wy_dqkg ----------------------------------------------------------------------------------------------------


def validate_wy(c: Arguments) -> Made:
    c.flags("state_v_first", "use_exp2")
    check_float("scale", c.scale)
    check_int_in("chunk_size", c.chunk_size, CHUNK_SIZES)
    state = "HV V K" if c.state_v_first else "HV K V"
    c.require("q", "B T H K", *FLOATS)
    dtype, either = c.q.dtype, (wider(c.q.dtype), c.q.dtype)
    c.require("k", "B T H K", dtype)
    c.require("v", "B T HV V", dtype)
    check_heads(c)
    c.require("v_new", "B T HV V", dtype)
    c.require("g", "B T HV K", wider(dtype))
    c.require("beta", "B T HV", *either)
    c.require("A", f"B T HV {c.chunk_size}", *either)
    c.require("h", f"B NT {state}", *either)
    c.require("dh", f"B NT {state}", *either)
    c.require("do", "B T HV V", dtype)
    c.require("dv", "B T HV V", dtype)
    check_offsets(c, "q")
    NT = -(-c.sizes["T"] // c.chunk_size)
    if c.cu_seqlens is None:
        rule("h", c.sizes["NT"] == NT, f"of NT = ceil(T / chunk_size) = {NT} states per row", shape_of(c.h))
    gate = "cumulative_log2" if c.use_exp2 else "cumulative"
    return c.made(WyProblem, operation="wy", scale=scale_of(c, c.q), gate=gate)


# ---- the layer around attention: gated_rms_norm, short_convolution ---------------------------------------------------------


def validate_norm(c: Arguments) -> Made:
    epsilon("eps", c.eps)
    check_name("activation", c.activation, *NORM_GATES)
    check_tensor("x", c.x)
    rows = " ".join([*(f"D{i}" for i in range(c.x.dim() - 1)), "V"])  # of any rank
    c.require("x", rows, *FLOATS)
    rule("x", 1 <= c.sizes["V"] <= MAX_NORM, f"of a last dimension from 1 to {MAX_NORM}", shape_of(c.x))
    dtype = c.x.dtype
    narrow = (torch.bfloat16, torch.float16) if dtype == FLOAT32 else ()
    c.require("z", rows, dtype, *narrow)
    c.require("weight", "V", wider(dtype), dtype, *narrow)
    return c.made(NormProblem, operation="gated_rms_norm", eps=float(c.eps))


def validate_convolution(c: Arguments) -> Made:
    check_name("activation", c.activation, "silu", None)
    check_pool_options(c)
    check_checkpoint_options(c, "checkpoint_states")
    c.require("x", "B T D", *FLOATS)
    dtypes = wider(c.x.dtype), c.x.dtype
    rule("x", c.sizes["D"] > 0, "of at least one channel", shape_of(c.x))
    check_offsets(c, "x")
    c.require("weight", ("D W", "D 1 W"), *dtypes)
    check_taps(c)
    c.check("bias", "D", *dtypes)
    check_states(c, "D L", *dtypes)
    check_checkpoints(c, "D L", *dtypes)
    W, L = c.sizes["W"], c.sizes.get("L", c.sizes["W"])
    states = ("initial_state", "state_pool", "final_state", "checkpoint_states", "weight")
    name = next(x for x in states if x in c.tensors)
    rule(name, L in (W - 1, W), f"of the last W - 1 = {W - 1} or W = {W} inputs of a channel", f"{L} inputs")
    c.check("out", "B T D", c.x.dtype, dense=1, written=True)
    settings = stored_states(c, every=c.checkpoint_every or 0)
    return c.made(ConvolutionProblem, operation="short_convolution", activation=c.activation or "none", **settings)


# ---- the layer's step: fused_kda_decode --------------------------------------------------------------------------------------

FUSED_NAMES = {
    **dict(state_pool="state", g="raw_g", beta="raw_beta", z="output_gate", out="output"),
    **dict(intermediate_indices="intermediate_state_indices"),
}
"""FlashInfer's and vLLM's names of roles, where they differ."""


def validate_fused_decode(c: Arguments) -> Made:
    c.flags("use_qk_l2norm_in_kernel", "state_v_first")
    check_name("null_index", c.null_index, *NULL_INDICES)
    check_spec_tokens(c.num_spec_tokens)
    epsilon("norm_eps", c.norm_eps)
    c.use_gate_in_kernel = c.gate is None  # always, where the call names no other
    gate = check_gate(c, "beta_is_logit")
    c.needs("num_accepted_tokens", "num_spec_tokens")
    c.needs("intermediate_states", "num_spec_tokens")
    c.needs("intermediate_state_indices", "intermediate_states")

    spec = c.num_spec_tokens or 0
    c.sizes["1+num_spec_tokens"] = 1 + spec
    c.require("x", "tokens D", *FLOATS)
    split_rows(c, "x", "state", 1 + spec, {"raw_g": "HV*K", "raw_beta": "HV", "output_gate": "HV*V"})
    check_tokens(c, FUSED_HEAD_DIMS, "raw_g", "raw_beta", "state")
    D, dtypes = c.sizes["D"], (FLOAT32, c.q.dtype)
    # three weights side by side, where q, k and v have as many channels
    c.sizes["D/3"] = D // 3 if c.q.shape[2:].numel() == c.v.shape[2:].numel() else 0
    c.require("weight", ("D W", "D 1 W", "3 W D/3"), *dtypes)
    check_taps(c)
    c.check("bias", "D", *dtypes)
    c.require("conv_state", "slots D L", *dtypes, written=True)
    W, L = c.sizes["W"], c.sizes["L"]
    rule("conv_state", W - 1 + spec <= L, f"of at least W - 1 + num_spec_tokens = {W - 1 + spec} inputs", f"{L} inputs")

    state, replayed = "HV V K" if c.state_v_first else "HV K V", c.intermediate_states is not None
    c.require("state", f"slots {state}", *state_dtypes(c.q.dtype), dense=3, written=not replayed)
    # a slot for each state that is stored
    c.require("state_indices", "N" if c.num_spec_tokens is None or replayed else "N 1+num_spec_tokens", *INTS)
    c.check("num_accepted_tokens", "N", *INTS)
    c.require("output_gate", "B T HV V", c.q.dtype)
    c.require("norm_weight", "V", *dtypes)
    check_intermediates(c, "state", "rows 1+num_spec_tokens HV width")
    c.check("output", "B T HV V", wider(c.q.dtype), c.q.dtype, dense=1, written=True)
    # `[parts, channels, W]`: one part, or three side by side
    c.weight = c.weight.mT if c.weight.shape[0] == 3 and c.weight.shape[1] != 1 else c.weight.reshape(1, D, W)
    settings = attention_settings(c, gate, c.beta_is_logit, "raw_g")
    settings |= dict(spec_tokens=spec, update_state=not replayed, eps=float(c.norm_eps))
    return c.made(FusedProblem, operation="fused_decode", **settings)


# ---- operations -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operation:
    """The rules of a public function for its arguments.

    `called`: the caller's names of roles, where they differ. `may_write`: the tensors that a call may write, by the caller's
    names; `reads`: those of them that a given call leaves alone. `may_share`: pairs that may lie interleaved in one buffer.
    `rows`: the argument whose rows hold q, k and v, where they are not passed. `no_gradients`: why it has none, if so.
    `by_token`: tensors `[B, T, ...]`, of which the rules ask no more than that T is the same for all, and contiguous ones of
    other lengths lie alike; unless there is one of `ask_length`.
    """

    name: str
    validate: Callable[[Arguments], Made]
    may_write: tuple[str, ...] = ()
    called: Mapping[str, str] = field(default_factory=dict)
    reads: Callable[[Mapping[str, Any]], str | None] = lambda given: None
    may_share: tuple[str, str] = ("", "")
    rows: str = ""
    no_gradients: str | None = None
    by_token: tuple[str, ...] = ()
    ask_length: tuple[str, ...] = ()

    def name_of(self, role: str) -> str:
        return self.called.get(role, role)

    def written(self, given: Mapping[str, object]) -> list[str]:
        """The caller's names of the tensors that a call writes."""
        read = self.reads(given)
        return [name for name in self.may_write if name != read and given.get(name) is not None]

    def overlaps(self, names: Collection[str]) -> Iterator[tuple[str, list[str]]]:
        """Yields each of `names` that may be written, with those that must not share its memory. Each pair comes once."""
        own = [name for name in self.may_write if name in names]
        for i, name in enumerate(own):
            yield name, [x for x in names if x not in own[: i + 1] and {x, name} != {*self.may_share}]

    def check(self, given: Mapping[str, object], *, dry: bool = False) -> Made:
        """Validates a call, whose arguments are `given` by the caller's names. A `dry` check copies and reads nothing on a
        device; its tensors may not be run on.

        Raises:
            TypeError: an argument of the wrong type or dtype.
            ValueError: anything else; the message names the argument, states the rule and says what came.
        """
        c = Arguments(given, self.called, dry)
        made = self.validate(c)
        check_gradients(c, self.no_gradients)
        self.check_overlaps(c.tensors)
        self.check_values(made, given, dry)
        return made

    def check_values(self, made: Made, given: Mapping[str, Any], dry: bool) -> None:
        if device_checks.due(made[1], dry):
            device_checks.check(*made, self.name_of, given.get("cu_seqlens_cpu"))

    def check_overlaps(self, tensors: Mapping[str, Tensor | None]) -> None:
        """Refuses a tensor to be written that shares memory with another argument."""
        if torch.compiler.is_compiling() or all([tensors.get(name) is None for name in self.may_write]):
            return
        places = {name: place for name, x in tensors.items() if (place := memory(x)) is not None}
        for name, others in self.overlaps(places):
            for other in others:
                if places[other][0] < places[name][1] and places[name][0] < places[other][1]:
                    raise wrong(name, f"memory shared with {other}", "in memory of its own")


WRITTEN = ("out", "final_state", "checkpoint_states", "state_pool")

CHUNK = Operation(
    "chunk",
    validate_chunk,
    WRITTEN,
    by_token=("q", "k", "v", "g", "beta", "out"),
    ask_length=("cu_seqlens_cpu", "checkpoint_every", "cp_context", "group"),
)
RECURRENT = Operation("recurrent", validate_recurrent, ("out", "final_state", "state_pool"))
DECODE = Operation(
    "decode",
    validate_decode,
    ("output", "intermediate_states", "initial_state"),
    DECODE_NAMES,
    reads=lambda given: None if given["update_state"] else "initial_state",
    may_share=("initial_state", "initial_state_source"),
    rows="mixed_qkv",
    no_gradients="chunk_kda and fused_recurrent_kda have gradients",
)
COMMIT = Operation(
    "commit",
    validate_commit,
    ("intermediate_states", "initial_state"),
    DECODE_NAMES,
    reads=lambda given: None if is_record(given["intermediate_states"]) else "intermediate_states",
    no_gradients="the pool is updated in place",
)
PREFILL = Operation("prefill", validate_prefill, no_gradients="kda_prefill has no backward")
WY = Operation("wy", validate_wy, no_gradients="this is a backward pass: it has none")
GATED_RMS_NORM = Operation("gated_rms_norm", validate_norm)
SHORT_CONVOLUTION = Operation("short_convolution", validate_convolution, WRITTEN)
FUSED_DECODE = Operation(
    "fused_decode",
    validate_fused_decode,
    ("output", "intermediate_states", "conv_state", "state"),
    FUSED_NAMES,
    reads=lambda given: None if given["intermediate_states"] is None else "state",
    may_share=("conv_state", "state"),
    rows="x",
    no_gradients="nn.KimiDeltaAttention has gradients",
)

BY_NAME = {x.name: x for x in (CHUNK, RECURRENT, DECODE, COMMIT, SHORT_CONVOLUTION, FUSED_DECODE)}
"""Operations that write tensors of the caller's."""
