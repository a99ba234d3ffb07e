"""`supports` says what the operator would do, without doing it."""

from __future__ import annotations

import inspect
import itertools
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
from flashdelta.problem import context as contexts
from flashdelta.problem import device_checks, split
from flashdelta.problem.arguments import is_plain
from flashdelta.runtime import supports as module
from flashdelta.testing.inputs import TOKEN_TENSORS

from ..support.refusals import REFUSED, Refusal, good_call, many_sequences, refusals, refused_with_a_pool
from ..support.work import MOST_INSTRUCTIONS, instructions

pytestmark = pytest.mark.usefixtures("as_on_gpu")

wy = fd.kernels.chunk_bwd_wy_dqkg
GOOD = (
    *((op, start) for op in (fd.chunk_kda, fd.fused_recurrent_kda) for start in ("plain", "pool")),
    *((fd.recurrent_kda, "paged"), (fd.commit, "plain"), (fd.kda_prefill, "plain"), (wy, "plain")),
    *((fd.gated_rms_norm, "heads"), (fd.short_convolution, "pool_by_token"), (fd.fused_kda_decode, "one")),
)
every_operator = pytest.mark.parametrize(("op", "start"), GOOD)


@pytest.fixture(autouse=True)
def no_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_answers", {})
    monkeypatch.setattr(module, "_latest", {})


@every_operator
def test_a_good_call_is_supported_and_explained(op: Callable, start: str):
    call = good_call(op, start)
    answers = [fd.supports(op, **call) for _ in range(3)]
    explanation = fd.explain(op, **call)
    assert answers == [explanation.support] * 3
    assert answers[0] and answers[0].ok and answers[0].backend == explanation.chosen == "reference"
    assert "hopper: device type 'cpu'" in answers[0].reason
    assert fd.supports(op, **call, backend="reference").reason == answers[0].reason


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize("refusal", refusals(REFUSED))
def test_what_is_refused_is_not_supported(refusal: Refusal):
    good, call = refusal.calls()
    assert fd.supports(refusal.op, **good)
    answers = [fd.supports(refusal.op, **call) for _ in range(2)]
    assert answers[0] == answers[1] and not answers[0] and answers[0].backend is None

    def raised(**arguments: object) -> None:
        raise refusal.error(answers[0].reason)

    refusal.expect(raised, call)


def test_rows_of_a_norm_that_triton_does_not_take(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for rows, ok in ((2**31 - 1, True), (2**31, False)):
        x = torch.empty(1).expand(rows, 1)
        found = fd.supports(fd.gated_rms_norm, x, x, torch.ones(1), backend="triton")
        assert found.ok == ok and ("2^31 rows" in found.reason) != ok


def test_other_questions_are_answered():
    call = good_call(fd.chunk_kda, "plain")
    assert "wanted one of flashdelta." in fd.supports(print, **call).reason
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


def test_the_fastest_backend_needs_no_reason(monkeypatch: pytest.MonkeyPatch):
    for backend in (fd.backends.HopperBackend, fd.backends.TritonBackend):
        monkeypatch.setattr(backend, "obstacle", lambda self, problem, device: None)
    call = good_call(fd.chunk_kda, "plain")
    assert fd.supports(fd.chunk_kda, **call) == (True, "hopper", "")
    assert fd.supports(fd.chunk_kda, **call, backend="reference").backend == "reference"


def test_a_repeated_question_sees_what_its_key_does_not():
    call = good_call(fd.recurrent_kda, "paged") | {
        "output": torch.empty_like(good_call(fd.recurrent_kda, "paged")["v"])
    }
    assert fd.supports(fd.recurrent_kda, **call) and fd.supports(fd.recurrent_kda, **call)
    assert len(module._answers) == 1
    assert "memory shared with v" in fd.supports(fd.recurrent_kda, **call | {"output": call["v"]}).reason
    negative = torch._neg_view(call["output"])
    assert negative.is_neg() and negative.stride() == call["output"].stride()
    assert "negative bit" in fd.supports(fd.recurrent_kda, **call | {"output": negative}).reason
    call["q"].requires_grad_()
    assert "requires grad" in fd.supports(fd.recurrent_kda, **call).reason
    with torch.no_grad():
        assert fd.supports(fd.recurrent_kda, **call)
    assert fd.supports(fd.recurrent_kda, **call | {"update_state": 1}).reason.startswith("update_state: got 1 (int)")


class Own(Tensor):
    """Of a class of its own, which may answer otherwise each time."""


def test_what_is_kept_and_what_is_not():
    call = good_call(fd.chunk_kda, "plain")
    assert not {"batch_invariant", "backend"} & {*call}
    assert fd.supports(fd.chunk_kda, **call, batch_invariant=True)
    assert not fd.supports(fd.chunk_kda, **call, backend=True)  # the same value by another name
    kept = len(module._answers)
    fd.supports(fd.chunk_kda, **call | {"q": call["q"].as_subclass(Own)})
    fd.supports(fd.chunk_kda, **call, scale=[1.0])
    assert len(module._answers) == kept
    refused = call | {"q": call["q"].flatten()}
    assert not fd.supports(fd.chunk_kda, **refused) and len(module._answers) == kept + 1  # and kept
    assert "dense (strided)" in fd.supports(fd.chunk_kda, **call | {"q": call["q"].flatten(2).to_mkldnn()}).reason
    assert fd.supports([], **call).reason.startswith("op: got []")
    for other in (fd.replay_buffer, fd.supports, print):
        assert re.search(r"^op: got .*, which is no operator, wanted one of flashdelta\.", fd.supports(other).reason)


def test_an_argument_may_be_called_op():
    call = good_call(fd.chunk_kda, "plain")
    assert fd.supports(fd.chunk_kda, **call, op=1).reason == "got an unexpected keyword argument 'op'"
    with pytest.raises(TypeError, match="unexpected keyword argument 'op'"):
        fd.explain(fd.chunk_kda, **call, op=1)


def test_inside_transforms_the_answer_is_the_call_s():
    call = good_call(fd.chunk_kda, "plain")
    asked = []

    def run(q: Tensor) -> Tensor:
        asked.append(fd.supports(fd.chunk_kda, **call | {"q": q, "out": torch.empty_like(call["v"])}))
        return q

    torch.func.vmap(run)(call["q"][None])
    assert not asked[0] and asked[0].reason


def test_offsets_on_the_host_are_read():
    call = good_call(fd.chunk_kda, "packed")
    right, wrong = call["cu_seqlens"].clone(), call["cu_seqlens"] + 1
    for _ in range(2):
        assert fd.supports(fd.chunk_kda, **call, cu_seqlens_cpu=right)
        assert not fd.supports(fd.chunk_kda, **call, cu_seqlens_cpu=wrong)
        assert not fd.supports(fd.chunk_kda, **call, cu_seqlens_cpu=right.to("meta"))
    kept = len(module._answers)
    other = torch.tensor([0, *[int(right[-1])] * (len(right) - 1)], dtype=right.dtype)
    assert fd.supports(fd.chunk_kda, **call, cu_seqlens_cpu=other) and len(module._answers) == kept


@pytest.fixture
def worked_out(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows with every answer, and every batch's offsets, that are worked out."""
    found: list[str] = []

    def counted(name: str, function: Callable) -> Callable:
        return lambda *arguments: (found.append(name), function(*arguments))[1]

    monkeypatch.setattr(module, "ask", counted("answer", module.ask))
    monkeypatch.setattr(split, "walk", counted("offsets", split.walk))
    monkeypatch.setattr(split, "_walked", {})
    return found


@pytest.mark.parametrize(("op", "out", "start"), [(fd.chunk_kda, "out", "pool"), (fd.recurrent_kda, "output", "paged")])
def test_refusals_of_calls_that_write_are_kept(op: Callable, out: str, start: str, worked_out: list[str]):
    """But not one for memory that different tensors share, nor for calls that share it."""
    call = good_call(op, start)
    call[out] = torch.empty_like(call["v"])
    refused = refused_with_a_pool(op) | {out: call[out]}
    answers = [fd.supports(op, **refused) for _ in range(3)]
    assert not answers[0] and answers == answers[:1] * 3 and worked_out == ["answer"]
    same = {name: x.clone() if isinstance(x, Tensor) else x for name, x in refused.items()}
    assert fd.supports(op, **same) == answers[0] and worked_out == ["answer"]
    for shared, ok in ((True, False), (False, True), (True, False)):
        answer = fd.supports(op, **call | ({out: call["v"]} if shared else {}))
        assert answer.ok is ok and ("memory shared with v" in answer.reason) is shared
    before = len(worked_out)
    assert fd.supports(op, **call) and len(worked_out) == before
    for more in (1, 2):
        shared = call | {out: call["v"].view_as(call["v"])}
        assert "memory shared" in fd.supports(op, **shared).reason and len(worked_out) == before + more
    assert fd.supports(op, **call) and len(worked_out) == before + 2


def test_offsets_are_walked_once(worked_out: list[str]):
    """As often as their values change, in place or not."""
    call = good_call(fd.chunk_kda, "packed")
    offsets = call["cu_seqlens"].clone()
    assert all(fd.supports(fd.chunk_kda, **call, cu_seqlens_cpu=offsets) for _ in range(3))
    assert worked_out.count("offsets") == 1 and worked_out.count("answer") == 1
    assert fd.supports(fd.chunk_kda, **call, cu_seqlens_cpu=offsets.clone()) and worked_out.count("offsets") == 1
    offsets[1:-1] = 0
    assert fd.supports(fd.chunk_kda, **call, cu_seqlens_cpu=offsets) and worked_out.count("offsets") == 2
    offsets[-1] += 1
    assert "cu_seqlens_cpu" in fd.supports(fd.chunk_kda, **call, cu_seqlens_cpu=offsets).reason
    offsets.numpy()[-1] -= 1  # which PyTorch does not see
    assert fd.supports(fd.chunk_kda, **call, cu_seqlens_cpu=offsets) and worked_out.count("answer") == 2
    longer = {name: torch.cat((x, x), 1) if name in TOKEN_TENSORS else x for name, x in call.items()}
    assert fd.supports(fd.chunk_kda, **longer, cu_seqlens_cpu=offsets)
    shorter = {name: x[:, :-1] if name in TOKEN_TENSORS else x for name, x in call.items()}
    assert not fd.supports(fd.chunk_kda, **shorter, cu_seqlens_cpu=offsets)


def test_offsets_that_are_not_dense_are_read(worked_out: list[str]):
    call = good_call(fd.chunk_kda, "packed")
    memory = torch.stack([call["cu_seqlens"]] * 2, 1)
    offsets = memory[:, 0]
    assert not offsets.is_contiguous()
    assert all(fd.supports(fd.chunk_kda, **call, cu_seqlens_cpu=offsets) for _ in range(2))
    memory[0] = 1
    assert not fd.supports(fd.chunk_kda, **call, cu_seqlens_cpu=offsets)
    memory[0] = 0
    assert fd.supports(fd.chunk_kda, **call, cu_seqlens_cpu=offsets) and worked_out.count("answer") == 2


def test_offsets_whose_memory_is_gone_end_nothing():
    call = good_call(fd.chunk_kda, "packed")
    assert all(fd.supports(fd.chunk_kda, **call, cu_seqlens_cpu=call["cu_seqlens"].clone()) for _ in range(2))
    offsets = call["cu_seqlens"].clone()
    offsets.untyped_storage().resize_(0)
    assert offsets.data_ptr() == 0 and isinstance(fd.supports(fd.chunk_kda, **call, cu_seqlens_cpu=offsets).ok, bool)


def variants() -> Iterator[dict]:
    """Of a call, each in one thing. Some are refused."""
    call = good_call(fd.chunk_kda, "packed")
    yield call
    for name, x in call.items():
        if isinstance(x, Tensor):
            yield call | {name: x[:-1]}
            yield call | {name: x.double()}
            yield call | {name: torch.stack([x] * 2, -1)[..., 0]}
            yield call | {name: x.to("meta")}
            yield call | {name: torch.nn.Parameter(x, requires_grad=x.is_floating_point())}
    yield {name: call[name] for name in reversed(call)}
    yield call | {"k": call["q"], "q": call["k"]}
    for change in ({"scale": 1}, {"scale": 1.0}, {"scale": True}, {"scale": "1"}, {"chunk_size": 32}, {"split": 2}):
        yield call | change
    longer = torch.cat([call["cu_seqlens"], call["cu_seqlens"][-1:]])
    yield call | {"cu_seqlens": longer}
    for change in (longer, longer.flip(0), call["cu_seqlens"], call["cu_seqlens"] + 1, longer.int()):
        yield call | {"cu_seqlens_cpu": change}


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_every_question_gets_its_own_answer(mode: Callable, worked_out: list[str]):
    """Whichever was asked before it."""
    calls, wanted = [*variants()], []
    with mode():
        for call in calls:
            module.forget()
            wanted.append(fd.supports(fd.chunk_kda, **call))
        for i, j in itertools.product(range(len(calls)), repeat=2):
            assert fd.supports(fd.chunk_kda, **calls[i]) == wanted[i]
            assert fd.supports(fd.chunk_kda, **calls[j]) == wanted[j]
    assert len({*wanted}) > 20


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
    assert found.tolist() == [2.0] * 3 and backend == "reference" and reason.startswith("backend: got 'none'")


def test_the_interpreter_s_switch_is_seen(monkeypatch: pytest.MonkeyPatch):
    call = good_call(fd.chunk_kda, "plain")
    for _ in range(2):
        for word, wanted in (("0", "triton: tensors are on the CPU"), ("1", "triton: the Triton interpreter")):
            monkeypatch.setenv("TRITON_INTERPRET", word)
            assert wanted in fd.supports(fd.chunk_kda, **call).reason


def test_a_tensor_that_comes_twice(worked_out: list[str]):
    """Is another kind of call than one of two that are alike, and may be refused where that is not."""
    call = good_call(fd.chunk_kda, "plain")
    call["out"] = torch.empty_like(call["v"])
    calls = [
        (call, True),
        (call | {"k": call["q"]}, True),
        (call | {"out": call["v"]}, False),
        (call | {"k": call["q"], "out": call["v"]}, False),
    ]
    answers = [[fd.supports(fd.chunk_kda, **one) for one, _ in calls] for _ in range(3)]
    assert answers == answers[:1] * 3 and [answer.ok for answer in answers[0]] == [ok for _, ok in calls]
    assert len(worked_out) == len(calls)
    both = call | {"k": call["q"], "out": call["v"].view_as(call["v"])}
    assert "memory shared with v" in fd.supports(fd.chunk_kda, **both).reason
    assert fd.supports(fd.chunk_kda, **call | {"k": call["q"]}) and len(worked_out) == len(calls) + 1


def lazy(x: object) -> Any:
    return torch._lazy_clone(x) if isinstance(x, Tensor) else x


@every_operator
def test_lazy_clones_stay_clones(op: Callable, start: str):
    """Asked about first, or after a call like it."""
    call = good_call(op, start)
    if "out" in inspect.signature(op).parameters:
        call["out"] = torch.empty_like(call["x" if "x" in call else "v"])
    source = {name: x.clone() if isinstance(x, Tensor) else x for name, x in call.items()}
    clones = {name: lazy(x) for name, x in source.items()}
    wanted = fd.supports(op, **call)
    for _ in range(2):
        assert fd.supports(op, **clones) == wanted == (True, "reference", wanted.reason)
        module.forget()
    tensors = [x for some in (source, clones) for x in some.values() if isinstance(x, Tensor)]
    assert tensors and all(map(torch._C._is_cow_tensor, tensors))


@pytest.mark.parametrize(("op", "out"), [(fd.chunk_kda, "out"), (fd.recurrent_kda, "output")])
def test_lazy_clones_share_with_their_own_views_alone(op: Callable, out: str):
    call = good_call(op, "plain" if op is fd.chunk_kda else "paged")
    source = call["v"].clone()
    both = torch.cat((source, source))
    B, clone = len(source), torch._lazy_clone(both)
    for other, begin, ok in ((clone, 0, False), (clone, B, True), (both, 0, True), (both, B, True)):
        answer = fd.supports(op, **call | {"v": clone[:B], out: other[begin : begin + B]})
        assert answer.ok is ok and ("memory shared with v" in answer.reason) is not ok
    assert torch._C._is_cow_tensor(both) and torch._C._is_cow_tensor(clone)


def test_lazy_offsets_on_the_host_stay_lazy():
    call = good_call(fd.chunk_kda, "packed")
    source = call["cu_seqlens"].clone()
    clone = torch._lazy_clone(source)
    assert fd.supports(fd.chunk_kda, **call, cu_seqlens_cpu=clone)
    assert all(fd.supports(fd.chunk_kda, **call, cu_seqlens_cpu=x) for x in (call["cu_seqlens"].clone(), clone))
    assert not fd.supports(fd.chunk_kda, **call, cu_seqlens_cpu=torch._lazy_clone(source + 1))
    assert torch._C._is_cow_tensor(clone)


def test_answers_are_forgotten_before_they_fill_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "MOST", 3)
    call = good_call(fd.chunk_kda, "plain")
    for scale in range(1, 12):
        assert fd.supports(fd.chunk_kda, **call, scale=float(scale))
        assert len(module._answers) <= 3
    for one in calls_by_length(call, 12):
        assert fd.supports(fd.chunk_kda, **one)
        assert sum(map(len, module._answers.values())) <= 3


ODD = {
    "compressed": lambda x: x[0, :, 0].to_sparse_csr(),
    "sparse": Tensor.to_sparse,
    "opaque": lambda x: x.flatten(2).to_mkldnn(),
    "nested": lambda x: torch.nested.nested_tensor([x, x]),
    "jagged": lambda x: torch.nested.nested_tensor([x[0], x[0]], layout=torch.jagged),
    "functional": torch._to_functional_tensor,
    "uninitialized": lambda x: torch.nn.UninitializedParameter(),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested", "ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("name", ["q", "g"])
@pytest.mark.parametrize("odd", ODD.values(), ids=ODD)
def test_odd_tensors_get_an_answer_of_their_own(odd: Callable, name: str):
    """PyTorch's guards end the process where a tensor has no strides."""
    call = good_call(fd.chunk_kda, "plain")
    changed = call | {name: odd(call[name])}
    alone = fd.supports(fd.chunk_kda, **changed)
    module.forget()
    assert fd.supports(fd.chunk_kda, **call)
    assert [fd.supports(fd.chunk_kda, **changed) for _ in range(2)] == [alone] * 2


def test_answers_to_several_shapes_are_kept(monkeypatch: pytest.MonkeyPatch):
    """Of different strides but for the first tensor's, no more than `MOST_ALIKE`."""
    monkeypatch.setattr(module, "MOST_ALIKE", 3)
    call = good_call(fd.chunk_kda, "plain")
    shorter = calls_by_length(call, 5)
    pitched = [call | {"v": torch.cat([call["v"]] * n, 3)[..., : call["v"].shape[3]]} for n in range(1, 6)]
    assert all(fd.supports(fd.chunk_kda, **one) for one in (*shorter, *pitched))
    assert sorted(map(len, module._answers.values())) == [1, 1, 1, 1, 1, 3]
    monkeypatch.setattr(module, "ask", None)
    assert all(fd.supports(fd.chunk_kda, **one) for one in (*shorter, *pitched[2:]))


def calls_by_length(call: dict, most: int) -> list[dict]:
    return [{name: x[:, :n] if name in TOKEN_TENSORS else x for name, x in call.items()} for n in range(1, most + 1)]


class Weight(torch.nn.Parameter):
    """As libraries that load models have them."""


def test_subclasses_of_parameters_are_plain():
    call = good_call(fd.chunk_kda, "plain")
    weights = {name: Weight(call[name]) for name in ("A_log", "dt_bias")}
    assert type(weights["A_log"]) is Weight and is_plain(weights["A_log"]) and not is_plain(call["q"].as_subclass(Own))
    assert fd.supports(fd.chunk_kda, **call | weights) and len(module._answers) == 1
    found, want = fd.chunk_kda(**call | weights)[0], fd.chunk_kda(**call)[0]
    assert type(found) is Tensor and torch.equal(found, want)
    with FakeTensorMode() as mode:
        assert not is_plain(mode.from_tensor(call["q"]))


def inferred(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


@every_operator
def test_inference_tensors_are_taken_and_written(op: Callable, start: str):
    """Outside of inference mode, too."""
    call, again = good_call(op, start), good_call(op, start)
    if "out" in inspect.signature(op).parameters:
        like = call["x" if "x" in call else "v"]
        call["out"], again["out"] = torch.zeros_like(like), torch.zeros_like(like)
    again = {name: inferred(x) if isinstance(x, Tensor) else x for name, x in again.items()}
    assert fd.supports(op, **call) and fd.supports(op, **again)
    op(**call)
    op(**again)
    assert all(torch.equal(x, again[name]) for name, x in call.items() if isinstance(x, Tensor))


@pytest.mark.parametrize("op", [fd.chunk_kda, fd.fused_recurrent_kda])
@pytest.mark.parametrize("name", ["q", "g", "dt_bias", "cu_seqlens"])
def test_inference_tensors_are_not_saved_for_gradients(op: Callable, name: str):
    call = good_call(op, "packed")
    call["v"].requires_grad_()
    assert fd.supports(op, **call)
    call[name] = inferred(call[name])
    for _ in range(2):
        assert fd.supports(op, **call).reason.startswith(
            f"{name}: got an inference tensor with inputs that require grad"
        )
    with pytest.raises(ValueError, match=f"{name}: got an inference tensor"):
        op(**call)
    with torch.no_grad():
        assert fd.supports(op, **call)
        op(**call)


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
    reason = f"{names[0]}: got a DTensor, wanted the part of it that is here (to_local())"
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


def test_a_context_of_fla_is_known_again(mesh: Any, worked_out: list[str]):
    call = good_call(fd.chunk_kda, "packed")
    offsets = call.pop("cu_seqlens").int()
    call = {name: x for name, x in call.items() if name not in ("initial_state", "output_final_state")}
    context = fla_context(mesh, offsets)
    with pytest.raises(TypeError):
        hash(context)

    def answer(new: bool, **changes: object) -> fd.Support:
        worked_out.clear()
        found = fd.supports(fd.chunk_kda, **call | {"cp_context": context} | changes)
        assert (worked_out == ["answer"]) is new, worked_out
        return found

    assert answer(True) and answer(False) and answer(False, cp_context=fla_context(mesh, offsets.clone()))
    assert answer(True, cp_context=fla_context(mesh, offsets[[0, -1]]))
    # FLA's own offsets may come with it, and no others
    assert answer(True, cu_seqlens=offsets) and answer(False, cu_seqlens=offsets)
    for new in (True, False):
        assert "cu_seqlens: got a tensor" in answer(new, cu_seqlens=offsets.clone()).reason
        assert answer(False, cu_seqlens=offsets)
    short = fla_context(mesh, offsets.clone())
    assert answer(False, cp_context=short)
    short.cu_seqlens = short.cu_seqlens_cpu = offsets.clamp(max=int(offsets[-1]) - 1)
    assert "tokens a rank" in answer(True, cp_context=short).reason
    context.layout = "zigzag"
    assert "layout 'zigzag'" in answer(True).reason and not answer(True)
    context.layout, context.post_num_ranks = "contiguous", 2
    assert "post_num_ranks 2" in answer(True).reason
    context.post_num_ranks = 1
    assert answer(False)
    context.pre_num_ranks = False  # which equals 0
    assert "pre_num_ranks False (bool)" in answer(True).reason
    context.pre_num_ranks, context.layout = 0, "".join(["contig", "uous"])
    assert answer(False)


@pytest.mark.parametrize("kind", [lambda x: x, contexts.as_context], ids=("FLA", "ours"))
def test_what_a_context_brings_is_looked_at(kind: Callable, mesh: Any):
    """Whether its offsets can be saved, and whether what is written lies in them."""
    call = good_call(fd.chunk_kda, "packed")
    offsets = call.pop("cu_seqlens").int()
    call = {name: x for name, x in call.items() if name not in ("initial_state", "output_final_state")}
    taken = call | {"cp_context": kind(fla_context(mesh, offsets)), "out": torch.empty_like(call["v"])}
    assert fd.supports(fd.chunk_kda, **taken)
    memory = torch.zeros_like(call["v"])
    inside = memory.flatten()[: len(offsets) * 4].view(torch.int32)[: len(offsets)].copy_(offsets)
    shared = taken | {"out": memory, "cp_context": kind(fla_context(mesh, inside))}
    assert "memory shared with cu_seqlens" in fd.supports(fd.chunk_kda, **shared).reason
    call["v"].requires_grad_()
    assert fd.supports(fd.chunk_kda, **call, cp_context=kind(fla_context(mesh, offsets)))
    answer = fd.supports(fd.chunk_kda, **call, cp_context=kind(fla_context(mesh, inferred(offsets))))
    assert "an inference tensor with inputs that require grad" in answer.reason


SLOWEST = ((fd.chunk_kda, "softplus"), (fd.recurrent_kda, "spec"), (fd.fused_kda_decode, "parts"))
REPEATED = {
    **{op.__name__: (op, good_call(op, start)) for op, start in SLOWEST},
    **{f"{op.__name__}, refused": (op, refused_with_a_pool(op)) for op in (fd.chunk_kda, fd.recurrent_kda)},
    **{f"{count} sequences": (fd.chunk_kda, many_sequences(count)) for count in (8, 1024)},
}


def test_instructions_are_counted():
    """And a question that takes too many fails: one that is worked out anew, or as long as two of the slowest."""
    op, call = REPEATED["fused_kda_decode"]

    def forgotten() -> None:
        module.forget()
        fd.supports(op, **call)

    once, twice = (instructions(lambda n=n: [fd.supports(op, **call) for _ in range(n)]) for n in (1, 2))
    assert once < MOST_INSTRUCTIONS < twice < 3 * once and 2 * once < instructions(forgotten)


@pytest.mark.parametrize("kind", REPEATED)
def test_a_repeated_question_takes_few_instructions(kind: str):
    op, call = REPEATED[kind]
    assert fd.supports(op, **call).ok is not kind.endswith("refused")
    assert instructions(lambda: fd.supports(op, **call)) < MOST_INSTRUCTIONS


def in_turn(op: Callable, calls: list[dict]) -> Callable[[], fd.Support]:
    turns = itertools.cycle(calls)
    return lambda: fd.supports(op, **next(turns))


@pytest.mark.parametrize(("op", "start"), SLOWEST)
def test_shapes_that_come_in_turn_take_few_instructions(op: Callable, start: str):
    call = good_call(op, start)
    names = {**dict.fromkeys(TOKEN_TENSORS, 1), "mixed_qkv": 0, "x": 0}
    grown = [
        {name: torch.cat([x] * n, names[name]) if name in names and n > 1 else x for name, x in call.items()}
        for n in range(1, 41)
    ]
    run = in_turn(op, grown)
    for _ in grown:
        run()
    assert instructions(lambda: [run() for _ in grown]) < MOST_INSTRUCTIONS * len(grown)


TWICE = ((fd.chunk_kda, "softplus", "k", "q"), (fd.recurrent_kda, "spec", "k", "q"))


@pytest.mark.parametrize(("op", "start", "name", "other"), TWICE)
def test_a_tensor_that_comes_twice_takes_few_instructions(op: Callable, start: str, name: str, other: str):
    call = good_call(op, start)
    call[name] = call[other]
    assert fd.supports(op, **call).ok
    assert instructions(lambda: fd.supports(op, **call)) < MOST_INSTRUCTIONS


def test_a_context_of_fla_takes_few_instructions(mesh: Any):
    call = good_call(fd.chunk_kda, "packed")
    offsets = call.pop("cu_seqlens").int()
    call = {name: x for name, x in call.items() if name not in ("initial_state", "output_final_state")}
    call["cp_context"] = fla_context(mesh, offsets)
    assert fd.supports(fd.chunk_kda, **call).ok
    assert instructions(lambda: fd.supports(fd.chunk_kda, **call)) < MOST_INSTRUCTIONS
