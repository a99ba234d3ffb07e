"""`fused_kda_decode`, portable and on Hopper, interpreted, against a plain loop in float64."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import flashdelta as fd

from ..full import FULL
from ..fuzz.truth import claims_of
from ..support.cases import BF16, FP32
from ..support.decoding_checks import output_of
from ..support.fused import FUSED_BY_NAME, FUSED_STEPS, FusedStep, make_fused
from ..support.fused_checks import HOPPER_FUSED, check_fused
from ..support.held import hold_claims
from ..support.oracle import TOLERANCE, same_bits
from .language import WRITTEN_LATE


@pytest.mark.parametrize("step", HOPPER_FUSED, ids=lambda step: step.name)
def test_kernel_is_the_loop(step: FusedStep):
    check_fused(step, FP32 if step.name.startswith(("bias", "two_taps K128", "scattered")) else BF16, "hopper")


@pytest.mark.parametrize(("group", "before"), [(1, 0), (1, 2**30), (2, 7), (2, -1)])
def test_an_index_that_the_kernel_before_writes_late(group: int, before: int):
    """A slot's contents are asked for by what the index was before; what counts is what it is."""
    step = replace(FUSED_BY_NAME["one"], K=64, V=64, H=1, HV=group, B=1, indices=(3,), slots=8)
    call = make_fused(step, BF16) | {"output": output_of(step, BF16), "backend": "hopper"}
    wanted, index = claims_of("fused_kda_decode", call), call["state_indices"]
    index.fill_(before)
    WRITTEN_LATE.append(lambda: index.fill_(3))
    fd.fused_kda_decode(**call)
    assert not WRITTEN_LATE
    hold_claims(wanted, call | {"o": call["output"]}, TOLERANCE[BF16])


@pytest.mark.parametrize(
    ("step", "dtype"),
    [
        *(each for i, each in enumerate(itertools.product(FUSED_STEPS, (FP32, BF16))) if FULL or i % 4 in (0, 3)),
        (FUSED_BY_NAME["replay"], torch.float16),
    ],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_portable_kernel_is_the_loop(step: FusedStep, dtype: torch.dtype):
    check_fused(step, dtype, "triton")


def test_nan_stays_in_its_sequence():
    """NaN of a row, a window, a state: others have the bits that they have without, and null sequences are zeros."""
    step = replace(FUSED_BY_NAME["null"], B=4, indices=(-1, 2, 3, 5))
    call, clean = make_fused(step), make_fused(step)
    want = fd.fused_kda_decode(**clean, backend="triton")
    for x in (call["x"], call["raw_g"], call["raw_beta"], call["output_gate"]):
        x[0] = torch.nan
    call["conv_state"][3] = torch.nan
    call["state"][5] = torch.nan
    o = fd.fused_kda_decode(**call, backend="triton")
    assert o[0].eq(0).all() and o[2:].isnan().all() and same_bits(o[1], want[1])
    assert same_bits(call["state"][2], clean["state"][2])
