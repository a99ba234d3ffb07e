"""The command of every benchmark: checks contenders, times them in turns, prints a line per row and saves JSON.

    python -m benchmarks.prefill --rows "T8192 H64"

A results file has `program`, `runs` (date, versions, GPU, commit, rates of the GPU) and `rows`. A row names its run and has,
per contender, `cold_ms`, `sustained_ms`, `graph_cold_ms`, `graph_sustained_ms`, `error` by result, and `problem`: why there is
no time. A row measured again replaces the one of its name.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashdelta import backends
from flashdelta.tools.devices import capture, default_device, synchronize
from flashdelta.tools.environment import environment

from . import contenders, timing
from .files import require_writable, save_json
from .gate import PEER_TOLERANCE, Errors, Results, fault, second_result
from .workloads import Row

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Contender:
    """A call to time. `modes`: "eager" and "graph". `checked`, if given, runs instead where results are checked. `more`: calls
    timed cold, by their key in the row. `host`: an eager call whose host time is taken."""

    call: Callable[[], Results]
    tolerance: float = PEER_TOLERANCE
    checked: Callable[[], Results] | None = None
    modes: tuple[str, ...] = ("eager",)
    more: Mapping[str, timing.Run] = field(default_factory=dict)
    host: timing.Run | None = None
    memory: bool = False


@dataclass(frozen=True)
class Work:
    """The calls of a row by contender, or why there is none; `errors` of a contender's results; `facts` for the JSON. A call
    makes `launches` launches, and a row has the time of one."""

    contenders: Mapping[str, Contender | str]
    errors: Callable[[Results], Errors]
    facts: Mapping[str, object] = field(default_factory=dict)
    launches: int = 1


@dataclass(frozen=True)
class Setup:
    """Settings of a run. `peers`: functions of other libraries, or why there is none. Pools of states take `pool_bytes`, and a
    graph reads `graph_bytes` of them, in at most `launches` launches."""

    device: torch.device
    timer: Any
    rounds: int = 50
    backend: str = "auto"
    peers: Mapping[str, Any] = field(default_factory=dict)
    ceilings: Mapping[str, float] = field(default_factory=dict)
    kernels: bool = False
    pool_bytes: int = 2**32
    graph_bytes: int = 2**31
    launches: int = 512
    host_calls: int = 200
    pools: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def peer(self, name: str, make: Callable[[Any], Any]) -> Any:
        """`make` of the library's function, or why the library takes no part."""
        found = self.peers.get(name, "not asked for")
        try:
            return found if isinstance(found, str) else make(found)
        except Exception as error:  # whatever a library raises, the others are worth having
            return summarize(error)


@dataclass(frozen=True)
class Program:
    """A benchmark: its rows, what makes a row's work, and the libraries that take part. `measure` replaces the whole
    measurement of a row."""

    name: str
    rows: Sequence[Row]
    make: Callable[[Any, Setup], Work] | None = None
    peers: tuple[str, ...] = ()
    grad: Callable[[], contextlib.AbstractContextManager] = torch.inference_mode
    measure: Callable[[Any, Setup], dict] | None = None


LEAST_LAUNCHES = 16
"""Launches in a graph: starting one takes some microseconds, which are not the steps'."""


def slots_of_launches(setup: Setup, N: int, T: int, state_bytes: int) -> tuple[int, list[Tensor]]:
    """The number of slots, and for each launch a tensor of `N * T` of its own, aligned as an engine's are: the same again where
    memory is short. Launches read `graph_bytes` of states together."""
    launches = min(setup.launches, max(LEAST_LAUNCHES, -(-setup.graph_bytes // (N * state_bytes))))
    tables = max(1, min(launches, setup.pool_bytes // (N * T * state_bytes)))
    order = torch.randperm(tables * N * T, generator=torch.Generator().manual_seed(0)).int()
    each = [x.to(setup.device, copy=True) for x in order.view(tables, -1)]
    return len(order), [each[i % tables] for i in range(launches)]


def in_launches(
    run: Callable, slots: Sequence[Tensor], checked: Callable[[], Results], tolerance: float, host: bool = False
) -> Contender:
    """A graph's launches, each on slots of its own. It returns nothing: `checked` checks one of them."""

    def run_each() -> Results:
        for each in slots:
            run(each)
        return ()

    return Contender(run_each, tolerance, checked, ("graph",), host=(lambda: run(slots[0])) if host else None)


# ---- a row -------------------------------------------------------------------------------------------------------------


def summarize(error: Exception) -> str:
    """An exception in one line."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


def checked(contender: Contender, work: Work, setup: Setup) -> dict:
    """A contender's errors, or its problem."""
    try:
        results = second_result(contender.checked or contender.call, setup.device)
        found: dict[str, Any] = {"error": work.errors(results)}
        del results
        found["problem"] = fault(found["error"], contender.tolerance)
        if contender.memory and found["problem"] is None:
            found["peak_above_bytes"] = timing.peak_above(contender.call, setup.device)
        if contender.host is not None:
            found["host_us"] = timing.host_us(contender.host, setup.device, setup.host_calls)
    except Exception as error:  # whatever a contender raises, the others are worth having
        found = {"problem": summarize(error)}
    return found


def graphed(contender: Contender, work: Work, setup: Setup) -> timing.Run:
    """The replay of the call's CUDA graph, once it writes what the call writes."""
    replay, results = capture(lambda: tuple(contender.call()))
    for x in results:
        x.fill_(torch.nan)
    replay()
    synchronize(setup.device)
    wrong = fault(work.errors(results), contender.tolerance) if results else None
    if wrong:
        raise RuntimeError(wrong)
    return replay


def prepared(work: Work, found: dict[str, dict], setup: Setup) -> dict[tuple[str, str], timing.Run]:
    """The calls to time, by contender and key of the time."""
    runs: dict[tuple[str, str], timing.Run] = {}
    for name, contender in work.contenders.items():
        if isinstance(contender, str) or found[name]["problem"]:
            continue
        if "eager" in contender.modes:
            runs |= {(name, "cold_ms"): contender.call} | {(name, key): run for key, run in contender.more.items()}
        if "graph" in contender.modes and setup.device.type == "cuda":
            try:
                runs[name, "graph_cold_ms"] = graphed(contender, work, setup)
            except Exception as error:
                found[name]["graph_problem" if "eager" in contender.modes else "problem"] = summarize(error)
        elif "eager" not in contender.modes:  # without a GPU there are no graphs
            runs[name, "graph_cold_ms"] = contender.call
    return runs


def measured(work: Work, setup: Setup) -> dict[str, dict]:
    """Errors and times by contender. All contenders are checked before any is timed."""
    found: dict[str, dict[str, Any]] = {
        name: {"problem": x} if isinstance(x, str) else checked(x, work, setup) for name, x in work.contenders.items()
    }
    runs = prepared(work, found, setup)
    for (name, key), ms in timing.cold(runs, setup.timer, setup.rounds).items():
        found[name][key] = ms / work.launches
    for key in ("cold_ms", "graph_cold_ms"):
        calls, counts = {}, {}
        for name in [name for name, own in runs if own == key]:
            calls[name], counts[name] = runs[name, key], work.launches
            if key == "graph_cold_ms" and work.launches == 1 and setup.device.type == "cuda":
                call = work.contenders[name].call  # type: ignore[union-attr]
                calls[name], counts[name] = timing.many_in_a_graph(call, found[name][key])
        for name, ms in timing.sustained(calls, setup.timer).items():
            found[name][key.replace("cold", "sustained")] = ms / counts[name]
    for name in {name for name, _ in runs} if setup.kernels else ():
        call = work.contenders[name].call  # type: ignore[union-attr]
        found[name]["kernels"] = timing.cold_kernels(call, setup.timer, 5, work.launches)
    return found


def measure(program: Program, row: Row, setup: Setup) -> dict:
    """A row of the results file."""
    with program.grad(), timing.compiled_together(setup.device):
        if program.measure is not None:
            found = program.measure(row, setup)
        else:
            assert program.make is not None
            try:
                work = program.make(row, setup)
                found = {**work.facts, "contenders": measured(work, setup)}
            except Exception as error:  # no memory, or a framework that raises: the other rows are worth having
                found = {"contenders": {"ours": {"problem": summarize(error)}}}
    if setup.device.type == "cuda":
        torch.cuda.empty_cache()  # the next row has the GPU's memory to itself
    asked = "" if setup.backend == "auto" else f" [{setup.backend}]"
    return {"name": row.name + asked, "table": row.table, **found}


# ---- files -------------------------------------------------------------------------------------------------------------


def load(path: Path) -> dict:
    return json.loads(path.read_text())


def record(path: Path, program: str, run: dict, row: dict) -> None:
    """Puts a row of `run` into a results file, in place of the row of its name. Runs without rows go."""
    document: dict[str, Any] = load(path) if path.exists() else {"program": program, "runs": [], "rows": []}
    runs = document["runs"] + [run] * (run not in document["runs"])
    row = {**row, "run": runs.index(run)}
    rows = [row if x["name"] == row["name"] else x for x in document["rows"]]
    rows += [] if row in rows else [row]
    used = sorted({x["run"] for x in rows})
    rows = [{**x, "run": used.index(x["run"])} for x in rows]
    save_json({"program": program, "runs": [runs[i] for i in used], "rows": rows}, path)


def measure_all(program: Program, rows: Sequence[Row], setup: Setup, path: Path) -> Iterator[dict]:
    """Measures and records rows one after another."""
    run = {**environment(setup.device), "ceilings": dict(setup.ceilings), "rounds": setup.rounds}
    for row in rows:
        print(f"measuring {row.name}", file=sys.stderr, flush=True)
        found = measure(program, row, setup)
        record(path, program.name, run, found)
        yield found


# ---- the command -------------------------------------------------------------------------------------------------------


def select(rows: Sequence[Row], texts: Sequence[str]) -> list[Row]:
    """The rows of these names, or with names that contain a text; the usual rows without any text.

    Raises:
        ValueError: a text fits no row.
    """
    if not texts:
        return [row for row in rows if row.usual]
    names = [row.name for row in rows]
    picked: set[str] = set()
    for text in texts:
        found = {text} & {*names} or {name for name in names if text in name}
        if not found:
            raise ValueError(f"no row {text!r}; --list shows the rows")
        picked |= found
    return [row for row in rows if row.name in picked]


def line(row: dict) -> str:
    """A finished row: each contender's sustained time, by graph where it has no other."""
    parts = []
    for name, x in row["contenders"].items():
        ms = next((x[key] for key in ("sustained_ms", "graph_sustained_ms", "cold_ms") if x.get(key)), None)
        said = None if ms is None else f"{ms:.3f} ms" if ms >= 0.1 else f"{ms * 1e3:.1f} us"
        if said or name == "ours":
            parts.append(f"{name} {said or x['problem']}")
    return f"{row['name']}: {', '.join(parts)}"


def parser(program: Program) -> argparse.ArgumentParser:
    known = argparse.ArgumentParser(prog=f"python -m benchmarks.{program.name}")
    known.add_argument("--rows", action="append", default=[], help="a row's name, or a part of names; repeatable")
    known.add_argument("--list", action="store_true", help="print the rows and why each is there")
    known.add_argument("--backend", default="auto", choices=["auto", *(x.name for x in backends.BACKENDS)])
    known.add_argument("--peers", nargs="*", choices=program.peers, help="other libraries that take part (all)")
    known.add_argument("--rounds", type=int, default=50, help="cold samples per contender, at most (50)")
    known.add_argument("--kernels", action="store_true", help="also time each kernel")
    known.add_argument("--out", type=Path, help="results file (benchmarks/results/<program>-<gpu>.json)")
    return known


def main(program: Program, arguments: Sequence[str] | None = None) -> int:
    """Exit code 1 if a result of ours is wrong."""
    known = parser(program)
    asked = known.parse_args(arguments)
    try:
        rows = select(program.rows, asked.rows)
        if asked.list:
            shown = rows if asked.rows else program.rows
            print("\n".join(f"{x.name}{'' if x.usual else ' (if asked for)'}: {x.why}" for x in shown))
            return 0
        if not torch.cuda.is_available():
            raise ValueError("no NVIDIA GPU; rows are full-size calls")
        device = default_device()
        gpu = torch.cuda.get_device_name(device).removeprefix("NVIDIA ").split(" ")[0].lower()
        path = asked.out or RESULTS / f"{program.name}-{gpu}.json"
        require_writable("--out", path)
    except ValueError as error:
        known.error(str(error))
    timer = timing.Timer(device)
    peers = {name: contenders.find(name) for name in (program.peers if asked.peers is None else asked.peers)}
    setup = Setup(device, timer, asked.rounds, asked.backend, peers, timing.ceilings(device, timer), asked.kernels)
    for name, why in peers.items():
        if isinstance(why, str):
            print(f"{name}: {why}", file=sys.stderr)
    wrong = 0
    for row in measure_all(program, rows, setup, path):
        wrong += row["contenders"]["ours"].get("problem") is not None
        print(line(row), flush=True)
    print(f"saved to {path}")
    return int(wrong > 0)
