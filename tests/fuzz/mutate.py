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

from . import truth
from .draw import Spec
from .modes import Case, Wanted, attributed, run

# ---- odd arguments --------------------------------------------------------------------------------------------------------

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, 7, 16, 32, 64, -1, 8192, 10**30, 10**400, 0.0, -0.0, 0.5, -5.0, -5.1, 3.5, 1e-30),
    *(1e300, math.nan, math.inf, -math.inf, 1j, "", "auto", "none", "softplus", "lower_bound", "logsigmoid", "ieee"),
    *("negative", "non_positive", "triton", "hopper", "Reference", "1", b"auto", np.float32(0.5), np.float64(0.5)),
    *(np.int64(64), np.bool_(True), np.float32("nan"), np.str_("auto"), np.zeros(3)),
    *((), [], {}, (64,), [1.0], {"a": 1}),
    *(object, len, slice(None), range(3), Ellipsis, NotImplemented, torch.float32, torch.device("cpu")),
    *(torch.tensor(1.0), torch.tensor(True), torch.tensor(64), torch.zeros(0), torch.zeros(2, 3)),
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
        lambda x, draw: torch._neg_view(-x),
        lambda x, draw: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8),
        lambda x, draw: x.cpu().pin_memory() if torch.cuda.is_available() else x.share_memory_(),
    ],
    "numbers": [
        *(poke(value) for value in (math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40)),
        *(poke(value) for value in (-1, -(2**31), 2**31 - 1, 10**6, 3)),
        lambda x, draw: torch.zeros_like(x),
        lambda x, draw: x.flip(0),
        lambda x, draw: x.sort().values,
    ],
}
"""Mutations of a tensor."""


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


SURROUNDINGS: dict[str, Callable[[Case], contextlib.AbstractContextManager]] = {
    "autocast": lambda case: torch.autocast(next(iter(case.before.values())).device.type, torch.bfloat16),
    "inference_mode": lambda case: torch.inference_mode() if not case.spec.grad else contextlib.nullcontext(),
    "double_by_default": lambda case: double_by_default(),
}


# ---- judging ----------------------------------------------------------------------------------------------------------------


def names_argument(error: Exception, spec: Spec) -> bool:
    """`argument must be ...; got ...`, or what Python says of an argument that is missing or unknown."""
    text = str(error)
    match = re.match(r"(\w+) must be .+; got .+", text, re.S)
    if match:
        return match[1] in inspect.signature(spec.function).parameters
    return isinstance(error, TypeError) and bool(re.match(r"\w+\(\) (missing|got an unexpected)", text))


def described(value: object) -> str:
    if not isinstance(value, Tensor):
        return repr(value)[:60]
    strides = list(value.stride()) if value.layout is torch.strided and not value.is_nested else value.layout
    shape = "nested" if value.is_nested else list(value.shape)
    return f"{type(value).__name__} {shape} {value.dtype} {value.device} strides {strides} grad {value.requires_grad}"


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
    try:
        with torch.set_grad_enabled(case.spec.grad):
            support = flashdelta.supports(case.spec.function, **call)
            results = run(case.spec, call)
    except (ValueError, TypeError) as error:
        if not names_argument(error, case.spec):
            raise AssertionError(f"refused without a name: {type(error).__name__}: {error}") from error
        for name, memory in case.contents.memories.items():
            if memory.changed(case.before[name], []):
                raise AssertionError(f"{name}: written by a call that was refused") from error
        assert not support, f"refused, but supports says {support}"
        return "refused"
    assert support, f"right, but supports says {support}"
    # what must come out is worked out from the tensors as they were before the call
    after = {name: memory.bytes.clone() for name, memory in case.contents.memories.items()}
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
    with attributed(f"in {name}"):
        with SURROUNDINGS[name](case):
            results = case.run()
        case.hold(results)
    return "right"
