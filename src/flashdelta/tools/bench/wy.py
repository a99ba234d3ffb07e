"""The fused backward of the WY step, `kernels.chunk_bwd_wy_dqkg`, beside FLA's kernel on the same tensors."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ... import kernels
from ...problem.problem import check_arguments
from ...problem.wy_spec import WyTensors, check_wy
from ...reference.chunk import from_chunks, prepare, recur, to_chunks
from ...reference.gate import elementwise_inputs
from ...reference.sequences import chunk_slots
from .cases import PACKINGS, Shape
from .environment import environment
from .inputs import MODEL_OPTIONS, random_inputs
from .kernels import CHUNK, chunk_counts
from .peers import WyPeer
from .prefill import GATED_GPU
from .protocol import (
    Ceilings,
    Effort,
    Run,
    Timer,
    Timing,
    capture,
    measure_ceilings,
    peak_above,
    second_result,
    summarize,
    take_turns,
    timer_for,
)
from .report import add_row, new_document

GRADIENTS = ("dq", "dk", "dv", "dbeta", "dg", "dA")
"""In the order of the results."""

TOLERANCE = 1e-2
"""Largest error ratio of a gradient in bf16: operands of two products in a row are rounded."""

MUST, AIM = 0.38, 0.33
"""Shares of FLA's time: the bound on one H200, and the hope."""


# ---- rows ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WyCase:
    """One row."""

    name: str
    shape: Shape
    table: str
    reason: str


GROUPINGS = {"H32": (32, "one value head a query/key head"), "H8 HV32": (8, "four value heads share a query/key head")}
"""By name: query/key heads for 32 value heads."""


def _fixed(B: int, T: int, heads: str) -> WyCase:
    H, reason = GROUPINGS[heads]
    return WyCase(f"B{B} T{T} {heads}", Shape(B=B, T=T, H=H, HV=32), "fixed length", reason)


def _packed(kind: str, count: int, total: int, heads: str) -> WyCase:
    lengths, reason = PACKINGS[kind]
    shape = Shape(lengths=lengths(count, total), H=GROUPINGS[heads][0], HV=32)
    return WyCase(f"packed {kind} {count} of {total} {heads}", shape, "packed", reason)


LENGTHS = (256, 512, 1024, 2048, 4096, 8192)

WY: tuple[WyCase, ...] = (
    *(_fixed(B, T, heads) for heads in GROUPINGS for B in (1, 2) for T in LENGTHS if B == 1 or T > 256),
    *(
        _packed(kind, count, total, heads)
        for heads in GROUPINGS
        for kind in PACKINGS
        for count in (10, 20)
        for total in (4096, 8192, 16384)
    ),
)
"""58 rows: per grouping 6 and 5 of fixed length, and 3 packings x 2 counts x 3 totals."""

QUICK = tuple(
    case
    for case in WY
    if case.name in ("B1 T1024 H32", "B1 T8192 H32", "packed random 10 of 8192 H32", "B1 T8192 H8 HV32")
)


def moved_bytes(shape: Shape) -> int:
    """What the kernel can't avoid moving, each byte once: bf16 inputs with g and beta in fp32, results in fp32 but dv."""
    K, V, H, HV = shape.K, shape.V, shape.H, shape.value_heads
    read = 2 * 2 * H * K + HV * (4 * 2 * V + 4 * K + 4 + 2 * CHUNK)
    written = HV * (3 * 4 * K + 2 * V + 4 + 4 * CHUNK)
    return shape.B * shape.tokens * (read + written) + 2 * 2 * sum(chunk_counts(shape)) * HV * K * V


# ---- inputs and truth -----------------------------------------------------------------------------------------------------


def wy_inputs(shape: Shape, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor | None]:
    """The tensors of a call, by argument: what a training step on `random_inputs` has at that point, with a random gradient of
    `o`. Dense, which FLA's kernel takes for granted; computed in float32, rounded once; sums of log decays are in base 2."""
    problem, t = check_arguments({**random_inputs(shape, device, dtype=dtype), **MODEL_OPTIONS})
    slots = chunk_slots(problem, t)
    elements = elementwise_inputs(problem, t)
    generator = torch.Generator(device=device).manual_seed(1)
    grad_o = torch.randn(t.v.shape, generator=generator, device=device).to(dtype)
    q, k, v, g, beta, do = (to_chunks(x, CHUNK, slots) for x in (*elements, grad_o.to(elements[0].dtype)))
    prepared, states, pseudo = [], [], []
    S = v.new_zeros(1, problem.HV, problem.K, problem.V)
    for i in range(len(v)):
        S = torch.where(slots.first[i], 0.0, S)
        prepared.append(prepare(q[i], k[i], g[i], beta[i]))
        states.append(S)
        found, S = recur(prepared[i], v[i], S)
        pseudo.append(found)
    grad_states, grad_pseudo = [], []
    grad = torch.zeros_like(S)
    for i in reversed(range(len(v))):
        p = prepared[i]
        last = i + 1 == len(v) or slots.first[i + 1]
        grad = torch.where(torch.as_tensor(last, device=device), 0.0, grad)
        grad_states.append(grad)
        grad_pseudo.append(p.Aqk.mT @ do[i] + p.kg @ grad)
        grad = p.decay[..., None] * grad + p.qg.mT @ do[i] - p.w.mT @ grad_pseudo[-1]
    # T = M diag(beta); a token that is not there has a beta of 0, and its column is not looked at
    written = beta.where(beta != 0.0, 1.0)[..., None, :]
    M = torch.stack([p.inverse for p in prepared]) / written
    used = slots.valid.any(-1)

    def rows(states: list[Tensor]) -> Tensor:
        return torch.cat(states)[used].unflatten(0, (problem.B, -1)).to(dtype)

    def tokens(x: Tensor) -> Tensor:
        return from_chunks(x, problem, slots)

    group = problem.group
    return {
        "q": (elements[0][:, :, ::group] / problem.scale).to(dtype).contiguous(),
        "k": elements[1][:, :, ::group].to(dtype).contiguous(),
        "v": t.v,
        "v_new": tokens(torch.stack(pseudo)).to(dtype),
        "g": tokens(g.cumsum(-2)) / math.log(2.0),
        "beta": elements[4],
        "A": tokens(M).to(dtype),
        "h": rows(states),
        "dh": rows(grad_states[::-1]),
        "do": grad_o,
        "dv": tokens(torch.stack(grad_pseudo[::-1])).to(dtype),
        "cu_seqlens": t.cu_seqlens,
    }


TRUTH_HEADS = 8
"""Value heads whose truth is computed at a time: float64 takes gigabytes for each."""


def wy_truth(inputs: Mapping[str, Tensor | None], heads: int = TRUTH_HEADS) -> list[Tensor]:
    """The float64 results, by value heads one after another."""
    HV = inputs["v"].shape[2]
    group = HV // inputs["q"].shape[2]
    step = max(heads // group, 1) * group
    parts = []
    for start in range(0, HV, step):
        own, shared = slice(start, start + step), slice(start // group, (start + step) // group)
        part = {}
        for name, x in inputs.items():
            if name == "cu_seqlens":
                part[name] = x
            else:
                part[name] = x[:, :, shared if name in ("q", "k") else own].double()
        parts.append(kernels.chunk_bwd_wy_dqkg(**part, use_exp2=True, backend="reference"))
    return [torch.cat(found, dim=2) for found in zip(*parts)]


def gradient_errors(found: Sequence[Tensor], truth: Sequence[Tensor]) -> tuple[dict[str, float], dict[str, float]]:
    """By gradient: `||x - truth|| / ||truth||`, and `max |x - truth| / max |truth|`."""
    ratios, largest = {}, {}
    for name, x, exact in zip(GRADIENTS, found, truth):
        distance = x.double() - exact
        ratios[name] = (distance.norm() / exact.norm()).item()
        largest[name] = (distance.abs().max() / exact.abs().max()).item()
    return ratios, largest


# ---- measuring ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """One contender in one row: an eager call, its replay from a CUDA graph, errors by gradient (`gradient_errors`), bytes
    allocated at the peak above the inputs, or why there is no time, or no graph."""

    ms: Timing | None = None
    graph_ms: Timing | None = None
    error: dict[str, float] | None = None
    max_error: dict[str, float] | None = None
    peak_bytes: int | None = None
    first_call_s: float | None = None
    problem: str | None = None
    graph_problem: str | None = None


@dataclass(frozen=True)
class WySetup:
    """What all rows of a run share."""

    device: torch.device
    timer: Timer
    ceilings: Ceilings
    backend: str
    fla: WyPeer
    effort: Effort
    gated: bool = False


def _admit(call: Run, truth: Sequence[Tensor], device: torch.device, tolerance: float | None) -> Outcome:
    """Judges the `second_result` of the call."""
    try:
        found, seconds = second_result(call, device)
        error, largest = gradient_errors(found, truth)
        del found
        peak = peak_above(call, device)
    except Exception as failure:  # whatever a contender raises, the other rows are worth having
        return Outcome(problem=summarize(failure))
    worst = max(error, key=lambda name: error[name] if error[name] == error[name] else math.inf)
    wrong = tolerance is not None and not error[worst] <= tolerance
    problem = f"wrong: error {worst} {error[worst]:.1e}, tolerance {tolerance:.0e}" if wrong else None
    return Outcome(None, None, error, largest, peak, seconds, problem)


def _captured(call: Run, outcome: Outcome, device: torch.device) -> tuple[Run | None, Outcome]:
    """The call's replay from a CUDA graph, if there is one, and the outcome with why not."""
    if device.type != "cuda":
        return None, outcome
    try:
        return capture(call)[0], outcome
    except Exception as failure:  # as in _admit
        return None, replace(outcome, graph_problem=summarize(failure))


def measure_wy(case: WyCase, setup: WySetup) -> dict:
    """One row of the document."""
    inputs = wy_inputs(case.shape, setup.device)
    truth = wy_truth(inputs)
    ours = functools.partial(kernels.chunk_bwd_wy_dqkg, **inputs, use_exp2=True, backend=setup.backend)
    calls: dict[str, Run] = {"ours": ours}
    outcomes = {"fla": Outcome(problem=setup.fla.absence or "not asked for")}
    if setup.fla.bind is not None:
        calls["fla"] = setup.fla.bind(**inputs)
    runs: dict[str, Run] = {}
    for name, call in calls.items():
        outcomes[name] = _admit(call, truth, setup.device, TOLERANCE if name == "ours" else None)
        if outcomes[name].problem is None:
            runs[name] = call
            graph, outcomes[name] = _captured(call, outcomes[name], setup.device)
            runs |= {f"{name} graph": graph} if graph is not None else {}
    del truth
    for name, timing in take_turns(runs, setup.timer, setup.effort).items():
        contender, _, graph = name.partition(" ")
        outcomes[contender] = replace(outcomes[contender], **{"graph_ms" if graph else "ms": timing})
    times = kernel_ms({name: asdict(outcome) for name, outcome in outcomes.items()})
    floor_ms = moved_bytes(case.shape) / setup.ceilings.copy_tb_s / 1e9
    share = times["ours"] / times["fla"] if times["ours"] and times["fla"] else None
    backend = None
    if outcomes["ours"].problem is None:
        backend = kernels.choose(check_wy(WyTensors(**inputs), use_exp2=True), setup.device, setup.backend)
    return {
        "name": case.name,
        "table": case.table,
        "reason": case.reason,
        "shape": {**asdict(case.shape), "HV": case.shape.value_heads, "T": case.shape.tokens},
        "reference": "formulas in float64",
        "backend": backend,
        "bytes": moved_bytes(case.shape),
        "floor_ms": floor_ms,
        "share_of_floor": floor_ms / times["ours"] if times["ours"] else None,
        "speedup": 1 / share if share else None,
        **{name: asdict(outcomes[name]) for name in ("ours", "fla")},
        "gate": f"<= {MUST:.2f} of FLA's",
        "met": share <= MUST if share and setup.gated and backend == "hopper" else None,
    }


def kernel_ms(outcomes: Mapping[str, dict]) -> dict[str, float | None]:
    """The medians of a row's contenders without host time, if all that were timed have such; else of their eager calls."""
    timed = [outcome for outcome in outcomes.values() if outcome["ms"]]
    key = "graph_ms" if all(outcome["graph_ms"] for outcome in timed) else "ms"
    return {name: outcome[key]["median"] if outcome["ms"] else None for name, outcome in outcomes.items()}


def run_wy(
    cases: Sequence[WyCase],
    *,
    device: torch.device,
    backend: str = "auto",
    fla: WyPeer,
    effort: Effort,
    path: Path,
    timer: Timer | None = None,
    ceilings: Ceilings | None = None,
    progress: Callable[[dict], None] = lambda row: None,
) -> dict:
    """Measures `cases` one after another and returns the document, which is saved to `path` after every row."""
    timer = timer or timer_for(device)
    ceilings = ceilings or measure_ceilings(device, timer)
    document = new_document("wy", environment(device))
    gpu = document["environment"]["gpu"]
    setup = WySetup(device, timer, ceilings, backend, fla, effort, gpu is not None and GATED_GPU in gpu["name"])
    document["protocol"] = {
        "clock": type(timer).__name__,
        "effort": asdict(effort),
        "dtype": "bfloat16",
        "backend": backend,
    }
    document["ceilings"] = asdict(ceilings)
    for case in cases:
        with torch.no_grad():
            row = measure_wy(case, setup)
        add_row(document, row, path, progress)
    return document
