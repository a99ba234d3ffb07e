"""How long the first calls of a new process take, before and after its kernels are cached.

`python -m flashdelta.tools.bench.startup JSON` is the measured process; it prints a JSON list for each call, as it ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

import flashdelta

from ...testing.cases import BF16, Case
from ...testing.inputs import make_call
from .contenders import Setup
from .timing import synchronize
from .workloads import Bound, Row, model

ROWS = (Row(model("first calls", "nothing is compiled yet", 32), "startup"),)
BUDGETS = {True: Bound("seconds", 8.0), False: Bound("seconds", 0.5)}
"""For the first call on an empty kernel cache, and for the first call of any other shape after it: by whether it compiles."""


def calls(tokens: int) -> tuple[Case, ...]:
    """The calls of a measured process in order, each of a shape not seen before. The first fixed and the first packed one
    may compile; another head count or length may not."""
    third, half = tokens // 3, tokens // 2 + 7
    few = model(f"H=12 T={tokens}", "other heads", 12, T=tokens)
    packed = (third, tokens - third)
    return (
        model(f"H=32 T={tokens}", "the first call", 32, T=tokens),
        few,
        replace(few, name=f"H=12 T={half}", why="another length", T=half),
        replace(few, name=f"H=12 packed {third}+{tokens - third}", why="packed sequences", lengths=packed),
    )


def measure(row: Row, setup: Setup) -> Iterator[dict]:
    """The measured process twice over one kernel cache, first empty, then filled.

    Raises:
        RuntimeError: the process failed; the message ends with its error output.
    """
    with tempfile.TemporaryDirectory(prefix="flashdelta-startup-") as cache:
        for process in ("empty cache", "new process, cache filled"):
            for i, (call, seconds) in enumerate(_measured_process(cache, setup)):
                budget = BUDGETS[i == 0 or "packed" in call]
                found = {"name": f"{process}: {call}", "table": process, "seconds": seconds, "ours": {"problem": None}}
                met = bool(budget.met(found, ()))
                yield found | {"bounds": {budget.words: met}, "met": met}


def _measured_process(cache: str, setup: Setup) -> Iterator[tuple[str, float]]:
    """Its calls as they end."""
    arguments = {"device": str(setup.device), "backend": setup.backend, "tokens": setup.tokens}
    command = [sys.executable, "-m", __name__, json.dumps(arguments)]
    environment = {**os.environ, "TRITON_CACHE_DIR": cache}
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        try:
            for line in process.stdout:
                yield tuple(json.loads(line))
        except BaseException:
            process.kill()
            raise
        if process.wait() != 0:
            errors.seek(0)
            raise RuntimeError(f"the measured process exited with {process.returncode}:\n{errors.read()[-2000:]}")


def main(device: str, backend: str, tokens: int) -> None:
    place = torch.device(device)
    # every input first: creating the CUDA context and the random number kernels is not ours to time
    prepared = [(case.name, make_call(case, BF16, place)) for case in calls(tokens)]
    synchronize(place)
    for name, call in prepared:
        start = time.perf_counter()
        with torch.inference_mode():
            flashdelta.chunk_kda(**call, backend=backend)
        synchronize(place)
        print(json.dumps((name, time.perf_counter() - start)), flush=True)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
