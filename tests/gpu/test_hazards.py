"""Memory errors and races in shared memory: compute-sanitizer over small sets of calls, bad `cu_seqlens` among them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flashdelta

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parent.parent.parent
FOUND_ERRORS = 86
"""Exit status that means the sanitizer found an error, not that it could not run."""

PARTS = ("chunk prefill", "pool", "decode", "replay fused", "backward", "layer buffers", "ranks")
RACES = ("chunk prefill", "decode replay fused", "backward", "layer buffers ranks")
"""Words to `tests.gpu.sanitized`: the parts that a process runs. Several run side by side."""

READ_PAST_THE_END = """
import torch, triton, triton.language as tl
@triton.jit
def read(x, y):
    tl.store(y, tl.load(x + 1000000))
x = torch.zeros(8, device="cuda"); y = torch.zeros(1, device="cuda")
read[(1,)](x, y)
torch.cuda.synchronize()
"""


RACE = """
import torch
kernel = torch.cuda._compile_kernel(
    "__global__ void turn_around(float* y) {"
    " __shared__ float x[128]; x[threadIdx.x] = threadIdx.x; y[threadIdx.x] = x[127 - threadIdx.x]; }",
    "turn_around",
)
y = torch.zeros(128, device="cuda")
kernel(grid=(1, 1, 1), block=(128, 1, 1), args=[y])
torch.cuda.synchronize()
"""


def sanitized(tool: str, flags: list[str], *arguments: str) -> subprocess.CompletedProcess:
    """`python *arguments` under a tool of compute-sanitizer."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on PATH")
    command = [sanitizer, "--tool", tool, *flags, sys.executable, *arguments]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer does not support this device")
    return done


def memcheck(*arguments: str) -> subprocess.CompletedProcess:
    flags = ["--report-api-errors", "no", "--error-exitcode", str(FOUND_ERRORS)]
    return sanitized("memcheck", flags, *arguments)


def race_errors(report: str) -> list[str]:
    """The hazards of the level ERROR, but for those of one kind. Warnings do not count: waits on mbarriers, which order the
    copies of TMA, are not all understood as such. Nor do hazards whose every access is at a kernel's first line or at its
    `warp_specialize`: there the compiler hands the arguments to the waiting warps through shared memory, between named
    barriers of all threads (BAR.SYNC 1), which the tool takes for no barrier since the two sides stand at different ones.

    No CTA here has more chunks to do than a `Ring` has stages. One thread releases a stage, behind a barrier of all warps that
    have read it; the tool takes only that thread's own reads for ordered before the loader's next writes. Of two instructions
    it counts 3072 hazards, and 2976 where one of 32 lanes is that thread. The interpreter finds a stage that is released too
    early (`tests/gluon`).
    """
    assert "RACECHECK SUMMARY" in report, f"no summary in the report:\n{report[-6000:]}"
    blocks = re.findall(r"========= Error: Race reported.*?(?=\n========= *\n|\Z)", report, re.DOTALL)
    places = [re.findall(r" in (\S+\.py):(\d+)", block) for block in blocks]
    return [block for block, at in zip(blocks, places) if not at or not all(_hands_over(*place) for place in at)]


def _hands_over(file: str, line: str) -> bool:
    found = list(Path(flashdelta.__file__).parent.rglob(file))
    assert len(found) > 0, file
    texts = [path.read_text().splitlines() for path in found]
    handing = re.compile(r"def \w+_kernel\(|gl\.warp_specialize\(")
    return any(len(lines) >= int(line) and handing.match(lines[int(line) - 1].strip()) for lines in texts)


@pytest.mark.long
@pytest.mark.parametrize("parts", PARTS)
def test_memcheck_finds_nothing(backend: str, parts: str):
    done = memcheck("-m", "tests.gpu.sanitized", backend, *parts.split())
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    assert "ERROR SUMMARY: 0 errors" in done.stdout


def test_memcheck_would_find_a_read_past_the_end(tmp_path: Path):
    script = tmp_path / "read.py"
    script.write_text(READ_PAST_THE_END)
    done = memcheck(str(script))
    assert "Invalid __global__ read" in done.stdout
    assert done.returncode != 0


@pytest.mark.long
@pytest.mark.parametrize("parts", RACES)
def test_racecheck_finds_no_error(backend: str, parts: str):
    calls = ("-m", "tests.gpu.sanitized", backend, "races", *parts.split())
    done = sanitized("racecheck", ["--print-limit", "20"], *calls)
    print(done.stdout[-12_000:])
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    if re.search(r"^0 calls", done.stdout, re.MULTILINE):
        pytest.skip(f"{backend} runs none of these calls here")
    wrong = race_errors(done.stdout)
    assert not wrong, "\n".join(wrong)


def test_racecheck_would_find_a_missing_barrier(tmp_path: Path):
    if not hasattr(torch.cuda, "_compile_kernel"):
        pytest.skip("this PyTorch compiles no CUDA source; Triton puts all barriers itself")
    script = tmp_path / "race.py"
    script.write_text(RACE)
    done = sanitized("racecheck", [], str(script))
    if done.returncode != 0:
        pytest.skip(f"PyTorch could not compile CUDA source here: {done.stderr[-500:]}")
    assert race_errors(done.stdout), done.stdout
