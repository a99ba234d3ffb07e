"""The Gluon kernels for Hopper as a backend."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence

import torch

from ..decode_spec import CommitSpec, CommitTensors
from ..plans import Plan, Recorder
from ..spec import Incoming, KdaSpec, KdaTensors, Results
from ..split import planned_parts
from ..wy_spec import WySpec
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


def _head_obstacle(spec: KdaSpec | WySpec) -> str | None:
    if spec.dtype != torch.bfloat16:
        return f"dtype {spec.dtype}; it computes in bfloat16"
    if spec.K not in HEAD_DIMS or spec.V not in HEAD_DIMS:
        return f"K = {spec.K}, V = {spec.V}; it takes 64 and 128"
    return None


def _shape_obstacle(spec: KdaSpec | WySpec) -> str | None:
    if obstacle := _head_obstacle(spec):
        return obstacle
    if spec.chunk_size != CHUNK_SIZE:
        return f"chunk_size {spec.chunk_size}; it takes {CHUNK_SIZE}"
    return None


def _step_obstacle(spec: KdaSpec | CommitSpec) -> str | None:
    """Why it can't run a call token by token."""
    if isinstance(spec, CommitSpec):
        return "no recurrence; it has the chunk form and steps of decoding"
    if spec.T != 1 or spec.packed or spec.stores_each_state:
        return "several tokens a sequence; token by token it takes one"
    if spec.state_dtype != torch.bfloat16 or not spec.state_v_first:
        return f"states in {spec.state_dtype}, {'V' if spec.state_v_first else 'K'} first; it takes bfloat16, V first"
    if obstacle := _head_obstacle(spec):
        return obstacle
    if spec.requires_grad:
        return "an input requires grad; it has gradients in chunks only"
    return None


def wy_obstacle(spec: WySpec, device: torch.device) -> str | None:
    """Why Hopper's kernel can't run a call of `kernels.chunk_bwd_wy_dqkg`, or None if it can."""
    for name, dtype in (("A", spec.A_dtype), ("h", spec.state_dtype), ("dh", spec.state_grad_dtype)):
        if dtype != torch.bfloat16:
            return _gpu_obstacle(device) or f"{name} in {dtype}; it takes bfloat16"
    return _gpu_obstacle(device) or _shape_obstacle(spec)


class HopperBackend:
    name = "hopper"
    summary = "Gluon kernels for Hopper GPUs (sm_90)"

    def obstacle(self, spec: KdaSpec | CommitSpec, device: torch.device) -> str | None:
        if obstacle := _gpu_obstacle(device):
            return obstacle
        if spec.algorithm != "chunk":
            return _step_obstacle(spec)
        if obstacle := _shape_obstacle(spec):
            return obstacle
        if spec.B * spec.slots * spec.HV * (3 * spec.K + 128) >= MAX_ROWS:
            return f"more than 2^31 workspace rows ({spec.B} x {spec.T} tokens, {spec.HV} heads)"
        return None

    def drawback(self, spec: KdaSpec | CommitSpec, device: torch.device) -> str | None:
        return None

    def parts(self, spec: KdaSpec, chunks: torch.Tensor, device: torch.device) -> torch.Tensor:
        from ..hopper import launch

        return planned_parts(spec, chunks, launch.room(spec, device), launch.SPLIT_COSTS)

    def run(self, spec: KdaSpec, t: KdaTensors, out: torch.Tensor | None) -> Results:
        from ..hopper.launch import forward

        return forward(spec, t, out)

    def plan(
        self, spec: KdaSpec, t: KdaTensors, given: Sequence[torch.Tensor | None], out: torch.Tensor | None
    ) -> Plan | None:
        from ..hopper.launch import launches, takes
        from ..steps import Plan as LaunchPlan

        if not takes(spec, out):
            return None  # its rows are copied from a dense output
        return LaunchPlan.make(spec, t, given, out, launches)

    def commit(self, spec: CommitSpec, t: CommitTensors) -> None:
        raise NotImplementedError("it has the chunk form and steps of decoding only")

    def run_kept(
        self, spec: KdaSpec, t: KdaTensors, recorder: Recorder | None = None
    ) -> tuple[Results, dict[str, torch.Tensor]]:
        from ..hopper.gradients import forward

        return forward(spec, t, recorder)

    def backward(
        self, spec: KdaSpec, t: KdaTensors, incoming: Incoming, recorder: Recorder | None = None
    ) -> dict[str, torch.Tensor]:
        from ..hopper.gradients import backward

        return backward(spec, t, incoming, recorder)
