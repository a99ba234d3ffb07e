"""Replays by value on a GPU: for every operation, every tensor in every layout, and some at random; losses, ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
from torch.distributed import ProcessGroup

from ..support import replay_checks as checks
from ..support.layouts import LAYOUTS, rotated
from ..support.oracle import poisoned_memory
from ..support.processes import on_processes
from ..support.ranks import Found
from ..support.replay_checks import check_loss, check_ranks, check_row, check_slices, check_stale, on_rank
from ..support.replays import Replays, counting
from ..support.rows import PAIRS, Row, pair_id
from ..support.virtual import on_ranks

pytestmark = pytest.mark.gpu


@pytest.fixture
def replays() -> Iterator[Replays]:
    with counting() as found:
        yield found


@pytest.mark.long
@pytest.mark.parametrize("pair", PAIRS, ids=pair_id)
def test_every_tensor_in_every_layout(pair: tuple[Row, str]):
    """In one test, as many turns share machine code."""
    for turn in range(len(LAYOUTS)):
        with counting() as replays:
            check_row(*pair, rotated(pair[0], turn), replays, device="cuda")


@pytest.mark.parametrize("pair", PAIRS, ids=pair_id)
def test_a_stale_tensor_is_seen(pair: tuple[Row, str], replays: Replays):
    check_stale(*pair, device="cuda")


@pytest.mark.parametrize("recorded", [True, False], ids=["recorded in one buffer", "replayed in one buffer"])
@pytest.mark.parametrize("sliced", checks.SLICED, ids=str)
def test_slices_of_one_buffer(sliced: tuple, recorded: bool, replays: Replays):
    check_slices(*sliced, recorded, replays, device="cuda")


@pytest.mark.parametrize("loss", checks.LOSSES)
def test_losses(loss: str, backend: str, replays: Replays):
    check_loss(loss, backend, device="cuda")
    assert len(replays.repeated) == 2 * len(replays.anew) > 0


@pytest.mark.parametrize("wrap", [checks.recomputed, checks.packed_and_unpacked, checks.compiled])
def test_wrapped_losses(wrap: Callable, backend: str, replays: Replays):
    check_loss("squares and a sum", backend, wrap, device="cuda")
    assert wrap is checks.compiled or replays.repeated


@pytest.mark.parametrize(("ranks", "kept"), checks.WORLDS)
def test_virtual_ranks(ranks: int, kept: bool, backend: str, replays: Replays):
    with poisoned_memory():
        found = on_ranks(ranks, lambda group: on_rank(group, backend, kept, "cuda"))
    check_ranks(found)
    assert len(replays.repeated) == 2 * len(replays.anew) > 0


def on_own_gpu(group: ProcessGroup, backend: str) -> tuple[list[Found], int, int]:
    with counting() as replays, poisoned_memory():
        found = on_rank(group, backend, False, "cuda")
    return found, len(replays.anew), len(replays.repeated)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_two_gpus(backend: str):
    found = on_processes(2, on_own_gpu, backend, device="cuda", timeout=timedelta(minutes=2))
    check_ranks([of_rank for of_rank, _, _ in found])
    assert all(repeated == 2 * anew > 0 for _, anew, repeated in found)
