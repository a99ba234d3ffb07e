"""A sequence over this machine's GPUs (docs/parallel.md), beside one GPU with a rank's tokens and FLA's context parallelism.

Each GPU has a process. A sample starts at a barrier; a row has the slowest rank's time. Results and gradients are held against
the whole call on one GPU, where it has room for that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flashdelta.ops.chunk import chunk_kda
from flashdelta.parallel import ContextParallel, context_parallel
from flashdelta.tools.devices import synchronize
from tests.support.cases import BF16, Case
from tests.support.inputs import TOKEN_TENSORS, make_call
from tests.support.oracle import TOLERANCE, relative_error
from tests.support.processes import on_processes

from . import contenders, gate, timing, workloads
from .gate import GRADIENT_TOLERANCE, LEAVES, PEER_TOLERANCE, random_like
from .run import Program, Setup, main, summarize
from .workloads import Row

Runs = dict[str, Callable[[], Any]]

MOST_CHECKED = 131_072
"""Tokens of all ranks up to which one GPU computes the whole, for the results to be held against."""

SUMMED = ("A_log", "dt_bias")
"""Parameters whose gradients are those of all ranks together."""

FLA_STEP_BYTES = 9_000
"""FLA's peak per token and head of 128 channels, forward and backward."""

PATIENCE = timedelta(minutes=5)
"""Wait for a rank that does not come: FLA may fail on one of them."""


def measure(row: Row, setup: Setup) -> dict:
    """A row of the results file. Without a GPU, processes meet over gloo and take the timer of `setup` along."""
    case: Any = row.call
    on_gpus = setup.device.type == "cuda"
    if on_gpus and torch.cuda.device_count() < case.ranks:
        return {"contenders": {"ours": {"problem": f"{case.ranks} GPUs wanted, {torch.cuda.device_count()} found"}}}
    absent = why_no_fla(case, setup)
    options = {"backend": setup.backend, "rounds": min(setup.rounds, 30), "fla": absent is None}
    options["timer"] = None if on_gpus else setup.timer
    try:
        found = on_processes(case.ranks, work, case, options, device=setup.device.type, timeout=PATIENCE)[0]
    except Exception as error:  # a process ran out of memory, or ended: the other rows are worth having
        lines = [line for line in str(error).splitlines() if "Error" in line]
        found = {"ours": {"problem": lines[-1].strip() if lines else summarize(error)}}
    return {"ranks": case.ranks, "contenders": found | ({} if absent is None else {"fla": {"problem": absent}})}


def why_no_fla(case: Any, setup: Setup) -> str | None:
    """Why FLA takes no part, if it does not."""
    found = setup.peers.get("fla", "not asked for")
    if isinstance(found, str) or setup.device.type != "cuda" or not case.trains:
        return found if isinstance(found, str) else None
    wanted, room = FLA_STEP_BYTES * case.T * case.HV, torch.cuda.get_device_properties(setup.device).total_memory
    return f"takes about {wanted / 2**30:.0f} GiB, the GPU has {room / 2**30:.0f}" if wanted > room else None


def work(group: dist.ProcessGroup, case: Any, options: Mapping[str, Any]) -> dict[str, dict]:
    """A rank's findings by contender."""
    device = torch.device("cuda", group.rank()) if options["timer"] is None else torch.device("cpu")
    with torch.enable_grad() if case.trains else torch.inference_mode(), timing.compiled_together(device):
        return measured(case, options, group, device)


def measured(case: Any, options: Mapping[str, Any], group: dist.ProcessGroup, device: torch.device) -> dict[str, dict]:
    total = group.size() * case.T
    cuts = [0, 3 * case.T // 4, total - case.T // 2, total] if case.packed else [0, total]
    offsets = torch.tensor(cuts, dtype=torch.int32, device=device)
    context = context_parallel(offsets, group=group)
    call = inputs(case, device, group.rank())
    runs = contenders_of(case, options, call, offsets, context)
    found: dict[str, dict] = {name: {} for name in runs}
    problems = first_calls(runs, device)
    found["ours"]["exchange"] = context.exchange
    if total <= MOST_CHECKED:
        checked = {name: runs[name] for name in ("ours", "no_relay", "fla") if name in runs}
        for name, off in errors(case, checked, call | {"backend": options["backend"]}, offsets, context).items():
            found[name]["error"] = off
            tolerances = (TOLERANCE[BF16], GRADIENT_TOLERANCE) if name != "fla" else (PEER_TOLERANCE,) * 2
            faults = [gate.fault({x: error}, tolerances[x != "o"]) for x, error in off.items()]
            problems |= {name: "; ".join(filter(None, faults))} if any(faults) else {}
    timed = {name: run for name, run in runs.items() if name not in problems}
    timer = Slowest(options["timer"] or timing.Timer(device), device)
    cold, sustained = timing.cold(timed, timer, options["rounds"]), timing.sustained(timed, timer)
    for name in timed:
        found[name] |= {"cold_ms": cold[name], "sustained_ms": sustained[name]}
    for name in ("one", "ours"):
        peak = timing.peak_above(timed[name], device) if name in timed else None
        if peak is not None:
            most = torch.tensor(peak, device=device)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            found[name]["peak_above_bytes"] = most.item()
    return {name: x | {"problem": problems.get(name)} for name, x in found.items()}


def contenders_of(case: Any, options: Mapping[str, Any], call: dict, offsets: Tensor, context: ContextParallel) -> Runs:
    """One GPU, all ranks by copies, by an all-gather, and without relay, and FLA's context parallelism."""
    grad = random_like(call["v"]) if case.trains else None
    ours = {"backend": options["backend"]}
    gathers = context_parallel(offsets, group=context.group, exchange="gather")
    runs: Runs = {
        "one": timed_call(chunk_kda, call | ({"cu_seqlens": context.cu_seqlens} if case.packed else {}) | ours, grad),
        "ours": timed_call(chunk_kda, call | {"cp_context": context} | ours, grad),
        "gather": timed_call(chunk_kda, call | {"cp_context": gathers} | ours, grad),
    }
    if case.ranks == 2 and not case.trains:
        formed = context_parallel(offsets, group=context.group, relay=False)
        runs["no_relay"] = timed_call(chunk_kda, call | {"cp_context": formed} | ours, grad)
    if options["fla"]:
        from fla.ops.cp import build_cp_context

        theirs = {"cp_context": build_cp_context(offsets, group=context.group)}
        runs["fla"] = timed_call(contenders.find("fla"), contenders.shared(call) | theirs, grad)
    return runs


def timed_call(op: Callable, call: dict, grad: Tensor | None) -> Callable[[], tuple[Tensor, ...]]:
    """A call of `op` that returns `o`, and with a gradient of `o` those of the leaves that the call has."""
    if grad is None:
        return lambda: (op(**call)[0],)
    leaves = [call[name].requires_grad_() for name in LEAVES if name in call]

    def both() -> tuple[Tensor, ...]:
        o = op(**call)[0]
        return o.detach(), *torch.autograd.grad(o, leaves, grad)

    return both


def inputs(case: Case, device: torch.device, seed: int) -> dict:
    """A rank's inputs: tokens differ from rank to rank, the gate's parameters do not."""
    call, common = make_call(case, BF16, device, seed), make_call(replace(case, T=1), BF16, device)
    return call | {name: common[name] for name in SUMMED}


def first_calls(runs: Runs, device: torch.device) -> dict[str, str]:
    """Calls all, and takes out those that fail on any rank. Returns why."""
    problems: dict[str, str] = {}
    for name in list(runs):
        try:
            for _ in range(3):
                runs[name]()
            synchronize(device)
        except Exception as error:  # FLA may raise anything, and memory may run out
            problems[name] = summarize(error)
        failed = torch.tensor(name in problems, dtype=torch.int32, device=device)
        dist.all_reduce(failed, dist.ReduceOp.MAX)
        if failed:
            problems.setdefault(name, "failed on another rank")
            del runs[name]
            torch.cuda.empty_cache()  # does nothing without a GPU
    return problems


def errors(case: Any, runs: Runs, call: dict, offsets: Tensor, context: ContextParallel) -> dict[str, dict[str, float]]:
    """The worst rank's errors by contender and result, against the whole call on one GPU. All ranks have one gradient of o."""
    names = ["o", *(name for name in LEAVES if name in call)] if case.trains else ["o"]
    each = [inputs(case, context.device, rank) for rank in range(context.ranks)]
    joined = {name: torch.cat([x[name] for x in each], dim=1) for name in TOKEN_TENSORS}
    grad = torch.cat([random_like(call["v"])] * context.ranks, dim=1) if case.trains else None
    whole = timed_call(chunk_kda, call | joined | {"cu_seqlens": offsets, "split": False}, grad)()
    own = slice(context.rank * case.T, (context.rank + 1) * case.T)
    wanted = {name: x if name in SUMMED else x[:, own].clone() for name, x in zip(names, whole)}
    found: dict[str, dict[str, float]] = {}
    for contender, run in runs.items():
        results = dict(zip(names, gate.second_result(run, context.device)))
        for name in SUMMED:  # in an order that all ranks share
            if name in results:
                dist.all_reduce(results[name])
        off = torch.tensor([relative_error(results[name], wanted[name]) for name in names], device=context.device)
        off.nan_to_num_(torch.inf, torch.inf)  # the largest of NaN and a number may be the number
        dist.all_reduce(off, dist.ReduceOp.MAX)
        found[contender] = dict(zip(names, off.tolist()))
    return found


class Slowest:
    """Times of the slowest rank, which all ranks see: they take the same turns and make as many calls."""

    def __init__(self, timer: Any, device: torch.device):
        self.timer, self.device = timer, device

    def __call__(self, run: timing.Run) -> float:
        return self.most(self.timer, run)

    def span(self, run: timing.Run, calls: int) -> float:
        return self.most(self.timer.span, run, calls)

    def most(self, time: Callable[..., float], *arguments: Any) -> float:
        synchronize(self.device)
        dist.barrier()
        ms = torch.tensor(time(*arguments), dtype=torch.float64, device=self.device)
        dist.all_reduce(ms, dist.ReduceOp.MAX)
        return ms.item()


PROGRAM = Program("ranks", workloads.RANKS, peers=("fla",), measure=measure)

if __name__ == "__main__":
    sys.exit(main(PROGRAM))
