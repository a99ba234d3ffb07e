"""How many segments long sequences are cut into, so that few heads fill a GPU (docs/split.md): the planner.

It takes the chunks of each sequence and how many maps are formed at the same time, and knows nothing of where: one GPU, or
several. The kernels of a backend form the same whole numbers from device data.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .spec import KdaSpec

AUTO = 0
"""Instead of a number of segments: as many as pay."""

MOST_PARTS = (64, 32, 16, 8, 4, 2, 1)
"""Bits of the most segments of a sequence, 127."""

MOST_ALIKE = 256
"""Sequences of a batch from which on none is split, whatever their number."""


@dataclass(frozen=True)
class SplitCosts:
    """What the planner weighs, in units of 10 ns: a chunk of the recurrence, a chunk of a segment's map, one step of the chain
    that composes maps, and what a split costs at all. `shortest`: chunks a segment has at least. `margin`: percent that a
    sequence's time must fall by."""

    step: int
    map: int
    compose: int
    fixed: int
    shortest: int = 8
    margin: int = 20


def parts_of_sequences(
    chunks: torch.Tensor, room: int, costs: SplitCosts, split: int = AUTO, batch_invariant: bool = False
) -> torch.Tensor:
    """How many segments each sequence is cut into, `[N]`, at least 1.

    Args:
        chunks: `[N]` integers, the chunks of each sequence. Only whole numbers are formed from them, on their device.
        room: maps of segments that can be formed at the same time.
        costs: of the kernels that will run.
        split: `AUTO`, or the number of segments of every sequence that has as many chunks.
        batch_invariant: a sequence's parts depend on its own chunks alone. Otherwise sequences share the room by their chunks.
    """
    if split != AUTO:
        return chunks.clamp(1, split)
    total = chunks if batch_invariant else chunks.sum()
    # the last segment of a sequence needs no map
    parts = 1 + room * chunks // total.clamp(min=1)
    parts = torch.minimum(parts, chunks // costs.shortest)
    # longest * (step + map) + parts * compose is least at the root of this
    square = chunks * (costs.step + costs.map)
    root = torch.zeros_like(chunks)
    for bit in MOST_PARTS:
        root = torch.where((root + bit) * (root + bit) * costs.compose <= square, root + bit, root)
    parts = torch.minimum(parts, root).clamp(min=1)
    longest = (chunks + parts - 1) // parts
    whole = chunks * costs.step
    cut = longest * (costs.step + costs.map) + parts * costs.compose + costs.fixed
    return torch.where(cut * 100 <= whole * (100 - costs.margin), parts, 1)


def most_segments(N: int, chunks: int, room: int, split: int = AUTO, batch_invariant: bool = False) -> int:
    """A bound on the segments of a batch of `N` sequences with at most `chunks` chunks in all, known without their lengths."""
    most = split if split != AUTO else 1 + room
    bound = N + room if split == AUTO and not batch_invariant else N * most
    return min(bound, max(chunks, N) + N)


NO_COSTS = SplitCosts(step=1, map=1, compose=1, fixed=1)
"""Where splits were not measured. Only a forced one is done there, which weighs nothing."""


def splits(spec: KdaSpec, costs: SplitCosts) -> bool:
    """Whether sequences of the call may be split."""
    return spec.split > 1 or (spec.split == AUTO and costs is not NO_COSTS)


def planned_parts(spec: KdaSpec, chunks: torch.Tensor, room: int, costs: SplitCosts) -> torch.Tensor:
    """`parts_of_sequences` of a call."""
    if not splits(spec, costs):
        return torch.ones_like(chunks)
    return parts_of_sequences(chunks, room, costs, spec.split, spec.batch_invariant)


@functools.cache
def gains(longest: int, share: int, room: int, costs: SplitCosts) -> bool:
    """Whether a sequence of so many chunks, one of `share` such, would be split."""
    return bool((parts_of_sequences(torch.tensor([longest] * share), room, costs) > 1).any())


def segments_of_call(spec: KdaSpec, room: int, costs: SplitCosts) -> int:
    """A bound on the segments of a call that may be split, 0 for one that is not: if one sequence had all the tokens of a
    packed batch, and still were not split, no other batch of as many tokens is."""
    if not splits(spec, costs) or spec.N == 0:
        return 0
    if spec.split == AUTO:
        together = spec.packed or spec.batch_invariant
        if not gains(spec.slots, 1 if together else min(spec.B, MOST_ALIKE), room, costs):
            return 0
    most = most_segments(spec.N, spec.B * spec.slots, room, spec.split, spec.batch_invariant)
    return most if most > spec.N else 0
