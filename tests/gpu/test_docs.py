"""The documents' code on a GPU: CUDA graphs are captured there, and the tutorial's kernels run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import documents

pytestmark = pytest.mark.gpu

ROOT = documents.ROOT
PAGES = [
    path for path in sorted((ROOT / "docs").rglob("*.md")) if "cuda" in documents.program(path.read_text(), on_gpu=True)
]
"""Those whose code goes to a GPU if there is one."""


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.long
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_code_runs(path: Path):
    """In a process of its own: some of it has a process group, or turns an integration on."""
    run("-c", documents.program(path.read_text(), on_gpu=True))


hopper = pytest.mark.skipif(
    torch.cuda.get_device_capability()[0] != 9 if torch.cuda.is_available() else True, reason="sm_90"
)


@hopper
@pytest.mark.long
def test_the_tutorials_kernels_are_right():
    """The last step ends where one of its ways is wrong."""
    steps = {"1_load": "2 x, to the bit", "2_multiply": "x y", "3_pipeline": "x y", "4_measure": " TFLOP/s"}
    for step, said in steps.items():
        assert said in run("-m", f"examples.gluon.step_{step}")
