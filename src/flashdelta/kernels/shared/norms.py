"""The L2 norm of rows of q and k."""

from __future__ import annotations

import triton
import triton.language as tl

from ...problem import problem

L2_EPS = tl.constexpr(problem.L2_EPS)


@triton.jit
def norm_factors_at(x, tokens, valid, C, K, BK, L2NORM):
    """`1 / sqrt(sum x^2 + eps)` of a chunk's rows, `[C]`, read `BK` channels at a time; 1 without `L2NORM`."""
    norm = tl.full([C], 1.0, tl.float32)
    if L2NORM:
        total = tl.zeros([C], tl.float32)
        for s in tl.range(0, K, BK):
            tile = tl.load(x + tokens + s + tl.arange(0, BK)[None, :], mask=valid[:, None], other=0.0).to(tl.float32)
            total += tl.sum(tile * tile, axis=1)
        norm = 1.0 / tl.sqrt(total + L2_EPS)
    return norm
