"""FLA on flashdelta: importing this module turns it on (docs/integrations.md)."""

from ._fla import ENVIRONMENT, disable, enable, status

__all__ = ["ENVIRONMENT", "disable", "enable", "status"]

enable()
