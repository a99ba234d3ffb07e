"""The portable kernels in bfloat16 with bounded decays, interpreted: `prepare_mma`."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

import flashdelta as fd
from flashdelta.kernels.triton import prepare

from ..gpu.calls import hold, slack_of
from ..support.cases import BF16, Case, case_id
from ..support.gradients import gradients, incoming, relative_errors, true_gradients
from ..support.inputs import make_call
from ..support.oracle import poisoned_memory, same_bits, truth
from .checks import hold_bits_alone, poisoned
from .test_steps import HARD, PLAIN, SMALL

pytestmark = pytest.mark.slow

CASES = [
    *(replace(case, T=min(case.T, 130), ill_conditioned=case.hard == "same_keys_2") for case in HARD),
    *(replace(SMALL, name=f"T{T}", T=T, K=64 if T % 2 else 128) for T in (1, 16, 33, 64, 95, 130)),
    replace(SMALL, name="GVA, packed", H=1, HV=2, lengths=(70, 0, 33, 1, 64)),
    replace(PLAIN, name="no norm", l2norm=False, T=100),
    replace(SMALL, name="g in float32", T=100, wide_gate=True),
    replace(PLAIN, name="log decays in float32", T=100, K=64, wide_gate=True),
]


def bounded_call(case: Case) -> dict:
    return make_call(case, BF16) | {"backend": "triton"}


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_cases(case: Case):
    call = bounded_call(case)
    hold(call, poisoned(call), truth(call), slack_of(case, call))


def test_bits_are_a_sequence_s_own():
    hold_bits_alone(bounded_call(replace(SMALL, lengths=(65, 0, 33, 64))), (0, 2, 3))


@pytest.mark.parametrize("K", [128, 64])
def test_gradients(K: int):
    call = bounded_call(replace(SMALL, T=70, K=K))
    with poisoned_memory():
        found = gradients(call, *incoming(call))
    errors = relative_errors(found, true_gradients(call, *incoming(call)))
    assert max(errors.values()) < 1e-2, errors


def test_rows_of_no_16_bytes_go_another_way():
    call = bounded_call(replace(SMALL, T=33))
    with mock.patch.object(prepare, "by_mma", lambda problem, t: False):
        want = poisoned(call)
    wide = torch.nn.functional.pad(call["k"], (0, 4))
    assert all(map(same_bits, fd.chunk_kda(**call | {"k": wide[..., :-4]}), want))
    assert not same_bits(poisoned(call)[0], want[0])
