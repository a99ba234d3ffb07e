"""The PyTorch reference as a backend."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from .. import reference
from ..problem.decode_spec import CommitSpec, CommitTensors
from ..problem.problem import Incoming, Problem, Results, Tensors
from ..problem.split import NO_COSTS, planned_parts
from ..program.cache import Recorder

IMPLEMENTATIONS = {
    "chunk": reference.chunk_kda,
    "recurrent": reference.recurrent_kda,
    "decode": reference.decode_kda,
}


@contextlib.contextmanager
def _autograd_inside_an_operator() -> Iterator[None]:
    """Lets an operator's kernel record a graph where the dispatcher has passed autograd: inside a dispatch mode (a FLOP
    counter, selective checkpointing, `opcheck`) nothing would be recorded."""
    with torch._C._PreserveDispatchKeyGuard():
        torch._C._dispatch_tls_set_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality, False)
        yield


class ReferenceBackend:
    name = "reference"
    summary = "exact PyTorch, any device, differentiable"

    def obstacle(self, problem: Problem | CommitSpec, device: torch.device) -> str | None:
        return None

    def drawback(self, problem: Problem | CommitSpec, device: torch.device) -> str | None:
        return None

    def run(self, problem: Problem, t: Tensors, out: torch.Tensor | None) -> Results:
        o, final_state, h = IMPLEMENTATIONS[problem.algorithm](problem, t)
        return (o if out is None else out.copy_(o)), final_state, h

    def plan(
        self, problem: Problem, t: Tensors, given: Sequence[torch.Tensor | None], out: torch.Tensor | None
    ) -> None:
        return None

    def parts(self, problem: Problem, chunks: torch.Tensor, device: torch.device) -> torch.Tensor:
        return planned_parts(problem, chunks, 1, NO_COSTS)

    def commit(self, problem: CommitSpec, t: CommitTensors) -> None:
        reference.commit(problem, t)

    def run_kept(
        self, problem: Problem, t: Tensors, recorder: Recorder | None = None
    ) -> tuple[Results, dict[str, torch.Tensor]]:
        return self.run(problem, t, None), {}

    def backward(
        self, problem: Problem, t: Tensors, incoming: Incoming, recorder: Recorder | None = None
    ) -> dict[str, torch.Tensor]:
        """Runs the forward again under autograd, then differentiates it. Keeps nothing."""
        with _autograd_inside_an_operator(), torch.enable_grad():
            leaves = {name: x.detach().requires_grad_(x.is_floating_point()) for name, x in t.present().items()}
            o, final_state, _ = self.run(problem, Tensors(**leaves), None)
            inputs = {name: x for name, x in leaves.items() if x.requires_grad}
            results = [(o, incoming.grad_o)]
            if problem.output_final_state:
                results.append((final_state, incoming.grad_final))
            # without a token nothing but the state passes through
            reached = [(x, d) for x, d in results if x.requires_grad]
            found = [None] * len(inputs)
            if reached:
                outputs, grads = zip(*reached)
                found = torch.autograd.grad(outputs, list(inputs.values()), grads, allow_unused=True)
        return {name: torch.zeros_like(x) if d is None else d for (name, x), d in zip(inputs.items(), found)}
