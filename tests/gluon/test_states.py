"""State pools, checkpoints and buffers of the Hopper prefill, interpreted: the truth, and nothing written beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest

import flashdelta as fd

from ..gpu.calls import on_gpu
from ..support.cases import BF16
from ..support.pools import BUFFERS, CHECKPOINT_POOLS, PLAIN_POOLS, SPLITS, PoolCase, hold_pool, pool_call, pool_id

pytestmark = pytest.mark.slow

POOL_NAMES = {
    *("batch", "v_first_int32", "bf16", "non_positive", "flags", "gva", "no_slots", "no_tokens", "unbounded"),
    *("several", "at_the_end", "cut_batch", "cut_bf16", "bad_offsets"),
}
BUFFER_NAMES = {
    *("every_128_batch", "every_bf16", "every_too_few", "every_pool", "every_h", "many_offsets", "offsets_batch"),
    *("bad_offsets", "only_final_bf16", "no_sequences", "split_every", "split_offsets"),
}
POOLS = [pool_case for pool_case in PLAIN_POOLS + CHECKPOINT_POOLS if pool_case.name in POOL_NAMES]
POOLS += [pool_case for pool_case in BUFFERS + SPLITS if pool_case.name in BUFFER_NAMES]


@pytest.mark.parametrize("pool_case", POOLS, ids=pool_id)
def test_pools(pool_case: PoolCase):
    call = pool_call(replace(pool_case, case=on_gpu(pool_case.case)), BF16) | {"backend": "hopper"}
    hold_pool(fd.chunk_kda, call)
