"""Products that lanes of a warp sum.

LLVM fuses a product into the addition that follows. Where a lane has one product of a sum, that is the addition of another
lane's: its own product enters exactly, the other's rounded. So lanes differ in the last bit of one sum, and race to store it at
one address. Rounded products stay as they are; of several a lane each but the first then costs an addition.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import num_threads

INTERPRETED = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def rounded_product(a, b):
    """`a b` by an FMA, which nothing is fused with. `a b + 0.0` is no such thing: of a square LLVM drops the 0."""
    return tl.fma(a, b, 0.0)


@triton.jit
def summand(a, b, OTHERS=1):
    """`a b`, rounded where a thread may have one product of a sum: where the tile has no more elements per thread than
    `OTHERS`, those that one has along the axis that stays. The interpreter knows of no threads."""
    return rounded_product(a, b) if INTERPRETED or a.numel <= OTHERS * num_threads() else a * b
