"""The portable kernels, interpreted: cases of the table in float32 and float16, against the truth. Results and scratch memory
start as NaN."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch

import flashdelta as fd

from ..gpu.calls import check_scalar_decay
from ..support import scalar_decay
from ..support.cases import BY_NAME, CASES, FP16, FP32, Case, case_id, named
from ..support.gradients import gradients, incoming, relative_errors, true_gradients
from ..support.inputs import TOKEN_TENSORS, make_call
from ..support.oracle import TOLERANCE, as_recurrent, assert_right, check_h, conditioning, poisoned_memory, same_bits
from ..support.readouts import OPERATORS, check_layer, check_readout
from .checks import hold_bits_alone, hold_nan_inside

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("exact_products")]

HALF = named(
    *("T65", "chunk32", "decay", "softplus", "wide_gate", "gva2", "state_bf16", "packed_int32", "same_keys"),
    *("g_alternating", "key_norms"),
)
WIDE = [replace(BY_NAME["state"], name=f"K{K} V{V}", K=K, V=V, H=1, HV=1, T=20) for K, V in ((128, 32), (32, 128))]


def few_tokens(case: Case) -> Case:
    """For the token recurrence, which has no chunk boundary to cross."""
    return replace(case, T=min(case.T, 9), lengths=case.lengths and tuple(min(n, 9) for n in case.lengths))


def distinct(cases: Iterable[Case]) -> Iterable[Case]:
    """Without those that differ from another in their name."""
    return {replace(case, name="", why=""): case for case in cases}.values()


KINDS = {
    (fd.chunk_kda, FP32): [*CASES, *WIDE],
    (fd.chunk_kda, FP16): HALF,
    (fd.fused_recurrent_kda, FP32): [*distinct(map(few_tokens, CASES)), *WIDE],
    # which computes in float32 whatever the inputs are
    (fd.fused_recurrent_kda, FP16): [*map(few_tokens, named("bounded", "wide_gate", "softplus", "state_bf16"))],
}


def call_for(op, case: Case, dtype: torch.dtype) -> dict:
    call = make_call(case, dtype) | {"backend": "triton"}
    return call if op is fd.chunk_kda else as_recurrent(call)


def check(op, case: Case, dtype: torch.dtype) -> None:
    """Into memory of the caller's, a strided view beside which nothing is written; nor are inputs."""
    call = call_for(op, case, dtype)
    B, T, *heads, V = call["v"].shape
    buffer = torch.full((B, T + 15, *heads, 2, V), torch.nan, dtype=dtype)
    before = {name: x.clone() for name, x in call.items() if isinstance(x, torch.Tensor)}
    call["out"] = buffer[:, :T, :, 1]
    shape, dtypes = (case.sequences, *case.state_shape), {"dtype": case.state or FP32}
    final = {"final_state": torch.full(shape, torch.nan, **dtypes)} if case.final else {}
    with poisoned_memory():
        results = op(**call, **final)
    assert results[0] is call["out"] and results[1] is final.get("final_state")
    assert all(same_bits(call[name], x) for name, x in before.items())
    assert buffer[:, T:].isnan().all() and buffer[:, :, :, 0].isnan().all()
    factor = conditioning(case, dtype) if op is fd.chunk_kda else 1.0
    assert_right(lambda **_: results[:2], call, factor=factor)
    if case.h and op is fd.chunk_kda:
        check_h(call, results[2], TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("case", "op", "dtype"),
    [(case, *kind) for kind, cases in KINDS.items() for case in cases],
    ids=lambda x: getattr(x, "name", getattr(x, "__name__", str(x))),
)
def test_cases(case: Case, op, dtype: torch.dtype):
    check(op, case, dtype)


@pytest.mark.parametrize("case", scalar_decay.CASES, ids=case_id)
def test_one_decay_per_head(case: Case):
    check_scalar_decay(case, FP32, "triton", "cpu")


@pytest.mark.parametrize("op", [fd.chunk_kda, fd.fused_recurrent_kda], ids=lambda op: op.__name__)
def test_a_sequence_is_its_own(op):
    """Its bits are those that it has alone, and NaN of another does not reach it."""
    case = replace(BY_NAME["packed"], lengths=(17, 20, 35), h=False, H=1, HV=2)
    call = call_for(op, case, FP32)
    hold_bits_alone(call, range(3), op)
    hold_nan_inside(call, (*TOKEN_TENSORS, "initial_state"), op)


@pytest.mark.parametrize("op", OPERATORS, ids=lambda op: op.__name__)
def test_a_readout_past_float16(op):
    check_readout(op, FP16, "triton")


@pytest.mark.parametrize("tokens", [4, 70])
def test_a_layer_in_float16(tokens: int):
    check_layer(tokens, "triton")


def test_chunks_and_their_gradients():
    case = replace(BY_NAME["packed_unused"], lengths=(0, 17), unused=2, H=1, HV=2)
    call = make_call(case) | {"backend": "triton"}
    with poisoned_memory():
        assert_right(fd.chunk_kda, call)
        found = gradients(call, *incoming(call))
    errors = relative_errors(found, true_gradients(call, *incoming(call)))
    assert max(errors.values()) < 3e-4, errors
