"""The measure of results: the float64 truth and the measures of error.

The truth is the token-by-token recurrence in float64. The error of a tensor is `||x - ref|| / ||ref||`. That alone
would let one wrong token hide among thousands of right ones, so every row (last dimension) is held to a bound too.
NaN fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

import flashdelta as fd
from flashdelta.runtime.call import check
from flashdelta.tools.cases import CHUNK_ONLY, TOLERANCE, as_recurrent, float64, relative_error, truth  # noqa: F401

from . import rounding
from .cases import Case

TOLERANCE = TOLERANCE | {torch.float64: 1e-11}
"""Relative error that a kernel working in this dtype may have."""

FEW_TOKENS, TOLERANCE_FOR_FEW = 8, 1e-2
"""In bfloat16, where every sequence has fewer tokens: see `tolerance_of`."""

ILL_CONDITIONED = 5
"""How many times as much rounding costs in the ill-conditioned cases: of operands to bfloat16 2.0e-2 instead of 3.7e-3
(`rounding_error`). In float32 what is left depends on the order of a matrix product's sums, so on the processor."""

ROW_FACTOR = 10
"""How many tolerances the worst row may be off: rounding spreads evenly, a wrong row is off by its own size."""

NO_H = {"return_intermediate_states": False}
"""Arguments of a `chunk_kda` that returns no states before chunks."""


def one_rounding(dtype: torch.dtype) -> float:
    """The largest relative error of rounding a number to `dtype` once."""
    return torch.finfo(dtype).eps / 2


def state_tolerance(dtype: torch.dtype, state_dtype: torch.dtype) -> float:
    """For a state that a kernel working in `dtype` rounds once to `state_dtype` on its way out."""
    return TOLERANCE[dtype] + one_rounding(state_dtype)


def row_excess(got: Tensor, want: Tensor) -> Tensor:
    """Error of each row over the larger of its own and the root-mean-square row norm, `[...]`."""
    got, want = got.detach().double(), want.detach().double()
    size = want.norm(dim=-1)
    return (got - want).norm(dim=-1) / size.clamp(min=size.square().mean().sqrt().clamp(min=1e-300).item())


def worst_coordinates(got: Tensor, want: Tensor, count: int = 5) -> str:
    """The coordinates that are furthest off (NaN first), one per line."""
    got, want = got.detach().double(), want.detach().double()
    distance = (got - want).abs().nan_to_num(nan=torch.inf)
    lines = []
    for flat in distance.flatten().topk(min(count, distance.numel())).indices.tolist():
        at = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), got.shape))
        lines.append(f"  {list(at)}: got {got[at].item():.9g}, wanted {want[at].item():.9g}")
    return "\n".join(lines)


def assert_close(name: str, got: Tensor, want: Tensor, tolerance: float) -> None:
    """Fails on another shape, a NaN, or an error above `tolerance` in all or `ROW_FACTOR` times it in a row."""
    assert got.shape == want.shape, f"{name}: shape {list(got.shape)}, wanted {list(want.shape)}"
    if got.numel() == 0:
        return
    error = relative_error(got, want)
    row = row_excess(got, want).max().item()
    if not (error <= tolerance and row <= ROW_FACTOR * tolerance):
        raise AssertionError(
            f"{name}: relative error {error:.3g} (at most {tolerance:.3g}), worst row {row:.3g} "
            f"(at most {ROW_FACTOR * tolerance:.3g}); worst coordinates of {list(got.shape)}:\n"
            + worst_coordinates(got, want)
        )


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    """Equality to the bit: NaN equals the same NaN, and 0.0 is not -0.0."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    plain = (x.detach().clone(memory_format=torch.contiguous_format) for x in (a, b))
    return torch.equal(*(x.view(-1).view(torch.uint8) for x in plain))


def chunked_truth(call: dict) -> tuple:
    """`(o, final_state, h)` by the chunked reference in float64: much faster, and equal (`test_reference.py`)."""
    asked = {"output_final_state": True, "return_intermediate_states": True, "backend": "reference", "out": None}
    return fd.chunk_kda(**float64(call) | asked)


def check_h(call: dict, h: Tensor, tolerance: float) -> None:
    """Holds the states before chunks against the truth."""
    assert h.dtype == call["q"].dtype
    assert_close("h", h, chunked_truth(call)[2], tolerance)


def lengths_of(call: dict) -> list[int]:
    """Tokens of every sequence."""
    cu_seqlens = call.get("cu_seqlens")
    return [call["q"].shape[1]] * call["q"].shape[0] if cu_seqlens is None else cu_seqlens.diff().tolist()


def tolerance_of(call: dict) -> float:
    """`TOLERANCE` of the call's dtype, and more in bfloat16 for sequences of a few tokens.

    Errors of single elements have the same spread at any length, and a norm over many of them is steady. Over the few
    terms and rows of a short sequence it is not: rounding operands alone costs 2.9e-3 at 64 tokens, give or take 3%, and
    up to 4.7e-3 at one token (and a kernel errs half as much again).
    """
    dtype = call["q"].dtype
    few = dtype == torch.bfloat16 and all(length < FEW_TOKENS for length in lengths_of(call))
    return TOLERANCE_FOR_FEW if few else TOLERANCE[dtype]


def rounding_error(call: dict) -> tuple[float, float]:
    """`rounding.rounding_error` of a `chunk_kda` call that is not packed."""
    return rounding.rounding_error(*check(fd.chunk_kda, **call))


def covered_tokens(call: dict) -> slice:
    """The tokens that belong to some sequence: rows of `o` past the last offset are undefined."""
    cu_seqlens = call.get("cu_seqlens")
    return slice(None) if cu_seqlens is None else slice(0, int(cu_seqlens[-1]))


def conditioning(case: Case, dtype: torch.dtype) -> float:
    """The factor on the tolerance of a chunked result."""
    return ILL_CONDITIONED if case.ill_conditioned and dtype == torch.float32 else 1.0


def assert_right(op, call: dict, factor: float = 1.0) -> tuple:
    """Runs `op(**call)` and holds every result against the truth; returns the results. `factor` is on the tolerance of the
    dtype."""
    dtype = call["q"].dtype
    results, want = op(**call), truth(call)
    tokens = covered_tokens(call)
    assert results[0].dtype == call["v"].dtype
    assert_close("o", results[0][:, tokens], want[0][:, tokens], factor * TOLERANCE[dtype])
    if call.get("output_final_state"):
        assert_close("final_state", results[1], want[1], factor * state_tolerance(dtype, results[1].dtype))
    else:
        assert results[1] is None
    return results


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` hands out NaN (all ones in integers), so that reading what nobody wrote shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = filled
