"""GPU kernels for Kimi Delta Attention (KDA) in readable Python."""

from . import kernels
from .ops import Explanation, chunk_kda, commit, explain, fused_recurrent_kda, kda_prefill, recurrent_kda, warmup

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
