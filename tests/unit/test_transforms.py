"""Calls inside what PyTorch does around them: autocast, negative views, `torch.func`, forward-mode AD, second derivatives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, functional

import flashdelta as fd

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
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, -x])),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
}
every_call = pytest.mark.parametrize("name", CALLS)


@every_call
def test_kernels_refuse_transforms_by_name(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flashdelta.backends.interpreting", lambda: True)
    x = torch.randn(SHAPES[name])
    for way in WAYS.values():
        with pytest.raises(ValueError, match=r'^[vx] must be a tensor outside transforms of torch.func .*="reference"'):
            way(partial(CALLS[name], backend="triton"), x)
    with (
        forward_ad.dual_level(),
        pytest.raises(ValueError, match=r"^[vx] must be a tensor without a forward-mode tangent"),
    ):
        CALLS[name](forward_ad.make_dual(x, x), backend="triton")


@every_call
def test_the_reference_takes_transforms(name: str):
    f, x = CALLS[name], torch.randn(SHAPES[name])
    total = lambda x: f(x).square().sum()  # noqa: E731
    leaf = x.clone().requires_grad_()
    (want,) = torch.autograd.grad(total(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(total)(x), want)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(total))(torch.stack([x, x]))[1], want)
    torch.testing.assert_close(torch.func.jvp(total, (x,), (x,))[1], (want * x).sum(), rtol=1e-4, atol=1e-4)
    step = 1e-3 * torch.randn_like(x)
    moved = torch.func.grad(total)(x + step) - torch.func.grad(total)(x - step)
    curvature = torch.func.jvp(torch.func.grad(total), (x,), (step,))[1]
    torch.testing.assert_close(2 * curvature, moved, rtol=1e-2, atol=1e-4)


@every_call
def test_second_derivatives_are_refused_and_not_lost(name: str):
    x = torch.randn(SHAPES[name], requires_grad=True)
    f = lambda x: CALLS[name](x).sum()  # noqa: E731
    (first,) = torch.autograd.grad(f(x), x, create_graph=True)
    # what comes into the backward pass is a constant here, and `x` has a gradient without it
    for run in (lambda: functional.hvp(f, x, x), (first.square().sum() + x.square().sum()).backward):
        with pytest.raises(NotImplementedError, match="gradients must be of first order"):
            run()


def test_autocast_and_negative_views_change_nothing():
    """Tensors that are read; a view with the negative bit is not written."""
    negative = torch.complex(torch.zeros_like(GIVEN["v"]), -GIVEN["v"]).conj().imag
    leaf, do = GIVEN["v"].clone().requires_grad_(), torch.randn(1, 20, 2, 32)
    want, o = attended(GIVEN["v"]), attended(leaf)
    assert negative.is_neg() and torch.equal(attended(negative), want)
    wanted = torch.autograd.grad(o, leaf, do, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(o, leaf, torch._neg_view(-do))[0], wanted)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(attended(GIVEN["v"]), want)
        assert torch.equal(torch.autograd.grad(attended(leaf), leaf, do)[0], wanted)
    with pytest.raises(ValueError, match=r"^out must be a tensor with memory of its own; got a view with the negative"):
        attended(GIVEN["v"], out=torch._neg_view(torch.zeros_like(want)))
