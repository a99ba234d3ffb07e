"""The device that a command runs on."""

from __future__ import annotations

import torch

from ...problem.errors import wrong
from ..bench.environment import default_device


def find_device(name: str | None) -> torch.device:
    """The device of that name; None takes a GPU where there is one.

    Raises:
        ValueError: a name of no device, or a device that is not there.
    """
    if name is None:
        return default_device()
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise wrong("device", repr(name), "a device such as cuda, cuda:1 or cpu") from error
    gpus = torch.cuda.device_count()
    if device.type not in ("cuda", "cpu") or (device.type == "cuda" and (device.index or 0) >= gpus):
        raise wrong("device", repr(name), f"cpu or one of the {gpus} CUDA devices that torch sees")
    return device
