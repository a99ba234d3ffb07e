"""Kernel launches: what one is, and the short way from it to the GPU."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction

from ..problem.problem import Problem, Results, Tensors
from .cache import Recorder


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


HOPPER_PTXAS = "--regAllocOptLevel=4"
"""The default of ptxas, for Gluon kernels, which are Hopper's. Triton 3.9 asks for level 2 to work around a fault seen on
Blackwell GPUs; kernels with 255 registers then spill up to 248 bytes and take up to a quarter longer (docs/machine-code.md)."""


@dataclass(frozen=True)
class Launch:
    """One kernel launch, ready to run on the device or to be compiled without one (`compile.py`).

    The grid is `[programs, rows]`. `arguments` are the kernel's run-time arguments and `constants` its compile-time ones, both
    in the kernel's order.
    `max_registers` caps the registers of a thread, so that more programs fit on a multiprocessor. `overlaps`: the kernel waits
    for the one before it by itself, so it may be started early (programmatic dependent launch). `scratch` are the buffers that
    temporary arguments lie in: what kernels of one call leave for each other.
    """

    kernel: JITFunction
    programs: int
    arguments: tuple
    constants: dict[str, Any]
    num_warps: int
    max_registers: int | None = None
    overlaps: bool = False
    scratch: tuple[torch.Tensor, ...] = ()
    rows: int = 1

    def options(self) -> dict[str, int | bool | str]:
        cap = {} if self.max_registers is None else {"maxnreg": self.max_registers}
        early = {"launch_pdl": True} if self.overlaps else {}
        ptxas = {"ptx_options": HOPPER_PTXAS} if isinstance(self.kernel, JITFunction) and self.kernel.is_gluon() else {}
        # Triton 3.10 stops fusing multiplications and additions by default: numerics and speed would move
        return {"num_warps": self.num_warps, "enable_fp_fusion": True, **cap, **early, **ptxas}

    def run(self) -> None:
        """Launches on the current stream of the current device.

        Triton's own way binds and specialises every argument anew, tens of microseconds a launch. What it would find is in
        `_specialization`; once it has compiled a kernel for that, the kernel is launched directly.
        """
        if self.programs <= 0:
            return
        if knobs.runtime.interpret or hooked():
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


def hooked() -> bool:
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


Launches = Callable[[Problem, Tensors, int, Results], "list[Launch]"]


def forward(problem: Problem, t: Tensors, out: torch.Tensor | None, launches: Launches) -> Results:
    """Allocates the results and runs `launches(problem, t, capability, results)`."""
    results = allocate(problem, t, out)
    device = t.v.device
    launch_all(launches(problem, t, capability(device), results), device)
    return results


def launch_all(
    launches: Iterable[Launch],
    device: torch.device,
    recorder: Recorder | None = None,
    outputs: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """In order; each runs, and is let go of, before the next is asked for. `outputs`: what they leave, by name, as far as it
    has been allocated when a launch is asked for."""
    with _current(device):
        for launch in launches:
            launch.run()
            if recorder is not None:
                recorder.add(launch, outputs or {})
            del launch


def allocate(problem: Problem, t: Tensors, out: torch.Tensor | None) -> Results:
    o = torch.empty(t.v.shape, dtype=problem.dtype, device=t.v.device) if out is None else out
    final_state = None
    if problem.output_final_state:
        final_state = torch.empty(problem.state_shape, dtype=problem.state_dtype, device=o.device)
    h = None
    if problem.return_intermediate_states:
        # packed: rows past the last chunk stay zero
        make = torch.zeros if problem.packed else torch.empty
        h = make(problem.intermediate_shape, dtype=problem.dtype, device=o.device)
    return o, final_state, h


def _current(device: torch.device) -> contextlib.AbstractContextManager:
    """Kernels launch on the current device, which need not be the tensors'."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def dense(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if x is None else x.contiguous() for x in tensors]


def or_empty(problem: Problem, t: Tensors, *states: torch.Tensor | None) -> list[torch.Tensor]:
    """The states, with one empty tensor for all that the call does not have."""
    absent = t.v.new_empty(0, dtype=problem.state_dtype) if any(x is None for x in states) else None
    return [absent if x is None else x for x in states]


def state_arguments(problem: Problem, t: Tensors, final_state: torch.Tensor | None) -> tuple:
    """Where states are read and stored, as the kernels take it (`triton/device/states.py`). For a state that the call does not
    have, an empty tensor, which the kernel leaves alone."""
    if problem.has_pool:
        initial = final = t.state_pool
        pitch = t.state_pool.stride(0)
    else:
        initial, final = or_empty(problem, t, t.initial_state, final_state)
        pitch = problem.HV * problem.K * problem.V
    return (
        *(initial, final, t.state_indices, t.has_initial_state, problem.lowest_index, problem.pool_slots),
        *(int(problem.has_initial_state), int(problem.output_final_state), pitch),
    )


def strides(*tensors: torch.Tensor) -> list[int]:
    return [s for x in tensors for s in x.stride()[:3]]
