"""Calls of `flashdelta verify` and `doctor`, and the float64 truth that they are held against."""

import itertools
import zlib
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor

import flashdelta as fd

from ..problem.problem import PARAMETRIC_GATES, PLAIN_GATES

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 6e-3, FP16: 2e-3, FP32: 1e-5}
"""Relative error that a kernel working in this dtype may have."""

_TOKENS = signature(fd.fused_recurrent_kda).parameters
CHUNK_ONLY = [name for name in signature(fd.chunk_kda).parameters if name not in _TOKENS]
"""Arguments of `chunk_kda` that `fused_recurrent_kda` does not have."""


@dataclass(frozen=True)
class Case:
    """A call of `chunk_kda`, and why it is there. `lengths`: packed sequences, else `B` rows of `T` tokens. `lower_bound` is of
    the gate of that name. `hard`: a key of `HARD`. `slack`: tolerance besides, of chunks: twice what rounding their operands
    costs."""

    name: str
    why: str
    _: KW_ONLY
    B: int = 1
    T: int = 150
    H: int = 2
    HV: int = 2
    K: int = 128
    V: int = 128
    lengths: tuple[int, ...] | None = None
    gate: str = "lower_bound"
    lower_bound: float | None = -5.0
    beta: str = "logit"
    safe: bool = False
    chunk_size: int = 64
    state: torch.dtype | None = None
    v_first: bool = False
    hard: str | None = None
    slack: float = 0.0

    @property
    def batch(self) -> int:
        """Rows of the tensors."""
        return self.B if self.lengths is None else 1

    @property
    def tokens(self) -> int:
        """Tokens per row."""
        return self.T if self.lengths is None else sum(self.lengths)

    @property
    def sequences(self) -> int:
        return self.B if self.lengths is None else len(self.lengths)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        return (self.HV, self.V, self.K) if self.v_first else (self.HV, self.K, self.V)


EDGES = (1, 15, 16, 17, 63, 64, 65, 127, 131, 0)
EMPTY: dict[str, Any] = {"lengths": (0, 0, 70, 0, 33, 0), "gate": "softplus", "state": FP32}
SAME_KEYS: dict[str, Any] = {"T": 200, "beta": "value", "gate": "none", "hard": "same_keys", "slack": 0.03}

VERIFY: dict[torch.dtype, list[Case]] = {
    BF16: [
        Case("bounded gate", "the gate of Kimi-K3, whole chunks", T=192),
        Case("softplus gate", "Kimi-Linear: no bound to lean on", T=192, gate="softplus"),
        *(Case(f"{gate} gate", "a gate without parameters", T=192, gate=gate) for gate in PLAIN_GATES),
        Case("decay given", "nothing fused but L2 norm", T=192, beta="value", gate="none"),
        Case("decay promised", "safe_gate takes the tensor-core diagonal", T=192, safe=True, gate="none"),
        Case("batch, tail", "a batch whose last chunk has 3 tokens", B=2, T=131),
        Case("one token", "the shortest prompt", T=1, state=FP32),
        Case("packed, every edge", "block and chunk edges, a prime, an empty sequence last", lengths=EDGES, state=FP32),
        Case("packed, empty ones", "empty sequences keep their state, first, last and between", **EMPTY),
        Case("grouped values", "GVA: three value heads read one query/key head", HV=6, state=FP32),
        Case("K 128, V 64", "K != V shows a transposed state", T=130, V=64, state=FP32),
        Case("K 64, V 128, V first", "the serving layout [V, K]", T=130, K=64, state=FP32, v_first=True),
        Case("K 32, V 32", "the smallest heads", T=130, K=32, V=32),
        Case("K 256, V 256", "the largest heads", T=130, H=1, HV=1, K=256, V=256),
        Case("chunks of 32", "the other chunk size", chunk_size=32, state=FP32),
        Case("beta up to 2", "negative eigenvalues", beta="double_logit"),
        Case("identical keys", "g = 0, beta = 1: a series for the inverse explodes here", **SAME_KEYS),
        Case("zero rows", "the L2 norm of a zero row must stay zero", hard="zero_rows"),
        Case("g = -50", "exp(-50 * 64) underflows", hard="g-50", gate="none"),
        Case("g = -50 and 0", "neighbouring channels forget at once and never", hard="g_mixed", gate="none"),
        Case("gate pinned", "every decay at the bound: the largest block exponents", T=200, hard="pinned"),
        Case("gate pinned, long", "the same for thousands of tokens", T=4096, H=1, HV=1, hard="pinned"),
        Case("long", "errors must not grow along 65 chunks; a prime", T=4099),
        Case("NaN stays put", "a bad request must not reach its neighbours", lengths=(70, 40, 70), hard="nan"),
    ],
    FP16: [Case("fp16", "less range than bf16", state=FP32)],
    FP32: [
        Case("fp32", "no rounding of operands to hide in", state=FP32),
        Case("fp32 softplus", "the exact diagonal in fp32", gate="softplus"),
    ],
}


def _same_keys(t: dict[str, Tensor]) -> None:
    t["k"].copy_(t["k"][:, :1].clone().expand_as(t["k"]))
    t["g"].zero_()
    t["beta"].fill_(1.0)


def _zero_rows(t: dict[str, Tensor]) -> None:
    t["q"][:, ::3], t["k"][:, ::5] = 0.0, 0.0


def _mixed(t: dict[str, Tensor]) -> None:
    t["g"].zero_()
    t["g"][..., ::2] = -50.0


def _nan(t: dict[str, Tensor]) -> None:
    for x in t.values():
        x[:, 70:110] = torch.nan


HARD: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "same_keys": _same_keys,
    "zero_rows": _zero_rows,
    "g-50": lambda t: t["g"].fill_(-50.0),
    "g_mixed": _mixed,
    "pinned": lambda t: t["g"].fill_(50.0),
    "nan": _nan,
}
"""Changes of the tensors in place; `_nan` fills the second of `lengths`."""


class Source:
    """Seeded random tensors on one device."""

    def __init__(self, dtype: torch.dtype, device: str | torch.device, seed: int) -> None:
        self.wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.generator = torch.Generator(device).manual_seed(seed)
        self.device = device

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device, dtype=self.wide)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, device=self.device, dtype=self.wide)


def make_call(case: Case, dtype: torch.dtype, device: str | torch.device = "cpu") -> dict:
    """Arguments of `chunk_kda`. Some channels forget within a token, others remember hundreds, so an error in a state shows."""
    source = Source(dtype, device, zlib.crc32(case.name.encode()))
    B, T, HV, K = case.batch, case.tokens, case.HV, case.K
    tensors = {name: source.normal(B, T, case.H, K) for name in "qk"} | {"v": source.normal(B, T, HV, case.V)}
    tensors["g"] = log_decays(source, case) if case.gate == "none" else source.normal(B, T, HV, K)
    tensors["beta"] = source.uniform(B, T, HV) if case.beta == "value" else source.normal(B, T, HV)
    if case.hard is not None:
        HARD[case.hard](tensors)
    call: dict = {name: x.to(dtype) for name, x in tensors.items()}
    if case.gate in PARAMETRIC_GATES:
        call |= {"A_log": 0.5 * source.normal(HV), "dt_bias": log_rates(source, case).flatten()}
    if case.lengths is not None:
        call["cu_seqlens"] = torch.tensor([0, *case.lengths], device=device).cumsum(0)
    if case.state is not None:
        call["initial_state"] = source.normal(case.sequences, *case.state_shape).to(case.state)
    return call | settings(case)


def log_rates(source: Source, case: Case) -> Tensor:
    return source.uniform(case.HV, case.K) * 9 - 8


def log_decays(source: Source, case: Case) -> Tensor:
    rates = log_rates(source, case).exp()
    return -(rates * source.uniform(case.batch, case.tokens, case.HV, case.K)).clamp(max=5.0 if case.safe else 50.0)


def settings(case: Case) -> dict:
    """The arguments that are no tensors."""
    asked: dict = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    asked |= {"state_v_first": case.v_first, "safe_gate": case.safe, "chunk_size": case.chunk_size}
    if case.gate in PARAMETRIC_GATES:
        asked |= {"use_gate_in_kernel": True, "lower_bound": case.lower_bound if case.gate == "lower_bound" else None}
    elif case.gate != "none":
        asked["gate"] = case.gate
    if case.beta != "value":
        asked |= {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": case.beta == "double_logit"}
    return asked


def as_recurrent(call: dict) -> dict:
    """The arguments that `fused_recurrent_kda` takes, too."""
    return {name: x for name, x in call.items() if name not in CHUNK_ONLY}


def float64(call: dict) -> dict:
    """The call on float64 copies of its floating-point tensors."""
    wide = {name: x.detach().double() for name, x in call.items() if isinstance(x, Tensor) and x.is_floating_point()}
    return call | wide


def truth(call: dict) -> tuple[Tensor, Tensor]:
    """`(o, final_state)` by the token recurrence in float64. Packed sequences are computed one at a time: the truth shares no
    packing logic with what it judges. Tokens of no sequence are 0."""
    exact = as_recurrent(float64(call)) | {"output_final_state": True, "backend": "reference", "out": None}
    offsets, state = exact.get("cu_seqlens"), exact.get("initial_state")
    if offsets is None or len(offsets) < 2 or exact.get("state_pool") is not None:
        return fd.fused_recurrent_kda(**exact)
    o, states = torch.zeros_like(exact["v"]), []
    for n, (start, stop) in enumerate(itertools.pairwise(offsets.tolist())):
        own = {name: exact[name][:, start:stop] for name in ("q", "k", "v", "g", "beta")}
        own |= {"initial_state": None if state is None else state[n : n + 1], "cu_seqlens": None}
        o[:, start:stop], last = fd.fused_recurrent_kda(**exact | own)
        states.append(last)
    return o, torch.cat(states)


def relative_error(got: Tensor, want: Tensor) -> float:
    """`||got - want|| / ||want||` in float64; 0 if they are equal, inf if only `want` is 0, NaN if `got` has one."""
    got, want = got.double(), want.double()
    difference, size = (got - want).norm().item(), want.norm().item()
    return 0.0 if difference == 0.0 else difference / size if size > 0 else difference * float("inf")
