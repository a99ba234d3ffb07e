"""Plans: the launches of a call in order over slots, which every call like it executes."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from triton.compiler import CompiledKernel

from ..parallel.exchange import Exchange, as_bytes
from ..problem.arguments import extent
from ..problem.problem import Problem, Tensors, Written, replaced
from .cache import Entry
from .launch import STREAM, Address, Launch, Prepared, current_device, current_stream, hooked, show
from .workspace import FIRST, SLOT, SLOT_BITS, Slots, address_of

Step = Launch | Exchange
"""A plan does one after another."""

Pointers = tuple[tuple[int, int, int], ...]
"""Addresses that a call takes: the position in the call, an index in a list of addresses, and bytes from there."""

Outputs = dict[str, Tensor]
"""A plan's results, by name."""

Given = Sequence[Tensor | None]
"""The tensors of a call, as they come."""


ALIGNMENT = 512
"""Bytes, of scratch within an allocation."""

MOST_APART = 256
"""Written tensors, such as the pools of a model's layers, that a plan knows to be disjoint from the call's others."""


def new_outputs(problem: Problem, t: Tensors) -> Outputs:
    """All results of a call by name, some of which may be tensors of the caller's."""
    given = t.caller_outputs()
    return {name: given[name] if name in given else t.memory.new(*x) for name, x in problem.results().items()}


class Bound(NamedTuple):
    """A step, and indices in a list of addresses: those of the call's tensors, its outputs, its scratch. In tuples, which the
    garbage collector leaves alone where they hold nothing but numbers."""

    act: Callable[..., object]
    call: list
    """The arguments of `act`, without addresses and stream."""

    places: Pointers
    described: Pointers
    """Addresses that tensor descriptors take."""

    exchanged: Pointers
    """Tensors that an exchange takes first, as bytes: index, begin and end. A launch has none."""

    outputs: Sequence[tuple]
    """Allocations: name, index, `torch.empty` or `torch.zeros`, shape, dtype."""

    scratch: Sequence[tuple[int, int]]
    """Allocations of scratch: index and bytes."""

    done: Sequence[int]
    """Indices of scratch that no later step uses."""

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
        """Places of the tensors of the call: index of the argument, and bytes from its beginning."""
        self.count = len(memory.roles)
        self.steps: list[Bound] | None = None
        """None before the first call."""
        self.rest: Sequence[tuple] = ()
        """Outputs that no step writes."""
        self.given: list[tuple[str, int]] = []
        """Outputs that are tensors of the call: name and index."""
        self.room: list[int] = []
        """A zero for each output and each allocation of scratch."""
        self.disjoint: list[tuple[int, int, list[tuple[int, int]]]] = []
        """Tensors that are written: index, bytes, and the indices and bytes of those that must not share their memory."""
        self.refuse: Callable[[Given], None] | None = None
        """Called with the tensors of a call that overlap; raises."""
        self.apart: dict[int, list[int]] = {}
        """The addresses last found to be disjoint, by that of the first that is written, such as a layer's pool."""

    def locate(self, t: Tensors, tensors: Given, index: Mapping[str, int], written: Written | None = None) -> None:
        """Makes it a plan of calls with `tensors` as they come: each of `t` is, or is a view of, the one at the index of its
        role."""
        found = [(index[role], getattr(t, role)) for role in self.memory.roles]
        self.sources = [(i, x.data_ptr() - tensors[i].data_ptr()) for i, x in found]  # type: ignore[union-attr]
        self.count = len(tensors)
        if written is not None:
            self.writes, self.refuse = written.places, written.refuse
            for i, others in written.pairs:
                if (size := bytes_of(tensors[i])) and (read := [(j, n) for j in others if (n := bytes_of(tensors[j]))]):
                    self.disjoint.append((i, size, read))

    def _prepare(self) -> list[Bound]:
        """Works out, for every step, where its arguments lie, and what comes and goes with it."""
        steps = [_prepared(x) for x in self.launches if isinstance(x, Exchange) or x.ctas > 0]
        # when each slot is first and last used
        uses = [(address >> SLOT_BITS, n) for n, x in enumerate(steps) for _, address in (*x.tensors, *x.described)]
        first, last = dict(reversed(uses)), dict(uses)
        # where each slot lies: its index among addresses, and what to add to an address in the slot for bytes from there
        places = {begin // SLOT: (i, offset - begin) for begin, (i, offset) in zip(self.memory.begins, self.sources)}
        index = self.count
        new, scratch, done = (defaultdict[int, list](list) for _ in range(3))
        for name, x in self.outputs.items():
            slot = address_of(x) // SLOT
            if slot < FIRST + len(self.sources):
                self.given.append((name, places[slot][0]))
                continue
            make = torch.zeros if slot in self.memory.zeroed else torch.empty
            new[first.get(slot, -1)].append((name, index, make, x.shape, x.dtype))
            places[slot] = index, -slot * SLOT
            index += 1
        # scratch with the same first and last use is one allocation
        spans = defaultdict[tuple[int, int], list[int]](list)
        for slot in sorted(first.keys() - places.keys()):
            assert slot in self.memory.sizes, "a tensor lies in no slot: PyTorch made it while a plan was built"
            spans[first[slot], last[slot]].append(slot)
        for (begin, end), slots in spans.items():
            nbytes = 0
            for slot in slots:
                places[slot] = index, nbytes - slot * SLOT
                nbytes += -(-self.memory.sizes[slot] // ALIGNMENT) * ALIGNMENT
            scratch[begin].append((index, nbytes))
            done[end].append(index)
            index += 1

        def located(some: list[tuple[int, int]]) -> Pointers:
            return tuple([(i, at, shift + x) for i, x in some for at, shift in [places[x >> SLOT_BITS]]])

        bound = []
        for n, step in enumerate(steps):
            pointers, described = located(step.tensors), located(step.described)
            exchanged = tuple([(at, begin, begin + size) for (_, at, begin), size in zip(pointers, step.nbytes)])
            pointers = () if exchanged else pointers
            comes = new.get(n, ()), scratch.get(n, ()), done.get(n, ())
            bound.append(Bound(step.act, step.call, pointers, described, exchanged, *comes, step.kernel))
        self.rest, self.room = new.get(-1, ()), [0] * (index - self.count)
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
            begin, end = addresses[i], addresses[i] + size
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
    packets = step.packet, step.packets
    tensors, nbytes = [(i, address_of(x)) for i, x in enumerate(packets)], [x.nbytes for x in packets]
    return Prepared(step.act, [step.group, step.way, step.to], tensors, [], nbytes)


def bytes_of(x: Tensor | None) -> int:
    return 0 if x is None else extent(x)
