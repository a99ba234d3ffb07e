"""Long sequences over few heads: split as planned, whole, and FLA with its own split, side by side."""

from __future__ import annotations

import functools
import os

import flashdelta

from .cases import PrefillCase
from .inputs import Inputs
from .prefill import Setup, case_inputs, measure_row, options_of, our_call
from .protocol import Run

FLA_SWITCH = "FLA_INTRACARD_CP"
"""Environment variable by which FLA splits sequences on one card; read when it is imported."""


def let_fla_split() -> None:
    os.environ.setdefault(FLA_SWITCH, "1")


def whole_call(case: PrefillCase, inputs: Inputs, setup: Setup) -> Run:
    return functools.partial(our_call(case, inputs, setup), split=False)


def measure_split(case: PrefillCase, setup: Setup) -> dict:
    """A row with the further contender `whole`, what a split gains (`gain`: whole over ours), and the plan: how many `segments`
    each sequence has."""
    row = measure_row(case, setup, {"whole": whole_call})
    plan = flashdelta.explain(
        flashdelta.chunk_kda, **case_inputs(case, setup), **options_of(case), backend=setup.backend
    ).segments
    ours, whole = row["ours"]["ms"], row["whole"]["ms"]
    gain = whole["median"] / ours["median"] if ours and whole else None
    return row | {"segments": plan, "gain": gain}
