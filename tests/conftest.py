"""Shared set-up of all tiers."""

from __future__ import annotations

import os

import pytest
import torch

# Kernels must be imported under TRITON_INTERPRET=1; test_triton_interpreter.py starts sessions that are.
collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreter"]


def pytest_configure(config: pytest.Config) -> None:
    # The tensors are tiny: handing pieces of them to other threads costs more than it saves, most of all under xdist.
    torch.set_num_threads(1)
