"""Calls that must be refused, of every public operation: what is changed of a good call, and what the message says."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

import flashdelta as fd

from .cases import BF16, FP16, FP32
from .cases import BY_NAME as CASES
from .decoding import BY_NAME as STEPS
from .decoding import make_step
from .decoding_checks import commit_call, counts_of
from .fused import FUSED_BY_NAME, make_fused
from .inputs import make_call
from .layer import CONVOLUTION_BY_NAME, NORM_BY_NAME, make_convolution, make_norm
from .oracle import as_recurrent
from .prefills import PLAIN, prefill_call
from .wy import BY_NAME as WY_CASES
from .wy import make_wy

wy = fd.kernels.chunk_bwd_wy_dqkg
CHUNK = (fd.chunk_kda,)
FORWARD = (fd.chunk_kda, fd.fused_recurrent_kda)
SEQUENCES = (*FORWARD, fd.recurrent_kda)
DECODE, COMMIT, PREFILL, WY = (fd.recurrent_kda,), (fd.commit,), (fd.kda_prefill,), (wy,)
NORM, CONVOLUTION = (fd.gated_rms_norm,), (fd.short_convolution,)


@dataclass(frozen=True)
class Refusal:
    """`changes`: arguments to replace in the good call `start`; a function makes one from that call. The message says of
    `argument` what it `got` and what was `wanted`, of which either may leave out the end, and "..." stands for any text."""

    op: Callable
    start: str
    error: type[Exception]
    argument: str
    got: str
    wanted: str
    changes: dict

    def calls(self) -> tuple[dict, dict]:
        """A good one, and the one to be refused."""
        good = good_call(self.op, self.start)
        return good, good | {name: x(good) if callable(x) else x for name, x in self.changes.items()}

    def expect(self, op: Callable, call: dict) -> None:
        with pytest.raises(self.error) as caught:
            op(**call)
        assert caught.type is self.error
        pattern = re.escape(f"{self.argument}: got {self.got}..., wanted {self.wanted}").replace(r"\.\.\.", ".*")
        assert re.match(pattern, str(caught.value)), str(caught.value)


def bad(got: str, wanted: str = "", *, of: str | None = None, error: type = ValueError, **changes: object) -> tuple:
    """A row of the table. `of`: the argument, where it is not the first that changes."""
    return error, of or next(iter(changes)), got, wanted, changes


mistyped = partial(bad, error=TypeError)


def refusals(table: dict[tuple, list]) -> list:
    """As parameters of a test."""
    found = [Refusal(op, start, *row) for (ops, start), rows in table.items() for row in rows for op in ops]
    return [pytest.param(x, id=f"{x.op.__name__}-{x.start}-{x.argument}: {x.got}") for x in found]


def zeros(*shape: int, dtype: torch.dtype = FP32, device: str = "cpu") -> Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


def offsets(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


# ---- good calls ---------------------------------------------------------------------------------------------------------

POOL = {"state_v_first": False, "use_qk_l2norm_in_kernel": True, "state_pool": zeros(4, 2, 32, 64)}
"""Of 4 slots."""

POOL_OF_ONE = POOL | {"state_indices": offsets(1)}
POOL_OF_THREE = POOL | {"state_indices": offsets(1, 1, 2), "cu_seqlens": offsets(0, 20, 20, 60)}
"""Sequences of 20, 0 and 40 tokens. The second stores nothing."""

MORE = {
    "plain": ("bounded", {}),
    "pool": ("bounded", POOL_OF_ONE),
    "checkpoint": ("bounded", POOL_OF_ONE | {"checkpoint_offsets": offsets(16), "checkpoint_indices": offsets(2)}),
    "three": ("bounded", POOL_OF_THREE),
    "three checkpoints": (
        "bounded",
        POOL_OF_THREE | {"checkpoint_offsets": offsets(16, 0, 16), "checkpoint_indices": offsets(3, 9, -1)},
    ),
    "final": ("bounded", {"final_state": zeros(1, 2, 32, 64)}),
    "buffer": (
        "bounded",
        {"checkpoint_states": zeros(4, 2, 32, 64), "checkpoint_offsets": offsets(16), "checkpoint_indices": offsets(2)},
    ),
    "regular": ("bounded", {"checkpoint_states": zeros(4, 2, 32, 64), "checkpoint_every": 64}),
    "three in a buffer": (
        "bounded",
        {
            "cu_seqlens": offsets(0, 20, 20, 60),
            "checkpoint_states": zeros(4, 2, 32, 64),
            "checkpoint_offsets": offsets(16, 0, 16),
            "checkpoint_indices": offsets(0, 9, -1),
        },
    ),
    "packed in a buffer": (
        "bounded",
        {"cu_seqlens": offsets(0, 65, 65, 70), "checkpoint_states": zeros(3, 2, 32, 64), "checkpoint_every": 64},
    ),
    "offsets": ("bounded", {"cu_seqlens": offsets(0, 20, 20, 60)}),
    "host offsets": ("packed", {"cu_seqlens_cpu": offsets(0, 17, 17, 81, 82, 147)}),
    "ones": ("state", {"scale": 1, "split": 1, "output_final_state": True}),
}
"""A case, and what is added. Those without have B = 1, T = 70, H = HV = 2, K = 32, V = 64; "packed" 5 sequences, T = 147.

Steps of `recurrent_kda`: "plain" has N = 3 of one token, H = 1, HV = 2, K = 32, V = 64, 8 slots; "spec" 3 x 3 tokens; "verify"
3 x 3, 8 rows."""


def good_call(op: Callable, start: str) -> dict:
    if op is fd.recurrent_kda:
        return make_step(STEPS["paged" if start == "plain" else start])
    if op is fd.commit:
        return commit_of_records() if start == "records" else commit_call()
    if op is fd.kda_prefill:
        return prefill_call(replace(PLAIN, T=70)) | {"scale": 1}
    if op is wy:
        return make_wy(WY_CASES[start])
    if op is fd.gated_rms_norm:
        return make_norm(NORM_BY_NAME[start])
    if op is fd.short_convolution:
        return make_convolution(CONVOLUTION_BY_NAME[start])
    if op is fd.fused_kda_decode:
        return make_fused(FUSED_BY_NAME[start])
    case, more = MORE.get(start, (start, {}))
    call = make_call(replace(CASES[case], h=False, final=False)) | copy.deepcopy(more)
    return call if op is fd.chunk_kda else as_recurrent(call)


def refused_with_a_pool(op: Callable) -> dict:
    """Of a call that writes."""
    if op is fd.recurrent_kda:
        return good_call(op, "paged") | {"null_index": "none"}
    call = good_call(op, "pool")
    return call | {name: zeros(*call[name].shape[:3], 96) for name in "qkg"}


def many_sequences(count: int) -> dict:
    """Most of them empty, whose offsets the host has."""
    call = good_call(fd.chunk_kda, "packed")
    ends = torch.cat((torch.zeros(count, dtype=torch.int64), torch.tensor([call["q"].shape[1]])))
    return call | {"cu_seqlens": ends, "cu_seqlens_cpu": ends.clone(), "initial_state": None}


def commit_of_records() -> dict:
    """Three tokens recorded in row 4, one in row 1, of the slots' own."""
    call = commit_call() | {"intermediate_states": fd.replay_buffer(6, 2, 2, 4, 8)}
    for row, recorded in ((4, 3), (1, 1)):
        call["intermediate_states"][row, 0, :, counts_of(4, 8)] = recorded
    call["num_accepted_tokens"] = offsets(2, 1, 0, 1)
    return call


CONVOLUTION_POOL = {"state_pool": zeros(6, 24, 3), "output_final_state": False}


# ---- what is refused ----------------------------------------------------------------------------------------------------

ROWS = zeros(24, 2, 64, 32)
ROWS_K_FIRST = zeros(24, 2, 32, 64)
NEEDS_GRAD = zeros(1, 70, 2, 32).requires_grad_()


def first_elements(x: Tensor, *shape: int) -> Tensor:
    """A view of them."""
    return x.flatten()[: torch.Size(shape).numel()].view(shape)


def heads(H: int) -> Callable[[dict], Tensor]:
    return lambda call: call["q"][:, :, :1].expand(-1, -1, H, -1)


def sharing(name: str, *shape: int) -> dict:
    """A `final_state`, and another argument that begins in its memory."""
    memory = zeros(2 * torch.Size(shape).numel())
    return {name: first_elements(memory, *shape), "final_state": first_elements(memory, 1, 2, 32, 64)}


def nested(call: dict) -> Tensor:
    return torch.nested.nested_tensor([call["q"], call["q"]])


def nested_offsets() -> Tensor:
    """Of rank 1, as offsets are."""
    return torch.nested.nested_tensor([torch.tensor(0), torch.tensor(70)])


def shared(other: str, **changes: object) -> tuple:
    return bad(f"memory shared with {other}", "memory of its own", **changes)


def no_tensors(*names: str) -> list[tuple]:
    return [mistyped("list", "a torch.Tensor", **{name: [1.0]}) for name in names]


def no_flags(*names: str, value: object = 1) -> list[tuple]:
    return [mistyped(f"{value} ({type(value).__name__})", "a bool", **{name: value}) for name in names]


def marks(offset: object, index: object, dtype: torch.dtype | None = None) -> dict:
    values = {"checkpoint_offsets": offset, "checkpoint_indices": index}
    return {name: torch.tensor(x, dtype=dtype) for name, x in values.items()}


REFUSED = {
    # ---- whatever the length of sequences
    (SEQUENCES, "plain"): [
        bad("shape [70, 2, 32]", "... rank 4", q=zeros(70, 2, 32)),
        bad("shape [1, 1, 70, 2, 32]", "... (rank 4)", k=zeros(1, 1, 70, 2, 32)),
        bad("shape [1, 70, 2]", "... rank 4", v=zeros(1, 70, 2)),
        bad("shape [1, 70, 2]", "... (rank 4)", g=zeros(1, 70, 2)),
        bad("shape [1, 70, 2, 32]", "... (rank 3)", beta=zeros(1, 70, 2, 32)),
        bad("shape [3]", "[HV] = [2]", A_log=zeros(3)),
        bad("shape [1, 2]", "... [1, 1, HV, 1] = [1, 1, 2, 1]", A_log=zeros(1, 2)),
        bad("shape [63]", "[HV * K] = [64]", dt_bias=zeros(63)),
        bad("shape [2]", "... [HV, K] = [2, 32]", dt_bias=zeros(2)),
        bad("shape [32, 2]", "... [HV, K] = [2, 32]", dt_bias=zeros(32, 2)),
        bad("-5.5", "a float in [-5, 0)", lower_bound=-5.5),
        bad("0.0", "a float in [-5, 0)", lower_bound=0.0),
        bad("1", "a float in [-5, 0)", lower_bound=1),
        bad("nan", "a finite float", lower_bound=float("nan")),
        bad("'gelu'", "...'lower_bound'", gate="gelu"),
        bad("'cuda'", "...'reference'", backend="cuda"),
        bad("array([0., 0.])", "one of", backend=np.zeros(2)),
        bad("'zero'", "one of ('negative', 'non_positive')", null_index="zero"),
        *(
            bad("device meta", "q's device cpu", **{name: lambda c, name=name: c[name].to("meta")})
            for name in ("k", "v", "g", "beta", "A_log", "dt_bias")
        ),
        *(bad("2 value heads", f"a positive multiple of the {H}", of="v", q=heads(H), k=heads(H)) for H in (3, 4)),
        mistyped("dtype torch.int32", "bfloat16, float16, float32", q=lambda c: c["q"].int()),
        mistyped("dtype torch.float16", "q's dtype torch.float32", k=lambda c: c["k"].half()),
        mistyped("dtype torch.bfloat16", "q's dtype torch.float32", v=lambda c: c["v"].bfloat16()),
        mistyped("dtype torch.float16", "float32", g=lambda c: c["g"].half()),
        mistyped("dtype torch.float64", "float32", beta=lambda c: c["beta"].double()),
        mistyped("dtype torch.float16", "float32", A_log=lambda c: c["A_log"].half()),
        mistyped("dtype torch.int32", "float32", dt_bias=lambda c: c["dt_bias"].int()),
        mistyped("'-5' (str)", "a float or None", lower_bound="-5"),
        mistyped("True (bool)", "a float or None", lower_bound=True),
        mistyped("tensor([0.]) (Tensor)", "a float or None", scale=zeros(1)),
        *(bad(f"{scale}", "a finite float or None", scale=scale) for scale in (float("nan"), float("-inf"))),
        bad("an int beyond floats", "a finite float or None", scale=10**400),
        *no_flags("output_final_state", "use_qk_l2norm_in_kernel", "use_gate_in_kernel"),
        *no_flags("allow_neg_eigval", "state_v_first"),
        *no_tensors("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state", "cu_seqlens"),
        *(
            mistyped(f"a {kind} tensor", "a dense (strided) one", **{name: make})
            for name in ("q", "v", "A_log", "initial_state")
            for kind, make in (("sparse_coo", lambda c: c["q"].to_sparse()), ("nested", nested))
        ),
    ],
    # ---- whole sequences
    (FORWARD, "plain"): [
        bad("shape [1, 2]", "... rank 1", cu_seqlens=offsets(0, 70)[None]),
        bad("shape [70, 2, 64]", "... (rank 4)", out=zeros(70, 2, 64)),
        bad("shape [1, 69, 2, 32]", "[B, T, H, K] = [1, 70, 2, 32]", k=zeros(1, 69, 2, 32)),
        bad("shape [1, 70, 1, 32]", "[B, T, H, K] = [1, 70, 2, 32]", k=zeros(1, 70, 1, 32)),
        bad("shape [1, 69, 2, 64]", "[B, T, HV, V] = [1, 70, 2, 64]", v=zeros(1, 69, 2, 64)),
        bad("shape [1, 70, 1, 32]", "[B, T, HV, K] = [1, 70, 2, 32]", g=zeros(1, 70, 1, 32)),
        bad("shape [1, 70, 2, 1]", "[B, T, HV, K] = [1, 70, 2, 32]", g=zeros(1, 70, 2, 1)),
        bad("shape [1, 70, 1]", "[B, T, HV] = [1, 70, 2]", beta=zeros(1, 70, 1)),
        bad("K = 31", "K in (32, 64, 128, 256)", of="q", **dict.fromkeys("qkg", zeros(1, 70, 2, 31))),
        bad("V = 48", "V in (32, 64, 128, 256)", v=zeros(1, 70, 2, 48)),
        bad("shape [1, 70, 2, 32]", "[B, T, HV, V] = [1, 70, 2, 64]", out=zeros(1, 70, 2, 32)),
        bad("shape [1, 70, 0, 32]", "at least one head", of="q", **dict.fromkeys("qk", zeros(1, 70, 0, 32))),
        bad("0 value heads", "a positive multiple", v=zeros(1, 70, 0, 64)),
        bad("device meta", "q's device cpu", out=zeros(1, 70, 2, 64, device="meta")),
        bad("an empty tensor", "N + 1 offsets", cu_seqlens=offsets()),
        bad("shape [2, 2, 32, 64]", "... [1, 2, 32, 64]", initial_state=zeros(2, 2, 32, 64)),
        bad("shape [1, 2, 64, 32]", "[N, HV, K, V]", initial_state=zeros(1, 2, 64, 32)),
        bad("shape [2, 32, 64]", "... [1, 2, 32, 64]", initial_state=zeros(2, 32, 64)),
        *(
            bad("a gate without parameters with use_gate_in_kernel=True", "one of the two", of="gate", gate=gate)
            for gate in ("none", "logsigmoid")
        ),
        bad("a tensor with a gate that does not read it", "None", of="A_log", use_gate_in_kernel=False),
        shared("v", out=lambda c: c["v"]),
        shared("v", out=lambda c: c["v"].view(1, 70, 2, 64)[:, :]),
        shared("q", out=lambda c: c["q"], v=zeros(1, 70, 2, 32)),
        bad(
            "strides (8960, 64, 64, 1)",
            "memory of its own",
            out=zeros(1, 300, 2, 64).as_strided((1, 70, 2, 64), (8960, 64, 64, 1)),
        ),
        bad("strides (17920, 256, 128, 2)", "a dense last", out=zeros(1, 70, 2, 128)[..., ::2]),
        bad("strides (4480, 64, 0, 1)", "memory of its own", out=zeros(1, 70, 1, 64).expand(-1, -1, 2, -1)),
        bad("a tensor that requires grad", "one that ... no gradient", out=zeros(1, 70, 2, 64).requires_grad_()),
        bad(
            "a tensor with inputs that require grad",
            "... requires grad",
            out=zeros(1, 70, 2, 64),
            v=zeros(1, 70, 2, 64).requires_grad_(),
        ),
        bad("a tensor without state_pool", "state_pool too", state_indices=offsets(1)),
        bad("a tensor without state_pool", "state_pool too", has_initial_state=torch.tensor([True])),
        mistyped("dtype torch.float16", "float32 or bfloat16", initial_state=zeros(1, 2, 32, 64, dtype=FP16)),
        mistyped("dtype torch.float32", "int32 or int64", cu_seqlens=zeros(2)),
        mistyped("dtype torch.int16", "int32 or int64", cu_seqlens=offsets(0, 70).short()),
        mistyped("dtype torch.bfloat16", "torch.float32 or q's dtype", out=zeros(1, 70, 2, 64, dtype=BF16)),
        *no_flags("use_beta_sigmoid_in_kernel"),
        *no_tensors("out"),
    ],
    (FORWARD, "state"): [
        bad("device meta", "q's device cpu", initial_state=lambda c: c["initial_state"].to("meta")),
        bad("shape [1, 2, 32, 64]", "[N, HV, V, K]", of="initial_state", state_v_first=True),
    ],
    (FORWARD, "packed"): [
        bad("device meta", "q's device cpu", cu_seqlens=lambda c: c["cu_seqlens"].to("meta")),
        bad("shape [1, 2, 32, 64]", "... [5, 2, 32, 64]", initial_state=zeros(1, 2, 32, 64)),
    ],
    (FORWARD, "B3"): [
        bad("batch size 3", "batch size 1", of="q", cu_seqlens=offsets(0, 70)),
    ],
    (FORWARD, "softplus"): [
        bad("None", "... [HV] = [2]", A_log=None),
    ],
    (FORWARD, "decay"): [
        bad("None", "a float in [-5, 0)", of="lower_bound", gate="lower_bound"),
        bad("a tensor with a gate that does not read it", "None", dt_bias=zeros(2, 32), gate="logsigmoid"),
        bad("a bound with a gate that does not read it", "None", lower_bound=-5.0),
        bad("a bound with a gate that does not read it", "None", lower_bound=-5.0, gate="softplus", A_log=zeros(2)),
    ],
    (FORWARD, "decay_promised"): [
        bad("True with use_beta_sigmoid_in_kernel=False", "beta logits", allow_neg_eigval=True),
    ],
    # ---- what only chunk_kda has
    (CHUNK, "plain"): [
        bad("a tensor without cu_seqlens", "cu_seqlens too", cu_seqlens_cpu=offsets(0, 70)),
        *(
            bad(str(list(x)), "... never fall", cu_seqlens_cpu=offsets(*x), cu_seqlens=offsets(*x))
            for x in ((0, 999, 5), (1, 70), (0, 71))
        ),
        bad("16", "one of (32, 64)", chunk_size=16),
        bad("128", "one of (32, 64)", chunk_size=128),
        bad("0", "... a number of segments", split=0),
        bad("1025", "... at most 1024", split=1025),
        bad("'all'", "'auto'", split="all"),
        bad(
            "True with inputs that require grad",
            "torch.no_grad()",
            return_intermediate_states=True,
            q=zeros(1, 70, 2, 32).requires_grad_(),
        ),
        *(
            bad("a tensor without state_pool and checkpoint_states", "one of these", **{name: offsets(1)})
            for name in ("checkpoint_offsets", "checkpoint_indices")
        ),
        bad("a tensor without checkpoint_offsets and checkpoint_every", "one of these", checkpoint_states=ROWS),
        bad("a number without checkpoint_states", "checkpoint_states too", checkpoint_every=64),
        *(bad(str(n), "a multiple of 64 up to 2^30", checkpoint_every=n) for n in (0, -64, 32, 100, 2**31, 10**400)),
        *(mistyped(f"{x!r}", "an int or None", checkpoint_every=x) for x in (True, 64.0, "64")),
        mistyped("dtype torch.float32", "int32 or int64", cu_seqlens_cpu=zeros(2), cu_seqlens=offsets(0, 70)),
        mistyped("2.0 (float)", "'auto'", split=2.0),
        mistyped("array([1, 2]) (ndarray)", "'auto'", split=np.array([1, 2])),
        mistyped("64.0 (float)", "an int", chunk_size=64.0),
        *no_flags("batch_invariant"),
        *no_flags("safe_gate", "disable_recompute", "return_intermediate_states", value=None),
    ],
    (CHUNK, "ones"): [
        mistyped("True (bool)", "a float or None", scale=True),
        mistyped("True (bool)", "'auto'", split=True),
        *no_flags("output_final_state"),
    ],
    (CHUNK, "host offsets"): [
        bad("device meta", "device cpu", cu_seqlens_cpu=offsets(*range(6)).to("meta")),
        bad("shape [2]", "[N + 1] = [6]", cu_seqlens_cpu=offsets(0, 70)),
        bad("[147, 82, 81,", cu_seqlens_cpu=offsets(147, 82, 81, 17, 17, 0)),
        mistyped("dtype torch.complex64", "int32 or int64", cu_seqlens_cpu=offsets(*range(6)).to(torch.complex64)),
        mistyped("a nested tensor", "a dense (strided) one", cu_seqlens_cpu=lambda c: nested_offsets()),
        *no_tensors("cu_seqlens_cpu"),
        mistyped("dtype torch.complex64", "int32 or int64", cu_seqlens_cpu=zeros(6, dtype=torch.complex64)),
        mistyped("a sparse_coo tensor", "a dense", cu_seqlens_cpu=lambda c: c["cu_seqlens_cpu"].to_sparse()),
    ],
    # ---- state pools
    (FORWARD, "pool"): [
        *(
            bad("nothing with state_pool", f"{name}=True or", **{name: None})
            for name in ("state_v_first", "use_qk_l2norm_in_kernel")
        ),
        shared("q", of="state_pool", q=lambda c: first_elements(c["state_pool"], 1, 70, 2, 32)),
        bad("a tensor with initial_state", "one of the two", of="state_pool", initial_state=zeros(1, 2, 32, 64)),
        bad("True with state_pool", "False", output_final_state=True),
        bad("None", "... [N] = [1]", state_indices=None),
        bad("shape [2, 32, 64]", "... rank 4", state_pool=zeros(2, 32, 64)),
        bad("shape [4, 2, 64, 32]", "[slots, HV, K, V] = [4, 2, 32, 64]", state_pool=zeros(4, 2, 64, 32)),
        bad("shape [4, 2, 32, 64]", "[slots, HV, V, K] = [4, 2, 64, 32]", of="state_pool", state_v_first=True),
        bad("strides (8192, 4096, 128, 2)", "dense last 3 dimensions", state_pool=zeros(4, 2, 32, 128)[..., ::2]),
        bad("strides (8192, 4096, 64, 1)", "dense last 3 dimensions", state_pool=zeros(4, 4, 32, 64)[:, ::2]),
        bad("strides (0, 2048, 64, 1)", "... must not overlap", state_pool=zeros(1, 2, 32, 64).expand(4, 2, 32, 64)),
        bad("device meta", "q's device cpu", state_pool=zeros(4, 2, 32, 64, device="meta")),
        bad("shape [2]", "[N] = [1]", state_indices=offsets(1, 2)),
        bad("shape [1, 1]", "[N] = [1]", has_initial_state=torch.tensor([[True]])),
        bad(
            "a tensor with inputs that require grad",
            "torch.no_grad()",
            of="state_pool",
            q=zeros(1, 70, 2, 32).requires_grad_(),
        ),
        bad(
            "a tensor with inputs that require grad", "torch.no_grad()", state_pool=zeros(4, 2, 32, 64).requires_grad_()
        ),
        shared("state_pool", out=lambda c: first_elements(c["state_pool"], 1, 70, 2, 64)),
        mistyped("dtype torch.float16", "float32 or bfloat16", state_pool=zeros(4, 2, 32, 64, dtype=FP16)),
        mistyped("dtype torch.int16", "int32 or int64", state_indices=offsets(1).short()),
        mistyped("dtype torch.int64", "bool", has_initial_state=offsets(1)),
        mistyped("bool", "a torch.Tensor", has_initial_state=True),
    ],
    (CHUNK, "checkpoint"): [
        bad("None with checkpoint_offsets", "both", checkpoint_indices=None),
        bad("None with checkpoint_indices", "both", checkpoint_offsets=None),
        bad("shape [2]", "[N] = [1] or [N, M]", checkpoint_offsets=offsets(16, 32)),
        bad("shape [1]", "... [1, 1]", of="checkpoint_indices", checkpoint_offsets=offsets(16)[None]),
        *(
            bad(
                f"{M} checkpoints",
                "1 to 8",
                of="checkpoint_offsets",
                **dict.fromkeys(("checkpoint_offsets", "checkpoint_indices"), offsets(*[0] * M)[None]),
            )
            for M in (0, 9)
        ),
        mistyped("dtype torch.float32", "int32 or int64", checkpoint_offsets=zeros(1)),
        shared("state_pool", checkpoint_states=lambda c: c["state_pool"]),
        bad("a number with checkpoint_offsets", "one of the two", checkpoint_every=64, checkpoint_states=ROWS_K_FIRST),
    ],
    # ---- buffers of the caller's
    (FORWARD, "final"): [
        bad("shape [1, 2, 64, 32]", "[N, HV, K, V] = [1, 2, 32, 64]", final_state=zeros(1, 2, 64, 32)),
        bad("shape [1, 2, 32, 64]", "[N, HV, V, K] = [1, 2, 64, 32]", of="final_state", state_v_first=True),
        bad("shape [2, 2, 32, 64]", "... [1, 2, 32, 64]", final_state=zeros(2, 2, 32, 64)),
        bad("shape [2, 32, 64]", "... (rank 4)", final_state=zeros(2, 32, 64)),
        bad("strides (4096, 1, 128, 2)", "a contiguous tensor", final_state=zeros(1, 32, 64, 2).permute(0, 3, 1, 2)),
        bad(
            "strides (4096, 0, 64, 1)",
            "a contiguous tensor",
            final_state=zeros(1, 2, 32, 64)[:, :1].expand(1, 2, 32, 64),
        ),
        bad("device meta", "q's device cpu", final_state=zeros(1, 2, 32, 64, device="meta")),
        mistyped("dtype torch.float16", "float32 or bfloat16", final_state=zeros(1, 2, 32, 64, dtype=FP16)),
        *no_tensors("final_state"),
        shared("out", of="final_state", **sharing("out", 1, 70, 2, 64)),
        shared("v", final_state=lambda c: first_elements(c["v"], 1, 2, 32, 64)),
        shared("initial_state", final_state=lambda c: c["final_state"], initial_state=lambda c: c["final_state"]),
        bad("a tensor with state_pool", "None", **POOL_OF_ONE | {"final_state": zeros(1, 2, 32, 64)}, of="final_state"),
        bad("a tensor with inputs that require grad", "None, or torch.no_grad()", of="final_state", q=NEEDS_GRAD),
        bad("a tensor that requires grad", "None", final_state=zeros(1, 2, 32, 64).requires_grad_()),
    ],
    (CHUNK, "buffer"): [
        bad("None with checkpoint_offsets", "both", checkpoint_indices=None),
        bad("shape [24, 2, 64, 32]", "[rows, HV, K, V] = [24, 2, 32, 64]", checkpoint_states=ROWS),
        bad("shape [4, 2, 32, 64]", "[rows, HV, V, K] = [4, 2, 64, 32]", of="checkpoint_states", state_v_first=True),
        bad("shape [2, 32, 64]", "... rank 4", checkpoint_states=zeros(2, 32, 64)),
        bad(
            "strides (8192, 4096, 128, 2)", "dense last 3 dimensions", checkpoint_states=zeros(4, 2, 32, 128)[..., ::2]
        ),
        bad(
            "strides (0, 2048, 64, 1)",
            "... must not overlap",
            checkpoint_states=zeros(1, 2, 32, 64).expand(4, 2, 32, 64),
        ),
        bad("device meta", "q's device cpu", checkpoint_states=zeros(4, 2, 32, 64, device="meta")),
        mistyped("dtype torch.float16", "float32 or bfloat16", checkpoint_states=zeros(4, 2, 32, 64, dtype=FP16)),
        *no_tensors("checkpoint_states"),
        shared("initial_state", of="checkpoint_states", initial_state=lambda c: c["checkpoint_states"][:1]),
        shared("checkpoint_states", final_state=lambda c: c["checkpoint_states"][1:2]),
        bad("0 checkpoints", "at least 1", of="checkpoint_offsets", **marks([[]], [[]], torch.int64)),
        bad("a tensor with inputs that require grad", "None, or torch.no_grad()", of="checkpoint_states", q=NEEDS_GRAD),
        bad("a tensor that requires grad", "None", checkpoint_states=zeros(4, 2, 32, 64).requires_grad_()),
    ],
    (CHUNK, "regular"): [
        bad("1 rows", "at least B * ceil(T / checkpoint_every) = 2", checkpoint_states=zeros(1, 2, 32, 64)),
        bad("0 rows", "at least", of="checkpoint_states", checkpoint_every=128, checkpoint_states=zeros(0, 2, 32, 64)),
    ],
    # ---- recurrent_kda
    (DECODE, "plain"): [
        bad("shape [2, 1, 1, 32]", "[B, T, H, K] = [3, 1, 1, 32]", k=zeros(2, 1, 1, 32)),
        bad("K = 24", "K in ...64, 128, 256", of="q", **{name: lambda c, n=name: c[n][..., :24] for name in "qkg"}),
        bad("shape [3, 1, 1]", "[B, T, HV] = [3, 1, 2]", beta=zeros(3, 1, 1)),
        bad("'hopper'", "one that can run this call", backend="hopper"),
        bad("True with beta_is_logit=False", "...beta_is_logit=True", allow_neg_eigval=True, beta_is_logit=False),
        bad("shape [8, 1, 64, 32]", "... [8, 2, 64, 32]", initial_state=zeros(8, 1, 64, 32)),
        bad("shape [8, 2, 64, 32]", "[slots, HV, K, V] = [8, 2, 32, 64]", of="initial_state", state_v_first=False),
        bad("shape [2, 64, 32]", "... rank 4", initial_state=zeros(2, 64, 32)),
        bad("device meta", "q's device cpu", initial_state=zeros(8, 2, 64, 32, device="meta")),
        bad("strides (8192, 4096, 64, 2)", "dense last 3 dimensions", initial_state=zeros(8, 2, 64, 64)[..., ::2]),
        bad("strides (8192, 4096, 32, 1)", "dense last 3 dimensions", initial_state=zeros(8, 4, 64, 32)[:, ::2]),
        bad("strides (0, 2048, 32, 1)", "... overlap", initial_state=zeros(1, 2, 64, 32).expand(8, 2, 64, 32)),
        bad("shape [8, 2, 64, 32]", "[N, HV, V, K] = [3, 2, 64, 32]", of="initial_state", ssm_state_indices=None),
        bad("a tensor that requires grad", "torch.no_grad()", q=zeros(3, 1, 1, 32).requires_grad_()),
        bad("a tensor that requires grad", "torch.no_grad()", A_log=zeros(2).requires_grad_()),
        bad("shape [2]", "[N] = [3]", ssm_state_indices=offsets(1, 2)),
        bad("shape [3, 1]", "[N] = [3]", ssm_state_indices=offsets(1, 2, 3)[:, None]),
        bad("device meta", "q's device cpu", ssm_state_indices=offsets(1, 2, 3).to("meta")),
        bad("batch size 3", "batch size 1", of="q", cu_seqlens=offsets(0, 1, 2, 3)),
        bad("a tensor without num_spec_tokens", "num_spec_tokens too", num_accepted_tokens=offsets(1, 1, 1)),
        bad("a tensor without num_spec_tokens", "num_spec_tokens too", intermediate_states=zeros(8, 3, 2, 64, 32)),
        bad(
            "a tensor without intermediate_states",
            "intermediate_states too",
            intermediate_state_indices=offsets(0, 1, 2),
        ),
        bad("shape [3, 1, 2, 32]", "[B, T, HV, V] = [3, 1, 2, 64]", output=zeros(3, 1, 2, 32)),
        bad("shape [3, 2, 64]", "... (rank 4)", output=zeros(3, 2, 64)),
        bad("device meta", "q's device cpu", output=zeros(3, 1, 2, 64, device="meta")),
        bad("strides (256, 256, 128, 2)", "a dense last", output=zeros(3, 1, 2, 128)[..., ::2]),
        shared("v", output=lambda c: c["v"]),
        *no_flags("beta_is_logit"),
        mistyped("NoneType", "a torch.Tensor", q=None),
        mistyped("NoneType", "a torch.Tensor", g=None),
        *no_flags("allow_neg_eigval", "state_v_first", "update_state", value=None),
        mistyped("dtype torch.float16", "float32 or bfloat16", initial_state=zeros(8, 2, 64, 32, dtype=FP16)),
        mistyped("dtype torch.int16", "int32 or int64", ssm_state_indices=offsets(1, 2, 3).short()),
        mistyped("dtype torch.float32", "int32 or int64", ssm_state_indices=zeros(3)),
        mistyped("dtype torch.bfloat16", "torch.float32 or q's dtype", output=zeros(3, 1, 2, 64, dtype=BF16)),
    ],
    (DECODE, "T17"): [
        bad(
            "18 tokens a sequence",
            "at most 17",
            of="q",
            **{name: lambda c, n=name: torch.cat([c[n], c[n][:, :1]], dim=1) for name in ("q", "k", "v", "g", "beta")},
        ),
    ],
    (DECODE, "packed"): [
        bad("shape [1, 2]", "... rank 1", cu_seqlens=offsets(0, 3)[None]),
        bad("shape [3, 1, 2, 64]", "... [1, 3, 2, 64]", output=zeros(3, 1, 2, 64)),
    ],
    (DECODE, "no_state"): [
        bad("a tensor without initial_state", "initial_state too", ssm_state_indices=offsets(1)),
        bad("a number without initial_state", "initial_state too", num_spec_tokens=2),
        bad("False without initial_state", "initial_state too", update_state=False),
    ],
    (DECODE, "own_slots"): [
        shared("initial_state", output=lambda c: c["initial_state"].flatten()[-384:].view(3, 1, 2, 64)),
    ],
    # ---- speculative tokens
    (DECODE, "spec"): [
        *(bad(str(n), "1 to 16", num_spec_tokens=n) for n in (0, -1, 17)),
        bad("3 tokens a sequence", "1 + num_spec_tokens = 2", of="q", num_spec_tokens=1),
        bad("shape [3, 3]", "[N] = [3]", of="ssm_state_indices", num_spec_tokens=None, num_accepted_tokens=None),
        bad("None", "... [3, 3] (num_spec_tokens needs it)", ssm_state_indices=None),
        bad("shape [3, 2]", "... [3, 3]", ssm_state_indices=lambda c: c["ssm_state_indices"][:, :2]),
        bad("shape [3]", "... [3, 3]", ssm_state_indices=offsets(1, 2, 3)),
        bad("shape [2]", "[N] = [3]", num_accepted_tokens=offsets(1, 1)),
        bad(
            "a tensor with initial_state_source",
            "one of the two",
            of="num_accepted_tokens",
            initial_state_source=lambda c: c["initial_state"],
            initial_state_indices=offsets(0, 1, 2),
        ),
        mistyped("2.0 (float)", "an int", num_spec_tokens=2.0),
        mistyped("True (bool)", "an int", num_spec_tokens=True),
        mistyped("dtype torch.float32", "int32 or int64", num_accepted_tokens=zeros(3)),
    ],
    (DECODE, "verify"): [
        bad("a tensor with update_state=False", "None (commit takes", num_accepted_tokens=offsets(1, 1, 1)),
        bad(
            "a tensor with update_state=True",
            "update_state=False",
            of="intermediate_states",
            update_state=True,
            ssm_state_indices=offsets(*range(9)).view(3, 3),
        ),
        bad("shape [8, 2, 2, 64, 32]", "... [8, 3, 2, 64, 32]", intermediate_states=zeros(8, 2, 2, 64, 32)),
        bad("shape [8, 3, 1, 64, 32]", "... [8, 3, 2, 64, 32]", intermediate_states=zeros(8, 3, 1, 64, 32)),
        bad("shape [8, 2, 64, 32]", "... multiple of 16] = [8, 3, 2, 144]", intermediate_states=zeros(8, 2, 64, 32)),
        bad("shape [8, 3, 132]", "... rank 5", intermediate_states=zeros(8, 3, 132)),
        mistyped("dtype torch.float64", "torch.float32", intermediate_states=zeros(8, 3, 2, 144).double()),
        bad(
            "2 rows",
            "one for each of the 3 sequences",
            of="intermediate_states",
            intermediate_states=zeros(2, 3, 2, 144),
            initial_state=zeros(3, 2, 64, 32),
            ssm_state_indices=None,
        ),
        bad(
            "strides (1728, 576, 288, 2)", "dense last 3 dimensions", intermediate_states=zeros(8, 3, 2, 288)[..., ::2]
        ),
        shared("initial_state", intermediate_states=ROWS.view(8, 3, 2, 64, 32), initial_state=ROWS),
        bad("shape [2]", "[N] = [3]", intermediate_state_indices=offsets(0, 1)),
        mistyped(
            "dtype torch.bfloat16", "initial_state's dtype", intermediate_states=zeros(8, 3, 2, 64, 32, dtype=BF16)
        ),
    ],
    (DECODE, "read_only"): [
        bad("True with update_state=False", "one of the two", output_final_state=True),
    ],
    # ---- a source pool
    (DECODE, "source"): [
        bad("None with initial_state_source", "both", initial_state_indices=None),
        bad("None with initial_state_indices", "both", initial_state_source=None),
        bad("shape [7, 1, 64, 32]", "... [7, 2, 64, 32]", initial_state_source=zeros(7, 1, 64, 32)),
        bad("shape [1]", "[N] = [3]", initial_state_indices=offsets(1)),
        bad("None with initial_state_source", "the pool", initial_state=None),
        shared("initial_state_source", output=lambda c: first_elements(c["initial_state_source"], 3, 1, 2, 64)),
    ],
    (DECODE, "verify_source"): [
        bad("a tensor with initial_state_source and update_state=False", "None", initial_state=zeros(8, 2, 64, 32)),
    ],
    # ---- q, k and v in one row
    (DECODE, "mixed"): [
        bad("a tensor with q", "one of the two", of="mixed_qkv", q=zeros(3, 1, 2, 32)),
        bad("None with mixed_qkv", "... tells the heads", initial_state=None),
        bad("shape [1, 3, 384]", "... rank 2", mixed_qkv=zeros(1, 3, 384)),
        bad("shape [3, 383]", "... K = 32 and HV * V = 256", mixed_qkv=zeros(3, 383)),
        bad("shape [3, 256]", "[N, 2 * H * K", mixed_qkv=zeros(3, 256)),
        bad("4 value heads", "a positive multiple of the 3 query/key heads", mixed_qkv=zeros(3, 448, dtype=BF16)),
        bad(
            "K = 48",
            "K in (1, 2, 4",
            initial_state=zeros(8, 4, 64, 48),
            mixed_qkv=zeros(3, 448, dtype=BF16),
            g=zeros(3, 192, dtype=BF16),
        ),
        mistyped("dtype torch.int32", "bfloat16, float16", mixed_qkv=lambda c: c["mixed_qkv"].int()),
        bad("a tensor that requires grad", mixed_qkv=lambda c: c["mixed_qkv"].clone().requires_grad_()),
        bad("shape [3, 127]", "[N, HV * K] = [3, 128]", g=zeros(3, 127)),
        bad("shape [2, 4]", "[N, HV] = [3, 4]", beta=zeros(2, 4)),
    ],
    (DECODE, "mixed_spec"): [
        bad("5 rows", "a multiple of", mixed_qkv=lambda c: c["mixed_qkv"][:5]),
    ],
    # ---- commit
    (COMMIT, "plain"): [
        bad("shape [2, 8, 4]", "... rank 4", initial_state=zeros(2, 8, 4)),
        bad("shape [6, 2, 8, 4]", "... rank 5", intermediate_states=zeros(6, 2, 8, 4)),
        bad("shape [6, 3, 2, 4, 8]", "... HV, V, K] = [6, 3, 2, 8, 4]", intermediate_states=zeros(6, 3, 2, 4, 8)),
        bad("shape [1]", "[N] = [4]", num_accepted_tokens=offsets(1)),
        bad("shape [1]", "[N] = [4]", intermediate_state_indices=offsets(1)),
        bad("'none'", "...'negative'", null_index="none"),
        bad("device meta", "initial_state's device cpu", num_accepted_tokens=offsets(1, 1, 1, 1).to("meta")),
        bad("strides (0, 32, 4, 1)", "... overlap", initial_state=zeros(1, 2, 8, 4).expand(6, 2, 8, 4)),
        shared("initial_state", of="intermediate_states", initial_state=lambda c: c["intermediate_states"][:, 0]),
        bad("shape [6, 0, 2, 8, 4]", "states of 1 to 17 tokens", intermediate_states=zeros(6, 0, 2, 8, 4)),
        bad("shape [6, 18, 2, 8, 4]", "states of 1 to 17 tokens", intermediate_states=zeros(6, 18, 2, 8, 4)),
        bad("shape [6, 3, 2, 20]", "...2 * K + V + 4 up to", intermediate_states=zeros(6, 3, 2, 20)),
        bad("shape [6, 3, 1, 32]", "... multiple of 16] = [6, 3, 2, 32]", intermediate_states=zeros(6, 3, 1, 32)),
        bad(
            "shape [6, 3, 2, 32]",
            "... multiple of 16] = [6, 3, 2, 48]",
            of="intermediate_states",
            state_v_first=False,
            initial_state=zeros(6, 2, 16, 4),
            intermediate_states=zeros(6, 3, 2, 32),
        ),
        mistyped("dtype torch.bfloat16", "torch.float32", intermediate_states=zeros(6, 3, 2, 32, dtype=BF16)),
        mistyped("dtype torch.float16", "float32 or bfloat16", initial_state=zeros(6, 2, 8, 4, dtype=FP16)),
        bad(
            "K = 3",
            "K in (1, 2, 4",
            of="initial_state",
            initial_state=zeros(6, 2, 8, 3),
            intermediate_states=zeros(6, 3, 2, 32),
        ),
        bad(
            "V = 12",
            "V in (1, 2, 4",
            of="initial_state",
            initial_state=zeros(6, 2, 12, 4),
            intermediate_states=zeros(6, 3, 2, 32),
        ),
        bad("'hopper'", "one that can run this call", backend="hopper"),
        *no_tensors("initial_state"),
        mistyped("NoneType", "a torch.Tensor", num_accepted_tokens=None),
        mistyped("NoneType", "a torch.Tensor", intermediate_states=None),
        mistyped(
            "dtype torch.bfloat16",
            "initial_state's dtype torch.float32",
            intermediate_states=zeros(6, 3, 2, 8, 4, dtype=BF16),
        ),
        mistyped("dtype torch.float32", "int32", num_accepted_tokens=zeros(4)),
    ],
    # ---- kda_prefill
    (PREFILL, "plain"): [
        bad("shape [2, 70, 64]", "[B, H, T, K], of rank 4", q=zeros(2, 70, 64)),
        bad("shape [1, 2, 71, 64]", "[B, H, T, K]", k=zeros(1, 2, 71, 64)),
        bad("shape [1, 2, 71, 64]", "[B, H, T, V]", v=zeros(1, 2, 71, 64)),
        bad("shape [1, 1, 70, 64]", "[B, H, T, K]", g=zeros(1, 1, 70, 64)),
        bad("shape [1, 70, 2]", "[B, H, T]", beta=zeros(1, 70, 2)),
        bad("strides (8960, 64, 128, 1)", "a contiguous tensor", v=zeros(1, 70, 2, 64).transpose(1, 2)),
        bad("device meta", "q's device cpu", k=zeros(1, 2, 70, 64, device="meta")),
        bad("(K, V, C) = (64, 64, 16)", "one of (64, 64, 32)", chunk_size=16),
        bad("'softplus'", "one of ('none', 'logsigmoid')", gate="softplus"),
        bad("'tf32'", "one of ('ieee', 'tf32x3')", precision="tf32"),
        bad("'cuda'", "one of", backend="cuda"),
        bad("'hopper'", "one that can run this call", backend="hopper"),
        bad("a tensor that requires grad", "torch.no_grad()", v=zeros(1, 2, 70, 64).requires_grad_()),
        mistyped("float", "a torch.Tensor", beta=1.0),
        mistyped("dtype torch.bfloat16", "float32", g=zeros(1, 2, 70, 64, dtype=BF16)),
        mistyped("dtype torch.float64", "float32", q=zeros(1, 2, 70, 64, dtype=torch.float64)),
        mistyped("64.0 (float)", "an int", chunk_size=64.0),
        mistyped("'1' (str)", "a float or None", scale="1"),
        mistyped("True (bool)", "a float or None", scale=True),
    ],
    # ---- kernels.chunk_bwd_wy_dqkg
    (WY, "plain"): [
        bad("shape [1, 70, 32]", "[B, T, H, K], of rank 4", q=zeros(1, 70, 32)),
        bad("shape [1, 70, 1, 32]", "[B, T, H, K] = [1, 70, 2, 32]", k=zeros(1, 70, 1, 32)),
        bad("3 value heads", "a positive multiple of the 2", v=zeros(1, 70, 3, 64)),
        bad("V = 48", "V in", v=zeros(1, 70, 2, 48)),
        bad("shape [1, 71, 2, 64]", "[B, T, HV, V]", v_new=zeros(1, 71, 2, 64)),
        bad("shape [1, 70, 2, 64]", "[B, T, HV, K]", g=zeros(1, 70, 2, 64)),
        bad("shape [1, 70, 1]", "[B, T, HV] = [1, 70, 2]", beta=zeros(1, 70, 1)),
        bad("shape [1, 70, 2, 32]", "[B, T, HV, chunk_size]", A=zeros(1, 70, 2, 32)),
        bad("shape [1, 2, 2, 64, 32]", "[B, NT, HV, K, V]", h=zeros(1, 2, 2, 64, 32)),
        bad("shape [1, 1, 2, 32, 64]", "[B, NT, HV, K, V]", dh=zeros(1, 1, 2, 32, 64)),
        bad("an empty tensor", cu_seqlens=offsets()),
        bad("16", "one of (32, 64)", chunk_size=16),
        bad("'fast'", "one of ('auto', 'hopper', 'triton', 'reference')", backend="fast"),
        bad("'hopper'", "one that can run this call (hopper: device", backend="hopper"),
        bad("a tensor that requires grad", v=zeros(1, 70, 2, 64).requires_grad_()),
        bad("device meta", "q's device cpu", dv=zeros(1, 70, 2, 64, device="meta")),
        mistyped("int", "a torch.Tensor", q=3),
        mistyped("dtype torch.float16", "q's", do=zeros(1, 70, 2, 64, dtype=FP16)),
        mistyped("dtype torch.bfloat16", "torch.float32", g=zeros(1, 70, 2, 32, dtype=BF16)),
        mistyped("dtype torch.float16", "torch.float32", h=zeros(1, 2, 2, 32, 64, dtype=FP16)),
        mistyped("dtype torch.float32", "int32", cu_seqlens=zeros(2)),
        mistyped("64.0 (float)", "an int", chunk_size=64.0),
        mistyped("True (bool)", "a float or None", scale=True),
        *no_flags("use_exp2"),
    ],
    # ---- the layer around attention
    (NORM, "heads"): [
        bad("shape [2, 9, 3, 16]", "[D0, D1, D2, V] = [2, 9, 3, 32]", z=zeros(2, 9, 3, 16)),
        bad("shape [9, 3, 32]", "... (rank 4)", z=zeros(9, 3, 32)),
        bad("shape [16]", "[V] = [32]", weight=zeros(16)),
        bad("shape [2, 9, 3, 0]", "a last dimension of 1 to 8192", x=zeros(2, 9, 3, 0)),
        bad("shape [1, 8193]", "a last dimension of 1 to 8192", x=zeros(1, 8193)),
        bad("device meta", "x's device cpu", weight=zeros(32, device="meta")),
        mistyped("dtype torch.float64", "float32, bfloat16 or float16", z=zeros(2, 9, 3, 32, dtype=torch.float64)),
        mistyped("dtype torch.float16", "torch.float32 or x's dtype", weight=zeros(32, dtype=FP16)),
        mistyped("dtype torch.int64", "bfloat16, float16, float32", x=zeros(2, 9, 3, 32, dtype=torch.int64)),
        mistyped("NoneType", "a torch.Tensor", x=None),
        mistyped("NoneType", "a torch.Tensor", weight=None),
        *no_tensors("x", "z", "weight"),
        bad("0.0", "a float from 1.18e-38 to 3.4e+38", eps=0.0),
        bad("nan", "a float from 1.18e-38 to 3.4e+38", eps=float("nan")),
        bad("1e+300", "a float from 1.18e-38 to 3.4e+38", eps=1e300),
        bad("1e-300", "a float from 1.18e-38 to 3.4e+38", eps=1e-300),
        bad(str(2**1024), "a float from 1.18e-38 to 3.4e+38", eps=2**1024),
        mistyped("'1' (str)", "a float", eps="1"),
        bad("'swish'", "one of ('sigmoid', 'silu')", activation="swish"),
        bad("None", "one of ('sigmoid', 'silu')", activation=None),
        bad("'cuda'", "one of", backend="cuda"),
    ],
    (CONVOLUTION, "plain"): [
        bad("shape [40, 24]", "[B, T, D], of rank 3", x=zeros(40, 24)),
        bad("shape [1, 40, 0]", "at least one channel", x=zeros(1, 40, 0)),
        bad("shape [12, 4]", "[D, W] = [24, 4] or [D, 1, W]", weight=zeros(12, 4)),
        bad("shape [24, 2, 4]", "...[D, 1, W] = [24, 1, 4]", weight=zeros(24, 2, 4)),
        bad("shape [24, 1]", "2 to 4 taps", weight=zeros(24, 1)),
        bad("shape [24, 5]", "2 to 4 taps", weight=zeros(24, 5)),
        bad("shape [12]", "[D] = [24]", bias=zeros(12)),
        bad("shape [1, 24, 3]", "[N, D, L] = [2, 24, 3]", initial_state=zeros(1, 24, 3)),
        bad("shape [2, 3, 24]", "[N, D, L] = [2, 24, 24]", initial_state=zeros(2, 3, 24)),
        bad("shape [2, 24, 5]", "the last W - 1 = 3 or W = 4 inputs of a channel", initial_state=zeros(2, 24, 5)),
        bad("batch size 2", "batch size 1 with cu_seqlens", of="x", cu_seqlens=offsets(0, 40)),
        bad("shape [2, 40, 12]", "[B, T, D] = [2, 40, 24]", out=zeros(2, 40, 12)),
        bad("strides (40, 1, 80)", "a dense last dimension", out=zeros(24, 2, 40).permute(1, 2, 0)),
        shared("x", out=lambda c: c["x"]),
        mistyped("dtype torch.bfloat16", "x's dtype torch.float32", out=zeros(2, 40, 24, dtype=BF16)),
        mistyped("dtype torch.float16", "torch.float32 or x's dtype", weight=zeros(24, 4, dtype=FP16)),
        mistyped("dtype torch.float16", "torch.float32 or x's dtype", initial_state=zeros(2, 24, 3, dtype=FP16)),
        mistyped("NoneType", "a torch.Tensor", weight=None),
        *no_tensors("x", "weight", "bias", "initial_state", "cu_seqlens", "state_pool", "out"),
        *no_flags("output_final_state"),
        bad("'gelu'", "one of ('silu', None)", activation="gelu"),
        bad("'zero'", "one of ('negative', 'non_positive')", null_index="zero"),
        bad("a tensor without state_pool", "state_pool too", state_indices=offsets(0, 1)),
        bad("None", "a tensor of shape [N] = [2] (state_pool needs it)", of="state_indices", **CONVOLUTION_POOL),
        bad(
            "a tensor with inputs that require grad",
            "one that takes no gradient, and None",
            of="out",
            out=zeros(2, 40, 24),
            weight=zeros(24, 4).requires_grad_(),
        ),
    ],
    (CONVOLUTION, "packed"): [
        mistyped("dtype torch.float32", "int32 or int64", cu_seqlens=zeros(7)),
        bad("shape [7, 1]", "[N + 1]", cu_seqlens=offsets(*range(7))[:, None]),
        bad("shape [6, 24, 3]", "[N, D, L] = [2, 24, 3]", of="initial_state", cu_seqlens=offsets(0, 7, 66)),
    ],
    (CONVOLUTION, "pool"): [
        bad("True with state_pool", "False (the pool receives the final states)", output_final_state=True),
        bad("a tensor with initial_state", "one of the two", of="state_pool", initial_state=zeros(6, 24, 3)),
        bad("shape [6, 24, 5]", "the last W - 1 = 3 or W = 4 inputs", state_pool=zeros(6, 24, 5)),
        bad("shape [5]", "[N] = [6]", state_indices=offsets(0, 1, 2, 3, 4)),
        bad(
            "strides (0, 3, 1)",
            "memory of its own for every element",
            state_pool=zeros(1, 24, 3).expand(6, 24, 3),
        ),
        shared("x", state_pool=lambda c: first_elements(c["x"], 6, 24, 3)),
        mistyped("dtype torch.int64", "bool", has_initial_state=offsets(0, 1, 2, 3, 4, 5)),
        bad(
            "a tensor with inputs that require grad",
            "torch.no_grad()",
            of="state_pool",
            weight=zeros(24, 4).requires_grad_(),
        ),
    ],
}

REFUSED_ON_REQUEST = {
    (CHUNK, "host offsets"): [
        bad("[0, 17, 18, 81, 82, 147]", "cu_seqlens' offsets", cu_seqlens_cpu=offsets(0, 17, 18, 81, 82, 147)),
    ],
    (FORWARD, "offsets"): [
        bad("first offset 3", "0", cu_seqlens=offsets(3, 40, 70)),
        bad("first offset -4", "0", cu_seqlens=offsets(-4, 40, 70)),
        bad("offsets that fall from 50 to 20", "... never fall", cu_seqlens=offsets(0, 50, 20, 70)),
        bad("last offset 71", "at most T = 70", cu_seqlens=offsets(0, 20, 71)),
        bad("offsets that fall from", "... never fall", cu_seqlens=offsets(0, 2**40, -(2**40), 2**62)),
    ],
    (FORWARD, "three"): [
        bad("index 4", "... 4 slots", state_indices=offsets(1, 4, 0)),
        bad("slot 1 again", "another slot", state_indices=offsets(1, 2, 1)),
        bad("slot 0 again", "another slot", state_indices=offsets(0, 2, 0)),
    ],
    (CHUNK, "three checkpoints"): [
        bad("index 9", "... 4 slots", of="checkpoint_indices", **marks((16, 0, 0), (9, 0, 0))),
        bad("slot 1 again", "another slot", of="checkpoint_indices", **marks((0, 0, 16), (0, 0, 1))),
        bad("slot 3 again", "another slot", of="checkpoint_indices", **marks((16, 0, 16), (3, 0, 3))),
        bad("offset 24 of sequence 0", "a multiple of 16", of="checkpoint_offsets", **marks((24, 0, 0), (3, 0, 0))),
        bad("offset -16 of sequence 0", "... rise", of="checkpoint_offsets", **marks((-16, 0, 0), (3, 0, 0))),
        bad("offset 32 of sequence 0", "... 20 tokens", of="checkpoint_offsets", **marks((32, 0, 0), (3, 0, 0))),
        bad(
            "16 after 32 in sequence 2",
            "... rise",
            of="checkpoint_offsets",
            **marks(((0, 0), (0, 0), (32, 16)), ((0, 0), (0, 0), (3, -1))),
        ),
    ],
    (CHUNK, "three in a buffer"): [
        bad("index 9", "... buffer's 4 rows", of="checkpoint_indices", **marks((16, 0, 0), (9, 0, 0))),
        bad("row 3 again", "another row", of="checkpoint_indices", **marks((16, 0, 16), (3, 0, 3))),
        bad("offset 24 of sequence 0", "a multiple of 16", of="checkpoint_offsets", **marks((24, 0, 0), (3, 0, 0))),
        bad("offset 32 of sequence 0", "... 20 tokens", of="checkpoint_offsets", **marks((32, 0, 0), (3, 0, 0))),
    ],
    (CHUNK, "packed in a buffer"): [
        bad("2 rows", "one for each of the 3 checkpoints", checkpoint_states=zeros(2, 2, 32, 64)),
    ],
    (DECODE, "plain"): [
        bad("index 8", "... 8 slots", ssm_state_indices=offsets(1, 8, 0)),
        bad("slot 1 again", "another slot", ssm_state_indices=offsets(1, 2, 1)),
    ],
    (DECODE, "packed"): [
        bad(
            "a sequence of 18 tokens",
            "at most 17",
            cu_seqlens=offsets(0, 1, 1, 1, 19),
            **{name: lambda c, n=name: c[n].repeat_interleave(8, dim=1) for name in ("q", "k", "v", "g", "beta")},
        ),
    ],
    (DECODE, "spec"): [
        bad("4", "1 to 3", num_accepted_tokens=offsets(1, 4, 1)),
    ],
    (DECODE, "verify"): [
        bad("row 3 again", "another row", ssm_state_indices=offsets(3, -1, 3)),
        bad("row 5 again", "another row", intermediate_state_indices=offsets(5, 0, 5)),
        bad("index 8", "... buffer's 8 rows", intermediate_state_indices=offsets(5, 0, 8)),
    ],
    (COMMIT, "plain"): [
        bad("4", "at most the 3 tokens of a row", num_accepted_tokens=offsets(2, 0, 4, 1)),
    ],
    (COMMIT, "records"): [
        bad("3", "at most the 1 tokens that row 1 has recorded", num_accepted_tokens=offsets(2, 3, 0, 1)),
        bad(
            "1",
            "at most the 0 tokens that row 5 ",
            num_accepted_tokens=offsets(1, 1, 1, 1),
            intermediate_state_indices=offsets(4, 1, 5, 3),
        ),
        bad("row 1 again", "another row", intermediate_state_indices=offsets(4, 1, 1, 3)),
        bad(
            "index 6",
            "... buffer's 6 rows",
            of="intermediate_state_indices",
            intermediate_state_indices=offsets(4, 1, 6, 3),
        ),
        bad("slot 4 again", "another slot", ssm_state_indices=offsets(4, 1, 4, -1)),
    ],
    (DECODE, "source"): [
        bad("index 7", "... 7 slots", initial_state_indices=offsets(1, 7, 1)),
    ],
    (CONVOLUTION, "packed"): [
        bad("offsets that fall", cu_seqlens=offsets(0, 7, 7, 8, 43, 42, 61)),
        bad("last offset 67", "at most T = 66", cu_seqlens=offsets(0, 7, 7, 8, 43, 59, 67)),
    ],
    (CONVOLUTION, "step"): [
        bad("slot 2 again", "another slot", state_indices=offsets(2, 0, -1, 2)),
        bad("index 6", "... 6 slots", state_indices=offsets(2, 0, 6, 4)),
    ],
    (WY, "packed"): [
        bad("offsets that fall", cu_seqlens=offsets(0, 20, 10, 148)),
        bad(
            "4 rows",
            "one for each of the 5 chunks",
            of="h",
            **{name: lambda c, n=name: c[n][:, :-1] for name in ("h", "dh")},
        ),
    ],
}
"""Refused where FLASHDELTA_CHECK=1 has values on the device read."""
