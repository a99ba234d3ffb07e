"""The commands and their options. Each hands over to a module of its own and turns the answer into an exit code."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn, Optional

import torch
import typer
from rich.console import Console
from typer.core import TyperGroup

from ... import __version__, backends
from ...problem.arguments import find_device
from ..devices import default_device
from ..files import to_json


class Commands(TyperGroup):
    """The commands; Ctrl-C ends each with one line. typer would say nothing, or "Aborted" by its version."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print("flashdelta: interrupted", file=sys.stderr)
            raise typer.Exit(130) from None


app = typer.Typer(
    name="flashdelta", cls=Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False
)


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


def _backend(name: Optional[str]) -> Optional[str]:
    if name not in (None, *backends.NAMES):
        raise typer.BadParameter(f"must be one of {', '.join(backends.NAMES)}; got {name!r}")
    return name


def _device(name: Optional[str]) -> str:
    with _bad_parameters():
        return str(default_device() if name is None else find_device(name))


Backend = Annotated[str, typer.Option(callback=_backend, help="auto, or a backend by name.")]
Device = Annotated[Optional[str], typer.Option(callback=_device, help="Where to run.", show_default="the GPU if any")]
Texts = Optional[list[str]]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]


def _chosen(choices: str, default: str) -> Any:
    """An option that may be repeated."""
    return typer.Option(help=f"{choices}; repeatable.", show_default=default)


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
    """Kimi Delta Attention kernels: check this machine, verify results, write a text, export a C library."""


@app.command()
def doctor(device: Device = None, json: Json = False) -> None:
    """Show versions, which backends can run here, and whether a call is right (exit code 1 if not)."""
    from .doctor import examine, show

    report = examine(torch.device(device), progress=not json)
    _end(report, show, json, report["self_check"]["passed"])


@app.command()
def verify(
    backend: Annotated[Optional[str], typer.Option(callback=_backend, help="Only this backend.")] = None,
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
    prompt: Annotated[Optional[str], typer.Option(help="Printable ASCII to continue.", show_default="built in")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Characters to write.")] = 300,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of sampling; 0 takes the likeliest character.")] = 0.5,
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
    from .verify import saying

    given: dict[str, Any] = {"prompt": prompt, "tokens": tokens, "temperature": temperature, "seed": seed}
    given |= {"backend": backend, "device": torch.device(device)}
    with _bad_parameters(), saying(not json) as say:
        if requests is not None:
            from . import batching

            say(f"serving {requests} requests; kernels compile on first use")
            report, show_report = batching.run_batch(requests=requests, slots=slots, **given), batching.show
        else:
            say(f"writing {tokens} characters; kernels compile on first use")
            report, show_report = run_demo(**given), show
    _end(report, show_report, json, report["checked"])


@app.command()
def export(
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder to write; created if missing.")],
    arch: Annotated[list[str], typer.Option(help="sm_80, sm_86, sm_89, sm_90, sm_100 or sm_120; repeatable.")],
    op: Annotated[Texts, _chosen("prefill_f32, prefill_bf16 or decode_bf16", "all")] = None,
    size: Annotated[Texts, _chosen("K,V,C, as in 128,128,64", "all four")] = None,
    gate: Annotated[Texts, _chosen("none, logsigmoid", "both")] = None,
    precision: Annotated[Texts, _chosen("tf32x3 or ieee, of prefill_f32", "tf32x3")] = None,
    jobs: Annotated[Optional[int], typer.Option(min=1, help="Kernels to compile at once.")] = None,
) -> None:
    """Compile kernels ahead of time and write them as a C library: header, sources, CMakeLists.txt. Needs no GPU."""
    from .export import run_export

    choice = {"op": op, "size": size, "gate": gate, "precision": precision}
    with _bad_parameters():
        run_export(out, arch, {name: values for name, values in choice.items() if values}, jobs)
