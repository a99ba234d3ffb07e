"""GPU kernels for Kimi Delta Attention (KDA) in readable Python."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import kernels, parallel
from .ops.chunk import chunk_kda
from .ops.convolution import short_convolution
from .ops.decode import commit, recurrent_kda, replay_buffer
from .ops.fused_decode import fused_kda_decode
from .ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
from .ops.norm import gated_rms_norm
from .ops.prefill_fp32 import kda_prefill
from .ops.recurrent import fused_recurrent_kda
from .runtime.explain import Explanation, Support, explain, supports
from .runtime.warmup import warmup

if TYPE_CHECKING:
    from . import nn

__version__ = "0.1.0"
__all__ = [
    "Explanation",
    "Support",
    "chunk_gated_delta_rule",
    "chunk_kda",
    "commit",
    "explain",
    "fused_kda_decode",
    "fused_recurrent_gated_delta_rule",
    "fused_recurrent_kda",
    "gated_rms_norm",
    "kda_prefill",
    "kernels",
    "nn",
    "parallel",
    "recurrent_kda",
    "replay_buffer",
    "short_convolution",
    "supports",
    "warmup",
]


def __getattr__(name: str) -> Any:
    """`flashdelta.nn` is imported when it is first asked for."""
    if name == "nn":
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
