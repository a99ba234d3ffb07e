"""From a benchmark's document to a file, a table and a plot.

A document is what the JSON files hold: `benchmark`, `date`, `environment`, `protocol`, `ceilings`, `rows`.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import math
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

TABLE_WIDTH = 190
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


def add_row(document: dict, row: dict, path: Path, progress: Callable[[dict], None]) -> None:
    """After which an interrupted run has lost nothing, and the next row has the GPU's memory to itself."""
    document["rows"].append(row)
    save(document, path)
    progress(row)
    torch.cuda.empty_cache()  # does nothing without a GPU


def load(path: Path) -> dict:
    return json.loads(path.read_text())


def default_path(benchmark: str, backend: str | None, gpu: str | None) -> Path:
    """`<benchmark>-<backend>-<gpu>-<date>.json` (without the backend if it is None) in benchmarks/results/ of the checkout
    this package is imported from, or in the current directory where there is none."""
    checkout = Path(__file__).resolve().parents[4] / "benchmarks" / "results"
    slug = (gpu or "cpu").lower().replace(" ", "-")
    what = benchmark if backend is None else f"{benchmark}-{backend}"
    name = f"{what}-{slug}-{datetime.date.today().isoformat()}.json"
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


def _times(row: dict) -> list[str]:
    """The cells that every table of prompts has: ours, graph and FLA in ms, and the speed-up."""
    speedup = "-" if row["speedup"] is None else f"{row['speedup']:.2f}x"
    return [*(_ms(row[name]) for name in ("ours", "graph", "fla")), speedup]


TIME_COLUMNS = ("ours ms", "graph ms", "FLA ms", "FLA/ours")


def _errors(outcome: dict, *keys: str) -> str:
    return " ".join(_error(outcome[key]) for key in keys or ("error_o", "error_state"))


def _number(x: float | None, form: str) -> str:
    return "-" if x is None else format(x, form)


def _error(x: float | str | None) -> str:
    return "-" if x is None else f"{float(x):.1e}"


def met(row: dict) -> str:
    if row["met"] is None:
        return "-"
    return f"{row['gate']}: " + ("[green]met[/green]" if row["met"] else "[red]not met[/red]")


def prefill_table(document: dict) -> Table:
    """The prefill rows; columns as explained in benchmarks/README.md."""
    columns = (*TIME_COLUMNS, "floor ms", "share", "error ours: o, state", "error FLA: o, state", "must ms", "gate")

    def cells(row: dict) -> list[str]:
        return [
            *_times(row),
            f"{row['floor_ms']:.3f}",
            "-" if row["share_of_floor"] is None else f"{row['share_of_floor']:.0%}",
            _errors(row["ours"]),
            _errors(row["fla"]),
            "-" if row["must_ms"] is None else f"{row['must_ms']:.2f}",
            met(row),
        ]

    return row_table(document, columns, lambda row: [cells(row)])


def row_table(document: dict, columns: Sequence[str], lines: Callable[[dict], list[list[str]]]) -> Table:
    """A table of the document's rows, each with one or more `lines`, whose cells stand behind the row's name."""
    table = Table(title=headline(document), title_justify="left", caption_justify="left")
    for column in ("case", *columns):
        table.add_column(column, justify="left" if column in ("case", "kernel", "gate") else "right", no_wrap=True)
    previous = None
    for row in document["rows"]:
        if previous is not None and row["table"] != previous:
            table.add_section()
        previous = row["table"]
        for cells in lines(row):
            table.add_row(row["name"], *cells)
    return table


def classic_table(document: dict) -> Table:
    """The rows of the classic table, with absolute errors."""
    columns = [f"{what}, {name}\nRMSE max" for what in ("o", "state") for name in ("ours", "FLA")]

    def cells(row: dict) -> list[str]:
        errors = [
            _errors(row[name], f"rmse_{what}", f"max_error_{what}")
            for what in ("o", "state")
            for name in ("ours", "fla")
        ]
        return [*_times(row), *errors]

    return row_table(document, (*TIME_COLUMNS, *columns), lambda row: [cells(row)])


def _is_split(row: dict) -> bool:
    return max(row["segments"] or (), default=1) > 1


def split_table(document: dict) -> Table:
    """The rows of `bench split`: split as planned, whole, and FLA."""
    columns = ("ours ms", "whole ms", "FLA ms", "whole/ours", "FLA/ours", "segments", "floor ms")
    columns += tuple(f"error {name}: o, state" for name in ("ours", "whole", "FLA"))

    def ratio(x: float | None) -> str:
        return "-" if x is None else f"{x:.2f}x"

    def cells(row: dict) -> list[str]:
        plan = row["segments"]
        return [
            *(_ms(row[name]) for name in ("ours", "whole", "fla")),
            ratio(row["gain"]),
            ratio(row["speedup"]),
            "-" if plan is None else " ".join(map(str, plan)) if _is_split(row) else "whole",
            f"{row['floor_ms']:.3f}",
            *(_errors(row[name]) for name in ("ours", "whole", "fla")),
        ]

    return row_table(document, columns, lambda row: [cells(row)])


def kernels_table(document: dict) -> Table:
    """One line a kernel of each row: time, work against the ceilings, what a program occupies."""
    columns = (
        "kernel",
        "ms",
        "GB",
        "TB/s",
        "of copy",
        "GFLOP",
        "TFLOP/s",
        "of GEMM",
        "us/chunk",
        "programs",
        "threads",
    )
    columns += ("regs", "spill B", "shared KiB", "CTAs/SM", "waves")

    def cells(kernel: dict) -> list[str]:
        def number(key: str, form: str, scale: float = 1.0) -> str:
            return "-" if kernel.get(key) is None else format(kernel[key] * scale, form)

        return [
            kernel["kernel"] + (f" x {kernel['launches']}" if kernel["launches"] > 1 else ""),
            number("ms", ".3f"),
            number("bytes", ".3f", 1e-9),
            number("tb_s", ".2f"),
            number("share_of_copy", ".0%"),
            number("flop", ".1f", 1e-9),
            number("tflop_s", ".0f"),
            number("share_of_gemm", ".0%"),
            number("us_per_chunk", ".2f"),
            *(number(key, ".0f") for key in ("programs", "threads", "registers", "spill_bytes")),
            number("shared_bytes", ".1f", 1 / 1024),
            number("ctas_per_sm", ".0f"),
            number("waves", ".2f"),
        ]

    return row_table(document, columns, lambda row: [cells(kernel) for kernel in row["kernels"]])


def prefill_markdown(document: dict, table: str = "prefill") -> str:
    """The rows of one prefill table as Markdown, for the README."""
    lines = [
        "| case | ours ms | CUDA graph ms | FLA ms | FLA/ours | floor ms | error ours: o, state | error FLA: o, state |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in document["rows"]:
        if row["table"] == table:
            times = " | ".join(_times(row))
            errors = " | ".join(_errors(row[name]) for name in ("ours", "fla"))
            lines.append(f"| {row['name']} | {times} | {row['floor_ms']:.3f} | {errors} |")
    return "\n".join(lines)


def split_markdown(document: dict, names: Sequence[str]) -> str:
    """Some rows of the split benchmark as Markdown, for the README."""
    lines = [
        "| batch, heads | segments | ours ms | not split ms | FLA ms | FLA/ours | floor ms |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in document["rows"]:
        if row["name"] in names:
            times = " | ".join(_ms(row[name]) for name in ("ours", "whole", "fla"))
            plan = " ".join(map(str, row["segments"]))
            lines.append(f"| {row['name']} | {plan} | {times} | {row['speedup']:.2f}x | {row['floor_ms']:.3f} |")
    return "\n".join(lines)


def decode_markdown(document: dict, names: Sequence[str]) -> str:
    """Some rows of the decode benchmark as Markdown, for the README."""
    lines = [
        "| case | us a step | of copy | FLA us | FLA/ours | error ours: o, state | bound |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in document["rows"]:
        if row["name"] in names:
            times = f"{row['ours']['us']:.1f} | {row['share']:.0%} | {row['fla']['us']:.1f} | {row['speedup']:.2f}x"
            bound = row["gate"] + ("" if row["met"] else ", missed")
            lines.append(f"| {row['name']} state | {times} | {_errors(row['ours'])} | {bound} |")
    return "\n".join(lines)


GEMMS = {"gemm_tflop_s": "bf16", "tf32_tflop_s": "TF32", "fp32_tflop_s": "fp32"}
"""Ceilings of products by their key in a document."""


def headline(document: dict) -> str:
    """One line: what was measured, where, with which versions."""
    found = document["environment"]
    gpu = found["gpu"]["name"] if found["gpu"] else "CPU"
    known = (f"{name} {version}" for name, version in found["versions"].items() if version is not None)
    parts = [f"{document['benchmark']} on {gpu}", *known]
    if "ceilings" in document:
        ceilings = document["ceilings"]
        parts.append(f"copy {ceilings['copy_tb_s']:.2f} TB/s")
        parts += [f"{name} GEMM {ceilings[key]:.0f} TFLOP/s" for key, name in GEMMS.items() if key in ceilings]
    return " · ".join(parts)


def prefill_summary(document: dict) -> list[str]:
    """What a reader should take away: gates met, and everything that is missing with its reason."""
    judged = gates(document, lambda row: f"{row['ours']['ms']['median']:.3f}")
    return [judged, *correctness(document), *absences(document, fla="FLA", graph="CUDA graph")]


def gates(document: dict, measured: Callable[[dict], str]) -> str:
    """How many gates are met, and the rows that miss theirs with what was `measured`."""
    gated = [row for row in document["rows"] if row["met"] is not None]
    if not gated:
        return "gates: none judged (they hold on an H200, for rows that were timed)"
    missed = [f"{row['name']} ({measured(row)})" for row in gated if not row["met"]]
    found = f"gates: {len(gated) - len(missed)} of {len(gated)} met"
    return found + (", not: " + "; ".join(missed) if missed else "")


def classic_summary(document: dict) -> list[str]:
    """The speed-up over all rows, and everything that is missing with its reason."""
    speedups = [row["speedup"] for row in document["rows"] if row["speedup"] is not None]
    lines = []
    if speedups:
        mean = statistics.geometric_mean(speedups)
        lines.append(f"FLA/ours: {mean:.2f}x (geometric mean of {len(speedups)} rows, least {min(speedups):.2f}x)")
    return [*lines, *correctness(document), *absences(document, fla="FLA", graph="CUDA graph")]


def kernels_summary(document: dict) -> list[str]:
    """Each row's whole call beside the sum of its kernels, and everything that is missing with its reason."""
    lines = []
    for row in document["rows"]:
        if row["kernels"]:
            total = sum(kernel["ms"] for kernel in row["kernels"])
            call = f"call {_ms(row['ours'])} ms, CUDA graph {_ms(row['graph'])} ms, kernels {total:.3f} ms"
            lines.append(f"{row['name']} ({row['backend']}): {call}, floor {row['floor_ms']:.3f} ms")
    return [*lines, *correctness(document), *absences(document, graph="CUDA graph")]


def split_summary(document: dict) -> list[str]:
    """What splitting gains where it is done, and costs where it is not, as a share of the whole call's time."""
    rows = [row for row in document["rows"] if row["gain"] is not None]
    split = [row["gain"] for row in rows if _is_split(row)]
    whole = [row["gain"] for row in rows if not _is_split(row)]
    speedups = [row["speedup"] for row in rows if row["speedup"] is not None]
    lines = []
    if split:
        mean = statistics.geometric_mean(split)
        lines.append(
            f"split rows: {mean:.2f}x as fast as whole (geometric mean), best {max(split):.2f}x, worst {min(split):.2f}x"
        )
    if whole:
        told = [row["told_gain"] for row in rows if not _is_split(row) and row.get("told_gain")]
        costs = [f"{max(1 / gain - 1 for gain in whole):.1%} at most"]
        costs += [f"{max(1 / gain - 1 for gain in told):.1%} where the host has the lengths"] if told else []
        lines.append(f"whole rows: planning costs {', '.join(costs)}")
    if speedups:
        mean = statistics.geometric_mean(speedups)
        lines.append(f"FLA with its own split over ours: {mean:.2f}x (geometric mean)")
    return [*lines, *correctness(document), *absences(document, fla="FLA", graph="CUDA graph")]


def correctness(document: dict) -> list[str]:
    failed, rows = failures(document), document["rows"]
    verdict = f"{len(failed)} of {len(rows)} rows failed" if failed else "all rows passed"
    return [f"correctness: {verdict}", *(f"  {row['name']}: {row['ours']['problem']}" for row in failed)]


def absences(document: dict, **titles: str) -> list[str]:
    """Why contenders, given by key and title, have no time."""
    rows, lines = document["rows"], []
    for name, title in titles.items():
        for problem in dict.fromkeys(row[name]["problem"] for row in rows if row[name]["problem"]):
            absent = [row["name"] for row in rows if row[name]["problem"] == problem]
            where = "in every row" if len(absent) == len(rows) else "in " + "; ".join(absent)
            lines.append(f"no {title} time {where}: {problem}")
    return lines


def decode_table(document: dict) -> Table:
    """The rows of decoding; columns as explained in benchmarks/README.md."""
    columns = ("ours us", "FLA us", "FLA/ours", "floor us", "share", "FLA share", "a token", "host us", "FLA host us")
    columns += ("error ours: o, state", "error FLA: o, state", "gate")

    def cells(row: dict) -> list[str]:
        ours, fla = row["ours"], row["fla"]
        wrong = ours["us"] is None and ours["error_o"] is not None
        return [
            "[red]wrong[/red]" if wrong else _number(ours["us"], ".2f"),
            _number(fla["us"], ".2f"),
            _number(row["speedup"], ".2f") + ("" if row["speedup"] is None else "x"),
            _number(row["floor_us"], ".2f"),
            *(_number(row[share], ".1%") for share in ("share", "share_fla")),
            _number(row["token_cost"], ".2f"),
            *(_number(x["host_us"], ".1f") for x in (ours, fla)),
            *(_errors(x) for x in (ours, fla)),
            met(row),
        ]

    return row_table(document, columns, lambda row: [cells(row)])


def decode_summary(document: dict) -> list[str]:
    """Gates met, and everything that is missing with its reason."""
    judged = gates(document, lambda row: f"{row['ours']['us']:.2f} us, {row['share']:.1%}")
    return [judged, *correctness(document), *absences(document, fla="FLA")]


def fp32_table(document: dict) -> Table:
    """The rows of the float32 prefill: times, shares of the ceilings by precision, errors, and the host's time of a call."""
    columns = ("tf32x3\nms", "ieee\nms", "C\nms", "FLA fp32\nms", "FLA bf16\nms", "floor\nms")
    columns += (
        "tf32x3, of\ncopy TF32",
        "ieee, of\ncopy fp32",
        "tf32x3, error\no w u",
        "ieee\no",
        "FLA fp32\no",
        "FLA bf16\no",
    )
    columns += ("host\nus", "C host us\nsame, other")

    def cells(row: dict) -> list[str]:
        def share(name: str) -> str:
            found = [row["shares"][f"{name} of {what}"] for what in ("copy", "products")]
            return " ".join(_number(x, ".0%") for x in found)

        return [
            *(_ms(row[name]) for name in ("tf32x3", "ieee", "c", "fla_fp32", "fla_bf16")),
            f"{row['floor_ms']:.3f}",
            share("tf32x3"),
            share("ieee"),
            _errors(row["ours"], "error_o", "error_w", "error_u"),
            *(_error(row[name]["error_o"]) for name in ("ieee", "fla_fp32", "fla_bf16")),
            _number(row["ours"]["host_us"], ".1f"),
            " ".join(_number(row["c"].get(x), ".1f") for x in ("host_us", "host_changed_us")),
        ]

    return row_table(document, columns, lambda row: [cells(row)])


def fp32_summary(document: dict) -> list[str]:
    """How many rows meet each gate, which do not, and everything that is missing with its reason."""
    rows, lines = document["rows"], []
    for gate in rows[0]["gates"] if rows else ():
        judged = [row for row in rows if row["gates"][gate] is not None]
        missed = [row["name"] for row in judged if not row["gates"][gate]]
        found = f"{len(judged) - len(missed)} of {len(judged)} rows" if judged else "not measured"
        lines.append(f"{gate}: {found}" + (", not: " + "; ".join(missed) if missed else ""))
    if document["protocol"]["ctypes us"] is not None:
        lines.append(f"of the C host us, ctypes takes {document['protocol']['ctypes us']:.1f}")
    titles = {"ieee": "ieee", "c": "C library", "fla_fp32": "FLA fp32", "fla_bf16": "FLA bf16"}
    return [*lines, *correctness(document), *absences(document, **titles)]


def toolchains_table(document: dict) -> Table:
    """A line for each row's whole call by CUDA graph, and one for each of its kernels: this process's Triton beside another."""
    names = {key: document["toolchains"][key]["triton"] for key in ("ours", "other")}
    table = Table(title=headline(document), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    both = "\n".join(names.values())
    for column in ("", f"regs\n{both}", f"spill B\n{both}", *(f"us\n{name}" for name in names.values())):
        table.add_column(column, justify="right" if column else "left")
    for column in ("ratio", "busy\nratio"):
        table.add_column(column, justify="right")
    for cells, row in _toolchain_cells(document):
        wrong = " [red]wrong[/red]" if row and row["ours"]["problem"] else ""
        name = f"[bold]{cells[0]}[/bold]{wrong}" if row else f"  {cells[0]}"
        table.add_row(name, *cells[1:])
    return table


def toolchains_markdown(document: dict) -> str:
    """The same in Markdown, for docs/machine-code.md."""
    names = [document["toolchains"][key]["triton"] for key in ("ours", "other")]
    times = " | ".join(f"{name} us" for name in names)
    lines = [
        f"| call, kernel | registers | spilled bytes: {', '.join(names)} | {times} | ratio | busy |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for cells, row in _toolchain_cells(document):
        name = f"**{cells[0]}**" if row else cells[0].removesuffix("_kernel")
        lines.append(f"| {' | '.join([name, *cells[1:]])} |")
    return "\n".join(lines)


def _toolchain_cells(document: dict) -> Iterator[tuple[list[str], dict | None]]:
    """Of each line: name, registers, spilled bytes, times, their ratio cold and busy; and the row if it is a whole call."""

    def both(found: dict) -> str:
        ours, other = (str(found.get(key, "-")) for key in ("ours", "other"))
        return ours if ours == other else f"{ours}/{other}"

    def times(ms: dict | None) -> list[str]:
        if ms is None:
            return ["-", "-", "-"]
        found = [ms[key]["median"] for key in ("ours", "other")]
        return [*(f"{1e3 * x:.1f}" for x in found), f"{found[1] / found[0]:.2f}"]

    for row in document["rows"]:
        yield [row["name"], "", "", *times(row["graph_ms"]), ""], row
        for kernel in row["kernels"]:
            costs = [both(kernel[what]) for what in ("registers", "spill_bytes")]
            yield [kernel["kernel"], *costs, *times(kernel["ms"]), _number(busy_ratio(kernel), ".2f")], None


def busy_ratio(kernel: dict) -> float | None:
    found = kernel["sustained_ms"]
    return found["other"] / found["ours"] if found else None


def toolchains_summary(document: dict) -> list[str]:
    """How the results differ, the ratio over all kernels, and everything that is missing with its reason."""
    rows = document["rows"]
    judged = [row for row in rows if row["difference"] is not None]
    same = sum(row["difference"] == 0 for row in judged)
    largest = max((float(row["difference"]) for row in judged), default=0.0)
    lines = [f"results: the same bits in {same} of {len(judged)} rows, largest difference {largest:.1e}"]
    kernels = [kernel for row in rows for kernel in row["kernels"]]
    ratios = {"cold": [x["ms"]["other"]["median"] / x["ms"]["ours"]["median"] for x in kernels if x["ms"]]}
    ratios["busy"] = [ratio for ratio in map(busy_ratio, kernels) if ratio is not None]
    for name, found in ratios.items():
        if found:
            mean = statistics.geometric_mean(found)
            lines.append(f"ratio, {name}: {mean:.3f} (geometric mean), {min(found):.2f} to {max(found):.2f}")
    missing = dict.fromkeys(f"{x['kernel']}: {x['problem']}" for x in kernels if x["problem"])
    return [*lines, *correctness(document), *missing]


def failures(document: dict) -> list[dict]:
    """The rows in which flashdelta raised or failed the correctness gate."""
    return [row for row in document["rows"] if row["ours"]["problem"] is not None]


def require_matplotlib() -> None:
    """Raises a ValueError that says what to install where matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("plot: matplotlib is not installed; run: pip install 'flashdelta[bench]'")


@dataclass(frozen=True)
class Plotted:
    """What a benchmark's plot shows: rows with one sequence and so many heads, and contenders beside ours."""

    heads: int
    title: str
    others: tuple[tuple[str, str], ...] = ()


PLOTTED = {
    "prefill": Plotted(64, "KDA prefill"),
    "classic": Plotted(64, "KDA prefill"),
    "split": Plotted(4, "KDA prefill, few heads", (("whole", "not split"),)),
}
"""By benchmark."""


def plot_times(document: dict, path: Path) -> None:
    """Time against T for one sequence, both axes logarithmic, with the floor; the suffix names the format.

    Raises:
        ValueError: the document has no such row, or matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    plotted = PLOTTED[document["benchmark"]]
    rows = [row for row in document["rows"] if _on_plot(row["shape"], plotted.heads)]
    if not rows:
        raise ValueError(f"plot: got no row with one sequence and H = HV = {plotted.heads}")
    rows.sort(key=lambda row: row["shape"]["T"])
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.add_subplot()
    ours = ", ".join(["flashdelta", *sorted({row["backend"] for row in rows if row["backend"]})])
    others = [(name, f"{ours}, {label}") for name, label in plotted.others]
    for name, label in (("fla", "FLA"), *others, ("ours", ours), ("graph", f"{ours}, CUDA graph")):
        timed = [(row["shape"]["T"], row[name]["ms"]["median"]) for row in rows if row[name]["ms"] is not None]
        if timed:
            axes.plot(*zip(*timed), marker="o", label=label)
    axes.plot(
        [row["shape"]["T"] for row in rows],
        [row["floor_ms"] for row in rows],
        linestyle="--",
        color="gray",
        label=f"floor: q, k, v, g, o moved once at {document['ceilings']['copy_tb_s']:.2f} TB/s",
    )
    lengths = [row["shape"]["T"] for row in rows]
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [str(T) for T in lengths])
    axes.set(xlabel="tokens T", ylabel="ms", title=f"{plotted.title}, B = 1, H = {plotted.heads}, K = V = 128, bf16")
    axes.grid(which="both", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150)


def _on_plot(shape: dict, heads: int) -> bool:
    return shape["B"] == 1 and not shape["lengths"] and shape["H"] == shape["HV"] == heads


STARTUP_BUDGET_S = {"first": 8.0, "later": 0.5}
"""Seconds that the first call on an empty kernel cache, and the first call of any other shape after it, may take."""


def startup_table(document: dict) -> Table:
    table = Table(title=headline(document), title_justify="left")
    for column, justify in (("process", "left"), ("call", "left"), ("s", "right"), ("budget s", "right"), ("", "left")):
        table.add_column(column, justify=justify)
    for row in document["rows"]:
        verdict = "" if row["met"] is None else "[green]met[/green]" if row["met"] else "[red]not met[/red]"
        budget = "" if row["budget_s"] is None else f"{row['budget_s']:.1f}"
        table.add_row(row["process"], row["call"], f"{row['seconds']:.3f}", budget, verdict)
    return table
