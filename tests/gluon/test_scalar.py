"""`prepare_scalar`, interpreted, against float64."""

from __future__ import annotations

import pytest
import torch

import flashdelta as fd

from ..support.oracle import assert_close
from .checks import poisoned

pytestmark = pytest.mark.slow


def scalar_call(T=150, B=1, H=1, HV=2, K=128, V=64, g_dtype=torch.float32, lengths=None, hard=None, l2=True, seed=0):
    torch.manual_seed(seed)
    B, T = (1, sum(lengths)) if lengths else (B, T)
    call = dict(q=torch.randn(B, T, H, K), k=torch.randn(B, T, H, K), v=torch.randn(B, T, HV, V))
    call = {n: x.to(torch.bfloat16) for n, x in call.items()}
    g = torch.nn.functional.logsigmoid(torch.randn(B, T, HV)) * 0.5
    beta = torch.rand(B, T, HV)
    if hard == "same_keys":
        call["k"] = call["k"][:, :1].expand(-1, T, -1, -1).contiguous()
        g, beta = g * 0, beta * 0 + 1.94
    elif hard == "strong":
        g = torch.where(torch.rand(B, T, HV) < 0.3, torch.full_like(g, -50.0), g)
    elif hard == "infinite":
        g = torch.where(torch.rand(B, T, HV) < 0.1, torch.full_like(g, -torch.inf), g)
    N = len(lengths) if lengths else B
    call |= dict(g=g.to(g_dtype)[..., None].expand(-1, -1, -1, K), beta=beta.to(torch.bfloat16), split=False)
    call |= dict(initial_state=torch.randn(N, HV, K, V), output_final_state=True, use_qk_l2norm_in_kernel=l2)
    if lengths:
        call["cu_seqlens"] = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    return call | {"backend": "hopper"}


CASES = {
    "plain": {},
    "bf16 g": dict(g_dtype=torch.bfloat16, HV=3),
    "K64": dict(K=64, V=128),
    "packed": dict(lengths=(1, 63, 0, 64, 65)),
    "rows": dict(B=2, T=70),
    "same keys": dict(hard="same_keys", T=200),
    "strong": dict(hard="strong"),
    "infinite": dict(hard="infinite"),
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_values(options: dict):
    call = scalar_call(**options)
    exact = {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in call.items()}
    want = fd.chunk_kda(**exact | {"backend": "reference"})
    got = poisoned(call)
    today = fd.chunk_kda(**call | {"g": call["g"].contiguous()})
    for name, a, b, c in zip(("o", "state"), got, want, today):
        e, f = ((x.double() - b).norm() / b.norm() for x in (a, c))
        print(f"{name} {e:.2e}, expanded {f:.2e}")
        assert_close(name, a, b, 0.06 if options.get("hard") == "same_keys" else 6e-3)
