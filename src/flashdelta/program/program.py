"""Launches that repeat, with everything in place but the addresses: the short way of a call like an earlier one.

Valid for calls whose tensors have the same shapes, strides, dtypes, device and alignment, and whose other arguments are equal;
`plans.py` sees to that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..problem.problem import Problem, Tensors, extent
from .launch import Launch, Launches, allocate, capability, hooked, start

ALIGNMENT = 512
"""Bytes: of buffers that share an allocation."""


class Steps:
    """`run` allocates results and buffers when they are first needed, gives buffers back after their last use, fills in
    addresses, and launches."""

    def __init__(self, device: torch.device, steps: list[tuple], slots: int):
        self.device, self.steps, self.blank = device, steps, [0] * slots

    def run(self, addresses: list[int]) -> dict[str, torch.Tensor]:
        """The results by name. `addresses` are those of the tensors that the `Recorder` was told of, in a list that may be
        changed."""
        device, index = self.device, self.device.index
        addresses += self.blank
        held, results = {}, {}
        for compiled, grid, template, places, described, outputs, buffers, done in self.steps:
            for name, slot, shape, dtype in outputs:
                x = results[name] = torch.empty(shape, dtype=dtype, device=device)
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
    """Makes `Steps` of launches, while they run or without. A repetition is given the addresses of the tensors `known`.

    An argument must be one of them or lie inside one, the first that it could be a view of; or lie in one of the `outputs`,
    which a repetition allocates; or in the launch's `scratch`. If one is not (an input had to be copied), or two of `known`
    share an address, there are no steps.
    """

    device: torch.device
    known: Sequence[torch.Tensor | None]
    _bases: dict[int, int] = field(init=False)
    _outputs: dict[str, tuple[int, torch.Size, torch.dtype]] = field(init=False, default_factory=dict)
    _buffers: list[_Buffer] = field(init=False, default_factory=list)
    _found: list[tuple] = field(init=False, default_factory=list)
    _possible: bool = field(init=False, default=True)

    def __post_init__(self):
        present = [(x.data_ptr(), i) for i, x in enumerate(self.known) if x is not None and x.numel() > 0]
        self._bases = dict(present)
        self._possible = len(self._bases) == len(present) and self.device.index == torch.cuda.current_device()

    def add(self, launch: Launch, outputs: Mapping[str, torch.Tensor]) -> None:
        compiled = launch.compiled(self.device.index) if self._possible else None
        if compiled is None or launch.programs <= 0:
            self._possible = False
            return
        template, places, described = [*launch.arguments, *launch.constants.values()], [], []
        for position, x in enumerate(launch.arguments):
            tensor = getattr(x, "base", x)
            if not isinstance(tensor, torch.Tensor):
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
        self._found.append((compiled, (launch.programs, launch.rows, 1), template, places, described))

    def _place(self, address: int, launch: Launch, outputs: Mapping[str, torch.Tensor]) -> tuple[object, int] | None:
        """Whose memory the address lies in (a number for one of `known`, a name for an output, or a buffer) and the offset
        there."""
        if address in self._bases:
            return self._bases[address], 0
        for name, x in outputs.items():
            if 0 <= address - x.data_ptr() < x.nbytes:
                self._outputs.setdefault(name, (len(self._found), x.shape, x.dtype))
                return name, address - x.data_ptr()
        for i, x in enumerate(self.known):
            if x is not None and 0 <= address - x.data_ptr() < extent(x):
                return i, address - x.data_ptr()
        for x in launch.scratch:
            if 0 <= address - x.data_ptr() < x.nbytes:
                return self._buffer(x), address - x.data_ptr()
        return None

    def _buffer(self, x: torch.Tensor) -> _Buffer:
        step = len(self._found)
        for buffer in self._buffers:
            if buffer.tensor() is x:
                buffer.last = step
                return buffer
        self._buffers.append(_Buffer(weakref.ref(x), x.nbytes, step, step))
        return self._buffers[-1]

    def steps(self) -> Steps | None:
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
            outputs = [
                (name, slots[name], shape, dtype) for name, (first, shape, dtype) in self._outputs.items() if first == i
            ]
            needed = [(beyond + j, sizes[j]) for j, (first, _) in enumerate(spans) if first == i]
            done = [beyond + j for j, (_, last) in enumerate(spans) if last == i]
            steps.append((compiled, grid, template, resolved(places), resolved(described), outputs, needed, done))
        return Steps(self.device, steps, len(slots) + len(spans))


class Plan:
    """A forward call that repeats: its `Steps`, and what a caller's output may not overlap."""

    def __init__(self, problem: Problem, steps: Steps, extents: list[int]):
        self.problem, self.steps = problem, steps
        self.o_shape = (problem.B, problem.T, problem.HV, problem.V)
        *extents, self.out_extent = extents
        self.extents = [(i, size) for i, size in enumerate(extents) if size > 0]
        self.usable = steps.usable

    @classmethod
    def make(
        cls,
        problem: Problem,
        t: Tensors,
        given: Sequence[torch.Tensor | None],
        out: torch.Tensor | None,
        launches: Launches,
    ) -> Plan | None:
        """The plan of a call that has just run, with its tensors as the caller passed them; None if it can't be repeated."""
        if problem.return_intermediate_states:
            return None
        device = t.v.device
        o, final_state, _ = results = allocate(problem, t, out)
        recorder = Recorder(device, (*given, o))
        for launch in launches(problem, t, capability(device), results):
            recorder.add(launch, {} if final_state is None else {"final_state": final_state})
        steps = recorder.steps()
        return None if steps is None else cls(problem, steps, [0 if x is None else extent(x) for x in (*given, o)])

    def run(
        self,
        given: Sequence[torch.Tensor | None],
        out: torch.Tensor | None,
        addresses: list[int],
        refuse: Callable[[Sequence[torch.Tensor | None], torch.Tensor], None],
    ) -> tuple:
        """`(o, final_state or None)`. `addresses` are those of `given` and `out`, in a list that may be changed. Calls
        `refuse(given, out)` if `out` lies where an input lies."""
        if out is None:
            o = torch.empty(self.o_shape, dtype=self.problem.dtype, device=self.steps.device)
            addresses[-1] = o.data_ptr()
        else:
            o, first = out, addresses[-1]
            end = first + self.out_extent
            for i, size in self.extents:
                if addresses[i] < end and first < addresses[i] + size:
                    refuse(given, out)
        return o, self.steps.run(addresses).get("final_state")


def _with_base(descriptor: object, base: object) -> object:
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
