"""Memory that kernels of a call leave for each other: scratch, and named tensors in one allocation of it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shapes and dtypes by name, in the order in which the tensors lie."""


ALIGNMENT = 16
"""Bytes. A kernel is compiled anew for a pointer that does not lie on so many."""


def sizes(layout: Layout) -> list[int]:
    """Bytes from each tensor to the next."""
    exact = (torch.Size(shape).numel() * dtype.itemsize for shape, dtype in layout.values())
    return [-(-n // ALIGNMENT) * ALIGNMENT for n in exact]


def new(shape: Sequence[int], dtype: torch.dtype, device: torch.device, zeroed: bool = False) -> Tensor:
    """Memory for kernels alone to write, marked as such: a replay allocates it anew, so what PyTorch computes does not belong
    there (`record.py: Recorder`)."""
    x = (torch.zeros if zeroed else torch.empty)(tuple(shape), dtype=dtype, device=device)
    mark(x)
    return x


_writes = WeakTensorKeyDictionary()
"""How often PyTorch had written a tensor when it was marked. It counts that, except for inference tensors."""


def mark(x: Tensor) -> None:
    _writes[x] = 0 if x.is_inference() else x._version


def is_marked(x: Tensor) -> bool:
    return x in _writes


def is_scratch(x: Tensor) -> bool:
    """Says whether it comes from `new`, and PyTorch has not written it since it was marked."""
    return x in _writes and _writes[x] == (0 if x.is_inference() else x._version)


class Workspace:
    """`workspace["w"]` is a tensor of the layout, and `workspace.get("w")` is None where the layout has none of that name.
    `buffer` holds them all but those `beside`, which lie elsewhere."""

    def __init__(self, layout: Layout, buffer: Tensor, beside: Mapping[str, Tensor] | None = None):
        self.buffer = buffer
        parts = buffer.split(sizes(layout))
        self._tensors = {name: _as(x, *kind) for x, (name, kind) in zip(parts, layout.items())}
        self._tensors.update(beside or {})

    @classmethod
    def allocate(cls, layout: Layout, device: torch.device, beside: Mapping[str, Tensor] | None = None) -> Workspace:
        layout = {name: kind for name, kind in layout.items() if name not in (beside or ())}
        return cls(layout, new([sum(sizes(layout))], torch.uint8, device), beside)

    def having(self, others: Mapping[str, Tensor]) -> Workspace:
        """The same with other tensors of these names."""
        found = copy.copy(self)
        found._tensors = {**self._tensors, **others}
        return found

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def get(self, name: str) -> Tensor | None:
        return self._tensors.get(name)

    def tensors(self) -> dict[str, Tensor]:
        return dict(self._tensors)

    def select(self, *names: str) -> list[Tensor | None]:
        return [self._tensors.get(name) for name in names]


def _as(x: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return x.view(dtype)[: torch.Size(shape).numel()].view(shape)
