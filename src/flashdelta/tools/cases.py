"""Calls of `flashdelta verify` and `doctor`, and the float64 truth that they are held against."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

import flashdelta as fd

from ..problem.problem import PLAIN_GATES

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 6e-3, FP16: 2e-3, FP32: 1e-5}
"""Relative error that a kernel working in this dtype may have."""

CHUNK_ONLY = ("safe_gate", "chunk_size")
"""Arguments of these calls that `fused_recurrent_kda` does not have."""


@dataclass(frozen=True)
class Case:
    """A call of `chunk_kda`, and why it is there. `lengths`: packed sequences, else `B` rows of `T` tokens. `state`: float32
    states come in. `hard`: a key of `HARD`. `slack`: tolerance besides, of chunks: twice
    what rounding their operands costs."""

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
    beta: str = "logit"
    safe: bool = False
    chunk_size: int = 64
    state: bool = False
    v_first: bool = False
    hard: str | None = None
    slack: float = 0.0

    @property
    def is_long(self) -> bool:
        """Tells whether `flashdelta verify --quick` leaves the case out."""
        return self.T > 1000 or self.K == 256


EDGES = (1, 15, 16, 17, 63, 64, 65, 127, 131, 0)
EMPTY: dict[str, Any] = {"lengths": (0, 0, 70, 0, 33, 0), "gate": "softplus", "state": True}
SAME_KEYS: dict[str, Any] = {"T": 200, "beta": "value", "gate": "none", "hard": "same_keys", "slack": 0.03}

VERIFY: dict[torch.dtype, list[Case]] = {
    BF16: [
        Case("bounded gate", "the gate of Kimi-K3, whole chunks", T=192),
        Case("softplus gate", "Kimi-Linear: no bound to lean on", T=192, gate="softplus"),
        *(Case(f"{gate} gate", "a gate without parameters", T=192, gate=gate) for gate in PLAIN_GATES),
        Case("decay given", "nothing fused but L2 norm", T=192, beta="value", gate="none"),
        Case("decay promised", "safe_gate takes the tensor-core diagonal", T=192, safe=True, gate="none"),
        Case("batch, tail", "a batch whose last chunk has 3 tokens", B=2, T=131),
        Case("one token", "the shortest prompt", T=1, state=True),
        Case("packed, every edge", "block and chunk edges, a prime, an empty sequence last", lengths=EDGES, state=True),
        Case("packed, empty ones", "empty sequences keep their state, first, last and between", **EMPTY),
        Case("grouped values", "GVA: three value heads read one query/key head", HV=6, state=True),
        Case("K 128, V 64", "K != V shows a transposed state", T=130, V=64, state=True),
        Case("K 64, V 128, V first", "the serving layout [V, K]", T=130, K=64, state=True, v_first=True),
        Case("K 32, V 32", "the smallest heads", T=130, K=32, V=32),
        Case("K 256, V 256", "the largest heads", T=130, H=1, HV=1, K=256, V=256),
        Case("chunks of 32", "the other chunk size", chunk_size=32, state=True),
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
    FP16: [Case("fp16", "less range than bf16", state=True)],
    FP32: [
        Case("fp32", "no rounding of operands to hide in", state=True),
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


def make_call(case: Case, dtype: torch.dtype, device: str | torch.device = "cpu") -> dict:
    """Arguments of `chunk_kda`. Some channels forget within a token, others remember hundreds, so an error in a state shows."""
    source = torch.Generator(device).manual_seed(zlib.crc32(case.name.encode()))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source, device=device)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=source, device=device)

    B, T, HV = (case.B, case.T, case.HV) if case.lengths is None else (1, sum(case.lengths), case.HV)
    rates = uniform(HV, case.K) * 9 - 8
    tensors = {name: normal(B, T, case.H, case.K) for name in "qk"} | {"v": normal(B, T, HV, case.V)}
    given = -(rates.exp() * uniform(B, T, HV, case.K)).clamp(max=5.0 if case.safe else 50.0)
    tensors["g"] = given if case.gate == "none" else normal(B, T, HV, case.K)
    tensors["beta"] = uniform(B, T, HV) if case.beta == "value" else normal(B, T, HV)
    if case.hard is not None:
        HARD[case.hard](tensors)
    call: dict = {name: x.to(dtype) for name, x in tensors.items()}
    if case.gate in ("softplus", "lower_bound"):
        call |= {"A_log": 0.5 * normal(HV), "dt_bias": rates.flatten(), "use_gate_in_kernel": True}
        call["lower_bound"] = -5.0 if case.gate == "lower_bound" else None
    elif case.gate != "none":
        call["gate"] = case.gate
    if case.beta != "value":
        call |= {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": case.beta == "double_logit"}
    if case.lengths is not None:
        call["cu_seqlens"] = torch.tensor([0, *case.lengths], device=device).cumsum(0)
    if case.state:
        count = B if case.lengths is None else len(case.lengths)
        call["initial_state"] = normal(count, HV, *((case.V, case.K) if case.v_first else (case.K, case.V)))
    flags = {"use_qk_l2norm_in_kernel": True, "output_final_state": True, "state_v_first": case.v_first}
    return call | flags | {"safe_gate": case.safe, "chunk_size": case.chunk_size}


def as_recurrent(call: dict) -> dict:
    """The arguments that `fused_recurrent_kda` takes, too."""
    return {name: x for name, x in call.items() if name not in CHUNK_ONLY}


def truth(call: dict) -> tuple[Tensor, Tensor]:
    """`(o, final_state)` by the token recurrence in float64. Packed sequences are computed one at a time: the truth shares no
    packing logic with what it judges."""
    exact = {name: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in call.items()}
    exact = as_recurrent(exact) | {"backend": "reference"}
    offsets, state = exact.pop("cu_seqlens", None), exact.get("initial_state")
    if offsets is None:
        return fd.fused_recurrent_kda(**exact)
    found = []
    for n, (start, stop) in enumerate(itertools.pairwise(offsets.tolist())):
        tokens = {name: exact[name][:, start:stop] for name in ("q", "k", "v", "g", "beta")}
        own = {} if state is None else {"initial_state": state[n : n + 1]}
        found.append(fd.fused_recurrent_kda(**exact | tokens | own))
    return torch.cat([o for o, _ in found], dim=1), torch.cat([last for _, last in found])


def relative_error(got: Tensor, want: Tensor) -> float:
    """`||got - want|| / ||want||` in float64; 0 if they are equal, inf if only `want` is 0, NaN if `got` has one."""
    got, want = got.double(), want.double()
    difference, size = (got - want).norm().item(), want.norm().item()
    return 0.0 if difference == 0.0 else difference / size if size > 0 else difference * float("inf")
