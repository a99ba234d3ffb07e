"""Programs: the launches of a call in order, and the outputs that they leave. One that ran can be recorded, and then repeats
for calls that differ in nothing but the addresses and contents of their tensors (`cache.py` sees to that)."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.compiler import CompiledKernel

from ..problem.arguments import extent
from ..problem.problem import Problem, Result, Tensors
from .launch import Launch, hooked, start

MOST_APART = 256
"""Written tensors, such as the pools of a model's layers, of which a recorded program knows that they are disjoint."""

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
                compiled = launch.run()
                if recorder is not None:
                    recorder.add(launch, compiled, self.outputs)
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


@dataclass
class _Buffer:
    """A launch's scratch. Told apart by identity: another one may have its address when it is gone."""

    tensor: weakref.ref
    begin: int
    nbytes: int
    first: int
    last: int


class Recorder:
    """Is shown launches as they run, and keeps no tensor of theirs. What they amount to is worked out when a call repeats."""

    def __init__(self, device: torch.device, known: Sequence[Tensor | None]):
        present = [(i, x) for i, x in enumerate(known) if x is not None and x.numel() > 0]
        self.device, self.known, self.count = device, known, len(known)
        self.ranges = [(begin := x.data_ptr(), begin + extent(x), i) for i, x in present]
        self.starts = {begin: i for begin, _, i in self.ranges}
        self.outputs: dict[str, tuple[int, int, tuple]] = {}
        self.given: list[tuple[str, int]] = []
        self.buffers: list[_Buffer] = []
        self.launches: list[tuple] = []
        self.possible = device.index == torch.cuda.current_device()

    def add(self, launch: Launch, compiled: CompiledKernel | None, outputs: Outputs) -> None:
        if compiled is None or launch.ctas <= 0:
            self.possible = False
            return
        step = len(self.launches)
        for name, x in outputs.items():
            if name not in self.outputs:
                make = torch.zeros if name in outputs.zeroed else torch.empty
                self.outputs[name] = x.data_ptr(), x.nbytes, (step, make, x.shape, x.dtype)
                self.given += [(name, i) for i, known in enumerate(self.known) if known is x]
        scratch = [(begin := x.data_ptr(), begin + x.nbytes, x) for x in launch.scratch if not self._is_own(x)]
        arguments, pointers = [*launch.arguments, *launch.constants.values()], []
        for position, x in enumerate(launch.arguments):
            if x is None or isinstance(x, (int, float)):
                continue
            described = not isinstance(x, Tensor)
            tensor = x.base if described else x
            arguments[position] = _with_base(x, None) if described else 0
            if tensor.numel() > 0:
                address = tensor.data_ptr()
                pointers.append((position, address, described))
                if address not in self.starts:
                    self._use(next((x for begin, end, x in scratch if begin <= address < end), None), step)
        alive = [i for i, buffer in enumerate(self.buffers) if buffer.last == step]
        self.launches.append((compiled, (launch.ctas, launch.rows, 1), arguments, pointers, alive))

    def _is_own(self, x: Tensor) -> bool:
        """Whether it is a tensor of the call, or an output: a forward leaves its scratch to the backward pass."""
        begin = x.data_ptr()
        return any(begin == output for output, _, _ in self.outputs.values()) or begin in self.starts

    def _use(self, x: Tensor | None, step: int) -> None:
        """Of scratch memory, at this step."""
        if x is None:
            return
        buffer = next((buffer for buffer in self.buffers if buffer.tensor() is x), None)
        if buffer is not None:
            buffer.last = step
        else:
            self.buffers.append(_Buffer(weakref.ref(x), x.data_ptr(), x.nbytes, step, step))

    def recorded(self) -> Recorded | None:
        self.known = ()
        return Recorded(self) if self.possible and self.launches else None


class Recorded:
    """A recorded program: allocates outputs and buffers when they are first needed, gives buffers back after their last use,
    fills in addresses, and launches.

    An argument must be one of the tensors of the call or lie inside one, the first that it could be a view of; or lie in one
    of the outputs, which a repetition allocates; or in the launch's `scratch`. If one does not (an input had to be copied), or
    two of the tensors share an address, the program is not `usable`.
    """

    used = 0

    def __init__(self, recorder: Recorder):
        self.device, self.index = recorder.device, recorder.device.index
        self.recorder: Recorder | None = recorder
        self.steps: list[tuple] | None = None
        """Of a repetition; none before it is worked out, or where there can be none."""
        self.pairs: Sequence[tuple[int, Sequence[int]]] = ()
        """Of tensors, by place, that are written, and those which must not share their memory."""
        self.refuse: Callable[[Sequence[Tensor | None]], None] | None = None
        """Is told of tensors that do."""
        self.apart: dict[int, list[int]] = {}
        """By the address of the first that is written, such as a layer's pool: the addresses last found to be disjoint."""

    def usable(self) -> bool:
        if self.recorder is not None:
            self.steps = self._resolved(self.recorder)
            self.recorder = None
        return self.steps is not None and torch.cuda.current_device() == self.index and not hooked()

    def run(self, tensors: Sequence[Tensor | None], addresses: list[int]) -> dict[str, Tensor]:
        """The outputs by name. `addresses` are those of `tensors`, in a list that may be changed."""
        if self.written >= 0 and self.apart.get(addresses[self.written]) != addresses:
            self._check_disjoint(tensors, addresses)
        device, index = self.device, self.index
        addresses += self.blank
        held, results = {}, {}
        for compiled, grid, template, places, described, outputs, buffers, done in self.steps or ():
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
            results[name] = tensors[i]  # type: ignore[assignment]
        return results

    def _check_disjoint(self, tensors: Sequence[Tensor | None], addresses: list[int]) -> None:
        for i, size, others in self.disjoint:
            begin = addresses[i]
            end = begin + size
            for j, length in others:
                if addresses[j] < end and begin < addresses[j] + length:
                    assert self.refuse is not None
                    self.refuse(tensors)
        if len(self.apart) >= MOST_APART:
            self.apart.clear()
        self.apart[addresses[self.written]] = addresses.copy()

    def _resolved(self, r: Recorder) -> list[tuple] | None:
        """The steps of a repetition; None if there is none."""
        sizes = {i: end - begin for begin, end, i in r.ranges}
        if len(r.starts) < len(r.ranges):
            return None
        written = (
            (i, sizes[i], [(j, sizes[j]) for j in others if j in sizes]) for i, others in self.pairs if i in sizes
        )
        self.disjoint = [(i, size, others) for i, size, others in written if others]
        self.written = self.disjoint[0][0] if self.disjoint else -1
        self.given = r.given
        given = {name for name, _ in r.given}
        own = {name: r.count + n for n, name in enumerate(name for name in r.outputs if name not in given)}
        # buffers with the same first and last use are one allocation
        spans = list(dict.fromkeys((buffer.first, buffer.last) for buffer in r.buffers))
        totals = [0] * len(spans)
        within = []
        for buffer in r.buffers:
            n = spans.index((buffer.first, buffer.last))
            within.append((r.count + len(own) + n, totals[n]))
            totals[n] += -(-buffer.nbytes // ALIGNMENT) * ALIGNMENT
        self.blank = [0] * (len(own) + len(spans))
        steps = []
        for step, (compiled, grid, arguments, pointers, alive) in enumerate(r.launches):
            # what has been allocated by then: later outputs may lie where an earlier buffer lay
            there = [(*r.outputs[name], slot) for name, slot in own.items() if r.outputs[name][2][0] <= step]
            ranges = [*((begin, begin + nbytes, slot) for begin, nbytes, _, slot in there), *r.ranges]
            scratch = [(r.buffers[n].begin, r.buffers[n].begin + r.buffers[n].nbytes, *within[n]) for n in alive]
            places: tuple[list[tuple], list[tuple]] = ([], [])
            for position, address, described in pointers:
                place = _place(address, r.starts, ranges, scratch)
                if place is None:
                    return None
                places[described].append((position, *place))
            outputs = [
                (name, slot, *r.outputs[name][2][1:]) for name, slot in own.items() if r.outputs[name][2][0] == step
            ]
            needed = [(r.count + len(own) + n, totals[n]) for n, (first, _) in enumerate(spans) if first == step]
            done = [r.count + len(own) + n for n, (_, last) in enumerate(spans) if last == step]
            steps.append((compiled, grid, arguments, *places, outputs, needed, done))
        return steps


def _place(
    address: int, starts: dict[int, int], ranges: list[tuple[int, int, int]], scratch: list[tuple[int, int, int, int]]
) -> tuple[int, int] | None:
    """Whose memory the address lies in, as a slot, and the offset there."""
    if address in starts:
        return starts[address], 0
    for begin, end, slot in ranges:
        if begin <= address < end:
            return slot, address - begin
    for begin, end, slot, base in scratch:
        if begin <= address < end:
            return slot, base + address - begin
    return None


def _with_base(descriptor: Any, base: object) -> Any:
    """The tensor descriptor of another tensor that lies alike: `copy.copy` takes two or three times as long."""
    kind: Any = type(descriptor)
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
