"""Beside flash-linear-attention on the same inputs: never more than 1.1 times its error."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashdelta as fd
from benchmarks.contenders import shared

from ..support.cases import BF16, BY_NAME, Case, case_id
from ..support.oracle import chunked_truth, relative_error, rounding_error
from .calls import KIMI, gpu_call, peer

pytestmark = pytest.mark.gpu

CASES = [
    replace(KIMI, name="fixed", H=32, HV=32, T=2048),
    replace(KIMI, name="packed", H=32, HV=32, lengths=(1300, 547, 0, 201)),
    *(
        replace(BY_NAME[name], H=32, HV=32, K=128, V=128)
        for name in ("same_keys_unsafe", "same_keys_2", "no_decay", "g-50")
    ),
]


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_error_is_not_above_flas(case: Case, backend: str):
    fla = peer("fla")
    call = gpu_call(fd.chunk_kda, case, BF16, backend)
    results, want = fd.chunk_kda(**call), chunked_truth(call)
    with torch.no_grad():
        fla_results = fla(**shared(call))
    print(f"{case.name}: rounding alone {rounding_error(call) if case.lengths is None else '-'}")
    for name, ours, theirs, exact in zip(("o", "final_state"), results, fla_results, want):
        error, fla_error = relative_error(ours, exact), relative_error(theirs, exact)
        print(f"{case.name} {name}: ours {error:.3g}, FLA {fla_error:.3g}")
        assert error <= 1.1 * fla_error, f"{name}: error {error:.3g}, FLA's is {fla_error:.3g}"
