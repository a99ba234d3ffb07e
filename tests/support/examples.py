"""Examples, as they are started."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

TRAIN_PARALLEL = Path(__file__).parents[2] / "examples" / "train_parallel.py"


def run_parallel(folder: Path, launcher: tuple[str, ...], *options: str) -> str:
    """Output of `train_parallel.py`."""
    command = [sys.executable, *launcher, str(TRAIN_PARALLEL), "--steps", "6", "--tokens", "256", *options]
    found = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-2000:]
    return found.stdout


def trains_on_one_curve(folder: Path, tolerance: float) -> None:
    """`train_parallel.py`: two ranks by torchrun have the losses of one, which fall."""
    run_parallel(folder, (), "--losses", "one.json")
    by_torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    said = run_parallel(folder, by_torchrun, "--compare", "one.json", "--tolerance", str(tolerance))
    losses = json.loads((folder / "one.json").read_text())
    assert "losses differ from one.json by" in said and losses[-1] < losses[0] - 0.5
