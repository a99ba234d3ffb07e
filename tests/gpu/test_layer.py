"""`fd.gated_rms_norm` and `fd.short_convolution` on the GPU: against float64, bit for bit again, in graphs, compiled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashdelta as fd

from ..support import layer as layers
from ..support.layer_checks import check_convolution, check_gradients, check_norm
from .calls import CALLS_TO_A_REPLAY, case_and_dtype, in_turn

pytestmark = pytest.mark.gpu

NORMS = [*layers.NORM_CASES, layers.NormCase("model", "a layer's heads", shape=(2, 700, 32, 128), sliced=True)]
MODEL = layers.ConvolutionCase("model", "a layer's q, k and v", lengths=(1, 63, 0, 300, 65), D=1536, state=0, padding=9)
CONVOLUTIONS = [
    *layers.CONVOLUTION_CASES,
    MODEL,
    replace(MODEL, name="model_rows", B=3, lengths=None, T=130, padding=0, sliced=True, bias=True),
    replace(MODEL, name="model_uneven", D=1000, state=1, W=3),
    replace(MODEL, name="model_pool", indices=(4, 0, 2, -1, 5), order="token"),
]
BY_NAME = layers.CONVOLUTION_BY_NAME | {case.name: case for case in CONVOLUTIONS}
WIDE = layers.ConvolutionCase("wide", "all tokens in one tile, uneven groups", T=301, D=12288, bias=True, final=False)
IN_GRADIENTS = [
    *(case for case in CONVOLUTIONS if case.indices is None and not case.buffer),
    WIDE,
    replace(WIDE, name="wide_768", T=768, W=3, bias=False),
    replace(WIDE, name="wide_states", state=1, W=3, final=True),
    replace(WIDE, name="wide_few", T=3),
]


@pytest.mark.parametrize(("case", "dtype"), in_turn(NORMS), ids=case_and_dtype)
def test_norm(case: layers.NormCase, dtype: torch.dtype):
    check_norm(case, dtype, device="cuda")


@pytest.mark.parametrize(("case", "dtype"), in_turn(NORMS), ids=case_and_dtype)
def test_gradients_of_the_norm(case: layers.NormCase, dtype: torch.dtype):
    check_gradients(fd.gated_rms_norm, layers.make_norm(case, dtype, "cuda"), repeats=CALLS_TO_A_REPLAY)


@pytest.mark.parametrize(("case", "dtype"), in_turn(CONVOLUTIONS), ids=case_and_dtype)
def test_convolution(case: layers.ConvolutionCase, dtype: torch.dtype):
    """The first call and replays, each from the states that the case has."""
    for _ in range(CALLS_TO_A_REPLAY + 1):
        check_convolution(case, dtype, device="cuda")


@pytest.mark.parametrize(("case", "dtype"), in_turn(IN_GRADIENTS), ids=case_and_dtype)
def test_gradients_of_the_convolution(case: layers.ConvolutionCase, dtype: torch.dtype):
    check_gradients(fd.short_convolution, layers.make_convolution(case, dtype, "cuda"), repeats=CALLS_TO_A_REPLAY)
