"""Good calls with odd arguments, or in odd surroundings: each must be refused by name, or right."""

from __future__ import annotations

import contextlib
import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

import flashdelta

from ..support.oracle import relative_error
from . import truth
from .draw import RESULTS, Spec
from .modes import Case, Wanted, run, tolerance

# ---- odd arguments --------------------------------------------------------------------------------------------------------

VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        2,
        7,
        16,
        32,
        64,
        -1,
        8192,
        10**30,
        10**400,
        0.0,
        -0.0,
        0.5,
        -5.0,
        -5.1,
        3.5,
        1e-30,
        1e300,
    ),
    *(
        math.nan,
        math.inf,
        -math.inf,
        1j,
        "",
        "auto",
        "none",
        "softplus",
        "lower_bound",
        "logsigmoid",
        "negative",
        "ieee",
    ),
    *("non_positive", "triton", "hopper", "Reference", "1", b"auto", np.float32(0.5), np.float64(0.5), np.int64(64)),
    *(np.bool_(True), np.float32("nan"), np.str_("auto"), np.zeros(3), (), [], {}, (64,), [1.0], {"a": 1}, object, len),
    *(slice(None), range(3), Ellipsis, NotImplemented, torch.float32, torch.device("cpu"), torch.tensor(1.0)),
    *(torch.tensor(True), torch.tensor(64), torch.zeros(0), torch.zeros(2, 3)),
)
"""Instead of an option, or of a tensor."""


def cast(*dtypes: torch.dtype) -> list[Callable[[Tensor, Random], Any]]:
    return [lambda x, draw, dtype=dtype: x.to(dtype) for dtype in dtypes]


def any_dim(x: Tensor, draw: Random) -> int:
    return draw.randrange(x.dim())


def poke(value: float) -> Callable[[Tensor, Random], Any]:
    """Puts `value` in one element."""

    def change(x: Tensor, draw: Random) -> Tensor:
        x = x.clone()
        x.view(-1)[draw.randrange(x.numel())] = value
        return x

    return change


class Subclass(Tensor):
    """A tensor that is no plain one."""


TENSORS: dict[str, list[Callable[[Tensor, Random], Any]]] = {
    "dtype": cast(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.int16)
    + cast(torch.bool, torch.complex64, torch.uint8, torch.float8_e4m3fn),
    "shape": [
        lambda x, draw: x[None],
        lambda x, draw: x[..., None],
        lambda x, draw: x.flatten(),
        lambda x, draw: x[0],
        lambda x, draw: x.narrow(d := any_dim(x, draw), 0, x.shape[d] - 1),
        lambda x, draw: x.narrow(any_dim(x, draw), 0, 0),
        lambda x, draw: torch.cat([x, x], dim=any_dim(x, draw)),
        lambda x, draw: x.movedim(any_dim(x, draw), any_dim(x, draw)),
        lambda x, draw: x.narrow(any_dim(x, draw), 0, 1).expand_as(x),
        lambda x, draw: x.reshape(-1)[0],
    ],
    "strides": [
        lambda x, draw: torch.stack([x, x], dim=-1)[..., 0],
        lambda x, draw: torch.stack([x, x])[draw.randrange(2)],
        lambda x, draw: x.transpose(-1, -2).contiguous().transpose(-1, -2),
        lambda x, draw: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
        lambda x, draw: x.flip(any_dim(x, draw)),
        lambda x, draw: x.as_strided(x.shape, [1] * x.dim()),
        lambda x, draw: x.expand(2, *x.shape)[0],
        lambda x, draw: x[..., ::2],
    ],
    "kind": [
        lambda x, draw: x.to("meta"),
        lambda x, draw: x.to_sparse(),
        lambda x, draw: x.numpy(),
        lambda x, draw: x.tolist(),
        lambda x, draw: torch.nn.Parameter(x, requires_grad=draw.random() < 0.5),
        lambda x, draw: x.detach().requires_grad_(),
        lambda x, draw: x.as_subclass(Subclass),
        lambda x, draw: torch.nested.nested_tensor([*x]),
        lambda x, draw: torch._neg_view(x),
        lambda x, draw: torch._neg_view(-x),
        lambda x, draw: torch.complex(x.float(), -x.float()).conj().imag,
        lambda x, draw: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
        lambda x, draw: x.cpu().pin_memory() if torch.cuda.is_available() else x.share_memory_(),
        lambda x, draw: torch.utils.mkldnn.to_mkldnn(x) if hasattr(torch.utils, "to_mkldnn") else x.to_mkldnn(),
    ],
    "numbers": [
        *(poke(value) for value in (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40)),
        *(poke(value) for value in (-1, -(2**31), 2**31 - 1, 10**6, 3)),
        lambda x, draw: torch.zeros_like(x),
        lambda x, draw: x.flip(0),
        lambda x, draw: x.sort().values,
    ],
}
"""What may become of a tensor."""


def odd_tensor(draw: Random, x: Tensor, others: dict[str, Tensor]) -> Any:
    """Another thing in its place; a change that can't be made of it is drawn again."""
    for _ in range(20):
        kind = draw.choice((*TENSORS, "value", "other"))
        if kind == "value":
            return draw.choice(VALUES)
        if kind == "other":
            # overlaps, if one of the two is written
            return others[draw.choice(sorted(others))]
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return draw.choice(TENSORS[kind])(x, draw)
    return None


def mutation(draw: Random, spec: Spec, call: dict) -> dict:
    """One argument or two, and what they become. Any parameter of the function may be given."""
    parameters = list(inspect.signature(spec.function).parameters)
    tensors = {name: x for name, x in call.items() if isinstance(x, Tensor)}
    changes: dict[str, Any] = {}
    for _ in range(draw.choice((1, 1, 1, 2))):
        name = draw.choice(sorted(tensors) if draw.random() < 0.6 else parameters)
        if name in tensors:
            changes[name] = odd_tensor(draw, tensors[name], tensors)
        elif draw.random() < 0.3:
            changes[name] = tensors[draw.choice(sorted(tensors))]
        else:
            changes[name] = draw.choice(VALUES)
    if draw.random() < 0.02:
        changes[draw.choice(("Q", "chunksize", "head_first"))] = True
    return changes


# ---- odd surroundings -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def double_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def inside(context: Callable[[Case], contextlib.AbstractContextManager]) -> Callable[[Case], None]:
    def test(case: Case) -> None:
        with context(case):
            results = case.run()
        case.hold(results)

    return test


def forward_mode(case: Case) -> None:
    """The tangent of `o` must not vanish."""
    x = case.call["v"].detach().contiguous()
    if x.numel() == 0:
        return
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        result = case.spec.function(**case.call | {"v": dual})
        tangent = torch.autograd.forward_ad.unpack_dual(first(result)).tangent
    if tangent is None:
        raise AssertionError("v: its tangent was dropped")
    # every operation is linear in v beside the state, which the call may have written
    case.restore()
    moved = truth.claims_of(case.spec.op, case.call | {"v": truth.wide(x) + 1.0})
    for claim, other in zip(case.claims, moved):
        if claim.target == RESULTS[case.spec.op][0]:
            hold_near("tangent", tangent[claim.index], other.want - claim.want, x.dtype)


def transformed(transform: Callable) -> Callable[[Case], None]:
    """A transform of `torch.func` that yields the gradient of `sum(o)` with respect to v."""

    def test(case: Case) -> None:
        x = case.call["v"].detach().contiguous()
        found = transform(lambda v: first(case.spec.function(**case.call | {"v": v})), x)
        ones = torch.ones(case.call["v"].shape)
        want = truth.gradients_of(case.spec.op, case.call, ones, None)["v"]
        hold_near("gradient of v", found, want, x.dtype)

    return test


def mapped(case: Case) -> None:
    x = case.call["v"].detach().contiguous()
    found = torch.func.vmap(lambda v: first(case.spec.function(**case.call | {"v": v})))(torch.stack([x, x]))
    for claim in case.claims:
        if claim.target == RESULTS[case.spec.op][0]:
            hold_near("o", found[1][claim.index], claim.want, x.dtype)


def first(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def hold_near(name: str, found: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    if want.numel() and not relative_error(found.cpu(), want.expand(found.shape)) <= 8 * tolerance(dtype):
        raise AssertionError(f"{name}: off by {relative_error(found.cpu(), want.expand(found.shape)):.3g}")


def by_grad(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.func.grad(lambda v: f(v).double().sum().to(v.dtype))(x)


def by_vjp(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    o, pull = torch.func.vjp(f, x)
    return pull(torch.ones_like(o))[0]


SURROUNDINGS: dict[str, Callable[[Case], None]] = {
    "autocast": inside(lambda case: torch.autocast(next(iter(case.before.values())).device.type, torch.bfloat16)),
    "inference_mode": inside(lambda case: torch.inference_mode() if not case.spec.grad else contextlib.nullcontext()),
    "double_by_default": inside(lambda case: double_by_default()),
    "forward_mode": forward_mode,
    "func.grad": transformed(by_grad),
    "func.vjp": transformed(by_vjp),
    "func.vmap": mapped,
}
TRANSFORMS = ("forward_mode", "func.grad", "func.vjp", "func.vmap")
"""Those that a call may refuse, and that ask for one tensor v and its first result."""


# ---- judging ----------------------------------------------------------------------------------------------------------------


def names_argument(error: Exception, spec: Spec) -> bool:
    """`argument: got ..., wanted ...`, or what Python says of an argument that is missing or unknown."""
    text = str(error)
    match = re.match(r"(\w+): got .+, wanted .+", text, re.S)
    if match:
        return match[1] in inspect.signature(spec.function).parameters
    return isinstance(error, TypeError) and bool(re.match(r"\w+\(\) (missing|got an unexpected)", text))


def described(value: object) -> str:
    if isinstance(value, Tensor):
        bits = [
            name
            for name in ("is_conj", "is_neg", "requires_grad")
            if (x := getattr(value, name)) is True or (callable(x) and x())
        ]
        kind = "" if type(value) is Tensor else type(value).__name__ + " "
        strides = list(value.stride()) if value.layout is torch.strided and not value.is_nested else value.layout
        shape = "nested" if value.is_nested else list(value.shape)
        return " ".join([f"{kind}{shape} {value.dtype} {value.device} strides {strides}", *bits])
    return repr(value)[:60]


def check(spec: Spec, device: torch.device, seed: int) -> str:
    """Runs a mutated call, and says how it went: `refused` or `right`."""
    draw = Random(seed)
    case = Case(spec, device, seed)
    if draw.random() < 0.5:
        # an odd call like one that is kept
        for _ in range(2):
            with contextlib.suppress(ValueError):
                case.run()
        case.restore()
    if draw.random() < 0.1:
        return surrounded(draw, case)
    changes = mutation(draw, spec, case.call)
    said = ", ".join(f"{name}={described(x)}" for name, x in changes.items())
    with attributed(said), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return judge(case, case.call | changes, frozenset(changes))


def judge(case: Case, call: dict, odd: frozenset[str]) -> str:
    with torch.set_grad_enabled(case.spec.grad):
        support = flashdelta.supports(case.spec.function, **call)
    verdict = judged(case, call, odd)
    assert support.ok is (verdict == "right"), f"{verdict}, but supports says {support}"
    return verdict


def judged(case: Case, call: dict, odd: frozenset[str]) -> str:
    try:
        with torch.set_grad_enabled(case.spec.grad):
            results = run(case.spec, call)
    except (ValueError, TypeError) as error:
        if not names_argument(error, case.spec):
            raise AssertionError(f"refused without a name: {type(error).__name__}: {error}") from error
        for name, memory in case.contents.memories.items():
            if memory.changed(case.before[name], []):
                raise AssertionError(f"{name}: written by a call that was refused") from error
        return "refused"
    # from the tensors as they were before the call
    after = {name: memory.bytes.clone() for name, memory in case.contents.memories.items()}
    return accepted(case, call, odd, results, after)


def accepted(case: Case, call: dict, odd: frozenset[str], results: dict, after: dict[str, Tensor]) -> str:
    case.restore()
    fresh = {name: x for name, x in call.items() if name in odd and name in case.spec.written() | {"out", "output"}}
    case.odd, case.call, case.wanted = odd, call, Wanted(None)
    # what was written of an odd argument that lies elsewhere can't be put back: claims from what it reads would be others
    read = {"state_pool", "initial_state", "state", "conv_state"}
    read |= {"intermediate_states"} if case.spec.op == "commit" else set()
    with contextlib.suppress(truth.Undefined):
        found = truth.claims_of(case.spec.op, call)
        if not fresh.keys() & read:
            case.wanted = Wanted([claim for claim in found if claim.target not in fresh])
    for name, memory in case.contents.memories.items():
        memory.bytes.copy_(after[name])
    case.hold(results)
    return "right"


def surrounded(draw: Random, case: Case) -> str:
    name = draw.choice(sorted(SURROUNDINGS))
    if name in TRANSFORMS and ("v" not in case.call or not case.claims):
        name = "autocast"
    with attributed(f"in {name}"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            SURROUNDINGS[name](case)
        except (ValueError, TypeError) as error:
            if name not in TRANSFORMS or not names_argument(error, case.spec):
                raise AssertionError(f"refused without a name: {type(error).__name__}: {error}") from error
            return "refused"
    return "right"


@contextlib.contextmanager
def attributed(said: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{said}: {type(error).__name__}: {error}") from error
