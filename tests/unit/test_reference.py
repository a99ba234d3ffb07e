"""The reference: its token recurrence against a numpy loop, its chunked form against its recurrence, autograd."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import flashdelta as fd

from ..fuzz import truth as truth_of_calls
from ..support.cases import BF16, BY_NAME, CASES, FP32, HARD_CASES, PACKED_CASES, Case, case_id, named
from ..support.gradients import gradients, incoming
from ..support.inputs import TOKEN_TENSORS, make_call, sequence_calls
from ..support.oracle import (
    TOLERANCE,
    as_recurrent,
    assert_close,
    assert_right,
    chunked_truth,
    conditioning,
    float64,
    same_bits,
    truth,
)

FP64 = torch.float64
both = pytest.mark.parametrize("op", [fd.chunk_kda, fd.fused_recurrent_kda])
NO_CASES = [case for case in CASES if case.tokens == 0 or case.sequences == 0]


# ---- the definition itself -----------------------------------------------------------------------------------------


def _numpy_decay(
    case: Case, g: np.ndarray, A_log: np.ndarray | None, dt_bias: np.ndarray | None, head: int
) -> np.ndarray:
    c: dict = {"gate": case.gate, "lower_bound": case.lower_bound, "g": torch.from_numpy(g)[None]}
    c["A_log"] = None if A_log is None else torch.from_numpy(A_log.reshape(-1)[head : head + 1])
    c["dt_bias"] = None if dt_bias is None else torch.from_numpy(dt_bias.reshape(case.HV, case.K)[head])
    return truth_of_calls.log_decay(c)[0].numpy()


def _numpy_beta(case: Case, x: float) -> float:
    return {"value": x, "logit": 1.0 / (1.0 + np.exp(-x)), "double_logit": 2.0 / (1.0 + np.exp(-x))}[case.beta]


def _numpy_kda(case: Case, call: dict) -> tuple[np.ndarray, np.ndarray]:
    """KDA as the paper writes it, one head and one token at a time. Shares no code with the library."""
    a = {name: x.double().numpy() for name, x in call.items() if isinstance(x, Tensor)}
    q, k, v, g, beta = (a[name] for name in TOKEN_TENSORS)
    offsets = a["cu_seqlens"].astype(int) if "cu_seqlens" in a else None
    scale = case.K**-0.5 if case.scale is None else case.scale
    o = np.zeros(v.shape)
    inner = (case.V, case.K) if case.v_first else (case.K, case.V)
    final = np.zeros((case.sequences, case.HV, *inner))
    for n in range(case.sequences):
        b, tokens = (n, range(case.T)) if offsets is None else (0, range(offsets[n], offsets[n + 1]))
        for head in range(case.HV):
            S = np.zeros((case.K, case.V))
            if "initial_state" in a:
                S = a["initial_state"][n, head].copy()
                S = S.T if case.v_first else S
            for t in tokens:
                q_t, k_t = (x[b, t, head // (case.HV // case.H)] for x in (q, k))
                if case.l2norm:
                    q_t, k_t = (x / np.sqrt((x * x).sum() + 1e-6) for x in (q_t, k_t))
                decay = _numpy_decay(case, g[b, t, head], a.get("A_log"), a.get("dt_bias"), head)
                S = np.exp(decay)[:, None] * S
                S = S + _numpy_beta(case, beta[b, t, head]) * np.outer(k_t, v[b, t, head] - k_t @ S)
                o[b, t, head] = scale * (q_t @ S)
            final[n, head] = S.T if case.v_first else S
    return o, final


@pytest.mark.parametrize("case", [c for c in CASES if c.tokens < 1000], ids=case_id)
def test_recurrence_is_the_papers(case: Case):
    call = make_call(case, FP64)
    o, final = (torch.from_numpy(x) for x in _numpy_kda(case, call))
    assert_right(fd.fused_recurrent_kda, as_recurrent(call), want=(o, final))


# ---- chunked = recurrent -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [FP64, FP32, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_chunked_is_the_recurrence(case: Case, dtype: torch.dtype):
    op = fd.chunk_kda if not case.h else _without_h
    assert_right(op, make_call(case, dtype), factor=conditioning(case, dtype))


def _without_h(**call):
    return fd.chunk_kda(**call)[:2]


@pytest.mark.parametrize("case", named("bounded", "packed", "state_bf16", "softplus", "g-50", "T0"), ids=case_id)
def test_recurrent_in_float32(case: Case):
    assert_right(fd.fused_recurrent_kda, as_recurrent(make_call(case, FP32)))


@both
@pytest.mark.parametrize("case", NO_CASES, ids=case_id)
def test_no_tokens(case: Case, op):
    """`o` is empty or covers no sequence; the final state is the initial one, but not the same memory."""
    call = make_call(case, FP32)
    call = call | {"return_intermediate_states": False} if op is fd.chunk_kda else as_recurrent(call)
    o, state = op(**call)
    assert o.shape == call["v"].shape
    assert state.shape[0] == case.sequences
    if "initial_state" in call:
        assert same_bits(state, call["initial_state"])
        assert state.data_ptr() != call["initial_state"].data_ptr()


# ---- states --------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("state", [None, FP32, BF16])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, FP32, FP64], ids=str)
def test_final_state_has_the_initial_states_dtype(op, dtype: torch.dtype, state: torch.dtype | None):
    call = as_recurrent(make_call(replace(BY_NAME["state"], state=state, T=3), dtype))
    _, final = op(**call)
    assert final.dtype == (state or (FP64 if dtype == FP64 else FP32))


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("chunk_size", [32, 64])
@pytest.mark.parametrize("T", [1, 64, 150])
def test_h_is_the_state_before_every_chunk(T: int, chunk_size: int, v_first: bool):
    case = replace(BY_NAME["h"], B=2, T=T, chunk_size=chunk_size, v_first=v_first)
    call = make_call(case, FP64)
    _, _, h = fd.chunk_kda(**call)
    assert h.shape == (2, -(-T // chunk_size), *call["initial_state"].shape[1:])
    for i in range(h.shape[1]):
        _, before = truth(call | {name: call[name][:, : i * chunk_size] for name in TOKEN_TENSORS})
        assert_close(f"h[:, {i}]", h[:, i], before, TOLERANCE[FP64])


@pytest.mark.parametrize("chunk_size", [32, 64])
@pytest.mark.parametrize("case", [c for c in PACKED_CASES if c.lengths], ids=case_id)
def test_packed_h_has_the_chunks_of_all_sequences_in_order(case: Case, chunk_size: int):
    case = replace(case, h=True, chunk_size=chunk_size)
    call = make_call(case, FP64)
    alone = [fd.chunk_kda(**one)[2] for one in sequence_calls(call)]
    want = torch.cat(alone, dim=1)
    _, _, h = fd.chunk_kda(**call)
    _, _, exact = fd.chunk_kda(**call, cu_seqlens_cpu=call["cu_seqlens"].cpu())
    assert h.shape[1] == case.tokens // chunk_size + case.sequences
    assert_close("h", h[:, : want.shape[1]], want, TOLERANCE[FP64])
    assert h[:, want.shape[1] :].eq(0).all()
    assert exact.shape == want.shape
    assert same_bits(exact, h[:, : want.shape[1]])


# ---- NaN stays in its sequence -------------------------------------------------------------------------------------

ISOLATED = {
    "side by side": replace(BY_NAME["B3"], T=40, H=1, HV=2),
    "packed": replace(BY_NAME["packed"], lengths=(17, 20, 0, 35), h=False, H=1, HV=2),
}


def _of_sequence(call: dict, name: str, x: Tensor, n: int) -> Tensor:
    """The part of `x`, shaped like the argument `name`, that belongs to sequence `n`."""
    if name == "initial_state" or "cu_seqlens" not in call:
        return x[n]
    start, stop = call["cu_seqlens"][n : n + 2].tolist()
    return x[0, start:stop]


@both
@pytest.mark.parametrize("name", [*TOKEN_TENSORS, "initial_state"])
@pytest.mark.parametrize("layout", ISOLATED)
def test_nan_stays_in_its_sequence(layout: str, name: str, op):
    call = as_recurrent(make_call(ISOLATED[layout], FP64))
    clean_o, clean_state = op(**call)
    poisoned = call | {name: call[name].clone()}
    _of_sequence(call, name, poisoned[name], 1).fill_(torch.nan)
    o, state = op(**poisoned)
    assert _of_sequence(call, "v", o, 1).isnan().any()
    for n in range(len(state)):
        if n != 1:
            assert same_bits(_of_sequence(call, "v", o, n), _of_sequence(call, "v", clean_o, n))
            assert same_bits(state[n], clean_state[n])


@both
@pytest.mark.parametrize("layout", ISOLATED)
def test_nan_gradients_stay_in_their_sequence(layout: str, op):
    call = as_recurrent(make_call(ISOLATED[layout], FP64))
    clean = gradients(call, *incoming(call), op)
    poisoned = call | {"v": call["v"].clone()}
    _of_sequence(call, "v", poisoned["v"], 1).fill_(torch.nan)
    grads = gradients(poisoned, *incoming(call), op)
    assert _of_sequence(call, "k", grads["k"], 1).isnan().any()
    for name in (*TOKEN_TENSORS, "initial_state"):
        for n in range(call["initial_state"].shape[0]):
            if n != 1:
                want = _of_sequence(call, name, clean[name], n)
                assert same_bits(_of_sequence(call, name, grads[name], n), want), name


# ---- gradients -----------------------------------------------------------------------------------------------------

GRADIENT_CASES = [
    case for case in CASES if 0 < case.tokens < 200 and case.layout == "dense" and not case.h and case not in NO_CASES
]


@pytest.mark.parametrize("case", GRADIENT_CASES, ids=case_id)
def test_gradients_of_chunked_and_recurrent_agree(case: Case):
    """Finite too, also where gates saturate and rows are zero."""
    call = make_call(case, FP64)
    chunked = gradients(call, *incoming(call))
    recurrent = gradients(as_recurrent(call), *incoming(call), fd.fused_recurrent_kda)
    for name, want in recurrent.items():
        assert_close(f"grad of {name}", chunked[name], want, 1e-9)


GRADCHECK_CASES = [
    *named(
        "decay", "decay_promised", "softplus", "bounded", "logsigmoid", "beta_double", "no_l2norm", "no_final_state"
    ),
    *named("gva2", "gva4", "state", "state_v_first", "packed", "packed_gva", "packed_unused", "fused"),
    *named("same_keys", "g_mixed"),
]


@both
@pytest.mark.parametrize("case", GRADCHECK_CASES, ids=case_id)
def test_gradcheck(case: Case, op):
    """Against finite differences of the forward, in a random direction (`fast_mode`), across a chunk boundary."""
    lengths = case.lengths and (5, 0, 30)
    case = replace(case, V=32, T=35, lengths=lengths, unused=3 * bool(case.unused), chunk_size=32, h=False)
    call = float64(make_call(case, FP64))
    call = call if op is fd.chunk_kda else as_recurrent(call)
    names = [name for name, x in call.items() if isinstance(x, Tensor) and x.is_floating_point()]

    def function(*tensors: Tensor) -> list[Tensor]:
        return [x for x in op(**call | dict(zip(names, tensors))) if x is not None]

    leaves = tuple(call[name].detach().clone().requires_grad_() for name in names)
    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


def test_gradients_have_their_inputs_dtypes():
    case = replace(BY_NAME["softplus"], state=BF16, wide_gate=True, T=5)
    call = make_call(case, BF16)
    for name, grad in gradients(call, *incoming(call)).items():
        assert grad.dtype == call[name].dtype, name
        assert grad.shape == call[name].shape, name
        assert grad.isfinite().all(), name


@pytest.mark.parametrize("case", HARD_CASES, ids=case_id)
def test_chunked_truth_is_the_truth(case: Case):
    """GPU tests compare long inputs with the chunked form in float64."""
    call = make_call(case, FP32)
    want, got = truth(call), chunked_truth(call)
    assert_close("o", got[0], want[0], TOLERANCE[FP64])
    assert_close("final_state", got[1], want[1], TOLERANCE[FP64])
