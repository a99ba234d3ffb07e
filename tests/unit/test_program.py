"""Plans: where arguments lie, when buffers come and go, and calls that share one. Nothing is compiled or launched."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FrameType, SimpleNamespace

import pytest
import torch
from torch import Tensor
from triton import knobs

import flashdelta as fd
from flashdelta.backends import KERNEL, TritonBackend
from flashdelta.kernels.triton.recurrence import recurrence_kernel
from flashdelta.parallel.exchange import Exchange
from flashdelta.problem.problem import ChunkTensors
from flashdelta.program import plan as plans
from flashdelta.program.cache import LaunchCache
from flashdelta.program.launch import ARGUMENTS, METADATA, Launch, _specialization
from flashdelta.program.plan import Outputs, Plan
from flashdelta.program.workspace import Workspace, in_slots
from flashdelta.runtime.call import CALLS, NoKernel

from ..support.cases import BF16, BY_NAME, Case
from ..support.decoding import BY_NAME as STEPS
from ..support.decoding import make_step
from ..support.decoding_checks import commit_call
from ..support.fused import FUSED_BY_NAME, make_fused
from ..support.inputs import make_call, tensors_of
from ..support.pools import PLAIN_POOLS, pool_call
from ..support.prefills import PLAIN, prefill_call
from .conftest import Started


def launch(name: str, *arguments: object, ctas: int = 3, **constants) -> Launch:
    return Launch(name, ctas, arguments, constants, num_warps=4)


def slots(**tensors: Tensor) -> ChunkTensors:
    return in_slots(tensors_of(**tensors))


def plan_of(t: ChunkTensors, *launches: Launch, **outputs: Tensor) -> Plan:
    return Plan(t.memory, Outputs(outputs), launches)


def test_arguments_are_found_again(started: Started):
    """In a tensor of the call, inside one, in an output, in scratch; numbers, constants and absent tensors as they were."""
    t, empty = slots(q=torch.zeros(10), k=torch.zeros(10)), torch.zeros(0, device="meta")
    out, scratch = t.memory.new((2, 3), torch.float32), t.memory.new((8,), torch.float32)
    first = launch("a", t.q, t.k[4:], 7, None, empty, scratch[2:], SIZE=64)
    plan = plan_of(t, first, launch("b", scratch, out[1:]), launch("none", out, ctas=0), out=out)
    for x, y in ((1000, 2000), (16, 48)):
        started.clear()
        results = plan.execute((), [x, y])
        assert list(results) == ["out"] and results["out"].shape == (2, 3) and results["out"].dtype == out.dtype
        (name, grid, (at_x, in_y, seven, none, absent, in_scratch, size)), (_, _, (at_scratch, in_out)) = started
        assert (name, grid) == ("a", (3, 1, 1))
        assert (at_x, in_y, seven, none, absent, size) == (x, y + 16, 7, None, 0, 64)
        assert in_scratch == at_scratch + 8
        assert in_out == results["out"].data_ptr() + 12


def test_tensors_may_be_views_of_what_a_caller_passes(started: Started):
    """Views of one tensor, and in another order than by role."""
    rows, x = torch.zeros(3, 12), torch.zeros(4)
    given = tensors_of(q=x, k=rows[:, 4:], v=rows[1:, 2:])
    t = in_slots(given)
    plan = plan_of(t, launch("a", t.q[1:], t.k, t.v[:, 1:]))
    plan.locate(given, (None, rows, x), dict(q=2, k=1, v=1))
    plan.execute((), [0, 1000, 5000])
    assert started[0][2] == [5000 + 4, 1000 + 16, 1000 + 48 + 8 + 4]


def test_an_output_of_the_callers_own_is_returned(started: Started):
    t, out, other = slots(q=torch.zeros(4), out=torch.zeros(4)), torch.zeros(4), torch.zeros(4)
    assert plan_of(t, launch("a", t.q, t.out), o=t.out).execute((other, out))["o"] is other
    assert started[0][2] == [out.data_ptr(), other.data_ptr()]


def test_zeroed_outputs_are_zeroed_again(started: Started):
    t = slots(q=torch.zeros(4))
    h = t.memory.new((1000,), torch.float32, zeroed=True)
    plan = plan_of(t, launch("a", t.q, h), h=h)
    for _ in range(3):
        found = plan.execute((torch.zeros(4),))["h"]
        assert found.eq(0).all()
        found.fill_(torch.nan)


def test_outputs_that_nothing_writes_are_there(started: Started):
    t = slots(q=torch.zeros(0, 4))
    plan = plan_of(t, o=t.memory.new((0, 4), torch.float32), h=t.memory.new((2,), torch.int32, zeroed=True))
    found = plan.execute((torch.zeros(0, 4),))
    assert found["o"].shape == (0, 4) and found["h"].tolist() == [0, 0]


def test_buffers_live_from_first_to_last_use(started: Started):
    """Those with the same first and last use are one allocation."""
    t = slots(q=torch.zeros(5))
    a, b, c = (t.memory.new((n,), torch.float32) for n in (100, 30, 50))
    plan = plan_of(t, launch("0", t.q, a, b), launch("1", a, b, c), launch("2", c))
    plan.execute((), [16])
    assert [(len(step.scratch), [*step.done]) for step in plan.steps] == [(1, []), (1, [1]), (0, [2])]
    assert [*plan.steps[0].scratch] == [(1, 512 + 512)]
    (_, _, (_, first_a, first_b)), (_, _, (second_a, second_b, _)), _ = started
    assert (first_a, first_b) == (second_a, second_b) and first_b == first_a + 512


def test_descriptors_get_new_addresses(started: Started):
    """Their tensor is not kept."""
    t = slots(q=torch.zeros(8))
    plan = plan_of(t, launch("a", SimpleNamespace(base=t.q, shape=(8,))))
    plan.execute((), [640])
    assert plan.steps[0].call[ARGUMENTS].base is None
    (_, _, (descriptor,)) = started[0]
    assert descriptor.base.data_ptr() == 640 and descriptor.shape == (8,)


@pytest.mark.parametrize("rows", [2, 0])
def test_an_exchange_takes_bytes(rows: int, started: Started):
    """Scratch and an output, of which there may be none."""
    said = []
    t = slots(q=torch.zeros(8))
    packet, packets = (t.memory.new((n, 3), torch.float32) for n in (rows, 2 * rows))
    exchange = Exchange(lambda *given: said.append(given), "group", "gather", "all", packet, packets)
    plan = Plan(t.memory, {"packets": packets}, [launch("a", t.q, packet), exchange, launch("b", packets)])
    found = plan.execute((torch.zeros(8),))["packets"]
    ((own, all_of_them, *rest),) = said
    assert rest == ["group", "gather", "all"]
    assert (own.nbytes, all_of_them.nbytes) == (12 * rows, 24 * rows) and own.dtype == all_of_them.dtype == torch.uint8
    if rows:
        assert own.data_ptr() == started[0][2][1] and all_of_them.data_ptr() == found.data_ptr() == started[1][2][0]


COMPUTED: dict[str, Callable[[Tensor], Tensor]] = {
    "a sum": lambda x: x + 1,
    "a dense copy": lambda x: x.mT.contiguous(),
    "a clone": lambda x: x[1:].clone(),
    "a gap closed": lambda x: x[:, :2].reshape(-1),
    "a tensor of its own": lambda x: torch.zeros(2, 3),
}


@pytest.mark.parametrize("kind", COMPUTED)
def test_what_pytorch_computes_is_no_argument(kind: str, started: Started):
    """While a plan is built, there is no data: what is made of it would never be made again."""
    t = slots(q=torch.zeros(2, 3))
    for _ in range(16):  # addresses of the CPU's memory are those of no slot
        t.memory.new((1,), torch.float32)
    with pytest.raises(AssertionError, match="lies in no slot: PyTorch made it while a plan was built"):
        plan_of(t, launch("a", COMPUTED[kind](t.q))).execute((torch.zeros(2, 3),))
    assert started == []


def test_a_profiler_sees_every_launch(started: Started, monkeypatch: pytest.MonkeyPatch):
    seen, kernel = [], SimpleNamespace(function=None, packed_metadata=None)
    kernel.run = lambda *call: seen.append(call[METADATA:ARGUMENTS])
    kernel.launch_metadata = lambda grid, stream, *arguments: (grid, arguments)
    monkeypatch.setattr(Launch, "compiled", lambda self: kernel)
    t = slots(q=torch.zeros(8))
    plan = plan_of(t, launch("a", t.q, 7))
    plan.execute((), [32])
    monkeypatch.setattr(plans, "hooked", lambda: True)
    plan.execute((), [64])
    hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    assert seen == [(None,) * 3, (((3, 1, 1), (64, 7)), *hooks)]


def test_a_plan_runs_on_its_device(started: Started, monkeypatch: pytest.MonkeyPatch):
    current = [0]

    @contextlib.contextmanager
    def on(index: int):
        current.append(index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(plans, "current_device", lambda: current[-1])
    monkeypatch.setattr(plans, "current_stream", lambda index: current[-1])
    t = slots(q=torch.zeros(8))
    plan = plan_of(t, launch("a", t.q))
    plan.index = 1
    plan.execute((), [64])
    assert started[0][2] == [64] and current == [0]


# ---- the cache ----------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_are_forgotten(on_gpu: None):
    cache, x = LaunchCache(most=8), torch.zeros(1)
    entries = [SimpleNamespace(used=0) for _ in range(9)]
    for i, entry in enumerate(entries[:8]):
        cache.keep(cache.find("call", (x,), (i,))[1], entry)
    assert [cache.find("call", (x,), (i,))[0] for i in (0, 2)] == [entries[0], entries[2]]  # used again
    cache.keep(cache.find("call", (x,), (8,))[1], entries[8])
    kept = [i for i in range(9) if cache.find("call", (x,), (i,))[0] is not None]
    assert kept == [0, 2, 4, 5, 6, 7, 8] and len(cache) == 7


def test_keys_tell_values_and_types_apart(on_gpu: None):
    cache, x, entry = LaunchCache(), torch.zeros(4, 4), SimpleNamespace(used=0)
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


# ---- kda_prefill ------------------------------------------------------------------------------------------------------


def prefill_on(case: Case, seed: int = 0) -> dict:
    return prefill_call(case, seed=seed) | {"backend": "triton"}


FUNCTION, OPERATOR = fd.kda_prefill, torch.ops.kda_prefill.forward


def test_function_and_operator_repeat_each_other(pretended: Started):
    for way in (FUNCTION, OPERATOR, FUNCTION):
        way(**prefill_on(PLAIN))
    assert pretended.anew() == [True] * 3 + [False] * 6


def test_one_tensor_for_two_inputs_has_the_plan_of_two(pretended: Started):
    call = prefill_on(PLAIN)
    for given, anew in ((call | {"k": call["q"]}, True), (call, False)):
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


MOST_ENTERED = 285
"""Functions of the package: a tenth more than a call over a pool enters."""


def test_a_new_length_enters_few_functions(pretended: Started):
    """The host time of a call whose length is new, without a clock."""
    package, entered = str(Path(fd.__file__).parent), []
    first, other = (pool_call(replace(x, case=replace(x.case, T=T)), BF16) for T in (70, 90) for x in PLAIN_POOLS[:1])

    def note(frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            entered.append(frame.f_code.co_name)

    fd.chunk_kda(**first, backend="triton")
    pretended.clear()
    sys.setprofile(note)
    fd.chunk_kda(**other, backend="triton")
    sys.setprofile(None)
    assert pretended and all(pretended.anew()) and len(entered) < MOST_ENTERED, len(entered)


LENGTHS: dict[str, Callable[[], dict]] = {
    "buffered": buffered,
    "pool": lambda: pool_call(PLAIN_POOLS[0], BF16),
    "parameters": lambda: make_call(replace(BY_NAME["softplus_broad"], h=False), BF16),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_another_length_is_checked_as_any_call(name: str, pretended: Started, monkeypatch: pytest.MonkeyPatch):
    """A dispatcher that knows the kind finds the same problem, tensors and faults as one that knows none."""
    dispatcher, call = CALLS[fd.chunk_kda], LENGTHS[name]() | {"backend": "triton"}
    monkeypatch.setattr(dispatcher.lengths, "known", {})
    tokens = dispatcher.operation.by_token
    for T in (64, 16):
        short = {x: y[:, :T].clone() if x in tokens else y for x, y in call.items()}
        given = dispatcher.named((), short) | {"border": None}
        given["cu_seqlens"] = None if given["cu_seqlens"] is None else given["cu_seqlens"].clamp(max=T)
        tensors, options = (tuple(map(given.get, names)) for names in (dispatcher.tensors, dispatcher.options))
        key = LaunchCache().find("chunk", tensors, options)[1]
        kind = *key[:3], *map(type, key[1])
        (problem, t), want = dispatcher.lengths.check(given, kind, False), dispatcher.operation.check(given)
        assert problem == want[0] and problem.T == T and t.present().keys() == want[1].present().keys()
        for role, x in t.present().items():
            other = getattr(want[1], role)
            assert (x.shape, x.stride(), x.data_ptr()) == (other.shape, other.stride(), other.data_ptr())
    assert len(dispatcher.lengths.known) == 1
    q, k, v, g = map(given.get, "qkvg")
    for fault in ({"k": k[:, :8].clone()}, {"v": v.float()}, {"g": g[..., :16].clone()}, {"q": q[0]}):
        with pytest.raises((ValueError, TypeError)) as found:
            fd.chunk_kda(**call | {x: given[x] for x in ("cu_seqlens", *tokens)} | fault)
        with pytest.raises(found.type) as want_error:
            dispatcher.operation.check(given | fault)
        assert str(found.value) == str(want_error.value)


@pytest.mark.parametrize("backend", ["triton", "reference", KERNEL])
def test_another_length_may_not_overlap(backend: object, pretended: Started, monkeypatch: pytest.MonkeyPatch):
    """In a call that is validated, in the first one of another length, and in its replay."""
    monkeypatch.setattr(TritonBackend, "drawback", lambda self, problem, device: None)
    call, tokens = buffered() | {"backend": backend}, CALLS[fd.chunk_kda].operation.by_token
    for T in (64, 16, 16):
        call |= {x: call[x][:, :T].clone() for x in tokens}
        with pytest.raises(ValueError, match=r"^out must be in memory of its own; got memory shared with v") as refused:
            fd.chunk_kda(**call | {"out": call["v"]})
        assert (refused.type is NoKernel) == (backend is KERNEL)
        fd.chunk_kda(**call)


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
    kinds = [_specialization(recurrence_kernel, (tensor,), (torch.Tensor,)) for tensor in (x, x[4:], x[1:])]
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
    """Each begins a cache line, however long the tensor before it is."""
    layout = {name: ((n,), torch.int32) for n, name in enumerate("abcde", start=1)}
    workspace = Workspace.allocate(layout, slots(q=torch.zeros(1)).memory)
    tensors = [workspace[name] for name in layout]
    assert [x.numel() for x in tensors] == [1, 2, 3, 4, 5] and all(x.dtype == torch.int32 for x in tensors)
    starts = [x.data_ptr() for x in tensors]
    assert [x - starts[0] for x in starts] == [0, 128, 256, 384, 512]
