"""Several GPUs: sequences over the ranks of a process group (docs/parallel.md)."""

from .context import ContextParallel, context_parallel
from .halo import halo

__all__ = ["ContextParallel", "context_parallel", "halo"]
