"""`fd.fused_kda_decode` by its Triton kernel, run on the CPU by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from flashdelta.testing.fused import FUSED_BY_NAME, FUSED_STEPS, FusedStep, make_fused
from flashdelta.testing.oracle import assert_close, same_bits

from ..support.fused_checks import chain, check_fused


@pytest.mark.parametrize("step", FUSED_STEPS, ids=lambda step: step.name)
def test_kernel_is_the_loop(step: FusedStep):
    check_fused(step, torch.float32, "triton")
