"""Long sequences over few heads: split as planned, whole, and FLA with its own split, side by side."""

from __future__ import annotations

import functools
import os

from torch import Tensor

from .cases import PrefillCase
from .inputs import Inputs
from .prefill import Setup, measure_row, our_call
from .protocol import Run, capture

FLA_SWITCH = "FLA_INTRACARD_CP"
"""Environment variable by which FLA splits sequences on one card; read when it is imported."""


def let_fla_split() -> None:
    os.environ.setdefault(FLA_SWITCH, "1")


def whole_call(case: PrefillCase, inputs: Inputs, setup: Setup) -> Run:
    return functools.partial(our_call(case, inputs, setup), split=False)


def whole_graph(case: PrefillCase, inputs: Inputs, setup: Setup) -> Run:
    """`whole_call` in a CUDA graph; the eager call where there are none."""
    call = whole_call(case, inputs, setup)
    if setup.device.type != "cuda":
        return call
    replay, results = capture(call)

    def run() -> tuple[Tensor, Tensor]:
        replay()
        return results

    return run


def measure_split(case: PrefillCase, setup: Setup) -> dict:
    """A row with the further contenders `whole` and `whole_graph`, and what a split gains (`gain`: whole over ours, by CUDA
    graph, as launches take longer than short sequences)."""
    row = measure_row(case, setup, {"whole": whole_call, "whole_graph": whole_graph})
    for ours, whole in (("graph", "whole_graph"), ("ours", "whole")):
        if row[ours]["ms"] and row[whole]["ms"]:
            return row | {"gain": row[whole]["ms"]["median"] / row[ours]["ms"]["median"]}
    return row | {"gain": None}
