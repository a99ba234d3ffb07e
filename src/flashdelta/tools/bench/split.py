"""Long sequences over few heads: split as planned, whole, and FLA with its own split, side by side."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

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


def told_call(case: PrefillCase, inputs: Inputs, setup: Setup) -> Run:
    """Our call with the offsets on the host, too."""
    offsets = inputs["cu_seqlens"]
    return functools.partial(our_call(case, inputs, setup), cu_seqlens_cpu=None if offsets is None else offsets.cpu())


def in_graph(make: Callable[..., Run]) -> Callable[..., Run]:
    """The call that `make` makes in a CUDA graph; the eager call where there are none."""

    def made(case: PrefillCase, inputs: Inputs, setup: Setup) -> Run:
        call = make(case, inputs, setup)
        if setup.device.type != "cuda":
            return call
        replay, results = capture(call)

        def run() -> tuple[Tensor, Tensor]:
            replay()
            return results

        return run

    return made


OTHERS = {"whole": whole_call, "whole_graph": in_graph(whole_call), "told_graph": in_graph(told_call)}


def measure_split(case: PrefillCase, setup: Setup) -> dict:
    """A row with the further contenders `OTHERS`, and what a split gains: whole over ours (`gain`), and over ours that is told
    the lengths on the host (`told_gain`); by CUDA graph, as launches take longer than short sequences."""
    row = measure_row(case, setup, OTHERS)

    def gain(ours: str, whole: str) -> float | None:
        times = [row[name]["ms"] for name in (whole, ours)]
        return times[0]["median"] / times[1]["median"] if all(times) else None

    return row | {
        "gain": gain("graph", "whole_graph") or gain("ours", "whole"),
        "told_gain": gain("told_graph", "whole_graph"),
    }
