"""`flashdelta bench`: runs a benchmark, saves its document, prints its table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ..bench.benchmarks import benchmark_of
from ..bench.contenders import Setup, find, let_fla_split
from ..bench.environment import gpu
from ..bench.report import (
    default_path,
    failures,
    load,
    plot_kernels,
    progress_line,
    require_matplotlib,
    show,
    to_json,
)
from ..bench.runner import Benchmark, run
from ..bench.timing import Timer, host_us
from ..bench.views import PLOTS, VIEWS
from ..bench.workloads import select
from ..export.bindings import Library

STDOUT = Path("-")


def run_benchmark(
    name: str,
    *,
    device: str,
    repeats: int | None = None,
    backend: str = "auto",
    json: Path | None = None,
    rows: Sequence[str] | None = None,
    fla: Sequence[str] | None = None,
    no_fla: bool = False,
    quick: bool = False,
    plot: Path | None = None,
    library: Path | None = None,
    tokens: int = 8192,
    wide: bool = False,
    folder: Path | None = None,
    compiles: bool = False,
) -> bool:
    """Runs and reports a benchmark; whether every row was right.

    Raises:
        ValueError: no GPU, a row name that fits nothing, a folder that does not fit, or a plot without matplotlib.
    """
    benchmark = benchmark_of(name)
    few = benchmark.quick if quick or "quick" not in benchmark.options else ()
    chosen = select(select(benchmark.rows, () if rows and not quick else few), rows or ())
    if compiles:
        return _compile(chosen, folder)
    place = torch.device(device)
    if name != "startup" and place.type != "cuda":
        raise ValueError(f"device: got {device}, wanted an NVIDIA GPU (bench {name} measures full-size calls)")
    if plot is not None:
        require_matplotlib()  # before the measuring, not after it
    if name == "split":
        let_fla_split()
    setup, facts = _setup(benchmark, place, backend, repeats, library, tokens, folder)
    names = ["none"] if no_fla else fla or ["all"]
    if "none" not in names:
        beside = frozenset(row.name for row in select(chosen, [text for text in names if text != "all"]))
        setup = replace(setup, peers={peer: find(peer) for peer in benchmark.peers}, peer_rows=beside)
    found = gpu(place)
    path = default_path(name, backend, str(found["name"]) if found else None) if json in (None, STDOUT) else json
    view = VIEWS[name]
    document = run(benchmark, setup, path, chosen, lambda row: _say(progress_line(row, view)), **facts)
    print(to_json(document) if json == STDOUT else show(document, view, wide))
    _say(f"saved to {path}")
    if plot is not None:
        _draw(document, plot)
    return not failures(document)


def _setup(
    benchmark: Benchmark,
    device: torch.device,
    backend: str,
    repeats: int | None,
    library: Path | None,
    tokens: int,
    folder: Path | None,
) -> tuple[Setup, dict[str, Any]]:
    """What all rows share, and facts of the whole document."""
    effort = benchmark.effort
    effort = replace(effort, rounds=repeats or effort.rounds)
    effort = replace(effort, min_rounds=min(effort.min_rounds, effort.rounds))
    facts: dict[str, Any] = {}
    if folder is not None:
        from ..bench.toolchains import prepare  # imports Triton, which is for Linux only

        loaded, facts["toolchains"] = prepare(folder, device)
    timer = Timer(device) if device.type == "cuda" else None
    ceilings = benchmark.ceilings(device, timer) if benchmark.ceilings else {}
    opened = None if library is None else Library(str(library))
    if opened is not None:
        # a prefill without arguments is refused at once, so this is the price of a call through ctypes
        price = host_us(lambda: opened.functions.fd_prefill_f32(None, None), device, 50)
        facts |= {"library": opened.version, "ctypes us": price}
    calls = 50 if benchmark.name == "fp32" else 200  # so many wait in the GPU's queue, and the host need not
    settings = {"ceilings": ceilings, "library": opened, "tokens": tokens, "host_calls": calls}
    return Setup(device, timer, effort, backend, folder=None if folder is None else loaded, **settings), facts


def _compile(rows: Sequence[Any], folder: Path | None) -> bool:
    from ..bench.toolchains import compile_rows

    manifest = compile_rows(rows, folder, _say)
    _say(f"Triton {manifest['triton']}: {len(manifest['kernels'])} kernels saved to {folder}")
    return True


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _draw(document: dict, path: Path) -> None:
    draw = plot_kernels if document["benchmark"] == "train" else PLOTS[document["benchmark"]].draw
    draw(document, path)


def show_results(path: Path, plot: Path | None, wide: bool = False) -> None:
    """Prints, and on request plots, a saved document.

    Raises:
        ValueError: the file holds no benchmark's document, or nothing to plot.
    """
    document = load(path)
    if not isinstance(document, dict) or document.get("benchmark") not in VIEWS:
        raise ValueError(f"results: got {path}, wanted a JSON file of one of: {', '.join(VIEWS)}")
    print(show(document, VIEWS[document["benchmark"]], wide))
    if plot is not None:
        if document["benchmark"] not in (*PLOTS, "train"):
            raise ValueError(
                f"plot: got a {document['benchmark']} result, wanted one of: {', '.join((*PLOTS, 'train'))}"
            )
        _draw(document, plot)
