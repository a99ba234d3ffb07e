"""From a benchmark's document to a file, a table and a plot.

A document is what the JSON files hold: `benchmark`, `date`, `environment`, `protocol`, `ceilings`, `rows`.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import math
import os
from pathlib import Path

from rich.console import Console
from rich.table import Table

TABLE_WIDTH = 160
"""Characters; what the widest table needs when the output is a file or a pipe."""


def new_document(benchmark: str, environment: dict) -> dict:
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"benchmark": benchmark, "date": date, "environment": environment, "rows": []}


def to_json(document: object) -> str:
    """Strict JSON: NaN and infinities become the strings "nan", "inf" and "-inf"."""
    return json.dumps(_strict(document), indent=1, allow_nan=False)


def _strict(x: object) -> object:
    if isinstance(x, dict):
        return {key: _strict(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [_strict(value) for value in x]
    if isinstance(x, float) and not math.isfinite(x):
        return str(x)
    return x


def save(document: dict, path: Path) -> None:
    """Writes the document so that `path` always holds a whole one, however the process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(to_json(document) + "\n")
    os.replace(unfinished, path)


def load(path: Path) -> dict:
    return json.loads(path.read_text())


def default_path(benchmark: str, backend: str, gpu: str | None) -> Path:
    """`<benchmark>-<backend>-<gpu>-<date>.json` in benchmarks/results/ of the checkout this package is imported from,
    or in the current directory where there is none."""
    checkout = Path(__file__).resolve().parents[3] / "benchmarks" / "results"
    slug = (gpu or "cpu").lower().replace(" ", "-")
    name = f"{benchmark}-{backend}-{slug}-{datetime.date.today().isoformat()}.json"
    return (checkout if checkout.is_dir() else Path.cwd()) / name


def wide_console(**named: object) -> Console:
    """A console that does not fold tables when its output is not a terminal."""
    console = Console(**named)
    if not console.is_terminal:
        console.width = max(console.width, TABLE_WIDTH)
    return console


def _ms(outcome: dict) -> str:
    if outcome["ms"] is not None:
        return f"{outcome['ms']['median']:.3f}"
    return "-" if outcome["error_o"] is None else "[red]wrong[/red]"


def _errors(outcome: dict) -> str:
    return f"{_error(outcome['error_o'])} {_error(outcome['error_state'])}"


def _error(x: float | str | None) -> str:
    return "-" if x is None else f"{float(x):.1e}"


def _met(row: dict) -> str:
    if row["met"] is None:
        return "-"
    return f"{row['gate']}: " + ("[green]met[/green]" if row["met"] else "[red]not met[/red]")


def prefill_table(document: dict) -> Table:
    """The prefill rows; columns as explained in benchmarks/README.md."""
    table = Table(title=headline(document), title_justify="left", caption_justify="left")
    table.add_column("case", no_wrap=True)
    for column in ("ours ms", "graph ms", "FLA ms", "FLA/ours", "floor ms", "share", "error ours: o, state"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("error FLA: o, state", justify="right", no_wrap=True)
    table.add_column("must ms", justify="right")
    table.add_column("gate", no_wrap=True)
    previous = None
    for row in document["rows"]:
        if previous is not None and row["table"] != previous:
            table.add_section()
        previous = row["table"]
        table.add_row(
            row["name"],
            *(_ms(row[name]) for name in ("ours", "graph", "fla")),
            "-" if row["speedup"] is None else f"{row['speedup']:.2f}x",
            f"{row['floor_ms']:.3f}",
            "-" if row["share_of_floor"] is None else f"{row['share_of_floor']:.0%}",
            _errors(row["ours"]),
            _errors(row["fla"]),
            f"{row['must_ms']:.2f}",
            _met(row),
        )
    return table


def prefill_markdown(document: dict, table: str = "prefill") -> str:
    """The rows of one prefill table as Markdown, for the README."""
    lines = [
        "| case | ours ms | CUDA graph ms | FLA ms | FLA/ours | floor ms | error ours: o, state | error FLA: o, state |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in document["rows"]:
        if row["table"] == table:
            times = " | ".join(_ms(row[name]) for name in ("ours", "graph", "fla"))
            speedup = "-" if row["speedup"] is None else f"{row['speedup']:.2f}x"
            errors = " | ".join(_errors(row[name]) for name in ("ours", "fla"))
            lines.append(f"| {row['name']} | {times} | {speedup} | {row['floor_ms']:.3f} | {errors} |")
    return "\n".join(lines)


def headline(document: dict) -> str:
    """One line: what was measured, where, with which versions."""
    found = document["environment"]
    gpu = found["gpu"]["name"] if found["gpu"] else "CPU"
    known = (f"{name} {version}" for name, version in found["versions"].items() if version is not None)
    parts = [f"{document['benchmark']} on {gpu}", *known]
    if "ceilings" in document:
        ceilings = document["ceilings"]
        parts += [f"copy {ceilings['copy_tb_s']:.2f} TB/s", f"bf16 GEMM {ceilings['gemm_tflop_s']:.0f} TFLOP/s"]
    return " · ".join(parts)


def prefill_summary(document: dict) -> list[str]:
    """What a reader should take away: gates met, and everything that is missing with its reason."""
    rows = document["rows"]
    gated = [row for row in rows if row["met"] is not None]
    missed = [f"{row['name']} ({row['ours']['ms']['median']:.3f})" for row in gated if not row["met"]]
    gates = f"{len(gated) - len(missed)} of {len(gated)} met" + (", not: " + "; ".join(missed) if missed else "")
    lines = ["gates: " + (gates if gated else "none judged (they hold on an H200, for rows that were timed)")]
    failed = failures(document)
    lines.append("correctness: " + (f"{len(failed)} of {len(rows)} rows failed" if failed else "all rows passed"))
    lines += [f"  {row['name']}: {row['ours']['problem']}" for row in failed]
    for name, title in (("fla", "FLA"), ("graph", "CUDA graph")):
        for problem in dict.fromkeys(row[name]["problem"] for row in rows if row[name]["problem"]):
            absent = [row["name"] for row in rows if row[name]["problem"] == problem]
            where = "in every row" if len(absent) == len(rows) else "in " + "; ".join(absent)
            lines.append(f"no {title} time {where}: {problem}")
    return lines


def failures(document: dict) -> list[dict]:
    """The rows in which flashdelta raised or failed the correctness gate."""
    return [row for row in document["rows"] if row["ours"]["problem"] is not None]


def require_matplotlib() -> None:
    """Raises a ValueError that says what to install where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("plot: matplotlib is not installed; run: pip install 'flashdelta[bench]'")


def plot_prefill(document: dict, path: Path) -> None:
    """Time against T at H = HV = 64, one sequence, both axes logarithmic, with the floor; the suffix names the format.

    Raises:
        ValueError: the document has no such row, or matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    rows = [row for row in document["rows"] if _on_plot(row["shape"])]
    if not rows:
        raise ValueError("plot: got no row with one sequence and H = HV = 64 (T1024, T8192 and T16384 are)")
    rows.sort(key=lambda row: row["shape"]["T"])
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.add_subplot()
    for name, label in (("fla", "FLA"), ("ours", "flashdelta"), ("graph", "flashdelta, CUDA graph")):
        timed = [(row["shape"]["T"], row[name]["ms"]["median"]) for row in rows if row[name]["ms"] is not None]
        if timed:
            axes.plot(*zip(*timed), marker="o", label=label)
    axes.plot(
        [row["shape"]["T"] for row in rows],
        [row["floor_ms"] for row in rows],
        linestyle="--",
        color="gray",
        label="floor: q, k, v, g, o moved once",
    )
    lengths = [row["shape"]["T"] for row in rows]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [str(T) for T in lengths])
    axes.set(xlabel="tokens T", ylabel="ms", title="KDA prefill, B = 1, H = 64, K = V = 128, bf16")
    axes.grid(which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def _on_plot(shape: dict) -> bool:
    return shape["B"] == 1 and not shape["lengths"] and shape["H"] == shape["HV"] == 64


STARTUP_BUDGET_S = {"first": 8.0, "later": 0.5}
"""Seconds that the first call on an empty kernel cache, and the first call of any other shape after it, may take."""


def startup_table(document: dict) -> Table:
    table = Table(title=headline(document), title_justify="left")
    for column, justify in (("process", "left"), ("call", "left"), ("s", "right"), ("budget s", "right"), ("", "left")):
        table.add_column(column, justify=justify)
    for row in document["rows"]:
        met = "" if row["met"] is None else "[green]met[/green]" if row["met"] else "[red]not met[/red]"
        budget = "" if row["budget_s"] is None else f"{row['budget_s']:.1f}"
        table.add_row(row["process"], row["call"], f"{row['seconds']:.3f}", budget, met)
    return table
