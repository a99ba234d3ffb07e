"""GPU kernels for Kimi Delta Attention (KDA) in readable Python."""

from . import kernels
from .ops.chunk import chunk_kda
from .ops.decode import commit, recurrent_kda
from .ops.prefill_fp32 import kda_prefill
from .ops.recurrent import fused_recurrent_kda
from .runtime.explain import Explanation, explain
from .runtime.warmup import warmup

__version__ = "0.1.0"
__all__ = [
    "Explanation",
    "chunk_kda",
    "commit",
    "explain",
    "fused_recurrent_kda",
    "kda_prefill",
    "kernels",
    "recurrent_kda",
    "warmup",
]
