"""`fd.gated_rms_norm` and `fd.short_convolution` on the GPU: against float64, bit for bit again, in graphs, compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

import flashdelta as fd

from ..support.layer import (
    CONVOLUTION_BY_NAME,
    CONVOLUTION_CASES,
    NORM_CASES,
    ConvolutionCase,
    NormCase,
    checkpoints_by_tokens,
    convolved_by_tokens,
    gradients,
    make_convolution,
    make_norm,
    normed_by_rows,
)
from ..support.oracle import poisoned_memory, relative_error, same_bits
from .calls import CALLS_TO_A_REPLAY, captured

pytestmark = pytest.mark.gpu

TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 3e-6}
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)

NORMS = [*NORM_CASES, NormCase("model", "a layer's heads", shape=(2, 700, 32, 128), sliced=True)]
MODEL = ConvolutionCase("model", "a layer's q, k and v", lengths=(1, 63, 0, 300, 65), D=1536, state=0, padding=9)
CONVOLUTIONS = [
    *CONVOLUTION_CASES,
    MODEL,
    replace(MODEL, name="model_rows", B=3, lengths=None, T=130, padding=0, sliced=True, bias=True),
    replace(MODEL, name="model_uneven", D=1000, state=1, W=3),
    replace(MODEL, name="model_pool", indices=(4, 0, 2, -1, 5), order="token"),
]
BY_NAME = CONVOLUTION_BY_NAME | {case.name: case for case in CONVOLUTIONS}
WIDE = ConvolutionCase(
    "wide", "all tokens in one tile, not as many for each group", T=301, D=12288, bias=True, final=False
)
IN_GRADIENTS = [
    *(case for case in CONVOLUTIONS if case.indices is None and not case.buffer),
    WIDE,
    replace(WIDE, name="wide_768", T=768, W=3, bias=False),
    replace(WIDE, name="wide_states", state=1, W=3, final=True),
    replace(WIDE, name="wide_few", T=3),
]


def close(found: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    assert found.shape == want.shape
    if found.numel() > 0:
        assert relative_error(found, want) <= TOLERANCE[dtype]


def on_cpu(call: dict) -> dict:
    return {name: x.cpu() if isinstance(x, Tensor) else x for name, x in call.items()}


@every_dtype
@pytest.mark.parametrize("case", NORMS, ids=str)
def test_norm(case: NormCase, dtype: torch.dtype):
    call = make_norm(case, dtype, "cuda")
    small = case.name != "model"
    want = normed_by_rows(on_cpu(call)).cuda() if small else exactly(fd.gated_rms_norm, call)
    with poisoned_memory():
        close(fd.gated_rms_norm(**call), want, dtype)


def exactly(op: Callable, call: dict) -> Tensor:
    """The float64 reference."""
    wide = {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in call.items()}
    found = op(**wide, backend="reference")
    return found[0] if isinstance(found, tuple) else found


@every_dtype
@pytest.mark.parametrize("case", NORMS, ids=str)
def test_gradients_of_the_norm(case: NormCase, dtype: torch.dtype):
    call = make_norm(case, dtype, "cuda")
    hold_gradients(fd.gated_rms_norm, call, dtype)


def hold_gradients(op: Callable, call: dict, dtype: torch.dtype) -> None:
    want = gradients(op, call, torch.float64)
    with poisoned_memory():
        found = [gradients(op, call) for _ in range(CALLS_TO_A_REPLAY + 1)]
    for name, x in found[0].items():
        close(x, want[name], dtype)
        assert all(same_bits(again[name], x) for again in found[1:]), name


@every_dtype
@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_convolution(case: ConvolutionCase, dtype: torch.dtype):
    """The first call and replays, each from the states that the case has."""
    call = make_convolution(case, dtype, "cuda")
    want, states = convolved_by_tokens(on_cpu(call))
    buffer = checkpoints_by_tokens(on_cpu(call)) if "checkpoint_states" in call else None
    there = ~want.isnan()
    for _ in range(CALLS_TO_A_REPLAY + 1):
        again = {name: x.clone() if isinstance(x, Tensor) else x for name, x in call.items()}
        with poisoned_memory():
            o, final = fd.short_convolution(**again)
        close(o.cpu()[there], want[there], dtype)
        assert same_bits((again["state_pool"] if final is None else final).cpu(), states.to(dtype))
        if buffer is not None:
            assert same_bits(again["checkpoint_states"].cpu(), buffer.float())


@every_dtype
@pytest.mark.parametrize("case", IN_GRADIENTS, ids=str)
def test_gradients_of_the_convolution(case: ConvolutionCase, dtype: torch.dtype):
    hold_gradients(fd.short_convolution, make_convolution(case, dtype, "cuda"), dtype)


@pytest.mark.parametrize("name", ["pool", "model_pool", "step"])
def test_a_graph_replays_with_other_slots(name: str):
    call = make_convolution(BY_NAME[name], torch.bfloat16, "cuda")
    out = torch.empty_like(call["x"])
    step = partial(fd.short_convolution, **call, out=out)
    for _ in range(CALLS_TO_A_REPLAY):
        step()
    graph, _ = captured(step)
    call["state_indices"].copy_(call["state_indices"].flip(0))
    want, states = convolved_by_tokens(on_cpu(call))
    graph.replay()
    there = ~want.isnan()
    close(out.cpu()[there], want[there], torch.bfloat16)
    assert same_bits(call["state_pool"].cpu(), states.bfloat16())
