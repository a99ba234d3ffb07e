"""The kernels of docs/learn/gluon.md compile for Hopper, with both Tritons."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples.gluon import step_1_load, step_4_measure

from ..full import FULL, thinned
from .costs import compile_launch
from .test_machine_code import TOOLCHAINS

CODE = "import json; from tests.compile.test_tutorial import found; print(json.dumps(found()))"


def found() -> list[list[int]]:
    x = torch.empty(1024, 256, dtype=torch.bfloat16, device="meta")
    multiply = thinned([*step_4_measure.launches().values()], 3)
    costs = [compile_launch(launch, 90) for launch in (step_1_load.launch(x, x), *multiply)]
    return [[each.spill_bytes, each.late_operands] for each in costs]


@pytest.mark.slow
@pytest.mark.parametrize("toolchain", TOOLCHAINS if FULL else ["installed"])
def test_steps_compile(toolchain: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert (TOOLCHAINS[toolchain].run("-c", CODE) if FULL else found()) == [[0, 0]] * (5 if FULL else 3)
