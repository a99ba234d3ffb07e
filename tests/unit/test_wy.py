"""`fd.kernels.chunk_bwd_wy_dqkg` without a GPU: the reference, the operator, refusals, and the choice of a backend."""

from __future__ import annotations

import pytest
import torch

import flashdelta as fd

from ..support.cases import case_id
from ..support.wy import BY_NAME, CASES, WyCase, by_definition, errors, make_wy

wy = fd.kernels.chunk_bwd_wy_dqkg
PLAIN = BY_NAME["plain"]


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_reference_is_the_gradient_of_the_definition(case: WyCase):
    call = make_wy(case, torch.float64)
    found = wy(**call)
    assert all(error <= 1e-12 for error in errors(found, by_definition(call)).values())
    assert [x.dtype for x in found] == [torch.float64] * 6


def test_what_the_docstring_says_is_not_looked_at():
    call = make_wy(BY_NAME["packed"], torch.float64)
    want = wy(**call)
    call["A"] = torch.where(call["A"] == 0.0, torch.nan, call["A"])
    for name in ("h", "dh"):
        call[name] = torch.cat([call[name], call[name].new_full((1, 2, *call[name].shape[2:]), torch.nan)], dim=1)
    assert all(torch.equal(x, y) for x, y in zip(wy(**call), want))
