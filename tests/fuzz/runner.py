"""Random calls of every public operator, and mutated ones, until the time is over.

A failure prints a line that reruns it. Without a GPU all of it runs on the CPU by the reference, which the results say.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import multiprocessing
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.files import save_json
from flashdelta.problem import device_checks
from flashdelta.tools.environment import environment

from . import modes, mutate
from .draw import draw_spec

PARTS = ("calls", "mutations")


@dataclass(frozen=True)
class Outcome:
    """Verdict of a case: `right`, `refused` or `failed`, with what went wrong."""

    part: str
    number: int
    op: str
    verdict: str
    message: str = ""


def run_case(part: str, seed: int, number: int, device: torch.device) -> Outcome:
    torch.set_num_threads(1)
    spec = draw_spec(seed, number, device)
    own = zlib.crc32(f"{part} {seed}/{number}".encode())
    before, device_checks.ON_CPU = device_checks.ON_CPU, False  # the reference stands for a GPU: indices may be wild
    try:
        verdict = (modes if part == "calls" else mutate).check(spec, device, own)
        return Outcome(part, number, spec.op, verdict or "right")
    except Exception as error:
        return Outcome(part, number, spec.op, "failed", str(error))
    finally:
        device_checks.ON_CPU = before


def rerun_line(found: Outcome, seed: int, device: torch.device) -> str:
    return f"python -m tests.fuzz --part {found.part} --seed {seed} --case {found.number} --device {device}"


@dataclass
class Tally:
    """Verdicts of all cases so far; `file` holds it, too."""

    seed: int
    device: torch.device
    jobs: int = 1
    file: Path | None = None
    counts: Counter = field(default_factory=Counter)
    failures: list[dict] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def add(self, found: Outcome) -> None:
        self.counts[found.part, found.op, found.verdict] += 1
        if found.verdict == "failed":
            line = rerun_line(found, self.seed, self.device)
            stated = {"part": found.part, "op": found.op, "case": found.number}
            self.failures.append(stated | {"message": found.message[:400], "rerun": line})
            print(f"{line}  # {found.op}: {' '.join(found.message.split())[:300]}", flush=True)
            self.save()

    @functools.cached_property
    def environment(self) -> dict:
        return environment(self.device)

    def total(self, verdict: str) -> int:
        return sum(n for (_, _, own), n in self.counts.items() if own == verdict)

    def save(self) -> None:
        if self.file is not None:
            save_json(self.document(), self.file)

    def document(self) -> dict:
        names = ("part", "op", "verdict")
        rows = [dict(zip(names, key)) | {"cases": n} for key, n in sorted(self.counts.items())]
        backends = "kernels" if self.device.type == "cuda" else "reference alone: no GPU"
        about = {"benchmark": "fuzz", "environment": self.environment, "seed": self.seed}
        about |= {"seconds": round(time.monotonic() - self.started, 1), "jobs": self.jobs, "ran": backends}
        return about | {"cases": self.counts.total(), "rows": rows, "failures": self.failures}


def run_all(tally: Tally, cases: Iterator[tuple[str, int]], until: float) -> None:
    """In as many processes as there are jobs. Of one that ends, all cases that ran failed."""
    due = iter(lambda: next(cases, None) if time.monotonic() < until else None, None)
    if tally.jobs == 1:
        for part, number in due:
            tally.add(run_case(part, tally.seed, number, tally.device))
        return
    while True:
        running: dict[Future, tuple[str, int]] = {}
        with ProcessPoolExecutor(tally.jobs, multiprocessing.get_context("spawn")) as pool:
            try:
                while True:
                    for part, number in itertools.islice(due, tally.jobs - len(running)):
                        running[pool.submit(run_case, part, tally.seed, number, tally.device)] = part, number
                    if not running:
                        return
                    for done in wait(running, return_when=FIRST_COMPLETED).done:
                        found = done.result()
                        del running[done]
                        tally.add(found)
                        if "CUDA error" in found.message:  # nothing runs in its process any more
                            raise BrokenProcessPool
            except BrokenProcessPool:
                for part, number in running.values():
                    op = draw_spec(tally.seed, number, tally.device).op
                    tally.add(Outcome(part, number, op, "failed", "a process ended"))


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to draw cases (60)")
    parser.add_argument("--cases", type=int, help="how many cases of each part at most")
    parser.add_argument("--seed", type=int, default=0, help="what all cases are drawn from (0)")
    parser.add_argument("--part", choices=PARTS, help="random calls or mutated ones; both by default")
    parser.add_argument("--case", type=int, help="run this one alone")
    parser.add_argument("--jobs", type=int, default=1, help="processes (1)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cuda or cpu")
    parser.add_argument("--json", type=Path, help="file for counts, seed and failures")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    asked = parsed(arguments)
    tally = Tally(asked.seed, torch.device(asked.device), asked.jobs, asked.json)
    numbers = itertools.count() if asked.cases is None else range(asked.cases)
    numbers = numbers if asked.case is None else (asked.case,)
    try:
        parts = [asked.part] if asked.part else PARTS
        run_all(tally, ((part, number) for number in numbers for part in parts), time.monotonic() + asked.seconds)
    finally:
        tally.save()
    verdicts = ", ".join(f"{tally.total(x)} {x}" for x in ("right", "refused", "failed"))
    where = "on the GPU" if tally.device.type == "cuda" else "on the CPU, by the reference alone"
    print(f"seed {asked.seed}: {tally.counts.total()} cases {where}: {verdicts}")
    return int(tally.total("failed") > 0)
