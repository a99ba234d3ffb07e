"""`flashdelta verify`: every backend against the float64 token recurrence."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from rich.console import Console
from torch import Tensor

import flashdelta

from ... import backends
from ..cases import TOLERANCE, VERIFY, Case, as_recurrent, make_call, relative_error, truth
from ..environment import environment

OPERATORS: dict[str, Callable] = {"chunk": flashdelta.chunk_kda, "recurrent": flashdelta.fused_recurrent_kda}


CASES = [(case, dtype) for dtype, cases in VERIFY.items() for case in cases]


def run_verify(
    device: torch.device,
    *,
    backend: str | None = None,
    quick: bool = False,
    cases: Sequence[tuple[Case, torch.dtype]] = CASES,
    progress: bool = True,
) -> dict:
    """Runs the table on `device` and returns the report.

    Args:
        backend: only this one (`"auto"`: whatever is chosen); otherwise every one that can run the call.
        quick: leave out the long cases.
        progress: say on stderr which case runs.

    Returns:
        `environment`, `rows` (a row per case, operator and backend), `checked` and `not_checked` (the backends of which a row
        ran, and the others) and `passed`. It passes if at least one row ran and none is past its tolerance, NaN or an
        exception.
    """
    chosen = [(case, dtype) for case, dtype in cases if not quick or (case.T <= 1000 and case.K < 256)]
    names = [b.name for b in backends.BACKENDS] if backend is None else [backend]
    rows: list[dict] = []
    with saying(progress) as say, torch.inference_mode():
        for i, (case, dtype) in enumerate(chosen):
            say(f"case {i + 1} of {len(chosen)}: {case.name}")
            rows += _rows(case, dtype, device, names)
    ran = [row for row in rows if row["status"] != "not supported"]
    checked = [name for name in names if any(row["backend"] == name for row in ran)]
    unchecked = [name for name in names if name not in checked]
    passed = bool(ran) and all(row["status"] == "passed" for row in ran)
    found = {"rows": rows, "checked": checked, "not_checked": unchecked, "passed": passed}
    return {"environment": environment(device), **found}


@contextmanager
def saying(progress: bool) -> Iterator[Callable[[str], None]]:
    """Says on stderr what takes seconds; on a terminal the line that is there changes."""
    stderr = Console(stderr=True, highlight=False)
    if progress and stderr.is_terminal:
        with stderr.status("") as waiting:
            yield waiting.update
    else:
        yield stderr.print if progress else lambda text: None


def _rows(case: Case, dtype: torch.dtype, device: torch.device, names: Sequence[str]) -> list[dict]:
    call = make_call(case, dtype, device)
    want = truth(call)
    rows = []
    for operator, op in OPERATORS.items():
        tolerance = TOLERANCE[dtype] + (case.slack if operator == "chunk" else 0.0)
        asked = call if operator == "chunk" else as_recurrent(call)
        for name in names:
            row: dict[str, object] = {"case": case.name, "reason": case.why, "operator": operator, "backend": name}
            row |= {"dtype": str(dtype).removeprefix("torch."), "tolerance": tolerance}
            rows.append(row | outcome(case, op, asked, name, want, tolerance))
    return rows


def outcome(case: Case, op: Callable, call: dict, backend: str, want: Sequence[Tensor], tolerance: float) -> dict:
    """A call's status (`"passed"`, `"wrong"`, `"NaN"`, `"raised"` or `"not supported"`), what went wrong, and errors."""
    none = {"error_o": None, "error_state": None}
    if backend != "auto":
        verdict = next(v for v in flashdelta.explain(op, **call).verdicts if v.backend == backend)
        if not verdict.supported:
            return {"status": "not supported", "problem": verdict.reason, **none}
    try:
        errors = [_error(case, x, exact) for x, exact in zip(op(**call, backend=backend), want)]
    except Exception as error:  # a kernel that does not compile is one row of the report, not its end
        return {"status": "raised", "problem": f"{type(error).__name__}: {error}", **none}
    passed = all(error <= tolerance for error in errors)  # a NaN compares false
    status = "passed" if passed else "NaN" if any(map(math.isnan, errors)) else "wrong"
    return {"status": status, "problem": None, "error_o": errors[0], "error_state": errors[1]}


def _error(case: Case, x: Tensor, want: Tensor) -> float:
    """Error of a result; where a sequence is all NaN, of the others."""
    others = ~want.isnan() if case.hard == "nan" else slice(None)
    return relative_error(x[others], want[others])


def show(report: dict, console: Console) -> None:
    """Prints the table, what went wrong in full, and last lines that say whether all passed, and what nobody checked."""
    rows = report["rows"]
    ran = [row for row in rows if row["status"] != "not supported"]
    table = [["case", "operator", "dtype", "backend", "o", "state", "limit", ""]]
    for row in ran:
        errors = ("-" if row[x] is None else f"{row[x]:.1e}" for x in ("error_o", "error_state", "tolerance"))
        table.append([row["case"], row["operator"], row["dtype"], row["backend"], *errors, row["status"]])
    console.print("relative error against the float64 token recurrence\n", highlight=False)
    widths = [max(map(len, column)) for column in zip(*table)]
    for line in table:
        cells = [cell.ljust(width) if i < 4 else cell.rjust(width) for i, (cell, width) in enumerate(zip(line, widths))]
        console.print("  ".join(cells).rstrip(), markup=False, highlight=False, soft_wrap=True)
    for row in ran:
        if row["problem"] is not None:
            console.print(f"{row['case']}, {row['operator']}, {row['backend']}: {row['problem']}", markup=False)
    skipped = [row for row in rows if row["status"] == "not supported"]
    for backend in dict.fromkeys(row["backend"] for row in skipped):
        of_backend = [row for row in skipped if row["backend"] == backend]
        reasons = "; ".join(dict.fromkeys(row["problem"] for row in of_backend))
        console.print(f"{backend}: {len(of_backend)} calls not supported ({reasons})", markup=False, highlight=False)
    failed, of = sum(row["status"] != "passed" for row in ran), ", ".join(report["checked"])
    if not ran:
        console.print("[red]nothing was checked[/red]")
    elif failed:
        console.print(f"[red]{failed} of {len(ran)} checks failed[/red] ({of})", highlight=False)
    else:
        console.print(f"[green]all {len(ran)} checks passed[/green] ({of})", highlight=False)
    if report["not_checked"]:
        device, others = report["environment"]["device"], ", ".join(report["not_checked"])
        console.print(f"[yellow]not checked[/yellow], as they can't run on {device}: {others}", highlight=False)
