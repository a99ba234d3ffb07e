"""Sequences over the GPUs of this machine (docs/parallel.md): a process for each, beside one GPU with as many tokens, FLA's
context parallelism, and the exchange alone. Rows of one GPU have few heads, and the same call with whole sequences beside it.

Every sample starts at a barrier with cold caches and is timed by events; a row has the slowest rank's time of each sample.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...ops.chunk import chunk_kda
from ...problem.context import ContextParallel, context_parallel, gather
from ...testing.cases import BF16, Case
from ...testing.inputs import TOKEN_TENSORS, make_call
from ...testing.oracle import TOLERANCE, relative_error
from .contenders import Setup, find, let_fla_split, shared
from .timing import Timer, Timing, summarize
from .training import LEAVES, random_like
from .workloads import Bound, Row, model

MOST_CHECKED = 131_072
"""Tokens of all ranks up to which one GPU computes the whole, for the results to be held against."""

FORWARD, STEP = "forward", "forward + backward"
EFFICIENCY = {
    (32, 8): (0.70, 0.82),
    (32, 32): (0.76, 0.85),
    (32, 128): (0.76, 0.85),
    (32, 512): (0.76, 0.85),
    (64, 8): (0.72, 0.86),
    (64, 32): (0.77, 0.88),
    (64, 128): (0.77, 0.88),
}
"""By heads and thousands of tokens a rank: the least of one GPU's time over ours that is wanted, on two GPUs."""

OF_FLA = {FORWARD: 0.35, STEP: 0.40}


def _row(heads: int, tokens: int, table: str, cut: bool = False) -> Row:
    name = f"{table}, H{heads}, {tokens}K a rank" + (", packed" if cut else "")
    why = "sequences cut inside" if cut else "one sequence over all ranks"
    bounds = [Bound("efficiency", x[table == STEP]) for x in [EFFICIENCY.get((heads, tokens))] if x and not cut]
    case = model(name, why, heads, T=tokens * 1024, final=False)
    return Row(case, "packed" if cut else table, (*bounds, Bound("FLA", OF_FLA[table])))


ROWS = tuple(
    _row(*sizes, table, cut)
    for table in (FORWARD, STEP)
    for *sizes, cut in (
        *((heads, tokens, False) for heads in (8, 32, 64) for tokens in (8, 32, 128)),
        (32, 512, False),
        (32, 8, True),
        (32, 32, True),
    )
)
ALONE = "one GPU"
"""The table of rows that split sequences on one GPU."""

ROWS += tuple(
    Row(
        model(f"{STEP}, H4, {tokens}K on one GPU", "few heads: split, and whole", 4, T=tokens * 1024, final=False),
        ALONE,
        (Bound("efficiency", 2.0),),
    )
    for tokens in (32, 128)
)


def measure(row: Row, setup: Setup) -> Iterator[dict]:
    """One row of the document.

    Raises:
        ValueError: fewer than two GPUs, of a row that has several.
        torch.multiprocessing.ProcessRaisedException: a process failed.
    """
    ranks = 1 if row.table == ALONE else torch.cuda.device_count()
    if row.table != ALONE and ranks < 2:
        raise ValueError(f"device: got {ranks} GPUs, wanted 2 or more (bench cp has a process for each)")
    asked = not isinstance(setup.found("fla", row), str)
    options = {"backend": setup.backend, "rounds": setup.effort.rounds, "fla": asked}
    with tempfile.TemporaryDirectory(prefix="flashdelta-ranks-") as folder:
        torch.multiprocessing.spawn(_work, (ranks, folder, row, options), nprocs=ranks)
        found = json.loads((Path(folder) / "row.json").read_text())
    case: Any = row.call
    shape = {"T": case.T, "H": case.H, "K": case.K}
    medians = {name: (x.get("ms") or {}).get("median") for name, x in found.items()}
    one, ours, fla = (medians.get(name) for name in ("one", "ours", "fla"))
    yield {
        **{"name": row.name, "table": row.table, "reason": row.why, "shape": shape, "ranks": ranks, **found},
        "efficiency": one / ours if one and ours else None,
        "speedup": fla / ours if fla and ours else None,
    }


def _work(rank: int, ranks: int, folder: str, row: Row, options: Mapping[str, Any]) -> None:
    """Of one rank. The first writes the row."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if ranks == 1:
        let_fla_split()
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks, device_id=device
    )
    group = dist.group.WORLD
    assert group is not None
    with torch.enable_grad() if row.name.startswith(STEP) else torch.inference_mode():
        found = _measured(row, options, group, device)
    if rank == 0:
        (Path(folder) / "row.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _measured(row: Row, options: Mapping[str, Any], group: dist.ProcessGroup, device: torch.device) -> dict:
    case: Any = row.call
    ranks, rank = group.size(), group.rank()
    total = ranks * case.T
    cuts = [0, 3 * case.T // 4, total - case.T // 2, total] if row.table == "packed" else [0, total]
    offsets = torch.tensor(cuts, dtype=torch.int32, device=device)
    context = context_parallel(offsets, group=group)
    call = _inputs(case, device, rank)
    one: dict[str, Any] = {"cu_seqlens": context.cu_seqlens} if row.table == "packed" else {}
    where: dict[str, Any] = {"cp_context": context}
    of_fla: dict[str, Any] = {}
    if ranks == 1:
        one, where = {"split": False}, {}
    runs: dict[str, Callable[[], object]] = {
        "one": _timed(row, chunk_kda, call | one | {"backend": options["backend"]}),
        "ours": _timed(row, chunk_kda, call | where | {"backend": options["backend"]}),
    }
    if ranks > 1:
        runs["exchange"] = _exchange(case, context)
    problems: dict[str, str | None] = dict.fromkeys(runs)
    if options["fla"]:
        theirs = find("fla")
        if ranks > 1:
            of_fla = {"cp_context": _context_of_fla(offsets, group)}
        runs["fla"] = _timed(row, theirs, shared(call) | of_fla)
    found: dict[str, dict] = {name: {} for name in runs}
    for name in list(runs):
        try:
            for _ in range(3):
                runs[name]()
            torch.cuda.synchronize(device)
        except Exception as error:  # whatever FLA raises, the other times are worth having
            if name != "fla":
                raise
            problems[name] = summarize(error)
            del runs[name]
    if total <= MOST_CHECKED:
        off = _error(row, options["backend"], call, offsets, context)
        found["ours"]["error"] = {"o": off}
        if not off <= TOLERANCE[BF16]:
            problems["ours"] = f"o is {off:.1e} off the whole call's"
    for name, samples in _in_turns(runs, options["rounds"], device).items():
        timing = Timing.of(samples)
        found[name]["ms"] = {"median": timing.median, "min": timing.min, "p90": timing.p90, "samples": timing.samples}
    return {name: x | {"problem": problems.get(name)} for name, x in found.items()}


def _inputs(case: Case, device: torch.device, seed: int) -> dict:
    """Of a rank: tokens differ, the gate's parameters do not."""
    call, shared_by_all = make_call(case, BF16, device, seed), make_call(replace(case, T=1), BF16, device)
    return call | {name: shared_by_all[name] for name in ("A_log", "dt_bias")}


def _timed(row: Row, op: Callable, call: dict) -> Callable[[], object]:
    """A call of `op`, with its backward pass in the rows that have it."""
    if not row.name.startswith(STEP):
        return lambda: op(**call)
    leaves = [call[name].requires_grad_() for name in LEAVES if name in call]
    grad_o = random_like(call["v"])
    return lambda: torch.autograd.grad(op(**call)[0], leaves, grad_o)


def _exchange(case: Case, context: ContextParallel) -> Callable[[], object]:
    """An all-gather of a forward's packets."""
    packet = torch.zeros(1, case.HV, case.K + case.V, case.K, device=context.device)
    packets = packet.new_empty(context.ranks, *packet.shape)
    return lambda: gather(packet, packets, context.name)


def _context_of_fla(offsets: Tensor, group: dist.ProcessGroup) -> Any:
    from fla.ops.cp import build_cp_context

    return build_cp_context(offsets, group=group)


def _error(row: Row, backend: str, call: dict, offsets: Tensor, context: ContextParallel) -> float:
    """Of the results of all ranks, against the whole call on one GPU."""
    case: Any = row.call
    whole = [_inputs(case, context.device, r) for r in range(context.ranks)]
    joined = {name: torch.cat([x[name] for x in whole], dim=1) for name in TOKEN_TENSORS}
    del whole
    with torch.no_grad():
        wanted = chunk_kda(**call | joined | {"cu_seqlens": offsets, "backend": backend, "split": False})[0]
        o = chunk_kda(**call | {"cp_context": context, "backend": backend})[0]
        error = relative_error(o, wanted[:, context.rank * case.T : (context.rank + 1) * case.T])
        worst = torch.tensor(error, device=context.device)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
    return worst.item()


def _in_turns(runs: Mapping[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Milliseconds of each sample, the slowest rank's. All ranks take the same turns."""
    timer, taken = Timer(device), {name: list[float]() for name in runs}
    names = list(runs)

    def together(run: Callable[[], object]) -> float:
        torch.cuda.synchronize(device)
        dist.barrier()
        return timer(run)

    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            taken[name].append(together(runs[name]))
    slowest = torch.tensor([taken[name] for name in names], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return dict(zip(names, slowest.tolist()))
