"""Long inputs: 64K tokens, and tensors of more than 2^31 elements."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashdelta as fd

from ..support.cases import BF16, BY_NAME, FP32, Case, case_id
from ..support.inputs import TOKEN_TENSORS, sequence_calls
from ..support.oracle import chunked_truth
from .calls import KIMI, UNBOUNDED, assert_same_bits, gpu_call, hold, of_sequence

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("much_memory")]

INT32_LIMIT = 2**31


@pytest.mark.parametrize(
    "case",
    [
        replace(KIMI, T=65_536),
        replace(UNBOUNDED, lengths=(65_536 - 1000, 0, 1000), state=FP32, v_first=True),
        replace(BY_NAME["no_decay"], name="64K without decay", T=65_536, H=2, HV=2, K=128, V=128),
        replace(BY_NAME["pinned"], name="64K pinned at the bound", T=65_536, H=2, HV=2, K=128, V=128),
    ],
    ids=case_id,
)
def test_64k_tokens(case: Case, backend: str):
    call = gpu_call(fd.chunk_kda, case, BF16, backend)
    hold(call, fd.chunk_kda(**call), chunked_truth(call))


def _big(*shape: int, **kinds) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", **kinds)


def test_more_than_2_31_elements_in_a_tensor(backend: str):
    """270,000 tokens x 64 heads x 128: the second sequence crosses element 2^31, the third lies past it.

    Both must give the bits they give alone, where every offset is small, and the second is held against the truth.
    """
    H, K, lengths = 64, 128, (261_000, 2_333, 6_667)
    T = sum(lengths)
    assert lengths[0] * H * K < INT32_LIMIT < sum(lengths[:2]) * H * K
    small = gpu_call(fd.chunk_kda, replace(KIMI, H=H, HV=H, T=1), BF16, backend)
    call = small | {name: _big(1, T, H, K, dtype=BF16) for name in ("q", "k", "v", "g")}
    call["beta"] = _big(1, T, H, dtype=BF16)
    call["cu_seqlens"] = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    results = fd.chunk_kda(**call)
    for n in (1, 2):
        one = sequence_calls(call)[n]
        alone = one | {name: one[name].clone() for name in TOKEN_TENSORS}
        found = fd.chunk_kda(**alone)
        assert_same_bits(found, of_sequence(call, results, n))
        if n == 1:
            hold(alone, found, chunked_truth(alone))
    assert results[1].isfinite().all()


def test_more_than_2_31_elements_of_state(op, backend: str):
    """2,100 sequences of one or two tokens, each with its state, as a decode batch has."""
    H, K, N = 64, 128, 2_100
    assert N * H * K * K > INT32_LIMIT
    lengths = tuple(1 + n % 2 for n in range(N))
    case = replace(KIMI, H=H, HV=H, lengths=lengths, v_first=True)
    call = gpu_call(op, case, BF16, backend)
    call["initial_state"] = _big(N, H, K, K, dtype=FP32)
    results, calls = op(**call), sequence_calls(call)
    for n in (0, N // 2, N - 3, N - 2, N - 1):
        one = calls[n] | {"initial_state": calls[n]["initial_state"].clone()}
        found = op(**one)
        assert_same_bits(found, of_sequence(call, results, n))
        hold(one, found, chunked_truth(one))
