"""A training step of `chunk_kda`, forward and backward, beside FLA's on the same inputs: time, memory, errors, and kernels."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

import flashdelta

from .cases import RANDOM, UNEVEN, Shape
from .environment import environment
from .inputs import MODEL_OPTIONS, UNBOUNDED_OPTIONS, Inputs, generator_of, random_inputs
from .kernels import KernelRun, profiled
from .oracle import relative_error
from .peers import Peer
from .prefill import GATED_GPU
from .protocol import (
    Ceilings,
    Effort,
    Run,
    Timer,
    Timing,
    measure_ceilings,
    peak_above,
    second_result,
    summarize,
    take_turns,
    timer_for,
)
from .report import add_row, new_document

LEAVES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
"""Whose gradients are taken."""

TOLERANCE = 2e-2
"""Largest relative error of a gradient in bf16."""

CHECKED = 8
"""Query/key heads, at most, whose gradients are held against float64."""

SHARE, MEMORY = 0.50, 0.70
"""Of FLA's time, and of FLA's peak memory above the inputs: what every row must reach on one H200."""


# ---- rows ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainCase:
    """One row. `must` and `aim`: milliseconds of forward and backward on one H200."""

    name: str
    shape: Shape
    reason: str
    bounded: bool = True
    must: float | None = None
    aim: float | None = None

    @property
    def options(self) -> dict[str, object]:
        return (MODEL_OPTIONS if self.bounded else UNBOUNDED_OPTIONS) | {"output_final_state": False}


TRAIN: tuple[TrainCase, ...] = (
    TrainCase("B1 T8192 H32", Shape(T=8192, H=32), "the headline: one long sequence", must=2.1, aim=1.6),
    TrainCase("B4 T2048 H32", Shape(B=4, T=2048, H=32), "as many tokens in shorter chains", must=2.1, aim=1.6),
    TrainCase("B1 T8192 H64", Shape(T=8192, H=64), "twice the heads", must=4.0, aim=3.1),
    TrainCase("packed 6 uneven H32", Shape(lengths=UNEVEN, H=32), "documents packed into one row"),
    TrainCase("packed 20 random H32", Shape(lengths=RANDOM, H=32), "many tails"),
    TrainCase("GVA B1 T8192 H8 HV32", Shape(T=8192, H=8, HV=32), "four value heads share a query/key head"),
    TrainCase("B1 T8192 H32 softplus", Shape(T=8192, H=32), "Kimi-Linear's gate, without a bound", bounded=False),
)

QUICK = tuple(case for case in TRAIN if case.name in ("B1 T8192 H32", "packed 20 random H32"))


# ---- calls and truth -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """The inputs of a row, leaves among them, and the gradient of `o`."""

    inputs: Inputs
    options: Mapping[str, object]
    grad_o: Tensor

    def forward(self, op: Callable[..., tuple]) -> Tensor:
        return op(**self.inputs, **self.options)[0]

    def both(self, op: Callable[..., tuple]) -> tuple[Tensor, ...]:
        """The gradients of the `LEAVES`."""
        return torch.autograd.grad(self.forward(op), [self.inputs[name] for name in LEAVES], self.grad_o)

    def input_bytes(self) -> int:
        return sum(x.nbytes for x in (*self.inputs.values(), self.grad_o) if x is not None)


def make_step(case: TrainCase, device: torch.device) -> Step:
    inputs = random_inputs(case.shape, device)
    for name in LEAVES:
        inputs[name].requires_grad_()
    generator = generator_of(device, 1)
    grad_o = torch.randn(inputs["v"].shape, generator=generator, device=device).to(inputs["v"].dtype)
    return Step(inputs, case.options, grad_o)


def heads_of(x: Tensor, name: str, shape: Shape, head: int) -> Tensor:
    """What belongs to query/key head `head` and to the value heads that read it."""
    group = shape.value_heads // shape.H
    own = slice(head * group, (head + 1) * group)
    if name in ("q", "k"):
        return x[:, :, head : head + 1]
    if name == "A_log":
        return x[own]
    if name == "dt_bias":
        return x.view(shape.value_heads, shape.K)[own].flatten()
    return x[:, :, own]


def checked_heads(shape: Shape) -> tuple[int, ...]:
    """Query/key heads that are held against float64, from the first to the last: of all of them it would take terabytes. As
    many as make the error of `A_log`, one number a head, say something: a sum over all tokens may be near zero."""
    return tuple(sorted({i * (shape.H - 1) // (CHECKED - 1) for i in range(CHECKED)}))


def true_gradients(step: Step, shape: Shape) -> dict[int, dict[str, Tensor]]:
    """By checked head and leaf, from float64 autograd of the reference."""
    found = {}
    for head in checked_heads(shape):
        inputs = {name: x for name, x in step.inputs.items() if name not in LEAVES}
        for name in LEAVES:
            part = heads_of(step.inputs[name].detach(), name, shape, head)
            inputs[name] = part.double().contiguous().requires_grad_()
        part = Step(inputs, step.options, heads_of(step.grad_o, "v", shape, head).double())
        op = functools.partial(flashdelta.chunk_kda, backend="reference")
        found[head] = dict(zip(LEAVES, part.both(op)))
    return found


def gradient_errors(
    found: Sequence[Tensor], truth: Mapping[int, Mapping[str, Tensor]], shape: Shape
) -> dict[str, float]:
    """The relative error of each gradient over the checked heads."""
    errors = {}
    for name, x in zip(LEAVES, found):
        ours = torch.cat([heads_of(x, name, shape, head).flatten() for head in truth])
        errors[name] = relative_error(ours, torch.cat([part[name].flatten() for part in truth.values()]))
    return errors


# ---- measuring ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """One contender in one row: `forward_ms` (keeping what the backward needs) and `ms` of forward and backward; bytes at the
    peak above the inputs, and with them; errors by gradient; kernels (`kernel_times`); or why there is no time."""

    ms: Timing | None = None
    forward_ms: Timing | None = None
    peak_above_bytes: int | None = None
    peak_bytes: int | None = None
    error: dict[str, float] | None = None
    first_call_s: float | None = None
    kernels: list[dict] = field(default_factory=list)
    problem: str | None = None


@dataclass(frozen=True)
class TrainSetup:
    """What all rows of a run share."""

    device: torch.device
    timer: Timer
    ceilings: Ceilings
    backend: str
    fla: Peer
    effort: Effort
    gated: bool = False
    profiled_calls: int = 5


def kernel_times(runs: Sequence[KernelRun], calls: int) -> list[dict]:
    """Milliseconds and launches a call by kernel, the longest first, from the `runs` of `calls` equal calls."""
    by_name: dict[str, list[float]] = {}
    for run in runs:
        by_name.setdefault(run.name, []).append(run.us)
    found = [
        {"kernel": name, "ms": statistics.fmean(us) * len(us) / calls / 1e3, "launches": len(us) / calls}
        for name, us in by_name.items()
    ]
    return sorted(found, key=lambda kernel: -kernel["ms"])


def _profile(call: Run, setup: TrainSetup) -> list[dict]:
    """The kernels of a call, on a cold L2; none where the profiler sees no GPU."""
    if setup.device.type != "cuda":
        return []

    def repeat() -> None:
        for _ in range(setup.profiled_calls):
            setup.timer(call)

    foreign = {run.name for run in profiled(lambda: setup.timer(lambda: None))}
    runs = [run for run in profiled(repeat) if run.name not in foreign]
    return kernel_times(runs, setup.profiled_calls)


def _admit(
    step: Step,
    op: Callable,
    truth: Mapping[int, Mapping[str, Tensor]],
    shape: Shape,
    setup: TrainSetup,
    tolerance: float | None,
) -> Outcome:
    """Judges the `second_result` of the step."""
    try:
        found, seconds = second_result(lambda: step.both(op), setup.device)
        errors = gradient_errors(found, truth, shape)
        del found
        peak = peak_above(lambda: step.both(op), setup.device)
    except Exception as failure:  # whatever a contender raises, the other rows are worth having
        return Outcome(problem=summarize(failure))
    wrong = [name for name, error in errors.items() if tolerance is not None and not error <= tolerance]
    words = ", ".join(f"{name} {errors[name]:.1e}" for name in wrong)
    problem = f"wrong: error {words}, tolerance {tolerance:.0e}" if wrong else None
    whole = None if peak is None else peak + step.input_bytes()
    return Outcome(None, None, peak, whole, errors, seconds, problem=problem)


def measure_train(case: TrainCase, setup: TrainSetup) -> dict:
    """One row of the document."""
    step = make_step(case, setup.device)
    truth = true_gradients(step, case.shape)
    ops: dict[str, Callable] = {"ours": functools.partial(flashdelta.chunk_kda, backend=setup.backend)}
    outcomes = {"fla": Outcome(problem=setup.fla.absence or "not asked for")}
    if setup.fla.chunk_kda is not None:
        ops["fla"] = setup.fla.chunk_kda
    runs: dict[str, Run] = {}
    for name, op in ops.items():
        tolerance = TOLERANCE if name == "ours" else None
        outcomes[name] = _admit(step, op, truth, case.shape, setup, tolerance)
        if outcomes[name].problem is None:
            runs[f"{name} forward"] = functools.partial(step.forward, op)
            runs[name] = functools.partial(step.both, op)
    del truth
    for name, timing in take_turns(runs, setup.timer, setup.effort).items():
        contender, _, forward = name.partition(" ")
        outcomes[contender] = replace(outcomes[contender], **{"forward_ms" if forward else "ms": timing})
    for name in ops:
        if name in runs:
            outcomes[name] = replace(outcomes[name], kernels=_profile(runs[name], setup))
    return _row(case, step, outcomes, setup)


def _row(case: TrainCase, step: Step, outcomes: Mapping[str, Outcome], setup: TrainSetup) -> dict:
    ours, fla = outcomes["ours"], outcomes["fla"]
    both_timed = ours.ms is not None and fla.ms is not None
    memory = ours.peak_above_bytes / fla.peak_above_bytes if both_timed and fla.peak_above_bytes else None
    share = ours.ms.median / fla.ms.median if both_timed else None
    forward = ours.forward_ms.median / fla.forward_ms.median if both_timed else None
    # forward and backward: inputs and o's gradient read once, o and the gradients written once
    moved = 2 * step.input_bytes()
    floor_ms = moved / setup.ceilings.copy_tb_s / 1e9
    bounds = [(f"<= {SHARE:.2f} of FLA's", None if share is None else share <= SHARE)]
    bounds.append((f"<= {MEMORY:.2f} of its memory", None if memory is None else memory <= MEMORY))
    if case.must is not None:
        bounds.insert(0, (f"<= {case.must:.1f} ms", None if ours.ms is None else ours.ms.median <= case.must))
    found = [met for _, met in bounds]
    met = False if False in found else None if None in found else True
    return {
        "name": case.name,
        "table": "train",
        "reason": case.reason,
        "shape": {**asdict(case.shape), "HV": case.shape.value_heads, "T": case.shape.tokens},
        "reference": f"float64 autograd, query/key heads {', '.join(map(str, checked_heads(case.shape)))}",
        "backend": setup.backend,
        "bytes": moved,
        "floor_ms": floor_ms,
        "share_of_floor": floor_ms / ours.ms.median if ours.ms else None,
        "speedup": 1 / share if share else None,
        "forward_speedup": 1 / forward if forward else None,
        "memory_share": memory,
        **{name: asdict(outcomes[name]) for name in ("ours", "fla")},
        "must_ms": case.must,
        "aim_ms": case.aim,
        "gate": ", ".join(words for words, _ in bounds),
        "met": met if setup.gated else None,
    }


def run_train(
    cases: Sequence[TrainCase],
    *,
    device: torch.device,
    backend: str = "auto",
    fla: Peer,
    effort: Effort,
    path: Path,
    timer: Timer | None = None,
    ceilings: Ceilings | None = None,
    progress: Callable[[dict], None] = lambda row: None,
) -> dict:
    """Measures `cases` one after another and returns the document, which is saved to `path` after every row."""
    timer = timer or timer_for(device)
    ceilings = ceilings or measure_ceilings(device, timer)
    document = new_document("train", environment(device))
    gpu = document["environment"]["gpu"]
    setup = TrainSetup(device, timer, ceilings, backend, fla, effort, gpu is not None and GATED_GPU in gpu["name"])
    document["protocol"] = {
        "clock": type(timer).__name__,
        "effort": asdict(effort),
        "options": MODEL_OPTIONS | {"output_final_state": False},
        "dtype": "bfloat16, A_log and dt_bias float32",
        "backend": backend,
    }
    document["ceilings"] = asdict(ceilings)
    for case in cases:
        add_row(document, measure_train(case, setup), path, progress)
    return document
