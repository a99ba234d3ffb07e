"""State pools on the GPU: bits, truth, warmup, and pools past 2^31 elements."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashdelta as fd

from ..support.cases import BF16, FP32
from ..support.inputs import TOKEN_TENSORS
from ..support.oracle import assert_close, one_rounding, same_bits, tolerance_of
from ..support.pools import (
    CHECKPOINT_POOLS,
    PLAIN_POOLS,
    PoolCase,
    as_recurrent_pool,
    copied,
    gathered_and_scattered,
    hold_pool,
    piece_by_piece,
    pool_call,
    pool_id,
)
from .calls import KIMI, UNBOUNDED, compilations, on_gpu, requested_bytes

pytestmark = pytest.mark.gpu

PREFILL = PoolCase(
    name="prefill",
    why="a mixed batch as an engine sends it",
    case=replace(KIMI, lengths=(200, 0, 1, 130, 64), state=FP32, v_first=True),
    indices=(4, 7, -1, 0, 5),
    flags=(True, True, True, False, True),
    marks=((64, 144), (0, 0), (0, 0), (128, 0), (64, 0)),
    mark_slots=((1, 2), (0, 0), (0, 0), (3, 0), (6, 0)),
    slots=9,
    gap=256,
    index_dtype=torch.int32,
)
MODELS = [
    PREFILL,
    replace(PREFILL, name="unbounded", case=replace(UNBOUNDED, lengths=PREFILL.case.lengths, state=FP32)),
]


def gpu_pool_call(op, pool_case: PoolCase, dtype: torch.dtype, backend: str, seed: int = 0) -> dict:
    call = pool_call(replace(pool_case, case=on_gpu(pool_case.case)), dtype, "cuda", seed) | {"backend": backend}
    return call if op is fd.chunk_kda else as_recurrent_pool(call)


def nearly(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Token by token only to the last bit, since there the compiler orders sums by how a state is aligned, and a state that is
    rounded every few tokens carries that on."""
    known = want.isfinite()  # canaries around the slots are NaN
    assert_close("", got[known], want[known], one_rounding(got.dtype))
    return torch.equal(known, got.isfinite())


def check(op, pool_case: PoolCase, dtype: torch.dtype, backend: str) -> None:
    """Also to the bit against plain calls: one for each piece, and without checkpoints one for all."""
    call = gpu_pool_call(op, pool_case, dtype, backend)
    ways = [piece_by_piece] if "checkpoint_offsets" in call else [piece_by_piece, gathered_and_scattered]
    of_pool = tolerance_of(call) + one_rounding(call["state_pool"].dtype)
    hold_pool(op, call, tolerance_of(call), of_pool, ways, same_bits if op is fd.chunk_kda else nearly)


@pytest.mark.parametrize("pool_case", PLAIN_POOLS + CHECKPOINT_POOLS + MODELS, ids=pool_id)
def test_chunk_bf16(pool_case: PoolCase, backend: str):
    check(fd.chunk_kda, pool_case, BF16, backend)


@pytest.mark.parametrize("dtype", [torch.float16, FP32], ids=str)
@pytest.mark.parametrize("pool_case", [PLAIN_POOLS[3], CHECKPOINT_POOLS[1], *MODELS], ids=pool_id)
def test_chunk_other_dtypes(pool_case: PoolCase, dtype: torch.dtype, backend: str):
    check(fd.chunk_kda, pool_case, dtype, backend)


@pytest.mark.parametrize("pool_case", [*PLAIN_POOLS, *MODELS], ids=pool_id)
def test_recurrent_bf16(pool_case: PoolCase, backend: str):
    check(fd.fused_recurrent_kda, replace(pool_case, marks=None), BF16, backend)


# ---- how calls run --------------------------------------------------------------------------------------------------


def test_no_state_is_copied(backend: str):
    """512 sequences of one token in slots of a large pool: their states would take 128 MB."""
    case = replace(KIMI, lengths=(1,) * 512, state=FP32, v_first=True)
    pool_case = replace(PREFILL, case=case, indices=tuple(range(512)), flags=None, marks=None, slots=512)
    call = gpu_pool_call(fd.fused_recurrent_kda, pool_case, BF16, backend)
    call["out"] = torch.empty_like(call["v"])
    fd.fused_recurrent_kda(**call)
    _, _, peak = requested_bytes(lambda: fd.fused_recurrent_kda(**call))
    assert peak < 2**20


@pytest.mark.long
def test_warmup_compiles_all_that_pool_calls_need(op, backend: str):
    """Afterwards no call compiles: other heads, slots, pitches, and numbers of checkpoints."""
    checkpoints = {"checkpoints": (False, True)} if op is fd.chunk_kda else {}
    base = replace(PREFILL, case=replace(PREFILL.case, K=64, V=128, H=8, HV=16, offsets_dtype=torch.int32))
    one = tuple(row[0] for row in PREFILL.marks), tuple(row[0] for row in PREFILL.mark_slots)
    others = [
        base,
        replace(base, case=replace(base.case, H=1, HV=1)),
        replace(base, gap=16, flags=None),
        replace(base, slots=30, marks=None),
        replace(base, marks=one[0], mark_slots=one[1]),
    ]
    calls = [gpu_pool_call(op, pool_case, BF16, backend) for pool_case in others]
    options = {"backend": backend, "state_v_first": True, "packed": (True,), "state_pool": (True,)}
    fd.warmup(op, [(64, 128)], **options, **checkpoints)
    with compilations() as names:
        for call in calls:
            op(**call)
    assert names == []


@pytest.mark.usefixtures("much_memory")
def test_more_than_2_31_elements_in_a_pool(op, backend: str):
    """The last slots lie past element 2^31; they give the bits that they give in a small pool."""
    H, slots = 64, 2_100
    case = replace(KIMI, H=H, HV=H, lengths=(70, 3, 5), state=FP32, v_first=True)
    near = replace(PREFILL, case=case, indices=(0, 1, 2), flags=None, marks=(64, 0, 0), mark_slots=(3, 0, 0), slots=4)
    call = gpu_pool_call(op, replace(near, gap=0), BF16, backend)
    pool = torch.empty(slots, *call["state_pool"].shape[1:], device="cuda")
    assert pool.numel() > 2**31
    far = torch.tensor([slots - 1, slots - 40, slots - 2], device="cuda", dtype=torch.int32)
    pool[far.long()] = call["state_pool"][:3]
    there = call | {"state_pool": pool, "state_indices": far}
    if op is fd.chunk_kda:
        there["checkpoint_indices"] = torch.tensor([slots - 9, 0, 0], device="cuda", dtype=torch.int32)
    want, _ = op(**call)
    o, _ = op(**there)
    assert same_bits(o, want)
    assert same_bits(pool[far.long()], call["state_pool"][:3])
    if op is fd.chunk_kda:
        assert same_bits(pool[slots - 9], call["state_pool"][3])


def test_nan_stays_in_its_sequence(op, backend: str):
    """NaN in a sequence, in its slot, and in slots that no sequence reads."""
    call = gpu_pool_call(op, PREFILL, BF16, backend)
    clean = call | {"state_pool": copied(call["state_pool"])}
    want, _ = op(**clean)
    spoiled = call | {name: call[name].clone() for name in TOKEN_TENSORS}
    spoiled["v"][:, 201:331] = torch.nan  # the sequence in slot 0, with a checkpoint in slot 3
    spoiled["state_pool"][[0, 7, 8]] = torch.nan  # slot 0 is not read (its flag is False), 7 and 8 are no one's
    o, _ = op(**spoiled)
    assert same_bits(o[:, :201], want[:, :201])
    assert same_bits(o[:, 331:], want[:, 331:])
    others = [1, 2, 4, 5, 6]
    assert same_bits(spoiled["state_pool"][others], clean["state_pool"][others])
    assert spoiled["state_pool"][0].isnan().any()
