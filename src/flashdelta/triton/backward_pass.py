"""The backward pass of a call, whatever kernels run it: its stages in order, and what they leave for each other.

A backend describes its kernels by `Stages` (`triton/gradients.py`, `hopper/gradients.py`); docs/backward.md has the formulas.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from ..problem.problem import Incoming, Problem, Results, Tensors
from ..program.cache import Recorder
from ..program.launch import Launch, allocate, launch_all
from .finish import finish_kernel
from .wy import WyOperands


class Workspace(Protocol):
    """What `prepare` leaves for `recurrence` and `reverse`, in one buffer. A backend has its own."""

    buffer: torch.Tensor

    @classmethod
    def allocate(cls, problem: Problem, device: torch.device) -> Workspace: ...

    @classmethod
    def over(cls, problem: Problem, buffer: torch.Tensor) -> Workspace: ...


@dataclass(frozen=True)
class Kept:
    """What the backward pass needs of the forward, `S` being the chunk slots: the workspace of `recurrence`, and in the operand
    dtype `solved` (`Stages.solved`), states before chunks `h [S, HV, V, K]` and `pseudo [B, T, HV, V]`."""

    workspace: Workspace
    solved: torch.Tensor
    h: torch.Tensor
    pseudo: torch.Tensor

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that it holds, by names that no result has."""
        return {"workspace": self.workspace.buffer, "solved": self.solved, "h": self.h, "pseudo": self.pseudo}


@dataclass(frozen=True)
class Walked:
    """What `reverse` leaves: gradients of the states after each chunk and of the pseudo-values, `grad_h` and `grad_pseudo`, as
    `h` and `pseudo`."""

    grad_h: torch.Tensor
    grad_pseudo: torch.Tensor


@dataclass(frozen=True)
class Parts:
    """What `wy` leaves for `intra`: in float32 `grad_q, grad_k, grad_G [B, T, HV, K]` and `grad_beta [B, T, HV]`; `grad_A` and
    `grad_Aqk`, as `solved`."""

    grad_q: torch.Tensor
    grad_k: torch.Tensor
    grad_G: torch.Tensor
    grad_beta: torch.Tensor
    grad_A: torch.Tensor
    grad_Aqk: torch.Tensor

    @classmethod
    def allocate(cls, problem: Problem, device: torch.device, squares: tuple[int, ...], dtype: torch.dtype) -> Parts:
        tokens = (problem.B, problem.T, problem.HV)
        wide = [*[(*tokens, problem.K)] * 3, tokens]
        return cls(
            *(torch.empty(shape, dtype=torch.float32, device=device) for shape in wide),
            *(torch.empty(squares, dtype=dtype, device=device) for _ in range(2)),
        )

    def scratch(self) -> tuple[torch.Tensor, ...]:
        return self.grad_q, self.grad_k, self.grad_G, self.grad_beta, self.grad_A, self.grad_Aqk


@dataclass(frozen=True)
class ByHead:
    """What `intra` leaves: gradients of the call's inputs by value head, dense, those of shared heads in float32; of the gate's
    parameters the parts of all chunk slots, `[S, HV, K]`, if the call has them."""

    q: torch.Tensor
    k: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None

    @classmethod
    def allocate(cls, problem: Problem, device: torch.device) -> ByHead:
        tokens, parts = (problem.B, problem.T, problem.HV), (problem.B * problem.slots, problem.HV, problem.K)
        grouped = problem.dtype if problem.group == 1 else torch.float32
        gated = problem.gate in ("softplus", "lower_bound")
        make = functools.partial(torch.empty, device=device)
        return cls(
            *(make((*tokens, problem.K), dtype=dtype) for dtype in (grouped, grouped, problem.g_dtype)),
            make(tokens, dtype=problem.beta_dtype),
            make(parts, dtype=torch.float32) if problem.has_A_log and gated else None,
            make(parts, dtype=torch.float32) if problem.has_dt_bias and gated else None,
        )

    def outputs(self, problem: Problem) -> dict[str, torch.Tensor]:
        """Those that are the call's gradients already."""
        shared = {"q": self.q, "k": self.k} if problem.group == 1 else {}
        return {**shared, "g": self.g, "beta": self.beta}

    def scratch(self, problem: Problem) -> tuple[torch.Tensor, ...]:
        """The others."""
        shared = () if problem.group == 1 else (self.q, self.k)
        return *shared, *(x for x in (self.A_log, self.dt_bias) if x is not None)


@dataclass(frozen=True)
class Stages:
    """A backend's kernels for a call whose tensors `t` are as they can read them.

    `solved` is the shape in which they have a matrix of every chunk, and `squares` the dtype of such matrices' gradients. The
    stages make launches: `walk(problem, kept, o, final_state)` the forward's two, which leave what is kept (without `o` none);
    `reverse(workspace, walked, grad_o, grad_final, initial)`, `wy(x, parts, grad_v)` and `intra(parts, heads)`.
    """

    problem: Problem
    t: Tensors
    workspace: type[Workspace]
    solved: tuple[int, ...]
    squares: torch.dtype
    walk: Callable[[Problem, Kept, torch.Tensor | None, torch.Tensor | None], list[Launch]]
    reverse: Callable[[Workspace, Walked, torch.Tensor, torch.Tensor, torch.Tensor | None], Launch]
    wy: Callable[[WyOperands, Parts, torch.Tensor], Launch]
    intra: Callable[[Parts, ByHead], Launch]

    @property
    def device(self) -> torch.device:
        return self.t.q.device

    def room(self) -> Kept:
        """For what a forward keeps."""
        problem, device = self.problem, self.device
        shapes = (
            self.solved,
            (problem.B * problem.slots, problem.HV, problem.V, problem.K),
            (problem.B, problem.T, problem.HV, problem.V),
        )
        workspace = self.workspace.allocate(problem, device)
        return Kept(workspace, *(torch.empty(shape, dtype=problem.dtype, device=device) for shape in shapes))

    def kept(self, tensors: Mapping[str, torch.Tensor]) -> Kept:
        """From `Kept.tensors`."""
        workspace = self.workspace.over(self.problem, tensors["workspace"])
        return Kept(workspace, *(tensors[name] for name in ("solved", "h", "pseudo")))


def forward(stages: Stages, recorder: Recorder | None) -> tuple[Results, dict[str, torch.Tensor]]:
    """The call's results, and what its backward pass would compute again (`Kept.tensors`). Sequences stay whole."""
    results, kept = allocate(stages.problem, stages.t, None), stages.room()
    o, final_state, _ = results
    found = {"o": o, **({} if final_state is None else {"final_state": final_state}), **kept.tensors()}
    launch_all(stages.walk(stages.problem, kept, o, final_state), stages.device, recorder, found)
    return results, kept.tensors()


def backward(stages: Stages, incoming: Incoming, recorder: Recorder | None) -> dict[str, torch.Tensor]:
    """Gradients by the names of `Tensors`; without what was `kept` the forward's stages run again."""
    found: dict[str, torch.Tensor] = {}
    launch_all(launches(stages, incoming, found), stages.device, recorder, found)
    return found


def launches(stages: Stages, incoming: Incoming, found: dict[str, torch.Tensor]) -> Iterator[Launch]:
    """In order; what they find is in `found` from when it is allocated. Each is to run before the next is asked for: what
    only the ones before it needed is given back then."""
    problem, t, device = stages.problem, stages.t, stages.device
    grad_o = incoming.grad_o
    if incoming.kept:
        kept = stages.kept(incoming.kept)
    else:
        kept = stages.room()
        yield from stages.walk(replace(problem, output_final_state=False), kept, None, None)
    walked = Walked(torch.empty_like(kept.h), torch.empty_like(kept.pseudo))
    initial = None
    if problem.has_initial_state:
        initial = found["initial_state"] = torch.empty(problem.state_shape, dtype=problem.state_dtype, device=device)
    yield stages.reverse(kept.workspace, walked, grad_o, incoming.grad_final.contiguous(), initial)
    given = (t.q, t.k, t.g, t.v, t.beta, kept.solved, kept.h, kept.pseudo, grad_o, walked.grad_pseudo, walked.grad_h)
    x = WyOperands(*given, t.cu_seqlens, t.A_log, t.dt_bias)
    del kept, walked, given
    parts = Parts.allocate(problem, device, stages.solved, stages.squares)
    found["v"] = torch.empty((problem.B, problem.T, problem.HV, problem.V), dtype=problem.dtype, device=device)
    yield stages.wy(x, parts, found["v"])
    del x
    heads = ByHead.allocate(problem, device)
    found.update(heads.outputs(problem))
    yield stages.intra(parts, heads)
    del parts
    yield from finish(problem, t, heads, found)


def finish(problem: Problem, t: Tensors, heads: ByHead, found: dict[str, torch.Tensor]) -> list[Launch]:
    """The last stage: sums over what shares an input; zeros where packed sequences have no token. Nothing if none is needed."""
    device = t.q.device
    for name, parts in (("A_log", heads.A_log), ("dt_bias", heads.dt_bias)):
        if parts is not None:
            given = getattr(t, name)
            found[name] = torch.empty(given.shape, dtype=given.dtype, device=device)
    if problem.group > 1:
        for name in ("q", "k"):
            found[name] = torch.empty((problem.B, problem.T, problem.H, problem.K), dtype=problem.dtype, device=device)
    has_parameters = heads.A_log is not None or heads.dt_bias is not None
    rows = 16 if problem.group > 1 else 64
    blocks = -(-problem.B * problem.T // rows) * problem.H if problem.group > 1 or problem.packed else 0
    programs = problem.HV * has_parameters + blocks
    if programs == 0:
        return []
    return [
        Launch(
            finish_kernel,
            programs,
            (
                *(heads.q, heads.k, heads.A_log, heads.dt_bias, t.cu_seqlens),
                *(found["q"], found["k"], found["g"], found["v"], found["beta"]),
                *(found.get("A_log"), found.get("dt_bias")),
                *(problem.B * problem.T, problem.N, problem.HV, problem.B * problem.slots if problem.N > 0 else 0),
            ),
            dict(K=problem.K, V=problem.V, GROUP=problem.group, ROWS=rows),
            num_warps=4,
            scratch=heads.scratch(problem),
        )
    ]
