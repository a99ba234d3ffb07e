"""The reference: its token recurrence against a numpy loop, its chunked form against its recurrence, autograd."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import flashdelta as fd

from ..full import FULL, paired
from ..support.cases import BF16, BY_NAME, CASES, FP32, PACKED_CASES, WITH_GRADIENTS, Case, case_id
from ..support.gradients import gradients, incoming
from ..support.held import run_held
from ..support.inputs import TOKEN_TENSORS, make_call
from ..support.oracle import NO_H, TOLERANCE, as_recurrent, assert_close, assert_right, conditioning, float64, same_bits

FP64 = torch.float64
both = pytest.mark.parametrize("op", [fd.chunk_kda, fd.fused_recurrent_kda])


# ---- the definition itself -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [c for c in CASES if c.tokens < 1000], ids=case_id)
def test_recurrence_is_the_papers(case: Case):
    """As the fuzzer has it, head by head and token by token, which shares no code with the library."""
    run_held(fd.fused_recurrent_kda, as_recurrent(make_call(case, FP64)), TOLERANCE[FP64])


# ---- chunked = recurrent -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "dtype"),
    [*((c, FP64) for c in CASES), *paired(CASES, (FP32, BF16, torch.float16))],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_chunked_is_the_recurrence(case: Case, dtype: torch.dtype):
    assert_right(fd.chunk_kda, make_call(case, dtype) | NO_H, factor=conditioning(case, dtype))


# ---- states --------------------------------------------------------------------------------------------------------


WITH_H = [replace(BY_NAME["h"], B=2, T=T, v_first=T > 64) for T in (1, 64, 150)] + [
    c for c in PACKED_CASES if c.lengths
]


@pytest.mark.parametrize("chunk_size", [32, 64])
@pytest.mark.parametrize("case", WITH_H, ids=case_id)
def test_h_is_the_state_before_every_chunk(case: Case, chunk_size: int):
    """States of packed sequences in order, and zeros where the host does not know how many chunks there are."""
    call = make_call(replace(case, h=True, chunk_size=chunk_size), FP64)
    h = run_held(fd.chunk_kda, call, TOLERANCE[FP64])[2]
    if case.lengths:
        exact = fd.chunk_kda(**call, cu_seqlens_cpu=call["cu_seqlens"].cpu())[2]
        assert h.shape[1] == case.tokens // chunk_size + case.sequences
        assert exact.shape[1] == sum(-(-n // chunk_size) for n in case.lengths)
        assert same_bits(exact, h[:, : exact.shape[1]])


# ---- NaN stays in its sequence -------------------------------------------------------------------------------------

ISOLATED = {
    "side by side": replace(BY_NAME["B3"], T=40, H=1, HV=2),
    "packed": replace(BY_NAME["packed"], lengths=(17, 20, 0, 35), h=False, H=1, HV=2),
}


def _of_sequence(call: dict, name: str, x: Tensor, n: int) -> Tensor:
    """The part of `x`, shaped like the argument `name`, that belongs to sequence `n`."""
    if name == "initial_state" or "cu_seqlens" not in call:
        return x[n]
    start, stop = call["cu_seqlens"][n : n + 2].tolist()
    return x[0, start:stop]


@both
@pytest.mark.parametrize("name", [*TOKEN_TENSORS, "initial_state"])
@pytest.mark.parametrize("layout", ISOLATED)
def test_nan_stays_in_its_sequence(layout: str, name: str, op):
    call = as_recurrent(make_call(ISOLATED[layout], FP64))
    clean_o, clean_state = op(**call)
    poisoned = call | {name: call[name].clone()}
    _of_sequence(call, name, poisoned[name], 1).fill_(torch.nan)
    o, state = op(**poisoned)
    assert _of_sequence(call, "v", o, 1).isnan().any()
    for n in range(len(state)):
        if n != 1:
            assert same_bits(_of_sequence(call, "v", o, n), _of_sequence(call, "v", clean_o, n))
            assert same_bits(state[n], clean_state[n])


# ---- gradients -----------------------------------------------------------------------------------------------------

SMALL = [case for case in CASES if 0 < case.tokens < 200 and case.layout == "dense" and not case.h and case.sequences]
GRADIENT_CASES = [case for case in SMALL if FULL or case in WITH_GRADIENTS]


@pytest.mark.parametrize("case", GRADIENT_CASES, ids=case_id)
def test_gradients_of_chunked_and_recurrent_agree(case: Case):
    """Finite too, also where gates saturate and rows are zero."""
    call = make_call(case, FP64)
    chunked = gradients(call, *incoming(call))
    recurrent = gradients(as_recurrent(call), *incoming(call), fd.fused_recurrent_kda)
    for name, want in recurrent.items():
        assert_close(f"grad of {name}", chunked[name], want, 1e-9)


@pytest.mark.parametrize(
    ("op", "case"),
    [
        *((fd.fused_recurrent_kda, case) for case in WITH_GRADIENTS),
        # others agree with the recurrence
        *((fd.chunk_kda, case) for case in WITH_GRADIENTS if FULL or case not in GRADIENT_CASES),
    ],
    ids=lambda x: getattr(x, "name", None) or x.__name__,
)
def test_gradcheck(op, case: Case):
    """Against finite differences of the forward, in a random direction (`fast_mode`), chunks' across a boundary."""
    T = 35 if op is fd.chunk_kda else 6
    lengths = case.lengths and (4, 0, T - 4)
    case = replace(case, V=32, T=T, lengths=lengths, unused=3 * bool(case.unused), chunk_size=32, h=False)
    call = float64(make_call(case, FP64))
    call = call if op is fd.chunk_kda else as_recurrent(call)
    names = [name for name, x in call.items() if isinstance(x, Tensor) and x.is_floating_point()]

    def function(*tensors: Tensor) -> list[Tensor]:
        return [x for x in op(**call | dict(zip(names, tensors))) if x is not None]

    leaves = tuple(call[name].detach().clone().requires_grad_() for name in names)
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True, check_undefined_grad=FULL)
