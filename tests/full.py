"""Whether all cases run (`make test-full`)."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence

FULL = os.environ.get("FLASHDELTA_TESTS") == "full"


def paired(cases: Iterable, values: Sequence) -> list[tuple]:
    """Pairs each case with all of the values in the full run, else with one of them in turn."""
    return [*itertools.product(cases, values)] if FULL else [*zip(cases, itertools.cycle(values))]


def thinned(cases: Sequence, step: int, first: int = 0) -> Sequence:
    """Returns all cases in the full run, else every `step`-th from `first` on."""
    return cases if FULL else cases[first::step]
