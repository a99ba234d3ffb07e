"""The portable Triton kernels as a backend."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from ..problem.decode_spec import CommitSpec, CommitTensors
from ..problem.problem import Incoming, Problem, Results, Tensors
from ..problem.split import planned_parts
from ..program.cache import Plan, Recorder
from .base import nvidia_capability

MIN_CAPABILITY = (8, 0)


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


class TritonBackend:
    name = "triton"
    summary = "portable Triton kernels, sm_80 and newer"

    def obstacle(self, problem: Problem | CommitSpec, device: torch.device) -> str | None:
        if device.type == "cpu" and not _interpreting():
            return "tensors are on the CPU (TRITON_INTERPRET=1 runs the kernels there, slowly, for testing)"
        if device.type not in ("cpu", "cuda"):
            return f"device type {device.type!r}; it runs on NVIDIA GPUs"
        if device.type == "cuda":
            capability = nvidia_capability(device.index)
            if capability is None:
                return "no NVIDIA GPU on this machine"
            if capability < MIN_CAPABILITY:
                return f"compute capability {capability}; it needs {MIN_CAPABILITY} or newer"
        if problem.dtype == torch.float64:
            return "float64; it takes bfloat16, float16 and float32"
        if problem.requires_grad and problem.algorithm != "chunk":
            return "an input requires grad and this backend has gradients in chunks only"
        return None

    def drawback(self, problem: Problem | CommitSpec, device: torch.device) -> str | None:
        return "the Triton interpreter is for testing" if device.type == "cpu" else None

    def run(self, problem: Problem, t: Tensors, out: torch.Tensor | None) -> Results:
        from .. import triton as kernels  # decorated kernels read TRITON_INTERPRET when first imported

        return kernels.forward(problem, t, out)

    def plan(
        self, problem: Problem, t: Tensors, given: Sequence[torch.Tensor | None], out: torch.Tensor | None
    ) -> Plan | None:
        from ..program.program import Plan as LaunchPlan
        from ..triton.launch import launches

        return LaunchPlan.make(problem, t, given, out, launches)

    def parts(self, problem: Problem, chunks: torch.Tensor, device: torch.device) -> torch.Tensor:
        from ..program.launch import capability, multiprocessors
        from ..triton import config

        at = capability(device)
        return planned_parts(problem, chunks, config.room(problem, at, multiprocessors(device)), config.SPLIT_COSTS)

    def commit(self, problem: CommitSpec, t: CommitTensors) -> None:
        from .. import triton as kernels

        kernels.commit(problem, t)

    def run_kept(
        self, problem: Problem, t: Tensors, recorder: Recorder | None = None
    ) -> tuple[Results, dict[str, torch.Tensor]]:
        from ..triton.gradients import forward

        return forward(problem, t, recorder)

    def backward(
        self, problem: Problem, t: Tensors, incoming: Incoming, recorder: Recorder | None = None
    ) -> dict[str, torch.Tensor]:
        from ..triton.gradients import backward

        return backward(problem, t, incoming, recorder)
