"""The Triton kernels themselves, run on the CPU by Triton's interpreter: cases of the table, against the truth.

float32 and float16: the interpreter's `tl.dot` gets bfloat16 wrong. Results and scratch memory start as NaN.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashdelta as fd

from ..support.cases import (
    BY_NAME,
    CASES,
    FP16,
    FP32,
    HARD_CASES,
    HEAD_CASES,
    LAYOUT_CASES,
    LENGTH_CASES,
    Case,
    case_id,
    named,
)
from ..support.inputs import TOKEN_TENSORS, make_call, sequence_calls
from ..support.oracle import (
    TOLERANCE,
    as_recurrent,
    assert_close,
    assert_right,
    chunked_truth,
    conditioning,
    covered_tokens,
    poisoned_memory,
    same_bits,
)
from ..support.readouts import OPERATORS, check_layer, check_readout

BOTH = [fd.chunk_kda, fd.fused_recurrent_kda]


ONE_CHUNK = 20
"""Tokens of cases whose point is the same in every chunk: heads, layouts, states, options."""


def small(case: Case) -> Case:
    """The case on as few chunks and heads as show the thing: the interpreter takes a third of a second for each of them."""
    about_heads = case in HEAD_CASES or case in LAYOUT_CASES or case.H != case.HV
    heads = {"B": min(case.B, 2)} if about_heads else {"B": min(case.B, 2), "H": 1, "HV": 1}
    across = case in HARD_CASES or case.name in ("decay", "softplus", "bounded", "logsigmoid")
    most = 131 if case in LENGTH_CASES or case.h else 66 if across else ONE_CHUNK
    return replace(case, T=min(case.T, most), lengths=case.lengths and case.lengths[:5], **heads)


def few_tokens(case: Case) -> Case:
    """For the token recurrence, which has no chunk boundary to cross."""
    case = small(case)
    return replace(case, T=min(case.T, 9), lengths=case.lengths and tuple(min(n, 9) for n in case.lengths))


IN_FLOAT32 = {"wide_gate", "wide_decay"}
"""The same as `bounded` and as no gate at all where all inputs are float32."""

ALIKE = {
    *("T2", "T15", "T16", "T31", "T32", "T33", "T63", "T64", "T127", "T128"),
    *("gva1", "gva4", "gva8", "packed_one", "packed_none", "pinned", "pinned_decay", "same_keys_2", "V32_unsafe"),
    *("decay_promised", "softplus_no_bias", "bounded_no_A", "bound_half", "logsigmoid_promised", "beta_logit"),
    *("state_bf16_v_first", "packed_bf16_state", "head_first", "odd_offset", "fused_packed", "beta_zero"),
    *("g_mixed", "g-1e4", "forget", "bounded_saturated", "zero_rows_unbounded", "key_norms_unbounded"),
}
"""Kernels run as for a neighbour: blocks are cut by one mask, the ratio of heads and lengths are numbers at run time, and a
case that differs in two ways from another stands for both. The GPU tier has all."""

SMALL = [small(case) for case in CASES if case.name not in IN_FLOAT32 | ALIKE]
BY_TOKEN = [
    few_tokens(case)
    for case in named(
        *("T0", "T17", "B0", "B3", "decay", "softplus_broad", "bounded", "logsigmoid", "beta_double", "no_l2norm"),
        *("scale", "gva2", "V32", "state_v_first", "state_bf16", "packed", "packed_unused", "fused", "expanded"),
        *("g-50", "softplus_saturated", "zero_rows"),
    )
]
"""Without those of which only chunks and promises about decays, which it does not have, are of interest."""

IN_HALF = [
    small(case)
    for case in named(
        *("T65", "chunk32", "decay", "softplus", "wide_gate", "gva2", "state_bf16", "packed_int32", "same_keys"),
        *("g_alternating", "key_norms"),
    )
]
BY_TOKEN_IN_HALF = [few_tokens(case) for case in named("bounded", "wide_gate", "softplus", "state_bf16")]
"""It computes in float32 whatever the inputs are, so hard decays are the same in both."""


def call_for(op, case: Case, dtype: torch.dtype) -> dict:
    call = make_call(case, dtype) | {"backend": "triton"}
    return call if op is fd.chunk_kda else as_recurrent(call)


def check(op, case: Case, dtype: torch.dtype) -> None:
    call = call_for(op, case, dtype)
    call["out"] = torch.full(call["v"].shape, torch.nan, dtype=dtype)
    with poisoned_memory():
        results = op(**call)
    assert results[0] is call["out"]
    factor = conditioning(case, dtype) if op is fd.chunk_kda else 1.0
    assert_right(lambda **_: results[:2], call, factor=factor)
    if case.h and op is fd.chunk_kda:
        assert_close("h", results[2], chunked_truth(call)[2], TOLERANCE[dtype])


@pytest.mark.parametrize("case", SMALL, ids=case_id)
def test_chunk_fp32(case: Case):
    check(fd.chunk_kda, case, FP32)


WIDE = [replace(BY_NAME["state"], name=f"K{K} V{V}", K=K, V=V, H=1, HV=1, T=20) for K, V in ((128, 32), (32, 128))]
OTHERS = {
    (fd.chunk_kda, FP16): IN_HALF,
    (fd.chunk_kda, FP32): WIDE,
    (fd.fused_recurrent_kda, FP32): BY_TOKEN + WIDE,
    (fd.fused_recurrent_kda, FP16): BY_TOKEN_IN_HALF,
}


@pytest.mark.parametrize(
    ("op", "dtype", "case"),
    [(*kind, case) for kind, cases in OTHERS.items() for case in cases],
    ids=lambda x: getattr(x, "__name__", str(getattr(x, "name", x))),  # an address differs from worker to worker
)
def test_others(op, dtype: torch.dtype, case: Case):
    check(op, case, dtype)


# ---- laws, to the bit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("case", named("packed_gva", "packed_chunk32"), ids=case_id)
def test_packed_gives_each_sequences_own_bits(case: Case, op):
    call = call_for(op, few_tokens(replace(case, h=False)) if op is not fd.chunk_kda else small(case), FP32)
    o, state = op(**call)[:2]
    alone = [op(**one) for one in sequence_calls(call)]
    assert same_bits(o[:, covered_tokens(call)], torch.cat([one[0] for one in alone], dim=1))
    assert same_bits(state, torch.cat([one[1] for one in alone]))


@pytest.mark.parametrize("op", BOTH)
def test_nan_stays_in_its_sequence(op):
    """Of all inputs at once: whichever leaks is seen."""
    case = replace(BY_NAME["packed"], lengths=(17, 20, 35), h=False, H=1, HV=1)
    call = call_for(op, case, FP32)
    o, state = op(**call)
    spoiled = call | {name: call[name].clone() for name in (*TOKEN_TENSORS, "initial_state")}
    spoiled["initial_state"][1] = torch.nan
    for name in TOKEN_TENSORS:
        spoiled[name][:, 17:37] = torch.nan
    o_spoiled, state_spoiled = op(**spoiled)
    for tokens in (slice(0, 17), slice(37, 72)):
        assert same_bits(o_spoiled[:, tokens], o[:, tokens])
    for n in (0, 2):
        assert same_bits(state_spoiled[n], state[n])
    assert not same_bits(o_spoiled, o)


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("case", named("packed_int32", "fused", "state_strided", "last_dim_strided"), ids=case_id)
def test_inputs_are_never_written(case: Case, op):
    lengths = case.lengths and (3, 14)
    call = call_for(op, replace(case, B=1, T=17, lengths=lengths, H=1, HV=1), FP32)
    before = {name: x.clone() for name, x in call.items() if isinstance(x, torch.Tensor)}
    op(**call)
    for name, x in before.items():
        assert same_bits(call[name], x), name


@pytest.mark.parametrize("op", BOTH)
def test_out_may_be_a_strided_view_and_nothing_beside_it_is_written(op):
    call = call_for(op, replace(BY_NAME["B3"], B=2, T=17), FP32)
    want, _ = op(**call)
    buffer = torch.full((2, 17 + 15, 2, 2, 64), torch.nan)
    o, _ = op(**call, out=buffer[:, :17, :, 1])
    assert same_bits(o, want)
    assert buffer[:, 17:].isnan().all()
    assert buffer[:, :, :, 0].isnan().all()


BAD_OFFSETS = [(0, 50, 20, 70), (0, 2**40, -(2**40), 2**62), (-4, 40, 710)]


# both clamp offsets by one function; the token recurrence takes long over so many tokens
@pytest.mark.parametrize(
    ("op", "values"),
    [*((fd.chunk_kda, values) for values in BAD_OFFSETS), (fd.fused_recurrent_kda, BAD_OFFSETS[1])],
    ids=lambda x: getattr(x, "__name__", str(x)),  # an address differs from worker to worker
)
def test_bad_offsets_touch_nothing_outside_the_tensors(op, values: tuple[int, ...]):
    """`out` lies amid zeros that must stay. (Reads outside would crash on a GPU: `gpu/test_hazards.py` looks there.)"""
    call = call_for(op, replace(BY_NAME["bounded"], H=1, HV=1), FP32)
    guarded = torch.zeros(1, 70 + 140, 1, 64)
    _, state = op(**call, cu_seqlens=torch.tensor(values), out=guarded[:, 70:140])
    assert state.shape[0] == len(values) - 1
    assert guarded[:, :70].eq(0).all() and guarded[:, 140:].eq(0).all()


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.__name__)
def test_a_readout_past_float16(op):
    check_readout(op, FP16, "triton")


@pytest.mark.parametrize("tokens", [4, 70])
def test_a_layer_in_float16(tokens: int):
    check_layer(tokens, "triton")
