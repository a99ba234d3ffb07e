"""Gradients of a call, and how they are held against others."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import flashdelta as fd
from flashdelta.kernels.stages.finish import gate_sums_kernel
from flashdelta.program.launch import Launch

from .inputs import TOKEN_TENSORS
from .launches import start
from .oracle import NO_H, covered_tokens, float64, poisoned_memory
from .ranks import incoming

INPUTS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")


def gradients(call: dict, grad_o: Tensor, grad_final: Tensor, op: Callable = fd.chunk_kda) -> dict[str, Tensor]:
    """Gradients per input's name."""
    leaves = {name: call[name].detach().clone().requires_grad_() for name in INPUTS if call.get(name) is not None}
    asked = {"output_final_state": True} | (NO_H if op is fd.chunk_kda else {})
    o, final_state = op(**call | leaves | asked)
    covered = covered_tokens(call)
    # rows of no sequence are undefined
    found = [o[:, covered], final_state]
    wanted = [grad_o[:, covered].to(o.dtype), grad_final.to(final_state.dtype)]
    grads = torch.autograd.grad(found, list(leaves.values()), wanted, allow_unused=True)
    return {name: x for name, x in zip(leaves, grads) if x is not None}


def true_gradients(call: dict, grad_o: Tensor, grad_final: Tensor) -> dict[str, Tensor]:
    """Gradients of the float64 reference."""
    return gradients(float64(call) | {"backend": "reference"}, grad_o, grad_final)


def same_gradients(found: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    """Whether all that are found have the same bits."""
    return all(torch.equal(x, want[name]) for name, x in found.items())


def check_gradients(call: dict, tolerance: float) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The gradients, and their errors."""
    grads = incoming(call)
    with poisoned_memory():
        found = gradients(call, *grads)
    errors = relative_errors(found, true_gradients(call, *grads))
    assert all(error <= tolerance for error in errors.values()), errors
    return found, errors


def relative_errors(found: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """Errors of each gradient, in norms: against its own and the largest one's."""
    most = max((float(x.norm()) for x in truth.values()), default=0.0)
    return {
        name: float((found[name].double() - x).norm()) / (float(x.norm()) + most + 1e-30) for name, x in truth.items()
    }


def assert_first_is_its_own(call: dict) -> None:
    """The first of two packed sequences has the gradients, to the bit, that it has alone."""
    end = int(call["cu_seqlens"][1])
    grad_o, grad_final = incoming(call)
    together = gradients(call, grad_o, grad_final)
    alone = call | {name: call[name][:, :end] for name in TOKEN_TENSORS}
    alone |= {"cu_seqlens": call["cu_seqlens"][:2], "initial_state": call["initial_state"][:1]}
    found = gradients(alone, grad_o[:, :end], grad_final[:1])
    assert all(torch.equal(found[name], together[name][:, :end]) for name in TOKEN_TENSORS)
    assert torch.equal(found["initial_state"], together["initial_state"][:1])


def assert_nan_stays(call: dict) -> None:
    """A NaN in a gradient of the first of two packed sequences changes no bit of the second one's."""
    end = int(call["cu_seqlens"][1])
    grad_o, grad_final = incoming(call)
    clean = gradients(call, grad_o, grad_final)
    grad_o[:, 3] = torch.nan
    found = gradients(call, grad_o, grad_final)
    assert all(torch.equal(found[name][:, end:], clean[name][:, end:]) for name in TOKEN_TENSORS)
    assert found["v"][:, :end].isnan().any()


def check_gate_sums(slots: int, present: tuple[bool, bool], device: str = "cpu", HV: int = 3, K: int = 64) -> None:
    """The kernel that sums the gradients of `A_log` and `dt_bias` over so many chunks, of those that are present."""
    parts = [torch.randn(slots, HV, K, device=device) if there else None for there in present]
    sums = [torch.full(shape, torch.nan, device=device) for shape in ((HV,), (HV, K))]
    given = [x if there else None for x, there in zip(sums, present)]
    start(Launch(gate_sums_kernel, HV * sum(present), (*parts, *given, HV, slots), {"K": K}, num_warps=16))
    for x, found, dims in zip(parts, sums, ((0, 2), (0,))):
        wanted = torch.full_like(found, torch.nan) if x is None else x.double().sum(dims).float()
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-4, equal_nan=True)
