"""Steps of the layer in one launch with other warps, tiles and registers than `fused_config` has: which of them it should have.

    python benchmarks/fused_steps.py [--quick | --chosen] [--out FILE]

Every form is held to the float64 reference first. Then all forms of a shape take turns, each by a CUDA graph of many launches
on slots of their own, beside a step of attention alone ("bare"). A form is named by its warps, the tiles of a state, and the
most registers that ptxas may give a thread; what that spills of two shapes is listed at the end. Hopper's own also goes
without its prefetches, and with more of them. `--quick`: H = 32 alone. `--chosen`: the portable kernel only as it is chosen,
and some of the rows that have bounds, in a minute.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from unittest import mock

import torch

from flashdelta.hopper import fused_decode as hopper
from flashdelta.hopper.fused_decode import HopperConfig
from flashdelta.problem.problem import Problem
from flashdelta.runtime.call import CACHE
from flashdelta.tools.bench import profiling
from flashdelta.tools.bench.checks import fault
from flashdelta.tools.bench.contenders import DECODE_TOLERANCE, Contender, Setup, Work, launch_all
from flashdelta.tools.bench.environment import environment
from flashdelta.tools.bench.layer import LayerStep
from flashdelta.tools.bench.report import new_document, save, script_parser, text_table
from flashdelta.tools.bench.timing import Effort, Run, Timer, capture, summarize, sustained, take_turns
from flashdelta.tools.bench.workloads import LAYER, Row
from flashdelta.triton import fused_decode
from flashdelta.triton.fused_decode import FusedConfig

FORMS = {
    (warps, tiles, registers): f"{warps} warps, {tiles} tiles, {registers}"
    for warps, tiles, registers in (
        *itertools.product((4,), (2, 4, 8), (168, 255)),
        *itertools.product((8,), (2, 4, 8), (128,)),
    )
}
"""With 128 channels 8 warps have two threads a channel, 64 elements of a state each."""

CHOSEN = {None: "Triton's, as chosen"}

CHOSEN_ROWS = (
    *(f"decode N{N} H32 fp32" for N in (1, 32, 128)),
    *(f"decode N{N} H32 bf16" for N in (1, 8, 32, 128)),
    "decode N256 H96 bf16",
)
"""Of `--chosen`."""

HOPPER_FORMS: dict[str, Callable[[HopperConfig, int], HopperConfig]] = {
    "Hopper's own": lambda c, ctas: c,
    "Hopper's own, 96 registers": lambda c, ctas: replace(c, max_registers=96),
    "Hopper's own, 168 registers": lambda c, ctas: replace(c, max_registers=168),
    "Hopper's own, no prefetch": lambda c, ctas: replace(c, ahead=(0, 0)),
    "Hopper's own, all prefetch": lambda c, ctas: replace(c, ahead=(0, ctas)),
}
"""Changes to what is chosen. 96 and 168 registers: five and three CTAs of a bfloat16 state on an SM; of a float32 one three in
any case."""

EFFORT = Effort(rounds=7, min_rounds=3, budget_ms=150.0, warmup_ms=2.0)


def configured(form: tuple[int, int, int] | None) -> Callable[..., FusedConfig]:
    """As `fused_config`, but for the warps, tiles and registers of a form."""
    usual = fused_decode.fused_config

    def config(problem: Problem, arch: int) -> FusedConfig:
        chosen = usual(problem, arch)
        return chosen if form is None else FusedConfig(*form[:2], chosen.stream, form[2])

    return config


def configured_hopper(change: Callable[[HopperConfig, int], HopperConfig]) -> Callable[..., HopperConfig]:
    usual = hopper.hopper_config
    return lambda problem, sms: change(usual(problem, sms), problem.N * problem.H)


def graphs_of(step: LayerStep, forms: Mapping) -> Iterator[tuple[str, Run | str]]:
    """The replay of each form's graph, or why it has none. Attention alone runs where it is fastest."""
    work = step.work()
    bare = work.contenders["bare"]
    assert isinstance(bare, Contender)
    yield "bare", capture(lambda: tuple(bare.call()))[0]
    step.setup = replace(step.setup, backend="triton")
    for form, name in forms.items():
        with mock.patch.object(fused_decode, "fused_config", configured(form)):
            yield name, graph_of(step, work)
    step.setup = replace(step.setup, backend="hopper")
    for name, change in HOPPER_FORMS.items():
        with mock.patch.object(hopper, "hopper_config", configured_hopper(change)):
            yield name, graph_of(step, work)


def graph_of(step: LayerStep, work: Work) -> Run | str:
    CACHE.clear()  # else a call like an earlier one replays that one's launch
    try:
        ours = step.contender(step.fused, step.fused, DECODE_TOLERANCE)
        assert ours.checked is not None
        step.pool[step.some], step.windows[step.some] = step.before  # graphs have moved them on
        wrong = fault(work.errors(ours.checked())["error"], DECODE_TOLERANCE)
        return wrong or capture(lambda: tuple(launch_all(step.fused, step.slots)()))[0]
    except Exception as error:  # a form that does not compile or fit leaves the others to be timed
        return summarize(error)
    finally:
        CACHE.clear()


def measured(row: Row, setup: Setup, forms: Mapping = FORMS) -> dict:
    step = LayerStep(row, setup)
    found = dict(graphs_of(step, forms))
    runs = {name: run for name, run in found.items() if not isinstance(run, str)}
    assert setup.timer is not None
    cold, warm = take_turns(runs, setup.timer, EFFORT), sustained(runs, setup.timer)
    launches = len(step.slots)
    times = {
        name: {"us": 1e3 * cold[name].median / launches, "sustained_us": 1e3 * warm[name] / launches} for name in runs
    }
    return {"name": row.name, "forms": times, "problems": {k: x for k, x in found.items() if isinstance(x, str)}}


def table(row: dict) -> str:
    bare = row["forms"]["bare"]["us"]
    lines = [["form", "us", "over bare", "sustained us"]]
    for name, x in sorted(row["forms"].items(), key=lambda item: item[1]["us"]):
        lines.append([name, f"{x['us']:.2f}", f"{x['us'] / bare:.3f}", f"{x['sustained_us']:.2f}"])
    return text_table([*lines, *([name, said, "", ""] for name, said in row["problems"].items())])


def spills(row: Row, setup: Setup) -> list[str]:
    """What each form's kernel has, of one launch."""
    step = LayerStep(row, replace(setup, backend="triton"))
    lines = []
    for form, name in FORMS.items():
        with mock.patch.object(fused_decode, "fused_config", configured(form)):
            CACHE.clear()
            runs = profiling.profiled(lambda: step.fused(step.slots[0]))
        for run in runs:
            lines.append(f"{name}: {run.registers} registers, {profiling.spilled_bytes(run)} B spilled")
    CACHE.clear()
    return lines


PARSER = script_parser(__doc__)
ROWS = PARSER.add_mutually_exclusive_group()
ROWS.add_argument("--quick", action="store_true", help="H = 32 alone")
ROWS.add_argument("--chosen", action="store_true", help="rows with bounds; the portable kernel only as it is chosen")


def main() -> int:
    arguments, device = PARSER.parse_args(), torch.device("cuda")
    setup = Setup(device, Timer(device), EFFORT)
    rows = [row for row in LAYER if row.table == "decode" and (not arguments.quick or row.call.H == 32)]
    if arguments.chosen:
        rows = [row for row in rows if row.name in CHOSEN_ROWS]
    document = new_document("fused_steps", environment(device))
    with torch.no_grad():
        for row in rows:
            found = measured(row, setup, CHOSEN if arguments.chosen else FORMS)
            document["rows"].append(found)
            print(f"{row.name}\n{table(found)}\n", flush=True)
            if arguments.out is not None:
                save(document, arguments.out)
        for state in () if arguments.chosen else ("fp32", "bf16"):
            row = next(row for row in rows if row.name == f"decode N128 H32 {state}")
            print(row.name, *spills(row, setup), sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
