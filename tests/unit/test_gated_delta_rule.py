"""Scalar decays (Gated DeltaNet): as decays of channels that are all one, and by FLA's names."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import flashdelta as fd

from ..support.cases import SCALAR_CASES, case_id
from ..support.decoding import BY_NAME, make_step
from ..support.inputs import make_call
from ..support.oracle import as_recurrent

BOTH = (fd.chunk_gated_delta_rule, fd.fused_recurrent_gated_delta_rule)


def by_channel(call: dict, K: int) -> dict:
    """With the same decay in every channel, in memory of its own."""
    wide = {name: call[name][..., None].repeat_interleave(K, -1) for name in ("g", "dt_bias") if name in call}
    return call | wide


def with_gradients(op, call: dict) -> list[Tensor]:
    call = {n: x.requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in call.items()}
    leaves = [x for x in call.values() if isinstance(x, Tensor) and x.requires_grad]
    o, state = op(**call)[:2]
    loss = o.square().sum() if state is None else o.square().sum() + state.sin().sum()
    return [o.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("op", [fd.chunk_kda, fd.fused_recurrent_kda])
@pytest.mark.parametrize("case", SCALAR_CASES, ids=case_id)
def test_decays_of_channels_that_are_all_one(case, op):
    call = make_call(replace(case, h=False), torch.float64)
    call = call if op is fd.chunk_kda else as_recurrent(call)
    found, want = with_gradients(op, call), with_gradients(op, by_channel(call, case.K))
    names = [name for name, x in call.items() if isinstance(x, Tensor) and x.is_floating_point()]
    for name, a, b in zip(("o", *names), found, want, strict=True):
        b = b.sum(-1) if name in ("g", "dt_bias") else b
        assert a.shape == b.shape and torch.allclose(a, b, rtol=1e-9, atol=1e-12), name


@pytest.mark.parametrize("name", ["scalar", "scalar_mixed", "scalar_packed"])
def test_steps(name: str):
    step = BY_NAME[name]
    call, other = (make_step(step, torch.float64) for _ in range(2))
    wide = by_channel(other, step.K)
    if "mixed_qkv" in wide:
        wide["g"] = wide["g"].flatten(1)
    for a, b in zip(fd.recurrent_kda(**call), fd.recurrent_kda(**wide)):
        assert (a is None and b is None) or torch.allclose(a, b, rtol=1e-9, atol=1e-12)
    assert torch.allclose(call["initial_state"], other["initial_state"], rtol=1e-9, atol=1e-12)


def call_of(op, **changes) -> dict:
    q, k, v = (torch.randn(1, 70, 2, 32, dtype=torch.float64) for _ in "qkv")
    g, beta = -torch.rand(1, 70, 2).double(), torch.rand(1, 70, 2).double()
    return dict(q=q, k=k, v=v, g=g, beta=beta, use_qk_l2norm_in_kernel=True, output_final_state=True) | changes


def test_names_of_fla():
    call = call_of(BOTH[0])
    chunked, recurrent, kda = (op(**call) for op in (*BOTH, fd.chunk_kda))
    for a, b, c in zip(chunked, recurrent, kda):
        assert torch.equal(a, c) and torch.allclose(a, b, rtol=1e-9, atol=1e-12)
    gate = {"use_gate_in_kernel": True, "A_log": torch.zeros(2).double(), "dt_bias": torch.ones(2).double()}
    decays = -torch.nn.functional.softplus(call["g"] + 1.0)
    for op in BOTH:
        assert torch.allclose(op(**call | gate)[0], op(**call | {"g": decays})[0], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("op", BOTH)
def test_signatures_are_flas(op):
    rule = pytest.importorskip("fla.ops.gated_delta_rule")
    ours, theirs = (inspect.signature(f).parameters for f in (op, getattr(rule, op.__name__)))
    assert [*ours][:-1] == [*theirs][:-1]
    assert [p.default for p in ours.values()] == [p.default for p in theirs.values()]


@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"g": torch.zeros(1, 70, 2, 32).double()}, r"g must be of shape \[B, T, HV\]"),
        (
            {"g": torch.zeros(1, 70, 3).double()},
            r"g must be of shape \[B, T, HV, K\] = .* or \[B, T, HV\] = \[1, 70, 2\]",
        ),
        ({"g": None}, r"g must be a torch\.Tensor"),
        ({"A_log": torch.zeros(2).double()}, "A_log must be None"),
    ],
)
def test_bad_input(op, changes: dict, message: str):
    with pytest.raises((ValueError, TypeError), match=message):
        op(**call_of(op, **changes))


@pytest.mark.parametrize("name", ["gk", "gv"])
def test_decays_of_channels_are_refused(name: str):
    with pytest.raises(ValueError, match=f"{name} must be None"):
        BOTH[1](**call_of(BOTH[1]) | {name: torch.zeros(1, 70, 2, 32).double()})


def test_a_bias_by_channel_does_not_fit_scalar_decays():
    gate = {"use_gate_in_kernel": True, "A_log": torch.zeros(2).double(), "dt_bias": torch.zeros(64).double()}
    with pytest.raises(ValueError, match=r"dt_bias must be of shape \[HV\] = \[2\]; got shape \[64\]"):
        fd.chunk_kda(**call_of(BOTH[0]) | gate)
