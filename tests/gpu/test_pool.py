"""States in tensors of the caller's on the GPU: slots of pools, buffers of checkpoints and final states. Bits, truth, warmup,
and pools past 2^31 elements."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashdelta as fd

from ..support import pools
from ..support.cases import BF16, FP16, FP32
from ..support.oracle import as_recurrent, assert_close, one_rounding, same_bits
from ..support.pools import PoolCase, by_pieces, hold_pool, pool_call, pool_id
from .calls import KIMI, UNBOUNDED, case_and_dtype, in_turn, on_gpu, requested_bytes

pytestmark = pytest.mark.gpu

LENGTHS = (200, 0, 1, 130, 64)
PREFILL = pools.pooled(
    "prefill",
    "a mixed batch as an engine sends it",
    replace(KIMI, lengths=LENGTHS, state=FP32, v_first=True),
    (4, 7, -1, 0, 5),
    flags=(True, True, True, False, True),
    marks=((64, 144), (0, 0), (0, 0), (128, 0), (64, 0)),
    mark_rows=((1, 2), (0, 0), (0, 0), (3, 0), (6, 0)),
    slots=9,
    gap=256,
    index_dtype=torch.int32,
)
MODELS = [PREFILL, replace(PREFILL, name="unbounded", case=replace(UNBOUNDED, lengths=LENGTHS, state=FP32))]
BUFFERED = pools.buffered(
    "prefill_buffers",
    PREFILL.why,
    replace(PREFILL.case, final=False),
    marks=PREFILL.marks,
    mark_rows=((1, 2), (0, 0), (0, 0), (3, 0), (5, 0)),
    gap=256,
    states=BF16,
    final=FP32,
    index_dtype=torch.int32,
)
BUFFER_MODELS = [
    BUFFERED,
    replace(BUFFERED, name="prefill_every", marks=None, mark_rows=None, every=64, rows=9),
    replace(BUFFERED, name="prefill_fp32", states=FP32, final=BF16, case=replace(BUFFERED.case, v_first=False)),
    replace(BUFFERED, name="prefill_unbounded", case=replace(UNBOUNDED, lengths=LENGTHS, final=False)),
    replace(
        pools.BUFFERS_BY_NAME["every_h"],
        name="many_heads",
        why="stream-K: a sequence's rows come from CTAs that share it",
        case=replace(KIMI, H=96, HV=96, K=64, V=64, lengths=(300, 70, 200, 5), h=True, final=False, v_first=True),
        every=64,
        rows=12,
    ),
]


def gpu_pool_call(op, pool_case: PoolCase, dtype: torch.dtype, backend: str, seed: int = 0) -> dict:
    call = pool_call(replace(pool_case, case=on_gpu(pool_case.case)), dtype, "cuda", seed) | {"backend": backend}
    return call if op is fd.chunk_kda else as_recurrent(call)


def nearly(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Token by token only to the last bit, since there the compiler orders sums by how a state is aligned, and a state that is
    rounded every few tokens carries that on."""
    assert_close("", got, want, one_rounding(got.dtype))
    return True


def check(op, pool_case: PoolCase, dtype: torch.dtype, backend: str) -> None:
    """Also to the bit against plain calls: of models one for each piece, and of a pool without checkpoints one for all."""
    call = gpu_pool_call(op, pool_case, dtype, backend)
    ways = [by_pieces] if pool_case in MODELS + BUFFER_MODELS else []
    if pool_case.indices is not None and pool_case.marks is None and pool_case.rows is None:
        ways.append(pools.gathered_and_scattered)
    hold_pool(op, call, ways, same_bits if op is fd.chunk_kda else nearly)


INTERPRETED = {
    *("batch", "bf16", "flags_batch", "all_null", "no_slots", "no_sequences", "unbounded", "every_16", "at_the_end"),
    *("cut_batch", "cut_bf16", "every_64", "every_64_chunk32", "every_bf16", "every_longer", "every_no_rows"),
    *("every_gva", "every_unbounded", "at_offsets", "offsets_batch", "only_final_bf16", "split_every"),
}
"""Cases that `tests/gluon/test_pool.py` has alone: kernels of their own for what others here have in other combinations."""

POOLS = [
    x for x in pools.PLAIN_POOLS + pools.CHECKPOINT_POOLS + pools.BUFFERS + pools.SPLITS if x.name not in INTERPRETED
]


@pytest.mark.parametrize("pool_case", POOLS + MODELS + BUFFER_MODELS, ids=pool_id)
def test_chunk_bf16(pool_case: PoolCase, backend: str):
    check(fd.chunk_kda, pool_case, BF16, backend)


@pytest.mark.parametrize(
    ("pool_case", "dtype"),
    in_turn([pools.PLAIN_POOLS[3], PREFILL, pools.BUFFERS_BY_NAME["many_offsets"], BUFFER_MODELS[1]], FP16, FP32),
    ids=case_and_dtype,
)
def test_chunk_other_dtypes(pool_case: PoolCase, dtype: torch.dtype, backend: str):
    check(fd.chunk_kda, pool_case, dtype, backend)


@pytest.mark.parametrize("pool_case", [*pools.PLAIN_POOLS, *MODELS], ids=pool_id)
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


@pytest.mark.usefixtures("much_memory")
def test_more_than_2_31_elements_in_a_pool(op, backend: str):
    """The last slots lie past element 2^31; they give the bits that they give in a small pool."""
    H, slots = 64, 2_100
    case = replace(KIMI, H=H, HV=H, lengths=(70, 3, 5), state=FP32, v_first=True)
    near = replace(PREFILL, case=case, indices=(0, 1, 2), flags=None, marks=(64, 0, 0), mark_rows=(3, 0, 0), slots=4)
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
