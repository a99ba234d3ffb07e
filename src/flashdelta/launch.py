"""Kernel launches: what one is, and the short way from it to the GPU."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction

from .spec import KdaSpec, KdaTensors, Results, extent


@functools.cache
def capability(device: torch.device) -> int:
    """As one number, e.g. 90. The interpreter on the CPU takes the oldest supported GPU's tables."""
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Off a GPU, where kernels are only compiled or interpreted, those of an H200."""
    if device.type != "cuda":
        return 132
    return torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True)
class Launch:
    """One kernel launch, ready to run on the device or to be compiled without one (`compile.py`).

    The grid is `[programs, rows]`. `arguments` are the kernel's run-time arguments and `constants` its compile-time ones, both
    in the kernel's order.
    `max_registers` caps the registers of a thread, so that more programs fit on a multiprocessor. `overlaps`: the kernel waits
    for the one before it by itself, so it may be started early (programmatic dependent launch). `workspace` is the buffer that
    temporary arguments lie in.
    """

    kernel: JITFunction
    programs: int
    arguments: tuple
    constants: dict[str, object]
    num_warps: int
    max_registers: int | None = None
    overlaps: bool = False
    workspace: torch.Tensor | None = None
    rows: int = 1

    def options(self) -> dict[str, int]:
        cap = {} if self.max_registers is None else {"maxnreg": self.max_registers}
        early = {"launch_pdl": True} if self.overlaps else {}
        return {"num_warps": self.num_warps, **cap, **early}

    def run(self) -> None:
        """Launches on the current stream of the current device.

        Triton's own way binds and specialises every argument anew, tens of microseconds a launch. What it would find is in
        `_specialization`; once it has compiled a kernel for that, the kernel is launched directly.
        """
        if self.programs <= 0:
            return
        if knobs.runtime.interpret or _hooked():
            self._run_through_triton()
            return
        device = torch.cuda.current_device()
        compiled = self.compiled(device)
        if compiled is None:
            _compiled[self._key(device)] = self._run_through_triton()
            return
        start(compiled, device, (self.programs, self.rows, 1), (*self.arguments, *self.constants.values()))

    def compiled(self, device: int) -> CompiledKernel | None:
        """The kernel as compiled by an earlier launch like this one."""
        return _compiled.get(self._key(device))

    def _key(self, device: int) -> tuple:
        options = (self.num_warps, self.max_registers, self.overlaps)
        return (device, self.kernel, *options, *self.constants.values(), *_specialization(self.kernel, self.arguments))

    def _run_through_triton(self) -> CompiledKernel:
        return self.kernel[(self.programs, self.rows)](*self.arguments, **self.constants, **self.options())


_compiled: dict[tuple, CompiledKernel] = {}


def start(compiled: CompiledKernel, device: int, grid: tuple[int, int, int], arguments: tuple | list) -> None:
    """Starts a compiled kernel on the current stream. Addresses may stand for tensors."""
    stream = torch._C._cuda_getCurrentRawStream(device)
    compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)


def _hooked() -> bool:
    """Whether a profiler wants to see launches."""
    hook = knobs.runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook))


@functools.cache
def _specialized(kernel: JITFunction) -> tuple[bool, ...]:
    """For each parameter whether Triton compiles integers that are 1 or multiples of 16 on their own."""
    return tuple(not p.do_not_specialize for p in kernel.params)


def _specialization(kernel: JITFunction, arguments: tuple) -> list:
    """What the machine code depends on: types, which arguments are None, alignment of addresses, and of some integers."""
    found = []
    for x, specialized in zip(arguments, _specialized(kernel)):
        if isinstance(x, int):
            found.append((x == 1, x % 16 == 0, x > 2**31 - 1) if specialized else None)
        elif isinstance(x, torch.Tensor):
            found.append(x.dtype)
            found.append(x.data_ptr() % 16)
        elif x is None:
            found.append("none")
    return found


Launches = Callable[[KdaSpec, KdaTensors, int, Results], "list[Launch]"]


def forward(spec: KdaSpec, t: KdaTensors, out: torch.Tensor | None, launches: Launches) -> Results:
    """Allocates the results and runs `launches(spec, t, capability, results)`."""
    results = allocate(spec, t, out)
    device = t.v.device
    launch_all(launches(spec, t, capability(device), results), device)
    return results


def launch_all(launches: Iterable[Launch], device: torch.device) -> None:
    """In order; each runs, and is let go of, before the next is asked for."""
    with _current(device):
        for launch in launches:
            launch.run()
            del launch


def allocate(spec: KdaSpec, t: KdaTensors, out: torch.Tensor | None) -> Results:
    o = torch.empty(t.v.shape, dtype=spec.dtype, device=t.v.device) if out is None else out
    final_state = None
    if spec.output_final_state:
        final_state = torch.empty(spec.state_shape, dtype=spec.state_dtype, device=o.device)
    h = None
    if spec.return_intermediate_states:
        # packed: rows past the last chunk stay zero
        make = torch.zeros if spec.packed else torch.empty
        h = make(spec.intermediate_shape, dtype=spec.dtype, device=o.device)
    return o, final_state, h


def _current(device: torch.device) -> contextlib.AbstractContextManager:
    """Kernels launch on the current device, which need not be the tensors'."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def dense(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if x is None else x.contiguous() for x in tensors]


def or_empty(spec: KdaSpec, t: KdaTensors, *states: torch.Tensor | None) -> list[torch.Tensor]:
    """The states, with one empty tensor for all that the call does not have."""
    absent = t.v.new_empty(0, dtype=spec.state_dtype) if any(x is None for x in states) else None
    return [absent if x is None else x for x in states]


def state_arguments(spec: KdaSpec, t: KdaTensors, final_state: torch.Tensor | None) -> tuple:
    """Where states are read and stored, as the kernels take it (`triton/states.py`). For a state that the call does not
    have, an empty tensor, which the kernel leaves alone."""
    if spec.has_pool:
        initial = final = t.state_pool
        pitch = t.state_pool.stride(0)
    else:
        initial, final = or_empty(spec, t, t.initial_state, final_state)
        pitch = spec.HV * spec.K * spec.V
    return (
        *(initial, final, t.state_indices, t.has_initial_state, spec.lowest_index, spec.pool_slots),
        *(int(spec.has_initial_state), int(spec.output_final_state), pitch),
    )


def strides(*tensors: torch.Tensor) -> list[int]:
    return [s for x in tensors for s in x.stride()[:3]]


class Plan:
    """A call that repeats: its launches with everything in place but the addresses.

    Valid for calls whose tensors have the same shapes, strides, dtypes, device and alignment, and whose other arguments are
    equal; `plans.py` sees to that. A run allocates the results and one workspace, fills in addresses, and launches.
    """

    def __init__(self, spec: KdaSpec, device: torch.device, steps: list, workspace_bytes: int, extents: list[int]):
        self.spec, self.device, self.steps, self.workspace_bytes = spec, device, steps, workspace_bytes
        self.o_shape = (spec.B, spec.T, spec.HV, spec.V)
        *extents, self.out_extent = extents
        self.extents = [(i, size) for i, size in enumerate(extents) if size > 0]

    @classmethod
    def make(
        cls,
        spec: KdaSpec,
        t: KdaTensors,
        given: Sequence[torch.Tensor | None],
        out: torch.Tensor | None,
        launches: Launches,
    ) -> Plan | None:
        """The plan of a call that has just run; None if it can't be repeated from the addresses of `given`, its tensors as
        the caller passed them (an input had to be copied, or two share an address). An argument may also lie inside a given
        tensor, the first that it could be a view of."""
        device = t.v.device
        if spec.return_intermediate_states or device.index != torch.cuda.current_device():
            return None
        results = allocate(spec, t, out)
        extents = [0 if x is None else extent(x) for x in (*given, results[0])]
        bases: dict[int, int] = {}
        for i, x in enumerate((*given, *results[:2])):
            if x is not None and x.numel() > 0:
                if x.data_ptr() in bases:
                    return None
                bases[x.data_ptr()] = i
        steps, workspace = [], None
        for launch in launches(spec, t, capability(device), results):
            compiled = launch.compiled(device.index)
            if compiled is None or launch.programs <= 0:
                return None
            template, places, described = [*launch.arguments, *launch.constants.values()], [], []
            for position, x in enumerate(launch.arguments):
                tensor = getattr(x, "base", x)
                if not isinstance(tensor, torch.Tensor):
                    continue
                address, offset = tensor.data_ptr(), 0
                index = bases.get(address)
                template[position] = 0
                if tensor.numel() == 0:
                    continue
                if index is None:
                    index, offset = _inside(address, given, extents)
                if index is None:
                    workspace = launch.workspace
                    if workspace is None or not 0 <= address - workspace.data_ptr() < workspace.nbytes:
                        return None
                    index, offset = len(given) + 2, address - workspace.data_ptr()
                if tensor is not x:
                    template[position] = copy.copy(x)
                    template[position].base = None
                (places if tensor is x else described).append((position, index, offset))
            steps.append((compiled, (launch.programs, launch.rows, 1), template, places, described))
        return cls(spec, device, steps, 0 if workspace is None else workspace.nbytes, extents)

    def run(
        self,
        given: Sequence[torch.Tensor | None],
        out: torch.Tensor | None,
        addresses: list[int],
        refuse: Callable[[Sequence[torch.Tensor | None], torch.Tensor], None],
    ) -> tuple:
        """`(o, final_state or None)`. `addresses` are those of `given` and `out`, in a list that may be changed. Calls
        `refuse(given, out)` if `out` lies where an input lies."""
        spec, device = self.spec, self.device
        if out is None:
            o = torch.empty(self.o_shape, dtype=spec.dtype, device=device)
            addresses[-1] = o.data_ptr()
        else:
            o, first = out, addresses[-1]
            end = first + self.out_extent
            for i, size in self.extents:
                if addresses[i] < end and first < addresses[i] + size:
                    refuse(given, out)
        final_state = workspace = None
        if spec.output_final_state:
            final_state = torch.empty(spec.state_shape, dtype=spec.state_dtype, device=device)
        if self.workspace_bytes:
            workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=device)
        addresses += (
            0 if final_state is None else final_state.data_ptr(),
            0 if workspace is None else workspace.data_ptr(),
        )
        for compiled, grid, template, places, described in self.steps:
            arguments = template.copy()
            for position, index, offset in places:
                arguments[position] = addresses[index] + offset
            for position, index, offset in described:
                descriptor = arguments[position] = copy.copy(arguments[position])
                descriptor.base = _Address(addresses[index] + offset)
            start(compiled, device.index, grid, arguments)
        return o, final_state

    def usable(self) -> bool:
        return torch.cuda.current_device() == self.device.index and not _hooked()


def _inside(address: int, given: Sequence[torch.Tensor | None], extents: Sequence[int]) -> tuple[int | None, int]:
    """The first given tensor in whose memory the address lies, by its place, and the offset there in bytes."""
    for i, (x, size) in enumerate(zip(given, extents)):
        if x is not None and 0 <= address - x.data_ptr() < size:
            return i, address - x.data_ptr()
    return None, 0


class _Address:
    """What a tensor descriptor asks of its tensor."""

    def __init__(self, address: int):
        self.address = address

    def data_ptr(self) -> int:
        return self.address
