"""Which calls the Hopper backend takes, why it declines the others, and what it launches: none of it needs a GPU."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import flashdelta as fd
from flashdelta import backends
from flashdelta.backends import build_hopper as build
from flashdelta.kernels.hopper.segments import split_layout
from flashdelta.program import launch
from flashdelta.program.launch import Launch
from flashdelta.program.workspace import in_slots
from flashdelta.runtime import warmup
from flashdelta.runtime.call import check

from ..full import thinned
from ..gluon.interpreter import hopper_on_cpu
from ..gpu.calls import KIMI, UNBOUNDED, on_gpu, takes_hopper
from ..gpu.test_pool import MODELS as POOL_MODELS
from ..support.cases import BF16, CASES, FP32, GATE_CASES, Case
from ..support.inputs import make_call, meta_call, on_meta
from ..support.oracle import as_recurrent
from ..support.pools import CHECKPOINT_POOLS, PLAIN_POOLS, pool_call

FP16 = torch.float16


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    has_capability(monkeypatch, (9, 0))


def has_capability(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None) -> None:
    monkeypatch.setattr(backends, "_cached_capability", lambda index: capability)


def verdict(call: dict, op=fd.chunk_kda, device: str = "cuda") -> backends.Verdict:
    explanation = fd.explain(op, **call, device=device)
    return next(v for v in explanation.verdicts if v.backend == "hopper")


# ---- what it takes --------------------------------------------------------------------------------------------------


def gates(dims: tuple[int, int], g_dtype: torch.dtype) -> list[dict]:
    calls = [meta_call(replace(case, K=dims[0], V=dims[1], wide_gate=False)) for case in GATE_CASES]
    return [call | {"g": call["g"].to(g_dtype)} for call in calls]


def models(model: Case) -> list[dict]:
    """Heads of a rank, groups, packed lengths, states of both layouts, and calls with gradients."""
    heads = [
        {"H": H, "HV": HV, "T": 8192} for H, HV in ((1, 1), (6, 6), (12, 12), (96, 96), (2, 6), (16, 64), (12, 96))
    ]
    packed = [{"lengths": x, "state": FP32, "unused": 5} for x in ((0,), (1,) * 600, (131_072, 1024), (3000, 0, 1))]
    names, flags = ("state", "v_first", "final", "h"), itertools.product((None, FP32, BF16), *[(False, True)] * 3)
    states = [dict(zip(names, x)) for x in flags]
    calls = [meta_call(replace(model, **x)) for x in (*heads, *packed, *states, {"T": 1_048_576})]
    for beta, grad in itertools.product(("value", "logit", "double_logit"), ("q", "v", "beta")):
        call = meta_call(replace(model, beta=beta))
        calls.append(call | {grad: call[grad].requires_grad_(), "beta": call["beta"].float()})
    return calls


ON_GPU = [*filter(takes_hopper, map(on_gpu, CASES))]
POOLS = [
    replace(x, case=on_gpu(x.case)) for x in PLAIN_POOLS + CHECKPOINT_POOLS + POOL_MODELS if x.case.chunk_size == 64
]
TAKEN = {
    "cases": lambda: [on_meta(make_call(case, BF16)) for case in ON_GPU],
    "pools": lambda: [on_meta(pool_call(pool_case, BF16)) for pool_case in POOLS],
    **{f"gates {K} {V}": partial(gates, (K, V), x) for K, V, x in ((64, 128, FP32), (128, 64, BF16), (128, 128, BF16))},
    "bounded models": partial(models, KIMI),
    "models": partial(models, UNBOUNDED),
}


@pytest.mark.parametrize("kind", TAKEN)
def test_takes_what_models_call(kind: str):
    for call in TAKEN[kind]():
        found = fd.explain(fd.chunk_kda, **call, device="cuda")
        assert found.chosen == "hopper", found


# ---- what it declines, and in which words ---------------------------------------------------------------------------


def assert_declines(call: dict, reason: str, op=fd.chunk_kda, device: str = "cuda") -> None:
    found = verdict(call, op, device)
    assert not found.supported
    assert reason in found.reason
    assert fd.explain(op, **call, device=device).chosen != "hopper"


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)], ids=str)
def test_declines_other_gpus(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch):
    has_capability(monkeypatch, capability)
    assert_declines(meta_call(KIMI), f"compute capability {capability}; it runs on Hopper, (9, 0)")
    assert fd.explain(fd.chunk_kda, **meta_call(KIMI), device="cuda").chosen == "triton"
    with pytest.raises(ValueError, match=r"^backend must be .*\(hopper: compute capability.*; got 'hopper'"):
        fd.explain(fd.chunk_kda, **meta_call(KIMI), device="cuda", backend="hopper")


@pytest.mark.parametrize("capability", [(9, 0), (9, 4)])
def test_amd_gpus_are_left_to_the_reference(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch):
    """Which ROCm's PyTorch calls "cuda", with capabilities like those of Hopper."""
    has_capability(monkeypatch, capability)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    explanation = fd.explain(fd.chunk_kda, **meta_call(KIMI), device="cuda")
    assert explanation.chosen == "reference"
    assert all(not found.supported and "AMD" in found.reason for found in explanation.verdicts[:2])


def test_declines_what_is_not_there(monkeypatch: pytest.MonkeyPatch):
    assert_declines(meta_call(KIMI), "device type 'cpu'; it runs on NVIDIA Hopper GPUs", device="cpu")
    with monkeypatch.context() as patch:
        has_capability(patch, None)
        assert_declines(meta_call(KIMI), "no NVIDIA GPU on this machine")
    monkeypatch.setattr(backends, "has_triton", lambda: False)
    assert_declines(meta_call(KIMI), "Triton is not installed")


DECLINED = [
    ({"chunk_size": 32}, BF16, "chunk_size 32; it takes 64"),
    ({"H": 64, "HV": 64, "T": 2**23}, BF16, "more than 2^31 workspace rows"),
    *(({"K": K, "V": V}, BF16, f"K = {K}, V = {V}; it takes") for K, V in ((32, 64), (128, 32), (256, 128), (64, 256))),
    *(({}, dtype, f"dtype {dtype}; it computes in bfloat16") for dtype in (FP16, FP32, torch.float64)),
]


@pytest.mark.parametrize(("changes", "dtype", "reason"), DECLINED)
def test_declines_other_sizes_and_dtypes(changes: dict, dtype: torch.dtype, reason: str):
    assert_declines(meta_call(replace(KIMI, **changes), dtype), reason)


def test_declines_the_token_recurrence_but_for_one_token():
    several = as_recurrent(meta_call(KIMI))
    assert_declines(several, "several tokens per sequence; token by token it takes one", fd.fused_recurrent_kda)
    one = as_recurrent(meta_call(replace(KIMI, T=1, lengths=None, state=FP32)))
    assert_declines(one, "states in torch.float32, K first; it takes bfloat16, V first", fd.fused_recurrent_kda)
    state = torch.empty(one["q"].shape[0], one["v"].shape[2], 128, 128, dtype=torch.bfloat16, device="meta")
    taken = one | {"initial_state": state, "state_v_first": True}
    assert verdict(taken, fd.fused_recurrent_kda).supported


# ---- what it launches -----------------------------------------------------------------------------------------------


def launched(call: dict) -> tuple[list, tuple[Tensor, ...]]:
    """The launches of a call on the CPU's memory (they are not run), and its inputs."""
    problem, t = check(fd.chunk_kda, **call)
    launches, t = build(problem, t, 90).launches, in_slots(t)
    return launches, (t.q, t.k, t.v, t.g, t.beta)


def read(launch, *names: str) -> list:
    by_name = dict(zip((param.name for param in launch.kernel.params), launch.arguments))
    return [by_name[name] for name in names]


FUSED = {"layout": "fused", "H": 8, "HV": 8}
READ = [(FUSED | {"B": 1, "lengths": (30, 40)}, False), (FUSED | {"H": 3, "HV": 3}, True)]
READ += [({"layout": x}, x in ("odd_offset", "padded")) for x in ("head_first", "expanded", "odd_offset", "padded")]


@pytest.mark.parametrize(("changes", "copied"), READ, ids=str)
def test_what_is_aligned_is_read_in_place(changes: dict, copied: bool):
    """Slices of a model's fused projection are; what no 16-byte copy can read is copied first."""
    (*copies, prepare, _), inputs = launched(make_call(replace(KIMI, **{"B": 2} | changes), BF16))
    assert len(copies) == copied
    assert [x.data_ptr() != y.data_ptr() for x, y in zip(read(prepare, "q", "k"), inputs)] == [copied] * 2


def test_rows_of_a_batch_may_be_any_distance_apart():
    """Kernels take strides as int32: where one does not fit a copy is read, and one row has none."""
    one = make_call(replace(KIMI, B=1), BF16)
    for name in ("q", "k", "v", "g", "beta"):
        one[name] = one[name].as_strided(one[name].shape, (2**40, *one[name].stride()[1:]))
    (prepare, recurrence), inputs = launched(one)
    assert read(prepare, "q_batch", "k_batch", "g_batch", "beta_batch") == [0, 0, 0, 0]
    assert read(recurrence, "v_batch") == [0]
    assert [x.data_ptr() for x in read(prepare, "q", "k", "g", "beta")] == [inputs[i].data_ptr() for i in (0, 1, 3, 4)]

    two = meta_call(replace(KIMI, B=2), BF16)
    dense = {name: two[name].stride(0) for name in ("q", "k", "g", "beta")}
    for name, far in (("q", 2**34), ("k", 2**34 - 8), ("g", 2**40), ("beta", 2**31)):
        two[name] = torch.empty_strided(two[name].shape, (far, *two[name].stride()[1:]), dtype=BF16, device="meta")
    (*_, prepare, _), _ = launched(two)
    found = read(prepare, "q_batch", "k_batch", "g_batch", "beta_batch")
    assert found == [dense["q"] // 8, 2**31 - 1, dense["g"] // 8, dense["beta"]]


@pytest.mark.parametrize("T", [1024, 8192])
def test_what_a_batch_must_not_decide_restarts_nowhere(T: int):
    call = meta_call(replace(KIMI, H=4, HV=4, T=T, lengths=(T,)))
    for options in (
        {},
        {"batch_invariant": True},
        {"split": 3},
        {"split": False},
        {"return_intermediate_states": True},
    ):
        problem, t = check(fd.chunk_kda, **call | options)
        assert ("forgets" in split_layout(problem, t.device)) == (options == {})


def test_explain_says_where_sequences_may_restart():
    call = make_call(replace(KIMI, H=1, HV=1), BF16)
    with hopper_on_cpu():
        said = [str(fd.explain(fd.chunk_kda, **call, batch_invariant=x)) for x in (False, True)]
    assert ["whole, but may restart" in x for x in said] == [True, False]


PROMPTS = replace(KIMI, H=16, HV=16, lengths=(40,) * 200, state=FP32)
MANY_HEADS = replace(PROMPTS, H=32, HV=32)
DENSE = replace(PROMPTS, lengths=None, B=200)
INVARIANT = ({"batch_invariant": True}, {"split": False})


@pytest.mark.parametrize(
    ("case", "options", "once"),
    [
        (PROMPTS, {}, True),
        (replace(PROMPTS, lengths=(128,) * 16), {}, True),
        (replace(PROMPTS, lengths=(128,) * 15), {}, False),
        (replace(PROMPTS, lengths=(129, *(40,) * 200)), {}, False),
        (MANY_HEADS, {}, True),
        (replace(MANY_HEADS, lengths=(65, *(40,) * 200)), {}, True),
        (replace(DENSE, T=128), {}, True),
        (replace(DENSE, T=129), {}, False),
        (replace(PROMPTS, lengths=()), {}, False),
        (replace(PROMPTS, K=64, V=64), {}, False),
        (replace(PROMPTS, h=True), {}, False),
        (replace(PROMPTS, gate="softplus", lower_bound=None), {}, False),
        # only the GPU knows lengths
        (PROMPTS, {"cu_seqlens_cpu": None}, False),
        # other bits than those of a call with few heads, but those of one with many
        *((PROMPTS, x, False) for x in INVARIANT),
        *((MANY_HEADS, x, True) for x in INVARIANT),
    ],
)
def test_batches_of_short_sequences_take_one_launch(case: Case, options: dict, once: bool):
    known = {} if case.lengths is None else {"cu_seqlens_cpu": torch.tensor([0, *case.lengths]).cumsum(0).int()}
    launches, _ = launched(meta_call(case, BF16) | known | options)
    assert ([x.kernel.__name__ for x in launches] == ["short_kernel"]) == once


POOLED = dict.fromkeys(("packed", "state_pool", "checkpoint_states"), (True,))
WARMED = [
    (fd.chunk_kda, {"head_dims": [(128, 128), (64, 128), (32, 32)], "has_initial_state": (True,)}),
    (fd.chunk_kda, POOLED | {"gate": "none", "lower_bound": None}),
    (fd.fused_recurrent_kda, {"state_v_first": True, "state_dtype": BF16}),
    *((fd.recurrent_kda, {"speculative": True, "state_v_first": True, "state_dtype": x}) for x in (BF16, FP32)),
    (fd.fused_kda_decode, {"speculative": True, "state_v_first": True}),
]
OTHER_SIZES = {"HEADS": (17, 64), "SEQUENCES": (3, 100), "LENGTHS": (1, 5000), "DRAFTS": (3, 5, 9, 17)}


@pytest.mark.parametrize(("capability", "sms"), thinned([((9, 0), 132), ((9, 0), 78), ((8, 0), 108)], 2))
@pytest.mark.parametrize(("op", "options"), WARMED)
def test_warmup_compiles_what_calls_of_other_sizes_launch(
    op, options: dict, capability: tuple[int, int], sms: int, monkeypatch: pytest.MonkeyPatch
):
    """As for a GPU that is not there: launches are made, and nothing is compiled."""
    gpu = SimpleNamespace(major=capability[0], minor=capability[1], multi_processor_count=sms)
    compiled: set[tuple] = set()
    has_capability(monkeypatch, capability)
    monkeypatch.setattr(warmup, "find_device", lambda name: torch.device("cuda", 0))
    monkeypatch.setattr(launch, "_properties", lambda device, target: target and gpu)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(Launch, "compile", lambda self: compiled.add(self._key(0)) if self.ctas > 0 else None)
    assert fd.warmup(op, **options) > 0
    before = {*compiled}
    assert len(before) > 2
    for name, sizes in OTHER_SIZES.items():
        monkeypatch.setattr(warmup, name, sizes)
    fd.warmup(op, **options)
    assert compiled == before
