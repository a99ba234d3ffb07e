"""Stages of the training step as operators of their own (public names)."""

from ..ops.wy import chunk_bwd_wy_dqkg

__all__ = ["chunk_bwd_wy_dqkg"]
