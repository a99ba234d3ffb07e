"""The L2 norm of rows of q and k."""

from __future__ import annotations

import triton
import triton.language as tl

from ...problem import problem

L2_EPS = tl.constexpr(problem.L2_EPS)


@triton.jit
def norms_at(x, rows, valid, K, BK, COUNT):
    """`1 / sqrt(sum x^2 + eps)` of `COUNT` rows, read `BK` channels at a time."""
    total = tl.zeros([COUNT], tl.float32)
    for s in tl.range(0, K, BK):
        tile = tl.load(x + rows + s + tl.arange(0, BK)[None, :], mask=valid, other=0.0).to(tl.float32)
        total += tl.sum(tile * tile, axis=1)
    return 1.0 / tl.sqrt(total + L2_EPS)


@triton.jit
def norm_factors_at(x, tokens, valid, C, K, BK, L2NORM):
    """Factors of a chunk's rows, `[C]`: `norms_at`, or 1 without `L2NORM`."""
    norm = tl.full([C], 1.0, tl.float32)
    if L2NORM:
        norm = norms_at(x, tokens, valid[:, None], K, BK, C)
    return norm
