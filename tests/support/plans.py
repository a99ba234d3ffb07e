"""Chunks as a plain Python loop cuts them, to hold the device-side plans against; and random layouts, drawn by hypothesis."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

import flashdelta as fd
from flashdelta.problem.problem import Problem, Tensors
from flashdelta.runtime.call import check

from .pools import cuts


@dataclass(frozen=True)
class Chunk:
    """Tokens are counted over all batch rows."""

    sequence: int
    tokens: list[int]


@dataclass(frozen=True)
class Plan:
    """`offsets`: `cu_seqlens`, or None for `B` rows of `T` tokens. `marks`: checkpoint offsets, `M` for each sequence."""

    B: int
    T: int
    C: int
    offsets: tuple[int, ...] | None
    marks: tuple[tuple[int, ...], ...]

    @property
    def N(self) -> int:
        return self.B if self.offsets is None else len(self.offsets) - 1

    def begin(self, n: int) -> int:
        return n * self.T if self.offsets is None else self.offsets[n]

    def length(self, n: int) -> int:
        return self.T if self.offsets is None else self.offsets[n + 1] - self.offsets[n]

    def cuts(self, n: int) -> list[tuple[int, bool]]:
        """Where sequence `n` is cut at its checkpoints, and whether the state there is asked for."""
        return cuts(self.marks[n], self.length(n))

    def call(self) -> tuple[Problem, Tensors]:
        """A validated call of this layout."""
        x, state = torch.zeros(self.B, self.T, 1, 32), torch.zeros(1, 1, 32, 32)
        call = {"q": x, "k": x, "v": x, "g": x, "beta": x[..., 0], "chunk_size": self.C, "state_pool": state}
        call |= {"state_v_first": False, "use_qk_l2norm_in_kernel": False}
        call["state_indices"] = torch.zeros(self.N, dtype=torch.int64)
        if self.offsets is not None:
            call["cu_seqlens"] = torch.tensor(self.offsets)
        if self.marks and self.marks[0]:
            call["checkpoint_offsets"] = torch.tensor(self.marks)
            call["checkpoint_indices"] = torch.zeros_like(call["checkpoint_offsets"])
        return check(fd.chunk_kda, **call)


def planned_chunks(plan: Plan) -> list[Chunk]:
    """The chunks of all sequences, in order."""
    chunks = []
    for n in range(plan.N):
        cuts = [0, *(cut for cut, _ in plan.cuts(n)), plan.length(n)]
        for a, b in itertools.pairwise(cuts):
            for start in range(a, b, plan.C):
                tokens = range(plan.begin(n) + start, plan.begin(n) + min(start + plan.C, b))
                chunks.append(Chunk(n, list(tokens)))
    return chunks


@st.composite
def plans(draw: st.DrawFn, wild: bool = False) -> Plan:
    """Any layout with any checkpoints: good ones, zeros, and ones past the end or out of order. `wild`: any offsets too."""
    C, M = draw(st.sampled_from([32, 64])), draw(st.integers(0, 4))
    offsets, B, T = None, draw(st.integers(1, 3)), draw(st.integers(1, 200))
    if draw(st.booleans()):
        lengths = draw(st.lists(st.integers(0, 150), min_size=1, max_size=5))
        offsets, B = tuple(itertools.accumulate(lengths, initial=0)), 1
        T = max(offsets[-1], 1) + draw(st.integers(0, 40))
        if wild:
            anything = st.one_of(st.integers(-T, 2 * T), st.integers(-(2**62), 2**62))
            offsets = tuple(draw(st.lists(anything, min_size=2, max_size=5)))
    mark = st.one_of(st.just(0), st.integers(0, 12).map(lambda i: 16 * i), st.integers(-(2**62), 2**62))
    N = B if offsets is None else len(offsets) - 1
    marks = tuple(tuple(draw(mark) for _ in range(M)) for _ in range(N))
    return Plan(B, T, C, offsets, marks)
