"""What is measured: shapes, and the tables of benchmark rows with the reason for each."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of one KDA call, in the symbols of docs/algorithm.md.

    `HV` is `H` if not given. `lengths` makes it a packed call: `B` is 1 and `T` the sum of the lengths.
    """

    H: int
    T: int = 0
    B: int = 1
    HV: int | None = None
    K: int = 128
    V: int = 128
    lengths: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens along T."""
        return sum(self.lengths) if self.lengths else self.T

    @property
    def value_heads(self) -> int:
        return self.H if self.HV is None else self.HV

    @property
    def sequences(self) -> int:
        return len(self.lengths) or self.B

    def forward_bytes(self, element_size: int = 2) -> int:
        """Bytes a forward can't avoid moving: q, k, v, g read once and o written once, all at `element_size` bytes."""
        elements = self.H * 2 * self.K + self.value_heads * (2 * self.V + self.K)
        return self.B * self.tokens * elements * element_size


@dataclass(frozen=True)
class Target:
    """What a row must reach on one NVIDIA H200 (132 SMs), by the kind of kernels.

    Those made for that GPU (Hopper): at most `must` milliseconds, `aim` being the hope, and at most `share` of the time that
    FLA takes in the same run (None: no such bound). The portable ones (Triton): `portable` times as fast as FLA in the same
    run.
    """

    must: float
    aim: float
    portable: float = 1.0
    share: float | None = None


@dataclass(frozen=True)
class PrefillCase:
    """One row. Without a target its time is printed and not judged.

    `bounded` gates are `lower_bound`, others `softplus`. With `forgetful` heads decays are as a new model has them, gone after
    a few tokens; else channels remember hundreds of tokens, too. `against` is the name of another row and the most times its
    time that kernels made for the GPU may take in the same run.
    """

    name: str
    shape: Shape
    reason: str
    target: Target | None = None
    bounded: bool = True
    forgetful: bool = False
    against: tuple[str, float] | None = None


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


RANDOM = random_lengths(20, 8192)
LONG_AND_SHORT = (65536, 512, 256, 128)
LONGEST_AND_SHORT = (131072, 1024, 1024, 1024, 1024, 1024)

PREFILL: tuple[PrefillCase, ...] = (
    PrefillCase(
        "T8192 H32", Shape(T=8192, H=32), "a 32-head model on one card: a quarter of the SMs' worth", Target(0.33, 0.25)
    ),
    PrefillCase(
        "T8192 H64",
        Shape(T=8192, H=64),
        "the headline: a 64-head model, one prompt",
        Target(0.55, 0.40, portable=1.5, share=0.31),
    ),
    PrefillCase("T8192 H96", Shape(T=8192, H=96), "a 96-head model: heads do not divide the SMs", Target(0.80, 0.60)),
    PrefillCase("T1024 H64", Shape(T=1024, H=64), "a short prompt: launches dominate", Target(0.12, 0.08)),
    PrefillCase("T16384 H64", Shape(T=16384, H=64), "time is linear in the length", Target(1.10, 0.80)),
    PrefillCase("B2 T8192 H64", Shape(B=2, T=8192, H=64), "a batch doubles the parallel chains", Target(1.05, 0.75)),
    PrefillCase("packed 6 uneven H64", Shape(lengths=UNEVEN, H=64), "a serving batch", Target(0.55, 0.40)),
    PrefillCase("packed 8 x 1024 H64", Shape(lengths=(1024,) * 8, H=64), "no tails: packing alone", Target(0.52, 0.38)),
    PrefillCase(
        "packed 20 random H64", Shape(lengths=RANDOM, H=64), "many tails; 8192 tokens in all", Target(0.55, 0.40)
    ),
    PrefillCase(
        "packed 6 uneven H96", Shape(lengths=UNEVEN, H=96), "a serving batch, 96 heads", Target(0.80, 0.60, share=0.30)
    ),
    PrefillCase(
        "GVA T8192 H16 HV64",
        Shape(T=8192, H=16, HV=64),
        "four value heads share a query/key head",
        Target(0.52, 0.38, share=0.33),
    ),
)
"""Prefill, forward: as many heads as one card sees without, or with little, tensor parallelism."""

UNBOUNDED: tuple[PrefillCase, ...] = (
    PrefillCase(
        "T8192 H32 softplus",
        Shape(T=8192, H=32),
        "Kimi-Linear-48B's heads and gate",
        bounded=False,
        against=("T8192 H32", 1.3),
    ),
    PrefillCase(
        "T8192 H64 softplus",
        Shape(T=8192, H=64),
        "the headline without a bound",
        bounded=False,
        against=("T8192 H64", 1.3),
    ),
    PrefillCase(
        "T8192 H64 softplus, forgetful",
        Shape(T=8192, H=64),
        "decays that float32 holds over few tokens only",
        bounded=False,
        forgetful=True,
        against=("T8192 H64", 1.3),
    ),
)
"""Gates without a bound, each beside the same heads with one."""

FEW_HEADS: tuple[PrefillCase, ...] = (
    PrefillCase("T8192 H4", Shape(T=8192, H=4), "32 heads over 8 cards: 4 chains for 132 SMs", Target(0.16, 0.10)),
    PrefillCase("T8192 H8", Shape(T=8192, H=8), "64 heads over 8 cards", Target(0.18, 0.12)),
    PrefillCase("T8192 H12", Shape(T=8192, H=12), "96 heads over 8 cards", Target(0.20, 0.14)),
    PrefillCase("T32768 H8", Shape(T=32768, H=8), "a long prompt", Target(0.45, 0.32)),
    PrefillCase("T131072 H8", Shape(T=131072, H=8), "128K: the serial chain rules", Target(1.50, 1.10)),
    PrefillCase(
        "64K+512+256+128 H8",
        Shape(lengths=LONG_AND_SHORT, H=8),
        "only the long one gains by a split",
        Target(0.85, 0.60),
    ),
    PrefillCase("T32768 H4", Shape(T=32768, H=4), "a long prompt, half the heads", Target(0.32, 0.22)),
    PrefillCase("T131072 H4", Shape(T=131072, H=4), "128K with the fewest heads", Target(0.85, 0.60)),
    PrefillCase(
        "128K + 5 x 1K H4",
        Shape(lengths=LONGEST_AND_SHORT, H=4),
        "one long prompt among short ones",
        Target(0.90, 0.65),
    ),
)
"""Few heads, long sequences: what tensor parallelism leaves on a card."""


def _heads(group: int) -> str:
    return "H64" if group == 1 else f"H{64 // group} HV64"


def _fixed(B: int, T: int, group: int) -> PrefillCase:
    reason = "one value head a query/key head" if group == 1 else f"{group} value heads share a query/key head"
    return PrefillCase(f"B{B} T{T} {_heads(group)}", Shape(B=B, T=T, H=64 // group, HV=64), reason)


PACKINGS = {
    "uniform": (uniform_lengths, "sequences of one length"),
    "random": (random_lengths, "many tails"),
    "skewed": (skewed_lengths, "one sequence holds half of the tokens"),
}
"""By name: how the lengths are drawn, and what that shows."""


def _packed(kind: str, count: int, total: int, group: int) -> PrefillCase:
    lengths, reason = PACKINGS[kind]
    name = f"packed {kind} {count} of {total} {_heads(group)}"
    return PrefillCase(name, Shape(lengths=lengths(count, total), H=64 // group, HV=64), reason)


CLASSIC_FIXED = tuple(_fixed(B, T, group) for group in (1, 2, 4, 8) for B in (1, 2) for T in (1024, 4096, 8192, 16384))
"""32 rows: 4 groupings x 2 batches x 4 lengths."""

CLASSIC_PACKED = (
    *(_packed(kind, count, total, 1) for kind in PACKINGS for count in (10, 20) for total in (4096, 8192)),
    *(_packed(kind, count, 8192, group) for group in (2, 4) for kind in ("random", "skewed") for count in (10, 20)),
)
"""20 rows: 3 packings x 2 counts x 2 totals, and with grouped value heads 2 groupings x 2 packings x 2 counts."""

SPLIT_BATCHES = (
    *("4x256", "8x256", "16x256", "4x1K", "8x1K", "4x2K", "1K+512+256+128", "2K+1K+512+256", "1K+1+63+65+129"),
    *("4K", "8K", "32K", "64K", "128K", "8x4K", "4x8K", "2x16K", "24K+8K", "28K+4K", "32K+2x256", "40K+1K+8K"),
    *("64K+512+256+128", "128K+1K", "128K+2x1K", "128K+5x1K", "128K+10x1K"),
)
"""Batches of `bench split`, by the lengths of their sequences."""


def lengths_named(name: str) -> tuple[int, ...]:
    """`2x16K+512` is two sequences of 16384 tokens and one of 512."""
    lengths: list[int] = []
    for term in name.split("+"):
        count, _, size = term.rpartition("x")
        tokens = int(size.removesuffix("K")) * (1024 if size.endswith("K") else 1)
        lengths += [tokens] * int(count or 1)
    return tuple(lengths)


def _split_case(name: str, H: int) -> PrefillCase:
    lengths = lengths_named(name)
    shape = Shape(H=H, lengths=lengths) if len(lengths) > 1 else Shape(H=H, T=lengths[0])
    return PrefillCase(f"{name} H{H}", shape, "long and short sequences over few heads")


SPLIT = tuple(_split_case(name, H) for H in (4, 8) for name in SPLIT_BATCHES)
"""52 rows: 26 batches x 2 numbers of heads."""

TABLES: dict[str, tuple[PrefillCase, ...]] = {
    "prefill": PREFILL,
    "unbounded gates": UNBOUNDED,
    "few heads": FEW_HEADS,
    "classic, fixed length": CLASSIC_FIXED,
    "classic, packed": CLASSIC_PACKED,
    "split": SPLIT,
}
"""By the name under which a row's table is recorded."""

CASES: dict[str, tuple[PrefillCase, ...]] = {
    "prefill": (*PREFILL, *UNBOUNDED, *FEW_HEADS),
    "classic": (*CLASSIC_FIXED, *CLASSIC_PACKED),
    "kernels": (*PREFILL, *UNBOUNDED, *FEW_HEADS),
    "split": SPLIT,
}
"""By benchmark: the rows it can measure."""


def select(cases: Sequence[PrefillCase], texts: Sequence[str]) -> list[PrefillCase]:
    """The cases that any of `texts` picks; all of them if there are none. A text that is the name of a case picks that one,
    any other text the cases whose name contains it.

    Raises:
        ValueError: a text that picks no case.
    """
    names = [case.name for case in cases]
    picked: set[str] = set()
    for text in texts:
        found = {text} & set(names) or {name for name in names if text in name}
        if not found:
            raise ValueError(f"rows: {text!r} matches none of: " + "; ".join(names))
        picked |= found
    return [case for case in cases if not texts or case.name in picked]
