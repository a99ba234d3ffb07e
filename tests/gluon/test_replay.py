"""Replays by value: for every operation, tensor and layout, calls in a row with other numbers, against float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ..support.cases import PAIRS, Row
from ..support.inputs import rotated
from ..support.replays import Replays, check_row, replaying
from .interpreter import run


@pytest.fixture
def replays() -> Iterator[Replays]:
    with replaying(run) as found:
        yield found


def pair_id(pair: object) -> str:
    return str(pair)


@pytest.mark.parametrize("turn", range(9))
@pytest.mark.parametrize(("row", "backend"), PAIRS, ids=pair_id)
def test_every_tensor_in_every_layout(row: Row, backend: str, turn: int, replays: Replays):
    check_row(row, backend, rotated(row, turn), replays)
