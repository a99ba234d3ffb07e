"""Runs `tests/interpreter` in sessions of its own: Triton decides at import whether its kernels are interpreted.

To work on one of those tests: `TRITON_INTERPRET=1 pytest tests/interpreter -k name`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .cases import CASES, Case

ROOT = Path(__file__).parent.parent

FILE = "tests/interpreter/test_kernels.py"
POOLS = "tests/interpreter/test_pool.py"


def _cases(test: str, cases: list[Case]) -> list[str]:
    return [f"{FILE}::{test}[{case.name}]" for case in cases]


# Several sessions, for pytest-xdist to run at once; together they select every test once.
PIECES = {
    "chunk, fp32, even cases": _cases("test_chunk_fp32", CASES[::2]),
    "chunk, fp32, odd cases": _cases("test_chunk_fp32", CASES[1::2]),
    "recurrent and fp16": [FILE, "-k", "test_recurrent or test_chunk_fp16"],
    "state pools": [POOLS],
    "decode": ["tests/interpreter/test_decode.py"],
    "split": ["tests/interpreter/test_split.py"],
    "backward": ["tests/interpreter/test_backward.py"],
    "backward of the WY step": ["tests/interpreter/test_wy.py"],
    "prefill": ["tests/interpreter/test_prefill.py"],
    "the rest": [FILE, "-k", "not test_recurrent and not test_chunk_fp16 and not test_chunk_fp32"],
}


@pytest.mark.parametrize("piece", PIECES)
def test_kernels_under_the_interpreter(piece: str):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "-W", "ignore"]
    done = subprocess.run(
        [*command, *PIECES[piece]],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{' '.join(done.args)}\n{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
