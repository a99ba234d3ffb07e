"""The whole layer but its projections: a step in one launch, training steps, the kernels around attention.

Beside a step stand ours one after another ("chain"), attention alone ("bare"), and FLA's kernels as its layer calls them: a
convolution each for q, k and v, the gate by itself ("fla") or in its step ("fla_gated"), step, norm.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import flashdelta as fd

from ...runtime.call import check
from ...runtime.torch_ops import GRADIENTS, operator_of
from ...testing.cases import BF16
from ...testing.fused import EPS, FusedStep
from ...testing.inputs import Source, make_call
from ...testing.oracle import TOLERANCE, TOLERANCE_FOR_FEW, float64
from . import checks, profiling
from .contenders import (
    CHECKED,
    DECODE_TOLERANCE,
    FLA_DECODE,
    LEAST_LAUNCHES,
    PEER_TOLERANCE,
    Contender,
    Results,
    Setup,
    Work,
    decode_bytes,
    decode_calls,
    decode_shape,
    explained,
    forward_bytes,
    launch_all,
    shared,
    sizes,
)
from .training import input_bytes, random_like
from .workloads import LayerCall, Row, value

FLA_STEP = ("fla_conv_update", "fla_gate", "fla_decode", "fla_norm")
FLA_LAYER = ("fla_conv", "fla", "fla_norm")
PEERS = tuple(dict.fromkeys((*FLA_STEP, *FLA_LAYER)))

FLA_NORM: dict[str, Any] = {"bias": None, "activation": "sigmoid", "eps": EPS}
Run = Callable[[Tensor], Tensor]
"""A step on the slots that it is given; returns `o [N, 1, HV, V]`."""

PROFILED = ((8, 32), (128, 32))
"""`(N, H)` of the steps whose kernels are listed."""


def layer_bytes(call: Any) -> int:
    """That can't but be moved: of a step the states, read and written; of other calls the inputs and outputs."""
    if isinstance(call, FusedStep):
        return decode_bytes(call)
    if call.part in ("all", "attention"):
        return (3 if call.part == "all" else 1) * layer_forward_bytes(call)
    moved = {"convolution": (2, 3), "norm": (3, 5)}[call.part][call.backward]
    return moved * call.batch * call.tokens * width_of(call) * 2


def layer_forward_bytes(call: LayerCall) -> int:
    """q, k, v, g and the output gate read, y written, in bfloat16."""
    return forward_bytes(call) + 2 * call.batch * call.tokens * call.HV * call.V


def width_of(call: LayerCall) -> int:
    """Channels of a token."""
    return call.channels if call.part == "convolution" else call.HV * call.V


def heads_and_channels(case: LayerCall | FusedStep) -> tuple[tuple[tuple[int, int], ...], list[int]]:
    """Of q, k and v: heads and channels of each; channels of all."""
    heads = (case.H, case.K), (case.H, case.K), (case.HV, case.V)
    return heads, [number * each for number, each in heads]


def layer(row: Row, setup: Setup) -> Work:
    case: Any = row.call
    if isinstance(case, FusedStep):
        return LayerStep(row, setup).work()
    return {"all": training, "attention": prefill}.get(case.part, around)(row, setup)


def fla_functions(names: Sequence[str], row: Row, setup: Setup) -> dict[str, Any] | str:
    """FLA's by name, or why one of them takes no part in this row."""
    found = {name: setup.found(name, row) for name in names}
    return next((x for x in found.values() if isinstance(x, str)), found)


FLA_TUNED = ("causal_conv1d_update_kernel", "kda_gate_fwd_kernel", "layer_norm_gated_fwd_kernel")
"""Kernels of FLA's step of which it keeps the form that was fastest for the first batch, whatever its size."""


TUNED_MS = {"warmup": 5, "rep": 20}
"""Of each form of them. Triton's own 25 and 100 would be half of the time that a row takes; a kernel of these runs for some
microseconds, so in 20 ms by the hundred."""


def tune_anew() -> None:
    """Lets FLA choose them for the batch that comes next: at 128 sequences the one for 1 takes 14 times as long."""
    from triton.runtime.autotuner import Autotuner  # Triton is for Linux only
    from triton.testing import do_bench

    for tuner in [x for x in gc.get_objects() if issubclass(type(x), Autotuner)]:
        if tuner.base_fn.__name__ in FLA_TUNED:
            tuner.cache.clear()
            tuner.cache_results = False
            tuner.do_bench = functools.partial(do_bench, **TUNED_MS)


# ---- a step ----------------------------------------------------------------------------------------------------------


class LayerStep:
    """Rows of q, k and v before the convolution; pools of windows and states, each launch with slots of its own."""

    def __init__(self, row: Row, setup: Setup):
        self.row, self.setup = row, setup
        step: Any = row.call
        self.step: FusedStep = step
        self.call, self.slots = decode_calls(step.plain, setup)
        device, source = setup.device, Source(BF16, setup.device, 1)
        self.x = torch.cat([self.call[name].flatten(1) for name in "qkv"], dim=1)
        self.weight = (source.normal(step.channels, step.W) / step.W).to(BF16)
        self.norm_weight = (1.0 + 0.1 * source.normal(step.V)).to(BF16)
        self.z = source.normal(step.N, step.HV, step.V).to(BF16)
        self.pool = self.call["initial_state"]
        shape = len(self.pool), step.W - 1, step.channels
        # as engines have them: channels innermost
        self.windows = torch.empty(shape, dtype=BF16, device=device).normal_().mT
        self.mixed = torch.empty_like(self.x)[:, None]
        self.gate = {name: self.call[name] for name in ("A_log", "dt_bias", "lower_bound")}
        self.some = self.slots[0][:CHECKED].long()
        self.before = self.pool[self.some], self.windows[self.some]

    @property
    def around(self) -> str:
        return around_of(self.setup.backend)

    def fused(self, slots: Tensor) -> Tensor:
        return fd.fused_kda_decode(
            *(self.x, self.weight, self.windows, self.call["g"][:, 0], self.call["beta"][:, 0]),
            *(self.gate["A_log"], self.gate["dt_bias"], slots, self.pool, self.z, self.norm_weight),
            lower_bound=self.gate["lower_bound"],
            norm_eps=EPS,
            output=self.call["output"],
            backend=self.setup.backend,
        )

    def chain(self, slots: Tensor) -> Tensor:
        self.convolved(slots)
        o = self.bare(slots, self.mixed[:, 0])
        return fd.gated_rms_norm(o, self.z[:, None], self.norm_weight, eps=EPS, backend=self.around)

    def convolved(self, slots: Tensor) -> None:
        pool = {"state_pool": self.windows, "state_indices": slots}
        fd.short_convolution(self.x[:, None], self.weight, **pool, out=self.mixed, backend=self.around)

    def bare(self, slots: Tensor, mixed: Tensor) -> Tensor:
        """Attention alone, of rows that a convolution left."""
        step = {name: x for name, x in self.call.items() if name not in ("q", "k", "v", "g", "beta")}
        g, beta = self.call["g"].flatten(1), self.call["beta"].flatten(1)
        options = {"ssm_state_indices": slots, "backend": self.around}
        return fd.recurrent_kda(mixed_qkv=mixed, g=g, beta=beta, **step | options)[0]

    def fla(self, functions: Mapping[str, Any], gate_inside: bool) -> tuple[Run, Run]:
        """Its kernels as its layer calls them, and the same from the windows of the pool. Its own windows are rows of a batch,
        `[N, D, W]`, that no index names."""
        step, call = self.step, self.call
        heads, channels = heads_and_channels(step)
        caches = [self.x.new_zeros(step.N, D, step.W) for D in channels]
        weights = [w.contiguous() for w in self.weight.split(channels)]
        apart = ("q", "k", "v") if gate_inside else ("q", "k", "v", "g", "A_log", "dt_bias")
        given = {name: call[name] for name in FLA_DECODE if name in call and name not in apart}
        given |= {"lower_bound": call["lower_bound"]} if gate_inside else {}

        def run(slots: Tensor) -> Tensor:
            rows = [
                functions["fla_conv_update"](x[:, None], cache, weight=weight, activation="silu")[0].unflatten(-1, head)
                for x, cache, weight, head in zip(self.x.split(channels, dim=1), caches, weights, heads)
            ]
            g = {} if gate_inside else {"g": functions["fla_gate"](call["g"], **self.gate)}
            functions["fla_decode"](
                **dict(zip("qkv", rows)),
                **given,
                **g,
                use_gate_in_kernel=gate_inside,
                use_beta_sigmoid_in_kernel=True,
                inplace_final_state=True,
                ssm_state_indices=slots,
                out=call["output"],
            )
            return functions["fla_norm"](call["output"], self.z[:, None], self.norm_weight, **FLA_NORM)

        def checked(slots: Tensor) -> Tensor:
            for cache, window in zip(caches, self.windows[slots.long()].split(channels, dim=1)):
                cache[..., 1:] = window  # the oldest input is not looked at
            return run(slots)

        return run, checked

    def contender(self, run: Run, checked: Run, tolerance: float) -> Contender:
        def held() -> Results:
            """The first sequences' outputs and states; both pools are put back as they were."""
            o = checked(self.slots[0])[:CHECKED].clone()
            after = self.pool[self.some]
            self.pool[self.some], self.windows[self.some] = self.before
            return o, after

        def describe(runs: Sequence[profiling.KernelRun], calls: int) -> list[dict]:
            return profiling.times(runs, calls * len(self.slots))

        host = {"host_us": lambda: run(self.slots[0])} if self.row.host else {}
        listed = (self.step.N, self.step.H) in PROFILED
        return Contender(
            launch_all(run, self.slots),
            tolerance,
            held,
            graph="only",
            host=host,
            describe=describe if listed else None,
        )

    def work(self) -> Work:
        """The bare step is checked as what it is in the chain."""
        functions = fla_functions(FLA_STEP, self.row, self.setup)
        tune_anew()
        peers: dict[str, Contender | str] = {}
        for name, gate_inside in (("fla", False), ("fla_gated", True)):
            if isinstance(functions, str):
                peers[name] = functions
            else:
                peers[name] = self.contender(*self.fla(functions, gate_inside), PEER_TOLERANCE)
        contenders = {
            "ours": self.contender(self.fused, self.fused, DECODE_TOLERANCE),
            "chain": self.contender(self.chain, self.chain, TOLERANCE_FOR_FEW),
            "bare": self.contender(lambda slots: self.bare(slots, self.x), self.chain, TOLERANCE_FOR_FEW),
            **peers,
        }
        errors = functools.partial(checks.errors, self.exact(), ("o", "state"))
        return Work(contenders, errors, decode_shape(self.step), layer_bytes(self.step), len(self.slots))

    def exact(self) -> Results:
        """Of the first sequences, by the reference in float64."""
        call = self.call
        tensors = {"x": self.x, "raw_g": call["g"][:, 0], "raw_beta": call["beta"][:, 0], "output_gate": self.z}
        tensors = {name: x[:CHECKED] for name, x in tensors.items()}
        tensors |= {"weight": self.weight, "norm_weight": self.norm_weight, **self.gate}
        exact = float64(tensors | dict(zip(("state", "conv_state"), self.before)))
        slots = torch.arange(len(self.some), device=self.x.device)
        o = fd.fused_kda_decode(**exact, state_indices=slots, norm_eps=EPS, backend="reference")
        return o, exact["state"]


# ---- training --------------------------------------------------------------------------------------------------------

LEAVES = ("x", "weight", "g", "beta", "A_log", "dt_bias", "z")
"""Whose gradients are checked, head by head; that of the norm's weight, a sum over all heads, is taken and not checked."""

PARAMETERS = ("g", "beta", "A_log", "dt_bias")


def layer_inputs(case: LayerCall, device: torch.device) -> tuple[dict[str, Tensor], dict[str, Any], Tensor]:
    """Tensors of the layer, options of `chunk_kda`, and the gradient of y."""
    call, source = make_call(case, BF16, device), Source(BF16, device, 2)
    q, k, v, g, beta = (call.pop(name) for name in ("q", "k", "v", "g", "beta"))
    tensors = {"x": torch.cat([x.flatten(2) for x in (q, k, v)], dim=2), "g": g, "beta": beta}
    tensors |= {"weight": (source.normal(case.channels, case.W) / case.W).to(BF16), "z": random_like(v, 3)}
    tensors |= {name: call.pop(name) for name in ("A_log", "dt_bias")}
    tensors["norm_weight"] = (1.0 + 0.1 * source.normal(case.V)).to(BF16)
    return tensors, call, random_like(v)


def heads_of_mixed(x: Tensor, case: LayerCall, dim: int = -1) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of what a convolution left, by head."""
    heads, channels = heads_and_channels(case)
    q, k, v = (part.unflatten(dim, head) for part, head in zip(x.split(channels, dim=dim), heads))
    return q, k, v


def whole(t: Mapping[str, Tensor], options: Mapping[str, Any], case: LayerCall, backend: str) -> Tensor:
    """Convolution, attention, norm."""
    offsets = options.get("cu_seqlens")
    mixed, _ = fd.short_convolution(t["x"], t["weight"], cu_seqlens=offsets, backend=around_of(backend))
    tensors = dict(zip("qkv", heads_of_mixed(mixed, case))) | {name: t[name] for name in PARAMETERS}
    o, *_ = fd.chunk_kda(**tensors, **options, backend=backend)
    return fd.gated_rms_norm(o, t["z"], t["norm_weight"], eps=EPS, backend=around_of(backend))


def around_of(backend: str) -> str:
    """Hopper has no kernels of its own for what lies around attention, nor for steps of attention alone of float32 states."""
    return "auto" if backend == "hopper" else backend


def parts_of(t: Mapping[str, Tensor], case: LayerCall, head: int) -> dict[str, Tensor]:
    """The tensors of one head of a case with as many value heads."""
    found = {}
    for name in LEAVES:
        if name in ("x", "weight"):
            dim = -1 if name == "x" else 0
            each = (part.select(-2 if name == "x" else 0, head) for part in heads_of_mixed(t[name], case, dim))
            found[name] = torch.cat([*each], dim=dim)
        else:
            found[name] = checks.heads_of(t[name], name, case, head)
    return found


def true_layer_gradients(
    t: Mapping[str, Tensor], options: Mapping[str, Any], grad: Tensor, case: LayerCall
) -> dict[int, dict[str, Tensor]]:
    """By checked head and leaf, from float64 autograd of the reference."""
    found = {}
    for head in checks.checked_heads(case):
        parts = parts_of({name: x.detach() for name, x in t.items()}, case, head)
        leaves = {name: x.double().contiguous().requires_grad_() for name, x in parts.items()}
        one = replace(case, H=1, HV=1)
        y = whole(leaves | {"norm_weight": t["norm_weight"].double()}, options, one, "reference")
        own = checks.heads_of(grad, "v", case, head).double()
        found[head] = dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), own)))
    return found


def trained(
    forward: Callable[[], Tensor], leaves: Mapping[str, Sequence[Tensor]], grad: Tensor, tolerance: float
) -> Contender:
    """`leaves`: by name of ours the parts that a contender has of it, side by side."""
    flat = [x for parts in leaves.values() for x in parts]

    def both() -> Results:
        return torch.autograd.grad(forward(), flat, grad)

    def checked() -> Results:
        found = iter(both())
        return [
            torch.cat([next(found) for _ in parts], dim=-1 if parts[0].dim() > 2 else 0) for parts in leaves.values()
        ]

    return Contender(both, tolerance, checked, more={"forward_ms": forward}, memory=True, describe=profiling.times)


def fla_training(
    functions: Mapping[str, Any], t: Mapping[str, Tensor], options: dict, case: LayerCall, grad: Tensor
) -> Contender:
    """As its layer: q, k and v are tensors of their own, with filters of their own."""
    heads, channels = heads_and_channels(case)
    rows, filters = (
        [part.detach().contiguous().requires_grad_() for part in t[name].split(channels, dim=dim)]
        for name, dim in (("x", -1), ("weight", 0))
    )
    offsets, given = options.get("cu_seqlens"), shared(options)
    parameters = {name: t[name] for name in PARAMETERS}

    def forward() -> Tensor:
        mixed = [
            functions["fla_conv"](x, w, activation="silu", cu_seqlens=offsets)[0].unflatten(-1, head)
            for x, w, head in zip(rows, filters, heads)
        ]
        o = functions["fla"](**dict(zip("qkv", mixed)), **parameters, **given)[0]
        return functions["fla_norm"](o, t["z"], t["norm_weight"], **FLA_NORM)

    parts = {"x": rows, "weight": filters}
    return trained(forward, {name: parts.get(name, [x]) for name, x in t.items()}, grad, PEER_TOLERANCE)


def training(row: Row, setup: Setup) -> Work:
    case: Any = row.call
    t, options, grad = layer_inputs(case, setup.device)
    for x in t.values():
        x.requires_grad_()
    want = true_layer_gradients(t, options, grad, case)
    functions = fla_functions(FLA_LAYER, row, setup)
    own = {name: [x] for name, x in t.items()}
    contenders = {
        "ours": trained(lambda: whole(t, options, case, setup.backend), own, grad, checks.GRADIENT_TOLERANCE),
        "fla": functions if isinstance(functions, str) else fla_training(functions, t, options, case, grad),
    }

    def errors(results: Results) -> checks.Errors:
        found = [parts_of(dict(zip(t, results)), case, head) for head in want]
        exact, ours = (
            [torch.cat([part[name].flatten() for part in parts]) for name in LEAVES] for parts in (want.values(), found)
        )
        return checks.errors(exact, LEAVES, ours)

    facts = {
        "reference": f"float64 autograd, heads {', '.join(map(str, checks.checked_heads(case)))}",
        "backend": setup.backend,
        "result_bytes": sum(x.nbytes for x in t.values()),
    }
    given = input_bytes({**t}, grad)
    return Work(contenders, errors, sizes(case), layer_bytes(case), input_bytes=given, facts=facts)


# ---- prefill ---------------------------------------------------------------------------------------------------------


def prefill(row: Row, setup: Setup) -> Work:
    """Attention with the norm behind it, and without ("bare"): what a norm in the last kernel could gain at most."""
    case: Any = row.call
    call = {**make_call(case, BF16, setup.device), "backend": setup.backend}
    z, weight = random_like(call["v"], 3), torch.ones(case.V, dtype=BF16, device=setup.device)

    def normed() -> Results:
        return (fd.gated_rms_norm(fd.chunk_kda(**call)[0], z, weight, eps=EPS, backend=around_of(setup.backend)),)

    heads = checks.checked_heads(case)
    picked = {name: x[:, :, heads] for name, x in call.items() if name in ("q", "k", "v", "g", "beta")}
    picked |= {name: call[name].view(case.HV, -1)[heads].flatten() for name in ("A_log", "dt_bias")}
    o, *_ = fd.chunk_kda(**float64({**call, **picked}) | {"backend": "reference"})
    exact = fd.gated_rms_norm(o, z[:, :, heads].double(), weight.double(), eps=EPS, backend="reference")

    def errors(results: Results) -> checks.Errors:
        return checks.errors((exact,), ("o",), (results[0][:, :, heads],))

    contenders = {
        "ours": Contender(normed, 2 * TOLERANCE[BF16], graph="too"),
        "bare": Contender(lambda: (fd.chunk_kda(**call)[0],), 2 * TOLERANCE[BF16], normed),
    }
    facts = explained(fd.chunk_kda, {name: x for name, x in call.items() if name != "backend"}, setup.backend)
    return Work(contenders, errors, sizes(case), layer_bytes(case), facts=facts)


# ---- kernels around attention ----------------------------------------------------------------------------------------

COLD_BYTES = 2**29
"""Of copies of the inputs: more than any L2 cache holds."""


def around(row: Row, setup: Setup) -> Work:
    """One kernel, forward or backward with the sums of its weights' gradients, beside a copy of as many bytes, read and
    written. A graph's launches take copies of the inputs in turns, so none is in the cache."""
    case: Any = row.call
    copies = max(1, min(-(-COLD_BYTES // layer_bytes(case)), LEAST_LAUNCHES, setup.launches))
    source = Source(BF16, setup.device, 4)
    width = width_of(case) if case.part == "convolution" else case.V
    shape = (case.batch, case.tokens, *((width,) if case.part == "convolution" else (case.HV, case.V)))
    filters = (source.normal(width, case.W) / case.W if case.part == "convolution" else source.normal(width)).to(BF16)
    inputs = [[torch.empty(shape, dtype=BF16, device=setup.device).normal_() for _ in range(3)] for _ in range(copies)]

    def forward(x: Tensor, z: Tensor, weight: Tensor, backend: str) -> Tensor:
        if case.part == "convolution":
            return fd.short_convolution(x, weight, backend=backend)[0]
        return fd.gated_rms_norm(x, z, weight, eps=EPS, backend=backend)

    backend = around_of(setup.backend)
    calls = [made_backward(case, *each, filters, backend) for each in inputs] if case.backward else []

    def one(i: int) -> Results:
        return calls[i]() if case.backward else (forward(*inputs[i][:2], filters, backend),)

    def all_of_them() -> Results:
        for i in range(max(copies, LEAST_LAUNCHES)):
            one(i % copies)
        return ()

    x, z, grad = (y.double() for y in inputs[0])
    if case.backward:
        leaves = [y.requires_grad_() for y in ((x, z) if case.part == "norm" else (x,))]
        weight = filters.double().requires_grad_()
        want = torch.autograd.grad(forward(x, z, weight, "reference"), [*leaves, weight], grad)
    else:
        want = (forward(x, z, filters.double(), "reference"),)
    names = ("x", "z", "weight")[: len(want)] if len(want) == 3 else ("x", "weight") if case.backward else ("o",)
    errors = functools.partial(checks.errors, want, names)
    rows = [torch.empty(layer_bytes(case) // 4, dtype=BF16, device=setup.device).normal_() for _ in range(copies)]

    def copy_all() -> Results:
        for i in range(max(copies, LEAST_LAUNCHES)):
            rows[i % copies].clone()
        return ()

    contenders = {
        name: Contender(run, TOLERANCE[BF16], lambda: one(0), graph="only")
        for name, run in (("ours", all_of_them), ("copy", copy_all))  # a copy has nothing of its own to check
    }
    shape_of = {"part": case.part, "T": case.tokens, "backward": case.backward}
    return Work(contenders, errors, shape_of, layer_bytes(case), max(copies, LEAST_LAUNCHES))


def made_backward(
    case: LayerCall, x: Tensor, z: Tensor, grad: Tensor, weight: Tensor, backend: str
) -> Callable[[], Results]:
    """The backward pass by itself, as the operator of a traced call has it: a graph can capture it alone."""
    convolves = case.part == "convolution"
    problem, t = (
        check(fd.short_convolution, x, weight) if convolves else check(fd.gated_rms_norm, x, z, weight, eps=EPS)
    )
    operator = operator_of(problem, t)
    gradients = GRADIENTS[operator.name]
    incoming = (grad, x.new_empty(0)) if convolves else (grad,)
    arguments = operator.arguments(problem, t, backend)
    return lambda: [dx for dx in gradients.call(*incoming, *arguments) if dx.numel() > 0]


def layer_extra(row: dict, document: dict) -> dict:
    """Of a training step the memory beyond inputs and results, and of a prefill the share of its norm."""
    found: dict[str, Any] = {}
    if "result_bytes" in row:
        peaks = {name: (row.get(name) or {}).get("peak_above_bytes") for name in ("ours", "fla")}
        found["beyond_bytes"] = {name: None if x is None else x - row["result_bytes"] for name, x in peaks.items()}
    without = value(row, "bare.ms.median/ours.ms.median")
    if row["table"] == "attention" and without is not None:
        found["norm_share"] = 1.0 - without
    return found
