"""`flashdelta verify`: every backend against the float64 token recurrence."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import flashdelta

from ... import backends
from ...problem.problem import check_arguments
from ...reference import rounding_error
from ..bench.environment import environment
from ..bench.inputs import Inputs
from ..bench.oracle import TOLERANCE, Truth, recurrent_options, relative_error, truth
from .verify_cases import CASES, VerifyCase, inputs, options

EXPLAINED_WIDTH = 120
"""Characters; on narrower terminals the table leaves out why each case is there."""

OPERATORS = {"chunk": flashdelta.chunk_kda, "recurrent": flashdelta.fused_recurrent_kda}


def run_verify(
    device: torch.device,
    *,
    backend: str | None = None,
    quick: bool = False,
    cases: Sequence[VerifyCase] = CASES,
    progress: bool = True,
) -> dict:
    """Runs the table on `device` and returns the report.

    Args:
        backend: only this one (`"auto"`: whatever is chosen); otherwise every one that can run the call.
        quick: leave out the long cases.
        progress: show a progress bar on stderr.

    Returns:
        `environment`, `rows` (a row per case, operator and backend) and `passed`. It passes if at least one row ran and
        none is past its tolerance, NaN or an exception.
    """
    chosen = [case for case in cases if not (quick and case.long)]
    names = [b.name for b in backends.BACKENDS] if backend is None else [backend]
    rows: list[dict] = []
    with Progress(console=Console(stderr=True), transient=True, disable=not progress) as bar, torch.inference_mode():
        task = bar.add_task("verify", total=len(chosen))
        for case in chosen:
            bar.update(task, description=case.name)
            rows += _rows(case, device, names)
            bar.advance(task)
    ran = [row for row in rows if row["status"] != "not supported"]
    return {
        "environment": environment(device),
        "rows": rows,
        "passed": bool(ran) and all(row["status"] == "passed" for row in ran),
    }


def _rows(case: VerifyCase, device: torch.device, names: Sequence[str]) -> list[dict]:
    tensors, settings = inputs(case, device), options(case)
    expected = truth(tensors, settings)
    tolerances = {operator: _tolerance(case, operator, tensors, settings) for operator in OPERATORS}
    return [
        {
            "case": case.name,
            "reason": case.reason,
            "operator": operator,
            "dtype": str(case.dtype).removeprefix("torch."),
            "backend": name,
            "tolerance": tolerances[operator],
            **_outcome(case, operator, name, tensors, settings, expected, tolerances[operator]),
        }
        for operator in OPERATORS
        for name in names
    ]


def _tolerance(case: VerifyCase, operator: str, tensors: Inputs, settings: dict[str, object]) -> float:
    """The dtype's, and for a chunked kernel on ill-conditioned inputs twice what rounding costs besides."""
    if operator != "chunk" or not case.ill_conditioned:
        return TOLERANCE[case.dtype]
    return TOLERANCE[case.dtype] + 2 * max(rounding_error(*check_arguments({**tensors, **settings})))


def _outcome(
    case: VerifyCase,
    operator: str,
    backend: str,
    tensors: Inputs,
    settings: dict[str, object],
    expected: Truth,
    tolerance: float,
) -> dict:
    op = OPERATORS[operator]
    settings = settings if operator == "chunk" else recurrent_options(settings)
    if backend != "auto":
        verdict = next(v for v in flashdelta.explain(op, **tensors, **settings).verdicts if v.backend == backend)
        if not verdict.supported:
            return {"status": "not supported", "problem": verdict.reason, "error_o": None, "error_state": None}
    try:
        o, state = op(**tensors, **settings, backend=backend)
        errors = _errors(case, o, state, expected)
    except Exception as error:  # a kernel that does not compile is one row of the report, not its end
        problem = f"{type(error).__name__}: {error}"
        return {"status": "raised", "problem": problem, "error_o": None, "error_state": None}
    passed = all(error <= tolerance for error in errors)  # a NaN compares false
    status = "passed" if passed else "NaN" if any(map(math.isnan, errors)) else "wrong"
    return {"status": status, "problem": None, "error_o": errors[0], "error_state": errors[1]}


def _errors(case: VerifyCase, o: torch.Tensor, state: torch.Tensor, expected: Truth) -> tuple[float, float]:
    if case.nan_sequence is None:
        return relative_error(o, expected.o), relative_error(state, expected.state)
    n, lengths = case.nan_sequence, case.shape.lengths
    begin = sum(lengths[:n])
    tokens = [t for t in range(sum(lengths)) if not begin <= t < begin + lengths[n]]
    sequences = [i for i in range(len(lengths)) if i != n]
    return (
        relative_error(o[:, tokens], expected.o[:, tokens]),
        relative_error(state[sequences], expected.state[sequences]),
    )


def show(report: dict, console: Console) -> None:
    """Prints the table, what went wrong in full, and a last line that says whether all passed."""
    explained = console.width >= EXPLAINED_WIDTH
    table = Table(title="relative error against the float64 token recurrence", title_justify="left")
    for column in ("case", *(["why"] if explained else []), "operator", "dtype", "backend"):
        table.add_column(column)
    for column in ("o", "state", "tolerance"):
        table.add_column(column, justify="right")
    table.add_column("")
    rows = report["rows"]
    ran = [row for row in rows if row["status"] != "not supported"]
    for row in ran:
        color = "green" if row["status"] == "passed" else "red"
        table.add_row(
            row["case"],
            *([row["reason"]] if explained else []),
            row["operator"],
            row["dtype"],
            row["backend"],
            *("-" if row[name] is None else f"{row[name]:.1e}" for name in ("error_o", "error_state")),
            f"{row['tolerance']:.0e}",
            f"[{color}]{row['status']}[/{color}]",
        )
    console.print(table)
    for row in ran:
        if row["problem"] is not None:
            console.print(f"{row['case']}, {row['operator']}, {row['backend']}: {row['problem']}", markup=False)
    skipped = [row for row in rows if row["status"] == "not supported"]
    for backend in dict.fromkeys(row["backend"] for row in skipped):
        of_backend = [row for row in skipped if row["backend"] == backend]
        reasons = "; ".join(dict.fromkeys(row["problem"] for row in of_backend))
        console.print(f"{backend}: {len(of_backend)} calls not supported ({reasons})", markup=False, highlight=False)
    failed = sum(row["status"] != "passed" for row in ran)
    if not ran:
        console.print("[red]nothing was checked[/red]")
    elif failed:
        console.print(f"[red]{failed} of {len(ran)} checks failed[/red]", highlight=False)
    else:
        console.print(f"[green]all {len(ran)} checks passed[/green]", highlight=False)
