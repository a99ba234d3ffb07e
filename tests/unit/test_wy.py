"""`fd.kernels.chunk_bwd_wy_dqkg` without a GPU: the reference is the gradient of the definition."""

from __future__ import annotations

import pytest
import torch

import flashdelta as fd

from ..fuzz.truth import claims_of
from ..support.cases import case_id
from ..support.held import hold_claims
from ..support.wy import CASES, NAMES, WyCase, make_wy

wy = fd.kernels.chunk_bwd_wy_dqkg


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_reference_is_the_gradient_of_the_definition(case: WyCase):
    call = make_wy(case, torch.float64)
    found = wy(**call)
    hold_claims(claims_of("chunk_bwd_wy_dqkg", call), dict(zip(NAMES, found)), 0.0, lambda dtype: 1e-12)
    assert [x.dtype for x in found] == [torch.float64] * 6
