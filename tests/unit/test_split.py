"""Segments of long sequences, on the reference: maps, plans, and a split forward against the whole one, in float64."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flashdelta as fd
from flashdelta.problem.split import AUTO, gains, known_lengths, most_segments, parts_of_sequences, segments_of_call
from flashdelta.reference import chunk_kda
from flashdelta.reference.chunk import prepare, segment_transition
from flashdelta.reference.split import cut, identity
from flashdelta.runtime.call import check

from ..compile.variants import BUILD, backward_of
from ..support.cases import Case
from ..support.gradients import gradients, incoming
from ..support.inputs import meta_call
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


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 999), st.tuples(*[st.integers(1, 3)] * 3))
def test_maps_compose_in_any_grouping(seed: int, counts: tuple[int, int, int]):
    HV, K, V = 2, 8, 4
    source = torch.Generator().manual_seed(seed)
    chunks = sum(counts)
    k = torch.nn.functional.normalize(torch.randn(chunks, 1, HV, 16, K, generator=source, dtype=FP64), dim=-1)
    g = -torch.rand(chunks, 1, HV, 16, K, generator=source, dtype=FP64)
    beta = torch.rand(chunks, 1, HV, 16, generator=source, dtype=FP64)
    v = torch.randn(chunks, 1, HV, 16, V, generator=source, dtype=FP64)
    prepared = [prepare(k[i], k[i], g[i], beta[i]) for i in range(chunks)]
    cuts = [0, counts[0], counts[0] + counts[1], chunks]
    a, b, c = (segment_transition(prepared[i:j], v[i:j]) for i, j in itertools.pairwise(cuts))
    left, right, whole = c.after(b).after(a), c.after(b.after(a)), segment_transition(prepared, v)
    S = torch.randn(HV, K, V, generator=source, dtype=FP64)
    for found in (left, right):
        _close(found.M, whole.M)
        _close(found.b, whole.b)
    _close(c(b(a(S))), whole(S))
    _close(identity(HV, K, V, S)(S), S)


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
