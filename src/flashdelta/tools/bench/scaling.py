"""How long calls over several GPUs take, modelled: a call on one GPU, and what is added to it, one thing after another.

    forward             transitions, exchange of (M, b), merge
    forward + backward  the same, merge in the forward that runs again, reverse for c, exchange of c, merge

Every input was measured on one H200, exchanges on two; K = V = 128, bfloat16, one sequence over all ranks. Left out are gaps
between launches, ranks that do not start together, and clocks under load.
"""

from __future__ import annotations

import itertools
import math

from .workloads import value

K = V = 128
CHUNK = 64
SMS = 132

TRANSITION_US = 0.57
"""A chunk of a transition (docs/split.md)."""

COMPOSE_US = 2.3
"""A step of a chain of transitions, by one CTA of 16 channels (docs/split.md)."""

COPY_TB_S = 4.24
"""Memory's, of the results files."""

GATHER_US = ((0, 35), (1, 35), (4, 36), (8, 55), (64, 290))
"""MiB that a rank receives, and an all-gather's time: NCCL, two H200 of one host (NV18), torch 2.11."""

RANKS, TOKENS, HEADS = (2, 4, 8), (8, 32, 128), (32, 64)
"""Of the table; tokens are thousands of a rank."""

FORWARD, STEP = "forward", "forward + backward"


def gather_us(mib: float) -> float:
    """Between the measured sizes on a line. More ranks send as fast as one: links of a host are not shared."""
    for (low, a), (high, b) in itertools.pairwise(GATHER_US):
        if mib <= high:
            return a + (b - a) * (mib - low) / (high - low)
    (low, a), (high, b) = GATHER_US[-2:]
    return b + (b - a) * (mib - high) / (high - low)


def transitions_us(T: int, HV: int) -> float:
    """Four CTAs a head, one an SM; no faster than memory moves `w`, `kg`, `inverse`, `v` and decays of each chunk."""
    chunks, waves = math.ceil(T / CHUNK), math.ceil(HV / (SMS // ((K + V) // 64)))
    moved = chunks * HV * ((2 * K + CHUNK + V) * CHUNK * 2 + 4 * K)
    return max(chunks * waves * TRANSITION_US, moved / COPY_TB_S / 1e6)


def merge_us(HV: int, ranks: int) -> float:
    """Of the rank that merges most packets."""
    return (ranks - 1) * COMPOSE_US * math.ceil(HV * (V // 16) / SMS)


def added_us(T: int, HV: int, ranks: int, reverse_us: float | None) -> float:
    """Microseconds beyond a call on one GPU. `reverse_us`: of `reverse`, with its stores, which `c` does without; None of a
    forward."""
    packet = HV * K * 4 / 2**20
    added = transitions_us(T, HV) + gather_us((ranks - 1) * packet * (K + V)) + merge_us(HV, ranks)
    if reverse_us is not None:
        added += reverse_us + gather_us((ranks - 1) * packet * V) + 2 * merge_us(HV, ranks)
    return added


REVERSE_US = {32: 140.9, 64: 258.8}
"""`reverse` at 8192 tokens, by heads (train-hopper-h200.json)."""


def efficiency(one_ms: float, T: int, HV: int, ranks: int, differentiates: bool) -> float | None:
    """One GPU's time over that of the ranks. None where heads are too few to keep one GPU from splitting sequences."""
    if ranks == 1 or HV not in REVERSE_US:
        return None
    reverse = REVERSE_US[HV] * T / 8192 if differentiates else None
    return one_ms / (one_ms + added_us(T, HV, ranks, reverse) / 1e3)


def one_ms(documents: dict[str, dict], T: int, HV: int, table: str) -> float:
    """Of one GPU: as measured at 8192 tokens, times the tokens."""
    benchmark, name = ("prefill", f"T8192 H{HV}") if table == FORWARD else ("train", f"B1 T8192 H{HV}")
    row = next(row for row in documents[benchmark]["rows"] if row["name"] == name)
    return value(row, "ours.ms.median") * T / 8192


def table(documents: dict[str, dict]) -> list[list[str]]:
    """Titles, then a line for each size: times in ms, and efficiencies by number of ranks."""
    lines = [["", "one GPU, ms", *(f"{ranks} GPUs" for ranks in RANKS)]]
    for kind in (FORWARD, STEP):
        for HV in HEADS:
            for tokens in TOKENS:
                T = tokens * 1024
                one = one_ms(documents, T, HV, kind)
                found = [efficiency(one, T, HV, ranks, kind == STEP) or 0.0 for ranks in RANKS]
                lines.append([f"{kind}, H{HV}, {tokens}K a rank", f"{one:.2f}", *(f"{x:.2f}" for x in found)])
    return lines
