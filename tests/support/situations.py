"""One row per situation that a user has run into: a new report becomes a row of the file that lists its area."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest


@dataclass(frozen=True)
class Situation:
    """A report, rebuilt. `situation`: one line, with its source. `check` runs it and fails unless what the user expects
    happens; it takes no arguments."""

    name: str
    situation: str
    check: Callable[[], None]


def every(rows: Sequence[Situation]) -> pytest.MarkDecorator:
    """Parametrizes a test over the rows, by name."""
    assert len({row.name for row in rows}) == len(rows), "two rows have one name"
    return pytest.mark.parametrize("row", rows, ids=[row.name for row in rows])
