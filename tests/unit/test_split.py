"""Plans of the segments of long sequences."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashdelta as fd
from flashdelta.problem.split import AUTO, gains, known_lengths, most_segments, parts_of_sequences, segments_of_call
from flashdelta.runtime.call import check

from ..compile.variants import BUILD, backward_of
from ..support.cases import Case
from ..support.inputs import meta_call
from ..support.split_cases import COSTS, split_call

FP64 = torch.float64


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


@pytest.mark.parametrize(
    ("chunks", "room", "wanted"),
    [
        ([2048], 8, [9]),  # 128K tokens, 4 heads
        ([2048, 16, 16, 16, 16, 16], 8, [8, 1, 1, 1, 1, 1]),  # 128K + 5 x 1K: the long one alone
        ([2048], 33, [34]),  # one head
        ([128], 33, [11]),  # where more would take longer to compose than they save
        ([16], 8, [1]),  # too short to pay for the maps
        ([128], 0, [1]),  # the heads fill the GPU
        ([128] * 20, 4, [1] * 20),  # the batch does
        ([0, 0], 8, [1, 1]),
    ],
)
def test_plans_split_what_gains(chunks: list[int], room: int, wanted: list[int]):
    assert _parts(chunks, room) == wanted


@settings(max_examples=200)
@given(st.integers(0, 3000), st.integers(1, 72), st.lists(st.integers(0, 3000), max_size=4))
def test_no_batch_is_split_of_whose_tokens_one_sequence_would_not_be(chunks: int, room: int, others: list[int]):
    total = chunks + sum(others)
    if not gains(total, total, room, COSTS):
        assert _parts([chunks, *others], room) == [1] * (1 + len(others))


ANY_LENGTHS = st.lists(st.one_of(st.integers(0, 300), st.integers(0, 20_000)), min_size=1, max_size=12)


@settings(max_examples=300)
@given(ANY_LENGTHS, st.integers(1, 72), st.booleans())
def test_no_batch_is_split_whose_known_lengths_would_not_be(lengths: list[int], room: int, invariant: bool):
    longest, together = known_lengths(torch.tensor([0, *itertools.accumulate(lengths)]), 64, tokens(sum(lengths)))
    chunks = [-(-length // 64) for length in lengths]
    assert (longest >= max(chunks) and together <= sum(chunks)) or max(chunks) == 0
    if not gains(longest, longest if invariant else max(longest, together), room, COSTS):
        assert _parts(chunks, room, batch_invariant=invariant) == [1] * len(lengths)


def test_unknown_lengths():
    """Nothing known, or nothing that the validation will let pass."""
    offsets, q = torch.tensor([0, 64, 200]), tokens(200)
    assert known_lengths(offsets, 64, q) == (4, 4) and known_lengths(offsets.int(), 32, q) == (8, 4)
    unknown = [None, [0, 64], offsets.float(), offsets[None], offsets.to("meta"), offsets[:1]]
    assert all(known_lengths(x, 64, q) == (0, 0) for x in unknown)
    assert known_lengths(offsets, "64", q) == known_lengths(offsets, 64, None) == (0, 0)
    assert all(known_lengths(x, 64, q) is None for x in (offsets.flip(0), offsets + 1, offsets * 2))


def tokens(T: int) -> torch.Tensor:
    return torch.empty(1, T, 1, 64, device="meta")


@pytest.mark.parametrize(("lengths", "segments"), [((1024,) * 4, False), ((128, 9000), True)], ids=str)
def test_a_call_that_knows_its_lengths_asks_for_no_needless_plan(lengths: tuple[int, ...], segments: bool):
    """Without them it must be ready for one sequence of all tokens."""
    offsets = torch.tensor([0, *itertools.accumulate(lengths)])
    x = torch.zeros(1, sum(lengths), 4, 128, dtype=torch.bfloat16)
    call = {"q": x, "k": x, "v": x, "g": x, "beta": x[..., 0], "cu_seqlens": offsets, "safe_gate": True}
    unknown, _ = check(fd.chunk_kda, **call)
    known, _ = check(fd.chunk_kda, **call, cu_seqlens_cpu=offsets)
    assert segments_of_call(unknown, 8, COSTS) > 0
    assert (segments_of_call(known, 8, COSTS) > 0) == segments


def test_split_can_be_turned_off_and_forced():
    assert _parts([2048, 3], 8, split=1) == [1, 1]
    assert _parts([2048, 3, 0], 8, split=5) == [5, 3, 1]


def test_explain_says_the_plan():
    explanation = fd.explain(fd.chunk_kda, **split_call([200, 31, 0]), split=5)
    assert explanation.segments == (1, 1, 1) and "sequences stay whole" in str(explanation)
    explanation = replace(explanation, segments=(5, 1, 1))
    assert "segments of the sequences: 5, 1, 1" in str(explanation)


@pytest.mark.parametrize("name", ["hopper", "triton"])
@pytest.mark.parametrize(("lengths", "kept"), [((32768,), True), ((65,) * 500 + (4096,), False)])
def test_a_forward_leaves_its_segments_if_they_are_small(name: str, lengths: tuple[int, ...], kept: bool):
    """To its backward pass, which then finds none of them again."""
    call = meta_call(
        Case("long", "", H=4, HV=4, K=128, V=128, T=sum(lengths), lengths=lengths, state=None), torch.bfloat16
    )
    problem, t = check(fd.chunk_kda, **call, split="auto")
    forward = BUILD[name](replace(problem, requires_grad=True), t, 90)
    segments = forward.outputs.get("segments")
    assert (segments is not None) is kept
    assert segments is None or segments.nbytes <= t.v.nbytes
    counts = []
    for left in (None, segments):
        back, back_t = backward_of(replace(problem, requires_grad=True), replace(t, segments=left))
        names = [launch.kernel.__name__ for launch in BUILD[name](back, back_t, 90).launches]
        counts.append([names.count(f"{stage}_kernel") for stage in ("transitions", "compose", "recurrence")])
    assert counts == [[1, 2, 1], [0, 1, 1] if kept else [1, 2, 1]]
