"""The exact reference, in PyTorch: any device, any dtype up to float64, differentiable."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..problem.problem import BACKWARD, Problem, Tensors
from .chunk import chunk_kda
from .convolution import short_convolution
from .decode import commit, decode_kda
from .fused_decode import fused_kda_decode
from .norm import gated_rms_norm
from .prefill import prefill
from .states import without_null, writing
from .wy import chunk_bwd_wy_dqkg


class Computation:
    """A plan that launches nothing: a function computes the results, of these tensors."""

    lasting = False

    def __init__(self, function: Callable[[Problem, Tensors], dict[str, Tensor]], problem: Problem, t: Tensors):
        self.function, self.problem, self.t = function, problem, t

    def locate(self, *call: object) -> None: ...

    def execute(self, *call: object) -> dict[str, Tensor]:
        with _full_precision(self.t.device):
            return self.function(self.problem, without_null(self.problem, self.t))


def _full_precision(device: torch.device) -> contextlib.AbstractContextManager:
    """Float32 means float32: autocast would run matrix products in 16 bits."""
    if torch.amp.is_autocast_available(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def build(problem: Problem, t: Tensors) -> Computation:
    """The plan of a validated call."""
    return Computation(OPERATIONS[problem.operation], problem, t)


FORWARDS: dict[str, Callable[..., tuple[Tensor, Tensor | None, Tensor | None]]] = {
    **dict(chunk=chunk_kda, recurrent=decode_kda, decode=decode_kda, fused_decode=fused_kda_decode),
    **dict(gated_rms_norm=gated_rms_norm, short_convolution=short_convolution),
}


def forward(problem: Problem, t: Tensors) -> dict[str, Tensor]:
    o, final_state, h = FORWARDS[problem.operation](problem, t)
    found = {"o": o, "final_state": final_state, "h": h}
    for name, x in t.caller_outputs().items():
        with writing(x):
            found[name] = x.copy_(found[name])
    return {name: x for name, x in found.items() if x is not None}


@contextlib.contextmanager
def _autograd_inside_an_operator() -> Iterator[None]:
    """Lets an operator's kernel record a graph where the dispatcher has passed autograd: inside a dispatch mode (a FLOP
    counter, selective checkpointing, `opcheck`) nothing would be recorded."""
    with torch._C._PreserveDispatchKeyGuard():
        torch._C._dispatch_tls_set_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality, False)
        yield


def backward(problem: Problem, t: Tensors) -> dict[str, Tensor]:
    """Gradients by input: runs the forward again under autograd, then differentiates it. Keeps nothing."""
    grads = (t.do, t.dht)
    problem, t = replace(problem, operation=problem.operation.removesuffix(BACKWARD)), replace(t, do=None, dht=None)
    with _autograd_inside_an_operator(), torch.enable_grad():
        leaves = {role: x.detach().requires_grad_(x.is_floating_point()) for role, x in t.present().items()}
        results = forward(problem, type(t)(**leaves))
        inputs = {role: x for role, x in leaves.items() if x.requires_grad}
        # without a token nothing but the state passes through
        pairs = [(x, d) for x, d in zip((results["o"], results.get("final_state")), grads) if x is not None]
        reached = [(x, d) for x, d in pairs if x.requires_grad]
        found: Sequence[Tensor | None] = [None] * len(inputs)
        if reached:
            outputs, incoming = zip(*reached)
            found = torch.autograd.grad(outputs, list(inputs.values()), incoming, allow_unused=True)
    return {role: torch.zeros_like(x) if d is None else d for (role, x), d in zip(inputs.items(), found)}


OPERATIONS: dict[str, Callable[..., dict[str, Tensor]]] = {
    **dict(dict.fromkeys(FORWARDS, forward), commit=commit, prefill=prefill, wy=chunk_bwd_wy_dqkg),
    **{name + BACKWARD: backward for name in FORWARDS if name not in ("recurrent", "decode", "fused_decode")},
}
