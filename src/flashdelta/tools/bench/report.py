"""From a benchmark's document to a file, a table and a plot.

A document is what the JSON files hold: `benchmark`, `date`, `environment`, `protocol`, `ceilings`, `rows`. Every contender of a
row (`ours`, `fla`, ...) has its times, its errors and `problem`, which says why it has no time; see `runner.Outcome`.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import math
import statistics
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import whole_file
from .environment import model_of
from .workloads import Row, is_plain, value

WIDTH = 80
"""Characters of a line, but for `--wide`."""

# ---- documents -------------------------------------------------------------------------------------------------------


def new_document(benchmark: str, environment: dict) -> dict:
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    return {"benchmark": benchmark, "date": date, "environment": environment, "rows": []}


def script_parser(about: str) -> argparse.ArgumentParser:
    """Of a script that writes a document: `about` is its docstring."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="a JSON file")
    return parser


def to_json(document: object) -> str:
    """Strict JSON, a line a key, and in a list a line an element: NaN and infinities become "nan", "inf" and "-inf"."""
    document = _strict(document)
    if not isinstance(document, dict):
        return json.dumps(document, allow_nan=False)
    lines = []
    for key, x in document.items():
        if isinstance(x, list) and x:
            elements = ",\n".join("  " + json.dumps(element, allow_nan=False) for element in x)
            lines.append(f" {json.dumps(key)}: [\n{elements}\n ]")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(x, allow_nan=False)}")
    return "{\n" + ",\n".join(lines) + "\n}"


def _strict(x: object) -> Any:
    if isinstance(x, dict):
        return {key: _strict(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [_strict(value) for value in x]
    if isinstance(x, float) and not math.isfinite(x):
        return str(x)
    return x


def save(document: dict, path: Path) -> None:
    """Writes the document so that `path` always holds a whole one, however the process ends."""
    with whole_file(path) as unfinished:
        unfinished.write_text(to_json(document) + "\n")


def load(path: Path) -> dict:
    return json.loads(path.read_text())


def default_path(benchmark: str, backend: str, gpu: str | None) -> Path:
    """`<benchmark>-<backend>-<gpu>-<date>.json` (without the backend if it is "auto") in benchmarks/results/ of the checkout
    this package is imported from, or in the current directory where there is none."""
    checkout = Path(__file__).resolve().parents[4] / "benchmarks" / "results"
    slug = (gpu or "cpu").lower().replace(" ", "-")
    what = benchmark if backend == "auto" else f"{benchmark}-{backend}"
    name = f"{what}-{slug}-{datetime.date.today().isoformat()}.json"
    return (checkout if checkout.is_dir() else Path.cwd()) / name


# ---- tables ----------------------------------------------------------------------------------------------------------


def short(x: float) -> str:
    """Three digits, fewer below 0.1."""
    digits = 0 if abs(x) >= 100 else 1 if abs(x) >= 10 else 2 if abs(x) >= 1 else 3
    return f"{x:.{digits}f}" if abs(x) >= 0.01 or x == 0 else f"{x:.1g}"


FORMS: dict[str, Callable[[Any], str]] = {
    "": short,
    "x": lambda x: f"{x:.2f}x",
    "%": lambda x: f"{x:.0%}",
    "e": lambda x: f"{float(x):.1e}".replace("e-0", "e-"),
    "largest": lambda x: FORMS["e"](max(map(float, x.values()))),
    "i": lambda x: f"{x:.0f}",
    "s": str,
    "met": lambda x: "yes" if x else "NO",
    "keys": lambda x: ", ".join(x) or "-",
    "values": lambda x: "/".join(dict.fromkeys(map(str, x.values()))),
    "commit": lambda x: x.partition("-")[0][:7] + x[40:],
    "list": lambda x: " ".join(map(str, x)) if max(x, default=1) > 1 else "whole",
}
"""By name: how a value is written."""


@dataclass(frozen=True)
class Column:
    """`paths`: dotted, one or more, into the row (see `workloads.value`); `form` a key of `FORMS`. `wide` ones are left out of
    narrow tables; `wide_title`: another one where there is room."""

    title: str
    paths: str
    form: str = ""
    scale: float = 1.0
    wide: bool = False
    wide_title: str | None = None

    def cell(self, row: dict) -> str:
        return " ".join(self._one(row, path) for path in self.paths.split())

    def _one(self, row: dict, path: str) -> str:
        found = value(row, path)
        if found is None:
            outcome = row.get(path.partition(".")[0])
            wrong = isinstance(outcome, dict) and (outcome.get("problem") or "").startswith("wrong")
            return "wrong" if wrong and path.endswith(("ms.median", "ms")) else "-"
        return FORMS[self.form](found if self.scale == 1.0 else found * self.scale)


@dataclass(frozen=True)
class View:
    """How a benchmark's document is shown: `columns` behind the name, `lines` of a row (itself, or one a kernel), contenders
    that are looked for by key and title, `ratios` by title and path, and further lines of the summary."""

    columns: tuple[Column, ...]
    lines: Callable[[dict], list[dict]] = lambda row: [row]
    titles: tuple[tuple[str, str], ...] = (("fla", "FLA"),)
    ratios: tuple[tuple[str, str], ...] = (("FLA/ours", "speedup"), ("FLA/ours, sustained", "sustained_speedup"))
    summary: Callable[[dict], list[str]] = lambda document: []


def cells(document: dict, view: View, wide: bool, names: Sequence[str] | None = None) -> list[list[str]]:
    """The table, titles first. Narrow ones leave out columns, and those that no row fills."""
    columns = [column for column in view.columns if wide or not column.wide]
    rows = [line for row in document["rows"] if names is None or row["name"] in names for line in view.lines(row)]
    columns = [x for x in columns if wide or any(x.cell(row).strip("- ") for row in rows)] or columns[:1]
    titles = [(wide and x.wide_title) or x.title for x in columns]
    return [["case", *titles], *([row["name"], *(x.cell(row) for x in columns)] for row in rows)]


def text_table(table: Sequence[Sequence[str]]) -> str:
    """Aligned: names to the left, the rest to the right. Columns move closer where they would not fit."""
    widths = [max(map(len, column)) for column in zip(*table)]
    gap = "  " if sum(widths) + 2 * (len(widths) - 1) <= WIDTH else " "
    lines = []
    for row in table:
        rest = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))
        lines.append(gap.join([row[0].ljust(widths[0]), *rest]).rstrip())
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def markdown_table(table: Sequence[Sequence[str]], words: int = 0) -> str:
    """Numbers to the right; the first column and the last `words` ones to the left."""
    titles, *rows = table
    sides = ["---", *("---:" for _ in titles[1 : len(titles) - words]), *("---" for _ in range(words))]
    lines = [titles, sides, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def show(document: dict, view: View, wide: bool = False) -> str:
    """Headline, table and summary."""
    said = [headline(document), "", text_table(cells(document, view, wide)), "", *summary(document, view)]
    if wide:
        return "\n".join(said)
    return "\n".join(
        line if len(line) <= WIDTH or i == 2 else textwrap.fill(line, WIDTH) for i, line in enumerate(said)
    )


GEMMS = {"gemm_tflop_s": "bf16", "tf32_tflop_s": "TF32", "fp32_tflop_s": "fp32"}
"""Ceilings of products by their key in a document."""


def headline(document: dict) -> str:
    """What was measured, where, with which versions."""
    found = document["environment"]
    gpu = found["gpu"]["name"] if found["gpu"] else "CPU"
    known = (f"{name} {version}" for name, version in found["versions"].items() if version is not None)
    parts = [f"{document['benchmark']} on {gpu}", *known]
    if "ceilings" in document:
        ceilings = document["ceilings"]
        parts.append(f"copy {ceilings['copy_tb_s']:.2f} TB/s")
        parts += [f"{name} GEMM {ceilings[key]:.0f} TFLOP/s" for key, name in GEMMS.items() if key in ceilings]
    return " · ".join(parts)


def summary(document: dict, view: View) -> list[str]:
    """What a reader should take away: ratios, bounds, and everything that is missing with its reason."""
    rows = document["rows"]
    lines = [mean(title, [value(row, path) for row in rows]) for title, path in view.ratios]
    lines += [*bounds(rows), *view.summary(document)]
    failed = failures(document)
    lines.append(f"correctness: {len(failed)} of {len(rows)} rows failed" if failed else "correctness: all rows passed")
    lines += [f"  {row['name']}: {row['ours']['problem']}" for row in failed]
    return [line for line in lines if line] + absences(rows, view)


def mean(title: str, found: Sequence[float | None], form: str = "x") -> str:
    """Geometric mean and range; nothing where nothing was measured."""
    known = [x for x in found if x is not None]
    if not known:
        return ""
    if len(known) == 1:
        return f"{title}: {FORMS[form](known[0])} (one row)"
    ends = f"{FORMS[form](min(known))} to {FORMS[form](max(known))}"
    return f"{title}: {FORMS[form](statistics.geometric_mean(known))} (geometric mean of {len(known)} rows, {ends})"


def bounds(rows: Sequence[dict]) -> list[str]:
    """How many rows meet their bounds, and those that do not with what they miss."""
    judged = [row for row in rows if row.get("met") is not None]
    if not judged:
        return ["bounds: none judged"] if any(row.get("bounds") for row in rows) else []
    lost = missed(rows)
    found = f"bounds: {len(judged) - len(lost)} of {len(judged)} rows meet theirs"
    return [found + ("; missed: " + "; ".join(lost) if lost else "")]


TIMES = {"sustained": "ours.sustained_ms", "by graph": "ours.graph_ms.median", "": "ours.ms.median"}
"""Of which time a bound is, by what its words say."""


MISSED = "missed bounds: "
"""How the last line of a run begins that missed some: `tests.release` tells them by it."""


def missed(rows: Sequence[dict]) -> list[str]:
    """The rows that miss bounds, each with those and with our time."""
    found = []
    for row in rows:
        if row.get("met") is False:
            words = ", ".join(words for words, met in row["bounds"].items() if met is False)
            ms = value(row, next(path for said, path in TIMES.items() if said in words))
            found.append(f"{row['name']} ({words}{'' if ms is None else f'; {short(ms)} ms'})")
    return found


def failures(document: dict) -> list[dict]:
    """The rows in which flashdelta raised or failed the correctness gate."""
    return [row for row in document["rows"] if value(row, "ours.problem") is not None]


MANY = 10
"""Rows whose names are not listed."""


def absences(rows: Sequence[dict], view: View) -> list[str]:
    """Why contenders have no time, or no graph."""
    lines = []
    for name, title in (*view.titles, ("ours", "our")):
        for key, what in (("problem", "time"), ("graph_problem", "graph")):
            if name == "ours" and key == "problem":
                continue
            problems = {row["name"]: value(row, f"{name}.{key}") for row in rows}
            for problem in dict.fromkeys(filter(None, problems.values())):
                absent = [row for row, said in problems.items() if said == problem]
                where = "in every row" if len(absent) == len(rows) else f"in {len(absent)} rows"
                where = "in " + "; ".join(absent) if len(absent) < min(MANY, len(rows)) else where
                lines.append(f"no {title} {what} {where}: {problem}")
    return lines


def progress_line(row: dict, view: View) -> str:
    """A finished row."""
    times = []
    for name, title in (("ours", "ours"), *view.titles):
        ms = value(row, f"{name}.ms.median")
        times += [f"{title} {short(ms) + ' ms' if ms >= 0.1 else short(ms * 1e3) + ' us'}"] if ms is not None else []
    problem, seconds = value(row, "ours.problem"), row.get("seconds")
    if not times and not problem and isinstance(seconds, float):
        problem = f"{seconds:.3f} s"
    return f"{row['name']}: " + ", ".join(times or [problem or "done"])


# ---- plots -----------------------------------------------------------------------------------------------------------


def require_matplotlib() -> None:
    """Raises a ValueError that says what to install where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("plot: matplotlib is not installed; run: pip install 'flashdelta[bench]'")


def new_figure(width: float, height: float) -> tuple[Any, Any]:
    """A figure with its axes. It needs no display."""
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def save_figure(figure: Any, path: Path) -> None:
    """The suffix of `path` names the format. An SVG holds its words as text and nothing of when it was drawn."""
    import matplotlib

    fixed = {"svg.fonttype": "none", "svg.hashsalt": "flashdelta"}
    with matplotlib.rc_context(fixed), whole_file(path) as unfinished:
        figure.savefig(unfinished, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def measured_on(document: dict) -> str:
    """The GPU and the day, for a title."""
    gpu = document["environment"]["gpu"]
    return f"{model_of(gpu['name']) if gpu else 'CPU'}, {document['date'][:10]}"


COLORS = {"FLA": "silver", "{ours}": "C0", "{ours}, CUDA graph": "C2", "{ours}, not split": "C1"}
"""Of lines, by their label: those of the README's bars."""


@dataclass(frozen=True)
class Plot:
    """Time against T of the plain rows with one sequence and `heads` heads: lines by label and path of a time."""

    rows: Sequence[Row]
    heads: int
    title: str
    lines: tuple[tuple[str, str], ...]
    floor: str = "q, k, v, g, o"

    def lengths(self) -> dict[str, int]:
        """T of each row that is drawn, by its name: a document does not say which gate a row had."""
        calls = [row.call for row in self.rows if is_plain(row.call) and not row.call.lengths]
        return {call.name: call.T for call in calls if call.B == 1 and call.H == call.HV == self.heads}

    def draw(self, document: dict, path: Path) -> None:
        """Both axes logarithmic, with the floor; the suffix of `path` names the format.

        Raises:
            ValueError: the document has no such row, or matplotlib is not installed.
        """
        figure, axes = new_figure(7, 5)
        known = self.lengths()
        rows = sorted((row for row in document["rows"] if row["name"] in known), key=lambda row: known[row["name"]])
        if not rows:
            raise ValueError(f"plot: got no row with one sequence, a bounded gate and H = HV = {self.heads}")
        lengths = [known[row["name"]] for row in rows]
        ours = ", ".join(["flashdelta", *sorted({row["backend"] for row in rows if row["backend"]})])
        for label, key in self.lines:
            timed = [(T, value(row, key)) for T, row in zip(lengths, rows) if value(row, key) is not None]
            if timed:
                axes.plot(*zip(*timed), marker="o", color=COLORS[label], label=label.format(ours=ours))
        floor = f"floor: {self.floor} moved once at {document['ceilings']['copy_tb_s']:.2f} TB/s"
        axes.plot(lengths, [row["floor_ms"] for row in rows], linestyle="--", color="gray", label=floor)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda ms, _: f"{ms:g}")
        axes.set_xticks(lengths, [str(T) for T in lengths])
        title = f"{self.title}, B = 1, H = {self.heads}, K = V = 128, bf16\n{measured_on(document)}"
        axes.set(xlabel="tokens T", ylabel="ms", title=title)
        axes.grid(which="both", alpha=0.3)
        figure.legend(loc="outside lower center", ncols=2)
        save_figure(figure, path)


def kernel_name(name: str) -> str:
    """Without what a C++ compiler adds."""
    return name.removeprefix("void ").split("<")[0].split("(")[0].removesuffix("_kernel")


@dataclass(frozen=True)
class KernelPlot:
    """Time by kernel, in a stacked bar a contender (key and label), of the first row that has kernels of all of them."""

    bars: tuple[tuple[str, str], ...]
    title: str
    unit: str = "ms"

    def draw(self, document: dict, path: Path) -> None:
        """Raises a ValueError where the document has no such row, or matplotlib is not installed."""
        figure, axes = new_figure(7 + len(self.bars), 6)
        from matplotlib import colormaps

        rows = [row for row in document["rows"] if all(value(row, f"{name}.kernels") for name, _ in self.bars)]
        if not rows:
            said = " and ".join(label for _, label in self.bars)
            raise ValueError(f"plot: got no row with the kernels of {said}")
        row, scale, form = rows[0], {"ms": 1.0, "us": 1e3}[self.unit], {"ms": ".3f", "us": ".1f"}[self.unit]
        least = 0.03 * max(sum(kernel["ms"] for kernel in row[name]["kernels"]) for name, _ in self.bars)
        places = [1.8 * i for i in range(len(self.bars))]  # names of kernels have room between the bars
        colormap, colors = colormaps["tab20"], dict[str, Any]()
        for place, (name, _) in zip(places, self.bars):
            kernels = [(kernel_name(kernel["kernel"]), kernel["ms"]) for kernel in row[name]["kernels"]]
            named = [found for found in kernels if found[1] >= least]
            rest = [ms for _, ms in kernels if ms < least]
            more = [(f"{len(rest)} more", sum(rest))] if rest else []
            below = 0.0
            for kernel, ms in (*named, *more):
                height = scale * ms
                color = "silver" if (kernel, ms) in more else colors.setdefault(kernel, colormap(len(colors) % 20))
                axes.bar(place, height, bottom=below, width=0.5, edgecolor="white", color=color)
                label = f"{kernel[:44]} {height:{form}}"
                axes.text(place + 0.27, below + height / 2, label, va="center", fontsize=7)
                below += height
            axes.text(place, below, f"{below:.2f} {self.unit}", ha="center", va="bottom")
        axes.set_xticks(places, [label for _, label in self.bars])
        axes.set_xlim(-0.4, places[-1] + 1.2)
        axes.set(ylabel=self.unit, title=f"{self.title.format(name=row['name'])}\n{measured_on(document)}")
        save_figure(figure, path)
