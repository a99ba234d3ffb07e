"""From a validated call and the gradients of its results to the launches of the backward pass."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from ..launch import Launch, Recorder, allocate, capability, launch_all, strides
from ..spec import Incoming, KdaSpec, KdaTensors, Results
from . import config
from .backward import finish_kernel, intra_kernel, reverse_kernel
from .launch import Workspace, prepare, readable, recurrence, walk_constants
from .wy import WyOperands, wy_launch


@dataclass(frozen=True)
class Kept:
    """What the backward pass needs of the forward, `S` being the chunk slots: the workspace of `recurrence`, and in the operand
    dtype `solved [S, HV, C, C]`, states before chunks `h [S, HV, V, K]` and `pseudo [B, T, HV, V]`."""

    workspace: Workspace
    solved: torch.Tensor
    h: torch.Tensor
    pseudo: torch.Tensor

    @classmethod
    def allocate(cls, spec: KdaSpec, device: torch.device) -> Kept:
        S, C = spec.B * spec.slots, spec.chunk_size
        shapes = ((S, spec.HV, C, C), (S, spec.HV, spec.V, spec.K), (spec.B, spec.T, spec.HV, spec.V))
        workspace = Workspace.allocate(spec, device)
        return cls(workspace, *(torch.empty(shape, dtype=spec.dtype, device=device) for shape in shapes))

    @classmethod
    def of(cls, spec: KdaSpec, tensors: Mapping[str, torch.Tensor]) -> Kept:
        """From its `tensors`."""
        return cls(Workspace.over(spec, tensors["workspace"]), *(tensors[name] for name in ("solved", "h", "pseudo")))

    def tensors(self) -> dict[str, torch.Tensor]:
        """All that it holds, by names that no result has."""
        return {"workspace": self.workspace.buffer, "solved": self.solved, "h": self.h, "pseudo": self.pseudo}


@dataclass(frozen=True)
class Walked:
    """What `reverse` leaves: gradients of the states after each chunk and of the pseudo-values, `grad_h` and `grad_pseudo`, as
    `h` and `pseudo`."""

    grad_h: torch.Tensor
    grad_pseudo: torch.Tensor

    @classmethod
    def allocate(cls, h: torch.Tensor, pseudo: torch.Tensor) -> Walked:
        return cls(torch.empty_like(h), torch.empty_like(pseudo))


@dataclass(frozen=True)
class Parts:
    """What `wy` leaves for `intra`: in float32 `grad_q, grad_k, grad_G [B, T, HV, K]` and `grad_beta [B, T, HV]`; `grad_A` and
    `grad_Aqk`, as `squares`."""

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


def values_gradient(spec: KdaSpec, device: torch.device) -> torch.Tensor:
    return torch.empty((spec.B, spec.T, spec.HV, spec.V), dtype=spec.dtype, device=device)


def state_gradient(spec: KdaSpec, device: torch.device) -> torch.Tensor | None:
    """Of the initial state, if the call has one."""
    return torch.empty(spec.state_shape, dtype=spec.state_dtype, device=device) if spec.has_initial_state else None


def forward(spec: KdaSpec, t: KdaTensors, recorder: Recorder | None = None) -> tuple[Results, dict[str, torch.Tensor]]:
    """The call's results, and what its backward pass would compute again (`Kept.tensors`). Sequences stay whole."""
    t = readable(spec, t)
    device = t.q.device
    results, kept = allocate(spec, t, None), Kept.allocate(spec, device)
    found = kept_outputs(results, kept.tensors())
    launch_all(walk(spec, t, capability(device), kept, *results[:2]), device, recorder, found)
    return results, kept.tensors()


def kept_outputs(results: Results, kept: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All that a forward leaves that keeps what its backward pass needs."""
    o, final_state, _ = results
    return {"o": o, **({} if final_state is None else {"final_state": final_state}), **kept}


def walk(
    spec: KdaSpec, t: KdaTensors, at: int, kept: Kept, o: torch.Tensor, final_state: torch.Tensor | None
) -> list[Launch]:
    scratch = tuple(kept.tensors().values())
    return [
        replace(prepare(spec, t, at, kept.workspace, kept.solved), scratch=scratch),
        replace(
            recurrence(spec, t, at, kept.workspace, (o, final_state, kept.h), 0, kept.pseudo), scratch=(*scratch, o)
        ),
    ]


def backward(
    spec: KdaSpec, t: KdaTensors, incoming: Incoming, recorder: Recorder | None = None
) -> dict[str, torch.Tensor]:
    """Gradients by the names of `KdaTensors`; without what was `kept` the forward's stages run again."""
    t = readable(spec, t)
    device = t.q.device
    grad_o, grad_final = incoming.grad_o, incoming.grad_final.contiguous()
    grad_o = grad_o if grad_o.stride(-1) == 1 else grad_o.contiguous()
    found: dict[str, torch.Tensor] = {}
    again = Kept.of(spec, incoming.kept) if incoming.kept else None
    stages = launches(spec, t, capability(device), grad_o, grad_final, found, again)
    del again
    launch_all(stages, device, recorder, found)
    return found


def launches(
    spec: KdaSpec,
    t: KdaTensors,
    at: int,
    grad_o: torch.Tensor,
    grad_final: torch.Tensor,
    found: dict[str, torch.Tensor],
    kept: Kept | None = None,
) -> Iterator[Launch]:
    """In order; what they find is in `found` from when it is allocated. Each is to run before the next is asked for: what
    only the ones before it needed is given back then."""
    device = t.q.device
    if kept is None:
        kept = Kept.allocate(spec, device)
        yield from walk(replace(spec, output_final_state=False), t, at, kept, torch.empty_like(kept.pseudo), None)
    walked = Walked.allocate(kept.h, kept.pseudo)
    if (initial := state_gradient(spec, device)) is not None:
        found["initial_state"] = initial
    yield reverse(spec, t, at, kept.workspace, walked, grad_o, grad_final, initial)
    given = (t.q, t.k, t.g, t.v, t.beta, kept.solved, kept.h, kept.pseudo, grad_o, walked.grad_pseudo, walked.grad_h)
    x = WyOperands(*given, t.cu_seqlens, t.A_log, t.dt_bias)
    del kept, walked, given
    parts = Parts.allocate(spec, device, x.solved.shape, torch.float32)
    found["v"] = values_gradient(spec, device)
    yield wy(spec, at, x, parts, found["v"])
    del x
    heads = ByHead.allocate(spec, device)
    found.update(heads.outputs(spec))
    yield intra(spec, t, at, parts, heads)
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


def reverse(
    spec: KdaSpec,
    t: KdaTensors,
    at: int,
    workspace: Workspace,
    walked: Walked,
    grad_o: torch.Tensor,
    grad_final: torch.Tensor,
    initial: torch.Tensor | None,
) -> Launch:
    c = config.recurrence_config(spec, at)
    absent = grad_o.new_empty(0, dtype=spec.state_dtype)
    w = workspace
    return Launch(
        reverse_kernel,
        spec.N * spec.HV * (spec.V // c.BV),
        (
            *(w.w, w.qg, w.kg, w.Aqk, w.decay, grad_o),
            grad_final if spec.output_final_state else absent,
            *(walked.grad_pseudo, walked.grad_h),
            absent if initial is None else initial,
            *(t.cu_seqlens, int(spec.has_initial_state), int(spec.output_final_state)),
            *(spec.T, spec.N, spec.HV, spec.slots),
            *strides(grad_o),
        ),
        walk_constants(spec, c, c.BV),
        c.num_warps,
        scratch=(w.buffer, walked.grad_pseudo, walked.grad_h),
    )


def wy(spec: KdaSpec, at: int, x: WyOperands, parts: Parts, grad_v: torch.Tensor) -> Launch:
    found = (parts.grad_q, parts.grad_k, parts.grad_G, grad_v, parts.grad_beta, parts.grad_A, parts.grad_Aqk)
    kinds = dict(GATE=spec.gate, BETA=spec.beta_kind, L2NORM=spec.l2norm, BY_TOKEN=False, V_FIRST=True)
    launch = wy_launch(spec, at, x, found, spec.lower_bound or 0.0, spec.slots, **kinds)
    return replace(launch, scratch=(*x.kept(), *parts.scratch()))


def intra(spec: KdaSpec, t: KdaTensors, at: int, parts: Parts, heads: ByHead) -> Launch:
    c = config.intra_config(spec, at)
    return Launch(
        intra_kernel,
        spec.B * spec.slots * spec.HV if spec.N > 0 else 0,
        (
            *(t.q, t.k, t.g, t.beta, t.A_log, t.dt_bias, t.cu_seqlens, parts.grad_A, parts.grad_Aqk),
            *(parts.grad_q, parts.grad_k, parts.grad_G, parts.grad_beta),
            *(heads.q, heads.k, heads.g, heads.beta, heads.A_log, heads.dt_bias),
            *(spec.scale, spec.lower_bound or 0.0),
            *(spec.T, spec.N, spec.H, spec.HV, spec.slots),
            *strides(t.q, t.k, t.g, t.beta),
        ),
        dict(
            C=spec.chunk_size,
            K=spec.K,
            BK=c.BK,
            GATE=spec.gate,
            SAFE=config.safe_blocks(spec),
            BETA=spec.beta_kind,
            L2NORM=spec.l2norm,
            PRECISION=config.backward_precision(spec, at),
        ),
        c.num_warps,
        scratch=(*parts.scratch(), *heads.scratch(spec)),
    )
