"""`fd.kernels.chunk_bwd_wy_dqkg` without a GPU: the reference is the gradient of the definition."""

from __future__ import annotations

import pytest
import torch

import flashdelta as fd

from ..support.cases import case_id
from ..support.wy import CASES, WyCase, by_definition, errors, make_wy

wy = fd.kernels.chunk_bwd_wy_dqkg


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_reference_is_the_gradient_of_the_definition(case: WyCase):
    call = make_wy(case, torch.float64)
    found = wy(**call)
    assert all(error <= 1e-12 for error in errors(found, by_definition(call)).values())
    assert [x.dtype for x in found] == [torch.float64] * 6
