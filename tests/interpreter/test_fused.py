"""`fd.fused_kda_decode` by its Triton kernel, run on the CPU by Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashdelta as fd

from ..support.fused import FUSED_BY_NAME, FUSED_STEPS, FusedStep, make_fused
from ..support.fused_checks import chain, check_fused
from ..support.oracle import assert_close, same_bits


@pytest.mark.parametrize("step", FUSED_STEPS, ids=lambda step: step.name)
def test_kernel_is_the_loop(step: FusedStep):
    check_fused(step, torch.float32, "triton")


@pytest.mark.parametrize("name", ["bias", "null", "bf16"])
def test_kernel_is_the_chain(name: str):
    """Of the single operators' kernels, within rounding; windows to the bit."""
    fused, single = (make_fused(FUSED_BY_NAME[name]) for _ in range(2))
    o, want = fd.fused_kda_decode(**fused, backend="triton"), chain(single, "triton")
    live = (fused["state_indices"] >= 0) & (fused["state_indices"] < len(fused["state"]))
    assert_close("o", o[live], want[live], 1e-5)
    assert_close("state", fused["state"], single["state"], 1e-2 if name == "bf16" else 1e-5)
    assert same_bits(fused["conv_state"], single["conv_state"])


@pytest.mark.parametrize(("name", "dtype"), [("bias", torch.bfloat16), ("replay", torch.float16)], ids=str)
def test_half_precision_rounds_once(name: str, dtype: torch.dtype):
    check_fused(FUSED_BY_NAME[name], dtype, "triton")


def test_nan_stays_in_its_sequence():
    """Of a row, a window, a state: others have the bits that they have without, and null sequences are zeros."""
    step = FUSED_BY_NAME["null"]
    step = replace(step, B=4, indices=(-1, 2, 3, 5))
    call, clean = make_fused(step), make_fused(step)
    want = fd.fused_kda_decode(**clean, backend="triton")
    for x in (call["x"], call["raw_g"], call["raw_beta"], call["output_gate"]):
        x[0] = torch.nan
    call["conv_state"][3] = torch.nan
    call["state"][5] = torch.nan
    o = fd.fused_kda_decode(**call, backend="triton")
    assert o[0].eq(0).all() and o[2:].isnan().all() and same_bits(o[1], want[1])
    assert same_bits(call["state"][2], clean["state"][2])
