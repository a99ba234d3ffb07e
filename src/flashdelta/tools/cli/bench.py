"""`flashdelta bench`: runs a benchmark, saves its document, prints its table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..bench.benchmarks import benchmark_of
from ..bench.contenders import Setup, find, let_fla_split
from ..bench.environment import gpu
from ..bench.pages import draw_headlines, headline_table
from ..bench.report import (
    MISSED,
    default_path,
    failures,
    load,
    missed,
    progress_line,
    require_matplotlib,
    show,
    text_table,
    to_json,
)
from ..bench.runner import Benchmark, run
from ..bench.timing import Timer, host_us
from ..bench.views import PLOTS, VIEWS
from ..bench.workloads import select
from ..export.bindings import Library
from ..files import counted, require_writable

STDOUT = Path("-")


@dataclass(frozen=True)
class Options:
    """What a benchmark's command is given; an option that it has not keeps its default."""

    device: str
    repeats: int | None = None
    backend: str = "auto"
    json: Path | None = None
    rows: Sequence[str] | None = None
    fla: Sequence[str] | None = None
    no_fla: bool = False
    quick: bool = False
    plot: Path | None = None
    library: Path | None = None
    tokens: int = 8192
    wide: bool = False
    folder: Path | None = None
    compiles: bool = False


def chosen_rows(benchmark: Benchmark, options: Options) -> list[Any]:
    few = benchmark.quick if options.quick or "quick" not in benchmark.options else ()
    usual = select(benchmark.rows, () if options.rows and not options.quick else few)
    return select(usual, options.rows or (), benchmark.more)


def run_benchmark(name: str, **given: Any) -> bool:
    """Runs and reports a benchmark; whether every row was right. Bounds that were missed are said last, and make none wrong.

    Raises:
        ValueError: no GPU, a row name that fits nothing, a folder that does not fit, a file that can't be written, or a plot
            without matplotlib.
    """
    benchmark, options = benchmark_of(name), Options(**given)
    chosen = chosen_rows(benchmark, options)
    if options.compiles:
        return _compile(chosen, options.folder)
    device = torch.device(options.device)
    if name != "startup" and device.type != "cuda":
        raise ValueError(f"device: got {device}, wanted an NVIDIA GPU (bench {name} measures full-size calls)")
    if options.plot is not None:
        require_matplotlib()  # this and files are asked for before the measuring, not after it
        require_writable("plot", options.plot)
    if name == "split":
        let_fla_split()
    setup, facts = _setup(benchmark, device, options)
    names = ["none"] if options.no_fla else options.fla or ["all"]
    if "none" not in names:
        beside = frozenset(row.name for row in select(chosen, [text for text in names if text != "all"]))
        setup = replace(setup, peers={peer: find(peer) for peer in benchmark.peers}, peer_rows=beside)
    found, path, view = gpu(device), options.json, VIEWS[name]
    if path in (None, STDOUT):
        path = default_path(name, options.backend, str(found["name"]) if found else None)
    require_writable("json", path)
    _say(f"{benchmark.help}, on {device}; a line for each row once it is measured")
    document = run(benchmark, setup, path, chosen, lambda row: _say(progress_line(row, view)), **facts)
    print(to_json(document) if options.json == STDOUT else show(document, view, options.wide), flush=True)
    _say(f"saved to {path}")
    if options.plot is not None:
        PLOTS[name].draw(document, options.plot)
    lost = missed(document["rows"])
    if lost:
        _say(MISSED + "; ".join(lost))
    return not failures(document)


def _setup(benchmark: Benchmark, device: torch.device, options: Options) -> tuple[Setup, dict[str, Any]]:
    """What all rows share, and facts of the whole document."""
    rounds = options.repeats or benchmark.effort.rounds
    effort = replace(benchmark.effort, rounds=rounds, min_rounds=min(benchmark.effort.min_rounds, rounds))
    timer = Timer(device) if device.type == "cuda" else None
    calls = 50 if benchmark.name == "fp32" else 200  # so many wait in the GPU's queue, and the host need not
    setup = Setup(device, timer, effort, options.backend, tokens=options.tokens, host_calls=calls)
    facts: dict[str, Any] = {}
    if options.folder is not None:
        from ..bench.toolchains import prepare  # imports Triton, which is for Linux only

        folder, facts["toolchains"] = prepare(options.folder, device)
        setup = replace(setup, folder=folder)
    if benchmark.ceilings is not None:
        setup = replace(setup, ceilings=benchmark.ceilings(device, timer))
    if options.library is not None:
        library = Library(str(options.library))
        # a prefill without arguments is refused at once, so this is the price of a call through ctypes
        price = host_us(lambda: library.functions.fd_prefill_f32(None, None), device, 50)
        facts |= {"library": library.version, "ctypes us": price}
        setup = replace(setup, library=library)
    return setup, facts


def _compile(rows: Sequence[Any], folder: Path | None) -> bool:
    from ..bench.toolchains import compile_rows

    manifest = compile_rows(rows, folder, _say)
    _say(f"Triton {manifest['triton']}: {counted(len(manifest['kernels']), 'kernel')} saved to {folder}")
    return True


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def show_results(path: Path, plot: Path | None, wide: bool = False) -> None:
    """Prints, and on request plots, a saved document, or the headlines of a folder of them.

    Raises:
        ValueError: the file holds no benchmark's document, the folder none of the headlines', or there is nothing to plot.
    """
    if path.is_dir():
        print(text_table(headline_table(path)))
        if plot is not None:
            require_writable("plot", plot)
            draw_headlines(plot, path)
        return
    document = load(path)
    if not isinstance(document, dict) or document.get("benchmark") not in VIEWS:
        raise ValueError(f"results: got {path}, wanted a JSON file of one of: {', '.join(VIEWS)}")
    print(show(document, VIEWS[document["benchmark"]], wide))
    if plot is not None:
        if document["benchmark"] not in PLOTS:
            raise ValueError(f"plot: got a {document['benchmark']} result, wanted one of: {', '.join(PLOTS)}")
        require_writable("plot", plot)
        PLOTS[document["benchmark"]].draw(document, plot)
