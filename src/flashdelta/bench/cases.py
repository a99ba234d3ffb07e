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
class PrefillCase:
    """One row. `must` and `aim` are milliseconds on one NVIDIA H200 (132 SMs) for the kernels made for that GPU; the portable
    kernels must be `portable` times as fast as FLA in the same run (None: printed, not gated)."""

    name: str
    shape: Shape
    must: float
    aim: float
    reason: str
    portable: float | None = 1.0


UNEVEN = (1300, 547, 2048, 963, 271, 3063)
"""Six prompts of a serving batch, most no multiple of the chunk; 8192 tokens in all."""


def random_lengths(count: int, total: int, seed: int = 0) -> tuple[int, ...]:
    """`count` lengths >= 1 that add up to `total`, cut at points drawn uniformly."""
    cuts = sorted(random.Random(seed).sample(range(1, total), count - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, total]))


RANDOM = random_lengths(20, 8192)
LONG_AND_SHORT = (65536, 512, 256, 128)
LONGEST_AND_SHORT = (131072, 1024, 1024, 1024, 1024, 1024)

PREFILL: tuple[PrefillCase, ...] = (
    PrefillCase(
        "T8192 H32", Shape(T=8192, H=32), 0.33, 0.25, "a 32-head model on one card: a quarter of the SMs' worth"
    ),
    PrefillCase(
        "T8192 H64", Shape(T=8192, H=64), 0.55, 0.40, "the headline: a 64-head model, one prompt", portable=1.5
    ),
    PrefillCase("T8192 H96", Shape(T=8192, H=96), 0.80, 0.60, "a 96-head model: heads do not divide the SMs"),
    PrefillCase("T1024 H64", Shape(T=1024, H=64), 0.12, 0.08, "a short prompt: launches dominate"),
    PrefillCase("T16384 H64", Shape(T=16384, H=64), 1.10, 0.80, "time is linear in the length"),
    PrefillCase("B2 T8192 H64", Shape(B=2, T=8192, H=64), 1.05, 0.75, "a batch doubles the parallel chains"),
    PrefillCase("packed 6 uneven H64", Shape(lengths=UNEVEN, H=64), 0.55, 0.40, "a serving batch"),
    PrefillCase("packed 8 x 1024 H64", Shape(lengths=(1024,) * 8, H=64), 0.52, 0.38, "no tails: packing alone"),
    PrefillCase("packed 20 random H64", Shape(lengths=RANDOM, H=64), 0.55, 0.40, "many tails; 8192 tokens in all"),
    PrefillCase("packed 6 uneven H96", Shape(lengths=UNEVEN, H=96), 0.80, 0.60, "a serving batch, 96 heads"),
    PrefillCase(
        "GVA T8192 H16 HV64", Shape(T=8192, H=16, HV=64), 0.52, 0.38, "four value heads share a query/key head"
    ),
)
"""Prefill, forward: as many heads as one card sees without, or with little, tensor parallelism."""

FEW_HEADS: tuple[PrefillCase, ...] = (
    PrefillCase("T8192 H4", Shape(T=8192, H=4), 0.16, 0.10, "32 heads over 8 cards: 4 chains for 132 SMs", None),
    PrefillCase("T8192 H8", Shape(T=8192, H=8), 0.18, 0.12, "64 heads over 8 cards", None),
    PrefillCase("T8192 H12", Shape(T=8192, H=12), 0.20, 0.14, "96 heads over 8 cards", None),
    PrefillCase("T32768 H8", Shape(T=32768, H=8), 0.45, 0.32, "a long prompt", None),
    PrefillCase("T131072 H8", Shape(T=131072, H=8), 1.50, 1.10, "128K: the serial chain rules", None),
    PrefillCase(
        "64K+512+256+128 H8", Shape(lengths=LONG_AND_SHORT, H=8), 0.85, 0.60, "only the long one gains by a split", None
    ),
    PrefillCase("T32768 H4", Shape(T=32768, H=4), 0.32, 0.22, "a long prompt, half the heads", None),
    PrefillCase("T131072 H4", Shape(T=131072, H=4), 0.85, 0.60, "128K with the fewest heads", None),
    PrefillCase(
        "128K + 5 x 1K H4", Shape(lengths=LONGEST_AND_SHORT, H=4), 0.90, 0.65, "one long prompt among short ones", None
    ),
)
"""Few heads, long sequences: what tensor parallelism leaves on a card."""

PREFILL_TABLES: dict[str, tuple[PrefillCase, ...]] = {"prefill": PREFILL, "few heads": FEW_HEADS}


def select(cases: Sequence[PrefillCase], substrings: Sequence[str]) -> list[PrefillCase]:
    """The cases whose name contains one of `substrings`; all of them if there are none.

    Raises:
        ValueError: a substring that matches no case.
    """
    for text in substrings:
        if not any(text in case.name for case in cases):
            raise ValueError(f"rows: {text!r} matches none of: " + "; ".join(case.name for case in cases))
    return [case for case in cases if not substrings or any(text in case.name for text in substrings)]
