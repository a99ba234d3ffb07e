"""Which implementation runs a call, and why. No other module knows more than one backend."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..problem.decode_spec import CommitSpec
from ..problem.problem import Problem
from .base import Backend
from .hopper import HopperBackend
from .reference import ReferenceBackend
from .triton import TritonBackend

BACKENDS: tuple[Backend, ...] = (HopperBackend(), TritonBackend(), ReferenceBackend())
"""Fastest first; `backend="auto"` takes the first that supports the call and is preferred for it."""

NAMES = ("auto", *(b.name for b in BACKENDS))


@dataclass(frozen=True)
class Verdict:
    """One backend's answer to a call: can it run it, should it, and the reason when either is no."""

    backend: str
    supported: bool
    preferred: bool
    reason: str


def judge(problem: Problem | CommitSpec, device: torch.device) -> list[Verdict]:
    """Every backend's verdict, fastest backend first."""
    verdicts = []
    for backend in BACKENDS:
        obstacle = backend.obstacle(problem, device)
        drawback = None if obstacle else backend.drawback(problem, device)
        verdicts.append(
            Verdict(backend.name, obstacle is None, not (obstacle or drawback), obstacle or drawback or backend.summary)
        )
    return verdicts


def choose(problem: Problem | CommitSpec, device: torch.device, name: str = "auto") -> Backend:
    """The backend that runs the call, and its backward pass.

    Raises:
        ValueError: `name` is no backend, or that backend can't run this call.
    """
    if name != "auto":
        for backend in BACKENDS:
            if backend.name == name:
                obstacle = backend.obstacle(problem, device)
                if obstacle:
                    raise ValueError(f"backend: got {name!r}, wanted one that can run this call ({name}: {obstacle})")
                return backend
    if name not in NAMES:
        raise ValueError(f"backend: got {name!r}, wanted one of {NAMES}")
    able = [b for b in BACKENDS if b.obstacle(problem, device) is None]
    if not able:
        reasons = "; ".join(f"{v.backend}: {v.reason}" for v in judge(problem, device))
        raise ValueError(f"backend: no backend can run this call ({reasons})")
    return next((b for b in able if b.drawback(problem, device) is None), able[0])
