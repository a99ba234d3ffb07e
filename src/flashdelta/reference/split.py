"""Long sequences cut into segments that run side by side (docs/split.md).

Over any run of chunks the state after it is affine in the state `S` before it, with `T, w, kg, G_C` as in `chunk.py`:

    one chunk:  S' = M S + b,   M = diag(exp(G_C)) - kg^T w [K, K],   b = kg^T T v [K, V]
    a run:      (M, b) after (M', b') is (M M', M b' + b)

So the segments of a sequence can find their `(M, b)` at the same time, a short chain `S_{j+1} = M_j S_j + b_j` gives each
segment's true initial state, and then all segments run as sequences do. Nothing is approximated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Segments:
    """Runs of chunk slots, sequence by sequence, `[G]` each: the `sequence`, the `first` slot and past the last one (`stop`),
    and whether a segment `opens` its sequence. A sequence without chunks has one empty segment."""

    sequence: torch.Tensor
    first: torch.Tensor
    stop: torch.Tensor
    opens: torch.Tensor


def cut(opening: torch.Tensor, chunks: torch.Tensor, parts: torch.Tensor) -> Segments:
    """Segment `j` of a sequence of `c` chunks in `p` parts has the chunks `[j c // p, (j + 1) c // p)`. `opening [N]` is the
    first slot of each sequence."""
    sequence = torch.repeat_interleave(torch.arange(len(parts), device=parts.device), parts)
    before = torch.cat([parts.new_zeros(1), parts.cumsum(0)])[:-1]
    j = torch.arange(len(sequence), device=parts.device) - before[sequence]
    c, p, at = chunks[sequence], parts[sequence], opening[sequence]
    return Segments(sequence, at + j * c // p, at + (j + 1) * c // p, j == 0)


@dataclass(frozen=True)
class AffineMap:
    """`S -> M S + b` for every head: `M [HV, K, K]`, `b [HV, K, V]`."""

    M: torch.Tensor
    b: torch.Tensor

    def __call__(self, S: torch.Tensor) -> torch.Tensor:
        return self.M @ S + self.b

    def after(self, earlier: AffineMap) -> AffineMap:
        """The map of a run that `earlier` comes before."""
        return AffineMap(self.M @ earlier.M, self(earlier.b))


def identity(HV: int, K: int, V: int, like: torch.Tensor) -> AffineMap:
    """The map of no chunks."""
    eye = torch.eye(K, dtype=like.dtype, device=like.device)
    return AffineMap(eye.expand(HV, K, K), like.new_zeros(HV, K, V))


def starts(segments: Segments, maps: Sequence[AffineMap], initial: torch.Tensor) -> torch.Tensor:
    """The state before every segment, `[G, HV, K, V]`, from the initial states `[N, HV, K, V]` of the sequences."""
    found: list[torch.Tensor] = []
    for g, opens in enumerate(segments.opens.tolist()):
        found.append(initial[segments.sequence[g]] if opens else maps[g - 1](found[-1]))
    return torch.stack(found)
