"""Compiles what parts will run, many rows at a time: alone, a benchmark waits for its compilers more than it measures.

Every row is run once by one of many processes that share the GPU, and nothing of it is kept but machine code: not times, nor
what other libraries' tuners chose meanwhile.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from flashdelta.tools.bench.benchmarks import BENCHMARKS
from flashdelta.tools.cli.bench import Options, chosen_rows

from .parts import Part

BENCH = ("-m", "flashdelta", "bench")
MOST_ROWS = 4
"""Of a process: it may have to tune another library for each."""

TUNED = "*/*.autotune.json"
"""In Triton's cache: what a tuner chose."""


def cache() -> Path:
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")


def rows_of(part: Part) -> tuple[list[str], list[str]]:
    """The names of a benchmark's rows, and what else it is told of contenders; nothing of other parts."""
    if part.command[:3] != BENCH:
        return [], []
    name, *words = part.command[3:]
    texts, others, quick = [], [], False
    given = iter(words)
    for word in given:
        if word == "--rows":
            texts.append(next(given))
        elif word == "--quick":
            quick = True
        elif word in ("--json", "--repeats"):
            next(given)
        else:
            others += [word, next(given)]
    benchmark = BENCHMARKS[name]
    if benchmark.measure is not None:  # whole processes of its own
        return [], []
    return [row.name for row in chosen_rows(benchmark, Options("cuda", rows=texts, quick=quick))], others


def commands(parts: Sequence[Part], jobs: int) -> list[list[str]]:
    """Of all parts, with neighbours in the same one: they share most of their kernels."""
    found = {part.name: rows_of(part) for part in parts}
    share = min(math.ceil(sum(len(names) for names, _ in found.values()) / jobs), MOST_ROWS) or 1
    made = []
    for part in parts:
        names, others = found[part.name]
        for first in range(0, len(names), share):
            rows = [word for name in names[first : first + share] for word in ("--rows", name)]
            made.append([*part.command[:4], *others, *rows, "--repeats", "1", "--json"])
    return made


def warm(parts: Sequence[Part], jobs: int, seconds: float, end: Callable[[subprocess.Popen], None]) -> str:
    """What came of it. `end`: how to end a process with all that it has started."""
    began, before = time.monotonic(), set(cache().glob(TUNED))
    waiting, running, ended = commands(parts, jobs), list[subprocess.Popen](), 0
    asked = len(waiting)
    with tempfile.TemporaryDirectory() as folder:
        while (waiting or running) and time.monotonic() - began < seconds:
            while waiting and len(running) < jobs:
                command = [sys.executable, *waiting.pop(0), f"{folder}/{len(waiting)}.json"]
                with Path(folder, "log").open("ab") as file:
                    running.append(subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True))
            time.sleep(0.2)
            ended += sum(process.poll() is not None for process in running)
            running = [process for process in running if process.poll() is None]
        for process in running:
            end(process)
    for path in set(cache().glob(TUNED)) - before:
        with suppress(FileNotFoundError):
            path.unlink()
    return f"{ended} of {asked} processes ended in {time.monotonic() - began:.0f} s"
