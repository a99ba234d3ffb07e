"""Examples, as they are started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

TRAIN_PARALLEL = Path(__file__).parents[2] / "examples" / "train_parallel.py"


def trains_on_one_curve(folder: Path, tolerance: float, environment: Mapping[str, str]) -> None:
    """`train_parallel.py` by torchrun: two ranks have the losses of one, which fall."""

    def run(ranks: int, *options: str) -> str:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command += [str(TRAIN_PARALLEL), "--steps", "6", "--tokens", "256", *options]
        found = subprocess.run(command, cwd=folder, env=os.environ | environment, capture_output=True, text=True)
        assert found.returncode == 0, found.stderr[-2000:]
        return found.stdout

    run(1, "--losses", "one.json")
    assert "losses differ from one.json by" in run(2, "--compare", "one.json", "--tolerance", str(tolerance))
    losses = json.loads((folder / "one.json").read_text())
    assert losses[-1] < losses[0] - 0.5
