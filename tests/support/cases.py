"""Calls of `chunk_kda` and why each is there: `CASES` for the tests of every tier.

`inputs.make_call(case, dtype)` turns a case into arguments. In `CASES` sizes are the smallest that show the thing; K differs
from V throughout, so that a state of the wrong layout can't pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from flashdelta.problem.problem import PLAIN_GATES
from flashdelta.tools import cases as verified
from flashdelta.tools.cases import BF16, FP16, FP32  # noqa: F401


@dataclass(frozen=True, kw_only=True)
class Case(verified.Case):
    """One call. `lengths`: packed sequences, in one row with `unused` tokens of none behind them.

    `hard`: a key of `inputs.HARD`, which changes the tensors. `ill_conditioned`: rounding a chunk's operands to the working
    dtype, which every chunked kernel must do, already costs more than the usual tolerance; see `oracle.rounding_error`.
    `memory`: how long channels remember; see `inputs.gate_parameters`."""

    T: int = 70
    K: int = 32
    V: int = 64
    unused: int = 0
    offsets_dtype: torch.dtype = torch.int64
    gate: str = "none"
    lower_bound: float | None = None
    has_A_log: bool = True
    has_dt_bias: bool = True
    broad_parameters: bool = False
    beta: str = "value"
    l2norm: bool = True
    scale: float | None = None
    final: bool = True
    h: bool = False
    wide_gate: bool = False
    layout: str = "dense"
    memory: str = "short"
    ill_conditioned: bool = False

    @property
    def tokens(self) -> int:
        return super().tokens + (self.unused if self.lengths is not None else 0)


BOUNDED: dict[str, Any] = {"gate": "lower_bound", "lower_bound": -5.0, "beta": "logit"}
"""The gate of Kimi-K3 and GLM."""

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 131)
"""Around every block and chunk boundary, and a prime past two chunks."""

LENGTH_CASES = [
    *(Case(f"T{T}", "a length at or beside a block or chunk boundary", T=T, **BOUNDED) for T in LENGTHS),
    Case("T0", "no token: an empty o, and the initial state comes out", T=0, state=FP32),
    Case("B0", "no sequence at all", B=0, T=5),
    Case("B3", "sequences side by side; the batch stride", B=3, T=67, state=FP32, **BOUNDED),
    Case("chunk32", "the other public chunk size, with a tail", T=75, chunk_size=32, **BOUNDED),
    Case("chunk32_unsafe", "the exact diagonal blocks at the other chunk size", T=75, chunk_size=32),
]

GATE_CASES = [
    Case("decay", "g is the log decay, any size: up to exp(-50) a step", beta="logit"),
    Case("decay_promised", "g is the log decay and the caller promises [-5, 0]", safe=True),
    Case("softplus", "Kimi-Linear's unbounded gate", gate="softplus", beta="logit"),
    Case("softplus_no_bias", "dt_bias is optional", gate="softplus", has_dt_bias=False),
    Case("softplus_broad", "A_log as [1,1,HV,1], dt_bias as [HV,K]", gate="softplus", broad_parameters=True),
    Case("bounded", "Kimi-K3's gate", **BOUNDED),
    Case("bounded_no_A", "A_log is optional with a bound", has_A_log=False, **BOUNDED),
    Case("bounded_bare", "neither parameter", has_A_log=False, has_dt_bias=False, **BOUNDED),
    Case("bound_half", "a bound that is not -5", gate="lower_bound", lower_bound=-0.5),
    *(Case(gate, "a gate without parameters", gate=gate) for gate in PLAIN_GATES),
    Case("logsigmoid_promised", "the same with a promise", gate="logsigmoid", safe=True),
    Case("wide_gate", "fp32 g and beta beside half-precision q, k, v", wide_gate=True, **BOUNDED),
    Case("wide_decay", "the same for the plain decay", wide_gate=True),
]

OPTION_CASES = [
    Case("beta_logit", "sigmoid in the kernel", beta="logit"),
    Case("beta_double", "2 sigmoid in the kernel: write strength in [0, 2)", beta="double_logit"),
    Case("beta_value_2", "write strength in [0, 2) given as a value", hard="beta_to_2"),
    Case("no_l2norm", "keys the caller normalised", l2norm=False),
    Case("scale", "a scale that is not K ** -0.5", scale=0.7),
    Case("no_final_state", "no state asked for: none is returned", final=False),
    Case("h", "the state before every chunk", T=150, h=True, state=FP32),
    Case("h_v_first", "the same, values first, two sequences", B=2, T=64, h=True, v_first=True, state=FP32),
]

HEAD_CASES = [
    Case("gva1", "as many value heads as keys, more than two", H=3, HV=3, **BOUNDED),
    Case("gva2", "two value heads read one key head", H=2, HV=4, **BOUNDED),
    Case("gva4", "four value heads read one key head", H=1, HV=4, **BOUNDED),
    Case("gva8", "eight value heads read one key head", H=1, HV=8, T=40, **BOUNDED),
    Case("gva3_unsafe", "a ratio that is no power of two", H=2, HV=6, T=40),
    Case("one_head", "heads = 1, which a compiler may specialise on", H=1, HV=1, **BOUNDED),
    Case("V32", "K > V", K=64, V=32, **BOUNDED),
    Case("V32_unsafe", "K > V with exact diagonal blocks", K=64, V=32),
]

STATE_CASES = [
    Case("state", "a carried state, keys first", state=FP32, **BOUNDED),
    Case("state_v_first", "a carried state as serving engines keep it", state=FP32, v_first=True, **BOUNDED),
    Case("state_bf16", "bf16 state: read, updated in fp32, rounded once", state=BF16, **BOUNDED),
    Case("state_bf16_v_first", "the same, values first", state=BF16, v_first=True, **BOUNDED),
    Case("final_v_first", "no initial state, and the final one values first", v_first=True),
    Case("state_strided", "initial_state is a view that is not dense", state=FP32, hard="strided_state", B=2),
]

PACKED_CASES = [
    Case("packed", "short, empty and long sequences", lengths=(17, 0, 64, 1, 65), state=FP32, h=True, **BOUNDED),
    Case("packed_int32", "int32 offsets", lengths=(3, 70), offsets_dtype=torch.int32, **BOUNDED),
    Case("packed_empty_ends", "empty first, last and twice in a row", lengths=(0, 0, 33, 0), state=FP32, h=True),
    Case("packed_all_empty", "no token in any sequence", lengths=(0, 0), state=FP32),
    Case("packed_one", "one sequence that fills the tensor", lengths=(70,), **BOUNDED),
    Case("packed_none", "cu_seqlens = [0]: no sequence", lengths=(), unused=5),
    Case("packed_unused", "graph padding: tokens past the last offset", lengths=(20, 50, 0), unused=30, **BOUNDED),
    Case("packed_gva", "packing with grouped heads", lengths=(40, 26), H=1, HV=2, state=FP32, v_first=True),
    Case("packed_chunk32", "chunk slots of the other size", lengths=(31, 0, 32, 1), chunk_size=32, h=True),
    Case("packed_tokens", "a decode batch: one token each", lengths=(1,) * 9, state=FP32, v_first=True, **BOUNDED),
    Case("packed_bf16_state", "packed with bf16 states", lengths=(5, 66), state=BF16, **BOUNDED),
]

LAYOUT_CASES = [
    Case("fused", "q, k, v, g, beta are slices of one projection", layout="fused", B=2, **BOUNDED),
    Case("fused_packed", "the same when packed", layout="fused", lengths=(30, 36)),
    Case("head_first", "[B, H, T, K] transposed: dense rows, odd strides", layout="head_first", B=2, T=66),
    Case("tokens_innermost", "as a convolution along them leaves them", layout="tokens_innermost", T=66, H=2, HV=4),
    Case("last_dim_strided", "rows that are not dense are copied", layout="last_dim_strided", T=66),
    Case("expanded", "strides of zero: one head shared by all", layout="expanded", B=2, H=2, T=66),
    Case("padded", "rows of an odd pitch, in fp32 as well", layout="padded", B=2, T=66, wide_gate=True),
    Case("odd_offset", "a view that starts off a 16-byte boundary", layout="odd_offset", **BOUNDED),
]

HARD_CASES = [
    Case("same_keys", "a series inverse explodes", T=130, hard="same_keys", safe=True, ill_conditioned=True),
    Case("same_keys_unsafe", "the same in the exact blocks", T=130, hard="same_keys", ill_conditioned=True),
    Case("same_keys_2", "identical keys and beta near 2", T=130, hard="same_keys_2", safe=True, ill_conditioned=True),
    Case("pinned", "the gate at its bound for thousands of tokens", T=2049, H=1, HV=1, V=32, hard="pinned", **BOUNDED),
    Case("pinned_decay", "g = -5 promised, every step", T=129, hard="g-5", safe=True),
    Case("no_decay", "g = 0 for long: the state only grows", T=515, H=1, HV=1, V=32, hard="g0", safe=True),
    Case("g-50", "exp(-50) each step: products under- and overflow", T=129, hard="g-50"),
    Case("g_mixed", "channels at -50 beside channels at 0", T=129, hard="g_mixed"),
    Case("g-1e4", "a decay far below what exp can hold", T=66, hard="g-1e4"),
    Case("forget", "g = -inf at some tokens: a reset", T=129, hard="forget"),
    Case("g_alternating", "a step of -30 after each of 0: prefix sums cancel", T=129, hard="g_alternating"),
    Case("forget_channels", "g = -inf in some channels, 0 in the others", T=129, hard="forget_channels"),
    Case("softplus_saturated", "raw gate inputs of +-1000", T=66, gate="softplus", hard="raw_1000"),
    Case("bounded_saturated", "the same under a bound", T=66, hard="raw_1000", **BOUNDED),
    Case("logsigmoid_saturated", "the same without parameters", T=66, gate="logsigmoid", hard="raw_1000"),
    Case("zero_rows", "zero q and k rows under the L2 norm", T=66, hard="zero_rows", **BOUNDED),
    Case("zero_rows_unbounded", "the same in the exact blocks", T=66, hard="zero_rows", gate="softplus"),
    Case("key_norms", "k rows of norm 1e-4 and 50 under the L2 norm", T=130, hard="key_norms", **BOUNDED),
    Case("key_norms_unbounded", "the same in the exact blocks", T=130, hard="key_norms", gate="softplus"),
    Case("beta_zero", "nothing is ever written", T=66, hard="beta_zero", state=FP32),
    Case("beta_saturated", "beta logits of +-100", T=66, hard="beta_saturated", beta="double_logit"),
]

WIDE: dict[str, Any] = {"H": 1, "K": 128, "V": 128, "state": FP32, **BOUNDED}
SHORT_CASES = [
    Case("short 40", "a part of a second step", T=40, **WIDE),
    Case("short 64", "a whole chunk, values first", T=64, **WIDE | {"v_first": True}),
    Case("short 65", "a token in the second chunk, states in bf16", B=2, T=65, **WIDE | {"state": BF16}),
    Case("short 128", "two whole chunks", T=128, **WIDE | {"v_first": True, "state": BF16}),
    Case("short, packed", "lengths beside chunks, and none", lengths=(65, 0, 1, 64, 130), **WIDE | {"HV": 3}),
    Case("short, no states", "but a final one", lengths=(33, 0, 128), unused=5, **WIDE | {"state": None}),
    Case("short, log decays", "no gate", lengths=(17, 70), **WIDE | {"gate": "none", "lower_bound": None}, safe=True),
    Case("short, pinned", "gates at their bound", lengths=(40, 90), hard="pinned", **WIDE),
    Case("short, same keys", "repeated keys", lengths=(64, 100), hard="same_keys", ill_conditioned=True, **WIDE),
]
"""Batches that `hopper` does in one launch."""

CASES = [
    *LENGTH_CASES,
    *GATE_CASES,
    *OPTION_CASES,
    *HEAD_CASES,
    *STATE_CASES,
    *PACKED_CASES,
    *LAYOUT_CASES,
    *HARD_CASES,
]
FORWARD_ONLY = {
    *(f"T{T}" for T in LENGTHS if T not in (33, 131)),
    *("softplus_no_bias", "bounded_no_A", "bound_half", "logsigmoid_promised", "wide_decay", "beta_logit"),
    *("h", "h_v_first", "gva1", "gva8", "one_head", "V32_unsafe", "final_v_first", "state_strided"),
    *("packed_all_empty", "packed_one", "packed_tokens", "packed_bf16_state", "fused_packed", "head_first"),
    *("tokens_innermost", "padded", "odd_offset", "same_keys_2", "pinned", "pinned_decay", "no_decay", "g-1e4"),
    *("forget", "g_alternating", "bounded_saturated", "logsigmoid_saturated", "zero_rows_unbounded"),
    *("key_norms_unbounded", "beta_zero", "beta_saturated"),
}
"""Cases like another as far as gradients go."""
WITH_GRADIENTS = [case for case in CASES if case.name not in FORWARD_ONLY]

BY_NAME = {case.name: case for case in CASES}
assert BY_NAME.keys() >= FORWARD_ONLY
assert len(BY_NAME) == len(CASES), "case names must differ"


def named(*names: str) -> list[Case]:
    return [BY_NAME[name] for name in names]


def case_id(case: Case) -> str:
    return case.name
