"""The Gluon kernels for Hopper as a backend."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence

import torch

from ..problem.decode_spec import CommitSpec, CommitTensors
from ..problem.problem import Incoming, Problem, Results, Tensors
from ..problem.split import planned_parts
from ..problem.wy_spec import WySpec
from ..program.cache import Plan, Recorder
from .base import assume_constant, nvidia_capability

MAX_ROWS = 2**31
"""Of the workspace: TMA coordinates are 32-bit."""


@assume_constant
def has_gluon() -> bool:
    """Asked once there is a GPU: the answer imports Triton."""
    return _found_gluon()


@functools.cache
def _found_gluon() -> bool:
    try:
        return importlib.util.find_spec("triton.experimental.gluon.language.nvidia.hopper") is not None
    except ModuleNotFoundError:
        return False


HEAD_DIMS = (64, 128)
CHUNK_SIZE = 64


def _gpu_obstacle(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"device type {device.type!r}; it runs on NVIDIA Hopper GPUs"
    capability = nvidia_capability(device.index)
    if capability is None:
        return "no NVIDIA GPU on this machine"
    if capability[0] != 9:
        return f"compute capability {capability}; it runs on Hopper, (9, 0)"
    if not has_gluon():
        return "this Triton has no Gluon for Hopper; it needs Triton 3.6 or newer"
    return None


def _head_obstacle(problem: Problem | WySpec) -> str | None:
    if problem.dtype != torch.bfloat16:
        return f"dtype {problem.dtype}; it computes in bfloat16"
    if problem.K not in HEAD_DIMS or problem.V not in HEAD_DIMS:
        return f"K = {problem.K}, V = {problem.V}; it takes 64 and 128"
    return None


def _shape_obstacle(problem: Problem | WySpec) -> str | None:
    if obstacle := _head_obstacle(problem):
        return obstacle
    if problem.chunk_size != CHUNK_SIZE:
        return f"chunk_size {problem.chunk_size}; it takes {CHUNK_SIZE}"
    return None


def _step_obstacle(problem: Problem | CommitSpec) -> str | None:
    """Why it can't run a call token by token."""
    if isinstance(problem, CommitSpec):
        return "no recurrence; it has the chunk form and steps of decoding"
    if problem.T != 1 or problem.packed or problem.stores_each_state:
        return "several tokens a sequence; token by token it takes one"
    if problem.state_dtype != torch.bfloat16 or not problem.state_v_first:
        return f"states in {problem.state_dtype}, {'V' if problem.state_v_first else 'K'} first; it takes bfloat16, V first"
    if obstacle := _head_obstacle(problem):
        return obstacle
    if problem.requires_grad:
        return "an input requires grad; it has gradients in chunks only"
    return None


def wy_obstacle(problem: WySpec, device: torch.device) -> str | None:
    """Why Hopper's kernel can't run a call of `kernels.chunk_bwd_wy_dqkg`, or None if it can."""
    for name, dtype in (("A", problem.A_dtype), ("h", problem.state_dtype), ("dh", problem.state_grad_dtype)):
        if dtype != torch.bfloat16:
            return _gpu_obstacle(device) or f"{name} in {dtype}; it takes bfloat16"
    return _gpu_obstacle(device) or _shape_obstacle(problem)


class HopperBackend:
    name = "hopper"
    summary = "Gluon kernels for Hopper GPUs (sm_90)"

    def obstacle(self, problem: Problem | CommitSpec, device: torch.device) -> str | None:
        if obstacle := _gpu_obstacle(device):
            return obstacle
        if problem.algorithm != "chunk":
            return _step_obstacle(problem)
        if obstacle := _shape_obstacle(problem):
            return obstacle
        if problem.B * problem.slots * problem.HV * (3 * problem.K + 128) >= MAX_ROWS:
            return f"more than 2^31 workspace rows ({problem.B} x {problem.T} tokens, {problem.HV} heads)"
        return None

    def drawback(self, problem: Problem | CommitSpec, device: torch.device) -> str | None:
        return None

    def parts(self, problem: Problem, chunks: torch.Tensor, device: torch.device) -> torch.Tensor:
        from ..hopper import launch

        return planned_parts(problem, chunks, launch.room(problem, device), launch.SPLIT_COSTS)

    def run(self, problem: Problem, t: Tensors, out: torch.Tensor | None) -> Results:
        from ..hopper.launch import forward

        return forward(problem, t, out)

    def plan(
        self, problem: Problem, t: Tensors, given: Sequence[torch.Tensor | None], out: torch.Tensor | None
    ) -> Plan | None:
        from ..hopper.launch import launches, takes
        from ..program.program import Plan as LaunchPlan

        if not takes(problem, out):
            return None  # its rows are copied from a dense output
        return LaunchPlan.make(problem, t, given, out, launches)

    def commit(self, problem: CommitSpec, t: CommitTensors) -> None:
        raise NotImplementedError("it has the chunk form and steps of decoding only")

    def run_kept(
        self, problem: Problem, t: Tensors, recorder: Recorder | None = None
    ) -> tuple[Results, dict[str, torch.Tensor]]:
        from ..hopper.gradients import forward

        return forward(problem, t, recorder)

    def backward(
        self, problem: Problem, t: Tensors, incoming: Incoming, recorder: Recorder | None = None
    ) -> dict[str, torch.Tensor]:
        from ..hopper.gradients import backward

        return backward(problem, t, incoming, recorder)
