"""A short run of the fuzzer on the GPU, the same in every run; `make fuzz` draws on."""

from __future__ import annotations

import pytest

from ..fuzz import runner

pytestmark = pytest.mark.gpu

CASES = {"calls": 20, "mutations": 60}


@pytest.mark.parametrize("part", runner.PARTS)
def test_a_short_run_finds_nothing(part: str):
    assert runner.main(["--part", part, "--cases", str(CASES[part]), "--device", "cuda", "--seconds", "3000"]) == 0
