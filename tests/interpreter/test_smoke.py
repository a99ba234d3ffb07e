"""The chunk form and its gradients, by either kernel of `prepare`."""

from __future__ import annotations

from dataclasses import replace

import pytest

import flashdelta as fd
from flashdelta.kernels.triton import prepare

from ..support.cases import BY_NAME
from ..support.gradients import gradients, incoming, relative_errors, true_gradients
from ..support.inputs import make_call
from ..support.oracle import assert_right, poisoned_memory


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
