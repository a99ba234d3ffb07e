"""The calls that `flashdelta verify` checks, and why each is there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from ...problem.problem import GateName
from ..bench.cases import Shape
from ..bench.inputs import Inputs, random_inputs

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True, kw_only=True)
class VerifyCase:
    """One call. `harden` changes the random inputs; `nan_sequence` names a packed sequence filled with NaN, which must
    stay in it; `long` cases are left out by `--quick`; `ill_conditioned` ones amplify the rounding of operands, which
    chunked kernels are then allowed twice over."""

    name: str
    reason: str
    shape: Shape
    dtype: torch.dtype = BF16
    gate: GateName = "lower_bound"
    beta: Literal["value", "logit", "double_logit"] = "logit"
    safe_gate: bool = False
    chunk_size: int = 64
    initial_state: bool = False
    state_v_first: bool = False
    harden: Callable[[Inputs], Inputs] | None = None
    nan_sequence: int | None = None
    long: bool = False
    ill_conditioned: bool = False


def options(case: VerifyCase) -> dict[str, object]:
    """The arguments of `chunk_kda` that are no tensors."""
    return {
        "gate": case.gate,
        "lower_bound": -5.0 if case.gate == "lower_bound" else None,
        "safe_gate": case.safe_gate,
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": case.beta != "value",
        "allow_neg_eigval": case.beta == "double_logit",
        "chunk_size": case.chunk_size,
        "output_final_state": True,
        "state_v_first": case.state_v_first,
    }


def inputs(case: VerifyCase, device: torch.device) -> Inputs:
    """The tensors of the call, seeded."""
    found = random_inputs(case.shape, device, dtype=case.dtype, initial_state=case.initial_state)
    if case.gate == "none":
        # log decays from about 0 to -3, as a softplus gate gives
        found["g"] = -F.softplus(2 * found["g"].float() - 2).to(case.dtype)
    if case.beta == "value":
        found["beta"] = torch.sigmoid(found["beta"].float()).to(case.dtype)
    if case.state_v_first and case.initial_state:
        found["initial_state"] = found["initial_state"].transpose(-1, -2).contiguous()
    if case.harden is not None:
        found = case.harden(found)
    if case.nan_sequence is not None:
        a, b = found["cu_seqlens"][case.nan_sequence : case.nan_sequence + 2].tolist()
        for name in ("q", "k", "v", "g", "beta"):
            found[name][:, a:b] = torch.nan
    return found


def _identical_keys(x: Inputs) -> Inputs:
    return {**x, "k": x["k"][:, :1].expand_as(x["k"]).contiguous(), "g": torch.zeros_like(x["g"]), "beta": _ones(x)}


def _ones(x: Inputs) -> torch.Tensor:
    return torch.ones_like(x["beta"])


def _pinned_gate(x: Inputs) -> Inputs:
    return {**x, "g": torch.full_like(x["g"], 100.0)}


def _vanishing_decay(x: Inputs) -> Inputs:
    return {**x, "g": torch.full_like(x["g"], -50.0)}


def _mixed_decay(x: Inputs) -> Inputs:
    g = x["g"].clone()
    g[..., ::2] = -50.0
    g[..., 1::2] = 0.0
    return {**x, "g": g}


def _zero_rows(x: Inputs) -> Inputs:
    q, k = x["q"].clone(), x["k"].clone()
    q[:, ::3], k[:, 1::3] = 0.0, 0.0
    return {**x, "q": q, "k": k}


def _promised_decay(x: Inputs) -> Inputs:
    return {**x, "g": x["g"].clamp(-5.0, 0.0)}


CASES: tuple[VerifyCase, ...] = (
    VerifyCase(name="bounded gate", shape=Shape(T=192, H=2), reason="the gate of Kimi-K3, whole chunks"),
    VerifyCase(
        name="softplus gate", shape=Shape(T=192, H=2), gate="softplus", reason="Kimi-Linear: no bound to lean on"
    ),
    VerifyCase(name="logsigmoid gate", shape=Shape(T=192, H=2), gate="logsigmoid", reason="a gate without parameters"),
    VerifyCase(
        name="decay given", shape=Shape(T=192, H=2), gate="none", beta="value", reason="nothing fused but L2 norm"
    ),
    VerifyCase(
        name="decay promised",
        shape=Shape(T=192, H=2),
        gate="none",
        safe_gate=True,
        harden=_promised_decay,
        reason="safe_gate takes the tensor-core diagonal",
    ),
    VerifyCase(name="batch, tail", shape=Shape(B=2, T=131, H=2), reason="a batch whose last chunk has 3 tokens"),
    VerifyCase(name="one token", shape=Shape(T=1, H=2), initial_state=True, reason="the shortest prompt"),
    VerifyCase(
        name="packed, every edge",
        shape=Shape(lengths=(1, 15, 16, 17, 63, 64, 65, 127, 131, 0), H=2),
        initial_state=True,
        reason="block and chunk edges, a prime, an empty sequence last",
    ),
    VerifyCase(
        name="packed, empty ones",
        shape=Shape(lengths=(0, 0, 70, 0, 33, 0), H=2),
        gate="softplus",
        initial_state=True,
        reason="empty sequences keep their state, first, last and between",
    ),
    VerifyCase(
        name="grouped values",
        shape=Shape(T=150, H=2, HV=6),
        initial_state=True,
        reason="GVA: three value heads read one query/key head",
    ),
    VerifyCase(
        name="K 128, V 64", shape=Shape(T=130, H=2, V=64), initial_state=True, reason="K != V shows a transposed state"
    ),
    VerifyCase(
        name="K 64, V 128, V first",
        shape=Shape(T=130, H=2, K=64),
        initial_state=True,
        state_v_first=True,
        reason="the serving layout [V, K], K != V",
    ),
    VerifyCase(name="K 32, V 32", shape=Shape(T=130, H=2, K=32, V=32), reason="the smallest heads"),
    VerifyCase(name="K 256, V 256", shape=Shape(T=130, H=1, K=256, V=256), long=True, reason="the largest heads"),
    VerifyCase(
        name="chunks of 32", shape=Shape(T=150, H=2), chunk_size=32, initial_state=True, reason="the other chunk size"
    ),
    VerifyCase(name="fp16", shape=Shape(T=150, H=2), dtype=FP16, initial_state=True, reason="less range than bf16"),
    VerifyCase(
        name="fp32",
        shape=Shape(T=150, H=2),
        dtype=FP32,
        initial_state=True,
        reason="no rounding of operands to hide in",
    ),
    VerifyCase(
        name="fp32 softplus", shape=Shape(T=150, H=2), dtype=FP32, gate="softplus", reason="the exact diagonal in fp32"
    ),
    VerifyCase(name="beta up to 2", shape=Shape(T=150, H=2), beta="double_logit", reason="negative eigenvalues"),
    VerifyCase(
        name="identical keys",
        shape=Shape(T=200, H=2),
        gate="none",
        beta="value",
        harden=_identical_keys,
        ill_conditioned=True,
        reason="g = 0, beta = 1: a series for the inverse explodes here",
    ),
    VerifyCase(
        name="zero rows", shape=Shape(T=150, H=2), harden=_zero_rows, reason="the L2 norm of a zero row must stay zero"
    ),
    VerifyCase(
        name="g = -50", shape=Shape(T=150, H=2), gate="none", harden=_vanishing_decay, reason="exp(-50 * 64) underflows"
    ),
    VerifyCase(
        name="g = -50 and 0",
        shape=Shape(T=150, H=2),
        gate="none",
        harden=_mixed_decay,
        reason="neighbouring channels forget at once and never",
    ),
    VerifyCase(
        name="gate pinned",
        shape=Shape(T=200, H=2),
        harden=_pinned_gate,
        reason="every decay at the lower bound: the largest block exponents",
    ),
    VerifyCase(
        name="gate pinned, long",
        shape=Shape(T=4096, H=1),
        harden=_pinned_gate,
        long=True,
        reason="the same for thousands of tokens",
    ),
    VerifyCase(
        name="long", shape=Shape(T=4099, H=2), long=True, reason="errors must not grow along 65 chunks; a prime"
    ),
    VerifyCase(
        name="NaN stays put",
        shape=Shape(lengths=(70, 40, 70), H=2),
        nan_sequence=1,
        reason="one bad request must not reach its neighbours",
    ),
)
