"""Kernel launches: what one is, and the short way from it to the GPU."""

import contextlib
import contextvars
import ctypes
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction

from ..problem.arguments import extent
from ..problem.problem import replaced

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
    """The compute capability as one number, e.g. 90. The interpreter on the CPU takes the oldest supported GPU's tables."""
    found = _properties(device, _target.get())
    return 80 if found is None else 10 * found.major + found.minor


def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors. Off a GPU, where kernels are only compiled or interpreted, those of an H200."""
    found = _properties(device, _target.get())
    return 132 if found is None else found.multi_processor_count


@functools.cache
def _properties(device: torch.device, target: torch.device | None) -> Any:
    """`target` stands for the meta device."""
    found = target if device.type == "meta" else device
    return torch.cuda.get_device_properties(found) if found is not None and found.type == "cuda" else None


REGISTERS = 65536
"""Registers that an SM has."""


HOPPER_PTXAS = "--regAllocOptLevel=4"
"""The default of ptxas, for Gluon kernels, which are Hopper's. Triton 3.9 asks for level 2 to work around a fault seen on
Blackwell GPUs; kernels with 255 registers then spill up to 248 bytes and take up to a quarter longer (docs/machine-code.md)."""


class Prepared(NamedTuple):
    """A launch made ready: the function that starts it, and the call of that without stream and addresses. `tensors`, and those
    `described` by tensor descriptors: positions in the call, and addresses in slots."""

    act: Callable[..., object]
    call: list
    tensors: list[tuple[int, int]]
    described: list[tuple[int, int]]
    nbytes: Sequence[int] = ()
    """Bytes of the tensors of an exchange."""
    kernel: CompiledKernel | None = None


@dataclass(eq=False)
class Launch:
    """One kernel launch, of tensors in slots; to be prepared for a plan, or compiled for any GPU (`tools/compile.py`).

    The grid is `[ctas, rows]`. `arguments` are the kernel's run-time arguments and `constants` its compile-time ones, both
    in the kernel's order.
    `max_registers` caps the registers of a thread, so that more CTAs fit on an SM. `overlaps`: the kernel waits
    for the one before it by itself, so it may be started early (programmatic dependent launch).
    """

    kernel: JITFunction
    ctas: int
    arguments: tuple
    constants: dict[str, Any]
    num_warps: int
    max_registers: int | None = None
    overlaps: bool = False
    rows: int = 1

    def __post_init__(self) -> None:
        self.kinds = tuple(map(type, self.arguments))

    def options(self) -> dict[str, int | bool | str]:
        cap = {} if self.max_registers is None else {"maxnreg": self.max_registers}
        early = {"launch_pdl": True} if self.overlaps else {}
        ptxas = {"ptx_options": HOPPER_PTXAS} if isinstance(self.kernel, JITFunction) and self.kernel.is_gluon() else {}
        # Triton 3.10 stops fusing multiplications and additions by default: numerics and speed would move
        return {"num_warps": self.num_warps, "enable_fp_fusion": True, **cap, **early, **ptxas}

    def prepare(self) -> Prepared:
        """Compiles the kernel, to be launched directly: Triton's own way binds and specialises every argument anew, tens of
        microseconds per launch."""
        call = [self.ctas, self.rows, 1, *[None] * (ARGUMENTS - 3), *self.arguments, *self.constants.values()]
        of_tensors, of_descriptors = _places(self.kinds, ARGUMENTS)
        tensors = [(i, at) for i in of_tensors if (at := call[i].data_ptr()) or call[i].numel() > 0]
        described = [(i, call[i].base.data_ptr()) for i in of_descriptors]
        for i in of_tensors:
            call[i] = 0
        for i in of_descriptors:
            call[i] = replaced(call[i], base=None)
        if knobs.runtime.interpret:
            return Prepared(functools.partial(interpret, self), call, tensors, described)
        kernel = self.compiled()
        act = kernel.run  # loads the machine code, so that there is a function
        call[STREAM + 1 : STREAM + 3] = kernel.function, kernel.packed_metadata
        return Prepared(act, call, tensors, described, kernel=kernel)

    def run(self) -> None:
        """Runs the kernel on tensors that have memory, by Triton's own way."""
        self.kernel[self.ctas, self.rows](*self.arguments, **self.constants, **self.options())

    def compile(self) -> None:
        """Compiles the kernel and loads its machine code; launches nothing."""
        if self.ctas > 0:
            self.prepare()

    def compiled(self) -> CompiledKernel:
        """The kernel for the current device. Triton compiles one for each `_specialization`."""
        key = self._key(current_device())
        kernel = _compiled.get(key)
        if kernel is None:
            grid = self.ctas, self.rows
            kernel = self.kernel.warmup(*self.arguments, grid=grid, **self.constants, **self.options())
            _compiled[key] = kernel
        return kernel

    def _key(self, device: int) -> tuple:
        # the function itself, since a `JITFunction` works out its hash each time
        options = (device, self.kernel.fn, self.num_warps, self.max_registers, self.overlaps)
        return (*options, *self.constants.values(), *_specialization(self.kernel, self.arguments, self.kinds))


_compiled: dict[tuple, CompiledKernel] = {}


STREAM, METADATA, ARGUMENTS = 3, 6, 9
"""Positions in the call of a compiled kernel: the stream, what profilers see, the first argument."""


def show(kernel: CompiledKernel, call: list) -> None:
    """Lets profilers see a launch."""
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    call[METADATA:ARGUMENTS] = kernel.launch_metadata(tuple(call[:STREAM]), call[STREAM], *call[ARGUMENTS:]), *hooks


def interpret(launch: Launch, *call: Any) -> None:
    """Runs the kernel by Triton's interpreter."""
    replaced(launch, arguments=on_cpu(launch.arguments, call[ARGUMENTS:])).run()


def on_cpu(arguments: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """A launch's arguments, with tensors of the CPU's memory in place of those in slots, at the addresses that were `given`."""
    bases = [base_of(x) for x in arguments]
    places = [0 if y is None else y.base.data_ptr() if hasattr(y, "base") else y for y in given]
    sizes = dict[int, int]()
    for at, like in zip(places, bases):
        if like is not None:
            sizes[at] = max(sizes.get(at, 0), extent(like))  # tensors at one address have one storage
    found = []
    for x, like, at in zip(arguments, bases, places):
        if like is not None:
            memory = torch.empty(0, dtype=torch.uint8)
            if sizes[at] > 0:
                memory = torch.frombuffer((ctypes.c_char * sizes[at]).from_address(at), dtype=torch.uint8)
            tensor = memory[: extent(like)].view(like.dtype).as_strided(like.shape, like.stride())
            x = tensor if like is x else replaced(x, base=tensor)
        found.append(x)
    return found


def base_of(x: Any) -> Tensor | None:
    """The tensor of an argument that is one, or a tensor descriptor."""
    x = getattr(x, "base", x)
    return x if isinstance(x, Tensor) else None


class Address:
    """An address, in place of a descriptor's tensor: the launcher asks no more of it."""

    def __init__(self, address: int):
        self.address = address

    def data_ptr(self) -> int:
        return self.address


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
    """True if a profiler wants to see launches."""
    hook = knobs.runtime.launch_enter_hook
    return bool(getattr(hook, "calls", hook))


@functools.cache
def _places(kinds: tuple[type, ...], first: int = 0) -> tuple[list[int], list[int]]:
    """The positions of tensors among arguments of these types, and those of tensor descriptors, counted from `first`."""
    tensors = [i for i, kind in enumerate(kinds, first) if issubclass(kind, Tensor)]
    plain = (int, float, type(None), Tensor)
    return tensors, [i for i, kind in enumerate(kinds, first) if not issubclass(kind, plain)]


_integers: dict[tuple, list[int]] = {}
"""Positions of integers for which Triton compiles a kernel anew where they are 1 or multiples of 16, by function and types."""


def _specialization(kernel: JITFunction, arguments: tuple, kinds: tuple[type, ...]) -> list:
    """Properties that set the machine code: types, which arguments are None, alignment of addresses, and of some integers."""
    integers = _integers.get((kernel.fn, kinds))
    if integers is None:
        ints = [i for i, (x, kind) in enumerate(zip(kernel.params, kinds)) if kind is int and not x.do_not_specialize]
        integers = _integers[kernel.fn, kinds] = ints
    tensors = [arguments[i] for i in _places(kinds)[0]]
    found = [(x == 1, x % 16 == 0, x > 2**31 - 1) for i in integers for x in [arguments[i]]]
    return [kinds, *found, *[x.dtype for x in tensors], *[x.data_ptr() % 16 for x in tensors]]
