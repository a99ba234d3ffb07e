"""Chooses the implementation that runs a call, and says why: the only module that knows more than one backend."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch

from .problem.arguments import check_name
from .problem.errors import wrong
from .problem.problem import (
    GATES,
    AttentionProblem,
    ChunkProblem,
    CommitProblem,
    NormProblem,
    Problem,
    StepProblem,
    Tensors,
    WyProblem,
)
from .problem.split import parts_of_sequences

if TYPE_CHECKING:  # kernels must not be imported before a call needs them
    from .program.plan import Plan
    from .reference import Computation

    Executable = Plan | Computation

T = TypeVar("T")


class Backend(Protocol):
    """An implementation of all operations, or of some."""

    name: str
    summary: str
    plain: bool = False
    """True if its work is plain PyTorch, on any device and in any transform."""
    gates: tuple[str, ...] = (*GATES, "cumulative", "cumulative_log2")
    """Gates that its code knows; the last two are stage WY's, whose `g` is summed up."""

    def obstacle(self, problem: Problem, device: torch.device) -> str | None:
        """The reason why this backend can't run the call, or None."""
        return None

    def _common_obstacle(self, problem: Problem) -> str | None:
        """The obstacle for kernels that know some gates, and merge the states of other ranks in one piece."""
        if isinstance(problem, AttentionProblem) and problem.gate not in self.gates:
            return f"gate {problem.gate!r}; it knows {', '.join(self.gates)}"
        if isinstance(problem, ChunkProblem) and problem.ranks > 1 and problem.K > 128:
            return f"K = {problem.K} over several ranks; it takes up to 128 there"
        return None

    def drawback(self, problem: Problem, device: torch.device) -> str | None:
        """The reason for which `auto` should take another backend that can run the call, or None."""
        return None

    def build(self, problem: Problem, t: Tensors) -> Executable:
        """The plan of a call that meets no obstacle, or of its backward pass."""

    def parts(self, problem: ChunkProblem, chunks: Sequence[int], device: torch.device) -> tuple[tuple[int, ...], bool]:
        """Segments that each sequence is cut into, from its `chunks` (`problem/split.py`), and whether a whole one may be done
        in pieces that begin where a chunk forgets."""
        return (1,) * len(chunks), False


def assume_constant(function: Callable[..., T]) -> Callable[..., T]:
    """torch.compile asks `function` while it traces, and keeps the answer.

    `torch.compiler.assume_constant_result` does no more, but imports torch._dynamo to do it, which takes a second.
    """
    setattr(function, "_dynamo_marked_constant", True)  # noqa: B010 (a type checker knows no such attribute)
    return function


@functools.cache
def _cached_capability(index: int | None) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(index) if torch.cuda.is_available() else None


@assume_constant
def other_vendor() -> str | None:
    """The reason why no GPU is NVIDIA's, or None. ROCm's PyTorch calls AMD's "cuda", too, with capabilities like Hopper's."""
    if torch.version.hip is None:
        return None
    return f"PyTorch is built for AMD GPUs (ROCm {torch.version.hip}); the kernels need an NVIDIA GPU"


@functools.cache
def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


@assume_constant
def has_triton() -> bool:
    return _is_installed("triton")


@assume_constant
def gpu_obstacle(index: int | None, needs: str, majors: range) -> str | None:
    """The reason why kernels can't run on a GPU, or None: the major number of its compute capability, say."""
    capability = None if other_vendor() else _cached_capability(index)
    if capability is None:
        return other_vendor() or "no NVIDIA GPU on this machine"
    if capability[0] not in majors:
        return f"compute capability {capability}; {needs}"
    return None if has_triton() else "Triton is not installed"


def layout(problem: StepProblem | CommitProblem) -> str:
    return f"{problem.state_dtype}, {'V' if problem.state_v_first else 'K'} first"


class HopperBackend(Backend):
    name = "hopper"
    summary = "Gluon kernels for Hopper GPUs (sm_90)"

    HEAD_DIMS = (64, 128)
    CHUNK_SIZE = 64
    MAX_ROWS = 2**31
    """The most of the workspace: TMA coordinates are 32-bit."""

    def obstacle(self, problem: Problem, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"device type {device.type!r}; it runs on NVIDIA Hopper GPUs"
        found = gpu_obstacle(device.index, "it runs on Hopper, (9, 0)", range(9, 10))
        return found or self._common_obstacle(problem) or self._problem_obstacle(problem)

    def _problem_obstacle(self, problem: Problem) -> str | None:
        if isinstance(problem, CommitProblem):
            if not problem.has_records:
                return "no copies of states; it has the chunk form, steps of decoding, and replay"
            return self._record_obstacle(problem) or self._width_obstacle(problem)
        if isinstance(problem, StepProblem):
            return (self._fused_obstacle if problem.operation == "fused_decode" else self._step_obstacle)(problem)
        if not isinstance(problem, ChunkProblem):
            return "no kernels of its own for the layer around attention"
        if isinstance(problem, WyProblem):
            for name, dtype in (("A", problem.A_dtype), ("h", problem.h_dtype), ("dh", problem.dh_dtype)):
                if dtype != torch.bfloat16:
                    return f"{name} in {dtype}; it takes bfloat16"
        if problem.ranks > 1 and problem.T == 0:
            return "no tokens on this rank; it leaves no packet then"
        if obstacle := self._head_obstacle(problem):
            return obstacle
        if problem.output_dtype != problem.dtype:
            return "o in float32; it stores bfloat16"
        if problem.chunk_size != self.CHUNK_SIZE:
            return f"chunk_size {problem.chunk_size}; it takes {self.CHUNK_SIZE}"
        rows = problem.B * problem.slots * problem.HV * (3 * problem.K + 128)
        if rows >= self.MAX_ROWS and problem.operation != "wy":
            return f"more than 2^31 workspace rows ({problem.B} x {problem.T} tokens, {problem.HV} heads)"
        return None

    def _head_obstacle(self, problem: AttentionProblem) -> str | None:
        if problem.dtype != torch.bfloat16:
            return f"dtype {problem.dtype}; it computes in bfloat16"
        return self._width_obstacle(problem)

    def _width_obstacle(self, problem: AttentionProblem | CommitProblem) -> str | None:
        if problem.K not in self.HEAD_DIMS or problem.V not in self.HEAD_DIMS:
            return f"K = {problem.K}, V = {problem.V}; it takes 64 and 128"
        return None

    def _step_obstacle(self, problem: StepProblem) -> str | None:
        """The obstacle to a call token by token."""
        if problem.has_records:
            return self._record_obstacle(problem) or self._head_obstacle(problem)
        if problem.T != 1 or problem.packed or problem.stores_each_state:
            return "several tokens per sequence; token by token it takes one"
        if {problem.state_dtype, problem.final_dtype} != {torch.bfloat16} or not problem.state_v_first:
            return f"states in {layout(problem)}; it takes bfloat16, V first"
        return self._head_obstacle(problem)

    def _fused_obstacle(self, problem: StepProblem) -> str | None:
        """The obstacle to a step of the layer."""
        if problem.T != 1 or problem.packed or problem.stores_each_state or problem.has_records:
            return "several tokens per sequence; in a step of the layer it takes one"
        if problem.dtype == torch.float64:
            return "float64; in a step of the layer it takes bfloat16, float16 and float32"
        if not problem.state_v_first or problem.state_dtype not in (torch.bfloat16, torch.float32):
            return f"states in {layout(problem)}; it takes float32 and bfloat16, V first"
        if problem.K != problem.V:
            return f"K = {problem.K}, V = {problem.V}; in a step of the layer it takes as many"
        return self._width_obstacle(problem)

    def _record_obstacle(self, problem: StepProblem | CommitProblem) -> str | None:
        """The obstacle to writing or replaying records."""
        if problem.state_dtype == torch.float64 or not problem.state_v_first:
            return f"states in {layout(problem)}; it takes float32 and bfloat16, V first"
        return None

    def build(self, problem: Problem, t: Tensors) -> Executable:
        return build_hopper(problem, t)

    def parts(self, problem: ChunkProblem, chunks: Sequence[int], device: torch.device) -> tuple[tuple[int, ...], bool]:
        from .kernels.hopper.build import in_one_launch, in_steps
        from .kernels.hopper.launch import parts
        from .kernels.hopper.segments import SPLIT_COSTS, room

        most = room(problem, device)
        whole = in_steps(problem, most) or in_one_launch(problem, device)
        options = problem.split, problem.batch_invariant
        found = tuple(parts_of_sequences(chunks, 0 if whole else most, SPLIT_COSTS, *options))
        return found, parts(problem, device) > 1


def build_hopper(problem: Problem, t: Tensors, arch: int | None = None) -> Executable:
    """The plan for Hopper; the portable one for steps that its kernels leave: few states, or states on no 16 bytes."""
    from .kernels.hopper.build import build

    plan = build(problem, t, arch)
    if plan is None:
        from .kernels.triton.build import build as portable

        return portable(problem, t, arch)
    return plan


class TritonBackend(Backend):
    name = "triton"
    summary = "portable Triton kernels, sm_80 and newer"

    MAX_ROWS = 2**31
    """The most of a norm: they are divided in 32 bits."""

    def obstacle(self, problem: Problem, device: torch.device) -> str | None:
        if device.type not in ("cpu", "cuda"):
            return f"device type {device.type!r}; it runs on NVIDIA GPUs"
        if device.type == "cuda":
            if found := gpu_obstacle(device.index, "it needs (8, 0) or newer", range(8, 100)):
                return found
        elif not has_triton():
            return "Triton is not installed"
        elif not interpreting():
            return "tensors are on the CPU (TRITON_INTERPRET=1 runs the kernels there, slowly, for testing)"
        if obstacle := self._common_obstacle(problem):
            return obstacle
        if problem.dtype == torch.float64:
            return "float64; it takes bfloat16, float16 and float32"
        if isinstance(problem, NormProblem) and math.prod(problem.shape[:-1]) >= self.MAX_ROWS:
            return "2^31 rows or more"
        if device.type == "cpu" and problem.dtype == torch.bfloat16 and isinstance(problem, ChunkProblem):
            return "the interpreter multiplies bfloat16 wrongly; it takes float16 and float32 there"
        return None

    def drawback(self, problem: Problem, device: torch.device) -> str | None:
        return "the Triton interpreter is for testing" if device.type == "cpu" else None

    def build(self, problem: Problem, t: Tensors) -> Executable:
        from .kernels.triton.build import build  # decorated kernels read TRITON_INTERPRET when first imported

        return build(problem, t)

    def parts(self, problem: ChunkProblem, chunks: Sequence[int], device: torch.device) -> tuple[tuple[int, ...], bool]:
        from .kernels.triton.segments import SPLIT_COSTS, room
        from .program.launch import capability, sm_count

        most = room(problem, capability(device), sm_count(device))
        return tuple(parts_of_sequences(chunks, most, SPLIT_COSTS, problem.split, problem.batch_invariant)), False


def interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


class ReferenceBackend(Backend):
    name = "reference"
    summary = "exact PyTorch, any device, differentiable"
    plain = True

    def build(self, problem: Problem, t: Tensors) -> Executable:
        from .reference import build

        return build(problem, t)


BACKENDS: tuple[Backend, ...] = (HopperBackend(), TritonBackend(), ReferenceBackend())
"""Fastest first; `backend="auto"` takes the first that supports the call and is preferred for it."""

NAMES = ("auto", *(b.name for b in BACKENDS))

KERNEL: Any = object()
"""Passed by integrations instead of "auto": the same choice, but never the reference on a GPU."""


@dataclass(frozen=True)
class Verdict:
    """One backend's answer to a call: can it run it, should it, and the reason when either is no."""

    backend: str
    supported: bool
    preferred: bool
    reason: str


def judge(problem: Problem, device: torch.device) -> list[Verdict]:
    """Every backend's verdict, fastest backend first."""
    verdicts = []
    for backend in BACKENDS:
        obstacle = backend.obstacle(problem, device)
        against = obstacle or backend.drawback(problem, device)
        verdicts.append(Verdict(backend.name, obstacle is None, not against, against or backend.summary))
    return verdicts


def choose(problem: Problem, device: torch.device, name: object = "auto") -> Backend:
    """The backend that runs the call, and its backward pass.

    Raises:
        TypeError: `name` is no name.
        ValueError: `name` is no backend, or that backend can't run this call.
    """
    if name is KERNEL:
        if not (found := choose(problem, device)).plain or device.type == "cpu":
            return found
        reasons = "; ".join([f"{v.backend}: {v.reason}" for v in judge(problem, device) if not v.preferred])
        raise wrong("backend", "none", f"one whose kernels run this call ({reasons})")
    check_name("backend", name, *NAMES)
    if name != "auto":
        backend = next(b for b in BACKENDS if b.name == name)
        obstacle = backend.obstacle(problem, device)
        if obstacle:
            raise wrong("backend", repr(name), f"one that can run this call ({name}: {obstacle})")
        return backend
    able = (b for b in BACKENDS if b.obstacle(problem, device) is None)
    first = next(able)
    return next((b for b in itertools.chain((first,), able) if b.drawback(problem, device) is None), first)
