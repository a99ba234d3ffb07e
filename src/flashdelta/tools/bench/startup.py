"""The start-up benchmark: how long the first calls of a new process take, before and after its kernels are cached.

`python -m flashdelta.tools.bench.startup` is the measured process; it prints one JSON list.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

import torch

import flashdelta

from .cases import Shape
from .environment import environment
from .inputs import MODEL_OPTIONS, random_inputs
from .protocol import synchronize
from .report import STARTUP_BUDGET_S, new_document


def calls(tokens: int) -> tuple[tuple[str, Shape], ...]:
    """The calls of a measured process in order, each of a shape not seen before. The first fixed and the first packed one
    may compile; another head count or length may not."""
    third = tokens // 3
    return (
        (f"H=32 T={tokens}", Shape(T=tokens, H=32)),
        (f"H=12 T={tokens}", Shape(T=tokens, H=12)),
        (f"H=12 T={tokens // 2 + 7}", Shape(T=tokens // 2 + 7, H=12)),
        (f"H=12 packed {third}+{tokens - third}", Shape(lengths=(third, tokens - third), H=12)),
    )


def run_startup(device: torch.device, backend: str = "auto", tokens: int = 8192) -> dict:
    """Runs the measured process twice over one kernel cache, first empty, then filled; returns the document.

    Raises:
        RuntimeError: the process failed; the message ends with its error output.
    """
    document = new_document("startup", environment(device))
    document["protocol"] = {"backend": backend, "options": MODEL_OPTIONS, "dtype": "bfloat16"}
    with tempfile.TemporaryDirectory(prefix="flashdelta-startup-") as cache:
        for process in ("empty cache", "new process, cache filled"):
            measured = _measured_process(cache, device, backend, tokens)
            document["rows"] += [_row(process, i, call, seconds) for i, (call, seconds) in enumerate(measured)]
    return document


def _row(process: str, i: int, call: str, seconds: float) -> dict:
    compiles = i == 0 or "packed" in call
    budget = STARTUP_BUDGET_S["first" if compiles else "later"]
    return {"process": process, "call": call, "seconds": seconds, "budget_s": budget, "met": seconds <= budget}


def _measured_process(cache: str, device: torch.device, backend: str, tokens: int) -> list[tuple[str, float]]:
    command = [sys.executable, "-m", __name__, "--device", str(device), "--backend", backend, "--tokens", str(tokens)]
    done = subprocess.run(command, env={**os.environ, "TRITON_CACHE_DIR": cache}, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"the measured process exited with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", required=True)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--tokens", type=int, required=True)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    # every input first: creating the CUDA context and the random number kernels is not ours to time
    prepared = [(call, random_inputs(shape, device)) for call, shape in calls(arguments.tokens)]
    synchronize(device)
    seconds = []
    for call, inputs in prepared:
        start = time.perf_counter()
        with torch.inference_mode():
            flashdelta.chunk_kda(**inputs, **MODEL_OPTIONS, backend=arguments.backend)
        synchronize(device)
        seconds.append((call, time.perf_counter() - start))
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
