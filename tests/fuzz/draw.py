"""Random calls of every public operator.

What a kernel is compiled for comes from a bounded set of variants, each drawn from its number, so that compiled kernels serve
many cases. Sizes, layouts and numbers are drawn anew for every case.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor

import flashdelta as fd
from flashdelta.problem.problem import GATES, PLAIN_GATES

from ..support.layouts import LAYOUTS as GRADIENT_LAYOUTS
from .memory import LAYOUTS, Memory, Place, dense, token_place

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

OPERATORS: dict[str, tuple[Callable, int]] = {
    "chunk_kda": (fd.chunk_kda, 7),
    "fused_recurrent_kda": (fd.fused_recurrent_kda, 3),
    "recurrent_kda": (fd.recurrent_kda, 5),
    "commit": (fd.commit, 1),
    "kda_prefill": (fd.kda_prefill, 2),
    "chunk_bwd_wy_dqkg": (fd.kernels.chunk_bwd_wy_dqkg, 2),
    "fused_kda_decode": (fd.fused_kda_decode, 4),
    "short_convolution": (fd.short_convolution, 2),
    "gated_rms_norm": (fd.gated_rms_norm, 1),
}
"""With how often each is drawn."""

RESULTS = {
    "chunk_kda": ("o", "final_state", "h"),
    "fused_recurrent_kda": ("o", "final_state"),
    "recurrent_kda": ("o", "final_state"),
    "commit": (),
    "kda_prefill": ("o", "w", "u"),
    "chunk_bwd_wy_dqkg": ("dq", "dk", "dv", "dbeta", "dg", "dA"),
    "fused_kda_decode": ("o",),
    "short_convolution": ("o", "final_state"),
    "gated_rms_norm": ("o",),
}

WRITTEN = (
    *("out", "output", "final_state", "state_pool", "initial_state", "intermediate_states", "checkpoint_states"),
    *("state", "conv_state"),
)
"""Arguments that a call may write; `initial_state` in decoding alone."""

VARIANTS = 12
"""Of a seed, for which kernels are compiled on a GPU, in a minute or two; other seeds have others. The CPU compiles nothing,
and draws from a thousand times as many. The first are one of each operator, and so are the first cases."""

Numbers = Callable[[torch.Generator], Tensor]
"""The contents of a tensor."""


@dataclass
class Spec:
    """A call without its numbers: where each tensor lies and what fills it."""

    op: str
    options: dict[str, Any]
    grad: bool = False
    places: dict[str, Place] = field(default_factory=dict)
    numbers: dict[str, Numbers] = field(default_factory=dict)
    on_host: dict[str, str] = field(default_factory=dict)
    """Tensors that are copies of others on the host; those keep their contents."""
    incoming: tuple[str, str] = ("contiguous", "contiguous")
    """Layouts of the gradients that come in, of `o` and of the final state."""
    lengths: Callable[[torch.Generator], list[int]] | None = None

    @property
    def function(self) -> Callable:
        return OPERATORS[self.op][0]

    def add(self, name: str, place: Place, numbers: Numbers) -> None:
        self.places[name], self.numbers[name] = place, numbers

    def fill(self, name: str, numbers: Numbers, dtype: torch.dtype, **options: Any) -> None:
        """A dense tensor, of the shape that its numbers have."""
        self.add(name, dense(numbers(torch.Generator()).shape, dtype, **options), numbers)

    def maybe(self, draw: Random, share: float, **options: Any) -> bool:
        if found := chance(draw, share):
            self.options |= options
        return found

    def written(self) -> set[str]:
        inputs = {"commit": set(), "recurrent_kda": set()}.get(self.op, {"initial_state"})
        if self.options.get("update_state") is False:
            inputs = {"initial_state"}
        if self.op == "fused_kda_decode" and "intermediate_states" in self.places:
            inputs = {"state"}  # a call that records
        return {name for name in self.places if name in WRITTEN} - inputs


def pick(draw: Random, *weighted: tuple[Any, float]) -> Any:
    values, weights = zip(*weighted)
    return draw.choices(values, weights)[0]


def chance(draw: Random, share: float) -> bool:
    return draw.random() < share


# ---- numbers ------------------------------------------------------------------------------------------------------------


def normal(*shape: int, scale: float = 1.0, shift: float = 0.0) -> Numbers:
    return lambda source: torch.randn(*shape, generator=source, dtype=FP64) * scale + shift


def uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> Numbers:
    return lambda source: torch.rand(*shape, generator=source, dtype=FP64) * (high - low) + low


def unit(*shape: int) -> Numbers:
    """Rows of norm 1, as an L2 norm leaves them; some are zero."""

    def numbers(source: torch.Generator) -> Tensor:
        x = torch.nn.functional.normalize(torch.randn(*shape, generator=source, dtype=FP64), dim=-1)
        return x * (torch.rand(*shape[:-1], 1, generator=source) > 0.05)

    return numbers


def decays(*shape: int, floor: float) -> Numbers:
    """Mostly slow; some at the floor, and below -5 some that forget all."""

    def numbers(source: torch.Generator) -> Tensor:
        x = -(1.5 * torch.randn(*shape, generator=source, dtype=FP64) - 2.0).exp()
        x = torch.where(torch.rand(*shape, generator=source) < 0.02, floor, x).clamp(min=floor)
        forgets = torch.rand(*shape[:2], *[1] * (len(shape) - 2), generator=source) < 0.01
        return torch.where(forgets, -math.inf, x) if floor < -5.0 else x

    return numbers


def unset(*shape: int) -> Numbers:
    return lambda source: torch.full(shape, math.nan)


def flags(count: int) -> Numbers:
    return lambda source: torch.rand(count, generator=source) < 0.6


def counts(low: int, high: int, count: int) -> Numbers:
    return lambda source: torch.randint(low, high, (count,), generator=source)


def distinct(slots: int, *shape: int) -> Numbers:
    """Indices of different slots; some null, below 0 or past the end."""
    count = math.prod(shape)

    def numbers(source: torch.Generator) -> Tensor:
        found = torch.randperm(max(slots, count), generator=source)[:count]
        odd = torch.tensor([-1, -7, slots, slots + 5, 2**31 - 1])[torch.randint(5, (count,), generator=source)]
        return torch.where(torch.rand(count, generator=source) < 0.1, odd, found).reshape(shape)

    return numbers


def index_dtype(draw: Random) -> torch.dtype:
    return draw.choice((torch.int32, torch.int64))


# ---- what operations share ------------------------------------------------------------------------------------------------


@dataclass
class Sizes:
    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int
    packed: bool


def gate_options(draw: Random, spec: Spec, decode: bool = False) -> str:
    gate = draw.choice(GATES)
    named = gate in PLAIN_GATES or chance(draw, 0.3)
    if named:
        spec.options["gate"] = gate
    elif gate != "none":
        spec.options["use_gate_in_kernel"] = True
    if gate == "lower_bound":
        spec.options["lower_bound"] = draw.choice((-5.0, -0.5, -3))
    beta = pick(draw, ("value", 2), ("logit", 2), ("double", 1))
    if beta != "value":
        spec.options["beta_is_logit" if decode else "use_beta_sigmoid_in_kernel"] = True
    if beta == "double":
        spec.options["allow_neg_eigval"] = True
    return gate


def layouts(draw: Random, names: str | tuple) -> dict[str, str]:
    one = pick(draw, ("dense", 3), *((layout, 1) for layout in LAYOUTS))
    mixed = chance(draw, 0.2)
    return {name: draw.choice(LAYOUTS) if mixed else one for name in names}


def lengths_of(draw: Random, N: int, T: int, longest: int | None = None) -> Callable[[torch.Generator], list[int]]:
    """`N` lengths that share `T` tokens, of which some may be left over."""
    left_over = chance(draw, 0.3)

    def lengths(source: torch.Generator) -> list[int]:
        cuts = torch.randint(0, T + 1, (N + 1,), generator=source)
        cuts = torch.where(torch.rand(N + 1, generator=source) < 0.15, cuts // 16 * 16, cuts).sort().values
        cuts[0] = 0
        if N > 0 and not left_over:
            cuts[-1] = T
        found = cuts.diff().tolist()
        return found if longest is None else [min(n, longest) for n in found]

    return lengths


def add_tokens(draw: Random, spec: Spec, s: Sizes, dtype: torch.dtype, wide: tuple, l2norm: bool, gate: str) -> None:
    """q, k, v, g, beta, the gate's parameters and the offsets."""
    tokens, own = (s.B, s.T), layouts(draw, "qkv") | layouts(draw, ("g", "beta"))
    keys = normal if l2norm else unit
    logits = any(spec.options.get(name) for name in ("use_beta_sigmoid_in_kernel", "beta_is_logit"))
    floor = -5.0 if spec.options.get("safe_gate") else -50.0
    wide_dtype = FP64 if dtype == FP64 else FP32
    shapes = {"q": (s.H, s.K), "k": (s.H, s.K), "v": (s.HV, s.V), "g": (s.HV, s.K), "beta": (s.HV,)}
    numbers = {"q": keys, "k": keys, "v": normal, "beta": normal if logits else uniform}
    for name, inner in shapes.items():
        shape = (*tokens, *inner)
        place = token_place(draw, shape, wide_dtype if name in wide else dtype, own[name])
        made = numbers.get(name, normal)(*shape)
        if name == "g" and gate == "none":
            made = decays(*shape, floor=floor)
        elif name == "g" and gate == "logsigmoid":
            made = normal(*shape, shift=2.0)
        elif name == "beta" and not logits:
            made = uniform(*shape, high=1.95)
        spec.add(name, place, made)
    if gate in ("softplus", "lower_bound"):
        if gate == "softplus" or chance(draw, 0.6):
            spec.fill("A_log", uniform(*draw.choice(((s.HV,), (1, 1, s.HV, 1))), low=-1.0), FP32)
        if chance(draw, 0.7):
            spec.fill("dt_bias", normal(*draw.choice(((s.HV * s.K,), (s.HV, s.K))), shift=-2.0), FP32)
    spec.maybe(draw, 0.3, scale=draw.choice((0.7, 1, 0.0, -2.0, 0.125)))


def add_offsets(draw: Random, spec: Spec, s: Sizes, longest: int | None = None) -> None:
    """Their contents are the lengths', which the numbers of other tensors know too."""
    spec.lengths = lengths_of(draw, s.N, s.T, longest)
    spec.add("cu_seqlens", dense((s.N + 1,), index_dtype(draw)), lambda source: torch.zeros(s.N + 1))


def add_pool(draw: Random, spec: Spec, name: str, slots: int, inner: tuple[int, ...], dtype: torch.dtype) -> None:
    spec.fill(name, normal(slots, *inner), dtype, pads={0: draw.choice((0, 0, 4, 16, 33))})


def sizes_of(draw: Random, variant: Random, head_dims: tuple[int, ...], tokens: int) -> Sizes:
    K = variant.choice(head_dims)
    V = K if chance(variant, 0.6) else variant.choice(head_dims)
    H, group = draw.choice((1, 1, 2, 3)), draw.choice((1, 1, 2, 3))
    packed = chance(variant, 0.5)
    T = draw.choice((0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 130, draw.randint(1, tokens)))
    B = 1 if packed else draw.choice((1, 1, 2, 3, 0) if chance(draw, 0.1) else (1, 1, 2, 3))
    return Sizes(B, T, H, H * group, K, V, draw.choice((0, 1, 2, 3, 5)) if packed else B, packed)


# ---- operations -----------------------------------------------------------------------------------------------------------


def draw_dtype(variant: Random, doubles: bool) -> torch.dtype:
    return pick(variant, (BF16, 5), (FP16, 2), (FP32, 3), (FP64, 2 if doubles else 0))


def whole_sequences(op: str, draw: Random, variant: Random, doubles: bool) -> Spec:
    chunked = op == "chunk_kda"
    spec, dtype = Spec(op, {}), draw_dtype(variant, doubles)
    s = sizes_of(draw, variant, (32, 64, 64, 128), 200 if chunked else 40)
    l2norm = chance(variant, 0.7)
    spec.maybe(variant, 0.4 * chunked, safe_gate=True)
    gate = gate_options(variant, spec)
    wide = variant.choice(((), ("g",), ("g", "beta")))
    add_tokens(draw, spec, s, dtype, wide, l2norm, gate)
    if s.packed:
        add_offsets(draw, spec, s)
    kind = pick(variant, ("none", 2), ("state", 3), ("pool", 3), ("grad", 3))
    spec.grad = kind == "grad"
    v_first = chance(variant, 0.5)
    inner = (s.HV, s.V, s.K) if v_first else (s.HV, s.K, s.V)
    state_dtype = variant.choice((FP32, BF16, FP64) if dtype == FP64 else (FP32, BF16))
    if l2norm or kind == "pool":
        spec.options["use_qk_l2norm_in_kernel"] = l2norm
    spec.options["state_v_first"] = v_first
    if kind == "pool":
        pool_of_sequences(draw, variant, spec, s, inner, state_dtype)
    elif kind == "state" or (spec.grad and chance(variant, 0.5)):
        spec.add("initial_state", dense((s.N, *inner), state_dtype), normal(s.N, *inner))
    if kind != "pool" and chance(variant, 0.7):
        spec.options["output_final_state"] = True
    if chunked:
        chunk_options(draw, variant, spec, s, kind)
        if not spec.grad:
            checkpoint_buffer(draw, variant, spec, s, inner, dtype)
    if spec.options.get("output_final_state") and not spec.grad and chance(variant, 0.4):
        final = variant.choice((FP32, BF16, FP64) if dtype == FP64 else (FP32, BF16))
        spec.add("final_state", dense((s.N, *inner), final), unset(s.N, *inner))
        spec.options["output_final_state"] = chance(draw, 0.5)
    if not spec.grad and chance(draw, 0.4):
        shape = (s.B, s.T, s.HV, s.V)
        layout = draw.choice(("dense", "padded", "odd_offset", "head_first"))
        spec.add("out", token_place(draw, shape, dtype, layout), unset(*shape))
    return spec


def chunk_options(draw: Random, variant: Random, spec: Spec, s: Sizes, kind: str) -> None:
    spec.maybe(variant, 0.3, chunk_size=32)
    spec.maybe(variant, 0.3 * (kind in ("none", "state")), return_intermediate_states=True)
    spec.maybe(variant, 0.4 * (kind == "grad"), disable_recompute=True)
    spec.maybe(variant, 0.25, split=variant.choice((False, 2, 3)))
    spec.maybe(variant, 0.2, batch_invariant=True)
    if s.packed and chance(draw, 0.3):
        spec.on_host["cu_seqlens_cpu"] = "cu_seqlens"


def checkpoint_buffer(
    draw: Random, variant: Random, spec: Spec, s: Sizes, inner: tuple[int, ...], dtype: torch.dtype
) -> None:
    """For the checkpoints that the call has already, or for others."""
    kind = pick(variant, ("none", 3), ("regular", 1), ("offsets", 1))
    states = variant.choice((FP32, BF16, FP64) if dtype == FP64 else (FP32, BF16))
    if kind == "none":
        return
    if "checkpoint_offsets" in spec.places:
        # its indices are those of the pool's slots
        add_pool(draw, spec, "checkpoint_states", spec.places["state_pool"].shape[0], inner, states)
    elif kind == "regular":
        n = draw.choice((64, 64, 128, 192))
        most = s.T // n + s.N if s.packed else s.B * -(-s.T // n)
        rows = draw.randint(0, most + 1) if s.packed else most + draw.choice((0, 0, 2))
        spec.options["checkpoint_every"] = n
        add_pool(draw, spec, "checkpoint_states", rows, inner, states)
    else:
        M = draw.choice((1, 1, 2, 12))
        rows = s.N * M + draw.choice((0, 1, 3))
        add_pool(draw, spec, "checkpoint_states", rows, inner, states)
        shape, own = (s.N,) if M == 1 and chance(draw, 0.5) else (s.N, M), index_dtype(variant)
        spec.fill("checkpoint_offsets", offsets_inside(s, M, shape), own)
        spec.fill("checkpoint_indices", distinct(rows, *shape), own)


def offsets_inside(s: Sizes, M: int, shape: tuple[int, ...]) -> Numbers:
    """Of checkpoints: multiples of 16 in order, some twice."""

    def offsets(source: torch.Generator) -> Tensor:
        found = torch.randint(0, max(s.T // 16, 1) + 1, (s.N, M), generator=source) * 16
        return found.sort(dim=1).values.reshape(shape)

    return offsets


def pool_of_sequences(
    draw: Random, variant: Random, spec: Spec, s: Sizes, inner: tuple[int, ...], dtype: torch.dtype
) -> None:
    M = pick(variant, (0, 3), (1, 1), (2, 1)) if spec.op == "chunk_kda" else 0
    slots = s.N * (1 + M) + draw.choice((0, 1, 3))
    add_pool(draw, spec, "state_pool", slots, inner, dtype)
    spec.maybe(variant, 0.3, null_index="non_positive")
    # the slots of sequences and of checkpoints are different ones: both come from one permutation, by one seed
    indices, kind = distinct(slots, s.N * (1 + M)), index_dtype(variant)
    spec.fill("state_indices", lambda source: indices(source)[: s.N], kind)
    if chance(variant, 0.5):
        spec.fill("has_initial_state", flags(s.N), torch.bool)
    if M > 0:
        shape = (s.N,) if M == 1 and chance(draw, 0.5) else (s.N, M)
        spec.fill("checkpoint_offsets", offsets_inside(s, M, shape), kind)
        spec.fill("checkpoint_indices", lambda source: indices(source)[s.N :].reshape(shape), kind)


def decoding(op: str, draw: Random, variant: Random, doubles: bool) -> Spec:
    served = chance(variant, 0.3)  # as engines verify, which more kernels take
    spec, dtype = Spec(op, {}), BF16 if served else draw_dtype(variant, doubles)
    spec_tokens = pick(variant, (None, 0 if served else 3), (1, 1), (3, 1), (7, 1), (11, 0.5), (15, 0.5), (16, 0.5))
    s = sizes_of(draw, variant, (64, 128) if served else (16, 32, 64, 128), 17)
    most = 1 + spec_tokens if spec_tokens else 17
    if s.packed:
        s.T = draw.randint(0, s.N * most)
    else:
        s.T = most if spec_tokens else draw.choice((1, 1, 1, 2, 5))
        s.B = s.N = draw.choice((0, 1, 2, 5, 9)) if chance(draw, 0.1) else draw.choice((1, 2, 5, 9))
    l2norm = chance(variant, 0.7)
    spec.options["use_qk_l2norm_in_kernel"] = l2norm
    gate = gate_options(variant, spec, decode=True)
    add_tokens(draw, spec, s, dtype, variant.choice(((), ("g", "beta"))), l2norm, gate)
    if s.packed:
        add_offsets(draw, spec, s, most)
    v_first = served or chance(variant, 0.7)
    spec.options["state_v_first"] = v_first
    inner = (s.HV, s.V, s.K) if v_first else (s.HV, s.K, s.V)
    state_dtype = variant.choice((FP32, BF16))
    spec.maybe(variant, 0.3, null_index="non_positive")
    states_of_decoding(draw, variant, spec, s, inner, state_dtype, spec_tokens)
    shape = (s.B, s.T, s.HV, s.V)
    if chance(draw, 0.5):
        spec.fill("output", unset(*shape), dtype)
    # without offsets every row is a sequence, or each `1 + num_spec_tokens`
    rows_fit = s.packed or 1 + (spec_tokens or 0) == s.T
    if "initial_state" in spec.places and rows_fit and chance(variant, 0.3):
        mix(draw, spec, s, dtype)
    return spec


def mix(draw: Random, spec: Spec, s: Sizes, dtype: torch.dtype) -> None:
    """q, k and v in one row."""
    rows, width = s.B * s.T, 2 * s.H * s.K + s.HV * s.V
    parts = [spec.numbers.pop(name) for name in "qkv"]
    for name in "qkv":
        del spec.places[name]

    def numbers(source: torch.Generator) -> Tensor:
        return torch.cat([part(source).flatten(2).flatten(0, 1) for part in parts], dim=1)

    spec.add("mixed_qkv", dense((rows, width), dtype, pads={0: draw.choice((0, 8, 24))}), numbers)
    for name, inner in (("g", s.HV * s.K), ("beta", s.HV)):
        made, place = spec.numbers[name], spec.places[name]
        spec.add(name, dense((rows, inner), place.dtype), lambda source, f=made, n=inner: f(source).reshape(rows, n))


def states_of_decoding(
    draw: Random, variant: Random, spec: Spec, s: Sizes, inner: tuple, dtype: torch.dtype, spec_tokens: int | None
) -> None:
    kind = pick(variant, ("none", 1), ("own", 1), ("pool", 4), ("source", 1), ("read", 1 if spec_tokens is None else 6))
    if spec_tokens is not None and kind in ("none", "own"):
        kind = "pool"
    S1 = 1 + (spec_tokens or 0)
    if kind == "none":
        spec.options["output_final_state"] = chance(variant, 0.5)
        return
    if kind == "own":
        add_pool(draw, spec, "initial_state", s.N, inner, dtype)
        return
    slots = s.N * S1 + draw.choice((0, 1, 4))
    add_pool(draw, spec, "initial_state", slots, inner, dtype)
    kinds = index_dtype(variant)
    if spec_tokens is not None:
        spec.options["num_spec_tokens"] = spec_tokens
    if kind == "read":
        spec.options["update_state"] = False
        spec.fill("ssm_state_indices", distinct(slots, s.N), kinds)
        if spec_tokens is not None:
            rows = s.N + draw.choice((0, 2))
            if chance(variant, 0.7):
                add_records(draw, spec, rows, S1, (s.HV, s.K, s.V))
            else:
                add_pool(draw, spec, "intermediate_states", rows, (S1, *inner), dtype)
            spec.fill("intermediate_state_indices", distinct(rows, s.N), kinds)
        return
    spec.fill("ssm_state_indices", distinct(slots, *((s.N,) if spec_tokens is None else (s.N, S1))), kinds)
    if kind == "source":
        add_pool(draw, spec, "initial_state_source", slots, inner, dtype)
        spec.fill("initial_state_indices", distinct(slots, s.N), kinds)
    elif spec_tokens is not None and chance(variant, 0.7):
        spec.fill("num_accepted_tokens", counts(draw.choice((0, 1)), S1 + 2, s.N), kinds)


def add_records(draw: Random, spec: Spec, rows: int, tokens: int, sizes: tuple[int, int, int]) -> None:
    """A replay buffer that holds records of some tokens."""
    HV, K, V = sizes
    width, counts = fd.replay_buffer(0, 1, 1, K, V).shape[-1], 2 * K + V
    add_pool(draw, spec, "intermediate_states", rows, (tokens, HV, width), FP32)
    normal = spec.numbers["intermediate_states"]

    def numbers(source: torch.Generator) -> Tensor:
        x = normal(source)
        x[..., :K] = x[..., :K].abs().clamp(max=1)
        x[..., counts : counts + 4] = torch.randint(0, tokens + 1, (rows, 1, 1, 1), generator=source).to(x.dtype)
        return x

    spec.numbers["intermediate_states"] = numbers


def committing(op: str, draw: Random, variant: Random, doubles: bool) -> Spec:
    spec, N, tokens = Spec(op, {}), draw.choice((0, 1, 3, 6)), draw.choice((1, 2, 4, 8, 12, 16, 17))
    inner = (draw.choice((1, 2, 3)), variant.choice((32, 64, 128)), variant.choice((32, 64, 128)))
    dtype, kinds = variant.choice((FP32, BF16)), index_dtype(variant)
    slots = N + draw.choice((0, 1, 3))
    add_pool(draw, spec, "initial_state", slots, inner, dtype)
    if chance(variant, 0.5):
        v_first = spec.options["state_v_first"] = chance(variant, 0.5)
        add_records(draw, spec, slots, tokens, inner if not v_first else (inner[0], inner[2], inner[1]))
    else:
        add_pool(draw, spec, "intermediate_states", slots, (tokens, *inner), dtype)
    spec.fill("ssm_state_indices", distinct(slots, N), kinds)
    spec.fill("num_accepted_tokens", counts(-1, tokens + 2, N), kinds)
    if chance(variant, 0.5):
        spec.fill("intermediate_state_indices", distinct(slots, N), kinds)
    spec.maybe(variant, 0.3, null_index="non_positive")
    return spec


def prefilling(op: str, draw: Random, variant: Random, doubles: bool) -> Spec:
    K, _, C = variant.choice(((64, 64, 32), (64, 64, 64), (128, 128, 32), (128, 128, 64)))
    B, H, T = draw.choice((1, 2)), draw.choice((1, 2, 3)), draw.choice((0, 1, 31, 32, 63, 64, 65, draw.randint(1, 150)))
    spec = Spec(op, {"chunk_size": C, "precision": variant.choice(("ieee", "tf32x3"))})
    gate = variant.choice(("none", "logsigmoid"))
    spec.options["gate"] = gate
    shape = (B, H, T, K)
    g = decays(*shape, floor=-50.0) if gate == "none" else normal(*shape, shift=2.0)
    made = {"q": normal(*shape), "k": unit(*shape), "v": normal(*shape), "g": g, "beta": uniform(*shape[:3], high=1.95)}
    for name, numbers in made.items():
        spec.fill(name, numbers, FP32)
    spec.maybe(draw, 0.3, scale=draw.choice((0.7, 1, -2.0)))
    return spec


def wy_stage(op: str, draw: Random, variant: Random, doubles: bool) -> Spec:
    dtype = draw_dtype(variant, doubles)
    wide = FP64 if dtype == FP64 else FP32
    s = sizes_of(draw, variant, (32, 64, 64, 128), 150)
    C, v_first = variant.choice((32, 64, 64)), chance(variant, 0.5)
    spec = Spec(op, {"chunk_size": C, "state_v_first": v_first, "use_exp2": chance(variant, 0.4)})
    NT = s.T // C + s.N if s.packed else -(-s.T // C)
    inner = (s.V, s.K) if v_first else (s.K, s.V)
    same = dtype if chance(variant, 0.6) else wide
    own = layouts(draw, ("q", "k", "v", "v_new", "g", "beta", "A", "do", "dv"))
    keys, values = (s.B, s.T, s.HV, s.K), (s.B, s.T, s.HV, s.V)
    table = {
        "q": (dtype, unit(s.B, s.T, s.H, s.K)),
        "k": (dtype, unit(s.B, s.T, s.H, s.K)),
        "v": (dtype, normal(*values)),
        "v_new": (dtype, normal(*values)),
        "g": (wide, sums_of_decays(keys)),
        "beta": (variant.choice((wide, dtype)), uniform(s.B, s.T, s.HV)),
        "A": (same, normal(s.B, s.T, s.HV, C, scale=C**-0.5)),
        "h": (same, normal(s.B, NT, s.HV, *inner)),
        "dh": (same, normal(s.B, NT, s.HV, *inner)),
        "do": (dtype, normal(*values)),
        "dv": (dtype, normal(*values)),
    }
    for name, (kind, numbers) in table.items():
        shape = tuple(numbers(torch.Generator()).shape)
        layout = own.get(name, "dense")
        spec.add(name, token_place(draw, shape, kind, layout if layout != "expanded" else "dense"), numbers)
    if s.packed:
        add_offsets(draw, spec, s)
    return spec


def sums_of_decays(shape: tuple[int, ...]) -> Numbers:
    """Sums that fall by up to 0.1 a token; the formulas do not ask where they begin."""
    return lambda source: -(torch.rand(shape, generator=source, dtype=FP64) * 0.1).cumsum(1)


def convolving(op: str, draw: Random, variant: Random, doubles: bool) -> Spec:
    spec, dtype = Spec(op, {}), draw_dtype(variant, doubles)
    wide = FP64 if dtype == FP64 else FP32
    s = sizes_of(draw, variant, (32,), 200)
    D, W = draw.choice((1, 8, 24, 96, 100, 384)), variant.choice((2, 3, 4))
    L = variant.choice((W - 1, W))
    shape = (s.B, s.T, D)
    spec.add("x", token_place(draw, shape, dtype, layouts(draw, "x")["x"]), normal(*shape))
    taps = variant.choice(((D, W), (D, 1, W)))
    spec.fill("weight", normal(*taps), variant.choice((wide, dtype)))
    if chance(variant, 0.5):
        spec.fill("bias", normal(D), variant.choice((wide, dtype)))
    spec.maybe(variant, 0.3, activation=None)
    if s.packed:
        add_offsets(draw, spec, s)
    kind = pick(variant, ("none", 1), ("state", 2), ("pool", 3), ("grad", 3))
    spec.grad = kind == "grad"
    states = variant.choice((wide, dtype))
    order = draw.choice(((0, 1, 2), (0, 2, 1)))
    if kind == "pool":
        slots = s.N + draw.choice((0, 1, 3))
        pads = {0: draw.choice((0, 7)), 1: draw.choice((0, 1))}
        spec.add("state_pool", dense((slots, D, L), states, order, pads), normal(slots, D, L))
        spec.fill("state_indices", distinct(slots, s.N), index_dtype(variant))
        spec.maybe(variant, 0.3, null_index="non_positive")
        if chance(variant, 0.5):
            spec.fill("has_initial_state", flags(s.N), torch.bool)
    else:
        if kind == "state" or chance(variant, 0.5):
            spec.add("initial_state", dense((s.N, D, L), states, order), normal(s.N, D, L))
        spec.options["output_final_state"] = chance(variant, 0.7)
        if not spec.grad and chance(variant, 0.3):
            length = L if "initial_state" in spec.places else W - 1
            final = (s.N, D, length)
            place = dense(final, variant.choice((wide, dtype)), order)
            spec.add("final_state", place, unset(*final))
    if not spec.grad and chance(draw, 0.4):
        layout = draw.choice(("dense", "padded", "odd_offset"))
        spec.add("out", token_place(draw, shape, dtype, layout), unset(*shape))
    return spec


def norming(op: str, draw: Random, variant: Random, doubles: bool) -> Spec:
    dtype = draw_dtype(variant, doubles)
    wide = FP64 if dtype == FP64 else FP32
    V = variant.choice((1, 17, 32, 64, 128, 1000))
    shape = (*(draw.choice((0, 1, 2, 3, 33)) if chance(draw, 0.1) else draw.choice((1, 2, 3, 33)) for _ in range(3)), V)
    spec = Spec(op, {"activation": variant.choice(("sigmoid", "silu")), "eps": variant.choice((1e-5, 0.1))})
    spec.grad = chance(variant, 0.5)
    for name, layout in layouts(draw, "xz").items():
        # rows alike have a norm that rounding may be all of
        layout = layout if layout != "expanded" else "dense"
        spec.add(name, token_place(draw, shape, dtype, layout), normal(*shape))
    spec.fill("weight", normal(V), variant.choice((wide, dtype)))
    return spec


def fused_decoding(op: str, draw: Random, variant: Random, doubles: bool) -> Spec:
    spec, dtype = Spec(op, {}), draw_dtype(variant, doubles)
    wide = FP64 if dtype == FP64 else FP32
    spec_tokens = pick(variant, (None, 3), (1, 1), (3, 1), (7, 0.5), (16, 0.3))
    S1, W = 1 + (spec_tokens or 0), variant.choice((2, 3, 4))
    s = sizes_of(draw, variant, (32, 64, 128), 17)
    s.N = draw.choice((0, 1, 2, 5))
    rows = draw.randint(0, s.N * S1 + 2) if s.packed else s.N * S1
    s.T = rows
    D = 2 * s.H * s.K + s.HV * s.V
    spec.fill("x", normal(rows, D), dtype, pads={0: draw.choice((0, 0, 8, 24))})
    taps = variant.choice(((D, W), (D, 1, W), *(((3, W, D // 3),) if s.H == s.HV and s.K == s.V else ())))
    spec.fill("weight", normal(*taps, scale=0.5), variant.choice((wide, dtype)))
    if chance(variant, 0.5):
        spec.fill("bias", normal(D), wide)
    gate = gate_options(variant, spec, decode=True)
    spec.options.pop("use_gate_in_kernel", None)
    spec.options["gate"] = gate
    if gate != "lower_bound":
        spec.options["lower_bound"] = None
    spec.options["beta_is_logit"] = "beta_is_logit" in spec.options
    shape = (rows, s.HV, s.K)
    made = decays(*shape, floor=-50.0) if gate == "none" else normal(*shape, shift=2.0 * (gate == "logsigmoid"))
    spec.fill("raw_g", made, variant.choice((wide, dtype)), pads={0: draw.choice((0, 8))})
    beta = normal(rows, s.HV) if spec.options["beta_is_logit"] else uniform(rows, s.HV, high=1.95)
    spec.fill("raw_beta", beta, variant.choice((wide, dtype)))
    if gate in ("softplus", "lower_bound"):
        spec.fill("A_log", uniform(s.HV, low=-1.0), FP32)
        spec.fill("dt_bias", normal(s.HV, s.K, shift=-2.0), FP32)
    else:
        spec.options |= {"A_log": None, "dt_bias": None}
    v_first = spec.options["state_v_first"] = chance(variant, 0.7)
    inner = (s.HV, s.V, s.K) if v_first else (s.HV, s.K, s.V)
    slots = s.N * S1 + draw.choice((0, 1, 4))
    add_pool(draw, spec, "state", slots, inner, variant.choice((FP32, BF16)))
    L = W - 1 + (spec_tokens or 0) + draw.choice((0, 0, 2))
    order = variant.choice(((0, 1, 2), (0, 2, 1)))
    place = dense((slots, D, L), variant.choice((wide, dtype)), order, {0: draw.choice((0, 16))})
    spec.add("conv_state", place, normal(slots, D, L))
    spec.fill("output_gate", normal(rows, s.HV, s.V), dtype, pads={0: draw.choice((0, 24))})
    spec.fill("norm_weight", normal(s.V, shift=1.0), variant.choice((wide, dtype)))
    kinds, recorded = index_dtype(variant), spec_tokens is not None and chance(variant, 0.5)
    shape = (s.N,) if spec_tokens is None or recorded else (s.N, S1)
    spec.fill("state_indices", distinct(slots, *shape), kinds)
    if spec_tokens is not None:
        spec.options["num_spec_tokens"] = spec_tokens
        if chance(variant, 0.7):
            spec.fill("num_accepted_tokens", counts(0, S1 + 2, s.N), kinds)
    if recorded:
        buffer = s.N + draw.choice((0, 2))
        add_records(draw, spec, buffer, S1, (s.HV, s.K, s.V))
        spec.fill("intermediate_state_indices", distinct(buffer, s.N), kinds)
    if s.packed:
        add_offsets(draw, spec, s, S1)
    spec.maybe(variant, 0.3, null_index="non_positive")
    spec.maybe(variant, 0.3, scale=0.7)
    if chance(draw, 0.5):
        shape_of_o = (1, rows, s.HV, s.V) if s.packed else (s.N, S1, s.HV, s.V)
        spec.fill("output", unset(*shape_of_o), dtype)
    return spec


DRAWS = {
    "chunk_kda": whole_sequences,
    "fused_recurrent_kda": whole_sequences,
    "recurrent_kda": decoding,
    "commit": committing,
    "kda_prefill": prefilling,
    "chunk_bwd_wy_dqkg": wy_stage,
    "fused_kda_decode": fused_decoding,
    "short_convolution": convolving,
    "gated_rms_norm": norming,
}


def draw_spec(seed: int, number: int, device: torch.device) -> Spec:
    """The case of that number, which depends on nothing else."""
    draw, on_gpu = Random(f"{seed}/{number}"), device.type == "cuda"
    which = draw.randrange(VARIANTS if on_gpu else 1000 * VARIANTS)
    which = number if number < len(OPERATORS) else which
    variant = Random(f"variant {seed}/{which}")
    op = pick(variant, *((name, weight) for name, (_, weight) in OPERATORS.items()))
    op = [*OPERATORS][which] if which < len(OPERATORS) else op
    spec = DRAWS[op](op, draw, variant, doubles=not on_gpu)
    choices = ("auto", "auto", "triton") if on_gpu else ("auto", "reference")
    if op == "fused_recurrent_kda" and spec.grad:
        choices = ("auto",)
    spec.options["backend"] = draw.choice(choices)
    if spec.grad:
        spec.incoming = draw.choice([*GRADIENT_LAYOUTS]), draw.choice([*GRADIENT_LAYOUTS])
    return spec


# ---- contents -----------------------------------------------------------------------------------------------------------


class Contents:
    """The tensors of a call, and numbers in them. `fill` puts other numbers in the same memory."""

    def __init__(self, spec: Spec, device: torch.device, seed: int):
        self.spec = spec
        self.memories = {name: Memory(place, device) for name, place in spec.places.items()}
        self.fill(seed)
        self.host = {name: self.memories[of].tensor.cpu() for name, of in spec.on_host.items()}

    def fill(self, seed: int) -> None:
        lengths = None
        if self.spec.lengths is not None:
            # offsets that the host knows are the same for all contents
            own = torch.Generator().manual_seed(0 if self.spec.on_host else seed)
            lengths = self.spec.lengths(own)
        for name, numbers in self.spec.numbers.items():
            own = "slots" if name in ("state_indices", "checkpoint_indices") else name
            x = numbers(torch.Generator().manual_seed(zlib.crc32(own.encode()) + seed))
            if name == "cu_seqlens":
                x = torch.tensor([0, *lengths]).cumsum(0)
            self.memories[name].fill(x)
        if lengths is not None:
            self.spoil(sum(lengths))

    def spoil(self, used: int) -> None:
        """NaN in the rows of tokens of no sequence."""
        flat = ("mixed_qkv", "raw_g", "raw_beta", "output_gate")
        for name in ("q", "k", "v", "g", "beta", "x", "v_new", "A", "do", "dv", *flat):
            if name in self.memories:
                x = self.memories[name].tensor
                batched = name not in flat and x.dim() >= (3 if name in ("beta", "x") else 4)
                rows = x[:, used:] if batched else x[used:]
                if 0 not in self.spec.places[name].strides:
                    rows.fill_(math.nan)

    def call(self) -> dict[str, Any]:
        tensors = {name: memory.tensor for name, memory in self.memories.items()}
        return self.spec.options | tensors | self.host
