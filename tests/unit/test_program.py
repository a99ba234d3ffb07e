"""Recorded programs: where arguments lie, when buffers come and go, and calls that replay them. Nothing is compiled or
launched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import flashdelta as fd
from flashdelta.kernels.triton.recurrence import recurrence_kernel
from flashdelta.problem.problem import Result
from flashdelta.program import record
from flashdelta.program.cache import LaunchCache
from flashdelta.program.launch import Launch, _specialization
from flashdelta.program.program import Outputs, Program
from flashdelta.program.record import Recorded
from flashdelta.program.workspace import Workspace, mark, new

from ..support.cases import BF16, BY_NAME, Case
from ..support.decoding import BY_NAME as STEPS
from ..support.decoding import make_step
from ..support.decoding_checks import commit_call
from ..support.fused import FUSED_BY_NAME, make_fused
from ..support.inputs import make_call
from ..support.pools import PLAIN_POOLS, pool_call
from ..support.prefills import PLAIN, prefill_call
from .conftest import Started

CPU = torch.device("cpu")


def launch(
    name: str | None, *arguments: object, scratch: tuple[Tensor, ...] = (), ctas: int = 3, **constants
) -> Launch:
    return Launch(name, ctas, arguments, constants, num_warps=4, scratch=scratch)


def scratch_of(*sizes: int) -> list[Tensor]:
    return [new((n,), torch.float32, CPU) for n in sizes]


def record_of(known: list[Tensor | None], launches: list[Launch], **outputs: Tensor) -> Recorded | None:
    made = Outputs(CPU)
    made.update(outputs)
    program = Program(made, launches)
    program.run(known)
    return program.recorded if program.recorded is not None and program.recorded.usable([0] * len(known)) else None


def test_arguments_are_found_again(started: Started):
    """In a known tensor, inside one, in an output, in scratch; numbers, constants and absent tensors as they were."""
    x, y, out, (scratch,) = torch.zeros(10), torch.zeros(10), torch.zeros(2, 3), scratch_of(8)
    empty = torch.zeros(0)
    first = launch("a", x, y[4:], 7, None, empty, scratch[2:], scratch=(scratch,), SIZE=64)
    found = record_of([x, None, y], [first, launch("b", scratch, out[1:], scratch=(scratch,))], out=out)
    results = found.run((), [1000, 0, 2000])
    assert list(results) == ["out"] and results["out"].shape == (2, 3) and results["out"].dtype == out.dtype
    (name, grid, (at_x, in_y, seven, none, absent, in_scratch, size)), (_, _, (at_scratch, in_out)) = started
    assert (name, grid) == ("a", (3, 1, 1))
    assert (at_x, in_y, seven, none, absent, size) == (1000, 2000 + 16, 7, None, 0, 64)
    assert in_scratch == at_scratch + 8
    assert in_out == results["out"].data_ptr() + 12


def test_an_output_of_the_callers_own_is_returned(started: Started):
    x, out, other = torch.zeros(4), torch.zeros(4), torch.zeros(4)
    found = record_of([x, out], [launch("a", x, out)], o=out)
    assert found.run((x, other), [16, 48])["o"] is other
    assert started[0][2] == [16, 48]


def test_zeroed_outputs_are_zeroed_again(started: Started):
    x, outputs = torch.zeros(4), Outputs(CPU)
    program = Program(outputs, [launch("a", x, outputs.allocate("h", Result((1000,), torch.float32, zeroed=True)))])
    program.run([x])
    assert program.recorded.usable([0])
    for _ in range(3):
        h = program.recorded.run((x,), [16])["h"]
        assert h.eq(0).all()
        h.fill_(torch.nan)


def test_buffers_live_from_first_to_last_use(started: Started):
    """Those with the same first and last use are one allocation."""
    a, b, c, x = *scratch_of(100, 30, 50), torch.zeros(5)
    launches = [
        launch("0", x, a, b, scratch=(a, b)),
        launch("1", a, b, c, scratch=(a, b, c)),
        launch("2", c, scratch=(a, b, c)),
    ]
    found = record_of([x], launches)
    assert [(len(needed), done) for *_, needed, done in found.replay.steps] == [(1, []), (1, [1]), (0, [2])]
    ((slot, size),) = found.replay.steps[0].scratch
    assert size == 512 + 512 and slot == 1
    found.run((), [16])
    (_, _, (_, first_a, first_b)), (_, _, (second_a, second_b, _)), _ = started
    assert (first_a, first_b) == (second_a, second_b) and first_b == first_a + 512


def test_a_buffer_is_not_the_one_that_had_its_address(started: Started):
    memory = torch.zeros(100)

    def launches():
        for name in ("0", "1"):
            again = memory[:]  # another tensor at the address; the first is gone by then
            mark(again)
            yield launch(name, again, scratch=(again,))
            del again

    found = record_of([torch.zeros(1)], launches())
    assert [(len(needed), len(done)) for *_, needed, done in found.replay.steps] == [(1, 1), (1, 1)]


def test_an_output_may_lie_where_a_buffer_lay(started: Started):
    """It is no place of what was launched before it was allocated."""
    x, memory, outputs = torch.zeros(4), torch.zeros(100), Outputs(CPU)

    def launches():
        buffer = memory[:]
        mark(buffer)
        yield launch("0", x, buffer, scratch=(buffer,))
        del buffer
        outputs["late"] = memory
        yield launch("1", x, memory)

    program = Program(outputs, launches())
    program.run([x])
    assert program.recorded.usable([0])
    first, second = program.recorded.replay.steps
    (_, buffer), (_, late) = first.places, second.places
    assert buffer[1] != late[1] and late[1] in [slot for _, slot, *_ in second.outputs]


@pytest.mark.parametrize("why", ["a copy", "not compiled", "another device", "none"])
def test_some_programs_do_not_replay(why: str, started: Started, monkeypatch: pytest.MonkeyPatch):
    x = torch.zeros(4)
    launches = [launch("a", x)]
    if why == "a copy":
        launches.append(launch("b", x.clone()))
    elif why == "not compiled":
        launches.append(launch(None, x))
    elif why == "another device":
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    elif why == "none":
        launches = []
    assert record_of([x], launches) is None


SCRATCH: dict[str, Callable[[Tensor], Tensor]] = {
    "another's": lambda x: torch.empty(8),
    "a view": lambda x: x[:],
    "written": lambda x: x.copy_(torch.ones(8)),
    "written by a view": lambda x: (x[2:].zero_(), x)[1],
    "a copy": lambda x: x.clone(),
}
"""What PyTorch may have put into scratch, which a replay would not."""


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", SCRATCH)
def test_scratch_is_kernels_own(kind: str, strict: bool, started: Started, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(record, "STRICT", strict)
    (own,), x = scratch_of(8), torch.zeros(4)
    assert record_of([x], [launch("a", x, own, scratch=(own,))]) is not None
    other = SCRATCH[kind](own)
    launches = [launch("a", x, other, scratch=(other,))]
    if strict:
        with pytest.raises(
            AssertionError, match=r"^a: no replay: scratch \[8\] that `new` did not make, or PyTorch wrote$"
        ):
            record_of([x], launches)
    else:
        assert record_of([x], launches) is None


@pytest.mark.parametrize("places", [(slice(0, 4), slice(4, 12)), (slice(8, 12), slice(0, 8))])
def test_an_argument_is_its_tensors_though_others_lie_around_it(places: tuple[slice, slice], started: Started):
    """Two tensors of one buffer's rows, and a kernel that is given a part of the second."""
    rows = torch.zeros(3, 12)
    first, second = (rows[:, place] for place in places)
    found = record_of([first, second], [launch("a", second[:, 2:], first[1:])])
    found.run((), [1000, 5000])
    assert started[0][2] == [5000 + 8, 1000 + 48]


# ---- the cache ----------------------------------------------------------------------------------------------------------


class Kept:
    used = 0

    def __init__(self, usable: bool = True):
        self.usable = lambda addresses: usable


def test_the_least_recently_used_are_forgotten(on_gpu: None):
    cache, x = LaunchCache(most=8), torch.zeros(1)
    entries = [Kept() for _ in range(9)]
    for i, entry in enumerate(entries[:8]):
        cache.keep(cache.find("call", (x,), (i,))[1], entry)
    assert [cache.find("call", (x,), (i,))[0] for i in (0, 2)] == [entries[0], entries[2]]  # used again
    cache.keep(cache.find("call", (x,), (8,))[1], entries[8])
    kept = [i for i in range(9) if cache.find("call", (x,), (i,))[0] is not None]
    assert kept == [0, 2, 4, 5, 6, 7, 8] and len(cache) == 7


def test_keys_tell_values_and_types_apart(on_gpu: None):
    cache, x, entry = LaunchCache(), torch.zeros(4, 4), Kept()
    key = cache.find("call", (x, None), (1, "a"))[1]
    cache.keep(key, entry)
    assert cache.find("call", (torch.ones(4, 4), None), (1, "a"))[0] is entry
    others = [
        ("call", (x, None), (True, "a")),
        ("call", (x, None), (1.0, "a")),
        ("call", (x, x), (1, "a")),
        ("call", (x.T, None), (1, "a")),
        ("call", (torch.zeros(17)[1:].view(4, 4), None), (1, "a")),
        ("call", (x.half(), None), (1, "a")),
        ("other", (x, None), (1, "a")),
    ]
    assert all(cache.find(*other)[0] is None for other in others)
    with torch.no_grad():
        assert cache.find("call", (x, None), (1, "a"))[0] is None


def test_what_may_not_be_kept_has_no_key(on_gpu: None):
    cache, x = LaunchCache(), torch.zeros(1)
    assert cache.find("call", (x,), ([],))[1] is None
    assert cache.find("call", (x.to_sparse(),))[1] is None
    assert cache.find("call", (x.to("meta"),))[1] is None
    cache.keep(cache.find("call", (x,))[1], Kept(usable=False))
    assert cache.find("call", (x,))[:2] == (None, None)


# ---- kda_prefill ------------------------------------------------------------------------------------------------------


def prefill_on(case: Case, seed: int = 0) -> dict:
    return prefill_call(case, seed=seed) | {"backend": "triton"}


FUNCTION, OPERATOR = fd.kda_prefill, torch.ops.kda_prefill.forward


def test_function_and_operator_repeat_each_other(pretended: Started):
    for way in (FUNCTION, OPERATOR, FUNCTION):
        way(**prefill_on(PLAIN))
    assert pretended.anew() == [True] * 3 + [False] * 6


def test_one_tensor_for_two_inputs_is_no_plan_for_two(pretended: Started):
    """Which of the two an address stands for can't be told. The other way round one plan does for both."""
    call = prefill_on(PLAIN)
    shared = call | {"k": call["q"]}
    for given, anew in ((shared, True), (shared, False), (call, True), (call, False), (shared, False)):
        pretended.clear()
        fd.kda_prefill(**given)
        assert pretended.anew() == [anew] * 3


# ---- all operations -----------------------------------------------------------------------------------------------------


def buffered() -> dict:
    call = make_call(replace(BY_NAME["state"], h=False), BF16)
    return call | {"out": torch.empty_like(call["v"]), "final_state": torch.empty_like(call["initial_state"])}


OPERATIONS: dict[str, tuple[Callable, Callable[[], dict], set[str]]] = {
    "chunk": (fd.chunk_kda, buffered, {"out", "final_state"}),
    "chunk, pool": (fd.chunk_kda, lambda: pool_call(PLAIN_POOLS[0], BF16), {"state_pool"}),
    "decode": (fd.recurrent_kda, lambda: make_step(STEPS["paged"], BF16), {"initial_state"}),
    "read only": (fd.recurrent_kda, lambda: make_step(STEPS["read_only"], BF16), set()),
    "verify": (fd.recurrent_kda, lambda: make_step(STEPS["verify_rows"], BF16), {"intermediate_states"}),
    "commit": (fd.commit, lambda: commit_call(BF16), {"initial_state"}),
    "fused": (fd.fused_kda_decode, lambda: make_fused(FUSED_BY_NAME["one"], BF16), {"conv_state", "state"}),
}
"""Each with what it writes."""


@pytest.mark.parametrize("name", OPERATIONS)
def test_autograd_hears_of_every_write(name: str, pretended: Started):
    """Also of a replay's: a backward pass of what was saved before it must not be silently wrong. And of nothing else."""
    op, make, written = OPERATIONS[name]
    call = make() | {"backend": "triton"}
    for i in range(3):
        pretended.clear()
        before = {x: y._version for x, y in call.items() if isinstance(y, Tensor)}
        op(**call)
        assert {x for x in before if call[x]._version > before[x]} == written
        assert set(pretended.anew()) == {i == 0}


def test_backward_passes_of_other_calls_are_worked_out_anew(pretended: Started):
    call = make_call(replace(BY_NAME["state"], h=False, final=False), BF16) | {"backend": "triton"}
    call["q"].requires_grad_()
    for scale in (0.5, 0.25):
        o, _ = fd.chunk_kda(**call | {"scale": scale})
        pretended.clear()
        torch.autograd.grad(o, call["q"], torch.ones_like(o))
        assert pretended and all(pretended.anew())


def test_a_call_with_gradients_does_not_replay_one_without(pretended: Started):
    call = make_call(replace(BY_NAME["state"], h=False), BF16) | {"backend": "triton"}
    for _ in range(2):
        assert not fd.chunk_kda(**call)[0].requires_grad
    assert fd.chunk_kda(**call | {"q": call["q"].requires_grad_()})[0].requires_grad


def test_gradients_of_parameters_have_their_shapes(pretended: Started):
    call = make_call(replace(BY_NAME["softplus_broad"], h=False), BF16) | {"backend": "triton"}
    leaves = {name: call[name].requires_grad_() for name in ("A_log", "dt_bias")}
    for _ in range(2):
        grads = torch.autograd.grad(fd.chunk_kda(**call)[0].sum(), list(leaves.values()))
        assert [x.shape for x in grads] == [x.shape for x in leaves.values()]


def test_machine_code_depends_on_the_alignment_of_addresses():
    x = torch.zeros(8)
    kinds = [_specialization(recurrence_kernel, (tensor,)) for tensor in (x, x[4:], x[1:])]
    assert kinds[0] == kinds[1] != kinds[2]


def test_a_replay_refuses_shared_memory(pretended: Started):
    call = make_step(STEPS["verify_rows"], BF16) | {"backend": "triton"}
    pool, states = call["initial_state"], call["intermediate_states"]
    memory = torch.zeros(pool.numel() + states.numel(), dtype=pool.dtype)
    apart = {"intermediate_states": memory[: states.numel()].view(states.shape)}
    meeting = memory[states.numel() - pool.numel() :][: pool.numel()].view(pool.shape)
    good = call | apart | {"initial_state": memory[states.numel() :].view(pool.shape)}
    for _ in range(3):
        fd.recurrent_kda(**good)
        with pytest.raises(ValueError, match=r"^intermediate_states must be in memory of its own"):
            fd.recurrent_kda(**good | {"initial_state": meeting})


def test_tensors_of_a_workspace_are_aligned():
    """A pointer that lies elsewhere has machine code of its own, whatever the tensor before it is long."""
    layout = {name: ((n,), torch.int32) for n, name in enumerate("abcde", start=1)}
    workspace = Workspace.allocate(layout, CPU)
    tensors = [workspace[name] for name in layout]
    assert [x.numel() for x in tensors] == [1, 2, 3, 4, 5] and all(x.dtype == torch.int32 for x in tensors)
    starts = [x.data_ptr() for x in tensors]
    assert [x - starts[0] for x in starts] == [0, 16, 32, 48, 64]
