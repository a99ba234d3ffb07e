"""Runs the parts of a release's GPU evidence, each under its own time limit, and writes down what came of each as it ends.

    python -m tests.release --out DIR [--only PART ...] [--seconds N]

Called again with the same folder it goes on with what has not passed on this commit, what failed or timed out last;
`--only fuzz` fuzzes on, with another seed. Parts that take several GPUs go first, then one part on each GPU: they share the
host's processors. Bounds that a benchmark missed are said in the end. Folder: each part's results and what it printed, and
`parts.jsonl` with a line for each part: on which GPUs it ran, and beside which others.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import queue
import re
import shlex
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from flashdelta.tools.bench.environment import default_device, git_commit, gpu, versions
from flashdelta.tools.bench.pages import RESULTS
from flashdelta.tools.bench.report import MISSED, text_table

from ..support.gpus import visible_gpus
from . import log, processes
from .parts import PARTS, Part
from .processes import run_python

JOBS = 14
"""Processes a GPU: a core is left of each eight, for what they start."""

STARTS = 5.0
"""Seconds kept for starting a part and for writing down what came of it."""

MOST_SAID = 2000
"""Characters that are kept of a part's last line."""


@dataclass(frozen=True)
class Outcome:
    """Of a part. `status`: "passed", "failed", "timed out", "skipped" for want of a package, or "no time". `beside`: parts that
    ran at the same time, on other GPUs."""

    part: str
    status: str
    seconds: float = 0.0
    said: str = ""
    command: str = ""
    gpus: Sequence[str] = ()
    beside: Sequence[str] = ()


class Schedule:
    """Which part has which GPU: each to itself, the host shared."""

    def __init__(self, gpus: Sequence[str]):
        self.gpus, self.free = gpus, queue.SimpleQueue[str]()
        for name in gpus:
            self.free.put(name)
        self.running: dict[str, set[str]] = {}
        self.lock = threading.Lock()

    @contextlib.contextmanager
    def turn(self, part: Part) -> Iterator[tuple[Sequence[str], set[str]]]:
        """The part's GPUs, once they are free, and in the end what ran beside it."""
        names = [self.free.get() for _ in range(1 if part.gpus == 1 else len(self.gpus))]
        with self.lock:
            beside = set(self.running)
            for others in self.running.values():
                others.add(part.name)
            self.running[part.name] = beside
        try:
            yield sorted(names, key=self.gpus.index), beside
        finally:
            with self.lock:
                del self.running[part.name]
            for name in names:
                self.free.put(name)


def absent(need: str) -> bool:
    """Whether a module, or a variable of the environment, is missing."""
    return not os.environ.get(need) if need.isupper() else importlib.util.find_spec(need) is None


def last_line(path: Path) -> str:
    lines = path.read_bytes()[-20_000:].decode(errors="replace").split("\n") if path.exists() else []
    return next((line.strip()[:MOST_SAID] for line in reversed(lines) if line.strip()), "")


def next_seed(*folders: Path) -> int:
    """One that no run in the folders has had."""
    seeds = [0]
    for path in (path for folder in folders for path in folder.glob("fuzz-*.json")):
        with contextlib.suppress(ValueError):
            document = json.loads(path.read_text())
            seeds += [row.get("seed", document.get("seed", 0)) for row in [document, *document["rows"]]]
    return 1 + max(seeds)


def command_of(part: Part, out: Path, limit: float, gpus: int = 1) -> list[str]:
    seed = next_seed(RESULTS, out) if part.again else 0
    # a part that is told its time ends by itself
    given = {"out": str(out), "name": part.name, "limit": str(int(limit - 40)), "seed": str(seed)}
    given |= {"jobs": str(JOBS * gpus)}
    fill = re.compile("{(" + "|".join(given) + ")}")
    return [sys.executable, *(fill.sub(lambda found: given[found[1]], word) for word in part.command)]


def fault(path: Path) -> str:
    """What is wrong with a file that a part has written."""
    try:
        log.read(path) if path.suffix == ".jsonl" else json.loads(path.read_text())
    except (ValueError, OSError) as error:
        return f"{path.name}: {type(error).__name__}: {error}"
    return ""


def run_part(part: Part, out: Path, left: float, gpus: Sequence[str]) -> Outcome:
    """In a process group of its own. `left`: seconds of all that is to run."""
    missing = [need for need in part.needs if absent(need)]
    missing += [f"{part.gpus} GPUs"] if len(gpus) < part.gpus else []
    if missing:
        return Outcome(part.name, "skipped", said=f"not here: {', '.join(missing)}")
    limit = min(part.limit, left - STARTS - processes.GRACE)
    if limit < min(part.least, part.limit):
        return Outcome(part.name, "no time", said=f"{max(left, 0):.0f} s left")
    command, printed = command_of(part, out, limit, len(gpus)), out / f"{part.name}.log"
    words, began = shlex.join(command), time.monotonic()
    with printed.open("wb") as file:
        code = run_python(command[1:], file, limit, ",".join(gpus))
    status = {0: "passed", None: "timed out"}.get(code, "failed")
    seconds, said = round(time.monotonic() - began, 1), last_line(printed)
    wrong = next((fault(Path(word)) for word in command if word.startswith(str(out)) and status == "passed"), "")
    return Outcome(part.name, "failed" if wrong else status, seconds, wrong or said, words, gpus)


def run_all(parts: Sequence[Part], out: Path, seconds: float, facts: dict, again: bool = False) -> list[Outcome]:
    """In order, but what has failed or timed out with the same `facts` comes last, unless it goes on where it ended, and what
    takes several GPUs first. What has passed is not run again; `again`: but for parts that may be."""
    until, written, schedule = time.monotonic() + seconds, out / "parts.jsonl", Schedule(visible_gpus())
    before = [line for line in log.read(written) if all(line.get(name) == x for name, x in facts.items())]
    passed = {x["part"]: x["said"] for x in before if x["status"] == "passed"}
    failed, late = ({x["part"] for x in before if x["status"] == status} for status in ("failed", "timed out"))

    def run_one(part: Part) -> Outcome:
        with schedule.turn(part) as (gpus, beside):
            print(f"{part.name}: at most {part.limit} s, {part.why}", flush=True)
            found = run_part(part, out, until - time.monotonic(), gpus)
        found = replace(found, beside=sorted(beside))
        date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        with written.open("a") as file:
            file.write(json.dumps(asdict(found) | facts | {"date": date}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        print(f"{part.name}: {found.status} in {found.seconds:.0f} s; {found.said}", flush=True)
        return found

    done = [part for part in parts if part.name in passed and not (again and part.again)]
    last = failed | (late - {part.name for part in parts if part.resumes})
    left = sorted((part for part in parts if part not in done), key=lambda part: part.name in last)
    found = [Outcome(part.name, "passed", said=f"before: {passed[part.name]}") for part in done]
    found += [run_one(part) for part in left if part.gpus != 1]
    with ThreadPoolExecutor(len(schedule.gpus)) as pool:
        return found + list(pool.map(run_one, [part for part in left if part.gpus == 1]))


def table(parts: Sequence[Part]) -> str:
    lines = [[x.name, f"{x.limit}", x.results or "-", ", ".join(x.needs) or "-", x.why] for x in parts]
    return text_table([["part", "most s", "results file", "needs", "why"], *lines])


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(prog="python -m tests.release", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for results; the same one again goes on")
    parser.add_argument(
        "--only", choices=names, action="append", help="this part alone; repeatable, in the order given"
    )
    parser.add_argument("--seconds", type=float, default=585.0, help="of all parts together (585)")
    parser.add_argument("--list", action="store_true", help="print the parts, and run none")
    asked = parser.parse_args(arguments)
    if asked.out is None and not asked.list:
        parser.error("--out: wanted a folder")
    return asked


def main(arguments: list[str] | None = None) -> int:
    asked = parsed(arguments)
    by_name = {part.name: part for part in PARTS}
    parts = [by_name[name] for name in asked.only or by_name]
    if asked.list:
        print(table(parts))
        return 0
    found, commit = gpu(default_device()), git_commit()
    if found is None:
        raise SystemExit("tests.release: got no GPU, wanted an NVIDIA GPU that PyTorch can see")
    if commit is None:
        raise SystemExit("tests.release: this copy has no git history; set FLASHDELTA_COMMIT")
    out = asked.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    facts = {"commit": commit, "gpu": found["name"], "versions": versions()}
    outcomes = run_all(parts, out, asked.seconds, facts, again=asked.only is not None)
    lines = [[x.part, x.status, f"{x.seconds:.0f}", x.said[:80]] for x in outcomes]
    print(text_table([["part", "status", "s", "said"], *lines]))
    for x in outcomes:
        if MISSED in x.said:
            print(f"{x.part}: {x.said}")
    return 0 if all(x.status == "passed" for x in outcomes) else 1
