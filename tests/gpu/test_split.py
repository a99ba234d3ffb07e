"""Split sequences on the GPU: truth, bits, CUDA graphs whose lengths change, pools with checkpoints."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashdelta as fd

from ..cases import BF16, BY_NAME, FP32, Case, case_id
from ..inputs import TOKEN_TENSORS
from ..oracle import assert_close, covered_tokens, one_rounding, poisoned_memory, same_bits, tolerance_of
from ..pools import memory_of, pool_truth
from .calls import CALLS_TO_A_PLAN, KIMI, UNBOUNDED, gpu_call, hold_each, lengths_between, on_gpu
from .test_pool import PREFILL, gpu_pool_call

pytestmark = pytest.mark.gpu

IRREGULAR = (1, 63, 64, 65, 0, 1009, 127, 640)
CASES = [
    replace(KIMI, name="kimi", lengths=IRREGULAR, state=FP32),
    replace(UNBOUNDED, name="unbounded", lengths=IRREGULAR, state=FP32, v_first=True),
    replace(KIMI, name="grouped", H=2, HV=6, lengths=(700, 64), state=BF16),
    replace(KIMI, name="rows", B=2, T=520),
    replace(KIMI, name="small_heads", K=64, V=64, T=777),
    replace(on_gpu(BY_NAME["decay"]), name="other_head_dims", T=400),
    replace(KIMI, name="h", T=500, h=True),
]


@pytest.mark.parametrize("parts", [2, 7, 64])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_split_is_the_recurrence(case: Case, parts: int, backend: str):
    call = gpu_call(fd.chunk_kda, case, backend=backend)
    whole = fd.chunk_kda(**call | {"split": False})
    for _ in range(CALLS_TO_A_PLAN):
        with poisoned_memory():
            found = fd.chunk_kda(**call | {"split": parts})
    exact = {
        name: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for name, x in call.items()
    }
    truth = fd.chunk_kda(**exact | {"backend": "reference"})
    if case.lengths:
        hold_each(call, found, truth)
    tokens = covered_tokens(call)
    for name, x, w, t in zip(("o", "final_state", "h"), found, whole, truth):
        if x is None:
            continue
        x, w, t = (y[:, tokens] if name == "o" else y for y in (x, w, t))
        assert_close(name, x, t, tolerance_of(call) + one_rounding(x.dtype))
        error, plain = ((y.double() - t).norm() / t.norm() for y in (x, w))
        assert error <= 1.2 * plain + 1e-6, f"{name}: error {error:.3g}, of whole sequences {plain:.3g}"


def test_split_repeats_to_the_bit(backend: str):
    call = gpu_call(fd.chunk_kda, CASES[0], backend=backend) | {"split": 5}
    first = fd.chunk_kda(**call)
    for _ in range(20):
        again = fd.chunk_kda(**call)
        assert same_bits(again[0][:, covered_tokens(call)], first[0][:, covered_tokens(call)])
        assert same_bits(again[1], first[1])


def test_forced_split_of_a_sequence_is_its_own(backend: str):
    """A forced split cuts each sequence by its own length, whatever is beside it."""
    call = gpu_call(fd.chunk_kda, replace(KIMI, lengths=(300, 500), state=FP32), backend=backend) | {"split": 3}
    o, final_state = fd.chunk_kda(**call)
    alone = call | {name: call[name][:, :300] for name in TOKEN_TENSORS}
    alone |= {"cu_seqlens": call["cu_seqlens"][:2], "initial_state": call["initial_state"][:1]}
    o_alone, final_alone = fd.chunk_kda(**alone)
    assert same_bits(o[:, :300], o_alone) and same_bits(final_state[:1], final_alone)


@pytest.mark.parametrize("parts", [2, 4])
def test_split_with_a_pool_and_checkpoints(parts: int, backend: str):
    call = gpu_pool_call(fd.chunk_kda, PREFILL, BF16, backend)
    true_o, true_pool = pool_truth(call)
    o, _ = fd.chunk_kda(**call, split=parts)
    tokens = covered_tokens(call)
    assert_close("o", o[:, tokens], true_o[:, tokens], tolerance_of(call))
    assert_close("pool", call["state_pool"], true_pool, tolerance_of(call) + one_rounding(call["state_pool"].dtype))
    assert memory_of(call["state_pool"]).isnan().any()  # canaries between the slots


def test_graph_replays_with_other_lengths(backend: str, no_synchronisation):
    lengths = lengths_between(3, 6, 400, empty=0.2)
    call = gpu_call(fd.chunk_kda, replace(KIMI, lengths=lengths, state=FP32), backend=backend) | {"split": 4}
    fd.chunk_kda(**call)
    graph = torch.cuda.CUDAGraph()
    with no_synchronisation():
        fd.chunk_kda(**call)
    with torch.cuda.graph(graph):
        captured = fd.chunk_kda(**call)
    total = sum(lengths)
    for cut in (0, total // 3, total):
        other = torch.tensor([0, cut, *[total] * (len(lengths) - 1)], device="cuda").to(call["cu_seqlens"].dtype)
        call["cu_seqlens"].copy_(other)
        graph.replay()
        found = tuple(x.clone() for x in captured[:2])
        again = fd.chunk_kda(**call)
        assert all(same_bits(x, y) for x, y in zip(found, again))
