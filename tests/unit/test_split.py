"""Segments of long sequences, on the reference: maps, plans, and a split forward against the whole one, in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashdelta as fd
from flashdelta.problem.split import AUTO, most_segments, parts_of_sequences
from flashdelta.reference import chunk_kda
from flashdelta.reference.split import cut
from flashdelta.runtime.call import check

from ..support.gradients import gradients, incoming
from ..support.split_cases import CHUNK, COSTS, LENGTHS, forced, offsets, split_call, split_inputs, split_pool_call

FP64 = torch.float64


def _forward(tensors: dict, parts: torch.Tensor | None, **options: object) -> tuple:
    return chunk_kda(*check(fd.chunk_kda, **tensors, chunk_size=CHUNK, **options), parts)


def _close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-11)


def assert_plan_is_the_whole(tensors: dict, parts: torch.Tensor) -> None:
    whole, found = (_forward(tensors, x, output_final_state=True) for x in (None, parts))
    for i in range(2):
        _close(found[i], whole[i])


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("parts", [2, 3, 64])
@pytest.mark.parametrize("v_first", [False, True])
def test_split_is_the_whole(lengths: list[int], parts: int, v_first: bool):
    call = forced(split_call(lengths, v_first, return_intermediate_states=True), FP64)
    whole = fd.chunk_kda(**call, backend="reference")
    for found, wanted in zip(fd.chunk_kda(**call, split=parts, backend="reference"), whole):
        _close(found, wanted)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_any_plan_is_the_whole(data: st.DataObject):
    lengths = data.draw(st.lists(st.integers(0, 150), min_size=1, max_size=5))
    parts = torch.tensor([data.draw(st.integers(1, 8)) for _ in lengths])
    tensors = split_inputs(sum(lengths), seed=data.draw(st.integers(0, 99)), dtype=FP64)
    assert_plan_is_the_whole(tensors | {"cu_seqlens": offsets(lengths)}, parts)


def test_split_batch_rows_have_the_states_before_every_chunk():
    rows = [split_inputs(100, seed, dtype=FP64) for seed in range(3)]
    call = {name: torch.cat([row[name] for row in rows]) for name in rows[0]} | {"chunk_size": CHUNK}
    whole, found = (fd.chunk_kda(**call, return_intermediate_states=True, split=parts)[2] for parts in (False, 2))
    _close(found, whole)


@pytest.mark.parametrize("parts", [2, 4])
def test_split_with_a_pool_and_checkpoints(parts: int):
    whole, cut_up = forced(split_pool_call(), FP64), forced(split_pool_call(), FP64)
    wanted, _ = fd.chunk_kda(**whole, backend="reference")
    found, _ = fd.chunk_kda(**cut_up, split=parts, backend="reference")
    _close(found, wanted)
    _close(cut_up["state_pool"], whole["state_pool"])


# ---- plans ----------------------------------------------------------------------------------------------------------


def _parts(chunks: list[int], room: int, **options: object) -> list[int]:
    return parts_of_sequences(torch.tensor(chunks), room, COSTS, **options).tolist()


@settings(max_examples=200)
@given(
    st.lists(st.integers(0, 4000), min_size=1, max_size=8),
    st.integers(0, 72),
    st.sampled_from([AUTO, 1, 2, 7]),
    st.booleans(),
)
def test_plans_keep_their_bounds(chunks: list[int], room: int, mode: int, invariant: bool):
    parts = _parts(chunks, room, split=mode, batch_invariant=invariant)
    assert all(1 <= p <= max(c, 1) for p, c in zip(parts, chunks))
    assert sum(parts) <= most_segments(len(chunks), sum(chunks), room, mode, invariant)
    if invariant:
        assert parts == [_parts([c], room, split=mode)[0] for c in chunks]
    if mode == AUTO and not invariant:
        assert sum(parts) - len(parts) <= room


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 60)), min_size=1, max_size=6))
def test_segments_cover_every_chunk_once(sequences: list[tuple[int, int]]):
    chunks = torch.tensor([c for c, _ in sequences])
    parts = torch.tensor([min(p, max(c, 1)) for c, p in sequences])
    opening = torch.cat([torch.zeros(1, dtype=torch.long), chunks.cumsum(0)])[:-1]
    segments = cut(opening, chunks, parts)
    covered = [slot for a, b in zip(segments.first.tolist(), segments.stop.tolist()) for slot in range(a, b)]
    assert covered == list(range(int(chunks.sum())))
    assert segments.opens.sum() == len(sequences)
    sizes = segments.stop - segments.first
    for n, (c, p) in enumerate(zip(chunks.tolist(), parts.tolist())):
        mine = sizes[segments.sequence == n]
        assert len(mine) == p and mine.max() - mine.min() <= 1
        assert c == 0 or mine.min() >= 1


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_gradients_of_a_split_are_those_of_the_whole(lengths: list[int]):
    call = forced(split_call(lengths), FP64) | {"backend": "reference"}
    grads = incoming(call)
    found, wanted = (gradients(call | {"split": parts}, *grads) for parts in (3, False))
    for name, x in wanted.items():
        _close(found[name], x)


def test_explain_says_the_plan():
    call = split_call([200, 31, 0])
    assert fd.explain(fd.chunk_kda, **call).segments == (1, 1, 1)
    assert "sequences stay whole" in str(fd.explain(fd.chunk_kda, **call))
    explanation = fd.explain(fd.chunk_kda, **call, split=5)
    assert explanation.segments == (5, 1, 1)
    assert "segments of the sequences: 5, 1, 1" in str(explanation)
