"""Compiles ahead what serving will need."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..problem.operations import INTERVAL_UNIT
from ..problem.problem import PARAMETRIC_GATES, GateName, record_width
from .call import CALLS, public_call
from .devices import find_device


def warmup(
    op: Callable,
    head_dims: Iterable[tuple[int, int]] = ((128, 128),),
    *,
    dtype: torch.dtype = torch.bfloat16,
    g_dtype: torch.dtype | None = None,
    beta_dtype: torch.dtype | None = None,
    state_dtype: torch.dtype = torch.float32,
    packed: Iterable[bool] = (False, True),
    cu_seqlens_dtype: torch.dtype = torch.int32,
    initial_state: Iterable[bool] = (False, True),
    output_final_state: Iterable[bool] = (True,),
    state_pool: Iterable[bool] = (False,),
    has_initial_state: Iterable[bool] = (False, True),
    checkpoints: Iterable[bool] = (False,),
    final_state: Iterable[bool] = (False,),
    checkpoint_states: Iterable[bool] = (False,),
    checkpoint_dtype: torch.dtype | None = None,
    state_indices_dtype: torch.dtype = torch.int32,
    speculative: bool = False,
    gate: GateName = "lower_bound",
    lower_bound: float | None = -5.0,
    dt_bias: bool = True,
    use_qk_l2norm_in_kernel: bool = True,
    use_beta_sigmoid_in_kernel: bool = True,
    allow_neg_eigval: bool = False,
    safe_gate: bool = False,
    state_v_first: bool = False,
    conv_size: int = 4,
    weight_dtype: torch.dtype | None = None,
    device: torch.device | str = "cuda",
    backend: str = "auto",
) -> int:
    """Compiles what serving will need, so that no call compiles later. Blocks until the device is done.

    Kernels depend on head dimensions, dtypes and options, hardly ever on head counts, lengths, strides that are multiples of
    16, or batch size; so a tiny call of each combination below compiles all of it. The exceptions are called, too: one token
    a sequence is a kind of its own for `fused_recurrent_kda` and `recurrent_kda`, and there few sequences are another than
    many; for `chunk_kda` so many tokens for so few heads that sequences may be split are another kind, and on Hopper many
    heads, sequences and heads that take a quarter of the SMs at most, and such that would leave many SMs idle. Options that are
    not listed are those of `chunk_kda`; `gate="softplus"` wants `lower_bound=None`.

    Args:
        op: `chunk_kda`, `fused_recurrent_kda`, `recurrent_kda` or `fused_kda_decode`. The last two are called over a pool, with
            slots by index: options about initial and final states, flags and checkpoints do not count, `state_pool` does not
            either.
        head_dims: pairs `(K, V)`.
        dtype: of q, k and v.
        g_dtype: of g; `dtype` by default.
        beta_dtype: of beta; `dtype` by default.
        state_dtype: of the states.
        checkpoint_dtype: of checkpoints in a buffer of their own; `state_dtype` by default.
        packed: the values that `cu_seqlens is not None` may take. Of these iterables every combination is compiled.
        initial_state: whether calls pass one.
        output_final_state: the values it may take.
        state_pool: whether calls pass one; `initial_state` and `output_final_state` then count for calls without one, and
            `has_initial_state` and `checkpoints` say whether those with one pass flags and checkpoints.
        final_state: whether calls that return a final state pass a tensor for it, of `state_dtype`.
        checkpoint_states: whether calls of `chunk_kda` pass a buffer for checkpoints; those that do are compiled with offsets
            and with regular ones.
        cu_seqlens_dtype: int32 or int64.
        state_indices_dtype: int32 or int64; of the checkpoint tensors too.
        speculative: whether `recurrent_kda` also verifies speculative tokens, in place and read-only, and `commit`s.
        conv_size: taps of `fused_kda_decode`, which is called with a weight `[D, W]` and no bias, and with windows whose
            channels lie innermost.
        weight_dtype: of its weights of convolution and norm; `dtype` by default.
        dt_bias: whether calls with a gate that reads one pass one.
        safe_gate: as in `chunk_kda`; other operators have none.
        device: where to run. On a CPU the calls run, but nothing is compiled.

    Returns:
        The number of calls made.

    Raises:
        ValueError, TypeError: as `op` itself would; no values for an argument to take; or a device that is not there (on a
            machine without a GPU, where nothing can be compiled, the default).
    """
    kind = _kind(op)
    device = find_device(device)
    _check_dtypes(dtype=dtype, g_dtype=g_dtype or dtype, beta_dtype=beta_dtype or dtype, state_dtype=state_dtype)
    checkpoint_dtype = checkpoint_dtype or state_dtype
    _check_dtypes(
        checkpoint_dtype=checkpoint_dtype, cu_seqlens_dtype=cu_seqlens_dtype, state_indices_dtype=state_indices_dtype
    )
    parametric = gate in PARAMETRIC_GATES
    calls = 0
    make = functools.partial(torch.zeros, dtype=torch.float32, device=device)  # whatever the default dtype is
    options: dict[str, object] = dict(gate=gate, lower_bound=lower_bound, state_v_first=state_v_first, backend=backend)
    options |= dict(use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, allow_neg_eigval=allow_neg_eigval)
    options |= {"safe_gate": safe_gate} if kind == "chunk" else {}
    logit = "use_beta_sigmoid_in_kernel" if kind in ("chunk", "recurrent") else "beta_is_logit"
    function = functools.partial(op, **options, **{logit: use_beta_sigmoid_in_kernel})
    layouts = [*itertools.product(_pairs(head_dims), _combinations(packed=packed))]
    if kind == "fused_decode":
        dtypes = dtype, g_dtype or dtype, beta_dtype or dtype, state_dtype, weight_dtype or dtype
        sizes = Fused(*dtypes, state_indices_dtype, cu_seqlens_dtype, conv_size)
        parameters = {"A_log": parametric, "dt_bias": parametric and dt_bias}
        return _warm_fused(function, make, sizes, layouts, parameters, FUSED_CALLS[: None if speculative else 2])

    def call(B: int, T: int, H: int, K: int, V: int, **states: object) -> None:
        nonlocal calls
        function(
            make(B, T, H, K, dtype=dtype),
            make(B, T, H, K, dtype=dtype),
            make(B, T, H, V, dtype=dtype),
            make(B, T, H, K, dtype=g_dtype or dtype),
            make(B, T, H, dtype=beta_dtype or dtype),
            **states,
            A_log=make(H) if parametric else None,
            dt_bias=make(H, K) if dt_bias and parametric else None,
        )
        calls += 1

    plain = _combinations(initial_state=initial_state, output_final_state=output_final_state)
    plain = _with_final_state(plain, _combinations(final_state=final_state))
    pooled = _combinations(has_initial_state=has_initial_state, checkpoints=checkpoints)
    pools = _combinations(state_pool=state_pool)
    ways = [(is_pool, way) for (is_pool,) in pools for way in (pooled if is_pool else plain)]
    buffers = [name for (has,) in _combinations(checkpoint_states=checkpoint_states) for name in BUFFERS[has]]
    if kind == "decode":
        ways = [(True, (False, False))]
    kinds = itertools.product(layouts, ways, buffers if kind == "chunk" else ["none"])
    for ((K, V), (is_packed,)), (is_pool, way), buffer in kinds:
        for B, T, H, N in _warm_sizes(kind, is_packed, V, device):
            rows = 1 if is_pool else N  # all sequences of a pool but the first are null: one slot is enough
            state = make((rows, H, V, K) if state_v_first else (rows, H, K, V), dtype=state_dtype)
            index = make(N, 1 + (is_pool and kind == "chunk"), dtype=state_indices_dtype)[:, 0]  # vLLM's: a column
            index[1:] = -1
            offsets = torch.tensor([0, *[T] * N], dtype=cu_seqlens_dtype, device=device) if is_packed else None
            states = _states(kind, is_pool, way, buffer, state, index)
            if buffer != "none":
                states["checkpoint_states"] = make(B * -(-T // INTERVAL_UNIT), *state.shape[1:], dtype=checkpoint_dtype)
            for own in _invariances((B, T, H, N)):
                call(B, T, H, K, V, **states, **own, cu_seqlens=offsets)
            if kind == "decode" and speculative and T > 1:
                _warm_verification(call, _commit(state_v_first, backend), (B, T, H, K, V), state, index, offsets)
    return _finished(calls, device)


def _finished(calls: int, device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return calls


def _with_final_state(ways: list[tuple[bool, ...]], given: list[tuple[bool, ...]]) -> list[tuple[bool, ...]]:
    """Whether the caller passes one matters only where a final state is asked for."""
    return [(*way, own) for way in ways for (own,) in (given if way[1] else [(False,)])]


def _states(
    kind: str, is_pool: bool, way: tuple[bool, ...], buffer: str, state: Tensor, index: Tensor
) -> dict[str, object]:
    """Arguments about states, but for a buffer of checkpoints itself."""
    if kind == "decode":
        return {"initial_state": state, "ssm_state_indices": index}
    marked = buffer == "offsets"
    if is_pool:
        has_flags, has_checkpoints = way
        states: dict[str, object] = {"state_pool": state, "state_indices": index}
        states |= {"has_initial_state": torch.zeros_like(index, dtype=torch.bool)} if has_flags else {}
        marked |= has_checkpoints and buffer == "none"
    else:
        has_state, final, own = way
        states = {"initial_state": state if has_state else None, "output_final_state": final}
        states |= {"final_state": torch.empty_like(state)} if own else {}
    marks = dict.fromkeys(("checkpoint_offsets", "checkpoint_indices"), index) if marked else {}
    return states | marks | ({"checkpoint_every": INTERVAL_UNIT} if buffer == "regular" else {})


def _kind(op: Callable) -> str:
    kind = public_call(op).operation.name
    if kind not in ("chunk", "recurrent", "decode", "fused_decode"):
        wanted = "chunk_kda, fused_recurrent_kda, recurrent_kda or fused_kda_decode"
        raise ValueError(f"op must be {wanted}; got {op.__name__}")
    return kind


def _check_dtypes(**dtypes: object) -> None:
    for name, x in dtypes.items():
        if not isinstance(x, torch.dtype):
            raise TypeError(f"{name} must be a torch.dtype; got {x!r}")


def _combinations(**flags: Iterable[bool]) -> list[tuple[bool, ...]]:
    """Of the values that each of the flags may take."""
    found = []
    for name, values in flags.items():
        found.append(list(values) if isinstance(values, Iterable) else [])
        if not found[-1] or not all(isinstance(x, bool) for x in found[-1]):
            raise TypeError(f"{name} must be the values it may take, such as (False, True); got {values!r}")
    return list(itertools.product(*found))


def _pairs(head_dims: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found = list(head_dims) if isinstance(head_dims, Iterable) else []
    fits = (isinstance(x, (tuple, list)) and len(x) == 2 and all(isinstance(n, int) for n in x) for x in found)
    if not found or not all(fits):
        raise TypeError(f"head_dims must be pairs (K, V), such as [(128, 128)]; got {head_dims!r}")
    return found


BUFFERS = {False: ["none"], True: ["offsets", "regular"]}
"""Kinds of calls without and with a buffer for checkpoints."""


WARM_MANY = 160
"""Sequences, of two heads each, that are many for every backend's launch parameters; also slices of 64 value channels that no
Hopper GPU can deal out to its SMs without leaving many idle, for which `hopper` has a kernel of its own."""


WARM_HEADS = 48
"""So many that `hopper` goes through chunks in steps, and so few that it has an SM for each of their slices."""


WARM_BATCH = 14
"""Sequences of 12 heads and 64 value channels that would leave SMs idle, too short to be split."""


WARM_MORE = 3
"""As many sequences of 12 heads and 64 value channels take more than a quarter of a Hopper GPU's SMs: with fewer, `hopper`
starts one kernel while another ends."""


WARM_LONG = (1, 8192, 2, 1)
"""Sizes as of `_warm_sizes`: a sequence that is split."""

WARM_LONG_BATCH = (1, 7168, 12, 14)
"""A batch with sequences that may be split, or else leave SMs idle."""


WARM_RECORDED = (4, 8, 16, 17)
"""Tokens of a sequence up to which one kernel serves for replay records."""


def _warm_sizes(kind: str, is_packed: bool, V: int, device: torch.device) -> list[tuple[int, int, int, int]]:
    """Batch, tokens, heads and sequences of the calls that `warmup` makes of one kind."""
    if kind == "chunk":
        if device.type != "cuda":
            return [(1, 65, 2, 1)]
        slices = max(V, 64) // 64
        batches = [(1 if is_packed else N, 65, 12, N) for N in (-(-WARM_MORE // slices), WARM_BATCH // slices)]
        batches += [WARM_LONG_BATCH] if is_packed else []
        return [(1, 65, 2, 1), (1, 65, WARM_HEADS, 1), (1, 65, WARM_MANY // slices, 1), *batches, WARM_LONG]
    several = (1, 2 if kind == "decode" else 65, 2, 1)
    return [several] if is_packed else [(1, 1, 2, 1), (WARM_MANY, 1, 2, WARM_MANY), several]


def _invariances(sizes: tuple[int, int, int, int]) -> list[dict[str, object]]:
    """Options of the calls of such sizes. A sequence that is split is of two kinds: its segments are tried for what they
    forget, or never, where bits must not depend on the batch."""
    return [{}, {"batch_invariant": True}] if sizes == WARM_LONG else [{}]


def _warm_verification(
    call: Callable,
    commit: Callable,
    sizes: tuple[int, int, int, int, int],
    state: Tensor,
    index: Tensor,
    offsets: Tensor | None,
) -> None:
    """Of one sequence: with counts of accepted tokens and without, and read-only; and of many that are null."""
    one, slots = torch.ones_like(index), torch.zeros_like(index).repeat(1, 2)
    slots[:, 1] = -1  # a slot may receive one state only
    tokens = {"num_spec_tokens": 1, "initial_state": state, "cu_seqlens": offsets}
    for accepted in (None, one):
        call(*sizes, **tokens, ssm_state_indices=slots, num_accepted_tokens=accepted)
    B, T, H, K, V = sizes
    buffers = [state.new_zeros(1, T, *state.shape[1:])]
    buffers += [state.new_zeros(1, n, H, record_width(K, V), dtype=torch.float32) for n in WARM_RECORDED]
    for own, rows in itertools.product((None, index), buffers):
        tokens["num_spec_tokens"] = rows.shape[1] - 1
        states = {"intermediate_states": rows, "intermediate_state_indices": own}
        call(B, rows.shape[1], H, K, V, **tokens, ssm_state_indices=index, update_state=False, **states)
        commit(state, rows, index, one, intermediate_state_indices=own)
    if state.device.type == "cuda":
        # four pairs of sequence and head an SM, of which `hopper` has fewer registers for few tokens, and commits whole heads
        sms = torch.cuda.get_device_properties(state.device).multi_processor_count
        N, n = 4 * sms // H, WARM_RECORDED[0]
        null, rows = index.new_full((N,), -1), state.new_zeros(1, n, H, record_width(K, V), dtype=torch.float32)
        tokens |= {
            "num_spec_tokens": n - 1,
            "ssm_state_indices": null,
            "update_state": False,
            "intermediate_states": rows,
        }
        if offsets is not None:
            tokens["cu_seqlens"] = torch.arange(N + 1, device=offsets.device, dtype=offsets.dtype) * n
        shape = (N, n) if offsets is None else (1, N * n)
        for own in (None, null):
            call(*shape, H, K, V, **tokens, intermediate_state_indices=own)
        ones = torch.ones_like(null)
        for recorded, own in itertools.product(buffers[1:], (None, null)):
            commit(state, recorded, null, ones, intermediate_state_indices=own)


class Fused(NamedTuple):
    """Dtypes of the tensors of `fused_kda_decode`, and taps."""

    x: torch.dtype
    g: torch.dtype
    beta: torch.dtype
    state: torch.dtype
    weight: torch.dtype
    index: torch.dtype
    offset: torch.dtype
    W: int


FUSED_CALLS = ((1, 0, False), (WARM_MANY, 0, False), (1, 1, False), (1, 1, True))
"""Sequences, speculative tokens, and whether they are recorded."""


def _warm_fused(
    step: functools.partial,
    make: Callable[..., Tensor],
    sizes: Fused,
    layouts: Sequence[tuple[tuple[int, int], tuple[bool, ...]]],
    parameters: Mapping[str, bool],
    kinds: Sequence[tuple[int, int, bool]],
) -> int:
    """The number of calls made, of two heads; all sequences but the first are null."""
    H, calls = 2, 0
    for ((K, V), (is_packed,)), (N, S, replayed) in itertools.product(layouts, kinds):
        D, rows = H * (2 * K + V), N * (1 + S)
        index = make(N, dtype=sizes.index) - 1
        index[:1] = 0
        given: dict[str, object] = {
            "x": make(rows, D, dtype=sizes.x),
            "weight": make(D, sizes.W, dtype=sizes.weight),
            "conv_state": make(1, sizes.W - 1 + S, D, dtype=sizes.x).mT,
            "raw_g": make(rows, H, K, dtype=sizes.g),
            "raw_beta": make(rows, H, dtype=sizes.beta),
            "state_indices": index if S == 0 or replayed else torch.stack([index, index * 0 - 1], dim=1),
            "state": make(1, H, *((V, K) if step.keywords["state_v_first"] else (K, V)), dtype=sizes.state),
            "output_gate": make(rows, H, V, dtype=sizes.x),
            "norm_weight": make(V, dtype=sizes.weight),
            "A_log": make(H) if parameters["A_log"] else None,
            "dt_bias": make(H, K) if parameters["dt_bias"] else None,
        }
        if is_packed:
            given["cu_seqlens"] = torch.arange(N + 1, device=index.device).to(sizes.offset) * (1 + S)
        if S > 0:
            given |= {"num_spec_tokens": S, "num_accepted_tokens": torch.ones_like(index)}
        if replayed:
            given["intermediate_states"] = make(1, 1 + S, H, record_width(K, V))
        step(**given)
        calls += 1
    return _finished(calls, index.device)


def _commit(v_first: bool, backend: str) -> Callable:
    function = next(function for function, call in CALLS.items() if call.operation.name == "commit")
    return functools.partial(function, state_v_first=v_first, backend=backend)
