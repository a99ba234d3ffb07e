"""Work that is counted, not timed: the same on every machine, however many others load it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

MOST_INSTRUCTIONS = 910
"""Of a repeated `supports`, which takes about 10 us then. The slowest of the tests took 727 on Python 3.11; 3.10, 3.12 and 3.13
count less for code of this kind."""


def instructions(run: Callable[[], object]) -> int:
    """How many instructions of bytecode `run` executes, once it has run before. What a call into C does counts as one."""
    total = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal total
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        total += event == "opcode"
        return trace

    others = sys.gettrace()
    try:
        # a frame's first run may count nothing: from 3.12 on what it sets holds for the next
        for _ in range(2):
            total = 0
            sys.settrace(trace)
            run()
            sys.settrace(None)
    finally:
        sys.settrace(others)
    return total
