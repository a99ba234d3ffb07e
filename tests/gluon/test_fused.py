"""`fused_kda_decode` on Hopper, interpreted, against a plain loop in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashdelta as fd

from ..compile.variants import Variant
from ..fuzz.truth import claims_of
from ..support.cases import BF16, FP32
from ..support.decoding_checks import output_of
from ..support.fused import FUSED_BY_NAME, FUSED_STEPS, FusedStep, make_fused
from ..support.fused_checks import HOPPER_FUSED, check_fused
from ..support.held import hold_claims
from ..support.oracle import TOLERANCE
from .language import WRITTEN_LATE


@pytest.mark.parametrize("step", HOPPER_FUSED, ids=lambda step: step.name)
def test_kernel_is_the_loop(step: FusedStep):
    check_fused(step, FP32 if step.name.startswith(("bias", "two_taps K128", "scattered")) else BF16, "hopper")


@pytest.mark.parametrize(("group", "before"), [(1, 0), (1, 2**30), (2, 7), (2, -1)])
def test_an_index_that_the_kernel_before_writes_late(group: int, before: int):
    """What lies in a slot is asked for by what the index was before; what counts is what it is."""
    step = replace(FUSED_BY_NAME["one"], K=64, V=64, H=1, HV=group, B=1, indices=(3,), slots=8)
    call = make_fused(step, BF16) | {"output": output_of(step, BF16), "backend": "hopper"}
    wanted, index = claims_of("fused_kda_decode", call), call["state_indices"]
    index.fill_(before)
    WRITTEN_LATE.append(lambda: index.fill_(3))
    fd.fused_kda_decode(**call)
    assert not WRITTEN_LATE
    hold_claims(wanted, call | {"o": call["output"]}, TOLERANCE[BF16])


@pytest.mark.parametrize(
    ("N", "state", "ahead"),
    [(1, FP32, (0, 32)), (4, BF16, (0, 128)), (8, BF16, (192, 256)), (32, BF16, (396, 528)), (32, FP32, (297, 396))],
    ids=str,
)
def test_which_ctas_prefetch(N: int, state: torch.dtype, ahead: tuple[int, int]):
    """All that have an SM each; of more the last quarter of those that run at once, three or four an SM."""
    options = {"operation": "fused_decode", "packed": False, "state_v_first": True}
    (launch,) = Variant("", "hopper", N=N, heads=32, state_dtype=state, **options).launches(90)
    assert launch.arguments[-2:] == ahead


@pytest.mark.slow
@pytest.mark.parametrize("step", FUSED_STEPS[::4], ids=lambda step: step.name)
def test_the_portable_kernel_stays_inside_its_tensors(step: FusedStep):
    check_fused(step, BF16, "triton")
