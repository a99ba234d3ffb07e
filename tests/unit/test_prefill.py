"""`kda_prefill` on the CPU: the reference against a definition written anew, and the operator."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashdelta as fd

from ..fuzz.truth import claims_of
from ..support.cases import Case, case_id
from ..support.held import hold_claims
from ..support.oracle import same_bits
from ..support.prefills import CASES, INPUTS, LOGITS, PLAIN, SIZES, hold, prefill_call, size_id, sized, truth


def hold_truth(call: dict) -> None:
    """The reference in float64."""
    hold_claims(claims_of("kda_prefill", call), dict(zip("owu", truth(call))), 1e-10, lambda dtype: 1e-10)


@pytest.mark.parametrize("size", SIZES, ids=size_id)
@pytest.mark.parametrize("case", [replace(PLAIN, B=2, T=75), LOGITS], ids=case_id)
def test_truth_is_the_definition(case: Case, size: tuple[int, int, int]):
    hold_truth(prefill_call(sized(case, size)))


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_reference_backend(case: Case):
    call = prefill_call(case)
    hold_truth(call)
    hold(case, fd.kda_prefill(**call), truth(call))


def test_public_function_and_operator_are_one():
    call = prefill_call(PLAIN)
    tensors = [call[name] for name in INPUTS]
    for got, want in zip(torch.ops.kda_prefill.forward(*tensors, 64), fd.kda_prefill(*tensors)):
        assert same_bits(got, want)
