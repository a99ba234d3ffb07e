"""Recorded programs: what the launches of a call amount to for the next one like it, which differs in nothing but the addresses
and contents of its tensors (`cache.py` sees to that)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.compiler import CompiledKernel

from ..parallel.exchange import Exchange, as_bytes
from ..problem.arguments import extent
from .launch import ARGUMENTS, STREAM, Launch, current_device, current_stream, hooked, kernel_call
from .workspace import is_marked, is_scratch, mark

MOST_APART = 256
"""Written tensors, such as the pools of a model's layers, of which a recorded program knows that they are disjoint."""

STRICT = False
"""Makes a program that should replay and can't raise, as in tests, instead of being built anew each time."""

ALIGNMENT = 512
"""Bytes: of buffers that share an allocation."""


class Within(NamedTuple):
    """A tensor of an exchange, as bytes: the slot, where it begins and where it ends there."""

    slot: int
    begin: int
    end: int

    def view(self, memory: Tensor) -> Tensor:
        return as_bytes(memory)[self.begin : self.end]


class Step(NamedTuple):
    """A launch of a repetition, or an exchange. A slot is a place in the list of addresses: the call's tensors, its outputs,
    its scratch."""

    run: Callable[..., object]
    call: list
    """The arguments of `run`, without addresses and stream."""

    places: list[tuple[int, int, int]]
    """Of arguments that are addresses: the place in the call, the slot, and bytes from there."""

    described: list[tuple[int, int, int]]
    """The same of tensor descriptors."""

    tensors: list[Within]
    """What an exchange takes before its other arguments; none of a launch."""

    outputs: list[tuple]
    """To allocate: name, slot, `torch.empty` or `torch.zeros`, shape, dtype."""

    scratch: list[tuple[int, int]]
    """To allocate: slot and bytes."""

    done: list[int]
    """Slots of scratch that no later launch uses."""


@dataclass(frozen=True)
class Replay:
    """What a repetition does."""

    steps: list[Step]
    slots: list[int]
    """Zeros, one for each output and each piece of scratch."""

    given: list[tuple[str, int]]
    """Outputs that are tensors of the call: name and place."""

    disjoint: list[tuple[int, int, list[tuple[int, int]]]]
    """Tensors that are written, by place and bytes, and those which must not share their memory."""

    written: int
    """The place of the first of them; -1 if there is none."""

    together: list[tuple[int, int, int]]
    """Tensors, by place, that shared an element which a kernel was given, and bytes from the first to the second: a call where
    they lie otherwise is no repetition."""


@dataclass
class _Buffer:
    """A launch's scratch. Told apart by identity: another one may have its address when it is gone."""

    tensor: weakref.ref
    begin: int
    nbytes: int
    first: int
    last: int


class _Strided(NamedTuple):
    """A tensor of the call. `dims`: sizes and strides in bytes, the longest stride first."""

    begin: int
    nbytes: int
    dims: list[tuple[int, int]]
    itemsize: int
    place: int

    @classmethod
    def of(cls, x: Tensor, place: int) -> _Strided:
        size = x.element_size()
        dims = [(n, s * size) for n, s in zip(x.shape, x.stride()) if n > 1 and s > 0]
        return cls(x.data_ptr(), extent(x), sorted(dims, key=lambda dim: -dim[1]), size, place)

    def has(self, address: int) -> bool:
        """Says whether the address is one of its elements: other tensors may lie between them."""
        left = address - self.begin
        if not 0 <= left < self.nbytes:
            return False
        for n, stride in self.dims:
            left -= min(left // stride, n - 1) * stride
        return left < self.itemsize


class Recorder:
    """Is shown launches as they run, and keeps no tensor of theirs. What they amount to is worked out when a call repeats.

    An argument must begin with an element of one of the tensors of the call; or lie in one of the outputs, which a repetition
    allocates; or in the launch's `scratch`, memory that `new` made and PyTorch has not written since. If one does not, there is
    no replay.
    """

    def __init__(self, device: torch.device, known: Sequence[Tensor | None]):
        present = [(i, x) for i, x in enumerate(known) if x is not None and x.numel() > 0]
        self.device, self.known, self.count = device, known, len(known)
        self.ranges = [_Strided.of(x, i) for i, x in present]
        self.starts = {x.begin for x in self.ranges}
        self.outputs: dict[str, tuple[int, int, tuple]] = {}
        self.given: list[tuple[str, int]] = []
        self.buffers: list[_Buffer] = []
        self.launches: list[tuple] = []
        self.possible = device.index == torch.cuda.current_device()

    def add_exchange(self, step: Exchange, outputs: Mapping[str, Tensor], zeroed: Container[str]) -> None:
        self._see(outputs, zeroed)
        place = len(self.launches)
        pointers = [(i, x.data_ptr(), False) for i, x in enumerate(step.scratch)]
        for x in step.scratch:
            if not self._is_own(x):
                self._check(step.act, is_marked(x), x)
                mark(x)  # written by the exchange
                self._use(x, place)
        sizes = [x.nbytes for x in step.scratch]
        self.launches.append((step.act, None, (step.group, step.way, step.to, sizes), pointers, self._alive(place)))

    def add(
        self,
        launch: Launch,
        compiled: CompiledKernel | None,
        outputs: Mapping[str, Tensor],
        zeroed: Container[str],
        copied: Sequence[Tensor] = (),
    ) -> None:
        """`copied`: scratch of launches before it, which it may read."""
        if launch.ctas <= 0:
            return
        if compiled is None:
            self.possible = False
            return
        step = len(self.launches)
        self._see(outputs, zeroed)
        scratch = [
            (begin := x.data_ptr(), begin + x.nbytes, x) for x in (*launch.scratch, *copied) if not self._is_own(x)
        ]
        for _, _, x in scratch:
            self._check(launch.kernel, is_scratch(x), x)
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
        self.launches.append((compiled, (launch.ctas, launch.rows, 1), arguments, pointers, self._alive(step)))

    def _check(self, kernel: object, is_scratch: bool, x: Tensor) -> None:
        if x.numel() > 0 and not is_scratch:
            self._refuse(kernel, f"scratch {list(x.shape)} that `new` did not make, or PyTorch wrote")

    def _refuse(self, kernel: object, why: str) -> None:
        if STRICT:
            raise AssertionError(f"{getattr(kernel, '__name__', kernel)}: no replay: {why}")
        self.possible = False

    def _see(self, outputs: Mapping[str, Tensor], zeroed: Container[str]) -> None:
        """Outputs that are new with the next step."""
        for name, x in outputs.items():
            if name not in self.outputs:
                make = torch.zeros if name in zeroed else torch.empty
                self.outputs[name] = x.data_ptr(), x.nbytes, (len(self.launches), make, x.shape, x.dtype)
                self.given += [(name, i) for i, known in enumerate(self.known) if known is x]

    def _alive(self, step: int) -> list[int]:
        """Scratch that the step uses."""
        return [i for i, buffer in enumerate(self.buffers) if buffer.last == step]

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

    def finish(self, outputs: Iterable[str]) -> Recorded | None:
        """The cache entry, if the call can be repeated at all: not if an output was allocated after the last launch."""
        self.known = ()
        complete = all(name in self.outputs for name in outputs)
        return Recorded(self) if self.possible and self.launches and complete else None

    def replay(self, written: Sequence[tuple[int, Sequence[int]]]) -> Replay | None:
        """`written`: tensors by place, and those which must not share their memory."""
        given = {name for name, _ in self.given}
        own = {name: self.count + n for n, name in enumerate(name for name in self.outputs if name not in given)}
        # buffers with the same first and last use are one allocation
        spans = list(dict.fromkeys((buffer.first, buffer.last) for buffer in self.buffers))
        slots = {span: self.count + len(own) + n for n, span in enumerate(spans)}
        totals = dict.fromkeys(spans, 0)
        within = []
        for buffer in self.buffers:
            span = buffer.first, buffer.last
            within.append((buffer.begin, buffer.begin + buffer.nbytes, slots[span], totals[span]))
            totals[span] += -(-buffer.nbytes // ALIGNMENT) * ALIGNMENT
        steps, together = [], set[tuple[int, int, int]]()
        for n, (what, grid, arguments, pointers, alive) in enumerate(self.launches):
            # what has been allocated by then: later outputs may lie where an earlier buffer lay
            there = [(*self.outputs[name], slot) for name, slot in own.items() if self.outputs[name][2][0] <= n]
            new = [*((begin, begin + nbytes, slot, 0) for begin, nbytes, _, slot in there), *(within[i] for i in alive)]
            places: tuple[list[tuple], list[tuple]] = ([], [])
            for position, address, described in pointers:
                owners = [x for x in self.ranges if x.has(address)]
                found = [(x.place, address - x.begin) for x in owners]
                found += [(slot, base + address - begin) for begin, end, slot, base in new if begin <= address < end]
                if not found:
                    self._refuse(getattr(what, "name", what), f"argument {position} lies in no memory that is known")
                    return None
                places[described].append((ARGUMENTS + position, *found[0]))
                together.update((owners[0].place, x.place, x.begin - owners[0].begin) for x in owners[1:])
            tensors: list[Within] = []
            call: tuple[Callable[..., object], list]
            if grid is None:
                *where, sizes = arguments
                tensors = [Within(slot, begin, begin + size) for (_, slot, begin), size in zip(places[0], sizes)]
                call, places = (what, where), ([], [])
            else:
                call = kernel_call(what, grid, arguments)
            outputs = [
                (name, slot, *self.outputs[name][2][1:]) for name, slot in own.items() if self.outputs[name][2][0] == n
            ]
            scratch = [(slots[span], totals[span]) for span in spans if span[0] == n]
            done = [slots[span] for span in spans if span[1] == n]
            steps.append(Step(*call, *places, tensors, outputs, scratch, done))
        disjoint = self._disjoint(written)
        first = disjoint[0][0] if disjoint else -1
        return Replay(steps, [0] * (len(own) + len(spans)), self.given, disjoint, first, [*together])

    def _disjoint(self, written: Sequence[tuple[int, Sequence[int]]]) -> list[tuple[int, int, list[tuple[int, int]]]]:
        sizes = {x.place: x.nbytes for x in self.ranges}
        found = [(i, sizes[i], [(j, sizes[j]) for j in others if j in sizes]) for i, others in written if i in sizes]
        return [(i, size, others) for i, size, others in found if others]


class Recorded:
    """A recorded program, an entry of the launch cache. Repeated, it allocates outputs and scratch when they are first needed,
    gives scratch back after its last use, fills in addresses, and launches."""

    used = 0
    types: Sequence[type] = ()

    def __init__(self, recorder: Recorder):
        self.device, self.index = recorder.device, recorder.device.index
        self.recorder: Recorder | None = recorder
        self.replay: Replay | None = None
        """None before it is worked out, or where there can be none."""
        self.pairs: Sequence[tuple[int, Sequence[int]]] = ()
        """Of tensors, by place, that are written, and those which must not share their memory."""
        self.writes: Sequence[int] = ()
        """Of these, what the call really writes."""
        self.refuse: Callable[[Sequence[Tensor | None]], None] | None = None
        """Called with the tensors of a call that overlap; raises."""
        self.apart: dict[int, list[int]] = {}
        """By the address of the first that is written, such as a layer's pool: the addresses last found to be disjoint."""

    def usable(self, addresses: Sequence[int]) -> bool | None:
        if self.recorder is not None:
            recorder, self.recorder = self.recorder, None
            self.replay = recorder.replay(self.pairs)
        if self.replay is None:
            return None
        if current_device() != self.index or hooked():
            return False
        together = self.replay.together
        return not together or all(addresses[j] - addresses[i] == apart for i, j, apart in together) or None

    def run(self, tensors: Sequence[Tensor | None], addresses: list[int]) -> dict[str, Tensor]:
        """The outputs by name, of a program that is `usable`. `addresses` are those of `tensors`, in a list that may be
        changed."""
        replay, device, stream = self.replay, self.device, current_stream(self.index)
        assert replay is not None
        if replay.written >= 0 and self.apart.get(addresses[replay.written]) != addresses:
            self._check_disjoint(replay, tensors, addresses)
        addresses += replay.slots
        held, results = {}, {}
        for run, template, places, described, exchanged, outputs, scratch, done in replay.steps:
            for name, slot, make, shape, dtype in outputs:
                # a `torch.Size` takes twice as long as its numbers
                x = held[slot] = results[name] = make(*shape, dtype=dtype, device=device)
                addresses[slot] = x.data_ptr()
            for slot, nbytes in scratch:
                x = held[slot] = torch.empty(nbytes, dtype=torch.uint8, device=device)
                addresses[slot] = x.data_ptr()
            call = template.copy()
            if exchanged:
                call[:0] = [x.view(held[x.slot]) for x in exchanged]
            else:
                call[STREAM] = stream
            for position, slot, offset in places:
                call[position] = addresses[slot] + offset
            for position, slot, offset in described:
                call[position] = _with_base(call[position], _Address(addresses[slot] + offset))
            run(*call)
            x = None
            for slot in done:
                del held[slot]
        for name, i in replay.given:
            results[name] = tensors[i]  # type: ignore[assignment]
        return results

    def _check_disjoint(self, replay: Replay, tensors: Sequence[Tensor | None], addresses: list[int]) -> None:
        for i, size, others in replay.disjoint:
            begin = addresses[i]
            end = begin + size
            for j, length in others:
                if addresses[j] < end and begin < addresses[j] + length:
                    assert self.refuse is not None
                    self.refuse(tensors)
        if len(self.apart) >= MOST_APART:
            self.apart.clear()
        self.apart[addresses[replay.written]] = addresses.copy()


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
