"""Work that is counted, not timed: the same on every machine, however many others load it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

MOST_INSTRUCTIONS = 1600
"""For a dispatcher's repeated question, which takes about 30 us then."""


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
