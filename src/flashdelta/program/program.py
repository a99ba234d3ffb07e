"""Programs: the launches of a call in order, and the outputs that they leave. One that ran can be recorded, and then repeats
for calls that differ in nothing but the addresses and contents of their tensors (`cache.py` sees to that)."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..problem.arguments import extent
from ..problem.problem import Problem, Result, Tensors
from .launch import Launch, hooked, start

ALIGNMENT = 512
"""Bytes: of buffers that share an allocation."""


class Outputs(dict[str, Tensor]):
    """What a program leaves, by name, as far as it has been allocated."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.device = device
        self.zeroed: set[str] = set()

    @classmethod
    def of(cls, problem: Problem, t: Tensors) -> Outputs:
        """All results of a call; `o` is the caller's own tensor if it passed one."""
        outputs = cls(t.device)
        for name, result in problem.results().items():
            if name == "o" and t.out is not None:
                outputs["o"] = t.out
            else:
                outputs.allocate(name, result)
        return outputs

    def allocate(self, name: str, result: Result) -> Tensor:
        x = self[name] = new(result.shape, result.dtype, self.device, result.zeroed)
        if result.zeroed:
            self.zeroed.add(name)
        return x


def new(shape: Sequence[int], dtype: torch.dtype, device: torch.device, zeroed: bool = False) -> Tensor:
    make = torch.zeros if zeroed else torch.empty
    return make(tuple(shape), dtype=dtype, device=device)


class Program:
    """Launches in order. Each runs, and is let go of, before the next is asked for, so that what only it needed is free by
    then. `copy_out`: a caller's tensor that kernels can't write, which receives the output `o`."""

    def __init__(self, outputs: Outputs, launches: Iterable[Launch], copy_out: Tensor | None = None):
        self.outputs, self.launches, self.copy_out = outputs, launches, copy_out
        self.recorded: Recorded | None = None

    def run(self, record: Sequence[Tensor | None] | None = None) -> dict[str, Tensor]:
        """The outputs by name. With `record`, the tensors of the call, `recorded` is how to repeat it, if it can be."""
        recorder = None if record is None or self.copy_out is not None else Recorder(self.outputs.device, record)
        with _current(self.outputs.device):
            for launch in self.launches:
                launch.run()
                if recorder is not None:
                    recorder.add(launch, self.outputs)
                del launch
        if self.copy_out is not None:
            self.outputs["o"] = self.copy_out.copy_(self.outputs["o"])
        if recorder is not None:
            self.recorded = recorder.recorded()
        return self.outputs


def _current(device: torch.device) -> contextlib.AbstractContextManager:
    """Kernels launch on the current device, which need not be the tensors'."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


# ---- recording ----------------------------------------------------------------------------------------------------------


class Recorded:
    """A recorded program: allocates outputs and buffers when they are first needed, gives buffers back after their last use,
    fills in addresses, and launches. `given` outputs are the caller's own: their name, and which of its tensors they are."""

    used = 0

    def __init__(self, device: torch.device, steps: list[tuple], slots: int, given: list[tuple[str, int]]):
        self.device, self.steps, self.blank, self.given = device, steps, [0] * slots, given

    def run(self, tensors: Sequence[Tensor | None], addresses: list[int]) -> dict[str, Tensor]:
        """The outputs by name. `addresses` are those of `tensors`, in a list that may be changed."""
        device, index = self.device, self.device.index
        addresses += self.blank
        held, results = {}, {}
        for compiled, grid, template, places, described, outputs, buffers, done in self.steps:
            for name, slot, make, shape, dtype in outputs:
                x = results[name] = make(shape, dtype=dtype, device=device)
                addresses[slot] = x.data_ptr()
            for slot, nbytes in buffers:
                x = held[slot] = torch.empty(nbytes, dtype=torch.uint8, device=device)
                addresses[slot] = x.data_ptr()
            arguments = template.copy()
            for position, slot, offset in places:
                arguments[position] = addresses[slot] + offset
            for position, slot, offset in described:
                arguments[position] = _with_base(arguments[position], _Address(addresses[slot] + offset))
            start(compiled, index, grid, arguments)
            x = None
            for slot in done:
                del held[slot]
        for name, i in self.given:
            results[name] = tensors[i]
        return results

    def usable(self) -> bool:
        return torch.cuda.current_device() == self.device.index and not hooked()


@dataclass
class _Buffer:
    """A launch's scratch. Told apart by identity: another one may have its address when it is gone."""

    tensor: weakref.ref
    nbytes: int
    first: int
    last: int


@dataclass
class Recorder:
    """Makes a `Recorded` of launches while they run, for calls with other tensors in place of `known`.

    An argument must be one of them or lie inside one, the first that it could be a view of; or lie in one of the outputs,
    which a repetition allocates; or in the launch's `scratch`. If one does not (an input had to be copied), or two of `known`
    share an address, there is no recording.
    """

    device: torch.device
    known: Sequence[Tensor | None]
    _bases: dict[int, int] = field(init=False)
    _outputs: dict[str, tuple[int, tuple]] = field(init=False, default_factory=dict)
    _given: dict[str, int] = field(init=False, default_factory=dict)
    _buffers: list[_Buffer] = field(init=False, default_factory=list)
    _found: list[tuple] = field(init=False, default_factory=list)
    _possible: bool = field(init=False, default=True)

    def __post_init__(self):
        present = [(x.data_ptr(), i) for i, x in enumerate(self.known) if x is not None and x.numel() > 0]
        self._bases = dict(present)
        self._possible = len(self._bases) == len(present) and self.device.index == torch.cuda.current_device()

    def add(self, launch: Launch, outputs: Outputs) -> None:
        compiled = launch.compiled(self.device.index) if self._possible else None
        if compiled is None or launch.ctas <= 0:
            self._possible = False
            return
        for name, x in outputs.items():
            self._own(name, x, outputs)
        template, places, described = [*launch.arguments, *launch.constants.values()], [], []
        for position, x in enumerate(launch.arguments):
            tensor = getattr(x, "base", x)
            if not isinstance(tensor, Tensor):
                continue
            template[position] = 0
            if tensor is not x:
                template[position] = _with_base(x, None)
            if tensor.numel() == 0:
                continue
            place = self._place(tensor.data_ptr(), launch, outputs)
            if place is None:
                self._possible = False
                return
            (places if tensor is x else described).append((position, *place))
        self._found.append((compiled, (launch.ctas, launch.rows, 1), template, places, described))

    def _own(self, name: str, x: Tensor, outputs: Outputs) -> None:
        """Where a repetition has the output from: the caller, or an allocation before this launch."""
        if name in self._outputs or name in self._given:
            return
        i = next((i for i, known in enumerate(self.known) if known is x), None)
        if i is not None:
            self._given[name] = i
        else:
            make = torch.zeros if name in outputs.zeroed else torch.empty
            self._outputs[name] = len(self._found), (make, x.shape, x.dtype)

    def _place(self, address: int, launch: Launch, outputs: Mapping[str, Tensor]) -> tuple[Any, int] | None:
        """Whose memory the address lies in (a number for one of `known`, a name for an output, or a buffer) and the offset
        there."""
        if address in self._bases:
            return self._bases[address], 0
        for name in self._outputs:
            if 0 <= address - outputs[name].data_ptr() < outputs[name].nbytes:
                return name, address - outputs[name].data_ptr()
        for i, x in enumerate(self.known):
            if x is not None and 0 <= address - x.data_ptr() < extent(x):
                return i, address - x.data_ptr()
        for x in launch.scratch:
            if 0 <= address - x.data_ptr() < x.nbytes:
                return self._buffer(x), address - x.data_ptr()
        return None

    def _buffer(self, x: Tensor) -> _Buffer:
        step = len(self._found)
        for buffer in self._buffers:
            if buffer.tensor() is x:
                buffer.last = step
                return buffer
        self._buffers.append(_Buffer(weakref.ref(x), x.nbytes, step, step))
        return self._buffers[-1]

    def recorded(self) -> Recorded | None:
        if not self._possible or not self._found:
            return None
        slots = {name: len(self.known) + i for i, name in enumerate(self._outputs)}
        # buffers with the same first and last use are one allocation
        spans = list(dict.fromkeys((buffer.first, buffer.last) for buffer in self._buffers))
        sizes = [0] * len(spans)
        beyond = len(self.known) + len(slots)
        within: dict[int, tuple[int, int]] = {}
        for buffer in self._buffers:
            i = spans.index((buffer.first, buffer.last))
            within[id(buffer)] = beyond + i, sizes[i]
            sizes[i] += -(-buffer.nbytes // ALIGNMENT) * ALIGNMENT

        def resolved(places: list[tuple]) -> list[tuple[int, int, int]]:
            found = []
            for position, whose, offset in places:
                slot, base = within[id(whose)] if isinstance(whose, _Buffer) else (slots.get(whose, whose), 0)
                found.append((position, slot, base + offset))
            return found

        steps = []
        for i, (compiled, grid, template, places, described) in enumerate(self._found):
            outputs = [(name, slots[name], *how) for name, (first, how) in self._outputs.items() if first == i]
            needed = [(beyond + j, sizes[j]) for j, (first, _) in enumerate(spans) if first == i]
            done = [beyond + j for j, (_, last) in enumerate(spans) if last == i]
            steps.append((compiled, grid, template, resolved(places), resolved(described), outputs, needed, done))
        return Recorded(self.device, steps, len(slots) + len(spans), [*self._given.items()])


def _with_base(descriptor: Any, base: object) -> Any:
    """The tensor descriptor of another tensor that lies alike: `copy.copy` takes two or three times as long."""
    kind = type(descriptor)
    other = kind.__new__(kind)
    other.__dict__.update(descriptor.__dict__)
    other.base = base
    return other


class _Address:
    """What a tensor descriptor asks of its tensor."""

    def __init__(self, address: int):
        self.address = address

    def data_ptr(self) -> int:
        return self.address
