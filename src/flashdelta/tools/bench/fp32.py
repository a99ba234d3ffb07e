"""The float32 prefill beside FLA, which takes float32 and bfloat16 inputs but computes with neither exactly: times, shares of
the ceilings, errors of both, and the C library beside the Python function.

Ours and the C library's times are those of CUDA graphs: what the kernels take. The library's tensors and workspace are
allocated once, as a C caller would.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

import flashdelta

from ... import reference
from ...problem.prefill import DEFAULT_PRECISION, INPUTS, PRECISIONS, prefill_of
from ..export.bindings import Library, PrefillArgs
from .environment import environment
from .oracle import relative_error
from .peers import Peer
from .protocol import (
    Effort,
    Run,
    Timer,
    Timing,
    capture,
    copy_tb_s,
    gemm_tflop_s,
    summarize,
    synchronize,
    take_turns,
    timer_for,
)
from .report import add_row, new_document

# ---- rows -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Fp32Case:
    B: int = 1
    H: int
    T: int
    K: int
    C: int
    reason: str

    @property
    def name(self) -> str:
        return f"B{self.B} H{self.H} T{self.T} K{self.K} C{self.C}"

    @property
    def chunks(self) -> int:
        """Of all heads."""
        return self.B * self.H * -(-self.T // self.C)

    @property
    def bytes(self) -> int:
        """Those that can't be avoided: q, k, v, g and beta read, o, w and u written, in float32."""
        return 4 * (self.B * self.H * self.T * (5 * self.K + 1) + self.chunks * self.C * 2 * self.K)

    @property
    def flop(self) -> int:
        """Of the matrix products. A chunk's: `A`, `Aqk`, `w`, `u`, `Aqk v'` (`C x C x K`), `w S`, `qg S` and `kg^T v'`
        (`C x K x K`), and `C^3 / 3` for the inverse of a unit lower triangle."""
        return self.chunks * (5 * 2 * self.C**2 * self.K + 3 * 2 * self.C * self.K**2 + self.C**3 // 3)


SHAPES = {
    (1, 8, 1024): "little to do",
    (1, 8, 16384): "few heads, a long sequence",
    (1, 16, 4096): "a small model",
    (1, 32, 1024): "a short prompt",
    (1, 32, 4096): "a prompt",
    (1, 32, 16384): "a long prompt",
    (2, 16, 8192): "two rows",
    (4, 8, 4096): "a batch of few heads",
    (4, 32, 1024): "a batch of short prompts",
    (4, 32, 16384): "as much as there is",
}
"""`(B, H, T)`."""

FP32 = tuple(
    Fp32Case(B=B, H=H, T=T, K=K, C=C, reason=reason)
    for K, C in ((64, 32), (128, 64))
    for (B, H, T), reason in SHAPES.items()
)
QUICK = tuple(case for case in FP32 if (case.B, case.H, case.T) in ((1, 32, 1024), (1, 32, 4096)))

TOLERANCE = 1e-5
"""Relative error of each result."""

MORE_ACCURATE = 100
"""Times that our error must be below FLA's on float32 inputs."""

C_SLOWER = 1.03
"""The C library's time over the Python function's, at most."""

C_HOST_US = 5.0

CHECKED = 4
"""Heads of a row that are held against float64."""

HOST_CALLS = 50
"""Launches of so many calls wait in the GPU's queue, so that the host need not."""

WORKSPACES, ALIGNMENT = 32, 16
"""Of the C library's calls with changing memory: more than it keeps graphs, and bytes between two."""


def make_inputs(case: Fp32Case, device: torch.device) -> dict[str, Tensor]:
    """Keys and queries of length 1. Some channels forget within a token, others remember thousands."""
    generator = torch.Generator(device).manual_seed(0)
    draw = functools.partial(torch.rand, generator=generator, device=device)
    normal = functools.partial(torch.randn, generator=generator, device=device)
    B, H, T, K = case.B, case.H, case.T, case.K
    q, k = (torch.nn.functional.normalize(normal(B, H, T, K), dim=-1) for _ in range(2))
    rate = (draw(1, H, 1, K) * 9 - 8).exp()
    return {"q": q, "k": k, "v": normal(B, H, T, K), "g": -rate * draw(B, H, T, K), "beta": draw(B, H, T)}


# ---- contenders -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """One contender in one row; `problem` says why there is no time. `host_us` is the host's time of an eager call, and
    `host_changed_us` that of one with other memory than any of the last calls."""

    ms: Timing | None = None
    host_us: float | None = None
    host_changed_us: float | None = None
    error_o: float | None = None
    error_w: float | None = None
    error_u: float | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Fp32Ceilings:
    """What the device can do: a large copy (bytes read plus written), and square products in TF32 and float32."""

    copy_tb_s: float
    tf32_tflop_s: float
    fp32_tflop_s: float


def measure_ceilings(device: torch.device, timer: Timer) -> Fp32Ceilings:
    found = {}
    before = torch.get_float32_matmul_precision()
    for name, allowed in (("tf32_tflop_s", "high"), ("fp32_tflop_s", "highest")):
        torch.set_float32_matmul_precision(allowed)
        found[name] = gemm_tflop_s(device, timer, dtype=torch.float32)
    torch.set_float32_matmul_precision(before)
    return Fp32Ceilings(copy_tb_s(device, timer), **found)


@dataclass(frozen=True)
class Fp32Setup:
    """What all rows share. `library` is a built libflashdelta.so."""

    device: torch.device
    timer: Timer
    ceilings: Fp32Ceilings
    fla: Peer
    library: Library | None
    effort: Effort


@dataclass(frozen=True)
class Contender:
    """`call` returns `o` head first, and `w` and `u` if it has them; it is captured in a CUDA graph if `graph`. With a
    `tolerance` larger errors are a problem."""

    call: Callable[[], Sequence[Tensor]]
    tolerance: float | None = None
    graph: bool = True
    host: Run | None = None
    host_changed: Run | None = None


def our_call(inputs: Mapping[str, Tensor], case: Fp32Case, precision: str) -> Callable[[], Sequence[Tensor]]:
    return functools.partial(flashdelta.kda_prefill, **inputs, chunk_size=case.C, precision=precision)


def fla_call(inputs: Mapping[str, Tensor], fla: Peer, dtype: torch.dtype) -> Callable[[], Sequence[Tensor]]:
    """FLA's layout has tokens before heads; its inputs are brought there once. g and beta stay float32, as they are for us."""
    given = {name: x.transpose(1, 2).contiguous() for name, x in inputs.items()}
    given |= {name: given[name].to(dtype) for name in ("q", "k", "v")}

    def call() -> Sequence[Tensor]:
        o, _ = fla.chunk_kda(**given)
        return (o.transpose(1, 2),)

    return call


def c_call(inputs: Mapping[str, Tensor], case: Fp32Case, library: Library) -> tuple[Callable, Run, Run]:
    """The call on the current stream; one that leaves out all that a C caller has not, for the host's time of it; and such a
    one with another workspace than any of the last calls."""
    tensors = [inputs[name] for name in INPUTS]
    problem, _ = prefill_of(*tensors, case.C, None, "none", DEFAULT_PRECISION)
    results = problem.allocate(tensors[0].device)
    args = PrefillArgs(B=case.B, H=case.H, T=case.T, K=case.K, V=case.K, C=case.C)
    size = library.workspace_bytes(args)
    workspace = torch.empty(size + ALIGNMENT * WORKSPACES, dtype=torch.uint8, device=tensors[0].device)
    for name, x in zip((*INPUTS, "o", "w", "u", "workspace"), (*tensors, *results, workspace)):
        setattr(args, name, x.data_ptr())
    args.workspace_bytes = size
    function, given = library.functions.fd_prefill_f32, ctypes.byref(args)
    others = [PrefillArgs.from_buffer_copy(args) for _ in range(WORKSPACES)]
    for i, other in enumerate(others):
        other.workspace += i * ALIGNMENT
    turns = itertools.cycle([ctypes.byref(other) for other in others])

    def call() -> Sequence[Tensor]:
        library.prefill(args, torch.cuda.current_stream().cuda_stream if workspace.is_cuda else 0)
        return (*results, workspace)  # which must live as long as they

    return call, lambda: function(given, None), lambda: function(next(turns), None)


def host_us(call: Run, device: torch.device, calls: int = HOST_CALLS) -> float:
    """Of an eager call, the least of several means."""
    found = []
    for _ in range(6):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - began) / calls * 1e6)
    synchronize(device)
    return min(found)


def ctypes_us(library: Library, device: torch.device) -> float:
    """What calling a C function with the same kinds of arguments costs where it returns at once: without arguments a prefill
    is refused."""
    function = library.functions.fd_prefill_f32
    return host_us(lambda: function(None, None), device)


def contenders_of(case: Fp32Case, inputs: Mapping[str, Tensor], setup: Fp32Setup) -> dict[str, Contender | str]:
    """By name; a reason instead of one that can't take part."""
    found: dict[str, Contender | str] = {}
    for precision in PRECISIONS:
        call = our_call(inputs, case, precision)
        found[precision] = Contender(call, TOLERANCE, host=call if precision == DEFAULT_PRECISION else None)
    found["c"] = "not asked for (--library)"
    if setup.library is not None:
        call, host, changed = c_call(inputs, case, setup.library)
        found["c"] = Contender(call, TOLERANCE, host=host, host_changed=changed)
    for name, dtype in (("fla_fp32", torch.float32), ("fla_bf16", torch.bfloat16)):
        found[name] = setup.fla.absence or "not asked for"
        if setup.fla.chunk_kda is not None:
            found[name] = Contender(fla_call(inputs, setup.fla, dtype), graph=False)
    return found


# ---- measuring ------------------------------------------------------------------------------------------------------


def some_heads(case: Fp32Case) -> list[int]:
    """Of the `B * H` heads, the first, the last and some between."""
    heads = case.B * case.H
    return sorted({i * (heads - 1) // max(CHECKED - 1, 1) for i in range(CHECKED)})


def truth(case: Fp32Case, inputs: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """`(o, w, u)` of some heads in float64, `[heads, ...]`."""
    picked = [inputs[name].flatten(0, 1)[some_heads(case)][None].double() for name in INPUTS]
    return tuple(x[0] for x in reference.prefill(*prefill_of(*picked, case.C, None, "none", "ieee")))


def judge(contender: Contender, case: Fp32Case, want: Sequence[Tensor], device: torch.device) -> Outcome:
    """Errors of the second of two calls: the first one's results are overwritten with NaN, and their memory used again."""
    try:
        for x in contender.call()[:3]:
            x.fill_(torch.nan)
        results = contender.call()[:3]
        synchronize(device)
        heads = some_heads(case)
        errors = [relative_error(got.flatten(0, 1)[heads], exact) for got, exact in zip(results, want)]
    except Exception as error:  # whatever a contender raises, the others are worth having
        return Outcome(problem=summarize(error))
    tolerance = contender.tolerance
    wrong = tolerance is not None and not all(error <= tolerance for error in errors)
    problem = (
        f"wrong: errors {', '.join(f'{error:.1e}' for error in errors)}, tolerance {tolerance:.0e}" if wrong else None
    )
    return Outcome(**dict(zip(("error_o", "error_w", "error_u"), errors)), problem=problem)


def prepared(contender: Contender, outcome: Outcome, device: torch.device) -> tuple[Outcome, Run]:
    """The outcome with the host's time, and what is timed."""
    if contender.host is not None:
        outcome = replace(outcome, host_us=host_us(contender.host, device))
    if contender.host_changed is not None:
        outcome = replace(outcome, host_changed_us=host_us(contender.host_changed, device))
    if contender.graph and device.type == "cuda":
        replay, results = capture(lambda: tuple(contender.call()))

        def run() -> tuple:
            replay()
            return results

        return outcome, run
    return outcome, contender.call


def measure_fp32(case: Fp32Case, setup: Fp32Setup) -> dict:
    """One row of the document."""
    inputs = make_inputs(case, setup.device)
    want = truth(case, inputs)
    outcomes: dict[str, Outcome] = {}
    runs: dict[str, Run] = {}
    for name, contender in contenders_of(case, inputs, setup).items():
        if isinstance(contender, str):
            outcomes[name] = Outcome(problem=contender)
            continue
        outcomes[name] = judge(contender, case, want, setup.device)
        if outcomes[name].problem is None:
            try:
                outcomes[name], runs[name] = prepared(contender, outcomes[name], setup.device)
            except Exception as error:  # as in judge
                outcomes[name] = replace(outcomes[name], problem=summarize(error))
    for name, timing in take_turns(runs, setup.timer, setup.effort).items():
        outcomes[name] = replace(outcomes[name], ms=timing)
    outcomes["ours"] = outcomes[DEFAULT_PRECISION]
    gates = gates_of(outcomes)
    return {
        "name": case.name,
        "table": "fp32",
        "reason": case.reason,
        "shape": {name: value for name, value in asdict(case).items() if name != "reason"},
        "bytes": case.bytes,
        "flop": case.flop,
        "floor_ms": case.bytes / setup.ceilings.copy_tb_s / 1e9,
        "shares": shares_of(case, outcomes, setup.ceilings),
        **{name: asdict(outcome) for name, outcome in outcomes.items()},
        "gates": gates,
        "gate": ", ".join(name for name, met in gates.items() if met is not None),
        "met": None if all(met is None for met in gates.values()) else False not in gates.values(),
    }


def shares_of(case: Fp32Case, outcomes: Mapping[str, Outcome], ceilings: Fp32Ceilings) -> dict[str, float | None]:
    """Of the copy rate, and of the rate of products in TF32 (of which 3xTF32 takes three) or float32."""
    found: dict[str, float | None] = {}
    for name, products, ceiling in (("tf32x3", 3, ceilings.tf32_tflop_s), ("ieee", 1, ceilings.fp32_tflop_s)):
        ms = outcomes[name].ms
        found[f"{name} of copy"] = case.bytes / ms.median / 1e9 / ceilings.copy_tb_s if ms else None
        found[f"{name} of products"] = products * case.flop / ms.median / 1e9 / ceiling if ms else None
    return found


def gates_of(outcomes: Mapping[str, Outcome]) -> dict[str, bool | None]:
    """What a row must reach, each None where it was not measured."""
    ours, fla, c = outcomes["ours"], outcomes["fla_fp32"], outcomes["c"]
    both = ours.ms is not None and fla.ms is not None
    return {
        "time <= FLA's on float32": ours.ms.median <= fla.ms.median if both else None,
        f"error <= FLA's / {MORE_ACCURATE}": ours.error_o * MORE_ACCURATE <= fla.error_o if both else None,
        f"C <= {C_SLOWER} x Python": c.ms.median <= C_SLOWER * ours.ms.median if c.ms and ours.ms else None,
        f"C call <= {C_HOST_US:g} us": None if c.host_us is None else c.host_us <= C_HOST_US,
    }


def run_fp32(
    cases: Sequence[Fp32Case],
    *,
    device: torch.device,
    fla: Peer,
    library: Path | None,
    effort: Effort,
    path: Path,
    timer: Timer | None = None,
    ceilings: Fp32Ceilings | None = None,
    progress: Callable[[dict], None] = lambda row: None,
) -> dict:
    """Measures `cases` one after another and returns the document, which is saved to `path` after every row."""
    timer = timer or timer_for(device)
    ceilings = ceilings or measure_ceilings(device, timer)
    loaded = None if library is None else Library(str(library))
    document = new_document("fp32", environment(device))
    document["protocol"] = {
        "clock": f"{type(timer).__name__}, CUDA graphs but for FLA" if device.type == "cuda" else "host",
        "effort": asdict(effort),
        "dtype": "float32",
        "default precision": DEFAULT_PRECISION,
        "library": None if loaded is None else loaded.version,
        "ctypes us": None if loaded is None else ctypes_us(loaded, device),
    }
    document["ceilings"] = asdict(ceilings)
    for case in cases:
        with torch.inference_mode():
            row = measure_fp32(case, Fp32Setup(device, timer, ceilings, fla, loaded, effort))
        add_row(document, row, path, progress)
    return document
