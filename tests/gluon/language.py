"""Gluon's and Triton's functions for kernels, as far as this project's use them, on `values` and `memory`."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import triton.language as tl
from triton.experimental.gluon.language import BlockedLayout, SliceLayout
from triton.experimental.gluon.language.nvidia.hopper import mbarrier as real_mbarrier

from . import memory
from .machine import Partition, let_others_run, now, run_partitions, wait_until
from .memory import Barriers, Descriptor, Shared
from .values import NUMPY, Fault, Value, check_ranks, meet, result, round_bf16, scalar, shape_of, value

# ---- elementwise ---------------------------------------------------------------------------------------------------


TINY = np.finfo(np.float32).tiny


def flushed(x: np.ndarray) -> np.ndarray:
    """Without the numbers too small for full precision."""
    return x * (np.abs(x) >= TINY)


def of_float(function: Callable) -> Callable:
    """Applies to float32 numbers, as the GPU's approximate instructions: none too small for full precision goes in or out."""

    def call(x: Any) -> Value:
        x = value(x)
        y = flushed(function(flushed(np.asarray(x.data, np.float32))))
        return result(y.astype(NUMPY[x.dtype], copy=False)[()], x.dtype, x.layout)

    return call


exp2 = of_float(np.exp2)
log2 = of_float(np.log2)
exp = of_float(np.exp)
log = of_float(np.log)
sqrt = of_float(np.sqrt)
rsqrt = of_float(lambda x: np.float32(1.0) / np.sqrt(x))
reciprocal = of_float(lambda x: np.float32(1.0) / x)


def abs_(x: Any) -> Value:
    return abs(value(x))


def _extreme(ignoring: Callable, spreading: Callable) -> Callable:
    """A NaN gives way to a number, unless it is asked for."""

    def call(a: Any, b: Any, propagate_nan: Any = tl.PropagateNan.NONE) -> Any:
        if not isinstance(a, Value) and not isinstance(b, Value):
            return builtins_of[ignoring](a, b)
        p, q, dtype, layout = meet(a, b)
        return Value((spreading if propagate_nan == tl.PropagateNan.ALL else ignoring)(p, q), dtype, layout)

    return call


builtins_of = {np.fmin: min, np.fmax: max}
minimum = _extreme(np.fmin, np.minimum)
maximum = _extreme(np.fmax, np.maximum)


def many(function: Callable) -> Callable:
    """`min` and `max`, which take any number of arguments."""
    return lambda *arguments: functools.reduce(function, arguments)


def fma(a: Any, b: Any, c: Any) -> Value:
    return value(a) * b + c


def where(condition: Any, a: Any, b: Any) -> Value:
    condition = value(condition)
    if isinstance(a, Value) and a.dtype.is_ptr():
        at = np.where(condition.data, a.data, b.data)[()]
        return Value(at, a.dtype, a.layout, tuple(dict.fromkeys(a.sources + b.sources)))
    p, q, dtype, layout = meet(a, b)
    chosen = condition.data if condition.dtype is tl.int1 else condition.data != 0
    check_ranks(chosen, p)
    check_ranks(chosen, q)
    return Value(np.where(chosen, p, q)[()], dtype, layout or condition.layout)


def cdiv(a: Any, b: Any) -> Any:
    return (a + b - 1) // b


# ---- shapes --------------------------------------------------------------------------------------------------------


def arange(start: Any, end: Any, layout: Any = None) -> Value:
    return Value(np.arange(operator.index(start), operator.index(end), dtype=np.int32), tl.int32, layout)


def full(shape: Any, x: Any, dtype: tl.dtype, layout: Any = None) -> Value:
    x = value(x).to(dtype).data
    return Value(np.full(shape_of((shape,)), x, NUMPY[dtype])[()], dtype, layout)


def zeros(shape: Any, dtype: tl.dtype, layout: Any = None) -> Value:
    return full(shape, 0, dtype, layout)


def zeros_like(x: Value) -> Value:
    return Value(np.zeros_like(x.data), x.dtype, x.layout)


def join(a: Value, b: Value) -> Value:
    return Value(np.stack([a.data, b.data], axis=-1), a.dtype)


def split(x: Value) -> tuple[Value, Value]:
    return x.with_data(x.data[..., 0]), x.with_data(x.data[..., 1])


def broadcast_to(x: Any, *shape: Any) -> Value:
    x = value(x)
    return x.with_data(np.broadcast_to(x.data, shape_of(shape)))


def expand_dims(x: Value, axis: int) -> Value:
    return x.with_data(np.expand_dims(x.data, axis))


def gather(x: Value, index: Value, axis: int) -> Value:
    count = x.shape[axis]
    if (index.data < 0).any() or (index.data >= count).any():
        raise Fault(f"a gather of elements {index.data.min()} to {index.data.max()} of {count}")
    return Value(np.take_along_axis(x.data, index.data, axis), x.dtype)


def convert_layout(x: Value, layout: Any, assert_trivial: bool = False) -> Value:
    return x.with_data(x.data, layout)


def identity(x: Any, *arguments: Any, **named: Any) -> Any:
    return x


def nothing(*arguments: Any, **named: Any) -> None:
    return None


def static_assert(condition: Any, message: str = "") -> None:
    if not condition:
        raise Fault(f"static_assert: {message}")


def static_range(*bounds: Any) -> Iterator[int]:
    return iter(range(*(operator.index(x) for x in bounds)))


def range_(*bounds: Any, **options: Any) -> Iterator[Value]:
    first = functools.reduce(operator.add, map(value, bounds)).dtype
    for i in range(*(operator.index(x) for x in bounds)):
        yield Value(NUMPY[first](i), first)


# ---- sums ----------------------------------------------------------------------------------------------------------


def over_lanes(x: Value, axis: int) -> bool:
    """Says whether several threads have parts of an axis, as far as `x` knows its layout."""
    layout, rank = x.layout, np.ndim(x.data)
    while isinstance(layout, SliceLayout):
        axis += axis >= layout.dim
        layout, rank = layout.parent, rank + 1
    known = isinstance(layout, BlockedLayout) and len(layout.threads_per_warp) == rank
    return known and layout.threads_per_warp[axis] * layout.warps_per_cta[axis] > 1


def reduce(x: Any, axis: Any, combine: Callable, keep_dims: bool = False) -> Any:
    """Combines neighbours first, so that `combine` need not commute, unless lanes exchange what they have."""
    parts = x if isinstance(x, tuple) else (x,)
    if axis is None:
        parts, axis = tuple(part.reshape([math.prod(part.shape)]) for part in parts), 0
    exchanged = not isinstance(x, tuple) and over_lanes(parts[0], axis)
    parts = tuple(part.with_data(np.moveaxis(part.data, axis, 0)) for part in parts)
    while parts[0].shape[0] > 1:
        first, second = ([part.with_data(part.data[half::2]) for part in parts] for half in (0, 1))
        combined = combine(*first, *second)
        parts = combined if isinstance(combined, tuple) else (combined,)
        if exchanged and not np.array_equal(parts[0].data, combine(*second, *first).data, equal_nan=True):
            raise Fault("a reduction over lanes by what does not commute")
    parts = tuple(Value(part.data[0], part.dtype, part.layout) for part in parts)
    if keep_dims:
        parts = tuple(part.with_data(np.expand_dims(part.data, axis)) for part in parts)
    return parts if isinstance(x, tuple) else parts[0]


def associative_scan(x: Value, axis: int, combine: Callable, reverse: bool = False) -> Value:
    along = np.moveaxis(x.data, axis, 0)
    found = x.with_data(along[::-1] if reverse else along)
    distance = 1
    while distance < len(along):
        later = combine(found.with_data(found.data[:-distance]), found.with_data(found.data[distance:]))
        found = found.with_data(np.concatenate([found.data[:distance], later.data]))
        distance *= 2
    data = found.data[::-1] if reverse else found.data
    return Value(np.moveaxis(data, 0, axis), x.dtype, x.layout)


def _along(function: np.ufunc) -> Callable:
    def call(x: Value, axis: Any = None, keep_dims: bool = False, **options: Any) -> Value:
        dtype = x.dtype
        if dtype is tl.bfloat16:
            dtype = tl.float32
        elif dtype.is_int() and dtype.primitive_bitwidth < 32:
            dtype = tl.int32
        data = function.reduce(x.to(dtype).data, axis=axis, keepdims=keep_dims, dtype=NUMPY[dtype])
        return Value(data, dtype)

    return call


sum_ = _along(np.add)
max_ = _along(np.fmax)
min_ = _along(np.fmin)


def cumsum(x: Value, axis: int = 0, reverse: bool = False) -> Value:
    return associative_scan(x, axis, operator.add, reverse)


def cumprod(x: Value, axis: int = 0, reverse: bool = False) -> Value:
    return associative_scan(x, axis, operator.mul, reverse)


# ---- matrix products -----------------------------------------------------------------------------------------------


def as_operand(x: np.ndarray, dtype: tl.dtype, precision: str | None) -> np.ndarray:
    """As tensor cores read it: of float32 the bits that TF32 has."""
    if dtype is tl.float32 and precision != "ieee":
        return (np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    return x.astype(np.float32, copy=False)


def product(a: Any, b: Any, dtype: tl.dtype, precision: str | None) -> np.ndarray:
    return as_operand(a, dtype, precision) @ as_operand(b, dtype, precision)


def check_product(a: Any, b: Any, acc_shape: list[int] | None) -> None:
    if a.dtype is not b.dtype:
        raise Fault(f"a product of {a.dtype} and {b.dtype}")
    if a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
        raise Fault(f"a product of shapes {a.shape} and {b.shape}")
    if acc_shape is not None and acc_shape != [*a.shape[:-1], b.shape[-1]]:
        raise Fault(f"a product of shapes {a.shape} and {b.shape} is added to {acc_shape}")


def mma_v2(a: Value, b: Value, acc: Value, input_precision: str | None = None) -> Value:
    check_product(a, b, acc.shape)
    return Value(acc.data + product(a.data, b.data, a.dtype, input_precision), acc.dtype, acc.layout)


def dot(
    a: Value,
    b: Value,
    acc: Value | None = None,
    input_precision: str | None = None,
    allow_tf32: bool | None = None,
    max_num_imprecise_acc: Any = None,
    out_dtype: tl.dtype = tl.float32,
) -> Value:
    check_product(a, b, None if acc is None else acc.shape)
    found = product(a.data, b.data, a.dtype, input_precision)
    return Value(found if acc is None else acc.data + found, tl.float32)


class Accumulator:
    """Result of an MMA that nobody has waited for: it is good for another MMA, and to be waited for."""

    def __init__(self, like: Any):
        self.shape, self.dtype, self.layout, self.data = like.shape, like.dtype, like.layout, None

    def __getattr__(self, name: str) -> Any:
        raise Fault(f"{name} of an accumulator that was not waited for")

    def _read(self, *arguments: Any) -> Any:
        raise Fault("an accumulator is read that was not waited for")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = __getitem__ = __truediv__ = _read


def warpgroup_mma(
    a: Any,
    b: Shared,
    acc: Any,
    *,
    use_acc: Any = True,
    precision: Any = None,
    max_num_imprecise_acc: Any = None,
    is_async: bool = False,
) -> Any:
    check_product(a, b, acc.shape)
    for x in (a, b):
        if isinstance(x, Shared):
            x.operand("an MMA")
    if isinstance(a, Accumulator):
        raise Fault("an operand of an MMA is an accumulator that was not waited for")
    found, add = Accumulator(acc), bool(use_acc)

    def compute() -> None:
        left, right = (memory.from_memory(x.cells, x.dtype) if isinstance(x, Shared) else x.data for x in (a, b))
        found.data = product(left, right, a.dtype, precision)
        if add:
            found.data = found.data + acc.data

    now().mmas.append(compute)
    if is_async:
        return found
    return warpgroup_mma_wait(0, deps=[found])


def warpgroup_mma_wait(num_outstanding: int = 0, deps: Any = None) -> Any:
    now().wait(now().mmas, num_outstanding)
    done = tuple(
        Value(x.data, x.dtype, x.layout) if isinstance(x, Accumulator) and x.data is not None else x for x in deps
    )
    return done[0] if len(done) == 1 else done


def fence_async_shared(cluster: bool = False) -> None:
    now().cta.fence()


# ---- memory --------------------------------------------------------------------------------------------------------


def load(p: Value, mask: Any = None, other: Any = None, **options: Any) -> Value:
    return memory.load(p, mask, other)


def store(p: Value, x: Any, mask: Any = None, **options: Any) -> None:
    memory.store(p, x, mask)


def atomic_add(p: Value, x: Any, mask: Any = None, sem: Any = None, scope: Any = None) -> Value:
    before = memory.atomic_add(p, x, mask)
    let_others_run()
    return before


def allocate_shared_memory(dtype: tl.dtype, shape: Any, layout: Any, value: Value | None = None) -> Shared | Barriers:
    if isinstance(layout, real_mbarrier.MBarrierLayout):
        return Barriers.allocate(shape)
    return Shared.allocate(dtype, shape, layout, value)


def reinterpret(x: Shared, dtype: tl.dtype, shape: Any, layout: Any) -> Shared:
    return x.reinterpret(dtype, shape, layout)


def copy_async(shared: Shared, p: Value, mask: Any = None, **options: Any) -> None:
    at, used = memory.lanes(p, mask)
    if list(np.shape(at)) != shared.shape or p.dtype.element_ty is not shared.dtype:
        raise Fault(f"a copy of {p.dtype.element_ty} {np.shape(at)} to {shared.dtype} {shared.shape}")
    cells = memory.gather(p, at, used, 0)
    shared.poison()

    def land() -> None:
        shared.receive(cells)
        now().cta.unfenced.add(shared.extent())

    now().open.append(land)


def mbarrier_arrive(barrier: Barriers, increment_count: bool = True) -> None:
    """Arrives for each thread, once its copies are there."""
    partition, one = now(), barrier.one
    if increment_count:
        raise Fault("an arrival that counts itself")
    one.flying += partition.take_copies()
    one.arrive(32 * partition.num_warps)
    let_others_run()


def copy_tile(
    descriptor: Descriptor, coordinates: Any, barrier: Barriers, shared: Shared, pred: Any = True, **options: Any
) -> None:
    if not pred:
        return
    if math.prod(shared.shape) != math.prod(descriptor.block_shape) or shared.dtype is not descriptor.dtype:
        raise Fault(f"a copy of {descriptor.dtype} {descriptor.block_shape} to {shared.dtype} {shared.shape}")
    tile = descriptor.read(coordinates)
    shared.operand("the TMA unit").poison()
    barrier.one.copied(shared.nbytes, lambda: shared.receive(tile))


def store_tile(descriptor: Descriptor, coordinates: Any, shared: Shared) -> None:
    if math.prod(shared.shape) != math.prod(descriptor.block_shape) or shared.dtype is not descriptor.dtype:
        raise Fault(f"a copy of {shared.dtype} {shared.shape} to {descriptor.dtype} {descriptor.block_shape}")
    shared.operand("the TMA unit")
    now().stores.append(lambda: descriptor.write(coordinates, shared.cells))


def expect(barrier: Barriers, size: int, pred: Any = True) -> None:
    if pred:
        barrier.one.expect(int(size))


def arrive(barrier: Barriers, *, count: int = 1, pred: Any = True) -> None:
    if pred:
        barrier.one.arrive(int(count))
        let_others_run()


def wait_barrier(barrier: Barriers, phase: Any, pred: Any = True, deps: Any = ()) -> None:
    if pred:
        barrier.one.wait(int(phase))


# ---- programs ------------------------------------------------------------------------------------------------------


def program_id(axis: int) -> Value:
    return scalar(now().cta.place[axis])


def num_programs(axis: int) -> Value:
    return scalar(now().cta.grid[axis])


def num_warps() -> int:
    return now().num_warps


def warp_specialize(
    functions: list[tuple[Callable, tuple]], worker_num_warps: list[int], worker_num_regs: Any = None
) -> None:
    parent = now()
    cta, warps = parent.cta, [parent.num_warps, *worker_num_warps]
    partitions = []
    for (function, arguments), count in zip(functions, warps, strict=True):
        partition = Partition(cta, f"{function.__name__} of {parent.name}", count)
        partitions.append((partition, functools.partial(function, *arguments)))
    run_partitions(partitions)


WRITTEN_LATE: list[Callable[[], None]] = []
"""Writes that the kernel before this one has yet to write when it starts: written when it waits for that one."""


def gdc_wait() -> None:
    while WRITTEN_LATE:
        WRITTEN_LATE.pop()()


# ---- PTX -----------------------------------------------------------------------------------------------------------


def bits_of(x: Value) -> np.ndarray:
    return np.ascontiguousarray(x.data, np.float32).view(np.uint32).reshape(np.shape(x.data))


def high_pair(x: Value, y: Value) -> Value:
    return Value(((bits_of(x) >> 16) | (bits_of(y) & 0xFFFF0000)).view(np.int32), tl.int32, x.layout)


def low_pair(x: Value, y: Value) -> Value:
    low = [round_bf16(v.data - (bits_of(v) & 0xFFFF0000).view(np.float32)).view(np.uint32) >> 16 for v in (x, y)]
    return Value((low[0] | low[1] << 16).view(np.int32), tl.int32, x.layout)


def wait_for_all(at: Value) -> Value:
    """Until the semaphore at each address is 128."""
    where_, cells = int(np.ravel(at.data)[0]), now().cta.memories
    found = next((m for m in cells if m.begin <= where_ < m.end), None)
    if found is None:
        raise Fault("a wait for a semaphore that is in no tensor")
    element = (where_ - found.begin) // found.size
    wait_until(lambda: found.cells[element] >= 128, lambda: f"element {element} of {found}: {found.cells[element]}")
    return Value(np.full(np.shape(at.data), found.cells[element]), tl.int32)


PTX: dict[str, Callable] = {
    "ex2.approx.ftz.f32 $0, $1;": exp2,
    "{ .reg .f32 t; neg.f32 t, $1; ex2.approx.ftz.f32 $0, t; }": lambda x: exp2(-x),
    "{ .reg .f32 t; abs.f32 t, $1; neg.f32 t, t; ex2.approx.ftz.f32 $0, t; }": lambda x: exp2(-abs_(x)),
    "lg2.approx.ftz.f32 $0, $1;": log2,
    "rcp.approx.ftz.f32 $0, $1;": reciprocal,
    "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;": lambda x: x.to(tl.float32),
    "cvt.rn.bf16x2.f32 $0, $2, $1;": lambda x: x.to(tl.bfloat16),
    "cvt.rn.f16x2.f32 $0, $2, $1;": lambda x: x.to(tl.float16),
    "and.b32 $0, $1, $2;": lambda x, mask: where(mask, x, 0.0),
    "prmt.b32 $0, $1, $2, 0x7632;": high_pair,
    "{ .reg .f32 a, b; and.b32 a, $1, 0xffff0000; and.b32 b, $2, 0xffff0000; sub.f32 a, $1, a; sub.f32 b, $2, b; "
    "cvt.rn.bf16x2.f32 $0, b, a; }": low_pair,
    "{ prefetch.global.L2 [$1]; mov.u32 $0, 0; }": lambda at: Value(np.zeros(np.shape(at.data), np.int32), tl.int32),
    "{ .reg .pred all; again: ld.acquire.gpu.global.s32 $0, [$1]; "
    "setp.ge.s32 all, $0, 128; @!all bra again; }": wait_for_all,
}
"""Meanings of pieces of assembly. A new one needs an entry."""


def inline_asm_elementwise(
    asm: str, constraints: str, args: list[Value], dtype: tl.dtype, is_pure: bool, pack: int
) -> Value:
    text = " ".join(asm.split())
    if text not in PTX:
        raise Fault(f"assembly that `PTX` does not have: {text}")
    found = PTX[text](*args)
    if found.dtype is not dtype:
        raise Fault(f"{found.dtype} where {dtype} is told of: {text}")
    return found


# ---- the modules that kernels name ---------------------------------------------------------------------------------


class Module:
    """A module of the language: what is interpreted, and of the real one what is no function for kernels."""

    def __init__(self, real: ModuleType, functions: dict[str, Any]):
        self.real = real
        vars(self).update(functions)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.real, name)
        if getattr(found, "__triton_builtin__", False) or hasattr(found, "fn"):
            raise Fault(f"{self.real.__name__}.{name} is not interpreted yet")
        setattr(self, name, found)
        return found


COMMON = {
    **{
        f.__name__: f
        for f in (where, arange, full, zeros, zeros_like, join, split, reduce, associative_scan, cdiv, fma)
    },
    **{f.__name__: f for f in (load, store, atomic_add, program_id, num_programs, static_assert)},
    **{f.__name__: f for f in (broadcast_to, expand_dims, static_range, inline_asm_elementwise)},
    **{"abs": abs_, "sum": sum_, "max": max_, "min": min_, "range": range_},
    **{"minimum": minimum, "maximum": maximum},
    **{"exp2": exp2, "log2": log2, "exp": exp, "log": log, "sqrt": sqrt, "rsqrt": rsqrt},
    **{"multiple_of": identity, "max_contiguous": identity, "assume": nothing, "device_assert": nothing},
    "permute": lambda x, *order: x.permute(*order),
    "reshape": lambda x, *shape: x.reshape(*shape),
    "cast": lambda x, dtype, **options: value(x).to(dtype, **options),
}
GLUON = COMMON | {
    **{f.__name__: f for f in (convert_layout, allocate_shared_memory, num_warps, warp_specialize)},
    **{"barrier": nothing, "thread_barrier": nothing, "num_ctas": lambda: 1, "fence_async_shared": fence_async_shared},
}
TRITON = COMMON | {
    **{"dot": dot, "cumsum": cumsum, "cumprod": cumprod, "gather": gather, "debug_barrier": nothing},
    **{
        "condition": identity,
        "gdc_wait": gdc_wait,
        "gdc_launch_dependents": nothing,
        "num_threads": lambda: 32 * num_warps(),
        "trans": lambda x, *o: x.trans(*o),
    },
}
COPIES = {
    **{"async_load": copy_async, "async_copy_global_to_shared": copy_async, "mbarrier_arrive": mbarrier_arrive},
    "commit_group": lambda: now().commit_copies(),
    "wait_group": lambda outstanding=0: now().wait_copies(int(outstanding)),
}
TMA = {
    **{"async_load": copy_tile, "async_copy_global_to_shared": copy_tile},
    **{"async_store": store_tile, "async_copy_shared_to_global": store_tile},
    "store_wait": lambda pendings=0, read_only=True: now().wait(now().stores, int(pendings)),
}
MBARRIER = {
    **{"wait": wait_barrier, "arrive": arrive, "expect": expect, "invalidate": nothing},
    "init": lambda barrier, count: barrier.one.init(int(count)),
}
HOPPER = {**{f.__name__: f for f in (warpgroup_mma, warpgroup_mma_wait, fence_async_shared, mma_v2)}}
BUILTINS = {"range": range_, "min": many(minimum), "max": many(maximum)}
"""Python's own, in kernels."""
