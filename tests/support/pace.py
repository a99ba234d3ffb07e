"""Times that hold on different machines: as multiples of a yardstick that is measured beside them."""

from __future__ import annotations

import timeit
from collections.abc import Callable

MOST_YARDSTICKS = 27
"""Of a repeated question of FLA's: 50 us where a yardstick takes 1.8. Only the GPU tier is held to it; the others count
instructions (`work.py`)."""

NAMES = tuple(map(str, range(20)))

CALLS = 5
"""Of `run` in a turn."""


def yardstick() -> int:
    """Plain Python about as long as a question: a few microseconds."""
    found = {}
    for name in NAMES:
        found[name] = len(name), name
    return hash(tuple(found.items()))


def pace(run: Callable[[], object]) -> tuple[float, float]:
    """How many yardsticks `run` takes, and its seconds. The two take turns of about the same length, so short that some of both
    meet nothing else on a busy machine, and the least of each counts."""
    ours, theirs = (
        timeit.Timer(run),
        timeit.Timer(yardstick),
    )  # made once: each compiles code, which would cool the caches
    turns = [(ours.timeit(CALLS) / CALLS, theirs.timeit(4 * CALLS) / (4 * CALLS)) for _ in range(1000)]
    seconds, unit = map(min, zip(*turns))
    return seconds / unit, seconds
