"""Calls of `fd.gated_rms_norm` and `fd.short_convolution`."""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from .inputs import Source


def source_of(name: str) -> Source:
    return Source(torch.float64, "cpu", zlib.crc32(name.encode()))


def wide_of(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def in_memory(x: Tensor, rows: int, fill: float = torch.nan) -> Tensor:
    """The same numbers as a slice of a tensor with so many times the channels, and what lies around them is `fill`."""
    around = x.new_full((*x.shape[:-1], rows * x.shape[-1]), fill)
    inside = around[..., x.shape[-1] : 2 * x.shape[-1]]
    return inside.copy_(x)


# ---- gated_rms_norm ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NormCase:
    """`sliced`: x and z are slices of larger tensors. `wide`: the weight is in float32 whatever x is in."""

    name: str
    why: str
    shape: tuple[int, ...] = (2, 9, 3, 32)
    activation: str = "sigmoid"
    sliced: bool = False
    wide: bool = True
    eps: float = 1e-5

    def __str__(self) -> str:
        return self.name


NORM_CASES = [
    NormCase("heads", "batch, tokens, heads"),
    NormCase("silu", "the other gate, a large epsilon", activation="silu", eps=0.1),
    NormCase("fused", "slices of a fused projection", sliced=True, wide=False),
    NormCase("rows", "rows, of an odd number of channels", shape=(37, 17)),
    NormCase("one", "one row without other dimensions", shape=(5,)),
    NormCase("deep", "more dimensions than kernels know", shape=(2, 2, 3, 2, 16)),
    NormCase("many", "rows of many tiles", shape=(3, 50, 4, 128)),
    NormCase("wide", "long rows", shape=(2, 3, 3000), activation="silu"),
    NormCase("none", "no row", shape=(0, 4, 32)),
]
NORM_BY_NAME = {case.name: case for case in NORM_CASES}


def make_norm(case: NormCase, dtype: torch.dtype = torch.float32, device: str = "cpu") -> dict:
    """The arguments, drawn in float64 and rounded."""
    source = source_of(case.name)
    x, z, weight = (source.normal(*shape) for shape in (case.shape, case.shape, case.shape[-1:]))
    call: dict = {"x": x.to(dtype).to(device), "z": z.to(dtype).to(device)}
    if case.sliced:
        call = {name: in_memory(y, 3) for name, y in call.items()}
    call["weight"] = weight.to(wide_of(dtype) if case.wide else dtype).to(device)
    return call | {"eps": case.eps, "activation": case.activation}


# ---- short_convolution ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConvolutionCase:
    """`lengths` of packed sequences, else `B` of `T` tokens. `state`: how many inputs more than `W - 1` a state holds, None
    without one. `indices`: slots of a pool of `slots`, with `flags` of those that have a state, whose dimensions lie
    as `order` says: by `"channel"`, or by `"token"`. `like_conv1d`: the weight is `[D, 1, W]`. `marks`: offsets of each
    sequence's checkpoints, with the `rows` of a buffer of `buffer` rows that they go to; or a checkpoint `every` so many
    tokens. `final`: states without a pool are returned."""

    name: str
    why: str
    B: int = 1
    T: int = 40
    D: int = 24
    W: int = 4
    lengths: tuple[int, ...] | None = None
    bias: bool = False
    activation: str | None = "silu"
    state: int | None = None
    indices: tuple[int, ...] | None = None
    flags: tuple[bool, ...] | None = None
    null_index: str = "negative"
    slots: int = 6
    order: str = "channel"
    sliced: bool = False
    like_conv1d: bool = False
    padding: int = 0
    marks: tuple | None = None
    rows: tuple | None = None
    every: int | None = None
    buffer: int = 0
    final: bool = True

    def __str__(self) -> str:
        return self.name

    @property
    def N(self) -> int:
        return self.B if self.lengths is None else len(self.lengths)

    @property
    def tokens(self) -> int:
        return self.T if self.lengths is None else sum(self.lengths) + self.padding


LENGTHS = (7, 0, 1, 35, 16, 2)
SIX = {"lengths": LENGTHS, "indices": (3, 1, -1, 0, 9, 5), "state": 0}
FLAGS = {"flags": (True, True, True, True, True, False), "null_index": "non_positive"}

CONVOLUTION_CASES = [
    ConvolutionCase("plain", "sequences side by side", B=2),
    ConvolutionCase("bias", "a bias, a weight as Conv1d has it", bias=True, like_conv1d=True),
    ConvolutionCase("linear", "no activation, three taps", activation=None, W=3, bias=True),
    ConvolutionCase("two", "two taps, many channels", W=2, D=600, T=20),
    ConvolutionCase("fused", "a slice of a fused projection", B=2, sliced=True, state=0),
    ConvolutionCase("state", "an initial state, in tokens' order", B=2, state=0, order="token"),
    ConvolutionCase("fla", "a state of W inputs, as FLA has it", B=2, state=1, bias=True),
    ConvolutionCase("short", "fewer tokens than taps", B=3, T=2, state=0),
    ConvolutionCase("packed", "sequences of all lengths, tokens of none", lengths=LENGTHS, state=0, padding=5),
    ConvolutionCase("packed_fla", "the same with states of W inputs", lengths=LENGTHS, state=1, W=3, bias=True),
    ConvolutionCase("packed_new", "the same without states", lengths=LENGTHS, W=2),
    ConvolutionCase("tiles", "sequences of several tiles", lengths=(70, 129, 64), state=0, bias=True),
    ConvolutionCase("pool", "states in a pool, with null indices", **SIX),
    ConvolutionCase("pool_by_token", "channels innermost", **SIX, order="token", bias=True),
    ConvolutionCase("pool_flags", "new sequences in old slots, slot 0 reserved", **SIX, **FLAGS),
    ConvolutionCase("step", "a token of each sequence, states of W inputs", B=4, T=1, indices=(2, 0, -1, 4), state=1),
    ConvolutionCase(
        "marks", "inside, none, past the end, at the end", B=4, marks=(3, 0, 41, 40), rows=(2, 1, 0, 4), buffer=6
    ),
    ConvolutionCase(
        "marks_packed",
        "several of each, some inside the state before, null rows and one past the end",
        lengths=LENGTHS,
        marks=((1, 6), (-7, 2**40), (1, 0), (2, 35), (16, 17), (1, 2)),
        rows=((5, 0), (1, 1), (-1, 1), (2, 3), (9, 4), (4, 6)),
        buffer=7,
        state=1,
        order="token",
    ),
    ConvolutionCase(
        "marks_pool",
        "from a pool that the same call stores to; row 0 is a row though slot 0 is none",
        **SIX,
        **FLAGS,
        marks=(1, 0, 1, 2, 3, 1),
        rows=(0, 5, 1, 2, 3, 4),
        buffer=5,
    ),
    ConvolutionCase("every", "regular ones, and one row more", B=2, T=130, state=0, every=64, buffer=7),
    ConvolutionCase(
        "every_packed", "packed, and too few rows", lengths=(64, 0, 129, 1, 65), W=3, state=0, every=64, buffer=6
    ),
    ConvolutionCase(
        "every_pool", "the same from a pool", lengths=(65, 1, 128), W=2, indices=(2, -1, 0), state=1, every=64, buffer=9
    ),
    ConvolutionCase("empty", "no token", T=0, state=0),
    ConvolutionCase("no_sequence", "offsets of no sequence", lengths=(), padding=3),
]
MARKS = ("checkpoint_indices", "checkpoint_offsets")
CONVOLUTION_BY_NAME = {case.name: case for case in CONVOLUTION_CASES}


def make_convolution(case: ConvolutionCase, dtype: torch.dtype = torch.float32, device: str = "cpu") -> dict:
    """The arguments, drawn in float64 and rounded; tokens of no sequence are NaN."""
    source = source_of(case.name)
    x = source.normal(case.B, case.tokens, case.D).to(dtype).to(device)
    x[:, case.tokens - case.padding :] = torch.nan
    weight = source.normal(case.D, case.W).to(dtype).to(device)
    call: dict = {"x": in_memory(x, 3) if case.sliced else x, "weight": weight[:, None] if case.like_conv1d else weight}
    call["bias"] = source.normal(case.D).to(wide_of(dtype)).to(device) if case.bias else None
    call["activation"] = case.activation
    if case.lengths is not None:
        offsets = [*itertools.accumulate(case.lengths, initial=0)]
        call["cu_seqlens"] = torch.tensor(offsets, dtype=torch.int32, device=device)
    if case.state is not None:
        length = case.W - 1 + case.state
        rows = case.N if case.indices is None else case.slots
        states = source.normal(rows, length, case.D).to(dtype).to(device).mT
        states = states.contiguous() if case.order == "channel" else states
        call["initial_state" if case.indices is None else "state_pool"] = states
    if case.indices is not None:
        call["state_indices"] = torch.tensor(case.indices, device=device)
        call["null_index"] = case.null_index
        if case.flags is not None:
            call["has_initial_state"] = torch.tensor(case.flags, device=device)
    else:
        call["output_final_state"] = case.final
    if case.buffer:
        length = case.W - 1 + (case.state or 0)
        call["checkpoint_states"] = source.normal(case.buffer, length, case.D).to(wide_of(dtype)).to(device).mT
    if case.marks is not None:
        call |= {name: torch.tensor(x, device=device) for name, x in zip(MARKS, (case.rows, case.marks))}
    if case.every is not None:
        call["checkpoint_every"] = case.every
    return call


DIFFERENTIABLE = ("x", "z", "weight", "bias", "initial_state")


def leaves_of(call: dict, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """The arguments that take gradients, as leaves that lie as they do."""
    given = {name: call[name] for name in DIFFERENTIABLE if call.get(name) is not None}
    return {name: (x if dtype is None else x.to(dtype)).detach().requires_grad_() for name, x in given.items()}


def gradients(op, call: dict, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """Gradients of inputs, for those of the results that are drawn from the results' shapes; 0 for tokens of no sequence."""
    leaves = leaves_of(call, dtype)
    found = op(**call | leaves)
    results = [x for x in (found if isinstance(found, tuple) else (found,)) if x is not None]
    incoming = []
    for i, x in enumerate(results):
        grad = source_of(f"gradient {i}").normal(*x.shape).to(call["x"].dtype).to(x.dtype).to(x.device)
        if i == 0 and call.get("cu_seqlens") is not None:
            grad[:, call["cu_seqlens"][-1] :] = 0.0
        incoming.append(grad)
    return dict(zip(leaves, torch.autograd.grad(results, list(leaves.values()), incoming)))
