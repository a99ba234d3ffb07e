"""Work of the processes of `test_parallel.py`, each with a GPU of its own, over NCCL."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

import flashdelta as fd
from flashdelta.parallel import context_parallel
from flashdelta.parallel.exchange import exchange
from flashdelta.tools.devices import capture

from ..support.cases import BF16, FP32, Case
from ..support.inputs import TOKEN_TENSORS, make_call
from ..support.oracle import relative_error, same_bits
from ..support.ranks import SHARED, Cut, Found, incoming_of, results_of
from .calls import KIMI, UNBOUNDED

CASES = {
    "through_all": replace(KIMI, name="ranks_all", lengths=(4096,), state=FP32),
    "packed": replace(KIMI, name="ranks_packed", lengths=(700, 0, 1, 2000, 1395), state=FP32),
    "unbounded": replace(UNBOUNDED, name="ranks_unbounded", lengths=(1000, 3096), state=FP32, v_first=True),
    "grouped": replace(KIMI, name="ranks_grouped", lengths=(1000, 3096), H=2, HV=6, state=FP32),
}
# few heads: ranks cut their tokens into segments, which take less memory than the values of so many tokens
CASES["segments"] = replace(KIMI, name="ranks_segments", lengths=(1000, 9752), H=4, HV=4, state=FP32)
# gradients of many repeats, and in a test that waits for a timeout
TINY = replace(KIMI, name="ranks_tiny", lengths=(200, 56), state=FP32)
REPEATS, BACKWARD_REPEATS, FEWER = 1000, 300, 10
"""Numbers of forwards, of calls with gradients, and how many times fewer where there are more ranks."""
MANY = 1 << 20
"""Tokens of one sequence."""

BRIEF, UNTOLD_AFTER, TOLD = timedelta(seconds=10), 90.0, 17
"""A group's timeout, seconds after which the others should have heard of a lost rank, and the exit code of one that has."""

WAYS = ("put", "gather")
REPLAYS = 3
"""A graph's, one after another: the exchange of each is in the place of the last."""


def cut_of(case: Case, ranks: int, backend: str) -> Cut:
    call = make_call(case, BF16, "cuda") | {"output_final_state": True, "backend": backend}
    return Cut(call, ranks, incoming_of(call))


def on_host(found: Found) -> Found:
    return {name: x.cpu() for name, x in found.items()}


def runs_of(cut: Cut, call: dict, incoming: Sequence[torch.Tensor]) -> Callable[[], Found]:
    """The rank's call again and again: a forward, and a backward pass too if gradients come in."""
    names = (*TOKEN_TENSORS, "initial_state", *SHARED) if cut.incoming is not None else ()
    inputs = {name: call[name].requires_grad_() for name in names if call.get(name) is not None}

    def run() -> Found:
        o, final_state = fd.chunk_kda(**call)
        found = {"o": o.detach(), "final_state": final_state.detach()}
        if inputs:
            found |= zip(inputs, torch.autograd.grad([o, final_state], [*inputs.values()], incoming))
        return found

    return run


def incoming_of_rank(cut: Cut, rank: int, room: int = 0) -> list[torch.Tensor]:
    """Gradients of the rank's results, in memory of their own."""
    if cut.incoming is None:
        return []
    return [x.clone(memory_format=torch.contiguous_format) for x in cut.gradients(rank, room)]


def replayed(cut: Cut, other: Cut, group: dist.ProcessGroup, way: str) -> tuple[list[Found], bool]:
    """A captured call with one batch, then with another one's lengths and tensors, among calls that are not captured; and
    whether those have the same bits."""
    context = context_parallel(cut.call["cu_seqlens"], group=group, max_sequences=8, exchange=way)
    delays = random.Random(context.rank)
    rooms = [8 - len(x.sequences(context.rank)) for x in (cut, other)]
    call, incoming = cut.local(context, rooms[0]), incoming_of_rank(cut, context.rank, rooms[0])
    run = runs_of(cut, call, incoming)
    replay, captured = capture(run)
    found, alike = [], True
    for each, room in zip((cut, other), rooms):
        context.update_(each.call["cu_seqlens"])
        with torch.no_grad():
            for name, x in each.local(context, room).items():
                if isinstance(x, torch.Tensor):
                    call[name].copy_(x)
            for to, x in zip(incoming, incoming_of_rank(each, context.rank, room)):
                to.copy_(x)
        eager = run()
        for _ in range(REPLAYS):
            replay()
            time.sleep(delays.random() * 2e-3)
        again = run()
        torch.cuda.synchronize()
        rows = len(each.sequences(context.rank))
        alike &= all(same_bits(x, other_run[name]) for other_run in (eager, again) for name, x in captured.items())
        cuts = {"final_state": rows, "initial_state": rows}
        found.append({name: x[: cuts.get(name)].clone() for name, x in captured.items()})
    return found, alike


def on_two_streams(group: dist.ProcessGroup, way: str) -> bool:
    """Whether exchanges that follow each other on other streams bring what was sent, also where ranks come late, and where a
    packet's memory is the next one's of its stream."""
    streams, delays = [torch.cuda.Stream() for _ in range(2)], random.Random(group.rank())
    ranks = torch.arange(group.size(), device="cuda", dtype=torch.float32).view(-1, 1, 1)
    found = [ranks.new_empty(group.size(), 1, 1 << 18) for _ in range(REPEATS // 10)]
    torch.cuda.synchronize()
    for i, packets in enumerate(found):
        with torch.cuda.stream(streams[i % 2]):
            packet = (ranks[group.rank()] + i).expand(packets.shape[1:]).contiguous()
            exchange(packet, packets, group.group_name, way)
            del packet
        if delays.random() < 0.2:
            time.sleep(delays.random() * 2e-3)
    torch.cuda.synchronize()
    return all(bool((packets == ranks + i).all()) for i, packets in enumerate(found))


def repeats_with_delays(cut: Cut, group: dist.ProcessGroup, way: str, repeats: int = REPEATS) -> bool:
    """Whether calls of ranks that come late, each by another time, find the same bits every time, in gradients too."""
    context = context_parallel(cut.call["cu_seqlens"], group=group, exchange=way)
    run = runs_of(cut, cut.local(context), incoming_of_rank(cut, context.rank))
    delays, first, alike = random.Random(context.rank), run(), True
    for _ in range(repeats):
        if delays.random() < 0.2:
            time.sleep(delays.random() * 2e-3)
        # no rank leaves before the others
        alike &= all(same_bits(x, first[name]) for name, x in run().items())
    return alike


def lose_a_rank(group: dist.ProcessGroup, way: str, backend: str) -> None:
    """The last rank does not come to a call. The other one ends by `TOLD` if the call raises after it has waited, or NCCL's
    watchdog ends it."""
    cut = replace(cut_of(TINY, group.size(), backend), exchange=way)
    cut.run(group)  # compiles, for which nobody waits briefly
    dist.barrier()
    brief = dist.new_group(timeout=BRIEF)
    cut.run(brief)
    torch.cuda.synchronize()
    dist.barrier()
    if group.rank() + 1 == group.size():
        time.sleep(UNTOLD_AFTER)
        raise RuntimeError("the other rank has not been told")
    began = time.monotonic()
    try:
        cut.run(brief)
        torch.cuda.synchronize()
    except RuntimeError:
        waited = time.monotonic() - began > BRIEF.total_seconds() / 2
        os._exit(TOLD if waited else 1)  # not by destructors, which a GPU with an error may not let end


def every_case(group: dist.ProcessGroup, backend: str, compiles: bool = False) -> dict[str, object]:
    """Findings of the ranks in each, and in which other ways they find other bits: again, by either exchange, with what the
    forward keeps, compiled."""
    found: dict[str, object] = {}
    compiled = torch.compile(lambda **call: fd.chunk_kda(**call), fullgraph=True)
    for name, case in CASES.items():
        cut = cut_of(case, group.size(), backend)
        first = cut.run(group)
        others = {"again": cut.run(group), "replayed": cut.run(group), "kept": cut.run(group, disable_recompute=True)}
        others |= {way: replace(cut, exchange=way).run(group) for way in WAYS}
        if compiles and name == "packed":
            local = cut.local(context_parallel(cut.call["cu_seqlens"], group=group))
            others["compiled"] = results_of(dict(local), None, compiled)
            others["compiled backward"] = results_of(local, cut.gradients(group.rank()), compiled)
        found[name] = on_host(first)
        found[f"{name} otherwise"] = [
            way for way, run in others.items() if not run or not all(same_bits(x, first[key]) for key, x in run.items())
        ]
        assert others["again"].keys() == first.keys() == others.get("compiled backward", first).keys()
    return found


def of_many_tokens(group: dist.ProcessGroup, backend: str) -> dict[str, float]:
    """How far the rank's part of one sequence lies from that of the whole call on one GPU, by result; sums over all tokens are
    of all ranks."""
    rank, ranks = group.rank(), group.size()
    case = replace(KIMI, name="ranks_many", lengths=(MANY,), H=2, HV=2, state=FP32, memory="slow")
    cut = cut_of(case, ranks, backend)
    found, whole = cut.run(group), cut.whole(split=False)
    for name in SHARED:
        dist.all_reduce(found[name])
    own = slice(rank * cut.tokens, (rank + 1) * cut.tokens)
    whole |= {name: whole[name][:, own] for name in ("o", *TOKEN_TENSORS)}
    elsewhere = {"final_state": rank + 1 < ranks, "initial_state": rank > 0}
    return {name: relative_error(x, whole[name]) for name, x in found.items() if not elsewhere.get(name)}


def by_either_way(group: dist.ProcessGroup, backend: str, fewer: int = 1) -> dict[str, object]:
    """Each exchange: captured graphs, repeats of ranks that come late, `fewer` times as many as of two, and two streams."""
    ranks, found = group.size(), dict[str, object]()
    cut = cut_of(CASES["packed"], ranks, backend)
    other = cut_of(replace(CASES["packed"], name="ranks_other", lengths=(4000, 96)), ranks, backend)
    tiny = cut_of(TINY, ranks, backend)
    for way in WAYS:
        for name, cuts in (("", [replace(x, incoming=None) for x in (cut, other)]), (" backward", [cut, other])):
            graphs, alike = replayed(*cuts, group, way)
            found[f"graph {way}{name}"], found[f"graph {way}{name} alike"] = [on_host(x) for x in graphs], alike
        found[f"delays {way}"] = repeats_with_delays(replace(cut, incoming=None), group, way, REPEATS // fewer)
        found[f"delays {way} backward"] = repeats_with_delays(tiny, group, way, BACKWARD_REPEATS // fewer)
        found[f"streams {way}"] = on_two_streams(group, way)
    return found


def work_of_more(group: dist.ProcessGroup, backend: str) -> dict[str, object]:
    """Parts of `work` that more ranks than two may find otherwise."""
    return every_case(group, backend) | by_either_way(group, backend, FEWER)


def work(group: dist.ProcessGroup, backend: str) -> dict[str, object]:
    found = every_case(group, backend, compiles=True) | by_either_way(group, backend)
    found["many tokens"] = of_many_tokens(group, backend)
    packed = cut_of(CASES["packed"], group.size(), backend)
    found["way"] = context_parallel(packed.call["cu_seqlens"], group=group).exchange
    return found
