"""Gated DeltaNet: calls with one decay per value head, g `[B, T, HV]`, which `chunk_kda` takes `expanded`, and their truth."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .cases import FP32, Case
from .inputs import TOKEN_TENSORS, make_call, sequence_calls

QWEN: dict = {"gate": "softplus", "beta": "logit", "state": FP32}
CASES = [
    Case("Qwen's gate", "grouped heads", H=1, HV=3, **QWEN),
    Case("packed", "with an empty one", H=1, **QWEN, lengths=(17, 0, 65, 1)),
    Case("log decays", "g as it is, grouped heads", H=1, HV=2, B=2),
    Case("same keys", "no decay, beta 1.94", T=130, hard="same_keys_2", ill_conditioned=True),
    Case("g = -50", "products under- and overflow", T=129, hard="g-50"),
    Case("g = -inf", "some tokens forget all before them", T=129, hard="forget"),
]


def scalar_call(case: Case, dtype: torch.dtype, device: str = "cpu") -> dict:
    """The call with the first channel's decays alone."""
    call = make_call(case, dtype, device)
    bias = {"dt_bias": call["dt_bias"][:: case.K]} if "dt_bias" in call else {}
    return call | {"g": call["g"][..., 0]} | bias


def expanded(call: dict) -> dict:
    K, names = call["q"].shape[-1], {"g", "dt_bias"} & call.keys()
    return call | {name: call[name][..., None].expand(*call[name].shape, K) for name in names}


def gated_delta_net(**call) -> tuple[Tensor, Tensor]:
    """`o` and the final states, token by token: one factor `exp(g)` for a head's whole state."""
    if "cu_seqlens" in call:
        o, states = zip(*(gated_delta_net(**one) for one in sequence_calls(call)))
        return torch.cat(o, 1), torch.cat(states)
    q, k, v, g, beta = (call[name] for name in TOKEN_TENSORS)
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q * q.shape[-1] ** -0.5, k))
    if "A_log" in call:
        g, beta = -call["A_log"].exp() * F.softplus(g + call["dt_bias"]), beta.sigmoid()
    S, o = call.get("initial_state", k.new_zeros(len(k), *k.shape[2:], v.shape[-1])), [v[:, :0]]
    for t in range(v.shape[1]):
        S = g[:, t, :, None, None].exp() * S
        v_new = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", S, k[:, t]))
        S = S + k[:, t, :, :, None] * v_new[:, :, None]
        o.append(torch.einsum("bhkv,bhk->bhv", S, q[:, t])[:, None])
    return torch.cat(o, 1), S
