"""Calls inside what PyTorch does around them: autocast, negative views, `torch.func`, forward-mode AD, second derivatives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, functional

import flashdelta as fd
from flashdelta.backends import ReferenceBackend
from flashdelta.program.cache import LaunchCache

from ..support.refusals import good_call

L2NORM = {"use_qk_l2norm_in_kernel": True}
torch.manual_seed(0)
GIVEN = {name: torch.randn(1, 20, 2, 32) for name in "qkv"} | {
    "g": -torch.rand(1, 20, 2, 32),
    "beta": torch.rand(1, 20, 2),
}


def attended(x: Tensor, name: str = "v", **options: object) -> Tensor:
    return fd.chunk_kda(**GIVEN | {name: x} | L2NORM | options)[0]


CALLS: dict[str, Callable[..., Tensor]] = {
    "attention": lambda x, **options: attended(x, **options).sin(),
    "convolution": lambda x, **options: fd.short_convolution(x[0], torch.ones(64, 3), **options)[0],
    "norm": lambda x, **options: fd.gated_rms_norm(x, torch.ones_like(x), torch.ones(32), **options),
}
SHAPES = {"attention": (1, 20, 2, 32), "convolution": (1, 2, 10, 64), "norm": (2, 9, 32)}
WAYS: dict[str, Callable[[Callable, Tensor], object]] = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, -x])),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
}
SECOND = {
    "hvp": lambda f, x: functional.hvp(f, x, x),
    "hessian": functional.hessian,
    # what comes into the backward pass is a constant here, and `x` has a gradient without it
    "penalty": lambda f, x: torch.autograd.grad(gradient(f, x, True).square().sum() + x.square().sum(), x),
    "of what comes in": lambda f, x: (
        torch.autograd.grad(f(x), x, torch.ones((), requires_grad=True), create_graph=True)[0].sum().backward()
    ),
}
every_call = pytest.mark.parametrize("name", CALLS)


def gradient(f: Callable, x: Tensor, create_graph: bool = False) -> Tensor:
    return torch.autograd.grad(f(x), x, create_graph=create_graph)[0]


@every_call
@pytest.mark.parametrize("way", WAYS)
def test_kernels_refuse_transforms_by_name(name: str, way: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flashdelta.backends.interpreting", lambda: True)
    wanted = r'^[vx] must be a tensor outside transforms of torch.func .*backend="reference"'
    with pytest.raises(ValueError, match=wanted):
        WAYS[way](partial(CALLS[name], backend="triton"), torch.randn(SHAPES[name]))
    x = torch.randn(SHAPES[name])
    with (
        forward_ad.dual_level(),
        pytest.raises(ValueError, match=r"^[vx] must be a tensor without a forward-mode tangent"),
    ):
        CALLS[name](forward_ad.make_dual(x, x), backend="triton")


@every_call
def test_the_reference_takes_transforms(name: str):
    f, x = CALLS[name], torch.randn(SHAPES[name])
    total = lambda x: f(x).square().sum()  # noqa: E731
    want = gradient(total, x.requires_grad_())
    x = x.detach()
    torch.testing.assert_close(torch.func.grad(total)(x), want)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(total))(torch.stack([x, x]))[1], want)
    torch.testing.assert_close(torch.func.jvp(total, (x,), (x,))[1], (want * x).sum(), rtol=1e-4, atol=1e-4)
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(total(forward_ad.make_dual(x, x))).tangent
    torch.testing.assert_close(tangent, (want * x).sum(), rtol=1e-4, atol=1e-4)
    step = 1e-3 * torch.randn_like(x)
    moved = torch.func.grad(total)(x + step) - torch.func.grad(total)(x - step)
    curvature = torch.func.jvp(torch.func.grad(total), (x,), (step,))[1]
    torch.testing.assert_close(2 * curvature, moved, rtol=1e-2, atol=1e-4)


def test_what_is_written_outside_of_a_transform_is_refused_by_name():
    state, x = torch.zeros(1, 2, 32, 32), GIVEN["v"]
    for way in ("vmap", "jvp"):
        with pytest.raises(ValueError, match=r"^v must be a tensor outside transforms of torch\.func \(final_state is"):
            WAYS[way](partial(attended, final_state=state), x)
    with (
        forward_ad.dual_level(),
        pytest.raises(ValueError, match=r"^q must be a tensor without a forward-mode tangent"),
    ):
        call = good_call(fd.kernels.chunk_bwd_wy_dqkg, "packed")
        fd.kernels.chunk_bwd_wy_dqkg(**call | {"q": forward_ad.make_dual(call["q"], call["q"])})
    assert not state.any()


def test_a_transform_of_something_else_leaves_the_call_as_it_is():
    leaf, state = GIVEN["v"].clone().requires_grad_(), torch.zeros(1, 2, 32, 32)
    total = lambda x: (attended(GIVEN["v"], final_state=state) * x).sum()  # noqa: E731
    assert torch.func.grad(total)(torch.tensor(1.0)) == attended(GIVEN["v"]).sum() and state.any()
    torch.func.grad(lambda x: attended(leaf).sum() * x)(torch.tensor(1.0)).backward()
    torch.testing.assert_close(leaf.grad, gradient(lambda x: attended(x).sum(), leaf))


@pytest.mark.parametrize("way", SECOND)
@every_call
def test_second_derivatives_are_refused_and_not_lost(name: str, way: str):
    x = torch.randn(SHAPES[name], requires_grad=True)
    with pytest.raises(NotImplementedError, match="gradients of gradients: kernels have none"):
        SECOND[way](lambda x: CALLS[name](x).sum(), x)


def test_forward_over_reverse_keeps_its_tangent_or_is_refused(monkeypatch: pytest.MonkeyPatch):
    x = GIVEN["v"].clone().requires_grad_()
    o = attended(x)
    (want,) = torch.autograd.grad(o, x, o, retain_graph=True)
    with forward_ad.dual_level():
        do = forward_ad.make_dual(o.detach(), o.detach())
        grad = lambda: torch.autograd.grad(o, x, do, retain_graph=True)[0]  # noqa: E731
        torch.testing.assert_close(forward_ad.unpack_dual(grad()).tangent, want)  # it is linear in what comes in
        monkeypatch.setattr(ReferenceBackend, "name", "other")
        with pytest.raises(NotImplementedError, match="gradients of gradients"):
            grad()


def test_jacobians_of_all_rows_at_once():
    x = torch.randn(1, 1, 4, 64)
    want = functional.jacobian(CALLS["convolution"], x)
    torch.testing.assert_close(functional.jacobian(CALLS["convolution"], x, vectorize=True), want)


def test_autocast_and_negative_views_change_nothing():
    """Of what is read; a view with the negative bit is not written."""
    negative = torch.complex(torch.zeros_like(GIVEN["v"]), -GIVEN["v"]).conj().imag
    leaf, do = GIVEN["v"].clone().requires_grad_(), torch.randn(1, 20, 2, 32)
    want, o = attended(GIVEN["v"]), attended(leaf)
    assert negative.is_neg() and torch.equal(attended(negative), want)
    wanted = torch.autograd.grad(o, leaf, do, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(o, leaf, torch._neg_view(-do))[0], wanted)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attended(GIVEN["v"]), want)
        assert torch.equal(torch.autograd.grad(attended(leaf), leaf, do)[0], wanted)
    with pytest.raises(ValueError, match=r"^out must be a tensor without the negative bit"):
        attended(GIVEN["v"], out=torch._neg_view(torch.zeros_like(want)))


def test_the_launch_cache_takes_no_negative_and_no_dual_tensors(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: 0)
    cache, x = LaunchCache(), torch.zeros(4)
    assert cache.find("call", (x,))[1] is not None
    assert cache.find("call", (torch._neg_view(x),))[1] is None
    with forward_ad.dual_level():
        assert cache.find("call", (forward_ad.make_dual(x, x),))[1] is None


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("op", [fd.chunk_kda, fd.fused_recurrent_kda])
def test_tokens_of_no_sequence_do_not_reach_gradients(op: Callable):
    """In calls like those on a GPU, which keep the shapes of the caller's parameters."""
    parameters = {"A_log": torch.zeros(2), "dt_bias": torch.zeros(64)}

    def grads(filler: float, offsets: list[int]) -> dict[str, Tensor]:
        leaves = {name: x.clone() for name, x in (GIVEN | parameters).items()}
        for x in leaves.values():
            if x.dim() > 2:
                x[:, offsets[-1] :] = filler
            x.requires_grad_()
        o, _ = op(**leaves, cu_seqlens=torch.tensor(offsets), use_gate_in_kernel=True, **L2NORM)
        o[:, : offsets[-1]].square().sum().backward()
        return {name: x.grad for name, x in leaves.items()}

    for offsets in ([0, 5, 15], [0]):
        clean = grads(0.0, offsets)
        for name, x in grads(torch.nan, offsets).items():
            assert torch.equal(x, clean[name]) and (x.dim() < 3 or x[:, offsets[-1] :].eq(0).all()), name


@pytest.mark.parametrize(("changes", "why"), [({}, "multiplies bfloat16 wrongly"), ({"gate": "tanh"}, "gate")])
def test_what_the_interpreter_declines(changes: dict, why: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flashdelta.backends.interpreting", lambda: True)
    with pytest.raises(ValueError, match=why):
        fd.chunk_kda(**{name: x.bfloat16() for name, x in GIVEN.items()} | changes, backend="triton")
