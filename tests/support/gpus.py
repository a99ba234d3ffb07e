"""The GPUs that processes are told to see."""

from __future__ import annotations

import os

import torch


def visible_gpus() -> list[str]:
    """Their names in CUDA_VISIBLE_DEVICES, which CUDA reads once, as it starts."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count()))))
    return named.split(",")
