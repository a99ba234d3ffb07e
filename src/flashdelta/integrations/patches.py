"""Replaced attributes of other libraries' modules, which can be put back."""

from __future__ import annotations

from types import ModuleType
from typing import Any


class Patches:
    """Replaces attributes of modules or classes, and puts back what was there."""

    def __init__(self) -> None:
        self.replaced: list[tuple[ModuleType | type, str, Any, Any]] = []

    def set(self, module: ModuleType | type, name: str, value: object) -> None:
        """Replaces `name`, which must be the module's or the class's own."""
        self.replaced.append((module, name, vars(module)[name], value))
        setattr(module, name, value)

    def restore(self) -> None:
        """Puts back what is still ours; what somebody else has replaced since is left as it is."""
        while self.replaced:
            module, name, before, ours = self.replaced.pop()
            if vars(module).get(name) is ours:
                setattr(module, name, before)
