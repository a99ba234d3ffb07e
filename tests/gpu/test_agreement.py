"""Every other backend beside the portable one, on shapes of models and under every gate."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashdelta as fd

from ..support.cases import BF16, BOUNDED, FP32, Case, case_id
from ..support.oracle import tolerance_of
from .calls import KIMI, gpu_call, hold

pytestmark = pytest.mark.gpu

PACKED = replace(KIMI, name="packed", H=16, HV=16, lengths=(700, 64, 0, 1, 1025, 63), state=FP32, v_first=True)
SHAPES = [
    replace(KIMI, name="12 heads", H=12, HV=12, T=2048),
    replace(KIMI, name="8 and 32 heads", H=8, HV=32, T=1024, v_first=True),
    replace(KIMI, name="packed, bf16 states", H=4, HV=16, lengths=(300,) * 7, state=BF16, offsets_dtype=torch.int32),
]
GATES = {
    "decay": {"gate": "none"},
    "decay, promised": {"gate": "none", "safe": True},
    "softplus": {"gate": "softplus"},
    "bounded": BOUNDED,
    "bounded at -1": {"gate": "lower_bound", "lower_bound": -1.0, "beta": "double_logit"},
    "logsigmoid": {"gate": "logsigmoid"},
    "logsigmoid, promised": {"gate": "logsigmoid", "safe": True},
}


def agree(case: Case, other_backend: str) -> None:
    """Within the sum of both tolerances."""
    call = gpu_call(fd.chunk_kda, case, BF16, other_backend)
    portable = fd.chunk_kda(**call | {"backend": "triton"})
    hold(call, fd.chunk_kda(**call), portable, slack=(tolerance_of(call),) * 2)


@pytest.mark.parametrize("gate", GATES)
def test_every_gate(gate: str, other_backend: str):
    agree(replace(PACKED, **GATES[gate]), other_backend)


@pytest.mark.parametrize("shape", SHAPES, ids=case_id)
@pytest.mark.parametrize("gate", ["softplus", "bounded"])
def test_shapes_of_models(gate: str, shape: Case, other_backend: str):
    agree(replace(shape, **GATES[gate]), other_backend)
