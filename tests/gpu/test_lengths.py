"""Every tail of a chunk, and packed calls of random lengths: each sequence is held to its own tolerance."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch

import flashdelta as fd

from ..support.cases import BF16, FP32, Case
from ..support.inputs import sequence_calls
from ..support.oracle import chunked_truth, same_bits, tolerance_of
from .calls import assert_same_bits, gpu_call, hold, hold_each, joined, lengths_between, of_sequence, poisoned

pytestmark = pytest.mark.gpu

TAILS = tuple(chunks * 64 + tail for tail in range(65) for chunks in (0, 2))


@pytest.mark.parametrize("state", [None, FP32], ids=["fresh", "carried"])
def test_every_tail(state: torch.dtype | None, model: Case, backend: str):
    """Sequences of 0 to 64 and of 128 to 192 tokens in one packed call, and each as a call of its own."""
    # enough heads that rounding evens out at 8 tokens: see `tolerance_of`
    case = replace(model, H=8, HV=8, lengths=TAILS, state=state, v_first=True)
    call = gpu_call(fd.chunk_kda, case, BF16, backend)
    results, want = poisoned(call), chunked_truth(call)
    hold(call, results, want)
    hold_each(call, results, want)
    assert_same_bits(results, joined(poisoned(one) for one in sequence_calls(call)))


@pytest.mark.parametrize("count", [1, 2, 7, 40, 200, 600])
def test_random_packings(count: int, model: Case, backend: str):
    """Up to 600 sequences of 0 to 3000 tokens. Some, the longest among them, are held against the truth, and all against the
    portable backend, which is within its tolerance of the truth too."""
    lengths = lengths_between(count, count, longest=3000)
    heads = {"H": 2, "HV": 4} if count % 2 else {"H": 4, "HV": 4}
    case = replace(model, **heads, lengths=lengths, unused=count % 5, state=FP32, v_first=True)
    # the plan of a split depends on the batch
    call = gpu_call(fd.chunk_kda, case, BF16, backend) | {"split": False}
    results = poisoned(call)
    if backend != "triton":
        portable = poisoned(call | {"backend": "triton"})
        hold_each(call, results, portable, slack=(tolerance_of(call),) * 2)
    singles = sequence_calls(call)
    filled = [n for n, length in enumerate(lengths) if length > 0]
    picked = {max(filled, key=lambda n: lengths[n]), *Random(count).sample(filled, min(4, len(filled)))}
    for n in sorted(picked):
        own = of_sequence(call, results, n)
        hold(singles[n], own, chunked_truth(singles[n]))
        assert_same_bits(poisoned(singles[n]), own)
    for n in set(range(count)) - set(filled):
        assert same_bits(results[1][n], call["initial_state"][n])
