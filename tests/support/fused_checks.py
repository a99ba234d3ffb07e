"""Checks of every backend's `fused_kda_decode`."""

from __future__ import annotations

from dataclasses import replace

import torch

import flashdelta as fd

from .cases import BF16, FP32
from .decoding import rows_of
from .decoding_checks import output_of
from .fused import EPS, FUSED_BY_NAME, FUSED_STEPS, FusedStep, make_fused
from .held import of_states, run_held
from .oracle import TOLERANCE, assert_close

_PLAIN = [x.name for x in FUSED_STEPS if x.T == 1 and x.lengths is None and x.v_first and x.state == FP32]
HOPPER_FUSED = [
    replace(FUSED_BY_NAME[name], name=f"{name} K{K} {state} {group}", H=2, HV=2 * group, K=K, V=K, state=state)
    for name, K, state, group in (
        *((name, 64, FP32, 1) for name in _PLAIN),
        *((name, 128, BF16, 1) for name in ("model", "two_taps", "null", "softplus", "page", "scattered")),
        ("one", 64, BF16, 1),
        ("model", 128, FP32, 1),
        ("gva3", 64, FP32, 3),
        ("null", 64, BF16, 2),
        ("scattered", 64, FP32, 2),
        ("gva8", 128, BF16, 8),
        ("no_slots", 64, FP32, 2),
    )
]
"""Steps that Hopper's own kernel takes, or leaves to the portable one because states lie on no 16 bytes."""

WRITTEN = ("state", "conv_state", "intermediate_states")


def check_fused(step: FusedStep, dtype: torch.dtype, backend: str, device: str = "cpu", seed: int = 0) -> dict:
    """Runs one step into an `output` full of NaN, and holds all that it leaves. Returns the call."""
    if dtype == torch.float64 and step.state == FP32:
        step = replace(step, state=dtype)
    call = make_fused(step, dtype, device, seed)
    states = of_states if step.rows is None else lambda dtype: 1e-4
    given = call | {"output": output_of(step, dtype, device), "backend": backend}
    run_held(fd.fused_kda_decode, given, TOLERANCE[dtype], states)
    return call


def by_operators(call: dict, backend: str) -> torch.Tensor:
    """A call of one token per sequence as single operators: what it returns. Both pools are written."""
    rows, HV, K = call["x"].shape[0], call["state"].shape[1], call["state"].shape[3]
    pool = {"state_pool": call["conv_state"], "state_indices": call["state_indices"], "backend": backend}
    mixed, _ = fd.short_convolution(call["x"][:, None], call["weight"], call["bias"], **pool)
    names = ("A_log", "dt_bias", "lower_bound", "gate", "use_qk_l2norm_in_kernel", "beta_is_logit", "allow_neg_eigval")
    tokens = {"g": call["raw_g"].reshape(rows, HV * K), "beta": call["raw_beta"].reshape(rows, HV)}
    tokens["scale"] = call["scale"]
    states = {"initial_state": call["state"], "ssm_state_indices": call["state_indices"]}
    given = tokens | states | {name: call[name] for name in names}
    o, _ = fd.recurrent_kda(mixed_qkv=mixed[:, 0], **given, backend=backend)
    z = call["output_gate"].reshape(o.shape)
    return fd.gated_rms_norm(o, z, call["norm_weight"], eps=EPS, backend=backend)


ROWS = ("x", "raw_g", "raw_beta", "output_gate")


def check_rounds_of_fused(rounds: int, dtype: torch.dtype, backend: str, device: str = "cpu") -> None:
    """Verification and random acceptance, over and over, with a state after each token and by replay: both go on alike."""
    draw = torch.Generator().manual_seed(0)
    S, N, heads = 3, 4, {"H": 1, "HV": 2, "W": 4, "state": torch.float64 if dtype == torch.float64 else FP32}
    spec = {"T": 1 + S, "spec": S, "B": N, "accepted": (1,) * N, **heads}
    each = make_fused(FusedStep("each", "", indices=rows_of(N, 1 + S), slots=16, **spec), dtype, device)
    own = FusedStep("replayed", "", indices=(*range(N),), slots=N, rows="slots", **spec)
    shared = ("weight", "A_log", "dt_bias", "norm_weight", *ROWS)
    replayed = make_fused(own, dtype, device) | {name: each[name] for name in shared}
    slots = replayed["state_indices"]
    for name in ("state", "conv_state"):
        replayed[name].copy_(each[name][:: 1 + S])
    for _ in range(rounds):
        for name in ROWS:
            each[name].copy_(torch.randn(each[name].shape, generator=draw))
        found = []
        for call in (each, replayed):
            given = call | {"backend": backend}
            found += run_held(fd.fused_kda_decode, given, TOLERANCE[dtype], lambda dtype: 1e-4)
        assert_close("o", found[1].flatten(0, 1), found[0].flatten(0, 1).double(), 2 * TOLERANCE[dtype])
        counts = torch.randint(1, 2 + S, (N,), generator=draw).to(device, torch.int32)
        fd.commit(replayed["state"], replayed["intermediate_states"], slots, counts, backend=backend)
        for call in (each, replayed):
            call["num_accepted_tokens"].copy_(counts)
