"""The operator `chunk_bwd_wy_dqkg` by its Triton kernel, run on the CPU by Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

import flashdelta as fd
from flashdelta.triton import config

from ..oracle import poisoned_memory
from ..wy import BY_NAME, CASES, WyCase, case_id, errors, exact, make_wy


@pytest.mark.parametrize("held", [False, True], ids=["sliced", "held"])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_results_are_the_reference(case: WyCase, held: bool, monkeypatch: pytest.MonkeyPatch):
    if held:  # as on Hopper
        monkeypatch.setattr(config, "wy_config", lambda spec, capability: config.WyConfig(16, spec.V, 4, 3))
    call = make_wy(case)
    with poisoned_memory():
        found = fd.kernels.chunk_bwd_wy_dqkg(**call, backend="triton")
    assert all(error <= 1e-6 for error in errors(found, exact(call)).values())


def test_half_precision_rounds_operands_only():
    call = make_wy(BY_NAME["grouped"], torch.float16)
    found = fd.kernels.chunk_bwd_wy_dqkg(**call, backend="triton")
    assert all(error <= 2e-3 for error in errors(found, exact(call)).values())


def test_nan_stays_in_its_sequence():
    call = make_wy(BY_NAME["packed32"])
    clean = fd.kernels.chunk_bwd_wy_dqkg(**call, backend="triton")
    call["do"] = call["do"].clone()
    call["do"][:, 3] = torch.nan
    found = fd.kernels.chunk_bwd_wy_dqkg(**call, backend="triton")
    assert all(torch.equal(x[:, 33:], y[:, 33:]) for x, y in zip(found, clean))
    assert found[0][:, 3].isnan().all()


def test_chunks_without_a_row_are_left_alone():
    """Offsets that promise more chunks than there are states: nothing outside the tensors is read or written."""
    call = make_wy(BY_NAME["packed"])
    short = {name: call[name][:, :2] for name in ("h", "dh")}
    want = fd.kernels.chunk_bwd_wy_dqkg(**call, backend="triton")
    found = fd.kernels.chunk_bwd_wy_dqkg(**call | short, backend="triton")
    assert all(torch.equal(x[:, :81], y[:, :81]) for x, y in zip(found, want))
