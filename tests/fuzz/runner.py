"""Random calls of every public operator, and mutated ones, until the time is over.

A failure prints a line that reruns it. Without a GPU all of it runs on the CPU by the reference, which the results say.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import multiprocessing
import shlex
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch

from flashdelta.problem import device_checks
from flashdelta.tools.environment import environment
from flashdelta.tools.files import save_json

from . import modes, mutate
from .draw import draw_spec

PARTS = ("calls", "mutations")


@dataclass(frozen=True)
class Outcome:
    """Of a case: `right`, `refused` or `failed`, with what went wrong."""

    part: str
    number: int
    op: str
    verdict: str
    message: str = ""


def run_case(part: str, seed: int, number: int, device: torch.device) -> Outcome:
    spec = draw_spec(seed, number, device)
    own = zlib.crc32(f"{part} {seed}/{number}".encode())
    before, device_checks.ON_CPU = device_checks.ON_CPU, False  # the reference stands for a GPU: indices may be wild
    try:
        verdict = (modes if part == "calls" else mutate).check(spec, device, own) or "right"
        return Outcome(part, number, spec.op, verdict)
    except Exception as error:
        return Outcome(part, number, spec.op, "failed", str(error))
    finally:
        device_checks.ON_CPU = before


def rerun_line(found: Outcome, seed: int, device: torch.device) -> str:
    words = ["python", "-m", "tests.fuzz", "--part", found.part, "--seed", seed, "--case", found.number]
    return shlex.join(map(str, [*words, "--device", device]))


SAVED_EVERY = 10.0
"""Seconds from one state of the file to the next: a run that is killed leaves what it found."""


@dataclass
class Tally:
    """What came of all cases so far; `file` holds it, too."""

    seed: int
    device: torch.device
    jobs: int = 1
    file: Path | None = None
    counts: Counter = field(default_factory=Counter)
    failures: list[dict] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    saved: float = field(default_factory=time.monotonic)

    def add(self, found: Outcome) -> None:
        self.counts[found.part, found.op, found.verdict] += 1
        if found.verdict == "failed":
            line = rerun_line(found, self.seed, self.device)
            stated = {"part": found.part, "op": found.op, "case": found.number}
            self.failures.append(stated | {"message": found.message[:400], "rerun": line})
            print(f"{line}  # {found.op}: {' '.join(found.message.split())[:300]}", flush=True)
        if found.verdict == "failed" or time.monotonic() - self.saved > SAVED_EVERY:
            self.save()

    def total(self, verdict: str) -> int:
        return sum(n for (_, _, own), n in self.counts.items() if own == verdict)

    @functools.cached_property
    def environment(self) -> dict:
        return environment(self.device)

    def save(self) -> None:
        if self.file is not None:
            save_json(self.document(), self.file)
        self.saved = time.monotonic()

    def document(self) -> dict:
        rows = [
            {"part": part, "op": op, "verdict": verdict, "cases": n}
            for (part, op, verdict), n in sorted(self.counts.items())
        ]
        backends = "kernels" if self.device.type == "cuda" else "reference alone: no GPU"
        stated = {"seed": self.seed, "seconds": round(time.monotonic() - self.started, 1), "jobs": self.jobs}
        stated |= {"ran": backends, "cases": self.counts.total()}
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        about = {"benchmark": "fuzz", "date": now, "environment": self.environment}
        return about | stated | {"rows": rows, "failures": self.failures}


def numbers(worker: int, jobs: int, most: int | None, until: float) -> Iterator[int]:
    number = worker
    while time.monotonic() < until and (most is None or number < most):
        yield number
        number += jobs


def work(
    worker: int, jobs: int, parts: tuple, seed: int, device: str, most: int | None, until: float, out: Connection
) -> None:
    """One process: every `jobs`-th case of each part."""
    torch.set_num_threads(1)
    for number in numbers(worker, jobs, most, until):
        for part in parts:
            found = run_case(part, seed, number, torch.device(device))
            out.send(found)
            if "CUDA error" in found.message:
                # nothing runs in this process any more
                return
    out.close()


def run_all(tally: Tally, jobs: int, parts: tuple, most: int | None, seconds: float) -> None:
    until = time.monotonic() + seconds
    if jobs == 1:
        for number in numbers(0, 1, most, until):
            for part in parts:
                tally.add(run_case(part, tally.seed, number, tally.device))
        return
    context, running = multiprocessing.get_context("spawn"), {}
    for worker in range(jobs):
        reader, writer = context.Pipe(duplex=False)
        arguments = (worker, jobs, parts, tally.seed, str(tally.device), most, until, writer)
        process = context.Process(target=work, args=arguments, daemon=True)
        process.start()
        writer.close()
        due = ((number, part) for number in itertools.count(worker, jobs) for part in parts)
        running[reader] = process, due
    while running:
        for reader in wait(running):
            process, due = running[reader]
            try:
                tally.add(reader.recv())
                next(due)
            except EOFError:
                del running[reader]
                process.join()
                if process.exitcode != 0:
                    number, part = next(due)
                    op = draw_spec(tally.seed, number, tally.device).op
                    tally.add(Outcome(part, number, op, "failed", f"its process ended with {process.exitcode}"))


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
    asked = parser.parse_args(arguments)
    if asked.json is not None and asked.case is not None:
        parser.error("--json: a single case is no run of its seed")
    return asked


def main(arguments: list[str] | None = None) -> int:
    asked = parsed(arguments)
    parts = PARTS if asked.part is None else (asked.part,)
    tally = Tally(asked.seed, torch.device(asked.device), asked.jobs, asked.json)
    torch.set_num_threads(1)
    if asked.case is not None:
        for part in parts:
            found = run_case(part, asked.seed, asked.case, tally.device)
            print(f"{found.op}: {found.verdict}  {found.message}")
            tally.add(found)
    else:
        try:
            run_all(tally, asked.jobs, parts, asked.cases, asked.seconds)
        finally:
            tally.save()
        verdicts = ", ".join(f"{tally.total(x)} {x}" for x in ("right", "refused", "failed"))
        where = "on the GPU" if tally.device.type == "cuda" else "on the CPU, by the reference alone"
        print(f"seed {asked.seed}: {tally.counts.total()} cases {where}: {verdicts}")
    return 1 if tally.total("failed") else 0
