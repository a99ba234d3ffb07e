"""Exchanges between ranks by copies into shared memory: virtual ranks, whose memory stands in for PyTorch's symmetric one."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from flashdelta.parallel import context_parallel, halo
from flashdelta.parallel import exchange as exchanges
from flashdelta.parallel.exchange import ALL, EARLIER, LATER, SharedMemory, exchange

from ..support.cases import Case
from ..support.inputs import make_call
from ..support.oracle import same_bits
from ..support.ranks import Cut, incoming_of
from ..support.refusals import says
from ..support.virtual import VirtualRank, on_ranks

OFFSETS = torch.tensor([0, 20, 96])


def packet_of(rank: int, i: int, size: int) -> Tensor:
    return torch.arange(size, dtype=torch.float32).view(1, size) + 1000 * rank + 10 * i


def exchanged(group: VirtualRank, sizes: list[int], to: Sequence[str] = (ALL,)) -> bool:
    """Whether exchanges of these sizes, one after another and by turns `to` these ranks, bring what the ranks sent."""
    right = True
    for i, (size, whom) in enumerate(zip(sizes, itertools.cycle(to))):
        packets = torch.full((group.size(), 1, size), torch.nan)
        exchange(packet_of(group.rank(), i, size), packets, group.group_name, "put", whom)
        wanted = torch.stack([packet_of(r, i, size) for r in range(group.size())])
        meant = {ALL: slice(None), LATER: slice(group.rank()), EARLIER: slice(group.rank() + 1, None)}[whom]
        right &= same_bits(packets[meant], wanted[meant])
    return right


TO = {
    "all": (ALL,),
    "later": (LATER,),
    "earlier": (EARLIER,),
    "by_turns": (LATER, EARLIER),
    "mixed": (ALL, LATER, LATER, ALL, EARLIER),
}


@pytest.mark.parametrize("to", TO)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_packets_of_any_size_arrive(ranks: int, to: str, monkeypatch: pytest.MonkeyPatch):
    """Memory grows with the largest; packets of nothing need none. More places come than are kept."""
    monkeypatch.setattr(exchanges, "MOST_PLACES", 3)
    sizes = [3, 0, 7, 70_000, 3, 1_000_000, 5]
    assert all(on_ranks(ranks, lambda group: exchanged(group, sizes, TO[to])))


@pytest.mark.parametrize("to", TO)
@pytest.mark.parametrize("late", [0, 1, 2])
@pytest.mark.parametrize("sizes", [[64] * 6, [64, 8, 64, 20_000, 64, 8]], ids=["alike", "unlike"])
def test_a_rank_that_is_slower_by_a_call_reads_what_was_meant_for_it(late: int, sizes: list[int], to: str):
    assert all(on_ranks(3, lambda group: exchanged(group, sizes, TO[to]), late))


def test_a_rank_that_nobody_sends_to_does_not_wait():
    """It leaves an exchange when the other has begun the one before: two places hold what that has not read."""
    done = [0, 0]

    def run(group: VirtualRank) -> list[int]:
        ahead = []
        for _ in range(6):
            exchanged(group, [64], [LATER])
            done[group.rank()] += 1
            ahead.append(done[0] - done[1])
        return ahead

    assert on_ranks(2, run, late=1)[0] == [1, 2, 2, 2, 2, 2]


def replays(group: VirtualRank, captured: threading.local, to: Sequence[str]) -> bool:
    """An odd number of captured exchanges, again and again, among others."""
    right = exchanged(group, [64], to)
    for _ in range(3):
        captured.now = True
        right &= exchanged(group, [64] * 3, to)
        captured.now = False
        right &= exchanged(group, [64], to)
    return right


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> threading.local:
    """Whether the thread's stream is being captured."""
    state = threading.local()
    monkeypatch.setattr(exchanges, "capturing", lambda device: getattr(state, "now", False))
    return state


@pytest.mark.parametrize("to", TO)
@pytest.mark.parametrize(("ranks", "late"), [(2, None), (2, 0), (2, 1), (3, 1), (3, 2), (4, 0), (4, 3)])
def test_captured_exchanges_meet_whatever_comes_before(
    ranks: int, late: int | None, to: str, captured: threading.local
):
    assert all(on_ranks(ranks, lambda group: replays(group, captured, TO[to]), late))


@pytest.mark.parametrize("before", [[], [64]])
def test_a_capture_without_room_is_refused_on_every_rank(before: list[int], captured: threading.local):
    def run(group: VirtualRank) -> str:
        exchanged(group, before)
        captured.now = True
        with pytest.raises(ValueError) as refused:
            exchanged(group, [20_000])
        return str(refused.value)

    wanted = "cp_context must ...; got a capture before a call of its size"
    assert all(says(wanted, text) for text in on_ranks(2, run))


def test_what_a_graph_holds_stays():
    """Memory that became too small is kept: it grows twofold at least, so that what is kept is less than what is used."""

    def run(group: VirtualRank) -> bool:
        name, device = group.group_name, torch.device("cpu")
        exchanged(group, [64])
        memory = exchanges._memory_of(name, device)
        own, room = memory.buffers[group.rank()], memory.room
        exchanged(group, [room // 4 + 1, room // 2 + 1])
        assert memory.room == 4 * room
        return memory.outgrown[0][1][group.rank()] is own and exchanges._memory_of(name, device) is memory

    assert all(on_ranks(2, run))


class StandIn:
    """A group that brings its own kind of memory."""

    rank, size, share = (lambda self: 0), (lambda self: 2), None


def test_a_later_group_of_a_name_has_memory_of_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(exchanges, "_memories", {})
    groups, found = [StandIn(), StandIn()], []
    for group in (groups[0], groups[0], groups[1]):
        monkeypatch.setattr(exchanges, "group_named", lambda name, group=group: group)
        found.append(exchanges._memory_of("one name", torch.device("cpu")))
    assert found[0] is found[1] and found[1] is not found[2] and found[2].group() is groups[1]


def test_groups_that_are_gone_leave_nothing():
    def run(group: VirtualRank) -> int:
        exchanged(group, [64])
        return len(exchanges._memories)

    counts = [max(on_ranks(2, run)) for _ in range(4)]
    assert counts[-1] <= counts[0] + 2


def test_memory_is_ready_before_another_rank_may_write_and_a_kernel_may_read(monkeypatch: pytest.MonkeyPatch):
    """PyTorch clears the signals, and uploads addresses, on a stream that other streams do not wait for."""
    from torch.distributed import _symmetric_memory as symmetric

    done, own, memory = [], torch.empty(8, dtype=torch.uint8), object()

    def told(what: str, found: object = None) -> Callable[..., object]:
        return lambda *_: done.append(what) or found

    monkeypatch.setattr(symmetric, "_SymmetricMemory", SimpleNamespace(empty_strided_p2p=told("allocate", own)))
    monkeypatch.setattr(symmetric, "rendezvous", told("meet", memory))
    monkeypatch.setattr(torch.cuda, "synchronize", told("wait"))
    assert exchanges._opened(SimpleNamespace(group_name="g"), 8, torch.device("cuda", 0)) == (own, memory)
    assert done == ["allocate", "wait", "meet", "wait"]


# ---- calls --------------------------------------------------------------------------------------------------------------


CASES = {
    "packed": (Case("put", "", lengths=(40, 0, 50, 6), K=32, V=64, chunk_size=32, state=torch.float64), 3),
    "through_all": (Case("put", "", lengths=(96,), K=32, V=32, chunk_size=32, gate="softplus", beta="logit"), 4),
}


@pytest.mark.parametrize("late", [None, 1])
@pytest.mark.parametrize("name", CASES)
def test_calls_have_the_bits_of_gather(name: str, late: int | None, put_calls: list[int]):
    case, ranks = CASES[name]
    call = make_call(case, torch.float64) | {"output_final_state": True, "backend": "reference"}
    cut = Cut(call, ranks, incoming_of(call), "put")
    found, wanted = cut.joined(on_ranks(ranks, cut.run, late)), replace(cut, exchange="gather").over_ranks()
    assert put_calls and found.keys() == wanted.keys()
    assert all(same_bits(found[key], x) for key, x in wanted.items())


@pytest.mark.parametrize("late", [None, 0])
def test_halos_have_the_bits_of_gather(late: int | None, put_calls: list[int]):
    x = torch.randn(1, 96, 5, dtype=torch.bfloat16)

    def run(group: VirtualRank, way: str) -> tuple[Tensor, Tensor]:
        context = context_parallel(OFFSETS, group=group, exchange=way)
        own = x[:, 32 * group.rank() :][:, :32].clone().requires_grad_()
        before = halo(own, context, 3)
        before.square().sum().backward()
        return before.detach(), own.grad

    found, wanted = (on_ranks(3, lambda group, way=way: run(group, way), late) for way in ("put", "gather"))
    assert len(put_calls) == 6
    assert all(same_bits(a, b) for pair in zip(found, wanted) for a, b in zip(*pair))


@pytest.fixture
def put_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ranks that put, in order."""
    found: list[int] = []
    send = SharedMemory.send

    def noted(self: SharedMemory, packet: Tensor, to: str) -> None:
        found.append(self.rank)
        send(self, packet, to)

    monkeypatch.setattr(SharedMemory, "send", noted)
    return found


def test_contexts_of_other_exchanges_do_not_replay_each_other():
    def run(group: VirtualRank) -> list:
        contexts = [context_parallel(OFFSETS, group=group, exchange=way) for way in ("auto", "gather", "put")]
        return [[a == b for b in contexts] for a in contexts]

    assert on_ranks(2, run) == [[[True, True, False], [True, True, False], [False, False, True]]] * 2


# ---- who can -------------------------------------------------------------------------------------------------------------


GOOD: dict[str, tuple] = {"host": (7, 7), "gpus": ((10, 11), (10, 11)), "reaches": (True, True), "opens": (True, True)}
"""What two ranks say of themselves."""

OBSTACLES = {
    "fine": ({}, None),
    "hosts": ({"host": (7, 8)}, "rank 1 is on another host than rank 0"),
    "one_gpu": ({"gpus": ((10, 11), (11, 10))}, "ranks 0 and 1 have one GPU"),
    "unreached": ({"reaches": (True, False)}, "rank 1's GPU does not reach rank 0's"),
    "absent": ({"opens": (True, False)}, "no symmetric memory on rank 1"),
}


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Callable[[VirtualRank, dict[str, tuple]], None]:
    """Ranks on GPUs, of which each says what it is told to."""
    told = threading.local()
    numbers, on_cpu = exchanges.gather_numbers, torch.device("cpu")

    def opened(group: VirtualRank, nbytes: int, device: torch.device) -> tuple:
        own = torch.empty(nbytes, dtype=torch.uint8)
        memory = group.share(own)
        if not told.opens:
            raise RuntimeError("no such memory\nhere")
        return own, memory

    monkeypatch.setattr(exchanges, "_stands_in", lambda group: False)
    monkeypatch.setattr(exchanges, "capturing", lambda device: getattr(told, "captured", False))
    monkeypatch.setattr(exchanges, "gather_numbers", lambda x, name, ranks, _: numbers(x, name, ranks, on_cpu))
    monkeypatch.setattr(exchanges, "_host", lambda: told.host)
    monkeypatch.setattr(exchanges, "_gpu", lambda index: told.gpus[index])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(SharedMemory, "_reaches", lambda self, peer: told.reaches)
    monkeypatch.setattr(exchanges, "_opened", opened)
    monkeypatch.setattr(exchanges, "_timeout_ms", lambda group, device: 5)

    def tell(group: VirtualRank, said: dict[str, tuple]) -> None:
        for name, values in (GOOD | said).items():
            setattr(told, name, values[group.rank()])

    return tell


@pytest.mark.parametrize("name", OBSTACLES)
def test_every_rank_finds_the_same_way(name: str, pretended: Callable):
    """Put where all can, else gather, or a refusal that says why."""
    said, obstacle = OBSTACLES[name]

    def run(group: VirtualRank) -> tuple[str, str]:
        pretended(group, said)
        asked = group.group_name, torch.device("cuda", group.rank())
        way = exchanges.chosen_exchange("auto", *asked)
        assert exchanges.chosen_exchange("gather", *asked) == "gather"
        if obstacle is None:
            return way, exchanges.chosen_exchange("put", *asked)
        with pytest.raises(ValueError) as refused:
            exchanges.chosen_exchange("put", *asked)
        return way, str(refused.value)

    for way, text in on_ranks(2, run):
        if obstacle is None:
            assert way == text == "put"
        else:
            assert way == "gather" and says(f"exchange must be 'gather' ({obstacle}...; got 'put'", text)


def test_a_group_is_not_asked_in_a_capture(pretended: Callable):
    def run(group: VirtualRank) -> str:
        pretended(group, {"captured": (True, True)})
        with pytest.raises(ValueError) as refused:
            exchanges.chosen_exchange("auto", group.group_name, torch.device("cuda", group.rank()))
        return str(refused.value)

    assert all("a capture before any call of the group" in text for text in on_ranks(2, run))


def test_put_needs_gpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(exchanges, "_stands_in", lambda group: False)

    def run(group: VirtualRank) -> str:
        with pytest.raises(ValueError) as refused:
            context_parallel(OFFSETS, group=group, exchange="put")
        return str(refused.value)

    assert on_ranks(2, run) == ["exchange must be 'gather' (tensors on cpu); got 'put'"] * 2
