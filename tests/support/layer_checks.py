"""Checks of every backend's `gated_rms_norm` and `short_convolution`."""

from __future__ import annotations

import torch

import flashdelta as fd

from .held import run_held
from .layer import ConvolutionCase, NormCase, gradients, make_convolution, make_norm
from .oracle import poisoned_memory, relative_error, same_bits

TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 3e-6, torch.float64: 1e-12}


def check_norm(case: NormCase, dtype: torch.dtype, backend: str = "auto", device: str = "cpu") -> None:
    run_held(fd.gated_rms_norm, make_norm(case, dtype, device) | {"backend": backend}, TOLERANCE[dtype])


def check_convolution(case: ConvolutionCase, dtype: torch.dtype, backend: str = "auto", device: str = "cpu") -> None:
    """States are inputs, to the bit."""
    call = make_convolution(case, dtype, device) | {"backend": backend}
    run_held(fd.short_convolution, call, TOLERANCE[dtype], lambda dtype: 0.0)


def check_gradients(op, call: dict, backend: str = "auto", repeats: int = 0) -> None:
    """Against those of the reference in float64; `repeats` have the same bits."""
    want = gradients(op, call, torch.float64)
    with poisoned_memory():
        found, *again = (gradients(op, call | {"backend": backend}) for _ in range(1 + repeats))
    for name, x in found.items():
        assert x.shape == want[name].shape and relative_error(x, want[name]) <= TOLERANCE[call["x"].dtype], name
        assert all(same_bits(other[name], x) for other in again), name
