"""A few cases of the fuzzer on the GPU, the same in every run; `make fuzz` draws on."""

from __future__ import annotations

import pytest
import torch

from ..fuzz import runner

pytestmark = pytest.mark.gpu

COUNTS = {"calls": 6, "mutations": 18}
SEED = 0


@pytest.mark.parametrize(("part", "number"), [(part, n) for part in runner.PARTS for n in range(COUNTS[part])])
def test_a_case_is_right_or_refused(part: str, number: int):
    device = torch.device("cuda")
    found = runner.run_case(part, SEED, number, device)
    assert found.verdict != "failed", f"{found.message}\n{runner.rerun_line(found, SEED, device)}"
