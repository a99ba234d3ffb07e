"""Examples, as they are started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

TRAIN_PARALLEL = Path(__file__).parents[2] / "examples" / "train_parallel.py"


def run_parallel(folder: Path, ranks: int | None, environment: Mapping[str, str], *options: str) -> tuple[str, str]:
    """Output of `train_parallel.py` on stdout and stderr, by torchrun, or without."""
    by_torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *(by_torchrun if ranks is not None else ()), str(TRAIN_PARALLEL), *options]
    found = subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-2000:]
    return found.stdout, found.stderr


def trains_on_one_curve(folder: Path, tolerance: float, environment: Mapping[str, str]) -> None:
    """`train_parallel.py`: two ranks by torchrun have the losses of one, which fall."""
    steps = ("--steps", "6", "--tokens", "256")
    run_parallel(folder, None, environment, *steps, "--losses", "one.json")
    compared = (*steps, "--compare", "one.json", "--tolerance", str(tolerance))
    assert "losses differ from one.json by" in run_parallel(folder, 2, environment, *compared)[0]
    losses = json.loads((folder / "one.json").read_text())
    assert losses[-1] < losses[0] - 0.5
