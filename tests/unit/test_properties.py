"""Laws that hold for every input, drawn by hypothesis: shapes, lengths, gates, layouts and split points."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

import flashdelta as fd

from ..support.cases import FP32, Case
from ..support.inputs import TOKEN_TENSORS, make_call, narrow
from ..support.oracle import TOLERANCE, assert_close, same_bits, state_tolerance

FP64 = torch.float64

GATES = {
    "none": {"gate": "none"},
    "none, promised": {"gate": "none", "safe": True},
    "softplus": {"gate": "softplus"},
    "lower_bound": {"gate": "lower_bound", "lower_bound": -5.0},
    "logsigmoid": {"gate": "logsigmoid"},
}


@st.composite
def cases(draw: st.DrawFn, packed: bool | None = None, max_tokens: int = 150) -> Case:
    """Any small call. K and V differ, so that a state of the wrong layout can't pass."""
    K, V = draw(st.sampled_from([(32, 64), (64, 32)]))
    H = draw(st.integers(1, 3))
    case = Case(
        name="drawn",
        why="drawn by hypothesis",
        B=draw(st.integers(1, 3)),
        T=draw(st.integers(0, max_tokens)),
        H=H,
        HV=H * draw(st.integers(1, 3)),
        K=K,
        V=V,
        **GATES[draw(st.sampled_from(sorted(GATES)))],
        beta=draw(st.sampled_from(["value", "logit", "double_logit"])),
        l2norm=draw(st.booleans()),
        chunk_size=draw(st.sampled_from([32, 64])),
        state=draw(st.sampled_from([None, FP32, FP64])),
        v_first=draw(st.booleans()),
    )
    if draw(st.booleans()) if packed is None else packed:
        lengths = draw(st.lists(st.integers(0, max_tokens // 2), max_size=4))
        case = replace(case, B=1, lengths=tuple(lengths))
    return case


@st.composite
def calls(draw: st.DrawFn, dtype: torch.dtype = FP64, **options) -> tuple[Case, dict]:
    case = draw(cases(**options))
    if dtype != FP64 and case.state == FP64:
        case = replace(case, state=FP32)
    return case, make_call(case, dtype, seed=draw(st.integers(0, 9)))


def assert_same(got: tuple, want: tuple) -> None:
    """Both results to float64 rounding (a state in float32 to one rounding of it)."""
    assert_close("o", got[0], want[0], TOLERANCE[FP64])
    assert_close("final_state", got[1], want[1], 2 * state_tolerance(FP64, got[1].dtype))


def in_pieces(call: dict, cuts: list[int], state: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """`o` and the final state of a call cut at these tokens, which carries the state from piece to piece."""
    outputs = []
    for start, stop in itertools.pairwise([0, *cuts, call["q"].shape[1]]):
        o, state = fd.chunk_kda(**narrow(call, start, stop), initial_state=state)
        outputs.append(o)
    return torch.cat(outputs, dim=1), state


@given(calls(packed=False), st.data())
def test_split_anywhere_with_carried_state_is_the_whole(drawn: tuple[Case, dict], data: st.DataObject):
    """Chunked prefill: any number of pieces, cut at chunk boundaries or not."""
    case, call = drawn
    cuts = sorted(data.draw(st.lists(st.integers(0, case.T), min_size=1, max_size=3)))
    whole = fd.chunk_kda(**call)
    state = call.get("initial_state")
    o, state = in_pieces(call, cuts, state if state is None else state.double())
    assert_same((o, state.to(whole[1].dtype)), whole)


@given(calls(dtype=FP32, packed=True), st.data())
def test_a_packed_sequences_bits_do_not_depend_on_its_neighbours(drawn: tuple[Case, dict], data: st.DataObject):
    """Every sequence again among others: shuffled, some dropped, new ones between."""
    case, call = drawn
    picked = data.draw(st.permutations(range(len(case.lengths))))[: data.draw(st.integers(0, len(case.lengths)))]
    stranger = make_call(replace(case, lengths=(data.draw(st.integers(0, 40)),)), FP32, seed=99)
    offsets = call["cu_seqlens"].tolist()
    pieces = [stranger, *({**narrow(call, offsets[n], offsets[n + 1])} for n in picked), stranger]
    again = call | {name: torch.cat([piece[name] for piece in pieces], dim=1) for name in TOKEN_TENSORS}
    lengths = [piece["q"].shape[1] for piece in pieces]
    again["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0)
    if "initial_state" in call:
        states = [stranger["initial_state"], call["initial_state"][list(picked)], stranger["initial_state"]]
        again["initial_state"] = torch.cat(states)
    o, state = fd.chunk_kda(**call)
    o_again, state_again = fd.chunk_kda(**again)
    for i, n in enumerate(picked, start=1):
        start = int(again["cu_seqlens"][i])
        there = o_again[:, start : start + case.lengths[n]]
        assert same_bits(there, o[:, offsets[n] : offsets[n + 1]])
        assert same_bits(state_again[i], state[n])


@given(calls(dtype=FP32, packed=False), st.data())
def test_a_batch_rows_bits_do_not_depend_on_its_neighbours(drawn: tuple[Case, dict], data: st.DataObject):
    case, call = drawn
    rows = data.draw(st.lists(st.integers(0, case.B - 1), min_size=1, max_size=4))
    per_row = [*TOKEN_TENSORS, *(["initial_state"] if "initial_state" in call else [])]
    o, state = fd.chunk_kda(**call)
    o_again, state_again = fd.chunk_kda(**call | {name: call[name][rows] for name in per_row})
    assert same_bits(o_again, o[rows])
    assert same_bits(state_again, state[rows])
