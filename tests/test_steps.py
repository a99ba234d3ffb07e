"""Launches that repeat: where arguments lie, when buffers come and go. Nothing is compiled or launched."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from flashdelta import steps
from flashdelta.launch import Launch

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
