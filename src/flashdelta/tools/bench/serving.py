"""Calls of engines' layers: on flashdelta by the integrations, and on the engines' own Triton kernels, on the same tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import flashdelta as fd

from ...testing.cases import BF16
from ...testing.engines import LAYERS, Batch, Functions, K3Step, KimiLinear, Model, exact_outputs
from ...testing.oracle import TOLERANCE, TOLERANCE_FOR_FEW, float64
from . import checks
from .contenders import (
    CHECKED,
    LEAST_LAUNCHES,
    PEER_TOLERANCE,
    Contender,
    Results,
    Setup,
    Work,
    forward_bytes,
    launch_all,
    sizes,
)
from .timing import summarize
from .workloads import Row

Layers = dict[str, "KimiLinear | str"]


def layers(row: Row, setup: Setup, model: Model) -> Layers:
    """Ours, and the engine's own or why there is none."""
    layer, functions = LAYERS[row.call.layer], own_functions(row, setup)
    theirs = functions if isinstance(functions, str) else layer(model, functions, ours=False)
    return {"ours": layer(model), "engine": theirs}


def own_functions(row: Row, setup: Setup) -> Functions | str:
    case: Any = row.call
    own = setup.found("engine", row)
    try:
        return own if isinstance(own, str) else own(case.layer)
    except Exception as error:  # as its kernels are imported: they probe GPUs and Triton
        return summarize(error)


def served(row: Row, setup: Setup) -> Work:
    case: Any = row.call
    model = Model(case.H, case.K, case.lower_bound, BF16, case.state, str(setup.device))
    run = {"prefill": prefill, "decode": decode, "verify": verify, "whole step": whole_step}[case.step]
    return run(row, setup, model)


def contenders(found: Layers, make: Callable[[KimiLinear, float], Contender], tolerance: float) -> dict[str, Any]:
    return {
        name: layer if isinstance(layer, str) else make(layer, tolerance if name == "ours" else PEER_TOLERANCE)
        for name, layer in found.items()
    }


def prefill(row: Row, setup: Setup, model: Model) -> Work:
    """New prompts, whose states go to the pool. The engine's own gathers and scatters them."""
    case: Any = row.call
    count, rows = len(case.lengths), model.tokens(sum(case.lengths))
    pool, slots = model.pool(count + 1), model.index(range(1, count + 1))
    flags = torch.zeros(count, dtype=torch.bool, device=setup.device)
    dense = case.layer == "Kimi-Linear"

    def run(layer: KimiLinear, batch: Batch) -> Results:
        return (layer.prefill(batch, pool, slots, flags),)

    def checked(layer: KimiLinear) -> Results:
        """From a pool of zeros, as SGLang's new sequences find it; its kernels write over v."""
        pool.zero_()
        return run(layer, Batch(model, rows.clone(), case.lengths, dense))

    def make(layer: KimiLinear, tolerance: float) -> Contender:
        batch = Batch(model, rows.clone(), case.lengths, dense)
        return Contender(functools.partial(run, layer, batch), tolerance, functools.partial(checked, layer))

    want = torch.cat([exact_outputs(model, x) for x in rows.split(case.lengths)])[None]
    errors = functools.partial(checks.errors, (want,), ("o",))
    found = contenders(layers(row, setup, model), make, TOLERANCE[BF16])
    return Work(found, errors, sizes(case), forward_bytes(case))


def decode(row: Row, setup: Setup, model: Model) -> Work:
    """By CUDA graph; each launch has slots of its own, as many as keep them out of the cache."""
    case: Any = row.call
    count = len(case.lengths)
    total, slots = own_slots(setup, model, count)
    pool, rows = model.pool(total), model.tokens(count)
    batch, some = Batch(model, rows, case.lengths), slots[0][:CHECKED].long()
    before = pool[some]

    def make(layer: KimiLinear, tolerance: float) -> Contender:
        def run(at: Tensor) -> Tensor:
            return layer.decode(batch, pool, at)

        def checked() -> Results:
            o = run(slots[0])[:, :CHECKED].clone()
            after, pool[some] = pool[some], before
            return o, after

        return Contender(launch_all(run, slots), tolerance, checked, graph="only")

    errors = functools.partial(checks.errors, exact_step(model, batch, before), ("o", "state"))
    found = contenders(layers(row, setup, model), make, TOLERANCE_FOR_FEW)
    return Work(found, errors, shape_of(case), 2 * count * pool[0].nbytes, len(slots))


def verify(row: Row, setup: Setup, model: Model) -> Work:
    """As `decode`, with drafts: a sequence has a slot for each of its tokens, and starts from that of the last accepted one."""
    case: Any = row.call
    count, each = len(case.lengths), case.lengths[0]
    total, slots = own_slots(setup, model, count * each)
    tables = [x.view(count, each) for x in slots]
    pool, accepted = model.pool(total), model.index([1 + i % each for i in range(count)])
    batch, some = Batch(model, model.tokens(count * each), case.lengths), tables[0][:CHECKED].long()
    before = pool[some]

    def make(layer: KimiLinear, tolerance: float) -> Contender:
        layer.room = torch.empty_like

        def run(table: Tensor) -> Tensor:
            return layer.verify(batch, pool, table, accepted)

        def checked() -> Results:
            o = run(tables[0])[:, : len(some) * each].clone()
            after, pool[some] = pool[some], before
            return o, after

        return Contender(launch_all(run, tables), tolerance, checked, graph="only")

    errors = functools.partial(checks.errors, exact_drafts(model, batch, before, accepted), ("o", "state"))
    found = contenders(layers(row, setup, model), make, TOLERANCE_FOR_FEW)
    return Work(found, errors, shape_of(case), (1 + each) * count * pool[0].nbytes, len(slots))


def shape_of(case: Any) -> dict[str, object]:
    state = "fp32" if case.state == torch.float32 else "bf16"
    return {"N": len(case.lengths), "H": case.H, "K": case.K, "state": state}


def own_slots(setup: Setup, model: Model, count: int) -> tuple[int, list[Tensor]]:
    """Slots of a pool, the first of them reserved, and each launch's own `count`: the same again where memory is short."""
    nbytes = count * model.pool(1).nbytes
    launches = min(setup.launches, max(LEAST_LAUNCHES, -(-setup.graph_bytes // nbytes)))
    tables = max(1, min(launches, setup.pool_bytes // nbytes))
    order = torch.randperm(tables * count, generator=torch.Generator().manual_seed(0)) + 1
    slots = [x.int().to(setup.device) for x in order.view(tables, count)]
    return tables * count + 1, [slots[i % tables] for i in range(launches)]


def whole_step(row: Row, setup: Setup, model: Model) -> Work:
    """As `decode`, with the convolution before it and the norm behind it, whose windows lie in a pool of their own."""
    case: Any = row.call
    count, step = len(case.lengths), K3Step(model)
    total, slots = own_slots(setup, model, count)
    rows, z = model.tokens(count), step.output_gate(count)
    pool, windows, some = model.pool(total), step.windows(total), slots[0][:CHECKED].long()
    batch, before = Batch(model, rows, case.lengths), (pool[some], windows[some])
    step.backends()

    def make(run: Callable[..., Tensor], tolerance: float) -> Contender:
        def launch(at: Tensor) -> Tensor:
            return run(batch, z, pool, windows, at)

        def checked() -> Results:
            o = launch(slots[0])[:, :CHECKED].clone()
            after, pool[some], windows[some] = pool[some], *before
            return o, after

        return Contender(launch_all(launch, slots), tolerance, checked, graph="only")

    own = own_functions(row, setup)
    theirs = own if isinstance(own, str) else make(functools.partial(step.chain, own), PEER_TOLERANCE)
    found: dict[str, Any] = {"ours": make(step.fused, TOLERANCE_FOR_FEW), "engine": theirs}
    apart = (torch.cat((x[:1], x)) for x in before)  # slot 0 is reserved
    few = len(some)
    o, states = step.exact(Batch(model, rows[:few], [1] * few), z[:few], *apart, model.index(range(1, few + 1)))
    errors = functools.partial(checks.errors, (o, states[1:]), ("o", "state"))
    moved = 2 * count * (pool[0].nbytes + windows[0].nbytes)
    return Work(found, errors, shape_of(case), moved, len(slots))


def exact_step(model: Model, batch: Batch, states: Tensor) -> Results:
    """Outputs of the first sequences, and their states, by the reference in float64."""
    tensors = {**batch.qkv, "g": batch.g, "beta": batch.beta}
    tensors = {name: x.transpose(0, 1)[:CHECKED] for name, x in tensors.items()}
    exact = float64(tensors | {"A_log": model.A_log, "dt_bias": model.dt_bias, "initial_state": states})
    options: dict[str, Any] = {"lower_bound": model.lower_bound, "use_gate_in_kernel": True, "beta_is_logit": True}
    o, _ = fd.recurrent_kda(**exact, **options, backend="reference")
    return o.transpose(0, 1), exact["initial_state"]


def exact_drafts(model: Model, batch: Batch, states: Tensor, accepted: Tensor) -> Results:
    """The same of drafts, with the states `[sequences, tokens, ...]` of each sequence's slots."""
    few, each = states.shape[:2]
    tensors = {name: x[:, : few * each] for name, x in (batch.qkv | {"g": batch.g, "beta": batch.beta}).items()}
    pool = torch.cat((states[:1, 0], states.flatten(0, 1)))  # slot 0 is reserved
    exact = float64(tensors | {"A_log": model.A_log, "dt_bias": model.dt_bias, "initial_state": pool})
    drafts: dict[str, Any] = {
        "ssm_state_indices": model.index(range(1, few * each + 1)).view(few, each),
        "cu_seqlens": batch.offsets[: few + 1],
        "num_spec_tokens": each - 1,
        "num_accepted_tokens": accepted[:few],
        "null_index": "non_positive",
    }
    options: dict[str, Any] = {"lower_bound": model.lower_bound, "use_gate_in_kernel": True, "beta_is_logit": True}
    o, _ = fd.recurrent_kda(**exact, **drafts, **options, backend="reference")
    return o, exact["initial_state"][1:].unflatten(0, (few, each))
