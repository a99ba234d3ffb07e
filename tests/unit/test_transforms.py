"""Calls inside what PyTorch does around them: autocast, views with the negative bit, `torch.func`, forward-mode AD."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import flashdelta as fd
from flashdelta.backends import HopperBackend, ReferenceBackend, TritonBackend, judge
from flashdelta.program.cache import LaunchCache
from flashdelta.reference import gate as reference_gate
from flashdelta.runtime import torch_ops
from flashdelta.runtime.call import check

from ..support.wy import BY_NAME, make_wy

both = pytest.mark.parametrize("op", [fd.chunk_kda, fd.fused_recurrent_kda])
L2NORM = {"use_qk_l2norm_in_kernel": True}


def call(T: int = 20, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, T, 2, 32, dtype=dtype) for _ in "qkv")
    return {
        "q": q,
        "k": k,
        "v": v,
        "g": -torch.rand(1, T, 2, 32, dtype=dtype),
        "beta": torch.rand(1, T, 2, dtype=dtype),
    }


def total(op: Callable, given: dict, **changed: Tensor) -> Tensor:
    return op(**given | changed, **L2NORM)[0].sum()


def gradient(op: Callable, given: dict, name: str) -> Tensor:
    x = given[name].clone().requires_grad_()
    return torch.autograd.grad(total(op, given, **{name: x}), x)[0]


@both
def test_tokens_of_no_sequence_do_not_reach_gradients(op: Callable):
    given = call(40, torch.float64) | {"cu_seqlens": torch.tensor([0, 10, 30])}
    parameters = {"A_log": torch.zeros(2, dtype=torch.float64), "dt_bias": torch.zeros(2, 32, dtype=torch.float64)}
    options = {"use_gate_in_kernel": True, **L2NORM}

    def grads(filler: float) -> dict[str, Tensor]:
        leaves = {name: x.clone() for name, x in (given | parameters).items() if name != "cu_seqlens"}
        for x in leaves.values():
            if x.dim() > 2:
                x[:, 30:] = filler
        for x in leaves.values():
            x.requires_grad_()
        o, _ = op(**leaves, cu_seqlens=given["cu_seqlens"], **options)
        o[:, :30].square().sum().backward()
        return {name: x.grad for name, x in leaves.items()}

    clean, spoilt = grads(0.0), grads(torch.nan)
    for name, x in spoilt.items():
        assert torch.equal(x, clean[name]), name
        if x.dim() > 2:
            assert x[:, 30:].eq(0).all(), name


@both
def test_no_sequence_at_all_leaves_no_gradient(op: Callable):
    given = call() | {"cu_seqlens": torch.tensor([0])}
    given = {name: x if name == "cu_seqlens" else torch.full_like(x, torch.nan) for name, x in given.items()}
    for name in ("q", "k", "v", "g", "beta"):
        assert gradient(op, given, name).eq(0).all(), name


@both
def test_a_transform_of_something_else_leaves_the_call_as_it_is(op: Callable):
    """And buffers of the caller's are written, which a transform of the call's own tensors may not see."""
    given, final_state = call(), torch.zeros(1, 2, 32, 32)
    o, state = op(**given, output_final_state=True, **L2NORM)
    for named in ({}, {"final_state": final_state} if op is fd.chunk_kda else {}):
        scaled = partial(lambda named, x: (op(**given, **named, **L2NORM)[0] * x).sum(), named)
        assert torch.func.grad(scaled)(torch.tensor(1.0)) == o.sum()
        assert torch.func.jvp(scaled, (torch.tensor(2.0),), (torch.tensor(1.0),))[1] == o.sum()
    assert op is not fd.chunk_kda or torch.equal(final_state, state)
    leaf = given["q"].clone().requires_grad_()
    torch.func.grad(lambda x: total(op, given, q=leaf) * x)(torch.tensor(1.0)).backward()
    assert torch.equal(leaf.grad, gradient(op, given, "q"))


def test_what_is_written_outside_of_a_transform_is_refused_by_name():
    given, final_state = call(), torch.zeros(1, 2, 32, 32)

    def run(q: Tensor) -> Tensor:
        return fd.chunk_kda(**given | {"q": q}, final_state=final_state)[0]

    with pytest.raises(ValueError, match=r"^q: got a tensor inside a transform of torch\.func, .*\(final_state is"):
        torch.func.jvp(run, (given["q"],), (given["q"],))
    assert not final_state.any()


def test_an_operator_without_gradients_refuses_tangents_by_name():
    given = make_wy(BY_NAME["packed"], torch.float64)
    with (
        forward_ad.dual_level(),
        pytest.raises(ValueError, match="v: got a tensor with a forward-mode tangent, wanted none"),
    ):
        fd.kernels.chunk_bwd_wy_dqkg(**given | {"v": forward_ad.make_dual(given["v"], given["v"])})


@both
def test_packed_sequences_in_vmap(op: Callable):
    given = call() | {"cu_seqlens": torch.tensor([0, 7, 20]), "output_final_state": True}
    found = torch.func.vmap(lambda v: op(**given | {"v": v}))(torch.stack([given["v"], -given["v"]]))
    for i, v in enumerate((given["v"], -given["v"])):
        for x, want in zip(found, op(**given | {"v": v})):
            torch.testing.assert_close(x[i], want)


@both
def test_autocast_leaves_the_reference_alone(op: Callable):
    given = call()
    want, wanted = total(op, given), gradient(op, given, "k")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(total(op, given), want)
        assert torch.equal(gradient(op, given, "k"), wanted)


NEGATIVE = {
    "_neg_view": lambda x: torch._neg_view(-x),
    "conj": lambda x: torch.complex(torch.zeros_like(x), -x).conj().imag,
}


@pytest.mark.parametrize("name", ["q", "v", "g", "beta"])
@pytest.mark.parametrize("view", NEGATIVE)
@both
def test_views_with_the_negative_bit_are_read_with_their_sign(op: Callable, name: str, view: str):
    given = call()
    x = NEGATIVE[view](given[name])
    assert x.is_neg() and torch.equal(x, given[name])
    assert torch.equal(total(op, given, **{name: x}), total(op, given))


def test_a_gradient_with_the_negative_bit_is_read_with_its_sign():
    given = call()
    q = given["q"].clone().requires_grad_()
    o, _ = fd.chunk_kda(**given | {"q": q})
    do = torch.randn_like(o)
    want = torch.autograd.grad(o, q, do, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(o, q, torch._neg_view(-do))[0], want)


def test_a_view_with_the_negative_bit_is_not_written():
    given = call()
    with pytest.raises(ValueError, match="out: got a view with the negative bit, wanted memory to be written as it is"):
        fd.chunk_kda(**given, out=torch._neg_view(torch.zeros_like(given["v"])))


def test_flags_with_the_negative_bit_are_refused_by_name():
    given = call()
    pool = torch.zeros(3, 2, 32, 32)
    given |= {"state_pool": pool, "state_indices": torch.tensor([1]), "state_v_first": False} | L2NORM
    flags = torch._neg_view(torch.tensor([True]))
    with pytest.raises(
        ValueError, match="has_initial_state: got a view with the negative bit, wanted flags as memory has"
    ):
        fd.chunk_kda(**given, has_initial_state=flags)
    assert not fd.supports(fd.chunk_kda, **given, has_initial_state=flags).ok


class Weight(torch.nn.Parameter): ...


def test_the_launch_cache_takes_no_negative_and_no_dual_tensors(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: 0)
    cache, x = LaunchCache(), torch.zeros(4)
    assert cache.find("call", (x,))[1] is not None
    assert cache.find("call", (Weight(x),))[1] is not None
    assert cache.find("call", (torch._neg_view(x),))[1] is None
    with forward_ad.dual_level():
        assert cache.find("call", (forward_ad.make_dual(x, x),))[1] is None


@both
def test_functional_transforms(op: Callable):
    """`grad`, `vjp`, `vmap`, `jvp` and gradients of gradients, by the reference."""
    given = call()
    q, want = given["q"], gradient(op, given, "q")

    def of(q: Tensor) -> Tensor:
        return total(op, given, q=q)

    torch.testing.assert_close(torch.func.grad(of)(q), want)
    torch.testing.assert_close(torch.func.vjp(of, q)[1](torch.ones(()))[0], want)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(of))(torch.stack([q, q])), torch.stack([want, want]))
    value, tangent = torch.func.jvp(lambda v: total(op, given, v=v), (given["v"],), (given["v"],))
    torch.testing.assert_close(tangent, value)  # it is linear in v
    # the L2 norm makes the gradient along q zero everywhere, so its derivative, too: H q + gradient = 0
    curvature = torch.func.grad(lambda x: (torch.func.grad(of)(x) * q).sum())(q)
    torch.testing.assert_close(curvature, -want, atol=1e-5, rtol=1e-4)


def test_functional_transforms_by_the_operators():
    """As kernels run there."""
    given = call()
    q, want = given["q"], gradient(fd.chunk_kda, given, "q")

    def of(q: Tensor) -> Tensor:
        problem, t = check(fd.chunk_kda, **given | {"q": q}, **L2NORM)
        return torch_ops.call(problem, t, "reference")["o"].sum()

    torch.testing.assert_close(torch.func.grad(of)(q), want)
    torch.testing.assert_close(torch.func.vjp(of, q)[1](torch.ones(()))[0], want)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PyTorch's, of operators without a rule for batches
        several = torch.func.vmap(torch.func.grad(of))(torch.stack([q, -q]))
    torch.testing.assert_close(several, torch.stack([want, gradient(fd.chunk_kda, given | {"q": -q}, "q")]))
    with pytest.raises(NotImplementedError, match="gradients of gradients: kernels have none"):
        torch.func.grad(lambda q: torch.func.grad(of)(q).sum())(q)


def convolved(x: Tensor) -> Tensor:
    return fd.short_convolution(x, torch.ones(8, 3))[0]


def normed(x: Tensor) -> Tensor:
    return fd.gated_rms_norm(x, torch.ones_like(x), torch.ones(8))


def attended(x: Tensor) -> Tensor:
    return fd.chunk_kda(**call() | {"q": x.expand(1, 20, 2, 8).repeat(1, 1, 1, 4)}, **L2NORM)[0]


OPERATORS = pytest.mark.parametrize(
    ("op", "shape"), [(convolved, (1, 4, 8)), (normed, (2, 8)), (attended, (1, 20, 1, 8))]
)
SECOND = "gradients of gradients: kernels have none"


@OPERATORS
def test_a_second_gradient_is_refused_and_not_lost(op: Callable, shape: tuple[int, ...]):
    x = torch.randn(shape, requires_grad=True)
    (want,) = torch.autograd.grad(op(x).sum(), x)
    o = op(x).sum()
    (found,) = torch.autograd.grad(o, x, create_graph=True)
    assert torch.equal(found, want)
    with pytest.raises(NotImplementedError, match=SECOND):
        (o + found.square().sum()).backward()


SECOND_WAYS: dict[str, Callable[[Callable, Tensor], object]] = {
    "hvp": lambda f, x: torch.autograd.functional.hvp(f, x, x),
    "vhp": lambda f, x: torch.autograd.functional.vhp(f, x, x),
    "hessian": torch.autograd.functional.hessian,
}


@pytest.mark.parametrize("way", SECOND_WAYS)
@OPERATORS
def test_second_derivatives_are_refused_and_not_zero(op: Callable, shape: tuple[int, ...], way: str):
    with pytest.raises(NotImplementedError, match=SECOND):
        SECOND_WAYS[way](lambda x: op(x).square().sum(), torch.randn(shape))


@OPERATORS
def test_a_penalty_beside_other_terms_is_refused_and_not_dropped(op: Callable, shape: tuple[int, ...]):
    """What comes into the backward pass is a constant here, and `x` has a gradient without it."""
    x = torch.randn(shape, requires_grad=True)
    (found,) = torch.autograd.grad(op(x).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match=SECOND):
        torch.autograd.grad(found.square().sum() + x.square().sum(), x)


def test_a_gradient_of_what_comes_in_is_refused():
    x, do = torch.randn(1, 4, 8, requires_grad=True), torch.randn(1, 4, 8, requires_grad=True)
    (found,) = torch.autograd.grad(convolved(x), x, do, create_graph=True)
    with pytest.raises(NotImplementedError, match=SECOND):
        torch.autograd.grad(found.sum(), do)


@pytest.mark.parametrize("create_graph", [False, True])
def test_forward_over_reverse_keeps_its_tangent_or_is_refused(create_graph: bool, monkeypatch: pytest.MonkeyPatch):
    x = torch.randn(1, 4, 8, requires_grad=True)
    o, _ = fd.short_convolution(x, torch.ones(8, 3), activation=None)
    do = torch.randn_like(o)
    (want,) = torch.autograd.grad(o, x, do, retain_graph=True)

    def tangent() -> Tensor:
        (found,) = torch.autograd.grad(o, x, forward_ad.make_dual(do, do), retain_graph=True, create_graph=create_graph)
        return forward_ad.unpack_dual(found).tangent

    with forward_ad.dual_level():
        if not create_graph:
            torch.testing.assert_close(tangent(), want)  # the reference's; it is linear in what comes in
            monkeypatch.setattr(ReferenceBackend, "name", "other")
        with pytest.raises(NotImplementedError, match=SECOND):
            tangent()


@pytest.mark.parametrize("create_graph", [False, True])
def test_jacobians_of_all_rows_at_once(create_graph: bool):
    x = torch.randn(1, 4, 8)
    want = torch.autograd.functional.jacobian(convolved, x)
    found = torch.autograd.functional.jacobian(convolved, x, vectorize=True, create_graph=create_graph)
    torch.testing.assert_close(found, want)


def test_kernels_refuse_forward_mode_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flashdelta.backends.interpreting", lambda: True)
    given = call() | {"backend": "triton"}
    wanted = re.escape('v: got a tensor with a forward-mode tangent, wanted none (backend="reference" has forward-mode')
    with forward_ad.dual_level(), pytest.raises(ValueError, match=wanted):
        fd.chunk_kda(**given | {"v": forward_ad.make_dual(given["v"], given["v"])})
    with pytest.raises(ValueError, match=wanted):
        torch.func.jvp(lambda v: total(fd.chunk_kda, given, v=v), (given["v"],), (given["v"],))


def test_forward_mode_of_the_reference():
    given = call()
    with forward_ad.dual_level():
        o = total(fd.chunk_kda, given, v=forward_ad.make_dual(given["v"], given["v"]))
        value, tangent = forward_ad.unpack_dual(o)
    torch.testing.assert_close(tangent, value)


def test_the_recurrence_has_the_gradients_of_the_chunk_form():
    """Kernels have gradients in chunks; the token recurrence with gradients is a call in chunks to them."""
    given = call(dtype=torch.bfloat16) | {"backend": "reference"}
    plain, _ = check(fd.fused_recurrent_kda, **given)
    given["q"] = given["q"].requires_grad_()
    problem, t = check(fd.fused_recurrent_kda, **given)
    assert plain.in_chunks is plain and problem.operation == "recurrent" and problem.in_chunks.operation == "chunk"
    for backend in (HopperBackend(), TritonBackend()):
        assert backend.obstacle(problem, t.device) == backend.obstacle(problem.in_chunks, t.device)
    assert "grad" not in "".join(verdict.reason for verdict in judge(problem, t.device))


def test_a_gate_that_nobody_knows_is_taken_by_nobody(monkeypatch: pytest.MonkeyPatch):
    problem, t = check(fd.chunk_kda, **call(), backend="reference")
    problem = replace(problem, gate="tanh")
    for backend in (HopperBackend(), TritonBackend()):
        monkeypatch.setattr(type(backend), "_device_obstacle", lambda self, device: None, raising=False)
        monkeypatch.setattr("flashdelta.backends.interpreting", lambda: True)
        assert backend.obstacle(problem, t.device).startswith("gate 'tanh'; it knows none, softplus,")
    with pytest.raises(NotImplementedError, match="tanh"):
        reference_gate.log_decay(problem, t)


def test_the_interpreter_declines_bfloat16(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flashdelta.backends.interpreting", lambda: True)
    given = call(dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="triton: the interpreter multiplies bfloat16 wrongly"):
        fd.chunk_kda(**given, backend="triton")
