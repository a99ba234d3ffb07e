"""State pools, checkpoints and buffers of the Hopper prefill, interpreted: the truth, and nothing written beside it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashdelta as fd

from ..gpu.calls import on_gpu
from ..support.buffers import CASES, SPLITS, BufferCase, buffer_call, buffer_id, buffer_truth, untouched_rows
from ..support.cases import BF16
from ..support.oracle import (
    assert_close,
    covered_tokens,
    one_rounding,
    poisoned_memory,
    same_bits,
    tolerance_of,
)
from ..support.pools import (
    CHECKPOINT_POOLS,
    PLAIN_POOLS,
    PoolCase,
    memory_of,
    pool_call,
    pool_id,
    pool_truth,
    untouched_memory,
)

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
BUFFERS = [buffer_case for buffer_case in CASES + SPLITS if buffer_case.name in BUFFER_NAMES]


def run(call: dict) -> tuple[torch.Tensor, ...]:
    with poisoned_memory():
        return fd.chunk_kda(**call, out=torch.full(call["v"].shape, torch.nan, dtype=BF16), backend="hopper")


@pytest.mark.parametrize("pool_case", POOLS, ids=pool_id)
def test_pools(pool_case: PoolCase):
    call = pool_call(replace(pool_case, case=on_gpu(pool_case.case)), BF16)
    true_o, true_pool = pool_truth(call)
    pool, tokens, untouched = call["state_pool"], covered_tokens(call), untouched_memory(call)
    before = memory_of(pool).clone()
    o, final_state = run(call)
    assert final_state is None
    assert same_bits(memory_of(pool)[untouched], before[untouched])
    assert_close("o", o[:, tokens], true_o[:, tokens], tolerance_of(call))
    assert_close("pool", pool, true_pool, tolerance_of(call) + one_rounding(pool.dtype))


@pytest.mark.parametrize("buffer_case", BUFFERS, ids=buffer_id)
def test_buffers(buffer_case: BufferCase):
    call = buffer_call(replace(buffer_case, case=on_gpu(buffer_case.case)), BF16)
    want, tokens = buffer_truth(call), covered_tokens(call)
    buffer = call.get("checkpoint_states")
    if buffer is not None:
        before, untouched = memory_of(buffer).clone(), untouched_rows(call, want)
    results = run(call)
    assert results[1] is call.get("final_state")
    assert_close("o", results[0][:, tokens], want.o[:, tokens], tolerance_of(call))
    for name, wanted in (("checkpoint_states", want.buffer), ("final_state", want.final), ("state_pool", want.pool)):
        if name in call:
            assert_close(name, call[name], wanted, tolerance_of(call) + one_rounding(call[name].dtype))
    if buffer is not None:
        assert same_bits(memory_of(buffer)[untouched], before[untouched])
