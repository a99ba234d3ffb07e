"""Devices by name."""

from __future__ import annotations

import torch

from ..problem.errors import mistyped, rule, wrong


def named_device(name: torch.device | str) -> torch.device:
    """The device of that name, whether it is there or not.

    Raises:
        TypeError: no name.
        ValueError: a name of no device.
    """
    if not isinstance(name, (str, torch.device)):
        raise mistyped("device", name, "a torch.device or its name")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise wrong("device", repr(name), "a device such as cuda, cuda:1 or cpu") from error


def find_device(name: torch.device | str) -> torch.device:
    """The device of that name; raises as `named_device`.

    Raises:
        ValueError: a device that is not there.
    """
    device = named_device(name)
    gpus = torch.cuda.device_count()
    there = device.type == "cpu" or (device.type == "cuda" and (device.index or 0) < gpus)
    rule("device", there, f"cpu or one of the {gpus} CUDA devices that torch sees", repr(str(name)))
    return device
