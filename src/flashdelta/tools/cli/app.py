"""The commands and their options. Each hands over to a module of its own and turns the answer into an exit code."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn, Optional

import torch
import typer
from rich.console import Console
from typer.core import TyperGroup

from ... import __version__, backends
from ...runtime.devices import find_device
from ..bench.benchmarks import BENCHMARKS
from ..bench.environment import default_device
from ..bench.report import to_json


class Commands(TyperGroup):
    """The commands; Ctrl-C ends each with one line. typer would say nothing, or "Aborted" by its version."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print("flashdelta: interrupted", file=sys.stderr)
            raise typer.Exit(130) from None


app = typer.Typer(
    name="flashdelta",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
bench_app = typer.Typer(help="Measure speed; see benchmarks/README.md for the protocol.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")


@contextlib.contextmanager
def _bad_parameters() -> Iterator[None]:
    """Makes a ValueError the message of a wrong command line (exit code 2)."""
    try:
        yield
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


def _end(report: dict, show: Callable[[dict, Console], None], json: bool, passed: bool) -> NoReturn:
    """Prints the report and exits; with 1 if it did not pass."""
    if json:
        print(to_json(report))
    else:
        show(report, Console())
    raise typer.Exit(0 if passed else 1)


def _backend(name: str) -> str:
    known = ("auto", *(backend.name for backend in backends.BACKENDS))
    if name not in known:
        raise typer.BadParameter(f"got {name!r}, wanted one of {', '.join(known)}")
    return name


def _device(name: Optional[str]) -> str:
    with _bad_parameters():
        return str(default_device() if name is None else find_device(name))


Backend = Annotated[str, typer.Option(callback=_backend, help="auto, or a backend by name.")]
Device = Annotated[
    Optional[str], typer.Option(callback=_device, help="Where to run.", show_default="the GPU if there is one")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]


def _say_version(asked: bool) -> None:
    if asked:
        print(f"flashdelta {__version__}")
        raise typer.Exit


@app.callback()
def all_commands(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Kimi Delta Attention kernels: check this machine, verify results, measure speed."""


@app.command()
def doctor(device: Device = None, json: Json = False) -> None:
    """Show versions, which backends can run here, and whether a call is right (exit code 1 if not)."""
    from .doctor import examine, show

    report = examine(torch.device(device), progress=not json)
    _end(report, show, json, report["self_check"]["passed"])


@app.command()
def verify(
    backend: Annotated[
        Optional[str], typer.Option(callback=lambda name: name and _backend(name), help="Only this backend.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the long cases.")] = False,
    device: Device = None,
    json: Json = False,
) -> None:
    """Check every backend against the float64 recurrence (exit code 1 past tolerance or on NaN)."""
    from .verify import run_verify, show

    report = run_verify(torch.device(device), backend=backend, quick=quick, progress=not json)
    _end(report, show, json, report["passed"])


@app.command()
def demo(
    prompt: Annotated[
        Optional[str], typer.Option(help="Text to continue, printable ASCII.", show_default="a built-in text")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Characters to write.")] = 300,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Of the sampling; 0 always takes the likeliest character.")
    ] = 0.5,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    requests: Annotated[
        Optional[int], typer.Option(min=1, help="Instead: so many requests, joining and leaving a running batch.")
    ] = None,
    slots: Annotated[int, typer.Option(min=1, help="Of that batch: how many run at a time.")] = 4,
    backend: Backend = "auto",
    device: Device = None,
    json: Json = False,
) -> None:
    """Let a small KDA model write, and compare its prefill with its decode; or serve requests, each of which must get the text
    that it gets alone. Exit code 1 if they differ."""
    from .demo import run_demo, show

    if requests is not None:
        from . import batching

        given = {"tokens": tokens, "temperature": temperature, "seed": seed, "prompt": prompt}
        with _bad_parameters():
            served = batching.run_batch(requests=requests, slots=slots, **given, backend=backend, device=device)
        _end(asdict(served), batching.show, json, served.checked)
    sampling = {"tokens": tokens, "temperature": temperature, "seed": seed}
    with _bad_parameters():
        result = run_demo(prompt=prompt, **sampling, backend=backend, device=device)
    _end(asdict(result), show, json, result.checked)


@app.command()
def export(
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder to write; created if missing.")],
    arch: Annotated[list[str], typer.Option(help="sm_80, sm_86, sm_89, sm_90, sm_100 or sm_120; repeatable.")],
    op: Annotated[
        Optional[list[str]],
        typer.Option(help="prefill_f32, prefill_bf16 or decode_bf16; repeatable.", show_default="all"),
    ] = None,
    size: Annotated[
        Optional[list[str]], typer.Option(help="K,V,C, as in 128,128,64; repeatable.", show_default="all four")
    ] = None,
    gate: Annotated[
        Optional[list[str]], typer.Option(help="none or logsigmoid; repeatable.", show_default="both")
    ] = None,
    precision: Annotated[
        Optional[list[str]], typer.Option(help="tf32x3 or ieee, of prefill_f32; repeatable.", show_default="tf32x3")
    ] = None,
    jobs: Annotated[Optional[int], typer.Option(min=1, help="Kernels to compile at once.")] = None,
) -> None:
    """Compile kernels ahead of time and write them as a C library: header, sources, CMakeLists.txt. Needs no GPU."""
    from .export import run_export

    choice = {"op": op, "size": size, "gate": gate, "precision": precision}
    with _bad_parameters():
        run_export(out, arch, {name: values for name, values in choice.items() if values}, jobs)


JsonPath = Annotated[
    Optional[Path],
    typer.Option(
        "--json",
        help="Where to write the results; '-' also prints them on stdout, and nothing else there.",
        show_default="benchmarks/results/ of the checkout",
    ),
]


def _benchmark(
    *,
    folder: Annotated[Path, typer.Argument(file_okay=False, help="Kernels compiled by another Triton.")],
    compiles: Annotated[
        bool, typer.Option("--compile", help="Fill the folder with this Triton's kernels; needs no GPU.")
    ] = False,
    backend: Backend = "auto",
    json: JsonPath = None,
    rows: Annotated[
        Optional[list[str]],
        typer.Option(help="Only the row of this name, or the rows whose name contains it; repeatable."),
    ] = None,
    fla: Annotated[
        Optional[list[str]],
        typer.Option(
            help="Rows in which other libraries are timed: all, none, or as in --rows (repeatable). "
            "FLA autotunes for a minute or two at each new head count.",
            show_default="all",
        ),
    ] = None,
    no_fla: Annotated[bool, typer.Option("--no-fla", help="The same as --fla none.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A few rows.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Maximum samples of each contender in a row.")],
    plot: Annotated[Optional[Path], typer.Option(help="Also plot the result to this file.")] = None,
    library: Annotated[
        Optional[Path], typer.Option(exists=True, dir_okay=False, help="A libflashdelta.so to time as well.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=64, help="Tokens of the calls.")] = 8192,
    device: Device = None,
    wide: Annotated[bool, typer.Option("--wide", help="All columns; else as many as fit 80 characters.")] = False,
) -> None:
    """Has every option of the benchmarks' commands, with its default. A command has some of them (`_command`)."""


def _command(name: str, help: str, options: Sequence[str], repeats: int) -> None:
    """A benchmark's command, with the options that it has."""

    def command(**chosen: Any) -> None:
        from .bench import run_benchmark

        with _bad_parameters():
            right = run_benchmark(name, **chosen)
        raise typer.Exit(0 if right else 1)

    known = inspect.signature(_benchmark, eval_str=True).parameters
    parameters = [known[x].replace(default=repeats) if x == "repeats" else known[x] for x in options]
    setattr(command, "__signature__", inspect.Signature(parameters))  # noqa: B010
    command.__annotations__ = {x.name: x.annotation for x in parameters}
    command.__doc__ = f"{help} (exit code 1 if a row is wrong)."
    bench_app.command(name)(command)


for _name, _one in BENCHMARKS.items():
    _command(_name, _one.help, _one.options, _one.effort.rounds)

# not asked of the benchmark itself, which imports Triton, and Triton is for Linux only
_command(
    "toolchains",
    "Time kernels as another Triton compiles them beside this Triton's",
    ("folder", "compiles", "json", "rows", "repeats", "device", "wide"),
    repeats=50,
)


@bench_app.command()
def show(
    results: Annotated[
        Path, typer.Argument(exists=True, help="A JSON file that a benchmark wrote, or a folder of them.")
    ],
    plot: Annotated[Optional[Path], typer.Option(help="Also plot the result to this file.")] = None,
    wide: Annotated[bool, typer.Option("--wide", help="All columns.")] = False,
) -> None:
    """Print a benchmark's table again from its JSON file, or of a folder the rows that README.md shows."""
    from .bench import show_results

    with _bad_parameters():
        show_results(results, plot, wide)


@bench_app.command()
def pages() -> None:
    """Write the tables of README.md, benchmarks/README.md and docs/ and the README's picture again from the result files."""
    from ..bench.pages import write

    with _bad_parameters():
        write()
