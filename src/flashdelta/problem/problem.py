"""What a call is: `Problem`, the one record of a validated call, which holds no tensor, and `Tensors`, its inputs by role."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

GateName = Literal["none", "softplus", "lower_bound", "logsigmoid"]
NullIndex = Literal["negative", "non_positive"]
Precision = Literal["ieee", "tf32x3"]
NormGate = Literal["sigmoid", "silu"]
PrefillGate = Literal["none", "logsigmoid"]

AUTO = 0
"""Instead of a number of segments: as many as pay."""

BACKWARD = "_backward"
"""Ends the name of an operation whose plan is the backward pass of one."""

DECODE_TOKENS = 17
"""Tokens that `recurrent_kda` takes of a sequence at most: a token and sixteen drafts."""

RECORD_COUNTS = 4
"""Numbers after a replay record. Those of the first token say how many are recorded, each to a slice of value channels."""

RECORD_MULTIPLE = 16
"""Of the width of replay records. With any number of heads strides are multiples of 16 then, so that kernels compile once."""

DEFAULT_PRECISION: Precision = "tf32x3"
"""21 mantissa bits or more, on tensor cores; true float32 products run on the ordinary units."""


ABSENT: Any = None
"""Default of roles that only some operations have; code that reads one may assume that it is set."""


@dataclass(frozen=True)
class Tensors:
    """The tensors of a call by role, in canonical shape: `A_log [HV]`, `dt_bias [HV, K]`, checkpoint tensors `[N, M]`."""

    q: Tensor = ABSENT
    k: Tensor = ABSENT
    v: Tensor = ABSENT
    g: Tensor = ABSENT
    beta: Tensor = ABSENT
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    initial_state: Tensor | None = None
    cu_seqlens: Tensor | None = None
    border: Tensor | None = None
    # of calls over a pool
    state_pool: Tensor | None = None
    state_indices: Tensor | None = None
    has_initial_state: Tensor | None = None
    checkpoint_offsets: Tensor | None = None
    checkpoint_indices: Tensor | None = None
    checkpoint_states: Tensor | None = None
    # of decoding
    num_accepted_tokens: Tensor | None = None
    source_pool: Tensor | None = None
    source_indices: Tensor | None = None
    intermediate_states: Tensor | None = None
    intermediate_indices: Tensor | None = None
    # of the backward pass: what the forward left, and what comes in
    v_new: Tensor = ABSENT
    A: Tensor = ABSENT
    h: Tensor = ABSENT
    do: Tensor = ABSENT
    dv: Tensor = ABSENT
    dh: Tensor = ABSENT
    dht: Tensor | None = None
    workspace: Tensor | None = None
    packets: Tensor | None = None
    segments: Tensor | None = None
    # what the caller wants written, and gets back
    out: Tensor | None = None
    final_state: Tensor | None = None
    # of the layer around attention: convolution and norm
    x: Tensor = ABSENT
    z: Tensor = ABSENT
    weight: Tensor = ABSENT
    bias: Tensor | None = None
    conv_state: Tensor = ABSENT
    norm_weight: Tensor = ABSENT
    # while a plan is built
    memory: Any = None
    """Where the tensors lie (`workspace.Slots`)."""

    def present(self) -> dict[str, Tensor]:
        return {name: x for name in ROLES if (x := getattr(self, name)) is not None}

    def given(self) -> dict[str, Tensor]:
        """Results by name that are tensors of the caller's."""
        found = {"o": self.out, "final_state": self.final_state}
        return {name: x for name, x in found.items() if x is not None}

    @property
    def first(self) -> Tensor:
        """What a call has first: its queries, the layer's input, or the pool of a commit."""
        x = next((x for x in (self.q, self.x, self.state_pool) if x is not None), None)
        assert x is not None
        return x

    @property
    def device(self) -> torch.device:
        """Where the call runs."""
        return self.first.device if self.memory is None else self.memory.device


class Written(NamedTuple):
    """What a call writes: places among its tensors; pairs of a place and those whose tensors must not share its memory; and
    what refuses a call where they do, by name."""

    places: Sequence[int]
    pairs: Sequence[tuple[int, Sequence[int]]]
    refuse: Callable[[Sequence[Tensor | None]], None]


ROLES = tuple(f.name for f in fields(Tensors) if f.name != "memory")
INPUTS = ROLES[: ROLES.index("state_pool")]
"""The tensors of a call that has no pool. None of them is ever written, and those of floats may take gradients."""

LAYER_INPUTS = {
    "gated_rms_norm": ("x", "z", "weight"),
    "short_convolution": ("x", "weight", "bias", "initial_state", "cu_seqlens"),
}
"""The same of the layer's operations, by name."""


def inputs_of(operation: str) -> tuple[str, ...]:
    """The inputs of an operation, or of its backward pass."""
    return LAYER_INPUTS.get(operation.removesuffix(BACKWARD), INPUTS)


class Result(NamedTuple):
    """What a call returns under a name. `zeroed`: kernels leave some of it alone, which must be zero."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    zeroed: bool = False


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The part of a problem that no tensor tells. An option of a public function that has the name of a field here is one.

    `beta_kind` is `"value"`, `"logit"` (sigmoid in the kernel) or `"double_logit"` (2 sigmoid, the `[0, 2)` range).
    `safe_gate` is true when every step's log decay is
    known to lie in `[-5, 0]`. `checkpoint_every`: tokens from one checkpoint of a sequence to the next, 0 for none.
    `null_index` says which pool indices name no slot: those below 0, or 0 too. `split` is the number of segments of a sequence,
    1 for whole ones, or `AUTO` (`split.py`), for which the host may know bounds on the chunks of the longest sequence and of
    all (`split.known_lengths`, else 0). Of decoding alone: `spec_tokens` speculative tokens a sequence, and without
    `update_state` the pool is only read. Of prefills in float32: `precision` of the matrix products, and `heads` that one batch
    row was given as (each is a batch row of its own). Of the layer's convolution and norm: their `activation`, and `eps` of the
    norm. Of calls over several ranks: the name of the `process_group`, this process' `rank` in it, how many `ranks` it has
    (`context.py`), and the way of their `exchange` (`exchanges.py`), of which states go by `relay` where there are two.
    """

    operation: str = "chunk"
    scale: float = 1.0
    gate: str = "none"
    lower_bound: float | None = None
    safe_gate: bool = False
    beta_kind: str = "value"
    l2norm: bool = False
    chunk_size: int = 64
    output_final_state: bool = False
    return_intermediate_states: bool = False
    checkpoint_every: int = 0
    state_v_first: bool = False
    null_index: str = "negative"
    spec_tokens: int = 0
    update_state: bool = True
    split: int = AUTO
    batch_invariant: bool = False
    disable_recompute: bool = False
    longest_chunks: int = 0
    all_chunks: int = 0
    precision: str = DEFAULT_PRECISION
    heads: int = 1
    activation: str = "none"
    eps: float = 0.0
    process_group: str = ""
    rank: int = 0
    ranks: int = 1
    exchange: str = "gather"
    relay: bool = True


SETTINGS = fields(Settings)


@dataclass(frozen=True, kw_only=True)
class Problem(Settings):
    """A call, validated. Symbols as in docs/algorithm.md.

    `B, T, H, HV, K, V` are the tensor sizes and `N` the number of sequences (`B`, or `len(cu_seqlens) - 1` when
    packed). `state_dtype` is the dtype of the initial and the final state, or of the pool that holds both; `final_dtype`
    that of the final state, which is another where the caller's `final_state` has it.
    `has_initial_state`: the caller passed `initial_state`. `pool_slots` is the pool's size (0 without one) and
    `checkpoints` the number `M` of offsets each sequence may have. `checkpoint_rows`: of `checkpoint_states`, None without
    one. `has_intermediate`: the caller passed `intermediate_states`; `has_records`: which is a replay buffer. `rows`: of
    `intermediate_states`, or chunks that `h` and `dh` of stage WY hold of a batch row, whose dtypes, with A's, are
    `state_dtype`, `state_grad_dtype` and `A_dtype`. Of the layer's operations: `shape` of the input, `D` channels,
    `taps` of the convolution's filters, and `state_length` inputs that a state of it holds (`fused_kda_decode` has the latter
    two, and the sizes of attention). `output_dtype`: of `o`, which `out` may have in float32, and of a norm's gate.
    """

    B: int = 0
    T: int = 0
    H: int = 0
    HV: int = 0
    K: int = 0
    V: int = 0
    N: int = 0
    dtype: torch.dtype
    output_dtype: torch.dtype
    g_dtype: torch.dtype = torch.float32
    beta_dtype: torch.dtype = torch.float32
    state_dtype: torch.dtype = torch.float32
    final_dtype: torch.dtype = torch.float32
    state_grad_dtype: torch.dtype = torch.float32
    A_dtype: torch.dtype = torch.float32
    has_A_log: bool = False
    has_dt_bias: bool = False
    has_initial_state: bool = False
    has_pool: bool = False
    pool_slots: int = 0
    checkpoints: int = 0
    checkpoint_rows: int | None = None
    has_intermediate: bool = False
    has_records: bool = False
    rows: int = 0
    packed: bool = False
    requires_grad: bool = False
    shape: tuple[int, ...] = ()
    D: int = 0
    taps: int = 0
    state_length: int = 0

    @property
    def group(self) -> int:
        """Value heads per query/key head."""
        return self.HV // self.H

    @property
    def slots(self) -> int:
        """Upper bound on a batch row's chunks, known without reading a device tensor (see `reference/sequences.py`)."""
        if self.packed:
            return self.T // self.chunk_size + self.N * (1 + self.checkpoints)
        return -(-self.T // self.chunk_size) + self.checkpoints

    @property
    def packets(self) -> int:
        """Sequences that may go on from rank to rank: one of packed ones, or every batch row."""
        return 1 if self.packed else self.B

    @property
    def relays(self) -> bool:
        """Whether a forward's states go from the scan of one rank to that of the next."""
        return self.ranks == 2 and self.relay

    @property
    def packet_shape(self) -> tuple[int, int, int, int, int]:
        """Of what all ranks say of those: for each rank, sequence and value head `M^T [K, K]`, of more ranks than two, then
        `b^T [V, K]`."""
        return (self.ranks, self.packets, self.HV, packet_columns(self.ranks, self.K, self.V), self.K)

    @property
    def most_tokens(self) -> int:
        """Tokens that are looked at of a sequence at most."""
        if self.operation in ("commit", "fused_decode"):
            return 1 + self.spec_tokens
        if self.operation != "decode":
            return self.T
        return 1 + self.spec_tokens if self.spec_tokens else DECODE_TOKENS

    @property
    def stores_each_state(self) -> bool:
        """Whether the state after every token goes somewhere, and not only the final one."""
        return self.has_intermediate or (self.spec_tokens > 0 and self.update_state)

    @property
    def stores_final_state(self) -> bool:
        """Whether final states go anywhere: to the caller, or to the pool."""
        return self.output_final_state or self.has_pool

    @property
    def keeps(self) -> bool:
        """Whether the forward leaves what its backward pass would compute again."""
        return self.requires_grad and self.disable_recompute

    @property
    def in_chunks(self) -> Problem:
        """As kernels run it: they have gradients in chunks, and with those `fused_recurrent_kda` is `chunk_kda`."""
        if self.operation == "recurrent" + BACKWARD or (self.operation == "recurrent" and self.requires_grad):
            return replace(self, operation=self.operation.replace("recurrent", "chunk"))
        return self

    @property
    def lowest_index(self) -> int:
        """The least pool index that is not null."""
        return 1 if self.null_index == "non_positive" else 0

    @property
    def lowest_checkpoint(self) -> int:
        """The same of checkpoints. In a buffer of their own no row is reserved."""
        return self.lowest_index if self.checkpoint_rows is None else 0

    @property
    def inner_state(self) -> tuple[int, int]:
        return (self.V, self.K) if self.state_v_first else (self.K, self.V)

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        return (self.N, self.HV, *self.inner_state)

    def results(self) -> dict[str, Result]:
        """What the call returns, by name and in order."""
        tokens = (self.B, self.T, self.HV)
        if self.operation == "commit":
            return {}
        if self.operation in LAYER_INPUTS:
            found = {"o": Result(self.shape, self.output_dtype)}
            if self.output_final_state:
                found["final_state"] = Result((self.N, self.D, self.state_length), self.final_dtype)
            return found
        if self.operation == "wy":
            wide = torch.float64 if self.dtype == torch.float64 else torch.float32
            keys, squares = Result((*tokens, self.K), wide), Result((*tokens, self.chunk_size), wide)
            values = Result((*tokens, self.V), self.dtype)
            return {"dq": keys, "dk": keys, "dv": values, "dbeta": Result(tokens, wide), "dg": keys, "dA": squares}
        if self.operation == "prefill":
            rows = (self.B // self.heads, self.heads)
            chunks = (*rows, self.slots, self.chunk_size)
            shapes = {"o": (*rows, self.T, self.V), "w": (*chunks, self.K), "u": (*chunks, self.V)}
            return {name: Result(shape, self.dtype) for name, shape in shapes.items()}
        found = {"o": Result((*tokens, self.V), self.output_dtype)}
        if self.output_final_state:
            found["final_state"] = Result(self.state_shape, self.final_dtype)
        if self.return_intermediate_states:
            # rows past the last chunk of packed sequences stay zero, and of a batch row that has fewer checkpoints
            zeroed = self.packed or self.checkpoints > 0
            found["h"] = Result((self.B, self.slots, self.HV, *self.inner_state), self.dtype, zeroed=zeroed)
        return found


def packet_columns(ranks: int, K: int, V: int) -> int:
    """Columns of M and b that ranks tell each other: of two none is between others, and M is not needed."""
    return V if ranks <= 2 else K + V


def record_width(K: int, V: int) -> int:
    """Numbers of a token and head in a replay buffer: `exp(g)` and `k` `[K]`, what the token writes `[V]`, counts."""
    return -(-(2 * K + V + RECORD_COUNTS) // RECORD_MULTIPLE) * RECORD_MULTIPLE


def record_counts(problem: Problem, records: Tensor) -> Tensor:
    """How many tokens each row of a replay buffer has recorded, `[rows, HV, 4]`, as a view."""
    begin = 2 * problem.K + problem.V
    return records[:, 0, :, begin : begin + RECORD_COUNTS]


def number_of_sequences(t: Tensors) -> int:
    return t.first.shape[0] if t.cu_seqlens is None else t.cu_seqlens.shape[0] - 1


def has_records(t: Tensors) -> bool:
    """Whether `intermediate_states` is a replay buffer, `[rows, 1 + S, HV, record_width]`, and not of states."""
    return t.intermediate_states is not None and t.intermediate_states.dim() == 4


def problem_of(t: Tensors, **settings: Any) -> Problem:
    """The problem of tensors already validated."""
    if t.x is not None:
        return layer_problem_of(t, **settings)
    if t.q is None:  # commit
        assert t.state_pool is not None and t.state_indices is not None and t.intermediate_states is not None
        rows, pool = t.intermediate_states.shape[0], t.state_pool
        K, V = pool.shape[:1:-1] if settings["state_v_first"] else pool.shape[2:]
        given = dict(
            has_pool=True, pool_slots=pool.shape[0], has_intermediate=True, has_records=has_records(t), rows=rows
        )
        sizes = dict(N=t.state_indices.shape[0], HV=pool.shape[1], K=K, V=V)
        return Problem(**settings, **sizes, **given, dtype=pool.dtype, output_dtype=pool.dtype, state_dtype=pool.dtype)
    B, T, H, K = t.q.shape
    wide = torch.float64 if t.q.dtype == torch.float64 else torch.float32
    states = (t.state_pool, t.source_pool, t.initial_state, t.h, t.final_state)
    state = next((x for x in states if x is not None), None)
    state_dtype = wide if state is None else state.dtype
    scratch = t.intermediate_states
    fused = t.conv_state is not None
    return Problem(
        **settings,
        B=B,
        T=T,
        H=H,
        HV=t.v.shape[2],
        K=K,
        V=t.v.shape[3],
        N=number_of_sequences(t),
        dtype=t.q.dtype,
        output_dtype=t.q.dtype if t.out is None else t.out.dtype,
        g_dtype=t.g.dtype,
        beta_dtype=t.beta.dtype,
        state_dtype=state_dtype,
        final_dtype=state_dtype if t.final_state is None else t.final_state.dtype,
        state_grad_dtype=wide if t.dh is None else t.dh.dtype,
        A_dtype=wide if t.A is None else t.A.dtype,
        has_A_log=t.A_log is not None,
        has_dt_bias=t.dt_bias is not None,
        has_initial_state=t.initial_state is not None,
        has_pool=t.state_pool is not None,
        pool_slots=0 if t.state_pool is None else t.state_pool.shape[0],
        checkpoints=0 if t.checkpoint_offsets is None else t.checkpoint_offsets.shape[1],
        checkpoint_rows=None if t.checkpoint_states is None else t.checkpoint_states.shape[0],
        has_intermediate=scratch is not None,
        has_records=has_records(t),
        rows=t.h.shape[1] if t.h is not None else 0 if scratch is None else scratch.shape[0],
        packed=t.cu_seqlens is not None,
        taps=t.weight.shape[-1] if fused else 0,
        state_length=t.conv_state.shape[2] if fused else 0,
        requires_grad=torch.is_grad_enabled() and any(x.requires_grad for x in t.present().values()),
    )


def layer_problem_of(t: Tensors, **settings: Any) -> Problem:
    """The same of the layer's operations."""
    shape = tuple(t.x.shape)
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in t.present().values())
    given = dict(shape=shape, dtype=t.x.dtype, requires_grad=grad)
    if t.z is not None:
        return Problem(**settings, **given, V=shape[-1], output_dtype=t.z.dtype)
    state = next((x for x in (t.state_pool, t.initial_state, t.final_state) if x is not None), None)
    state_dtype, taps = t.x.dtype if state is None else state.dtype, t.weight.shape[-1]
    buffer = t.checkpoint_states
    any_state = buffer if state is None else state
    return Problem(
        **settings,
        **given,
        B=shape[0],
        T=shape[1],
        D=shape[2],
        output_dtype=t.x.dtype,
        N=number_of_sequences(t),
        taps=taps,
        state_length=taps - 1 if any_state is None else any_state.shape[2],
        state_dtype=state_dtype,
        final_dtype=state_dtype if t.final_state is None else t.final_state.dtype,
        has_initial_state=t.initial_state is not None,
        has_pool=t.state_pool is not None,
        pool_slots=0 if t.state_pool is None else t.state_pool.shape[0],
        checkpoints=0 if t.checkpoint_offsets is None else t.checkpoint_offsets.shape[1],
        checkpoint_rows=None if buffer is None else buffer.shape[0],
        packed=t.cu_seqlens is not None,
    )
