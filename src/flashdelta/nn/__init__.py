"""Modules built on the operators: the attention layer with its cache, and a small language model made of it."""

from .attention import KdaCache, KdaPool, KimiDeltaAttention
from .lm import KdaLanguageModel, LanguageModelConfig, load_model, save_model
from .sharding import shard_attention
from .weights import export_weights, import_weights

__all__ = [
    "KdaCache",
    "KdaLanguageModel",
    "KdaPool",
    "KimiDeltaAttention",
    "LanguageModelConfig",
    "export_weights",
    "import_weights",
    "load_model",
    "save_model",
    "shard_attention",
]
