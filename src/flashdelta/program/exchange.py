"""Points of a program where ranks of a process group exchange what their launches left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Exchange:
    """Between two launches or after the last, on the current stream: `packets [ranks, ...]` receives every rank's `packet`, if
    that is for this one, by a `way` of the process group's. Both are `scratch`, or outputs. `act`: `exchange` or a half of it
    (`problem/exchanges.py`)."""

    act: Callable[[Tensor, Tensor, str, str, str], None]
    group: str
    way: str
    to: str
    packet: Tensor
    packets: Tensor

    @property
    def scratch(self) -> tuple[Tensor, ...]:
        return self.packet, self.packets

    def run(self) -> None:
        self.act(self.packet, self.packets, self.group, self.way, self.to)
