"""Portable Triton kernels (sm_80 and newer), one file a stage: `prepare`, `recurrence` (with output), `recurrent`."""

from .launch import forward

__all__ = ["forward"]
