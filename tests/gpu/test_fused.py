"""`fd.fused_kda_decode` on the GPU: against float64, operator by operator, again and again, in graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import flashdelta as fd

from ..support.cases import BF16, FP16, FP32
from ..support.fused import FUSED_STEPS, FusedStep, make_fused
from ..support.fused_checks import HOPPER_FUSED, WRITTEN, by_operators, check_fused, check_rounds_of_fused
from ..support.oracle import TOLERANCE, assert_close, same_bits
from ..support.pools import copied as laid_out_alike
from .calls import case_and_dtype, check_late, in_turn, overlapping

pytestmark = pytest.mark.gpu

K128 = {"K": 128, "V": 128, "slots": 40}
MODEL = FusedStep("heads_12", "a model's heads", H=12, HV=12, B=3, bias=True, **K128)
GVA8 = FusedStep("gva8_model", "eight heads share windows", H=4, HV=32, B=16, indices=tuple(range(39, 7, -2)), **K128)
MANY = FusedStep("many", "more states than stay in the L2 cache", H=8, HV=8, B=40, indices=(*range(40),), **K128)
DRAFTS = tuple(tuple(range(4 * n, 4 * n + 4)) for n in range(8))
FUSED = [
    *FUSED_STEPS,
    MODEL,
    replace(MODEL, name="heads_12_bf16", state=BF16, weights="parts", bias=False, order="page", gate="softplus"),
    replace(MODEL, name="heads_12_k_first", v_first=False),
    replace(MODEL, name="K64", K=64, V=64, order="channel", W=3),
    replace(MODEL, name="K64_V128", K=64, state=BF16),
    replace(MODEL, name="K128_V64", V=64),
    GVA8,
    replace(GVA8, name="gva8_bf16", state=BF16, order="channel"),
    replace(GVA8, name="gva8_drafts", B=8, T=4, spec=3, indices=DRAFTS, accepted=(1, 2, 3, 4) * 2),
    replace(GVA8, name="gva8_replay", B=8, T=4, spec=3, indices=(*range(8),), rows="slots", accepted=(4, 3, 2, 1) * 2),
    MANY,
    replace(MANY, name="many_bf16", state=BF16),
]
BY_NAME = {step.name: step for step in FUSED}


@pytest.mark.parametrize(("step", "dtype"), in_turn(FUSED), ids=case_and_dtype)
def test_kernel_is_the_loop(step: FusedStep, dtype: torch.dtype, backend: str):
    check_fused(step, dtype, backend, "cuda")


@pytest.mark.parametrize(("step", "dtype"), in_turn(HOPPER_FUSED), ids=case_and_dtype)
def test_kernel_for_hopper_is_the_loop(step: FusedStep, dtype: torch.dtype, other_backend: str):
    check_fused(step, dtype, other_backend, "cuda")


@pytest.mark.parametrize("name", ["heads_12", "K64", "many", "gva8_model"])
def test_fused_is_the_chain(name: str):
    """The chain of single operators, which round q, k, v and o in between."""
    fused, single = (make_fused(BY_NAME[name], BF16, "cuda") for _ in range(2))
    assert_close("o", fd.fused_kda_decode(**fused), by_operators(single, "auto").double(), 2 * TOLERANCE[BF16])
    assert_close("state", fused["state"], single["state"].double(), 2 * TOLERANCE[BF16])
    assert same_bits(fused["conv_state"], single["conv_state"])


def copied(call: dict) -> dict:
    """With memory of their own for what is written, laid out alike."""
    return call | {name: laid_out_alike(call[name]) for name in WRITTEN if name in call}


@pytest.mark.parametrize(
    "name", ["heads_12", "many_bf16", "gva8_model", "gva8_bf16", "gva8_drafts", "gva8_replay", "K128_V64"]
)
def test_a_thousand_calls_have_the_same_bits(name: str, backend: str):
    """No CTA may write a window that another one, or a slower warp of its own, still reads."""
    call = make_fused(BY_NAME[name], BF16, "cuda")
    first = copied(call)
    want = [fd.fused_kda_decode(**first, backend=backend), *(first[x] for x in WRITTEN if x in first)]
    held = [x.contiguous().view(torch.uint8) for x in want]
    wrong = torch.zeros((), device="cuda", dtype=torch.int64)
    pools = [copied(call) for _ in range(2)]
    names = [x for x in WRITTEN if x in call]
    for i in range(1000):
        again = pools[i % 2]
        for x in names:
            again[x].copy_(call[x])
        found = [fd.fused_kda_decode(**again, backend=backend), *(again[x] for x in names)]
        for x, y in zip(found, held):
            wrong += (x.contiguous().view(torch.uint8) != y).sum()
    assert wrong.item() == 0


@overlapping
@pytest.mark.parametrize("before", [0, 39, -1, 2**30], ids=["a slot", "none of its slots", "no slot", "far outside"])
@pytest.mark.parametrize("name", ["heads_12", "heads_12_bf16", "gva8_model", "many_bf16"])
def test_indices_that_the_kernel_before_writes_late(name: str, before: int, backend: str):
    call = make_fused(BY_NAME[name], BF16, "cuda")

    def prepare(indices: torch.Tensor) -> Callable[[], list]:
        given = copied(call) | {"state_indices": indices}
        written = [given[x] for x in WRITTEN if x in given]
        return lambda: [fd.fused_kda_decode(**given, backend=backend), *written]

    check_late(prepare, call["state_indices"].clone(), before)


@pytest.mark.parametrize("dtype", (BF16, FP16, FP32), ids=str)
def test_rounds_of_speculation_are_steps_one_by_one(dtype: torch.dtype):
    check_rounds_of_fused(20, dtype, "triton", "cuda")
