"""vLLM on flashdelta: importing this module turns it on, which vLLM does by itself (docs/integrations.md)."""

from ._vllm import disable, enable, status

__all__ = ["disable", "enable", "status"]

enable()
