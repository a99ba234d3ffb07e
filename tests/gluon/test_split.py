"""Split sequences: the Triton kernels against whole sequences in float64, and the planning kernel against the planner."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import flashdelta as fd
from flashdelta.kernels.triton.segments import plan_kernel
from flashdelta.problem.split import AUTO, most_segments, parts_of_sequences
from flashdelta.program.launch import Launch

from ..support.oracle import assert_close, float64
from ..support.split_cases import COSTS, offsets, split_call, split_pool_call
from .interpreter import run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("exact_products")]

TOLERANCE = 2e-5


def hold(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    for x, y in zip(found, wanted):
        assert_close("split", x, y, TOLERANCE)


def exactly(call: dict) -> tuple[torch.Tensor, ...]:
    return fd.chunk_kda(**float64(call), backend="reference")


# empty sequences, tails and single chunks, each once and no longer than the parts take
@pytest.mark.parametrize(("lengths", "parts", "v_first"), [([0, 163], 5, True), ([7, 97, 1, 0], 2, False)], ids=str)
def test_split_is_the_whole(lengths: list[int], parts: int, v_first: bool):
    call = split_call(lengths, v_first=v_first, return_intermediate_states=True)
    hold(fd.chunk_kda(**call, split=parts, backend="triton"), exactly(call))


def test_split_with_a_pool_and_checkpoints():
    call = split_pool_call()
    exact = float64(call)
    o, _ = fd.chunk_kda(**call, split=4, backend="triton")
    wanted, _ = fd.chunk_kda(**exact, backend="reference")
    hold((o, call["state_pool"]), (wanted, exact["state_pool"]))


def _plan(cu_seqlens: torch.Tensor, T: int, room: int, split: int, invariant: bool = False) -> torch.Tensor:
    """`first_segment` as the kernel plans it."""
    N, costs = len(cu_seqlens) - 1, COSTS
    first_segment = torch.full((N + 1,), -1, dtype=torch.int32)
    arguments = cu_seqlens, None, first_segment, T, N, 0, room, split, int(invariant)
    numbers = costs.step, costs.transition, costs.compose, costs.fixed, costs.shortest, costs.margin
    run(Launch(plan_kernel, 1, (*arguments, *numbers), {"C": 64, "BLOCK": 128}, num_warps=4))
    return first_segment


@pytest.mark.parametrize("room", [1, 8, 40])
@pytest.mark.parametrize(("split", "invariant"), [(AUTO, False), (AUTO, True), (3, False)])
def test_plan_is_the_planners(room: int, split: int, invariant: bool):
    chunks = torch.cat(
        [torch.tensor([700, 0, 16, 130]), torch.randint(0, 90, (150,), generator=torch.Generator().manual_seed(0))]
    )
    cu_seqlens = offsets((chunks * 64 - (chunks > 0) * 5).tolist()).int()
    first_segment = _plan(cu_seqlens, int(cu_seqlens[-1]), room, split, invariant)
    parts = parts_of_sequences(chunks.tolist(), room, COSTS, split, invariant)
    assert first_segment.diff().tolist() == parts and first_segment[0] == 0


@pytest.mark.parametrize(("split", "invariant"), [(AUTO, False), (AUTO, True), (64, False)])
def test_falling_offsets_get_no_more_segments_than_there_is_room_for(split: int, invariant: bool):
    """Every second sequence claims all tokens."""
    T, N, room = 64 * 64, 15, 8
    first_segment = _plan(torch.tensor([0, T] * 8, dtype=torch.int32), T, room, split, invariant)
    assert first_segment[-1] <= most_segments(N, T // 64 + N, room, split, invariant)
