"""The exact reference, in PyTorch: any device, any dtype up to float64, differentiable."""

from .chunk import chunk_kda
from .decode import commit, decode_kda
from .prefill import prefill
from .recurrent import recurrent_kda
from .rounding import rounding_error
from .wy import chunk_bwd_wy_dqkg

__all__ = ["chunk_bwd_wy_dqkg", "chunk_kda", "commit", "decode_kda", "prefill", "recurrent_kda", "rounding_error"]
