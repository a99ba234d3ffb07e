"""Whether all cases run (`make test-full`)."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

FULL = os.environ.get("FLASHDELTA_TESTS") == "full"


def in_turn(cases: Iterable, others: Sequence) -> list[tuple]:
    """Pairs: each case with all of the others in the full run, else with one of them in turn."""
    return [(x, y) for i, x in enumerate(cases) for y in (others if FULL else (others[i % len(others)],))]
