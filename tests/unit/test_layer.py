"""`fd.gated_rms_norm` and `fd.short_convolution` without a GPU: the reference, the operators, the launch cache."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import flashdelta as fd

from ..support import layer as layers
from ..support.layer_checks import check_convolution, check_norm

pytestmark = pytest.mark.usefixtures("as_on_gpu")


# ---- the reference ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", layers.NORM_CASES, ids=str)
def test_norm_is_that_of_each_row(case: layers.NormCase):
    check_norm(case, torch.float64)


@pytest.mark.parametrize("case", layers.CONVOLUTION_CASES, ids=str)
def test_convolution_is_that_of_each_token(case: layers.ConvolutionCase):
    check_convolution(case, torch.float64)


SHORT = {"D": 3, "T": 6}
CHECKED = [
    *((fd.gated_rms_norm, layers.make_norm, layers.NORM_BY_NAME[name]) for name in ("silu", "fused", "one", "none")),
    *(
        (fd.short_convolution, layers.make_convolution, case)
        for case in (
            layers.ConvolutionCase("checked", "all inputs", B=2, state=0, bias=True, **SHORT),
            layers.ConvolutionCase("checked_packed", "packed", lengths=(2, 0, 5, 1), state=1, W=3, D=3, padding=1),
            layers.ConvolutionCase("checked_linear", "no activation", activation=None, W=2, **SHORT),
        )
    ),
]


@pytest.mark.parametrize(("op", "make", "case"), CHECKED, ids=lambda x: getattr(x, "__name__", str(x)))
def test_gradients(op: Callable, make: Callable, case: layers.NormCase | layers.ConvolutionCase):
    call = make(case, torch.float64)
    leaves = layers.leaves_of(call)
    # fast: along random directions, as thousands of elements are not worth a call each
    fast = op is fd.gated_rms_norm
    assert torch.autograd.gradcheck(lambda *x: op(**call | dict(zip(leaves, x))), [*leaves.values()], fast_mode=fast)
