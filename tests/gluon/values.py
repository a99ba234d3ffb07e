"""Tensors and scalars of an interpreted kernel: a NumPy array and Triton's type of it, with Triton's rules of promotion.

A bfloat16 is kept as the float32 it equals. A pointer is an array of addresses, with the tensors that it may lead to.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.language.semantic import TritonSemantic


class Fault(AssertionError):
    """An error of a kernel."""


INTEGERS, FLOATS = ("int8", "int16", "int32", "int64", "uint8"), ("float16", "float32", "float64")
NUMPY = {tl.int1: np.bool_, tl.bfloat16: np.float32}
NUMPY |= {getattr(tl, name): getattr(np, name) for name in (*INTEGERS, "uint16", "uint32", "uint64", *FLOATS)}
"""Types that numbers are kept as."""

STORED = NUMPY | {tl.bfloat16: np.uint16}
"""Types that they have in memory."""

OF_TORCH = {torch.bool: tl.int1}
OF_TORCH |= {getattr(torch, name): getattr(tl, name) for name in (*INTEGERS, *FLOATS, "bfloat16")}

UNDEFINED = {kind: np.array(-1).astype(kind) if kind != np.bool_ else np.array(True) for kind in set(STORED.values())}
"""Values of memory that nobody wrote: all ones where that is NaN."""
UNDEFINED |= {kind: np.array(np.nan, kind) for kind in (np.float16, np.float32, np.float64)}


def round_bf16(x: np.ndarray) -> np.ndarray:
    """To the nearest bfloat16, ties to even; a NaN stays one."""
    x = np.asarray(x, np.float32)
    bits = x.view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded &= 0xFFFF0000
    return np.where(x == x, rounded.view(np.float32), np.float32(np.nan))[()]


def from_memory(cells: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    if dtype is tl.bfloat16:
        return (cells.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return cells.copy()


def to_memory(x: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    if dtype is tl.bfloat16:
        x = np.asarray(x, np.float32)
        # a NaN may have no bits but the last ones
        return np.where(x == x, x.view(np.uint32) >> 16, 0x7FFF).astype(np.uint16)
    return x


class TypeOf:
    """`x.type`, as far as kernels ask."""

    def __init__(self, x: Any):
        self.layout, self.shape, self.element_ty = x.layout, x.shape, x.dtype
        self.scalar = x.dtype


class Value:
    """`sources`: of pointers, the tensors (`memory.Memory`) that they may lead to."""

    __slots__ = ("data", "dtype", "layout", "sources")

    def __init__(self, data: Any, dtype: tl.dtype, layout: Any = None, sources: tuple = ()):
        self.data, self.dtype, self.layout, self.sources = data, dtype, layout, sources

    @property
    def shape(self) -> list[int]:
        return list(self.data.shape)

    @property
    def numel(self) -> int:
        return int(np.size(self.data))

    @property
    def type(self) -> TypeOf:
        return TypeOf(self)

    def __repr__(self) -> str:
        return f"Value({self.data}, {self.dtype})"

    def with_data(self, data: Any, layout: Any = None) -> Value:
        return Value(data, self.dtype, layout, self.sources)

    def __bool__(self) -> bool:
        if self.data.ndim:
            raise Fault(f"a branch on a tensor of shape {self.shape}")
        return bool(self.data)

    def __index__(self) -> int:
        if self.data.ndim or not self.dtype.is_int():
            raise Fault(f"a tensor {self.dtype} {self.shape} where an integer is wanted")
        return int(self.data)

    def __getitem__(self, key: Any) -> Value:
        return self.with_data(self.data[key])

    def to(self, dtype: tl.dtype, fp_downcast_rounding: Any = None, bitcast: bool = False) -> Value:
        if dtype is self.dtype:
            return self
        if self.dtype.is_ptr() or dtype.is_ptr():
            return Value(self.data, dtype, self.layout, self.sources)
        if bitcast:
            cells = np.asarray(to_memory(self.data, self.dtype)).view(STORED[dtype])
            return Value(from_memory(cells, dtype)[()], dtype, self.layout)
        return Value(converted(self.data, self.dtype, dtype), dtype, self.layout)

    cast = to

    def reshape(self, *shape: Any) -> Value:
        return self.with_data(self.data.reshape(shape_of(shape)))

    def permute(self, *order: Any) -> Value:
        return self.with_data(self.data.transpose(shape_of(order)))

    def trans(self, *order: Any) -> Value:
        return self.permute(order) if order else self.with_data(self.data.swapaxes(-1, -2))

    @property
    def T(self) -> Value:
        return self.trans()

    def __neg__(self) -> Value:
        return self.with_data(-self.data, self.layout)

    def __invert__(self) -> Value:
        return self.with_data(~self.data, self.layout)

    def __abs__(self) -> Value:
        return self.with_data(np.abs(self.data), self.layout)


def shape_of(arguments: Any) -> tuple[int, ...]:
    """From `(2, 3)`, `([2, 3],)` or `((2, 3),)`."""
    if len(arguments) == 1 and isinstance(arguments[0], (list, tuple)):
        arguments = arguments[0]
    return tuple(operator.index(n) for n in arguments)


def converted(x: Any, old: tl.dtype, new: tl.dtype) -> Any:
    if new is tl.int1:
        return x != 0
    if new is tl.bfloat16:
        return round_bf16(x)
    if old.is_floating() and new.is_int():
        # as the GPU: towards zero, saturated, 0 for NaN
        limits = np.iinfo(NUMPY[new])
        whole = np.nan_to_num(np.trunc(np.asarray(x, np.float64)), nan=0.0)
        inside = np.clip(whole, float(limits.min), float(limits.max))
        return np.where(inside >= float(limits.max), limits.max, inside.astype(np.int64)).astype(NUMPY[new])[()]
    return x.astype(NUMPY[new])


# ---- types ---------------------------------------------------------------------------------------------------------


def scalar(x: bool | int | float) -> Value:
    """A number of Python's, as Triton types it."""
    if isinstance(x, (bool, np.bool_)):
        return Value(np.bool_(x), tl.int1)
    return whole(x) if isinstance(x, int) else Value(np.float32(x), tl.float32)


@functools.cache
def whole(x: int) -> Value:
    if -(2**31) <= x < 2**31:
        return Value(np.int32(x), tl.int32)
    return Value(np.int64(x), tl.int64) if x < 2**63 else Value(np.uint64(x), tl.uint64)


def value(x: Any) -> Value:
    if type(x) is Value:
        return x
    if isinstance(x, (bool, int, float)):
        return scalar(x)
    raise Fault(f"{type(x).__name__} where a tensor is wanted: {x!r}")


promoted = functools.cache(TritonSemantic(None).computation_type_impl)
"""The type in which two operands meet: of the two types, whether each is a number of Python's, and whether they are divided."""


def meet(a: Any, b: Any, division: bool = False) -> tuple[Any, Any, tl.dtype, Any]:
    """Two operands as arrays of one type, and a layout."""
    x, y = a if type(a) is Value else value(a), b if type(b) is Value else value(b)
    p, q, dtype = x.data, y.data, x.dtype
    if dtype is not y.dtype or division:
        dtype = promoted(dtype, x is not a, y.dtype, y is not b, division)
        if x.dtype is not dtype:
            p = converted(p, x.dtype, dtype)
        if y.dtype is not dtype:
            q = converted(q, y.dtype, dtype)
    if 0 != p.ndim != q.ndim != 0:
        check_ranks(p, q)
    return p, q, dtype, x.layout if p.ndim else y.layout


def check_ranks(p: Any, q: Any) -> None:
    if 0 != p.ndim != q.ndim != 0:
        raise Fault(f"shapes {p.shape} and {q.shape} have different ranks")


def result(data: Any, dtype: tl.dtype, layout: Any) -> Value:
    return Value(round_bf16(data) if dtype is tl.bfloat16 else data, dtype, layout)


def arithmetic(function: Callable, of_pointers: bool = False) -> tuple[Callable, Callable]:
    def forward(a: Any, b: Any) -> Value:
        if of_pointers:
            if type(a) is Value and a.sources and a.dtype.is_ptr():
                return moved(a, b, function)
            if type(b) is Value and b.sources and b.dtype.is_ptr():
                return moved(b, a, function)
        p, q, dtype, layout = meet(a, b)
        if dtype is tl.int1:  # of two truth values: 32 bits hold the sum
            return Value(function(p.astype(np.int32), q.astype(np.int32)) != 0, tl.int1, layout)
        return result(function(p, q), dtype, layout)

    return forward, lambda a, b: forward(b, a)


def moved(p: Value, offset: Any, function: Callable) -> Value:
    by = value(offset)
    check_ranks(p.data, by.data)
    size = np.int64(p.dtype.element_ty.primitive_bitwidth // 8 or 1)  # the offset becomes an int64
    return Value(function(p.data, by.data * size), p.dtype, by.layout, p.sources)


def divide(a: Any, b: Any) -> Value:
    p, q, dtype, layout = meet(a, b, division=True)
    if dtype.is_int():
        p, q, dtype = converted(p, dtype, tl.float32), converted(q, dtype, tl.float32), tl.float32
    return result(p / q, dtype, layout)


def quotient(p: Any, q: Any) -> Any:
    """Towards zero, as C has it."""
    whole = p // q
    return whole if (whole >= 0).all() else whole + ((whole < 0) & (whole * q != p)).astype(whole.dtype)


def divide_whole(a: Any, b: Any) -> Value:
    p, q, dtype, layout = meet(a, b)
    return Value(quotient(p, q), dtype, layout)


def remainder(a: Any, b: Any) -> Value:
    p, q, dtype, layout = meet(a, b)
    if dtype.is_int():
        return Value(p - quotient(p, q) * q, dtype, layout)
    return result(np.fmod(p, q), dtype, layout)


def bitwise(function: Callable) -> Callable:
    def forward(a: Any, b: Any) -> Value:
        p, q, dtype, layout = meet(a, b)
        return Value(function(p, q), dtype, layout)

    return forward


def compare(function: Callable) -> Callable:
    def forward(a: Any, b: Any) -> Value:
        if isinstance(a, Value) and a.dtype.is_ptr() and isinstance(b, Value):
            return Value(function(a.data, b.data), tl.int1, a.layout)
        p, q, _, layout = meet(a, b)
        return Value(function(p, q), tl.int1, layout)

    return forward


def _install() -> None:
    for name, function, of_pointers in (
        ("add", operator.add, True),
        ("sub", operator.sub, True),
        ("mul", operator.mul, False),
    ):
        forward, backward = arithmetic(function, of_pointers)
        setattr(Value, f"__{name}__", forward)
        setattr(Value, f"__r{name}__", backward)
    others = {"truediv": divide, "floordiv": divide_whole, "mod": remainder}
    others |= {name: bitwise(getattr(operator, name + "_")) for name in ("and", "or")}
    others |= {name: bitwise(getattr(operator, name)) for name in ("xor", "lshift", "rshift")}
    for name, forward in others.items():
        setattr(Value, f"__{name}__", forward)
        setattr(Value, f"__r{name}__", lambda a, b, forward=forward: forward(b, a))
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Value, f"__{name}__", compare(getattr(operator, name)))
    Value.__hash__ = None  # type: ignore[assignment]


_install()
