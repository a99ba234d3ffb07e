"""Adversarial inputs at the models' head dimensions: packed with carried states, and for thousands of tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

import flashdelta as fd
from flashdelta.testing.cases import BF16, BOUNDED, FP32, HARD_CASES, Case, case_id
from flashdelta.testing.oracle import chunked_truth

from .calls import KIMI, UNBOUNDED, check, gpu_call, hold, slack_of

pytestmark = pytest.mark.gpu

EXACT = replace(UNBOUNDED, gate="none", beta="value")
LONG = [
    replace(KIMI, name="pinned", hard="pinned", T=4096),
    replace(KIMI, name="key_norms", hard="key_norms", T=4096),
    replace(UNBOUNDED, name="key_norms_unbounded", hard="key_norms", T=4096),
    replace(UNBOUNDED, name="saturated_unbounded", hard="raw_1000", T=4096),
    replace(EXACT, name="g_alternating", hard="g_alternating", T=4096),
    replace(EXACT, name="g_mixed", hard="g_mixed", T=4096),
    replace(EXACT, name="g-50", hard="g-50", T=4096),
    replace(EXACT, name="forget_channels", hard="forget_channels", T=4096),
]
BOTH_PATHS = [
    *(replace(KIMI, name=f"bounded, {hard}", hard=hard, T=130) for hard in ("zero_rows", "beta_saturated", "raw_1000")),
    *(replace(UNBOUNDED, name=f"unbounded, {hard}", hard=hard, T=130) for hard in ("zero_rows", "beta_saturated")),
    *(
        replace(EXACT, name=f"{name}, {hard}", safe=safe, hard=hard, T=130)
        for name, safe in (("promised", True), ("any decay", False))
        for hard in ("g0", "g-5", "beta_to_2", "beta_zero")
    ),
    replace(KIMI, name="double logits", beta="double_logit", hard="beta_saturated", T=130),
    replace(KIMI, name="no L2 norm", l2norm=False, hard="pinned", T=130),
    Case(name="half bound", why="", gate="lower_bound", lower_bound=-0.5, hard="pinned", K=128, V=128, T=130),
    Case(name="no parameters", why="", has_A_log=False, has_dt_bias=False, hard="pinned", K=128, V=128, **BOUNDED),
]


@pytest.mark.parametrize("case", HARD_CASES, ids=case_id)
def test_packed_with_states(case: Case, backend: str):
    lengths = (65, 0, 1, 130, 17) if case.T < 500 else (case.T, 0, 65)
    case = replace(case, K=128, V=128, lengths=lengths, state=FP32, v_first=True)
    call = gpu_call(fd.chunk_kda, case, BF16, backend)
    slack = slack_of(call) if case.ill_conditioned else (0.0, 0.0)
    hold(call, fd.chunk_kda(**call), chunked_truth(call), slack)


@pytest.mark.parametrize("case", LONG, ids=case_id)
def test_thousands_of_tokens(case: Case, backend: str):
    check(fd.chunk_kda, replace(case, H=2, HV=2), BF16, backend)


@pytest.mark.parametrize("case", BOTH_PATHS, ids=case_id)
def test_both_paths(case: Case, backend: str):
    check(fd.chunk_kda, case, BF16, backend)
