"""Training steps, forward and backward, beside FLA and cuDNN, and the stage `chunk_bwd_wy_dqkg` beside FLA's kernel."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import flashdelta as fd
from tests.support import wy as stage
from tests.support.cases import BF16
from tests.support.inputs import make_call

from . import contenders, gate, workloads
from .gate import GRADIENT_TOLERANCE, LEAVES, PEER_TOLERANCE, Results
from .run import Contender, Program, Setup, Work, main
from .workloads import Row


def make(row: Row, setup: Setup) -> Work:
    return wy(row, setup) if row.table == "wy" else train(row, setup)


def train(row: Row, setup: Setup) -> Work:
    case: Any = row.call
    call = make_call(case, BF16, setup.device)
    for name in {*LEAVES} & call.keys():
        call[name].requires_grad_()
    grad_o = gate.random_like(call["v"])

    def part(x: Tensor, name: str, head: int) -> Tensor:
        return gate.heads_of(x, name, case, head)

    want = gate.true_gradients(
        gate.spread(gate.CHECKED_HEADS, case.H),
        lambda head: {name: part(call[name], name, head) for name in LEAVES if name in call},
        lambda leaves: fd.chunk_kda(**{**call, **leaves, "backend": "reference"})[0],
        lambda head: part(grad_o, "v", head),
    )

    def contender(op: Callable, tolerance: float, inputs: Mapping[str, Any] = call) -> Contender:
        leaves = [inputs[name] for name in LEAVES if name in inputs]

        def both() -> Results:
            return torch.autograd.grad(op()[0], leaves, grad_o)

        return Contender(both, tolerance, more={"forward_ms": lambda: op()[0]}, memory=True)

    def cudnn(op: Any) -> dict[str, Contender | str]:
        """Its backward takes ready inputs only: "cudnn" makes them in each call, "cudnn_ready" starts from them."""
        refusal = contenders.cudnn_refusal("cudnn", case, training=True)
        if refusal:
            return {"cudnn": refusal}
        run = contenders.bind_cudnn(op, "cudnn", call, case)
        ready = {name: x.detach().requires_grad_() for name, x in contenders.made_ready(call, case).items()}
        whole = contender(lambda: run(contenders.made_ready(call, case)), PEER_TOLERANCE)
        alone = contender(lambda: run(ready), PEER_TOLERANCE, ready)
        # its gradients are of other inputs, and so are checked where they reach ours
        return {"cudnn": whole, "cudnn_ready": replace(alone, checked=whole.call, memory=False)}

    def attn_gym(op: Any) -> Contender | str:
        run = contenders.attn_gym(op, call, case)
        return run if isinstance(run, str) else contender(run, PEER_TOLERANCE)

    ours = functools.partial(fd.chunk_kda, **call, backend=setup.backend)
    found = setup.peer("cudnn", cudnn)
    made: dict[str, Any] = {
        "ours": contender(ours, GRADIENT_TOLERANCE),
        "ours_kept": contender(functools.partial(ours, disable_recompute=True), GRADIENT_TOLERANCE),
        "fla": setup.peer("fla", lambda f: contender(functools.partial(f, **contenders.shared(call)), PEER_TOLERANCE)),
        **({"cudnn": found} if isinstance(found, str) else found),
        "attn_gym": setup.peer("attn_gym", attn_gym),
    }
    return Work(made, functools.partial(gate.gradient_errors, want, part))


def wy(row: Row, setup: Setup) -> Work:
    """Without autograd, beside FLA's kernel on the same tensors."""
    call = stage.make_wy(row.call, BF16, str(setup.device))
    want = [*stage.exact(call).values()]
    ours = functools.partial(fd.kernels.chunk_bwd_wy_dqkg, **call, backend=setup.backend)
    both = ("eager", "graph")
    made = {
        "ours": Contender(ours, 1e-2, modes=both, memory=True),
        "fla": setup.peer("fla_wy", lambda f: Contender(contenders.fla_wy(f, call), modes=both, memory=True)),
    }
    return Work(made, functools.partial(gate.errors, want, stage.NAMES))


PROGRAM = Program("train", workloads.TRAIN, make, peers=("fla", "cudnn", "attn_gym", "fla_wy"), grad=torch.enable_grad)

if __name__ == "__main__":
    sys.exit(main(PROGRAM))
