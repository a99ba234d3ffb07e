"""A launch on its own, of tensors with memory."""

from __future__ import annotations

from torch import Tensor

from flashdelta.program.launch import Launch

from ..gluon.interpreter import run


def start(launch: Launch) -> None:
    """On a GPU by Triton, on a CPU by the interpreter."""
    if any(isinstance(x, Tensor) and x.is_cuda for x in launch.arguments):
        launch.kernel[(launch.ctas, launch.rows)](*launch.arguments, **launch.constants, **launch.options())
    else:
        run(launch)
