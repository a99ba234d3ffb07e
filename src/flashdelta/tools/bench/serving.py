"""Calls of engines' layers: on flashdelta by the integrations, and on the engines' own Triton kernels, on the same tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import flashdelta as fd

from ...testing.cases import BF16
from ...testing.engines import LAYERS, Batch, KimiLinear, Model, exact_outputs
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
    case: Any = row.call
    own = setup.found("engine", row)
    try:
        theirs = own if isinstance(own, str) else LAYERS[case.layer](model, own(case.layer), ours=False)
    except Exception as error:  # as its kernels are imported: they probe GPUs and Triton
        theirs = summarize(error)
    return {"ours": LAYERS[case.layer](model), "engine": theirs}


def served(row: Row, setup: Setup) -> Work:
    case: Any = row.call
    model = Model(case.H, case.K, case.lower_bound, BF16, case.state, str(setup.device))
    return (prefill if case.step == "prefill" else decode)(row, setup, model)


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
    nbytes = count * model.pool(1).nbytes
    wanted = max(LEAST_LAUNCHES, -(-setup.graph_bytes // nbytes))
    launches = min(setup.launches, wanted)
    tables = max(1, min(launches, setup.pool_bytes // nbytes))
    order = torch.randperm(tables * count, generator=torch.Generator().manual_seed(0)) + 1
    slots = [x.int().to(setup.device) for x in order.view(tables, count)]
    pool, rows = model.pool(tables * count + 1), model.tokens(count)
    batch, some = Batch(model, rows, case.lengths), slots[0][:CHECKED].long()
    before = pool[some]

    def make(layer: KimiLinear, tolerance: float) -> Contender:
        def run(at: Tensor) -> Tensor:
            return layer.decode(batch, pool, at)

        def checked() -> Results:
            o = run(slots[0])[:, :CHECKED].clone()
            after, pool[some] = pool[some], before
            return o, after

        return Contender(
            launch_all(run, [slots[i % tables] for i in range(launches)]), tolerance, checked, graph="only"
        )

    errors = functools.partial(checks.errors, exact_step(model, batch, before), ("o", "state"))
    found = contenders(layers(row, setup, model), make, TOLERANCE_FOR_FEW)
    shape = {"N": count, "H": case.H, "K": case.K, "state": "fp32" if case.state == torch.float32 else "bf16"}
    return Work(found, errors, shape, 2 * nbytes, launches)


def exact_step(model: Model, batch: Batch, states: Tensor) -> Results:
    """Outputs of the first sequences, and their states, by the reference in float64."""
    tensors = {**batch.qkv, "g": batch.g, "beta": batch.beta}
    tensors = {name: x.transpose(0, 1)[:CHECKED] for name, x in tensors.items()}
    exact = float64(tensors | {"A_log": model.A_log, "dt_bias": model.dt_bias, "initial_state": states})
    options: dict[str, Any] = {"lower_bound": model.lower_bound, "use_gate_in_kernel": True, "beta_is_logit": True}
    o, _ = fd.recurrent_kda(**exact, **options, backend="reference")
    return o.transpose(0, 1), exact["initial_state"]
