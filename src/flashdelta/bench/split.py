"""Long sequences over few heads: split as planned, whole, and FLA with its own split, side by side."""

from __future__ import annotations

import functools
import os

from .cases import PrefillCase
from .inputs import Inputs
from .prefill import Setup, measure_row, our_call
from .protocol import Run

FLA_SWITCH = "FLA_INTRACARD_CP"
"""Environment variable by which FLA splits sequences on one card; read when it is imported."""


def let_fla_split() -> None:
    os.environ.setdefault(FLA_SWITCH, "1")


def whole_call(case: PrefillCase, inputs: Inputs, setup: Setup) -> Run:
    return functools.partial(our_call(case, inputs, setup), split=False)


def measure_split(case: PrefillCase, setup: Setup) -> dict:
    """A row with the further contender `whole`, and what a split gains (`gain`: whole over ours)."""
    row = measure_row(case, setup, {"whole": whole_call})
    ours, whole = row["ours"]["ms"], row["whole"]["ms"]
    return row | {"gain": whole["median"] / ours["median"] if ours and whole else None}
