"""The record of a validated call, `Problem`, which holds no tensor, and its inputs by role, `Tensors`: by family of operations.

`Chunk`: whole sequences, in chunks. `Step`: token by token, from and to states. `Convolution` and `Norm`: the layer around
attention. Symbols as in docs/algorithm.md: `N` sequences (`B`, or `len(cu_seqlens) - 1` when packed) of `B * T` tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor

T = TypeVar("T")

GateName = Literal["none", "softplus", "lower_bound", "logsigmoid"]
GATES: tuple[str, ...] = get_args(GateName)
PARAMETRIC_GATES = ("softplus", "lower_bound")
"""Gates that read `A_log` and `dt_bias`."""
PLAIN_GATES = tuple(gate for gate in GATES if gate not in ("none", *PARAMETRIC_GATES))
"""Gates without parameters."""

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
"""The width of replay records is a multiple of it: strides are so with any number of heads, and kernels compile once."""

L2_EPS = 1e-6
"""Added to the sum of squares of a row of q or k."""

DEFAULT_PRECISION: Precision = "tf32x3"
"""21 mantissa bits or more, on tensor cores; true float32 products run on the ordinary units."""


def make_frozen(kind: type[T], values: Mapping[str, Any]) -> T:
    """Makes a frozen dataclass of all its fields: its `__init__` sets one after the other, which takes five times as long."""
    if torch.compiler.is_compiling():  # PyTorch 2.11 does not trace an update of `vars`
        return kind(**values)
    made = kind.__new__(kind)
    vars(made).update(values)
    return made


def replaced(x: T, /, **changes: Any) -> T:
    """Copies a dataclass as `dataclasses.replace` does, which takes twenty times as long."""
    return make_frozen(type(x), {**vars(x), **changes})


# ---- tensors ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """The tensors of a call by role, in canonical shape. `do`, `dht`: incoming gradients of a backward pass; `out`,
    `final_state`: what the caller wants written, and gets back."""

    PRIMARY = "q"
    do: Tensor | None = None
    dht: Tensor | None = None
    out: Tensor | None = None
    final_state: Tensor | None = None
    # while a plan is built
    memory: Any = None
    """Slots in which the tensors lie (`workspace.Slots`)."""

    def present(self) -> dict[str, Tensor]:
        # not from `vars`, which PyTorch 2.11 does not trace
        roles = self.__dataclass_fields__
        return {role: x for role in roles if (x := getattr(self, role)) is not None and role != "memory"}

    def caller_outputs(self) -> dict[str, Tensor]:
        """Results by name that are tensors of the caller's."""
        return {name: x for name, x in {"o": self.out, "final_state": self.final_state}.items() if x is not None}

    @property
    def primary(self) -> Tensor:
        """Tells where the call runs: its queries, the layer's input, or the pool of a commit."""
        return getattr(self, self.PRIMARY)

    @property
    def device(self) -> torch.device:
        """The device on which the call runs."""
        return self.primary.device if self.memory is None else self.memory.device


@dataclass(frozen=True, kw_only=True)
class NormTensors(Tensors):
    x: Tensor
    z: Tensor
    weight: Tensor
    PRIMARY = "x"


@dataclass(frozen=True, kw_only=True)
class SequenceTensors(Tensors):
    """Sequences that begin and end with a state. Checkpoint tensors are `[N, M]`."""

    cu_seqlens: Tensor | None = None
    initial_state: Tensor | None = None
    state_pool: Tensor | None = None
    state_indices: Tensor | None = None
    has_initial_state: Tensor | None = None
    checkpoint_offsets: Tensor | None = None
    checkpoint_indices: Tensor | None = None
    checkpoint_states: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class ConvolutionTensors(SequenceTensors):
    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    PRIMARY = "x"


@dataclass(frozen=True, kw_only=True)
class AttentionTensors(SequenceTensors):
    """Tokens of Kimi Delta Attention. `A_log [HV]`, `dt_bias [HV, K]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class ChunkTensors(AttentionTensors):
    """`border`: of calls over ranks. The others are what a forward leaves for its backward pass."""

    border: Tensor | None = None
    A: Tensor | None = None
    h: Tensor | None = None
    v_new: Tensor | None = None
    workspace: Tensor | None = None
    packets: Tensor | None = None
    segments: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class WyTensors(AttentionTensors):
    v_new: Tensor
    A: Tensor
    h: Tensor
    dh: Tensor
    do: Tensor
    dv: Tensor


@dataclass(frozen=True, kw_only=True)
class StepTensors(AttentionTensors):
    num_accepted_tokens: Tensor | None = None
    source_pool: Tensor | None = None
    source_indices: Tensor | None = None
    intermediate_states: Tensor | None = None
    intermediate_indices: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class FusedTensors(StepTensors):
    """`weight [parts, channels, W]`: one part, or three side by side."""

    weight: Tensor
    bias: Tensor | None = None
    conv_state: Tensor
    state_pool: Tensor
    state_indices: Tensor
    z: Tensor
    norm_weight: Tensor


@dataclass(frozen=True, kw_only=True)
class CommitTensors(Tensors):
    state_pool: Tensor
    state_indices: Tensor
    num_accepted_tokens: Tensor
    intermediate_states: Tensor
    intermediate_indices: Tensor | None = None
    PRIMARY = "state_pool"


class Written(NamedTuple):
    """The writes of a call: places among its tensors; pairs of a place and those whose tensors must not share its memory; and
    what refuses a call where they do, by name."""

    places: Sequence[int]
    pairs: Sequence[tuple[int, Sequence[int]]]
    refuse: Callable[[Sequence[Tensor | None]], None]


INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens", "border")
"""The tensors of a call that has no pool. None of them is ever written, and those of floats may take gradients."""

LAYER_INPUTS = {
    "gated_rms_norm": ("x", "z", "weight"),
    "short_convolution": ("x", "weight", "bias", "initial_state", "cu_seqlens"),
}
"""The same of the layer's operations, by name."""


def inputs_of(operation: str) -> tuple[str, ...]:
    """The inputs of an operation, or of its backward pass."""
    return LAYER_INPUTS.get(operation.removesuffix(BACKWARD), INPUTS)


# ---- problems -----------------------------------------------------------------------------------------------------------


class Result(NamedTuple):
    """A tensor that a call returns under a name. `zeroed`: kernels leave some of it alone, which must be zero."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    zeroed: bool = False


def requires_grad(t: Tensors) -> bool:
    return torch.is_grad_enabled() and any([x.requires_grad for x in t.present().values()])


def number_of_sequences(t: Any) -> int:
    if isinstance(t, CommitTensors):
        return t.state_indices.shape[0]
    return t.primary.shape[0] if t.cu_seqlens is None else t.cu_seqlens.shape[0] - 1


def states_of(t: Any) -> list[Tensor]:
    """The states that a call has: the first tells their dtype, and the length of a convolution's."""
    roles = ("state_pool", "source_pool", "initial_state", "final_state")
    return [x for role in roles if (x := getattr(t, role, None)) is not None]


def state_dtype(t: Any) -> torch.dtype:
    states = states_of(t)
    if states:
        return states[0].dtype
    return t.x.dtype if isinstance(t, ConvolutionTensors) else wider(t.primary.dtype)


def state_length(t: ConvolutionTensors) -> int:
    states = [*states_of(t), *([] if t.checkpoint_states is None else [t.checkpoint_states])]
    return states[0].shape[2] if states else t.weight.shape[-1] - 1


def is_record(states: Tensor | None) -> bool:
    """True if `intermediate_states` is a replay buffer, `[rows, 1 + S, HV, record_width]`, and does not hold states."""
    return states is not None and states.dim() == 4


def derived(by: Callable[[Any], Any]) -> Any:
    """A field that `by` derives from the tensors. The others are settings."""
    return field(metadata={"derived": by})


def settings_of(family: type[Problem]) -> dict[str, str]:
    """The fields that are not derived from tensors, and their types. A public function's option of that name sets the field."""
    return {f.name: str(f.type) for f in fields(family) if not f.metadata}


def required_roles(family: type[Tensors]) -> set[str]:
    return {f.name for f in fields(family) if f.default is MISSING}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A call, validated. `dtype`: of its tokens; `output_dtype`: of `o`, which `out` may have in float32."""

    operation: str
    dtype: torch.dtype = derived(lambda t: t.primary.dtype)
    output_dtype: torch.dtype = derived(lambda t: t.primary.dtype if t.out is None else t.out.dtype)
    requires_grad: bool = derived(requires_grad)

    def results(self) -> dict[str, Result]:
        """The results of the call, by name and in order."""
        return {}


@dataclass(frozen=True, kw_only=True)
class NormProblem(Problem):
    """`shape`: of the input, whose rows have `V` channels. `output_dtype` is that of the gate."""

    activation: str
    eps: float
    output_dtype: torch.dtype = derived(lambda t: t.z.dtype)
    shape: tuple[int, ...] = derived(lambda t: tuple(t.x.shape))
    V: int = derived(lambda t: t.x.shape[-1])

    def results(self) -> dict[str, Result]:
        return {"o": Result(self.shape, self.output_dtype)}


@dataclass(frozen=True, kw_only=True)
class PoolProblem(Problem):
    """A call whose indices name slots of a pool of `pool_slots` (0 without one). `null_index` says which name none: those below
    0, or 0 too. `state_dtype` is the dtype of the initial and the final state, or of the pool that holds both."""

    null_index: str = "negative"
    N: int = derived(number_of_sequences)
    state_dtype: torch.dtype = derived(state_dtype)
    pool_slots: int = derived(lambda t: 0 if t.state_pool is None else t.state_pool.shape[0])

    @property
    def lowest_index(self) -> int:
        """The least pool index that is not null."""
        return 1 if self.null_index == "non_positive" else 0


@dataclass(frozen=True, kw_only=True)
class SequenceProblem(PoolProblem):
    """Sequences that begin and end with a state.

    `final_dtype`: of the final state, which is another than `state_dtype` where the caller's `final_state` has it.
    `has_initial_state`: the caller passed `initial_state`. `checkpoint_every`: tokens from one checkpoint of a sequence to the
    next, 0 for none; `checkpoints`: the number `M` of offsets each sequence may have; `checkpoint_rows`: of
    `checkpoint_states`, None without one.
    """

    output_final_state: bool = False
    checkpoint_every: int = 0
    B: int = derived(lambda t: t.primary.shape[0])
    T: int = derived(lambda t: t.primary.shape[1])
    packed: bool = derived(lambda t: t.cu_seqlens is not None)
    final_dtype: torch.dtype = derived(lambda t: state_dtype(t) if t.final_state is None else t.final_state.dtype)
    has_initial_state: bool = derived(lambda t: t.initial_state is not None)
    has_pool: bool = derived(lambda t: t.state_pool is not None)
    checkpoints: int = derived(lambda t: 0 if t.checkpoint_offsets is None else t.checkpoint_offsets.shape[1])
    checkpoint_rows: int | None = derived(lambda t: None if (x := t.checkpoint_states) is None else x.shape[0])

    @property
    def most_tokens(self) -> int:
        """Tokens that are looked at of a sequence at most."""
        return self.T

    @property
    def stores_final_state(self) -> bool:
        """True if final states go anywhere: to the caller, or to the pool."""
        return self.output_final_state or self.has_pool

    @property
    def lowest_checkpoint(self) -> int:
        """The least index of a checkpoint that is not null. In a buffer of their own no row is reserved."""
        return self.lowest_index if self.checkpoint_rows is None else 0


@dataclass(frozen=True, kw_only=True)
class ConvolutionProblem(SequenceProblem):
    """`D` channels, `taps` of the filters, and `state_length` inputs that a state holds."""

    activation: str = "none"
    D: int = derived(lambda t: t.x.shape[2])
    taps: int = derived(lambda t: t.weight.shape[-1])
    state_length: int = derived(state_length)

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.B, self.T, self.D)

    def results(self) -> dict[str, Result]:
        found = {"o": Result(self.shape, self.output_dtype)}
        if self.output_final_state:
            found["final_state"] = Result((self.N, self.D, self.state_length), self.final_dtype)
        return found


@dataclass(frozen=True, kw_only=True)
class AttentionProblem(SequenceProblem):
    """`beta_kind` is `"value"`, `"logit"` (sigmoid in the kernel) or `"double_logit"` (2 sigmoid, the `[0, 2)` range).
    `safe_gate` is true when every step's log decay is known to lie in `[-5, 0]`. A gate without a `lower_bound` has 0."""

    scale: float
    gate: str
    lower_bound: float = 0.0
    safe_gate: bool = False
    beta_kind: str = "value"
    l2norm: bool = False
    state_v_first: bool = False
    H: int = derived(lambda t: t.q.shape[2])
    HV: int = derived(lambda t: t.v.shape[2])
    K: int = derived(lambda t: t.q.shape[3])
    V: int = derived(lambda t: t.v.shape[3])
    g_dtype: torch.dtype = derived(lambda t: t.g.dtype)
    beta_dtype: torch.dtype = derived(lambda t: t.beta.dtype)
    has_A_log: bool = derived(lambda t: t.A_log is not None)
    has_dt_bias: bool = derived(lambda t: t.dt_bias is not None)

    @property
    def group(self) -> int:
        """Value heads per query/key head."""
        return self.HV // self.H

    @property
    def inner_state(self) -> tuple[int, int]:
        return (self.V, self.K) if self.state_v_first else (self.K, self.V)

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        return (self.N, self.HV, *self.inner_state)

    def results(self) -> dict[str, Result]:
        found = {"o": Result((self.B, self.T, self.HV, self.V), self.output_dtype)}
        if self.output_final_state:
            found["final_state"] = Result(self.state_shape, self.final_dtype)
        return found


@dataclass(frozen=True, kw_only=True)
class ChunkProblem(AttentionProblem):
    """Whole sequences in chunks: `chunk`, `prefill`.

    `split` is the number of segments of a sequence, 1 for whole ones, or `AUTO` (`split.py`), for which the host may know
    bounds on the chunks of the longest sequence and of all (`split.known_lengths`, else 0). For prefills in float32:
    `precision` of the matrix products, and `heads` that one batch row was given as (each is a batch row of its own). For calls
    over several ranks: the name of the `process_group`, this process' `rank` in it, how many `ranks` it has, and the way of
    their `exchange`, of which states go by `relay` where there are two (`parallel/`).
    """

    chunk_size: int = 64
    return_intermediate_states: bool = False
    split: int = AUTO
    batch_invariant: bool = False
    disable_recompute: bool = False
    longest_chunks: int = 0
    all_chunks: int = 0
    precision: str = DEFAULT_PRECISION
    heads: int = 1
    process_group: str = ""
    rank: int = 0
    ranks: int = 1
    exchange: str = "gather"
    relay: bool = True

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
        """True if a forward's states go from the scan of one rank to that of the next."""
        return self.ranks == 2 and self.relay

    @property
    def packet_shape(self) -> tuple[int, int, int, int, int]:
        """Shape of what all ranks say of those: for each rank, sequence and value head `M^T [K, K]`, of more ranks than two,
        then `b^T [V, K]`."""
        # of two ranks none is between others, and M is not needed
        columns = self.V if self.ranks <= 2 else self.K + self.V
        return (self.ranks, self.packets, self.HV, columns, self.K)

    @property
    def keeps(self) -> bool:
        """True if the forward leaves what its backward pass would compute again."""
        return self.requires_grad and self.disable_recompute

    def results(self) -> dict[str, Result]:
        if self.operation == "prefill":
            rows = (self.B // self.heads, self.heads)
            chunks = (*rows, self.slots, self.chunk_size)
            shapes = {"o": (*rows, self.T, self.V), "w": (*chunks, self.K), "u": (*chunks, self.V)}
            return {name: Result(shape, self.dtype) for name, shape in shapes.items()}
        found = super().results()
        if self.return_intermediate_states:
            # rows past the last chunk of packed sequences stay zero, and of a batch row that has fewer checkpoints
            zeroed = self.packed or self.checkpoints > 0
            found["h"] = Result((self.B, self.slots, self.HV, *self.inner_state), self.dtype, zeroed=zeroed)
        return found


@dataclass(frozen=True, kw_only=True)
class WyProblem(ChunkProblem):
    """`rows`: chunks that `h` and `dh` hold of a batch row."""

    h_dtype: torch.dtype = derived(lambda t: t.h.dtype)
    dh_dtype: torch.dtype = derived(lambda t: t.dh.dtype)
    A_dtype: torch.dtype = derived(lambda t: t.A.dtype)
    rows: int = derived(lambda t: t.h.shape[1])

    def results(self) -> dict[str, Result]:
        tokens, wide = (self.B, self.T, self.HV), wider(self.dtype)
        keys, squares = Result((*tokens, self.K), wide), Result((*tokens, self.chunk_size), wide)
        values = Result((*tokens, self.V), self.dtype)
        return {"dq": keys, "dk": keys, "dv": values, "dbeta": Result(tokens, wide), "dg": keys, "dA": squares}


@dataclass(frozen=True, kw_only=True)
class StepProblem(AttentionProblem):
    """Token by token: `recurrent`, `decode`, `fused_decode`.

    `spec_tokens`: speculative tokens per sequence; without `update_state` the pool is only read. `has_intermediate`: the caller
    passed `intermediate_states`, of so many `rows`; `has_records`: which is a replay buffer.
    """

    spec_tokens: int = 0
    update_state: bool = True
    has_intermediate: bool = derived(lambda t: t.intermediate_states is not None)
    has_records: bool = derived(lambda t: is_record(t.intermediate_states))
    rows: int = derived(lambda t: 0 if t.intermediate_states is None else t.intermediate_states.shape[0])

    @property
    def most_tokens(self) -> int:
        if self.operation == "recurrent":
            return self.T
        return DECODE_TOKENS if self.operation == "decode" and not self.spec_tokens else 1 + self.spec_tokens

    @property
    def stores_each_state(self) -> bool:
        """True if the state after every token goes somewhere, and not only the final one."""
        return self.has_intermediate or (self.spec_tokens > 0 and self.update_state)


@dataclass(frozen=True, kw_only=True)
class FusedProblem(StepProblem):
    """A step of the layer: `taps` of the convolution, `eps` of the norm."""

    eps: float
    taps: int = derived(lambda t: t.weight.shape[-1])


@dataclass(frozen=True, kw_only=True)
class CommitProblem(PoolProblem):
    """The end of a read-only verification of `1 + spec_tokens` tokens: `rows` of states, or of records."""

    spec_tokens: int
    state_v_first: bool
    K: int
    V: int
    HV: int = derived(lambda t: t.state_pool.shape[1])
    has_records: bool = derived(lambda t: is_record(t.intermediate_states))
    rows: int = derived(lambda t: t.intermediate_states.shape[0])

    @property
    def most_tokens(self) -> int:
        """Tokens that are looked at of a sequence at most."""
        return 1 + self.spec_tokens


def wider(dtype: torch.dtype) -> torch.dtype:
    """The dtype of results and states: float32, or float64 where tokens are in it."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def record_width(K: int, V: int) -> int:
    """Numbers of a token and head in a replay buffer: `exp(g)` and `k` `[K]`, what the token writes `[V]`, counts."""
    return -(-(2 * K + V + RECORD_COUNTS) // RECORD_MULTIPLE) * RECORD_MULTIPLE


def record_counts(problem: StepProblem | CommitProblem, records: Tensor) -> Tensor:
    """The number of tokens that each row of a replay buffer has recorded, `[rows, HV, 4]`, as a view."""
    begin = 2 * problem.K + problem.V
    return records[:, 0, :, begin : begin + RECORD_COUNTS]


P = TypeVar("P", bound=Problem)

FAMILIES: dict[type[Problem], type[Tensors]] = {
    NormProblem: NormTensors,
    ConvolutionProblem: ConvolutionTensors,
    ChunkProblem: ChunkTensors,
    WyProblem: WyTensors,
    StepProblem: StepTensors,
    FusedProblem: FusedTensors,
    CommitProblem: CommitTensors,
}
"""The tensors of each family's calls."""

DERIVED = {family: {f.name: f.metadata["derived"] for f in fields(family) if f.metadata} for family in FAMILIES}
"""Functions of each family's tensors that give the derived fields."""

SETTINGS = {family: tuple(settings_of(family)) for family in FAMILIES}
DEFAULTS = {family: {f.name: f.default for f in fields(family) if f.default is not MISSING} for family in FAMILIES}


def problem_of(family: type[P], t: Tensors, **settings: Any) -> P:
    """The problem of tensors already validated."""
    found = {name: derive(t) for name, derive in DERIVED[family].items()}
    return make_frozen(family, DEFAULTS[family] | settings | found)
