"""The launch cache: a call like an earlier one, which differs in nothing but the contents and addresses of its tensors, replays
what that one recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from ..problem import device_checks
from ..problem.arguments import PLAIN


class Entry(Protocol):
    used: int
    """When it was last found."""

    def usable(self) -> bool:
        """Whether it may run now."""


E = TypeVar("E", bound=Entry)

Key = tuple | None


def key(kind: object, tensors: Sequence[Tensor | None], options: tuple = ()) -> tuple[Key, list[int]]:
    """All that the validation and the launches of a call of this kind depend on, and the addresses of its `tensors` (0 where
    there is none). Of options the types, too: 64.0 equals 64, and True equals 1.

    The key is None for a call that may not be kept: one that is traced, checked on the host, or not on a GPU, and one with
    arguments that are no plain tensors, or have no memory of their own (sparse ones, those inside `torch.vmap`)."""
    if device_checks.ENABLED or torch.compiler.is_compiling():
        return None, []
    grad = torch.is_grad_enabled()
    found: list[object] = [kind, options, tuple(map(type, options)), grad]
    addresses, device = [], -1
    for x in tensors:
        if x is None:
            found.append(None)
            addresses.append(0)
        elif type(x) in PLAIN:
            # flat, and the device as a number: all this is most of the host time of a repeated call
            try:
                index, address = x.get_device(), x.data_ptr()
                found += (x.shape, x.stride(), x.dtype, index, grad and x.requires_grad, address & 15)
            except RuntimeError:
                return None, []
            if index > device:
                device = index
            addresses.append(address)
        else:
            return None, []
    if device < 0:
        return None, []
    return tuple(found), addresses


class LaunchCache(Generic[E]):
    """Entries by key. Beyond `most` the least recently used go, a quarter at a time."""

    def __init__(self, most: int = 4096):
        self.most, self._entries, self._clock = most, dict[tuple, E](), 0

    def find(self, key: Key) -> E | None:
        try:
            entry = self._entries.get(key)  # type: ignore[arg-type]
        except TypeError:  # an option that can't be hashed, which the validation will refuse
            return None
        if entry is None or not entry.usable():
            return None
        self._clock += 1
        entry.used = self._clock
        return entry

    def keep(self, key: Key, entry: E | None) -> None:
        if key is None or entry is None:
            return
        if len(self._entries) >= self.most:
            by_use = sorted(self._entries.items(), key=lambda item: item[1].used)
            for old, _ in by_use[: max(1, self.most // 4)]:
                self._entries.pop(old, None)
        self._clock += 1
        entry.used = self._clock
        self._entries[key] = entry

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        self._entries.clear()
