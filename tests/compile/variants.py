"""The variants of all kernels, compiled for any GPU on a machine without one, and what they cost.

    python -m tests.compile.variants --arch 80 --arch 90 --json

Prints, for every kernel variant and architecture, registers per thread, bytes spilled to local memory, shared memory per CTA,
places where Hopper code waits for asynchronous MMAs, instructions, and the seconds it took.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend
from triton.experimental.gluon._runtime import GluonASTSource

from flashdelta.backends import build_hopper
from flashdelta.kernels import chunk_bwd_wy_dqkg
from flashdelta.kernels.triton.build import build as build_triton
from flashdelta.ops.chunk import chunk_kda
from flashdelta.ops.convolution import short_convolution
from flashdelta.ops.decode import commit, recurrent_kda
from flashdelta.ops.fused_decode import fused_kda_decode
from flashdelta.ops.norm import gated_rms_norm
from flashdelta.ops.prefill_fp32 import kda_prefill
from flashdelta.ops.recurrent import fused_recurrent_kda
from flashdelta.parallel.border import BORDER
from flashdelta.problem.problem import BACKWARD, DEFAULT_PRECISION, Problem, Tensors, record_width
from flashdelta.program.launch import Launch
from flashdelta.runtime.call import check
from flashdelta.tools.compile import in_processes, only_launches, source

from ..support.cases import BF16, FP16, FP32, Case
from ..support.decoding import Step, make_step
from ..support.fused import FusedStep, make_fused
from ..support.inputs import TOKEN_TENSORS, meta_call, on_meta
from ..support.oracle import as_recurrent
from ..support.wy import WyCase, make_wy
from .costs import compiled, costs_of

ARCHITECTURES = (80, 89, 90, 100, 120)


BUILD = {"hopper": build_hopper, "triton": build_triton}
"""Builders by backend."""


Given = dict[str, Any]


Call = tuple[Callable, Given]


@dataclass(frozen=True)
class Variant:
    """One way to call an operator, enough to fix every compile-time choice of its kernels. `N` sequences and `spec_tokens` are
    of `decode` alone, `precision` of `prefill`, `records` (a replay buffer) of `decode` and `commit`; `buffer` is the dtype of
    `checkpoint_states`, with checkpoints `every` so many tokens, or at offsets; `operation="commit"`
    takes the dtype and layout of states and `spec_tokens` only, `"wy"` (`kernels.chunk_bwd_wy_dqkg`) no gate. `kept`:
    Hopper's forward that leaves what its backward pass needs. `copied`: q, k and v come with tokens innermost, a norm's
    rows with heads, indices of a convolution in columns of a table. `sequences` of so many `chunks`. `T` tokens and `taps`
    are of the layer's convolution and norm, and value heads a `group` of its step; `stated`: that convolution has states.
    `rank`: of how many, over which the sequences lie."""

    name: str
    backend: Literal["triton", "hopper"] = "triton"
    operation: str = "chunk"
    K: int = 128
    V: int = 128
    dtype: torch.dtype = torch.bfloat16
    gate: str = "lower_bound"
    packed: bool = True
    chunk_size: int = 64
    state_v_first: bool = False
    intermediate: bool = False
    pool: bool = False
    checkpoints: bool = False
    every: int | None = None
    buffer: torch.dtype | None = None
    g_dtype: torch.dtype | None = None
    state_dtype: torch.dtype = torch.float32
    spec_tokens: int = 0
    records: bool = False
    split: str | int = "auto"
    backward: bool = False
    kept: bool = False
    copied: bool = False
    precision: str = DEFAULT_PRECISION
    N: int = 2
    heads: int = 2
    sequences: int = 1
    chunks: int = 4
    rank: tuple[int, int] | None = None
    offsets: torch.dtype = torch.int32
    T: int = 256
    taps: int = 4
    group: int = 1
    stated: bool = True

    def architectures(self) -> tuple[int, ...]:
        return (90,) if self.backend == "hopper" else ARCHITECTURES

    def launches(self, arch: int) -> list[Launch]:
        function, given = getattr(self, f"_{self.operation}")()
        problem, t = check(function, **given)
        if self.kept:
            problem = replace(problem, requires_grad=True)
        if self.rank is not None:
            problem, t = on_rank(problem, t, *self.rank)
        call = backward_of(problem, t) if self.backward else (problem, t)
        return only_launches(BUILD[self.backend](*call, arch))

    def _chunk(self) -> Call:
        return chunk_kda, self._sequences() | {"disable_recompute": self.kept, "split": self.split}

    def _recurrent(self) -> Call:
        return fused_recurrent_kda, as_recurrent(self._sequences())

    def _shape(self) -> Given:
        """Fields of a `Case` or a `Step`, with the gate and the states."""
        options = {"gate": self.gate, "beta": "logit", "state": self.state_dtype, "v_first": self.state_v_first}
        return {"name": self.name, "why": "", **self._sizes(), **options}

    def _sizes(self) -> dict[str, int]:
        return {"H": self.heads, "HV": self.heads, "K": self.K, "V": self.V}

    def _sequences(self) -> Given:
        C, N, index = self.chunk_size, self.sequences, _make(torch.int32)
        bound = -5.0 if self.gate == "lower_bound" else None
        T = self.chunks * C
        lengths = {"lengths": (T,) * N, "offsets_dtype": self.offsets} if self.packed else {"B": N, "T": T}
        case = Case(**self._shape(), **lengths, lower_bound=bound, h=self.intermediate, chunk_size=C)
        call = meta_call(case, self.dtype)
        if self.packed and self.chunks == 1:
            call["cu_seqlens_cpu"] = T * torch.arange(N + 1, dtype=self.offsets)
        if self.g_dtype is not None:
            call["g"] = call["g"].to(self.g_dtype)
        if self.copied:
            call |= {name: call[name].transpose(1, 3).contiguous().transpose(1, 3) for name in "qkv"}
        if self.pool:
            call |= {"state_pool": call.pop("initial_state"), "output_final_state": False}
            call |= {"state_indices": index(N), "has_initial_state": index(N).bool()}
        return call | self._checkpoints(_make(self.buffer)(*self._states(4 * N)), index(N, 1))

    def _checkpoints(self, states: torch.Tensor, marks: torch.Tensor) -> Given:
        found = {} if self.buffer is None else {"checkpoint_states": states}
        found |= {} if self.every is None else {"checkpoint_every": self.every}
        return found | ({"checkpoint_offsets": marks, "checkpoint_indices": marks} if self.checkpoints else {})

    def _states(self, count: int) -> tuple[int, ...]:
        inner = (self.V, self.K) if self.state_v_first else (self.K, self.V)
        return (count, self.heads, *inner)

    def _decode(self) -> Call:
        """A paged step: packed sequences, or `N` rows of one token; with speculative tokens, counts of accepted ones."""
        N, S, tokens = self.N, self.spec_tokens, 1 + self.spec_tokens
        drafts = {"spec": S, "accepted": (1,) * N, "indices": ((0,) * tokens,) * N} if S else {"indices": (0,) * N}
        lengths = (tokens,) * N if self.packed else None
        if self.records:
            drafts = {"spec": S, "update": False, "indices": (0,) * N, "rows": "slots"}
        call = make_step(Step(**self._shape(), **drafts, B=N, T=tokens, lengths=lengths, slots=4), self.dtype)
        return recurrent_kda, on_meta(call | ({"intermediate_states": self._records(tokens)} if self.records else {}))

    def _fused_decode(self) -> Call:
        """A step of the layer, windows and states as vLLM has them; with speculative tokens, a state after each, or records."""
        N, S, tokens = self.N, self.spec_tokens, 1 + self.spec_tokens
        own = {"indices": (0,) * N} if S == 0 or self.records else {"indices": ((0,) * tokens,) * N}
        drafts = {"spec": S, "accepted": (1,) * N, "rows": "slots" if self.records else None} if S else {}
        weights = "parts" if self.group == 1 and self.K == self.V else "channels"
        sizes = {"H": self.heads // self.group, "W": self.taps, "weights": weights}
        step = FusedStep(**self._shape() | sizes, **own, **drafts, B=N, T=tokens, slots=4)
        return fused_kda_decode, on_meta(make_fused(step, self.dtype))

    def _records(self, tokens: int) -> torch.Tensor:
        return _make(torch.float32)(4, tokens, self.heads, record_width(self.K, self.V))

    def _prefill(self) -> Call:
        call = self._sequences()
        inputs = {name: call[name].transpose(1, 2).contiguous() for name in TOKEN_TENSORS}
        options = {"chunk_size": self.chunk_size, "gate": self.gate, "precision": self.precision}
        return kda_prefill, inputs | options

    def _commit(self) -> Call:
        make, index = _make(self.state_dtype), _make(torch.int32)
        pool, states = make(*self._states(4)), make(4, 2, *self._states(4)[1:])
        states = self._records(1 + (self.spec_tokens or 1)) if self.records else states
        names = ("initial_state", "intermediate_states", "ssm_state_indices", "num_accepted_tokens")
        options = {"null_index": "negative", "state_v_first": self.state_v_first}
        return commit, dict(zip(names, (pool, states, index(self.N), index(self.N)))) | options

    def _wy(self) -> Call:
        T = 4 * self.chunk_size
        lengths = {"lengths": (T // 2,) * 2, "offsets_dtype": torch.int32} if self.packed else {"T": T}
        case = WyCase(
            "", "", **self._sizes(), **lengths, chunk_size=self.chunk_size, v_first=self.state_v_first, log2=True
        )
        return chunk_bwd_wy_dqkg, on_meta(make_wy(case, self.dtype))

    def _gated_rms_norm(self) -> Call:
        """`z` is a slice of a fused projection."""
        make, width = _make(self.dtype), self.heads * self.V
        z = make(1, self.T, 4 * width)[..., width : 2 * width].unflatten(2, (self.heads, self.V))
        return gated_rms_norm, {
            "x": make(1, self.T, self.V, self.heads).mT if self.copied else make(1, self.T, self.heads, self.V),
            "z": z,
            "weight": _make(torch.float32)(self.V),
        }

    def _short_convolution(self) -> Call:
        """Convolves q, k and v side by side, in a fused projection. With a pool states lie by tokens, as vLLM has them."""
        make, N = _make(self.dtype), self.N if self.packed else 1

        def index(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return _make(dtype)(*shape, 2)[..., 0] if self.copied else _make(dtype)(*shape)

        D = self.heads * (2 * self.K + self.V)
        call = {"x": make(1, self.T, 2 * D)[..., :D], "weight": make(D, self.taps), "bias": None}
        if self.packed:
            call["cu_seqlens"] = index(N + 1, dtype=self.offsets)
        if self.pool:
            call |= {"state_pool": make(4, self.taps - 1, D).mT, "state_indices": index(N), "bias": make(D)}
            call |= {"has_initial_state": index(N, dtype=torch.bool), "out": make(1, self.T, D)}
        call |= self._checkpoints(_make(self.buffer)(4, self.taps - 1, D).mT, index(N, 1))
        if self.pool or not self.stated:
            return short_convolution, call
        return short_convolution, call | {"initial_state": make(N, D, self.taps - 1), "output_final_state": True}


def _make(dtype: torch.dtype | None) -> Callable[..., torch.Tensor]:
    return functools.partial(torch.empty, dtype=dtype, device="meta")


FIRST, SECOND, BETWEEN = (0, 2), (1, 2), (1, 3)
"""A rank, and how many there are: of two, or between two others."""


def on_rank(problem: Problem, t: Tensors, rank: int, ranks: int) -> tuple[Problem, Tensors]:
    problem = replace(problem, process_group="compiled", rank=rank, ranks=ranks)
    return problem, replace(t, border=torch.empty(BORDER, dtype=torch.int32, device=t.device))


def backward_of(problem: Problem, t: Tensors) -> tuple[Problem, Tensors]:
    """The backward pass of a call, with the gradients that come in."""
    given = {name: torch.empty(x.shape, dtype=x.dtype, device=t.device) for name, x in problem.results().items()}
    do = given["o"]
    dht = given.get("final_state", do.new_zeros(0))
    return replace(problem, operation=problem.operation + BACKWARD), replace(t, do=do, dht=dht)


HOPPER: Given = {"backend": "hopper"}
FUSED: Given = {"operation": "fused_decode", "packed": False, "state_v_first": True}
KINDS: dict[str, Given] = {
    "": {},
    "recurrent": {"operation": "recurrent"},
    "wy": {"operation": "wy"},
    "decode": {"operation": "decode"},
    "commit": {"operation": "commit"},
    "norm": {"operation": "gated_rms_norm"},
    "convolution": {"operation": "short_convolution"},
    "fused": FUSED,
    "prefill fp32": {"operation": "prefill", "dtype": FP32, "gate": "none"},
    "hopper": HOPPER,
    "hopper few heads": HOPPER,
    "hopper wy": HOPPER | {"operation": "wy", "heads": 64},
    "hopper fused": HOPPER | FUSED,
    "hopper steps": HOPPER | {"heads": 64},
    "hopper short": HOPPER | {"heads": 64, "sequences": 5, "chunks": 1},
    "hopper forgetting": HOPPER | {"heads": 8, "chunks": 128},
    "hopper forgetting steps": HOPPER | {"heads": 32},
    "hopper decode": HOPPER
    | {"operation": "decode", "packed": False, "state_v_first": True, "state_dtype": BF16, "N": 512},
    "hopper replay": HOPPER | {"operation": "decode", "packed": False, "state_v_first": True, "records": True},
    "hopper commit of records": HOPPER | {"operation": "commit", "state_v_first": True, "records": True},
}
"""Options of variants by the first words of their names. On Hopper `steps` are of 32 tokens; `short` are sequences of one
chunk; `forgetting` calls begin segments where a chunk forgets, in chunks of sequences that are long enough to be split, too;
and its own kernel of decoding is for many sequences and states in bfloat16."""


DTYPES = {"bf16": BF16, "fp16": FP16, "fp32": FP32}
STEPS = dict.fromkeys(("decode", "commit", "fused_decode"), "state_dtype")
WORDS: dict[str, Given] = {
    "unbounded": {"gate": "softplus"},
    "softplus": {"gate": "softplus"},
    "log decays": {"gate": "none"},
    "log decays in fp32": {"gate": "none", "g_dtype": FP32},
    "g in fp32": {"g_dtype": FP32},
    "packed": {"packed": True},
    "fixed length": {"packed": False},
    "long": {"packed": False, "T": 2**17},
    "one tile": {"packed": False, "T": 768, "heads": 32, "stated": False},
    "offsets in int64": {"offsets": torch.int64},
    "tokens innermost": {"copied": True},
    "heads innermost": {"copied": True},
    "columns of tables": {"copied": True, "offsets": torch.int64},
    "V first": {"state_v_first": True},
    "K first": {"state_v_first": False},
    "states in bf16": {"state_dtype": BF16},
    "intermediate states": {"intermediate": True},
    "chunk 32": {"chunk_size": 32},
    "pool": {"pool": True},
    "pool with checkpoints": {"pool": True, "checkpoints": True},
    "checkpoints": {"checkpoints": True, "buffer": BF16},
    "checkpoints in a buffer": {"checkpoints": True, "buffer": FP32},
    "regular checkpoints": {"every": 64, "buffer": FP32},
    "regular checkpoints in bf16": {"every": 64, "buffer": BF16},
    "split": {"split": 4},
    "over ranks": {"rank": BETWEEN},
    "over two ranks": {"rank": FIRST},
    "backward": {"backward": True},
    "for the backward pass": {"kept": True},
    "ieee": {"precision": "ieee"},
    "tf32x3": {"precision": "tf32x3"},
    "many heads": {"heads": 32},
    "eight value heads": {"heads": 8, "group": 8},
    "speculative": {"spec_tokens": 3},
    "replay": {"records": True},
    "of 16 tokens": {"spec_tokens": 15, "packed": True},
    "of 17 tokens": {"spec_tokens": 16},
    "N=2": {"N": 2},
    "N=256": {"N": 256},
    "many": {"N": 256},
    "of heads": {"N": 512},
    "two CTAs an SM": {"N": 100},
}
"""Options by words of names."""
PHRASES = re.compile(rf"\b({'|'.join(sorted(WORDS, key=len, reverse=True))})\b")


def variants(stem: str, *ends: str, **options: Any) -> list[Variant]:
    """Variants whose names begin alike. Names say what their options are: `KINDS` by the first words, `WORDS`, the sizes K, V
    and W (taps), and the dtype, of states where the operation is a step. `options` are others."""
    found = []
    kind = KINDS[max((x for x in KINDS if f"{stem} ".startswith(f"{x} " * bool(x))), key=len)]
    for name in (stem + end for end in ends or ("",)):
        own = dict(kind)
        for phrase in PHRASES.findall(name):
            own |= WORDS[phrase]
        own |= {"taps" if key == "W" else key: int(n) for key, n in re.findall(r"\b([KVW])(\d+)", name)}
        for dtype in re.findall(r"(?<!in )\b(bf16|fp16|fp32)\b", name):
            own |= {STEPS.get(own.get("operation", "chunk"), "dtype"): DTYPES[dtype]}
        found.append(Variant(name, **own | options))
    return found


STREAM_K: Given = {"heads": 12, "sequences": 7}
"""Work tiles that leave SMs idle, of few heads."""
WHOLE: Given = {"sequences": 17, "split": 1}
"""So many whole sequences that no launch overlaps."""

VARIANTS = (
    *variants("bf16 K128 V128", " bounded", " unbounded", " g in fp32"),
    *variants("bf16 K128 V128", " fixed length", " fixed length, tokens innermost", " intermediate states, V first"),
    *variants("bf16 K128 V128", " chunk 32", " pool, V first", " pool with checkpoints, V first"),
    *variants("bf16 K128 V128", " unbounded, pool with checkpoints", " checkpoints in a buffer, V first"),
    *variants("bf16 K128 V128", " regular checkpoints, V first", " regular checkpoints, fixed length, split", " split"),
    *variants("bf16 K128 V128 split, pool with checkpoints", state_v_first=True),
    *variants("bf16 K128 V128 backward", "", ", unbounded, V first"),
    *variants("bf16 K128 V128", " split, backward", " split, fixed length, V first, backward", " over ranks"),
    *variants("bf16 K128 V128 over", " two ranks", " ranks, pool, V first", " ranks, fixed length, V first, backward"),
    *variants("bf16 K256 V256", " split, fixed length", " backward", " split, backward"),
    *variants("bf16 K256 V256", gate="none"),
    *variants("fp32 K128 V128", " split", " backward", " split, backward", ""),
    *variants("bf16", " K64 V64 backward, chunk 32, fixed length", " K32 V64", " K64 V32"),
    *variants("fp16 K128 V128"),
    *variants("fp32 K256 V256", gate="logsigmoid"),
    *variants("fp32 K64 V128 over ranks, backward"),
    *variants("fp32 K64 V128 over two ranks, backward", rank=SECOND),
    *variants("fp32 K64 V128"),
    *variants("wy bf16 K128 V128", "", " fixed length, V first"),
    *variants("wy", " bf16 K64 V64 chunk 32", " bf16 K256 V256", " fp32 K128 V128"),
    *variants("recurrent bf16 K128 V128"),
    *variants("recurrent bf16 K128 V128 V first", gate="softplus"),
    *variants("recurrent", " bf16 K128 V128 pool, V first", " fp32 K256 V256"),
    *variants(
        "decode K128 V128",
        *(f", {state} states, {order} first, N={N}" for order in "VK" for state in ("fp32", "bf16") for N in (2, 256)),
        " unbounded, V first",
        packed=False,
    ),
    *variants("decode", " K128 V128 packed, V first", " K128 V128 speculative, V first", " K64 V64, V first"),
    *variants("decode K256 V256 speculative, K first", gate="none", spec_tokens=7),
    *variants("decode replay K128 V128, V first", packed=False, spec_tokens=7),
    *variants("decode replay K128 V128 bf16, V first", packed=False, spec_tokens=3),
    *variants("decode replay of 17 tokens K128 V128, V first", packed=False),
    *variants("decode replay of 16 tokens K128 V128 unbounded, K first"),
    *variants("decode replay K64 V64 packed, K first", gate="softplus", spec_tokens=3),
    *variants("commit fp32"),
    *variants("commit replay", " fp32, V first", " bf16, V first", " fp32, K first", " K256 V256 fp32, V first"),
    *variants("norm", " bf16 V128", " bf16 V128 backward", " bf16 V128, heads innermost", " fp32 V64"),
    *variants("convolution bf16 W4", "", ", long", ", pool", ", pool, columns of tables"),
    *variants("convolution bf16 W4", ", pool, checkpoints", ", regular checkpoints", " backward"),
    *variants("convolution", " bf16 W2 backward, fixed length", " bf16 W4 backward, one tile", " fp32 W3"),
    *variants("fused K128 V128", " fp32", " bf16", " fp32, many"),
    *variants("fused K128 V128", " bf16, many", " fp32, eight value heads", " unbounded, K first", " speculative"),
    *variants("fused K128 V128 replay", "", " bf16", spec_tokens=3),
    *variants("fused", " K64 V64 fp32", " K64 V128 bf16, W3", " K128 V64 fp32"),
    *variants("prefill fp32 K64 V64 chunk", " 32, tf32x3", " 64, tf32x3"),
    *variants("prefill fp32 K128 V128 chunk", " 32, tf32x3", " 64, tf32x3"),
    *variants("prefill fp32", " K64 V64 chunk 32, ieee", " K64 V64 chunk 64, ieee", " K128 V128 chunk 32, ieee"),
    *variants("prefill fp32 K128 V128 chunk", " 64, ieee", " 32, many heads, tf32x3", " 64, many heads, tf32x3"),
    *variants("hopper K128 V128", " bounded", " unbounded", " unbounded, fixed length", **WHOLE),
    *variants("hopper K128 V128", " fixed length", " offsets in int64", " log decays in fp32", **WHOLE),
    *variants("hopper K128 V128 intermediate states", state_dtype=BF16, split=1, sequences=17),
    *variants("hopper K128 V128", " pool with checkpoints, V first", " checkpoints in a buffer, V first", **WHOLE),
    *variants("hopper K128 V128 checkpoints in a buffer, intermediate states", **WHOLE),
    *variants("hopper K128 V128 regular checkpoints", ", V first", "", **WHOLE),
    *variants("hopper K128 V128 regular checkpoints in bf16, V first", packed=False, split=1, sequences=17),
    *variants("hopper K128 V128 backward", "", ", fixed length", ", unbounded, V first", **WHOLE),
    *variants("hopper K128 V128", " backward, log decays in fp32", " kept for the backward pass", **WHOLE),
    *variants("hopper few heads K128 V128", "", " fixed length"),
    *variants("hopper few heads", " K128 V128 unbounded, pool with checkpoints", " K128 V128 backward", " K64 V64"),
    *variants("hopper K128 V128 stream-K, offsets in int64", **STREAM_K),
    *variants("hopper K128 V128 stream-K", "", ", fixed length", ", regular checkpoints, V first", **STREAM_K),
    *variants("hopper K128 V128 split", ", regular checkpoints, V first", "", ", fixed length"),
    *variants("hopper K128 V128 split, pool with checkpoints", state_v_first=True),
    *variants("hopper K128 V128 over", " ranks", " two ranks", " two ranks, split, pool, V first"),
    *variants("hopper K128 V128 over two ranks, stream-K", **STREAM_K),
    *variants("hopper K128 V128 over two ranks, for the backward pass", "", ", split"),
    *variants("hopper K128 V128 over two ranks, backward", rank=SECOND),
    *variants("hopper K128 V128 over two ranks, split, backward", rank=SECOND),
    *variants("hopper K128 V128", " over ranks, backward", " split, backward"),
    *variants("hopper K128 V128 split, fixed length, V first, backward"),
    *variants("hopper K128 V128 split, kept for the backward pass"),
    *variants("hopper K64 V64", " split, fixed length", " over ranks, fixed length, V first, backward"),
    *variants("hopper K64 V64 over two ranks, fixed length, V first, backward", rank=SECOND),
    *variants("hopper K64 V64 split, backward"),
    *variants("hopper short K128 V128", "", " fixed length", " pool, V first", " V first, states in bf16"),
    *variants("hopper forgetting", " K128 V128", " K128 V128, fixed length", " K128 V128, pool, V first"),
    *variants("hopper forgetting steps K128 V128", "", ", fixed length"),
    *variants("hopper steps K128 V128", "", " fixed length", " offsets in int64", " V first, states in bf16"),
    *variants("hopper steps K128 V128 unbounded", "", ", fixed length", ", log decays"),
    *variants("hopper steps K128 V128 stream-K", "", ", fixed length", ", offsets in int64", heads=96),
    *variants("hopper steps K128 V128 pool with checkpoints"),
    *variants("hopper steps K128 V128", " pool with checkpoints, V first", " checkpoints in a buffer, V first"),
    *variants("hopper steps K128 V128 checkpoints in a buffer, fixed length"),
    *variants("hopper steps K128 V128 stream-K, checkpoints in a buffer", "", ", fixed length", heads=96),
    *variants("hopper steps K128 V128 regular checkpoints", "", ", V first", " in bf16, V first, fixed length"),
    *variants("hopper steps K128 V128 stream-K, regular checkpoints, V first", heads=96),
    *variants("hopper steps K128 V128 over", " ranks", " two ranks", " two ranks, fixed length, V first"),
    *variants("hopper steps K128 V128 over two ranks, stream-K", heads=96),
    *variants("hopper steps K128 V128 over ranks, fixed length, V first"),
    *variants("hopper steps K128", " V128 over ranks, pool, unbounded", " V64"),
    *variants("hopper steps K64 V64", "", " fixed length", " pool with checkpoints, V first", " regular checkpoints"),
    *variants("hopper steps K64 V64", " unbounded", " unbounded, log decays", " over ranks", " over two ranks"),
    *variants("hopper steps K64 V128 stream-K", heads=96),
    *variants("hopper K64 V128 backward", **WHOLE),
    *variants("hopper K128 V64 backward, unbounded", gate="logsigmoid", split=1, sequences=17),
    *variants("hopper K64 V64", **WHOLE),
    *variants("hopper K64 V64 unbounded", gate="logsigmoid", split=1, sequences=17),
    *variants("hopper decode", " K128 V128, lower_bound", " K64 V64, softplus"),
    *variants("hopper replay K128 V128", spec_tokens=7),
    *variants("hopper replay K128 V128 bf16", "", ", two CTAs an SM", spec_tokens=3),
    *variants("hopper replay of", " 16 tokens K128 V128", " 17 tokens K128 V128"),
    *variants("hopper replay K128 V128 unbounded", spec_tokens=7),
    *variants("hopper replay K128 V128 unbounded bf16", "", ", two CTAs an SM", spec_tokens=3),
    *variants("hopper replay of 16 tokens K128 V128 unbounded"),
    *variants("hopper replay of 17 tokens K128 V128", " unbounded", " bf16"),
    *variants("hopper replay K64 V64 bf16", spec_tokens=7),
    *variants("hopper replay K64 V64 unbounded bf16", gate="logsigmoid", spec_tokens=7),
    *variants("hopper commit of records", " K128 V128", " of 17 tokens K128 V128"),
    *variants("hopper commit of records", " K128 V128 bf16", " K64 V128 bf16", " of 17 tokens K128 V128 bf16"),
    *variants("hopper commit of records of heads", " K128 V128 bf16", " K64 V128 bf16", " of 16 tokens K128 V128 bf16"),
    *variants("hopper fused K128 V128 fp32"),
    *variants("hopper fused", " K128 V128 bf16", " K128 V128 bf16, eight value heads", " K64 V64 bf16, unbounded, W3"),
    *variants("hopper wy", " K128 V128", " K128 V128 fixed length", " K64 V64", " K128 V128 fixed length, V first"),
)


def fingerprint(launch: Launch, arch: int) -> str:
    """Hashes all that determines the launch's machine code: Triton's version, the target, the launch options, and the IR that
    the kernel's source becomes, in which constants are folded and functions, locals and lines have no names."""
    options = sorted(launch.options().items())
    lowered = 90 if ".hopper." in launch.kernel.fn.__module__ else ARCHITECTURES[0]  # Gluon's IR names the GPU
    determined = f"{triton.__version__}\nsm_{arch}\n{options}\n{intermediate(source(launch), options, lowered)}"
    return hashlib.sha256(determined.encode()).hexdigest()[:16]


_intermediate: dict[tuple, str] = {}


def intermediate(source: ASTSource | GluonASTSource, options: list[tuple[str, object]], arch: int) -> str:
    """Triton's first IR, without source locations; functions are numbered as they appear. The same for all architectures
    whose launches are alike, so it is made once."""
    known = (source.fn, *(str(x) for x in (source.signature, source.constants, source.attrs, options)))
    if known not in _intermediate:
        target = GPUTarget("cuda", arch, 32)
        backend = make_backend(target)
        context = ir.context()
        ir.load_dialects(context)
        backend.load_dialects(context)
        parsed = backend.parse_options({**dict(options), **source.parse_options()})
        helpers = backend.get_codegen_implementation(parsed), backend.get_module_map()
        text = source.make_ir(target, parsed, *helpers, context).str_nodebug()
        numbers: dict[str, str] = {}
        _intermediate[known] = re.sub(
            r'@(?:"[^"]+"|[\w.$-]+)', lambda name: numbers.setdefault(name[0], f"@{len(numbers)}"), text
        )
    return _intermediate[known]


def unequal_sums(ptx: str) -> int:
    """Sums of two lanes' products that the lanes do not hold alike, as each fused its own product into its addition
    (`kernels/shared/products.py`). Products with 0 are exact."""
    found = 0
    names: dict[str, str] = {}
    made: dict[str, tuple[str, ...]] = {}
    for operation, operands in re.findall(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.]+)\s+(.*);", ptx, re.MULTILINE):
        target, *sources = re.sub(r"\|%p\d+", "", operands).split(", ")
        sources = [names.get(x, x) for x in sources]
        if operation == "mov.b32":
            names[target] = sources[0]
            continue
        names.pop(target, None)
        made[target] = operation, *sources
        if operation == "fma.rn.f32":
            *factors, addend = sources
            shuffled, other, *_ = *made.get(addend, ()), "", ""
            product, *others = made.get(other, ("",))
            same = product == "mul.f32" and sorted(factors) == sorted(others)
            found += same and shuffled.startswith("shfl.sync.bfly") and "0f00000000" not in factors
    return found


LINE = (
    "sm_{arch} {kernel:18} {variant:46} {registers:4} registers {spill_bytes:5} B spilled {shared_bytes:7} B shared "
    "{mma_waits:4} waits {instructions:6} instructions {seconds:5.1f} s"
)


@functools.cache
def all_launches() -> list[tuple[int, str, Launch]]:
    """With architecture and variant. The same in every process, so that a place in the list says which is meant. GPUs other
    than sm_80 and sm_90 have each kernel in the first variant of its sizes and dtype only."""
    found, seen = [], set()
    for x in VARIANTS:
        for arch in x.architectures():
            for launch in x.launches(arch):
                key = arch, launch.kernel, x.K, x.V, x.dtype
                if arch in (80, 90) or key not in seen:
                    found.append((arch, x.name, launch))
                seen.add(key)
    return found


def report(place: int, compiles: bool) -> dict:
    """The launch at that place with its fingerprint, or compiled, with its costs."""
    arch, variant, launch = all_launches()[place]
    row = {"arch": arch, "variant": variant, "kernel": launch.kernel.__name__}
    if not compiles:
        return row | {"fingerprint": fingerprint(launch, arch)}
    began = time.perf_counter()
    kernel = compiled(launch, arch)
    found = asdict(costs_of(kernel, arch)) | {"unequal_sums": unequal_sums(kernel.asm["ptx"])}
    return row | found | {"triton": triton.__version__, "seconds": round(time.perf_counter() - began, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, action="append", choices=ARCHITECTURES, help="default: all")
    parser.add_argument("--only", default="", help="variants whose name contains this")
    parser.add_argument("--places", type=int, nargs="*", help="launches by their places in the list of all")
    parser.add_argument("--list", action="store_true", help="fingerprints (as JSON), and nothing is compiled")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--jobs", type=int, default=1, help="kernels compiled at a time")
    arguments = parser.parse_args()
    places = arguments.places
    if places is None:
        wanted = arguments.arch or ARCHITECTURES
        found = enumerate(all_launches())
        places = [i for i, (arch, variant, _) in found if arch in wanted and arguments.only in variant]
    rows = []
    for row in in_processes(report, [(place, not arguments.list) for place in places], arguments.jobs):
        rows.append(row)
        if not arguments.json and not arguments.list:
            print(LINE.format_map(row), flush=True)
    if arguments.json or arguments.list:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # at the usual exit nanobind prints what Triton's bindings leak
