"""The arguments of one call, and the checks of one argument that the validators of `operations.py` are made of."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from .errors import mistyped, rule, wrong
from .problem import FAMILIES, SETTINGS, Problem, Tensors, make_frozen, problem_of

Made = tuple[Problem, Tensors]

PLAIN = (Tensor, torch.nn.Parameter)
"""The usual classes of tensors that are plain."""

is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
"""Inside `torch.func.grad`, `vjp`, `vmap` and so on, whose work must go through the dispatcher, too."""


def is_plain(x: object) -> bool:
    """True if `x` is a tensor whose class leaves its work as it is. That of others (fake, functional, ...) must go through the
    dispatcher. Subclasses of parameters are plain unless they say otherwise."""
    kind = type(x)
    return kind in PLAIN or (
        getattr(kind, "__torch_function__", None) is torch._C._disabled_torch_function_impl
        and getattr(kind, "__torch_dispatch__", None) is torch._C._disabled_torch_dispatch_impl
    )


def resolved(x: Tensor) -> Tensor:
    """`x` as memory has it; with memory, if it is known to be zeros. A traced call sees neither."""
    if torch.compiler.is_compiling() or not (x._is_zerotensor() or x.is_neg()):
        return x
    return x.resolve_neg() if x.is_neg() else torch.zeros(x.shape, dtype=x.dtype, device=x.device)


# ---- options ------------------------------------------------------------------------------------------------------------


def flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise mistyped(name, value, "a bool")


def check_float(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise mistyped(name, value, "a float or None")
    if not abs(value) <= sys.float_info.max:
        raise wrong(name, "an int beyond floats" if isinstance(value, int) else value, "a finite float or None")


def check_int(name: str, value: object, wanted: str = "an int") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise mistyped(name, value, wanted)


def positive(name: str, value: object, wanted: str = "an int") -> None:
    check_int(name, value, wanted)
    if value < 1:  # type: ignore[operator]
        raise wrong(name, value, "at least 1")


def check_int_in(name: str, value: object, allowed: Sequence[int]) -> None:
    check_int(name, value, f"an int, one of {allowed}")
    if value not in allowed:
        raise wrong(name, repr(value), f"one of {allowed}")


def check_name(name: str, value: object, *allowed: str | None) -> None:
    if not isinstance(value, (str, type(None))):
        raise mistyped(name, value, f"one of {allowed}")
    if value not in allowed:
        raise wrong(name, repr(value), f"one of {allowed}")


def named_device(name: torch.device | str) -> torch.device:
    """The device of that name, whether it is there or not.

    Raises:
        TypeError: no name.
        ValueError: a name of no device.
    """
    if not isinstance(name, (str, torch.device)):
        raise mistyped("device", name, "a torch.device or its name")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise wrong("device", repr(name), "a device such as cuda, cuda:1 or cpu") from error


def find_device(name: torch.device | str) -> torch.device:
    """The device of that name; raises as `named_device`.

    Raises:
        ValueError: a device that is not there.
    """
    device = named_device(name)
    gpus = torch.cuda.device_count()
    there = device.type == "cpu" or (device.type == "cuda" and (device.index or 0) < gpus)
    rule("device", there, f"cpu or one of the {gpus} CUDA devices that torch sees", repr(str(name)))
    return device


# ---- tensors ------------------------------------------------------------------------------------------------------------


def shape_of(x: Tensor) -> str:
    return f"shape {list(x.shape)}"


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def shown(value: object) -> str:
    """Words for an argument that may be a tensor."""
    return "a tensor" if isinstance(value, Tensor) else repr(value)


def check_tensor(name: str, x: object) -> None:
    """Refuses what is no tensor that has elements at strides."""
    if not isinstance(x, Tensor) or type(x).__name__ == "DTensor":
        raise TypeError(f"{name} must be a torch.Tensor; got {type(x).__name__}")
    if x.layout is not torch.strided or x.is_nested:
        raise TypeError(f"{name} must be of layout torch.strided; got {'nested' if x.is_nested else x.layout}")


def check_dense(name: str, x: Tensor, dims: int) -> None:
    """Refuses a tensor whose last `dims` dimensions are not contiguous."""
    if x.numel() == 0:
        return
    inner = 1
    for size, stride in reversed([*zip(x.shape, x.stride())][x.dim() - dims :]):
        if size > 1 and stride != inner:
            some = f"dense in its last {'dimension' if dims == 1 else f'{dims} dimensions (any pitch between them)'}"
            raise wrong(name, f"strides {x.stride()}", "contiguous" if 1 < dims == x.dim() else some)
        inner *= size


def check_writable(name: str, x: Tensor) -> None:
    """Refuses a tensor to be written whose elements overlap, or whose memory does not hold its numbers."""
    if not torch.compiler.is_compiling() and (x.is_neg() or (x._is_zerotensor() and x.numel() > 0)):
        found = "a view with the negative bit" if x.is_neg() else "known zeros, which have none"
        raise wrong(name, found, "a tensor with memory of its own")
    span, strides = 1, ascending([(stride, size) for size, stride in zip(x.shape, x.stride()) if size > 1])
    for stride, size in strides if x.numel() > 0 else ():
        if stride < span:
            raise wrong(name, f"strides {x.stride()}", "a tensor whose elements do not overlap")
        span += stride * (size - 1)


def ascending(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorts by the first of each pair. (`torch.compile` traces no `sorted` of sizes that it leaves open.)"""
    found: list[tuple[int, int]] = []
    for pair in pairs:
        found.insert(sum(1 for other in found if other[0] <= pair[0]), pair)
    return found


class Arguments:
    """A call's arguments by the caller's names, as attributes, with the sizes that its tensors bind as they are checked.

    A shape is a line of symbols, `"B T HV K"`. The first tensor that has a symbol binds it, others must have the same size
    there; `HV*K` is a product, a number stands for itself. The first tensor checked tells the device of the others.
    """

    def __init__(self, given: Mapping[str, Any], called: Mapping[str, str], dry: bool = False):
        for name, value in given.items():
            setattr(self, name, value)
        self.given, self.called = given, called
        """All arguments as they came, and the caller's names of roles, where they differ."""
        self.read: Callable[[Tensor], Tensor] = (lambda x: x) if dry else resolved
        """A tensor as memory has it; a `dry` check copies nothing."""
        self.sizes: dict[str, int] = {}
        self.first, self.device = "", torch.device("cpu")
        self.tensors: dict[str, Tensor] = {}
        """Tensors that were checked, by name."""

    if TYPE_CHECKING:  # the arguments

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...

    def flags(self, *names: str) -> None:
        for name in names:
            flag(name, getattr(self, name))

    def require(self, name: str, shape: str | Sequence[str], *dtypes: torch.dtype, **layout: Any) -> None:
        """Checks a tensor that may not be left out."""
        if getattr(self, name) is None:
            check_tensor(name, None)
        self.check(name, shape, *dtypes, **layout)

    def check(
        self, name: str, shape: str | Sequence[str], *dtypes: torch.dtype, dense: int = 0, written: bool = False
    ) -> None:
        """Checks a tensor, if there is one: its shape, or one of several; its dtype, one of `dtypes`; its device; that the last
        `dense` dimensions are contiguous; if it is to be `written`, that its elements don't overlap."""
        x = getattr(self, name)
        if x is None:
            return
        check_tensor(name, x)
        shapes = (shape,) if isinstance(shape, str) else shape
        for each in shapes:
            if self.fits(each.split(), x.shape):
                break
        else:
            raise wrong(name, shape_of(x), f"of shape {' or '.join([self.described(each) for each in shapes])}")
        if x.dtype not in dtypes:
            allowed = " or ".join([dtype_name(dtype) for dtype in dict.fromkeys(dtypes)])
            mixed = self.first and dtypes[0].is_floating_point
            beside = f" beside {self.first} in {dtype_name(self.tensors[self.first].dtype)}" if mixed else ""
            raise TypeError(f"{name} must be of dtype {allowed}{beside}; got {dtype_name(x.dtype)}")
        if not self.first:
            self.first, self.device = name, x.device
        if x.device != self.device:
            raise wrong(name, f"device {x.device}", f"on {self.first}'s device {self.device}")
        if dense > 0:
            check_dense(name, x, dense)
        if written:
            check_writable(name, x)
        self.tensors[name] = x

    def size(self, symbol: str) -> int | None:
        """The size of a dimension, None where it is not known."""
        if symbol in self.sizes:
            return self.sizes[symbol]
        if "*" in symbol:
            a, b = [self.size(each) for each in symbol.split("*")]
            return None if a is None or b is None else a * b
        return int(symbol) if symbol.isdigit() else None

    def fits(self, symbols: list[str], shape: torch.Size) -> bool:
        """True if a tensor of this shape has these dimensions; if so, binds the symbols that are new."""
        if len(symbols) != len(shape):
            return False
        new, sizes = {}, self.sizes
        for symbol, n in zip(symbols, shape):
            if sizes.get(symbol) != n:
                known = self.size(symbol)
                if known is None:
                    new[symbol] = n
                elif known != n:
                    return False
        sizes.update(new)
        return True

    def described(self, shape: str) -> str:
        """`[B, T, HV, K] = [1, 70, 2, 32]`; of a size that is not known, the symbol."""
        symbols = shape.split()
        known = [symbol if self.size(symbol) is None else self.size(symbol) for symbol in symbols]
        said = f"[{', '.join(symbols)}]"
        return said if known == symbols else f"{said} = [{', '.join(map(str, known))}]"

    def exclusive(self, name: str, other: str) -> None:
        value = getattr(self, name)
        if value is not None and getattr(self, other) is not None:
            raise wrong(name, shown(value), f"None with {other}")

    def needs(self, name: str, *others: str) -> None:
        """Refuses `name` without any of the `others`."""
        value = getattr(self, name)
        if value is not None and all([getattr(self, other) is None for other in others]):
            raise wrong(name, shown(value), f"None without {' and '.join(others)}")

    def together(self, name: str, other: str) -> None:
        for a, b in ((name, other), (other, name)):
            rule(a, getattr(self, a) is not None or getattr(self, b) is None, f"a tensor with {b}", None)

    def with_gradients(self) -> list[str]:
        """Names of tensors that require grad."""
        return [name for name, x in self.tensors.items() if x.requires_grad] if torch.is_grad_enabled() else []

    def made(self, family: type[Problem], **settings: Any) -> Made:
        """The problem, and the tensors by role. An option that has the name of a setting sets it, unless `settings` do."""
        tensors, own = FAMILIES[family], SETTINGS[family]
        found = {role: getattr(self, self.called.get(role, role), None) for role in tensors.__dataclass_fields__}
        t = make_frozen(tensors, {role: x if x is None else self.read(x) for role, x in found.items()})
        return problem_of(family, t, **{name: self.given[name] for name in own if name in self.given} | settings), t


# ---- memory --------------------------------------------------------------------------------------------------------------


def extent(x: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last one."""
    if x.is_contiguous():
        return x.nbytes
    return (sum([(n - 1) * s for n, s in zip(x.shape, x.stride())]) + 1) * x.element_size()


def has_address(x: Tensor) -> bool:
    """True if the tensor has an address: not on the meta device, in subclasses, or inside the transforms of `torch.func`."""
    return is_plain(x) and not x.is_meta and not is_wrapped(x)


def memory(x: Tensor | None) -> tuple[int, int] | None:
    """The addresses at which a tensor begins and ends; None without any. Interleaved slices of one buffer share memory, too."""
    if x is None or x.numel() == 0 or not has_address(x):
        return None
    return x.data_ptr(), x.data_ptr() + extent(x)


# ---- what a backward pass refuses ------------------------------------------------------------------------------------------


def note_offsets(ctx: Any, offsets: Mapping[str, Tensor]) -> None:
    """Notes versions by the caller's names, for `refuse_changed`: autograd sees changes of what it saved, but not where
    checkpointing saves it anew, or a hook a copy."""
    ctx.offsets = [(name, x, x._version) for name, x in offsets.items()]


def refuse_changed(ctx: Any) -> None:
    for name, x, version in ctx.offsets:
        if x._version != version:
            wanted = "the same until the backward pass, which reads it"
            raise RuntimeError(f"{name} must stay {wanted}; got one changed in place")


def refuse_transforms(name: str) -> NoReturn:
    """Refuses transforms of `torch.func` around a call over ranks."""
    rule = "None inside transforms of torch.func (autograd works over ranks)"
    raise NotImplementedError(f"{name} must be {rule}; got several ranks")
