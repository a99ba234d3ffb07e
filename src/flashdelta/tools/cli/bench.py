"""`flashdelta bench`: runs a benchmark, saves its document, prints its table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from ..bench.cases import CASES, PrefillCase, select
from ..bench.decode import DECODE, QUICK, run_decode
from ..bench.environment import gpu
from ..bench.fp32 import FP32, run_fp32
from ..bench.fp32 import QUICK as FP32_QUICK
from ..bench.gradients_report import plot_kernels, plot_wy, train_summary, train_table, wy_summary, wy_table
from ..bench.kernels import measure_kernels
from ..bench.peers import DecodePeer, Peer, WyPeer, find_fla, find_fla_decode, find_fla_wy
from ..bench.prefill import measure_row, run_prefill
from ..bench.protocol import Effort
from ..bench.report import (
    PLOTTED,
    classic_summary,
    classic_table,
    decode_summary,
    decode_table,
    default_path,
    failures,
    fp32_summary,
    fp32_table,
    kernels_summary,
    kernels_table,
    load,
    plot_times,
    prefill_summary,
    prefill_table,
    require_matplotlib,
    save,
    split_summary,
    split_table,
    startup_table,
    to_json,
    toolchains_summary,
    toolchains_table,
    wide_console,
)
from ..bench.split import let_fla_split, measure_split
from ..bench.startup import run_startup
from ..bench.train import QUICK as TRAIN_QUICK
from ..bench.train import TRAIN, run_train
from ..bench.wy import QUICK as WY_QUICK
from ..bench.wy import WY, run_wy

STDOUT = Path("-")


MEASURE = {"prefill": measure_row, "classic": measure_row, "kernels": measure_kernels, "split": measure_split}
"""By benchmark over whole prompts: what makes a row."""


def bench_prompts(
    benchmark: str,
    device: torch.device,
    backend: str,
    json: Path | None,
    *,
    rows: Sequence[str],
    fla_rows: Sequence[str],
    repeats: int,
    plot: Path | None = None,
) -> bool:
    """Runs and reports one of the benchmarks over whole prompts; whether every row was right.

    Raises:
        ValueError: no GPU, a row name that fits nothing, or a plot without matplotlib or without its rows.
    """
    if device.type != "cuda":
        raise ValueError(f"device: got {device}, wanted an NVIDIA GPU (bench {benchmark} measures full-size prompts)")
    if plot is not None:
        require_matplotlib()  # before the measuring, not after it
    cases = select(CASES[benchmark], rows)
    timed = _fla_cases(cases, fla_rows)
    if benchmark == "split":
        let_fla_split()
    log = Console(stderr=True, highlight=False)

    def progress(row: dict) -> None:
        log.print(_progress_line(row), soft_wrap=True)

    path = _path(benchmark, backend, json, device)
    document = run_prefill(
        cases,
        benchmark=benchmark,
        measure=MEASURE[benchmark],
        device=device,
        backend=backend,
        fla=find_fla() if timed else Peer(None, "not asked for"),
        fla_rows=frozenset(case.name for case in timed),
        effort=Effort(rounds=repeats),
        path=path,
        progress=progress,
    )
    _finish(document, json, path, log)
    if plot is not None:
        plot_times(document, plot)
    return not failures(document)


def bench_decode(
    device: torch.device,
    backend: str,
    json: Path | None,
    *,
    rows: Sequence[str],
    quick: bool,
    fla: bool,
    repeats: int,
) -> bool:
    """Runs and reports decoding; whether every row was right.

    Raises:
        ValueError: no GPU, or a row name that fits nothing.
    """
    if device.type != "cuda":
        raise ValueError(f"device: got {device}, wanted an NVIDIA GPU (bench decode measures full-size pools)")
    log = Console(stderr=True, highlight=False)

    def progress(row: dict) -> None:
        times = (f"{name} {row[name]['us']:.2f} us" for name in ("ours", "fla") if row[name]["us"] is not None)
        log.print(f"{row['name']}: " + (", ".join(times) or f"- ({row['ours']['problem']})"), soft_wrap=True)

    path = _path("decode", None if backend == "auto" else backend, json, device)
    document = run_decode(
        select(QUICK if quick else DECODE, rows),
        device=device,
        backend=backend,
        fla=find_fla_decode() if fla else DecodePeer(None, "not asked for"),
        effort=Effort(rounds=repeats, min_rounds=min(3, repeats), budget_ms=100.0, warmup_ms=2.0),
        path=path,
        progress=progress,
    )
    _finish(document, json, path, log)
    return not failures(document)


def bench_fp32(
    device: torch.device,
    json: Path | None,
    *,
    rows: Sequence[str],
    quick: bool,
    fla: bool,
    library: Path | None,
    repeats: int,
) -> bool:
    """Runs and reports the float32 prefill; whether every row was right.

    Raises:
        ValueError: no GPU, or a row name that fits nothing.
    """
    if device.type != "cuda":
        raise ValueError(f"device: got {device}, wanted an NVIDIA GPU (bench fp32 measures full-size prompts)")
    log = Console(stderr=True, highlight=False)

    def progress(row: dict) -> None:
        names = ("tf32x3", "ieee", "c", "fla_fp32", "fla_bf16")
        times = [f"{name} {row[name]['ms']['median']:.3f} ms" for name in names if row[name]["ms"]]
        log.print(f"{row['name']}: " + (", ".join(times) or f"- ({row['ours']['problem']})"), soft_wrap=True)

    path = _path("fp32", None, json, device)
    document = run_fp32(
        select(FP32_QUICK if quick else FP32, rows),
        device=device,
        fla=find_fla() if fla else Peer(None, "not asked for"),
        library=library,
        effort=Effort(rounds=repeats, min_rounds=min(5, repeats), budget_ms=1000.0, warmup_ms=10.0),
        path=path,
        progress=progress,
    )
    _finish(document, json, path, log)
    return not failures(document)


GRADIENTS = {
    "train": (TRAIN, TRAIN_QUICK, run_train, find_fla, Peer, plot_kernels),
    "wy": (WY, WY_QUICK, run_wy, find_fla_wy, WyPeer, plot_wy),
}
"""By benchmark of the backward pass: its rows, fewer of them, what measures them, how FLA is found, what stands for none, and
the plot."""


def bench_gradients(
    benchmark: str,
    device: torch.device,
    backend: str,
    json: Path | None,
    *,
    rows: Sequence[str],
    quick: bool,
    fla: bool,
    repeats: int,
    plot: Path | None = None,
) -> bool:
    """Runs and reports one of the benchmarks of the backward pass; whether every row was right.

    Raises:
        ValueError: no GPU, a row name that fits nothing, or a plot without matplotlib or without its rows.
    """
    if device.type != "cuda":
        raise ValueError(f"device: got {device}, wanted an NVIDIA GPU (bench {benchmark} measures full-size steps)")
    if plot is not None:
        require_matplotlib()  # before the measuring, not after it
    every, few, run, find, peer, draw = GRADIENTS[benchmark]
    log = Console(stderr=True, highlight=False)

    def progress(row: dict) -> None:
        times = (f"{name} {row[name]['ms']['median']:.3f} ms" for name in ("ours", "fla") if row[name]["ms"])
        log.print(f"{row['name']}: " + (", ".join(times) or f"- ({row['ours']['problem']})"), soft_wrap=True)

    path = _path(benchmark, None if backend == "auto" else backend, json, device)
    document = run(
        select(few if quick else every, rows),
        device=device,
        backend=backend,
        fla=find() if fla else peer(None, "not asked for"),
        effort=Effort(rounds=repeats),
        path=path,
        progress=progress,
    )
    _finish(document, json, path, log)
    if plot is not None:
        draw(document, plot)
    return not failures(document)


def bench_startup(device: torch.device, backend: str, json: Path | None, tokens: int) -> None:
    """Runs and reports the start-up benchmark."""
    document = run_startup(device, backend, tokens)
    path = _path("startup", backend, json, device)
    save(document, path)
    _finish(document, json, path, Console(stderr=True, highlight=False))


def bench_toolchains(
    folder: Path, device: torch.device, json: Path | None, *, compiles: bool, rows: Sequence[str], repeats: int
) -> bool:
    """Compiles the kernels into `folder`, or runs and reports those in it beside this Triton's; whether every row was right.

    Raises:
        ValueError: no GPU, a folder that does not fit, or a row name that fits nothing.
    """
    from ..bench.toolchains import ROWS, compile_rows, run_toolchains  # imports Triton, which is for Linux only

    log = Console(stderr=True, highlight=False)

    def say(line: str) -> None:
        log.print(line, soft_wrap=True, markup=False)

    if compiles:
        manifest = compile_rows(select(ROWS, rows), folder, say)
        say(f"Triton {manifest['triton']}: {len(manifest['kernels'])} kernels saved to {folder}")
        return True
    if device.type != "cuda":
        raise ValueError(f"device: got {device}, wanted an NVIDIA GPU (without --compile, kernels are timed)")

    def progress(row: dict) -> None:
        problems = [x["problem"] for x in (row["ours"], *row["kernels"]) if x["problem"]]
        say("; ".join([f"{row['name']}: difference {row['difference']}", *problems]))

    path = _path("toolchains", None, json, device)
    document = run_toolchains(
        select(ROWS, rows),
        folder=folder,
        device=device,
        effort=Effort(rounds=repeats, budget_ms=500.0, warmup_ms=10.0),
        path=path,
        progress=progress,
        begin=lambda name: say(f"{name} .."),
    )
    _finish(document, json, path, log)
    return not failures(document)


def show_results(path: Path, plot: Path | None) -> None:
    """Prints, and on request plots, a saved document.

    Raises:
        ValueError: the file holds no benchmark's document, or nothing to plot.
    """
    document = load(path)
    if not isinstance(document, dict) or document.get("benchmark") not in PRINTERS:
        raise ValueError(f"results: got {path}, wanted a JSON file of one of: {', '.join(PRINTERS)}")
    _print(document)
    if plot is not None:
        if document["benchmark"] not in PLOTS:
            raise ValueError(f"plot: got a {document['benchmark']} result, wanted one of: {', '.join(PLOTS)}")
        PLOTS[document["benchmark"]](document, plot)


PRINTERS: dict[str, tuple[Callable[[dict], Table], Callable[[dict], list[str]]]] = {
    "prefill": (prefill_table, prefill_summary),
    "classic": (classic_table, classic_summary),
    "kernels": (kernels_table, kernels_summary),
    "split": (split_table, split_summary),
    "decode": (decode_table, decode_summary),
    "fp32": (fp32_table, fp32_summary),
    "startup": (startup_table, lambda document: []),
    "train": (train_table, train_summary),
    "wy": (wy_table, wy_summary),
    "toolchains": (toolchains_table, toolchains_summary),
}
"""By benchmark: its table, and the lines under it."""

PLOTS: dict[str, Callable[[dict, Path], None]] = {
    **dict.fromkeys(PLOTTED, plot_times),
    "train": plot_kernels,
    "wy": plot_wy,
}
"""By benchmark, where it has one."""


def _fla_cases(cases: Sequence[PrefillCase], chosen: Sequence[str]) -> list[PrefillCase]:
    if "none" in chosen:
        return []
    return select(cases, [text for text in chosen if text != "all"])


def _path(benchmark: str, backend: str | None, json: Path | None, device: torch.device) -> Path:
    if json is not None and json != STDOUT:
        return json
    found = gpu(device)
    return default_path(benchmark, backend, found["name"] if found else None)


def _finish(document: dict, json: Path | None, path: Path, log: Console) -> None:
    if json == STDOUT:
        print(to_json(document))
    else:
        _print(document)
    log.print(f"saved to {path}", soft_wrap=True)


def _print(document: dict) -> None:
    table, summary = PRINTERS[document["benchmark"]]
    console = wide_console(highlight=False)
    console.print(table(document))
    for line in summary(document):
        console.print(line, markup=False, soft_wrap=True)


def _progress_line(row: dict) -> str:
    times = []
    for name in ("ours", "graph", "fla"):
        outcome = row[name]
        result = f"{outcome['ms']['median']:.3f} ms" if outcome["ms"] else f"- ({outcome['problem']})"
        times.append(f"{name} {result}")
    return f"{row['name']}: " + ", ".join(times)
