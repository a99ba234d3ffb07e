"""Compiles what parts will run, many rows at a time: alone, a benchmark waits for its compilers more than it measures.

Every row is run once by one of many processes that share the GPU, and nothing of it is kept but machine code: not times, nor
what other libraries' tuners chose meanwhile.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from typer.main import get_command

from flashdelta.tools.bench.benchmarks import BENCHMARKS
from flashdelta.tools.bench.runner import Benchmark
from flashdelta.tools.cli.app import app
from flashdelta.tools.cli.bench import Options, chosen_rows

from .parts import Part
from .processes import run_python

BENCH = ("-m", "flashdelta", "bench")
MOST_ROWS = 4
"""Of a process: it may have to tune another library for each."""

TUNED = "*/*.autotune.json"
"""In Triton's cache: what a tuner chose."""


def cache() -> Path:
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")


def asked_of_bench(words: Sequence[str]) -> tuple[Benchmark, Options]:
    """What `flashdelta bench` is asked by `words`; raises where they do not parse."""
    name, *rest = words
    given = get_command(app).commands["bench"].commands[name].make_context(name, rest).params
    return BENCHMARKS[name], Options(**given)


def commands(parts: Sequence[Part], jobs: int) -> list[list[str]]:
    """Of all parts' rows, but those of benchmarks that start processes of their own. Neighbours are in the same command: they
    share most of their kernels."""
    asked = [asked_of_bench(part.command[3:]) for part in parts if part.command[:3] == BENCH]
    found = [
        (benchmark.name, options, chosen_rows(benchmark, options)) for benchmark, options in asked if benchmark.make
    ]
    share = min(math.ceil(sum(len(rows) for _, _, rows in found) / jobs), MOST_ROWS)
    made = []
    for name, options, rows in found:
        backend = () if options.backend == "auto" else ("--backend", options.backend)
        for first in range(0, len(rows), share):
            picked = [word for row in rows[first : first + share] for word in ("--rows", row.name)]
            made.append([*BENCH, name, *backend, *picked, "--repeats", "1", "--json"])
    return made


def warm_up(parts: Sequence[Part], jobs: int, seconds: float) -> str:
    """What came of it."""
    began, before = time.monotonic(), set(cache().glob(TUNED))
    asked = commands(parts, jobs)

    def ends(number: int) -> bool:
        left = began + seconds - time.monotonic()
        return left > 0 and run_python([*asked[number], f"{folder}/{number}.json"], printed, left) is not None

    with tempfile.TemporaryFile() as printed, tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        ended = sum(pool.map(ends, range(len(asked))))
    for path in set(cache().glob(TUNED)) - before:
        path.unlink(missing_ok=True)
    return f"{ended} of {len(asked)} processes ended in {time.monotonic() - began:.0f} s"
