"""Convolution and norm with other tiles, warps, loads ahead and CTAs than their configs have: which of them they should have.

    python benchmarks/around_attention.py [ROWS ...] [--out FILE]

Rows are those of `flashdelta bench layer`, all by default ("norm backward": those whose name has it). All forms of a row are
compiled together, each is held to the float64 reference, and those that are right take turns beside a copy of as many bytes,
each by a CUDA graph of many launches on inputs in turns. "chosen" is the config as it is.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

import flashdelta as fd
from flashdelta.problem.problem import Problem
from flashdelta.program.launch import Launch, capability
from flashdelta.runtime.call import CACHE, check
from flashdelta.testing.cases import BF16
from flashdelta.tools.bench.checks import fault
from flashdelta.tools.bench.contenders import Contender, Setup, Work
from flashdelta.tools.bench.environment import environment
from flashdelta.tools.bench.layer import around, width_of
from flashdelta.tools.bench.report import new_document, save, script_parser, text_table
from flashdelta.tools.bench.timing import Effort, Run, Timer, capture, summarize, sustained
from flashdelta.tools.bench.tuning import THREADS
from flashdelta.tools.bench.workloads import LAYER, LayerCall, Row, select
from flashdelta.tools.compile import backward_of, only_launches
from flashdelta.triton import convolution, norm
from flashdelta.triton.build import build
from flashdelta.triton.convolution import ConvolutionConfig, Form
from flashdelta.triton.norm import NormConfig

Change = Callable[[Any, Problem, torch.device], Any]
"""Of the config that is chosen."""

TURN_MS = 12.0
"""How long a form runs at a time."""

FORWARD_FORMS = {
    "8 B x8": Form(8, 2, 8, 96, 10),
    "8 B x16, 4 warps": Form(8, 4, 16, 128, 4),
    "8 B x24": Form(8, 2, 24, 168, 6),
    "8 B x32": Form(8, 2, 32, 255, 4),
    "16 B x8": Form(16, 2, 8, 168, 6),
    "16 B x8, 1 warp": Form(16, 1, 8, 168, 12),
    "16 B x16": Form(16, 2, 16, 255, 4),
}
BACKWARD_FORMS = {
    "16 B x4": Form(16, 2, 4, 255, 4),
    "8 B x4": Form(8, 4, 4, 168, 3),
    "8 B x8": Form(8, 4, 8, 168, 3),
    "8 B x4, 2 warps": Form(8, 2, 4, 168, 6),
    "4 B x4": Form(4, 8, 4, 80, 3),
}
NORM_FORMS = {
    False: [
        norm.Form(*sizes) for sizes in ((1024, 2), (1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 8))
    ],
    True: [
        norm.Form(*sizes)
        for sizes in (
            *((512, 2, 14), (1024, 2, 8), (1024, 4, 4), (1024, 4, 7), (2048, 4, 3), (2048, 4, 4)),
            *((2048, 8, 3), (4096, 8, 2)),
        )
    ],
}
"""By whether they are of the backward pass."""

TOKENS = {768: (16, 24, 48), 2048: (32, 64, 96), 8192: (64, 128, 256)}
"""Of a group of a tile of what is chosen, by tokens of the row. Other forms have those that they load at once, or in the
backward pass those that fill waves."""


def formed(form: Form, backward: bool) -> Change:
    usual = convolution.convolution_config
    return lambda c, problem, device: usual(problem, device, backward, form)


def with_tokens(tokens: int) -> Change:
    return lambda c, problem, device: replace(c, BT=tokens * c.groups)


def normed(form: norm.Form, backward: bool) -> Change:
    usual = norm.norm_config
    return lambda c, problem, device: usual(problem, backward, form)


def forms_of(case: LayerCall) -> dict[str, Change]:
    """By name, what is chosen first."""
    chosen: dict[str, Change] = {"chosen": lambda c, problem, device: c}
    if case.part == "convolution":
        forms = BACKWARD_FORMS if case.backward else FORWARD_FORMS
        chosen |= {name: formed(form, case.backward) for name, form in forms.items()}
        return chosen | {f"{tokens} tokens": with_tokens(tokens) for tokens in TOKENS[case.tokens]}
    return chosen | {said(form): normed(form, case.backward) for form in NORM_FORMS[case.backward]}


def said(form: norm.Form) -> str:
    return f"{form.elements} elements, {form.warps} warps" + (f", {form.ctas} CTAs" if form.ctas else "")


@contextlib.contextmanager
def configured(change: Change, device: torch.device) -> Iterator[None]:
    """No call replays an earlier one's launches, in here or after it."""
    convolve, normalise = convolution.convolution_config, norm.norm_config

    def of_convolution(problem: Problem, device: torch.device, backward: bool = False) -> ConvolutionConfig:
        return change(convolve(problem, device, backward), problem, device)

    def of_norm(problem: Problem, backward: bool = False) -> NormConfig:
        return change(normalise(problem, backward), problem, device)

    CACHE.clear()
    with (
        mock.patch.object(convolution, "convolution_config", of_convolution),
        mock.patch.object(norm, "norm_config", of_norm),
    ):
        yield
    CACHE.clear()


def launches_of(case: LayerCall, device: torch.device) -> list[Launch]:
    def make(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=BF16, device=device)

    if case.part == "convolution":
        call = check(fd.short_convolution, make(case.batch, case.tokens, width_of(case)), make(width_of(case), case.W))
    else:
        x, z = (make(case.batch, case.tokens, case.HV, case.V) for _ in range(2))
        call = check(fd.gated_rms_norm, x, z, make(case.V))
    return only_launches(build(*(backward_of(*call) if case.backward else call), capability(device)))


def compile_together(case: LayerCall, forms: Mapping[str, Change], device: torch.device) -> None:
    launches = []
    for change in forms.values():
        with configured(change, device):
            launches += launches_of(case, device)

    def make(launch: Launch) -> None:
        with contextlib.suppress(Exception):  # the form meets it again
            grid = launch.ctas, launch.rows
            launch.kernel.warmup(*launch.arguments, grid=grid, **launch.constants, **launch.options())

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(make, launches))


def graph_of(work: Work, change: Change, device: torch.device) -> tuple[Run | str, dict]:
    """The replay of the form's graph or why there is none, and its errors."""
    ours = work.contenders["ours"]
    assert isinstance(ours, Contender) and ours.checked is not None
    try:
        with configured(change, device):
            errors = work.errors(ours.checked())["error"]
            return fault(errors, ours.tolerance) or capture(lambda: tuple(ours.call()))[0], errors
    except Exception as error:  # a form that does not compile or fit leaves the others to be timed
        return summarize(error), {}


def measured(row: Row, setup: Setup) -> dict:
    case: Any = row.call
    forms = forms_of(case)
    compile_together(case, forms, setup.device)
    work = around(row, setup)
    found = {name: graph_of(work, change, setup.device) for name, change in forms.items()}
    copy = work.contenders["copy"]
    assert isinstance(copy, Contender)
    runs = {name: run for name, (run, _) in found.items() if not isinstance(run, str)}
    runs["copy"] = capture(lambda: tuple(copy.call()))[0]
    assert setup.timer is not None
    taken = sustained(runs, setup.timer, TURN_MS)
    times = {
        name: {"us": 1e3 * ms / work.launches, "error": found.get(name, ("", {}))[1]} for name, ms in taken.items()
    }
    problems = {name: run for name, (run, _) in found.items() if isinstance(run, str)}
    return {"name": row.name, "bytes": work.bytes, "forms": times, "problems": problems}


def table(row: dict) -> str:
    copy = row["forms"]["copy"]["us"]
    lines = [["form", "us", "TB/s", "beside a copy", "largest error"]]
    for name, x in sorted(row["forms"].items(), key=lambda item: item[1]["us"]):
        us, error = x["us"], max(x["error"].values(), default=None)
        said = "" if error is None else f"{error:.1e}"
        lines.append([name, f"{us:.2f}", f"{row['bytes'] / us / 1e6:.2f}", f"{copy / us:.1%}", said])
    return text_table([*lines, *([name, said, "", "", ""] for name, said in row["problems"].items())])


PARSER = script_parser(__doc__)
PARSER.add_argument("rows", nargs="*", help="names of rows, or parts of names")


def main() -> int:
    arguments, device = PARSER.parse_args(), torch.device("cuda")
    began, setup = time.perf_counter(), Setup(device, Timer(device), Effort())
    document = new_document("around_attention", environment(device))
    for row in select([row for row in LAYER if row.table in ("convolution", "norm")], arguments.rows):
        found = measured(row, setup)
        document["rows"].append(found)
        print(f"{row.name} ({time.perf_counter() - began:.0f} s)\n{table(found)}\n", flush=True)
        torch.cuda.empty_cache()
        if arguments.out is not None:
            save(document, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
