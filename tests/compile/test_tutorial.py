"""The kernels of docs/learn/gluon.md compile for Hopper, with both Tritons, as the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ..full import FULL
from .test_machine_code import TOOLCHAINS
from .toolchains import ROOT

pytestmark = pytest.mark.slow

FOLDER = ROOT / "examples" / "gluon"
CODE = """
import json, sys
from dataclasses import asdict
sys.path.insert(0, "examples/gluon")
import step_1_load, step_4_measure, torch
from flashdelta.tools.compile import compile_launch
x = torch.empty(1024, 256, dtype=torch.bfloat16, device="meta")
found = {"load": compile_launch(step_1_load.launch(x, x), 90)} | step_4_measure.costs()
print(json.dumps({name: asdict(costs) for name, costs in found.items()}))
"""


@pytest.mark.parametrize("toolchain", TOOLCHAINS if FULL else ["installed"])
def test_steps_compile(toolchain: str, tmp_path: Path):
    found = TOOLCHAINS[toolchain].run("-c", CODE, environment={"TRITON_CACHE_DIR": str(tmp_path)})
    assert all(costs["spill_bytes"] == costs["late_operands"] == 0 for costs in found.values())
    page = (ROOT / "docs" / "learn" / "gluon.md").read_text()
    shown = re.findall(r"^\| (.*?) \| (\d+) \| ([\d,]+) \|$", page, flags=re.MULTILINE)
    assert len(shown) == len(found) - 1
    for name, registers, shared in shown:
        assert (found[name]["registers"], found[name]["shared_bytes"]) == (int(registers), int(shared.replace(",", "")))


def test_the_page_links_every_step():
    page = (ROOT / "docs" / "learn" / "gluon.md").read_text()
    assert all(path.name in page for path in FOLDER.glob("step_*.py"))
