"""One table of calls for tests that hold for every operation, with what each is held against: `ROWS`, one row a way through the
kernels. `inputs.py` makes their arguments, in any memory layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import flashdelta as fd

from .cases import BF16, BOUNDED, FP32, Case
from .decoding import Step, make_step, rows_of
from .decoding_checks import replay_buffer
from .fused import FusedStep, make_fused
from .inputs import make_call
from .layer import ConvolutionCase, NormCase, make_convolution, make_norm
from .pools import PoolCase, as_recurrent, pool_call
from .prefills import prefill_call
from .wy import WyCase, make_wy

CHUNK = Case("replay", "", T=70, H=1, HV=2, K=64, V=64, state=FP32, **BOUNDED)
PACKED = replace(CHUNK, lengths=(40, 0, 30))
PREFILL = Case("replay", "", T=70, H=2, HV=2, K=64, V=64, l2norm=False)
CONVOLUTION = ConvolutionCase("replay", "", B=2, bias=True, state=0)
STEP = Step("replay", "", B=3, HV=2, K=64, V=64, state=BF16)
DRAFTS = replace(STEP, T=3, spec=2, update=False, indices=(3, 1, 4), rows=(2, 0, 1))
FUSED = FusedStep("replay", "", K=64, V=64, HV=2, bias=True)
POOL = {"case": replace(PACKED, state=BF16), "indices": (4, 1, 2)}
WY = WyCase("replay", "", HV=2, K=64, V=64, lengths=(40, 0, 30))
NORM = NormCase("replay", "")
CONVOLUTION_LEAVES = ("x", "weight", "bias", "initial_state")
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
    return as_recurrent(call) if op is fd.fused_recurrent_kda else call


@dataclass(frozen=True)
class Row:
    """A call of `op` with the arguments of `make`, which takes a seed. `leaves`: arguments that take gradients, if it is
    differentiated. `writes`: those that it writes."""

    name: str
    op: Callable[..., Any]
    make: Callable[[int], dict]
    backends: tuple[str, ...] = HOPPER
    leaves: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


def chunk(case: Case, **options: Any) -> Callable[[int], dict]:
    return lambda seed: make_call(case, BF16, seed=seed) | options


def made(make: Callable[..., dict], case: Any, dtype: torch.dtype = BF16) -> Callable[[int], dict]:
    """Runs a maker that draws from the case's name."""
    return lambda seed: make(replace(case, name=f"{case.name} {seed}"), dtype)


def records(seed: int) -> dict:
    return make_step(DRAFTS, BF16, seed=seed) | {"intermediate_states": replay_buffer(DRAFTS)}


def draft_and_commit(num_accepted_tokens: torch.Tensor, **call: Any) -> tuple:
    """Both halves of speculative decoding."""
    found = fd.recurrent_kda(**call)
    names = ("initial_state", "intermediate_states", "ssm_state_indices", "intermediate_state_indices", "state_v_first")
    fd.commit(num_accepted_tokens=num_accepted_tokens, **{name: call[name] for name in (*names, "backend")})
    return found


def accepted(make: Callable[[int], dict]) -> Callable[[int], dict]:
    return lambda seed: make(seed) | {"num_accepted_tokens": torch.tensor([2, 0, 3], dtype=torch.int32)}


def pooled(case: PoolCase, op: Callable = fd.chunk_kda) -> Callable[[int], dict]:
    return lambda seed: call_of(op, case, seed=seed)


def into(make: Callable[[int], dict], **shapes: tuple[int, ...]) -> Callable[[int], dict]:
    """The same with tensors for results."""
    return lambda seed: make(seed) | {name: torch.zeros(shape, dtype=BF16) for name, shape in shapes.items()}


MARKS: dict[str, Any] = {"marks": (64, 0, 0), "mark_rows": (2, 0, 1), "rows": 3}
CHECKPOINTS = PoolCase("", "", replace(PACKED, lengths=(66, 0, 4)), **MARKS, final=FP32, split=False)
FINAL = PoolCase("", "", replace(CHUNK, B=2, T=5), final=FP32)
IN_POOL = PoolCase("replay", "", flags=(False, True, True), **POOL)
WINDOWS = ConvolutionCase("replay", "", lengths=(20, 0, 17), indices=(4, 1, 2), flags=(False, True, True), state=0)
MARKED = replace(WINDOWS, indices=None, flags=None, bias=True, marks=(9, 0, 5), rows=(2, 0, 1), buffer=3)
MARKED_BUFFERS = into(made(make_convolution, MARKED), out=(1, 37, 24), final_state=(3, 24, 3))
SOURCE = replace(STEP, source=(4, 1, 2), lengths=(1, 0, 1))
TARGETS = replace(FUSED, T=3, spec=2, indices=rows_of(3, 3), slots=9, accepted=(1, 3, 2))
RECORDED = replace(FUSED, T=3, spec=2, indices=(3, 1, 4), rows=(2, 0, 1), lengths=(3, 0, 2), accepted=(1, 3, 2))

FROM_ELSEWHERE = into(made(make_step, SOURCE), output=(1, 2, 2, 64))
FUSED_DRAFTS = into(made(make_fused, TARGETS), output=(3, 3, 2, 64))
STATES, BUFFERS = ("initial_state", "intermediate_states"), ("checkpoint_states", "final_state")
FUSED_STATES = ("conv_state", "state")
RECURRENT, DECODE, STEPS, CONVOLVE = fd.fused_recurrent_kda, fd.recurrent_kda, fd.fused_kda_decode, fd.short_convolution
RECURRENT_POOL = into(pooled(IN_POOL, RECURRENT), out=(1, 70, 2, 64))

ROWS = [
    Row("chunk packed h", fd.chunk_kda, chunk(replace(PACKED, h=True))),
    Row("chunk split", fd.chunk_kda, chunk(replace(CHUNK, T=130), split=2)),
    Row("chunk pool", fd.chunk_kda, pooled(IN_POOL), writes=("state_pool",)),
    Row("chunk out", fd.chunk_kda, into(chunk(CHUNK), out=(1, 70, 2, 64)), writes=("out",)),
    Row("chunk checkpoints", fd.chunk_kda, pooled(CHECKPOINTS), writes=BUFFERS),
    Row("chunk backward", fd.chunk_kda, chunk(CHUNK), leaves=LEAVES),
    Row("chunk packed kept backward", fd.chunk_kda, chunk(PACKED, disable_recompute=True), leaves=LEAVES),
    Row("chunk split backward", fd.chunk_kda, chunk(replace(CHUNK, T=130), split=2), leaves=LEAVES),
    Row("recurrent", RECURRENT, pooled(FINAL, RECURRENT), PORTABLE, writes=("final_state",)),
    Row("recurrent pool", RECURRENT, RECURRENT_POOL, PORTABLE, writes=("state_pool", "out")),
    Row("decode", DECODE, made(make_step, STEP), writes=("initial_state",)),
    Row("decode mixed", DECODE, made(make_step, replace(STEP, layout="mixed")), writes=("initial_state",)),
    Row("decode from elsewhere", DECODE, FROM_ELSEWHERE, PORTABLE, writes=("initial_state", "output")),
    Row("verify", DECODE, made(make_step, DRAFTS), PORTABLE, writes=("intermediate_states",)),
    Row("verify records", DECODE, records, writes=("intermediate_states",)),
    Row("commit", draft_and_commit, accepted(made(make_step, DRAFTS)), PORTABLE, writes=STATES),
    Row("commit records", draft_and_commit, accepted(records), writes=STATES),
    Row("fused", STEPS, made(make_fused, FUSED), writes=FUSED_STATES),
    Row("fused drafts", STEPS, FUSED_DRAFTS, PORTABLE, writes=(*FUSED_STATES, "output")),
    Row("fused records", STEPS, made(make_fused, RECORDED), PORTABLE, writes=("conv_state", "intermediate_states")),
    Row("prefill", fd.kda_prefill, lambda seed: prefill_call(PREFILL, seed=seed), PORTABLE),
    Row("wy", fd.kernels.chunk_bwd_wy_dqkg, made(make_wy, WY)),
    Row("norm", fd.gated_rms_norm, made(make_norm, NORM, FP32), PORTABLE),
    Row("norm backward", fd.gated_rms_norm, made(make_norm, NORM, FP32), PORTABLE, ("x", "z", "weight")),
    Row("convolution", CONVOLVE, made(make_convolution, CONVOLUTION), PORTABLE),
    Row("convolution pool", CONVOLVE, made(make_convolution, WINDOWS, FP32), PORTABLE, writes=("state_pool",)),
    Row("convolution checkpoints", CONVOLVE, MARKED_BUFFERS, PORTABLE, writes=(*BUFFERS, "out")),
    Row("convolution backward", CONVOLVE, made(make_convolution, CONVOLUTION), PORTABLE, CONVOLUTION_LEAVES),
]
BY_NAME = {row.name: row for row in ROWS}
PAIRS: list[tuple[Row, str]] = [(row, backend) for row in ROWS for backend in row.backends]
"""Calls and the backends that have kernels for them."""


def pair_id(x: object) -> str:
    return " ".join(map(str, x)) if isinstance(x, tuple) else str(x)
