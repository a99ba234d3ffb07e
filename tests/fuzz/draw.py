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
from typing import Any, NamedTuple

import torch
from torch import Tensor

import flashdelta as fd
from flashdelta.problem.problem import GATES, PLAIN_GATES

from ..support.layouts import LAYOUTS as GRADIENT_LAYOUTS
from .memory import LAYOUTS, Memory, Place, dense, token_place

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

WRITTEN = (
    *("out", "output", "final_state", "state_pool", "initial_state", "intermediate_states", "checkpoint_states"),
    *("state", "conv_state"),
)
"""Arguments that a call may write; `initial_state` in decoding alone."""

POOL_PADS = (0, 0, 4, 16, 33)
"""Elements between slots of a pool, beyond those of a slot."""

VARIANTS = 12
"""Variants per seed, for which kernels are compiled on a GPU, in a minute or two; other seeds have others. The CPU compiles
nothing, and draws from a thousand times as many. The first are one of each operator, and so are the first cases."""

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
        return OPERATORS[self.op].function

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


def ordered(most: int, *shape: int) -> Numbers:
    """Offsets of checkpoints: multiples of 16 in order, some twice."""
    rows = (shape[0], math.prod(shape[1:]))
    return lambda source: (torch.randint(0, most + 1, rows, generator=source) * 16).sort(dim=1).values.reshape(shape)


def records(rows: int, tokens: int, HV: int, K: int, V: int) -> Numbers:
    """A replay buffer that holds records of some tokens."""
    shape = rows, tokens, HV, fd.replay_buffer(0, 1, 1, K, V).shape[-1]

    def numbers(source: torch.Generator) -> Tensor:
        x = torch.randn(shape, generator=source, dtype=FP64)
        x[..., :K] = x[..., :K].abs().clamp(max=1)
        x[..., 2 * K + V :][..., :4] = torch.randint(0, tokens + 1, (rows, 1, 1, 1), generator=source).double()
        return x

    return numbers


# ---- what operations share ------------------------------------------------------------------------------------------------


class Drawing:
    """A case while it is drawn: by `variant` what kernels are compiled for, by `draw` the rest."""

    B = T = H = HV = K = V = N = 0
    packed = False

    def __init__(self, op: str, draw: Random, variant: Random, doubles: bool):
        self.spec, self.draw, self.variant = Spec(op, {}), draw, variant
        self.dtype = pick(variant, (BF16, 5), (FP16, 2), (FP32, 3), (FP64, 2 if doubles else 0))
        self.index = variant.choice((torch.int32, torch.int64))

    def sizes(self, head_dims: tuple[int, ...], tokens: int) -> None:
        draw, variant = self.draw, self.variant
        self.K = variant.choice(head_dims)
        self.V = self.K if chance(variant, 0.6) else variant.choice(head_dims)
        self.H, group = draw.choice((1, 1, 2, 3)), draw.choice((1, 1, 2, 3))
        self.HV, self.packed = self.H * group, chance(variant, 0.5)
        self.T = draw.choice((0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 130, draw.randint(1, tokens)))
        self.B = 1 if self.packed else draw.choice((1, 1, 2, 3, 0) if chance(draw, 0.1) else (1, 1, 2, 3))
        self.N = draw.choice((0, 1, 2, 3, 5)) if self.packed else self.B

    @property
    def wide(self) -> torch.dtype:
        return FP64 if self.dtype == FP64 else FP32

    @property
    def states(self) -> tuple[torch.dtype, ...]:
        return (FP32, BF16, FP64) if self.dtype == FP64 else (FP32, BF16)

    @property
    def state(self) -> tuple[int, int, int]:
        return self.HV, *((self.V, self.K) if self.spec.options.get("state_v_first") else (self.K, self.V))

    def option(self, name: str, share: float, *values: Any) -> None:
        if chance(self.variant, share):
            self.spec.options[name] = self.variant.choice(values)

    def null_index(self) -> None:
        self.option("null_index", 0.3, "non_positive")

    def either(self, *dtypes: torch.dtype) -> torch.dtype:
        """The wide dtype or the call's own, or one of those given."""
        return self.variant.choice(dtypes or (self.wide, self.dtype))

    def add(self, name: str, numbers: Numbers, dtype: torch.dtype, layout: str = "dense", **options: Any) -> None:
        """A tensor of the shape that its numbers have, by `token_place` or, with options, by `dense`."""
        shape, self.spec.numbers[name] = tuple(numbers(torch.Generator()).shape), numbers
        place = dense(shape, dtype, **options) if options else token_place(self.draw, shape, dtype, layout)
        self.spec.places[name] = place

    def add_rows(self, name: str, numbers: Numbers, dtype: torch.dtype, *pads: int, **options: Any) -> None:
        """The same, with rows one of `pads` apart."""
        self.add(name, numbers, dtype, pads={0: self.draw.choice(pads)}, **options)

    def tokens(self, expanded: bool = True, **tensors: tuple[torch.dtype, Numbers]) -> None:
        """Tensors `[B, T, ...]`; most lie as the others do."""
        kinds = [layout for layout in LAYOUTS if expanded or layout != "expanded"]
        one, mixed = pick(self.draw, ("dense", 3), *((kind, 1) for kind in kinds)), chance(self.draw, 0.2)
        for name, (dtype, numbers) in tensors.items():
            self.add(name, numbers, dtype, self.draw.choice(kinds) if mixed else one)

    def offsets(self, longest: float = math.inf) -> None:
        """Offsets of packed sequences: `N` lengths that share `T` tokens, of which some may be left over."""
        if not self.packed:
            return
        N, T, left_over = self.N, self.T, chance(self.draw, 0.3)

        def lengths(source: torch.Generator) -> list[int]:
            cuts = torch.randint(0, T + 1, (N + 1,), generator=source)
            cuts = torch.where(torch.rand(N + 1, generator=source) < 0.15, cuts // 16 * 16, cuts).sort().values
            cuts[0] = 0
            if N > 0 and not left_over:
                cuts[-1] = T
            return [min(n, longest) for n in cuts.diff().tolist()]

        self.spec.lengths = lengths
        self.add("cu_seqlens", lambda source: torch.zeros(N + 1), self.draw.choice((torch.int32, torch.int64)))

    def pool(self, name: str, slots: int, *inner: int, dtype: torch.dtype) -> None:
        self.add_rows(name, normal(slots, *inner), dtype, *POOL_PADS)

    def slots(self, name: str, count: int, *shape: int) -> None:
        self.add(name, distinct(count, *shape), self.index)

    def flags(self) -> None:
        if chance(self.variant, 0.5):
            self.add("has_initial_state", lambda source: torch.rand(self.N, generator=source) < 0.6, torch.bool)

    def out(self, shape: tuple[int, ...], *layouts: str) -> None:
        if not self.spec.grad and chance(self.draw, 0.4):
            self.add("out", unset(*shape), self.dtype, self.draw.choice(("dense", "padded", "odd_offset", *layouts)))

    def gate(self, logit: str) -> str:
        variant, options = self.variant, self.spec.options
        gate = variant.choice(GATES)
        if gate in PLAIN_GATES or chance(variant, 0.3):
            options["gate"] = gate
        elif gate != "none":
            options["use_gate_in_kernel"] = True
        if gate == "lower_bound":
            options["lower_bound"] = variant.choice((-5.0, -0.5, -3))
        beta = pick(variant, ("value", 2), ("logit", 2), ("double", 1))
        options |= ({logit: True} if beta != "value" else {}) | ({"allow_neg_eigval": True} if beta == "double" else {})
        return gate

    def raw_g(self, gate: str, *shape: int) -> Numbers:
        if gate == "none":
            return decays(*shape, floor=-5.0 if self.spec.options.get("safe_gate") else -50.0)
        return normal(*shape, shift=2.0 * (gate == "logsigmoid"))

    def raw_beta(self, *shape: int) -> Numbers:
        logits = {"use_beta_sigmoid_in_kernel", "beta_is_logit"} & self.spec.options.keys()
        return normal(*shape) if logits else uniform(*shape, high=1.95)

    def attention(self, wide: tuple[tuple[str, ...], ...], logit: str = "use_beta_sigmoid_in_kernel") -> None:
        """q, k, v, g, beta and the gate's parameters; `wide`: which of them are in the wide dtype."""
        draw, lead = self.draw, (self.B, self.T)
        l2norm, gate, wide_ones = chance(self.variant, 0.7), self.gate(logit), self.variant.choice(wide)
        self.spec.options["use_qk_l2norm_in_kernel"] = l2norm
        keys, own = (normal if l2norm else unit)(*lead, self.H, self.K), self.dtype
        self.tokens(q=(own, keys), k=(own, keys), v=(own, normal(*lead, self.HV, self.V)))
        g, beta = self.raw_g(gate, *lead, self.HV, self.K), self.raw_beta(*lead, self.HV)
        dtypes = [self.wide if name in wide_ones else own for name in ("g", "beta")]
        self.tokens(g=(dtypes[0], g), beta=(dtypes[1], beta))
        if gate == "softplus" or (gate == "lower_bound" and chance(draw, 0.6)):
            self.add("A_log", uniform(*draw.choice(((self.HV,), (1, 1, self.HV, 1))), low=-1.0), FP32)
        if gate in ("softplus", "lower_bound") and chance(draw, 0.7):
            self.add("dt_bias", normal(*draw.choice(((self.HV * self.K,), (self.HV, self.K))), shift=-2.0), FP32)
        if chance(draw, 0.3):
            self.spec.options["scale"] = draw.choice((0.7, 1, 0.0, -2.0, 0.125))


# ---- operations -----------------------------------------------------------------------------------------------------------


def whole_sequences(d: Drawing) -> None:
    spec, draw, variant, chunked = d.spec, d.draw, d.variant, d.spec.op == "chunk_kda"
    options = spec.options
    d.sizes((32, 64, 64, 128), 200 if chunked else 40)
    d.option("safe_gate", 0.4 * chunked, True)
    d.attention(((), ("g",), ("g", "beta")))
    if "A_log" in spec.places and "lower_bound" not in options:
        options.pop("safe_gate", None)  # the softplus gate can't keep the promise
    d.offsets()
    kind = pick(variant, ("none", 2), ("state", 3), ("pool", 3), ("grad", 3))
    spec.grad = kind == "grad"
    d.option("state_v_first", 1.0, False, True)
    if not options["use_qk_l2norm_in_kernel"] and kind != "pool":
        del options["use_qk_l2norm_in_kernel"]
    if kind == "pool":
        pool_of_sequences(d, pick(variant, (0, 3), (1, 1), (2, 1)) if chunked else 0)
    elif kind == "state" or (spec.grad and chance(variant, 0.5)):
        d.add("initial_state", normal(d.N, *d.state), d.either(*d.states))
    d.option("output_final_state", 0.7 * (kind != "pool"), True)
    if chunked:
        d.option("chunk_size", 0.3, 32)
        d.option("return_intermediate_states", 0.3 * (kind in ("none", "state")), True)
        d.option("disable_recompute", 0.4 * spec.grad, True)
        d.option("split", 0.25, False, 2, 3)
        d.option("batch_invariant", 0.2, True)
        if d.packed and chance(draw, 0.3):
            spec.on_host["cu_seqlens_cpu"] = "cu_seqlens"
        if not spec.grad:
            checkpoint_buffer(d)
    if options.get("output_final_state") and not spec.grad and chance(variant, 0.4):
        d.add("final_state", unset(d.N, *d.state), d.either(*d.states))
        options["output_final_state"] = chance(draw, 0.5)
    d.out((d.B, d.T, d.HV, d.V), "head_first")


def checkpoint_marks(d: Drawing, M: int, indices: Numbers) -> None:
    shape = (d.N,) if M == 1 and chance(d.draw, 0.5) else (d.N, M)
    d.add("checkpoint_offsets", ordered(max(d.T // 16, 1), *shape), d.index)
    d.add("checkpoint_indices", lambda source: indices(source).reshape(shape), d.index)


def checkpoint_buffer(d: Drawing) -> None:
    """For the checkpoints that the call has already, or for others."""
    draw, kind = d.draw, pick(d.variant, ("none", 3), ("regular", 1), ("offsets", 1))
    if kind == "none":
        return
    if "checkpoint_offsets" in d.spec.places:
        rows = d.spec.places["state_pool"].shape[0]  # its indices are those of the pool's slots
    elif kind == "regular":
        n = d.spec.options["checkpoint_every"] = draw.choice((64, 64, 128, 192))
        most = d.T // n + d.N if d.packed else d.B * -(-d.T // n)
        rows = draw.randint(0, most + 1) if d.packed else most + draw.choice((0, 0, 2))
    else:
        M = draw.choice((1, 1, 2, 12))
        rows = d.N * M + draw.choice((0, 1, 3))
        checkpoint_marks(d, M, distinct(rows, d.N * M))
    d.pool("checkpoint_states", rows, *d.state, dtype=d.either(*d.states))


def pool_of_sequences(d: Drawing, M: int) -> None:
    slots = d.N * (1 + M) + d.draw.choice((0, 1, 3))
    d.pool("state_pool", slots, *d.state, dtype=d.either(*d.states))
    d.null_index()
    # the slots of sequences and of checkpoints are different ones: both come from one permutation, by one seed
    indices = distinct(slots, d.N * (1 + M))
    d.add("state_indices", lambda source: indices(source)[: d.N], d.index)
    d.flags()
    if M > 0:
        checkpoint_marks(d, M, lambda source: indices(source)[d.N :])


def decoding(d: Drawing) -> None:
    spec, draw, variant, options = d.spec, d.draw, d.variant, d.spec.options
    served = chance(variant, 0.3)  # as engines verify, which more kernels take
    d.dtype = BF16 if served else d.dtype
    drafts = pick(variant, (None, 0 if served else 3), (1, 1), (3, 1), (7, 1), (11, 0.5), (15, 0.5), (16, 0.5))
    d.sizes((64, 128) if served else (16, 32, 64, 128), 17)
    most = 1 + drafts if drafts else 17
    if d.packed:
        d.T = draw.randint(0, d.N * most)
    else:
        d.T = most if drafts else draw.choice((1, 1, 1, 2, 5))
        d.B = d.N = draw.choice((0, 1, 2, 5, 9) if chance(draw, 0.1) else (1, 2, 5, 9))
    d.attention(((), ("g", "beta")), "beta_is_logit")
    d.offsets(most)
    options["state_v_first"] = served or chance(variant, 0.7)
    states_of_decoding(d, drafts)
    if "ssm_state_indices" in spec.places:
        d.null_index()
    if chance(draw, 0.5):
        d.add("output", unset(d.B, d.T, d.HV, d.V), d.dtype)
    # without offsets every row is a sequence, or each `1 + num_spec_tokens`
    rows_fit = d.packed or 1 + (drafts or 0) == d.T
    if "initial_state" in spec.places and rows_fit and chance(variant, 0.3):
        mix(d)


def mix(d: Drawing) -> None:
    """q, k and v in one row."""
    rows, parts = d.B * d.T, [d.spec.numbers.pop(name) for name in "qkv"]
    for name in "qkv":
        del d.spec.places[name]

    def numbers(source: torch.Generator) -> Tensor:
        return torch.cat([part(source).flatten(2).flatten(0, 1) for part in parts], dim=1)

    d.add_rows("mixed_qkv", numbers, d.dtype, 0, 8, 24)
    for name, inner in (("g", d.HV * d.K), ("beta", d.HV)):
        made = d.spec.numbers[name]
        d.add(name, lambda source, f=made, n=inner: f(source).reshape(rows, n), d.spec.places[name].dtype)


def states_of_decoding(d: Drawing, drafts: int | None) -> None:
    draw, variant, options, N, S1 = d.draw, d.variant, d.spec.options, d.N, 1 + (drafts or 0)
    kinds = (("none", 1), ("own", 1), ("pool", 4), ("source", 1), ("read", 1))
    kind = pick(variant, *kinds if drafts is None else (("pool", 6), ("source", 1), ("read", 6)))
    if kind == "none":
        d.option("output_final_state", 1.0, False, True)
        return
    slots, dtype = N if kind == "own" else N * S1 + draw.choice((0, 1, 4)), d.either(FP32, BF16)
    d.pool("initial_state", slots, *d.state, dtype=dtype)
    if kind == "own":
        return
    if drafts is not None:
        options["num_spec_tokens"] = drafts
    if kind == "read":
        options["update_state"] = False
        d.slots("ssm_state_indices", slots, N)
        if drafts is not None:
            recorded(d, S1, dtype, 0.7)
        return
    d.slots("ssm_state_indices", slots, *((N,) if drafts is None else (N, S1)))
    if kind == "source":
        d.pool("initial_state_source", slots, *d.state, dtype=dtype)
        d.slots("initial_state_indices", slots, N)
    elif drafts is not None and chance(variant, 0.7):
        d.add("num_accepted_tokens", counts(draw.choice((0, 1)), S1 + 2, N), d.index)


def recorded(d: Drawing, tokens: int, dtype: torch.dtype, share: float, named: float = 1.0) -> None:
    """A buffer for records, or for states, whose rows are named or not."""
    rows = d.N + d.draw.choice((0, 2))
    if chance(d.variant, share):
        d.add_rows("intermediate_states", records(rows, tokens, d.HV, d.K, d.V), FP32, *POOL_PADS)
    else:
        d.pool("intermediate_states", rows, tokens, *d.state, dtype=dtype)
    if chance(d.variant, named):
        d.slots("intermediate_state_indices", rows, d.N)


def committing(d: Drawing) -> None:
    draw, variant, tokens = d.draw, d.variant, d.draw.choice((1, 2, 4, 8, 12, 16, 17))
    d.N, d.HV = draw.choice((0, 1, 3, 6)), draw.choice((1, 2, 3))
    d.K, d.V = (variant.choice((32, 64, 128)) for _ in range(2))
    d.option("state_v_first", 1.0, False, True)
    slots, dtype = d.N + draw.choice((0, 1, 3)), d.either(FP32, BF16)
    d.pool("initial_state", slots, *d.state, dtype=dtype)
    recorded(d, tokens, dtype, 0.5, named=0.5)
    d.slots("ssm_state_indices", slots, d.N)
    d.add("num_accepted_tokens", counts(-1, tokens + 2, d.N), d.index)
    d.null_index()


def prefilling(d: Drawing) -> None:
    draw, variant = d.draw, d.variant
    K, C = variant.choice((64, 128)), variant.choice((32, 64))
    T = draw.choice((0, 1, 31, 32, 63, 64, 65, draw.randint(1, 150)))
    shape, gate = (draw.choice((1, 2)), draw.choice((1, 2, 3)), T, K), variant.choice(("none", "logsigmoid"))
    d.spec.options |= {"chunk_size": C, "precision": variant.choice(("ieee", "tf32x3")), "gate": gate}
    made = {"q": normal(*shape), "k": unit(*shape), "v": normal(*shape), "g": d.raw_g(gate, *shape)}
    for name, numbers in (made | {"beta": d.raw_beta(*shape[:3])}).items():
        d.add(name, numbers, FP32)
    d.option("scale", 0.3, 0.7, 1, -2.0)


def wy_stage(d: Drawing) -> None:
    variant, dtype = d.variant, d.dtype
    d.sizes((32, 64, 64, 128), 150)
    C, v_first = variant.choice((32, 64, 64)), chance(variant, 0.5)
    d.spec.options |= {"chunk_size": C, "state_v_first": v_first, "use_exp2": chance(variant, 0.4)}
    NT = d.T // C + d.N if d.packed else -(-d.T // C)
    same = dtype if chance(variant, 0.6) else d.wide
    keys, values, heads = (d.B, d.T, d.H, d.K), (d.B, d.T, d.HV, d.V), (d.B, d.T, d.HV)
    d.tokens(
        expanded=False,
        **dict.fromkeys("qk", (dtype, unit(*keys))),
        **dict.fromkeys(("v", "v_new", "do", "dv"), (dtype, normal(*values))),
        # sums that fall by up to 0.1 per token; the formulas do not ask where they begin
        g=(d.wide, lambda source: -(torch.rand(*heads, d.K, generator=source, dtype=FP64) * 0.1).cumsum(1)),
        beta=(d.either(), uniform(*heads)),
        A=(same, normal(*heads, C, scale=C**-0.5)),
    )
    for name in ("h", "dh"):
        d.add(name, normal(d.B, NT, *d.state), same)
    d.offsets()


def convolving(d: Drawing) -> None:
    spec, draw, variant = d.spec, d.draw, d.variant
    d.sizes((32,), 200)
    D, W = draw.choice((1, 8, 24, 96, 100, 384)), variant.choice((2, 3, 4))
    L, N = variant.choice((W - 1, W)), d.N
    d.tokens(x=(d.dtype, normal(d.B, d.T, D)))
    d.add("weight", normal(*variant.choice(((D, W), (D, 1, W)))), d.either())
    if chance(variant, 0.5):
        d.add("bias", normal(D), d.either())
    d.option("activation", 0.3, None)
    d.offsets()
    kind = pick(variant, ("none", 1), ("state", 2), ("pool", 3), ("grad", 3))
    spec.grad = kind == "grad"
    states, order = d.either(), draw.choice(((0, 1, 2), (0, 2, 1)))
    if kind == "pool":
        slots, pads = N + draw.choice((0, 1, 3)), {0: draw.choice((0, 7)), 1: draw.choice((0, 1))}
        d.add("state_pool", normal(slots, D, L), states, order=order, pads=pads)
        d.slots("state_indices", slots, N)
        d.null_index()
        d.flags()
    else:
        if kind == "state" or chance(variant, 0.5):
            d.add("initial_state", normal(N, D, L), states, order=order)
        d.option("output_final_state", 1.0, True, True, False)
        if not spec.grad and chance(variant, 0.3):
            length = L if "initial_state" in spec.places else W - 1
            d.add("final_state", unset(N, D, length), d.either(), order=order)
    d.out((d.B, d.T, D))


def norming(d: Drawing) -> None:
    draw, variant, V = d.draw, d.variant, d.variant.choice((1, 17, 32, 64, 128, 1000))
    shape = (*(draw.choice((0, 1, 2, 3, 33)) if chance(draw, 0.1) else draw.choice((1, 2, 3, 33)) for _ in range(3)), V)
    d.spec.options |= {"activation": variant.choice(("sigmoid", "silu")), "eps": variant.choice((1e-5, 0.1))}
    d.spec.grad = chance(variant, 0.5)
    # not expanded: rows alike have a norm that rounding may be all of
    d.tokens(expanded=False, **dict.fromkeys("xz", (d.dtype, normal(*shape))))
    d.add("weight", normal(V), d.either())


def fused_decoding(d: Drawing) -> None:
    draw, variant, options = d.draw, d.variant, d.spec.options
    drafts = pick(variant, (None, 3), (1, 1), (3, 1), (7, 0.5), (16, 0.3))
    S1, W = 1 + (drafts or 0), variant.choice((2, 3, 4))
    d.sizes((32, 64, 128), 17)
    N = d.N = draw.choice((0, 1, 2, 5))
    rows = d.T = draw.randint(0, N * S1 + 2) if d.packed else N * S1
    D = 2 * d.H * d.K + d.HV * d.V
    d.add_rows("x", normal(rows, D), d.dtype, 0, 0, 8, 24)
    taps = variant.choice(((D, W), (D, 1, W), *(((3, W, D // 3),) if d.H == d.HV and d.K == d.V else ())))
    d.add("weight", normal(*taps, scale=0.5), d.either())
    if chance(variant, 0.5):
        d.add("bias", normal(D), d.wide)
    gate = d.gate("beta_is_logit")
    options.pop("use_gate_in_kernel", None)
    d.add_rows("raw_g", d.raw_g(gate, rows, d.HV, d.K), d.either(), 0, 8)
    d.add("raw_beta", d.raw_beta(rows, d.HV), d.either())
    if gate in ("softplus", "lower_bound"):
        d.add("A_log", uniform(d.HV, low=-1.0), FP32)
        d.add("dt_bias", normal(d.HV, d.K, shift=-2.0), FP32)
    else:
        options |= {"A_log": None, "dt_bias": None}
    options |= {"gate": gate, "lower_bound": options.get("lower_bound"), "beta_is_logit": "beta_is_logit" in options}
    options["state_v_first"] = chance(variant, 0.7)
    slots, order = N * S1 + draw.choice((0, 1, 4)), variant.choice(((0, 1, 2), (0, 2, 1)))
    d.pool("state", slots, *d.state, dtype=d.either(FP32, BF16))
    L = W - 1 + (drafts or 0) + draw.choice((0, 0, 2))
    d.add_rows("conv_state", normal(slots, D, L), d.either(), 0, 16, order=order)
    d.add_rows("output_gate", normal(rows, d.HV, d.V), d.dtype, 0, 24)
    d.add("norm_weight", normal(d.V, shift=1.0), d.either())
    records_tokens = drafts is not None and chance(variant, 0.5)
    d.slots("state_indices", slots, *((N,) if drafts is None or records_tokens else (N, S1)))
    if drafts is not None:
        options["num_spec_tokens"] = drafts
        if chance(variant, 0.7):
            d.add("num_accepted_tokens", counts(0, S1 + 2, N), d.index)
    if records_tokens:
        recorded(d, S1, FP32, 1.0)
    d.offsets(S1)
    d.null_index()
    d.option("scale", 0.3, 0.7)
    if chance(draw, 0.5):
        d.add("output", unset(*((1, rows) if d.packed else (N, S1)), d.HV, d.V), d.dtype)


class Operator(NamedTuple):
    """A public function, how often it is drawn and how, and its results."""

    function: Callable
    weight: int
    draw: Callable[[Drawing], None]
    results: tuple[str, ...]


OPERATORS = {
    "chunk_kda": Operator(fd.chunk_kda, 7, whole_sequences, ("o", "final_state", "h")),
    "fused_recurrent_kda": Operator(fd.fused_recurrent_kda, 3, whole_sequences, ("o", "final_state")),
    "recurrent_kda": Operator(fd.recurrent_kda, 5, decoding, ("o", "final_state")),
    "commit": Operator(fd.commit, 1, committing, ()),
    "kda_prefill": Operator(fd.kda_prefill, 2, prefilling, ("o", "w", "u")),
    "chunk_bwd_wy_dqkg": Operator(fd.kernels.chunk_bwd_wy_dqkg, 2, wy_stage, ("dq", "dk", "dv", "dbeta", "dg", "dA")),
    "fused_kda_decode": Operator(fd.fused_kda_decode, 4, fused_decoding, ("o",)),
    "short_convolution": Operator(fd.short_convolution, 2, convolving, ("o", "final_state")),
    "gated_rms_norm": Operator(fd.gated_rms_norm, 1, norming, ("o",)),
}


def draw_spec(seed: int, number: int, device: torch.device) -> Spec:
    """The case of that number, which depends on nothing else."""
    draw, on_gpu = Random(f"{seed}/{number}"), device.type == "cuda"
    which = draw.randrange(VARIANTS if on_gpu else 1000 * VARIANTS)
    which = number if number < len(OPERATORS) else which
    variant = Random(f"variant {seed}/{which}")
    op = pick(variant, *((name, operator.weight) for name, operator in OPERATORS.items()))
    drawing = Drawing([*OPERATORS][which] if which < len(OPERATORS) else op, draw, variant, doubles=not on_gpu)
    spec = drawing.spec
    OPERATORS[spec.op].draw(drawing)
    choices = ("auto", "auto", "triton") if on_gpu else ("auto", "reference")
    spec.options["backend"] = draw.choice(("auto",) if spec.op == "fused_recurrent_kda" and spec.grad else choices)
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
