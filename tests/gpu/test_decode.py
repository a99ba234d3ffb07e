"""`recurrent_kda` and `commit` on the GPU: truth, repeated calls, laws, drift beside FLA, warmup."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import flashdelta as fd

from ..support import decoding_checks as checks
from ..support.cases import BF16, FP32, case_id
from ..support.decoding import SINGLE_BF16, STEPS, Step, make_step
from ..support.oracle import same_bits
from .calls import CALLS_TO_A_REPLAY, case_and_dtype, check_late, hold_replay, in_turn, overlapping, whole_heads

pytestmark = pytest.mark.gpu

KIMI = Step("kimi", "as Kimi-K3 is served", K=128, V=128, H=4, HV=4, B=5, indices=(9, 2, 0, 7, 4), slots=12, gap=256)
MANY = replace(KIMI, B=70, indices=tuple(range(70)), slots=71)
DRAFTS = replace(KIMI, name="speculative", T=4, B=3, spec=3, indices=((0, 1, 2, 3), (4, 5, 6, 7), (11, 10, 9, 8)))
SPECULATIVE = replace(DRAFTS, accepted=(4, 2, 1))
VERIFY = replace(DRAFTS, name="verify", update=False, indices=(0, 5, -1), rows="slots", state=BF16)
REPLAY_OF_MANY = replace(VERIFY, name="many", B=70, T=8, spec=7, indices=tuple(range(70)), slots=71, gap=512)
MODELS = [
    KIMI,
    replace(KIMI, name="kimi_bf16", state=BF16),
    replace(KIMI, name="kimi_linear", gate="softplus", v_first=False),
    replace(KIMI, name="k_first_bf16", state=BF16, v_first=False),
    replace(KIMI, name="mixed_rows", layout="mixed_rows", H=2),
    replace(KIMI, name="K64", K=64, V=64, state=BF16),
    replace(KIMI, name="V64_wide", K=128, V=64),
    replace(MANY, name="many_fp32"),
    replace(MANY, name="many_bf16", state=BF16),
    replace(MANY, name="many_k_first", v_first=False),
    replace(MANY, name="many_k_first_bf16", state=BF16, v_first=False),
    replace(KIMI, name="packed", lengths=(1, 0, 3, 8, 1)),
    SPECULATIVE,
    VERIFY,
]


@pytest.mark.parametrize(("step", "dtype"), in_turn([*STEPS, *MODELS], BF16, FP32, BF16), ids=case_and_dtype)
def test_step(step: Step, dtype: torch.dtype, backend: str):
    checks.check_step(fd.recurrent_kda, step, dtype, backend, "cuda")


@pytest.mark.parametrize("step", [*SINGLE_BF16, MODELS[1]], ids=case_id)
def test_step_of_few_by_the_kernel_for_many(step: Step, other_backend: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("flashdelta.kernels.hopper.decode.DECODE_FEW", 0)
    checks.check_step(fd.recurrent_kda, step, BF16, other_backend, "cuda")


def test_no_allocation_with_output(backend: str):
    call = make_step(KIMI, BF16, "cuda") | {"backend": backend}
    output = torch.empty_like(call["v"])
    fd.recurrent_kda(**call, output=output)
    torch.cuda.synchronize()
    for _ in range(CALLS_TO_A_REPLAY + 1):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        fd.recurrent_kda(**call, output=output)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@overlapping
@pytest.mark.parametrize("before", [0, 511, -1, 2**30], ids=["a slot", "none of its slots", "no slot", "far outside"])
@pytest.mark.parametrize("N", [1, 64])
def test_indices_that_the_kernel_before_writes_late(N: int, before: int, backend: str):
    step = replace(KIMI, H=8, HV=8, B=64, slots=512, gap=0, indices=tuple(range(64)), state=BF16)
    call = make_step(step, BF16, "cuda") | {"backend": backend}
    call |= {name: call[name][:N] for name in ("q", "k", "v", "g", "beta")}

    def prepare(indices: torch.Tensor) -> Callable[[], list]:
        pool = call["initial_state"].clone()
        return lambda: [fd.recurrent_kda(**call | {"initial_state": pool, "ssm_state_indices": indices})[0], pool]

    check_late(prepare, torch.randperm(256, device="cuda")[:N].int() + 128, before)


@overlapping
@pytest.mark.parametrize("state", [FP32, BF16], ids=str)
@pytest.mark.parametrize("before", [0, -1, 2**30], ids=["a slot", "no slot", "far outside"])
def test_slots_of_a_commit_that_the_kernel_before_writes_late(before: int, state: torch.dtype, backend: str):
    N, S, HV = 64, 3, 2
    records = torch.randn(fd.replay_buffer(N, S, HV, 128, 128).shape, device="cuda")
    records[:, 0, :, checks.counts_of(128, 128)] = 1.0 + S
    pool = torch.randn(256, HV, 128, 128, device="cuda").to(state)
    rows, accepted = (x.int() for x in (torch.arange(N, device="cuda"), torch.full((N,), 1 + S, device="cuda")))

    def prepare(slots: torch.Tensor) -> Callable[[], list]:
        states, own = pool.clone(), records.clone()
        given = {"intermediate_state_indices": rows, "backend": backend}
        return lambda: [fd.commit(states, own, slots, accepted, **given), states][1:]

    check_late(prepare, torch.randperm(128, device="cuda")[:N].int() + 128, before)


REPLAYS = [
    *checks.REPLAYED,
    replace(VERIFY, name="kimi"),
    replace(VERIFY, name="kimi_fp32", state=FP32, gate="softplus", v_first=False),
    REPLAY_OF_MANY,
]


@pytest.mark.parametrize(("step", "dtype"), in_turn(REPLAYS, BF16, FP32, BF16), ids=case_and_dtype)
def test_a_replay_is_the_accepted_state(step: Step, dtype: torch.dtype, backend: str):
    checks.check_replay(step, dtype, backend, "cuda")


@pytest.mark.parametrize("step", checks.HOPPER_REPLAYED, ids=case_id)
def test_a_replay_for_hopper_is_the_accepted_state(step: Step, other_backend: str):
    """In bfloat16 alone, which Hopper's kernel takes."""
    checks.check_replay(step, BF16, other_backend, "cuda")


@pytest.mark.parametrize("step", checks.WHOLE_HEADS, ids=case_id)
def test_a_replay_of_whole_heads(step: Step, other_backend: str):
    with whole_heads():
        checks.check_replay(step, BF16, other_backend, "cuda")


ROUNDS = [{"K": 64, "state": state} | other for other, state in in_turn(checks.OTHER_ROUNDS, FP32, BF16)]
ROUNDS += [{"K": 64, "S": 16, "gate": gate} for gate in ("lower_bound", "softplus")]


@pytest.mark.parametrize("options", ROUNDS, ids=str)
def test_many_rounds_of_replay_are_steps_one_by_one(options: dict, backend: str):
    checks.check_rounds(200, backend, "cuda", dtype=BF16, **options)


@pytest.mark.parametrize("name", checks.RECORD_CHECKS)
def test_records(name: str, backend: str):
    checks.RECORD_CHECKS[name](backend=backend, device="cuda", K=128, dtype=BF16)


@pytest.mark.parametrize("state", [FP32, BF16], ids=str)
@pytest.mark.parametrize("heads", ["slices", "whole"])
def test_a_captured_round_replays_with_other_slots_and_counts(state: torch.dtype, heads: str):
    """Verification and commit in one graph."""
    with whole_heads() if heads == "whole" else contextlib.nullcontext():
        check_captured_round(state)


def check_captured_round(state: torch.dtype) -> None:
    step = replace(VERIFY, name="captured", state=state, indices=(0, 5, 7))
    call, records = make_step(step, BF16, "cuda"), checks.replay_buffer(step, "cuda")
    pool, slots, accepted = call["initial_state"], call["ssm_state_indices"], torch.ones_like(call["ssm_state_indices"])
    call |= {"intermediate_states": records, "output": torch.empty_like(call["v"])}

    def both() -> torch.Tensor:
        o, _ = fd.recurrent_kda(**call)
        fd.commit(pool, records, slots, accepted, state_v_first=step.v_first)
        return o

    def change(indices: tuple[int, ...], counts: tuple[int, ...]) -> None:
        for name in ("q", "k", "v", "g", "beta", "initial_state"):
            call[name].normal_()
        slots.copy_(torch.tensor(indices))
        accepted.copy_(torch.tensor(counts))

    for indices, counts in (((3, 1, 9), (4, 2, 1)), ((11, -1, 2), (3, 3, 5)), ((0, 0 - 2, 40), (1, 1, 1))):
        hold_replay(both, [pool], functools.partial(change, indices, counts))


@pytest.mark.usefixtures("much_memory")
def test_more_than_2_31_elements_in_a_pool(backend: str):
    """The last slots lie past element 2^31; they give the bits that they give in a small pool."""
    step = replace(KIMI, H=64, HV=64, B=3, indices=(0, 1, 2), slots=4, gap=0)
    call = make_step(step, BF16, "cuda") | {"backend": backend}
    pool = torch.empty(2_100, *call["initial_state"].shape[1:], device="cuda")
    assert pool.numel() > 2**31
    far = torch.tensor([2_099, 2_060, 2_098], device="cuda", dtype=torch.int32)
    pool[far.long()] = call["initial_state"][:3]
    want, _ = fd.recurrent_kda(**call)
    o, _ = fd.recurrent_kda(**call | {"initial_state": pool, "ssm_state_indices": far})
    assert same_bits(o, want)
    assert same_bits(pool[far.long()], call["initial_state"][:3])
