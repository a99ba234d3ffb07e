"""Replaced attributes of other libraries' modules, which can be put back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType
from typing import Any
from weakref import WeakSet

ABSENT = object()
"""Stands for an attribute that was not there."""


class Patches:
    """Replaces attributes of modules or classes, and puts back what was there."""

    def __init__(self) -> None:
        self.replaced: list[tuple[ModuleType | type, str, Any, Any]] = []
        self.watches: list[Watch] = []
        self.wrappers: WeakSet[Any] = WeakSet()

    def set(self, owner: ModuleType | type, name: str, value: object) -> None:
        """Sets `name`, which may be the owner's own, inherited or new."""
        self.replaced.append((owner, name, vars(owner).get(name, ABSENT), value))
        setattr(owner, name, value)

    def wrap(self, owner: ModuleType | type, name: str, make: Callable[[Any], Any]) -> None:
        """Replaces `name`, the owner's own, by `make` of it, unless it is a wrapper from here already: others may put one back
        after `restore`."""
        original = vars(owner)[name]
        if original not in self.wrappers:
            wrapper = make(original)
            self.wrappers.add(wrapper)
            self.set(owner, name, wrapper)

    def when_imported(self, name: str, patch: Callable[[ModuleType], None]) -> None:
        """Calls `patch(module)` once the module of that name is imported: at once if it is."""
        if name in sys.modules:
            patch(sys.modules[name])
        else:
            self.watches.append(Watch(name, patch))
            sys.meta_path.insert(0, self.watches[-1])

    def restore(self) -> None:
        """Puts back what is still ours; what somebody else has replaced since is left as it is."""
        for watch in self.watches:
            sys.meta_path.remove(watch)
        self.watches.clear()
        while self.replaced:
            owner, name, before, ours = self.replaced.pop()
            if vars(owner).get(name) is not ours:
                continue
            if before is ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, before)


class Watch(MetaPathFinder):
    """Finds a module of Python source as usual, and has it patched as soon as its code has run."""

    def __init__(self, name: str, patch: Callable[[ModuleType], None]):
        self.name, self.patch = name, patch

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        others = [finder for finder in sys.meta_path if not isinstance(finder, Watch)]
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is None or not isinstance(spec.loader, SourceFileLoader):
            return None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
