"""What Gluon names differently from one Triton version to the next."""

from __future__ import annotations

from triton.experimental.gluon.language._core import builtin, shared_memory_descriptor

_reinterpret = getattr(shared_memory_descriptor, "reinterpret", None) or shared_memory_descriptor._reinterpret


@builtin
def reinterpret(memory, dtype, shape, layout, _semantic=None):
    """The same shared memory as another tensor. `_reinterpret` before Triton 3.9."""
    return _reinterpret(memory, dtype, shape, layout, _semantic=_semantic)
