"""Exchanges between ranks by copies into shared memory: virtual ranks, whose memory stands in for PyTorch's symmetric one."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import replace

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
    """Whether exchanges of these sizes, one after another, alternately `to` these ranks, bring what the ranks sent."""
    right = True
    for i, (size, whom) in enumerate(zip(sizes, itertools.cycle(to))):
        packets = torch.full((group.size(), 1, size), torch.nan)
        exchange(packet_of(group.rank(), i, size), packets, group.group_name, "put", whom)
        wanted = torch.stack([packet_of(r, i, size) for r in range(group.size())])
        meant = {ALL: slice(None), LATER: slice(group.rank()), EARLIER: slice(group.rank() + 1, None)}[whom]
        right &= same_bits(packets[meant], wanted[meant])
    return right


TO = {"all": (ALL,), "later": (LATER,), "earlier": (EARLIER,)}
TO |= {"by_turns": (LATER, EARLIER), "mixed": (ALL, LATER, LATER, ALL, EARLIER)}


@pytest.mark.parametrize("to", TO)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_packets_of_any_size_arrive(ranks: int, to: str, monkeypatch: pytest.MonkeyPatch):
    """Memory grows with the largest; packets of nothing need none. More places come than are kept."""
    monkeypatch.setattr(exchanges, "MOST_PLACES", 3)
    sizes = [3, 0, 7, 7_000, 3, 100_000, 5]
    assert all(on_ranks(ranks, lambda group: exchanged(group, sizes, TO[to])))


@pytest.mark.parametrize("to", TO)
@pytest.mark.parametrize("late", [0, 1, 2])
@pytest.mark.parametrize("sizes", [[64] * 6, [64, 8, 64, 20_000, 64, 8]], ids=["alike", "unlike"])
def test_a_rank_that_is_slower_by_a_call_reads_what_was_meant_for_it(late: int, sizes: list[int], to: str):
    assert all(on_ranks(3, lambda group: exchanged(group, sizes, TO[to]), late))


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


# ---- who can -------------------------------------------------------------------------------------------------------------

SAID: dict[str, tuple] = {"host": (7, 7), "gpus": ((10, 11), (10, 11)), "reaches": (True, True), "opens": (True, True)}
"""Two ranks' words of themselves."""

OBSTACLES = {
    "fine": ({}, None),
    "hosts": ({"host": (7, 8)}, "rank 1 is on another host than rank 0"),
    "one_gpu": ({"gpus": ((10, 11), (11, 10))}, "ranks 0 and 1 have one GPU"),
    "unreached": ({"reaches": (True, False)}, "rank 1's GPU does not reach rank 0's"),
    "absent": ({"opens": (True, False)}, "no symmetric memory on rank 1"),
}


@pytest.mark.parametrize("name", OBSTACLES)
def test_every_rank_finds_the_same_way(name: str, monkeypatch: pytest.MonkeyPatch):
    """Put where all can, else gather, or a refusal that says why. Ranks stand on GPUs, and say what they are told to."""
    (changes, obstacle), told, numbers = OBSTACLES[name], threading.local(), exchanges.gather_numbers

    def opened(group: VirtualRank, nbytes: int, device: torch.device) -> tuple:
        own = torch.empty(nbytes, dtype=torch.uint8)
        memory = group.share(own)
        if not told.opens:
            raise RuntimeError("no such memory\nhere")
        return own, memory

    for part, stand_in in {
        "_stands_in": lambda group: False,
        "capturing": lambda device: False,
        "gather_numbers": lambda x, name, ranks, _: numbers(x, name, ranks, torch.device("cpu")),
        "_host": lambda: told.host,
        "_gpu": lambda index: told.gpus[index],
        "_opened": opened,
        "_timeout_ms": lambda group, device: 5,
    }.items():
        monkeypatch.setattr(exchanges, part, stand_in)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(SharedMemory, "_reaches", lambda self, peer: told.reaches)

    def run(group: VirtualRank) -> tuple[str, str]:
        vars(told).update({part: values[group.rank()] for part, values in (SAID | changes).items()})
        asked = group.group_name, torch.device("cuda", group.rank())
        assert exchanges.chosen_exchange("gather", *asked) == "gather"
        way = exchanges.chosen_exchange("auto", *asked)
        try:
            return way, exchanges.chosen_exchange("put", *asked)
        except ValueError as refused:
            return way, str(refused)

    wanted = ("put", "put") if obstacle is None else ("gather", f"exchange must be 'gather' ({obstacle}...; got 'put'")
    assert all(way == wanted[0] and says(wanted[1], text) for way, text in on_ranks(2, run))
