"""The commands and their options. Each hands over to a module of its own and turns the answer into an exit code."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Optional

import torch
import typer
from rich.console import Console

from ... import backends
from ..bench.environment import default_device
from ..bench.report import to_json, wide_console

app = typer.Typer(
    name="flashdelta",
    help="Kimi Delta Attention kernels: check this machine, verify results, measure speed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
bench_app = typer.Typer(help="Measure speed; see benchmarks/README.md for the protocol.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")


def _backend(name: str) -> str:
    known = ("auto", *(backend.name for backend in backends.BACKENDS))
    if name not in known:
        raise typer.BadParameter(f"got {name!r}, wanted one of {', '.join(known)}")
    return name


def _device(name: Optional[str]) -> str:
    if name is None:
        return str(default_device())
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise typer.BadParameter(f"got {name!r}, wanted a device such as cuda, cuda:1 or cpu") from error
    if device.type not in ("cuda", "cpu"):
        raise typer.BadParameter(f"got {name!r}, wanted a CUDA device or cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise typer.BadParameter(f"got {name!r}, but torch sees {torch.cuda.device_count()} CUDA devices")
    return name


Backend = Annotated[str, typer.Option(callback=_backend, help="auto, or a backend by name.")]
Device = Annotated[
    Optional[str], typer.Option(callback=_device, help="Where to run.", show_default="the GPU if there is one")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]


@app.command()
def doctor(device: Device = None, json: Json = False) -> None:
    """Say what this machine has, which backends run here, and whether results are right (exit code 1 if not)."""
    from .doctor import examine, show

    report = examine(torch.device(device))
    if json:
        print(to_json(report))
    else:
        show(report, Console())
    raise typer.Exit(0 if report["self_check"]["passed"] else 1)


@app.command()
def verify(
    backend: Annotated[
        Optional[str], typer.Option(callback=lambda name: name and _backend(name), help="Only this backend.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Leave out the long cases.")] = False,
    device: Device = None,
    json: Json = False,
) -> None:
    """Hold every backend's results against the float64 recurrence (exit code 1 past tolerance or on NaN)."""
    from .verify import run_verify, show

    report = run_verify(torch.device(device), backend=backend, quick=quick, progress=not json)
    if json:
        print(to_json(report))
    else:
        show(report, wide_console())
    raise typer.Exit(0 if report["passed"] else 1)


@app.command()
def demo(
    prompt: Annotated[
        Optional[str], typer.Option(help="Text to continue, printable ASCII.", show_default="a text of our own")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Characters to write.")] = 300,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 always takes the likeliest character.")] = 0.5,
    seed: Annotated[int, typer.Option(help="Of the sampling.")] = 0,
    backend: Backend = "auto",
    device: Device = None,
    json: Json = False,
) -> None:
    """Let a small KDA model write, and hold its prefill and decode against each other (exit code 1 if they differ)."""
    from .demo import run_demo
    from .demo_view import show

    try:
        result = run_demo(
            prompt=prompt, tokens=tokens, temperature=temperature, seed=seed, backend=backend, device=device
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if json:
        print(to_json(asdict(result)))
    else:
        show(result, Console())
    raise typer.Exit(0 if result.checked else 1)


@app.command()
def export(
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder to write; made if need be.")],
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
    jobs: Annotated[Optional[int], typer.Option(min=1, help="Kernels compiled at a time.")] = None,
) -> None:
    """Compile kernels ahead of time and write them as a C library: header, sources, CMakeLists.txt. Needs no GPU."""
    from .export import run_export

    choice = {"op": op, "size": size, "gate": gate, "precision": precision}
    try:
        run_export(out, arch, {name: values for name, values in choice.items() if values}, jobs)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


JsonPath = Annotated[
    Optional[Path],
    typer.Option(
        "--json",
        help="Where to write the results; '-' also prints them on stdout, and nothing else there.",
        show_default="benchmarks/results/ of the checkout",
    ),
]


Rows = Annotated[
    Optional[list[str]],
    typer.Option(help="Only the row of this name, or the rows whose name contains it; repeatable."),
]
Fla = Annotated[
    Optional[list[str]],
    typer.Option(
        help="Rows in which FLA is timed: all, none, or as in --rows (repeatable). "
        "It tunes itself for a minute or two at a head count that its cache does not know.",
        show_default="all",
    ),
]
NoFla = Annotated[bool, typer.Option("--no-fla", help="The same as --fla none.")]
Repeats = Annotated[int, typer.Option(min=1, help="Most samples of each contender in a row.")]
Plot = Annotated[Optional[Path], typer.Option(help="Also plot time against T of one sequence into this file.")]


def _bench_prompts(
    benchmark: str,
    device: str,
    backend: str,
    json: Optional[Path],
    *,
    rows: Optional[list[str]],
    fla: Optional[list[str]],
    repeats: int,
    plot: Optional[Path] = None,
) -> None:
    """Runs one of the benchmarks over whole prompts and exits; with 1 if a row is wrong."""
    from .bench import bench_prompts

    choice = {"rows": rows or [], "fla_rows": fla or ["all"]}
    try:
        right = bench_prompts(benchmark, torch.device(device), backend, json, **choice, repeats=repeats, plot=plot)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    raise typer.Exit(0 if right else 1)


@bench_app.command()
def prefill(
    backend: Backend = "auto",
    json: JsonPath = None,
    rows: Rows = None,
    fla: Fla = None,
    no_fla: NoFla = False,
    repeats: Repeats = 100,
    plot: Plot = None,
    device: Device = None,
) -> None:
    """Time the forward over whole prompts beside FLA, with errors and floor (exit code 1 if a row is wrong)."""
    fla = ["none"] if no_fla else fla
    _bench_prompts("prefill", device, backend, json, rows=rows, fla=fla, repeats=repeats, plot=plot)


@bench_app.command()
def classic(
    backend: Backend = "auto",
    json: JsonPath = None,
    rows: Rows = None,
    fla: Fla = None,
    no_fla: NoFla = False,
    repeats: Repeats = 20,
    plot: Plot = None,
    device: Device = None,
) -> None:
    """Time 52 usual shapes beside FLA, with RMS and maximum errors of both (exit code 1 if a row is wrong)."""
    fla = ["none"] if no_fla else fla
    _bench_prompts("classic", device, backend, json, rows=rows, fla=fla, repeats=repeats, plot=plot)


@bench_app.command()
def split(
    backend: Backend = "auto",
    json: JsonPath = None,
    rows: Rows = None,
    fla: Fla = None,
    no_fla: NoFla = False,
    repeats: Repeats = 20,
    device: Device = None,
    plot: Plot = None,
) -> None:
    """Time long sequences over few heads, split and whole, beside FLA with its own split (exit code 1 if a row is wrong)."""
    fla = ["none"] if no_fla else fla
    _bench_prompts("split", device, backend, json, rows=rows, fla=fla, repeats=repeats, plot=plot)


@bench_app.command()
def kernels(
    backend: Backend = "auto",
    json: JsonPath = None,
    rows: Annotated[
        Optional[list[str]], typer.Option(help="Rows of bench prefill, as there.", show_default="T8192 H64")
    ] = None,
    repeats: Repeats = 20,
    device: Device = None,
) -> None:
    """Time the forward's kernels one by one, beside the ceilings of memory and arithmetic (exit code 1 if a row is wrong)."""
    _bench_prompts("kernels", device, backend, json, rows=rows or ["T8192 H64"], fla=["none"], repeats=repeats)


@bench_app.command()
def decode(
    backend: Backend = "auto",
    json: JsonPath = None,
    rows: Rows = None,
    quick: Annotated[bool, typer.Option("--quick", help="9 rows of 120.")] = False,
    no_fla: Annotated[bool, typer.Option("--no-fla", help="Leave FLA out.")] = False,
    repeats: Repeats = 7,
    device: Device = None,
) -> None:
    """Time steps of decoding over a paged pool beside FLA, with shares of the copy rate (exit code 1 if a row is wrong)."""
    from .bench import bench_decode

    choice = {"rows": rows or [], "quick": quick, "fla": not no_fla}
    try:
        right = bench_decode(torch.device(device), backend, json, **choice, repeats=repeats)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    raise typer.Exit(0 if right else 1)


def _bench_gradients(benchmark: str, device: str, backend: str, json: Optional[Path], **choice: object) -> None:
    """Runs one of the benchmarks of the backward pass and exits; with 1 if a row is wrong."""
    from .bench import bench_gradients

    try:
        right = bench_gradients(benchmark, torch.device(device), backend, json, **choice)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    raise typer.Exit(0 if right else 1)


@bench_app.command()
def train(
    backend: Backend = "auto",
    json: JsonPath = None,
    rows: Rows = None,
    quick: Annotated[bool, typer.Option("--quick", help="2 rows of 7.")] = False,
    no_fla: Annotated[bool, typer.Option("--no-fla", help="Leave FLA out.")] = False,
    repeats: Repeats = 20,
    plot: Annotated[Optional[Path], typer.Option(help="Also plot time by kernel into this file.")] = None,
    device: Device = None,
) -> None:
    """Time training steps beside FLA, with memory, errors of all gradients, and kernels (exit code 1 if a row is wrong)."""
    choice = {"rows": rows or [], "quick": quick, "fla": not no_fla, "repeats": repeats, "plot": plot}
    _bench_gradients("train", device, backend, json, **choice)


@bench_app.command()
def wy(
    backend: Backend = "auto",
    json: JsonPath = None,
    rows: Rows = None,
    quick: Annotated[bool, typer.Option("--quick", help="4 rows of 58.")] = False,
    no_fla: Annotated[bool, typer.Option("--no-fla", help="Leave FLA out.")] = False,
    repeats: Repeats = 20,
    plot: Plot = None,
    device: Device = None,
) -> None:
    """Time the fused backward of the WY step beside FLA's kernel, with errors by gradient (exit code 1 if a row is wrong)."""
    choice = {"rows": rows or [], "quick": quick, "fla": not no_fla, "repeats": repeats, "plot": plot}
    _bench_gradients("wy", device, backend, json, **choice)


@bench_app.command()
def fp32(
    json: JsonPath = None,
    rows: Rows = None,
    quick: Annotated[bool, typer.Option("--quick", help="4 rows of 20.")] = False,
    no_fla: Annotated[bool, typer.Option("--no-fla", help="Leave FLA out.")] = False,
    library: Annotated[
        Optional[Path], typer.Option(exists=True, dir_okay=False, help="A libflashdelta.so to time beside.")
    ] = None,
    repeats: Repeats = 50,
    device: Device = None,
) -> None:
    """Time the float32 prefill in both precisions, and the C library, beside FLA (exit code 1 if a row is wrong)."""
    from .bench import bench_fp32

    choice = {"rows": rows or [], "quick": quick, "fla": not no_fla, "library": library}
    try:
        right = bench_fp32(torch.device(device), json, **choice, repeats=repeats)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    raise typer.Exit(0 if right else 1)


@bench_app.command()
def startup(
    backend: Backend = "auto",
    json: JsonPath = None,
    tokens: Annotated[int, typer.Option(min=64, help="Tokens of the calls.")] = 8192,
    device: Device = None,
) -> None:
    """Time the first calls of a fresh process, with the kernel cache empty and then filled."""
    from .bench import bench_startup

    bench_startup(torch.device(device), backend, json, tokens)


@bench_app.command()
def toolchains(
    folder: Annotated[Path, typer.Argument(file_okay=False, help="Kernels as another Triton compiles them.")],
    compiles: Annotated[
        bool, typer.Option("--compile", help="Fill the folder with this Triton's kernels; needs no GPU.")
    ] = False,
    json: JsonPath = None,
    rows: Rows = None,
    repeats: Repeats = 50,
    device: Device = None,
) -> None:
    """Time kernels as another Triton compiles them beside this Triton's (exit code 1 if a row is wrong)."""
    from .bench import bench_toolchains

    try:
        right = bench_toolchains(
            folder, torch.device(device), json, compiles=compiles, rows=rows or [], repeats=repeats
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    raise typer.Exit(0 if right else 1)


@bench_app.command()
def show(
    results: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A JSON file that a benchmark wrote.")],
    plot: Plot = None,
) -> None:
    """Print a benchmark's table again from its JSON file."""
    from .bench import show_results

    try:
        show_results(results, plot)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
