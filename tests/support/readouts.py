"""Readouts past float16's largest number, 65504 (vLLM #54308: float16 activations, and a float32 state that has grown)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import flashdelta as fd
from flashdelta.nn import KdaCache, KimiDeltaAttention

from .oracle import TOLERANCE, float64, relative_error

OPERATORS = (fd.chunk_kda, fd.fused_recurrent_kda, fd.recurrent_kda)
TOKENS = {fd.chunk_kda: 70, fd.fused_recurrent_kda: 5, fd.recurrent_kda: 1}


def readout_call(op: Callable, dtype: torch.dtype, device: torch.device | str, state: torch.dtype) -> dict[str, Any]:
    draw, T, H, K = torch.Generator().manual_seed(0), TOKENS[op], 2, 64
    q, k, v = (torch.randn(1, T, H, K, generator=draw).to(dtype) for _ in "qkv")
    call = dict(q=q, k=k, v=v, g=torch.zeros(1, T, H, K), beta=torch.rand(1, T, H, generator=draw))
    # chunks multiply states in q's dtype: these fit, and what is read of them does not
    grown, scale = (1.2e4, 8.0) if op is fd.chunk_kda else (3e5, None)
    call["initial_state"] = (torch.randn(1, H, K, K, generator=draw) * grown).to(state)
    call = {name: x.to(device) for name, x in call.items()}
    return call | {"scale": scale, "use_qk_l2norm_in_kernel": True, "state_v_first": True}


def check_readout(
    op: Callable, dtype: torch.dtype, backend: str, device: Any = "cpu", state: torch.dtype = torch.float32
) -> None:
    """In float32 the output is right, and so is what the norm makes of it, in the dtype of its gate."""

    def run(**changes: Any) -> torch.Tensor:
        call = readout_call(op, dtype, device, state)  # some calls write the state
        return op(**call | {"backend": backend} | changes)[0]

    exact = run(**float64(readout_call(op, dtype, "cpu", state)), backend="reference")
    assert exact.abs().max() > 65504
    assert dtype != torch.float16 or run().isinf().any()
    shape = exact.shape
    o = torch.full(shape, torch.nan, dtype=torch.float32, device=device)
    assert run(**{"output" if op is fd.recurrent_kda else "out": o}) is o
    assert relative_error(o.cpu(), exact) <= TOLERANCE[dtype]
    assert (o.to(dtype).float() != o).any()  # not rounded on the way
    z, weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype), torch.ones(shape[-1])
    normed = fd.gated_rms_norm(exact, z.double(), weight.double(), backend="reference")
    around = "auto" if backend == "hopper" else backend
    y = fd.gated_rms_norm(o, z.to(device), weight.to(device), backend=around)
    assert y.dtype == dtype and relative_error(y.cpu(), normed) <= 2 * TOLERANCE[dtype]


def check_layer(tokens: int, backend: str, device: torch.device | str = "cpu") -> None:
    """The layer in float16 norms before it rounds: outputs and gradients are right, from a state that has grown."""
    torch.manual_seed(0)
    layer = KimiDeltaAttention(64, 2, head_dim=64, backend=backend).half().to(device)
    exact = KimiDeltaAttention(64, 2, head_dim=64, backend="reference").double()
    exact.load_state_dict({name: x.double().cpu() for name, x in layer.state_dict().items()})
    x = torch.randn(1, tokens, 64).half()
    cache = KdaCache(torch.zeros(1, 6 * 64, 3).half(), torch.randn(1, 2, 64, 64) * 3e5)
    found = []
    for model, double in ((layer, False), (exact, True)):
        where, dtype = ("cpu", torch.float64) if double else (device, torch.float16)
        given = x.detach().to(where, dtype).requires_grad_()
        before = replace(cache, conv=cache.conv.to(where, dtype), state=cache.state.to(where))
        y, _ = model(given, before)
        assert y.dtype == dtype
        y.double().square().sum().backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        found.append((y.cpu(), given.grad.cpu()))
    for one, want in zip(*found):
        assert relative_error(one, want) <= 5e-3
