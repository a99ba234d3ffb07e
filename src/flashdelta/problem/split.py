"""Plans the number of segments that long sequences are cut into, so that few heads fill a GPU (docs/split.md).

It takes the chunks of each sequence and how many segment transitions are formed at the same time, and knows nothing of where:
one GPU, or several. The kernels of a backend form the same whole numbers from device data.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .problem import AUTO, ChunkProblem

MOST_PARTS = 127
"""The most segments of a sequence."""


@dataclass(frozen=True)
class SplitCosts:
    """Costs that the planner weighs, in units of 10 ns: a chunk of the recurrence, a chunk of a segment's transition, one step
    of the chain that composes transitions, and what a split costs at all. `shortest`: chunks a segment has at least. `margin`:
    percent that a sequence's time must fall by."""

    step: int
    transition: int
    compose: int
    fixed: int
    shortest: int = 8
    margin: int = 20


def parts_of_sequences(
    chunks: Sequence[int], room: int, costs: SplitCosts, split: int = AUTO, batch_invariant: bool = False
) -> list[int]:
    """The number of segments that each sequence is cut into, at least 1.

    Args:
        chunks: of each sequence.
        room: segment transitions that can be formed at the same time.
        costs: of the kernels that will run.
        split: `AUTO`, or the number of segments of every sequence that has as many chunks.
        batch_invariant: a sequence's parts depend on its own chunks alone. Otherwise sequences share the room by their chunks.

    """
    if split != AUTO:
        return [min(max(n, 1), split) for n in chunks]
    total = sum(chunks)
    return [parts_that_pay(n, n if batch_invariant else total, room, costs) for n in chunks]


def parts_that_pay(chunks: int, total: int, room: int, costs: SplitCosts) -> int:
    """Counts the segments into which it pays to cut a sequence of so many chunks, in a batch of `total`."""
    # the last segment of a sequence needs no transition
    parts = min(1 + room * chunks // max(total, 1), chunks // costs.shortest, MOST_PARTS)
    # longest * (step + transition) + parts * compose is least at this root
    parts = max(min(parts, math.isqrt(chunks * (costs.step + costs.transition) // costs.compose)), 1)
    cut = -(-chunks // parts) * (costs.step + costs.transition) + parts * costs.compose + costs.fixed
    return parts if cut * 100 <= chunks * costs.step * (100 - costs.margin) else 1


def most_segments(N: int, chunks: int, room: int, split: int = AUTO, batch_invariant: bool = False) -> int:
    """A bound on the segments of a batch of `N` sequences with at most `chunks` chunks in all, known without their lengths."""
    most = split if split != AUTO else 1 + room
    bound = N + room if split == AUTO and not batch_invariant else N * most
    return min(bound, max(chunks, N) + N)


def known_lengths(offsets: Any, chunk_size: Any, q: Any) -> tuple[int, int] | None:
    """Bounds the chunks of sequences whose offsets the host has: from above those of the longest, and from below those of all;
    zeros if it has none. The bounds are powers of two, so that not every batch is a kind of call of its own. Returns None for
    offsets that can't be those of tensors like `q`. Any object may be passed: what is no tensor of offsets is for the
    validation to refuse."""
    if torch.compiler.is_compiling() or type(offsets) is not Tensor or offsets.layout is not torch.strided:
        return 0, 0
    if not offsets.is_cpu or offsets.dim() != 1 or offsets.numel() == 0 or offsets.is_nested:
        return 0, 0
    if offsets.dtype not in (torch.int32, torch.int64) or type(chunk_size) is not int or chunk_size <= 0:
        return 0, 0
    if not isinstance(q, Tensor) or q.is_nested or q.dim() != 4:
        return 0, 0
    try:
        content = offsets.numpy().tobytes()
    except (RuntimeError, TypeError):  # of a tensor without memory of its own, or without NumPy
        content = None
    if content is None:
        last, found = walk(offsets.tolist(), chunk_size)
    else:
        kind = offsets.dtype, chunk_size, len(content)
        known = _walked.get(kind)
        if known is None or known[0] != content:
            if len(_walked) >= MOST_WALKED:
                _walked.clear()
            known = _walked[kind] = content, walk(offsets.tolist(), chunk_size)
        last, found = known[1]
    return None if last > q.shape[1] else found


_walked: dict[tuple, tuple[bytes, tuple[int, tuple[int, int] | None]]] = {}
"""The answer for the offsets of a kind that came last, as the layers of a model all have the same."""

MOST_WALKED = 1024


def walk(offsets: list[int], chunk_size: int) -> tuple[int, tuple[int, int] | None]:
    """The last offset, and `known_lengths`, None where the offsets can be those of no tensors."""
    pairs = [*itertools.pairwise(offsets)]
    if offsets[0] != 0 or any(end < begin for begin, end in pairs):
        return offsets[-1], None
    chunks = [-(-(end - begin) // chunk_size) for begin, end in pairs]
    longest = max(chunks, default=0)
    if longest == 0:
        return offsets[-1], (0, 0)
    return offsets[-1], (1 << (longest - 1).bit_length(), 1 << sum(chunks).bit_length() - 1)


def segments_of_call(problem: ChunkProblem, room: int, costs: SplitCosts) -> int:
    """A bound on the segments of a call that may be split, 0 for one that is not. Without lengths on the host: if one sequence
    had all the tokens of a packed batch, and still were not split, no other batch of as many tokens is."""
    if problem.split == 1 or problem.N == 0:
        return 0
    if problem.split == AUTO:
        longest, together = problem.slots, problem.B * problem.slots
        if problem.longest_chunks > 0:
            # at every checkpoint a chunk may end early
            longest, together = min(longest, problem.longest_chunks + problem.checkpoints), problem.all_chunks
        if problem.batch_invariant:
            together = longest
        # a shorter sequence gains less, as does one in a larger batch
        if parts_that_pay(longest, max(longest, together), room, costs) == 1:
            return 0
    most = most_segments(problem.N, problem.B * problem.slots, room, problem.split, problem.batch_invariant)
    return most if most > problem.N else 0
