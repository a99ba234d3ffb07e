"""Rows of the benchmarks: a name, why it is there, and the call."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.support.cases import BF16, BOUNDED, FP32, Case
from tests.support.decoding import Step
from tests.support.fused import FusedStep
from tests.support.wy import WyCase


@dataclass(frozen=True)
class Row:
    """One row. Only `usual` rows run where none is named."""

    call: Any
    table: str
    usual: bool = True

    @property
    def name(self) -> str:
        return self.call.name

    @property
    def why(self) -> str:
        return self.call.why


UNBOUNDED: dict[str, Any] = {"gate": "softplus", "lower_bound": None, "safe": False}
NARROW = {"K": 64, "V": 64}
GATES = {
    "random": "gates as benchmarks draw them: all is forgotten within a token",
    "slow": "gates as models train to: channels remember 2 to 1,000 tokens",
}
STATES = {"fp32": FP32, "bf16": BF16}


def model(name: str, why: str, H: int, **changes: Any) -> Case:
    """A call as a model makes it: L2 norm, bounded gate and beta's sigmoid in the kernel, the final state returned."""
    asked = {"T": 8192, "HV": H, "K": 128, "V": 128, "safe": True, "memory": "long", **BOUNDED, **changes}
    return Case(name=name, why=why, H=H, **asked)


def with_gates(rows: Sequence[Row], usual: bool = False) -> list[Row]:
    """Rows with a bounded gate and K = 128 once more, with each kind of gates."""
    return [
        Row(replace(row.call, name=f"{row.name}, {kind} gates", why=why, memory=kind), row.table, usual)
        for (kind, why), row in itertools.product(GATES.items(), rows)
        if row.call.gate == "lower_bound" and row.call.K == 128
    ]


UNEVEN = (1300, 547, 2048, 963, 271, 3063)
"""Six prompts, most no multiple of a chunk; 8192 tokens in all."""


def random_lengths(count: int, total: int) -> tuple[int, ...]:
    """`count` lengths that add up to `total`, cut at points drawn uniformly."""
    cuts = sorted(random.Random(0).sample(range(1, total), count - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, total]))


RANDOM = random_lengths(20, 8192)

# ---- prefill -------------------------------------------------------------------------------------------------------------


def _prefill(table: str, name: str, why: str, H: int, **call: Any) -> Row:
    return Row(model(name, why, H, **call), table)


_MAIN = (
    _prefill("prefill", "T8192 H32", "a 32-head model on one card: a quarter of the SMs' worth", 32),
    _prefill("prefill", "T8192 H64", "the headline: a 64-head model, one prompt", 64),
    _prefill("prefill", "T8192 H96", "a 96-head model: heads do not divide the SMs", 96),
    _prefill("prefill", "T1024 H64", "a short prompt: launches dominate", 64, T=1024),
    _prefill("prefill", "T16384 H64", "time is linear in the length", 64, T=16384),
    _prefill("prefill", "B2 T8192 H64", "a batch doubles the parallel chains", 64, B=2),
    _prefill("prefill", "packed 6 uneven H64", "a serving batch", 64, lengths=UNEVEN),
    _prefill("prefill", "packed 8 x 1024 H64", "no tails: packing alone", 64, lengths=(1024,) * 8),
    _prefill("prefill", "packed 20 random H64", "many tails; 8192 tokens in all", 64, lengths=RANDOM),
    _prefill("prefill", "packed 6 uneven H96", "a serving batch, 96 heads", 96, lengths=UNEVEN),
    _prefill("prefill", "packed 200 x 40 H16", "short prompts, or what is left of long ones", 16, lengths=(40,) * 200),
    _prefill("prefill", "packed 64 x 100 H32", "prompts of two chunks, the second half empty", 32, lengths=(100,) * 64),
    _prefill("prefill", "GVA T8192 H16 HV64", "four value heads share a query/key head", 16, HV=64),
    _prefill("other gates and heads", "T8192 H32 softplus", "Kimi-Linear-48B's heads and gate", 32, **UNBOUNDED),
    _prefill("other gates and heads", "T8192 H64 softplus", "the headline without a bound", 64, **UNBOUNDED),
    _prefill("other gates and heads", "T8192 H32 K64", "heads of half the width", 32, **NARROW),
    _prefill("other gates and heads", "T8192 H64 K64", "heads of half the width", 64, **NARROW),
    _prefill("other gates and heads", "T8192 H64 K64 softplus", "the same, no bound", 64, **NARROW, **UNBOUNDED),
    _prefill("few heads", "T8192 H4", "32 heads over 8 cards: 4 chains for 132 SMs", 4),
    _prefill("few heads", "T8192 H8", "64 heads over 8 cards", 8),
    _prefill("few heads", "T8192 H12", "96 heads over 8 cards", 12),
    _prefill("few heads", "T32768 H8", "a long prompt", 8, T=32768),
    _prefill("few heads", "T131072 H8", "128K: the serial chain rules", 8, T=131072),
    _prefill("few heads", "T32768 H4", "a long prompt, half the heads", 4, T=32768),
    _prefill("few heads", "T131072 H4", "128K with the fewest heads", 4, T=131072),
    _prefill("few heads", "64K+512+256+128 H8", "one long prompt", 8, lengths=(65536, 512, 256, 128)),
    _prefill("few heads", "128K + 5 x 1K H4", "one long prompt", 4, lengths=(131072, *(1024,) * 5)),
)


def _shard(T: int, H: int, N: int = 1) -> Row:
    name, lengths = (f"shard T{T} H{H} N{N}", (T // N,) * N) if N > 1 else (f"shard T{T} H{H}", None)
    return Row(model(name, "", H, T=T, state=FP32, v_first=True, lengths=lengths), "shards")


_SHARDS = (
    *(_shard(2048, 12), _shard(2048, 16), _shard(4096, 8), _shard(4096, 12), _shard(8192, 12, 4)),
    *(_shard(8192, 16), _shard(1024, 4), _shard(3072, 10), _shard(8192, 24), _shard(16384, 16, 8)),
)
"""Shapes that cuDNN's kernels were tuned on, parts of shipped models: N sequences of one length, T tokens in all, each of which
goes on from a state. Only with named gates."""

SEGMENTED = {
    **{"8x256": (256,) * 8, "8x1K": (1024,) * 8, "1K+1+63+65+129": (1024, 1, 63, 65, 129), "2x16K": (16384,) * 2},
    **{"8K": (8192,), "32K": (32768,), "128K": (131072,), "128K+5x1K": (131072, *(1024,) * 5)},
}
_SPLIT = tuple(
    Row(model(f"{name} H{H}", "cut into segments, and whole", H, lengths=lengths), "split", False)
    for H in (4, 8)
    for name, lengths in SEGMENTED.items()
)


def _float32(B: int, H: int, T: int, K: int, C: int) -> Row:
    sizes = {"B": B, "H": H, "HV": H, "T": T, "K": K, "V": K, "chunk_size": C}
    why = "kda_prefill in float32"
    return Row(Case(f"fp32 B{B} H{H} T{T} K{K} C{C}", why, **sizes, l2norm=False, memory="long"), "fp32", False)


_FLOAT32 = (
    *(_float32(1, 8, 1024, 64, 32), _float32(1, 32, 4096, 64, 32), _float32(4, 32, 16384, 64, 32)),
    *(_float32(1, 8, 1024, 128, 64), _float32(1, 8, 16384, 128, 64), _float32(1, 32, 4096, 128, 64)),
    *(_float32(1, 32, 16384, 128, 64), _float32(4, 32, 16384, 128, 64)),
)


@dataclass(frozen=True, kw_only=True)
class Served(Case):
    """Calls of an engine's layer, one of `tests/support/engines.py`, by our integration and by the engine's kernels: a
    "prefill" of packed prompts; "decode" of a token per sequence, or the "whole step" between the projections; "verify" of
    drafts."""

    layer: str
    step: str


ENGINES = {"Kimi-Linear": None, "SGLang": -5.0}
"""Layers of vLLM and SGLang, with the lower bound of their gate."""

PROMPTS = {"8 x 1024": (1024,) * 8, "1 x 8192": (8192,), "6 uneven": UNEVEN}


def served(layer: str, H: int, step: str, what: str, lengths: tuple[int, ...], state: Any = FP32) -> Row:
    bound = -5.0 if layer == "Kimi-K3" else ENGINES[layer]
    sizes = {"H": H, "HV": H, "K": 128, "V": 128, "lengths": lengths, "state": state, "lower_bound": bound}
    sizes |= {"gate": "softplus" if bound is None else "lower_bound", "layer": layer, "step": step}
    call = Served(f"{layer} {step} {what} H{H}", "beside the engine's own kernels", **sizes)  # type: ignore[arg-type]
    return Row(call, "engines", usual=False)


PREFILL = (
    *_MAIN,
    *with_gates(_MAIN),
    *with_gates(_SHARDS, usual=True),
    *_SPLIT,
    *_FLOAT32,
    *(
        served(layer, H, "prefill", what, lengths)
        for layer, H, (what, lengths) in itertools.product(ENGINES, (12, 32), PROMPTS.items())
    ),
)

# ---- decode --------------------------------------------------------------------------------------------------------------


def decode_row(
    N: int, state: str = "fp32", why: str = "a 32-head model", usual: bool = True, S: int = 0, **changes: Any
) -> Row:
    """`N` sequences of one token and `S` speculative ones, in a pool of states."""
    sizes: dict[str, Any] = {"H": 32, "K": 128, "gate": "lower_bound", "v_first": True, **changes}
    H, HV, K = sizes["H"], sizes.setdefault("HV", sizes["H"]), sizes["K"]
    parts = [f"N{N}", f"H{H}" if H == HV else f"H{H} HV{HV}", *([f"K{K}"] if K != 128 else []), state]
    parts += [sizes["gate"]] if sizes["gate"] != "lower_bound" else []
    parts += [*([] if sizes["v_first"] else ["K first"]), *([f"S{S}"] if S else [])]
    sizes |= {"B": N, "T": 1 + S, "V": K, "spec": S or None, "indices": None, "memory": "long"}
    return Row(Step(" ".join(parts), why, state=STATES[state], **sizes), "decode", usual)


def verify_row(N: int, H: int, S: int, state: str = "fp32", usual: bool = True, **changes: Any) -> Row:
    """`S` drafts verified without a write to the pool, then the accepted ones committed."""
    step = decode_row(N, state, S=S, H=H, **changes).call
    why = "verification and commit, by replay"
    return Row(replace(step, name=f"verify {step.name}", why=why, update=False, rows="slots"), "verify", usual)


_HEADS: tuple[dict[str, int], ...] = ({"H": 12}, {"H": 16, "HV": 64}, {"H": 64, "HV": 128}, {"K": 64})
_OTHERS: tuple[dict[str, Any], ...] = ({"gate": "softplus"}, {"gate": "none"}, {"v_first": False})
_SERVED = [*itertools.product((12, 32), STATES, (32, 128))]

DECODE = (
    *(decode_row(N, state) for state in STATES for N in (1, 4, 8, 16, 32, 64, 128, 256)),
    *(decode_row(N, x, "other heads", False, **heads) for heads in _HEADS for x in STATES for N in (8, 32, 128)),
    *(decode_row(128, state, "another gate or layout", False, **one) for one in _OTHERS for state in STATES),
    *(decode_row(32, state, "a state stored after each token", S=S) for state in STATES for S in (1, 3, 7)),
    *(
        verify_row(N, H, S, state, usual=H == 32 and N == 32)
        for state, H, N, S in itertools.product(STATES, (12, 32), (8, 32, 128), (3, 7, 15))
    ),
    *(
        served(layer, H, step, f"N{N} {state}", (1,) * N, STATES[state])
        for layer, step in (("Kimi-Linear", "decode"), ("SGLang", "decode"), ("Kimi-K3", "whole step"))
        for H, state, N in _SERVED
    ),
    *(served("Kimi-K3", 24, "whole step", f"N{N} fp32", (1,) * N) for N in (32, 128)),  # where vLLM fuses it, too
    *(served("Kimi-Linear", H, "verify", f"N{N} {x}", (4,) * N, STATES[x]) for H, x, N in _SERVED if N == 32),
)

# ---- train ---------------------------------------------------------------------------------------------------------------


def _train(name: str, why: str, H: int, **call: Any) -> Row:
    return Row(model(name, why, H, final=False, **call), "train")


_STEPS = (
    _train("B1 T8192 H32", "the headline: one long sequence", 32),
    _train("B4 T2048 H32", "as many tokens in shorter chains", 32, B=4, T=2048),
    _train("B1 T8192 H64", "twice the heads", 64),
    _train("packed 6 uneven H32", "documents packed into one row", 32, lengths=UNEVEN),
    _train("packed 20 random H32", "many tails", 32, lengths=RANDOM),
    _train("GVA B1 T8192 H8 HV32", "four value heads share a query/key head", 8, HV=32),
    _train("B1 T8192 H32 softplus", "Kimi-Linear's gate, without a bound", 32, **UNBOUNDED),
)


def _wy(name: str, H: int = 32, **call: Any) -> Row:
    sizes = {"T": 8192, "H": H, "HV": 32, "K": 128, "V": 128, "log2": True, **call}
    return Row(WyCase(f"wy {name}", "the public stage of the backward pass, alone", **sizes), "wy", usual=False)


TRAIN = (
    *_STEPS,
    *with_gates(_STEPS),
    *(_wy("B1 T512 H32", T=512), _wy("B1 T8192 H32"), _wy("B1 T8192 H8 HV32", 8)),
    _wy("packed random 20 of 8192 H32", lengths=RANDOM),
)

# ---- layer ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LayerCall(Case):
    """Convolution, attention and norm ("train"), or one of them alone: "convolution" or "norm"."""

    part: str
    W: int = 4

    @property
    def channels(self) -> int:
        return 2 * self.H * self.K + self.HV * self.V


def layer_step_row(N: int, H: int, state: str, why: str, **changes: Any) -> Row:
    """A step of decoding of the layer: a token for each of `N` sequences."""
    sizes = {"B": N, "H": H, "HV": H, "K": 128, "V": 128, "layout": "dense", "indices": None, "memory": "long"}
    return Row(FusedStep(f"decode N{N} H{H} {state}", why, state=STATES[state], **sizes | changes), "step")


def layer_call_row(name: str, why: str, part: str, **changes: Any) -> Row:
    call = model(name, why, 32, final=False, **changes)
    return Row(LayerCall(**vars(call), part=part), part)


LAYER = (
    *(
        layer_step_row(N, H, state, why)
        for H, why in {12: "96 heads over 8 cards", 32: "a 32-head model", 96: "a 96-head model"}.items()
        for state in STATES
        for N in (1, 8, 32, 128, 256)
    ),
    layer_call_row("train T8192 H32", "one long sequence", "train"),
    layer_call_row("train B4 T2048 H32", "as many tokens in shorter chains", "train", B=4, T=2048),
    layer_call_row("train packed 6 uneven H32", "documents packed into one row", "train", lengths=UNEVEN),
    *(
        layer_call_row(f"{part} T{T}", "a kernel beside attention, bound by memory", part, T=T)
        for part, T in (("convolution", 2048), ("convolution", 8192), ("norm", 4096), ("norm", 16384))
    ),
)

# ---- ranks ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Spread(Case):
    """A sequence over `ranks` GPUs; the sizes are of one rank. `trains`: its backward pass is timed too."""

    ranks: int
    trains: bool
    packed: bool = False


def spread_row(ranks: int, H: int, thousands: int, trains: bool, packed: bool = False) -> Row:
    name = f"{'fwd+bwd' if trains else 'fwd'} H{H} {thousands}K x {ranks}" + " packed" * packed
    why = "sequences cut inside" if packed else "one sequence over all ranks"
    call = model(name, why, H, T=thousands * 1024, final=False)
    table = "packed" if packed else "forward + backward" if trains else "forward"
    return Row(Spread(**vars(call), ranks=ranks, trains=trains, packed=packed), table, usual=ranks == 2)


RANKS = tuple(
    spread_row(ranks, H, thousands, trains, packed)
    for ranks in (2, 4, 8)
    for trains in (False, True)
    for H, thousands, packed in (
        *((H, T, False) for H in (8, 32, 64) for T in (8, 32, 128) if H > 8 or ranks == 2),
        *((32, T, True) for T in (8, 32)),
    )
)
