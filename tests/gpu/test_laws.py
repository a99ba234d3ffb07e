"""What must hold to the bit on the GPU: repeats, splits, neighbours, absent states."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

import flashdelta as fd

from ..support.cases import BF16, FP32, Case
from ..support.inputs import TOKEN_TENSORS, narrow, sequence_calls
from ..support.oracle import same_bits
from .calls import KIMI, assert_same_bits, gpu_call, joined

pytestmark = pytest.mark.gpu

PACKED = (65, 0, 300, 1, 130)


def test_a_packed_sequences_bits_are_its_own(model: Case, op, backend: str):
    """Alone and unpacked it gives the same bits, so nothing else in the batch matters."""
    call = gpu_call(op, replace(model, lengths=PACKED, state=FP32), BF16, backend)
    assert_same_bits(op(**call), joined(op(**one) for one in sequence_calls(call)))


def test_a_batch_rows_bits_are_its_own(model: Case, op, backend: str):
    call = gpu_call(op, replace(model, B=3, T=150), BF16, backend)
    rows = [2, 0]
    picked = call | {name: call[name][rows] for name in TOKEN_TENSORS}
    assert_same_bits(op(**picked), [x[rows] for x in op(**call)])


@pytest.mark.parametrize("packed", [False, True])
def test_no_state_and_zeros_give_the_same_bits(packed: bool, op, backend: str):
    call = gpu_call(op, replace(KIMI, lengths=PACKED if packed else None), BF16, backend)
    zeros = torch.zeros(len(PACKED) if packed else 1, 4, 128, 128, device="cuda")
    assert_same_bits(op(**call), op(**call, initial_state=zeros))


PIECES = {
    "chunks": (fd.chunk_kda, {"T": 330}, (0, 128, 192, 330)),
    "tokens": (fd.fused_recurrent_kda, {"B": 4, "T": 8}, range(9)),
}


@pytest.mark.parametrize("kind", PIECES)
def test_pieces_that_carry_a_float32_state_give_the_same_bits(kind: str, model: Case, backend: str):
    """Chunked prefill, cut at chunk boundaries, and decoding token by token."""
    op, sizes, cuts = PIECES[kind]
    call = gpu_call(op, replace(model, **sizes), BF16, backend)
    carried, outputs = None, []
    for start, stop in itertools.pairwise(cuts):
        part, carried = op(**narrow(call, start, stop), initial_state=carried)
        outputs.append(part)
    assert_same_bits((torch.cat(outputs, dim=1), carried), op(**call))


def test_asking_for_a_state_changes_nothing_else(backend: str):
    call = gpu_call(fd.chunk_kda, KIMI, BF16, backend)
    want, _ = fd.chunk_kda(**call)
    o, none = fd.chunk_kda(**call | {"output_final_state": False})
    assert none is None
    assert same_bits(o, want)
    assert same_bits(fd.chunk_kda(**call | {"return_intermediate_states": True})[0], want)
