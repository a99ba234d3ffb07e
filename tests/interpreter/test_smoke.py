"""A few small calls that together launch every portable kernel: what runs even where nothing has changed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashdelta as fd
from flashdelta.testing import prefills, wy
from flashdelta.testing.cases import BY_NAME, FP32
from flashdelta.testing.decoding import BY_NAME as STEPS
from flashdelta.testing.inputs import make_call
from flashdelta.testing.oracle import assert_close, assert_right, poisoned_memory
from flashdelta.triton import prepare

from ..support.decoding_checks import check_commit, check_step
from ..support.gradients import gradients, incoming, relative_errors, true_gradients
from ..support.split_cases import forced, split_call
from ..unit.test_decode import commit_call


@pytest.mark.parametrize("bounded", [False, True], ids=["prepare", "prepare_bounded"])
def test_chunks_and_their_gradients(bounded: bool, monkeypatch: pytest.MonkeyPatch):
    if bounded:  # which is else for bfloat16 alone, and the interpreter gets that wrong
        monkeypatch.setattr(prepare, "bounded", prepare.safe_blocks)
    case = replace(BY_NAME["packed_unused"], lengths=(0, 17), unused=2, H=1, HV=2)
    call = make_call(case) | {"backend": "triton"}
    with poisoned_memory():
        assert_right(fd.chunk_kda, call)
        found = gradients(call, *incoming(call))
    errors = relative_errors(found, true_gradients(call, *incoming(call)))
    assert max(errors.values()) < 3e-4, errors


def test_split():
    call = split_call([40, 33], return_intermediate_states=True)
    exact = forced(call, torch.float64)
    found = fd.chunk_kda(**call, split=2, backend="triton")
    wanted = fd.chunk_kda(**exact, backend="reference")
    for x, y in zip(found, wanted):
        assert_close("split", x, y, 2e-5)


def test_prefill():
    case = prefills.sized(replace(prefills.PLAIN, T=34, H=1, HV=1), (64, 64, 32))
    call = prefills.prefill_call(case)
    with poisoned_memory():
        results = fd.kda_prefill(**call, backend="triton")
    prefills.hold(case, results, prefills.truth(call))


@pytest.mark.parametrize("name", ["paged", "spec_packed"])
def test_step(name: str):
    check_step(fd.recurrent_kda, STEPS[name], FP32, "triton")


def test_commit():
    check_commit(commit_call(FP32, (1, 0, 5, 2)), "triton")


def test_wy_step():
    call = wy.make_wy(replace(wy.BY_NAME["grouped"], T=17, HV=2))
    found = fd.kernels.chunk_bwd_wy_dqkg(**call, backend="triton")
    assert all(error <= 1e-6 for error in wy.errors(found, wy.exact(call)).values())
