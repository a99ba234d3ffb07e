"""Tables, summaries and plots of the benchmarks of the backward pass, `train` and `wy`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from .report import absences, correctness, gates, met, require_matplotlib, row_table
from .train import LEAVES
from .wy import GRADIENTS, kernel_ms


def _number(x: float | None, form: str, unit: str = "") -> str:
    return "-" if x is None else format(x, form) + unit


def _median(timing: dict | None) -> float | None:
    return None if timing is None else timing["median"]


def _ms(outcome: dict, key: str = "ms") -> str:
    if outcome[key] is None and outcome["error"] is not None and outcome["problem"] is not None:
        return "[red]wrong[/red]"
    return _number(_median(outcome[key]), ".3f")


def _gib(size: int | None) -> str:
    return _number(None if size is None else size / 2**30, ".2f")


def _errors(errors: dict | None, names: Sequence[str]) -> str:
    return "-" if errors is None else " ".join(f"{float(errors[name]):.1e}" for name in names)


def _means(document: dict) -> list[str]:
    speedups = [row["speedup"] for row in document["rows"] if row["speedup"] is not None]
    if not speedups:
        return []
    mean = statistics.geometric_mean(speedups)
    return [f"FLA/ours: {mean:.2f}x (geometric mean of {len(speedups)} rows, least {min(speedups):.2f}x)"]


# ---- train --------------------------------------------------------------------------------------------------------------


def train_table(document: dict) -> Table:
    """The rows of training; columns as explained in benchmarks/README.md."""
    columns = ("", "fwd ms", "fwd+bwd ms", "FLA/ours fwd", "FLA/ours", "of copy", "peak GiB", "with inputs", "of FLA's")
    columns += (f"error: {' '.join(LEAVES)}", "gate")

    def lines(row: dict) -> list[list[str]]:
        ours, fla = row["ours"], row["fla"]

        def cells(name: str, outcome: dict, *own: str) -> list[str]:
            memory = (_gib(outcome["peak_above_bytes"]), _gib(outcome["peak_bytes"]))
            forward, backward, share, of_memory, gate = own or ("",) * 5
            times = (_ms(outcome, "forward_ms"), _ms(outcome))
            return [name, *times, forward, backward, share, *memory, of_memory, _errors(outcome["error"], LEAVES), gate]

        found = (
            _number(row["forward_speedup"], ".2f", "x"),
            _number(row["speedup"], ".2f", "x"),
            _number(row["share_of_floor"], ".0%"),
            _number(row["memory_share"], ".2f"),
            met(row),
        )
        return [cells("ours", ours, *found), cells("FLA", fla)]

    return row_table(document, columns, lines)


def train_summary(document: dict) -> list[str]:
    """Gates met, the longest kernels of each row, and everything that is missing with its reason."""
    lines = [gates(document, lambda row: f"{_ms(row['ours'])} ms"), *_means(document)]
    for row in document["rows"]:
        for name, title in (("ours", "ours"), ("fla", "FLA")):
            kernels = row[name]["kernels"]
            if kernels:
                total = sum(kernel["ms"] for kernel in kernels)
                longest = ", ".join(f"{_short(kernel['kernel'])} {kernel['ms']:.3f}" for kernel in kernels[:8])
                lines.append(f"{row['name']}, {title}: kernels {total:.3f} ms: {longest}")
    return [*lines, *correctness(document), *absences(document, fla="FLA")]


def _short(kernel: str) -> str:
    """A kernel's name without what a C++ compiler adds."""
    return kernel.removeprefix("void ").split("<")[0].split("(")[0]


def plot_kernels(document: dict, path: Path) -> None:
    """Time by kernel of the first row that has kernels of both, ours and FLA's, in two stacked bars.

    Raises:
        ValueError: the document has no such row, or matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    rows = [row for row in document["rows"] if row["ours"]["kernels"] and row["fla"]["kernels"]]
    if not rows:
        raise ValueError("plot: got no row with the kernels of ours and FLA's")
    row = rows[0]
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.add_subplot()
    for place, name in enumerate(("fla", "ours")):
        below = 0.0
        for kernel in row[name]["kernels"]:
            axes.bar(place, kernel["ms"], bottom=below, width=0.5, edgecolor="white")
            if kernel["ms"] >= 0.03 * sum(other["ms"] for other in rows[0]["fla"]["kernels"]):
                label = f"{_short(kernel['kernel'])[:44]} {kernel['ms']:.3f}"
                axes.text(place + 0.27, below + kernel["ms"] / 2, label, va="center", fontsize=7)
            below += kernel["ms"]
        axes.text(place, below, f"{below:.2f} ms", ha="center", va="bottom")
    axes.set_xticks([0, 1], ["FLA", "flashdelta"])
    axes.set_xlim(-0.5, 2.1)
    axes.set(ylabel="ms", title=f"Forward and backward by kernel, {row['name']}, K = V = 128, bf16")
    figure.savefig(path, dpi=150)


# ---- wy -----------------------------------------------------------------------------------------------------------------


def wy_table(document: dict) -> Table:
    """The rows of the WY step; columns as explained in benchmarks/README.md."""
    columns = ("", "ms", "graph ms", "FLA/ours", "of copy", "peak GiB", f"error ratio: {' '.join(GRADIENTS)}")
    columns += ("largest error", "gate")

    def lines(row: dict) -> list[list[str]]:
        def cells(name: str, outcome: dict, *own: str) -> list[str]:
            speedup, share, gate = own or ("",) * 3
            errors = (_errors(outcome["error"], GRADIENTS), _errors(outcome["max_error"], GRADIENTS))
            times = (_ms(outcome), _ms(outcome, "graph_ms"))
            return [name, *times, speedup, share, _gib(outcome["peak_bytes"]), *errors, gate]

        found = (_number(row["speedup"], ".2f", "x"), _number(row["share_of_floor"], ".0%"), met(row))
        return [cells("ours", row["ours"], *found), cells("FLA", row["fla"])]

    return row_table(document, columns, lines)


def wy_summary(document: dict) -> list[str]:
    """Gates met, the speed-up over all rows, and everything that is missing with its reason."""
    judged = gates(document, lambda row: f"{1 / row['speedup']:.2f}")
    return [judged, *_means(document), *correctness(document), *absences(document, fla="FLA")]


def plot_wy(document: dict, path: Path) -> None:
    """Time against T for one sequence of 32 heads, both axes logarithmic, with the floor.

    Raises:
        ValueError: the document has no such row, or matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    def drawn(shape: dict) -> bool:
        return shape["B"] == 1 and not shape["lengths"] and shape["H"] == shape["HV"] == 32

    rows = sorted((row for row in document["rows"] if drawn(row["shape"])), key=lambda row: row["shape"]["T"])
    if not rows:
        raise ValueError("plot: got no row with one sequence and H = HV = 32")
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.add_subplot()
    ours = ", ".join(["flashdelta", *sorted({row["backend"] for row in rows if row["backend"]})])
    for name, label in (("fla", "FLA"), ("ours", ours)):
        times = [(row["shape"]["T"], kernel_ms({key: row[key] for key in ("ours", "fla")})[name]) for row in rows]
        timed = [(T, ms) for T, ms in times if ms is not None]
        if timed:
            axes.plot(*zip(*timed), marker="o", label=label)
    lengths = [row["shape"]["T"] for row in rows]
    floor = f"floor: all tensors moved once at {document['ceilings']['copy_tb_s']:.2f} TB/s"
    axes.plot(lengths, [row["floor_ms"] for row in rows], linestyle="--", color="gray", label=floor)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [str(T) for T in lengths])
    axes.set(xlabel="tokens T", ylabel="ms", title="Backward of the WY step, B = 1, H = 32, K = V = 128, bf16")
    axes.grid(which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)
