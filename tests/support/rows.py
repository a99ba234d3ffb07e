"""One table of calls for tests that hold for every operation, with what each is held against: `ROWS`, one row a way through the
kernels. `inputs.py` makes their arguments, in any memory layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import flashdelta as fd

from .cases import BF16, BOUNDED, FP32, Case
from .decoding import Step, make_step
from .decoding_checks import replay_buffer
from .fused import FusedStep, make_fused
from .inputs import make_call
from .layer import ConvolutionCase, NormCase, make_convolution, make_norm
from .oracle import as_recurrent
from .pools import PoolCase, as_recurrent_pool, pool_call
from .prefills import prefill_call
from .wy import WyCase, make_wy

CHUNK = Case("replay", "", T=70, H=1, HV=2, K=64, V=64, state=FP32, **BOUNDED)
PACKED = replace(CHUNK, lengths=(40, 0, 30))
PREFILL = Case("replay", "", T=70, H=2, HV=2, K=64, V=64, l2norm=False)
CONVOLUTION = ConvolutionCase("replay", "", B=2, bias=True, state=0)
STEP = Step("replay", "", B=3, HV=2, K=64, V=64, state=BF16)
DRAFTS = replace(STEP, T=3, spec=2, update=False, indices=(3, 1, 4), rows="slots")
FUSED = FusedStep("replay", "", K=64, V=64, HV=1, bias=True)
POOL = {"case": replace(PACKED, state=BF16), "indices": (4, 1, 2)}
LEAVES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
HOPPER, PORTABLE = ("triton", "hopper"), ("triton",)


def call_of(
    op: Callable, case: Any, dtype: torch.dtype = BF16, device: torch.device | str = "cpu", seed: int = 0
) -> dict:
    """Arguments of a public function, for a case of any kind."""
    makers = {PoolCase: pool_call, FusedStep: make_fused, Step: make_step}
    if isinstance(case, (WyCase, ConvolutionCase, NormCase)):
        return {WyCase: make_wy, ConvolutionCase: make_convolution, NormCase: make_norm}[type(case)](
            case, dtype, device
        )
    if op is fd.kda_prefill:
        return prefill_call(case, device, seed)
    call = makers.get(type(case), make_call)(case, dtype, device, seed)
    return as_recurrent_pool(call) if op is fd.fused_recurrent_kda else call


@dataclass(frozen=True)
class Row:
    """A call of `op` with the arguments of `make`. `leaves`: arguments that take gradients, if it is differentiated. `writes`:
    those that it writes. `tied`: those whose numbers must stay."""

    name: str
    op: Callable[..., Any]
    make: Callable[[], dict]
    backends: tuple[str, ...] = HOPPER
    leaves: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


def chunk(case: Case, dtype: torch.dtype = BF16, **options: Any) -> Callable[[], dict]:
    return lambda: make_call(case, dtype) | options


def records() -> dict:
    return make_step(DRAFTS, BF16) | {"intermediate_states": replay_buffer(DRAFTS)}


def draft_and_commit(num_accepted_tokens: torch.Tensor, **call: Any) -> tuple:
    """Both halves of speculative decoding."""
    found = fd.recurrent_kda(**call)
    names = ("initial_state", "intermediate_states", "ssm_state_indices", "state_v_first", "backend")
    fd.commit(num_accepted_tokens=num_accepted_tokens, **{name: call[name] for name in names})
    return found


def accepted(call: dict) -> dict:
    return call | {"num_accepted_tokens": torch.tensor([2, 0, 3], dtype=torch.int32)}


CHECKPOINTS = PoolCase("", "", PACKED, every=64, rows=3, final=FP32, split=False)
IN_POOL = PoolCase("replay", "", flags=(True, False, True), **POOL)

ROWS = [
    Row("chunk", fd.chunk_kda, chunk(CHUNK)),
    Row("chunk packed h", fd.chunk_kda, chunk(replace(PACKED, h=True))),
    Row("chunk split", fd.chunk_kda, chunk(replace(CHUNK, T=130), split=2)),
    Row("chunk pool", fd.chunk_kda, lambda: pool_call(IN_POOL, BF16), writes=("state_pool",)),
    Row("chunk out", fd.chunk_kda, lambda: chunk(CHUNK)() | {"out": torch.zeros(1, 70, 2, 64).bfloat16()}, writes=("out",)),
    Row("chunk checkpoints", fd.chunk_kda, lambda: pool_call(CHECKPOINTS, BF16), writes=("checkpoint_states", "final_state")),
    Row("chunk backward", fd.chunk_kda, chunk(CHUNK), leaves=LEAVES),
    Row("chunk packed kept backward", fd.chunk_kda, chunk(PACKED, disable_recompute=True), leaves=LEAVES),
    Row("chunk split backward", fd.chunk_kda, chunk(replace(CHUNK, T=130), split=2), leaves=LEAVES),
    Row("recurrent", fd.fused_recurrent_kda, lambda: as_recurrent(chunk(replace(CHUNK, T=5))()), PORTABLE),
    Row("decode", fd.recurrent_kda, lambda: make_step(STEP, BF16), writes=("initial_state",)),
    Row("decode mixed", fd.recurrent_kda, lambda: make_step(replace(STEP, layout="mixed"), BF16), writes=("initial_state",)),
    Row("verify", fd.recurrent_kda, lambda: make_step(DRAFTS, BF16), PORTABLE, writes=("intermediate_states",)),
    Row("verify records", fd.recurrent_kda, records, writes=("intermediate_states",), tied=("intermediate_states",)),
    Row(
        "commit", draft_and_commit, lambda: accepted(make_step(DRAFTS, BF16)), PORTABLE,
        writes=("initial_state", "intermediate_states"),
    ),
    Row(
        "commit records", draft_and_commit, lambda: accepted(records()),
        writes=("initial_state", "intermediate_states"), tied=("intermediate_states",),
    ),
    Row("fused", fd.fused_kda_decode, lambda: make_fused(FUSED, BF16), writes=("conv_state", "state")),
    Row("prefill", fd.kda_prefill, lambda: prefill_call(PREFILL), PORTABLE),
    Row("wy", fd.kernels.chunk_bwd_wy_dqkg, lambda: make_wy(WyCase("replay", "", HV=2, K=64, V=64), BF16)),
    Row("norm", fd.gated_rms_norm, lambda: make_norm(NormCase("replay", "")), PORTABLE),
    Row("norm backward", fd.gated_rms_norm, lambda: make_norm(NormCase("replay", "")), PORTABLE, ("x", "z", "weight")),
    Row("convolution", fd.short_convolution, lambda: make_convolution(CONVOLUTION, BF16), PORTABLE),
    Row(
        "convolution pool", fd.short_convolution,
        lambda: make_convolution(ConvolutionCase("replay", "", lengths=(20, 0, 17), indices=(4, 1, 2), state=0)), PORTABLE,
        writes=("state_pool",),
    ),
    Row(
        "convolution backward", fd.short_convolution,
        lambda: make_convolution(CONVOLUTION, BF16), PORTABLE,
        ("x", "weight", "bias", "initial_state"),
    ),
]  # fmt: skip
BY_NAME = {row.name: row for row in ROWS}
PAIRS: list[tuple[Row, str]] = [(row, backend) for row in ROWS for backend in row.backends]
"""Calls and the backends that have kernels for them."""


def pair_id(x: object) -> str:
    return " ".join(map(str, x)) if isinstance(x, tuple) else str(x)
