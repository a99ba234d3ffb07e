"""Memory errors: compute-sanitizer over a small set of calls, bad `cu_seqlens` among them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ..cases import BF16
from .calls import BOTH, KIMI, gpu_call

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parent.parent.parent
FOUND_ERRORS = 86
"""Exit status that means the sanitizer found an error, not that it could not run."""

READ_PAST_THE_END = """
import torch, triton, triton.language as tl
@triton.jit
def read(x, y):
    tl.store(y, tl.load(x + 1000000))
x = torch.zeros(8, device="cuda"); y = torch.zeros(1, device="cuda")
read[(1,)](x, y)
torch.cuda.synchronize()
"""


def memcheck(*arguments: str) -> subprocess.CompletedProcess:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on PATH")
    flags = ["--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", str(FOUND_ERRORS)]
    done = subprocess.run(
        [sanitizer, *flags, sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
        capture_output=True,
        text=True,
    )
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer does not support this device")
    return done


def test_memcheck_finds_nothing(backend: str):
    done = memcheck("-m", "tests.gpu.sanitized", backend)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    assert "ERROR SUMMARY: 0 errors" in done.stdout


def test_memcheck_would_find_a_read_past_the_end(tmp_path: Path):
    script = tmp_path / "read.py"
    script.write_text(READ_PAST_THE_END)
    done = memcheck(str(script))
    assert "Invalid __global__ read" in done.stdout
    assert done.returncode != 0


@pytest.mark.parametrize(
    "values", [(3, 40, 200), (0, 50, 20, 200), (0, 20, 10_000), (0, 2**40, -(2**40), 2**62)], ids=str
)
def test_bad_offsets_write_nothing_outside(values: tuple[int, ...], backend: str):
    for op in BOTH:
        call = gpu_call(op, KIMI, BF16, backend)
        guarded = torch.zeros(1, 600, 4, 128, dtype=BF16, device="cuda")
        _, state = op(**call, cu_seqlens=torch.tensor(values, device="cuda"), out=guarded[:, 200:400])
        torch.cuda.synchronize()
        assert state.shape[0] == len(values) - 1
        assert guarded[:, :200].eq(0).all() and guarded[:, 400:].eq(0).all()
