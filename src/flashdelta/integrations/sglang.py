"""SGLang on flashdelta: importing this module turns it on, which SGLang does by itself (docs/integrations.md)."""

from ._sglang import disable, enable, status

__all__ = ["disable", "enable", "status"]

enable()
