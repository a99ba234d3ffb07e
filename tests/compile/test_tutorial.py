"""The kernels of docs/learn/gluon.md compile for Hopper, with both Tritons."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..full import FULL
from .test_machine_code import TOOLCHAINS

CODE = """
import json, torch
from examples.gluon import step_1_load, step_4_measure
from tests.compile.costs import compile_launch
x = torch.empty(1024, 256, dtype=torch.bfloat16, device="meta")
found = [compile_launch(step_1_load.launch(x, x), 90), *step_4_measure.costs().values()]
print(json.dumps([[costs.spill_bytes, costs.late_operands] for costs in found]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("toolchain", TOOLCHAINS if FULL else ["installed"])
def test_steps_compile(toolchain: str, tmp_path: Path):
    found = TOOLCHAINS[toolchain].run("-c", CODE, environment={"TRITON_CACHE_DIR": str(tmp_path)})
    assert len(found) > 1 and all(costs == [0, 0] for costs in found)
