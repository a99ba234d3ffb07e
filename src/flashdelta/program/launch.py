"""Kernel launches: what one is, and the short way from it to the GPU."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction

_target = contextvars.ContextVar[torch.device | None]("_target", default=None)


@contextlib.contextmanager
def compiling_for(device: torch.device) -> Iterator[None]:
    """Builds launches of tensors without memory, on the meta device, as for this GPU, which is made the current one."""
    with torch.cuda.device(device):
        token = _target.set(torch.device("cuda", torch.cuda.current_device()))
        try:
            yield
        finally:
            _target.reset(token)


def capability(device: torch.device) -> int:
    """As one number, e.g. 90. The interpreter on the CPU takes the oldest supported GPU's tables."""
    found = _properties(_target.get() if device.type == "meta" else device)
    return 80 if found is None else 10 * found.major + found.minor


def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors. Off a GPU, where kernels are only compiled or interpreted, those of an H200."""
    found = _properties(_target.get() if device.type == "meta" else device)
    return 132 if found is None else found.multi_processor_count


@functools.cache
def _properties(device: torch.device | None) -> Any:
    return torch.cuda.get_device_properties(device) if device is not None and device.type == "cuda" else None


REGISTERS = 65536
"""Of an SM."""


HOPPER_PTXAS = "--regAllocOptLevel=4"
"""The default of ptxas, for Gluon kernels, which are Hopper's. Triton 3.9 asks for level 2 to work around a fault seen on
Blackwell GPUs; kernels with 255 registers then spill up to 248 bytes and take up to a quarter longer (docs/machine-code.md)."""


@dataclass(frozen=True)
class Launch:
    """One kernel launch, ready to run on the device or to be compiled without one (`compile.py`).

    The grid is `[ctas, rows]`. `arguments` are the kernel's run-time arguments and `constants` its compile-time ones, both
    in the kernel's order.
    `max_registers` caps the registers of a thread, so that more CTAs fit on an SM. `overlaps`: the kernel waits
    for the one before it by itself, so it may be started early (programmatic dependent launch). `scratch` are the buffers that
    temporary arguments lie in: what kernels of one call leave for each other.
    """

    kernel: JITFunction
    ctas: int
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

    def run(self) -> CompiledKernel | None:
        """Launches on the current stream of the current device. Returns the compiled kernel, if that can be launched again
        directly.

        Triton's own way binds and specialises every argument anew, tens of microseconds a launch. What it would find is in
        `_specialization`; once it has compiled a kernel for that, the kernel is launched directly.
        """
        if self.ctas <= 0:
            return None
        if knobs.runtime.interpret or hooked():
            self._run_through_triton()
            return None
        device = current_device()
        key = self._key(device)
        compiled = _compiled.get(key)
        if compiled is None:
            compiled = _compiled[key] = self._run_through_triton()
        else:
            start(compiled, device, (self.ctas, self.rows, 1), (*self.arguments, *self.constants.values()))
        return compiled

    def compile(self) -> None:
        """Compiles the kernel and loads its machine code; launches nothing."""
        if self.ctas <= 0:
            return
        key = self._key(current_device())
        if key not in _compiled:
            _compiled[key] = self.kernel.warmup(*self.arguments, grid=(1,), **self.constants, **self.options())
            kernel_call(_compiled[key], (1, 1, 1), ())

    def _key(self, device: int) -> tuple:
        options = (self.num_warps, self.max_registers, self.overlaps)
        return (device, self.kernel, *options, *self.constants.values(), *_specialization(self.kernel, self.arguments))

    def _run_through_triton(self) -> CompiledKernel:
        return self.kernel[(self.ctas, self.rows)](*self.arguments, **self.constants, **self.options())


_compiled: dict[tuple, CompiledKernel] = {}


STREAM, ARGUMENTS = 3, 9
"""Places in the call of a compiled kernel: of the stream, and of the first argument."""


def kernel_call(
    compiled: CompiledKernel, grid: tuple[int, int, int], arguments: Iterable[Any]
) -> tuple[Callable[..., object], list]:
    """A compiled kernel's launcher and what it takes, the stream left out. Addresses may stand for tensors."""
    run = compiled.run  # loads the machine code, so that there is a function
    return run, [*grid, None, compiled.function, compiled.packed_metadata, None, None, None, *arguments]


def start(compiled: CompiledKernel, device: int, grid: tuple[int, int, int], arguments: Iterable[Any]) -> None:
    """Starts a compiled kernel on the current stream."""
    run, call = kernel_call(compiled, grid, arguments)
    call[STREAM] = current_stream(device)
    run(*call)


_thread = threading.local()


def current_device() -> int:
    """The thread's device, whose context is made the thread's: tensor maps are encoded in it, and a new thread that has taken
    its memory from PyTorch's cache has none."""
    device = torch.cuda.current_device()
    if getattr(_thread, "device", None) != device:
        torch.cuda.is_current_stream_capturing()  # any question to the runtime about a stream
        _thread.device = device
    return device


def current_stream(device: int) -> int:
    return torch._C._cuda_getCurrentRawStream(device)


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
    found: list[object] = []
    for x, specialized in zip(arguments, _specialized(kernel)):
        if isinstance(x, int):
            found.append((x == 1, x % 16 == 0, x > 2**31 - 1) if specialized else None)
        elif isinstance(x, torch.Tensor):
            found.append(x.dtype)
            found.append(x.data_ptr() % 16)
        elif x is None:
            found.append("none")
    return found


def strides(*tensors: torch.Tensor) -> list[int]:
    """Of the batch, the token and the head."""
    return [s for x in tensors for s in x.stride()[:3]]
