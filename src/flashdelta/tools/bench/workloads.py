"""What is measured: the rows of every benchmark, why each is there, and what it must reach."""

from __future__ import annotations

import difflib
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...testing.cases import BF16, BOUNDED, FP32, Case
from ...testing.decoding import Step
from ...testing.fused import FusedStep

# ---- rows ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bound:
    """What a row must reach in `of`, a key of `QUANTITIES`, with kernels of `backend` (None: of any).

    `row` is the name of another row that a time is a multiple of. Bounds hold on one NVIDIA H200 or H100 (132
    SMs), set on the former, whose memory is 1.4 times as fast; those of `any_gpu` hold everywhere.
    """

    of: str
    limit: float
    backend: str | None = None
    row: str | None = None
    any_gpu: bool = False

    @property
    def words(self) -> str:
        return QUANTITIES[self.of][0].format(self.limit, row=self.row)

    def met(self, row: dict, rows: Sequence[dict]) -> bool | None:
        """Whether the row keeps it; None if that was not measured. `rows` are those before it."""
        found = self.found(row, rows)
        if found is None:
            return None
        return found >= self.limit if self.words.startswith(">=") else found <= self.limit

    def found(self, row: dict, rows: Sequence[dict]) -> float | None:
        """What the row reaches."""
        other = next((other for other in rows if other["name"] == self.row), None) if self.row else None
        return QUANTITIES[self.of][1](row, other)


def value(row: dict | None, path: str) -> Any:
    """What a JSON row holds under a dotted path, or the quotient of two, `a/b`; None if it has no such thing."""
    if "/" in path:
        return quotient(*(value(row, x) for x in path.split("/")))
    found: Any = row
    for name in path.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return found


def quotient(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


SAME_CALL = ("fla", "flash_kda", "cula", "cudnn")
"""Other libraries that get the call that we get. Contenders with ready inputs do less than it asks for, and do not count."""


def over_fastest(row: dict, key: str) -> float | None:
    """Our time over the least of the other libraries' that get the same call."""
    others = filter(None, (value(row, f"{name}.{key}.median") for name in SAME_CALL))
    return quotient(value(row, f"ours.{key}.median"), min(others, default=None))


FLASH_KDA_OF_FLA = {
    "T8192 H64": 0.710,
    "T8192 H96": 0.552,
    "B2 T8192 H64": 0.489,
    "packed 6 uneven H64": 0.554,
    "packed 8 x 1024 H64": 0.443,
    "packed 6 uneven H96": 0.515,
}
"""FlashKDA's sustained time over FLA's by row, of one run on an H200 (FLA 0.6.0, FlashKDA 1ce47ea). pip has no FlashKDA."""

FLASH_KDA_LEAST, FLASH_KDA_MEAN = 1.7, 2.2
"""How many times as fast as FlashKDA each of these rows must be, and their geometric mean."""


def over_flash_kda(row: dict) -> float | None:
    """FlashKDA's sustained time over ours, derived from FLA's in this row."""
    share, ratio = FLASH_KDA_OF_FLA.get(row["name"]), value(row, "sustained_speedup")
    return None if share is None or ratio is None else share * ratio


ALLOWED_MS = 1.5e-3
"""More than a bare step takes, where that is little itself."""


def over_a_bare_step(row: dict, allowed: float = 0.0) -> float | None:
    """The fused step's time over a step of attention alone; 1 where the difference is allowed."""
    ours, bare = value(row, "ours.ms.median"), value(row, "bare.ms.median")
    if ours is None or bare is None:
        return None
    return 1.0 if ours - bare <= allowed else ours / bare


RELAY_OR_NOT = ("ours", "no_relay")
"""Contenders of `bench cp`: forwards over two ranks may choose either."""


def rate_of_one_call(row: dict) -> float | None:
    """One GPU's time over that of several, by what their user may choose."""
    rates = (value(row, f"one.ms.median/{way}.ms.median") for way in RELAY_OR_NOT)
    return max((rate for rate in rates if rate is not None), default=None)


QUANTITIES: dict[str, tuple[str, Callable[[dict, dict | None], float | None]]] = {
    "ms": ("<= {:g} ms", lambda row, other: value(row, "ours.ms.median")),
    "sustained": ("<= {:g} ms sustained", lambda row, other: value(row, "ours.sustained_ms")),
    "us": ("<= {:g} us", lambda row, other: None if not value(row, "ours.ms") else row["ours"]["ms"]["median"] * 1e3),
    "FLA": ("<= {:g} of FLA's", lambda row, other: quotient(1.0, value(row, "speedup"))),
    "fastest": ("<= {:g}x the fastest other", lambda row, other: over_fastest(row, "ms")),
    "graph": ("by graph <= {:g}x the fastest other", lambda row, other: over_fastest(row, "graph_ms")),
    "FlashKDA": (">= {:g}x FlashKDA, derived", lambda row, other: over_flash_kda(row)),
    "speedup": (">= {:g}x FLA", lambda row, other: value(row, "speedup")),
    "copy": (">= {:.0%}", lambda row, other: value(row, "share_of_floor")),
    "a copy": (
        ">= {:.0%} of a copy's rate",
        lambda row, other: value(row, "copy.sustained_ms/ours.sustained_ms"),
    ),
    "memory": ("<= {:g} of its memory", lambda row, other: value(row, "ours.peak_above_bytes/fla.peak_above_bytes")),
    "row": (
        "<= {:g}x {row} sustained",
        lambda row, other: quotient(value(row, "ours.sustained_ms"), value(other, "ours.sustained_ms")),
    ),
    "checkpoint": (
        "with a checkpoint a sequence <= {:g}x",
        lambda row, other: value(row, "checkpoint.sustained_ms/ours.sustained_ms"),
    ),
    "states": (
        "<= {:g} of a state a token and commit",
        lambda row, other: value(row, "ours.ms.median/states.ms.median"),
    ),
    "scratch": ("<= {:g} of its scratch", lambda row, other: value(row, "scratch_bytes.ours/scratch_bytes.states")),
    "bare": ("verify <= {:g}x a bare step", lambda row, other: value(row, "verify.ms.median/bare.ms.median")),
    "step": ("<= {:g}x a bare step", lambda row, other: over_a_bare_step(row)),
    "few": ("<= {:g}x a bare step or 1.5 us more", lambda row, other: over_a_bare_step(row, ALLOWED_MS)),
    "scratch memory": (
        "<= {:g} of its memory beyond results",
        lambda row, other: value(row, "beyond_bytes.ours/beyond_bytes.fla"),
    ),
    "float32": ("<= {:g} of FLA's on float32", lambda row, other: quotient(1.0, value(row, "speedup"))),
    "error": ("error <= {:g} of FLA's", lambda row, other: value(row, "ours.error.o/fla.error.o")),
    "C": ("C <= {:g} x Python", lambda row, other: value(row, "c.ms.median/ours.ms.median")),
    "C host": ("C call <= {:g} us", lambda row, other: value(row, "c.host_us")),
    "efficiency": (
        ">= {:g} of one GPU's rate sustained",
        lambda row, other: value(row, "sustained_efficiency"),
    ),
    "single": (">= {:g} by one cold call of either relay", lambda row, other: rate_of_one_call(row)),
    "seconds": ("<= {:g} s", lambda row, other: value(row, "seconds")),
    "engine": (">= {:g}x the engine's own", lambda row, other: value(row, "engine_ratio")),
}
"""How a bound reads, and what it is on: from the row, and from the other one that the bound names."""


@dataclass(frozen=True)
class Row:
    """One row. `peers`: the libraries beside us take part; `host`: the host's time of a call is taken too."""

    call: Case | Step
    table: str
    bounds: tuple[Bound, ...] = ()
    peers: bool = True
    host: bool = False

    @property
    def name(self) -> str:
        return self.call.name

    @property
    def why(self) -> str:
        return self.call.why


def select(rows: Sequence[Any], texts: Sequence[str], more: Sequence[Any] = ()) -> list[Any]:
    """The rows that any of `texts` picks; all of them if there are none. A text that is the name of a row picks that one, any
    other text the rows whose name contains it; of `more` only a text that picks none of `rows`.

    Raises:
        ValueError: a text that picks no row.
    """
    if not texts:
        return list(rows)
    picked: set[str] = set()
    for text in texts:
        found: set[str] = set()
        for names in ({row.name for row in rows}, {row.name for row in more}):
            found = found or {text} & names or {name for name in names if text in name}
        if not found:
            every = [row.name for row in (*rows, *more)]
            nearest = "; ".join(difflib.get_close_matches(text, every, n=5, cutoff=0))
            raise ValueError(f"rows: {text!r} matches none of the {len(every)} names; the nearest are: {nearest}")
        picked |= found
    return [row for row in (*rows, *more) if row.name in picked]


def model(name: str, why: str, H: int, **changes: Any) -> Case:
    """A call as a model makes it: L2 norm, bounded gate and beta's sigmoid in the kernel, the final state returned."""
    asked = {"T": 8192, "HV": H, "K": 128, "V": 128, "safe": True, "memory": "long", **BOUNDED, **changes}
    return Case(name=name, why=why, H=H, **asked)


UNBOUNDED = {"gate": "softplus", "lower_bound": None, "safe": False}

GATES = {
    "random": "as benchmarks draw them: all is forgotten within a token",
    "slow": "as models train to: channels remember 2 to 1,000 tokens",
}
"""Kinds of bounded gates, by the name of their memory."""

BY_GRAPH = {"random": 1.15, "slow": 1.0}
"""Our time over the fastest other library's, at most. Where all is forgotten at once, cuDNN leaves out what came before."""


def is_plain(call: Any) -> bool:
    """A bounded gate and heads of 128 channels, as tables and plots have where they say nothing else."""
    return call.gate == "lower_bound" and call.K == 128


def with_gates(rows: Sequence[Row], graphs: bool = True) -> tuple[Row, ...]:
    """The plain rows once more, with gates of each kind, held against all other libraries; with `graphs` by CUDA graph too."""
    bounded = [row for row in rows if is_plain(row.call)]
    eager = Bound("fastest", 1.0)
    bounds = {kind: (eager, Bound("graph", BY_GRAPH[kind])) if graphs else (eager,) for kind in GATES}
    return tuple(
        Row(replace(row.call, name=f"{row.name}, {kind} gates", why=why, memory=kind), row.table, bounds[kind])
        for kind, why in GATES.items()
        for row in bounded
    )


# ---- lengths ---------------------------------------------------------------------------------------------------------

UNEVEN = (1300, 547, 2048, 963, 271, 3063)
"""Six prompts of a serving batch, most no multiple of the chunk; 8192 tokens in all."""


def random_lengths(count: int, total: int, seed: int = 0) -> tuple[int, ...]:
    """`count` lengths >= 1 that add up to `total`, cut at points drawn uniformly."""
    cuts = sorted(random.Random(seed).sample(range(1, total), count - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, total]))


def uniform_lengths(count: int, total: int) -> tuple[int, ...]:
    """`count` lengths that add up to `total` and differ by at most one."""
    length, longer = divmod(total, count)
    return (length + 1,) * longer + (length,) * (count - longer)


def skewed_lengths(count: int, total: int) -> tuple[int, ...]:
    """One sequence holds half of `total`, the others share the rest evenly."""
    return (total // 2, *uniform_lengths(count - 1, total - total // 2))


def lengths_named(name: str) -> tuple[int, ...]:
    """`2x16K+512` is two sequences of 16384 tokens and one of 512."""
    lengths: list[int] = []
    for term in name.split("+"):
        count, _, size = term.rpartition("x")
        tokens = int(size.removesuffix("K")) * (1024 if size.endswith("K") else 1)
        lengths += [tokens] * int(count or 1)
    return tuple(lengths)


RANDOM = random_lengths(20, 8192)
LONG_AND_SHORT = lengths_named("64K+512+256+128")
LONGEST_AND_SHORT = lengths_named("128K+5x1K")
PACKINGS: dict[str, tuple[Callable[[int, int], tuple[int, ...]], str]] = {
    "uniform": (uniform_lengths, "sequences of one length"),
    "random": (random_lengths, "many tails"),
    "skewed": (skewed_lengths, "one sequence holds half of the tokens"),
}

# ---- prefill, classic, split -----------------------------------------------------------------------------------------


def _prefill(
    table: str, name: str, why: str, H: int, must: float, portable: float = 1.0, share: float | None = None, **call: Any
) -> Row:
    """Kernels for Hopper must keep `must` milliseconds and `share` of FLA's time, portable ones be so many times as fast."""
    bounds = [Bound("sustained", must, "hopper"), Bound("speedup", portable, "triton")]
    bounds += [Bound("FLA", share, "hopper")] if share else []
    bounds += [Bound("FlashKDA", FLASH_KDA_LEAST, "hopper")] if name in FLASH_KDA_OF_FLA else []
    bounds += [Bound("checkpoint", 1.02, "hopper")] if table == "prefill" else []
    return Row(model(name, why, H, **call), table, tuple(bounds))


def _beside(name: str, why: str, H: int, most: float, table: str, **call: Any) -> Row:
    """Kernels for Hopper may take so many times as long as with `H` heads, 128 channels and bounded gates."""
    return Row(model(name, why, H, **call), table, (Bound("row", most, "hopper", row=f"T8192 H{H}"),))


def _unbounded(name: str, why: str, H: int, **call: Any) -> Row:
    return _beside(name, why, H, 1.15, "unbounded gates", **UNBOUNDED, **call)


def _narrow(H: int) -> Row:
    return _beside(f"T8192 H{H} K64", "heads of half the width", H, 0.65, "narrow heads", K=64, V=64)


def _narrow_unbounded(H: int, most: float) -> Row:
    """Its bound is that of narrow heads times that of gates without a bound."""
    name, why = f"T8192 H{H} K64 softplus", "heads of half the width, and a gate without a bound"
    return _beside(name, why, H, most, "narrow heads", K=64, V=64, **UNBOUNDED)


PREFILL = (
    _prefill("prefill", "T8192 H32", "a 32-head model on one card: a quarter of the SMs' worth", 32, 0.30),
    _prefill("prefill", "T8192 H64", "the headline: a 64-head model, one prompt", 64, 0.48, 1.5, 0.31),
    _prefill("prefill", "T8192 H96", "a 96-head model: heads do not divide the SMs", 96, 0.70),
    _prefill("prefill", "T1024 H64", "a short prompt: launches dominate", 64, 0.085, T=1024),
    _prefill("prefill", "T16384 H64", "time is linear in the length", 64, 0.95, T=16384),
    _prefill("prefill", "B2 T8192 H64", "a batch doubles the parallel chains", 64, 0.93, B=2),
    _prefill("prefill", "packed 6 uneven H64", "a serving batch", 64, 0.50, lengths=UNEVEN),
    _prefill("prefill", "packed 8 x 1024 H64", "no tails: packing alone", 64, 0.46, lengths=(1024,) * 8),
    _prefill("prefill", "packed 20 random H64", "many tails; 8192 tokens in all", 64, 0.55, lengths=RANDOM),
    _prefill("prefill", "packed 6 uneven H96", "a serving batch, 96 heads", 96, 0.74, 1.0, 0.30, lengths=UNEVEN),
    _prefill("prefill", "GVA T8192 H16 HV64", "four value heads share a query/key head", 16, 0.47, 1.0, 0.33, HV=64),
    _unbounded("T8192 H32 softplus", "Kimi-Linear-48B's heads and gate", 32),
    _unbounded("T8192 H64 softplus", "the headline without a bound", 64),
    _unbounded("T8192 H64 softplus, forgetful", "decays that float32 holds over few tokens", 64, memory="new"),
    _narrow(32),
    _narrow(64),
    _narrow_unbounded(64, 0.75),
    # few heads, long sequences: what tensor parallelism leaves on a card
    _prefill("few heads", "T8192 H4", "32 heads over 8 cards: 4 chains for 132 SMs", 4, 0.16),
    _prefill("few heads", "T8192 H8", "64 heads over 8 cards", 8, 0.18),
    _prefill("few heads", "T8192 H12", "96 heads over 8 cards", 12, 0.20),
    _prefill("few heads", "T32768 H8", "a long prompt", 8, 0.45, T=32768),
    _prefill("few heads", "T131072 H8", "128K: the serial chain rules", 8, 1.50, T=131072),
    _prefill("few heads", "64K+512+256+128 H8", "only the long one gains by a split", 8, 0.85, lengths=LONG_AND_SHORT),
    _prefill("few heads", "T32768 H4", "a long prompt, half the heads", 4, 0.32, T=32768),
    _prefill("few heads", "T131072 H4", "128K with the fewest heads", 4, 0.85, T=131072),
    _prefill("few heads", "128K + 5 x 1K H4", "one long prompt among short ones", 4, 0.90, lengths=LONGEST_AND_SHORT),
)
"""As many heads as one card sees without, or with little, tensor parallelism; gates without a bound; narrow heads; few
heads."""


def _grouped(HV: int, group: int) -> tuple[str, str]:
    if group == 1:
        return f"H{HV}", "one value head a query/key head"
    return f"H{HV // group} HV{HV}", f"{group} value heads share a query/key head"


def _grid(HV: int, B: int, T: int, group: int, table: str) -> Row:
    heads, why = _grouped(HV, group)
    return Row(model(f"B{B} T{T} {heads}", why, HV // group, HV=HV, B=B, T=T), table)


def _packed(HV: int, kind: str, count: int, total: int, group: int, table: str) -> Row:
    lengths, why = PACKINGS[kind]
    name = f"packed {kind} {count} of {total} {_grouped(HV, group)[0]}"
    return Row(model(name, why, HV // group, HV=HV, lengths=lengths(count, total)), table)


CLASSIC_PACKED = (
    *itertools.product(PACKINGS, (10, 20), (4096, 8192), (1,)),
    *((kind, count, 8192, group) for group in (2, 4) for kind in ("random", "skewed") for count in (10, 20)),
)
CLASSIC = tuple(
    _grid(64, B, T, group, "classic, fixed length")
    for group, B, T in itertools.product((1, 2, 4, 8), (1, 2), (1024, 4096, 8192, 16384))
) + tuple(_packed(64, *packed, "classic, packed") for packed in CLASSIC_PACKED)
"""52 rows: 4 groupings x 2 batches x 4 lengths; 3 packings x 2 counts x 2 totals; grouped 2 x 2 packings x 2 counts."""

SPLIT_BATCHES = (
    *("4x256", "8x256", "16x256", "4x1K", "8x1K", "4x2K", "1K+512+256+128", "2K+1K+512+256", "1K+1+63+65+129"),
    *("4K", "8K", "32K", "64K", "128K", "8x4K", "4x8K", "2x16K", "24K+8K", "28K+4K", "32K+2x256", "40K+1K+8K"),
    *("64K+512+256+128", "128K+1K", "128K+2x1K", "128K+5x1K", "128K+10x1K"),
)
"""By the lengths of their sequences."""


def _split(name: str, H: int) -> Row:
    lengths = lengths_named(name)
    sizes: dict[str, Any] = {"lengths": lengths} if len(lengths) > 1 else {"T": lengths[0]}
    return Row(model(f"{name} H{H}", "long and short sequences over few heads", H, **sizes), "split")


SPLIT = tuple(_split(name, H) for H in (4, 8) for name in SPLIT_BATCHES)
"""52 rows: 26 batches x 2 numbers of heads."""

# ---- shards ----------------------------------------------------------------------------------------------------------


def _shard(T: int, H: int, N: int) -> Row:
    sizes: dict[str, Any] = {"lengths": uniform_lengths(N, T)} if N > 1 else {"T": T}
    name = f"T{T} H{H}" + (f" N{N}" if N > 1 else "")
    return Row(model(name, "", H, state=FP32, v_first=True, **sizes), "shards")


SHARDS = with_gates(
    [
        *(_shard(2048, 12, 1), _shard(2048, 16, 1), _shard(4096, 8, 1), _shard(4096, 12, 1), _shard(8192, 12, 4)),
        *(_shard(8192, 16, 1), _shard(1024, 4, 1), _shard(3072, 10, 1), _shard(8192, 24, 1), _shard(16384, 16, 8)),
    ]
)
"""The shapes that cuDNN's kernels were tuned on, parts of shipped models: T tokens in N sequences of one length, each of which
goes on from a state. 10 shapes x 2 kinds of gates."""

# ---- training --------------------------------------------------------------------------------------------------------


def _train(name: str, why: str, H: int, must: float | None = None, **call: Any) -> Row:
    bounds = [Bound("FLA", 0.5), Bound("memory", 0.7)]
    bounds = [Bound("ms", must), *bounds] if must else bounds
    return Row(model(name, why, H, final=False, **call), "train", tuple(bounds))


TRAIN = (
    _train("B1 T8192 H32", "the headline: one long sequence", 32, 2.1),
    _train("B4 T2048 H32", "as many tokens in shorter chains", 32, 2.1, B=4, T=2048),
    _train("B1 T8192 H64", "twice the heads", 64, 4.0),
    _train("packed 6 uneven H32", "documents packed into one row", 32, lengths=UNEVEN),
    _train("packed 20 random H32", "many tails", 32, lengths=RANDOM),
    _train("GVA B1 T8192 H8 HV32", "four value heads share a query/key head", 8, HV=32),
    _train("B1 T8192 H32 softplus", "Kimi-Linear's gate, without a bound", 32, **UNBOUNDED),
)


def _wy(row: Row) -> Row:
    return Row(row.call, row.table, (Bound("FLA", 0.38, "hopper"),))


WY = tuple(
    _wy(_grid(32, B, T, group, "fixed length"))
    for group, B, T in itertools.product((1, 4), (1, 2), (256, 512, 1024, 2048, 4096, 8192))
    if B == 1 or T > 256
) + tuple(
    _wy(_packed(32, kind, count, total, group, "packed"))
    for group, kind, count, total in itertools.product((1, 4), PACKINGS, (10, 20), (4096, 8192, 16384))
)
"""58 rows: per grouping 6 and 5 of fixed length, and 3 packings x 2 counts x 3 totals."""

# ---- decoding --------------------------------------------------------------------------------------------------------

STATES = {"fp32": FP32, "bf16": BF16}
BATCHES = (1, 4, 8, 16, 32, 64, 128, 256)


def _decode_bounds(N: int, state: str) -> tuple[Bound, ...]:
    us = {1: 5, 8: 12 if state == "fp32" else 8}
    copy = {32: 0.85, 128: 0.88, 256: 0.88}
    return (Bound("us", us[N]),) if N in us else (Bound("copy", copy[N]),) if N in copy else ()


def decode_row(
    N: int,
    state: str = "fp32",
    *,
    why: str = "a 32-head model",
    H: int = 32,
    HV: int = 32,
    K: int = 128,
    gate: str = "lower_bound",
    v_first: bool = True,
    S: int = 0,
    bounds: tuple[Bound, ...] = (),
    peers: bool = False,
    host: bool = False,
) -> Row:
    """`N` sequences of one token and `S` speculative ones."""
    parts = [f"N{N}", f"H{H}" if H == HV else f"H{H} HV{HV}", *([f"K{K}"] if K != 128 else []), state]
    parts += [*([gate] if gate != "lower_bound" else []), *([] if v_first else ["K first"]), *([f"S{S}"] if S else [])]
    sizes = {"B": N, "T": 1 + S, "H": H, "HV": HV, "K": K, "V": K, "spec": S or None}
    step = Step(
        **{"name": " ".join(parts), "why": why, "state": STATES[state], "gate": gate, "v_first": v_first, **sizes},
        memory="long",
        indices=None,
    )
    return Row(step, "decode", bounds, peers, host)


def verify_row(
    N: int, H: int, S: int, state: str = "fp32", *, K: int = 128, gate: str = "lower_bound", v_first: bool = True
) -> Row:
    """`S` drafts verified read-only, and the accepted ones committed. The bounds are for what Hopper's own kernels take."""
    step = decode_row(N, state, H=H, HV=H, K=K, S=S, gate=gate, v_first=v_first).call
    bounds: dict[int, tuple[Bound, ...]] = {}
    if gate == "lower_bound" and v_first:
        bounds = {7: (Bound("states", 0.5), Bound("scratch", 0.05)) if N == 32 else (), 3: (Bound("bare", 1.25),)}
    named = replace(
        step, name=f"verify {step.name}", why="verification and commit, by replay", update=False, rows="slots"
    )
    return Row(named, "decode", bounds.get(S, ()))


def _models(batches: Sequence[int]) -> list[Row]:
    return [
        decode_row(N, state, bounds=_decode_bounds(N, state), peers=True, host=N in (1, 32))
        for state in STATES
        for N in batches
    ]


OTHER_HEADS: dict[str, dict[str, int]] = {
    "96 heads over 8 cards": {"H": 12, "HV": 12},
    "four value heads share a key head": {"H": 16, "HV": 64},
    "many value heads": {"H": 64, "HV": 128},
    "four times as many value heads": {"H": 32, "HV": 128},
    "heads half as wide": {"K": 64},
}
DRAFTS = "speculative tokens, a state stored after each"
DECODE = (
    *_models(BATCHES),
    *(
        decode_row(N, state, why=why, peers=N == 128, **OTHER_HEADS[why])
        for why, state, N in itertools.product(OTHER_HEADS, STATES, BATCHES)
    ),
    *(
        decode_row(128, state, why="the other gates", gate=gate, peers=True)
        for gate, state in itertools.product(("softplus", "none"), STATES)
    ),
    *(
        decode_row(N, state, why="the layout of Hugging Face", v_first=False, peers=True)
        for state, N in itertools.product(STATES, (1, 32, 128, 256))
    ),
    *(decode_row(N, state, why=DRAFTS, S=S) for state, N, S in itertools.product(STATES, (32, 128), (1, 3, 7))),
    *(verify_row(N, H, S, state) for state, H, N, S in itertools.product(STATES, (12, 32), (8, 32, 128), (3, 7, 15))),
    *(verify_row(32, 32, S, state) for state, S in itertools.product(STATES, (8, 16))),
    *(
        verify_row(32, 32, S, state, **other)
        for state, S, other in itertools.product(STATES, (3, 7), ({"gate": "softplus"}, {"v_first": False}))
    ),
)
"""FLA takes part in verification, else where its compile times stay small: it compiles anew for other heads and kinds of N."""

# ---- float32 ---------------------------------------------------------------------------------------------------------

FP32_BOUNDS = (
    Bound("float32", 1, any_gpu=True),
    Bound("error", 0.01, any_gpu=True),
    Bound("C", 1.03, any_gpu=True),
    Bound("C host", 5, any_gpu=True),
)


def fp32_row(why: str, B: int, H: int, T: int, K: int, C: int) -> Row:
    sizes = {"B": B, "H": H, "HV": H, "T": T, "K": K, "V": K, "chunk_size": C}
    case = Case(name=f"B{B} H{H} T{T} K{K} C{C}", why=why, l2norm=False, memory="long", **sizes)
    return Row(case, "fp32", FP32_BOUNDS, host=True)


FP32_SIZES = {
    (1, 8, 1024): "little to do",
    (1, 8, 16384): "few heads, a long sequence",
    (1, 16, 4096): "a small model",
    (1, 32, 1024): "a short prompt",
    (1, 32, 4096): "a prompt",
    (1, 32, 16384): "a long prompt",
    (2, 16, 8192): "two rows",
    (4, 8, 4096): "a batch of few heads",
    (4, 32, 1024): "a batch of short prompts",
    (4, 32, 16384): "as much as there is",
}
"""`(B, H, T)`."""

PREFILL_FP32 = tuple(fp32_row(why, *size, K, C) for K, C in ((64, 32), (128, 64)) for size, why in FP32_SIZES.items())

# ---- layers of models ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Block(Case):
    """A call of a layer with KDA in it, of `framework`. `step`: "prefill", "train", or "decode" of one token behind a prompt.
    `part`: the whole "block", or the "KDA" of it. Sizes are those of Kimi-Linear-48B."""

    framework: str
    step: str
    part: str
    hidden: int = 2304
    prompt: int = 16
    H: int = 32
    HV: int = 32
    K: int = 128
    V: int = 128


STEPS: tuple[tuple[str, str, dict[str, int], float | None], ...] = (
    ("prefill 8K", "a prompt", {"T": 8192}, 2.5),
    ("prefill 64K", "a long prompt", {"T": 65536}, 2.5),
    ("train 4x2048", "a training step over short sequences", {"B": 4, "T": 2048}, 2.2),
    ("train 1x8192", "as many tokens in one sequence", {"T": 8192}, 2.2),
    *((f"decode {B}", "a token for each sequence", {"B": B, "T": 1}, None) for B in (1, 32, 256)),
)
"""Name, reason, sizes, and how many times as fast the KDA part must be."""


def block_row(name: str, why: str, part: str, bound: float | None, **sizes: Any) -> Row:
    """`name`: framework, step and size."""
    framework, step, *_ = name.split()
    call = Block(f"{name} {part}", why, framework=framework, step=step, part=part, **sizes)
    return Row(call, step, () if bound is None else (Bound("speedup", bound),))


MODELS = tuple(
    block_row(f"{framework} {step}", why, part, bound, **sizes)
    for framework, (step, why, sizes, must) in itertools.product(("FLA", "HF"), STEPS)
    for part, bound in (("block", 1.0), ("KDA", must))
)
"""28 rows: 2 frameworks x 7 steps x 2 parts, a KDA part after its block."""

# ---- layers of engines -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Served(Case):
    """Calls of an engine's layer, one of `testing/engines.py`: a prefill of packed prompts; a step of decoding for as many
    sequences as it has `lengths` of one token, alone or the "whole step" between the layer's projections; or the verification
    of drafts, with as many tokens a sequence."""

    layer: str
    step: str
    K: int = 128
    V: int = 128


ENGINES = {"Kimi-Linear": UNBOUNDED, "SGLang": BOUNDED}
WHOLE = {"Kimi-K3": BOUNDED}
"""Layers, each with a gate of the models that it serves, and one whose steps are timed with convolution and norm."""

VERIFIED, DRAFTED = "Kimi-Linear", 4
"""The layer that verifies, and tokens of a sequence: the accepted one and three drafts."""

PROMPTS = {"8 x 1024": (1024,) * 8, "1 x 8192": (8192,), "6 uneven": UNEVEN}
ENGINE_BATCHES = (32, 128)
MUST_DECODE = {FP32: 1.3, BF16: 1.6}


def served_row(layer: str, H: int, step: str, what: str, lengths: tuple[int, ...], **changes: Any) -> Row:
    gate = {name: x for name, x in (ENGINES | WHOLE)[layer].items() if name != "safe"}
    sizes = {"H": H, "HV": H, "lengths": lengths, "l2norm": True, **gate, "state": FP32, **changes}
    must = None if step == "verify" else 2.5 if step == "prefill" else MUST_DECODE[sizes["state"]]
    call = Served(f"{layer} {step} {what} H{H}", WHY_SERVED[step], layer=layer, step=step, **sizes)
    return Row(call, step, () if must is None else (Bound("engine", must),))


WHY_SERVED = {
    "prefill": "a batch of prompts, into the pool",
    "decode": "a token for each sequence, in the pool",
    "verify": "drafts, whose states go to slots of their own",
    "whole step": "a token for each sequence, in the pool",
}


SERVED = (
    *(
        served_row(layer, H, "prefill", what, lengths)
        for layer, H, (what, lengths) in itertools.product(ENGINES, (12, 32), PROMPTS.items())
    ),
    *(
        served_row(layer, H, "decode", f"N{N} {'fp32' if state == FP32 else 'bf16'}", (1,) * N, state=state)
        for layer, H, state, N in itertools.product(ENGINES, (12, 32), MUST_DECODE, ENGINE_BATCHES)
    ),
    *(
        served_row(VERIFIED, H, "verify", f"N32 {'fp32' if state == FP32 else 'bf16'}", (DRAFTED,) * 32, state=state)
        for H, state in itertools.product((12, 32), MUST_DECODE)
    ),
    *(
        served_row(layer, H, "whole step", f"N{N} {'fp32' if state == FP32 else 'bf16'}", (1,) * N, state=state)
        for layer, H, state, N in itertools.product(WHOLE, (12, 32), MUST_DECODE, ENGINE_BATCHES)
    ),
)
"""40 rows: 2 numbers of heads x (2 engines x (3 prompts + 2 dtypes of states x 2 batches) + 2 dtypes of verification
+ 2 dtypes x 2 batches of whole steps)."""

# ---- the whole layer -------------------------------------------------------------------------------------------------

LAYER_BATCHES = (1, 8, 32, 128, 256)
LAYER_HEADS = {12: "96 heads over 8 cards", 32: "a 32-head model", 96: "a 96-head model"}
OVER_STEP, OVER_CHAIN = {"fp32": 1.12, "bf16": 1.18}, {"fp32": 0.8, "bf16": 0.65}
"""Of a bare step's time, and of that of FLA's kernels, by state; from 32 sequences on."""


def layer_step_row(N: int, H: int, state: str, why: str, **changes: Any) -> Row:
    """A step of a token for each of `N` sequences."""
    sizes = {"B": N, "H": H, "HV": H, "K": 128, "V": 128, "layout": "dense", "state": STATES[state], "indices": None}
    step = FusedStep(**{"name": f"decode N{N} H{H} {state}", "why": why, "memory": "long", **sizes, **changes})
    over = Bound("step", OVER_STEP[state]) if N >= 32 else Bound("few", 1.25)
    chain = [Bound("FLA", OVER_CHAIN[state] if N >= 32 else 0.5)] if N <= 8 or N >= 32 else []
    return Row(step, "decode", (over, *chain), host=N in (1, 32))


@dataclass(frozen=True, kw_only=True)
class LayerCall(Case):
    """A call of whole sequences. `part`: "convolution" or "norm", forward or `backward`; "all", which is convolution, attention
    and norm; or "attention" with the norm behind it."""

    part: str
    backward: bool = False
    W: int = 4
    K: int = 128
    V: int = 128

    @property
    def channels(self) -> int:
        return 2 * self.H * self.K + self.HV * self.V


def layer_call_row(name: str, why: str, part: str, bounds: tuple[Bound, ...] = (), **changes: Any) -> Row:
    asked = {"T": 8192, "H": 32, "HV": 32, "safe": True, "memory": "long", "final": False, **BOUNDED, **changes}
    peers = part == "all"
    return Row(LayerCall(name, why, part=part, **asked), "train" if peers else part, bounds, peers)


TRAINED = (Bound("FLA", 0.45), Bound("scratch memory", 0.6))
AROUND = {"convolution": (768, 2048, 8192), "norm": (1536, 4096, 16384)}
"""Tokens by kernel: forwards move 38, 100 and 403 MB."""

LAYER = (
    *(
        layer_step_row(N, H, state, why)
        for (H, why), state, N in itertools.product(LAYER_HEADS.items(), STATES, LAYER_BATCHES)
    ),
    layer_call_row("train T8192 H32", "one long sequence", "all", TRAINED),
    layer_call_row("train B4 T2048 H32", "as many tokens in shorter chains", "all", TRAINED, B=4, T=2048),
    layer_call_row("train packed 6 uneven H32", "documents packed into one row", "all", TRAINED, lengths=UNEVEN),
    *(
        layer_call_row(
            f"{part}{' backward' * backward} T{T}",
            "what lies around attention, bound by memory",
            part,
            (Bound("a copy", 0.85),),
            T=T,
            backward=backward,
        )
        for part, backward in itertools.product(AROUND, (False, True))
        for T in AROUND[part]
    ),
    layer_call_row("prefill T8192 H32, norm", "what a norm in the last kernel could gain", "attention"),
    layer_call_row("prefill T8192 H64, norm", "the same at the headline's heads", "attention", H=64, HV=64),
)
"""47 rows: 3 numbers of heads x 2 dtypes of states x 5 batches; 3 training steps; 12 of single kernels; 2 of prefill."""
