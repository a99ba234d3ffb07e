"""Steps of decoding over a paged pool of states, verification of drafts, and engines' layers, by CUDA graph."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import flashdelta as fd
from flashdelta.problem.problem import record_width
from tests.support.cases import BF16, FP32
from tests.support.decoding import Step, make_step
from tests.support.oracle import float64

from . import contenders, engines, gate, workloads
from .engines import CHECKED
from .gate import PEER_TOLERANCE, Results
from .run import Contender, Program, Setup, Work, in_launches, main, slots_of_launches
from .workloads import Row, Served

TOLERANCE = 5e-3


def state_bytes(step: Step) -> int:
    """Bytes of a sequence's state."""
    return step.HV * step.K * step.V * step.state.itemsize if step.state else 0


def decode_bytes(step: Step) -> int:
    """Bytes of states read and written: one before the tokens, one after each. With replay, verification reads a state, commit
    reads and writes it, and both move the records."""
    if step.rows is not None:
        records = 4 * step.N * step.T * step.HV * record_width(step.K, step.V)
        return 3 * step.N * state_bytes(step) + 2 * records
    return step.N * state_bytes(step) * (1 + step.T)


def pool_of(step: Step, setup: Setup, slots: int) -> Tensor:
    """Slots of the memory for pools of the state's dtype, which is filled once."""
    dtype = step.state or FP32
    if dtype not in setup.pools:
        empty = torch.empty(setup.pool_bytes // dtype.itemsize, dtype=dtype, device=setup.device)
        setup.pools[dtype] = empty.normal_()
    shape = (slots, step.HV, *((step.V, step.K) if step.v_first else (step.K, step.V)))
    return setup.pools[dtype][: torch.Size(shape).numel()].view(shape)


def decode_calls(step: Step, setup: Setup) -> tuple[dict, list[Tensor]]:
    """Arguments of `recurrent_kda` without slots, and the slots of each launch: together they read `graph_bytes` of states."""
    bare = Step(**{**vars(step), "state": None, "indices": None})
    call = make_step(bare, BF16, setup.device)
    total, slots = slots_of_launches(setup, step.N, step.T, state_bytes(step))
    call["initial_state"] = pool_of(step, setup, total)
    call["output"] = torch.empty_like(call["v"])
    return call, [x.view(step.N, step.T) for x in slots] if step.T > 1 else slots


def first_sequences(call: dict) -> dict:
    return {name: call[name][:CHECKED] for name in ("q", "k", "v", "g", "beta")}


def make(row: Row, setup: Setup) -> Work:
    if isinstance(row.call, Served):
        return engines.DECODE[row.call.step](row, setup)
    return decode(row, setup) if row.call.update else verify(row, setup)


def stepped(
    call: dict, run: Callable, tables: Sequence[Tensor], slots: tuple[Tensor, ...], tolerance: float, host: bool = False
) -> Contender:
    """`slots` of the first sequences' last states, and those that are written, which are put back as they were: the third."""
    ends, written, before = slots

    def checked() -> Results:
        call["output"].fill_(torch.nan)
        run(tables[0])
        found = call["initial_state"][ends]
        call["initial_state"][written] = before
        return call["output"][:CHECKED], found

    return in_launches(run, tables, checked, tolerance, host)


def decode(row: Row, setup: Setup) -> Work:
    step: Any = row.call
    call, slots = decode_calls(step, setup)
    some = slots[0][:CHECKED]
    flat = some.flatten().long()
    before = call["initial_state"][flat]

    def contender(run: Callable[[Tensor], object], tolerance: float = TOLERANCE) -> Contender:
        return stepped(call, run, slots, (flat, flat, before), tolerance, host=step.N in (1, 32))

    def fla(function: Any) -> Contender:
        return contender(lambda at: contenders.fla_step(function, call, at), PEER_TOLERANCE)

    made = {
        "ours": contender(lambda at: fd.recurrent_kda(**call, ssm_state_indices=at, backend=setup.backend)),
        "fla": setup.peer("fla_decode", fla) if step.spec is None else "takes no speculative tokens",
    }
    exact = float64({**call, "initial_state": before})
    exact |= first_sequences(exact) | {"output": None}
    own = torch.arange(len(flat), device=flat.device).view(some.shape)
    o, _ = fd.recurrent_kda(**exact, ssm_state_indices=own, backend="reference")
    errors = functools.partial(gate.errors, (o, exact["initial_state"]), ("o", "state"))
    return Work(made, errors, {"bytes": decode_bytes(step)}, len(slots))


def verify(row: Row, setup: Setup) -> Work:
    """Drafts verified and the accepted ones committed: by replay ("ours"); with a state per token, in a buffer ("states") or in
    slots of the pool, where no commit is needed ("slots", and FLA). "verify" is ours without its commit, "bare" a step of one
    token; they are checked as ours is."""
    step: Any = row.call
    call, slots = decode_calls(replace(step, update=True, rows=None), setup)
    N, T, pool = step.N, step.T, call["initial_state"]
    records = fd.replay_buffer(N, T - 1, step.HV, step.K, step.V, device=pool.device)
    states = pool.new_empty(N, T, *pool.shape[1:])
    starts = [x[:, 0].contiguous() for x in slots]
    counts = torch.randint(1, T + 1, (N,), generator=torch.Generator().manual_seed(0))
    accepted, rows = (x.int().to(pool.device) for x in (counts, torch.arange(N)))
    options = {"intermediate_state_indices": rows, "backend": setup.backend}
    some = slots[0][:CHECKED].flatten().long()
    before = pool[some]

    def last(table: Tensor) -> Tensor:
        """The first sequences' slots of the last accepted token."""
        return table[:CHECKED].gather(1, accepted[:CHECKED, None].long() - 1)[:, 0].long()

    def check(buffer: Tensor, at: Tensor) -> None:
        verified = {"update_state": False, "ssm_state_indices": at, "intermediate_states": buffer}
        fd.recurrent_kda(**call | verified, **options)

    def commit(buffer: Tensor, at: Tensor) -> None:
        check(buffer, at)
        fd.commit(pool, buffer, at, accepted, state_v_first=step.v_first, **options)

    def contender(run: Callable, tables: Sequence[Tensor], ends: Tensor, tolerance: float = TOLERANCE) -> Contender:
        return stepped(call, run, tables, (ends, some, before), tolerance)

    own, ends = starts[0][:CHECKED].long(), last(slots[0])
    ours = contender(functools.partial(commit, records), starts, own)
    bare = {name: call[name][:, :1].clone() for name in ("q", "k", "v", "g", "beta", "output")}
    bare = {**call, **bare, "num_spec_tokens": None, "backend": setup.backend}
    made = {
        "ours": ours,
        "states": contender(functools.partial(commit, states), starts, own),
        "slots": contender(
            lambda at: fd.recurrent_kda(**call, ssm_state_indices=at, backend=setup.backend), slots, ends
        ),
        "verify": replace(contender(functools.partial(check, records), starts, own), checked=ours.checked),
        "bare": replace(
            contender(lambda at: fd.recurrent_kda(**bare, ssm_state_indices=at), starts, own), checked=ours.checked
        ),
        "fla": setup.peer(
            "fla_decode", lambda f: contender(lambda at: contenders.fla_step(f, call, at), slots, ends, PEER_TOLERANCE)
        ),
    }
    exact = float64({**call, "initial_state": before})
    exact |= first_sequences(exact) | {"output": None}
    table = torch.arange(len(some), device=pool.device).view(-1, T)
    o, _ = fd.recurrent_kda(**exact, ssm_state_indices=table, backend="reference")
    errors = functools.partial(gate.errors, (o, exact["initial_state"][last(table)]), ("o", "state"))
    return Work(made, errors, {"bytes": decode_bytes(step)}, len(slots))


PROGRAM = Program("decode", workloads.DECODE, make, peers=("fla_decode", "engine", "vllm_fused"))

if __name__ == "__main__":
    sys.exit(main(PROGRAM))
