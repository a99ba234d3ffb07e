"""Every backend with kernels, over the whole list of semantics, against the float64 reference: gates, options, lengths, memory
layouts, adversarial inputs, long calls; and what must hold to the bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
import torch

import flashdelta as fd

from ..support import scalar_decay
from ..support.cases import BF16, BOUNDED, BY_NAME, CASES, FP16, FP32, HARD_CASES, Case, case_id, named
from ..support.inputs import TOKEN_TENSORS, sequence_calls
from ..support.oracle import chunked_truth, same_bits
from . import calls
from .calls import KIMI, UNBOUNDED, assert_same_bits, gpu_call, hold, on_gpu, poisoned

pytestmark = pytest.mark.gpu

SOME = named(
    *("T1", "T65", "chunk32", "decay", "decay_promised", "softplus", "bounded", "wide_gate", "beta_double"),
    *("gva4", "state_v_first", "state_bf16", "packed", "packed_chunk32", "packed_unused", "fused", "h"),
)
INTERPRETED = {
    *("softplus_no_bias", "bounded_bare", "bound_half", "logsigmoid_promised", "wide_decay", "V32_unsafe", "h"),
    *("chunk32_unsafe", "packed_bf16_state", "fused_packed", "tokens_innermost", "state_bf16_v_first", "final_v_first"),
}
"""Cases that `tests/gluon` has alone: kernels of their own for what others have in other combinations."""

# Heads, lengths and packing are run-time values: these compile nothing new.
RATIOS = [(1, 1), (2, 2), (4, 4), (2, 4), (3, 6), (2, 8), (1, 8), (12, 12)]
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 127, 131, 257, 1021)
CHUNKS_OF_H = [(200,), (1,) * 300, (100, 0, 300), (64,) * 20]
"""Where the chunks of a sequence start in `h` depends on all sequences before it; 300 are more than one block."""

LAYOUTS = {
    "fused": {"layout": "fused", "H": 8, "HV": 8},  # rows a multiple of 16 bytes long, as a model's are
    "fused, grouped heads": {"layout": "fused", "H": 4, "HV": 8},
    "fused, odd rows": {"layout": "fused", "H": 3, "HV": 3},
    "one element off": {"layout": "odd_offset"},
    "padded rows": {"layout": "padded"},
    "padded rows, fp32 gate": {"layout": "padded", "wide_gate": True},
    "head first": {"layout": "head_first"},
    "head first, fp32 gate": {"layout": "head_first", "wide_gate": True},
    "one head for all": {"layout": "expanded"},
    "tokens innermost": {"layout": "tokens_innermost"},
}


BETWEEN = {"lengths": (65, 0, 3, 130), "unused": 2, "state": FP32, "v_first": True}
EXACT = replace(UNBOUNDED, name="exact", gate="none", beta="value")
BOTH_PATHS = [
    *(replace(KIMI, name=f"bounded, {hard}", hard=hard, T=130) for hard in ("zero_rows", "beta_saturated", "raw_1000")),
    *(replace(UNBOUNDED, name=f"unbounded, {hard}", hard=hard, T=130) for hard in ("zero_rows", "beta_saturated")),
    *(
        replace(EXACT, name=f"{name}, {hard}", safe=safe, hard=hard, T=130)
        for name, safe in (("promised", True), ("any decay", False))
        for hard in ("g0", "g-5", "beta_to_2", "beta_zero")
    ),
    replace(KIMI, name="double logits", beta="double_logit", hard="beta_saturated", T=130),
    replace(KIMI, name="no L2 norm", l2norm=False, hard="pinned", T=130),
    Case("half bound", "", gate="lower_bound", lower_bound=-0.5, hard="pinned", K=128, V=128, T=130),
    Case("no parameters", "", has_A_log=False, has_dt_bias=False, hard="pinned", K=128, V=128, **BOUNDED),
]
LONG_AND_HARD = [
    replace(model, name=f"{model.name}, {hard}", hard=hard, T=4096, H=2, HV=2)
    for model, kinds in {
        KIMI: ("pinned", "key_norms"),
        UNBOUNDED: ("key_norms", "raw_1000"),
        EXACT: ("g_alternating", "g_mixed", "g-50", "forget_channels"),
    }.items()
    for hard in kinds
]


def each(
    what: str,
    models: Iterable[Case],
    changes: Iterable[dict] = ({},),
    ops: Iterable[Callable] = (fd.chunk_kda,),
    dtypes: Iterable[torch.dtype] = (BF16,),
) -> list:
    """Each of the models with each of the changes, as parameters of a test."""
    changed = [replace(model, **change) for model in models for change in changes]
    rows = [(n, *row) for n, row in enumerate(itertools.product(changed, ops, dtypes))]
    return [pytest.param(*row, id=f"{what} {n}: {row[0].name}, {row[1].__name__}, {row[2]}") for n, *row in rows]


TOKENS = (fd.fused_recurrent_kda,)
HEAD_DIMS = [{"K": K, "V": V} for V in (32, 64, 128, 256) for K in (V, 256 if V == 32 else V // 2)]
OTHER_DIMS = [
    {"K": K, "V": V, "H": 2, "HV": 4, "lengths": (100, 0, 1, 64, 150), **states}
    for K, V, states in (
        (128, 64, {"state": BF16, "v_first": True}),
        (64, 128, {"state": FP32}),
        (64, 64, {"state": BF16, "v_first": True}),
    )
]
PACKED_LENGTHS = {"lengths": (0, *LENGTHS, 0, 0, *reversed(LENGTHS), 0), "state": FP32, "v_first": True}
CALLS = [
    *each("table", [on_gpu(x) for x in CASES if x.name not in INTERPRETED], ops=calls.BOTH),
    *each("half", map(on_gpu, SOME[::2]), dtypes=[FP16], ops=calls.BOTH),
    *each("full", map(on_gpu, SOME[1::2]), dtypes=[FP32], ops=calls.BOTH),
    *each("hard", [on_gpu(x) for x in HARD_CASES if x.gate == "none" and x.beta == "value"], dtypes=(FP16, FP32)),
    *each("head dims", [replace(BY_NAME["state"], T=130)], HEAD_DIMS),
    *each("head dims, tokens", [replace(BY_NAME["state"], T=20)], HEAD_DIMS, TOKENS),
    *each("head dims, half", [replace(BY_NAME["decay"], T=130)], [{"K": 64, "V": 256}], dtypes=[FP16]),
    *each("head dims, full", [replace(BY_NAME["decay"], T=130)], [{"K": 256, "V": 256}], dtypes=[FP32]),
    *each("heads", calls.MODELS, [{"H": H, "HV": HV} for H, HV in RATIOS]),
    *each("heads, tokens", calls.MODELS, [{"H": H, "HV": HV, "T": 20} for H, HV in RATIOS], TOKENS),
    *each("lengths", calls.MODELS, [{"T": T, "B": 2} for T in LENGTHS]),
    *each("packed lengths", calls.MODELS, [PACKED_LENGTHS]),
    *each("packed lengths", [UNBOUNDED], [PACKED_LENGTHS], dtypes=[FP16, FP32]),
    *each("h", [replace(KIMI, state=FP32, h=True)], [{"lengths": lengths} for lengths in CHUNKS_OF_H]),
    *each("layout", [UNBOUNDED], [{"B": 2, "T": 130} | layout for layout in LAYOUTS.values()]),
    *each("layout, packed", [replace(KIMI, **BETWEEN)], [*LAYOUTS.values()][:5]),
    *each("other head dims", calls.MODELS, OTHER_DIMS),
    *each("both paths", BOTH_PATHS + LONG_AND_HARD),
]


@pytest.mark.parametrize(("case", "function", "dtype"), CALLS)
def test_results_are_the_reference(case: Case, function: Callable, dtype: torch.dtype, backend: str):
    calls.check(function, case, dtype, backend)


@pytest.mark.parametrize("case", [*map(on_gpu, scalar_decay.CASES)], ids=case_id)
def test_one_decay_per_head(case: Case, backend: str):
    calls.check_scalar_decay(case, BF16, backend)


# ---- NaN, and what else must not reach a neighbour ------------------------------------------------------------------


@pytest.mark.parametrize("name", [*TOKEN_TENSORS, "initial_state"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_stays_in_its_sequence(bad: float, name: str, op, backend: str):
    call = gpu_call(op, replace(KIMI, lengths=(17, 100, 35), state=FP32), BF16, backend)
    want_o, want_state = op(**call)
    spoiled = call | {name: call[name].clone()}
    if name == "initial_state":
        spoiled[name][1] = bad
    else:
        spoiled[name][:, 17:117] = bad
    o, state = op(**spoiled)
    for tokens, n in ((slice(0, 17), 0), (slice(117, 152), 2)):
        assert_same_bits((o, state[n]), (want_o, want_state[n]), tokens)
    assert not same_bits(o, want_o)


def test_auto_takes_the_hopper_kernels_on_hopper(model: Case):
    """Calls that the backend declines are skipped in this tier: that it takes these is a test. Which calls else it must take:
    `tests/unit/test_hopper_choice.py`."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("not a Hopper GPU")
    for lengths in (None, (64, 0, 17)):
        call = gpu_call(fd.chunk_kda, replace(model, lengths=lengths, state=FP32)) | {"backend": "auto"}
        assert fd.explain(fd.chunk_kda, **call).chosen == "hopper"


# ---- every tail of a chunk, and packed calls of random lengths ----------------------------------------------------

TAILS = tuple(chunks * 64 + tail for tail in range(65) for chunks in (0, 2))


@pytest.mark.parametrize("state", [None, FP32], ids=["fresh", "carried"])
def test_every_tail(state: torch.dtype | None, model: Case, backend: str):
    """Sequences of 0 to 64 and of 128 to 192 tokens in one packed call, and each as a call of its own."""
    # enough heads that rounding evens out at 8 tokens: see `tolerance_of`
    case = replace(model, H=8, HV=8, lengths=TAILS, state=state, v_first=True)
    call = gpu_call(fd.chunk_kda, case, BF16, backend)
    results, want = poisoned(call), chunked_truth(call)
    hold(call, results, want)
    calls.hold_each(call, results, want)
    assert_same_bits(results, calls.joined(poisoned(one) for one in sequence_calls(call)))


# ---- what must hold to the bit: repeats, splits, neighbours, absent states ----------------------------------------

UNEVEN = (65, 0, 300, 1, 130)


def test_a_packed_sequences_bits_are_its_own(model: Case, op, backend: str):
    """Alone and unpacked it gives the same bits, so nothing else in the batch matters."""
    call = gpu_call(op, replace(model, lengths=UNEVEN, state=FP32), BF16, backend)
    assert_same_bits(op(**call), calls.joined(op(**one) for one in sequence_calls(call)))


def test_a_batch_rows_bits_are_its_own(model: Case, op, backend: str):
    call = gpu_call(op, replace(model, B=3, T=150), BF16, backend)
    rows = [2, 0]
    picked = call | {name: call[name][rows] for name in TOKEN_TENSORS}
    assert_same_bits(op(**picked), [x[rows] for x in op(**call)])


# ---- adversarial inputs at the models' head dimensions ------------------------------------------------------------


@pytest.mark.parametrize("case", HARD_CASES, ids=case_id)
def test_packed_with_states(case: Case, backend: str):
    lengths = (65, 0, 1, 130, 17) if case.T < 500 else (case.T, 0, 65)
    case = replace(case, K=128, V=128, lengths=lengths, state=FP32, v_first=True)
    call = gpu_call(fd.chunk_kda, case, BF16, backend)
    hold(call, fd.chunk_kda(**call), chunked_truth(call), calls.slack_of(case, call))


# ---- 64K tokens, and tensors of more than 2^31 elements -----------------------------------------------------------

LONG = [
    replace(KIMI, T=65_536),
    replace(UNBOUNDED, lengths=(65_536 - 1000, 0, 1000), state=FP32, v_first=True),
    *(replace(x, name=f"64K, {x.name}", T=65_536, H=2, HV=2, K=128, V=128) for x in named("no_decay", "pinned")),
]


INT32_LIMIT = 2**31


@pytest.mark.parametrize("case", LONG, ids=case_id)
@pytest.mark.usefixtures("much_memory")
def test_64k_tokens(case: Case, backend: str):
    call = gpu_call(fd.chunk_kda, case, BF16, backend)
    hold(call, fd.chunk_kda(**call), chunked_truth(call))


def _big(*shape: int, **kinds) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", **kinds)


@pytest.mark.usefixtures("much_memory")
def test_more_than_2_31_elements_in_a_tensor(backend: str):
    """270,000 tokens x 64 heads x 128: the second sequence crosses element 2^31, the third lies past it.

    Both must give the bits they give alone, where every offset is small, and the second is held against the truth.
    """
    H, K, lengths = 64, 128, (261_000, 2_333, 6_667)
    T = sum(lengths)
    assert lengths[0] * H * K < INT32_LIMIT < sum(lengths[:2]) * H * K
    small = gpu_call(fd.chunk_kda, replace(KIMI, H=H, HV=H, T=1), BF16, backend)
    call = small | {name: _big(1, T, H, K, dtype=BF16) for name in ("q", "k", "v", "g")}
    call["beta"] = _big(1, T, H, dtype=BF16)
    call["cu_seqlens"] = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    results = fd.chunk_kda(**call)
    for n in (1, 2):
        one = sequence_calls(call)[n]
        alone = one | {name: one[name].clone() for name in TOKEN_TENSORS}
        found = fd.chunk_kda(**alone)
        assert_same_bits(found, calls.of_sequence(call, results, n))
        if n == 1:
            hold(alone, found, chunked_truth(alone))
    assert results[1].isfinite().all()


@pytest.mark.usefixtures("much_memory")
def test_more_than_2_31_elements_of_state(op, backend: str):
    """2,100 sequences of one or two tokens, each with its state, as a decode batch has."""
    H, K, N = 64, 128, 2_100
    assert N * H * K * K > INT32_LIMIT
    lengths = tuple(1 + n % 2 for n in range(N))
    case = replace(KIMI, H=H, HV=H, lengths=lengths, v_first=True)
    call = gpu_call(op, case, BF16, backend)
    call["initial_state"] = _big(N, H, K, K, dtype=FP32)
    results, each_alone = op(**call), sequence_calls(call)
    for n in (0, N // 2, N - 3, N - 2, N - 1):
        one = each_alone[n] | {"initial_state": each_alone[n]["initial_state"].clone()}
        found = op(**one)
        assert_same_bits(found, calls.of_sequence(call, results, n))
        hold(one, found, chunked_truth(one))
