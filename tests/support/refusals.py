"""Calls that must be refused, of every public operation: what is changed of a good call, and the argument that is named."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import flashdelta as fd
from flashdelta.problem.problem import record_width
from flashdelta.runtime.call import CALLS

from .cases import BY_NAME as CASES
from .cases import FP32
from .decoding import BY_NAME as STEPS
from .decoding_checks import commit_call, counts_of
from .fused import FUSED_BY_NAME
from .inputs import TOKEN_TENSORS, make_call
from .layer import CONVOLUTION_BY_NAME, NORM_BY_NAME
from .oracle import as_recurrent
from .prefills import PLAIN
from .rows import call_of
from .wy import BY_NAME as WY_CASES

wy = fd.kernels.chunk_bwd_wy_dqkg
CHUNK = (fd.chunk_kda,)
FORWARD = (fd.chunk_kda, fd.fused_recurrent_kda)
SEQUENCES = (*FORWARD, fd.recurrent_kda)
DECODE, COMMIT, PREFILL, WY = (fd.recurrent_kda,), (fd.commit,), (fd.kda_prefill,), (wy,)
NORM, CONVOLUTION, FUSED = (fd.gated_rms_norm,), (fd.short_convolution,), (fd.fused_kda_decode,)


@dataclass(frozen=True)
class Refusal:
    """`changes`: arguments to replace in the good call `start`; a function makes one from that call, or several under "". The
    message names `argument`, a pattern."""

    op: Callable
    start: str
    argument: str
    changes: dict

    def calls(self) -> tuple[dict, dict]:
        """A good one, and the one to be refused."""
        good = good_call(self.op, self.start)
        made = {name: x(good) if inspect.isfunction(x) else x for name, x in self.changes.items()}
        return good, good | (made.pop("", None) or {}) | made

    def expect(self, op: Callable, call: dict) -> None:
        with pytest.raises((ValueError, TypeError), match=rf"(?s)^({self.argument}) must be .+; got .+"):
            op(**call)


def says(message: str, text: str) -> bool:
    """Whether a refusal reads so; `...` stands for any words."""
    return re.search(".*".join(map(re.escape, message.split("..."))), text, re.S) is not None


def bad(of: str | None = None, /, **changes: object) -> tuple[str, dict]:
    """`of`: the argument, where it is not the first that changes."""
    return of or next(iter(changes)), changes


def each(**values: tuple | list) -> list[tuple[str, dict]]:
    """Changes of one argument at a time: `values` has several for each."""
    return [bad(**{name: value}) for name, some in values.items() for value in some]


def refusals(table: dict[tuple, list], *others: Refusal) -> list:
    """As parameters of a test."""
    found = [Refusal(op, start, *row) for (ops, start), rows in table.items() for row in rows for op in ops]
    return [pytest.param(x, id=f"{x.op.__name__}-{x.start}-{x.argument}-{i}") for i, x in enumerate((*found, *others))]


def zeros(*shape: int, dtype: torch.dtype = FP32, device: str = "cpu") -> Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


def offsets(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


# ---- good calls ---------------------------------------------------------------------------------------------------------

POOL = {"state_v_first": False, "use_qk_l2norm_in_kernel": True, "state_pool": zeros(4, 2, 32, 64)}
"""Options of a pool of 4 slots."""

POOL_OF_ONE = POOL | {"state_indices": offsets(1)}
POOL_OF_THREE = POOL | {"state_indices": offsets(1, 1, 2), "cu_seqlens": offsets(0, 20, 20, 60)}
"""Sequences of 20, 0 and 40 tokens. The second stores nothing."""


def marks(offset: object, index: object) -> dict:
    return {"checkpoint_offsets": torch.tensor(offset), "checkpoint_indices": torch.tensor(index)}


BUFFER = {"checkpoint_states": zeros(4, 2, 32, 64)}
THREE = {"cu_seqlens": offsets(0, 20, 20, 60)}
REGULAR = {"cu_seqlens": offsets(0, 65, 65, 70), "checkpoint_states": zeros(3, 2, 32, 64), "checkpoint_every": 64}
MORE = {
    "plain": ("bounded", {}),
    "pool": ("bounded", POOL_OF_ONE),
    "flags": ("bounded", POOL_OF_ONE | {"has_initial_state": torch.tensor([True])}),
    "out": ("bounded", {"out": zeros(1, 70, 2, 64)}),
    "checkpoint": ("bounded", POOL_OF_ONE | marks([16], [2])),
    "three": ("bounded", POOL_OF_THREE),
    "three checkpoints": ("bounded", POOL_OF_THREE | marks([16, 0, 16], [3, 9, -1])),
    "final": ("bounded", {"final_state": zeros(1, 2, 32, 64)}),
    "buffer": ("bounded", BUFFER | marks([16], [2])),
    "regular": ("bounded", BUFFER | {"checkpoint_every": 64}),
    "packed in a buffer": ("bounded", REGULAR),
    "offsets": ("bounded", THREE),
    "host offsets": ("packed", {"cu_seqlens_cpu": offsets(0, 17, 17, 81, 82, 147)}),
    "ones": ("state", {"scale": 1, "split": 1, "output_final_state": True}),
}
"""A case, and what is added. Those without have B = 1, T = 70, H = HV = 2, K = 32, V = 64; "packed" 5 sequences, T = 147.

Steps of `recurrent_kda`: "plain" has N = 3 of one token, H = 1, HV = 2, K = 32, V = 64, 8 slots; "spec" 3 x 3 tokens; "verify"
3 x 3, 8 rows."""


CASES_OF: dict[Callable, dict[str, Any]] = {
    fd.recurrent_kda: STEPS | {"plain": STEPS["paged"], "output": STEPS["paged"]},
    fd.kda_prefill: {"plain": replace(PLAIN, T=70)},
    wy: WY_CASES,
    fd.gated_rms_norm: NORM_BY_NAME,
    fd.short_convolution: CONVOLUTION_BY_NAME | {"out": CONVOLUTION_BY_NAME["state"]},
    fd.fused_kda_decode: FUSED_BY_NAME | {"output": FUSED_BY_NAME["bias"]},
}
OUTPUTS = {
    (fd.recurrent_kda, "output"): {"output": zeros(3, 1, 2, 64)},
    (fd.kda_prefill, "plain"): {"scale": 1},
    (fd.short_convolution, "out"): {"out": zeros(2, 40, 24), "final_state": zeros(2, 24, 3)},
    (fd.fused_kda_decode, "output"): {"output": zeros(3, 1, 2, 32)},
}


def good_call(op: Callable, start: str) -> dict:
    if op is fd.commit:
        return commit_of_records() if start == "records" else commit_call()
    if op in CASES_OF:
        return call_of(op, CASES_OF[op][start], FP32) | copy.deepcopy(OUTPUTS.get((op, start), {}))
    case, more = MORE.get(start, (start, {}))
    call = make_call(replace(CASES[case], h=False, final=False)) | copy.deepcopy(more)
    return call if op is fd.chunk_kda else as_recurrent(call)


def commit_of_records() -> dict:
    """Three tokens recorded in row 4, one in row 1, of the slots' own."""
    call = commit_call() | {"intermediate_states": fd.replay_buffer(6, 2, 2, 4, 8)}
    for row, recorded in ((4, 3), (1, 1)):
        call["intermediate_states"][row, 0, :, counts_of(4, 8)] = recorded
    call["num_accepted_tokens"] = offsets(2, 1, 0, 1)
    return call


CONVOLUTION_POOL = {"state_pool": zeros(6, 24, 3), "output_final_state": False}
GRAD = zeros(1, 70, 2, 32).requires_grad_()

# ---- what is refused, whatever the argument -----------------------------------------------------------------------------


def overlapping(x: Tensor) -> Tensor:
    dim = next((d for d in range(x.dim() - 1) if x.shape[d] > 1), 0)
    return torch.zeros_like(x.narrow(dim, 0, 1)).expand_as(x)


def in_one(c: dict, *names: str) -> dict:
    """Tensors that begin in the same memory."""
    memory = torch.zeros(max(c[name].nbytes for name in names), dtype=torch.uint8)
    return {name: memory[: c[name].nbytes].view(c[name].dtype).view(c[name].shape) for name in names}


TENSORS: dict[str, Callable[[Tensor], object]] = {
    "rank": lambda x: x[None, None],
    "size": lambda x: torch.cat([x, *[x[..., :1]] * 2], dim=-1),
    "dtype": lambda x: x.to(torch.int16),
    "half": lambda x: x.half(),
    "device": lambda x: x.to("meta"),
    "type": lambda x: [1.0],
    "layout": lambda x: x.to_sparse(),
    "overlap": overlapping,
    "negative": torch._neg_view,
    "zeros": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype, device=x.device),
    "spread": lambda x: torch.stack([x, x], dim=-1)[..., 0],
    "grad": lambda x: x.detach().clone().requires_grad_(),
}
WRITTEN = (
    *("out", "output", "final_state", "state_pool", "checkpoint_states", "intermediate_states", "state", "conv_state"),
)
SHARED = (("conv_state", "state"), ("state", "conv_state"), ("initial_state_source", "initial_state"))
"""Tensors that may lie in one buffer."""

LEADING = ("q", "x", "mixed_qkv", "initial_state", "cu_seqlens", "ssm_state_indices", "state")
"""Tensors that others are compared with, so that those may be named."""

STARTS: dict[Callable, tuple[str, ...]] = {
    fd.chunk_kda: ("plain", "state", "packed", "checkpoint", "flags", "final", "buffer", "out", "host offsets"),
    fd.fused_recurrent_kda: ("plain", "state", "packed", "flags", "final", "out"),
    fd.recurrent_kda: ("plain", "packed", "spec", "verify", "source", "mixed", "output"),
    fd.commit: ("records", "plain"),
    fd.kda_prefill: ("plain",),
    wy: ("plain", "packed"),
    fd.gated_rms_norm: ("heads",),
    fd.short_convolution: ("bias", "packed", "pool_flags", "marks", "out"),
    fd.fused_kda_decode: ("bias", "spec", "packed", "replay", "output"),
}
"""Good calls that have every tensor among them."""


def tensor_axes() -> Iterator[Refusal]:
    """Each tensor of each operation wrong in each way, and memory shared with what is written."""
    for op, starts in STARTS.items():
        seen: set[str] = set()
        for start in starts:
            call = good_call(op, start)
            own = [name for name, x in call.items() if isinstance(x, Tensor)]
            written = [x for x in own if x in WRITTEN or (x == "initial_state" and op in (*DECODE, *COMMIT))]
            for name in [name for name in own if name not in seen]:
                for other in written:
                    if other != name and (name, other) not in SHARED:
                        yield Refusal(op, start, f"{name}|{other}", {"": lambda c, n=(name, other): in_one(c, *n)})
                for way, change in TENSORS.items():
                    if applies(op, call, name, way, name in written):
                        compared = name in LEADING and way in ("size", "device", "rank")
                        changes = {name: lambda c, n=name, f=change: f(c[n])}
                        yield Refusal(op, start, r"\w+" if compared else name, changes)
            seen |= {*own}


def applies(op: Callable, call: dict, name: str, way: str, written: bool) -> bool:
    x = call[name]
    if way in ("overlap", "negative", "zeros"):
        return written
    if way == "spread":  # windows of convolutions may lie at any strides
        return (written and x.dim() > 3 and op is not fd.commit) or op is fd.kda_prefill
    if way == "grad":
        return x.is_floating_point() and op not in (*FORWARD, *NORM, *CONVOLUTION)
    if way == "half":
        return x.dtype == FP32 and name not in ("q", "x", "z", "mixed_qkv") and op not in NORM
    return way != "size" or (name != "conv_state" and (op is not wy or name != "cu_seqlens"))


OPTIONS = {
    "bool": (1, "x"),
    "int": (64.0, "64", True),
    "float": (True, "1", float("nan"), float("inf"), 10**400, zeros(1)),
    "str": (1j, np.zeros(2), "cuda"),
    "": ("nonsense", 1, np.zeros(2)),
}


def option_axes() -> Iterator[Refusal]:
    """Each option of each operation of another type, or out of range."""
    for op, (start, *_) in STARTS.items():
        for name, parameter in inspect.signature(op).parameters.items():
            if name not in (*CALLS[op].tensors, "positional", "cp_context", "group"):
                kind = next(kind for kind in OPTIONS if str(parameter.annotation).startswith(kind))
                for value in OPTIONS[kind]:
                    yield Refusal(op, start, name, {name: value})


# ---- rules about several arguments, and sizes -----------------------------------------------------------------------------

REFUSED = {
    (SEQUENCES, "plain"): [
        *each(lower_bound=(-5.5, 0.0, 1)),
        *(bad("v", **dict.fromkeys("qk", lambda c, H=H: c["q"][:, :, :1].expand(-1, -1, H, -1))) for H in (3, 4)),
        bad("v", v=lambda c: c["v"][:, :, :0]),
        bad("q", **{name: lambda c, n=name: c[n][..., :24] for name in "qkg"}),
        bad("v", v=lambda c: c["v"][..., :48]),
        *(bad("gate|dt_bias|A_log|lower_bound", gate=gate) for gate in ("none", "logsigmoid")),
    ],
    (FORWARD, "plain"): [
        bad("q", **dict.fromkeys("qk", zeros(1, 70, 0, 32))),
        bad(cu_seqlens=offsets()),
        bad(initial_state=zeros(2, 2, 32, 64)),
        bad("A_log", use_gate_in_kernel=False),
        bad(allow_neg_eigval=True, use_beta_sigmoid_in_kernel=False),
        bad(out=zeros(1, 70, 2, 64).requires_grad_()),
        bad("out", out=zeros(1, 70, 2, 64), q=GRAD),
        bad(state_indices=offsets(1)),
        bad(has_initial_state=torch.tensor([True])),
        bad("out", out=lambda c: c["v"].view(1, 70, 2, 64)[:, :]),
    ],
    (FORWARD, "state"): [bad("initial_state", state_v_first=True)],
    (FORWARD, "B3"): [bad("q", cu_seqlens=offsets(0, 70))],
    (FORWARD, "softplus"): [bad(A_log=None)],
    (FORWARD, "decay"): [
        bad("lower_bound", gate="lower_bound"),
        bad(lower_bound=-5.0),
        bad(lower_bound=-5.0, gate="softplus", A_log=zeros(2)),
        bad(dt_bias=zeros(2, 32), gate="logsigmoid"),
        bad(gate="logsigmoid", use_gate_in_kernel=True),
    ],
    (CHUNK, "plain"): [
        bad(cu_seqlens_cpu=offsets(0, 70)),
        *(bad(cu_seqlens_cpu=offsets(*x), cu_seqlens=offsets(*x)) for x in ((0, 999, 5), (1, 70), (0, 71))),
        *each(chunk_size=(16, 128), split=(0, 1025, "all"), checkpoint_every=(64, 0, -64, 32, 100, 2**31, 10**400)),
        bad(return_intermediate_states=True, q=GRAD),
        bad(checkpoint_offsets=offsets(1)),
        bad(checkpoint_indices=offsets(1)),
        bad(checkpoint_states=zeros(4, 2, 32, 64)),
    ],
    (CHUNK, "ones"): [bad(scale=True), bad(split=True), bad(output_final_state=1)],
    (CHUNK, "host offsets"): [bad(cu_seqlens_cpu=offsets(0, 70)), bad(cu_seqlens_cpu=offsets(147, 82, 81, 17, 17, 0))],
    (FORWARD, "pool"): [
        *each(state_v_first=[None], use_qk_l2norm_in_kernel=[None], output_final_state=[True]),
        bad(state_indices=None),
        bad("state_pool", initial_state=zeros(1, 2, 32, 64)),
        bad("state_pool", state_v_first=True),
        bad("state_pool", q=GRAD),
        bad(state_pool=zeros(4, 4, 32, 64)[:, ::2]),
        bad("final_state", final_state=zeros(1, 2, 32, 64)),
    ],
    (CHUNK, "checkpoint"): [
        *each(checkpoint_indices=[None], checkpoint_offsets=[None, offsets(16, 32)]),
        bad("checkpoint_indices", checkpoint_offsets=offsets(16)[None]),
        *(bad(**dict.fromkeys(("checkpoint_offsets", "checkpoint_indices"), offsets(*[0] * M)[None])) for M in (0, 9)),
        bad(checkpoint_every=64, checkpoint_states=zeros(24, 2, 32, 64)),
    ],
    (FORWARD, "final"): [bad("final_state", state_v_first=True), bad("final_state", q=GRAD)],
    (CHUNK, "buffer"): [
        bad(checkpoint_indices=None),
        bad("checkpoint_states", state_v_first=True),
        bad("checkpoint_states", q=GRAD),
        bad("final_state", final_state=lambda c: c["checkpoint_states"][1:2]),
    ],
    (CHUNK, "regular"): [
        *each(checkpoint_every=(0, -64, 32, 100, 2**31, 64.0, True)),
        bad(checkpoint_states=zeros(1, 2, 32, 64)),
        bad(checkpoint_states=zeros(0, 2, 32, 64), checkpoint_every=128),
    ],
    (DECODE, "plain"): [
        bad("allow_neg_eigval", allow_neg_eigval=True, beta_is_logit=False),
        bad(backend="hopper"),
        bad("initial_state", ssm_state_indices=None),
        bad("q", cu_seqlens=offsets(0, 1, 2, 3)),
        bad(num_accepted_tokens=offsets(1, 1, 1)),
        bad(intermediate_states=zeros(8, 3, 2, 64, 32)),
        bad(intermediate_state_indices=offsets(0, 1, 2)),
        *each(q=[None], g=[None], ssm_state_indices=[offsets(1, 2)]),
    ],
    (DECODE, "T17"): [
        bad("q", **{name: lambda c, n=name: torch.cat([c[n], c[n][:, :1]], dim=1) for name in TOKEN_TENSORS})
    ],
    (DECODE, "no_state"): [
        bad(ssm_state_indices=lambda c: torch.arange(len(c["q"]))),
        bad("num_spec_tokens|q", num_spec_tokens=2),
        bad(update_state=False),
    ],
    (DECODE, "own_slots"): [bad(output=lambda c: c["initial_state"].flatten()[-384:].view(3, 1, 2, 64))],
    (DECODE, "spec"): [
        *each(num_spec_tokens=(0, -1, 17), ssm_state_indices=(None, offsets(1, 2, 3))),
        bad(num_accepted_tokens=offsets(1)),
        bad("q", num_spec_tokens=1),
        bad("ssm_state_indices", num_spec_tokens=None, num_accepted_tokens=None),
        bad(
            num_accepted_tokens=offsets(1, 1, 1),
            initial_state_source=lambda c: c["initial_state"].clone(),
            initial_state_indices=offsets(0, 1, 2),
        ),
    ],
    (DECODE, "verify"): [
        bad(
            "intermediate_states",
            num_spec_tokens=None,
            intermediate_states=lambda c: c["initial_state"].new_zeros(8, 1, *c["initial_state"].shape[1:]),
        ),
        bad(num_accepted_tokens=offsets(1, 1, 1)),
        bad("intermediate_states", update_state=True, ssm_state_indices=offsets(*range(9)).view(3, 3)),
        *each(intermediate_states=[zeros(8, *x) for x in ((2, 2, 64, 32), (2, 64, 32), (3, 132))]),
        bad(intermediate_states=zeros(8, 3, 2, 144).double()),
        *each(intermediate_state_indices=(offsets(1, 2), zeros(3), offsets(1, 2, 3)[None])),
        bad(intermediate_states=zeros(2, 3, 2, 144), initial_state=zeros(3, 2, 64, 32), ssm_state_indices=None),
    ],
    (DECODE, "read_only"): [bad(output_final_state=True)],
    (DECODE, "source"): [*each(initial_state_indices=[None], initial_state_source=[None], initial_state=[None])],
    (DECODE, "verify_source"): [bad(initial_state=zeros(8, 2, 64, 32))],
    (DECODE, "mixed"): [
        bad("mixed_qkv", q=zeros(3, 1, 2, 32)),
        *each(initial_state=[None], mixed_qkv=(zeros(3, 383), zeros(3, 256), zeros(3, 448, dtype=torch.bfloat16))),
        bad(initial_state=zeros(8, 4, 64, 48), mixed_qkv=lambda c: c["mixed_qkv"].new_zeros(3, 448), g=zeros(3, 192)),
    ],
    (COMMIT, "plain"): [
        bad(num_accepted_tokens=None),
        bad(backend="hopper"),
        bad("intermediate_states", initial_state=zeros(6, 2, 8, 3)),
        *each(intermediate_states=[zeros(6, *x) for x in ((0, 2, 8, 4), (18, 2, 8, 4), (3, 2, 20), (3, 1, 32))]),
        bad(intermediate_states=None),
        bad(intermediate_states=zeros(6, 3, 2, 32), state_v_first=False, initial_state=zeros(6, 2, 16, 4)),
        *(bad(initial_state=zeros(6, 2, *x), intermediate_states=zeros(6, 3, 2, 32)) for x in ((8, 3), (12, 4))),
        bad(initial_state=zeros(6, 0, 8, 4), intermediate_states=zeros(6, 3, 0, 8, 4)),
    ],
    (PREFILL, "plain"): [
        *each(chunk_size=[16], backend=["hopper"]),
        bad("q", **{name: lambda c, n=name: c[n][:, :0].contiguous() for name in TOKEN_TENSORS}),
    ],
    (WY, "plain"): [
        *each(v=[zeros(1, 70, 3, 64)], chunk_size=[16], backend=["hopper"], dh=[zeros(1, 1, 2, 32, 64)]),
        bad(cu_seqlens=offsets()),
        *each(h=[zeros(1, 2, 2, 64, 32)], dh=[zeros(1, 1, 2, 32, 64)]),
        bad(**{name: lambda c, n=name: torch.cat([c[n], c[n][:, :1]], dim=1) for name in ("h", "dh")}),
    ],
    (FUSED, "softplus"): [
        *each(A_log=[None], norm_eps=[0.0], lower_bound=[1.0], num_spec_tokens=[17], raw_beta=[zeros(3, 2).double()]),
        bad(x=lambda c: c["x"][:, :-1]),
        bad(raw_g=lambda c: c["raw_g"][..., :-1]),
        *(bad(weight=lambda c, W=W: c["weight"][:, :1].expand(-1, W)) for W in (1, 5)),
        bad(output=lambda c: c["x"].new_empty(3, 2, 1, 32)),
        bad(conv_state=lambda c: c["conv_state"][:, :, 1:]),
        bad(num_accepted_tokens=lambda c: c["state_indices"]),
        bad(intermediate_state_indices=lambda c: c["state_indices"]),
        bad(intermediate_states=lambda c: zeros(8, 1, c["state"].shape[1], record_width(*c["state"].shape[2:]))),
    ],
    (NORM, "heads"): [*each(x=(zeros(2, 9, 3, 0), zeros(1, 8193)), eps=(0.0, 1e300, 1e-300))],
    (CONVOLUTION, "plain"): [
        *each(weight=(zeros(24, 1), zeros(24, 5))),
        bad(x=zeros(1, 40, 0)),
        bad("x", cu_seqlens=offsets(0, 40)),
        bad(state_indices=offsets(0, 1)),
        bad("state_indices", **CONVOLUTION_POOL),
        bad("out", out=zeros(2, 40, 24), weight=zeros(24, 4).requires_grad_()),
    ],
    (CONVOLUTION, "packed"): [bad("initial_state", cu_seqlens=offsets(0, 7, 66))],
    (CONVOLUTION, "pool"): [
        *each(output_final_state=[True], state_pool=[zeros(6, 24, 5)]),
        bad("state_pool", initial_state=zeros(6, 24, 3)),
        bad("state_pool", weight=zeros(24, 4).requires_grad_()),
    ],
}


BAD_OFFSETS = ((3, 40, 70), (-4, 40, 70), (0, 50, 20, 70), (0, 20, 71), (0, 2**40, -(2**40), 2**62))
REFUSED_IF_CHECKED = {
    (CHUNK, "host offsets"): [bad(cu_seqlens_cpu=offsets(0, 17, 18, 81, 82, 147))],
    (FORWARD, "offsets"): each(cu_seqlens=[offsets(*x) for x in BAD_OFFSETS]),
    (FORWARD, "three"): each(state_indices=[offsets(*x) for x in ((1, 4, 0), (1, 2, 1), (0, 2, 0))]),
    (CHUNK, "three checkpoints"): [
        *(bad("checkpoint_indices", **marks(*x)) for x in (((16, 0, 0), (9, 0, 0)), ((0, 0, 16), (0, 0, 1)))),
        bad("checkpoint_indices", **marks((16, 0, 16), (3, 0, 3))),
        *(bad("checkpoint_offsets", **marks((offset, 0, 0), (3, 0, 0))) for offset in (24, -16, 32)),
        bad("checkpoint_offsets", **marks(((0, 0), (0, 0), (32, 16)), ((0, 0), (0, 0), (3, -1)))),
    ],
    (CHUNK, "packed in a buffer"): [bad(checkpoint_states=zeros(2, 2, 32, 64))],
    (DECODE, "plain"): each(ssm_state_indices=[offsets(1, 8, 0), offsets(1, 2, 1)]),
    (DECODE, "packed"): [
        bad(
            cu_seqlens=offsets(0, 1, 1, 1, 19),
            **{name: lambda c, n=name: c[n].repeat_interleave(8, dim=1) for name in TOKEN_TENSORS},
        )
    ],
    (DECODE, "spec"): [bad(num_accepted_tokens=offsets(1, 4, 1))],
    (DECODE, "verify"): each(
        ssm_state_indices=[offsets(3, -1, 3)], intermediate_state_indices=[offsets(5, 0, 5), offsets(5, 0, 8)]
    ),
    (DECODE, "source"): [bad(initial_state_indices=offsets(1, 7, 1))],
    (COMMIT, "plain"): [bad(num_accepted_tokens=offsets(2, 0, 4, 1))],
    (COMMIT, "records"): [
        bad(num_accepted_tokens=offsets(2, 3, 0, 1)),
        bad(num_accepted_tokens=offsets(1, 1, 1, 1), intermediate_state_indices=offsets(4, 1, 5, 3)),
        *each(intermediate_state_indices=[offsets(4, 1, 1, 3), offsets(4, 1, 6, 3)]),
        bad(ssm_state_indices=offsets(4, 1, 4, -1)),
    ],
    (CONVOLUTION, "packed"): each(cu_seqlens=[offsets(0, 7, 7, 8, 43, 42, 61), offsets(0, 7, 7, 8, 43, 59, 67)]),
    (CONVOLUTION, "step"): each(state_indices=[offsets(2, 0, -1, 2), offsets(2, 0, 6, 4)]),
    (WY, "packed"): [
        bad(cu_seqlens=offsets(0, 20, 10, 148)),
        bad(h=lambda c: c["h"][:, :-1], dh=lambda c: c["dh"][:, :-1]),
    ],
}
"""Refused where FLASHDELTA_CHECK=1 has values on the device read."""
