"""Split sequences: the Triton kernels against whole sequences in float64, and the planning kernel against the planner."""

from __future__ import annotations

import pytest
import torch

import flashdelta as fd
from flashdelta.problem.split import AUTO, most_segments, parts_of_sequences
from flashdelta.testing.oracle import assert_close
from flashdelta.triton.segments import plan_kernel

from ..support.split_cases import COSTS, forced, offsets, split_call, split_pool_call

TOLERANCE = 2e-5


def _close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert_close("split", found, wanted, TOLERANCE)


# as in `LENGTHS` empty sequences, tails and single chunks, each once and no longer than five parts take
@pytest.mark.parametrize(
    ("lengths", "parts", "v_first"),
    [([0, 130, 0, 33], 5, False), ([163], 5, True), ([7, 97, 1, 0], 2, False)],
    ids=str,
)
def test_split_is_the_whole(lengths: list[int], parts: int, v_first: bool):
    call = split_call(lengths, v_first=v_first, return_intermediate_states=True)
    found = fd.chunk_kda(**call, split=parts, backend="triton")
    for x, wanted in zip(found, fd.chunk_kda(**forced(call, torch.float64), backend="reference")):
        _close(x, wanted)


def test_split_of_batch_rows():
    call = split_call([66, 66])
    batch = {
        name: x.view(2, 66, *x.shape[2:]) if x.dim() > 2 and name != "initial_state" else x
        for name, x in ((n, y) for n, y in call.items() if isinstance(y, torch.Tensor) and n != "cu_seqlens")
    }
    rest = {n: y for n, y in call.items() if not isinstance(y, torch.Tensor)}
    found = fd.chunk_kda(**batch, **rest, split=2, backend="triton")
    wanted = fd.chunk_kda(**forced(batch | rest, torch.float64), backend="reference")
    _close(found[0], wanted[0])
    _close(found[1], wanted[1])


def test_split_with_a_pool_and_checkpoints():
    call = split_pool_call()
    exact = forced(call, torch.float64)
    o, _ = fd.chunk_kda(**call, split=4, backend="triton")
    wanted, _ = fd.chunk_kda(**exact, backend="reference")
    _close(o, wanted)
    _close(call["state_pool"], exact["state_pool"])


def _plan(cu_seqlens: torch.Tensor, T: int, room: int, split: int, invariant: bool = False) -> torch.Tensor:
    """`first_segment` as the kernel plans it."""
    N, costs = len(cu_seqlens) - 1, COSTS
    first_segment = torch.full((N + 1,), -1, dtype=torch.int32)
    plan_kernel[(1,)](
        *(cu_seqlens, None, first_segment, T, N, 0, room, split, int(invariant)),
        *(costs.step, costs.transition, costs.compose, costs.fixed, costs.shortest, costs.margin),
        C=64,
        BLOCK=128,
    )
    return first_segment


@pytest.mark.parametrize("room", [1, 8, 40])
@pytest.mark.parametrize(("split", "invariant"), [(AUTO, False), (AUTO, True), (3, False)])
def test_plan_is_the_planners(room: int, split: int, invariant: bool):
    chunks = torch.cat(
        [torch.tensor([700, 0, 16, 130]), torch.randint(0, 90, (150,), generator=torch.Generator().manual_seed(0))]
    )
    cu_seqlens = offsets((chunks * 64 - (chunks > 0) * 5).tolist()).int()
    first_segment = _plan(cu_seqlens, int(cu_seqlens[-1]), room, split, invariant)
    parts = parts_of_sequences(chunks, room, COSTS, split, invariant)
    assert first_segment.diff().tolist() == parts.tolist() and first_segment[0] == 0


@pytest.mark.parametrize(("split", "invariant"), [(AUTO, False), (AUTO, True), (64, False)])
def test_falling_offsets_get_no_more_segments_than_there_is_room_for(split: int, invariant: bool):
    """Every second sequence claims all tokens."""
    T, N, room = 64 * 64, 15, 8
    first_segment = _plan(torch.tensor([0, T] * 8, dtype=torch.int32), T, room, split, invariant)
    assert first_segment[-1] <= most_segments(N, T // 64 + N, room, split, invariant)
