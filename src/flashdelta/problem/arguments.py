"""Declarative checks: what an operation asks of its arguments, and how a call that does not fit is refused.

An `Operation` is a table: a row for each tensor (`Argument`), a check for each option, and rules about several arguments
(`Rule`). `operations.py` has the tables. Past `Operation.check` no code validates again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from . import device_checks
from .errors import mistyped, wrong
from .problem import ROLES, Problem, Tensors

CPU = torch.device("cpu")
PLAIN = (Tensor, torch.nn.Parameter)
"""The usual classes of tensors that are plain."""

is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
"""Inside `torch.func.grad`, `vjp`, `vmap` and so on, whose work must go through the dispatcher, too."""


def is_plain(x: object) -> bool:
    """Whether `x` is a tensor whose class leaves its work as it is. That of others (fake, functional, ...) must go through the
    dispatcher. Subclasses of parameters are plain unless they say otherwise."""
    kind = type(x)
    return kind in PLAIN or (
        getattr(kind, "__torch_function__", None) is torch._C._disabled_torch_function_impl
        and getattr(kind, "__torch_dispatch__", None) is torch._C._disabled_torch_dispatch_impl
    )


def resolved(x: Tensor) -> Tensor:
    """`x` as memory has it; with memory, if it is known to be zeros. A traced call sees neither."""
    if torch.compiler.is_compiling():
        return x
    if x._is_zerotensor():
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    return x.resolve_neg() if x.is_neg() else x


# ---- options ------------------------------------------------------------------------------------------------------------

Check = Callable[[str, Any], None]
"""Refuses a bad value of the option of that name."""


def flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise mistyped(name, value, "a bool")


def flag_or_none(name: str, value: object) -> None:
    if value is not None:
        flag(name, value)


def number_or_none(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise mistyped(name, value, "a float or None")
    if not abs(value) <= sys.float_info.max:
        raise wrong(name, "an int beyond floats" if isinstance(value, int) else value, "a finite float or None")


def positive(name: str, value: object, wanted: str = "an int") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise mistyped(name, value, wanted)
    if value < 1:
        raise wrong(name, value, "at least 1")


def integer(*values: int) -> Check:
    """An int, one of `values` if there are any."""
    wanted = f"an int, one of {values}" if values else "an int"

    def check(name: str, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            raise mistyped(name, value, wanted)
        if values and value not in values:
            raise wrong(name, repr(value), f"one of {values}")

    return check


def one_of(*values: object) -> Check:
    """`values` may have None among them, last."""

    def check(name: str, value: object) -> None:
        if not isinstance(value, (str, type(None))) or value not in values:
            raise wrong(name, repr(value), f"one of {values}")

    return check


# ---- tensors ------------------------------------------------------------------------------------------------------------

Dtypes = Callable[[torch.dtype, Any], tuple[tuple[torch.dtype, ...], str]]
"""The dtypes that an argument may have, given that of the operation's first tensor and the call, and how to say so. In the text
`{first}` is that tensor's name, and `{role}` the caller's name of an argument."""


def dtypes(*allowed: torch.dtype) -> Dtypes:
    words = [str(x).removeprefix("torch.") for x in allowed]
    said = " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
    return lambda first, call: (allowed, said)


def wide(first: torch.dtype) -> torch.dtype:
    return torch.float64 if first == torch.float64 else torch.float32


INPUT = dtypes(torch.bfloat16, torch.float16, torch.float32, torch.float64)
INDEX = dtypes(torch.int32, torch.int64)
INT32 = dtypes(torch.int32)
BOOL = dtypes(torch.bool)
FLOAT32 = dtypes(torch.float32)


def like_first(first: torch.dtype, call: Any) -> tuple[tuple[torch.dtype, ...], str]:
    return (first,), f"{{first}}'s dtype {first}"


def float32_or_first(first: torch.dtype, call: Any) -> tuple[tuple[torch.dtype, ...], str]:
    return (torch.float32, first), f"float32 or {{first}}'s dtype {first}"


def wide_or_first(first: torch.dtype, call: Any) -> tuple[tuple[torch.dtype, ...], str]:
    return (wide(first), first), f"{wide(first)} or {{first}}'s dtype {first}"


def only_wide(first: torch.dtype, call: Any) -> tuple[tuple[torch.dtype, ...], str]:
    return (wide(first),), str(wide(first))


def state(first: torch.dtype, call: Any) -> tuple[tuple[torch.dtype, ...], str]:
    double = (torch.float64,) if first == torch.float64 else ()
    return (torch.float32, torch.bfloat16, *double), "float32, bfloat16 or float64" if double else "float32 or bfloat16"


@dataclass(frozen=True)
class Argument:
    """A tensor of an operation.

    `shape`: symbols of sizes, separated by spaces, which the first argument that has them binds: `"B T HV K"`; `HV*K` is a
    product, and `STATE` a state's two dimensions in the call's layout. Alternatives stand in a tuple, and what depends on other
    arguments is a function of them. `required`: None for an argument that may be left out, else why it may not be, or a
    function that says so. `dense`: how many of the last dimensions must be contiguous. `written`: the call writes it, so that
    it must have memory of its own (but that in `shares`); a function says which calls do. `on_host`: it lies on the CPU.
    """

    role: str
    shape: str | tuple[str, ...] | Callable[[Any], str]
    dtype: Dtypes
    required: str | Callable[[Any], str | None] | None = None
    dense: int = 0
    written: bool | Callable[[Any], bool] = False
    shares: tuple[str, ...] = ()
    on_host: bool = False

    def written_by(self, call: Any) -> bool:
        return self.written(call) if callable(self.written) else self.written


WORDS = {
    "S1": "1 + num_spec_tokens",
    "N1": "N + 1",
    "C": "chunk_size",
    "RECORD": "2 * K + V + 4 up to a multiple of 16",
    "PART": "D / 3",
}
"""Symbols that read otherwise in messages."""


class Sizes(dict[str, int]):
    """Sizes by symbol, as arguments bind them."""

    def expected(self, dim: str) -> int | None:
        known = self.get(dim)
        if known is None and dim.isdigit():
            return int(dim)
        if known is None and "*" in dim:
            a, b = (self.expected(x) for x in dim.split("*"))
            return None if a is None or b is None else a * b
        return known

    def fit(self, dims: list[str], shape: torch.Size) -> bool:
        """Whether a tensor of this shape has these dimensions; if so, binds the symbols that are new."""
        if len(dims) != len(shape):
            return False
        new = {}
        for dim, n in zip(dims, shape):
            known = self.expected(dim)
            if known is None:
                new[dim] = n
            elif known != n:
                return False
        self.update(new)
        return True

    def described(self, dims: list[str], shape: torch.Size) -> str:
        """`[B, T, HV, K] = [1, 70, 2, 32]`, as far as sizes are known."""
        symbols = ", ".join(WORDS.get(dim, dim.replace("*", " * ")) for dim in dims)
        known = [self.expected(dim) for dim in dims]
        if len(dims) != len(shape):
            return f"[{symbols}], of rank {len(dims)}" if None in known else f"[{symbols}] = {known} (rank {len(dims)})"
        return f"[{symbols}] = {[n if size is None else size for n, size in zip(shape, known)]}"


def dimensions(shape: str, v_first: bool) -> list[str]:
    return shape.replace("STATE", "V K" if v_first else "K V").split() if "STATE" in shape else shape.split()


def shape_of(x: Tensor) -> str:
    return f"shape {list(x.shape)}"


def check_tensor(name: str, x: object) -> None:
    """Refuses what is no tensor that has elements at strides."""
    if not isinstance(x, Tensor) or type(x).__name__ == "DTensor":
        raise TypeError(f"{name}: got {type(x).__name__}, wanted a torch.Tensor")
    if x.layout is not torch.strided or x.is_nested:
        raise TypeError(f"{name}: got layout {'nested' if x.is_nested else x.layout}, wanted torch.strided")


def check_strides(name: str, x: Tensor, dense: int, written: bool) -> None:
    """Refuses a tensor whose last `dense` dimensions are not contiguous, or one to be written whose elements overlap."""
    if written and not torch.compiler.is_compiling() and x.is_neg():
        raise wrong(name, "a view with the negative bit", "memory that is written as it is")
    if x.numel() == 0:
        return
    inner = 1
    for size, stride in reversed([*zip(x.shape, x.stride())][x.dim() - dense :]):
        if size > 1 and stride != inner:
            what = "a dense last dimension" if dense == 1 else f"dense last {dense} dimensions (any pitch between them)"
            raise wrong(name, f"strides {x.stride()}", "a contiguous tensor" if dense == x.dim() else what)
        inner *= size
    span = 1
    for stride, size in ascending((stride, size) for size, stride in zip(x.shape, x.stride()) if written and size > 1):
        if stride < span:
            raise wrong(name, f"strides {x.stride()}", "memory of its own for every element (they must not overlap)")
        span += stride * (size - 1)


def ascending(pairs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """By the first of each pair. (`torch.compile` traces no `sorted` of sizes that it leaves open.)"""
    found: list[tuple[int, int]] = []
    for pair in pairs:
        found.insert(sum(1 for other in found if other[0] <= pair[0]), pair)
    return found


def note_offsets(ctx: Any, offsets: Mapping[str, Tensor]) -> None:
    """Notes versions by the caller's names, for `refuse_changed_offsets`: autograd sees changes of what it saved, but not where
    checkpointing saves it anew, or a hook a copy."""
    ctx.offsets = [(name, x, x._version) for name, x in offsets.items()]


def refuse_changed_offsets(ctx: Any) -> None:
    for name, x, version in ctx.offsets:
        if x._version != version:
            raise RuntimeError(f"{name}: changed in place after the forward, and its backward pass reads it")


def refuse_transforms(name: str) -> NoReturn:
    """Refuses transforms of `torch.func` around a call over ranks."""
    raise NotImplementedError(f"{name}: transforms of torch.func have no calls over ranks; autograd has")


def extent(x: Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last one."""
    if x.numel() == 0:
        return 0
    return (sum((n - 1) * s for n, s in zip(x.shape, x.stride())) + 1) * x.element_size()


def has_address(x: Tensor) -> bool:
    """Not so on the meta device, in subclasses, and inside the transforms of `torch.func`."""
    return is_plain(x) and x.device.type != "meta" and not is_wrapped(x)


def memory(x: Tensor) -> tuple[int, int] | None:
    """Where a tensor begins and ends; None of one without addresses. Interleaved slices of one buffer share memory, too."""
    if x.numel() == 0 or not has_address(x):
        return None
    return x.data_ptr(), x.data_ptr() + extent(x)


NO_TENSORS: dict[str, Any] = dict.fromkeys(ROLES)


class Given:
    """A call's tensors by role and options by name, as attributes. (`torch.compile` traces no `SimpleNamespace`.)"""

    def __init__(self, values: dict[str, Any]):
        for name, value in values.items():
            setattr(self, name, value)


# ---- calls --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """`argument` is refused where `broken` is true of a call, whose tensors and options are attributes. In the texts
    `{role}` is the caller's name of an argument."""

    argument: str
    broken: Callable[[Any], bool]
    got: str
    wanted: str


@dataclass(frozen=True)
class Operation:
    """What a public function asks of its arguments.

    `called`: its names for roles and options, where they differ. `options`: checks of options; the others are flags.
    `canonical`: brings tensors to canonical shape before they are checked. `sizes`: checks the sizes known so far, whenever
    there are new ones. `problem`: makes the record of a call that fits. `no_gradients`: why it takes none, if so.
    """

    name: str
    arguments: tuple[Argument, ...]
    options: Mapping[str, Check]
    rules: tuple[Rule, ...]
    problem: Callable[[Any, Tensors], tuple[Problem, Tensors]]
    sizes: Callable[[Any, Sizes], None]
    canonical: Callable[[Any, Sizes], Any] | None = None
    called: Mapping[str, str] | None = None
    no_gradients: str | None = None
    roles: frozenset[str] = field(init=False)
    role_of_name: dict[str, str] = field(init=False)
    """Of the names that are not the role's own."""
    overlaps: dict[str, list[str]] = field(init=False)
    """Of roles that are written: those that must not share their memory. Each pair is there once."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "roles", frozenset(argument.role for argument in self.arguments))
        object.__setattr__(self, "role_of_name", {name: role for role, name in (self.called or {}).items()})
        found: dict[str, list[str]] = {}
        for argument in reversed(self.arguments):
            if argument.written:
                others = [x.role for x in self.arguments if x.role not in (argument.role, *argument.shares)]
                found[argument.role] = [other for other in others if argument.role not in found.get(other, ())]
        object.__setattr__(self, "overlaps", found)

    def name_of(self, role: str) -> str:
        return role if self.called is None else self.called.get(role, role)

    def by_role(self, given: Mapping[str, object]) -> dict[str, Any]:
        return {self.role_of_name.get(name, name): x for name, x in given.items()}

    def written(self, given: Mapping[str, object]) -> list[str]:
        """Roles that the call writes, of a call whose arguments are `given` by the caller's names."""
        call = Given(NO_TENSORS | self.by_role(given))
        return [argument.role for argument in self.arguments if argument.written_by(call)]

    def check(self, given: Mapping[str, object], *, dry: bool = False) -> tuple[Problem, Tensors]:
        """Validates a call, whose arguments are `given` by the caller's names. A `dry` check copies and reads nothing on a
        device; its tensors may not be run on.

        Raises:
            TypeError: an argument of the wrong type or dtype.
            ValueError: anything else; the message names the argument, what came and what was wanted.
        """
        values, sizes = self.by_role(given), Sizes()
        for name, value in values.items():
            if name in self.roles:
                if value is not None:
                    check_tensor(self.name_of(name), value)
            elif name in self.options:
                self.options[name](self.name_of(name), value)
            elif not isinstance(value, bool) and name != "backend":
                flag(self.name_of(name), value)
        call = Given(NO_TENSORS | values)
        for rule in self.rules:
            if rule.broken(call):
                raise wrong(self.name_of(rule.argument), self._named(rule.got), self._named(rule.wanted))
        if self.canonical is not None:
            call = self.canonical(call, sizes)
        present = self._check_shapes(call, sizes)
        self._check_dtypes_and_devices(call, present)
        for argument, x in present:
            written = argument.written_by(call)
            if argument.dense or written:
                check_strides(self.name_of(argument.role), x, argument.dense, written)
        self.check_overlaps(vars(call))
        if torch.is_grad_enabled():
            self._check_gradients(call, present)
        tensors = {argument.role: x if dry else resolved(x) for argument, x in present if argument.role in NO_TENSORS}
        t = _canonical_shapes(Tensors(**tensors))
        problem, t = self.problem(call, t)
        if not dry and not torch.compiler.is_compiling():
            if device_checks.ENABLED:
                device_checks.check(problem, t, self.name_of, getattr(call, "cu_seqlens_cpu", None))
            elif device_checks.ON_CPU and t.device.type == "cpu" and all(map(has_address, t.present().values())):
                device_checks.check_on_cpu(t, self.name_of)
        return problem, t

    def _check_shapes(self, call: Any, sizes: Sizes) -> list[tuple[Argument, Tensor]]:
        """Returns the arguments that the call has."""
        present, v_first = [], bool(getattr(call, "state_v_first", False))
        for argument in self.arguments:
            x, known = getattr(call, argument.role), len(sizes)
            if x is None:
                if argument.required is not None:
                    self._require(argument, call, sizes, v_first)
                if argument.role == "cu_seqlens":
                    sizes["N"] = sizes["B"]
                continue
            shapes = argument.shape(call) if callable(argument.shape) else argument.shape
            dims = [dimensions(shape, v_first) for shape in ((shapes,) if isinstance(shapes, str) else shapes)]
            if not any([sizes.fit(one, x.shape) for one in dims]):
                wanted = " or ".join(sizes.described(one, x.shape) for one in dims)
                raise wrong(self.name_of(argument.role), shape_of(x), wanted)
            if argument.role == "cu_seqlens":
                if x.numel() == 0:
                    raise wrong("cu_seqlens", "an empty tensor", "N + 1 offsets")
                sizes["N"] = x.numel() - 1
            if len(sizes) > known:
                self.sizes(call, sizes)
            present.append((argument, x))
        return present

    def _require(self, argument: Argument, call: Any, sizes: Sizes, v_first: bool) -> None:
        name = self.name_of(argument.role)
        why = argument.required(call) if callable(argument.required) else argument.required
        if why == "":
            raise TypeError(f"{name}: got NoneType, wanted a torch.Tensor")
        if why is not None:
            shapes = argument.shape(call) if callable(argument.shape) else argument.shape
            dims = dimensions(shapes if isinstance(shapes, str) else shapes[0], v_first)
            described = sizes.described(dims, torch.Size([0] * len(dims)))
            raise wrong(name, None, f"a tensor of shape {described} ({self._named(why)})")

    def _check_dtypes_and_devices(self, call: Any, present: list[tuple[Argument, Tensor]]) -> None:
        (leading, first), *_ = present
        for argument, x in present:
            allowed, said = argument.dtype(first.dtype, call)
            if x.dtype not in allowed:
                said = said.replace("{first}", self.name_of(leading.role))
                raise TypeError(f"{self.name_of(argument.role)}: got dtype {x.dtype}, wanted {self._named(said)}")
            device = CPU if argument.on_host else first.device
            if x.device != device:
                of = "" if argument.on_host else f"{self.name_of(leading.role)}'s "
                raise wrong(self.name_of(argument.role), f"device {x.device}", f"{of}device {device}")

    def _named(self, text: str) -> str:
        """A message with the caller's names for roles in braces. Not by `format_map`, which Dynamo does not trace."""
        start, *others = text.split("{")
        return start + "".join([self.name_of(x.split("}")[0]) + x.split("}")[1] for x in others])

    def check_overlaps(self, by_role: Mapping[str, Any]) -> None:
        """Refuses a tensor to be written that shares memory with another argument."""
        if torch.compiler.is_compiling():
            return
        places = {role: memory(x) for role in self.roles if (x := by_role.get(role)) is not None}
        for role, others in self.overlaps.items():
            written = places.get(role)
            for other in others if written is not None else ():
                place = places.get(other)
                if place is not None and place[0] < written[1] and written[0] < place[1]:
                    raise wrong(self.name_of(role), f"memory shared with {self.name_of(other)}", "memory of its own")

    def _check_gradients(self, call: Any, present: list[tuple[Argument, Tensor]]) -> None:
        role = next((argument.role for argument, x in present if x.requires_grad), None)
        if role is None:
            return
        if self.no_gradients is not None:
            raise wrong(self.name_of(role), "a tensor that requires grad", f"torch.no_grad() ({self.no_gradients})")
        if call.state_pool is not None:
            wanted = "torch.no_grad() (it is updated in place)"
            raise wrong("state_pool", "a tensor with inputs that require grad", wanted)
        if getattr(call, "return_intermediate_states", False):
            raise wrong("return_intermediate_states", "True with inputs that require grad", "torch.no_grad()")
        for role in ("final_state", "checkpoint_states"):
            x = getattr(call, role, None)
            if x is not None:
                kind = "that requires grad" if x.requires_grad else "with inputs that require grad"
                raise wrong(role, f"a tensor {kind}", "None, or torch.no_grad() (it is written in place)")
        if call.out is not None:
            got = "a tensor that requires grad" if call.out.requires_grad else "a tensor with inputs that require grad"
            raise wrong("out", got, "one that takes no gradient, and None when an input requires grad")


def _canonical_shapes(t: Tensors) -> Tensors:
    """Parameters of the gate by head, checkpoints by sequence."""
    changed: dict[str, Any] = {}
    if t.A_log is not None and t.A_log.dim() == 4:
        changed["A_log"] = t.A_log.reshape(t.g.shape[2])
    if t.dt_bias is not None and t.dt_bias.dim() == 1:
        changed["dt_bias"] = t.dt_bias.reshape(t.g.shape[2:])
    for role in ("checkpoint_offsets", "checkpoint_indices"):
        x = getattr(t, role)
        if x is not None and x.dim() == 1:
            changed[role] = x[:, None]
    return replace(t, **changed) if changed else t
