"""`supports` says what the operator would do, without doing it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import flashdelta as fd
from flashdelta import backends
from flashdelta.problem import device_checks
from flashdelta.problem.operations import Operation
from flashdelta.runtime.call import NoKernel, public_call

from ..support.inputs import TOKEN_TENSORS
from ..support.refusals import STARTS, good_call
from ..support.work import MOST_INSTRUCTIONS, instructions
from .conftest import Started

pytestmark = pytest.mark.usefixtures("as_on_gpu")

GOOD = [(op, start) for op in STARTS for start in STARTS[op] if start != "host offsets"]  # which are read
every_operator = pytest.mark.parametrize(("op", "start"), GOOD)


@every_operator
def test_a_good_call_is_supported_and_explained(op: Callable, start: str):
    call = good_call(op, start)
    answers = [fd.supports(op, **call) for _ in range(3)]
    explanation = fd.explain(op, **call)
    assert answers == [explanation.support] * 3
    assert answers[0] and answers[0].ok and answers[0].backend == explanation.chosen == "reference"
    assert "hopper: device type 'cpu'" in answers[0].reason
    assert fd.supports(op, **call, backend="reference").reason == answers[0].reason


def test_other_questions_are_answered():
    call = good_call(fd.chunk_kda, "plain")
    assert "op must be one of flashdelta." in fd.supports(print, **call).reason
    assert fd.supports(fd.chunk_kda, **{name: x for name, x in call.items() if name != "k"}).reason.endswith("'k'")
    assert "'sclae'" in fd.supports(fd.chunk_kda, **call, sclae=1.0).reason
    tokens = [call.pop(name) for name in TOKEN_TENSORS]
    assert fd.supports(fd.chunk_kda, *tokens, **call).ok
    assert "positional" in fd.supports(fd.chunk_kda, *tokens, 0.5).reason
    assert "memory shared with v" in fd.supports(fd.chunk_kda, *tokens, **call, out=tokens[2]).reason


class Fuse:
    """Raises at whatever it is asked."""

    def __hash__(self) -> int:
        raise ZeroDivisionError("burnt")

    def __eq__(self, other: object) -> bool:
        raise KeyError("burnt")

    def __getattr__(self, name: str) -> Any:
        raise OverflowError("burnt")


@every_operator
def test_whatever_an_argument_is_nothing_is_raised(op: Callable, start: str):
    call = good_call(op, start)
    for name in inspect.signature(op).parameters:
        for odd in (Fuse(), 10**400, object, [], {}, "", 1j):
            answer = fd.supports(op, **call | {name: odd})
            assert answer or answer.reason


class OnlyViews(TorchDispatchMode):
    """Fails at an operation that returns memory of its own."""

    def __torch_dispatch__(self, func: Any, types: Any, arguments: tuple = (), named: dict | None = None) -> object:
        assert all(x.alias_info is not None and not x.alias_info.is_write for x in func._schema.returns), func
        return func(*arguments, **named or {})


@every_operator
def test_nothing_is_read_or_allocated(op: Callable, start: str, monkeypatch: pytest.MonkeyPatch):
    """With FLASHDELTA_CHECK=1, too. Fake tensors have no values to read."""
    monkeypatch.setattr(device_checks, "ENABLED", True)
    call = good_call(op, start)
    with OnlyViews():
        assert fd.supports(op, **call)
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in call.items()}
        assert fd.supports(op, **fake)
    assert fd.supports(op, **{name: x.to("meta") if isinstance(x, Tensor) else x for name, x in call.items()})


# ---- calls that a kernel runs or nobody ---------------------------------------------------------------------------------


BY_KERNEL = {"backend": backends.KERNEL}
WRITING = [(fd.chunk_kda, "plain"), (fd.recurrent_kda, "paged"), (fd.fused_kda_decode, "one")]


@pytest.mark.parametrize(("op", "start"), WRITING)
def test_elsewhere_it_is_refused_before_anything_is_written(op: Callable, start: str):
    """The meta device stands for a GPU that no kernel of ours runs on."""
    call = {x: y.to("meta") if isinstance(y, Tensor) else y for x, y in (good_call(op, start) | BY_KERNEL).items()}
    with pytest.raises(
        NoKernel, match=r"^backend must be one whose kernels run .*\(hopper: device type 'meta'.*; got none"
    ):
        op(**call)
    assert public_call(op).refusal(call).startswith("backend must be one whose kernels run")
    assert not fd.supports(op, **call)


@pytest.fixture
def validated(pretended: Started, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows with every call that is validated; the CPU passes for a GPU."""
    found: list[str] = []
    check = Operation.check

    def counted(self: Operation, given: Any, *, dry: bool = False) -> Any:
        found.append(self.name)
        return check(self, given, dry=dry)

    monkeypatch.setattr(Operation, "check", counted)
    monkeypatch.setattr(backends.TritonBackend, "drawback", lambda self, problem, device: None)
    return found


def test_a_repeated_refusal_is_remembered(validated: list[str]):
    """Under the launch cache's key, so that tensors elsewhere are refused without another look. One that depends on addresses
    is not: whether an output lies in an input."""
    call = good_call(fd.chunk_kda, "plain") | BY_KERNEL
    bad = call | {"beta": call["beta"][..., :1].clone()}
    reasons = set()
    for _ in range(3):
        moved = {name: x.clone() if isinstance(x, Tensor) else x for name, x in bad.items()}
        with pytest.raises(NoKernel, match=r"^beta must be") as refused:
            fd.chunk_kda(**moved)
        reasons |= {str(refused.value), public_call(fd.chunk_kda).refusal(moved)}
    assert validated == ["chunk"] and len(reasons) == 1
    assert instructions(lambda: public_call(fd.chunk_kda).refusal(bad)) < MOST_INSTRUCTIONS
    validated.clear()
    inside = call | {"out": call["v"]}
    for _ in range(2):
        with pytest.raises(NoKernel, match="memory shared with v"):
            fd.chunk_kda(**inside)
    assert len(validated) == 2
    fd.chunk_kda(**call | {"out": torch.empty_like(call["v"])})


def test_a_fault_in_a_check_comes_through(pretended: Started, monkeypatch: pytest.MonkeyPatch):
    """It is no refusal, with which an engine would run its own kernel, and no later call is refused for it."""
    monkeypatch.setattr(backends.TritonBackend, "drawback", lambda self, problem, device: None)
    call = good_call(fd.chunk_kda, "plain") | BY_KERNEL

    def faulty(*arguments: Any, **named: Any) -> None:
        raise AttributeError("a fault")

    with monkeypatch.context() as broken:
        broken.setattr(Operation, "check", faulty)
        assert public_call(fd.chunk_kda).refusal(call) == "a fault"
        with pytest.raises(AttributeError, match="a fault"):
            fd.chunk_kda(**call)
    fd.chunk_kda(**call)


def test_a_call_that_ran_answers_a_dispatcher(validated: list[str]):
    call = good_call(fd.chunk_kda, "plain") | BY_KERNEL
    ask = public_call(fd.chunk_kda).refusal
    assert ask(call) is None and validated == ["chunk"]
    fd.chunk_kda(**call)
    validated.clear()
    assert ask(call) is None and ask({**call, "q": call["q"].clone()}) is None and not validated
    assert instructions(lambda: ask(call)) < MOST_INSTRUCTIONS
    assert ask(call | {"out": call["v"]}).endswith("got memory shared with v")
    assert "'sclae'" in ask(call | {"sclae": 1.0})
