"""`supports` says what the operator would do, without doing it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, distributed
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import flashdelta as fd
from flashdelta import backends
from flashdelta.parallel import context as contexts
from flashdelta.problem import device_checks
from flashdelta.problem.operations import Operation
from flashdelta.runtime.call import NoKernel, public_call

from ..support.inputs import TOKEN_TENSORS
from ..support.refusals import REFUSED, Refusal, good_call, refusals
from ..support.work import MOST_INSTRUCTIONS, instructions
from .conftest import Started

pytestmark = pytest.mark.usefixtures("as_on_gpu")

wy = fd.kernels.chunk_bwd_wy_dqkg
GOOD = (
    *((op, start) for op in (fd.chunk_kda, fd.fused_recurrent_kda) for start in ("plain", "pool")),
    *((fd.recurrent_kda, "paged"), (fd.commit, "plain"), (fd.kda_prefill, "plain"), (wy, "plain")),
    *((fd.gated_rms_norm, "heads"), (fd.short_convolution, "pool_by_token"), (fd.fused_kda_decode, "one")),
)
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


@pytest.mark.parametrize("refusal", refusals(REFUSED))
def test_what_is_refused_is_not_supported(refusal: Refusal):
    good, call = refusal.calls()
    assert fd.supports(refusal.op, **good)
    answers = [fd.supports(refusal.op, **call) for _ in range(2)]
    assert answers[0] == answers[1] and not answers[0] and answers[0].backend is None

    def raised(**arguments: object) -> None:
        raise ValueError(answers[0].reason)

    refusal.expect(raised, call)


def test_other_questions_are_answered():
    call = good_call(fd.chunk_kda, "plain")
    assert "op must be one of flashdelta." in fd.supports(print, **call).reason
    assert fd.supports(fd.chunk_kda, **{name: x for name, x in call.items() if name != "k"}).reason.endswith("'k'")
    assert "'sclae'" in fd.supports(fd.chunk_kda, **call, sclae=1.0).reason
    tokens = [call.pop(name) for name in TOKEN_TENSORS]
    assert fd.supports(fd.chunk_kda, *tokens, **call).ok
    assert "positional" in fd.supports(fd.chunk_kda, *tokens, 0.5).reason
    assert not fd.supports(fd.chunk_kda, *tokens, **call, backend="hopper")


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


def test_what_a_call_refuses_beyond_shapes_is_seen():
    call = good_call(fd.recurrent_kda, "paged") | {
        "output": torch.empty_like(good_call(fd.recurrent_kda, "paged")["v"])
    }
    assert fd.supports(fd.recurrent_kda, **call)
    assert "memory shared with v" in fd.supports(fd.recurrent_kda, **call | {"output": call["v"]}).reason
    negative = torch._neg_view(call["output"])
    assert negative.is_neg() and negative.stride() == call["output"].stride()
    assert "negative bit" in fd.supports(fd.recurrent_kda, **call | {"output": negative}).reason
    call["q"].requires_grad_()
    assert "requires grad" in fd.supports(fd.recurrent_kda, **call).reason
    with torch.no_grad():
        assert fd.supports(fd.recurrent_kda, **call)
    assert fd.supports(fd.recurrent_kda, **call | {"update_state": 1}).reason.startswith(
        "update_state must be a bool; got 1 (int)"
    )


class Own(Tensor):
    """Of a class of its own, which may answer otherwise each time."""


def test_offsets_on_the_host_are_read():
    call = good_call(fd.chunk_kda, "packed")
    right, wrong = call["cu_seqlens"].clone(), call["cu_seqlens"] + 1
    for _ in range(2):
        assert fd.supports(fd.chunk_kda, **call, cu_seqlens_cpu=right)
        assert not fd.supports(fd.chunk_kda, **call, cu_seqlens_cpu=wrong)
        assert not fd.supports(fd.chunk_kda, **call, cu_seqlens_cpu=right.to("meta"))


def test_a_mode_of_gradients_gets_its_own_answer():
    call = good_call(fd.chunk_kda, "plain")
    call |= {"v": call["v"].requires_grad_(), "out": torch.empty_like(call["v"])}
    for _ in range(3):
        assert not fd.supports(fd.chunk_kda, **call)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert fd.supports(fd.chunk_kda, **call)


def test_tangents_are_seen():
    call = good_call(fd.kda_prefill, "plain")
    assert fd.supports(fd.kda_prefill, **call)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(call["q"], torch.ones_like(call["q"]))
        assert "forward-mode tangent" in fd.supports(fd.kda_prefill, **call | {"q": dual}).reason


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


@every_operator
def test_traced_questions_are_answered(op: Callable, start: str):
    torch._dynamo.reset()  # of every operator's function there may be few versions
    call = good_call(op, start)
    given = torch.ones(3)

    def answered(x: Tensor) -> tuple:
        good, bad = fd.supports(op, **call), fd.supports(op, **call, backend="none")
        return (x + 1 if good and not bad else x), good.backend, bad.reason

    found, backend, reason = torch.compile(answered, fullgraph=True, backend="eager")(given)
    assert found.tolist() == [2.0] * 3 and backend == "reference" and reason.endswith("; got 'none'")


def inferred(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Of two ranks, of which only this one is there."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield distributed.device_mesh.init_device_mesh("cpu", (2,))
    distributed.destroy_process_group()


@pytest.mark.parametrize("names", [("k",), TOKEN_TENSORS], ids=("one", "all"))
def test_distributed_tensors_are_refused_by_name(names: tuple, mesh: Any):
    from torch.distributed.tensor import DTensor, Replicate

    call = good_call(fd.chunk_kda, "plain")
    call |= {name: DTensor.from_local(call[name], mesh, [Replicate()]) for name in names}
    reason = f"{names[0]} must be a torch.Tensor; got DTensor"
    assert fd.supports(fd.chunk_kda, **call) == (False, None, reason)
    with pytest.raises(TypeError, match=re.escape(reason)):
        fd.chunk_kda(**call)
    local = {name: call[name].to_local() for name in names}
    assert fd.supports(fd.chunk_kda, **call | local)


def fla_context(mesh: Any, cu_seqlens: Tensor, **changes: object) -> Any:
    """Like FLA's, which is a dataclass that can't be hashed, on the first of two ranks."""
    said = {"group": mesh.get_group(), "cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens.cpu()}
    said |= {"pre_num_ranks": 0, "post_num_ranks": 1, "pre_num_conv_tokens": 0, "layout": "contiguous"}
    return SimpleNamespace(**said | changes)


@pytest.mark.parametrize("kind", [lambda x: x, contexts.as_context], ids=("FLA", "ours"))
def test_what_a_context_brings_is_looked_at(kind: Callable, mesh: Any):
    """Whether what is written lies in its offsets."""
    call = good_call(fd.chunk_kda, "packed")
    offsets = call.pop("cu_seqlens").int()
    call = {name: x for name, x in call.items() if name not in ("initial_state", "output_final_state")}
    taken = call | {"cp_context": kind(fla_context(mesh, offsets)), "out": torch.empty_like(call["v"])}
    assert fd.supports(fd.chunk_kda, **taken)
    memory = torch.zeros_like(call["v"])
    inside = memory.flatten()[: len(offsets) * 4].view(torch.int32)[: len(offsets)].copy_(offsets)
    shared = taken | {"out": memory, "cp_context": kind(fla_context(mesh, inside))}
    assert "memory shared with cu_seqlens" in fd.supports(fd.chunk_kda, **shared).reason


# ---- calls that a kernel runs or nobody ---------------------------------------------------------------------------------


NARROW = {
    "chunk": (fd.chunk_kda, "plain"),
    "decode": (fd.recurrent_kda, "paged"),
    "fused": (fd.fused_kda_decode, "one"),
}
"""Calls that `backend="kernel"` names, and writes of whose a test can see."""


def by_kernel(call: dict) -> dict:
    return {**{name: x for name, x in call.items() if name != "backend"}, "backend": backends.KERNEL}


@pytest.mark.parametrize("name", NARROW)
def test_elsewhere_it_is_refused_before_anything_is_written(name: str):
    """The meta device stands for a GPU that no kernel of ours runs on."""
    op, start = NARROW[name]
    call = {x: y.to("meta") if isinstance(y, Tensor) else y for x, y in by_kernel(good_call(op, start)).items()}
    with pytest.raises(NoKernel, match="no kernel runs this call: hopper: device type 'meta'"):
        op(**call)
    assert public_call(op).refusal(call).startswith("no kernel runs this call")
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
    """By the launch cache's key, so that tensors elsewhere are refused without another look. One that depends on addresses is
    not: whether an output lies in an input."""
    call = by_kernel(good_call(fd.chunk_kda, "plain"))
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


def test_a_call_that_ran_answers_a_dispatcher(validated: list[str]):
    call = by_kernel(good_call(fd.chunk_kda, "plain"))
    ask = public_call(fd.chunk_kda).refusal
    assert ask(call) is None and validated == ["chunk"]
    fd.chunk_kda(**call)
    validated.clear()
    assert ask(call) is None and ask({**call, "q": call["q"].clone()}) is None and not validated
    assert instructions(lambda: ask(call)) < MOST_INSTRUCTIONS
    assert ask(call | {"out": call["v"]}).endswith("got memory shared with v")
    assert "'sclae'" in ask(call | {"sclae": 1.0})
