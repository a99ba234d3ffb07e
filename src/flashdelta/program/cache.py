"""The launch cache: calls that differ in nothing but the contents and addresses of their tensors have one plan."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..problem import device_checks
from ..problem.arguments import PLAIN, is_plain

is_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""True if the call stands inside `torch.func.grad`, `vjp`, `vmap` and so on, of its arguments or of others."""


class Entry:
    """A call that the cache has."""

    used = 0
    """Count of entries kept when it was last found."""

    types: Sequence[type] = ()
    """Types of the call's options: 64.0 equals 64, and True equals 1, but they are not the same call."""

    writes: Sequence[int] = ()
    """Tensors, by place, that the call writes."""


Key = tuple | None
"""All that the validation and the launches of a call depend on; None for a call that may not be kept."""


class LaunchCache:
    """Entries by key. Beyond `most` the least recently used go, a quarter at a time."""

    def __init__(self, most: int = 4096):
        self.most, self._entries, self._clock = most, dict[tuple, Any](), 0

    def find(self, kind: object, tensors: Sequence[Tensor | None], options: tuple = ()) -> tuple[Any, Key, list[int]]:
        """The entry of a call of this kind, if there is one; its key; and the addresses of its `tensors` (0
        where there is none).

        A call may not be kept that is traced, checked on the host, inside a transform of `torch.func`, or not on a GPU, nor one
        with arguments that are no plain tensors, have no memory of their own (sparse ones, known zeros), may have a
        forward-mode tangent, or stand for the negative of their memory."""
        if device_checks.ENABLED or torch.compiler.is_compiling() or forward_ad._current_level >= 0 or is_transformed():
            return None, None, []
        grad = torch.is_grad_enabled()
        found: list[object] = [kind, options, grad]
        addresses: list[int] = []
        try:
            for x in tensors:
                if x is None:
                    found.append(None)
                    addresses.append(0)
                elif (type(x) in PLAIN or is_plain(x)) and not x.is_neg():
                    # flat, and the device as a number: all this is most of the host time of a repeated call
                    index, address = x.get_device(), x.data_ptr()
                    if not address and x.numel() > 0:
                        return None, None, []
                    found += x.shape, x.stride(), x.dtype, index, grad and x.requires_grad, address & 15
                    addresses.append(address)
                else:
                    return None, None, []
            key: tuple = tuple(found)
            entry = self._entries.get(key)
        except (RuntimeError, TypeError):  # no memory; an option that can't be hashed, which the validation will refuse
            return None, None, []
        if entry is not None and entry.types != [*map(type, options)]:
            key += tuple(map(type, options))
            entry = self._entries.get(key)
        if entry is None:
            on_gpu = any(x is not None and x.get_device() >= 0 for x in tensors)
            return None, key if on_gpu else None, addresses
        entry.used = self._clock
        return entry, key, addresses

    def keep(self, key: Key, entry: Any) -> None:
        if key is None:
            return
        if len(self._entries) >= self.most:
            for old, _ in sorted(self._entries.items(), key=lambda item: item[1].used)[: max(1, self.most // 4)]:
                self._entries.pop(old, None)
        self._clock += 1
        entry.used, entry.types = self._clock, [*map(type, key[1])]
        self._entries[key] = entry

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        self._entries.clear()
