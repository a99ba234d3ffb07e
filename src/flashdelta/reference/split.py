"""Long sequences cut into segments that run at the same time (docs/split.md).

The state after any run of chunks is affine in the state `S` before it, with `inverse, w, kg, decay` as in `chunk.py`:

    transitions, of a chunk:  S' = M S + b,   M = diag(decay) - kg^T w [K, K],   b = kg^T inverse v [K, V]
    transitions, of a run:    (M, b) after (M', b') is (M M', M b' + b)
    compose:                  S_{j+1} = M_j S_j + b_j, segment by segment

So all segments find their `(M, b)` at the same time, the short chain gives each its true initial state, and then all run as
sequences do. Nothing is approximated.
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
class Transition:
    """`S -> M S + b` of a segment, for every head: `M [HV, K, K]`, `b [HV, K, V]`."""

    M: torch.Tensor
    b: torch.Tensor

    def __call__(self, S: torch.Tensor) -> torch.Tensor:
        return self.M @ S + self.b

    def after(self, earlier: Transition) -> Transition:
        """The transition of both, `earlier` first."""
        return Transition(self.M @ earlier.M, self(earlier.b))


def identity(HV: int, K: int, V: int, like: torch.Tensor) -> Transition:
    """The transition of no chunks."""
    eye = torch.eye(K, dtype=like.dtype, device=like.device)
    return Transition(eye.expand(HV, K, K), like.new_zeros(HV, K, V))


def starts(segments: Segments, transitions: Sequence[Transition], initial: torch.Tensor) -> torch.Tensor:
    """`compose`: the state before every segment, `[G, HV, K, V]`, from the sequences' initial states `[N, HV, K, V]`."""
    states: list[torch.Tensor] = []
    for g, opens in enumerate(segments.opens.tolist()):
        states.append(initial[segments.sequence[g]] if opens else transitions[g - 1](states[-1]))
    return torch.stack(states)
