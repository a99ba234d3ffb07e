"""The layer between its projections: steps of decoding in one launch, training steps, kernels beside attention."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import flashdelta as fd
from tests.support.cases import BF16
from tests.support.fused import EPS
from tests.support.inputs import Source, make_call
from tests.support.oracle import TOLERANCE, TOLERANCE_FOR_FEW, float64

from . import contenders, decode, gate, workloads
from .decode import CHECKED, decode_bytes, decode_calls
from .gate import GRADIENT_TOLERANCE, PEER_TOLERANCE, Results, random_like
from .run import Contender, Program, Setup, Work, in_launches, main
from .workloads import LayerCall, Row

FLA_STEP = ("fla_conv_update", "fla_gate", "fla_decode", "fla_norm")
FLA_LAYER = ("fla_conv", "fla", "fla_norm")


def make(row: Row, setup: Setup) -> Work:
    made = {"step": step, "train": train, "convolution": around, "norm": around}
    return made[row.table](row, setup)


def functions_of(names: Sequence[str], setup: Setup) -> Any:
    """FLA's functions by name, or why one of them takes no part."""
    found = {name: setup.peers.get(name, "not asked for") for name in names}
    return next((x for x in found.values() if isinstance(x, str)), found)


def around_of(backend: str) -> str:
    """Hopper has no kernels of its own beside attention, nor for bare steps of float32 states."""
    return "auto" if backend == "hopper" else backend


def heads_and_channels(case: Any) -> tuple[list[tuple[int, int]], list[int]]:
    """Heads and channels per head of q, k and v; channels of each."""
    heads = [(case.H, case.K), (case.H, case.K), (case.HV, case.V)]
    return heads, [number * each for number, each in heads]


# ---- a step ----------------------------------------------------------------------------------------------------------


def step(row: Row, setup: Setup) -> Work:
    """Ours in one launch; ours one after another ("chain"); attention alone ("bare", checked as the chain); FLA's kernels."""
    case: Any = row.call
    call, slots = decode_calls(case.plain, setup)
    source, pool, beside = Source(BF16, setup.device, 1), call["initial_state"], around_of(setup.backend)
    x = torch.cat([call[name].flatten(1) for name in "qkv"], dim=1)
    weight = (source.normal(case.channels, case.W) / case.W).to(BF16)
    norm = (1.0 + 0.1 * source.normal(case.V)).to(BF16)
    z = source.normal(case.N, case.HV, case.V).to(BF16)
    # as engines have them: channels innermost
    windows = torch.empty(len(pool), case.W - 1, case.channels, dtype=BF16, device=setup.device).normal_().mT
    mixed, some = torch.empty_like(x)[:, None], slots[0][:CHECKED].long()
    before, parameters = (pool[some], windows[some]), {name: call[name] for name in ("A_log", "dt_bias", "lower_bound")}

    rows = {"x": x, "raw_g": call["g"][:, 0], "raw_beta": call["beta"][:, 0], "output_gate": z}

    def fused(at: Tensor) -> Tensor:
        states = {"state": pool, "conv_state": windows, "state_indices": at, "weight": weight, "norm_weight": norm}
        options = {"norm_eps": EPS, "output": call["output"], "backend": setup.backend}
        return fd.fused_kda_decode(**rows, **states, **parameters, **options)

    def bare(at: Tensor, mixed_qkv: Tensor = x) -> Tensor:
        rest = {name: y for name, y in call.items() if name not in ("q", "k", "v", "g", "beta")}
        g, beta = call["g"].flatten(1), call["beta"].flatten(1)
        return fd.recurrent_kda(mixed_qkv=mixed_qkv, g=g, beta=beta, **rest, ssm_state_indices=at, backend=beside)[0]

    def chain(at: Tensor) -> Tensor:
        fd.short_convolution(x[:, None], weight, state_pool=windows, state_indices=at, out=mixed, backend=beside)
        return fd.gated_rms_norm(bare(at, mixed[:, 0]), z[:, None], norm, eps=EPS, backend=beside)

    def contender(run: Callable, checked: Callable, tolerance: float, host: bool = True) -> Contender:
        def held() -> Results:
            """The first sequences' outputs and states; both pools are put back as they were."""
            o = checked(slots[0])[:CHECKED].clone()
            after = pool[some]
            pool[some], windows[some] = before
            return o, after

        return in_launches(run, slots, held, tolerance, host and case.N in (1, 32))

    def fla(functions: Mapping[str, Any]) -> Contender:
        channels = heads_and_channels(case)[1]
        weights = [w.contiguous() for w in weight.split(channels)]
        caches, run = contenders.fla_layer_step(functions, call, x.split(channels, dim=1), weights, z, norm)
        contenders.tune_anew()

        def checked(at: Tensor) -> Tensor:
            for cache, window in zip(caches, windows[at.long()].split(channels, dim=1)):
                cache[..., 1:] = window  # the oldest input is not looked at
            return run(at)

        return contender(run, checked, PEER_TOLERANCE)

    functions = functions_of(FLA_STEP, setup)
    made = {
        "ours": contender(fused, fused, decode.TOLERANCE),
        "chain": contender(chain, chain, TOLERANCE_FOR_FEW),
        "bare": contender(bare, chain, TOLERANCE_FOR_FEW),
        "fla": functions if isinstance(functions, str) else fla(functions),
    }
    tensors = {name: y[:CHECKED] for name, y in rows.items()} | {"weight": weight, "norm_weight": norm, **parameters}
    exact = float64(tensors | dict(zip(("state", "conv_state"), before)))
    own = torch.arange(len(some), device=setup.device)
    o = fd.fused_kda_decode(**exact, state_indices=own, norm_eps=EPS, backend="reference")
    errors = functools.partial(gate.errors, (o, exact["state"]), ("o", "state"))
    return Work(made, errors, {"bytes": decode_bytes(case)}, len(slots))


# ---- training --------------------------------------------------------------------------------------------------------

LEAVES = ("x", "weight", "g", "beta", "A_log", "dt_bias", "z")
"""Leaves whose gradients are checked, head by head. The gradient of the norm's weight, a sum over all heads, is not."""

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


def split_heads(x: Tensor, case: Any, dim: int = -1) -> list[Tensor]:
    """q, k and v of what a convolution left, by head."""
    heads, channels = heads_and_channels(case)
    return [part.unflatten(dim, head) for part, head in zip(x.split(channels, dim=dim), heads)]


def whole(t: Mapping[str, Tensor], options: Mapping[str, Any], case: Any, backend: str) -> Tensor:
    """Convolution, attention, norm."""
    beside, offsets = around_of(backend), options.get("cu_seqlens")
    mixed, _ = fd.short_convolution(t["x"], t["weight"], cu_seqlens=offsets, backend=beside)
    tensors = dict(zip("qkv", split_heads(mixed, case))) | {name: t[name] for name in PARAMETERS}
    o, *_ = fd.chunk_kda(**tensors, **options, backend=backend)
    return fd.gated_rms_norm(o, t["z"], t["norm_weight"], eps=EPS, backend=beside)


def part(case: Any, x: Tensor, name: str, head: int) -> Tensor:
    """A head's part of a leaf; the case has as many value heads."""
    if name not in ("x", "weight"):
        return gate.heads_of(x, name, case, head)
    dim = -1 if name == "x" else 0
    return torch.cat([y.select(-2 if name == "x" else 0, head) for y in split_heads(x, case, dim)], dim=dim)


def train(row: Row, setup: Setup) -> Work:
    case: Any = row.call
    t, options, grad = layer_inputs(case, setup.device)
    for x in t.values():
        x.requires_grad_()
    one, norm = replace(case, H=1, HV=1), t["norm_weight"].detach().double()
    want = gate.true_gradients(
        gate.spread(gate.CHECKED_HEADS, case.H),
        lambda head: {name: part(case, t[name], name, head) for name in LEAVES},
        lambda leaves: whole({**leaves, "norm_weight": norm}, options, one, "reference"),
        lambda head: gate.heads_of(grad, "v", case, head),
    )

    def contender(forward: Callable[[], Tensor], leaves: Mapping[str, Sequence[Tensor]], tolerance: float) -> Contender:
        """`leaves`: by name the parts that a contender has side by side."""
        flat = [x for parts in leaves.values() for x in parts]

        def both() -> Results:
            return torch.autograd.grad(forward(), flat, grad)

        def checked() -> Results:
            found = iter(both())
            joined = ([next(found) for _ in leaves[name]] for name in leaves)
            return [torch.cat(x, dim=-1 if x[0].dim() > 2 else 0) for x in joined]

        return Contender(both, tolerance, checked, more={"forward_ms": forward}, memory=True)

    def fla(functions: Mapping[str, Any]) -> Contender:
        """FLA's kernels as its layer calls them: q, k and v are tensors of their own, with filters of their own."""
        heads, channels = heads_and_channels(case)
        rows, filters = (
            [y.detach().contiguous().requires_grad_() for y in t[name].split(channels, dim=dim)]
            for name, dim in (("x", -1), ("weight", 0))
        )
        parameters, given = {name: t[name] for name in PARAMETERS}, contenders.shared(options)

        def forward() -> Tensor:
            mixed = [
                functions["fla_conv"](x, w, activation="silu", cu_seqlens=options.get("cu_seqlens"))[0].unflatten(-1, h)
                for x, w, h in zip(rows, filters, heads)
            ]
            o = functions["fla"](**dict(zip("qkv", mixed)), **parameters, **given)[0]
            return functions["fla_norm"](o, t["z"], t["norm_weight"], bias=None, activation="sigmoid", eps=EPS)

        parts = {"x": rows, "weight": filters}
        return contender(forward, {name: parts.get(name, [x]) for name, x in t.items()}, PEER_TOLERANCE)

    functions, own = functions_of(FLA_LAYER, setup), {name: [x] for name, x in t.items()}
    made: dict[str, Any] = {
        "ours": contender(lambda: whole(t, options, case, setup.backend), own, GRADIENT_TOLERANCE),
        "fla": functions if isinstance(functions, str) else fla(functions),
    }

    def errors(results: Results) -> gate.Errors:
        named = dict(zip(t, results))
        return gate.gradient_errors(want, functools.partial(part, case), [named[name] for name in LEAVES])

    return Work(made, errors)


# ---- kernels beside attention ----------------------------------------------------------------------------------------


def around(row: Row, setup: Setup) -> Work:
    """The convolution or the norm, forward, beside FLA's."""
    case: Any = row.call
    convolves, source = case.part == "convolution", Source(BF16, setup.device, 4)
    width = case.channels if convolves else case.V
    shape = (case.batch, case.tokens, *((width,) if convolves else (case.HV, width)))
    x, z = (source.normal(*shape).to(BF16) for _ in range(2))
    weight = (source.normal(width, case.W) / case.W if convolves else source.normal(width)).to(BF16)

    def ours(x: Tensor = x, z: Tensor = z, weight: Tensor = weight, backend: str = around_of(setup.backend)) -> Results:
        if convolves:
            return (fd.short_convolution(x, weight, backend=backend)[0],)
        return (fd.gated_rms_norm(x, z, weight, eps=EPS, backend=backend),)

    def fla(function: Callable) -> Contender:
        run = functools.partial(function, x, weight, activation="silu")
        if not convolves:
            run = functools.partial(function, x, z, weight, bias=None, activation="sigmoid", eps=EPS)
        return Contender(lambda: (run()[0] if convolves else run(),), modes=("eager", "graph"))

    made = {
        "ours": Contender(ours, TOLERANCE[BF16], modes=("eager", "graph")),
        "fla": setup.peer("fla_conv" if convolves else "fla_norm", fla),
    }
    want = ours(x.double(), z.double(), weight.double(), "reference")
    return Work(made, functools.partial(gate.errors, want, ("o",)))


PEERS = tuple(dict.fromkeys((*FLA_STEP, *FLA_LAYER)))
PROGRAM = Program("layer", workloads.LAYER, make, peers=PEERS, grad=torch.enable_grad)

if __name__ == "__main__":
    sys.exit(main(PROGRAM))
