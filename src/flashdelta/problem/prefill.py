"""`kda_prefill`: what a validated call is, and what runs it.

A call of `chunk_kda` in float32 whose `w` and `u` are results as well. Tensors are head first, so every head of every batch
row is taken as a batch row with one head: the chunks of a head then lie one after another, as `w [B, H, Nc, C, K]` has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..program.cache import Recorder
from .errors import wrong
from .problem import Problem, Settings, Tensors, check_tensor, shape_of, spec_of

Precision = Literal["ieee", "tf32x3"]
PRECISIONS: tuple[str, ...] = ("ieee", "tf32x3")
PrefillGate = Literal["none", "logsigmoid"]
PREFILL_GATES: tuple[str, ...] = ("none", "logsigmoid")

DEFAULT_PRECISION: Precision = "tf32x3"
"""21 mantissa bits or more, on tensor cores; true float32 products run on the ordinary units."""

PREFILL_SIZES = ((64, 64, 32), (64, 64, 64), (128, 128, 32), (128, 128, 64))
"""`(K, V, C)`."""

INPUTS = ("q", "k", "v", "g", "beta")
RESULTS = ("o", "w", "u")


@dataclass(frozen=True)
class PrefillSpec:
    """A validated call of `B * H` heads: `call` is that of `chunk_kda` with a batch row for each; `precision` is that of
    products whose operands are float32. (In bfloat16, which the C library has, these are few.)"""

    B: int
    H: int
    call: Problem
    precision: str

    @property
    def chunks(self) -> int:
        """`Nc`."""
        return self.call.slots

    @property
    def o_shape(self) -> tuple[int, ...]:
        return (self.B, self.H, self.call.T, self.call.V)

    @property
    def w_shape(self) -> tuple[int, ...]:
        return (self.B, self.H, self.chunks, self.call.chunk_size, self.call.K)

    @property
    def u_shape(self) -> tuple[int, ...]:
        return (self.B, self.H, self.chunks, self.call.chunk_size, self.call.V)

    def allocate(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """`(o, w, u)`."""
        shapes = (self.o_shape, self.w_shape, self.u_shape)
        return tuple(torch.empty(shape, dtype=self.call.dtype, device=device) for shape in shapes)


def check_prefill(
    given: dict[str, object], chunk_size: object, scale: object, gate: object, precision: object
) -> tuple[PrefillSpec, Tensors]:
    """Validates a call of `ops.kda_prefill`, whose tensors are `given` by name.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: anything else; the message names the argument, what came and what was wanted.
    """
    for name in INPUTS:
        check_tensor(name, given[name], rank=3 if name == "beta" else 4)
    q = given["q"]
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int):
        raise TypeError(f"chunk_size: got {chunk_size!r} ({type(chunk_size).__name__}), wanted an int")
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, (int, float))):
        raise TypeError(f"scale: got {scale!r} ({type(scale).__name__}), wanted a float or None")
    if gate not in PREFILL_GATES:
        raise wrong("gate", repr(gate), f"one of {PREFILL_GATES}")
    if precision not in PRECISIONS:
        raise wrong("precision", repr(precision), f"one of {PRECISIONS}")
    B, H, T, K = q.shape
    V = given["v"].shape[3]
    if H == 0:
        raise wrong("q", f"shape {shape_of(q)}", "at least one head")
    if (K, V, chunk_size) not in PREFILL_SIZES:
        named = "q" if K not in (64, 128) else "v" if V != K else "chunk_size"
        raise wrong(named, f"(K, V, C) = {(K, V, chunk_size)}", f"one of {', '.join(map(str, PREFILL_SIZES))}")
    wanted = {"k": ((B, H, T, K), "[B, H, T, K]"), "v": ((B, H, T, V), "[B, H, T, V]")}
    wanted |= {"g": wanted["k"], "beta": ((B, H, T), "[B, H, T]")}
    for name, (shape, symbols) in wanted.items():
        if tuple(given[name].shape) != shape:
            raise wrong(name, f"shape {shape_of(given[name])}", f"{symbols} = {list(shape)} as in q")
    for name in INPUTS:
        _check_one(name, given[name], q.device)
    return prefill_of(*(given[name] for name in INPUTS), chunk_size, scale, gate, precision)


def prefill_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int,
    scale: float | None,
    gate: str,
    precision: str,
) -> tuple[PrefillSpec, Tensors]:
    """The problem of arguments already validated."""
    settings = Settings(
        scale=q.shape[3] ** -0.5 if scale is None else float(scale),
        gate=gate,
        chunk_size=chunk_size,
        state_v_first=True,
        split=1,
    )
    t = rows_of_heads(q, k, v, g, beta)
    return PrefillSpec(*q.shape[:2], spec_of(t, settings), precision), t


def _check_one(name: str, x: Tensor, device: torch.device) -> None:
    """What is asked of every tensor alike."""
    if x.dtype != torch.float32:
        raise TypeError(f"{name}: got dtype {x.dtype}, wanted float32")
    if x.device != device:
        raise wrong(name, f"device {x.device}", f"q's device {device}")
    if not x.is_contiguous():
        raise wrong(name, f"strides {tuple(x.stride())}", "a contiguous tensor")
    if x.requires_grad and torch.is_grad_enabled():
        raise wrong(name, "a tensor that requires grad", "torch.no_grad() (kda_prefill has no backward)")


def rows_of_heads(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensors:
    """`[B, H, T, ...]` as `[B * H, T, 1, ...]`."""
    return Tensors(*(x.reshape(x.shape[0] * x.shape[1], x.shape[2], 1, *x.shape[3:]) for x in (q, k, v, g, beta)))


def run(
    problem: PrefillSpec, t: Tensors, backend: str, recorder: Recorder | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`(o, w, u)` by the backend of that name."""
    if backend == "triton":
        from ..triton import prefill  # decorated kernels read TRITON_INTERPRET when first imported

        return prefill(problem, t, recorder)
    from ..reference import prefill

    return prefill(problem, t)
