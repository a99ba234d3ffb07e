"""Launches that repeat: where arguments lie, when buffers come and go, and calls that run by them. Nothing is compiled or
launched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from flashdelta.problem.prefill import INPUTS, RESULTS
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import flashdelta as fd
from flashdelta.program import cache as plans
from flashdelta.program import program as steps
from flashdelta.program.launch import Launch
from flashdelta.testing.cases import Case, case_id
from flashdelta.testing.prefills import LOGITS, PLAIN, SIZES, prefill_call, sized

from ..support.bad_prefills import BAD

CPU = torch.device("cpu")


class Started(list):
    """What every start was given."""

    def __call__(self, compiled: object, index: object, grid: tuple, arguments: list) -> None:
        self.append((compiled, grid, arguments))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    found = Started()
    monkeypatch.setattr(steps, "start", found)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(Launch, "compiled", lambda self, index: self.kernel)
    return found


def launch(name: str, *arguments: object, scratch: tuple[Tensor, ...] = (), programs: int = 3, **constants) -> Launch:
    return Launch(name, programs, arguments, constants, num_warps=4, scratch=scratch)


def record(known: list[Tensor | None], launches: list[Launch], outputs: dict[str, Tensor]) -> steps.Steps | None:
    recorder = steps.Recorder(CPU, known)
    for one in launches:
        recorder.add(one, outputs)
    return recorder.steps()


def test_arguments_are_found_again(started: Started):
    """In a known tensor, inside one, in an output, in scratch; numbers, constants and absent tensors as they were."""
    x, y, out, scratch = torch.zeros(10), torch.zeros(10), torch.zeros(2, 3), torch.zeros(8)
    empty = torch.zeros(0)
    first = launch("a", x, y[4:], 7, None, empty, scratch[2:], scratch=(scratch,), SIZE=64)
    found = record([x, None, y], [first, launch("b", scratch, out[1:], scratch=(scratch,))], {"out": out})
    results = found.run([1000, 0, 2000])
    assert list(results) == ["out"] and results["out"].shape == (2, 3) and results["out"].dtype == out.dtype
    (name, grid, (at_x, in_y, seven, none, absent, in_scratch, size)), (_, _, (at_scratch, in_out)) = started
    assert (name, grid) == ("a", (3, 1, 1))
    assert (at_x, in_y, seven, none, absent, size) == (1000, 2000 + 16, 7, None, 0, 64)
    assert in_scratch == at_scratch + 8
    assert in_out == results["out"].data_ptr() + 12


def test_every_run_has_its_own_results(started: Started):
    x, out = torch.zeros(4), torch.zeros(4)
    found = record([x], [launch("a", x, out)], {"out": out})
    first, second = found.run([16]), found.run([32])
    assert first["out"].data_ptr() != second["out"].data_ptr()
    assert [arguments[0] for _, _, arguments in started] == [16, 32]


def test_buffers_live_from_first_to_last_use(started: Started, monkeypatch: pytest.MonkeyPatch):
    """Those with the same first and last use are one allocation."""
    a, b, c, x = (torch.zeros(n) for n in (100, 30, 50, 5))
    launches = [
        launch("0", x, a, b, scratch=(a, b)),
        launch("1", a, b, c, scratch=(a, b, c)),
        launch("2", c, scratch=(a, b, c)),
    ]
    found = record([x], launches, {})
    assert [(len(needed), done) for *_, needed, done in found.steps] == [(1, []), (1, [1]), (0, [2])]
    ((slot, size),) = found.steps[0][-2]
    assert size == 512 + 512 and slot == 1
    found.run([16])
    (_, _, (_, first_a, first_b)), (_, _, (second_a, second_b, _)), _ = started
    assert (first_a, first_b) == (second_a, second_b) and first_b == first_a + 512


def test_a_buffer_is_not_the_one_that_had_its_address(started: Started):
    recorder = steps.Recorder(CPU, [torch.zeros(1)])
    memory = torch.zeros(100)
    for name in ("0", "1"):
        again = memory[:]  # another tensor at the address; the first is gone by then
        recorder.add(launch(name, again, scratch=(again,)), {})
        del again
    assert [(len(needed), len(done)) for *_, needed, done in recorder.steps().steps] == [(1, 1), (1, 1)]


def test_descriptors_get_new_addresses(started: Started):
    """Their tensor is not kept."""
    x = torch.zeros(8)
    found = record([x], [launch("a", SimpleNamespace(base=x, shape=(8,)))], {})
    assert found.steps[0][2][0].base is None
    found.run([640])
    (_, _, (descriptor,)) = started[0]
    assert descriptor.base.data_ptr() == 640 and descriptor.shape == (8,)


@pytest.mark.parametrize(
    "why", ["a copy", "two of one address", "no program", "not compiled", "another device", "none"]
)
def test_some_launches_have_no_steps(why: str, started: Started, monkeypatch: pytest.MonkeyPatch):
    x = torch.zeros(4)
    launches = [launch("a", x)]
    if why == "a copy":
        launches.append(launch("b", x.clone()))
    elif why == "no program":
        launches.append(launch("b", x, programs=0))
    elif why == "not compiled":
        monkeypatch.setattr(Launch, "compiled", lambda self, index: None)
    elif why == "another device":
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    elif why == "none":
        launches = []
    assert record([x, x] if why == "two of one address" else [x], launches, {}) is None


# ---- kda_prefill ------------------------------------------------------------------------------------------------------

CALLS = ("worked out", "and recorded", "repeated", "again")


@pytest.fixture
def pretended(started: Started, monkeypatch: pytest.MonkeyPatch) -> Started:
    """The CPU passes for a GPU. Starts that are worked out anew are noted, too: with tensors, where recorded ones have
    addresses."""

    def run(launch: Launch) -> None:
        arguments = [*launch.arguments, *launch.constants.values()]
        started(launch.kernel, None, (launch.programs, launch.rows, 1), arguments)

    monkeypatch.setattr(Launch, "run", run)
    monkeypatch.setattr(plans, "_plans", {})
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: 0 if x.device.type == "cpu" else -1)
    monkeypatch.setattr("flashdelta.backends.triton._interpreting", lambda: True)
    return started


def prefill_on(case: Case, seed: int = 0) -> dict:
    return prefill_call(case, seed=seed) | {"backend": "triton"}


def anew(launches: Started) -> list[bool]:
    return [any(isinstance(x, Tensor) for x in arguments) for _, _, arguments in launches]


def located(launches: Started, tensors: dict[str, Tensor], pointers: list[tuple[int, ...]]) -> list[tuple]:
    """The launches with, in place of an address (`pointers`: where they have one), whose it is and how far from the start. What
    is no tensor's is scratch."""

    def address(x: Tensor | int) -> int:
        return x.data_ptr() if isinstance(x, Tensor) else x

    def owner(place: int) -> str:
        if place == 0:
            return "absent"
        return next((name for name, x in tensors.items() if 0 <= place - x.data_ptr() < x.nbytes), "scratch")

    given = [address(arguments[i]) for (*_, arguments), positions in zip(launches, pointers) for i in positions]
    starts = {name: x.data_ptr() for name, x in tensors.items()} | {"absent": 0}
    starts["scratch"] = min(place for place in given if owner(place) == "scratch")
    found = []
    for (kernel, grid, arguments), positions in zip(launches, pointers):
        named = [*arguments]
        for i in positions:
            place = address(named[i])
            named[i] = owner(place), place - starts[owner(place)]
        found.append((kernel, grid, named))
    return found


def by_function(call: dict) -> tuple[Tensor, ...]:
    return fd.kda_prefill(**call)


def by_operator(call: dict) -> tuple[Tensor, ...]:
    return torch.ops.kda_prefill.forward(**call)


@pytest.mark.parametrize("way", [by_function, by_operator])
@pytest.mark.parametrize(
    "case", [PLAIN, LOGITS, replace(sized(PLAIN, SIZES[-1]), name="batch", B=2, H=3, HV=3, scale=0.5)], ids=case_id
)
def test_a_repeated_prefill_starts_what_the_first_did(case: Case, way: Callable, pretended: Started):
    kept, found, pointers = [], [], []
    for seed, name in enumerate(CALLS):
        pretended.clear()
        call = prefill_on(case, seed)
        results = way(call)
        kept.append((call, results))  # so that the next tensors lie elsewhere
        assert anew(pretended) == [name in CALLS[:2]] * 3
        pointers = pointers or [
            tuple(i for i, x in enumerate(arguments) if isinstance(x, Tensor)) for _, _, arguments in pretended
        ]
        tensors = {name: call[name] for name in INPUTS} | dict(zip(RESULTS, results))
        found.append(located(pretended, tensors, pointers))
    places = {name for _, _, arguments in found[0] for name, _ in (x for x in arguments if isinstance(x, tuple))}
    assert places == {*INPUTS, *RESULTS, "scratch", "absent"}
    assert all(launches == found[0] for launches in found)
    for _, results in kept:
        assert [(x.shape, x.dtype) for x in results] == [(x.shape, x.dtype) for x in kept[0][1]]
    assert len({x.data_ptr() for _, results in kept for x in results}) == len(CALLS) * len(RESULTS)


def test_function_and_operator_repeat_each_other(pretended: Started):
    for way in (by_function, by_operator, by_function):
        way(prefill_on(PLAIN))
    assert anew(pretended) == [True] * 6 + [False] * 3


@pytest.mark.parametrize("name", BAD)
def test_a_repeated_prefill_is_checked_as_the_first(name: str, pretended: Started):
    call = prefill_on(replace(PLAIN, T=70))
    changes, error, _ = BAD[name]
    with pytest.raises(error) as first:
        fd.kda_prefill(**call | changes)
    for _ in CALLS:
        fd.kda_prefill(**call)
    pretended.clear()
    with pytest.raises(error) as later:
        fd.kda_prefill(**call | changes)
    assert str(later.value) == str(first.value) and not pretended


def test_an_option_equal_to_a_good_one_may_be_wrong(pretended: Started):
    call = prefill_on(PLAIN) | {"scale": 1}
    for _ in CALLS:
        fd.kda_prefill(**call)
    with pytest.raises(TypeError, match=r"^scale: got True"):
        fd.kda_prefill(**call | {"scale": True})


def test_gradients_are_refused_of_repeated_prefills(pretended: Started):
    call = prefill_on(PLAIN)
    for _ in CALLS:
        fd.kda_prefill(**call)
    call["v"].requires_grad_()
    with pytest.raises(ValueError, match=r"^v: got a tensor that requires grad"):
        fd.kda_prefill(**call)
    with torch.no_grad():
        fd.kda_prefill(**call)


@pytest.mark.parametrize("other", ["alignment", "tokens", "gate", "precision", "scale", "chunk_size"])
def test_another_prefill_is_worked_out_anew(other: str, pretended: Started):
    call = prefill_on(PLAIN)
    for _ in CALLS:
        fd.kda_prefill(**call)
    pretended.clear()
    options = {"gate": "logsigmoid", "precision": "ieee", "scale": 0.5, "chunk_size": 32}
    if other == "alignment":
        change = {"v": torch.zeros(call["v"].numel() + 1)[1:].view(call["v"].shape)}
        assert (change["v"].data_ptr() - call["v"].data_ptr()) % 16 != 0
    elif other == "tokens":
        change = {name: call[name][:, :, 1:].contiguous() for name in INPUTS}
    else:
        change = {other: options[other]}
    fd.kda_prefill(**call | change)
    assert anew(pretended) == [True] * 3


def test_one_tensor_for_two_inputs_has_no_plan(pretended: Started):
    """Which of the two an address would stand for can't be told."""
    call = prefill_on(PLAIN)
    for _ in CALLS:
        fd.kda_prefill(**call | {"k": call["q"]})
    assert anew(pretended) == [True] * 3 * len(CALLS)


def test_fake_tensors_start_nothing(pretended: Started):
    call = prefill_on(PLAIN)
    for _ in CALLS:
        results = fd.kda_prefill(**call)
    pretended.clear()
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in call.items()}
        found = fd.kda_prefill(**fake)
    assert [x.shape for x in found] == [x.shape for x in results] and not pretended
