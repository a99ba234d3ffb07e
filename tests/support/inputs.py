"""From a `Case` to the arguments of `chunk_kda`: seeded, on any device, the hard inputs included."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from flashdelta.problem.problem import ChunkTensors
from flashdelta.tools import cases as verified
from flashdelta.tools.cases import Source

from .cases import Case


def make_call(
    case: Case, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu", seed: int = 0
) -> dict:
    """Arguments of `chunk_kda` for `case`, with `dtype` tensors.

    Drawn in float32 (float64 for float64) from a generator seeded by the case's name, then rounded: a case holds the
    same numbers in every dtype up to rounding.
    """
    source = Source(dtype, device, zlib.crc32(case.name.encode()) + seed)
    call = token_tensors(source, case, dtype) | gate_parameters(source, case)
    if case.state is not None:
        call["initial_state"] = initial_state(source, case)
    return call | packed_offsets(case, device) | settings(case)


def token_tensors(source: Source, case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    """`q`, `k`, `v`, `g` and `beta`."""
    B, T, H, HV, K, V = case.batch, case.tokens, case.H, case.HV, case.K, case.V
    tensors = {
        "q": source.normal(B, T, H, K),
        "k": source.normal(B, T, H, K),
        "v": source.normal(B, T, HV, V),
        "g": log_decays(source, case) if case.gate == "none" else source.normal(B, T, HV, K),
        "beta": source.uniform(B, T, HV) if case.beta == "value" else source.normal(B, T, HV),
    }
    if not case.l2norm:
        tensors["q"], tensors["k"] = (torch.nn.functional.normalize(tensors[name], dim=-1) for name in "qk")
    if case.gate == "logsigmoid":
        tensors["g"] = tensors["g"] + 2.0
    if case.hard in HARD:
        HARD[case.hard](tensors)
    wide = ("g", "beta") if case.wide_gate else ()
    tensors = {name: x.to(source.wide if name in wide else dtype) for name, x in tensors.items()}
    return LAYOUTS[case.layout](tensors)


def packed_offsets(case: Case, device: str | torch.device) -> dict[str, Tensor]:
    if case.lengths is None:
        return {}
    return {"cu_seqlens": torch.tensor([0, *case.lengths]).cumsum(0).to(case.offsets_dtype).to(device)}


def settings(case: Case) -> dict:
    """The arguments that are no tensors."""
    own = {"use_qk_l2norm_in_kernel": case.l2norm, "return_intermediate_states": case.h}
    own |= {"output_final_state": case.final} | ({} if case.scale is None else {"scale": case.scale})
    return verified.settings(case) | own


def log_decays(source: Source, case: Case) -> Tensor:
    """Mostly slow, some at the far end: down to -5 if that is promised, to about -50 otherwise."""
    shape = (case.batch, case.tokens, case.HV, case.K)
    if case.memory == "long":
        return verified.log_decays(source, case)
    if case.safe:
        return -5.0 * source.uniform(*shape) ** 6
    return -(1.5 * source.normal(*shape) - 2.0).exp().clamp(max=50.0)


def gate_parameters(source: Source, case: Case) -> dict:
    """`A_log` and `dt_bias` of the gates that have them."""
    if case.gate not in verified.PARAMETRIC_GATES:
        return {}
    A_log, dt_bias = MEMORY[case.memory](source, case.HV, case.K)
    parameters = {}
    if case.has_A_log:
        parameters["A_log"] = A_log.view(1, 1, case.HV, 1) if case.broad_parameters else A_log
    if case.has_dt_bias:
        parameters["dt_bias"] = dt_bias if case.broad_parameters else dt_bias.flatten()
    return parameters


def _slow(source: Source, HV: int, K: int) -> tuple[Tensor, Tensor]:
    A_log = -0.5 * source.uniform(HV)
    rate, memory = A_log.exp()[:, None], 2.0 * 500.0 ** source.uniform(HV, K)
    # by the mean decay: exp(rate * x) of a normal x is exp(rate ** 2 / 2) in the mean
    return A_log, (1.0 / (5.0 * memory)).logit() / rate - 0.5 * rate


MEMORY: dict[str, Callable[[Source, int, int], tuple[Tensor, Tensor]]] = {
    "short": lambda source, HV, K: (2.0 * source.uniform(HV) - 1.0, source.normal(HV, K) - 2.0),
    "long": lambda source, HV, K: (0.5 * source.normal(HV), source.uniform(HV, K) * 9 - 8),
    "new": lambda source, HV, K: ((source.uniform(HV) * 15 + 1).log(), 0.5 * source.normal(HV, K)),
    "random": lambda source, HV, K: (0.0 * source.uniform(HV), 0.0 * source.uniform(HV, K)),
    "slow": _slow,
}
"""`A_log` and `dt_bias` by how long channels remember. "short": tens of tokens. "long": some forget within a token and others
remember hundreds, so an error in the state that passes between chunks shows in the outputs. "new": as models are initialised,
all gone after a few tokens. "random": no parameters, so that all is gone within a token. "slow": under a bound of -5, channels
remember 2 to 1,000 tokens, spread evenly over the logarithm."""


def initial_state(source: Source, case: Case) -> Tensor:
    state = source.normal(case.sequences, *case.state_shape).to(case.state)
    if case.hard != "strided_state":
        return state
    padded = state.new_full((*state.shape[:-1], 2 * state.shape[-1]), torch.nan)
    padded[..., ::2] = state
    return padded[..., ::2]


# ---- hard inputs: each changes the tensors in place ----------------------------------------------------------------


def _fill(name: str, value: float) -> Callable[[dict], object]:
    return lambda t: t[name].fill_(value)


def _decays(value: float, *place: slice) -> Callable[[dict], object]:
    """No decay but at this place."""
    return lambda t: t["g"].zero_().__setitem__((slice(None), *place), value)


def _signs(name: str, size: float) -> Callable[[dict], object]:
    return lambda t: t[name].copy_(t[name].sign() * size)


def _key_norms(t: dict) -> None:
    k = torch.nn.functional.normalize(t["k"], dim=-1)
    k[:, ::3] *= 1e-4
    k[:, 1::3] *= 50.0
    t["k"].copy_(k)


HARD = verified.HARD | {
    "same_keys_2": lambda t: (verified.HARD["same_keys"](t), t["beta"].fill_(1.9375)),
    "g-5": _fill("g", -5.0),
    "g0": _fill("g", 0.0),
    "g-1e4": _fill("g", -1e4),
    "g_alternating": _decays(-30.0, slice(1, None, 2)),
    "forget": lambda t: t["g"][:, 5::13].fill_(-torch.inf),
    "forget_channels": _decays(-torch.inf, slice(5, None, 13), slice(None), slice(None, None, 2)),
    "raw_1000": _signs("g", 1000.0),
    "key_norms": _key_norms,
    "beta_zero": _fill("beta", 0.0),
    "beta_to_2": lambda t: t["beta"].mul_(1.99),
    "beta_saturated": _signs("beta", 100.0),
}


# ---- memory layouts ------------------------------------------------------------------------------------------------


def _tokens_innermost(x: Tensor) -> Tensor:
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) if x.dim() == 4 else x


def around(x: Tensor, *before_after: int) -> Tensor:
    """A copy amid NaN, or amid what no index may be; as `torch.nn.functional.pad` counts."""
    fill = torch.nan if x.is_floating_point() else 0 if x.dtype == torch.bool else torch.iinfo(x.dtype).min
    return torch.nn.functional.pad(x, before_after, value=fill)


def _padded(x: Tensor) -> Tensor:
    """Rows 4 elements longer than they need: 8 bytes in half precision, 16 in fp32."""
    return around(x.flatten(2), 0, 4)[..., :-4].unflatten(-1, x.shape[2:])


def _each(place: Callable[[Tensor], Tensor]) -> Callable[[dict], dict]:
    return lambda t: {name: place(x) for name, x in t.items()}


def _fused(t: dict) -> dict:
    """Slices of one `[B, T, sum of widths]` buffer: dense rows, one long token stride. Tensors must share a dtype."""
    widths = [x[0, 0].numel() if x.shape[0] * x.shape[1] else 0 for x in t.values()]
    buffer = torch.cat([x.flatten(2) for x in t.values()], dim=-1)
    slices = buffer.split(widths, dim=-1)
    return {name: s.unflatten(-1, x.shape[2:]) for (name, x), s in zip(t.items(), slices)}


def _mixed(t: dict, beside: int = 0) -> dict:
    """`q`, `k` and `v` of a token in one row, for `recurrent_kda`; `beside` more elements between two of them."""
    rows = torch.cat([t[name].flatten(2).flatten(0, 1) for name in "qkv"], dim=-1)
    mixed = around(rows, 0, beside)[:, : rows.shape[1]]
    return {"mixed_qkv": mixed, "g": t["g"].flatten(2).flatten(0, 1), "beta": t["beta"].flatten(0, 1)}


LAYOUTS = {
    "dense": _each(Tensor.contiguous),
    "head_first": _each(lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)),
    "last_dim_strided": _each(lambda x: x.mT.contiguous().mT),
    "tokens_innermost": _each(_tokens_innermost),
    # every head reads the first one's memory, and every batch row the first row's
    "expanded": _each(lambda x: x[:1, :, :1].expand_as(x)),
    "odd_offset": _each(lambda x: around(x.flatten(), 1, 0)[1:].view(x.shape)),
    "padded": _each(_padded),
    "fused": _fused,
    "mixed": _mixed,
    "mixed_rows": lambda t: _mixed(t, beside=24),
}


# ---- several calls from one ----------------------------------------------------------------------------------------

TOKEN_TENSORS = ("q", "k", "v", "g", "beta")


def sequence_calls(call: dict) -> list[dict]:
    """Every sequence of a packed call as a call of its own, with its initial state."""
    dropped = ("cu_seqlens", "cu_seqlens_cpu", "initial_state", "out")
    kept, calls = {name: x for name, x in call.items() if name not in dropped}, []
    for n, (start, stop) in enumerate(itertools.pairwise(call["cu_seqlens"].tolist())):
        calls.append(kept | {name: call[name][:, start:stop] for name in TOKEN_TENSORS})
        if call.get("initial_state") is not None:
            calls[-1]["initial_state"] = call["initial_state"][n : n + 1]
    return calls


def on_meta(call: dict) -> dict:
    return {name: x.to("meta") if isinstance(x, Tensor) else x for name, x in call.items()}


def meta_call(case: Case, dtype: torch.dtype = torch.bfloat16) -> dict:
    """The call without its numbers: heads and lengths as long as a model's take no time."""
    short = replace(case, B=1, T=1, lengths=case.lengths and (1,), H=1, HV=case.HV // case.H, unused=0)
    call = on_meta(make_call(short, dtype))
    for name in TOKEN_TENSORS:
        heads = case.H if name in "qk" else case.HV
        call[name] = call[name].new_empty(case.batch, case.tokens, heads, *call[name].shape[3:])
    if "initial_state" in call:
        call["initial_state"] = call["initial_state"].new_empty(case.sequences, *case.state_shape)
    if "cu_seqlens" in call:
        call["cu_seqlens"] = call["cu_seqlens"].new_empty(case.sequences + 1)
    for name in {"A_log", "dt_bias"} & call.keys():
        call[name] = call[name].new_empty(case.HV * (case.K if name == "dt_bias" else 1))
    return call


def tensors_of(**tensors: Tensor) -> ChunkTensors:
    """The tensors of a chunk call by role, of which only these are there: for plans of launches on their own."""
    return ChunkTensors(**dict.fromkeys((*"qkvg", "beta")) | tensors)
