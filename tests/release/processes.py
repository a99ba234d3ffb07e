"""Processes that end in time, with all that they have started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).parents[2]
GRACE = 10.0
"""Seconds from asking a process to end to ending it."""


def run_python(words: Sequence[str], printed: IO[bytes], seconds: float, gpus: str) -> int | None:
    """The exit code of Python with these `words`, or None if it ran past the time. In a process group of its own, which sees
    `gpus`."""
    given = {"cwd": ROOT, "env": {**os.environ, "CUDA_VISIBLE_DEVICES": gpus}, "start_new_session": True}
    process = subprocess.Popen([sys.executable, *words], stdout=printed, stderr=subprocess.STDOUT, **given)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end(process)


def end(process: subprocess.Popen) -> None:
    """With all that it has started."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sent)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
