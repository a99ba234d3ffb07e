"""Compiles ahead what serving will need."""

import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..problem.arguments import find_device
from ..problem.errors import mistyped, rule
from ..problem.operations import INTERVAL_UNIT
from ..problem.problem import PARAMETRIC_GATES, GateName, record_width
from .call import CALLS, check, public_call

HEADS = (1, 4, 12, 24, 32, 48, 96)
SEQUENCES = (1, 2, 4, 8, 16, 64, 1024)
LENGTHS = (65, 1024, 8192)
DRAFTS = (2, 4, 8, 16, 17)
"""Sizes of the calls whose launches are compiled: launches depend on them in a few steps, which no other size takes."""


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
    """Compiles what serving will need, so that no call compiles later.

    Examples:
        >>> if torch.cuda.is_available():
        ...     fd.warmup(fd.chunk_kda, [(128, 128)], state_pool=[True])

    Kernels depend on head dimensions, dtypes and options, and in a few steps on sizes. So the launches of calls of each
    combination below are made for many sizes, of tensors without memory, and their kernels compiled and loaded. Nothing is
    launched. The logger "flashdelta" has a line per combination at level INFO. Options that are not listed are those of
    `chunk_kda`; `gate="softplus"` wants `lower_bound=None`.

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
        packed: the values that `cu_seqlens is not None` may take. Every combination of these iterables is compiled.
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
        device: the device to compile for. For a CPU the calls are checked, and nothing is compiled.

    Returns:
        The number of kinds of calls that are ready.

    Raises:
        ValueError, TypeError: as `op` itself would; no values for an argument to take; or a device that is not there (on a
            machine without a GPU, where nothing can be compiled, the default).
    """
    kind: str = public_call(op).operation.name
    wanted = "chunk_kda, fused_recurrent_kda, recurrent_kda or fused_kda_decode"
    rule("op", kind in ("chunk", "recurrent", *DRAFTED), wanted, op.__name__)
    device = find_device(device)
    dtypes = dict(dtype=dtype, state_dtype=state_dtype, checkpoint_dtype=checkpoint_dtype or state_dtype)
    dtypes |= dict(g_dtype=g_dtype or dtype, beta_dtype=beta_dtype or dtype, weight_dtype=weight_dtype or dtype)
    dtypes |= dict(cu_seqlens_dtype=cu_seqlens_dtype, state_indices_dtype=state_indices_dtype)
    for name, x in dtypes.items():
        if not isinstance(x, torch.dtype):
            raise mistyped(name, x, "a torch.dtype")
    gated = gate in PARAMETRIC_GATES
    calls = Calls(kind, dtypes, state_v_first, A_log=gated, dt_bias=gated and dt_bias, taps=conv_size)
    pairs = _values("head_dims", head_dims, _is_pair, "pairs (K, V), such as [(128, 128)]")

    own = [*itertools.product(flags("initial_state", initial_state), flags("output_final_state", output_final_state))]
    given = flags("final_state", final_state)  # which matters only where a final state is asked for
    plain = [(*x, is_given) for x in own for is_given in (given if x[1] else [False])]
    pooled = [*itertools.product(flags("has_initial_state", has_initial_state), flags("checkpoints", checkpoints))]
    pools = flags("state_pool", state_pool)
    ways: list[dict[str, Any]] = [
        *(dict(zip(("pool", "flags", "marks"), (True, *x))) for is_pool in pools for x in pooled if is_pool),
        *(dict(zip(("initial", "final", "given"), x)) for is_pool in pools for x in plain if not is_pool),
    ]
    buffers = [x for has in flags("checkpoint_states", checkpoint_states) for x in (MARKS if has else ("",))]
    if kind in DRAFTED:
        ways = [{"drafts": x} for x in DRAFTED[kind][: None if speculative else 1]]
    kinds = [*itertools.product(pairs, flags("packed", packed), ways, buffers if kind == "chunk" else [""])]
    options: dict[str, Any] = dict(gate=gate, lower_bound=lower_bound, backend=backend)
    options |= dict(use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, allow_neg_eigval=allow_neg_eigval)
    logit = "use_beta_sigmoid_in_kernel" if kind in ("chunk", "recurrent") else "beta_is_logit"
    options |= {logit: use_beta_sigmoid_in_kernel, "state_v_first": state_v_first}
    options |= {"safe_gate": safe_gate} if kind == "chunk" else {}
    for i, ((K, V), is_packed, way, buffer) in enumerate(kinds):
        logging.getLogger("flashdelta").info("warm-up: %s, kind %d of %d", op.__name__, i + 1, len(kinds))
        for call in calls.of_sizes(K, V, is_packed, buffer, **way):
            _compile(op, call | options, device)
            if kind == "decode" and "intermediate_states" in call:
                commit = next(function for function, call in CALLS.items() if call.kind == "commit")
                _compile(commit, calls.commit(call) | {"state_v_first": state_v_first, "backend": backend}, device)
    return len(kinds)


def _compile(op: Callable, call: dict[str, Any], device: torch.device) -> None:
    """Compiles the kernels of a call, which is checked."""
    problem, t = check(op, **call)
    backend = backends.choose(problem, device, call["backend"])
    if device.type == "cuda" and not backend.plain:
        from ..program.launch import compiling_for  # Triton need not be there

        with compiling_for(device):
            plan: Any = backend.build(problem, t)
            for launch in plan.launches:
                launch.compile()


def _values(name: str, given: Any, fits: Callable[[Any], bool], wanted: str) -> list:
    """Lists the values of an argument, all of which must fit."""
    found = list(given) if isinstance(given, Iterable) else []
    if not found or not all(map(fits, found)):
        raise mistyped(name, given, wanted)
    return found


def flags(name: str, given: Any) -> list:
    return _values(name, given, lambda x: isinstance(x, bool), "the values it may take, such as (False, True)")


def _is_pair(x: Any) -> bool:
    return isinstance(x, (tuple, list)) and len(x) == 2 and all(isinstance(n, int) for n in x)


MARKS = ("offsets", "regular")
"""Kinds of checkpoints in a buffer."""

DRAFTED = {
    "decode": ("", "slots", "slots counted", "states", "states by row", "records", "records by row"),
    "fused_decode": ("", "slots", "records"),
}
"""Places of the states of tokens that may be rejected; none in plain steps."""

make = functools.partial(torch.empty, dtype=torch.float32, device="meta")

Call = dict[str, Any]


@dataclass(frozen=True)
class Calls:
    """Calls of one operator, by tensors without memory."""

    kind: str
    dtypes: dict[str, torch.dtype]
    v_first: bool
    A_log: bool
    dt_bias: bool
    taps: int

    def of_sizes(self, K: int, V: int, packed: bool, buffer: str, drafts: str = "", **way: bool) -> Iterator[Call]:
        """Yields the arguments, but for options, of calls of one kind."""
        for N, T, H in self.sizes(packed, drafts):
            B, length = (1, N * T) if packed else (N, T)
            parameters = {"A_log": make(H) if self.A_log else None, "dt_bias": make(H, K) if self.dt_bias else None}
            call = parameters | {"cu_seqlens": make(N + 1, dtype=self.dtypes["cu_seqlens_dtype"]) if packed else None}
            state = make(N, H, *((V, K) if self.v_first else (K, V)), dtype=self.dtypes["state_dtype"])
            if self.kind == "fused_decode":
                yield call | self.layer(N, T, H, K, V, state) | self.steps(N, T, state, drafts, "state_indices", (K, V))
                continue
            widths = {"q": (H, K), "k": (H, K), "v": (H, V), "g": (H, K), "beta": (H,)}
            narrow = {"g": self.dtypes["g_dtype"], "beta": self.dtypes["beta_dtype"]}
            call |= {x: make(B, length, *y, dtype=narrow.get(x, self.dtypes["dtype"])) for x, y in widths.items()}
            if self.kind == "decode":
                yield call | self.steps(N, T, state, drafts, "ssm_state_indices", (K, V)) | {"initial_state": state}
                continue
            call |= self.states(N, T, state, buffer, way)
            yield call
            if self.kind == "chunk":
                yield call | {"batch_invariant": True}
                if packed and LENGTHS[0] == T:
                    ends = torch.arange(N + 1, dtype=self.dtypes["cu_seqlens_dtype"], device="cpu")
                    yield call | {"cu_seqlens_cpu": T * ends}

    def sizes(self, packed: bool, drafts: str) -> Iterable[tuple[int, int, int]]:
        """Sequences, tokens of each, heads."""
        if self.kind == "chunk":
            return itertools.product(SEQUENCES[:6], LENGTHS, HEADS)
        plain = {"fused_decode": (1,), "recurrent": (1, 2, 65), "decode": (1, 2)}
        lengths = plain[self.kind] if not drafts else DRAFTS if drafts.startswith("records") else DRAFTS[:1]
        return itertools.product(SEQUENCES, lengths, HEADS[1::3])

    def index(self, *shape: int) -> Tensor:
        return make(*shape, dtype=self.dtypes["state_indices_dtype"])

    def states(self, N: int, T: int, state: Tensor, buffer: str, way: dict[str, bool]) -> Call:
        """Arguments about the states of whole sequences. Indices of a pool are a column, as vLLM's are."""
        column = self.index(N, 2)[:, 0] if "pool" in way and self.kind == "chunk" else self.index(N)
        if "pool" in way:
            flags = {"has_initial_state": make(N, dtype=torch.bool)} if way["flags"] else {}
            found: dict[str, Any] = {"state_pool": state, "state_indices": column, **flags}
        else:
            found = {"initial_state": state if way["initial"] else None, "output_final_state": way["final"]}
            found |= {"final_state": state} if way["given"] else {}
        if buffer == "offsets" or (way.get("marks") and not buffer):
            found |= {"checkpoint_offsets": column, "checkpoint_indices": column}
        if buffer:
            rows = N * -(-T // INTERVAL_UNIT)
            found["checkpoint_states"] = make(rows, *state.shape[1:], dtype=self.dtypes["checkpoint_dtype"])
        return found | ({"checkpoint_every": INTERVAL_UNIT} if buffer == "regular" else {})

    def steps(self, N: int, T: int, state: Tensor, drafts: str, name: str, dims: tuple[int, int]) -> Call:
        """Arguments about the states of steps of decoding; `name`: of the indices."""
        where, _, more = drafts.partition(" ")
        if not where:
            return {name: self.index(N)}
        found: Call = {"num_spec_tokens": T - 1, name: self.index(N, T) if where == "slots" else self.index(N)}
        if more == "counted" or self.kind == "fused_decode":
            found["num_accepted_tokens"] = self.index(N)
        if where == "slots":
            return found
        records = make(N, T, state.shape[1], record_width(*dims))
        found["intermediate_states"] = state.new_empty(N, T, *state.shape[1:]) if where == "states" else records
        if self.kind == "decode":
            found |= {"update_state": False, "intermediate_state_indices": self.index(N) if more else None}
        return found

    def commit(self, call: Call) -> Call:
        """Arguments of `commit` after a verification."""
        names = ("initial_state", "intermediate_states", "ssm_state_indices", "intermediate_state_indices")
        return {x: call[x] for x in names} | {"num_accepted_tokens": self.index(len(call["ssm_state_indices"]))}

    def layer(self, N: int, T: int, H: int, K: int, V: int, state: Tensor) -> Call:
        """Arguments of `fused_kda_decode` besides those about states."""
        rows, D, weight = N * T, H * (2 * K + V), self.dtypes["weight_dtype"]
        tokens = {"x": ("", D), "raw_g": ("g_", H, K), "raw_beta": ("beta_", H), "output_gate": ("", H, V)}
        found: Call = {x: make(rows, *shape, dtype=self.dtypes[f"{of}dtype"]) for x, (of, *shape) in tokens.items()}
        conv_state = make(N, self.taps - 2 + T, D, dtype=self.dtypes["dtype"]).mT
        weights = {"weight": make(D, self.taps, dtype=weight), "norm_weight": make(V, dtype=weight)}
        return found | weights | {"conv_state": conv_state, "state": state}
