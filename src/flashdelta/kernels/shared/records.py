"""Replay records: what a token changes of a head's state, `S_t = diag(exp(g)) S_(t-1) + k u^T`, in `record_width` numbers.

`exp(g)` `[K]`, `k` `[K]`, `u` `[V]`, then counts. Those of a row's first token say how many tokens are recorded, each to one
slice of the value channels, so that CTAs may clear them without waiting for one another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...problem import problem
from .states import everywhere, named_slot, target_slot

COUNTS = tl.constexpr(problem.RECORD_COUNTS)
record_width = triton.constexpr_function(problem.record_width)


@triton.jit
def store_decay_and_key(records, at, stored, exp_g, k, K):
    """`exp(g)` and `k`, which are the same for all slices of a head."""
    tl.store(records + at, exp_g, mask=stored)
    tl.store(records + K + at, k, mask=stored)


@triton.jit
def record_values(records, K):
    """Returns the address of `u` of a token and head."""
    return records + 2 * K


@triton.jit
def load_record(records, there, key, value, K):
    """`exp(g)` and `k` `[K]`, `u` `[BV]` of a token; zeros if it is not `there`."""
    exp_g = tl.load(records + key, mask=everywhere(key, there), other=0.0)
    k = tl.load(records + K + key, mask=everywhere(key, there), other=0.0)
    return exp_g, k, tl.load(record_values(records, K) + value, mask=everywhere(value, there), other=0.0)


@triton.jit
def record_counts(records, K, V):
    """Returns the address of the counts of a row and head."""
    return records + 2 * K + V


@triton.jit
def open_record(
    records, starts, targets, n, head, slot, count, slice_, start_row, target_row, target_pitch, lowest, start_slots,
    target_slots, counts, K, V,
):  # fmt: skip
    """The record of sequence `n` and a head, with the `count` of its tokens stored in all its `counts`, and whether they are to
    be stored. A null sequence leaves its row alone."""
    row, has_row = target_slot(targets, n * target_row, slot, 0, target_slots)
    if starts is not None:
        _, named = named_slot(starts, n * start_row, lowest, start_slots)
        has_row &= named
    records += row * target_pitch + head * record_width(K, V)
    counted = everywhere(counts, has_row & (slice_ == 0))
    tl.store(record_counts(records, K, V) + counts, count.to(tl.float32), mask=counted)
    return records, has_row & (count > 0)
