"""Decoding beside FLA: one step over a paged pool, against the rate at which memory can be copied.

A row's time is that of a CUDA graph of many launches, each on other slots, over the number of launches: what a step costs
inside an engine's graph, with states that are not in the L2 cache. Inputs are the same in every launch; there the kernels
before this one have just written them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

import flashdelta

from .environment import environment
from .inputs import generator_of
from .oracle import fault, relative_error
from .peers import DecodePeer
from .prefill import GATED_GPU
from .protocol import (
    Ceilings,
    Effort,
    Run,
    Timer,
    capture,
    measure_ceilings,
    summarize,
    synchronize,
    take_turns,
    timer_for,
)
from .report import new_document, save

BF16, FP32 = torch.bfloat16, torch.float32
STATES = {"fp32": FP32, "bf16": BF16}

# ---- rows -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Bound:
    """What a row must reach on one NVIDIA H200, the hope in `aim`: microseconds, or the share of the copy rate."""

    must: float
    aim: float
    unit: str = "share"

    def words(self) -> str:
        return f"<= {self.must:g} us" if self.unit == "us" else f">= {self.must:.0%}"

    def met(self, us: float, share: float) -> bool:
        return us <= self.must if self.unit == "us" else share >= self.must


@dataclass(frozen=True, kw_only=True)
class DecodeCase:
    """One row: `N` sequences of `1 + S` tokens. `fla`: FLA takes part; `host`: the host time of an eager call is taken too."""

    N: int
    H: int = 32
    HV: int = 32
    K: int = 128
    state: str = "fp32"
    gate: str = "lower_bound"
    v_first: bool = True
    S: int = 0
    reason: str
    fla: bool = False
    host: bool = False
    bound: Bound | None = None

    @property
    def name(self) -> str:
        heads = f"H{self.H}" if self.H == self.HV else f"H{self.H} HV{self.HV}"
        parts = [f"N{self.N}", heads, *([f"K{self.K}"] if self.K != 128 else []), self.state]
        parts += [self.gate] if self.gate != "lower_bound" else []
        parts += [] if self.v_first else ["K first"]
        parts += [f"S{self.S}"] if self.S else []
        return " ".join(parts)

    @property
    def tokens(self) -> int:
        return 1 + self.S

    @property
    def state_bytes(self) -> int:
        """Of one sequence."""
        return self.HV * self.K * self.K * STATES[self.state].itemsize

    @property
    def moved_bytes(self) -> int:
        """States read and written: one before the tokens, one after each."""
        return self.N * self.state_bytes * (1 + self.tokens)


BATCHES = (1, 4, 8, 16, 32, 64, 128, 256)
HEADS = {
    (12, 12): "96 heads over 8 cards",
    (16, 64): "four value heads share a key head",
    (64, 128): "many value heads",
    (32, 128): "four times as many value heads",
}


def _bound(N: int, state: str) -> Bound | None:
    if N == 1:
        return Bound(must=5, aim=4, unit="us")
    if N == 8:
        return Bound(must=12, aim=10, unit="us") if state == "fp32" else Bound(must=8, aim=7, unit="us")
    return {32: Bound(must=0.85, aim=0.92)}.get(N) or (Bound(must=0.88, aim=0.94) if N in (128, 256) else None)


def _models(batches: Sequence[int]) -> list[DecodeCase]:
    return [
        DecodeCase(N=N, state=state, reason="a 32-head model", fla=True, host=N in (1, 32), bound=_bound(N, state))
        for state in STATES
        for N in batches
    ]


DECODE: tuple[DecodeCase, ...] = (
    *_models(BATCHES),
    *(
        DecodeCase(N=N, H=H, HV=HV, state=state, reason=reason, fla=N == 128)
        for (H, HV), reason in HEADS.items()
        for state in STATES
        for N in BATCHES
    ),
    *(
        DecodeCase(N=N, K=64, state=state, reason="heads half as wide", fla=N == 128)
        for state in STATES
        for N in BATCHES
    ),
    *(
        DecodeCase(N=128, gate=gate, state=state, reason="the other gates", fla=True)
        for gate in ("softplus", "none")
        for state in STATES
    ),
    *(
        DecodeCase(N=N, v_first=False, state=state, reason="the layout of Hugging Face", fla=True)
        for state in STATES
        for N in (1, 32, 128, 256)
    ),
    *(
        DecodeCase(N=N, S=S, state=state, reason="speculative tokens, a state stored after each")
        for state in STATES
        for N in (32, 128)
        for S in (1, 3, 7)
    ),
)
"""All rows. FLA takes part where its compile times stay small: it compiles anew for other heads and kinds of N."""

QUICK = (*_models((1, 32, 128, 256)), DecodeCase(N=32, S=3, reason="speculative tokens, a state stored after each"))


# ---- measuring ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """One contender in one row: microseconds of a launch, of the host for an eager call; relative errors of `o` and of the
    states of some sequences against float64; or why there is no time."""

    us: float | None = None
    host_us: float | None = None
    error_o: float | None = None
    error_state: float | None = None
    problem: str | None = None


TOLERANCE = 5e-3
CHECKED = 2
"""Sequences of a row that are held against float64."""


@dataclass
class Pools:
    """Memory for pools, one piece for each dtype of states, filled once."""

    device: torch.device
    nbytes: int
    memory: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def view(self, case: DecodeCase, slots: int) -> Tensor:
        dtype = STATES[case.state]
        if dtype not in self.memory:
            count = self.nbytes // dtype.itemsize
            self.memory[dtype] = torch.empty(count, dtype=dtype, device=self.device).normal_()
        size = slots * case.HV * case.K * case.K
        return self.memory[dtype][:size].view(slots, case.HV, case.K, case.K)


LEAST_LAUNCHES = 16
"""In a graph: starting one takes some microseconds, which are not the steps'."""


@dataclass(frozen=True)
class DecodeSetup:
    """What all rows share. A graph holds as many launches as walk through `walk_bytes` of states, at least
    `LEAST_LAUNCHES` and at most `launches`: about a millisecond or more, beside which its start hardly counts."""

    device: torch.device
    timer: Timer
    ceilings: Ceilings
    backend: str
    fla: DecodePeer
    effort: Effort
    pools: Pools
    gated: bool = False
    walk_bytes: int = 2**31
    launches: int = 512
    host_calls: int = 200


@dataclass(frozen=True)
class Step:
    """The tensors of a row. `slots [launches, N]` (with speculative tokens `[launches, N, 1 + S]`)."""

    case: DecodeCase
    inputs: dict[str, Tensor]
    gate: dict[str, object]
    pool: Tensor
    slots: list[Tensor]
    output: Tensor


def make_step(case: DecodeCase, setup: DecodeSetup) -> Step:
    generator = generator_of(setup.device, 0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=setup.device).to(BF16)

    N, T, H, HV, K = case.N, case.tokens, case.H, case.HV, case.K
    inputs = {"q": normal(N, T, H, K), "k": normal(N, T, H, K), "v": normal(N, T, HV, K), "g": normal(N, T, HV, K)}
    inputs["beta"] = normal(N, T, HV)
    gate: dict[str, object] = {"use_gate_in_kernel": case.gate != "none"}
    if case.gate == "none":
        inputs["g"] = -inputs["g"].abs()
    else:
        gate["A_log"] = torch.rand(HV, generator=generator, device=setup.device)
        # as in `random_inputs`: some channels forget at once, others remember hundreds of tokens
        gate["dt_bias"] = torch.rand(HV * K, generator=generator, device=setup.device) * 9 - 8
        gate["lower_bound"] = -5.0 if case.gate == "lower_bound" else None
    launches = min(setup.launches, max(LEAST_LAUNCHES, -(-setup.walk_bytes // (N * case.state_bytes))))
    rows = max(1, min(launches, setup.pools.nbytes // (N * T * case.state_bytes)))
    slots = torch.randperm(rows * N * T, generator=torch.Generator().manual_seed(0)).int().to(setup.device)
    # every launch's indices in a tensor of their own, aligned as an engine's are
    each = [x.clone() for x in slots.view(rows, *((N, T) if T > 1 else (N,)))]
    return Step(
        case,
        inputs,
        gate,
        setup.pools.view(case, rows * N * T),
        [each[i % rows] for i in range(launches)],
        torch.empty_like(inputs["v"]),
    )


def our_arguments(step: Step, slots: Tensor) -> dict[str, object]:
    """Those of `recurrent_kda`, but for the backend."""
    return {
        **step.inputs,
        **step.gate,
        "initial_state": step.pool,
        "ssm_state_indices": slots,
        "num_spec_tokens": step.case.S or None,
        "beta_is_logit": True,
        "state_v_first": step.case.v_first,
        "output": step.output,
    }


def our_call(step: Step, backend: str) -> Callable[[Tensor], object]:
    """`recurrent_kda` on the slots it is given."""
    return lambda slots: flashdelta.recurrent_kda(**our_arguments(step, slots), backend=backend)


def fla_call(step: Step, peer: DecodePeer) -> Callable[[Tensor], object]:
    return lambda slots: peer.step(
        **step.inputs,
        **step.gate,
        initial_state=step.pool,
        inplace_final_state=True,
        ssm_state_indices=slots,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        state_v_first=step.case.v_first,
        out=step.output,
    )


def errors(step: Step, call: Callable[[Tensor], object]) -> tuple[float, float]:
    """Of the first sequences' outputs and states; the pool is put back as it was."""
    some = step.slots[0][:CHECKED]
    flat = some.flatten().long()
    before = step.pool[flat]
    step.output.fill_(torch.nan)
    call(step.slots[0])
    after = step.pool[flat]
    step.pool[flat] = before
    exact = before.double()
    o, _ = flashdelta.recurrent_kda(
        **{name: x[:CHECKED].double() for name, x in step.inputs.items()},
        **{name: x.double() if isinstance(x, Tensor) else x for name, x in step.gate.items()},
        initial_state=exact,
        ssm_state_indices=torch.arange(len(flat), device=flat.device).view(some.shape),
        num_spec_tokens=step.case.S or None,
        beta_is_logit=True,
        state_v_first=step.case.v_first,
        backend="reference",
    )
    return relative_error(step.output[:CHECKED], o), relative_error(after, exact)


def host_us(call: Callable[[Tensor], object], slots: Tensor, calls: int, device: torch.device) -> float:
    """Of an eager call, the least of several means."""
    found = []
    for _ in range(6):
        synchronize(device)
        began = time.perf_counter()
        for _ in range(calls):
            call(slots)
        found.append((time.perf_counter() - began) / calls * 1e6)
    synchronize(device)
    return min(found)


def _judge(step: Step, call: Callable[[Tensor], object], tolerance: float | None) -> Outcome:
    """Errors, and with a `tolerance` whether they are too large."""
    try:
        error_o, error_state = errors(step, call)
    except Exception as error:  # whatever a contender raises, the other rows are worth having
        return Outcome(problem=summarize(error))
    return Outcome(error_o=error_o, error_state=error_state, problem=fault(error_o, error_state, tolerance))


def _prepare(step: Step, call: Callable[[Tensor], object], outcome: Outcome, setup: DecodeSetup) -> tuple[Outcome, Run]:
    """The outcome with the host's time if the row has one, and what runs all launches."""

    def launch_all() -> tuple:
        for slots in step.slots:
            call(slots)
        return ()

    if step.case.host:
        outcome = replace(outcome, host_us=host_us(call, step.slots[0], setup.host_calls, setup.device))
    run = capture(launch_all)[0] if setup.device.type == "cuda" else launch_all
    run()
    synchronize(setup.device)
    return outcome, run


def measure_decode(case: DecodeCase, setup: DecodeSetup) -> dict:
    """One row of the document."""
    step = make_step(case, setup)
    outcomes: dict[str, Outcome] = {"fla": Outcome(problem=setup.fla.absence or "not asked for in this row")}
    runs: dict[str, Run] = {}
    contenders = {"ours": (our_call(step, setup.backend), TOLERANCE)}
    if case.fla and setup.fla.step is not None:
        contenders["fla"] = (fla_call(step, setup.fla), None)
    for name, (call, tolerance) in contenders.items():  # all on the same states, before any run changes them
        outcomes[name] = _judge(step, call, tolerance)
    for name, (call, _) in contenders.items():
        if outcomes[name].problem is None:
            try:
                outcomes[name], runs[name] = _prepare(step, call, outcomes[name], setup)
            except Exception as error:  # as in _judge
                outcomes[name] = replace(outcomes[name], problem=summarize(error))
    for name, timing in take_turns(runs, setup.timer, setup.effort).items():
        outcomes[name] = replace(outcomes[name], us=timing.median * 1e3 / len(step.slots))
    ours, fla = outcomes["ours"].us, outcomes["fla"].us
    floor_us = case.moved_bytes / setup.ceilings.copy_tb_s / 1e6
    row = {
        "name": case.name,
        "table": "decode",
        "reason": case.reason,
        "shape": {
            name: value for name, value in asdict(case).items() if name not in ("reason", "fla", "host", "bound")
        },
        "launches": len(step.slots),
        "bytes": case.moved_bytes,
        "floor_us": floor_us,
        "share": floor_us / ours if ours else None,
        "share_fla": floor_us / fla if fla else None,
        "speedup": fla / ours if ours and fla else None,
        **{name: asdict(outcomes[name]) for name in ("ours", "fla")},
        "gate": None,
        "met": None,
    }
    if case.bound is not None:
        row["gate"] = case.bound.words()
        if setup.gated and ours:
            row["met"] = case.bound.met(ours, floor_us / ours)
    return row


def run_decode(
    cases: Sequence[DecodeCase],
    *,
    device: torch.device,
    backend: str = "auto",
    fla: DecodePeer,
    effort: Effort,
    path: Path,
    timer: Timer | None = None,
    ceilings: Ceilings | None = None,
    pool_bytes: int = 2**32,
    progress: Callable[[dict], None] = lambda row: None,
    **limits: int,
) -> dict:
    """Measures `cases` one after another and returns the document, which is saved to `path` after every row. `pool_bytes` is
    for each dtype of states, and must hold the largest row's; `limits` are fields of `DecodeSetup`."""
    timer = timer or timer_for(device)
    ceilings = ceilings or measure_ceilings(device, timer)
    document = new_document("decode", environment(device))
    gpu = document["environment"]["gpu"]
    gated = gpu is not None and GATED_GPU in gpu["name"]
    pools = Pools(device, pool_bytes)
    setup = DecodeSetup(device, timer, ceilings, backend, fla, effort, pools, gated, **limits)
    document["protocol"] = {
        "clock": f"{type(timer).__name__}, a CUDA graph of many launches" if device.type == "cuda" else "host",
        "effort": asdict(effort),
        "dtype": "bfloat16",
        "backend": backend,
    }
    document["ceilings"] = asdict(ceilings)
    rows: dict[str, dict] = {}
    for case in cases:
        with torch.inference_mode():
            row = measure_decode(case, setup)
        row["token_cost"] = _token_cost(case, row, rows)
        rows[case.name] = row
        document["rows"].append(row)
        save(document, path)
        progress(row)
    return document


def _token_cost(case: DecodeCase, row: dict, rows: dict[str, dict]) -> float | None:
    """Time a token against the row without speculative tokens."""
    base = rows.get(replace(case, S=0).name)
    if not case.S or base is None or not base["ours"]["us"] or not row["ours"]["us"]:
        return None
    return row["ours"]["us"] / case.tokens / base["ours"]["us"]
