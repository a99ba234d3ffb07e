"""Plans: the launches of a call in order over slots, which every call like it executes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from triton.compiler import CompiledKernel

from ..parallel.exchange import Exchange, as_bytes
from ..problem.arguments import extent
from ..problem.problem import Problem, Tensors, Written, replaced
from .cache import Entry
from .launch import STREAM, Address, Launch, Prepared, current_device, current_stream, hooked, show
from .workspace import Slots

Step = Launch | Exchange
"""A plan does one after another."""

Pointers = list[tuple[int, int, int]]
"""Addresses that a call takes: the argument's place in the call, a place among addresses (or a slot), and bytes from there."""

Outputs = dict[str, Tensor]
"""A plan's results, by name."""

Given = Sequence[Tensor | None]
"""The tensors of a call, as they come."""


ALIGNMENT = 512
"""Bytes: of scratch that shares an allocation."""

MOST_APART = 256
"""Written tensors, such as the pools of a model's layers, of which a plan knows that they are disjoint."""


def new_outputs(problem: Problem, t: Tensors) -> Outputs:
    """All results of a call by name, some of which may be tensors of the caller's."""
    given = t.caller_outputs()
    return {name: given[name] if name in given else t.memory.new(*x) for name, x in problem.results().items()}


class Bound(NamedTuple):
    """A step, and where its arguments are found: in a list of addresses, of the call's tensors, its outputs, its scratch."""

    act: Callable[..., object]
    call: list
    """The arguments of `act`, without addresses and stream."""

    places: Pointers
    described: Pointers
    """The same of tensor descriptors."""

    exchanged: list[tuple[int, int, int]]
    """The tensors that an exchange takes first, as bytes: the place in the list, begin and end. None of a launch."""

    outputs: list[tuple]
    """To allocate: name, place, `torch.empty` or `torch.zeros`, shape, dtype."""

    scratch: list[tuple[int, int]]
    """To allocate: place and bytes."""

    done: list[int]
    """Places of scratch that no later step uses."""

    kernel: CompiledKernel | None


class Plan(Entry):
    """Launches in order, between or after which ranks may exchange something, and the outputs that they leave. An entry of the
    launch cache.

    A launch's arguments lie in slots. `execute` allocates outputs and scratch when they are first needed, gives scratch back
    after its last use, fills in addresses, and launches.
    """

    lasting = True

    def __init__(self, memory: Slots, outputs: Outputs, launches: Iterable[Step]):
        self.memory, self.outputs, self.launches = memory, outputs, [*launches]
        self.index = memory.device.index
        self.sources = [(i, 0) for i in range(len(memory.roles))]
        self.count = len(memory.roles)
        self.steps: list[Bound] | None = None
        """None before the first call."""
        self.rest: list[tuple] = []
        """Outputs that no step writes."""
        self.given: list[tuple[str, int]] = []
        """Outputs that are tensors of the call: name and place."""
        self.room: list[int] = []
        """Zeros, one for each output and each allocation of scratch."""
        self.disjoint: list[tuple[int, int, list[tuple[int, int]]]] = []
        """Tensors that are written, by place and bytes, and those which must not share their memory."""
        self.refuse: Callable[[Given], None] | None = None
        """Called with the tensors of a call that overlap; raises."""
        self.apart: dict[int, list[int]] = {}
        """The addresses last found to be disjoint, by that of the first that is written, such as a layer's pool."""

    def locate(self, t: Tensors, tensors: Given, places: Sequence[int], written: Written | None = None) -> None:
        """Makes it a plan of calls with `tensors` as they come: each of `t` is, or is a view of, the one at its place."""
        begins = [0 if x is None else x.data_ptr() for x in tensors]
        self.sources = [(i, x.data_ptr() - begins[i]) for i, x in zip(places, t.present().values())]
        self.count = len(tensors)
        if written is not None:
            self.writes, self.refuse = written.places, written.refuse
            sizes = [0 if x is None else extent(x) for x in tensors]
            pairs = [(i, [(j, sizes[j]) for j in others if sizes[j]]) for i, others in written.pairs if sizes[i]]
            self.disjoint = [(i, sizes[i], others) for i, others in pairs if others]

    def _prepare(self) -> list[Bound]:
        """Works out, for every step, where its arguments lie, and what comes and goes with it."""
        launches = [x for x in self.launches if isinstance(x, Exchange) or x.ctas > 0]
        steps, find = [_prepared(x) for x in launches], self.memory.find
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        found: list[list[Pointers]] = []
        for n, step in enumerate(steps):
            found.append([[(i, *find(x)) for i, x in some] for some in (step.tensors, step.described)])
            for some in found[n]:
                for _, slot, _ in some:
                    first.setdefault(slot, n)
                    last[slot] = n
        places, index = dict(enumerate(self.sources)), self.count
        new, scratch, done = (defaultdict[int, list](list) for _ in range(3))
        for name, x in self.outputs.items():
            slot, _ = find(x)
            if slot < len(self.sources):
                self.given.append((name, places[slot][0]))
                continue
            make = torch.zeros if slot in self.memory.zeroed else torch.empty
            new[first.get(slot, -1)].append((name, index, make, x.shape, x.dtype))
            places[slot] = index, 0
            index += 1
        # scratch with the same first and last use is one allocation
        spans = defaultdict[tuple[int, int], list[int]](list)
        for slot in sorted(first.keys() - places.keys()):
            spans[first[slot], last[slot]].append(slot)
        for (begin, end), slots in spans.items():
            nbytes = 0
            for slot in slots:
                places[slot] = index, nbytes
                nbytes += -(-self.memory.sizes[slot] // ALIGNMENT) * ALIGNMENT
            scratch[begin].append((index, nbytes))
            done[end].append(index)
            index += 1
        bound = []
        for n, (launch, step, pointers) in enumerate(zip(launches, steps, found)):
            at, described = ([(i, places[x][0], places[x][1] + offset) for i, x, offset in some] for some in pointers)
            exchanged: list[tuple[int, int, int]] = []
            if isinstance(launch, Exchange):
                exchanged = [(i, begin, begin + x.nbytes) for (_, i, begin), (_, x) in zip(at, step.tensors)]
                at = []
            bound.append(Bound(step.act, step.call, at, described, exchanged, new[n], scratch[n], done[n], step.kernel))
        self.rest, self.room = new[-1], [0] * (index - self.count)
        self.launches, self.outputs = [], {}
        return bound

    def execute(self, tensors: Given, addresses: list[int] | None = None) -> dict[str, Tensor]:
        """The outputs by name. `addresses` are those of `tensors`, in a list that may be changed."""
        if addresses is None:
            addresses = [0 if x is None else x.data_ptr() for x in tensors]
        index = self.index
        if index is not None and current_device() != index:
            with torch.cuda.device(index):
                return self.execute(tensors, addresses)
        if self.steps is None:
            self.steps = self._prepare()
        if self.disjoint and self.apart.get(addresses[self.disjoint[0][0]]) != addresses:
            self._check_disjoint(tensors, addresses)
        device, stream, seen = self.memory.device, 0 if index is None else current_stream(index), hooked()
        addresses += self.room
        held, results = {}, {}
        for act, template, places, described, exchanged, outputs, scratch, done, kernel in self.steps:
            for name, at, make, shape, dtype in outputs:
                # a `torch.Size` takes twice as long as its numbers
                x = held[at] = results[name] = make(*shape, dtype=dtype, device=device)
                addresses[at] = x.data_ptr()
            for at, nbytes in scratch:
                x = held[at] = torch.empty(nbytes, dtype=torch.uint8, device=device)
                addresses[at] = x.data_ptr()
            call = template.copy()
            if exchanged:
                call[:0] = [as_bytes(held[at])[begin:end] for at, begin, end in exchanged]
            else:
                call[STREAM] = stream
            for position, at, offset in places:
                call[position] = addresses[at] + offset
            for position, at, offset in described:
                call[position] = replaced(call[position], base=Address(addresses[at] + offset))
            if seen and kernel is not None:
                show(kernel, call)
            act(*call)
            x = None
            for at in done:
                del held[at]
        for name, _, make, shape, dtype in self.rest:
            results[name] = make(*shape, dtype=dtype, device=device)
        for name, i in self.given:
            results[name] = tensors[i]  # type: ignore[assignment]
        return results

    def _check_disjoint(self, tensors: Given, addresses: list[int]) -> None:
        for i, size, others in self.disjoint:
            begin = addresses[i]
            end = begin + size
            for j, length in others:
                if addresses[j] < end and begin < addresses[j] + length:
                    assert self.refuse is not None
                    self.refuse(tensors)
        if len(self.apart) >= MOST_APART:
            self.apart.clear()
        self.apart[addresses[self.disjoint[0][0]]] = addresses.copy()


def _prepared(step: Step) -> Prepared:
    if isinstance(step, Launch):
        return step.prepare()
    return Prepared(step.act, [step.group, step.way, step.to], [(0, step.packet), (1, step.packets)], [])
