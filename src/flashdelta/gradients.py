"""The backward pass of a call, whatever kernels run it: its stages in order, and what they leave for each other.

A backend describes its kernels by `Stages` (`triton/gradients.py`, `hopper/gradients.py`); docs/backward.md has the formulas.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from .launch import Launch, allocate, launch_all
from .plans import Recorder
from .spec import Incoming, KdaSpec, KdaTensors, Results
from .triton.backward import finish_kernel
from .triton.wy import WyOperands


class Workspace(Protocol):
    """What `prepare` leaves for `recurrence` and `reverse`, in one buffer. A backend has its own."""

    buffer: torch.Tensor

    @classmethod
    def allocate(cls, spec: KdaSpec, device: torch.device) -> Workspace: ...

    @classmethod
    def over(cls, spec: KdaSpec, buffer: torch.Tensor) -> Workspace: ...


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
    def allocate(cls, spec: KdaSpec, device: torch.device, squares: tuple[int, ...], dtype: torch.dtype) -> Parts:
        tokens = (spec.B, spec.T, spec.HV)
        wide = [*[(*tokens, spec.K)] * 3, tokens]
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
    def allocate(cls, spec: KdaSpec, device: torch.device) -> ByHead:
        tokens, parts = (spec.B, spec.T, spec.HV), (spec.B * spec.slots, spec.HV, spec.K)
        grouped = spec.dtype if spec.group == 1 else torch.float32
        gated = spec.gate in ("softplus", "lower_bound")
        make = functools.partial(torch.empty, device=device)
        return cls(
            *(make((*tokens, spec.K), dtype=dtype) for dtype in (grouped, grouped, spec.g_dtype)),
            make(tokens, dtype=spec.beta_dtype),
            make(parts, dtype=torch.float32) if spec.has_A_log and gated else None,
            make(parts, dtype=torch.float32) if spec.has_dt_bias and gated else None,
        )

    def outputs(self, spec: KdaSpec) -> dict[str, torch.Tensor]:
        """Those that are the call's gradients already."""
        shared = {"q": self.q, "k": self.k} if spec.group == 1 else {}
        return {**shared, "g": self.g, "beta": self.beta}

    def scratch(self, spec: KdaSpec) -> tuple[torch.Tensor, ...]:
        """The others."""
        shared = () if spec.group == 1 else (self.q, self.k)
        return *shared, *(x for x in (self.A_log, self.dt_bias) if x is not None)


@dataclass(frozen=True)
class Stages:
    """A backend's kernels for a call whose tensors `t` are as they can read them.

    `solved` is the shape in which they have a matrix of every chunk, and `squares` the dtype of such matrices' gradients. The
    stages make launches: `walk(spec, kept, o, final_state)` the forward's two, which leave what is kept (without `o` there is
    none to leave); `reverse(workspace, walked, grad_o, grad_final, initial)`, `wy(x, parts, grad_v)` and `intra(parts, heads)`.
    """

    spec: KdaSpec
    t: KdaTensors
    workspace: type[Workspace]
    solved: tuple[int, ...]
    squares: torch.dtype
    walk: Callable[[KdaSpec, Kept, torch.Tensor | None, torch.Tensor | None], list[Launch]]
    reverse: Callable[[Workspace, Walked, torch.Tensor, torch.Tensor, torch.Tensor | None], Launch]
    wy: Callable[[WyOperands, Parts, torch.Tensor], Launch]
    intra: Callable[[Parts, ByHead], Launch]

    @property
    def device(self) -> torch.device:
        return self.t.q.device

    def room(self) -> Kept:
        """For what a forward keeps."""
        spec, device = self.spec, self.device
        shapes = (self.solved, (spec.B * spec.slots, spec.HV, spec.V, spec.K), (spec.B, spec.T, spec.HV, spec.V))
        workspace = self.workspace.allocate(spec, device)
        return Kept(workspace, *(torch.empty(shape, dtype=spec.dtype, device=device) for shape in shapes))

    def kept(self, tensors: Mapping[str, torch.Tensor]) -> Kept:
        """From `Kept.tensors`."""
        workspace = self.workspace.over(self.spec, tensors["workspace"])
        return Kept(workspace, *(tensors[name] for name in ("solved", "h", "pseudo")))


def forward(stages: Stages, recorder: Recorder | None) -> tuple[Results, dict[str, torch.Tensor]]:
    """The call's results, and what its backward pass would compute again (`Kept.tensors`). Sequences stay whole."""
    results, kept = allocate(stages.spec, stages.t, None), stages.room()
    o, final_state, _ = results
    found = {"o": o, **({} if final_state is None else {"final_state": final_state}), **kept.tensors()}
    launch_all(stages.walk(stages.spec, kept, o, final_state), stages.device, recorder, found)
    return results, kept.tensors()


def backward(stages: Stages, incoming: Incoming, recorder: Recorder | None) -> dict[str, torch.Tensor]:
    """Gradients by the names of `KdaTensors`; without what was `kept` the forward's stages run again."""
    found: dict[str, torch.Tensor] = {}
    launch_all(launches(stages, incoming, found), stages.device, recorder, found)
    return found


def launches(stages: Stages, incoming: Incoming, found: dict[str, torch.Tensor]) -> Iterator[Launch]:
    """In order; what they find is in `found` from when it is allocated. Each is to run before the next is asked for: what
    only the ones before it needed is given back then."""
    spec, t, device = stages.spec, stages.t, stages.device
    grad_o = incoming.grad_o
    if incoming.kept:
        kept = stages.kept(incoming.kept)
    else:
        kept = stages.room()
        yield from stages.walk(replace(spec, output_final_state=False), kept, None, None)
    walked = Walked(torch.empty_like(kept.h), torch.empty_like(kept.pseudo))
    initial = None
    if spec.has_initial_state:
        initial = found["initial_state"] = torch.empty(spec.state_shape, dtype=spec.state_dtype, device=device)
    yield stages.reverse(kept.workspace, walked, grad_o, incoming.grad_final.contiguous(), initial)
    given = (t.q, t.k, t.g, t.v, t.beta, kept.solved, kept.h, kept.pseudo, grad_o, walked.grad_pseudo, walked.grad_h)
    x = WyOperands(*given, t.cu_seqlens, t.A_log, t.dt_bias)
    del kept, walked, given
    parts = Parts.allocate(spec, device, stages.solved, stages.squares)
    found["v"] = torch.empty((spec.B, spec.T, spec.HV, spec.V), dtype=spec.dtype, device=device)
    yield stages.wy(x, parts, found["v"])
    del x
    heads = ByHead.allocate(spec, device)
    found.update(heads.outputs(spec))
    yield stages.intra(parts, heads)
    del parts
    yield from finish(spec, t, heads, found)


def finish(spec: KdaSpec, t: KdaTensors, heads: ByHead, found: dict[str, torch.Tensor]) -> list[Launch]:
    """The last stage: sums over what shares an input; zeros where packed sequences have no token. Nothing if none is needed."""
    device = t.q.device
    for name, parts in (("A_log", heads.A_log), ("dt_bias", heads.dt_bias)):
        if parts is not None:
            given = getattr(t, name)
            found[name] = torch.empty(given.shape, dtype=given.dtype, device=device)
    if spec.group > 1:
        for name in ("q", "k"):
            found[name] = torch.empty((spec.B, spec.T, spec.H, spec.K), dtype=spec.dtype, device=device)
    has_parameters = heads.A_log is not None or heads.dt_bias is not None
    rows = 16 if spec.group > 1 else 64
    blocks = -(-spec.B * spec.T // rows) * spec.H if spec.group > 1 or spec.packed else 0
    programs = spec.HV * has_parameters + blocks
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
                *(spec.B * spec.T, spec.N, spec.HV, spec.B * spec.slots if spec.N > 0 else 0),
            ),
            dict(K=spec.K, V=spec.V, GROUP=spec.group, ROWS=rows),
            num_warps=4,
            scratch=heads.scratch(spec),
        )
    ]
