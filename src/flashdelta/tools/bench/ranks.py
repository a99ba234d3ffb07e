"""Sequences over the GPUs of this machine (docs/parallel.md): a process for each, beside one GPU with as many tokens, the same
with an all-gather as exchange, FLA's context parallelism, and the exchanges alone. Rows of one GPU have few heads, and the same
call with whole sequences beside it.

Every sample starts at a barrier with cold caches and is timed by events, and sustained ones are calls back to back; a row has
the slowest rank's time of each sample, the kernels of each rank, the largest rank's memory, and what `scaling.py` predicts.
Results and gradients of ours and of FLA's are held against the whole call on one GPU, where it has room for that; what is
wrong, or raises, has no time.
"""

from __future__ import annotations

import functools
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...nn import KimiDeltaAttention
from ...ops.chunk import chunk_kda
from ...problem.context import ContextParallel, context_parallel
from ...problem.exchanges import exchange
from ...problem.problem import packet_columns
from ...testing.cases import BF16, Case
from ...testing.inputs import TOKEN_TENSORS, make_call
from ...testing.oracle import TOLERANCE, relative_error
from ...testing.processes import on_processes
from . import profiling, scaling
from .checks import GRADIENT_TOLERANCE, fault
from .contenders import PEER_TOLERANCE, Setup, find, let_fla_split, shared
from .timing import (
    SUSTAINED_MS,
    SUSTAINED_ROUNDS,
    Clock,
    Timer,
    Timing,
    peak_above,
    second_result,
    summarize,
    synchronize,
    to_the_millisecond,
)
from .training import LEAVES, random_like
from .tuning import compiled_together
from .workloads import RELAY_OR_NOT, Bound, Row, model, value

MOST_CHECKED = 131_072
"""Tokens of all ranks up to which one GPU computes the whole, for the results to be held against."""

SUMMED = ("A_log", "dt_bias")
"""Whose gradients are those of all ranks together."""

FLA_STEP_BYTES = 9_000
"""Of FLA's forward and backward at its peak, a token and head of 128 channels: 2.2 GiB at 8192 tokens and 32 heads [m]."""

PROFILED_CALLS = 5

PATIENCE = timedelta(minutes=5)
"""For a rank that does not come: FLA may fail on one of them."""

FORWARD, STEP = "forward", "forward + backward"
EFFICIENCY = {
    (2, 32, 8): (0.70, 0.82),
    (2, 32, 32): (0.76, 0.85),
    (2, 32, 128): (0.76, 0.85),
    (2, 32, 512): (0.76, 0.85),
    (2, 64, 8): (0.72, 0.86),
    (2, 64, 32): (0.77, 0.88),
    (2, 64, 128): (0.77, 0.88),
    (4, 32, 32): (None, 0.80),
    (8, 32, 32): (None, 0.75),
}
"""By GPUs, heads and thousands of tokens a rank: the least of one GPU's time over ours that is wanted."""

OF_FLA = {FORWARD: 0.35, STEP: 0.40}


@dataclass(frozen=True)
class RanksRow(Row):
    """`call` is of one rank. `differentiates`: its backward pass is timed too; `kept`: the forward keeps what it needs.
    `layers`: a stack of so many layers is timed instead, whose ranks are `joined` after each where the model makes them wait
    for each other, as expert parallelism does."""

    ranks: int = 1
    differentiates: bool = False
    kept: bool = False
    layers: int = 0
    joined: bool = False


SHORT = {FORWARD: "fwd", STEP: "fwd+bwd"}


def _row(ranks: int, heads: int, tokens: int, table: str, cut: bool = False) -> RanksRow:
    name = f"{SHORT[table]} H{heads} {tokens}K x {ranks}" + (" packed" if cut else "")
    why = "sequences cut inside" if cut else "one sequence over all ranks"
    least = EFFICIENCY.get((ranks, heads, tokens), (None, None))[table == STEP]
    bounds = [Bound("efficiency", least), Bound("single", least)] if least and not cut else []
    bounds += [Bound("FLA", OF_FLA[table])] if ranks == 2 else []
    case = model(name, why, heads, T=tokens * 1024, final=False)
    return RanksRow(case, "packed" if cut else table, tuple(bounds), ranks=ranks, differentiates=table == STEP)


def _rows(ranks: int, heads: tuple[int, ...]) -> tuple[RanksRow, ...]:
    return tuple(
        _row(ranks, *sizes, table, cut)
        for table in (FORWARD, STEP)
        for *sizes, cut in (
            *((H, tokens, False) for H in heads for tokens in (8, 32, 128)),
            (32, 8, True),
            (32, 32, True),
        )
    )


def _alone(tokens: int, kept: bool) -> RanksRow:
    name = f"{SHORT[STEP]} H4 {tokens}K" + (" kept" if kept else "")
    case = model(name, "few heads: split, and whole", 4, T=tokens * 1024, final=False, memory="slow")
    return RanksRow(case, ALONE, (Bound("efficiency", 2.0),), differentiates=True, kept=kept)


def _stack(heads: int, tokens: int, joined: bool) -> RanksRow:
    name = f"{LAYERS} layers H{heads} {tokens}K x 2" + (" joined" if joined else "")
    why = "all ranks wait for each other after each layer" if joined else "layer after layer, each rank at its own pace"
    case = model(name, why, heads, T=tokens * 1024, final=False)
    return RanksRow(case, STACK, ranks=2, layers=LAYERS, joined=joined)


LAYERS = 4
STACK = "layers"
"""The table of rows of stacks."""

ALONE = "one GPU"
"""The table of rows that split sequences on one GPU."""

ROWS = (
    *_rows(2, (8, 32, 64)),
    *(_alone(tokens, kept) for kept in (False, True) for tokens in (32, 128)),
    *(_stack(32, tokens, joined) for tokens in (8, 32) for joined in (False, True)),
    *(_row(2, 32, 512, table) for table in (FORWARD, STEP)),
)
"""Those of a million tokens come last: a step of theirs takes 78 GiB a GPU."""
MORE = (*_rows(4, (32, 64)), *(_row(4, 32, 256, table) for table in (FORWARD, STEP)), *_rows(8, (32, 64)))
"""Of more GPUs than most machines have; a million tokens are 256K on each of four, 128K on each of eight."""


def measure(row: RanksRow, setup: Setup) -> Iterator[dict]:
    """One row of the document. Where there is no GPU, processes meet over gloo, and take the timer of `setup` along.

    Raises:
        ValueError: fewer GPUs than the row's ranks.
    """
    on_gpus, ranks = setup.device.type == "cuda", row.ranks
    if on_gpus and torch.cuda.device_count() < ranks:
        wanted = f"{ranks} for the row {row.name!r} (bench cp has a process for each)"
        raise ValueError(f"device: got {torch.cuda.device_count()} GPUs, wanted {wanted}")
    absent = _why_no_fla(row, setup)
    options = {"backend": setup.backend, "rounds": setup.effort.rounds, "fla": absent is None}
    options["timer"] = None if on_gpus else setup.timer
    began = time.perf_counter()
    try:
        found = on_processes(ranks, _work, row, options, device=setup.device.type, timeout=PATIENCE)[0]
        took, inside = time.perf_counter() - began, found["seconds"]
        found["seconds"] = to_the_millisecond({"processes": took - sum(inside.values()), **inside})
    except Exception as error:  # a process ran out of memory, or ended: the other rows are worth having
        found = {name: {"problem": last_words(error)} for name in ("ours", "fla")}
    yield described(row, found | ({} if absent is None else {"fla": {"problem": absent}}))


def _why_no_fla(row: RanksRow, setup: Setup) -> str | None:
    """Why FLA takes no part, if it does not."""
    found, case = setup.found("fla", row), row.call
    if isinstance(found, str):
        return found
    if row.layers:
        return "takes no part in stacks of layers"
    if setup.device.type != "cuda" or not row.differentiates:
        return None
    wanted, room = FLA_STEP_BYTES * case.T * case.HV, torch.cuda.get_device_properties(setup.device).total_memory
    return f"takes about {wanted / 2**30:.0f} GiB, the GPU has {room / 2**30:.0f}" if wanted > room else None


def last_words(error: Exception) -> str:
    """The line that names what a process raised, which stands below where it did; else the last one."""
    lines = str(error).strip().splitlines()
    named = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return (named or lines or [type(error).__name__])[-1]


def described(row: RanksRow, found: dict[str, dict]) -> dict:
    """The row of the document, of what its processes found by contender."""
    case: Any = row.call
    shape = {"T": case.T, "H": case.H, "K": case.K}
    one = value(found, "one.sustained_ms")
    way = found["ours"].get("exchange") or "put"
    modelled = one is not None and not row.layers
    predicted = scaling.efficiency(one, case.T, case.HV, row.ranks, row.differentiates, way) if modelled else None
    return {
        **{"name": row.name, "table": row.table, "reason": row.why, "shape": shape, "ranks": row.ranks, **found},
        "efficiency": value(found, "one.ms.median/ours.ms.median"),
        "sustained_efficiency": value(found, "one.sustained_ms/ours.sustained_ms"),
        "modelled": predicted,
        "speedup": value(found, "fla.ms.median/ours.ms.median"),
        "sustained_speedup": value(found, "fla.sustained_ms/ours.sustained_ms"),
    }


def _work(group: dist.ProcessGroup, row: RanksRow, options: Mapping[str, Any]) -> dict[str, dict]:
    """What a rank finds, by contender."""
    device = torch.device("cuda", group.rank()) if options["timer"] is None else torch.device("cpu")
    if row.ranks == 1:
        let_fla_split()  # before FLA is imported
    grad = torch.enable_grad() if row.differentiates else torch.inference_mode()
    with grad, compiled_together(device):
        return _measured(row, options, group, device)


def _measured(row: RanksRow, options: Mapping[str, Any], group: dist.ProcessGroup, device: torch.device) -> dict:
    case: Any = row.call
    clock, ranks, rank = Clock(device), group.size(), group.rank()
    total = ranks * case.T
    cuts = [0, 3 * case.T // 4, total - case.T // 2, total] if row.table == "packed" else [0, total]
    offsets = torch.tensor(cuts, dtype=torch.int32, device=device)
    context = context_parallel(offsets, group=group)
    if row.layers:
        call, runs = _stacked(row, options, offsets, context)
    else:
        call = _inputs(case, device, rank) | ({"disable_recompute": True} if row.kept else {})
        runs = _runs(row, options, call, offsets, context)
    found: dict[str, dict] = {name: {} for name in runs}
    if "fla" in found:
        found["fla"]["FLA_INTRACARD_CP"] = os.environ.get("FLA_INTRACARD_CP")
    clock.lap("make")
    problems = _warm_up(runs, device)
    clock.lap("first calls")
    if ranks > 1:
        found["ours"]["exchange"] = context.exchange
    if total <= MOST_CHECKED and not row.layers:  # a layer over two GPUs is held to the whole by the tests
        checked = {name: runs[name] for name in (*RELAY_OR_NOT, "fla") if name in runs}
        errors = _errors(row, checked, call | {"backend": options["backend"]}, offsets, context)
        for name, off in errors.items():
            found[name]["error"] = off
            problems |= _faults(name, off)
    clock.lap("check")
    timed = {name: run for name, run in runs.items() if name not in problems}
    timer = options["timer"] or Timer(device)
    for name, samples in _in_turns(timed, options["rounds"], device, timer).items():
        timing = Timing.of(samples)
        found[name]["ms"] = {"median": timing.median, "min": timing.min, "p90": timing.p90, "samples": timing.samples}
    clock.lap("time")
    for name, ms in _sustained({name: (run, found[name]) for name, run in timed.items()}, device, timer).items():
        found[name]["sustained_ms"] = ms
    clock.lap("sustained")
    for name in ("one", "ours"):
        found[name] |= _memory(timed[name], call, device) if name in timed else {}
    if device.type == "cuda" and "ours" in timed:
        found["ours"]["kernels"] = _kernels(timed["ours"], timer)
    clock.lap("profile")
    return {name: x | {"problem": problems.get(name)} for name, x in found.items()} | {"seconds": clock.seconds}


def _runs(
    row: RanksRow, options: Mapping[str, Any], call: dict, offsets: Tensor, context: ContextParallel
) -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    case: Any = row.call
    grad = random_like(call["v"]) if row.differentiates else None
    ours = {"backend": options["backend"]}
    one: dict[str, Any] = {"cu_seqlens": context.cu_seqlens} if row.table == "packed" else {}
    where: dict[str, Any] = {"cp_context": context}
    if row.ranks == 1:
        one, where = {"split": False}, {}
    runs: dict[str, Callable[[], object]] = {
        "one": _timed(chunk_kda, call | one | ours, grad),
        "ours": _timed(chunk_kda, call | where | ours, grad),
    }
    if row.ranks > 1:
        gathers = context_parallel(offsets, group=context.group, exchange="gather")
        runs |= {"gather": _timed(chunk_kda, call | {"cp_context": gathers} | ours, grad)}
        if row.ranks == 2 and not row.differentiates:
            formed = context_parallel(offsets, group=context.group, relay=False)
            runs |= {"no_relay": _timed(chunk_kda, call | {"cp_context": formed} | ours, grad)}
        for end, each in (("", context), ("_gather", gathers)):
            runs |= {f"exchange{end}": _exchange(case, packet_columns(each.ranks, case.K, case.V), each)}
            runs |= {f"exchange_backward{end}": _exchange(case, case.V, each)} if row.differentiates else {}
    if options["fla"]:
        of_fla = {"cp_context": _context_of_fla(offsets, context.group)} if row.ranks > 1 else {}
        runs["fla"] = _timed(find("fla"), shared(call) | of_fla, grad)
    return runs


def _stacked(
    row: RanksRow, options: Mapping[str, Any], offsets: Tensor, context: ContextParallel
) -> tuple[dict, dict[str, Callable[[], object]]]:
    """The inputs of a stack of layers, and what is timed, by name."""
    case, device = row.call, context.device
    hidden, place = case.H * case.K, {"device": device, "dtype": BF16}
    layers = [
        KimiDeltaAttention(hidden, case.H, head_dim=case.K, backend=options["backend"]).to(**place)
        for _ in range(row.layers)
    ]
    x, told = torch.randn(1, case.T, hidden, **place), torch.zeros(1, device=device)
    taps = layers[0].conv_size

    def through(ranks: int, **where: Any) -> Callable[[], tuple[Tensor, ...]]:
        def run() -> tuple[Tensor, ...]:
            y = x
            for layer in layers:
                y = y + layer(y, **where)[0]
                if row.joined and ranks > 1:
                    dist.all_reduce(told)
            return (y,)

        return run

    runs: dict[str, Callable[[], object]] = {"one": through(1)}
    for name, relay in zip(RELAY_OR_NOT, (True, False)):
        each = context_parallel(offsets, group=context.group, conv_size=taps, relay=relay)
        runs[name] = through(row.ranks, cp_context=each)
    return {"x": x}, runs


def _warm_up(runs: dict[str, Callable[[], object]], device: torch.device) -> dict[str, str]:
    """Calls all, and takes out what fails on any rank: FLA may raise anything, and memory may run out. Returns why."""
    problems: dict[str, str] = {}
    for name in list(runs):
        try:
            for _ in range(3):
                runs[name]()
            synchronize(device)
        except Exception as error:
            problems[name] = summarize(error)
        failed = torch.tensor(name in problems, dtype=torch.int32, device=device)
        dist.all_reduce(failed, dist.ReduceOp.MAX)
        if failed:
            problems.setdefault(name, "failed on another rank")
            del runs[name]
            torch.cuda.empty_cache()  # does nothing without a GPU
    return problems


def _inputs(case: Case, device: torch.device, seed: int) -> dict:
    """Of a rank: tokens differ, the gate's parameters do not."""
    call, shared_by_all = make_call(case, BF16, device, seed), make_call(replace(case, T=1), BF16, device)
    return call | {name: shared_by_all[name] for name in ("A_log", "dt_bias")}


def _timed(op: Callable, call: dict, grad: Tensor | None) -> Callable[[], tuple[Tensor, ...]]:
    """A call of `op` that returns `o`, and with a gradient of `o` those of `LEAVES` that the call has."""
    if grad is None:
        return lambda: (op(**call)[0],)
    leaves = [call[name].requires_grad_() for name in LEAVES if name in call]

    def both() -> tuple[Tensor, ...]:
        o = op(**call)[0]
        return o.detach(), *torch.autograd.grad(o, leaves, grad)

    return both


def _exchange(case: Case, columns: int, context: ContextParallel) -> Callable[[], object]:
    """The exchange of packets alone: of a forward's `(M, b)`, of two ranks b alone, or a backward pass' `c`."""
    packet = torch.zeros(1, case.HV, columns, case.K, device=context.device)
    packets = packet.new_empty(context.ranks, *packet.shape)
    return lambda: exchange(packet, packets, context.name, context.exchange)


def _context_of_fla(offsets: Tensor, group: dist.ProcessGroup) -> Any:
    from fla.ops.cp import build_cp_context

    return build_cp_context(offsets, group=group)


def _errors(
    row: RanksRow,
    runs: Mapping[str, Callable[[], tuple[Tensor, ...]]],
    call: dict,
    offsets: Tensor,
    context: ContextParallel,
) -> dict[str, dict[str, float]]:
    """By contender and result: the worst rank's, against the whole call on one GPU."""
    case: Any = row.call
    names = ["o", *(name for name in LEAVES if name in call)] if row.differentiates else ["o"]
    wanted = dict(zip(names, _whole(row, call, offsets, context)))
    own = slice(context.rank * case.T, (context.rank + 1) * case.T)
    wanted = {name: x if name in SUMMED else x[:, own].clone() for name, x in wanted.items()}
    errors = {}
    for name, run in runs.items():
        found = dict(zip(names, second_result(run, context.device)[0]))
        for each in [each for each in SUMMED if each in found]:
            dist.all_reduce(found[each])
        off = torch.tensor([relative_error(found[each], wanted[each]) for each in names], device=context.device)
        off.nan_to_num_(torch.inf, torch.inf)  # the largest of NaN and a number may be the number
        dist.all_reduce(off, dist.ReduceOp.MAX)
        errors[name] = dict(zip(names, off.tolist()))
    return errors


def _whole(row: RanksRow, call: dict, offsets: Tensor, context: ContextParallel) -> Sequence[Tensor]:
    """What one GPU finds for the tokens of all ranks. Ranks have the same gradients of `o`."""
    each = [_inputs(row.call, context.device, r) for r in range(context.ranks)]
    joined = {name: torch.cat([x[name] for x in each], dim=1) for name in TOKEN_TENSORS}
    del each
    given = call | joined | {"cu_seqlens": offsets, "split": False}
    grad = torch.cat([random_like(call["v"])] * context.ranks, dim=1) if row.differentiates else None
    return _timed(chunk_kda, given, grad)()


def _faults(name: str, off: Mapping[str, float]) -> dict[str, str]:
    """What is wrong with a contender's results, by its name."""
    limits = {"o": TOLERANCE[BF16]} if name in RELAY_OR_NOT else {}
    usual = GRADIENT_TOLERANCE if name in RELAY_OR_NOT else PEER_TOLERANCE
    found = [fault({each: error}, limits.get(each, usual)) for each, error in off.items()]
    said = [x for x in found if x is not None]
    return {name: "; ".join(said)} if said else {}


def _in_turns(
    runs: Mapping[str, Callable[[], Any]], rounds: int, device: torch.device, timer: Callable[[Any], float]
) -> dict[str, list[float]]:
    """Milliseconds of each sample, the slowest rank's. All ranks take the same turns."""
    if not runs:
        return {}
    taken = {name: list[float]() for name in runs}
    names = list(runs)
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            synchronize(device)
            dist.barrier()
            taken[name].append(timer(runs[name]))
    slowest = torch.tensor([taken[name] for name in names], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return dict(zip(names, slowest.tolist()))


def _sustained(
    runs: Mapping[str, tuple[Callable[[], object], Mapping]], device: torch.device, timer: Any
) -> dict[str, float]:
    """As `timing.sustained`, the slowest rank's. All ranks make as many calls, by what was found cold."""
    counts = {name: max(round(SUSTAINED_MS / found["ms"]["median"]), 3) for name, (_, found) in runs.items()}

    halves = {name: functools.partial(timer.span, run, counts[name]) for name, (run, _) in runs.items()}

    def second_half(half: Callable[[], float]) -> float:
        half()
        return half()

    found = _in_turns(halves, SUSTAINED_ROUNDS, device, second_half)
    return {name: statistics.median(taken) / counts[name] for name, taken in found.items()}


def _memory(run: Callable[[], object], call: dict, device: torch.device) -> dict[str, int]:
    """Peak bytes above the inputs, and with them, of the rank that has most; nothing where the device does not count them."""
    dist.barrier()
    above = peak_above(run, device)
    inputs = sum(x.numel() * x.element_size() for x in call.values() if isinstance(x, Tensor))
    most = torch.tensor([above or 0, (above or 0) + inputs], device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return {} if above is None else dict(zip(("peak_above_bytes", "peak_bytes"), most.tolist()))


def _kernels(run: Callable[[], object], timer: Timer) -> list[dict]:
    """Milliseconds of each kernel in a call, by rank. Those of an exchange wait for the other ranks, too."""
    dist.barrier()
    own = profiling.times(profiling.profile_calls(run, timer, PROFILED_CALLS), PROFILED_CALLS)
    all_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(all_ranks, own)
    return [{"rank": rank, **kernel} for rank, found in enumerate(all_ranks) for kernel in found]
