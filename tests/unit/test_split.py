"""Plans of the segments of long sequences."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

import flashdelta as fd
from flashdelta.problem.split import AUTO, most_segments, parts_of_sequences

from ..support.split_cases import COSTS, split_call

# ---- plans ----------------------------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(
    st.lists(st.integers(0, 4000), min_size=1, max_size=8),
    st.integers(0, 72),
    st.sampled_from([AUTO, 1, 2, 7]),
    st.booleans(),
)
def test_plans_keep_their_bounds(chunks: list[int], room: int, mode: int, invariant: bool):
    parts = parts_of_sequences(chunks, room, COSTS, mode, invariant)
    assert all(1 <= p <= max(c, 1) for p, c in zip(parts, chunks))
    assert sum(parts) <= most_segments(len(chunks), sum(chunks), room, mode, invariant)
    if invariant:
        assert parts == [parts_of_sequences([c], room, COSTS, mode)[0] for c in chunks]
    if mode == AUTO and not invariant:
        assert sum(parts) - len(parts) <= room


def test_explain_says_the_plan():
    explanation = fd.explain(fd.chunk_kda, **split_call([200, 31, 0]), split=5)
    assert explanation.segments == (1, 1, 1) and "sequences stay whole" in str(explanation)
    explanation = replace(explanation, segments=(5, 1, 1))
    assert "segments of the sequences: 5, 1, 1" in str(explanation)
