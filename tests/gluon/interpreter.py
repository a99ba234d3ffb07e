"""An interpreter for Gluon, and for the Triton kernels beside it: kernels run on CPU tensors, from the real host code.

    with hopper_on_cpu():                                   # launches are interpreted, and the Hopper backend takes CPU tensors
        fd.chunk_kda(**make_call(case, torch.bfloat16), backend="hopper")
    run(launch)                                             # or one `Launch`, such as a new kernel's, at a time

A kernel's functions are the Python that they are written in, with `gl`, `tl` and the like replaced by `language`: CTAs run one
after another, numbers are NumPy arrays (`values`). Layouts of registers mean nothing here, and shared memory lies in the order
of its shape. Results are those of exact functions on operands as they are rounded; a sum's order is not the GPU's.

What a GPU would not tell is told: accesses outside of the tensor a pointer came from (`memory`), waits and fences that are
missing, places that are written too early, deadlocks (`machine`).
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import itertools
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import ampere, hopper
from triton.language.extra import cuda
from triton.runtime.jit import JITFunction

from flashdelta import backends
from flashdelta.kernels.hopper import build
from flashdelta.kernels.shared.gluon import compat
from flashdelta.program.launch import Launch

from ..support.replays import interpreted_by
from . import language, machine
from .language import Module
from .machine import Cta, run_ctas
from .memory import Descriptor, Memory
from .values import Fault, Value, scalar

MODULES = {
    id(module): Module(module, functions)
    for module, functions in (
        (gl, language.GLUON),
        (tl, language.TRITON),
        (cuda, language.TRITON),
        (ampere, language.HOPPER),
        (hopper, language.HOPPER),
        (ampere.async_copy, language.COPIES),
        (hopper.tma, language.TMA),
        (hopper.mbarrier, language.MBARRIER),
    )
}
COMPAT = {
    id(getattr(compat, name)): function
    for name, function in (
        ("copy_async", language.copy_async),
        ("copy_tile", language.copy_tile),
        ("store_tile", language.store_tile),
        ("barrier", language.nothing),
        ("reinterpret", language.reinterpret),
    )
}
NAMED = language.GLUON | language.TRITON | language.HOPPER
"""Functions of the language that kernels may import by name."""


# ---- functions -----------------------------------------------------------------------------------------------------


class _Typed(ast.NodeTransformer):
    """A number of Python's that is assigned to a variable becomes a scalar of the kernel's, unless it is a constant's: this is
    what Triton does."""

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        self.generic_visit(node)
        return ast.copy_location(ast.Assign(node.targets, _assigned(node.value)), node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        self.generic_visit(node)
        before = ast.parse(ast.unparse(node.target), mode="eval").body
        total = ast.copy_location(ast.BinOp(before, node.op, node.value), node)
        return ast.fix_missing_locations(ast.copy_location(ast.Assign([node.target], _assigned(total)), node))


def _assigned(node: ast.expr) -> ast.expr:
    call = ast.Call(ast.Name("__assigned__", ast.Load()), [node], [])
    return ast.fix_missing_locations(ast.copy_location(call, node))


def assigned(x: Any) -> Any:
    if type(x) is Value:
        return x
    if isinstance(x, tuple):
        return tuple(map(assigned, x))
    return scalar(x) if isinstance(x, (bool, int, float)) else x


class Function:
    """A function of a kernel."""

    def __init__(self, real: Any):
        self.real = real
        self.__name__ = real.fn.__name__

    @functools.cached_property
    def python(self) -> Callable:
        fn, first = self.real.fn, self.real.starting_line_number
        tree = ast.parse(textwrap.dedent("".join(self.real.raw_src)))
        definition = tree.body[0]
        assert isinstance(definition, ast.FunctionDef)
        definition.decorator_list, definition.returns = [], None
        for argument in (*definition.args.args, *definition.args.kwonlyargs):
            argument.annotation = None
        tree = ast.increment_lineno(_Typed().visit(tree), first - 1)
        code = compile(tree, inspect.getsourcefile(fn) or "", "exec", dont_inherit=True)
        space = {"__assigned__": assigned, **language.BUILTINS}
        names = {name for constant in _codes(code) for name in constant.co_names}
        space |= {name: interpreted(fn.__globals__[name]) for name in names if name in fn.__globals__}
        exec(code, space)
        return space[definition.name]

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self.python(*arguments, **named)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def record(real: type) -> type:
    """An aggregate: its fields in order, and its methods."""
    # Triton 3.6 leaves the fields to the class that it wraps
    fields = tuple(inspect.getclosurevars(real.__new__).nonlocals["cls"].__annotations__)

    def init(self: Any, *values: Any) -> None:
        for name, x in zip(fields, values, strict=True):
            setattr(self, name, x)

    methods = {name: inspect.getattr_static(real, name) for name in dir(real)}
    functions = {name: interpreted(x) for name, x in methods.items() if isinstance(x, JITFunction)}
    return type(real.__name__, (), {**functions, "__init__": init})


class Names:
    """A module of the project's: its functions as kernels call them."""

    def __init__(self, real: types.ModuleType):
        self.real = real

    def __getattr__(self, name: str) -> Any:
        return interpreted(getattr(self.real, name))


_interpreted: dict[int, tuple[Any, Any]] = {}
"""Keyed by the identity of what is kept beside it."""


def interpreted(x: Any) -> Any:
    """Translates a kernel's global."""
    if isinstance(x, tl.constexpr):
        return interpreted(x.value)
    if isinstance(x, tuple) and type(x) is tuple:
        return tuple(map(interpreted, x))
    found = MODULES.get(id(x)) or COMPAT.get(id(x))
    if found is not None:
        return found
    if id(x) not in _interpreted:
        _interpreted[id(x)] = (x, _translated(x))
    return _interpreted[id(x)][1]


def _translated(x: Any) -> Any:
    if isinstance(x, type) and getattr(x, "__triton_aggregate__", False):
        return record(x)
    if isinstance(x, triton.runtime.jit.ConstexprFunction):
        return x.fn
    if isinstance(x, types.ModuleType) and x.__name__.startswith("flashdelta."):
        return Names(x)
    library = (getattr(x, "__module__", "") or "").startswith("triton.")
    name = getattr(x, "__name__", "")
    if library and name in NAMED and not isinstance(x, types.ModuleType):
        return NAMED[name]
    if hasattr(x, "fn") and hasattr(x, "arg_names"):
        return Function(x)
    if library and getattr(x, "__triton_builtin__", False):
        raise Fault(f"{x.__module__}.{name} is not interpreted yet")
    return x


# ---- launches ------------------------------------------------------------------------------------------------------


def argument(name: str, annotation: str, x: Any) -> Any:
    """As a kernel takes it."""
    if isinstance(x, torch.Tensor):
        return Memory(name, x).pointer()
    if hasattr(x, "block_shape"):
        return Descriptor(name, x)
    if not isinstance(x, (bool, int, float)):
        return x
    told = annotation.rpartition(".")[2]
    if told in ("int32", "int64", "float32"):
        return scalar(x).to(getattr(tl, told))
    return scalar(x)


def run(launch: Launch) -> None:
    parameters = launch.kernel.params
    given = [argument(p.name, str(p.annotation or ""), x) for p, x in zip(parameters, launch.arguments)]
    missing = [p.name for p in parameters[len(given) :] if p.name not in launch.constants]
    if missing:
        raise Fault(f"{launch.kernel.__name__}: no argument {', '.join(missing)}")
    memories = [x.sources[0] for x in given if isinstance(x, Value) and x.sources]
    grid = (launch.ctas, launch.rows)
    body = functools.partial(interpreted(launch.kernel), *given, **launch.constants)
    places = itertools.product(range(launch.rows), range(launch.ctas))
    run_ctas([(Cta(launch.kernel.__name__, (x, y), grid, launch.num_warps, memories), body) for y, x in places])


def _as_on_hopper(obstacle: Callable) -> Callable:
    return lambda self, problem, device: obstacle(self, problem, torch.device("cuda"))


@contextlib.contextmanager
def hopper_on_cpu(sms: int | None = None, **order: bool) -> Iterator[None]:
    """Backends take CPU tensors for a Hopper GPU's, and launches are interpreted. `sms`: SMs that the host code sees; with few
    of them a persistent CTA has several work tiles. `order`: of `machine.Order`."""
    kinds = (backends.HopperBackend, backends.TritonBackend)
    patches = [
        *(mock.patch.object(kind, "obstacle", _as_on_hopper(kind.obstacle)) for kind in kinds),
        mock.patch.object(backends, "_cached_capability", lambda index: (9, 0)),
        mock.patch.object(Launch, "compiled", interpreted_by(run)),
        mock.patch.object(build, "capability", lambda device: 90),
        mock.patch.object(machine, "ORDER", machine.Order(**order)),
    ]
    if sms is not None:
        modules = [x for name, x in sys.modules.items() if name.startswith("flashdelta.") and hasattr(x, "sm_count")]
        patches += [mock.patch.object(module, "sm_count", lambda device: sms) for module in modules]
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield
