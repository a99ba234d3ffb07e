"""`fd.gated_rms_norm` and `fd.short_convolution` without a GPU: the reference, the operators, the launch cache."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import flashdelta as fd

from ..support.layer import (
    CONVOLUTION_CASES,
    NORM_BY_NAME,
    NORM_CASES,
    ConvolutionCase,
    NormCase,
    leaves_of,
    make_convolution,
    make_norm,
)
from ..support.layer_checks import check_convolution, check_norm

pytestmark = pytest.mark.usefixtures("as_on_gpu")


# ---- the reference ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", NORM_CASES, ids=str)
def test_norm_is_that_of_each_row(case: NormCase):
    check_norm(case, torch.float64)


@pytest.mark.parametrize("case", CONVOLUTION_CASES, ids=str)
def test_convolution_is_that_of_each_token(case: ConvolutionCase):
    check_convolution(case, torch.float64)


@pytest.mark.parametrize("case", [NORM_BY_NAME[name] for name in ("silu", "fused", "one", "none")], ids=str)
def test_gradients_of_the_norm(case: NormCase):
    call = make_norm(case, torch.float64)
    leaves = leaves_of(call)

    def result(*x: Tensor) -> Tensor:
        return fd.gated_rms_norm(**call | dict(zip(leaves, x)))

    # fast: along random directions, as thousands of elements are not worth a call each
    assert torch.autograd.gradcheck(result, list(leaves.values()), fast_mode=True)


SHORT = {"D": 3, "T": 6}
CHECKED = [
    ConvolutionCase("checked", "all inputs", B=2, state=0, bias=True, **SHORT),
    ConvolutionCase("checked_packed", "packed", lengths=(2, 0, 5, 1), state=1, W=3, D=3, padding=1),
    ConvolutionCase("checked_linear", "no activation", activation=None, W=2, **SHORT),
]


@pytest.mark.parametrize("case", CHECKED, ids=str)
def test_gradients_of_the_convolution(case: ConvolutionCase):
    call = make_convolution(case, torch.float64)
    leaves = leaves_of(call)

    def results(*x: Tensor) -> tuple[Tensor, Tensor | None]:
        return fd.short_convolution(**call | dict(zip(leaves, x)))

    assert torch.autograd.gradcheck(results, list(leaves.values()))
