"""Exchanges among the ranks of a process group: an all-gather, or copies into the memory of the other ranks
(docs/parallel.md)."""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..problem.errors import rule, wrong

EXCHANGES = ("auto", "gather", "put")

ALL, LATER, EARLIER = DIRECTIONS = ("all", "later", "earlier")
"""Receivers of a packet: all ranks, or those after the sender's, or before it."""


def exchange(packet: Tensor, packets: Tensor, name: str, way: str, to: str = ALL) -> None:
    """`packets [ranks, ...]`: every rank's `packet`, of the process group of this name, by the `way` that `EXCHANGES` has; the
    bits are the same. All ranks must call this, with as many bytes and in the same order. `to`: of `DIRECTIONS`; packets that
    are not for this rank, its own among them, may be missing then, and none is waited for. Nobody may write to `packet` any
    more: what follows on the stream runs while copies are read from it."""
    send(packet, packets, name, way, to)
    receive(packet, packets, name, way, to)


def send(packet: Tensor, packets: Tensor, name: str, way: str, to: str = ALL) -> None:
    """The half of `exchange` that waits for no other rank: what follows on the stream, up to `receive`, runs while packets are
    under way. An all-gather is not cut in two: `receive` has all of it."""
    memory = _putting(name, way, packet.device)
    if memory is not None:
        memory.send(as_bytes(packet), to)


def receive(packet: Tensor, packets: Tensor, name: str, way: str, to: str = ALL) -> None:
    """The other half, after `send` and no other exchange of the group. `packet` is as it was."""
    memory = _putting(name, way, packet.device)
    if memory is not None:
        memory.receive(as_bytes(packet), as_bytes(packets), to)
    else:
        gather(as_bytes(packet), as_bytes(packets), name)


def _putting(name: str, way: str, device: torch.device) -> SharedMemory | None:
    """The memory that the ranks put packets into; None if they gather them."""
    memory = _memory_of(name, device) if puts(way, device) else None
    return memory if memory is not None and memory.obstacle is None else None


def puts(way: str, device: torch.device) -> bool:
    """True if copies are wanted, where the ranks can make them."""
    return way == "put" or (way == "auto" and device.type == "cuda")


def gather(packet: Tensor, packets: Tensor, name: str) -> None:
    """An all-gather of the group, along the first dimension."""
    from torch.distributed import distributed_c10d as c10d

    # the newer of two names, where it is known, since the older one warns
    all_gather = getattr(c10d, "all_gather_single", c10d.all_gather_into_tensor)
    all_gather(packets, packet, group=group_named(name))


def gather_numbers(numbers: Sequence[int], name: str, ranks: int, device: torch.device) -> list[list[int]]:
    own = torch.tensor(numbers, dtype=torch.int64, device=device)
    found = own.new_empty(ranks, len(numbers))
    gather(own, found.view(-1), name)
    return found.tolist()


def chosen_exchange(way: str, name: str, device: torch.device) -> str:
    """Settles `way`: "put" or "gather". All ranks of the group must ask.

    Raises:
        ValueError: copies are asked for, and some rank can't: on every rank.
    """
    if not puts(way, device):
        return "gather"
    obstacle = _memory_of(name, device).obstacle
    rule("exchange", obstacle is None or way != "put", f"'gather' ({obstacle})", "'put'")
    return "put" if obstacle is None else "gather"


@dataclass(frozen=True)
class Exchange:
    """Copies into `packets [ranks, ...]` every rank's `packet` that is for this one, by a `way` of the process group's: between
    two launches or after the last, on the current stream. Both are scratch, or outputs. `act`: `exchange` or a half of it."""

    act: Callable[[Tensor, Tensor, str, str, str], None]
    group: str
    way: str
    to: str
    packet: Tensor
    packets: Tensor


# ---- process groups, by name and by what a process has of them ----------------------------------------------------------


def is_group(x: object) -> bool:
    # not a tuple of kinds, in which torch.compile does not find a group's
    return torch.distributed.is_available() and isinstance(x, torch.distributed.ProcessGroup)


def members(group: Any, name: str = "group") -> tuple[str, int, int]:
    """A process group's name, this process' rank in it, and how many ranks it has. `name`: the argument's."""
    if not is_group(group):
        if torch.distributed.is_available() and group is torch.distributed.GroupMember.NON_GROUP_MEMBER:
            raise wrong(name, "a group that this process is not in", "one of its own")
        wanted = "a torch.distributed.ProcessGroup (of a DeviceMesh: its get_group())"
        raise TypeError(f"{name} must be {wanted}; got {type(group).__name__}")
    if not torch.compiler.is_compiling():
        check_alive(group, group.group_name, name)
    return group.group_name, group.rank(), group.size()


def check_alive(group: Any, name: str, argument: str) -> None:
    """Checks that a group has its name still: a later one may have got it."""
    if group is not group_named(name, argument):
        raise wrong(argument, f"a process group that was destroyed, and a later one has its name ({name!r})", LIVING)


def group_named(name: str, argument: str = "group") -> Any:
    try:
        return torch.distributed.distributed_c10d._resolve_process_group(name)
    except (RuntimeError, KeyError, ValueError):
        raise wrong(argument, f"a process group that was destroyed (its name was {name!r})", LIVING) from None


LIVING = "a living process group"


# ---- put ------------------------------------------------------------------------------------------------------------------


TURNS = 2
"""The number of places for packets that exchanges take in turn. A captured one has a place of its own, behind these."""

LEAST_ROOM = 1 << 16
"""Bytes of a packet, of which room for others is a multiple."""

MOST_PLACES = 64
"""The most places whose views are kept: one for each size of packets and each turn."""


Ranks = Sequence[int]


_Place = tuple[list[Tensor], Tensor, Tensor]
"""Packets of one exchange, as bytes: this rank's on every rank, and here those of the ranks before and after."""


class SharedMemory:
    """Memory that the ranks of a group put packets into. Each rank has a place for all packets, `TURNS` times and once for
    captures. All ranks alike make it, and make it larger, at the same exchange.

    An exchange writes its packet to its place on every rank that it is for. Then all get a signal, and a rank copies what it
    has got once it has the signals of those that send to it. It waits for the others' before it writes in the next exchange:
    where packets go to later ranks alone, an earlier one may be ahead by an exchange. With places in turn none writes what a
    slower rank still reads: the copies out of exchange `i` come before that rank's signals of exchange `i + 1`, which wait for
    its stream, and the copies into the same place, of exchange `i + 2`, behind these on any other rank's. With one place they
    would come behind the signals of exchange `i` alone.

    A captured exchange does not know which one comes before it, since a graph may be replayed after any call. It meets the
    others before it writes: what came before has been read then, and signals go with packets alone. Its place is not one of
    those that alternate, so that a replay between two other exchanges does not count.

    Signals have a channel for each direction. Copies and signals have a stream of their own, so that a rank that waits for no
    other goes on beside them; captured ones don't, whose barrier has the channel of the signals that `receive` waits for.
    """

    obstacle: str | None
    """The reason why there is no such memory, if so."""

    def __init__(self, name: str, group: Any, device: torch.device):
        self.group, self.device = weakref.ref(group), device
        self.rank, self.ranks = group.rank(), group.size()
        self.room = self.calls = self.timeout_ms = 0
        self.memory: Any
        """The handle of PyTorch's symmetric memory."""
        self.buffers: list[Tensor] = []
        self.places: dict[tuple[int, int], _Place] = {}
        """Places by bytes of a packet, and by where the first one lies."""
        earlier, later = range(self.rank), range(self.rank + 1, self.ranks)
        self.others = (*later, *earlier)
        """Each rank begins with another one."""
        self.sides = {ALL: (self.others, self.others), LATER: (later, earlier), EARLIER: (earlier, later)}
        """Receivers of this rank's packets, and senders to it."""
        self.outgrown: list[tuple[Any, list[Tensor]]] = []
        self.unread: list[tuple[int, int]] = []
        """Signals of the last exchange that have not been waited for: rank and channel."""
        self.done: torch.cuda.Event | None = None
        self.stream: torch.cuda.Stream | None = None
        self.sending: torch.cuda.Stream | None = None
        """The stream of copies to other ranks; none where a group stands in, whose signals wait for no stream."""
        self.ready: torch.cuda.Event
        self.sent: torch.cuda.Event
        self.packet: Tensor | None = None
        """The last one: its memory is not for others before the copies have been read."""
        self.obstacle = None if _stands_in(group) else self._ask(name, group)

    def send(self, packet: Tensor, to: str) -> None:
        """`packet [n]` uint8, as are the `packets [ranks * n]` of `receive`."""
        nbytes = packet.numel()
        if nbytes == 0:
            return
        captured = capturing(self.device)
        if nbytes > self.room:
            rule("cp_context", not captured, BEFORE_CAPTURE, "a capture before a call of its size")
            self._grow(max(-(-nbytes // LEAST_ROOM) * LEAST_ROOM, 2 * self.room))
        (own, _, _), channel = self._place(nbytes, to, captured)
        receivers, _ = self.sides[to]
        if captured:
            self.memory.barrier(channel, self.timeout_ms)
            self._put(packet, own, channel, receivers, receivers)
            return
        with self._aside(packet):
            for peer, late in self.unread:
                self.memory.wait_signal(peer, late, self.timeout_ms)
            self.unread = []
            self._put(packet, own, channel, receivers, self.others)

    def _put(self, packet: Tensor, own: list[Tensor], channel: int, receivers: Ranks, signalled: Ranks) -> None:
        for peer in signalled:
            if peer in receivers:
                own[peer].copy_(packet)
            self.memory.put_signal(peer, channel, self.timeout_ms)

    def receive(self, packet: Tensor, packets: Tensor, to: str) -> None:
        nbytes = packet.numel()
        if nbytes == 0:
            return
        captured = capturing(self.device)
        (_, before, after), channel = self._place(nbytes, to, captured)
        _, senders = self.sides[to]
        begin, end = self.rank * nbytes, (self.rank + 1) * nbytes
        if to == ALL:
            packets[begin:end].copy_(packet)
        for peer in senders:
            self.memory.wait_signal(peer, channel, self.timeout_ms)
        if to != EARLIER and self.rank > 0:
            packets[:begin].copy_(before)
        if to != LATER and self.rank < self.ranks - 1:
            packets[end:].copy_(after)
        if not captured:
            self.unread = [(peer, channel) for peer in self.others if peer not in senders]
            self.calls += 1
            if self.done is not None:
                self.done.record(self.stream)

    def _place(self, nbytes: int, to: str, captured: bool) -> tuple[_Place, int]:
        """Returns the place of the exchange's packets, and the channel of its signals."""
        turn = TURNS if captured else self.calls % TURNS
        begin = turn * self.ranks * self.room
        place = self.places.get((nbytes, begin))
        if place is None:
            at, end = begin + self.rank * nbytes, begin + self.ranks * nbytes
            here = self.buffers[self.rank]
            with torch.inference_mode(False):
                place = [x[at : at + nbytes] for x in self.buffers], here[begin:at], here[at + nbytes : end]
            if len(self.places) >= MOST_PLACES:
                self.places.clear()
            self.places[nbytes, begin] = place
        return place, DIRECTIONS.index(to) + captured * len(DIRECTIONS)

    @contextlib.contextmanager
    def _aside(self, packet: Tensor) -> Iterator[None]:
        """Copies of `packet`, and their signals, on a stream of their own: what follows the exchange runs beside them. Only
        those of one exchange, or the packets of a rank that is ahead would fill its memory."""
        current = self._follow()
        if self.sending is None or current is None:
            yield
            return
        current.wait_event(self.sent)
        self.packet = packet
        self.ready.record(current)
        self.sending.wait_event(self.ready)
        with torch.cuda.stream(self.sending):
            yield
        self.sent.record(self.sending)

    def _follow(self) -> torch.cuda.Stream | None:
        """The current stream, on which exchanges run one after another, also if the last one was on another."""
        if self.device.type != "cuda":
            return None
        stream = torch.cuda.current_stream(self.device)
        if self.done is None:
            self.done = torch.cuda.Event()
            if not _stands_in(self.group()):
                self.sending = torch.cuda.Stream(self.device, priority=-1)
                self.ready, self.sent = torch.cuda.Event(), torch.cuda.Event()
        elif self.stream is not None and stream != self.stream:
            stream.wait_event(self.done)
            if self.sending is not None:
                # the memory of the last packet goes back to its stream, which may write it at once
                self.stream.wait_event(self.sent)
        self.stream = stream
        return stream

    def _grow(self, room: int) -> None:
        """Graphs may have captured what there was, so it stays; at least twice as much is new, and what stays is less than
        that. Nobody reads what is new."""
        group, nbytes = self.group(), (TURNS + 1) * self.ranks * room
        with torch.inference_mode(False):  # calls with gradients take them, too
            own, memory = _opened(group, nbytes, self.device)
            buffers = [memory.get_buffer(r, (nbytes,), torch.uint8) for r in range(self.ranks)]
            buffers[self.rank] = own
        if self.room > 0:
            self.outgrown.append((self.memory, self.buffers))
        self.memory, self.buffers, self.room, self.unread = memory, buffers, room, []
        self.places.clear()

    def _ask(self, name: str, group: Any) -> str | None:
        """All ranks find the same."""
        if self.device.type != "cuda":
            return f"tensors on {self.device.type}"
        rule("cp_context", not capturing(self.device), BEFORE_CAPTURE, "a capture before any call of the group")

        def gathered(*numbers: int) -> list[tuple[int, ...]]:
            return [*zip(*gather_numbers(numbers, name, self.ranks, self.device))]

        gpu = _gpu(self.device.index)
        hosts, gpus = gathered(_host(), gpu)
        for r in range(self.ranks):
            if hosts[r] != hosts[0]:
                return f"rank {r} is on another host than rank 0"
            if gpus.index(gpus[r]) < r:
                return f"ranks {gpus.index(gpus[r])} and {r} have one GPU"
        seen = {_gpu(i): i for i in range(torch.cuda.device_count())}
        # of GPUs that this process does not see the trial will tell
        far = [r for r in range(self.ranks) if gpus[r] != gpu and gpus[r] in seen and not self._reaches(seen[gpus[r]])]
        (unreached,) = gathered(far[0] if far else -1)
        for r in range(self.ranks):
            if unreached[r] >= 0:
                return f"rank {r}'s GPU does not reach rank {unreached[r]}'s"
        why = ""
        try:
            self.timeout_ms = _timeout_ms(group, self.device)
            self._grow(LEAST_ROOM)
        except Exception as error:
            why = str(error).partition("\n")[0]
        (failed,) = gathered(why != "")
        if any(failed):
            return f"no symmetric memory on rank {failed.index(1)}" + (f": {why}" if why else "")
        return None

    def _reaches(self, peer: int) -> bool:
        return torch.cuda.can_device_access_peer(self.device.index, peer)


BEFORE_CAPTURE = "one call like it first: it opens memory on all ranks, which a capture can't"

_memories: dict[tuple[str, torch.device], SharedMemory] = {}


def _memory_of(name: str, device: torch.device) -> SharedMemory:
    """All ranks ask once: the first time is an exchange."""
    group = group_named(name)
    found = _memories.get((name, device))
    # a later group may have the name
    if found is None or found.group() is not group:
        found = SharedMemory(name, group, device)
        for gone in [key for key, memory in _memories.items() if memory.group() is None]:
            del _memories[gone]
        _memories[name, device] = found
    return found


def _stands_in(group: Any) -> bool:
    """Says whether a group brings its own kind of memory: `tests/support/virtual.py` does."""
    return hasattr(group, "share")


def _opened(group: Any, nbytes: int, device: torch.device) -> tuple[Tensor, Any]:
    """Memory of this rank, and that of all."""
    if _stands_in(group):
        own = torch.empty(nbytes, dtype=torch.uint8, device=device)
        return own, group.share(own)
    from torch.distributed import _symmetric_memory as symmetric

    # not `empty`, whose tensors may lie in one allocation, and share its barriers with others
    own = symmetric._SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
    # PyTorch clears the signals, and uploads the addresses of the others', without waiting for either: a signal that comes
    # before is lost, and a kernel on another stream reads addresses that are none
    torch.cuda.synchronize(device)
    memory = symmetric.rendezvous(own, group.group_name)
    torch.cuda.synchronize(device)
    return own, memory


def _timeout_ms(group: Any, device: torch.device) -> int:
    return int(group._get_backend(device).options._timeout.total_seconds() * 1e3)


def as_bytes(x: Tensor) -> Tensor:
    """A tensor's bytes in one dimension."""
    return x if x.dtype == torch.uint8 and x.dim() == 1 else x.reshape(-1).view(torch.uint8)


def capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _host() -> int:
    """A number for the processes that can hand each other memory: those of one machine, and of one container there."""
    said = [socket.gethostname()]
    with contextlib.suppress(OSError):
        said.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        said += [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "mnt")]
    return _hashed(" ".join(said))


def _gpu(index: int) -> int:
    return _hashed(str(torch.cuda.get_device_properties(index).uuid))


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
