"""Programs of `recurrence` share its chunks evenly: each is done once, in order, and no program waits for a later one."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ..support.shares import C, Work

SLACK = 3
"""Chunks by which a program may do more than its share: a cut close to an item's end leaves the item whole."""


@st.composite
def works(draw: st.DrawFn) -> Work:
    heads, programs = draw(st.integers(1, 12)), draw(st.integers(1, 24))
    if draw(st.booleans()):
        sequences = draw(st.integers(1, 6))
        return Work(heads, min(programs, sequences * heads), draw(st.integers(0, 40)) * C // 2, sequences)
    length = st.one_of(st.just(0), st.integers(0, 3 * C), st.integers(0, 60 * C))
    lengths = draw(st.lists(length, min_size=1, max_size=draw(st.sampled_from([4, 20, 300]))))
    offsets = tuple(itertools.accumulate(lengths, initial=0))
    T = max(1, offsets[-1]) + draw(st.integers(0, 100))
    return Work(heads, min(programs, len(lengths) * heads), T, len(lengths), offsets)


WRONG = st.one_of(st.integers(-100, 5000), st.integers(-(2**31), 2**31 - 1))


@st.composite
def wild_works(draw: st.DrawFn) -> Work:
    """Offsets in any order, inside the tensors and out."""
    offsets = tuple(draw(st.lists(WRONG, min_size=2, max_size=8)))
    heads = draw(st.integers(1, 6))
    programs = min(draw(st.integers(1, 24)), heads * (len(offsets) - 1))
    return Work(heads, programs, draw(st.integers(1, 4000)), len(offsets) - 1, offsets)


def assert_all_done(work: Work) -> None:
    """Programs run one after another: who waits must find that what it waits for has been done."""
    done = [0] * len(work.chunks)
    visits = [0] * len(work.chunks)
    finished = [0] * len(work.chunks)
    handed = {}
    for program in range(work.programs):
        parts = work.parts(program)
        assert sum(part.waits for part in parts) <= 1 and sum(part.hands_over for part in parts) <= 1
        for k, part in enumerate(parts):
            assert 0 <= part.item < len(work.chunks)
            assert 0 <= part.first <= part.stop <= work.chunks[part.item]
            assert not (part.waits and part.hands_over)
            if part.waits:
                assert k == len(parts) - 1
                assert handed.pop(program - 1) == (part.item, part.first)
            if part.hands_over:
                assert k == 0
                handed[program] = (part.item, part.stop)
            else:
                finished[part.item] += 1
            assert done[part.item] == part.first
            done[part.item] = part.stop
            visits[part.item] += 1
    assert not handed, "states that nobody fetches"
    assert done == work.chunks
    assert finished == [1] * len(work.chunks), "empty items are done, too"
    assert max(visits) <= 2


def finish(work: Work, change: float = 1.0) -> tuple[float, float]:
    """When the last program ends if all start at once, a chunk takes 1 and a change of item `change`; and the time that
    programs spend waiting."""
    ends, waited, handed = [], 0.0, {}
    for program in range(work.programs):
        time = 0.0
        for part in work.parts(program):
            if part.waits:
                waited += max(0.0, handed[program - 1] - time)
                time = max(time, handed[program - 1])
            time += part.stop - part.first + change
            if part.hands_over:
                handed[program] = time
        ends.append(time)
    return max(ends), waited


@settings(max_examples=200, deadline=None)
@given(works())
@example(Work(96, 66, 8192, 1))
@example(Work(64, 66, 8192, 8, tuple(range(0, 8193, 1024))))
@example(Work(3, 6, 64, 2, (0, 0, 0)))
@example(Work(1, 1, 1, 1, (0, 0)))
@example(Work(1, 130, 130 * C, 130, (0,) * 130 + (130 * C,)))
def test_every_chunk_is_done_once_and_in_order(work: Work):
    assert_all_done(work)


@settings(max_examples=100, deadline=None)
@given(wild_works())
@example(Work(4, 12, 1000, 4, (0, 1000, 0, 1000, 0)))
def test_wrong_offsets_change_nothing_about_that(work: Work):
    assert_all_done(work)


@settings(max_examples=200, deadline=None)
@given(works())
def test_no_program_does_much_more_than_its_share(work: Work):
    steps = [chunks + 1 for chunks in work.chunks]
    even = max(-(-sum(steps) // work.programs), max(steps))
    end, _ = finish(work)
    assert end <= even + 2 * SLACK


@pytest.mark.parametrize("heads", [1, 4, 8, 12, 16, 24, 32, 48, 64])
def test_what_divides_evenly_is_not_cut(heads: int):
    for work in (Work(heads, heads, 8192, 1), Work(heads, heads, 8192, 4), Work(heads, heads, 8192, 1, (0, 8000))):
        assert all(not part.waits for program in range(work.programs) for part in work.parts(program))


@pytest.mark.parametrize(
    "work",
    [
        Work(96, 66, 8192, 1),
        Work(64, 66, 8192, 8, tuple(range(0, 8193, 1024))),
        Work(96, 66, 8192, 6, (0, 4096, 6144, 7168, 7680, 8000, 8192)),
    ],
    ids=["96 heads", "8 x 1024", "uneven"],
)
def test_models_split_evenly_without_waiting(work: Work):
    """Items of two slices on 132 multiprocessors."""
    end, waited = finish(work)
    assert end <= sum(chunks + 1 for chunks in work.chunks) / work.programs + 2 * SLACK
    assert waited == 0.0
    assert sum(part.waits for program in range(work.programs) for part in work.parts(program)) > 20
