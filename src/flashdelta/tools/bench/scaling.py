"""How long calls over several GPUs take back to back, modelled: a call on one GPU, and what is added to it.

Of two, each goes on from what the other's scan ends with:

    forward             merge; the first rank is a call ahead, so its packet waits for the second, which copies it
    forward + backward  the passes wait for each other: exchange of b, merge, reverse, exchange of c, merge

Of more, one thing after another:

    forward             transitions, exchange of (M, b), merge
    forward + backward  the same, merge in the forward that runs again, reverse for c, exchange of c, merge; by put the exchange
                        takes no time, as the forward's recurrence runs again meanwhile

Every input was measured on one H200, exchanges on two, transitions in steps on four; K = V = 128, bfloat16, one sequence over
all ranks. Left out are gaps between launches, ranks that do not start together, and the host.
"""

from __future__ import annotations

import itertools
import math

from ...problem.problem import packet_columns
from .workloads import value

K = V = 128
CHUNK = 64
SMS = 132

TRANSITION_US = 0.57
"""A chunk of a transition (docs/split.md)."""

TRANSITION_IN_STEPS_US, STEPS_FROM = 0.89, 48
"""The same in two steps of 32 tokens, which forwards take from so many heads on: of four ranks with 64 (cp-h200.json)."""

COMPOSE_US = 2.3
"""A step of a chain of transitions, by one CTA of 16 channels (docs/split.md)."""

COPY_TB_S = 4.27
"""Memory's, of the results files."""

GATHER_US = ((0, 35), (1, 35), (4, 36), (8, 55), (64, 290))
"""MiB that a rank receives, and an all-gather's time: NCCL, two H200 of one host (NV18), torch 2.11."""

PUT_US = ((0, 4.3), (1, 6.8), (4, 13.7), (8, 24.1), (64, 176))
"""MiB of a packet, and the time of its copy into another GPU's symmetric memory: likewise."""

SIGNAL_US = 5
"""Of symmetric memory, sent and seen."""

RANKS, TOKENS, HEADS = (2, 4, 8), (8, 32, 128), (32, 64)
"""Of the table; tokens are thousands of a rank."""

FORWARD, STEP = "forward", "forward + backward"


def on_line(measured: tuple[tuple[float, float], ...], mib: float) -> float:
    """Between the measured sizes, and past the last two."""
    pairs = [*itertools.pairwise(measured)]
    (low, a), (high, b) = next((pair for pair in pairs if mib <= pair[1][0]), pairs[-1])
    return a + (b - a) * (mib - low) / (high - low)


def exchange_us(mib: float, ranks: int, way: str) -> float:
    """Of packets of so many MiB. By gather more ranks send as fast as one: links of a host are not shared. By put a rank
    writes one packet after another, and copies what it has received."""
    if way == "gather":
        return on_line(GATHER_US, (ranks - 1) * mib)
    return (ranks - 1) * on_line(PUT_US, mib) + SIGNAL_US + copied_us(mib, ranks)


def copied_us(mib: float, ranks: int) -> float:
    """Of the others' packets, out of the memory that they write."""
    return 2 * (ranks - 1) * mib * 2**20 / COPY_TB_S / 1e6


def transitions_us(T: int, HV: int, steps: bool = False) -> float:
    """A CTA for each 64 columns of M and b of a head, one an SM."""
    each = TRANSITION_IN_STEPS_US if steps else TRANSITION_US
    return math.ceil(T / CHUNK) * math.ceil(HV / (SMS // ((K + V) // 64))) * each


def merge_us(HV: int, ranks: int) -> float:
    """Of the rank that merges most packets."""
    return (ranks - 1) * COMPOSE_US * math.ceil(HV * (V // 16) / SMS)


def added_us(T: int, HV: int, ranks: int, reverse_us: float | None, way: str = "put") -> float:
    """Microseconds beyond a call on one GPU. `reverse_us`: of `reverse`, with its stores, which `c` does without; None of a
    forward."""
    column, merged = HV * K * 4 / 2**20, merge_us(HV, ranks)
    packet = column * packet_columns(ranks, K, V)
    of_packet, of_c = exchange_us(packet, ranks, way), exchange_us(column * V, ranks, way)
    if ranks == 2:
        if reverse_us is None:
            return merged + (copied_us(packet, ranks) if way == "put" else of_packet)
        return reverse_us + 2 * merged + of_packet + of_c
    added = transitions_us(T, HV, steps=reverse_us is None and HV >= STEPS_FROM) + merged + of_packet
    if reverse_us is not None:
        added += reverse_us + 2 * merged + (of_c if way == "gather" else 0)
    return added


REVERSE_US = {32: 142.5, 64: 256.0}
"""`reverse` at 8192 tokens, by heads (train-hopper-h200.json)."""


def efficiency(one_ms: float, T: int, HV: int, ranks: int, differentiates: bool, way: str = "put") -> float | None:
    """One GPU's time over that of the ranks. None where heads are too few to keep one GPU from splitting sequences."""
    if ranks == 1 or HV not in REVERSE_US:
        return None
    reverse = REVERSE_US[HV] * T / 8192 if differentiates else None
    return one_ms / (one_ms + added_us(T, HV, ranks, reverse, way) / 1e3)


def one_ms(documents: dict[str, dict], T: int, HV: int, table: str) -> float:
    """Of one GPU, back to back: as measured at 8192 tokens, times the tokens."""
    benchmark, name = ("prefill", f"T8192 H{HV}") if table == FORWARD else ("train", f"B1 T8192 H{HV}")
    row = next(row for row in documents[benchmark]["rows"] if row["name"] == name)
    return value(row, "ours.sustained_ms") * T / 8192


def table(documents: dict[str, dict]) -> list[list[str]]:
    """Titles, then a line for each size: times in ms, and efficiencies by number of ranks and way of exchange."""
    kinds = [(RANKS[0], "gather"), *((ranks, "put") for ranks in RANKS)]
    lines = [["", "one GPU, ms", *(f"{ranks} GPUs, {way}" for ranks, way in kinds)]]
    for kind in (FORWARD, STEP):
        for HV in HEADS:
            for tokens in TOKENS:
                T = tokens * 1024
                one = one_ms(documents, T, HV, kind)
                found = [efficiency(one, T, HV, ranks, kind == STEP, way) or 0.0 for ranks, way in kinds]
                lines.append([f"{kind}, H{HV}, {tokens}K a rank", f"{one:.2f}", *(f"{x:.2f}" for x in found)])
    return lines
