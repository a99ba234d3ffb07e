"""Adversarial inputs at the models' head dimensions: packed with carried states, and for thousands of tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

import flashdelta as fd

from ..support.cases import BF16, BOUNDED, FP32, HARD_CASES, Case, case_id
from ..support.oracle import chunked_truth
from .calls import KIMI, UNBOUNDED, check, gpu_call, hold, slack_of

pytestmark = pytest.mark.gpu

EXACT = replace(UNBOUNDED, name="exact", gate="none", beta="value")
BOTH_PATHS = [
    *(replace(KIMI, name=f"bounded, {hard}", hard=hard, T=130) for hard in ("zero_rows", "beta_saturated",
        "raw_1000")),
    *(replace(UNBOUNDED, name=f"unbounded, {hard}", hard=hard, T=130) for hard in ("zero_rows", "beta_saturated")),
    *(replace(EXACT, name=f"{name}, {hard}", safe=safe, hard=hard, T=130) for name, safe in (("promised", True),
        ("any decay", False)) for hard in ("g0", "g-5", "beta_to_2", "beta_zero")),
    replace(KIMI, name="double logits", beta="double_logit", hard="beta_saturated", T=130),
    replace(KIMI, name="no L2 norm", l2norm=False, hard="pinned", T=130),
    Case("half bound", "", gate="lower_bound", lower_bound=-0.5, hard="pinned", K=128, V=128, T=130),
    Case("no parameters", "", has_A_log=False, has_dt_bias=False, hard="pinned", K=128, V=128, **BOUNDED),
]  # fmt: skip
LONG = [
    replace(model, name=f"{model.name}, {hard}", hard=hard, T=4096, H=2, HV=2)
    for model, kinds in {
        KIMI: ("pinned", "key_norms"),
        UNBOUNDED: ("key_norms", "raw_1000"),
        EXACT: ("g_alternating", "g_mixed", "g-50", "forget_channels"),
    }.items()
    for hard in kinds
]


@pytest.mark.parametrize("case", HARD_CASES, ids=case_id)
def test_packed_with_states(case: Case, backend: str):
    lengths = (65, 0, 1, 130, 17) if case.T < 500 else (case.T, 0, 65)
    case = replace(case, K=128, V=128, lengths=lengths, state=FP32, v_first=True)
    call = gpu_call(fd.chunk_kda, case, BF16, backend)
    hold(call, fd.chunk_kda(**call), chunked_truth(call), slack_of(case, call))


@pytest.mark.parametrize("case", BOTH_PATHS + LONG, ids=case_id)
def test_both_paths(case: Case, backend: str):
    """Of the diagonal blocks, also for thousands of tokens."""
    check(fd.chunk_kda, case, BF16, backend)
