"""Stream-K gives the CTAs of `recurrence` equal work: each chunk is done once, in order, and no CTA waits for a later one."""

from __future__ import annotations

import itertools

from hypothesis import example, given, settings
from hypothesis import strategies as st

from ..support.stream_k import C, Work


@st.composite
def works(draw: st.DrawFn) -> Work:
    heads, ctas = draw(st.integers(1, 12)), draw(st.integers(1, 24))
    if draw(st.booleans()):
        sequences = draw(st.integers(1, 6))
        return Work(heads, min(ctas, sequences * heads), draw(st.integers(0, 40)) * C // 2, sequences)
    length = st.one_of(st.just(0), st.integers(0, 3 * C), st.integers(0, 60 * C))
    lengths = draw(st.lists(length, min_size=1, max_size=draw(st.sampled_from([4, 20, 300]))))
    offsets = tuple(itertools.accumulate(lengths, initial=0))
    T = max(1, offsets[-1]) + draw(st.integers(0, 100))
    return Work(heads, min(ctas, len(lengths) * heads), T, len(lengths), offsets)


WRONG = st.one_of(st.integers(-100, 5000), st.integers(-(2**31), 2**31 - 1))


@st.composite
def wild_works(draw: st.DrawFn) -> Work:
    """Offsets in any order, inside the tensors and out."""
    offsets = tuple(draw(st.lists(WRONG, min_size=2, max_size=8)))
    heads = draw(st.integers(1, 6))
    ctas = min(draw(st.integers(1, 24)), heads * (len(offsets) - 1))
    return Work(heads, ctas, draw(st.integers(1, 4000)), len(offsets) - 1, offsets)


def assert_all_done(work: Work) -> None:
    """CTAs run one after another: who waits must find that what it waits for has been done."""
    done = [0] * len(work.chunks)
    visits = [0] * len(work.chunks)
    finished = [0] * len(work.chunks)
    carries = {}
    for cta in range(work.ctas):
        tiles = work.work_tiles(cta)
        assert sum(tile.carry_in for tile in tiles) <= 1 and sum(tile.carry_out for tile in tiles) <= 1
        for k, tile in enumerate(tiles):
            assert 0 <= tile.tile < len(work.chunks)
            assert 0 <= tile.first <= tile.stop <= work.chunks[tile.tile]
            assert not (tile.carry_in and tile.carry_out)
            if tile.carry_in:
                assert k == len(tiles) - 1
                assert carries.pop(cta - 1) == (tile.tile, tile.first)
            if tile.carry_out:
                assert k == 0
                carries[cta] = (tile.tile, tile.stop)
            else:
                finished[tile.tile] += 1
            assert done[tile.tile] == tile.first
            done[tile.tile] = tile.stop
            visits[tile.tile] += 1
    assert not carries, "states that nobody fetches"
    assert done == work.chunks
    assert finished == [1] * len(work.chunks), "empty tiles are done, too"
    assert max(visits) <= 2


@settings(max_examples=80, deadline=None)
@given(works())
@example(Work(96, 66, 8192, 1))
@example(Work(64, 66, 8192, 8, tuple(range(0, 8193, 1024))))
@example(Work(3, 6, 64, 2, (0, 0, 0)))
@example(Work(1, 1, 1, 1, (0, 0)))
@example(Work(1, 130, 130 * C, 130, (0,) * 130 + (130 * C,)))
def test_every_chunk_is_done_once_and_in_order(work: Work):
    assert_all_done(work)


@settings(max_examples=40, deadline=None)
@given(wild_works())
@example(Work(4, 12, 1000, 4, (0, 1000, 0, 1000, 0)))
def test_wrong_offsets_change_nothing_about_that(work: Work):
    assert_all_done(work)
