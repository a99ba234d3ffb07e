"""`fd.gated_rms_norm` and `fd.short_convolution` without a GPU: the reference, the operators, the launch cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import flashdelta as fd
from flashdelta.runtime.call import check
from flashdelta.runtime.torch_ops import CONVOLUTION, CONVOLUTION_OUT, NORM, operator_of

from ..support.layer import (
    CONVOLUTION_BY_NAME,
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
from ..support.oracle import same_bits

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


# ---- operators --------------------------------------------------------------------------------------------------------------

TRACED = [
    *((fd.gated_rms_norm, partial(make_norm, NORM_BY_NAME[name])) for name in ("heads", "fused")),
    *(
        (fd.short_convolution, partial(make_convolution, CONVOLUTION_BY_NAME[name]))
        for name in ("bias", "packed", "pool", "pool_flags", "step", "marks_pool", "every_packed")
    ),
]


def compiled(function: Callable) -> Callable:
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def tensors_of(results: object) -> list[Tensor]:
    return [x for x in (results if isinstance(results, tuple) else (results,)) if x is not None]


@pytest.mark.parametrize(("op", "make"), TRACED)
def test_compiles_in_one_graph(op: Callable, make: Callable[[], dict]):
    eager, traced = make(), make()
    want = tensors_of(op(**eager))
    found = tensors_of(compiled(lambda call: op(**call))(traced))
    assert len(want) == len(found) and all(same_bits(x, y) for x, y in zip(found, want))
    for name in {"state_pool", "checkpoint_states"} & eager.keys():
        assert same_bits(traced[name].contiguous(), eager[name].contiguous())


def test_operators_pass_opcheck():
    square = {"x": torch.rand(2, 8, 8), "z": torch.rand(2, 8, 8), "weight": torch.rand(8)}
    calls = [
        (fd.gated_rms_norm, make_norm(NORM_BY_NAME["rows"]), NORM),
        (fd.gated_rms_norm, {name: x.mT if x.dim() > 1 else x for name, x in square.items()}, NORM),
        (fd.short_convolution, make_convolution(CONVOLUTION_BY_NAME["packed_fla"]), CONVOLUTION),
        (fd.short_convolution, make_convolution(CONVOLUTION_BY_NAME["pool"]), CONVOLUTION_OUT),
        (fd.short_convolution, make_convolution(CONVOLUTION_BY_NAME["every"]), CONVOLUTION_OUT),
    ]
    for op, call, operator in calls:
        problem, t = check(op, **call)
        assert operator_of(problem, t) is operator
        torch.library.opcheck(operator.call, operator.arguments(problem, t, "reference"))
