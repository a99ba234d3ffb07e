"""State pools, checkpoints and buffers of the caller's, interpreted: the truth, nothing written beside it, and by the portable
kernels the bits of plain calls put together by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashdelta as fd

from ..full import FULL
from ..gpu.calls import on_gpu, takes_hopper
from ..support import pools
from ..support.cases import BF16
from ..support.decoding import memory_of
from ..support.pools import PoolCase, as_recurrent, by_pieces, hold_pool, pool_call, pool_id

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("exact_products")]


POOLS = pools.PLAIN_POOLS + pools.CHECKPOINT_POOLS + pools.BUFFERS + pools.SPLITS


@pytest.mark.parametrize("pool_case", POOLS, ids=pool_id)
def test_chunk(pool_case: PoolCase):
    whole = pool_case in (pools.SPLITS if FULL else POOLS[::2] + pools.SPLITS)
    hold_pool(fd.chunk_kda, pool_call(pool_case) | {"backend": "triton"}, [] if whole else [by_pieces])


@pytest.mark.parametrize("pool_case", pools.PLAIN_POOLS, ids=pool_id)
def test_recurrent(pool_case: PoolCase):
    hold_pool(fd.fused_recurrent_kda, as_recurrent(pool_call(pool_case) | {"backend": "triton"}), [by_pieces])


ON_HOPPER = POOLS if FULL else POOLS[1::2] + pools.SPLITS[::2]  # in steps the others (`test_steps.py`)


@pytest.mark.parametrize("pool_case", [x for x in ON_HOPPER if takes_hopper(on_gpu(x.case))], ids=pool_id)
def test_chunk_on_hopper(pool_case: PoolCase):
    case = on_gpu(pool_case.case)
    heads = {} if case.H < case.HV and "gva" in pool_case.name else {"H": 1, "HV": 1}
    hold_pool(fd.chunk_kda, pool_call(replace(pool_case, case=replace(case, **heads)), BF16) | {"backend": "hopper"})


# ---- offsets that are wild ------------------------------------------------------------------------------------------


BAD_OFFSETS = [(0, 50, 20, 70), (0, 2**40, -(2**40), 2**62), (-4, 40, 710)]


@pytest.mark.parametrize(
    ("op", "values"),
    [*((fd.chunk_kda, values) for values in BAD_OFFSETS), (fd.fused_recurrent_kda, BAD_OFFSETS[1])],
    ids=lambda x: getattr(x, "__name__", str(x)),  # an address differs from worker to worker
)
def test_bad_offsets_and_indices_touch_nothing_outside(op, values: tuple[int, ...]):
    """The pool and `out` lie amid numbers that must stay."""
    N = len(values) - 1
    pool_case = replace(
        pools.PLAIN_POOLS[0],
        indices=(5, 2**40, -(2**62))[:N],
        marks=(16, 2**50, 48)[:N],
        mark_rows=(2**40, 1, 2)[:N],
        gap=8,
    )
    case = pool_case.case
    sequences = replace(pool_case, case=replace(case, lengths=(case.T, *(0,) * (N - 1)), HV=1))
    call = pool_call(sequences) | {"backend": "triton", "cu_seqlens": torch.tensor(values)}
    call = call if op is fd.chunk_kda else as_recurrent(call)
    guarded = torch.zeros(1, 70 + 140, 1, 64)
    memory = memory_of(call["state_pool"])
    before, pitch = memory.clone(), call["state_pool"].stride(0)
    op(**call, out=guarded[:, 70:140])
    assert guarded[:, :70].eq(0).all() and guarded[:, 140:].eq(0).all()
    changed = (memory != before).nonzero().flatten() - 64
    may_be = torch.tensor([5] if op is fd.fused_recurrent_kda else [1, 2, 5])
    assert torch.isin(changed // pitch, may_be).all()
    assert (changed % pitch < pitch - 8).all()
