"""The forward over whole prompts beside FLA, with errors and ceilings from the same run: what fills every table of cases.py."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

import flashdelta

from .cases import TABLES, PrefillCase, Target
from .environment import environment
from .inputs import MODEL_OPTIONS, UNBOUNDED_OPTIONS, Inputs, random_inputs
from .oracle import RECURRENCE_TOKENS, TOLERANCE, Truth, absolute_errors, fault, relative_error, truth
from .peers import Peer
from .protocol import (
    Ceilings,
    Effort,
    Run,
    Timer,
    Timing,
    capture,
    measure_ceilings,
    second_result,
    summarize,
    synchronize,
    take_turns,
    timer_for,
)
from .report import add_row, new_document

GATED_GPU = "H200"
"""The GPU that the targets of cases.py are for."""


@dataclass(frozen=True)
class Outcome:
    """One contender in one row.

    `ms` is None where it was not timed, and `problem` says why: it raised, it failed the correctness gate, or it was
    not asked to run. `first_call_s` is the first call in this process, so it includes compiling and any tuning. Errors of
    `o` and of the final state against the truth: `error_*` relative, `rmse_*` and `max_error_*` absolute.
    """

    ms: Timing | None = None
    error_o: float | None = None
    error_state: float | None = None
    rmse_o: float | None = None
    rmse_state: float | None = None
    max_error_o: float | None = None
    max_error_state: float | None = None
    first_call_s: float | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Setup:
    """What all rows of a run share. `fla_rows` are the names of the rows in which FLA takes part; `gated` says whether the
    targets of cases.py apply to this GPU."""

    device: torch.device
    timer: Timer
    ceilings: Ceilings
    backend: str
    fla: Peer
    fla_rows: frozenset[str]
    effort: Effort
    gated: bool = False


Others = Mapping[str, Callable[[PrefillCase, Inputs, Setup], Run]]
"""Further contenders by name: what makes the call of a row."""


def measure_row(case: PrefillCase, setup: Setup, others: Others | None = None) -> dict:
    """One row of the document. Contenders that raise or err are recorded, not timed."""
    inputs = case_inputs(case, setup)
    serial = case.shape.tokens
    reference = truth(inputs, options_of(case), "recurrence" if serial <= RECURRENCE_TOKENS else "chunked")
    outcomes, runs = _admit(case, setup, inputs, reference, others or {})
    for name, timing in take_turns(runs, setup.timer, setup.effort).items():
        outcomes[name] = replace(outcomes[name], ms=timing)
    ours, fla = outcomes["ours"].ms, outcomes["fla"].ms
    floor_ms = case.shape.forward_bytes() / setup.ceilings.copy_tb_s / 1e9
    speedup = fla.median / ours.median if ours and fla else None
    chosen, segments = _chosen(case, inputs, setup.backend)
    row = {
        "name": case.name,
        "table": next((table for table, cases in TABLES.items() if case in cases), None),
        "reason": case.reason,
        "shape": {**asdict(case.shape), "HV": case.shape.value_heads, "T": case.shape.tokens},
        "reference": f"{reference.method}, float64",
        "backend": chosen,
        "segments": segments,
        "floor_ms": floor_ms,
        "speedup": speedup,
        "share_of_floor": floor_ms / ours.median if ours else None,
        **{name: asdict(outcome) for name, outcome in outcomes.items()},
    }
    if case.target is not None:
        measured = (ours.median if ours else None, speedup) if setup.gated else (None, None)
        gate, met = judge(case.target, chosen, *measured)
        row |= {"must_ms": case.target.must, "aim_ms": case.target.aim, "gate": gate, "met": met}
    return row


def run_prefill(
    cases: Sequence[PrefillCase],
    *,
    benchmark: str = "prefill",
    measure: Callable[[PrefillCase, Setup], dict] = measure_row,
    device: torch.device,
    backend: str = "auto",
    fla: Peer,
    fla_rows: frozenset[str],
    effort: Effort,
    path: Path,
    timer: Timer | None = None,
    ceilings: Ceilings | None = None,
    progress: Callable[[dict], None] = lambda row: None,
) -> dict:
    """Measures `cases` one after another and returns the document, which is saved to `path` after every row.

    Args:
        benchmark: what the document is called.
        measure: makes a row of a case.
        fla, fla_rows: the peer and the names of the rows in which it is timed.
        timer, ceilings: how to time and what the device can do; both found out from `device` by default.
        progress: called with each finished row of the document.
    """
    timer = timer or timer_for(device)
    ceilings = ceilings or measure_ceilings(device, timer)
    document = new_document(benchmark, environment(device))
    gpu = document["environment"]["gpu"]
    gated = gpu is not None and GATED_GPU in gpu["name"]
    setup = Setup(device, timer, ceilings, backend, fla, fla_rows, effort, gated)
    document["protocol"] = {
        "clock": type(timer).__name__,
        "effort": asdict(effort),
        "options": MODEL_OPTIONS,
        "dtype": "bfloat16",
        "backend": backend,
    }
    document["ceilings"] = asdict(ceilings)
    for case in cases:
        with torch.inference_mode():
            row = measure(case, setup)
        compare(case, row, document["rows"], gated)
        add_row(document, row, path, progress)
    return document


def judge(
    target: Target, backend: str | None, ours_ms: float | None, speedup: float | None
) -> tuple[str | None, bool | None]:
    """What the row must reach with this backend, in words, and whether it did.

    None where it was not judged: one bound that is missed decides, but to meet them all, all must have been measured.
    """
    bounds: list[tuple[str, bool | None]] = []
    if backend == "hopper":
        bounds.append((f"<= {target.must:.2f} ms", None if ours_ms is None else ours_ms <= target.must))
        if target.share is not None:
            within = None if speedup is None else 1 / speedup <= target.share
            bounds.append((f"<= {target.share:.2f} of FLA's", within))
    elif backend == "triton":
        bounds.append((f">= {target.portable}x FLA", None if speedup is None else speedup >= target.portable))
    if not bounds:
        return None, None
    met = [bound for _, bound in bounds]
    return ", ".join(words for words, _ in bounds), False if False in met else None if None in met else True


def options_of(case: PrefillCase) -> dict[str, object]:
    return MODEL_OPTIONS if case.bounded else UNBOUNDED_OPTIONS


def case_inputs(case: PrefillCase, setup: Setup) -> Inputs:
    return random_inputs(case.shape, setup.device, forgetful=case.forgetful)


def _chosen(case: PrefillCase, inputs: Inputs, backend: str) -> tuple[str | None, tuple[int, ...] | None]:
    """The backend that runs the row, by name, and how many segments each sequence has there."""
    try:
        explanation = flashdelta.explain(flashdelta.chunk_kda, **inputs, **options_of(case), backend=backend)
    except ValueError:
        return None, None
    return explanation.chosen, explanation.segments


def our_call(case: PrefillCase, inputs: Inputs, setup: Setup) -> Callable[..., tuple[Tensor, Tensor]]:
    """flashdelta's call of a row."""
    return functools.partial(flashdelta.chunk_kda, **inputs, **options_of(case), backend=setup.backend)


def compare(case: PrefillCase, row: dict, rows: Sequence[dict], gated: bool) -> None:
    """Judges a row by the time of another one of the run."""
    if case.against is None:
        return
    name, most = case.against
    ours = row["ours"]["ms"]
    other = next((r["ours"]["ms"] for r in rows if r["name"] == name), None)
    must = most * other["median"] if other and gated and row["backend"] == "hopper" else None
    met = None if must is None or ours is None else ours["median"] <= must
    row |= {"must_ms": must, "aim_ms": None, "gate": f"<= {most}x {name}", "met": met}


def _admit(
    case: PrefillCase, setup: Setup, inputs: Inputs, reference: Truth, others: Others
) -> tuple[dict[str, Outcome], dict[str, Run]]:
    """Every contender's outcome so far, and the calls of those that passed the correctness gate."""
    ours = our_call(case, inputs, setup)

    def ours_poisoned() -> tuple[Tensor, Tensor]:
        return ours(out=torch.full_like(inputs["v"], torch.nan))

    outcomes = {"ours": _gate(ours_poisoned, reference, setup.device)}
    runs: dict[str, Run] = {}
    if outcomes["ours"].problem is None:
        runs["ours"] = ours
    outcomes["graph"], replay = _captured(ours, outcomes["ours"], reference, setup.device)
    if replay is not None:
        runs["graph"] = replay
    outcomes["fla"] = Outcome(problem=setup.fla.absence or "not asked for")
    if setup.fla.chunk_kda is not None and case.name in setup.fla_rows:
        fla = functools.partial(setup.fla.chunk_kda, **inputs, **options_of(case))
        outcomes["fla"] = _gate(fla, reference, setup.device, tolerance=None)
        if outcomes["fla"].problem is None:
            runs["fla"] = fla
    for name, make in others.items():
        run = make(case, inputs, setup)
        outcomes[name] = _gate(run, reference, setup.device)
        if outcomes[name].problem is None:
            runs[name] = run
    return outcomes, runs


def _gate(
    run: Callable[[], tuple[Tensor, Tensor]],
    reference: Truth,
    device: torch.device,
    tolerance: float | None = TOLERANCE[torch.bfloat16],
) -> Outcome:
    """Judges the `second_result` of `run`. A `tolerance` of None only records the error."""
    try:
        (o, state), seconds = second_result(run, device)
    except Exception as error:  # whatever a contender raises, the other rows are worth having
        return Outcome(problem=summarize(error))
    return _judged(o, state, reference, seconds, tolerance)


def _captured(
    run: Callable[[], tuple[Tensor, Tensor]], eager: Outcome, reference: Truth, device: torch.device
) -> tuple[Outcome, Run | None]:
    """Captures `run` in a CUDA graph and judges what a replay writes."""
    if eager.problem is not None:
        return Outcome(problem="the eager call failed"), None
    if device.type != "cuda":
        return Outcome(problem="no CUDA graphs on this device"), None
    try:
        replay, (o, state) = capture(run)
        for x in (o, state):
            x.fill_(torch.nan)
        replay()
        synchronize(device)
    except Exception as error:  # as in _gate
        return Outcome(problem=summarize(error)), None
    outcome = _judged(o, state, reference, None, TOLERANCE[torch.bfloat16])
    return outcome, replay if outcome.problem is None else None


def _judged(o: Tensor, state: Tensor, reference: Truth, seconds: float | None, tolerance: float | None) -> Outcome:
    relative = relative_error(o, reference.o), relative_error(state, reference.state)
    rmse, largest = zip(absolute_errors(o, reference.o), absolute_errors(state, reference.state))
    return Outcome(None, *relative, *rmse, *largest, first_call_s=seconds, problem=fault(*relative, tolerance))
