"""A pytest plugin that writes to the file FLASHDELTA_TRACE which functions of this repository a session calls.

Loaded before anything of the repository is. What takes long and calls none of it is not traced: the imports of PyTorch and
Triton, and what Triton's interpreter does for a kernel.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from types import CodeType, FrameType

import pytest
import torch  # noqa: F401
from triton.runtime.interpreter import InterpretedFunction

from .fingerprints import MODULE, module

ROOT = Path(__file__).resolve().parents[2]
MACHINERY = [f"tests/interpreter/{name}.py" for name in ("groups", "fingerprints", "tracing")]

called: set[CodeType] = set()
rewrite, run = InterpretedFunction.rewrite, InterpretedFunction.run


def trace(frame: FrameType, event: str, argument: object) -> None:
    if event == "call":
        called.add(frame.f_code)


def traced_rewrite(kernel: InterpretedFunction) -> object:
    """Every call of a kernel or of a function in one comes by here."""
    called.add(kernel.fn.__code__)
    return rewrite(kernel)


def untraced_run(*arguments: object, **named: object) -> object:
    sys.setprofile(None)
    try:
        return run(*arguments, **named)
    finally:
        sys.setprofile(trace)


InterpretedFunction.rewrite, InterpretedFunction.run = traced_rewrite, untraced_run
sys.setprofile(trace)


def pytest_unconfigure(config: pytest.Config) -> None:
    sys.setprofile(None)
    functions = set()
    for code in called:
        path = Path(code.co_filename)
        name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
        if name.startswith(("src/", "tests/")) and name not in MACHINERY:
            functions |= {f"{name}:{part}" for part in (MODULE, module(path).name_at(code.co_firstlineno))}
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = round(used.ru_utime + used.ru_stime, 1)
    Path(os.environ["FLASHDELTA_TRACE"]).write_text(json.dumps({"functions": sorted(functions), "seconds": seconds}))
