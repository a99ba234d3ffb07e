"""The portable Triton kernels as a backend."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from ..decode_spec import CommitSpec, CommitTensors
from ..plans import Plan, Recorder
from ..spec import Incoming, KdaSpec, KdaTensors, Results
from ..split import planned_parts
from .base import nvidia_capability

MIN_CAPABILITY = (8, 0)


def _interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


class TritonBackend:
    name = "triton"
    summary = "portable Triton kernels, sm_80 and newer"

    def obstacle(self, spec: KdaSpec | CommitSpec, device: torch.device) -> str | None:
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
        if spec.dtype == torch.float64:
            return "float64; it takes bfloat16, float16 and float32"
        if spec.requires_grad and spec.algorithm != "chunk":
            return "an input requires grad and this backend has gradients in chunks only"
        return None

    def drawback(self, spec: KdaSpec | CommitSpec, device: torch.device) -> str | None:
        return "the Triton interpreter is for testing" if device.type == "cpu" else None

    def run(self, spec: KdaSpec, t: KdaTensors, out: torch.Tensor | None) -> Results:
        from .. import triton as kernels  # decorated kernels read TRITON_INTERPRET when first imported

        return kernels.forward(spec, t, out)

    def plan(
        self, spec: KdaSpec, t: KdaTensors, given: Sequence[torch.Tensor | None], out: torch.Tensor | None
    ) -> Plan | None:
        from ..steps import Plan as LaunchPlan
        from ..triton.launch import launches

        return LaunchPlan.make(spec, t, given, out, launches)

    def parts(self, spec: KdaSpec, chunks: torch.Tensor, device: torch.device) -> torch.Tensor:
        from ..launch import capability, multiprocessors
        from ..triton import config

        at = capability(device)
        return planned_parts(spec, chunks, config.room(spec, at, multiprocessors(device)), config.SPLIT_COSTS)

    def commit(self, spec: CommitSpec, t: CommitTensors) -> None:
        from .. import triton as kernels

        kernels.commit(spec, t)

    def run_kept(
        self, spec: KdaSpec, t: KdaTensors, recorder: Recorder | None = None
    ) -> tuple[Results, dict[str, torch.Tensor]]:
        from ..triton.gradients import forward

        return forward(spec, t, recorder)

    def backward(
        self, spec: KdaSpec, t: KdaTensors, incoming: Incoming, recorder: Recorder | None = None
    ) -> dict[str, torch.Tensor]:
        from ..triton.gradients import backward

        return backward(spec, t, incoming, recorder)
