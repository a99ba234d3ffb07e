"""What a validated KDA call is.

`Problem` states a call completely (shapes, dtypes, gate, layout) without holding a tensor; `Tensors` holds them.
`check_call` is the one door through which both are made: past it, no code validates again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Literal

import torch

from ..program.cache import PLAIN
from . import device_checks as checked
from .errors import wrong as _wrong
from .split import AUTO, known_lengths

Algorithm = Literal["chunk", "recurrent", "decode"]
GateName = Literal["none", "softplus", "lower_bound", "logsigmoid"]
GATES: tuple[str, ...] = ("none", "softplus", "lower_bound", "logsigmoid")
NullIndex = Literal["negative", "non_positive"]
NULL_INDICES: tuple[str, ...] = ("negative", "non_positive")
HEAD_DIMS = (32, 64, 128, 256)
DECODE_HEAD_DIMS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CHUNK_SIZES = (32, 64)
LOWEST_BOUND = -5.0
"""Below -5 a 16-token block may decay by more than exp(80), which float32 cannot hold as a quotient."""

DECODE_TOKENS = 8
"""Tokens that `recurrent_kda` takes of a sequence at most."""

MAX_SEGMENTS = 1024
"""Of a sequence."""

MAX_CHECKPOINTS = 8
"""Checkpoints a sequence may have: each adds a chunk slot to every sequence."""


Results = tuple[torch.Tensor, "torch.Tensor | None", "torch.Tensor | None"]
"""`(o, final_state or None, h or None)`."""


@dataclass(frozen=True)
class Tensors:
    """The tensors of one call. `A_log` is `[HV]`, `dt_bias` is `[HV, K]` and the checkpoint tensors are `[N, M]`, whatever
    shape the caller passed. The last five are `recurrent_kda`'s alone (`decode_spec.py`)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor | None = None
    dt_bias: torch.Tensor | None = None
    initial_state: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    state_pool: torch.Tensor | None = None
    state_indices: torch.Tensor | None = None
    has_initial_state: torch.Tensor | None = None
    checkpoint_offsets: torch.Tensor | None = None
    checkpoint_indices: torch.Tensor | None = None
    num_accepted_tokens: torch.Tensor | None = None
    source_pool: torch.Tensor | None = None
    source_indices: torch.Tensor | None = None
    intermediate_states: torch.Tensor | None = None
    intermediate_indices: torch.Tensor | None = None

    def present(self) -> dict[str, torch.Tensor]:
        named = ((name, getattr(self, name)) for name in TENSOR_NAMES)
        return {name: x for name, x in named if x is not None}


TENSOR_NAMES = tuple(f.name for f in fields(Tensors))
INPUT_NAMES = TENSOR_NAMES[: TENSOR_NAMES.index("state_pool")]
"""The tensors of a call without a state pool; none of them is ever written."""


@dataclass(frozen=True)
class Incoming:
    """What a backward pass starts from: the gradients of `o` and of the final state (an empty tensor without one), and what the
    forward kept of its own work, by name."""

    grad_o: torch.Tensor
    grad_final: torch.Tensor
    kept: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The part of a validated call that no tensor tells.

    `beta_kind` is `"value"`, `"logit"` (sigmoid in the kernel) or `"double_logit"` (2 sigmoid, the `[0, 2)` range).
    `safe_gate` is true when every step's log decay is known to lie in `[-5, 0]`. `null_index` says which pool indices
    name no slot: those below 0, or 0 too. `split` is the number of segments of a sequence, 1 for whole ones, or `AUTO`
    (`split.py`), for which the host may know bounds on the chunks of the longest sequence and of all (`split.known_lengths`,
    else 0). Of `recurrent_kda` alone: `spec_tokens` is the number of speculative tokens, and without `update_state` the pool is
    only read.
    """

    algorithm: Algorithm = "chunk"
    scale: float
    gate: GateName = "none"
    lower_bound: float | None = None
    safe_gate: bool = False
    beta_kind: Literal["value", "logit", "double_logit"] = "value"
    l2norm: bool = False
    chunk_size: int = 64
    output_final_state: bool = False
    return_intermediate_states: bool = False
    state_v_first: bool = False
    null_index: NullIndex = "negative"
    spec_tokens: int = 0
    update_state: bool = True
    split: int = AUTO
    batch_invariant: bool = False
    longest_chunks: int = 0
    all_chunks: int = 0

    def settings(self) -> dict[str, object]:
        """The settings by name: the scalar arguments of the operators in `library.py`."""
        return {name: getattr(self, name) for name in SETTING_NAMES}


SETTING_NAMES = tuple(f.name for f in fields(Settings))


@dataclass(frozen=True, kw_only=True)
class Problem(Settings):
    """A KDA call, validated. Symbols as in docs/algorithm.md.

    `B, T, H, HV, K, V` are the tensor sizes and `N` the number of sequences (`B`, or `len(cu_seqlens) - 1` when
    packed). `state_dtype` is the dtype of the initial and the final state, or of the pool that holds both.
    `has_initial_state`: the caller passed `initial_state`. `pool_slots` is the pool's size (0 without one) and
    `checkpoints` the number `M` of checkpoints each sequence may have. `has_intermediate`: the caller passed
    `intermediate_states`.
    """

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int
    dtype: torch.dtype
    g_dtype: torch.dtype
    beta_dtype: torch.dtype
    state_dtype: torch.dtype
    has_A_log: bool = False
    has_dt_bias: bool = False
    has_initial_state: bool = False
    has_pool: bool = False
    pool_slots: int = 0
    checkpoints: int = 0
    has_intermediate: bool = False
    packed: bool = False
    requires_grad: bool = False

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
    def most_tokens(self) -> int:
        """Tokens that are looked at of a sequence at most."""
        if self.algorithm != "decode":
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
    def lowest_index(self) -> int:
        """The least pool index that is not null."""
        return 1 if self.null_index == "non_positive" else 0

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        inner = (self.V, self.K) if self.state_v_first else (self.K, self.V)
        return (self.N, self.HV, *inner)

    @property
    def intermediate_shape(self) -> tuple[int, int, int, int, int]:
        """Of `h`: `[B, NT, HV, K, V]`, `NT` being `slots`."""
        return (self.B, self.slots, *self.state_shape[1:])


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of a public call that are not tensors, under the names the caller used."""

    algorithm: Algorithm = "chunk"
    scale: float | None = None
    output_final_state: bool = False
    use_qk_l2norm_in_kernel: bool = False
    use_gate_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    safe_gate: bool = False
    lower_bound: float | None = None
    gate: GateName | None = None
    disable_recompute: bool = False
    return_intermediate_states: bool = False
    state_v_first: bool = False
    chunk_size: int = 64
    null_index: NullIndex = "negative"
    split: str | bool | int = "auto"
    batch_invariant: bool = False


OWN_NAMES: Mapping[str, str] = {}
"""What the caller calls an argument, where it is not the name of the field here: nothing for the operators that use these."""


def shape_of(x: torch.Tensor) -> str:
    return str(list(x.shape))


def check_tensor(name: str, x: object, rank: int | None = None) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, wanted a torch.Tensor")
    if rank is not None and x.dim() != rank:
        raise _wrong(name, f"shape {shape_of(x)}", f"a tensor of rank {rank}")


FLAGS = (
    "output_final_state",
    "use_qk_l2norm_in_kernel",
    "use_gate_in_kernel",
    "use_beta_sigmoid_in_kernel",
    "allow_neg_eigval",
    "safe_gate",
    "disable_recompute",
    "return_intermediate_states",
    "state_v_first",
    "batch_invariant",
)


def check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r} ({type(value).__name__}), wanted a bool")


def _check_flags(options: Options, called: Mapping[str, str]) -> None:
    for name in FLAGS:
        check_bool(called.get(name, name), getattr(options, name))
    for name in ("scale", "lower_bound"):
        value = getattr(options, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise TypeError(f"{name}: got {value!r} ({type(value).__name__}), wanted a float or None")
    if not isinstance(options.chunk_size, int):
        size = options.chunk_size
        raise TypeError(f"chunk_size: got {size!r} ({type(size).__name__}), wanted an int, one of {CHUNK_SIZES}")
    if options.chunk_size not in CHUNK_SIZES:
        raise _wrong("chunk_size", repr(options.chunk_size), f"one of {CHUNK_SIZES}")
    _segments(options.split)
    if options.null_index not in NULL_INDICES:
        raise _wrong("null_index", repr(options.null_index), f"one of {NULL_INDICES}")
    if options.allow_neg_eigval and not options.use_beta_sigmoid_in_kernel:
        logits = called.get("use_beta_sigmoid_in_kernel", "use_beta_sigmoid_in_kernel")
        raise _wrong(
            "allow_neg_eigval",
            f"True with {logits}=False",
            f"beta logits ({logits}=True); pass beta in [0, 2) yourself otherwise",
        )


def _segments(split: object) -> int:
    """`split` as a number."""
    wanted = "'auto', False or a number of segments, at least 1"
    if split is False:
        return 1
    if isinstance(split, bool) or not isinstance(split, (int, str)):
        raise TypeError(f"split: got {split!r} ({type(split).__name__}), wanted {wanted}")
    if split == "auto":
        return AUTO
    if isinstance(split, str) or not 1 <= split <= MAX_SEGMENTS:
        raise _wrong("split", repr(split), f"{wanted} and at most {MAX_SEGMENTS}")
    return split


def _gate_name(options: Options) -> GateName:
    if options.gate is None:
        if not options.use_gate_in_kernel:
            return "none"
        return "softplus" if options.lower_bound is None else "lower_bound"
    if options.gate not in GATES:
        raise _wrong("gate", repr(options.gate), f"one of {GATES}")
    if options.gate == "none" and options.use_gate_in_kernel:
        raise _wrong("gate", "'none' with use_gate_in_kernel=True", "one of the two")
    if options.gate == "softplus" and options.lower_bound is not None:
        raise _wrong("lower_bound", options.lower_bound, "None with gate='softplus' (gate='lower_bound' reads it)")
    return options.gate


def _check_shapes(t: Tensors, head_dims: tuple[int, ...]) -> None:
    for name, rank in (("q", 4), ("k", 4), ("v", 4), ("g", 4), ("beta", 3)):
        check_tensor(name, getattr(t, name), rank)
    B, T, H, K = t.q.shape
    HV, V = t.v.shape[2:]
    if t.k.shape != t.q.shape:
        raise _wrong("k", f"shape {shape_of(t.k)}", f"q's shape {shape_of(t.q)}")
    if H == 0:
        raise _wrong("q", f"shape {shape_of(t.q)}", "at least one head")
    if HV == 0 or HV % H != 0:
        raise _wrong("v", f"{HV} value heads", f"a positive multiple of the {H} query/key heads")
    if t.v.shape[:2] != (B, T):
        raise _wrong("v", f"shape {shape_of(t.v)}", f"[{B}, {T}, HV, V] as in q")
    if t.g.shape != (B, T, HV, K):
        raise _wrong("g", f"shape {shape_of(t.g)}", f"[B, T, HV, K] = {[B, T, HV, K]}")
    if t.beta.shape != (B, T, HV):
        raise _wrong("beta", f"shape {shape_of(t.beta)}", f"[B, T, HV] = {[B, T, HV]}")
    if K not in head_dims:
        raise _wrong("q", f"K = {K}", f"K in {head_dims}")
    if V not in head_dims:
        raise _wrong("v", f"V = {V}", f"V in {head_dims}")


STATE_NAMES = ("initial_state", "state_pool", "source_pool", "intermediate_states")
INDEX_NAMES = (
    "cu_seqlens",
    "state_indices",
    "checkpoint_offsets",
    "checkpoint_indices",
    "num_accepted_tokens",
    "source_indices",
    "intermediate_indices",
)


def _check_dtypes(t: Tensors, called: Mapping[str, str]) -> None:
    dtype = t.q.dtype
    if dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        raise TypeError(f"q: got dtype {dtype}, wanted bfloat16, float16, float32 or float64")
    for name in ("k", "v"):
        x = getattr(t, name)
        if x.dtype != dtype:
            raise TypeError(f"{name}: got dtype {x.dtype}, wanted q's dtype {dtype}")
    for name in ("g", "beta"):
        x = getattr(t, name)
        if x.dtype not in (dtype, torch.float32):
            raise TypeError(f"{name}: got dtype {x.dtype}, wanted float32 or q's dtype {dtype}")
    for name in ("A_log", "dt_bias"):
        x = getattr(t, name)
        if x is not None and x.dtype not in (torch.float32, dtype):
            raise TypeError(f"{name}: got dtype {x.dtype}, wanted float32")
    wide = (torch.float64,) if dtype == torch.float64 else ()
    for name in STATE_NAMES:
        x = getattr(t, name)
        if x is not None and x.dtype not in (torch.float32, torch.bfloat16, *wide):
            raise TypeError(f"{called.get(name, name)}: got dtype {x.dtype}, wanted float32 or bfloat16")
    for name in INDEX_NAMES:
        check_index_dtype(called.get(name, name), getattr(t, name))
    flags = t.has_initial_state
    if flags is not None and flags.dtype != torch.bool:
        raise TypeError(f"has_initial_state: got dtype {flags.dtype}, wanted bool")


def check_index_dtype(name: str, x: torch.Tensor | None) -> None:
    if x is not None and x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: got dtype {x.dtype}, wanted int32 or int64")


def _gate_parameters(t: Tensors, gate: GateName, lower_bound: float | None) -> Tensors:
    """Brings `A_log` to `[HV]` and `dt_bias` to `[HV, K]`, or drops them where the gate has no use for them."""
    if gate in ("none", "logsigmoid"):
        return replace(t, A_log=None, dt_bias=None)
    HV, K = t.g.shape[2:]
    A_log, dt_bias = t.A_log, t.dt_bias
    if A_log is None and gate == "softplus":
        raise _wrong("A_log", None, f"a tensor of shape [HV] = [{HV}] (the softplus gate needs it)")
    if A_log is not None:
        check_tensor("A_log", A_log)
        if tuple(A_log.shape) not in ((HV,), (1, 1, HV, 1)):
            raise _wrong("A_log", f"shape {shape_of(A_log)}", f"[HV] = [{HV}] or [1, 1, {HV}, 1]")
        A_log = A_log.reshape(HV)
    if dt_bias is not None:
        check_tensor("dt_bias", dt_bias)
        if tuple(dt_bias.shape) not in ((HV * K,), (HV, K)):
            raise _wrong("dt_bias", f"shape {shape_of(dt_bias)}", f"[HV * K] = [{HV * K}] or [HV, K] = {[HV, K]}")
        dt_bias = dt_bias.reshape(HV, K)
    if gate == "lower_bound":
        if lower_bound is None:
            raise _wrong("lower_bound", None, "a float in [-5, 0) (the lower_bound gate needs it)")
        if not LOWEST_BOUND <= lower_bound < 0:
            raise _wrong("lower_bound", lower_bound, "a float in [-5, 0)")
    return replace(t, A_log=A_log, dt_bias=dt_bias)


def number_of_sequences(t: Tensors) -> int:
    return t.q.shape[0] if t.cu_seqlens is None else t.cu_seqlens.shape[0] - 1


def check_sequences(t: Tensors, state_v_first: bool) -> None:
    B, T = t.q.shape[:2]
    if t.cu_seqlens is not None:
        check_tensor("cu_seqlens", t.cu_seqlens, rank=1)
        if t.cu_seqlens.numel() < 1:
            raise _wrong("cu_seqlens", "an empty tensor", "N + 1 offsets")
        if B != 1:
            raise _wrong("q", f"batch size {B}", "batch size 1 with cu_seqlens (pack the sequences along T)")
        if checked.enabled():
            checked.check_offsets(t.cu_seqlens, T)
    if t.initial_state is not None:
        check_states("initial_state", t.initial_state, "N", number_of_sequences(t), t, state_v_first)


def check_states(name: str, states: torch.Tensor, count_name: str, count: int, t: Tensors, state_v_first: bool) -> None:
    """Refuses states of another shape than `count` of them in the layout asked for."""
    HV, V, K = t.v.shape[2], t.v.shape[3], t.q.shape[3]
    want = (count, HV, V, K) if state_v_first else (count, HV, K, V)
    if tuple(states.shape) != want:
        layout = f"[{count_name}, HV, V, K]" if state_v_first else f"[{count_name}, HV, K, V]"
        raise _wrong(name, f"shape {shape_of(states)}", f"{layout} = {list(want)}")


def check_slots(name: str, pool: torch.Tensor, t: Tensors, state_v_first: bool) -> None:
    """Refuses a pool whose slots are not states of this call, dense and apart from each other."""
    check_tensor(name, pool, rank=4)
    check_states(name, pool, "slots", pool.shape[0], t, state_v_first)
    check_pitch(name, pool, dense=3)


def check_pitch(name: str, states: torch.Tensor, dense: int) -> None:
    """Refuses states whose last `dense` dimensions are not contiguous, or whose others overlap."""
    content, free = 1, states.dim() - dense
    for i in reversed(range(states.dim())):
        size, stride = states.shape[i], states.stride(i)
        if size > 1 and (stride != content if i >= free else stride < content):
            raise _wrong(name, f"strides {states.stride()}", "slots that are dense and do not overlap (any pitch)")
        content = content * size if i >= free else max(stride, 1) * size


def _check_pool(t: Tensors, options: Options) -> Tensors:
    """Checks all about a state pool but what its index tensors hold; brings the checkpoint tensors to `[N, M]`."""
    pool, N = t.state_pool, number_of_sequences(t)
    if pool is None:
        for name in TENSOR_NAMES[len(INPUT_NAMES) :]:
            if getattr(t, name) is not None:
                raise _wrong(name, "a tensor without state_pool", "state_pool too")
        return t
    if t.initial_state is not None:
        raise _wrong("state_pool", "a tensor with initial_state", "one of the two")
    if options.output_final_state:
        raise _wrong("output_final_state", "True with state_pool", "False (the pool receives the final states)")
    check_slots("state_pool", pool, t, options.state_v_first)
    if t.state_indices is None:
        raise _wrong("state_indices", None, f"a tensor of shape [N] = [{N}] with state_pool")
    for name in ("state_indices", "has_initial_state"):
        x = getattr(t, name)
        if x is not None and tuple(x.shape) != (N,):
            raise _wrong(name, f"shape {shape_of(x)}", f"[N] = [{N}]")
    return _check_checkpoints(t, N, options.return_intermediate_states)


def _check_checkpoints(t: Tensors, N: int, return_intermediate_states: bool) -> Tensors:
    offsets, indices = t.checkpoint_offsets, t.checkpoint_indices
    if offsets is None and indices is None:
        return t
    for name, x, other in (
        ("checkpoint_offsets", offsets, "checkpoint_indices"),
        ("checkpoint_indices", indices, "checkpoint_offsets"),
    ):
        if x is None:
            raise _wrong(name, f"None with {other}", "both or neither")
    if offsets.dim() not in (1, 2) or offsets.shape[0] != N:
        raise _wrong("checkpoint_offsets", f"shape {shape_of(offsets)}", f"[N] = [{N}] or [N, M] = [{N}, M]")
    if indices.shape != offsets.shape:
        raise _wrong(
            "checkpoint_indices", f"shape {shape_of(indices)}", f"checkpoint_offsets' shape {shape_of(offsets)}"
        )
    if offsets.dim() == 1:
        offsets, indices = offsets[:, None], indices[:, None]
    if not 1 <= offsets.shape[1] <= MAX_CHECKPOINTS:
        raise _wrong("checkpoint_offsets", f"{offsets.shape[1]} checkpoints", f"1 to {MAX_CHECKPOINTS} a sequence")
    if return_intermediate_states:
        raise _wrong("return_intermediate_states", "True with checkpoint_offsets", "one of the two")
    return replace(t, checkpoint_offsets=offsets, checkpoint_indices=indices)


def _check_host_offsets(cu_seqlens_cpu: torch.Tensor | None, cu_seqlens: torch.Tensor | None) -> None:
    if cu_seqlens_cpu is None:
        return
    check_tensor("cu_seqlens_cpu", cu_seqlens_cpu, rank=1)
    if cu_seqlens is None:
        raise _wrong("cu_seqlens_cpu", "a tensor without cu_seqlens", "cu_seqlens too")
    if cu_seqlens_cpu.shape != cu_seqlens.shape:
        raise _wrong("cu_seqlens_cpu", f"shape {shape_of(cu_seqlens_cpu)}", f"cu_seqlens' shape {shape_of(cu_seqlens)}")
    if cu_seqlens_cpu.device.type != "cpu":
        raise _wrong("cu_seqlens_cpu", f"device {cu_seqlens_cpu.device}", "device cpu")


def _check_devices(t: Tensors, called: Mapping[str, str]) -> None:
    device = t.q.device
    for name, x in t.present().items():
        if x.device != device:
            raise _wrong(called.get(name, name), f"device {x.device}", f"q's device {device}")


def check_out(out: torch.Tensor | None, t: Tensors, requires_grad: bool, called: Mapping[str, str] = OWN_NAMES) -> None:
    """Refuses an `out` of the wrong shape, dtype, device or layout, or one that shares memory with an input."""
    if out is None:
        return
    name = called.get("out", "out")
    check_tensor(name, out, rank=4)
    if out.shape != t.v.shape:
        raise _wrong(name, f"shape {shape_of(out)}", f"v's shape [B, T, HV, V] = {shape_of(t.v)}")
    if out.dtype != t.v.dtype:
        raise TypeError(f"{name}: got dtype {out.dtype}, wanted v's dtype {t.v.dtype}")
    if out.device != t.v.device:
        raise _wrong(name, f"device {out.device}", f"v's device {t.v.device}")
    if out.stride(-1) != 1:
        raise _wrong(name, f"strides {out.stride()}", "a dense last dimension")
    if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride())):
        raise _wrong(name, f"strides {out.stride()}", "memory of its own for every element")
    if out.requires_grad:
        raise _wrong(name, "a tensor that requires grad", "one that takes no gradient")
    if requires_grad:
        raise _wrong(name, "a tensor", "None when an input requires grad")
    check_overlap(name, out, t.present(), called)


def check_overlap(
    name: str, written: torch.Tensor, others: Mapping[str, torch.Tensor], called: Mapping[str, str] = OWN_NAMES
) -> None:
    """Refuses a tensor to be written, argument `name`, that shares memory with one of the others."""
    if torch.compiler.is_compiling():
        return
    for other, x in others.items():
        if _overlap(written, x):
            raise _wrong(name, f"memory shared with {called.get(other, other)}", "memory of its own")


def is_plain(x: torch.Tensor) -> bool:
    """Whether `x` is no tensor subclass (fake, functional, ...), whose work must go through the dispatcher."""
    return type(x) in PLAIN


def _has_memory(x: torch.Tensor) -> bool:
    return x.numel() > 0 and is_plain(x) and x.device.type != "meta"


def _overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether the address ranges meet. Interleaved slices of one buffer count as sharing."""
    if not (_has_memory(a) and _has_memory(b)):
        return False

    a0, b0 = a.data_ptr(), b.data_ptr()
    return a0 < b0 + extent(b) and b0 < a0 + extent(a)


def extent(x: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last one."""
    if x.numel() == 0:
        return 0
    return (sum((n - 1) * s for n, s in zip(x.shape, x.stride())) + 1) * x.element_size()


def check_call(t: Tensors, options: Options, cu_seqlens_cpu: torch.Tensor | None = None) -> tuple[Problem, Tensors]:
    """Validates a call and returns its problem with the tensors in canonical shape.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: anything else; the message names the argument, what came and what was wanted.
    """
    t, gate = check_inputs(t, options)
    check_sequences(t, options.state_v_first)
    t = _check_pool(t, options)
    _check_host_offsets(cu_seqlens_cpu, t.cu_seqlens)
    if options.safe_gate and gate == "softplus":
        raise _wrong("safe_gate", "True with the unbounded softplus gate", "lower_bound set, or safe_gate=False")
    longest, together = known_lengths(cu_seqlens_cpu, options.chunk_size)
    problem = spec_of(t, settings_of(t, options, gate, longest_chunks=longest, all_chunks=together))
    if problem.has_pool and problem.requires_grad:
        raise _wrong("state_pool", "a tensor with inputs that require grad", "torch.no_grad() (it is updated in place)")
    if problem.has_pool and checked.enabled():
        checked.check_pool(problem, t)
    if problem.requires_grad and problem.return_intermediate_states:
        raise _wrong("return_intermediate_states", "True with inputs that require grad", "torch.no_grad()")
    return problem, t


def check_inputs(
    t: Tensors,
    options: Options,
    head_dims: tuple[int, ...] = HEAD_DIMS,
    called: Mapping[str, str] = OWN_NAMES,
) -> tuple[Tensors, GateName]:
    """Validates what all operators share: options, shapes of the inputs, gate parameters, dtypes and devices of all tensors.
    Returns the tensors in canonical shape and the gate's name."""
    _check_flags(options, called)
    _check_shapes(t, head_dims)
    gate = _gate_name(options)
    t = _gate_parameters(t, gate, options.lower_bound)
    for name in TENSOR_NAMES[TENSOR_NAMES.index("initial_state") :]:
        if getattr(t, name) is not None:
            check_tensor(called.get(name, name), getattr(t, name))
    _check_dtypes(t, called)
    _check_devices(t, called)
    return t, gate


def settings_of(t: Tensors, options: Options, gate: GateName, **others: object) -> Settings:
    return Settings(
        algorithm=options.algorithm,
        scale=t.q.shape[-1] ** -0.5 if options.scale is None else float(options.scale),
        gate=gate,
        lower_bound=float(options.lower_bound) if gate == "lower_bound" else None,
        safe_gate=gate == "lower_bound" or options.safe_gate,
        beta_kind=_beta_kind(options),
        l2norm=options.use_qk_l2norm_in_kernel,
        chunk_size=options.chunk_size,
        output_final_state=options.output_final_state,
        return_intermediate_states=options.return_intermediate_states,
        state_v_first=options.state_v_first,
        null_index=options.null_index,
        split=_segments(options.split),
        batch_invariant=options.batch_invariant,
        **others,
    )


def check_arguments(
    arguments: Mapping[str, object], algorithm: Literal["chunk", "recurrent"] = "chunk"
) -> tuple[Problem, Tensors]:
    """`check_call` for a public operator's arguments by name; those that are left out have their defaults."""
    tensors = Tensors(**{name: arguments.get(name) for name in TENSOR_NAMES})
    options = {f.name: arguments[f.name] for f in fields(Options) if f.name in arguments}
    return check_call(tensors, Options(algorithm=algorithm, **options), arguments.get("cu_seqlens_cpu"))


def _beta_kind(options: Options) -> Literal["value", "logit", "double_logit"]:
    if not options.use_beta_sigmoid_in_kernel:
        return "value"
    return "double_logit" if options.allow_neg_eigval else "logit"


def spec_of(t: Tensors, settings: Settings) -> Problem:
    """The problem of tensors already validated."""
    B, T, H, K = t.q.shape
    default_state = torch.float64 if t.q.dtype == torch.float64 else torch.float32
    states = next((x for x in (t.state_pool, t.source_pool, t.initial_state) if x is not None), None)
    return Problem(
        **settings.settings(),
        B=B,
        T=T,
        H=H,
        HV=t.v.shape[2],
        K=K,
        V=t.v.shape[3],
        N=number_of_sequences(t),
        dtype=t.q.dtype,
        g_dtype=t.g.dtype,
        beta_dtype=t.beta.dtype,
        state_dtype=default_state if states is None else states.dtype,
        has_A_log=t.A_log is not None,
        has_dt_bias=t.dt_bias is not None,
        has_initial_state=t.initial_state is not None,
        has_pool=t.state_pool is not None,
        pool_slots=0 if t.state_pool is None else t.state_pool.shape[0],
        checkpoints=0 if t.checkpoint_offsets is None else t.checkpoint_offsets.shape[1],
        has_intermediate=t.intermediate_states is not None,
        packed=t.cu_seqlens is not None,
        requires_grad=torch.is_grad_enabled() and any(x.requires_grad for x in t.present().values()),
    )
