"""Layers of vLLM and SGLang: on flashdelta by the integrations, and on the engines' own Triton kernels."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import flashdelta as fd
from tests.support.cases import BF16
from tests.support.engines import LAYERS, Batch, K3Step, Model, exact_sequence
from tests.support.oracle import TOLERANCE, TOLERANCE_FOR_FEW, float64

from . import gate
from .gate import PEER_TOLERANCE, Results
from .run import Contender, Setup, Work, in_launches, slots_of_launches
from .workloads import Row

CHECKED = 2
"""Sequences of a row that are held against float64."""

Step = Callable[[Tensor], Tensor]


def model_of(case: Any, setup: Setup) -> Model:
    return Model(case.H, case.K, case.lower_bound, BF16, case.state, str(setup.device))


def contenders(case: Any, setup: Setup, ours: Any, engine: Callable, make: Callable, own: float) -> dict[str, Any]:
    """Layers as contenders, by `make`. `engine` makes one of the kernels by name, which probe GPUs as they are imported;
    `own`: our tolerance."""
    theirs = setup.peer("engine", lambda functions: make(engine(functions(case.layer)), PEER_TOLERANCE))
    return {"ours": make(ours, own), "engine": theirs}


def layers(case: Any, setup: Setup, model: Model, make: Callable, own: float) -> dict[str, Any]:
    layer = LAYERS[case.layer]
    return contenders(case, setup, layer(model), functools.partial(layer, model, ours=False), make, own)


def prefill(row: Row, setup: Setup) -> Work:
    """New prompts, whose states go to the pool."""
    case: Any = row.call
    model = model_of(case, setup)
    count, rows = len(case.lengths), model.tokens(sum(case.lengths))
    pool, slots = model.pool(count + 1), model.index(range(1, count + 1))
    flags, dense = torch.zeros(count, dtype=torch.bool, device=setup.device), case.layer == "Kimi-Linear"

    def make(layer: Any, tolerance: float) -> Contender:
        batch = Batch(model, rows.clone(), case.lengths, dense)

        def checked() -> Results:
            """Outputs from a pool of zeros, as SGLang's new sequences find it; its kernels write over v."""
            pool.zero_()
            return (layer.prefill(Batch(model, rows.clone(), case.lengths, dense), pool, slots, flags),)

        return Contender(lambda: (layer.prefill(batch, pool, slots, flags),), tolerance, checked)

    want = torch.cat([exact_sequence(model, x)[0] for x in rows.split(case.lengths)])[None]
    found = layers(case, setup, model, make, TOLERANCE[BF16])
    return Work(found, functools.partial(gate.errors, (want,), ("o",)))


def own_slots(setup: Setup, model: Model, count: int, each: int = 1) -> tuple[int, list[Tensor]]:
    """Slots of a pool, the first of them reserved, and those of each launch."""
    total, slots = slots_of_launches(setup, count, each, model.pool(1).nbytes)
    return total + 1, [x + 1 for x in slots]


def stepped(
    run: Step, tables: Sequence[Tensor], written: Sequence[tuple[Tensor, Tensor]], some: Tensor, tolerance: float
) -> Contender:
    """A step by CUDA graph. The first sequences' outputs and states are checked; `written` memory is put back as it was."""

    def checked() -> Results:
        o = run(tables[0])[:, : some.numel()].clone()
        after = written[0][0][some]
        for memory, before in written:
            memory[some] = before
        return o, after

    return in_launches(run, tables, checked, tolerance)


def decode(row: Row, setup: Setup) -> Work:
    """A token per sequence, or drafts: then a sequence has a slot per token and starts from that of the last accepted one."""
    case: Any = row.call
    model, count, each = model_of(case, setup), len(case.lengths), case.lengths[0]
    drafts = case.step == "verify"
    total, slots = own_slots(setup, model, count, each)
    tables = [x.view(count, each) for x in slots] if drafts else slots
    pool, accepted = model.pool(total), model.index([1 + i % each for i in range(count)])
    batch, some = Batch(model, model.tokens(count * each), case.lengths), tables[0][:CHECKED].long()
    before = pool[some]

    def make(layer: Any, tolerance: float) -> Contender:
        layer.room = torch.empty_like

        def run(at: Tensor) -> Tensor:
            return layer.verify(batch, pool, at, accepted) if drafts else layer.decode(batch, pool, at)

        return stepped(run, tables, [(pool, before)], some, tolerance)

    found = layers(case, setup, model, make, TOLERANCE_FOR_FEW)
    errors = functools.partial(gate.errors, exact(model, batch, before, accepted if drafts else None), ("o", "state"))
    return Work(found, errors, {"bytes": (1 + each) * count * pool[0].nbytes}, len(slots))


def exact(model: Model, batch: Batch, states: Tensor, accepted: Tensor | None) -> Results:
    """Outputs and states of the first sequences, by the reference in float64. Slot 0 is reserved."""
    few, each = len(states), 1 if accepted is None else states.shape[1]
    tensors = {name: x[:, : few * each] for name, x in (batch.qkv | {"g": batch.g, "beta": batch.beta}).items()}
    flat = states if accepted is None else states.flatten(0, 1)
    pool = torch.cat((flat[:1], flat))
    call = float64(tensors | {"A_log": model.A_log, "dt_bias": model.dt_bias, "initial_state": pool})
    table = model.index(range(1, few * each + 1))
    drafts: dict[str, Any] = {"ssm_state_indices": table}
    if accepted is not None:
        drafts = {"ssm_state_indices": table.view(few, each), "num_accepted_tokens": accepted[:few]}
        drafts |= {"num_spec_tokens": each - 1}
    options: dict[str, Any] = {"lower_bound": model.lower_bound, "use_gate_in_kernel": True, "beta_is_logit": True}
    options |= {"cu_seqlens": batch.offsets[: few + 1], "null_index": "non_positive", "backend": "reference"}
    o, _ = fd.recurrent_kda(**call, **drafts, **options)
    after = call["initial_state"][1:]
    return o, after if accepted is None else after.unflatten(0, (few, each))


def whole_step(row: Row, setup: Setup) -> Work:
    """A step with the convolution before it and the norm behind it, whose windows lie in a pool of their own: also by the
    kernel that vLLM has for 12, 24, 48 and 96 heads and float32 states ("vllm_fused")."""
    case: Any = row.call
    model, count = model_of(case, setup), len(case.lengths)
    step = K3Step(model)
    total, slots = own_slots(setup, model, count)
    rows, z = model.tokens(count), step.output_gate(count)
    pool, windows, some = model.pool(total), step.windows(total), slots[0][:CHECKED].long()
    batch, written = Batch(model, rows, case.lengths), [(pool, pool[some]), (windows, windows[some])]
    batch.g = batch.g.contiguous()  # as vLLM has it
    step.backends()

    def make(run: Callable[..., Tensor], tolerance: float) -> Contender:
        return stepped(lambda at: run(batch, z, pool, windows, at), slots, written, some, tolerance)

    def vllm_fused(operators: Any) -> Contender:
        def fused_kda_decode(**call: Any) -> Tensor:
            operators.fused_kda_decode(**call)
            return call["out"]

        own = copy.copy(step)
        own.call = SimpleNamespace(fused_kda_decode=fused_kda_decode)
        return make(own.fused, PEER_TOLERANCE)

    theirs = functools.partial(functools.partial, step.chain)
    found = contenders(case, setup, step.fused, theirs, make, TOLERANCE_FOR_FEW)
    found["vllm_fused"] = setup.peer("vllm_fused", vllm_fused)
    apart = (torch.cat((x[:1], x)) for _, x in written)  # slot 0 is reserved
    few = len(some)
    o, states = step.exact(Batch(model, rows[:few], [1] * few), z[:few], *apart, model.index(range(1, few + 1)))
    errors = functools.partial(gate.errors, (o, states[1:]), ("o", "state"))
    return Work(found, errors, {"bytes": 2 * count * (pool[0].nbytes + windows[0].nbytes)}, len(slots))


DECODE = {"decode": decode, "verify": decode, "whole step": whole_step}
