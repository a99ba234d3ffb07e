"""Launches of either backend's kernels: arguments by their names, inputs as portable kernels read them, the workspace."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.runtime import JITFunction

from ...problem.problem import (
    BACKWARD,
    AttentionProblem,
    AttentionTensors,
    ChunkProblem,
    ChunkTensors,
    ConvolutionProblem,
    NormProblem,
    Problem,
    Tensors,
)
from ...program.launch import Launch
from ...program.workspace import Layout, tensor_at
from .copy import T, laid_out, read


@dataclass(frozen=True)
class StageCall:
    """A call as every stage needs it. `t`: as the kernels read them. `arch`: the GPU's compute capability, e.g. 90."""

    problem: ChunkProblem
    t: ChunkTensors
    arch: int
    workspace: dict[str, Tensor]
    packet: Tensor | None = None
    """Receives the states of sequences that go on from the first of two ranks to the second (`merge.py`)."""

    def left(self, *names: str) -> dict[str, Tensor | None]:
        """Tensors of the workspace by name, None where it has none of that name."""
        return {name: self.workspace.get(name) for name in names}

    @property
    def may_split(self) -> bool:
        """True if sequences may be split: the workspace has room for segments."""
        return self.workspace.get("starts") is not None

    @property
    def forms_segments(self) -> bool:
        """True if sequences may be split, and the forward has not left their segments."""
        return self.may_split and self.t.segments is None


@dataclass(frozen=True)
class Config:
    """The options of a launch, under the kernels' names: `BK` and `BV` are the key and value channels that a CTA holds at a
    time, `TILE` of them, or so many `TILES`, in registers; `STAGES` the slices or chunks in flight; `STREAM`: states need not
    stay in the L2 cache. `max_registers`: of a thread, so that more CTAs fit on an SM."""

    num_warps: int
    BK: int = 0
    BV: int = 0
    STAGES: int = 1
    STREAM: bool = False
    TILE: int = 0
    TILES: int = 0
    max_registers: int | None = None


SMALL = Config(num_warps=4)

FIELDS = {
    **dict(C="chunk_size", GATE="gate", BETA="beta_kind", L2NORM="l2norm", SAFE="safe_gate", V_FIRST="state_v_first"),
    **dict(GROUP="group", W="taps", L="state_length", chunk_slots="slots", lowest="lowest_index"),
}
"""Kernels' own names for fields of a problem."""

AXES = {"batch": 0, "token": 1, "head": 2}

Own = Mapping[str, object]
"""Arguments under the kernel's names."""


@functools.cache
def parameters(kernel: Callable[..., object]) -> tuple[tuple[str, bool, str, int, str], ...]:
    """A kernel's parameters in order: the name; whether it is a compile-time one; the tensor that it may be a stride of,
    and the axis; the field of a problem that it may be."""
    found = []
    for x in inspect.signature(kernel).parameters.values():
        of, _, dimension = x.name.rpartition("_")
        constant, axis = "constexpr" in str(x.annotation), AXES.get(dimension, -1)
        found.append((x.name, constant, of if axis >= 0 else "", axis, FIELDS.get(x.name, x.name)))
    return tuple(found)


def plain_stride(name: str, x: Tensor, axis: int) -> int:
    return x.stride()[axis]


def bind(
    kernel: JITFunction, problem: Problem, t: Tensors, own: Own, stride: Callable[..., int] = plain_stride
) -> tuple[tuple, dict[str, Any]]:
    """The run-time and compile-time arguments of a kernel, in its order. A parameter takes what `own` has of its name, else the
    call's tensor of that name, else the field of its problem. `x_batch`, `x_token` and `x_head` are the strides of `x`, 0 of
    one that is absent.

    Raises:
        AttributeError: a parameter that none of them has, with the kernel's name.
    """
    found = vars(t) | own  # type: ignore[operator]
    arguments, constants = [], {}
    # `kernel` itself has a hash that is worked out each time
    for name, constant, of, axis, field in parameters(kernel.fn):
        if name in found:
            x = found[name]
        elif of in found:
            x = 0 if found[of] is None else stride(of, found[of], axis)
        else:
            x = getattr(problem, field, found)
            if x is found:
                where = f"the launcher, {type(t).__name__} nor {type(problem).__name__} (by its name in FIELDS) has it"
                raise AttributeError(f"{kernel.__name__} has a parameter {name!r}, but neither {where}")
        if constant:
            constants[name] = x
        else:
            arguments.append(int(x) if x is True or x is False else x)
    return tuple(arguments), constants


FAR = 2**31
"""The least stride that kernels do not take."""


def near(x: Tensor, unit: int) -> bool:
    """Says whether strides fit, in multiples of `unit` elements."""
    return all([s < FAR * unit or n == 1 for n, s in zip(x.shape, x.stride())])


def aligned(x: Tensor, unit: int = 8) -> bool:
    """Says whether rows can be copied 16 bytes at a time, and lie a multiple of `unit` elements apart: 8 is that of strides in
    most kernels."""
    *outer, inner = x.stride()
    return inner == 1 and x.data_ptr() % 16 == 0 and math.gcd(*outer) % unit == 0 and near(x, 8)


def stride_div8(name: str, x: Tensor, axis: int) -> int:
    """A stride in units of 8 elements, of beta in elements. One row of a batch may have any stride, which nobody needs."""
    stride = x.stride()[axis] if axis > 0 or x.shape[0] > 1 else 0
    return stride if name == "beta" else stride // 8


def launch_div8(
    kernel: JITFunction, ctas: int, problem: Problem, t: Tensors, own: Own, num_warps: int = 4, **options: Any
) -> Launch:
    """A launch with the arguments that `bind` finds, strides as Hopper's kernels over chunks take them."""
    return Launch(kernel, ctas, *bind(kernel, problem, t, own, stride_div8), num_warps, **options)


def launch(
    kernel: JITFunction, ctas: int, problem: Problem, t: Tensors, own: Own, config: Any = SMALL, overlaps: bool = False
) -> Launch:
    """A launch with the arguments that `bind` finds, of which `config` has those that `own` has not. Kernels ask by `OVERLAP`
    whether it overlaps the one before."""
    bound = bind(kernel, problem, t, {**vars(config), "OVERLAP": overlaps, **own})
    return Launch(kernel, ctas, *bound, config.num_warps, getattr(config, "max_registers", None), overlaps)


DENSE = (
    *("A_log", "dt_bias", "bias", "norm_weight", "cu_seqlens", "has_initial_state", "checkpoint_offsets"),
    *("checkpoint_indices", "num_accepted_tokens", "dht"),
)
"""Inputs that kernels read without gaps."""

DENSE_TOO = {
    "chunk": ("initial_state", "state_indices"),
    "chunk" + BACKWARD: ("initial_state",),
    "commit": ("state_indices", "intermediate_indices"),
    "gated_rms_norm": ("weight",),
    "gated_rms_norm" + BACKWARD: ("weight",),
    "short_convolution": ("weight", "state_indices"),
    "short_convolution" + BACKWARD: ("weight", "initial_state"),
    "wy": ("v_new", "A", "h", "dh", "dv"),
}
"""More of them, by operation; of others only initial states."""

ROWS = ("q", "k", "v", "g", "do")
"""Inputs `[B, T, H, K]` of the operator and of its backward pass."""


def prepare_inputs(problem: Problem, t: T) -> tuple[T, list[Launch]]:
    """The kernels read any strides but the last dimension's, which must be 1, dense parameters, states and indices, and a
    pool in place; `decode` reads indices of any strides too."""
    t, copies = laid_out(t, (*DENSE, *DENSE_TOO.get(problem.operation, ("initial_state",))))
    if isinstance(problem, (ConvolutionProblem, NormProblem)):
        t, of_rows = laid_out(t, ("x", "z", "do"), has_rows)
    else:
        t, gates = laid_out(t, ("z",), has_rows)
        t, of_rows = read(t, ROWS, lambda x: x.stride(-1) == 1)
        of_rows = gates + of_rows
    return t, copies + of_rows


def has_rows(x: Tensor) -> bool:
    """Says whether the last dimension is dense, and those before the last three lie as one."""
    batches = [(n, s) for n, s in zip(x.shape[:-3], x.stride()) if n > 1]
    return x.stride(-1) == 1 and all(s == n * own for (_, s), (n, own) in itertools.pairwise(batches))


def segment_layout(problem: ChunkProblem, segments: int) -> Layout:
    """Layout of what the stages of a split leave for each other (`segments.py`), with up to `segments` of them; nothing
    without."""
    if segments == 0:
        return {}
    rows = {"transitions": problem.K, "offsets": problem.V, "starts": problem.V}
    states = {name: ((segments, problem.HV, n, problem.K), torch.float32) for name, n in rows.items()}
    return {**states, "first_segment": ((problem.N + 1,), torch.int32)}


def layout(problem: ChunkProblem, segments: int = 0) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Layout of what `prepare` leaves for `recurrence`, for `S = B * slots` chunk slots, and what a split keeps, if there is
    one."""
    S, HV, C, K = problem.B * problem.slots, problem.HV, problem.chunk_size, problem.K
    operand, square = ((S, HV, C, K), problem.dtype), ((S, HV, C, C), problem.dtype)
    tiles = {"w": operand, "qg": operand, "kg": operand, "Akk_inv": square, "Aqk": square}
    return {**tiles, "decay": ((S, HV, K), torch.float32), **segment_layout(problem, segments)}


def chunks(problem: ChunkProblem) -> int:
    """Chunk slots of all heads."""
    return problem.B * problem.slots * problem.HV if problem.N > 0 else 0


def precision(problem: ChunkProblem) -> str:
    """The precision of products whose operands are float32 in the kernel."""
    return problem.precision if problem.operation == "prefill" else dot_precision(problem.dtype)


def state_arguments(problem: AttentionProblem, t: AttentionTensors, final_state: Tensor | None) -> dict[str, object]:
    """The tensors of states, read and written, under the kernels' names (`shared/states.py`). One that the call does not have
    is empty, and the kernel leaves it alone."""
    if problem.has_pool:
        assert t.state_pool is not None
        initial = final = t.state_pool
        pitch = t.state_pool.stride(0)
    else:
        initial, final = or_empty(problem, t.initial_state, final_state)
        pitch = problem.HV * problem.K * problem.V
    given = dict(has_initial=problem.has_initial_state, has_final=final_state is not None, state_pitch=pitch)
    return dict(initial_state=initial, final_state=final, **given)


def packet_arguments(call: StageCall) -> dict[str, object]:
    """The tensors in which `recurrence` leaves states for the second rank, under the kernels' names."""
    return dict(border=None if call.packet is None else call.t.border, packet=call.packet)


def checkpoint_arguments(problem: ChunkProblem, t: ChunkTensors) -> dict[str, object]:
    """The layout of checkpoints, under the kernels' names: chunks from one to the next where they are regular, and the rows and
    pitch of a buffer of their own."""
    buffer, every, rows, pitch = t.checkpoint_states, None, None, None
    if buffer is not None:
        rows = buffer.shape[0]
        # a dimension of one row may have any stride
        pitch = buffer.stride(0) if rows > 1 else problem.HV * problem.K * problem.V
        if problem.checkpoint_every > 0:
            every = problem.checkpoint_every // problem.chunk_size
    return dict(checkpoint_every=every, checkpoint_rows=rows, checkpoint_pitch=pitch)


def or_empty(problem: AttentionProblem, *states: Tensor | None) -> list[Tensor]:
    """The states, with one empty tensor for all that the call does not have."""
    return [tensor_at(0, (0,), problem.state_dtype) if x is None else x for x in states]


SHARED_MEMORY = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes that a CTA may use, by compute capability."""


def dot_precision(dtype: torch.dtype) -> str:
    """The precision of products whose operands are float32 in the kernel. tf32x3 carries 21 mantissa bits or more."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def backward_precision(problem: Problem, capability: int) -> str:
    """The precision of products in `wy` and `intra`. In float32 on Hopper without tensor cores: Triton 3.6 makes wrong wgmma of
    tf32 operands that lie by columns, and code that reads out of bounds."""
    return "ieee" if problem.dtype == torch.float32 and capability == 90 else dot_precision(problem.dtype)


def safe_blocks(problem: ChunkProblem) -> bool:
    """Says whether blocks of 32 rows may use one reference: `exp(80)` must be finite in the operand dtype."""
    return problem.safe_gate and problem.dtype != torch.float16
