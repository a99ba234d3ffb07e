"""Runs a benchmark: for every row admits contenders that pass their check, times them, judges the row, saves the document."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import profiling
from .checks import fault
from .contenders import Contender, Results, Setup, Work
from .environment import environment
from .report import new_document, save
from .timing import (
    DEFAULT_EFFORT,
    Clock,
    Effort,
    Run,
    Timer,
    Timing,
    capture,
    ceilings,
    host_us,
    many_in_a_graph,
    peak_above,
    second_result,
    summarize,
    sustained,
    synchronize,
    take_turns,
    times_as_long,
    to_the_millisecond,
)
from .tuning import compiled_together
from .workloads import Bound, Row, quotient, value

GATED_GPUS = ("H200", "H100")
"""The GPUs that the bounds of workloads.py are for."""


@dataclass
class Outcome:
    """One contender in one row; `problem` says why it has no time.

    `ms` is cold (a CUDA graph where the contender is timed so only), `graph_ms` and `forward_ms` likewise; `sustained_ms` is a
    call amid others. Errors are by result. `first_call_s` includes compiling and any tuning. Peaks are above the inputs, and
    with them.
    """

    ms: Timing | None = None
    graph_ms: Timing | None = None
    forward_ms: Timing | None = None
    sustained_ms: float | None = None
    host_us: float | None = None
    host_changed_us: float | None = None
    error: dict[str, float] | None = None
    max_error: dict[str, float] | None = None
    rmse: dict[str, float] | None = None
    first_call_s: float | None = None
    peak_above_bytes: int | None = None
    peak_bytes: int | None = None
    kernels: list[dict] | None = None
    problem: str | None = None
    graph_problem: str | None = None

    def json(self) -> dict:
        """Without what was not measured, but for `ms` and `problem`."""
        return {name: x for name, x in asdict(self).items() if x is not None or name in ("ms", "problem")}


@dataclass(frozen=True)
class Benchmark:
    """A table of rows and what makes the calls of one: `make`, at once or part by part; or `measure`, which yields rows of the
    document.

    `more`: rows that are measured only when asked for. `quick`: names of rows; taken by themselves where there is no option of
    that name. `prefer`: the time whose ratio is the row's where both libraries have it. `over`: further ratios by name.
    `derive`: what else a finished row tells, given the document. `profiled_calls`: how many the profile of a contender is of
    (None: as many as samples). `options`: those of its command.
    """

    name: str
    help: str
    rows: Sequence[Any]
    make: Callable[[Any, Setup], Work | Iterable[Work]] | None = None
    measure: Callable[[Any, Setup], Iterable[dict]] | None = None
    more: Sequence[Any] = ()
    quick: tuple[str, ...] = ()
    effort: Effort = DEFAULT_EFFORT
    prefer: str = "ms"
    over: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    derive: Callable[[dict, dict], dict] = lambda row, document: {}
    ceilings: Callable[[torch.device, Timer], dict[str, float]] | None = ceilings
    grad: Callable[[], contextlib.AbstractContextManager] = torch.inference_mode
    profiled_calls: int | None = 5
    peers: tuple[str, ...] = ("fla",)
    options: tuple[str, ...] = ()


def run(
    benchmark: Benchmark,
    setup: Setup,
    path: Path,
    rows: Sequence[Any] | None = None,
    progress: Callable[[dict], None] = lambda row: None,
    **facts: object,
) -> dict:
    """Measures rows one after another and returns the document, which is saved to `path` after every one. `progress` is called
    with each finished row; `facts` are of the whole document."""
    document = new_document(benchmark.name, environment(setup.device))
    document["protocol"] = {"effort": asdict(setup.effort), "backend": setup.backend}
    document |= {"ceilings": dict(setup.ceilings), **facts} if setup.ceilings else facts
    for row in benchmark.rows if rows is None else rows:
        with benchmark.grad(), compiled_together(setup.device):
            found = benchmark.measure(row, setup) if benchmark.measure else parts(row, setup, benchmark)
            for each in found:
                each |= benchmark.derive(each, document)
                judge(each, row.bounds, document["rows"], is_gated(document))
                document["rows"].append(each)
                save(document, path)
                progress(each)
        torch.cuda.empty_cache()  # the next row has the GPU's memory to itself; does nothing without a GPU
    return document


def is_gated(document: dict) -> bool:
    """Whether it was measured on the GPU that bounds are for."""
    gpu = document["environment"]["gpu"]
    return gpu is not None and any(name in gpu["name"] for name in GATED_GPUS)


def judge_again(document: dict, benchmark: Benchmark) -> dict:
    """A saved document with the bounds of today, by the times that are in it. A row is held against others of its own run; rows
    that came judged stay as they are."""
    bounds = {row.name: row.bounds for row in (*benchmark.rows, *benchmark.more)}
    rows = []
    for row in document["rows"]:
        if row["name"] in bounds:
            unjudged = {name: x for name, x in row.items() if name not in ("bounds", "met")}
            beside = [other for other in document["rows"] if other.get("date") == row.get("date")]
            judge(unjudged, bounds[row["name"]], beside, is_gated(document))
            row = {name: unjudged[name] for name in row}  # in the order of before
        rows.append(row)
    return document | {"rows": rows}


def judge(row: dict, bounds: Sequence[Bound], rows: Sequence[dict], gated: bool) -> None:
    """Adds `bounds`, by their words whether each was met (None: not measured, or not on this GPU), and `met`: whether all
    were. One that is missed decides, but to meet them all, all must have been measured. Rows may come judged."""
    if "bounds" in row:
        return
    own = [bound for bound in bounds if bound.backend in (None, row.get("backend"))]
    found = {bound.words: bound.met(row, rows) if gated or bound.any_gpu else None for bound in own}
    met = list(found.values())
    row["bounds"] = found
    row["met"] = False if False in met else None if None in met or not met else True


def parts(row: Row, setup: Setup, benchmark: Benchmark) -> Iterator[dict]:
    """The rows of the document that a row makes, most often one."""
    assert benchmark.make is not None
    clock = Clock(setup.device)
    made = benchmark.make(row, setup)
    for work in [made] if isinstance(made, Work) else made:
        clock.lap("make")
        yield measure(row, work, setup, benchmark, clock)
        clock = Clock(setup.device)


def measure(row: Row, work: Work, setup: Setup, benchmark: Benchmark, clock: Clock) -> dict:
    """One row of the document, with the laps of `clock`. Contenders that raise or err are recorded, not timed."""
    outcomes: dict[str, Outcome] = {}
    for name, contender in work.contenders.items():  # all are checked before any is timed
        admitted = isinstance(contender, Contender)
        outcomes[name] = check(contender, work, setup) if admitted else Outcome(problem=contender)
    clock.lap("check")
    timed = {name: x for name, x in work.contenders.items() if outcomes[name].problem is None}
    runs: dict[tuple[str, str], Run] = {}
    for name, contender in timed.items():
        runs |= {(name, key): call for key, call in prepare(contender, outcomes[name], work, setup).items()}
    clock.lap("prepare")
    for (name, key), timing in take_turns(runs, setup.timer, setup.effort).items():
        setattr(outcomes[name], key, timing.over(work.launches))
    clock.lap("time")
    timed = {name: x for name, x in timed.items() if outcomes[name].problem is None}
    for name, ms in _sustained(timed, runs, outcomes, setup, benchmark.prefer, work.launches).items():
        outcomes[name].sustained_ms = ms / work.launches
    clock.lap("sustained")
    for name, contender in timed.items():
        if contender.describe is not None:
            calls = benchmark.profiled_calls or setup.effort.rounds
            found = profiling.profile_calls(contender.call, setup.timer, calls)
            outcomes[name].kernels = contender.describe(found, calls) if found else []
    clock.lap("profile")
    return describe(row, work, outcomes, setup, benchmark) | {"seconds": to_the_millisecond(clock.seconds)}


def check(contender: Contender, work: Work, setup: Setup) -> Outcome:
    """Errors of the contender's second result, and the seconds of its first call."""
    try:
        results, seconds = second_result(contender.checked or contender.call, setup.device)
        measured = work.errors(results)
        del results
        outcome = Outcome(**measured, first_call_s=seconds, problem=fault(measured["error"], contender.tolerance))
        if contender.memory and outcome.problem is None:
            outcome.peak_above_bytes = peak_above(contender.call, setup.device)
            if outcome.peak_above_bytes is not None and work.input_bytes is not None:
                outcome.peak_bytes = outcome.peak_above_bytes + work.input_bytes
    except Exception as error:  # whatever a contender raises, the other rows are worth having
        return Outcome(problem=summarize(error))
    return outcome


def prepare(contender: Contender, outcome: Outcome, work: Work, setup: Setup) -> dict[str, Run]:
    """What is timed of a contender, by its key in the row; its host times are taken at once."""
    runs = {"ms": contender.call, **contender.more}
    try:
        for key, call in contender.host.items():
            setattr(outcome, key, host_us(call, setup.device, setup.host_calls))
    except Exception as error:  # as in `check`
        outcome.problem = summarize(error)
    if contender.graph != "no" and setup.graphs:
        try:
            replay, results = capture(lambda: tuple(contender.call()))
            outcome.graph_problem = _check_replay(replay, results, contender, work, setup)
        except Exception as error:  # as in `check`
            outcome.graph_problem = summarize(error)
        if contender.graph == "only":
            outcome.problem = outcome.problem or outcome.graph_problem
        if outcome.graph_problem is None:
            runs["ms" if contender.graph == "only" else "graph_ms"] = replay
    return {} if outcome.problem else runs


def _check_replay(replay: Run, results: Results, contender: Contender, work: Work, setup: Setup) -> str | None:
    """A graph must write what the call writes."""
    if not results:
        return None
    for x in results:
        x.fill_(torch.nan)
    replay()
    synchronize(setup.device)
    return fault(work.errors(results)["error"], contender.tolerance)


def _sustained(
    timed: Mapping[str, Contender],
    runs: Mapping[tuple[str, str], Run],
    outcomes: Mapping[str, Outcome],
    setup: Setup,
    prefer: str,
    launches: int,
) -> dict[str, float]:
    """Milliseconds of a call amid others, of all contenders in the same way: the preferred one if all have it. Calls shorter
    than a graph's start are put into a graph by many."""
    paired = {name: contender.beside for name, contender in timed.items() if contender.beside in timed}
    apart = {name: contender for name, contender in timed.items() if name not in paired}
    key = prefer if all((name, prefer) in runs for name in apart) else "ms"
    calls, counts = {}, {}
    for name, contender in apart.items():
        calls[name], counts[name] = runs[name, key], 1
        timing = getattr(outcomes[name], key)
        in_graph = setup.graphs and (key == "graph_ms" or contender.graph == "only")
        if in_graph and launches == 1:
            calls[name], counts[name] = many_in_a_graph(contender.call, timing.median)
    found = {name: ms / counts[name] for name, ms in sustained(calls, setup.timer).items()}
    for name, other in paired.items():
        assert other is not None
        found[name] = found[other] * times_as_long(timed[name].call, timed[other].call, setup.timer)
    return found


def ratio(row: dict, over: str, under: str, prefer: str) -> float | None:
    """How often as long the one takes as the other, cold: by the preferred times if both have such."""
    found = (value(row, f"{over}.{key}.median/{under}.{key}.median") for key in (prefer, "ms"))
    return next((x for x in found if x is not None), None)


def describe(row: Row, work: Work, outcomes: Mapping[str, Outcome], setup: Setup, benchmark: Benchmark) -> dict:
    name = row.name if work.name is None else f"{row.name}: {work.name}"
    found = {"name": name, "table": row.table, "reason": row.why, "shape": work.shape, **work.facts}
    found |= {"launches": work.launches} if work.launches > 1 else {}
    found |= {name: outcome.json() for name, outcome in outcomes.items()}
    if work.bytes is not None:
        best = value(found, f"ours.{benchmark.prefer}.median") or value(found, "ours.ms.median")
        found |= {"bytes": work.bytes, "floor_ms": work.bytes / setup.ceilings["copy_tb_s"] / 1e9}
        found["share_of_floor"] = quotient(found["floor_ms"], best)
    found |= {"speedup": ratio(found, "fla", "ours", benchmark.prefer)}
    found |= {name: ratio(found, *pair, "graph_ms") for name, pair in benchmark.over.items()}
    return found | {"sustained_speedup": value(found, "fla.sustained_ms/ours.sustained_ms")}
