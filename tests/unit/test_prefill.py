"""`kda_prefill` on the CPU: the reference against a definition written anew, the operator, and refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import flashdelta as fd

from ..support.cases import Case, case_id
from ..support.oracle import assert_close, same_bits
from ..support.prefills import CASES, INPUTS, LOGITS, PLAIN, SIZES, hold, prefill_call, size_id, sized, truth


def recurrence(call: dict) -> Tensor:
    """`o` token by token, in float64."""
    exact = {name: call[name].transpose(1, 2).double() for name in INPUTS}
    options = {name: call[name] for name in ("scale", "gate") if name in call}
    return fd.fused_recurrent_kda(**exact, **options, backend="reference")[0].transpose(1, 2)


def defined(call: dict) -> tuple[Tensor, Tensor]:
    """`w` and `u` chunk by chunk as the formulas say, in float64, for decays whose prefix sums do not cancel."""
    C = call["chunk_size"]
    q, k, v, g, beta = (call[name].double() for name in INPUTS)
    if call["gate"] == "logsigmoid":
        g = torch.nn.functional.logsigmoid(g)
    T = q.shape[2]
    chunks = -(-T // C)
    w, u = (torch.zeros(*x.shape[:2], chunks, C, x.shape[3], dtype=torch.float64) for x in (k, v))
    for c in range(chunks):
        rows = slice(c * C, min(T, (c + 1) * C))
        key, value, strength, G = k[:, :, rows], v[:, :, rows], beta[:, :, rows], g[:, :, rows].cumsum(2)
        A = torch.zeros(*strength.shape, strength.shape[-1], dtype=torch.float64)
        for i in range(key.shape[2]):
            for j in range(i):
                pair = key[:, :, i] * key[:, :, j] * (G[:, :, i] - G[:, :, j]).exp()
                A[:, :, i, j] = strength[:, :, i] * pair.sum(-1)
        inverse = torch.linalg.inv(torch.eye(A.shape[-1], dtype=torch.float64) + A) * strength[:, :, None]
        w[:, :, c, : key.shape[2]] = inverse @ (key * G.exp())
        u[:, :, c, : key.shape[2]] = inverse @ value
    return w, u


@pytest.mark.parametrize("size", SIZES, ids=size_id)
@pytest.mark.parametrize("case", [replace(PLAIN, B=2, T=75), LOGITS], ids=case_id)
def test_truth_is_the_definition(case: Case, size: tuple[int, int, int]):
    call = prefill_call(sized(case, size))
    o, w, u = truth(call)
    assert_close("o", o, recurrence(call), 1e-11)
    for name, got, want in zip("wu", (w, u), defined(call)):
        assert_close(name, got, want, 1e-11)


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_reference_backend(case: Case):
    call = prefill_call(case)
    want = truth(call)
    if case.T > 0:
        assert_close("o", want[0], recurrence(call), 1e-10)
    hold(case, fd.kda_prefill(**call), want)


def test_public_function_and_operator_are_one():
    call = prefill_call(PLAIN)
    tensors = [call[name] for name in INPUTS]
    for got, want in zip(torch.ops.kda_prefill.forward(*tensors, 64), fd.kda_prefill(*tensors)):
        assert same_bits(got, want)
