"""Calls on the GPU: what the tests of this tier share."""

from __future__ import annotations

from dataclasses import replace

import torch

import flashdelta as fd

from ..cases import BF16, BY_NAME, Case
from ..inputs import make_call
from ..oracle import (
    TOLERANCE,
    as_recurrent,
    assert_close,
    chunked_truth,
    covered_tokens,
    poisoned_memory,
    rounding_error,
    state_tolerance,
    truth,
)

BOTH = [fd.chunk_kda, fd.fused_recurrent_kda]

KIMI = replace(BY_NAME["bounded"], name="kimi", K=128, V=128, H=4, HV=4, T=200)
"""As Kimi-K3 calls it: bounded gate, L2 norm and beta's sigmoid in the kernel."""

UNBOUNDED = replace(BY_NAME["softplus"], name="unbounded", K=128, V=128, H=4, HV=4, T=200)
"""As Kimi-Linear calls it."""


def on_gpu(case: Case) -> Case:
    """The case at the head dimensions of the models, still with K != V."""
    return replace(case, K=128, V=64) if case.K == 32 else case


def gpu_call(op, case: Case, dtype: torch.dtype = BF16, backend: str = "triton", seed: int = 0) -> dict:
    call = make_call(case, dtype, "cuda", seed) | {"backend": backend}
    return call if op is fd.chunk_kda else as_recurrent(call)


def check(op, case: Case, dtype: torch.dtype = BF16, backend: str = "triton") -> None:
    """Holds `o`, the final state and `h` against the truth. `out` and every allocation start as NaN."""
    call = gpu_call(op, case, dtype, backend)
    out = torch.full(call["v"].shape, torch.nan, dtype=dtype, device="cuda")
    with poisoned_memory():
        results = op(**call | {"out": out})
    assert results[0] is out
    want = truth(call) if case.tokens < 300 else chunked_truth(call)
    # a kernel rounds in a few more places than the exact algorithm does
    slack = [2 * error for error in rounding_error(call)] if case.ill_conditioned else (0.0, 0.0)
    hold(call, results, want, slack)
    if case.h and op is fd.chunk_kda:
        assert_close("h", results[2], chunked_truth(call)[2], TOLERANCE[dtype])


def hold(call: dict, results: tuple, want: tuple, slack: tuple[float, float] = (0.0, 0.0)) -> None:
    dtype, tokens = call["q"].dtype, covered_tokens(call)
    assert_close("o", results[0][:, tokens], want[0][:, tokens], TOLERANCE[dtype] + slack[0])
    if call["output_final_state"]:
        assert_close("final_state", results[1], want[1], state_tolerance(dtype, results[1].dtype) + slack[1])
    else:
        assert results[1] is None
