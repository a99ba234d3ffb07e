"""What must hold to the bit on the GPU: repeats, splits, neighbours, absent states."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import flashdelta as fd
from flashdelta.testing.cases import BF16, FP32, Case, case_id
from flashdelta.testing.inputs import narrow, sequence_calls
from flashdelta.testing.oracle import as_recurrent, same_bits

from .calls import BOTH, KIMI, UNBOUNDED, gpu_call

pytestmark = pytest.mark.gpu

MODELS = [KIMI, UNBOUNDED]
PACKED = (65, 0, 300, 1, 130)


@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("model", MODELS, ids=case_id)
def test_same_call_same_bits(model: Case, op, backend: str):
    call = gpu_call(op, replace(model, H=16, HV=32, lengths=(500, 3, 0, 700), state=FP32), BF16, backend)
    first = op(**call)
    for _ in range(5):
        for a, b in zip(op(**call), first):
            assert same_bits(a, b)


@pytest.mark.parametrize("model", MODELS, ids=case_id)
def test_a_hundred_calls_give_the_same_bits(model: Case, backend: str):
    """The second half while another stream keeps the device busy, so that programs run in another order."""
    lengths = (500, 3, 0, 700, 65, 64, 1)
    call = gpu_call(fd.chunk_kda, replace(model, H=8, HV=16, lengths=lengths, state=FP32, v_first=True), BF16, backend)
    want = fd.chunk_kda(**call)
    noise, beside = torch.randn(4096, 4096, device="cuda", dtype=BF16), torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    for repeat in range(100):
        if repeat >= 50:
            with torch.cuda.stream(beside):
                for _ in range(4):
                    torch.mm(noise, noise)
                    noise.clone()
        for a, b in zip(fd.chunk_kda(**call), want):
            assert same_bits(a, b), f"call {repeat}"
    torch.cuda.synchronize()


@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("model", MODELS, ids=case_id)
def test_a_packed_sequences_bits_are_its_own(model: Case, op, backend: str):
    """Alone and unpacked it gives the same bits, so nothing else in the batch matters."""
    call = gpu_call(op, replace(model, lengths=PACKED, state=FP32), BF16, backend)
    o, state = op(**call)
    alone = [op(**one) for one in sequence_calls(call)]
    assert same_bits(o, torch.cat([one[0] for one in alone], dim=1))
    assert same_bits(state, torch.cat([one[1] for one in alone]))


@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("model", MODELS, ids=case_id)
def test_a_batch_rows_bits_are_its_own(model: Case, op, backend: str):
    call = gpu_call(op, replace(model, B=3, T=150), BF16, backend)
    o, state = op(**call)
    rows = [2, 0]
    picked = call | {name: call[name][rows] for name in ("q", "k", "v", "g", "beta")}
    o_picked, state_picked = op(**picked)
    assert same_bits(o_picked, o[rows])
    assert same_bits(state_picked, state[rows])


@pytest.mark.parametrize("op", BOTH)
@pytest.mark.parametrize("packed", [False, True])
def test_no_state_and_zeros_give_the_same_bits(packed: bool, op, backend: str):
    call = gpu_call(op, replace(KIMI, lengths=PACKED if packed else None), BF16, backend)
    zeros = torch.zeros(len(PACKED) if packed else 1, 4, 128, 128, device="cuda")
    for a, b in zip(op(**call), op(**call, initial_state=zeros)):
        assert same_bits(a, b)


@pytest.mark.parametrize("model", MODELS, ids=case_id)
def test_split_at_a_chunk_boundary_gives_the_same_bits(model: Case, backend: str):
    """Chunked prefill with a float32 state."""
    call = gpu_call(fd.chunk_kda, replace(model, T=330), BF16, backend)
    o, state = fd.chunk_kda(**call)
    outputs, carried = [], None
    for start, stop in ((0, 128), (128, 192), (192, 330)):
        part, carried = fd.chunk_kda(**narrow(call, start, stop), initial_state=carried)
        outputs.append(part)
    assert same_bits(torch.cat(outputs, dim=1), o)
    assert same_bits(carried, state)


@pytest.mark.parametrize("model", MODELS, ids=case_id)
def test_decoding_in_one_call_or_token_by_token_gives_the_same_bits(model: Case, backend: str):
    call = gpu_call(fd.fused_recurrent_kda, replace(model, B=4, T=8), BF16, backend)
    o, state = fd.fused_recurrent_kda(**call)
    carried, outputs = None, []
    for t in range(8):
        part, carried = fd.fused_recurrent_kda(**narrow(call, t, t + 1), initial_state=carried)
        outputs.append(part)
    assert same_bits(torch.cat(outputs, dim=1), o)
    assert same_bits(carried, state)


def test_asking_for_a_state_changes_nothing_else(backend: str):
    call = gpu_call(fd.chunk_kda, KIMI, BF16, backend)
    want, _ = fd.chunk_kda(**call)
    o, none = fd.chunk_kda(**call | {"output_final_state": False})
    assert none is None
    assert same_bits(o, want)
    assert same_bits(fd.chunk_kda(**call | {"return_intermediate_states": True})[0], want)


def test_no_state_is_allocated_when_none_is_asked_for(backend: str):
    """512 sequences: a state for each would take 128 MB."""
    call = gpu_call(fd.fused_recurrent_kda, replace(KIMI, lengths=(1,) * 512), BF16, backend)
    call = as_recurrent(call) | {"output_final_state": False, "out": torch.empty_like(call["v"])}
    fd.fused_recurrent_kda(**call)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    fd.fused_recurrent_kda(**call)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 2**20
