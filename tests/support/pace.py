"""Times that hold on a machine which others load: as multiples of a yardstick that is measured beside them."""

from __future__ import annotations

import timeit
from collections.abc import Callable

MOST_YARDSTICKS = 5.6
"""Of a repeated `supports`: 10 us where a yardstick takes 1.8. The call with the most arguments took 4.4."""

NAMES = tuple(map(str, range(20)))


def yardstick() -> int:
    """Plain Python about as long as a question: a few microseconds."""
    found = {}
    for name in NAMES:
        found[name] = len(name), name
    return hash(tuple(found.items()))


def pace(run: Callable[[], object]) -> tuple[float, float]:
    """How many yardsticks `run` takes, and its seconds. The two take turns, and the least of each counts."""
    turns = [(timeit.timeit(run, number=50), timeit.timeit(yardstick, number=50)) for _ in range(200)]
    ours, theirs = map(min, zip(*turns))
    return ours / theirs, ours / 50
