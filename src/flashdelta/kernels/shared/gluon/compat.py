"""Names that Gluon changes from one Triton version to the next."""

from __future__ import annotations

import math
from typing import get_type_hints

import triton
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin, shared_memory_descriptor
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language.core import _aggregate, _unwrap_if_constexpr, _unwrap_shape, base_value

copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
"""`copy_async(shared, pointers, mask=None)`: asynchronous copies by the threads; zeros where the mask is false."""

copy_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""`copy_tile(descriptor, coordinates, barrier, shared)`: an asynchronous copy by the TMA unit."""

store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
"""`store_tile(descriptor, coordinates, shared)`: an asynchronous copy to memory by the TMA unit, but for what is past the
tensor's end."""

barrier = getattr(gl, "barrier", None) or gl.thread_barrier
"""`barrier()`: all threads of the CTA have come this far."""

_reinterpret = getattr(shared_memory_descriptor, "reinterpret", None) or shared_memory_descriptor._reinterpret

_WHOLE = triton.__version__.startswith("3.8.")
"""Triton 3.8 alone reinterprets all of a shared memory or nothing."""


@builtin
def reinterpret(memory, dtype, shape, layout, _semantic=None):
    """Views shared memory as another tensor; a smaller one is its beginning. Triton before 3.9 has it as `_reinterpret`."""
    if _WHOLE:
        bits = math.prod(_unwrap_shape(shape)) * _unwrap_if_constexpr(dtype).primitive_bitwidth
        parts = math.prod(memory.shape) * memory.dtype.primitive_bitwidth // bits
        if parts > 1:
            whole = _reinterpret(memory, dtype, [parts, *shape], layout, _semantic=_semantic)
            return whole.index(0, _semantic=_semantic)
    return _reinterpret(memory, dtype, shape, layout, _semantic=_semantic)


def aggregate(cls: type) -> type:
    """`gluon.aggregate`: an immutable record of kernel values with `gluon.jit` methods. Its constructor takes the fields in
    order, None and numbers as constants; Triton 3.6 makes none."""
    cls.__annotations__ = get_type_hints(cls)
    names = tuple(cls.__annotations__)

    def init(self, *values):
        for name, value in zip(names, values, strict=True):
            setattr(self, name, value if isinstance(value, base_value) else gl.constexpr(value))

    init.__triton_builtin__ = True
    cls.__init__ = init
    return _aggregate(cls)
