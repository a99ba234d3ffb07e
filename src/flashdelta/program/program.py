"""Programs: the launches of a call in order, and the outputs that they leave."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..parallel.exchange import Exchange
from ..problem.problem import Problem, Result, Tensors
from .launch import Launch
from .record import Recorded, Recorder
from .workspace import new

Step = Launch | Exchange
"""What a program does next."""


class Outputs(dict[str, Tensor]):
    """What a program leaves, by name, as far as it has been allocated."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self.zeroed: set[str] = set()

    @classmethod
    def of(cls, problem: Problem, t: Tensors) -> Outputs:
        """All results of a call, some of which may be tensors of the caller's."""
        outputs, given = cls(t.device), t.caller_outputs()
        for name, result in problem.results().items():
            if name in given:
                outputs[name] = given[name]
            else:
                outputs.allocate(name, result)
        return outputs

    def allocate(self, name: str, result: Result) -> Tensor:
        x = self[name] = new(result.shape, result.dtype, self.device, result.zeroed)
        if result.zeroed:
            self.zeroed.add(name)
        return x


class Program:
    """Launches in order, made lazily: a launch and its scratch are freed before the next is made. Between two of them, or after
    the last, ranks may exchange something. `copies`: launches before those, whose scratch any of those may read."""

    def __init__(self, outputs: Outputs, launches: Iterable[Step], copies: Sequence[Launch] = ()):
        self.outputs = outputs
        self.launches = itertools.chain(copies, launches)
        self.copied = tuple(x for launch in copies for x in launch.scratch)
        self.recorded: Recorded | None = None

    def run(self, record: Sequence[Tensor | None] | None = None) -> dict[str, Tensor]:
        """The outputs by name. With `record`, the tensors of the call, `recorded` is how to repeat it, if it can be."""
        recorder = None if record is None else Recorder(self.outputs.device, record)
        with _current(self.outputs.device):
            for launch in self.launches:
                compiled = launch.run()
                if recorder is None:
                    pass
                elif isinstance(launch, Exchange):
                    recorder.add_exchange(launch, self.outputs, self.outputs.zeroed)
                else:
                    recorder.add(launch, compiled, self.outputs, self.outputs.zeroed, self.copied)
                del launch
        if recorder is not None:
            self.recorded = recorder.finish(self.outputs)
        return self.outputs


def _current(device: torch.device) -> contextlib.AbstractContextManager:
    """Kernels launch on the current device, which need not be the tensors'."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)
