"""Portable Triton kernels (sm_80 and newer), one file a stage: `prepare`, `recurrence` (with output), `decode`, `commit`."""

from .launch import commit, forward, prefill

__all__ = ["commit", "forward", "prefill"]
